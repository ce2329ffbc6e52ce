/* Rotary positions: frequencies, tables of cos and sin, and the rotation itself. */
#include "kernel.h"

/* theta^(-2 i / width). Long double leaves one rounding, to float64, whatever the C library's pow does. */
QR_OP(rope_frequencies, "rope_frequencies(index[F]:i, theta, width) -> f[F]:d",
      "f = theta ^ (-2 index / width), in float64")
{
    const long double theta = SCALAR(0), width = SCALAR(1);
    for (int64_t i = 0; i < DIM('F'); i++)
        OUT_F64(0)[i] = (double)powl(theta, -2.0L * (long double)IN_I64(0)[i] / width);
}

/* pi/2 in pieces: n times any of the first three is exact for |n| < 2^31. */
#define HALF_PI_1 0x1.921fb00000000p+0
#define HALF_PI_2 0x1.5110b00000000p-22
#define HALF_PI_3 0x1.1846980000000p-44
#define HALF_PI_4 0x1.3198a2e037073p-69
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define ROUND_DOUBLE 0x1.8p+52

/* sin and cos of |x| < 2^31 in plain double operations: no C library, the same bits everywhere. */
static void sin_cos(double x, double *sine, double *cosine)
{
    const double n = (x * TWO_OVER_PI + ROUND_DOUBLE) - ROUND_DOUBLE;
    /* Both differences are exact (the operands are close, or short enough); the last piece may cancel, so what its
     * subtraction loses is kept and small results stay accurate relative to themselves. */
    const double a = (x - n * HALF_PI_1) - n * HALF_PI_2, third = n * HALF_PI_3, high = a - third;
    const double r = high + (((a - high) - third) - n * HALF_PI_4), s = r * r;

    double p = -1.0 / 121645100408832000.0; /* -1/19!, then up the series of sin r = r + r^3 p(r^2) */
    p = p * s + 1.0 / 355687428096000.0;
    p = p * s - 1.0 / 1307674368000.0;
    p = p * s + 1.0 / 6227020800.0;
    p = p * s - 1.0 / 39916800.0;
    p = p * s + 1.0 / 362880.0;
    p = p * s - 1.0 / 5040.0;
    p = p * s + 1.0 / 120.0;
    p = p * s - 1.0 / 6.0;
    const double sin_r = r + r * s * p;

    double q = 1.0 / 6402373705728000.0; /* 1/18!, then up the series of cos r = 1 - r^2/2 + r^4 q(r^2) */
    q = q * s * -1.0 + 1.0 / 20922789888000.0;
    q = q * s * -1.0 + 1.0 / 87178291200.0;
    q = q * s * -1.0 + 1.0 / 479001600.0;
    q = q * s * -1.0 + 1.0 / 3628800.0;
    q = q * s * -1.0 + 1.0 / 40320.0;
    q = q * s * -1.0 + 1.0 / 720.0;
    q = q * s * -1.0 + 1.0 / 24.0;
    const double cos_r = 1.0 - (0.5 * s - s * s * q);

    const int64_t quarter = (int64_t)n & 3;
    const double y = quarter & 1 ? cos_r : sin_r, z = quarter & 1 ? sin_r : cos_r;
    *sine = quarter & 2 ? -y : y;
    *cosine = (quarter + 1) & 2 ? -z : z;
}

/* The angle of position s and frequency i is positions[axis[i], s] * f[i]; each result is rounded once, to float32. */
QR_OP(rope_table, "rope_table(positions[A,*]:i, axis[F]:i, f[F]:d) -> cos[*,F]:f, sin[*,F]:f",
      "cos and sin of positions[axis[i]] * f[i], computed in float64")
{
    const int64_t rows = DIM('*'), F = DIM('F'), A = DIM('A');
    const int64_t *const positions = IN_I64(0), *const axis = IN_I64(1);
    const double *const f = IN_F64(2);
    for (int64_t i = 0; i < F; i++) {
        if (axis[i] < 0 || axis[i] >= A) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "rope_table: axis[%lld] is outside the positions\n    found    %lld\n"
                    "    expected 0 to %lld",
                    (long long)i, (long long)axis[i], (long long)A - 1);
            return;
        }
        for (int64_t r = 0; r < rows; r++) {
            double sine, cosine;
            const double angle = (double)positions[axis[i] * rows + r] * f[i];
            if (!(fabs(angle) < 0x1p31)) {
                qr_fail(call->error, QR_BAD_INPUT,
                        "rope_table: angle too large for an accurate cosine\n"
                        "    found    position %lld x frequency %g\n    expected a product below 2^31",
                        (long long)positions[axis[i] * rows + r], f[i]);
                return;
            }
            sin_cos(angle, &sine, &cosine);
            OUT(0)[r * F + i] = (float)cosine;
            OUT(1)[r * F + i] = (float)sine;
        }
    }
}

typedef struct rope_task {
    float *y;
    const float *x, *cosine, *sine;
    int64_t H, D, F;
} rope_task;

/* Pairs (i, i + F) turn by the angle of frequency i; dimensions from 2F on pass through. */
static void rope_tokens(void *context, int64_t begin, int64_t end, int thread)
{
    const rope_task *const task = context;
    const int64_t H = task->H, D = task->D, F = task->F;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const float *const c = task->cosine + t * F, *const s = task->sine + t * F;
        for (int64_t h = 0; h < H; h++) {
            const float *const x = task->x + (t * H + h) * D;
            float *restrict const y = task->y + (t * H + h) * D;
            for (int64_t i = 0; i < F; i++) {
                y[i] = x[i] * c[i] - x[i + F] * s[i];
                y[i + F] = x[i + F] * c[i] + x[i] * s[i];
            }
            memcpy(y + 2 * F, x + 2 * F, (size_t)(D - 2 * F) * sizeof *y);
        }
    }
}

QR_OP(rope, "rope(x[B,T,H,D]:f, cos[B,T,F]:f, sin[B,T,F]:f) -> y[B,T,H,D]:f",
      "rotate the pairs (i, i+F) of every head; dimensions from 2F on pass through")
{
    rope_task task = {OUT(0), IN(0), IN(1), IN(2), DIM('H'), DIM('D'), DIM('F')};
    if (2 * task.F > task.D) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "rope: cos has more frequencies than the heads have pairs\n"
                "    found    F=%lld\n    expected at most D/2=%lld",
                (long long)task.F, (long long)task.D / 2);
        return;
    }
    qr_parallel(call, DIM('B') * DIM('T'), norm_grain(task.H * task.D), rope_tokens, &task);
}
