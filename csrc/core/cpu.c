/* Which instruction level to run and how many CPUs there are.  Every level gives the same bits, so this is about speed. */
#include "cpu.h"

#include "pool.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* Register state the operating system saves for every thread; without it the instructions exist but trap. */
static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool machine_has(qr_level level)
{
    enum { YMM = 0x6, ZMM = 0xe6 };
    const unsigned fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;    /* leaf 1 ecx */
    const unsigned avx2 = 1u << 5, f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* leaf 7 ebx */
    const unsigned bf16 = 1u << 5;                                                         /* leaf 7.1 eax */
    const unsigned leaf1 = fma | osxsave | avx | f16c;
    unsigned a, b, c, d, leaves;

    if (level == QR_SCALAR)
        return true;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf1) != leaf1 || (saved_state() & YMM) != YMM ||
        !__get_cpuid_count(7, 0, &leaves, &b, &c, &d) || !(b & avx2))
        return false;
    if (level == QR_AVX2)
        return true;
    if ((b & f_dq_bw_vl) != f_dq_bw_vl || (saved_state() & ZMM) != ZMM)
        return false;
    return level == QR_AVX512 || (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bf16));
}
#else
static bool machine_has(qr_level level)
{
    return level == QR_SCALAR;
}
#endif

bool qr_cpu_runs(qr_level level)
{
    return qr_ops(level) != NULL && machine_has(level);
}

static qr_level fastest_level(void)
{
    /* The dot instruction does two multiply-adds, but some CPUs issue it so rarely that widening to float wins by two;
     * on others it doubles the rate. The two kinds are a factor of four apart, so a short measurement tells them. */
    if (qr_cpu_runs(QR_AVX512BF16) && qr_cpu_bf16_rate() > 1.0)
        return QR_AVX512BF16;
    return qr_cpu_runs(QR_AVX512) ? QR_AVX512 : qr_cpu_runs(QR_AVX2) ? QR_AVX2 : QR_SCALAR;
}

/* "scalar, avx2" */
static const char *available(char *buffer, size_t size)
{
    size_t used = 0;

    buffer[0] = '\0';
    for (qr_level level = QR_SCALAR; level < QR_LEVELS && used < size; level++)
        if (qr_cpu_runs(level))
            used += (size_t)snprintf(buffer + used, size - used, "%s%s", used > 0 ? ", " : "", qr_level_name(level));
    return buffer;
}

int qr_cpu_choose(const char *forced, qr_level *out, qr_error *error)
{
    char names[64];

    if (forced == NULL || *forced == '\0') {
        *out = fastest_level();
        return 0;
    }
    for (qr_level level = QR_SCALAR; level < QR_LEVELS; level++) {
        if (strcmp(forced, qr_level_name(level)) != 0)
            continue;
        if (!qr_cpu_runs(level))
            return qr_fail(error, QR_NOT_CAPABLE,
                           "QWENREF_CPU=%s: this machine cannot run that instruction level\n"
                           "    expected one of %s\n"
                           "    do       unset QWENREF_CPU to have the fastest one chosen",
                           forced, available(names, sizeof names));
        *out = level;
        return 0;
    }
    return qr_fail(error, QR_NOT_CAPABLE,
                   "QWENREF_CPU: no instruction level is called '%.40s'\n"
                   "    expected one of %s\n"
                   "    do       unset QWENREF_CPU to have the fastest one chosen",
                   forced, available(names, sizeof names));
}

/* CPUs granted by one control group: quota / period, rounded up; 0 when it sets no limit. */
static int group_quota(const char *mount, const char *group, int group_length)
{
    char path[1024], text[64] = "";
    long long quota = 0, period = 0;
    FILE *file;

    snprintf(path, sizeof path, "%s%.*s/cpu.max", mount, group_length, group);
    file = fopen(path, "re");
    if (file == NULL)
        return 0;
    if (fgets(text, sizeof text, file) == NULL)
        text[0] = '\0';
    fclose(file);
    /* "max 100000" is no limit and no number, so sscanf leaves both zero. */
    if (sscanf(text, "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0)
        return 0;
    const long long cpus = (quota - 1) / period + 1;
    return cpus > QR_MAX_THREADS ? QR_MAX_THREADS : (int)cpus;
}

int qr_cpu_quota(const char *membership, const char *mount)
{
    char line[1024];
    int least = 0;
    FILE *file = fopen(membership, "re");

    if (file == NULL)
        return 0;
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "0::/", 4) != 0) /* the one line of the unified hierarchy */
            continue;
        const char *group = line + 3;
        int length = (int)strcspn(group, "\n");
        for (;;) {
            while (length > 0 && group[length - 1] == '/')
                length--;
            const int quota = group_quota(mount, group, length);
            if (quota > 0 && (least == 0 || quota < least))
                least = quota;
            if (length == 0)
                break;
            while (length > 0 && group[length - 1] != '/')
                length--;
        }
        break;
    }
    fclose(file);
    return least;
}

#if defined(__linux__)
/* CPUs in the affinity mask of this thread; the mask may be longer than the kernel's default type. */
static int allowed_cpus(void)
{
    for (size_t room = 1024; room <= 1 << 16; room *= 4) {
        cpu_set_t *set = CPU_ALLOC(room);
        const size_t size = CPU_ALLOC_SIZE(room);
        int count = 0;

        if (set == NULL)
            return 0;
        if (sched_getaffinity(0, size, set) == 0)
            count = CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (count > 0)
            return count;
    }
    return 0;
}
#else
static int allowed_cpus(void)
{
    return 0;
}
#endif

int qr_cpu_count(void)
{
    const int quota = qr_cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    long count = allowed_cpus();

    if (count <= 0)
        count = sysconf(_SC_NPROCESSORS_ONLN);
    if (quota > 0 && quota < count)
        count = quota;
    return count < 1 ? 1 : count > QR_MAX_THREADS ? QR_MAX_THREADS : (int)count;
}
