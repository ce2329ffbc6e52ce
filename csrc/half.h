/* The formats of stored weights as float32, exactly: inline, so that kernels and core share them without sharing code
 * objects. Includes qr.h only. */
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
