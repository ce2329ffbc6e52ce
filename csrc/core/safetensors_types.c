/* Element types of safetensors files and the bytes a tensor of them takes. */
#include "safetensors.h"

static const struct {
    const char *name;
    int bits;
} types[] = {
#define X(name, bits) {#name, bits},
    QR_FILE_TYPES(X)
#undef X
};

const char *qr_file_dtype_name(qr_file_dtype dtype)
{
    return types[dtype].name;
}

int qr_file_dtype_bits(qr_file_dtype dtype)
{
    return types[dtype].bits;
}

int64_t qr_tensor_bytes(qr_file_dtype dtype, int ndim, const int64_t *shape)
{
    int64_t bits = types[dtype].bits;
    bool empty = false;

    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return -1;
        empty = empty || shape[i] == 0;
    }
    if (empty) /* whatever the other sizes are */
        return 0;
    for (int i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(bits, shape[i], &bits) || bits > (int64_t)8 << 53)
            return -1;
    return bits % 8 == 0 ? bits / 8 : -1;
}

const char *qr_shape_text(int ndim, const int64_t *shape, char *buffer, size_t size)
{
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, i > 0 ? ", %lld" : "%lld", (long long)shape[i]);
    if (used < size)
        (void)snprintf(buffer + used, size - used, "]");
    return buffer;
}
