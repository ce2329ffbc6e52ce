/* What this machine offers: instruction levels it can run, the one to use, CPUs the process may use. */
#ifndef QR_CPU_H
#define QR_CPU_H

#include "../qr.h"

/* Built, and both CPU and operating system can run it. */
bool qr_cpu_runs(qr_level level);

/* The level to use: the one `forced` names (a value of QWENREF_CPU), or the fastest when it is NULL or empty.
 * A name that is none, or a level this machine lacks, is QR_NOT_CAPABLE. */
int qr_cpu_choose(const char *forced, qr_level *out, qr_error *error);

/* Multiply-adds per second of the bf16 dot instruction relative to the float one, measured now (some 20 us).
 * Call it only where qr_cpu_runs(QR_AVX512BF16). */
double qr_cpu_bf16_rate(void);

/* Keeps the float units of this thread busy with `steps` rounds of what a level has best: multiply-adds, or with `dot` the
 * bf16 dot instruction. Returns the floating point operations done, 0 where this machine or level lacks the instruction.
 * The portable level multiplies and adds in two steps, as its loops are compiled without a fused instruction. */
int64_t qr_cpu_arithmetic(qr_level level, bool dot, int64_t steps);

/* CPUs this process may use, at least 1: its affinity mask, cut by a quota of its control group. */
int qr_cpu_count(void);

/* The smallest CPU quota on the way from the control group named in `membership` (the form of /proc/self/cgroup) up to
 * the root mounted at `mount`, rounded up; 0 when there is none. */
int qr_cpu_quota(const char *membership, const char *mount);

#endif
