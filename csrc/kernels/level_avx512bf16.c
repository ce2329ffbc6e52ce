/* Every kernel with AVX-512 and its bf16 dot product (used where activations are exact in bf16). */
#if defined(__x86_64__)
#define QR_LEVEL_NAME avx512bf16
#define QR_HAVE_AVX2 1
#define QR_HAVE_AVX512 1
#define QR_HAVE_AVX512BF16 1
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))),   \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int qr_level_avx512bf16_is_not_built_here;
#endif
