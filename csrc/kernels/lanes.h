/* Sixteen floats at a time: the one summation order of every reduction. Holds no ops.
 *
 * Element i of a row belongs to lane i mod 16; a lane is one chain in increasing i, from zero; a short tail is filled up
 * with the neutral element. The sixteen lanes are then combined as ((0+1)+(2+3))+((4+5)+(6+7)) and so on. That is what
 * one 512-bit, two 256-bit or sixteen scalar accumulators do anyway, so every instruction level gives the same bits. */
#ifndef QR_LANES_H
#define QR_LANES_H

#define QR_INLINE static inline __attribute__((always_inline, unused))

enum { LANES = 16 };

/* Elements of light work below which waking a second thread costs more than it brings. */
enum { QR_GRAIN = 65536 };

/* How many items of so many elements each are worth a thread. A double, because beside an empty dimension the others may
 * be so large that their product is beyond int64. */
QR_INLINE int64_t grain_of(double elements)
{
    return (int64_t)(QR_GRAIN / (elements + 1)) + 1;
}

#if defined(QR_HAVE_AVX512)

typedef struct lanes {
    __m512 v;
} lanes;

QR_INLINE lanes lanes_set(float a)
{
    return (lanes){_mm512_set1_ps(a)};
}

QR_INLINE lanes lanes_load(const float *p)
{
    return (lanes){_mm512_loadu_ps(p)};
}

QR_INLINE void lanes_store(float *p, lanes a)
{
    _mm512_storeu_ps(p, a.v);
}

QR_INLINE lanes lanes_add(lanes a, lanes b)
{
    return (lanes){_mm512_add_ps(a.v, b.v)};
}

QR_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return (lanes){_mm512_sub_ps(a.v, b.v)};
}

QR_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){_mm512_mul_ps(a.v, b.v)};
}

/* a * b + c with one rounding */
QR_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){_mm512_fmadd_ps(a.v, b.v, c.v)};
}

/* a > b ? a : b, so that a NaN in `a` loses */
QR_INLINE lanes lanes_max(lanes a, lanes b)
{
    return (lanes){_mm512_max_ps(a.v, b.v)};
}

#elif defined(QR_HAVE_AVX2)

typedef struct lanes {
    __m256 lo, hi;
} lanes;

QR_INLINE lanes lanes_set(float a)
{
    return (lanes){_mm256_set1_ps(a), _mm256_set1_ps(a)};
}

QR_INLINE lanes lanes_load(const float *p)
{
    return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

QR_INLINE void lanes_store(float *p, lanes a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

QR_INLINE lanes lanes_add(lanes a, lanes b)
{
    return (lanes){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

QR_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return (lanes){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

QR_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

QR_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

QR_INLINE lanes lanes_max(lanes a, lanes b)
{
    return (lanes){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}

#elif defined(__aarch64__)

#include "lanes_neon.h"

#else

typedef struct lanes {
    float v[LANES];
} lanes;

QR_INLINE lanes lanes_set(float a)
{
    lanes y;
    for (int i = 0; i < LANES; i++)
        y.v[i] = a;
    return y;
}

QR_INLINE lanes lanes_load(const float *p)
{
    lanes y;
    memcpy(y.v, p, sizeof y.v);
    return y;
}

QR_INLINE void lanes_store(float *p, lanes a)
{
    memcpy(p, a.v, sizeof a.v);
}

QR_INLINE lanes lanes_add(lanes a, lanes b)
{
    for (int i = 0; i < LANES; i++)
        a.v[i] += b.v[i];
    return a;
}

QR_INLINE lanes lanes_sub(lanes a, lanes b)
{
    for (int i = 0; i < LANES; i++)
        a.v[i] -= b.v[i];
    return a;
}

QR_INLINE lanes lanes_mul(lanes a, lanes b)
{
    for (int i = 0; i < LANES; i++)
        a.v[i] *= b.v[i];
    return a;
}

QR_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    for (int i = 0; i < LANES; i++)
        c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}

QR_INLINE lanes lanes_max(lanes a, lanes b)
{
    for (int i = 0; i < LANES; i++)
        a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}

#endif

/* The first n < 16 elements at p; the other lanes hold `rest`. */
QR_INLINE lanes lanes_load_tail(const float *p, int64_t n, float rest)
{
    float v[LANES];
    for (int i = 0; i < LANES; i++)
        v[i] = i < n ? p[i] : rest;
    return lanes_load(v);
}

QR_INLINE void lanes_store_tail(float *p, lanes a, int64_t n)
{
    float v[LANES];
    lanes_store(v, a);
    memcpy(p, v, (size_t)n * sizeof *p);
}

/* Unroll the loop over a few accumulators that follows: an array of them is kept in registers only then. */
#if defined(__clang__)
#define QR_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define QR_UNROLL _Pragma("GCC unroll 16")
#else
#define QR_UNROLL
#endif

#if defined(QR_HAVE_AVX2)

QR_INLINE __m256 lanes_low(lanes a)
{
#if defined(QR_HAVE_AVX512)
    return _mm512_castps512_ps256(a.v);
#else
    return a.lo;
#endif
}

QR_INLINE __m256 lanes_high(lanes a)
{
#if defined(QR_HAVE_AVX512)
    return _mm512_extractf32x8_ps(a.v, 1);
#else
    return a.hi;
#endif
}

/* The tree over the lanes of four sums at once: every step adds adjacent pairs. */
QR_INLINE void lanes_sum4(float *out, lanes a, lanes b, lanes c, lanes d)
{
    const __m256 ab =
        _mm256_hadd_ps(_mm256_hadd_ps(lanes_low(a), lanes_high(a)), _mm256_hadd_ps(lanes_low(b), lanes_high(b)));
    const __m256 cd =
        _mm256_hadd_ps(_mm256_hadd_ps(lanes_low(c), lanes_high(c)), _mm256_hadd_ps(lanes_low(d), lanes_high(d)));
    const __m128 ab8 = _mm_add_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
    const __m128 cd8 = _mm_add_ps(_mm256_castps256_ps128(cd), _mm256_extractf128_ps(cd, 1));
    _mm_storeu_ps(out, _mm_hadd_ps(ab8, cd8));
}

/* The tree over the lanes. */
QR_INLINE float lanes_sum(lanes a)
{
    const __m256 pairs = _mm256_hadd_ps(lanes_low(a), lanes_high(a)), fours = _mm256_hadd_ps(pairs, pairs);
    const __m128 eights = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
    return _mm_cvtss_f32(_mm_hadd_ps(eights, eights));
}

#elif !defined(__aarch64__)

/* The tree over the lanes. */
QR_INLINE float lanes_sum(lanes a)
{
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            a.v[i] = a.v[2 * i] + a.v[2 * i + 1];
    return a.v[0];
}

QR_INLINE void lanes_sum4(float *out, lanes a, lanes b, lanes c, lanes d)
{
    out[0] = lanes_sum(a);
    out[1] = lanes_sum(b);
    out[2] = lanes_sum(c);
    out[3] = lanes_sum(d);
}

#endif

QR_INLINE float lanes_top(lanes a)
{
    float v[LANES];
    lanes_store(v, a);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            v[i] = v[2 * i] > v[2 * i + 1] ? v[2 * i] : v[2 * i + 1];
    return v[0];
}

/* sum x[i] y[i]: fused multiply-adds */
QR_INLINE float qr_dot(const float *x, const float *y, int64_t n)
{
    lanes sum = lanes_set(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = lanes_fma(lanes_load(x + i), lanes_load(y + i), sum);
    if (i < n)
        sum = lanes_fma(lanes_load_tail(x + i, n - i, 0), lanes_load_tail(y + i, n - i, 0), sum);
    return lanes_sum(sum);
}

/* Largest element, NaN left out; -inf for an empty row. */
QR_INLINE float qr_max(const float *x, int64_t n)
{
    lanes top = lanes_set(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        top = lanes_max(lanes_load(x + i), top);
    if (i < n)
        top = lanes_max(lanes_load_tail(x + i, n - i, -INFINITY), top);
    return lanes_top(top);
}

/* The tree over sixteen sums in double. */
QR_INLINE double lanes_sum_double(double *sum)
{
    for (int m = LANES / 2; m > 0; m /= 2)
        for (int j = 0; j < m; j++)
            sum[j] = sum[2 * j] + sum[2 * j + 1];
    return sum[0];
}

/* sum x[i] in double: a float row of any length sums without visible rounding */
QR_INLINE double qr_sum_double(const float *x, int64_t n)
{
    double sum[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            sum[j] += (double)x[i + j];
    for (int j = 0; i + j < n; j++)
        sum[j] += (double)x[i + j];
    return lanes_sum_double(sum);
}

/* sum x[i]^2 in double: every square of a float is exact there */
QR_INLINE double qr_sumsq(const float *x, int64_t n)
{
    double sum[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            sum[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i + j < n; j++)
        sum[j] += (double)x[i + j] * (double)x[i + j];
    return lanes_sum_double(sum);
}

QR_INLINE uint32_t qr_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

#endif
