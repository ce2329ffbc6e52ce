/* Norms, pointwise ops, reductions and rotary tables against double precision; the bits of every level against each
 * other (run_op.h does that in each call). Linears, attention, conv and the delta rule have files of their own. */
#include "run_op.h"

static const int64_t widths[] = {1, 3, 16, 17, 130, 1024};
enum { WIDTHS = sizeof widths / sizeof *widths, ROWS = 70 };

/* ---- norms ---- */

/* Roundings of a scale 1/sqrt(sum/D + eps): the sum of squares has D/16 + 1 in a chain, 4 in the tree, then division and
 * eps; the root halves them; root and reciprocal add two. */
static double scale_bound(int64_t n)
{
    return (((double)n / 16 + 1 + 4 + 2) / 2 + 2) * UNIT;
}

TEST(norms_match_double)
{
    for (int i = 0; i < WIDTHS; i++) {
        const int64_t n = widths[i];
        float *const x = random_floats(ROWS * n), *const z = random_floats(ROWS * n), *const w = random_floats(n);
        float *const rms = empty_floats(ROWS * n), *const gated = empty_floats(ROWS * n),
                     *const l2 = empty_floats(ROWS * n);
        const float eps = 1e-6f;
        RUN("rms_norm", ARRAYS(F(x, ROWS, n), F(w, n)), SCALARS(1e-6), F(rms, ROWS, n));
        RUN("rms_norm_gated", ARRAYS(F(x, ROWS, n), F(z, ROWS, n), F(w, n)), SCALARS(1e-6), F(gated, ROWS, n));
        RUN("l2_norm", ARRAYS(F(x, ROWS, n)), SCALARS(1e-6), F(l2, ROWS, n));
        for (int64_t r = 0; r < ROWS; r++) {
            double sum = 0;
            for (int64_t d = 0; d < n; d++)
                sum += (double)x[r * n + d] * (double)x[r * n + d];
            for (int64_t d = r * n; d < (r + 1) * n; d++) {
                const double scaled = (double)x[d] / sqrt(sum / (double)n + (double)eps), weight = (double)w[d - r * n];
                const double silu = (double)z[d] / (1 + exp(-(double)z[d]));
                /* further roundings: 1 + w, two products; silu within 2 units of its last place, three products */
                CHECK_NEAR(rms[d], scaled * (1 + weight), fabs(scaled * (1 + weight)) * (scale_bound(n) + 4 * UNIT));
                CHECK_NEAR(gated[d], weight * scaled * silu,
                           fabs(weight * scaled * silu) * (scale_bound(n) + 8 * UNIT));
                const double unit = (double)x[d] / sqrt(sum + (double)eps);
                CHECK_NEAR(l2[d], unit, fabs(unit) * (scale_bound(n) + 2 * UNIT));
            }
        }
        free(x), free(z), free(w), free(rms), free(gated), free(l2);
    }
}

/* The variance about the mean, from a row far from zero: one formed of squares alone would have lost it. */
TEST(layer_norm_matches_double_far_from_zero_too)
{
    for (int i = 0; i < WIDTHS; i++) {
        const int64_t n = widths[i];
        float *const x = random_floats(ROWS * n), *const w = random_floats(n), *const b = random_floats(n);
        float *const y = empty_floats(ROWS * n);
        for (int64_t j = ROWS / 2 * n; j < ROWS * n; j++)
            x[j] += 1000;
        RUN("layer_norm", ARRAYS(F(x, ROWS, n), F(w, n), F(b, n)), SCALARS(1e-6), F(y, ROWS, n));
        for (int64_t r = 0; r < ROWS; r++) {
            long double mean = 0, sum = 0;
            for (int64_t d = 0; d < n; d++)
                mean += (long double)x[r * n + d] / (long double)n;
            for (int64_t d = 0; d < n; d++)
                sum += ((long double)x[r * n + d] - mean) * ((long double)x[r * n + d] - mean);
            for (int64_t d = 0; d < n; d++) {
                const double z = (double)(((long double)x[r * n + d] - mean) / sqrtl(sum / (long double)n + 1e-6L));
                const double expected = z * (double)w[d] + (double)b[d];
                /* double is off by 2^-53 of the row's size where differences of one are meant; then one rounding */
                CHECK_NEAR(y[r * n + d], expected, fabs(expected) * UNIT + 0x1p-36 * (1 + fabs(z)));
            }
        }
        free(x), free(w), free(b), free(y);
    }
}

TEST(rms_norm_keeps_a_weight_bf16_would_lose)
{
    float x[4] = {1, -1, 1, -1}, w[4] = {0.0012f, 0, 0, 0}, y[4];
    RUN("rms_norm", ARRAYS(F(x, 1, 4), F(w, 4)), SCALARS(0), F(y, 1, 4));
    CHECK_NEAR(y[0], 1.0012, 2 * UNIT);
    CHECK(y[1] == -1 && y[2] == 1);
}

TEST(a_zero_row_stays_zero_and_no_row_is_fine)
{
    float x[4] = {0, 0, 0, 0}, w[4] = {1, 2, 3, 4}, y[4];
    RUN("rms_norm", ARRAYS(F(x, 1, 4), F(w, 4)), SCALARS(1e-6), F(y, 1, 4));
    CHECK(y[0] == 0 && y[3] == 0);
    RUN("l2_norm", ARRAYS(F(x, 1, 4)), SCALARS(1e-6), F(y, 1, 4));
    CHECK(y[0] == 0 && y[3] == 0);
    RUN("rms_norm", ARRAYS(F(x, 0, 4), F(w, 4)), SCALARS(1e-6), F(y, 0, 4));
    RUN("silu", ARRAYS(F(x, 0)), NULL, F(y, 0));
    RUN("softmax", ARRAYS(F(x, 0, 4)), NULL, F(y, 0, 4));
}

/* ---- pointwise ---- */

static double exp_of(double x)
{
    return exp(x);
}

static double sigmoid_of(double x)
{
    return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));
}

static double silu_of(double x)
{
    return x < 0 ? x * exp(x) / (1 + exp(x)) : x / (1 + exp(-x));
}

static double softplus_of(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static double gelu_of(double x)
{
    return x * 0.5 * erfc(-x * 0x1.6a09e667f3bcdp-1);
}

static double gelu_tanh_of(double x)
{
    return x * sigmoid_of(1.5957691216057308 * (x + 0.044715 * x * x * x));
}

static const struct {
    const char *name;
    double (*of)(double);
    double bound, at_minus_infinity, at_infinity; /* bound in units in the last place of the result */
} functions[] = {
    {"exp", exp_of, 1.1, 0, INFINITY},   {"sigmoid", sigmoid_of, 1.1, 0, 1},
    {"silu", silu_of, 1.2, 0, INFINITY}, {"softplus", softplus_of, 1.6, 0, INFINITY},
    {"gelu", gelu_of, 1.0, 0, INFINITY}, {"gelu_tanh", gelu_tanh_of, 1.3, 0, INFINITY},
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static double last_place(double y)
{
    int exponent;
    frexp(y, &exponent);
    return ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

/* Every 9973rd of all float32 bit patterns, so every sign, exponent and kind of number. */
TEST(exponentials_keep_their_bounds_over_all_of_float32)
{
    enum { STEP = 9973, N = (int)((1ull << 32) / STEP) };
    float *const x = empty_floats(N), *const y = empty_floats(N);
    for (int64_t i = 0; i < N; i++) {
        const uint32_t bits = (uint32_t)(i * STEP);
        memcpy(x + i, &bits, sizeof bits);
    }
    for (int f = 0; f < FUNCTIONS; f++) {
        RUN(functions[f].name, ARRAYS(F(x, N)), NULL, F(y, N));
        double worst = 0;
        for (int64_t i = 0; i < N; i++) {
            const double expected = functions[f].of((double)x[i]);
            if (isnan(x[i])) {
                CHECK(isnan(y[i]));
            } else if (isinf((float)expected) || isinf(y[i])) {
                CHECK(y[i] == (float)expected);
            } else {
                const double error = fabs((double)y[i] - expected) / last_place(expected);
                worst = error > worst ? error : worst;
            }
        }
        CHECK_SAY(worst <= functions[f].bound, "%s is off by %.3f units in the last place", functions[f].name, worst);
    }
    free(x), free(y);
}

/* x on the grid of `digits` binary digits whose least normal number is 2^lowest; infinity from `limit` on */
static float nearest(float x, int digits, int lowest, double limit)
{
    int exponent;
    frexp((double)x, &exponent);
    const int last = (exponent < lowest + 1 ? lowest + 1 : exponent) - digits;
    return isfinite(x) && fabs((double)x) >= limit ? copysignf(INFINITY, x)
                                                   : (float)ldexp(nearbyint(ldexp((double)x, -last)), last);
}

TEST(roundings_to_sixteen_bits_give_the_nearest_even_number)
{
    enum { STEP = 9973, N = (int)((1ull << 32) / STEP) };
    float *const x = empty_floats(N), *const brain = empty_floats(N), *const half = empty_floats(N);
    for (int64_t i = 0; i < N; i++) { /* every third one half-way between two numbers of bf16, and one of float16 */
        uint32_t bits = (uint32_t)(i * STEP);
        bits = i % 3 == 0 ? (bits & 0xffff0000u) | 0x8000u : i % 3 == 1 ? (bits & 0xffffe000u) | 0x1000u : bits;
        memcpy(x + i, &bits, sizeof bits);
    }
    RUN("round_bf16", ARRAYS(F(x, N)), NULL, F(brain, N));
    RUN("round_f16", ARRAYS(F(x, N)), NULL, F(half, N));
    for (int64_t i = 0; i < N; i++) {
        if (isnan(x[i])) {
            CHECK(isnan(brain[i]) && isnan(half[i]));
            continue;
        }
        const float expected[2] = {nearest(x[i], 8, -126, 0x1.ffp127), nearest(x[i], 11, -14, 65520)};
        CHECK(memcmp(brain + i, expected, sizeof *brain) == 0);
        CHECK(memcmp(half + i, expected + 1, sizeof *half) == 0);
    }
    free(x), free(brain), free(half);
}

TEST(exponentials_at_the_edges)
{
    const float x[8] = {-INFINITY, INFINITY, NAN, 0.0f, -0.0f, 88.72284f, 88.72283f, -103.9f};
    float y[8];
    for (int f = 0; f < FUNCTIONS; f++) {
        RUN(functions[f].name, ARRAYS(F(x, 8)), NULL, F(y, 8));
        CHECK(y[0] == (float)functions[f].at_minus_infinity);
        CHECK(y[1] == (float)functions[f].at_infinity);
        CHECK(isnan(y[2]));
        CHECK_NEAR(y[3], functions[f].of(0), UNIT);
        CHECK_NEAR(y[4], functions[f].of(0), UNIT);
    }
    RUN("exp", ARRAYS(F(x, 8)), NULL, F(y, 8));
    CHECK(y[3] == 1 && isinf(y[5]) && y[6] > 3.4e38f && y[7] == 0x1p-149f);
}

TEST(a_fused_op_has_the_bits_of_its_two_steps)
{
    enum { N = 1003 };
    float *const a = random_floats(N), *const b = random_floats(N);
    float *const one = empty_floats(N), *const two = empty_floats(N), *const fused = empty_floats(N);
    for (int i = 0; i < N; i++)
        a[i] *= 20;
    RUN("silu", ARRAYS(F(a, N)), NULL, F(one, N));
    RUN("mul", ARRAYS(F(one, N), F(b, N)), NULL, F(two, N));
    RUN("silu_mul", ARRAYS(F(a, N), F(b, N)), NULL, F(fused, N));
    CHECK(same_floats(fused, two, N));
    RUN("sigmoid", ARRAYS(F(a, N)), NULL, F(one, N));
    RUN("mul", ARRAYS(F(b, N), F(one, N)), NULL, F(two, N));
    RUN("sigmoid_mul", ARRAYS(F(b, N), F(a, N)), NULL, F(fused, N));
    CHECK(same_floats(fused, two, N));
    RUN("add", ARRAYS(F(a, N), F(b, N)), NULL, F(one, N));
    for (int i = 0; i < N; i++)
        CHECK(one[i] == a[i] + b[i]);
    free(a), free(b), free(one), free(two), free(fused);
}

TEST(delta_decay_matches_double)
{
    enum { T = 7, V = 6 };
    float *const a = random_floats(T * V), *const A = random_floats(V), *const dt = random_floats(V);
    float *const g = empty_floats(T * V);
    for (int i = 0; i < T * V; i++)
        a[i] *= 30;
    RUN("delta_decay", ARRAYS(F(a, T, V), F(A, V), F(dt, V)), NULL, F(g, T, V));
    for (int i = 0; i < T * V; i++) {
        const double x = (double)a[i] + (double)dt[i % V], expected = -exp((double)A[i % V]) * softplus_of(x);
        /* the sum rounds once, which softplus turns into at most |x| roundings of its result; two routines, a product */
        CHECK_NEAR(g[i], expected, fabs(expected) * (fabs(x) + 2 * 2 + 2 * 2 + 1) * UNIT);
        CHECK(g[i] <= 0);
    }
    free(a), free(A), free(dt), free(g);
}

/* ---- reductions ---- */

TEST(softmax_and_its_logarithm_match_double)
{
    for (int i = 0; i < WIDTHS; i++) {
        const int64_t n = widths[i];
        float *const x = random_floats(ROWS * n), *const p = empty_floats(ROWS * n), *const l = empty_floats(ROWS * n);
        for (int64_t j = 0; j < ROWS * n; j++)
            x[j] *= 40;
        RUN("softmax", ARRAYS(F(x, ROWS, n)), NULL, F(p, ROWS, n));
        RUN("log_softmax", ARRAYS(F(x, ROWS, n)), NULL, F(l, ROWS, n));
        for (int64_t r = 0; r < ROWS; r++) {
            double top = -INFINITY, sum = 0, spread = 0;
            for (int64_t d = r * n; d < (r + 1) * n; d++)
                top = (double)x[d] > top ? (double)x[d] : top;
            for (int64_t d = r * n; d < (r + 1) * n; d++) {
                const double e = exp((double)x[d] - top);
                sum += e;
                /* the difference rounds once: a relative error of |x - top| units; exp adds its own */
                spread += e * (top - (double)x[d] + 2 * 2) * UNIT;
            }
            for (int64_t d = r * n; d < (r + 1) * n; d++) {
                const double below = top - (double)x[d], expected = exp(-below) / sum, log = -below - log1p(sum - 1);
                CHECK_NEAR(p[d], expected, expected * (spread / sum + (below + 2 * 2 + 2) * UNIT) + 0x1p-149);
                CHECK_NEAR(l[d], log, spread / sum + fabs(log) * UNIT);
            }
        }
        free(x), free(p), free(l);
    }
}

TEST(argmax_takes_the_first_of_equals_and_a_nan_before_all)
{
    float x[4][5] = {{1, 3, 2, 3, 0},
                     {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
                     {0, 9, NAN, 3, NAN},
                     {-2, -1, -3, -1, -INFINITY}};
    int64_t y[4];
    RUN("argmax", ARRAYS(F(x, 4, 5)), NULL, I(y, 4));
    CHECK(y[0] == 1 && y[1] == 0 && y[2] == 2 && y[3] == 1);
    enum { N = 1003 };
    float *const long_row = random_floats(N);
    int64_t best = 0;
    for (int64_t i = 1; i < N; i++)
        best = long_row[i] > long_row[best] ? i : best;
    RUN("argmax", ARRAYS(F(long_row, 1, N)), NULL, I(y, 1));
    CHECK_INT(y[0], best);
    long_row[N - 1] = 2;
    RUN("argmax", ARRAYS(F(long_row, 1, N)), NULL, I(y, 1));
    CHECK_INT(y[0], N - 1);
    RUN_FAILS(QR_BAD_SHAPE, "argmax", ARRAYS(F(x, 1, 0)), NULL, I(y, 1));
    free(long_row);
}

/* ---- rotary ---- */

TEST(rotary_tables_are_rounded_once)
{
    enum { F_ = 32, P = 9 };
    const int64_t positions[3][P] = {{0, 1, 2, 3, 1000, 10000, 262143, 1000003, 2147483647},
                                     {0, 1, 2, 3, 999, 10001, 262142, 1000033, -5},
                                     {0, 0, 0, 0, 1, 2, 3, 4, 5}};
    int64_t index[F_], axis[F_];
    double f[F_];
    float c[P * F_], s[P * F_];
    for (int i = 0; i < F_; i++)
        index[i] = i, axis[i] = i % 3;
    RUN("rope_frequencies", ARRAYS(I(index, F_)), SCALARS(1e7, 64), D(f, F_));
    for (int i = 0; i < F_; i++)
        CHECK_NEAR(f[i], powl(1e7L, -2.0L * i / 64), 1.5 * 0x1p-53 * f[i]);
    f[0] = 0.99999; /* with f = 1 the largest position would be the only angle beyond the limit */
    RUN("rope_table", ARRAYS(I(positions, 3, P), I(axis, F_), D(f, F_)), NULL, F(c, P, F_), F(s, P, F_));
    for (int p = 0; p < P; p++)
        for (int i = 0; i < F_; i++) {
            const double angle = (double)positions[axis[i]][p] * f[i];
            const double cosine = (double)cosl((long double)angle), sine = (double)sinl((long double)angle);
            /* half a unit in the last place for the one rounding, and what double arithmetic leaves of it undecided */
            CHECK_NEAR(c[p * F_ + i], cosine, last_place(cosine) * (0.5 + 1e-6));
            CHECK_NEAR(s[p * F_ + i], sine, last_place(sine) * (0.5 + 1e-6));
        }
    f[0] = 2;
    RUN_FAILS(QR_BAD_INPUT, "rope_table", ARRAYS(I(positions, 3, P), I(axis, F_), D(f, F_)), NULL, F(c, P, F_),
              F(s, P, F_));
    f[0] = 1, axis[3] = 3;
    RUN_FAILS(QR_BAD_INPUT, "rope_table", ARRAYS(I(positions, 3, 1), I(axis, F_), D(f, F_)), NULL, F(c, 1, F_),
              F(s, 1, F_));
}

TEST(rope_turns_pairs_and_passes_the_rest)
{
    enum { B = 2, T = 3, H = 2, W = 11, F_ = 4 };
    float *const x = random_floats(B * T * H * W), *const c = random_floats(B * T * F_);
    float *const s = random_floats(B * T * F_), *const y = empty_floats(B * T * H * W);
    RUN("rope", ARRAYS(F(x, B, T, H, W), F(c, B, T, F_), F(s, B, T, F_)), NULL, F(y, B, T, H, W));
    for (int64_t t = 0; t < B * T; t++)
        for (int64_t h = 0; h < H; h++) {
            const float *const in = x + (t * H + h) * W, *const out = y + (t * H + h) * W;
            for (int i = 0; i < F_; i++) {
                const double a = (double)in[i], b = (double)in[i + F_];
                const double co = (double)c[t * F_ + i], si = (double)s[t * F_ + i];
                CHECK_NEAR(out[i], a * co - b * si, 2 * UNIT * (fabs(a * co) + fabs(b * si)));
                CHECK_NEAR(out[i + F_], b * co + a * si, 2 * UNIT * (fabs(b * co) + fabs(a * si)));
            }
            CHECK(same_floats(in + 2 * F_, out + 2 * F_, W - 2 * F_));
        }
    RUN_FAILS(QR_BAD_SHAPE, "rope", ARRAYS(F(x, B, T, 1, 7), F(c, B, T, F_), F(s, B, T, F_)), NULL, F(y, B, T, 1, 7));
    free(x), free(c), free(s), free(y);
}

RUN_TESTS()
