/* The loops of linear.c with NEON: a class is a lane, four classes are a register. */

/* Elements of four pairs as they lie in W: the high ones, and the low ones. */
LINEAR_INLINE float32x4_t high4(const char *pairs, const qr_dtype dtype)
{
    if (dtype == QR_F32)
        return vld2q_f32((const float *)(const void *)pairs).val[1];
    const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)pairs));
    if (dtype == QR_BF16)
        return vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
    return vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(words, 16)));
}

LINEAR_INLINE float32x4_t low4(const char *pairs, const qr_dtype dtype)
{
    if (dtype == QR_F32)
        return vld2q_f32((const float *)(const void *)pairs).val[0];
    const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)pairs));
    if (dtype == QR_BF16)
        return vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(words)));
}

/* R rows x T tokens x 16 classes; R, T and dtype are constants where this is used. Sixteen accumulators hide the latency
 * of the multiply-add and leave as many registers for operands. */
LINEAR_INLINE void narrow_tile_of(float *sums, int64_t row_sums, const char *w, int64_t w_stride, const float *x,
                                  int64_t x_stride, int64_t steps, const int R, const int T, const qr_dtype dtype)
{
    const int64_t four_bytes = 8 * element_size(dtype), step_bytes = 4 * four_bytes;
    float32x4_t a[4][2][4];

    QR_UNROLL
    for (int r = 0; r < R; r++)
        QR_UNROLL
    for (int t = 0; t < T; t++)
        QR_UNROLL
    for (int q = 0; q < 4; q++)
        a[r][t][q] = vld1q_f32(sums + r * row_sums + t * 16 + q * 4);
    for (int64_t s = 0; s < steps; s++, w += step_bytes, x += STEP) {
        QR_UNROLL
        for (int low = 0; low < 2; low++)
            QR_UNROLL
        for (int q = 0; q < 4; q++) {
            float32x4_t v[2];
            QR_UNROLL
            for (int t = 0; t < T; t++)
                v[t] = vld1q_f32(x + t * x_stride + low * 16 + q * 4);
            QR_UNROLL
            for (int r = 0; r < R; r++) {
                const char *pairs = w + r * w_stride + q * four_bytes;
                const float32x4_t e = low ? low4(pairs, dtype) : high4(pairs, dtype);
                QR_UNROLL
                for (int t = 0; t < T; t++)
                    a[r][t][q] = vfmaq_f32(a[r][t][q], e, v[t]);
            }
        }
    }
    QR_UNROLL
    for (int r = 0; r < R; r++)
        QR_UNROLL
    for (int t = 0; t < T; t++)
        QR_UNROLL
    for (int q = 0; q < 4; q++)
        vst1q_f32(sums + r * row_sums + t * 16 + q * 4, a[r][t][q]);
}

LINEAR_INLINE void narrow_tile_as(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride,
                                  int64_t steps, int rows, int tokens, const qr_dtype dtype)
{
    const int64_t row_sums = tokens * 16;
    int t = 0;

    for (; t + 2 <= tokens; t += 2, sums += 2 * 16, x += 2 * x_stride) {
        int r = 0;
        for (; r + 2 <= rows; r += 2)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 2, 2, dtype);
        if (r < rows)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 1, 2, dtype);
    }
    if (t < tokens) {
        int r = 0;
        for (; r + 4 <= rows; r += 4)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 4, 1, dtype);
        for (; r < rows; r++)
            narrow_tile_of(sums + r * row_sums, row_sums, w + r * w_stride, w_stride, x, x_stride, steps, 1, 1, dtype);
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

/* The same with sums that are exact about what counts as zero, for the few places where something was flushed. */
static void careful_tile(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride, int64_t steps,
                         int rows, int tokens, qr_dtype dtype, bool dots)
{
    (void)dots;
    for (int r = 0; r < rows; r++)
        for (int64_t s = 0; s < steps; s++) {
            float v[STEP];
            qr_widen(v, w + r * w_stride + s * STEP * element_size(dtype), dtype, STEP);
            for (int t = 0; t < tokens; t++) {
                const float *high = x + t * x_stride + s * STEP, *low = high + 16;
                float *sum = sums + (r * tokens + t) * 16;
                for (int c = 0; c < 16; c++)
                    sum[c] = flushing_fma(v[2 * c], low[c], flushing_fma(v[2 * c + 1], high[c], sum[c]));
            }
        }
}
