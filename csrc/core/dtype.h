/* Names and sizes of element types, and the exact widening of the 16-bit ones. */
#ifndef QR_DTYPE_H
#define QR_DTYPE_H

#include "../qr.h"

const char *qr_dtype_name(qr_dtype dtype);
size_t qr_dtype_size(qr_dtype dtype);

/* y[i] = x[i] as float32, exact for bfloat16 and float16; x must be QR_F32, QR_BF16 or QR_F16. */
void qr_widen(float *y, const void *x, qr_dtype dtype, int64_t n);

#endif
