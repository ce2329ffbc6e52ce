/* Which instruction levels were built, and their tables of ops.  Holds no arithmetic. */
#include "../qr.h"

#define OP(name) +1
enum {
    OP_COUNT = 0
#include "ops.h"
};
#undef OP

extern const qr_op *const qr_ops_scalar[];
#if defined(__x86_64__)
extern const qr_op *const qr_ops_avx2[], *const qr_ops_avx512[], *const qr_ops_avx512bf16[];
#endif

int qr_op_count(void)
{
    return OP_COUNT;
}

const qr_op *const *qr_ops(qr_level level)
{
    switch (level) {
    case QR_SCALAR:
        return qr_ops_scalar;
#if defined(__x86_64__)
    case QR_AVX2:
        return qr_ops_avx2;
    case QR_AVX512:
        return qr_ops_avx512;
    case QR_AVX512BF16:
        return qr_ops_avx512bf16;
#endif
    default:
        return NULL;
    }
}

const char *qr_level_name(qr_level level)
{
    static const char *const names[QR_LEVELS] = {"scalar", "avx2", "avx512", "avx512bf16"};
    return level >= 0 && level < QR_LEVELS ? names[level] : "?";
}
