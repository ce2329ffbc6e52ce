/* The loops of linear.c with AVX2 and FMA: a class is a lane, eight classes are a register. */

enum {
    VECTOR = 8, /* tokens per register in the wide loop */
    GROUP = 4,  /* rows of W per tile */
    PANEL = 24, /* tokens per tile: 4 x 3 accumulators, 3 operands and a broadcast fill the 16 registers */
    PART_LEVEL = BLOCK_ROWS * BLOCK_TOKENS,
    BF16_UNPACKED = 16 /* tokens up to which packing W, of a type that is cheap to take apart, does not pay */
};
#define LINEAR_WIDE 1

/* Keeps gcc from loading an operand anew at each use: two loads a cycle are just enough without that. */
#define IN_REGISTER(v) __asm__("" : "+x"(v))

/* R rows x T tokens x `halves` times eight classes; R, T, halves and dtype are constants where this is used. At least 8
 * accumulators hide the latency of the multiply-add, at most 12 leave room for operands. */
LINEAR_INLINE void narrow_tile_of(float *sums, int64_t row_sums, const char *w, int64_t w_stride, const float *x,
                                  int64_t x_stride, int64_t steps, const int R, const int T, const int halves,
                                  const qr_dtype dtype)
{
    const int64_t step_bytes = STEP * element_size(dtype), half_bytes = step_bytes / 2;
    __m256 a[4][4][2];

#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++)
                a[r][t][h] = _mm256_loadu_ps(sums + r * row_sums + t * 16 + h * 8);
    for (int64_t s = 0; s < steps; s++, w += step_bytes, x += STEP) {
        if (T > 2) /* few rows are read at a time: the hardware loses sight of their streams between two turns */
            for (int r = 0; r < R; r++)
                for (int64_t line = 0; line < step_bytes; line += 64)
                    _mm_prefetch(w + r * w_stride + NARROW_STEPS * step_bytes + line, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int low = 0; low < 2; low++)
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                __m256 v[4];
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) {
                    v[t] = _mm256_loadu_ps(x + t * x_stride + low * 16 + h * 8);
                    IN_REGISTER(v[t]);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const char *p = w + r * w_stride + h * half_bytes;
                    const __m256 e = low ? low8(p, dtype) : high8(p, dtype);
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++)
                        a[r][t][h] = _mm256_fmadd_ps(e, v[t], a[r][t][h]);
                }
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++)
                _mm256_storeu_ps(sums + r * row_sums + t * 16 + h * 8, a[r][t][h]);
}

/* All rows for one group of T tokens; the tokens' x stays in L1 while the rows take turns. */
LINEAR_INLINE void narrow_tokens(float *sums, int64_t row_sums, const char *w, int64_t w_stride, const float *x,
                                 int64_t x_stride, int64_t steps, int rows, const int T, const qr_dtype dtype)
{
    const int R = T <= 2 ? 4 : T == 3 ? 3 : 2, halves = T == 1 ? 2 : 1;
    const int64_t half_bytes = STEP / 2 * element_size(dtype);

    for (int h = 0; h < 2; h += halves, sums += 8, x += 8, w += half_bytes) {
        int r = 0;
        for (; r + R <= rows; r += R)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, R, T, halves,
                           dtype);
        for (; r < rows; r++)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 1, T, halves,
                           dtype);
    }
}

LINEAR_INLINE void narrow_tile_as(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride,
                                  int64_t steps, int rows, int tokens, const qr_dtype dtype)
{
    for (int t = 0; t < tokens;) {
        const int left = tokens - t, T = left == 5 ? 3 : left < 4 ? left : 4; /* 5 as 3 + 2: one token alone is slow */
        float *s = sums + t * 16;
        const float *from = x + t * x_stride;
        if (T == 4)
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 4, dtype);
        else if (T == 3)
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 3, dtype);
        else if (T == 2)
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 2, dtype);
        else
            narrow_tokens(s, tokens * 16, w, w_stride, from, x_stride, steps, rows, 1, dtype);
        t += T;
    }
}

/* Advance the class sums of rows x tokens by `steps`. sums[row][token][class]; w rows are w_stride bytes apart; packed x
 * has, per token and step, the 16 high elements and then the 16 low ones. */
static __attribute__((noinline)) void narrow_tile(float *sums, const char *w, int64_t w_stride, const float *x,
                                                  int64_t x_stride, int64_t steps, int rows, int tokens, qr_dtype dtype,
                                                  bool dots)
{
    (void)dots;
    if (dtype == QR_BF16)
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_BF16);
    else if (dtype == QR_F16)
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F16);
    else
        narrow_tile_as(sums, w, w_stride, x, x_stride, steps, rows, tokens, QR_F32);
}

/* The chain of class c for GROUP rows x V registers of tokens, then up the tree: after class c the tile has swallowed as
 * many finished levels as c + 1 has factors of two, and takes the place of the next. */
LINEAR_INLINE void wide_tile_of(float *part, const float *w, const float *x, int64_t depth, const int V, int c)
{
    __m256 a[GROUP][3];
    const int merge = __builtin_ctz((unsigned)c + 1);

#pragma GCC unroll 4
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            a[r][v] = _mm256_setzero_ps();
    for (int64_t d = 0; d < depth; d++, w += GROUP, x += V * VECTOR) {
        __m256 token[3];
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            token[v] = _mm256_loadu_ps(x + v * VECTOR);
#pragma GCC unroll 4
        for (int r = 0; r < GROUP; r++) {
            const __m256 e = _mm256_broadcast_ss(w + r);
#pragma GCC unroll 3
            for (int v = 0; v < V; v++)
                a[r][v] = _mm256_fmadd_ps(e, token[v], a[r][v]);
        }
    }
    for (int level = 0; level < merge; level++, part += PART_LEVEL)
#pragma GCC unroll 4
        for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
            for (int v = 0; v < V; v++)
                a[r][v] = _mm256_add_ps(_mm256_loadu_ps(part + (r * V + v) * VECTOR), a[r][v]);
#pragma GCC unroll 4
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            _mm256_storeu_ps(part + (r * V + v) * VECTOR, a[r][v]);
}

static void wide_tile(float *part, const float *w, const float *x, int64_t depth, int V, int c, bool dots)
{
    (void)dots;
    if (V == 3)
        wide_tile_of(part, w, x, depth, 3, c);
    else if (V == 2)
        wide_tile_of(part, w, x, depth, 2, c);
    else
        wide_tile_of(part, w, x, depth, 1, c);
}
