/* Names and sizes of element types. */
#ifndef QR_DTYPE_H
#define QR_DTYPE_H

#include "../qr.h"

const char *qr_dtype_name(qr_dtype dtype);
size_t qr_dtype_size(qr_dtype dtype);

#endif
