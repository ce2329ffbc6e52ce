/* Element by element: sums, products, gates, exponentials, roundings to a narrower format. */
#include "kernel.h"

typedef struct pointwise_task {
    float *y;
    const float *a, *b;
} pointwise_task;

static void pointwise_run(qr_call *call, qr_range loop, const float *b)
{
    pointwise_task task = {OUT(0), IN(0), b};
    qr_parallel(call, DIM('*'), QR_GRAIN, loop, &task);
}

/* POINTWISE(name, expression in a and b): the loop over [begin, end). Each result depends on its own element only, so
 * a fused op has the bits of the two ops it stands for: `silu_mul` rounds silu before it multiplies. */
#define POINTWISE(name, expression)                                                                                    \
    static void name##_range(void *context, int64_t begin, int64_t end, int thread)                                    \
    {                                                                                                                  \
        const pointwise_task *const task = context;                                                                    \
        const float *const as = task->a, *const bs = task->b;                                                          \
        float *restrict const y = task->y;                                                                             \
        (void)thread, (void)bs;                                                                                        \
        for (int64_t i = begin; i < end; i++) {                                                                        \
            const float a = as[i];                                                                                     \
            y[i] = expression;                                                                                         \
        }                                                                                                              \
    }

POINTWISE(add, a + bs[i])
POINTWISE(mul, a *bs[i])
POINTWISE(silu, qr_silu(a))
POINTWISE(silu_mul, qr_silu(a) * bs[i])
POINTWISE(sigmoid, qr_sigmoid(a))
POINTWISE(sigmoid_mul, a *qr_sigmoid(bs[i]))
POINTWISE(softplus, qr_softplus(a))
POINTWISE(gelu, qr_gelu(a))
POINTWISE(gelu_tanh, qr_gelu_tanh(a))
POINTWISE(exp, qr_exp(a))
POINTWISE(round_bf16, qr_round_bf16(a))
POINTWISE(round_f16, qr_round_f16(a))

#undef POINTWISE

QR_OP(add, "add(a[*]:f, b[*]:f) -> y[*]:f", "y = a + b")
{
    pointwise_run(call, add_range, IN(1));
}

QR_OP(mul, "mul(a[*]:f, b[*]:f) -> y[*]:f", "y = a * b")
{
    pointwise_run(call, mul_range, IN(1));
}

QR_OP(silu, "silu(x[*]:f) -> y[*]:f", "y = x / (1 + exp(-x))")
{
    pointwise_run(call, silu_range, NULL);
}

QR_OP(silu_mul, "silu_mul(g[*]:f, u[*]:f) -> y[*]:f", "y = silu(g) * u")
{
    pointwise_run(call, silu_mul_range, IN(1));
}

QR_OP(sigmoid, "sigmoid(x[*]:f) -> y[*]:f", "y = 1 / (1 + exp(-x))")
{
    pointwise_run(call, sigmoid_range, NULL);
}

QR_OP(sigmoid_mul, "sigmoid_mul(x[*]:f, g[*]:f) -> y[*]:f", "y = x * sigmoid(g)")
{
    pointwise_run(call, sigmoid_mul_range, IN(1));
}

QR_OP(softplus, "softplus(x[*]:f) -> y[*]:f", "y = log(1 + exp(x))")
{
    pointwise_run(call, softplus_range, NULL);
}

QR_OP(gelu, "gelu(x[*]:f) -> y[*]:f", "y = x/2 (1 + erf(x / sqrt(2)))")
{
    pointwise_run(call, gelu_range, NULL);
}

QR_OP(gelu_tanh, "gelu_tanh(x[*]:f) -> y[*]:f", "y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))")
{
    pointwise_run(call, gelu_tanh_range, NULL);
}

QR_OP(exp, "exp(x[*]:f) -> y[*]:f", "y = exp(x)")
{
    pointwise_run(call, exp_range, NULL);
}

QR_OP(round_bf16, "round_bf16(x[*]:f) -> y[*]:f", "y = the value of bfloat16 nearest to x, ties to even")
{
    pointwise_run(call, round_bf16_range, NULL);
}

QR_OP(round_f16, "round_f16(x[*]:f) -> y[*]:f",
      "y = the value of float16 nearest to x, ties to even, infinite from 65520")
{
    pointwise_run(call, round_f16_range, NULL);
}

typedef struct decay_task {
    float *g;
    const float *a, *A_log, *dt_bias;
    int64_t width;
} decay_task;

/* g = -exp(A_log) * softplus(a + dt_bias): the log of a head's decay, never above zero */
static void delta_decay_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const decay_task *const task = context;
    const int64_t V = task->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        for (int64_t v = 0; v < V; v++)
            task->g[r * V + v] = -qr_exp(task->A_log[v]) * qr_softplus(task->a[r * V + v] + task->dt_bias[v]);
}

QR_OP(delta_decay, "delta_decay(a[*,V]:f, A_log[V]:v, dt_bias[V]:v) -> g[*,V]:f",
      "g = -exp(A_log) * softplus(a + dt_bias)")
{
    decay_task task = {OUT(0), IN(0), IN(1), IN(2), DIM('V')};
    qr_parallel(call, DIM('*'), norm_grain(task.width), delta_decay_rows, &task);
}
