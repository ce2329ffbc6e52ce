/* Exponentials of our own, so that their bits depend on no C library and no instruction level. Holds no ops.
 *
 * Each is straight-line arithmetic on one float (selections, no branches), so a loop over it becomes SIMD at every
 * level. Largest errors over all float32 arguments, in units in the last place of the result:
 * qr_exp 1.07, qr_sigmoid 1.07, qr_silu 1.14, qr_softplus 1.6.
 * Gradual underflow is kept, exp overflows to infinity, NaN gives NaN. */
#ifndef QR_EXPM_H
#define QR_EXPM_H

#define QR_LN2_HIGH 0x1.62e4p-1f   /* 15 bits: n * QR_LN2_HIGH is exact for |n| < 512 */
#define QR_LN2_LOW 0x1.7f7d1cp-20f /* ln 2 - QR_LN2_HIGH */
#define QR_LOG2E 0x1.715476p+0f    /* 1 / ln 2 */
#define QR_ROUND 0x1.8p+23f        /* adding it rounds to an integer, which then sits in the low bits */

/* exp(x) = p 2^n with p near [1/sqrt 2, sqrt 2]; `tail` is what p lost to its last rounding. |x| must be below 200. */
typedef struct qr_exp_parts {
    float p, tail;
    int32_t n;
} qr_exp_parts;

QR_INLINE qr_exp_parts qr_exp_split(float x)
{
    const float shifted = fmaf(x, QR_LOG2E, QR_ROUND), n = shifted - QR_ROUND;
    const float r = fmaf(n, -QR_LN2_LOW, fmaf(n, -QR_LN2_HIGH, x));
    /* e^r = 1 + r + r^2 (1/2 + r/6 + ...), |r| <= ln 2 / 2 */
    float c = 0x1.a01a02p-13f;
    c = fmaf(c, r, 0x1.6c16c2p-10f);
    c = fmaf(c, r, 0x1.111112p-7f);
    c = fmaf(c, r, 0x1.555556p-5f);
    c = fmaf(c, r, 0x1.555556p-3f);
    c = fmaf(c, r, 0.5f);
    const float s = fmaf(c * r, r, r), p = 1.0f + s;
    return (qr_exp_parts){p, s - (p - 1.0f), (int32_t)(qr_bits(shifted) - qr_bits(QR_ROUND))};
}

QR_INLINE float qr_power_of_two(int32_t n) /* -126 <= n <= 127 */
{
    return qr_float((uint32_t)(n + 127) << 23);
}

QR_INLINE float qr_exp(float x)
{
    float bounded = x < -110.0f ? -110.0f : x;
    bounded = bounded > 90.0f ? 90.0f : bounded;
    const qr_exp_parts e = qr_exp_split(bounded);
    /* 2^n in two factors: the first leaves a normal number, so a subnormal result is rounded once */
    const int32_t half = e.n >> 1;
    return e.p * qr_power_of_two(half) * qr_power_of_two(e.n - half);
}

/* All ones where x has its sign bit set, else zero. */
QR_INLINE uint32_t qr_sign_mask(float x)
{
    return 0u - (qr_bits(x) >> 31);
}

/* a where the mask is set, b elsewhere. Conditions on x would be turned into branches, and branches stop SIMD. */
QR_INLINE float qr_select(uint32_t mask, float a, float b)
{
    return qr_float((qr_bits(a) & mask) | (qr_bits(b) & ~mask));
}

/* numerator e^m / (1 + e^m) where `negative` is set, numerator / (1 + e^m) else, for an m <= 0 in parts;
 * |numerator| e^m may be subnormal. */
QR_INLINE float qr_logistic_of(qr_exp_parts e, uint32_t negative, float numerator)
{
    /* e^m = (p + tail) 2^half 2^rest; the last factor multiplies the finished quotient, which is rounded there once */
    const int32_t half = e.n >> 1;
    const float first = qr_power_of_two(half), rest = qr_power_of_two(e.n - half);
    const float p = e.p * first, tail = e.tail * first, power = p * rest;
    const float factor = qr_select(negative, p, 1.0f), factor_tail = qr_select(negative, tail, 0.0f);
    const float above = numerator * factor;
    const float above_tail = fmaf(numerator, factor_tail, fmaf(numerator, factor, -above));
    const float below = 1.0f + power, below_tail = fmaf(tail, rest, power - (below - 1.0f));
    /* one step of Newton on the quotient brings back what the roundings above lost */
    const float inverse = 1.0f / below, y = above * inverse;
    const float error = fmaf(-y, below, above) + fmaf(-y, below_tail, above_tail);
    return fmaf(error, inverse, y) * qr_select(negative, rest, 1.0f);
}

/* numerator sigmoid(x) */
QR_INLINE float qr_logistic(float x, float numerator)
{
    float m = -fabsf(x);
    m = m < -150.0f ? -150.0f : m;
    return qr_logistic_of(qr_exp_split(m), qr_sign_mask(x), numerator);
}

QR_INLINE float qr_sigmoid(float x)
{
    return qr_logistic(x, 1.0f);
}

/* x sigmoid(x), -0 at minus infinity. From 18 up the answer rounds to x, and the corrections of an infinite x are NaN. */
QR_INLINE float qr_silu(float x)
{
    const float bounded = x < -150.0f ? -150.0f : x, y = qr_logistic(x, bounded);
    return qr_select(0u - (uint32_t)(x > 18.0f), x, y);
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|) */
QR_INLINE float qr_softplus(float x)
{
    const float e = qr_exp(-fabsf(x));
    /* log(1 + e) = u (1 + u^2/12 + u^4/80 + ...), u = e / (1 + e/2); `rest` is what u lost to rounding */
    const float below = fmaf(e, 0.5f, 1.0f), lost = fmaf(e, 0.5f, 1.0f - below);
    const float u = e / below, rest = fmaf(-u, lost, fmaf(-u, below, e)) / below, s = u * u;
    float c = 0x1.3b13b2p-16f;
    c = fmaf(c, s, 0x1.745d18p-14f);
    c = fmaf(c, s, 0x1.c71c72p-12f);
    c = fmaf(c, s, 0x1.24924ap-9f);
    c = fmaf(c, s, 0x1.99999ap-7f);
    c = fmaf(c, s, 0x1.555556p-4f);
    const float log1p = u + fmaf(c * s, u, rest);
    return (x > 0 ? x : 0.0f) + log1p;
}

/* log(x) in double for a positive normal x: x = m 2^n, log m = 2 atanh((m - 1) / (m + 1)). */
QR_INLINE double qr_log_double(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    int64_t n = (int64_t)(u >> 52) - 1023;
    u = (u & 0xfffffffffffffu) | 0x3ff0000000000000u;
    double m;
    memcpy(&m, &u, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        n++;
    }
    const double t = (m - 1.0) / (m + 1.0), s = t * t;
    double c = 1.0 / 23.0;
    for (int k = 21; k >= 3; k -= 2)
        c = c * s + 1.0 / k;
    return (double)n * 0x1.62e42fefa39efp-1 + (2.0 * t + 2.0 * t * s * c);
}

#endif
