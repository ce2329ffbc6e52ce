/* y = x Wᵀ + b as other implementations might sum it: K in blocks, added in an order of one's choice. Each block is
 * linear.c run over some of the columns; the result depends on no instruction level, batch or number of threads. */
#include "kernel.h"

enum { PARTS_MOST = 4096 };

/* An option that has to be a whole number from `least` to `most`. */
static bool whole_number(qr_call *call, const char *option, double value, int least, int most)
{
    if (value >= least && value <= most && value == floor(value))
        return true;
    qr_fail(call->error, QR_BAD_INPUT, "%s: %s is %g\n    expected a whole number from %d to %d", call->name, option,
            value, least, most);
    return false;
}

QR_OP(
    linear_parts,
    "linear_parts(x[*,I]:f, w[O,I]:w, b[O]:v?, parts=2, rotate=0, reverse=0, partials=0) -> y[*,O]:f, " LINEAR_SCRATCH,
    "y = x w^T + b: K in blocks, each summed as linear does, added from block `rotate` on, or back with reverse=1; "
    "partials=1 rounds the sum of each block to bfloat16 first")
{
    linear whole = linear_of(call);
    if (!whole_number(call, "parts", SCALAR(0), 1, PARTS_MOST) ||
        !whole_number(call, "rotate", SCALAR(1), 0, PARTS_MOST) || !whole_number(call, "reverse", SCALAR(2), 0, 1) ||
        !whole_number(call, "partials", SCALAR(3), 0, 1))
        return;
    const int64_t parts = (int64_t)SCALAR(0), start = (int64_t)SCALAR(1) % parts, back = (int64_t)SCALAR(2);

    whole.narrowed = SCALAR(3) != 0;
    for (int64_t i = 0, summed = 0; i < parts; i++) {
        const int64_t block = (start + (back ? parts - i : i)) % parts;
        const int64_t from = whole.steps * block / parts, to = whole.steps * (block + 1) / parts;
        if (from == to && (whole.steps > 0 || i > 0))
            continue; /* fewer steps than blocks; rows without elements are one block */
        linear l = whole;
        l.x += from * STEP;
        l.w += from * STEP * element_size(l.dtype);
        l.I = (to * STEP < whole.I ? to * STEP : whole.I) - from * STEP;
        l.steps = to - from;
        l.add = summed > 0;
        summed += l.steps;
        if (summed < whole.steps)
            l.bias = NULL;
        linear_run(call, &l);
    }
}
