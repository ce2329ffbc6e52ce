/* y = x Wᵀ + b in double with W as it lies in the file: the arbiter of linear.c.
 *
 * The order of every output is the one linear.c states, in double: classes of pairs, the high element of a pair before
 * the low one, the tree over the sixteen class sums, then the bias. W and b are widened exactly and nothing is flushed to
 * zero. So the bits depend on no instruction level, blocking or number of threads here either. */
#include "simd.h"

enum {
    F64_ROWS = 12,   /* rows of W that take turns on the same tokens: whole tiles at every level */
    F64_TOKENS = 32, /* tokens that share one pass over W */
    F64_STEPS = 16,  /* steps after which the next tile takes its turn: x of a tile and 12 rows of W then fit into L1 */
    F64_LONG = 64    /* the same for few tokens, whose x is small: long enough for what is fetched ahead to arrive */
};

typedef struct linear_f64 {
    const double *x;
    const float *bias;
    const char *w;
    double *y, *px, *sums; /* px: packed x; sums[threads,12,32,16] */
    int64_t M, O, I, row_bytes, steps;
    qr_dtype dtype;
} linear_f64;

/* ---- a register of doubles, and of elements of W as doubles ------------------------------------------------------ */

#if defined(QR_HAVE_AVX512)

enum { DOUBLES = 8, F64_GROUP = 4 }; /* classes per register; rows of a tile of several tokens */
typedef __m512d doubles;
#define doubles_load _mm512_loadu_pd
#define doubles_store _mm512_storeu_pd
#define doubles_fma _mm512_fmadd_pd

LINEAR_INLINE doubles doubles_high(const char *pairs, qr_dtype dtype)
{
    return qr_eight_doubles(high8(pairs, dtype));
}

LINEAR_INLINE doubles doubles_low(const char *pairs, qr_dtype dtype)
{
    return qr_eight_doubles(low8(pairs, dtype));
}

#elif defined(QR_HAVE_AVX2)

enum { DOUBLES = 4, F64_GROUP = 3 };
typedef __m256d doubles;
#define doubles_load _mm256_loadu_pd
#define doubles_store _mm256_storeu_pd
#define doubles_fma _mm256_fmadd_pd

LINEAR_INLINE doubles doubles_high(const char *pairs, qr_dtype dtype)
{
    const float *p = (const float *)(const void *)pairs;
    if (dtype == QR_F32)
        return _mm256_cvtps_pd(_mm_shuffle_ps(_mm_loadu_ps(p), _mm_loadu_ps(p + 4), 0xdd));
    const __m128i words = _mm_loadu_si128((const __m128i *)(const void *)pairs);
    if (dtype == QR_BF16)
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_and_si128(words, _mm_set1_epi32((int)0xffff0000u))));
    const __m128i halves = _mm_srli_epi32(words, 16);
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_packus_epi32(halves, halves)));
}

LINEAR_INLINE doubles doubles_low(const char *pairs, qr_dtype dtype)
{
    const float *p = (const float *)(const void *)pairs;
    if (dtype == QR_F32)
        return _mm256_cvtps_pd(_mm_shuffle_ps(_mm_loadu_ps(p), _mm_loadu_ps(p + 4), 0x88));
    const __m128i words = _mm_loadu_si128((const __m128i *)(const void *)pairs);
    if (dtype == QR_BF16)
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(words, 16)));
    const __m128i halves = _mm_and_si128(words, _mm_set1_epi32(0xffff));
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_packus_epi32(halves, halves)));
}

#elif defined(__aarch64__)

enum { DOUBLES = 4, F64_GROUP = 3 };
typedef struct doubles {
    float64x2_t v[2];
} doubles;

LINEAR_INLINE doubles doubles_load(const double *p)
{
    return (doubles){{vld1q_f64(p), vld1q_f64(p + 2)}};
}

LINEAR_INLINE void doubles_store(double *p, doubles a)
{
    vst1q_f64(p, a.v[0]);
    vst1q_f64(p + 2, a.v[1]);
}

LINEAR_INLINE doubles doubles_fma(doubles a, doubles b, doubles c)
{
    return (doubles){{vfmaq_f64(c.v[0], a.v[0], b.v[0]), vfmaq_f64(c.v[1], a.v[1], b.v[1])}};
}

LINEAR_INLINE doubles doubles_of(float32x4_t a)
{
    return (doubles){{vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)}};
}

LINEAR_INLINE doubles doubles_high(const char *pairs, qr_dtype dtype)
{
    return doubles_of(high4(pairs, dtype));
}

LINEAR_INLINE doubles doubles_low(const char *pairs, qr_dtype dtype)
{
    return doubles_of(low4(pairs, dtype));
}

#else

enum { DOUBLES = 4, F64_GROUP = 3 };
typedef struct doubles {
    double v[DOUBLES];
} doubles;

LINEAR_INLINE doubles doubles_load(const double *p)
{
    doubles y;
    memcpy(y.v, p, sizeof y.v);
    return y;
}

LINEAR_INLINE void doubles_store(double *p, doubles a)
{
    memcpy(p, a.v, sizeof a.v);
}

LINEAR_INLINE doubles doubles_fma(doubles a, doubles b, doubles c)
{
    for (int i = 0; i < DOUBLES; i++)
        c.v[i] = fma(a.v[i], b.v[i], c.v[i]);
    return c;
}

LINEAR_INLINE doubles doubles_of(const char *pairs, qr_dtype dtype, int element)
{
    float pair[2 * DOUBLES];
    doubles y;
    qr_widen(pair, pairs, dtype, 2 * DOUBLES);
    for (int i = 0; i < DOUBLES; i++)
        y.v[i] = (double)pair[2 * i + element];
    return y;
}

LINEAR_INLINE doubles doubles_high(const char *pairs, qr_dtype dtype)
{
    return doubles_of(pairs, dtype, 1);
}

LINEAR_INLINE doubles doubles_low(const char *pairs, qr_dtype dtype)
{
    return doubles_of(pairs, dtype, 0);
}

#endif

/* ---- the loops ----------------------------------------------------------------------------------------------------- */

/* Advance the class sums of R rows x T tokens by `steps`, Q registers of classes at a time. R, T, Q and dtype are constants
 * where this is used; R x T x Q accumulators hide the latency of the multiply-add and leave room for operands.
 * sums[row][token][class]; packed x has, per token and step, the 16 high elements and then the 16 low ones. */
LINEAR_INLINE void f64_tile_of(double *sums, const char *w, int64_t w_stride, const double *x, int64_t x_stride,
                               int64_t steps, const int R, const int T, const int Q, const qr_dtype dtype)
{
    const int64_t pair_bytes = 2 * element_size(dtype), step_bytes = 16 * pair_bytes;

    for (int c = 0; c < 16; c += Q * DOUBLES) {
        const char *from = w + c * pair_bytes;
        const double *with = x + c;
        doubles a[4][4][4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++)
                    a[r][t][q] = doubles_load(sums + (r * F64_TOKENS + t) * 16 + c + q * DOUBLES);
        for (int64_t s = 0; s < steps; s++, from += step_bytes, with += STEP) {
#if defined(QR_HAVE_AVX2)
            if (T == 1) /* the hardware sees a stream only within a row; the rows that follow are one piece of memory */
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    for (int line = 0; line < step_bytes; line += 64)
                        _mm_prefetch(from + (R + r) * w_stride + line, _MM_HINT_T0);
#endif
#pragma GCC unroll 2
            for (int low = 0; low < 2; low++)
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++) {
                    doubles v[4];
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        const char *pairs = from + r * w_stride + q * DOUBLES * pair_bytes;
                        v[r] = low ? doubles_low(pairs, dtype) : doubles_high(pairs, dtype);
                    }
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++) {
                        const doubles token = doubles_load(with + t * x_stride + low * 16 + q * DOUBLES);
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++)
                            a[r][t][q] = doubles_fma(v[r], token, a[r][t][q]);
                    }
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++)
                    doubles_store(sums + (r * F64_TOKENS + t) * 16 + c + q * DOUBLES, a[r][t][q]);
    }
}

/* All rows for T tokens. */
LINEAR_INLINE void f64_rows_of(double *sums, const char *w, int64_t w_stride, const double *x, int64_t x_stride,
                               int64_t steps, int rows, const int T, const qr_dtype dtype)
{
    const int R = T == 1 ? 2 : F64_GROUP, Q = T == 1 ? 16 / DOUBLES : T == 2 ? 2 : 1;
    int r = 0;
    for (; r + R <= rows; r += R)
        f64_tile_of(sums + r * F64_TOKENS * 16, w + r * w_stride, w_stride, x, x_stride, steps, R, T, Q, dtype);
    for (; r < rows; r++)
        f64_tile_of(sums + r * F64_TOKENS * 16, w + r * w_stride, w_stride, x, x_stride, steps, 1, T, Q, dtype);
}

LINEAR_INLINE void f64_block_as(double *sums, const char *w, int64_t w_stride, const double *x, int64_t x_stride,
                                int64_t steps, int rows, int tokens, const qr_dtype dtype)
{
#if !defined(QR_HAVE_AVX2) /* no registers to fill: one shape of tile, and a compiler that is done soon */
    for (int t = 0; t < tokens; t++, sums += 16, x += x_stride)
        f64_rows_of(sums, w, w_stride, x, x_stride, steps, rows, 1, dtype);
#else
    for (int t = 0; t < tokens; t += 4, sums += 4 * 16, x += 4 * x_stride)
        if (tokens - t >= 4)
            f64_rows_of(sums, w, w_stride, x, x_stride, steps, rows, 4, dtype);
        else if (tokens - t == 3)
            f64_rows_of(sums, w, w_stride, x, x_stride, steps, rows, 3, dtype);
        else if (tokens - t == 2)
            f64_rows_of(sums, w, w_stride, x, x_stride, steps, rows, 2, dtype);
        else
            f64_rows_of(sums, w, w_stride, x, x_stride, steps, rows, 1, dtype);
#endif
}

static __attribute__((noinline)) void f64_block(double *sums, const char *w, int64_t w_stride, const double *x,
                                                int64_t x_stride, int64_t steps, int rows, int tokens, qr_dtype dtype)
{
    if (dtype == QR_BF16)
        f64_block_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_BF16);
    else if (dtype == QR_F16)
        f64_block_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F16);
    else
        f64_block_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F32);
}

static void f64_pack(void *context, int64_t begin, int64_t end, int thread)
{
    const linear_f64 *l = context;
    (void)thread;
    for (int64_t m = begin; m < end; m++) {
        const double *x = l->x + m * l->I;
        double *out = l->px + m * l->steps * STEP;
        for (int64_t k = 0; k < l->steps * STEP; k += STEP, out += STEP)
            for (int64_t c = 0; c < 16; c++) {
                out[c] = k + 2 * c + 1 < l->I ? x[k + 2 * c + 1] : 0.0;
                out[16 + c] = k + 2 * c < l->I ? x[k + 2 * c] : 0.0;
            }
    }
}

/* Class sums of one block of rows and tokens, from zero. */
static void f64_sums(const linear_f64 *l, int64_t row, int rows, int64_t m, int tokens, double *sums)
{
    const int64_t full = l->I / STEP, tail = l->I % STEP * element_size(l->dtype);
    const int64_t step_bytes = STEP * element_size(l->dtype), x_stride = l->steps * STEP;
    const int64_t turn = tokens <= 2 ? F64_LONG : F64_STEPS;
    const char *w = l->w + row * l->row_bytes;
    const double *x = l->px + m * x_stride;

    for (int r = 0; r < rows; r++)
        memset(sums + r * F64_TOKENS * 16, 0, (size_t)tokens * 16 * sizeof *sums);
    for (int64_t s = 0; s < full; s += turn)
        f64_block(sums, w + s * step_bytes, l->row_bytes, x + s * STEP, x_stride, full - s < turn ? full - s : turn,
                  rows, tokens, l->dtype);
    if (tail > 0) {
        _Alignas(64) char last[F64_ROWS * STEP * sizeof(float)];
        memset(last, 0, sizeof last);
        for (int r = 0; r < rows; r++)
            memcpy(last + r * step_bytes, w + r * l->row_bytes + full * step_bytes, (size_t)tail);
        f64_block(sums, last, step_bytes, x + full * STEP, x_stride, 1, rows, tokens, l->dtype);
    }
}

static void f64_work(void *context, int64_t begin, int64_t end, int thread)
{
    const linear_f64 *l = context;
    double *sums = l->sums + thread * F64_ROWS * F64_TOKENS * 16;

    for (int64_t m = 0; m < l->M; m += F64_TOKENS) {
        const int tokens = (int)(l->M - m < F64_TOKENS ? l->M - m : F64_TOKENS);
        for (int64_t row = begin; row < end; row += F64_ROWS) {
            const int rows = (int)(end - row < F64_ROWS ? end - row : F64_ROWS);
            f64_sums(l, row, rows, m, tokens, sums);
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < tokens; t++) {
                    double y = lanes_sum_double(sums + (r * F64_TOKENS + t) * 16);
                    if (l->bias != NULL)
                        y += (double)l->bias[row + r];
                    l->y[(m + t) * l->O + row + r] = y == y ? y : (double)NAN;
                }
        }
    }
}

QR_OP(linear_f64, "linear_f64(x[*,I]:d, w[O,I]:w, b[O]:v?) -> y[*,O]:d, _x[*,I+31]:d, _sums[#,12,32,16]:d",
      "y = x w^T + b: as linear, in double")
{
    linear_f64 l = {.x = IN_F64(0),
                    .w = ARRAY(1)->data,
                    .bias = IN(2),
                    .y = OUT_F64(0),
                    .px = OUT_F64(1),
                    .sums = OUT_F64(2),
                    .M = DIM('*'),
                    .O = DIM('O'),
                    .I = DIM('I'),
                    .dtype = ARRAY(1)->dtype};
    l.row_bytes = l.I * element_size(l.dtype);
    l.steps = (l.I + STEP - 1) / STEP;
    const int64_t rows = LINEAR_GRAIN / (l.I + 1) + 1; /* or tokens */
    qr_parallel(call, l.M, rows, f64_pack, &l);
    qr_parallel(call, l.O, (rows + F64_ROWS - 1) / F64_ROWS * F64_ROWS, f64_work, &l);
}
