/* The linear kernels of one AVX-512 level, emulated, so that any machine with AVX2 can compare their bits.
 * TEST_LEVEL is avx512 or avx512bf16. */
#include "../../csrc/kernels/kernel.h"

#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)
#define DOTS_avx512 0
#define DOTS_avx512bf16 1

#define QR_HAVE_AVX2 1
#define QR_HAVE_AVX512 1
#if PASTE(DOTS_, TEST_LEVEL, )
#define QR_HAVE_AVX512BF16 1
#endif

#include "../../csrc/kernels/simd.h"

#include "../../csrc/kernels/lanes.h"

#include "../../csrc/kernels/linear.c"

#include "../../csrc/kernels/linear_blas.c"
#include "../../csrc/kernels/linear_f64.c"
#include "../../csrc/kernels/linear_parts.c"

#define TABLE PASTE(linear_ops_, TEST_LEVEL, _emulated)
extern const qr_op *const TABLE[5];
const qr_op *const TABLE[5] = {&qr_op_linear, &qr_op_linear_blas, &qr_op_embedding, &qr_op_linear_f64,
                               &qr_op_linear_parts}; /* as in linear_problem.h */
