/* The environment of the float sums of linear.c: round to nearest even, subnormals are zero, no exception trapped.
 *
 * x86 and its bf16 dot instruction look at a result once it is rounded: it is a subnormal if it lies below 2^-126 even
 * with 24 bits. aarch64 looks before it rounds, so there the last 2^-151 below 2^-126 differ. It tells that something was
 * flushed, though, and what was summed meanwhile is then summed again by flushing_fma(), which has the bits of x86. */
#ifndef QR_FLUSHING_H
#define QR_FLUSHING_H

/* What the caller had, flags included; it comes back untouched. */
typedef uint64_t flushing_state;

#if defined(__x86_64__)

static flushing_state enter_flushing(void)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    return before;
}

static void leave_flushing(flushing_state before)
{
    _mm_setcsr((unsigned)before);
}

#elif defined(__aarch64__)

enum { FLUSH = 1 << 24, UNDERFLOW = 1 << 3 }; /* in the control and in the status register */
#define FLUSHES_EARLY 1

static flushing_state enter_flushing(void)
{
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status) : : "memory");
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"((uint64_t)FLUSH), "r"((uint64_t)0) : "memory");
    return control << 32 | (status & 0xffffffffu);
}

static void leave_flushing(flushing_state before)
{
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(before >> 32), "r"(before & 0xffffffffu) : "memory");
}

/* Whether a result was flushed since the last question. The sums are named so that their arithmetic is done by then. */
static bool something_was_flushed(const float *sums)
{
    uint64_t status;
    __asm__ volatile("mrs %0, fpsr" : "=r"(status) : "r"(sums) : "memory");
    if ((status & UNDERFLOW) == 0)
        return false;
    __asm__ volatile("msr fpsr, %0" : : "r"((uint64_t)0) : "memory");
    return true;
}

#else /* the bits of subnormals are those of the machine */

static flushing_state enter_flushing(void)
{
    return 0;
}

static void leave_flushing(flushing_state before)
{
    (void)before;
}

#endif

static inline float flushed(float a)
{
    return fabsf(a) < 0x1p-126f ? copysignf(0, a) : a;
}

/* a * b + c as x86 has it while flushing, in an environment that flushes early or not at all. */
static inline float flushing_fma(float a, float b, float c)
{
    a = flushed(a);
    b = flushed(b);
    c = flushed(c);
    const float sum = fmaf(a, b, c);
    /* From c = 2^-60 on, the sum is a multiple of 2^-108, so that a small one is an exact zero. */
    if (!(fabsf(sum) <= 0x1p-126f) || fabsf(c) >= 0x1p-60f)
        return sum;
    /* The same sum, 2^60 times as large: neither a factor below 2^-30 nor c overflows, and nothing is lost below. */
    const bool first = fabsf(a) < fabsf(b);
    const float scaled = fmaf(first ? a * 0x1p60f : a, first ? b : b * 0x1p60f, c * 0x1p60f);
    return fabsf(scaled) < 0x1p-66f ? copysignf(0, scaled) : scaled * 0x1p-60f;
}

#endif
