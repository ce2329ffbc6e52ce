/* Names and sizes of element types, and the exact widening of the 16-bit ones. */
#include "dtype.h"

#include <string.h>

const char *qr_dtype_name(qr_dtype dtype)
{
    static const char *const names[QR_DTYPES] = {"float32", "float64", "bfloat16", "float16", "int64"};
    return dtype < QR_DTYPES ? names[dtype] : "another dtype";
}

size_t qr_dtype_size(qr_dtype dtype)
{
    static const size_t sizes[QR_DTYPES] = {4, 8, 2, 2, 8};
    return dtype < QR_DTYPES ? sizes[dtype] : 0;
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A float16 subnormal is m * 2^-24: exact in float32, whose conversion from the integer does the normalising. */
static float widen_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 0) {
        const float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31)
        return from_bits(sign | 0x7f800000u | mantissa << 13);
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

void qr_widen(float *y, const void *x, qr_dtype dtype, int64_t n)
{
    const uint16_t *half = x;
    if (dtype == QR_F32) {
        memcpy(y, x, (size_t)n * sizeof *y);
    } else if (dtype == QR_BF16) {
        for (int64_t i = 0; i < n; i++)
            y[i] = from_bits((uint32_t)half[i] << 16);
    } else {
        for (int64_t i = 0; i < n; i++)
            y[i] = widen_f16(half[i]);
    }
}
