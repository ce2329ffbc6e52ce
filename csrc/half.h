/* The 16-bit formats as float32: stored weights widened exactly, and float32 rounded to what such a format can hold.
 * Inline, so that kernels and core share them without sharing code objects. Includes qr.h only. */
#ifndef QR_HALF_H
#define QR_HALF_H

#include "qr.h"

#include <string.h>

static inline float qr_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float qr_bf16(uint16_t h)
{
    return qr_float((uint32_t)h << 16);
}

/* A NaN becomes quiet, as the conversion instruction makes it. */
static inline float qr_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u)
        return qr_float(sign | 0x7f800000u | rest << 13 | (rest > 0x7c00u ? 0x400000u : 0u));
    if (rest >= 0x400u)
        return qr_float(sign | ((rest << 13) + 0x38000000u));
    /* Subnormal: a whole multiple of 2^-24, which is a normal float32 and so is not flushed either. */
    const float magnitude = (float)rest * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
}

/* The nearest value of bf16, ties to the even one. Selections instead of branches, here and below, keep loops SIMD. */
static inline float qr_round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u), quiet = bits | 0x400000u;
    return qr_float((x == x ? rounded : quiet) & 0xffff0000u);
}

/* The nearest value of float16, ties to the even one; infinity from 65520 on. The rounding mode must be to nearest. */
static inline float qr_round_f16(float x)
{
    uint32_t bits, small;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t normal = (size + 0xfffu + (size >> 13 & 1u)) & 0xffffe000u;
    const float fixed = (qr_float(size) + 0.5f) - 0.5f; /* beside 0.5, float32 counts in 2^-24, as small float16 do */
    memcpy(&small, &fixed, sizeof small);
    const uint32_t is_small = 0u - (uint32_t)((int32_t)size < 0x38800000);    /* below 2^-14 */
    const uint32_t is_large = 0u - (uint32_t)((int32_t)normal >= 0x47800000); /* from 2^16 on */
    const uint32_t is_nan = 0u - (uint32_t)((int32_t)size > 0x7f800000);
    const uint32_t number = (small & is_small) | (normal & ~is_small & ~is_large) | (0x7f800000u & is_large);
    return qr_float(sign | (number & ~is_nan) | ((size | 0x400000u) & 0xffffe000u & is_nan));
}

/* y[i] = x[i] for n stored elements, aligned or not; x is QR_F32, QR_BF16 or QR_F16. */
static inline void qr_widen(float *restrict y, const void *restrict x, qr_dtype dtype, int64_t n)
{
    if (dtype == QR_F32) {
        memcpy(y, x, (size_t)n * sizeof *y);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t stored;
        memcpy(&stored, (const char *)x + 2 * i, sizeof stored);
        y[i] = dtype == QR_F16 ? qr_f16(stored) : qr_bf16(stored);
    }
}

#endif
