/* The test runner of the C tests: TEST(name_of_the_fact) { CHECK(...); }, then RUN_TESTS() once at the end of the file.
 * A failed check reports its line and the test goes on, so one run shows all that is wrong. */
#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
} check_test;

static check_test *check_first, **check_last = &check_first;
static int check_faults; /* of the test that runs now; checks belong to the main thread */

/* Where the tests draw their numbers: every test from the same ones, whatever the tests before it drew. */
static uint64_t random_state = 1;

#define TEST(fact)                                                                                                     \
    static void test_##fact(void);                                                                                     \
    __attribute__((constructor)) static void enlist_##fact(void)                                                       \
    {                                                                                                                  \
        static check_test self = {#fact, test_##fact, NULL};                                                           \
        *check_last = &self;                                                                                           \
        check_last = &self.next;                                                                                       \
    }                                                                                                                  \
    static void test_##fact(void)

#define CHECK_SAY(ok, ...)                                                                                             \
    do {                                                                                                               \
        if (!(ok)) {                                                                                                   \
            check_faults++;                                                                                            \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
        }                                                                                                              \
    } while (0)

#define CHECK(condition) CHECK_SAY(condition, "not so: %s", #condition)
#define CHECK_INT(got, want)                                                                                           \
    CHECK_SAY((long long)(got) == (long long)(want), "%s is %lld, expected %lld", #got, (long long)(got),              \
              (long long)(want))
#define CHECK_NEAR(got, want, tolerance)                                                                               \
    CHECK_SAY(fabs((double)(got) - (double)(want)) <= (double)(tolerance), "%s is %.9g, expected %.9g within %.3g",    \
              #got, (double)(got), (double)(want), (double)(tolerance))
#define CHECK_TEXT(got, want) CHECK_SAY(strcmp(got, want) == 0, "%s is\n  %s\nexpected\n  %s", #got, got, want)
#define CHECK_HAS(text, part) CHECK_SAY(strstr(text, part) != NULL, "'%s' is not in\n  %s", part, text)

#define RUN_TESTS()                                                                                                    \
    int main(void)                                                                                                     \
    {                                                                                                                  \
        int passed = 0, failed = 0;                                                                                    \
        for (const check_test *test = check_first; test != NULL; test = test->next) {                                  \
            check_faults = 0;                                                                                          \
            random_state = 1;                                                                                          \
            test->run();                                                                                               \
            if (check_faults > 0)                                                                                      \
                fprintf(stderr, "failed: %s\n", test->name);                                                           \
            *(check_faults > 0 ? &failed : &passed) += 1;                                                              \
        }                                                                                                              \
        printf("%s: %d passed, %d failed\n", __FILE__, passed, failed);                                                \
        return failed > 0 || passed == 0;                                                                              \
    }

#endif
