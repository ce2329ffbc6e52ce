/* The linear kernels of one instruction level, chosen by TEST_LEVEL: scalar, avx2, avx512 or avx512bf16.  With QR_SIMDE
 * the AVX-512 levels are emulated, so that any machine with AVX2 can compare their bits. */
#include "../../csrc/kernels/kernel.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define IS_scalar 0
#define IS_avx2 1
#define IS_avx512 2
#define IS_avx512bf16 3
#define IS_LEVEL PASTE(IS_, TEST_LEVEL)

#if IS_LEVEL >= 1
#define QR_HAVE_AVX2 1
#endif
#if IS_LEVEL >= 2
#define QR_HAVE_AVX512 1
#endif
#if IS_LEVEL >= 3
#define QR_HAVE_AVX512BF16 1
#endif

#include "../../csrc/kernels/linear.c"
#include "../../csrc/kernels/linear_blas.c"

#if defined(QR_SIMDE)
#define TABLE PASTE(PASTE(linear_ops_, TEST_LEVEL), _emulated)
#else
#define TABLE PASTE(linear_ops_, TEST_LEVEL)
#endif
extern const qr_op *const TABLE[3];
const qr_op *const TABLE[3] = {&qr_op_linear, &qr_op_linear_blas, &qr_op_embedding};
