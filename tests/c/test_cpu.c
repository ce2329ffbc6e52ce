/* What the machine offers: levels are consistent, a wrong name says what is right, quotas cut the number of CPUs. */
#include "../../csrc/core/cpu.h"

#include "check.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

TEST(the_portable_level_always_runs)
{
    CHECK(qr_cpu_runs(QR_SCALAR));
}

TEST(each_level_implies_the_ones_below)
{
    for (qr_level level = QR_AVX2; level < QR_LEVELS; level++)
        CHECK(!qr_cpu_runs(level) || qr_cpu_runs(level - 1));
}

#if defined(__x86_64__)
TEST(the_compiler_agrees_about_the_machine)
{
    __builtin_cpu_init();
    CHECK_INT(qr_cpu_runs(QR_AVX2), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
    CHECK_INT(qr_cpu_runs(QR_AVX512), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
}
#endif

TEST(the_choice_runs_and_is_the_same_for_unset_and_empty)
{
    qr_level chosen = QR_LEVELS, again = QR_LEVELS;
    qr_error error = {0};
    CHECK_INT(qr_cpu_choose(NULL, &chosen, &error), 0);
    CHECK_INT(qr_cpu_choose("", &again, &error), 0);
    CHECK(qr_cpu_runs(chosen));
    CHECK_INT(chosen, again);
    CHECK(chosen != QR_SCALAR || !qr_cpu_runs(QR_AVX2));
}

TEST(a_level_can_be_forced_or_is_refused)
{
    for (qr_level level = QR_SCALAR; level < QR_LEVELS; level++) {
        qr_level chosen = QR_LEVELS;
        qr_error error = {0};
        const int status = qr_cpu_choose(qr_level_name(level), &chosen, &error);
        if (qr_cpu_runs(level)) {
            CHECK_INT(status, 0);
            CHECK_INT(chosen, level);
        } else {
            CHECK_INT(status, -1);
            CHECK_INT(error.kind, QR_NOT_CAPABLE);
            CHECK_HAS(error.text, qr_level_name(level));
            CHECK_HAS(error.text, "expected one of scalar");
            CHECK_INT(chosen, QR_LEVELS); /* untouched */
        }
    }
}

TEST(an_unknown_level_is_refused_with_the_known_ones)
{
    qr_level chosen = QR_LEVELS;
    qr_error error = {0};
    CHECK_INT(qr_cpu_choose("AVX2", &chosen, &error), -1);
    CHECK_INT(error.kind, QR_NOT_CAPABLE);
    CHECK_HAS(error.text, "'AVX2'");
    CHECK_HAS(error.text, "expected one of scalar");
    CHECK_INT(chosen, QR_LEVELS);
}

TEST(the_bf16_rate_is_a_rate)
{
    if (!qr_cpu_runs(QR_AVX512BF16))
        return; /* the instruction does not exist here */
    const double rate = qr_cpu_bf16_rate();
    CHECK(rate > 0.1 && rate < 8.0); /* known: 0.5 on one vendor's CPUs, 2 on the other's */
}

TEST(affinity_cuts_the_count)
{
    cpu_set_t before, one;
    CHECK_INT(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &before)) {
            CPU_SET(cpu, &one);
            break;
        }
    CHECK(qr_cpu_count() >= 1 && qr_cpu_count() <= CPU_COUNT(&before));
    CHECK_INT(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_INT(qr_cpu_count(), 1);
    CHECK_INT(sched_setaffinity(0, sizeof before, &before), 0);
}

/* A tree of control groups in a temporary folder. */
static char root[64];

static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    if (file != NULL) {
        fputs(text, file);
        fclose(file);
    }
}

static int quota_of(const char *membership)
{
    char path[128];
    write_file("membership", membership);
    snprintf(path, sizeof path, "%s/membership", root);
    return qr_cpu_quota(path, root);
}

TEST(the_smallest_quota_on_the_way_up_counts_rounded_up)
{
    static const char *const made[] = {"a/b/cpu.max", "a/cpu.max", "cpu.max", "membership", "a/b", "a"};
    char path[256];

    strcpy(root, "/tmp/qwenref-test-XXXXXX");
    CHECK(mkdtemp(root) != NULL);
    snprintf(path, sizeof path, "%s/a", root);
    CHECK_INT(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/a/b", root);
    CHECK_INT(mkdir(path, 0700), 0);

    CHECK_INT(quota_of("0::/a/b\n"), 0); /* no cpu.max anywhere */
    write_file("a/cpu.max", "250000 100000\n");
    CHECK_INT(quota_of("0::/a/b\n"), 3);
    write_file("a/b/cpu.max", "max 100000\n");
    CHECK_INT(quota_of("0::/a/b\n"), 3);
    write_file("a/b/cpu.max", "150000 100000\n");
    CHECK_INT(quota_of("0::/a/b\n"), 2);
    CHECK_INT(quota_of("12:cpu:/x\n0::/a\n"), 3);
    CHECK_INT(quota_of("0::/\n"), 0);
    write_file("cpu.max", "1000 100000\n");
    CHECK_INT(quota_of("0::/a/b\n"), 1);
    CHECK_INT(quota_of("0::/\n"), 1);
    write_file("cpu.max", "no number at all\n");
    CHECK_INT(quota_of("0::/\n"), 0);
    CHECK_INT(quota_of(""), 0);
    CHECK_INT(qr_cpu_quota("/nonexistent", root), 0);

    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        snprintf(path, sizeof path, "%s/%s", root, made[i]);
        CHECK_INT(remove(path), 0);
    }
    CHECK_INT(rmdir(root), 0);
}

TEST(arithmetic_is_counted_by_step_and_refused_where_there_is_none)
{
    for (qr_level level = QR_SCALAR; level < QR_LEVELS; level++) {
        const int64_t one = qr_cpu_arithmetic(level, false, 1);
        CHECK(qr_cpu_runs(level) == (one > 0));
        CHECK_INT(qr_cpu_arithmetic(level, false, 1000), 1000 * one);
        CHECK_INT(qr_cpu_arithmetic(level, false, 0), 0);
        CHECK_INT(qr_cpu_arithmetic(level, true, 1), level == QR_AVX512BF16 && qr_cpu_runs(level) ? 2 * one : 0);
    }
}

RUN_TESTS()
