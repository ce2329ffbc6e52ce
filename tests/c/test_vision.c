/* What only pictures need: attention in segments, the sampled position table, angles in two directions. Against double
 * precision, level by level in bits, and a segment alone against the same one among others. */
#include "run_op.h"

typedef struct segments_case {
    int64_t H, D, G, lengths[6];
} segments_case;

static const segments_case segments_cases[] = {
    {1, 1, 1, {1}},      {3, 8, 3, {5, 1, 30}},          {2, 33, 4, {64, 0, 17, 3}}, {1, 72, 1, {131}},
    {12, 64, 2, {4, 6}}, {2, 14, 6, {1, 2, 3, 4, 5, 6}}, {4, 64, 1, {96}},           {2, 8, 0, {0}},
};
enum { SEGMENTS_CASES = sizeof segments_cases / sizeof *segments_cases };

static int64_t tokens_of(const segments_case *c)
{
    int64_t sum = 0;
    for (int64_t g = 0; g < c->G; g++)
        sum += c->lengths[g];
    return sum;
}

/* As in test_mixers.c, but for the orders: a score is one chain of D and a product; a row is read in chains of 64. */
static void check_query(const float *q, const float *k, const float *v, int64_t keys, int64_t H, int64_t D,
                        double scale, const float *o, const float *p)
{
    double s[256], top = -INFINITY, low = INFINITY, sum = 0, score_error = 0;
    for (int64_t i = 0; i < keys; i++) {
        double size = 0;
        s[i] = 0;
        for (int64_t d = 0; d < D; d++) {
            s[i] += (double)q[d] * (double)k[i * H * D + d] * scale;
            size += fabs((double)q[d] * (double)k[i * H * D + d] * scale);
        }
        top = s[i] > top ? s[i] : top;
        low = s[i] < low ? s[i] : low;
        size *= (double)(D + 1) * UNIT;
        score_error = size > score_error ? size : score_error;
    }
    const double relative = 2 * score_error + (top - low + 8) * UNIT;
    for (int64_t i = 0; i < keys; i++)
        sum += exp(s[i] - top);
    for (int64_t i = 0; i < keys; i++)
        CHECK_NEAR(p[i], exp(s[i] - top) / sum, exp(s[i] - top) / sum * 2 * relative);
    for (int64_t d = 0; d < D; d++) {
        double mix = 0, size = 0;
        for (int64_t i = 0; i < keys; i++) {
            mix += exp(s[i] - top) / sum * (double)v[i * H * D + d];
            size += exp(s[i] - top) / sum * fabs((double)v[i * H * D + d]);
        }
        CHECK_NEAR(o[d], mix, size * (2 * relative + (64 + (double)keys / 64 + 1) * UNIT));
    }
}

TEST(segment_attention_matches_double_and_its_three_steps_match_it_in_bits)
{
    for (int n = 0; n < SEGMENTS_CASES; n++) {
        const segments_case *const c = segments_cases + n;
        const int64_t H = c->H, W = c->D, N = tokens_of(c);
        float *const q = random_floats(N * H * W), *const k = random_floats(N * H * W),
                     *const v = random_floats(N * H * W);
        float *const o = empty_floats(N * H * W), *const o2 = empty_floats(N * H * W),
                     *const o3 = empty_floats(N * H * W);
        float *const p = empty_floats(H * N * N), *const s = empty_floats(H * N * N),
                     *const p3 = empty_floats(H * N * N);
        const qr_array lengths = I(c->lengths, c->G);
        RUN("segment_attention", ARRAYS(F(q, N, H, W), F(k, N, H, W), F(v, N, H, W), lengths), SCALARS(0.7),
            F(o, N, H, W), F(p, H, N, N));
        RUN("segment_attention", ARRAYS(F(q, N, H, W), F(k, N, H, W), F(v, N, H, W), lengths), SCALARS(0.7),
            F(o2, N, H, W), NONE);
        RUN("segment_scores", ARRAYS(F(q, N, H, W), F(k, N, H, W), lengths), SCALARS(0.7), F(s, H, N, N));
        RUN("segment_softmax", ARRAYS(F(s, H, N, N), lengths), NULL, F(p3, H, N, N));
        RUN("segment_mix", ARRAYS(F(p3, H, N, N), F(v, N, H, W), lengths), NULL, F(o3, N, H, W));
        CHECK(same_floats(o, o2, N * H * W));
        CHECK(same_floats(o, o3, N * H * W));
        CHECK(same_floats(p, p3, H * N * N));
        for (int64_t g = 0, begin = 0; g < c->G; begin += c->lengths[g++])
            for (int64_t h = 0; h < H; h++)
                for (int64_t t = begin; t < begin + c->lengths[g]; t++) {
                    const int64_t at = (t * H + h) * W, first = (begin * H + h) * W;
                    const float *const row = p + (h * N + t) * N;
                    check_query(q + at, k + first, v + first, c->lengths[g], H, W, (double)0.7f, o + at, row + begin);
                    for (int64_t i = 0; i < N; i++) {
                        const bool inside = i >= begin && i < begin + c->lengths[g];
                        CHECK(inside || (row[i] == 0 && s[(h * N + t) * N + i] == -INFINITY));
                    }
                }
        free(q), free(k), free(v), free(o), free(o2), free(o3), free(p), free(s), free(p3);
    }
}

TEST(a_segment_has_the_bits_of_the_segment_alone)
{
    enum { H = 3, W = 24, N = 90, AT = 41, OWN = 37 };
    const int64_t lengths[] = {AT, OWN, N - AT - OWN}, own[] = {OWN};
    float *const q = random_floats(N * H * W), *const k = random_floats(N * H * W), *const v = random_floats(N * H * W);
    float *const all = empty_floats(N * H * W), *const one = empty_floats(OWN * H * W);
    for (int64_t i = 0; i < N * H * W; i++) /* the others may hold anything */
        if (i < AT * H * W || i >= (AT + OWN) * H * W)
            q[i] = k[i] = v[i] = NAN;
    const int64_t at = AT * H * W;
    RUN("segment_attention", ARRAYS(F(q, N, H, W), F(k, N, H, W), F(v, N, H, W), I(lengths, 3)), SCALARS(0.2),
        F(all, N, H, W), NONE);
    RUN("segment_attention", ARRAYS(F(q + at, OWN, H, W), F(k + at, OWN, H, W), F(v + at, OWN, H, W), I(own, 1)),
        SCALARS(0.2), F(one, OWN, H, W), NONE);
    CHECK(same_floats(all + at, one, OWN * H * W));
    free(q), free(k), free(v), free(all), free(one);
}

TEST(segments_that_are_not_the_tokens_are_refused)
{
    const int64_t wrong[][3] = {{2, 2, 1}, {2, -1, 5}, {2, 2, 3}, {1, INT64_MAX, INT64_MAX}};
    float x[6 * 2] = {0}, y[6 * 2];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        RUN_FAILS(QR_BAD_INPUT, "segment_attention",
                  ARRAYS(F(x, 6, 1, 2), F(x, 6, 1, 2), F(x, 6, 1, 2), I(wrong[i], 3)), SCALARS(1), F(y, 6, 1, 2), NONE);
}

TEST(a_table_is_its_entries_at_whole_places_and_lines_between_them)
{
    enum { R = 5, C = 3, W = 19, N = 40 };
    float *const w = random_floats(R * C * W), *const y = empty_floats(N * W);
    double row[N], column[N];
    for (int i = 0; i < N; i++) {
        row[i] = i < R * C ? i / C : (double)(random_float() + 1) * (R - 1) / 2;
        column[i] = i < R * C ? i % C : (double)(random_float() + 1) * (C - 1) / 2;
    }
    RUN("sample_table", ARRAYS(F(w, R, C, W), D(row, N), D(column, N)), NULL, F(y, N, W));
    CHECK(same_floats(y, w, R * C * W));
    for (int i = 0; i < N; i++)
        for (int d = 0; d < W; d++) {
            double sum = 0;
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) {
                    const double near = fmax(0, 1 - fabs(row[i] - r)) * fmax(0, 1 - fabs(column[i] - c));
                    sum += near * (double)w[(r * C + c) * W + d];
                }
            CHECK_NEAR(y[i * W + d], sum, fabs(sum) * UNIT + 0x1p-50);
        }
    row[3] = 4.001;
    RUN_FAILS(QR_BAD_INPUT, "sample_table", ARRAYS(F(w, R, C, W), D(row, N), D(column, N)), NULL, F(y, N, W));
    row[3] = NAN;
    RUN_FAILS(QR_BAD_INPUT, "sample_table", ARRAYS(F(w, R, C, W), D(row, N), D(column, N)), NULL, F(y, N, W));
    free(w), free(y);
}

TEST(angles_in_two_directions_turn_whole_heads)
{
    enum { N = 7, H = 2, F_ = 5 };
    const int64_t positions[2][N] = {{0, 0, 1, 1, 47, 1000, 3}, {0, 1, 0, 1, 89, 7, -2}};
    const double f[F_] = {1, 0.3, 0.1, 0.01, 0.0001};
    float c[N * 2 * F_], s[N * 2 * F_], y[N * H * 4 * F_];
    float *const x = random_floats(N * H * 4 * F_);
    RUN("grid_table", ARRAYS(I(positions, 2, N), D(f, F_)), NULL, F(c, N, 2, F_), F(s, N, 2, F_));
    RUN("rope_whole", ARRAYS(F(x, N, H, 4 * F_), F(c, N, 2 * F_), F(s, N, 2 * F_)), NULL, F(y, N, H, 4 * F_));
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 2 * F_; i++) {
            const double angle = (double)positions[i / F_][n] * f[i % F_];
            const double co = (double)c[n * 2 * F_ + i], si = (double)s[n * 2 * F_ + i];
            CHECK_NEAR(co, cos(angle), fabs(cos(angle)) * UNIT * (1 + 1e-6) + 0x1p-60);
            CHECK_NEAR(si, sin(angle), fabs(sin(angle)) * UNIT * (1 + 1e-6) + 0x1p-60);
            for (int h = 0; h < H; h++) {
                const float *const in = x + (n * H + h) * 4 * F_ + i, *const out = y + (n * H + h) * 4 * F_ + i;
                const double a = (double)in[0], b = (double)in[2 * F_];
                CHECK_NEAR(out[0], a * co - b * si, 2 * UNIT * (fabs(a * co) + fabs(b * si)));
                CHECK_NEAR(out[2 * F_], b * co + a * si, 2 * UNIT * (fabs(b * co) + fabs(a * si)));
            }
        }
    RUN_FAILS(QR_BAD_SHAPE, "rope_whole", ARRAYS(F(x, N, H, 7), F(c, N, F_), F(s, N, F_)), NULL, F(y, N, H, 7));
    free(x);
}

RUN_TESTS()
