/* Names and sizes of element types. */
#include "dtype.h"

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
