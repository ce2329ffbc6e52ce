/* One answer per row: softmax, its logarithm, the index of the largest element. */
#include "kernel.h"

/* p = exp(x - max x) / sum: a row or a stretch of one, in place or not. n = 0 does nothing.
 * Attention calls it too, so its probabilities are those of the op. */
static void softmax_row(float *p, const float *x, int64_t n)
{
    const float top = qr_max(x, n);
    for (int64_t i = 0; i < n; i++)
        p[i] = qr_exp(x[i] - top);
    const float scale = (float)(1.0 / qr_sum_double(p, n));
    for (int64_t i = 0; i < n; i++)
        p[i] *= scale;
}

/* y = x - max x - log(sum exp(x - max x)); the exponentials are stored where the answer will be */
static void log_softmax_row(float *y, const float *x, int64_t n)
{
    const float top = qr_max(x, n);
    for (int64_t i = 0; i < n; i++)
        y[i] = qr_exp(x[i] - top);
    const double sum = qr_sum_double(y, n);
    /* NaN and infinity pass through the subtraction below, not through the logarithm */
    const double below = sum >= 1.0 ? (double)top + qr_log_double(sum) : (double)NAN;
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)((double)x[i] - below);
}

/* First index of the largest element; the first NaN counts as larger than everything. */
static int64_t argmax_row(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        if (x[i] != x[i])
            return i;
        if (x[i] > x[best])
            best = i;
    }
    return best;
}

typedef struct reduce_task {
    float *y;
    int64_t *index;
    const float *x;
    int64_t width;
} reduce_task;

static void softmax_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const reduce_task *const task = context;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        softmax_row(task->y + r * task->width, task->x + r * task->width, task->width);
}

static void log_softmax_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const reduce_task *const task = context;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        log_softmax_row(task->y + r * task->width, task->x + r * task->width, task->width);
}

static void argmax_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const reduce_task *const task = context;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        task->index[r] = argmax_row(task->x + r * task->width, task->width);
}

QR_OP(softmax, "softmax(x[*,D]:f) -> y[*,D]:f", "y = exp(x - max) / sum(exp(x - max)), the sum in double")
{
    reduce_task task = {OUT(0), NULL, IN(0), DIM('D')};
    qr_parallel(call, DIM('*'), norm_grain(task.width), softmax_rows, &task);
}

QR_OP(log_softmax, "log_softmax(x[*,D]:f) -> y[*,D]:f", "y = x - log(sum(exp(x))), the sum in double")
{
    reduce_task task = {OUT(0), NULL, IN(0), DIM('D')};
    qr_parallel(call, DIM('*'), norm_grain(task.width), log_softmax_rows, &task);
}

QR_OP(argmax, "argmax(x[*,D]:f) -> y[*]:i", "index of the largest element: the first one, and a NaN before any number")
{
    reduce_task task = {NULL, OUT_I64(0), IN(0), DIM('D')};
    if (task.width == 0 && DIM('*') > 0) {
        qr_fail(call->error, QR_BAD_SHAPE, "argmax: x has rows of no elements\n    expected D >= 1");
        return;
    }
    qr_parallel(call, DIM('*'), norm_grain(task.width), argmax_rows, &task);
}
