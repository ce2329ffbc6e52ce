/* linear, linear_blas and embedding: the stated order of summation, on every level, blocking and number of threads. */
#include "linear_problem.h"

#include <float.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* The order as linear.c states it, written once more without its loops. */
static float stated_order(const problem *p, int64_t m, int64_t o, bool bias)
{
    float sum[16] = {0};
    for (int64_t pair = 0; pair < (p->I + 31) / 32 * 16; pair++)
        for (int64_t k = 2 * pair + 1; k >= 2 * pair; k--) {
            const float x = k < p->I ? p->x[m * p->I + k] : 0,
                        w = k < p->I ? stored_value(p->w, o * p->I + k, p->dtype) : 0;
            sum[pair % 16] = fmaf(x, w, sum[pair % 16]);
        }
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            sum[i] = sum[2 * i] + sum[2 * i + 1];
    return bias ? sum[0] + p->bias[o] : sum[0];
}

/* Outputs of every level and several numbers of threads against the scalar level on one thread. */
static void check_levels(const problem *p, bool bias)
{
    const size_t size = (size_t)(p->M * p->O) * sizeof(float);
    float *want = fresh(p->M * p->O), *got = fresh(p->M * p->O);

    run(levels[0].ops[LINEAR], p, 0, p->M, bias, 1, want);
    for (int i = 0; i < level_count; i++)
        for (int threads = 1; threads <= 3; threads++) {
            memset(got, 0x7f, size);
            run(levels[i].ops[LINEAR], p, 0, p->M, bias, threads, got);
            CHECK_SAY(memcmp(got, want, size) == 0, "%s, %d threads, M=%lld O=%lld I=%lld %s: other bits than scalar",
                      levels[i].name, threads, (long long)p->M, (long long)p->O, (long long)p->I,
                      DTYPE_NAMES[p->dtype]);
        }
    free(want);
    free(got);
}

/* ---- linear -------------------------------------------------------------------------------------------------------- */

TEST(the_order_is_the_stated_one)
{
    const int64_t widths[] = {1, 2, 3, 31, 32, 33, 63, 65, 200};
    for (size_t k = 0; k < sizeof widths / sizeof *widths; k++)
        for (size_t d = 0; d < 3; d++) {
            problem p = make_problem(19, 11, widths[k], DTYPES[d], false, false);
            float *y = fresh(p.M * p.O);
            for (int i = 0; i < level_count; i++) {
                int faults = 0;
                run(levels[i].ops[LINEAR], &p, 0, p.M, true, 1, y);
                for (int64_t m = 0; m < p.M; m++)
                    for (int64_t o = 0; o < p.O; o++)
                        faults += to_bits(y[m * p.O + o]) != to_bits(stated_order(&p, m, o, true));
                CHECK_SAY(faults == 0, "%s I=%lld %s: %d outputs in another order", levels[i].name, (long long)p.I,
                          DTYPE_NAMES[p.dtype], faults);
            }
            free(y);
            free_problem(&p);
        }
}

/* A class rounds twice per step of 32, the tree four times, the bias once, so with n = 2 ceil(I/32) + 5 roundings of
 * relative size u = 2^-24 the error stays below n u / (1 - n u) times the sum of magnitudes. */
TEST(close_to_a_sum_in_double)
{
    for (size_t d = 0; d < 3; d++) {
        problem p = make_problem(20, 9, 4099, DTYPES[d], false, false);
        float *y = fresh(p.M * p.O);
        const double n = 2 * ((double)(p.I + 31) / 32) + 5, bound = n * 0x1p-24 / (1 - n * 0x1p-24);
        for (int i = 0; i < level_count; i++) {
            run(levels[i].ops[LINEAR], &p, 0, p.M, true, 2, y);
            for (int64_t m = 0; m < p.M; m++)
                for (int64_t o = 0; o < p.O; o++) {
                    double sum = (double)p.bias[o], size = fabs(sum);
                    for (int64_t k = 0; k < p.I; k++) {
                        const double e = (double)p.x[m * p.I + k] * (double)stored_value(p.w, o * p.I + k, p.dtype);
                        sum += e;
                        size += fabs(e);
                    }
                    CHECK_NEAR(y[m * p.O + o], sum, bound * size);
                }
        }
        free(y);
        free_problem(&p);
    }
}

TEST(levels_and_threads_agree_bit_for_bit)
{
    const int64_t shapes[][3] = {{1, 1, 1},     {1, 9, 33},    {2, 17, 64},   {3, 8, 1},     {4, 50, 95},
                                 {5, 13, 257},  {7, 31, 1100}, {8, 24, 130},  {15, 10, 66},  {16, 49, 1023},
                                 {17, 5, 63},   {24, 48, 64},  {25, 97, 65},  {48, 8, 96},   {49, 47, 31},
                                 {64, 100, 33}, {97, 3, 2},    {193, 51, 40}, {200, 1, 300}, {1, 3000, 40}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t d = 0; d < 3; d++)
            for (int exact = 0; exact < 2; exact++) {
                problem p = make_problem(shapes[s][0], shapes[s][1], shapes[s][2], DTYPES[d], false, exact);
                check_levels(&p, s % 2 == 0);
                free_problem(&p);
            }
}

/* Subnormals of x, W and of sums count as zero, signs of zero included, whatever instruction reads them. */
TEST(subnormals_and_zeros_agree_bit_for_bit)
{
    for (size_t d = 0; d < 3; d++)
        for (int exact = 0; exact < 2; exact++)
            for (int64_t M = 1; M <= 33; M += 16)
                for (int64_t I = 1; I <= 40; I += 13) {
                    problem p = make_problem(M, 70, I, DTYPES[d], true, exact);
                    check_levels(&p, false);
                    free_problem(&p);
                }
}

/* Rounding, flushing and flags of this thread; a mode that is not the default, to be found again after a call. */
#if defined(__x86_64__)
#define UNUSUAL_MODE ((uint64_t)0x7f80 | 0x20) /* rounding towards zero, a flag set */

static uint64_t float_mode(void)
{
    return _mm_getcsr();
}

static void set_float_mode(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}
#elif defined(__aarch64__)
#define UNUSUAL_MODE ((uint64_t)3 << 22 << 32 | 1 << 4) /* the same */

static uint64_t float_mode(void)
{
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status) : : "memory");
    return control << 32 | (status & 0xffffffffu);
}

static void set_float_mode(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(mode >> 32), "r"(mode & 0xffffffffu) : "memory");
}
#endif

#if defined(UNUSUAL_MODE)
/* y = a b + c by an op that flushes; no element beside them differs from zero. */
static float flushing_sum(const qr_op *op, int64_t M, float a, float b, float c)
{
    problem p = make_problem(M, 1, 34, QR_F32, false, false);
    float y[20];
    memset(p.x, 0, (size_t)(M * 34) * sizeof *p.x);
    memset(p.w, 0, 34 * sizeof(float));
    for (int64_t m = 0; m < M; m++) {
        p.x[m * 34 + 1] = c; /* the high element of the first pair begins a chain, its low one goes on */
        p.x[m * 34] = a;
    }
    ((float *)p.w)[1] = 1;
    ((float *)p.w)[0] = b;
    run(op, &p, 0, M, false, 1, y);
    free_problem(&p);
    for (int64_t m = 1; m < M; m++)
        CHECK_INT(to_bits(y[m]), to_bits(y[0]));
    return y[0];
}

/* Not so under valgrind, whose arithmetic takes no notice of the mode. */
static bool cpu_flushes_when_told(void)
{
#if defined(__x86_64__)
    const uint64_t before = float_mode();
    volatile float small = 0x1p-70f;
    set_float_mode(0x9fc0);
    volatile float product = small * small;
    set_float_mode(before);
    return product == 0;
#else
    return true;
#endif
}

TEST(subnormals_count_as_zero_and_the_callers_state_comes_back)
{
    static const struct {
        float a, b, c, sum;
    } cases[] = {
        {0x1p-130f, 0x1p100f, 0, 0},                                     /* a is zero */
        {0x1p100f, 0x1p-130f, 0x1p-20f, 0x1p-20f},                       /* b is */
        {1, 0x1p-126f, 0x1p-130f, 0x1p-126f},                            /* c is */
        {0x1p-70f, 0x1p-70f, 0, 0},                                      /* a small product is zero */
        {0x1.000002p-63f, 0x1.fffffcp-64f, 0, 0x1p-126f},                /* 2^-126 (1 - 2^-46): rounded, then small? */
        {-0x1.000002p-63f, 0x1.fffffcp-64f, 0, -0x1p-126f},              /* the same */
        {0x1p-63f, 0x1.fffffep-64f, 0, 0},                               /* 2^-126 (1 - 2^-24): 24 bits hold it */
        {0x1.000002p-80f, 0x1.000002p-80f, 0x1p-126f, 0x1p-126f},        /* nothing small in sight */
        {-0x1.000002p-80f, 0x1.000002p-80f, 0x1p-126f, 0x1p-126f},       /* below, and back by rounding */
        {-0x1p-75f, 0x1p-76f, 0x1p-126f, 0x1p-126f},                     /* a tie, to the even one */
        {-0x1.000002p-75f, 0x1p-76f, 0x1p-126f, 0},                      /* beyond the tie */
        {-0x1.000002p-10f, 0x1.000002p-10f, 0x1.000004p-20f, -0x1p-66f}, /* what is left is small but normal */
        {-0x1p100f, 0x1p20f, 0x1p120f, 0},                               /* nothing is left of much */
    };
    const uint64_t before = float_mode();
    for (int i = 0; i < level_count; i++)
        for (int64_t M = 1; M <= 20; M += 19)
            for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
                set_float_mode(UNUSUAL_MODE);
                const float sum = flushing_sum(levels[i].ops[LINEAR], M, cases[k].a, cases[k].b, cases[k].c);
                const uint64_t after = float_mode();
                set_float_mode(before);
                CHECK_INT(after, UNUSUAL_MODE);
                CHECK_SAY(to_bits(sum) == to_bits(cases[k].sum) || !cpu_flushes_when_told(), "%s: %a * %a + %a is %a",
                          levels[i].name, (double)cases[k].a, (double)cases[k].b, (double)cases[k].c, (double)sum);
            }
}
#endif

TEST(not_a_number_is_one_pattern_and_stays_in_its_row)
{
    for (int i = 0; i < level_count; i++)
        for (int64_t M = 3; M <= 40; M += 37) {
            problem p = make_problem(M, 12, 70, QR_BF16, false, true);
            float *y = fresh(M * p.O);
            p.x[70 + 5] = from_bits(0xffa10000);
            p.x[2 * 70 + 6] = INFINITY;
            ((uint16_t *)p.w)[3 * 70 + 6] = 0;
            run(levels[i].ops[LINEAR], &p, 0, M, true, 1, y);
            for (int64_t o = 0; o < p.O; o++) {
                CHECK(!isnan(y[o]));
                CHECK_INT(to_bits(y[p.O + o]), 0x7fc00000);
            }
            CHECK_INT(to_bits(y[2 * p.O + 3]), 0x7fc00000); /* infinity times zero */
            CHECK(isinf(y[2 * p.O + 4]));
            free(y);
            free_problem(&p);
        }
}

TEST(a_token_does_not_depend_on_its_batch)
{
    for (int i = 0; i < level_count; i++)
        for (size_t d = 0; d < 3; d++) {
            problem p = make_problem(130, 53, 161, DTYPES[d], false, d == 1);
            const int64_t splits[] = {1, 2, 3, 16, 17, 23, 48, 100};
            float *all = fresh(p.M * p.O), *part = fresh(p.M * p.O);
            run(levels[i].ops[LINEAR], &p, 0, p.M, true, 2, all);
            for (size_t s = 0; s < sizeof splits / sizeof *splits; s++) {
                for (int64_t m = 0; m < p.M; m += splits[s])
                    run(levels[i].ops[LINEAR], &p, m, p.M - m < splits[s] ? p.M - m : splits[s], true, 1,
                        part + m * p.O);
                CHECK_SAY(memcmp(all, part, (size_t)(p.M * p.O) * 4) == 0, "%s %s: split by %lld", levels[i].name,
                          DTYPE_NAMES[p.dtype], (long long)splits[s]);
            }
            free(all);
            free(part);
            free_problem(&p);
        }
}

TEST(one_inexact_element_changes_no_other_token)
{
    for (int i = 0; i < level_count; i++) {
        problem p = make_problem(40, 20, 100, QR_BF16, false, true);
        float *exact = fresh(p.M * p.O), *mixed = fresh(p.M * p.O);
        run(levels[i].ops[LINEAR], &p, 0, p.M, true, 1, exact);
        p.x[39 * 100 + 99] += 0x1p-20f;
        run(levels[i].ops[LINEAR], &p, 0, p.M, true, 1, mixed);
        CHECK(memcmp(exact, mixed, (size_t)(39 * p.O) * 4) == 0);
        CHECK(memcmp(exact, mixed, (size_t)(40 * p.O) * 4) != 0);
        free(exact);
        free(mixed);
        free_problem(&p);
    }
}

TEST(empty_sizes)
{
    for (int i = 0; i < level_count; i++) {
        problem none = make_problem(0, 5, 40, QR_BF16, false, false),
                rows = make_problem(20, 0, 40, QR_BF16, false, false);
        problem width = make_problem(20, 5, 0, QR_BF16, false, false);
        float y[100];
        run(levels[i].ops[LINEAR], &none, 0, 0, true, 2, y);
        for (int64_t M = 1; M <= 20; M += 19) { /* both few and many tokens, which have loops of their own */
            run(levels[i].ops[LINEAR], &rows, 0, M, true, 2, y);
            memset(y, 0x7f, sizeof y);
            run(levels[i].ops[LINEAR], &width, 0, M, true, 2, y);
            for (int64_t m = 0; m < M; m++)
                CHECK(memcmp(y + m * 5, width.bias, 20) == 0);
        }
        free_problem(&none);
        free_problem(&rows);
        free_problem(&width);
    }
}

/* Any order of I products and I additions, then the bias: the bound of a sum of that many roundings. */
TEST(blas_is_close_to_a_sum_in_double)
{
    for (size_t d = 0; d < 3; d++)
        for (int64_t M = 1; M <= 70; M += 69) {
            problem p = make_problem(M, 140, 130, DTYPES[d], false, false);
            float *y = fresh(p.M * p.O);
            const double n = (double)p.I + 1, bound = n * 0x1p-24 / (1 - n * 0x1p-24);
            run(levels[level_count - 1].ops[LINEAR_BLAS], &p, 0, p.M, true, 2, y);
            for (int64_t m = 0; m < p.M; m++)
                for (int64_t o = 0; o < p.O; o++) {
                    double sum = (double)p.bias[o], size = fabs(sum);
                    for (int64_t k = 0; k < p.I; k++) {
                        const double e = (double)p.x[m * p.I + k] * (double)stored_value(p.w, o * p.I + k, p.dtype);
                        sum += e;
                        size += fabs(e);
                    }
                    CHECK_NEAR(y[m * p.O + o], sum, bound * size);
                }
            free(y);
            free_problem(&p);
        }
}

/* ---- embedding ----------------------------------------------------------------------------------------------------- */

static void embed(const qr_op *op, const int64_t *ids, int64_t rows, int64_t columns, const void *w, qr_dtype dtype,
                  int64_t V, int64_t H, float *y, qr_error *error)
{
    qr_call call = {.name = op->name, .inputs = 2, .threads = 2, .parallel = parallel, .error = error};
    call.array[0] = (qr_array){.data = (void *)(uintptr_t)ids, .shape = {rows, columns}, .ndim = 2, .dtype = QR_I64};
    call.array[1] = (qr_array){.data = (void *)(uintptr_t)w, .shape = {V, H}, .ndim = 2, .dtype = dtype};
    call.array[2] = (qr_array){.data = y, .shape = {rows, columns, H}, .ndim = 3, .dtype = QR_F32};
    QR_DIM(&call, '*') = rows * columns;
    QR_DIM(&call, 'V') = V;
    QR_DIM(&call, 'H') = H;
    op->run(&call);
}

TEST(an_embedding_is_the_stored_row_exactly)
{
    const int64_t ids[] = {0, 65535, 7, 7, 40000, 1};
    for (size_t d = 0; d < 3; d++) {
        uint16_t *w = malloc(2 * 65536 * sizeof(float));
        for (int64_t i = 0; i < 65536; i++)
            if (DTYPES[d] == QR_F32)
                ((float *)w)[i] = from_bits(random_bits() & 0xff7fffffu);
            else
                w[i] = (uint16_t)i; /* every pattern there is */
        for (int i = 0; i < level_count; i++) {
            qr_error error = {0};
            float y[6];
            embed(levels[i].ops[EMBEDDING], ids, 2, 3, w, DTYPES[d], 65536, 1, y, &error);
            CHECK_INT(error.kind, QR_OK);
            for (int k = 0; k < 6; k++) {
                const float want = stored_value(w, ids[k], DTYPES[d]);
                CHECK(isnan(want) ? isnan(y[k]) : to_bits(y[k]) == to_bits(want));
            }
        }
        free(w);
    }
}

TEST(an_id_outside_the_vocabulary_is_named_and_nothing_is_written)
{
    const int64_t bad[] = {-1, 5, INT64_MAX, INT64_MIN};
    float w[10] = {0};
    for (int i = 0; i < level_count; i++)
        for (int b = 0; b < 4; b++) {
            const int64_t ids[] = {0, 4, 1, 2, 3, bad[b]};
            qr_error error = {0};
            float y[12];
            char number[32];
            memset(y, 0x7f, sizeof y);
            embed(levels[i].ops[EMBEDDING], ids, 2, 3, w, QR_F32, 5, 2, y, &error);
            CHECK_INT(error.kind, QR_BAD_INPUT);
            CHECK_HAS(error.text, "embedding: ids[1, 2] is ");
            CHECK_HAS(error.text, "the vocabulary has 5\n");
            snprintf(number, sizeof number, "found    %lld\n", (long long)bad[b]);
            CHECK_HAS(error.text, number);
            for (int k = 0; k < 12; k++)
                CHECK_INT(to_bits(y[k]), 0x7f7f7f7f);
        }
}

RUN_TESTS();
