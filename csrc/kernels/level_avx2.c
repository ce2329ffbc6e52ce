/* Every kernel with AVX2 and FMA (x86-64-v3). */
#if defined(__x86_64__)
#define QR_LEVEL_NAME avx2
#define QR_HAVE_AVX2 1
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int qr_level_avx2_is_not_built_here;
#endif
