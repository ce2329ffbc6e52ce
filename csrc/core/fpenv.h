/* The floating-point environment ops run in: round to nearest even, subnormals kept, whatever the caller has set. */
#ifndef QR_FPENV_H
#define QR_FPENV_H

#if defined(__x86_64__)

#include <xmmintrin.h>

typedef unsigned qr_fpenv;

/* Other libraries set flush-to-zero for their whole thread; our bits may not depend on who called before. */
static inline qr_fpenv qr_fpenv_enter(void)
{
    const qr_fpenv before = _mm_getcsr();
    _mm_setcsr(0x1f80); /* the state a process starts with: all exceptions masked, nothing flushed */
    return before;
}

static inline void qr_fpenv_leave(qr_fpenv before)
{
    _mm_setcsr(before);
}

#else

#include <fenv.h>

typedef fenv_t qr_fpenv;

static inline qr_fpenv qr_fpenv_enter(void)
{
    qr_fpenv before;
    (void)fegetenv(&before);
    (void)fesetenv(FE_DFL_ENV);
    return before;
}

static inline void qr_fpenv_leave(qr_fpenv before)
{
    (void)fesetenv(&before);
}

#endif

#endif
