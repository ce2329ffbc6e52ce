/* Where the AVX2 and AVX-512 intrinsics come from: the compiler, or with QR_SIMDE their emulation, which lets a machine
 * without AVX-512 run those loops in a test and compare their bits. */
#ifndef QR_SIMD_H
#define QR_SIMD_H

#if defined(QR_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>
#include <simde/x86/f16c.h>
#undef I /* the imaginary unit, which comes along */

/* The instruction is two fused multiply-adds per lane, the high element first; the emulation of the library is not. */
static inline __m512 qr_dot_pairs(__m512 sum, __m512i a, __m512i b)
{
    float s[16];
    uint32_t x[16], y[16];
    _mm512_storeu_ps(s, sum);
    _mm512_storeu_si512(x, a);
    _mm512_storeu_si512(y, b);
    for (int i = 0; i < 16; i++) {
        const uint32_t part[4] = {x[i] & 0xffff0000u, y[i] & 0xffff0000u, x[i] << 16, y[i] << 16};
        float f[4];
        memcpy(f, part, sizeof f);
        s[i] = fmaf(f[2], f[3], fmaf(f[0], f[1], s[i]));
    }
    return _mm512_loadu_ps(s);
}

/* The library lacks this one. */
static inline __m512d qr_eight_doubles(__m256 a)
{
    float f[8];
    double d[8];
    _mm256_storeu_ps(f, a);
    for (int i = 0; i < 8; i++)
        d[i] = (double)f[i];
    return _mm512_loadu_pd(d);
}
#elif defined(__x86_64__)
#include <immintrin.h>
#define qr_eight_doubles(a) _mm512_cvtps_pd(a)
#if defined(QR_HAVE_AVX512BF16)
#define qr_dot_pairs(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#endif
#endif

#endif
