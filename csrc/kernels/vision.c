/* Where a patch stands: a table of positions sampled between its rows, and rotary angles in two directions. */
#include "kernel.h"

typedef struct sample_task {
    float *y;
    const char *w;
    const double *row, *column;
    int64_t R, C, D;
    qr_dtype dtype;
} sample_task;

LINEAR_INLINE double stored_number(const char *w, int64_t i, qr_dtype dtype)
{
    float x;
    qr_widen(&x, w + i * element_size(dtype), dtype, 1);
    return (double)x;
}

/* Weights and sum in double, one rounding: the weights add to one whatever the coordinate. */
LINEAR_INLINE void sample_row(float *restrict y, const sample_task *task, double row, double column,
                              const qr_dtype dtype)
{
    const int64_t D = task->D, r = (int64_t)row, c = (int64_t)column;
    const int64_t below = r + 1 < task->R ? r + 1 : r, beside = c + 1 < task->C ? c + 1 : c;
    const double down = row - (double)r, across = column - (double)c;
    const double w00 = (1 - down) * (1 - across), w01 = (1 - down) * across, w10 = down * (1 - across),
                 w11 = down * across;
    const int64_t size = element_size(dtype) * D;
    const char *const a = task->w + (r * task->C + c) * size, *const b = task->w + (r * task->C + beside) * size,
                      *const e = task->w + (below * task->C + c) * size,
                      *const f = task->w + (below * task->C + beside) * size;
    for (int64_t d = 0; d < D; d++)
        y[d] = (float)((w00 * stored_number(a, d, dtype) + w01 * stored_number(b, d, dtype)) +
                       (w10 * stored_number(e, d, dtype) + w11 * stored_number(f, d, dtype)));
}

static void sample_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const sample_task *const task = context;
    (void)thread;
    for (int64_t n = begin; n < end; n++) {
        float *const y = task->y + n * task->D;
        if (task->dtype == QR_BF16)
            sample_row(y, task, task->row[n], task->column[n], QR_BF16);
        else if (task->dtype == QR_F16)
            sample_row(y, task, task->row[n], task->column[n], QR_F16);
        else
            sample_row(y, task, task->row[n], task->column[n], QR_F32);
    }
}

QR_OP(sample_table, "sample_table(w[R,C,D]:w, row[N]:d, column[N]:d) -> y[N,D]:f",
      "y = w between the four places around (row, column), bilinearly: whole numbers are the places themselves")
{
    sample_task task = {OUT(0), ARRAY(0)->data, IN_F64(1), IN_F64(2), DIM('R'), DIM('C'), DIM('D'), ARRAY(0)->dtype};
    for (int64_t n = 0; n < DIM('N'); n++)
        if (!(task.row[n] >= 0 && task.row[n] <= (double)task.R - 1 && task.column[n] >= 0 &&
              task.column[n] <= (double)task.C - 1)) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "sample_table: place %lld is outside the table\n    found    row %.17g, column %.17g\n"
                    "    expected 0 to %lld, and 0 to %lld",
                    (long long)n, task.row[n], task.column[n], (long long)task.R - 1, (long long)task.C - 1);
            return;
        }
    qr_parallel(call, DIM('N'), norm_grain(task.D), sample_rows, &task);
}

/* Every axis has all frequencies; the angle is formed and turned in double, each result rounded once. */
QR_OP(grid_table, "grid_table(positions[A,N]:i, f[F]:d) -> cos[N,A,F]:f, sin[N,A,F]:f",
      "cos and sin of positions[a] * f[i] for every axis a, computed in float64")
{
    const int64_t A = DIM('A'), N = DIM('N'), F = DIM('F');
    for (int64_t n = 0; n < N; n++)
        for (int64_t a = 0; a < A; a++)
            for (int64_t i = 0; i < F; i++) {
                double sine, cosine;
                const double angle = (double)IN_I64(0)[a * N + n] * IN_F64(1)[i];
                if (!(fabs(angle) < 0x1p31)) {
                    qr_fail(call->error, QR_BAD_INPUT,
                            "grid_table: angle too large for an accurate cosine\n"
                            "    found    position %lld x frequency %g\n    expected a product below 2^31",
                            (long long)IN_I64(0)[a * N + n], IN_F64(1)[i]);
                    return;
                }
                sin_cos(angle, &sine, &cosine);
                OUT(0)[(n * A + a) * F + i] = (float)cosine;
                OUT(1)[(n * A + a) * F + i] = (float)sine;
            }
}

typedef struct turn_task {
    float *y;
    const float *cosine, *sine;
    const qr_array *x;
    int64_t H, F;
} turn_task;

/* Pairs (i, i + F) of a head of 2F turn by the angle of frequency i. */
static void turn_tokens(void *context, int64_t begin, int64_t end, int thread)
{
    const turn_task *const task = context;
    const int64_t H = task->H, F = task->F;
    (void)thread;
    for (int64_t n = begin; n < end; n++) {
        const float *const c = task->cosine + n * F, *const s = task->sine + n * F;
        for (int64_t h = 0; h < H; h++) {
            const float *const x = (const float *)task->x->data + n * task->x->stride[0] + h * task->x->stride[1];
            float *restrict const y = task->y + (n * H + h) * 2 * F;
            for (int64_t i = 0; i < F; i++) {
                y[i] = x[i] * c[i] - x[i + F] * s[i];
                y[i + F] = x[i + F] * c[i] + x[i] * s[i];
            }
        }
    }
}

QR_OP(rope_whole, "rope_whole(x[N,H,D]:s, cos[N,F]:f, sin[N,F]:f) -> y[N,H,D]:f",
      "rotate the pairs (i, i+F) of every head, which are all there is: D = 2F")
{
    turn_task task = {OUT(0), IN(1), IN(2), ARRAY(0), DIM('H'), DIM('F')};
    if (2 * task.F != DIM('D')) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "rope_whole: cos has another number of frequencies than the heads have pairs\n"
                "    found    F=%lld\n    expected D/2, with D=%lld",
                (long long)task.F, (long long)DIM('D'));
        return;
    }
    qr_parallel(call, DIM('N'), norm_grain(task.H * DIM('D')), turn_tokens, &task);
}
