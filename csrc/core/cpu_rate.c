/* How fast the bf16 dot instruction is against the float one, by running both for some microseconds. */
#include "cpu.h"

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
#define ZERO(i) "vpxord %%zmm" i ", %%zmm" i ", %%zmm" i "\n\t"
#define FMA(i) "vfmadd231ps %%zmm15, %%zmm15, %%zmm" i "\n\t"
#define DOT(i) "vdpbf16ps %%zmm15, %%zmm15, %%zmm" i "\n\t"
#define DEFINE_TIMER(name, instruction)                                                                                \
    static double name(void)                                                                                           \
    {                                                                                                                  \
        const double start = seconds();                                                                                \
        int64_t steps = STEPS;                                                                                         \
        __asm__ volatile(CHAINS(ZERO) ZERO("15") "1:\n\t" CHAINS(instruction) "dec %0\n\tjnz 1b\n\tvzeroupper"         \
                         : "+r"(steps)                                                                                 \
                         :                                                                                             \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",       \
                           "xmm10", "xmm11", "xmm15");                                                                 \
        return seconds() - start;                                                                                      \
    }

DEFINE_TIMER(time_fma, FMA)
DEFINE_TIMER(time_dot, DOT)

double qr_cpu_bf16_rate(void)
{
    double fma = 1.0, dot = 1.0; /* seconds; the least of some trials is the one nobody disturbed */

    for (int trial = 0; trial < TRIALS; trial++) {
        const double a = time_fma(), b = time_dot();
        fma = a < fma ? a : fma;
        dot = b < dot ? b : dot;
    }
    return dot > 0.0 ? 2.0 * fma / dot : 0.0;
}
#else
double qr_cpu_bf16_rate(void)
{
    return 0.0;
}
#endif
