/* Normalisations of a row: RMS with a zero-centred weight, RMS with a gate, L2, mean and variance.
 * They work in double and round each output once: a row is short, and what a norm loses every later layer inherits. */
#include "kernel.h"

typedef struct norm_task {
    float *y;
    const float *x, *z, *w, *b;
    int64_t width;
    double eps;
} norm_task;

/* Rows worth a thread of their own: about as many elements as a fork and join of the pool costs. */
static int64_t norm_grain(int64_t width)
{
    return width > 0 ? (QR_GRAIN + width - 1) / width : QR_GRAIN;
}

static void norm_run(qr_call *call, qr_range rows, const float *z, const float *w, const float *b)
{
    norm_task task = {OUT(0), IN(0), z, w, b, DIM('D'), SCALAR(0)};
    qr_parallel(call, DIM('*'), norm_grain(task.width), rows, &task);
}

/* y = x * rsqrt(mean x^2 + eps) * (1 + w)
 * The checkpoint stores w centred on zero; the 1 is added here because bf16 would lose a small w. */
static void rms_norm_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const norm_task *const task = context;
    const int64_t D = task->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const float *const x = task->x + r * D, *const w = task->w;
        float *const y = task->y + r * D;
        const double scale = 1.0 / sqrt(qr_sumsq(x, D) / (double)D + task->eps);
        for (int64_t d = 0; d < D; d++)
            y[d] = (float)((double)x[d] * scale * (1.0 + (double)w[d]));
    }
}

/* y = w * (x * rsqrt(mean x^2 + eps)) * silu(z): norm first, then weight, then gate */
static void rms_norm_gated_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const norm_task *const task = context;
    const int64_t D = task->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const float *const x = task->x + r * D, *const z = task->z + r * D, *const w = task->w;
        float *const y = task->y + r * D;
        const double scale = 1.0 / sqrt(qr_sumsq(x, D) / (double)D + task->eps);
        for (int64_t d = 0; d < D; d++)
            y[d] = (float)((double)x[d] * scale * (double)w[d] * (double)qr_silu(z[d]));
    }
}

/* y = x * rsqrt(sum x^2 + eps): eps inside the root, so a zero row stays zero */
static void l2_norm_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const norm_task *const task = context;
    const int64_t D = task->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const float *const x = task->x + r * D;
        float *const y = task->y + r * D;
        const double scale = 1.0 / sqrt(qr_sumsq(x, D) + task->eps);
        for (int64_t d = 0; d < D; d++)
            y[d] = (float)((double)x[d] * scale);
    }
}

/* sum (x[i] - mean)^2 in double, in the order of qr_sumsq */
QR_INLINE double sum_of_squares_about(double mean, const float *x, int64_t n)
{
    double sum[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const double d = (double)x[i + j] - mean;
            sum[j] += d * d;
        }
    for (int j = 0; i + j < n; j++) {
        const double d = (double)x[i + j] - mean;
        sum[j] += d * d;
    }
    return lanes_sum_double(sum);
}

/* y = (x - mean) / sqrt(variance + eps) * w + b. The variance is that about the mean: one over sums of squares would lose
 * what a row far from zero has of it. */
static void layer_norm_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const norm_task *const task = context;
    const int64_t D = task->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const float *const x = task->x + r * D, *const w = task->w, *const b = task->b;
        float *const y = task->y + r * D;
        const double mean = qr_sum_double(x, D) / (double)D;
        const double scale = 1.0 / sqrt(sum_of_squares_about(mean, x, D) / (double)D + task->eps);
        for (int64_t d = 0; d < D; d++)
            y[d] = (float)(((double)x[d] - mean) * scale * (double)w[d] + (double)b[d]);
    }
}

QR_OP(rms_norm, "rms_norm(x[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f", "y = x * rsqrt(mean(x^2) + eps) * (1 + w)")
{
    norm_run(call, rms_norm_rows, NULL, IN(1), NULL);
}

QR_OP(rms_norm_gated, "rms_norm_gated(x[*,D]:f, z[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f",
      "y = w * (x * rsqrt(mean(x^2) + eps)) * silu(z)")
{
    norm_run(call, rms_norm_gated_rows, IN(1), IN(2), NULL);
}

QR_OP(l2_norm, "l2_norm(x[*,D]:f, eps=1e-6) -> y[*,D]:f", "y = x * rsqrt(sum(x^2) + eps)")
{
    norm_run(call, l2_norm_rows, NULL, NULL, NULL);
}

QR_OP(layer_norm, "layer_norm(x[*,D]:f, w[D]:v, b[D]:v, eps=1e-6) -> y[*,D]:f",
      "y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b")
{
    norm_run(call, layer_norm_rows, NULL, IN(1), IN(2));
}
