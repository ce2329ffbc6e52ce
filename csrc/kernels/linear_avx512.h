/* The loops of linear.c with AVX-512: the sixteen classes are one register.  With bf16 dot products a pair is one
 * operand: the same two multiply-adds in the same order, hence the same bits. */

enum {
    VECTOR = 16, /* tokens per register in the wide loop */
    GROUP = 8,   /* rows of W per tile */
    PANEL = 48,  /* tokens per tile: 8 x 3 accumulators, 3 operands and a broadcast of the 32 registers */
    PART_LEVEL = BLOCK_ROWS * BLOCK_TOKENS,
    BF16_UNPACKED = 24 /* tokens up to which packing W, of a type that is cheap to take apart, does not pay */
};
#define LINEAR_WIDE 1

#if defined(QR_HAVE_AVX512BF16)
#define LINEAR_DOT(sum, a, b) qr_dot_pairs(sum, _mm512_castps_si512(a), _mm512_castps_si512(b))
#else
#define LINEAR_DOT(sum, a, b) ((void)(a), (void)(b), (sum)) /* never taken: linear.dots is false */
#endif

/* The high (odd) elements of the sixteen pairs at p. */
LINEAR_INLINE __m512 high16(const void *p, qr_dtype dtype)
{
    if (dtype == QR_BF16)
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)));
    if (dtype == QR_F16)
        return _mm512_insertf32x8(_mm512_castps256_ps512(high8(p, QR_F16)), high8((const char *)p + 32, QR_F16), 1);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(_mm512_loadu_ps(p), odd, _mm512_loadu_ps((const float *)p + 16));
}

LINEAR_INLINE __m512 low16(const void *p, qr_dtype dtype)
{
    if (dtype == QR_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    if (dtype == QR_F16)
        return _mm512_insertf32x8(_mm512_castps256_ps512(low8(p, QR_F16)), low8((const char *)p + 32, QR_F16), 1);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(_mm512_loadu_ps(p), even, _mm512_loadu_ps((const float *)p + 16));
}

/* R rows x T tokens; R, T, dtype and dots are constants where this is used. */
LINEAR_INLINE void narrow_tile_of(float *sums, int64_t row_sums, const char *w, int64_t w_stride, const float *x,
                                  int64_t x_stride, int64_t steps, const int R, const int T, const qr_dtype dtype,
                                  const bool dots)
{
    const int64_t step_bytes = STEP * element_size(dtype);
    __m512 a[8][3];

#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int t = 0; t < T; t++)
            a[r][t] = _mm512_loadu_ps(sums + r * row_sums + t * 16);
    for (int64_t s = 0; s < steps; s++, w += step_bytes, x += dots ? 16 : STEP) {
        /* all high elements, then all low ones: the operands of one half at a time fit beside the accumulators */
#pragma GCC unroll 2
        for (int low = 0; low < 2; low++) {
            if (dots && low)
                continue;
            __asm__ volatile("" ::: "memory"); /* or gcc keeps all of W from the first half, at the cost of spills */
            __m512 v[3];
#pragma GCC unroll 3
            for (int t = 0; t < T; t++)
                v[t] = _mm512_loadu_ps(x + t * x_stride + low * 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const char *p = w + r * w_stride;
                const __m512 e = dots ? _mm512_loadu_ps(p) : low ? low16(p, dtype) : high16(p, dtype);
#pragma GCC unroll 3
                for (int t = 0; t < T; t++)
                    a[r][t] = dots ? LINEAR_DOT(a[r][t], e, v[t]) : _mm512_fmadd_ps(e, v[t], a[r][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int t = 0; t < T; t++)
            _mm512_storeu_ps(sums + r * row_sums + t * 16, a[r][t]);
}

LINEAR_INLINE void narrow_tokens(float *sums, int64_t row_sums, const char *w, int64_t w_stride, const float *x,
                                 int64_t x_stride, int64_t steps, int rows, const int T, const qr_dtype dtype,
                                 const bool dots)
{
    if (rows == 8) {
        narrow_tile_of(sums, row_sums, w, w_stride, x, x_stride, steps, 8, T, dtype, dots);
        return;
    }
    for (int r = 0; r < rows; r++)
        narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 1, T, dtype,
                       dots);
}

LINEAR_INLINE void narrow_tile_as(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride,
                                  int64_t steps, int rows, int tokens, const qr_dtype dtype, const bool dots)
{
    for (int t = 0; t < tokens; t += 3) {
        float *s = sums + t * 16;
        const float *from = x + t * x_stride;
        if (tokens - t >= 3)
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 3, dtype, dots);
        else if (tokens - t == 2)
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 2, dtype, dots);
        else
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 1, dtype, dots);
    }
}

/* Advance the class sums of rows x tokens by `steps`. sums[row][token][class]; w rows are w_stride bytes apart; packed x
 * has, per token and step, the 16 high elements and then the 16 low ones, or the 16 pairs for dots. */
static __attribute__((noinline)) void narrow_tile(float *sums, const char *w, int64_t w_stride, const float *x,
                                                  int64_t x_stride, int64_t steps, int rows, int tokens, qr_dtype dtype,
                                                  bool dots)
{
    if (dots)
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_BF16, true);
    else if (dtype == QR_BF16)
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_BF16, false);
    else if (dtype == QR_F16)
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F16, false);
    else
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F32, false);
}

/* The chain of class c for GROUP rows x V registers of tokens, then up the tree: after class c the tile has swallowed as
 * many finished levels as c + 1 has factors of two, and takes the place of the next. */
LINEAR_INLINE void wide_tile_of(float *part, const float *w, const float *x, int64_t depth, const int V, int c,
                                const bool dots)
{
    __m512 a[GROUP][3];
    const int merge = __builtin_ctz((unsigned)c + 1);

#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            a[r][v] = _mm512_setzero_ps();
    for (int64_t d = 0; d < depth; d++, w += GROUP, x += V * VECTOR) {
        __m512 token[3];
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            token[v] = _mm512_loadu_ps(x + v * VECTOR);
#pragma GCC unroll 8
        for (int r = 0; r < GROUP; r++) {
            const __m512 e = _mm512_set1_ps(w[r]); /* a pair where dots: a broadcast moves bits */
#pragma GCC unroll 3
            for (int v = 0; v < V; v++)
                a[r][v] = dots ? LINEAR_DOT(a[r][v], e, token[v]) : _mm512_fmadd_ps(e, token[v], a[r][v]);
        }
    }
    for (int level = 0; level < merge; level++, part += PART_LEVEL)
#pragma GCC unroll 8
        for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
            for (int v = 0; v < V; v++)
                a[r][v] = _mm512_add_ps(_mm512_loadu_ps(part + (r * V + v) * VECTOR), a[r][v]);
#pragma GCC unroll 8
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            _mm512_storeu_ps(part + (r * V + v) * VECTOR, a[r][v]);
}

LINEAR_INLINE void wide_tile_as(float *part, const float *w, const float *x, int64_t depth, int V, int c,
                                const bool dots)
{
    if (V == 3)
        wide_tile_of(part, w, x, depth, 3, c, dots);
    else if (V == 2)
        wide_tile_of(part, w, x, depth, 2, c, dots);
    else
        wide_tile_of(part, w, x, depth, 1, c, dots);
}

static void wide_tile(float *part, const float *w, const float *x, int64_t depth, int V, int c, bool dots)
{
    if (dots)
        wide_tile_as(part, w, x, depth, V, c, true);
    else
        wide_tile_as(part, w, x, depth, V, c, false);
}
