/* linear_f64 and linear_parts: their stated orders of summation, on every level, blocking and number of threads. */
#include "linear_problem.h"

/* ---- in double ----------------------------------------------------------------------------------------------------- */

/* The order as linear_f64.c states it, written once more without its loops. */
static double stated_order(const problem *p, int64_t m, int64_t o, bool bias)
{
    double sum[16] = {0};
    for (int64_t pair = 0; pair < (p->I + 31) / 32 * 16; pair++)
        for (int64_t k = 2 * pair + 1; k >= 2 * pair; k--)
            if (k < p->I)
                sum[pair % 16] =
                    fma(p->fine[m * p->I + k], (double)stored_value(p->w, o * p->I + k, p->dtype), sum[pair % 16]);
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            sum[i] = sum[2 * i] + sum[2 * i + 1];
    return bias ? sum[0] + (double)p->bias[o] : sum[0];
}

/* Widths with and without a tail, in one turn and in several; tokens and rows in whole tiles and not. */
static const int64_t SHAPES[][3] = {{1, 1, 1},    {1, 25, 33},  {2, 17, 64},  {3, 8, 2},   {4, 13, 95},  {5, 12, 257},
                                    {7, 3, 1100}, {32, 24, 65}, {33, 5, 600}, {70, 2, 31}, {1, 300, 40}, {2, 2, 5000}};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

/* Wild numbers have subnormals and zeros of both signs, which count like any other: nothing is flushed in double. */
TEST(in_double_the_order_is_the_stated_one_and_nothing_is_flushed)
{
    for (size_t s = 0; s < SHAPE_COUNT; s++)
        for (size_t d = 0; d < 3; d++)
            for (int wild = 0; wild < 2; wild++) {
                problem p = make_problem(SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], DTYPES[d], wild, false);
                double *const y = fresh_bytes(p.M * p.O * 8), *const want = fresh_bytes(p.M * p.O * 8);
                for (int64_t i = 0; i < p.M * p.O; i++)
                    want[i] = stated_order(&p, i / p.O, i % p.O, s % 2 == 0);
                for (int i = 0; i < level_count; i++)
                    for (int threads = 1; threads <= 3; threads += 2) {
                        memset(y, 0x7f, (size_t)(p.M * p.O) * 8);
                        run(levels[i].ops[LINEAR_F64], &p, 0, p.M, s % 2 == 0, threads, y);
                        CHECK_SAY(memcmp(y, want, (size_t)(p.M * p.O) * 8) == 0,
                                  "%s, %d threads, M=%lld O=%lld I=%lld %s: another order", levels[i].name, threads,
                                  (long long)p.M, (long long)p.O, (long long)p.I, DTYPE_NAMES[p.dtype]);
                    }
                free(y), free(want);
                free_problem(&p);
            }
}

TEST(in_double_a_token_does_not_depend_on_its_batch)
{
    for (int i = 0; i < level_count; i++) {
        problem p = make_problem(67, 29, 161, QR_BF16, false, false);
        double *const all = fresh_bytes(p.M * p.O * 8), *const part = fresh_bytes(p.M * p.O * 8);
        run(levels[i].ops[LINEAR_F64], &p, 0, p.M, true, 2, all);
        for (int64_t split = 1; split < 40; split += 6) {
            for (int64_t m = 0; m < p.M; m += split)
                run(levels[i].ops[LINEAR_F64], &p, m, p.M - m < split ? p.M - m : split, true, 1, part + m * p.O);
            CHECK_SAY(memcmp(all, part, (size_t)(p.M * p.O) * 8) == 0, "%s: split by %lld", levels[i].name,
                      (long long)split);
        }
        free(all), free(part);
        free_problem(&p);
    }
}

TEST(in_double_not_a_number_is_one_pattern_and_stays_in_its_row)
{
    const uint64_t quiet = 0x7ff8000000000000u;
    for (int i = 0; i < level_count; i++) {
        problem p = make_problem(40, 12, 70, QR_BF16, false, false);
        double *const y = fresh_bytes(p.M * p.O * 8);
        p.fine[70 + 5] = -(double)NAN;
        p.fine[2 * 70 + 6] = (double)INFINITY;
        ((uint16_t *)p.w)[3 * 70 + 6] = 0;
        run(levels[i].ops[LINEAR_F64], &p, 0, p.M, true, 1, y);
        for (int64_t o = 0; o < p.O; o++)
            CHECK(!isnan(y[o]) && memcmp(y + p.O + o, &quiet, 8) == 0);
        CHECK(memcmp(y + 2 * p.O + 3, &quiet, 8) == 0); /* infinity times zero */
        CHECK(isinf(y[2 * p.O + 4]));
        free(y);
        free_problem(&p);
    }
}

/* ---- in parts ------------------------------------------------------------------------------------------------------ */

static float to_bf16(float value)
{
    const uint32_t bits = to_bits(value);
    return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* By linear itself on one token and one row of W: the columns of each block cut out, the sums put together here. */
static float sum_of_blocks(const problem *p, int64_t m, int64_t o, const double *options, bool bias)
{
    const int64_t steps = (p->I + 31) / 32, parts = (int64_t)options[0], bytes = p->dtype == QR_F32 ? 4 : 2;
    float y = 0;
    bool any = false;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t block = ((int64_t)options[1] + (options[2] != 0 ? parts * parts - i : i)) % parts;
        const int64_t from = steps * block / parts * 32, end = steps * (block + 1) / parts * 32;
        const int64_t width = (end < p->I ? end : p->I) - from;
        if (width <= 0)
            continue;
        problem cut = {.M = 1, .O = 1, .I = width, .dtype = p->dtype, .x = p->x + m * p->I + from};
        float sum;
        cut.w = (char *)p->w + (o * p->I + from) * bytes;
        run(levels[0].ops[LINEAR], &cut, 0, 1, false, 1, &sum);
        sum = options[3] != 0 ? to_bf16(sum) : sum;
        y = any ? y + sum : sum;
        any = true;
    }
    return bias ? y + p->bias[o] : y;
}

TEST(parts_are_what_linear_makes_of_their_columns)
{
    const double orders[][4] = {{1, 0, 0, 0}, {2, 0, 0, 0}, {3, 1, 0, 0}, {4, 7, 1, 0},
                                {8, 5, 1, 1}, {5, 0, 0, 1}, {1, 0, 0, 1}, {100, 33, 0, 0}};
    const int64_t shapes[][3] = {{1, 9, 33}, {3, 17, 257}, {19, 11, 200}, {50, 49, 300}, {17, 3, 31}, {2, 1, 32}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t d = 0; d < 3; d++)
            for (int exact = 0; exact < 2; exact++) {
                problem p = make_problem(shapes[s][0], shapes[s][1], shapes[s][2], DTYPES[d], false, exact);
                float *const y = fresh(p.M * p.O), *const want = fresh(p.M * p.O);
                for (size_t n = 0; n < sizeof orders / sizeof *orders; n++) {
                    for (int64_t i = 0; i < p.M * p.O; i++)
                        want[i] = sum_of_blocks(&p, i / p.O, i % p.O, orders[n], n % 2 == 0);
                    for (int i = 0; i < level_count; i++)
                        for (int threads = 1; threads <= 3; threads += 2) {
                            memset(y, 0x7f, (size_t)(p.M * p.O) * 4);
                            run_with(levels[i].ops[LINEAR_PARTS], &p, orders[n], 0, p.M, n % 2 == 0, threads, y);
                            CHECK_SAY(memcmp(y, want, (size_t)(p.M * p.O) * 4) == 0,
                                      "%s, %d threads, M=%lld O=%lld I=%lld %s, %g parts from %g: another order",
                                      levels[i].name, threads, (long long)p.M, (long long)p.O, (long long)p.I,
                                      DTYPE_NAMES[p.dtype], orders[n][0], orders[n][1]);
                        }
                }
                free(y), free(want);
                free_problem(&p);
            }
}

TEST(one_part_is_linear_and_more_are_not)
{
    for (int i = 0; i < level_count; i++)
        for (int64_t M = 2; M <= 40; M += 38) {
            problem p = make_problem(M, 30, 1000, QR_BF16, false, false);
            float *const y = fresh(M * p.O), *const parts = fresh(M * p.O);
            run(levels[i].ops[LINEAR], &p, 0, M, true, 2, y);
            run_with(levels[i].ops[LINEAR_PARTS], &p, (double[]){1, 0, 0, 0}, 0, M, true, 2, parts);
            CHECK(memcmp(y, parts, (size_t)(M * p.O) * 4) == 0);
            run_with(levels[i].ops[LINEAR_PARTS], &p, (double[]){2, 0, 0, 0}, 0, M, true, 2, parts);
            CHECK(memcmp(y, parts, (size_t)(M * p.O) * 4) != 0);
            free(y), free(parts);
            free_problem(&p);
        }
}

TEST(sizes_of_zero)
{
    for (int i = 0; i < level_count; i++)
        for (int op = LINEAR_F64; op <= LINEAR_PARTS; op++)
            for (int64_t M = 1; M <= 20; M += 19) {
                problem rows = make_problem(M, 0, 40, QR_BF16, false, false);
                problem width = make_problem(M, 5, 0, QR_BF16, false, false);
                const double options[] = {3, 1, 0, 1};
                double wide[100];
                float narrow[100];
                void *const y = op == LINEAR_F64 ? (void *)wide : (void *)narrow;
                run_with(levels[i].ops[op], &rows, options, 0, 0, true, 2, y);
                run_with(levels[i].ops[op], &rows, options, 0, M, true, 2, y);
                run_with(levels[i].ops[op], &width, options, 0, M, true, 2, y);
                for (int64_t o = 0; o < M * 5; o++)
                    CHECK((op == LINEAR_F64 ? wide[o] : (double)narrow[o]) == (double)width.bias[o % 5]);
                free_problem(&rows);
                free_problem(&width);
            }
}

RUN_TESTS();
