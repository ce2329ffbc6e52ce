/* The loops of linear.c in portable C. */

/* Advance the class sums of rows x tokens by `steps`. sums[row][token][class]; w rows are w_stride bytes apart; packed x
 * has, per token and step, the 16 high elements and then the 16 low ones. */
static void narrow_tile(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride, int64_t steps,
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
                    sum[c] = fmaf(v[2 * c], low[c], fmaf(v[2 * c + 1], high[c], sum[c]));
            }
        }
}
