/* How fast the arithmetic units are: chains of one instruction, kept in registers, for as long as the caller wants. */
#include "cpu.h"

enum { CHAIN_COUNT = 12, PORTABLE_LANES = 64 };

#if defined(__x86_64__)
#include <time.h>

enum { STEPS = 400, TRIALS = 5 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Twelve chains hide a latency of six cycles at two instructions a cycle. Written in assembly because from intrinsics one
 * compiler keeps the chains in memory and another replaces a multiply-add of constants by an addition. */
#define CHAINS(one)                                                                                                    \
    one("0") one("1") one("2") one("3") one("4") one("5") one("6") one("7") one("8") one("9") one("10") one("11")
#define ZERO_Y(i) "vxorps %%ymm" i ", %%ymm" i ", %%ymm" i "\n\t"
#define ZERO_Z(i) "vpxord %%zmm" i ", %%zmm" i ", %%zmm" i "\n\t"
#define FMA_Y(i) "vfmadd231ps %%ymm15, %%ymm15, %%ymm" i "\n\t"
#define FMA_Z(i) "vfmadd231ps %%zmm15, %%zmm15, %%zmm" i "\n\t"
#define DOT_Z(i) "vdpbf16ps %%zmm15, %%zmm15, %%zmm" i "\n\t"
#define DEFINE_LOOP(name, zero, instruction)                                                                           \
    static void name(int64_t steps)                                                                                    \
    {                                                                                                                  \
        __asm__ volatile(CHAINS(zero) zero("15") "1:\n\t" CHAINS(instruction) "dec %0\n\tjnz 1b\n\tvzeroupper"         \
                         : "+r"(steps)                                                                                 \
                         :                                                                                             \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",       \
                           "xmm10", "xmm11", "xmm15");                                                                 \
    }

DEFINE_LOOP(fma_y, ZERO_Y, FMA_Y)
DEFINE_LOOP(fma_z, ZERO_Z, FMA_Z)
DEFINE_LOOP(dot_z, ZERO_Z, DOT_Z)

double qr_cpu_bf16_rate(void)
{
    double fma = 1.0, dot = 1.0; /* seconds; the least of some trials is the one nobody disturbed */

    for (int trial = 0; trial < TRIALS; trial++) {
        const double start = seconds();
        fma_z(STEPS);
        const double middle = seconds();
        dot_z(STEPS);
        const double end = seconds();
        fma = middle - start < fma ? middle - start : fma;
        dot = end - middle < dot ? end - middle : dot;
    }
    return dot > 0.0 ? 2.0 * fma / dot : 0.0;
}
#else
double qr_cpu_bf16_rate(void)
{
    return 0.0;
}
#endif

/* A multiplication and an addition per lane, for the compiler to put into whatever vectors every CPU has. */
static void portable(int64_t steps)
{
    float sum[PORTABLE_LANES];
    volatile float result = 0.5f; /* read and written, so that the sums have to be made */
    const float factor = result;

    for (int i = 0; i < PORTABLE_LANES; i++)
        sum[i] = 0.0f;
    for (int64_t step = 0; step < steps; step++)
        for (int i = 0; i < PORTABLE_LANES; i++)
            sum[i] = sum[i] * factor + factor;
    for (int i = 0; i < PORTABLE_LANES; i++)
        result = result + sum[i];
}

int64_t qr_cpu_arithmetic(qr_level level, bool dot, int64_t steps)
{
    if (steps < 1 || (dot && level != QR_AVX512BF16) || !qr_cpu_runs(level))
        return 0;
#if defined(__x86_64__)
    if (level != QR_SCALAR) {
        const int64_t lanes = level == QR_AVX2 ? 8 : 16;
        (dot ? dot_z : level == QR_AVX2 ? fma_y : fma_z)(steps);
        return steps * CHAIN_COUNT * lanes * (dot ? 4 : 2);
    }
#endif
    portable(steps);
    return steps * PORTABLE_LANES * 2;
}
