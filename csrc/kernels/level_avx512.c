/* Every kernel with AVX-512 F, BW, DQ and VL (x86-64-v4). */
#if defined(__x86_64__)
#define QR_LEVEL_NAME avx512
#define QR_HAVE_AVX2 1
#define QR_HAVE_AVX512 1
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),              \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int qr_level_avx512_is_not_built_here;
#endif
