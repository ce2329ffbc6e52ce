/* Attention, causal convolution and the gated delta rule against double precision, and what their state promises: any
 * split of a prompt, any packing and any choice of outputs give the same bits. */
#include "run_op.h"

/* ---- attention ---- */

typedef struct attention_case {
    int64_t B, T, Q, K, S, D;
} attention_case;

static const attention_case attention_cases[] = {
    {1, 1, 1, 1, 1, 1},     {2, 5, 6, 2, 9, 8}, {1, 3, 4, 4, 70, 24}, {2, 7, 12, 2, 33, 17}, {1, 1, 24, 4, 200, 64},
    {1, 65, 4, 1, 130, 32}, {1, 2, 3, 3, 4, 3}, {0, 3, 2, 1, 4, 8},   {2, 0, 2, 1, 4, 8},    {1, 3, 2, 1, 0, 8},
};
enum { ATTENTION_CASES = sizeof attention_cases / sizeof *attention_cases };

/* Ranges of every kind: causal, all, empty, in the middle. */
static void fill_ranges(int64_t *begin, int64_t *end, const attention_case *c)
{
    for (int64_t i = 0; i < c->B * c->T; i++) {
        const int64_t t = i % c->T, causal = c->S - c->T + t + 1;
        begin[i] = i % 5 == 3 ? c->S / 3 : 0;
        end[i] = causal < 0 ? 0 : causal > c->S ? c->S : causal;
        if (i % 7 == 4 || end[i] < begin[i])
            begin[i] = end[i] = c->S / 2;
    }
}

/* What the float32 op may be off by: a score has D/16 + 1 + 4 + 1 roundings; an error e in every score moves a
 * probability by a factor 1 + 2e; softmax adds |x - top| + 8 units; the mix is one chain of n. */
static void check_attention_row(const attention_case *c, const float *q, const float *k, const float *v, int64_t begin,
                                int64_t end, double scale, const float *o, const float *p)
{
    double s[256], top = -INFINITY, low = INFINITY, sum = 0, score_error = 0;
    for (int64_t i = begin; i < end; i++) {
        double size = 0;
        s[i] = 0;
        for (int64_t d = 0; d < c->D; d++) {
            s[i] += (double)q[d] * (double)k[i * c->D + d] * scale;
            size += fabs((double)q[d] * (double)k[i * c->D + d] * scale);
        }
        top = s[i] > top ? s[i] : top;
        low = s[i] < low ? s[i] : low;
        size *= ((double)c->D / 16 + 6) * UNIT;
        score_error = size > score_error ? size : score_error;
    }
    const double relative = begin < end ? 2 * score_error + (top - low + 8) * UNIT : 0;
    for (int64_t i = begin; i < end; i++)
        sum += exp(s[i] - top);
    for (int64_t i = 0; i < c->S; i++) {
        const double expected = i >= begin && i < end ? exp(s[i] - top) / sum : 0;
        CHECK_NEAR(p[i], expected, expected * 2 * relative);
    }
    for (int64_t d = 0; d < c->D; d++) {
        double mix = 0, size = 0;
        for (int64_t i = begin; i < end; i++) {
            mix += exp(s[i] - top) / sum * (double)v[i * c->D + d];
            size += exp(s[i] - top) / sum * fabs((double)v[i * c->D + d]);
        }
        CHECK_NEAR(o[d], mix, size * (2 * relative + (double)(end - begin) * UNIT));
    }
}

TEST(attention_matches_double_and_its_three_steps_match_it_in_bits)
{
    for (int n = 0; n < ATTENTION_CASES; n++) {
        const attention_case c = attention_cases[n];
        const int64_t B = c.B, T = c.T, Q = c.Q, K = c.K, S = c.S, W = c.D;
        float *const q = random_floats(B * T * Q * W), *const k = random_floats(B * K * S * W);
        float *const v = random_floats(B * K * S * W), *const o = empty_floats(B * T * Q * W);
        float *const o2 = empty_floats(B * T * Q * W), *const o3 = empty_floats(B * T * Q * W);
        float *const p = empty_floats(B * Q * T * S), *const s = empty_floats(B * Q * T * S);
        float *const p3 = empty_floats(B * Q * T * S);
        int64_t begin[256], end[256];
        const double scale = 1.7 / sqrt((double)W);
        fill_ranges(begin, end, &c);
        const qr_array ask[5] = {F(q, B, T, Q, W), F(k, B, K, S, W), F(v, B, K, S, W), I(begin, B, T), I(end, B, T)};
        RUN("attention", ask, SCALARS(scale), F(o, B, T, Q, W), F(p, B, Q, T, S));
        RUN("attention", ask, SCALARS(scale), F(o2, B, T, Q, W), NONE);
        CHECK(same_floats(o, o2, B * T * Q * W));
        RUN("attention_scores", ARRAYS(ask[0], ask[1], ask[3], ask[4]), SCALARS(scale), F(s, B, Q, T, S));
        RUN("attention_softmax", ARRAYS(F(s, B, Q, T, S), ask[3], ask[4]), NULL, F(p3, B, Q, T, S));
        RUN("attention_mix", ARRAYS(F(p3, B, Q, T, S), ask[2], ask[3], ask[4]), NULL, F(o3, B, T, Q, W));
        CHECK(same_floats(o, o3, B * T * Q * W));
        CHECK(same_floats(p, p3, B * Q * T * S));
        for (int64_t i = 0; i < B * Q * T; i++) {
            const int64_t t = i % T, h = i / T % Q, b = i / T / Q, head = (b * K + h / (Q / K)) * S * W;
            const int64_t at = ((b * T + t) * Q + h) * W;
            check_attention_row(&c, q + at, k + head, v + head, begin[b * T + t], end[b * T + t], (double)(float)scale,
                                o + at, p + i * S);
            for (int64_t j = 0; j < S; j++)
                CHECK((s[i * S + j] == -INFINITY) == (j < begin[b * T + t] || j >= end[b * T + t]));
        }
        free(q), free(k), free(v), free(o), free(o2), free(o3), free(p), free(s), free(p3);
    }
}

/* Keys 5..24 of a cache whose strides leave room for more, against the same twenty keys alone; the rest is NaN. */
TEST(attention_of_a_packed_sequence_is_that_of_the_sequence_alone)
{
    enum { T = 9, Q = 4, K = 2, S = 20, ROOM = 40, W = 24, AT = 5 };
    float *const q = random_floats(T * Q * W), *const k = random_floats(K * S * W), *const v = random_floats(K * S * W);
    float *const alone = empty_floats(T * Q * W), *const packed = empty_floats(T * Q * W);
    float *const wide_k = empty_floats(K * ROOM * W), *const wide_v = empty_floats(K * ROOM * W);
    int64_t begin[T], end[T];
    for (int t = 0; t < T; t++)
        begin[t] = 0, end[t] = S - T + t + 1;
    RUN("attention", ARRAYS(F(q, 1, T, Q, W), F(k, 1, K, S, W), F(v, 1, K, S, W), I(begin, 1, T), I(end, 1, T)),
        SCALARS(0.3), F(alone, 1, T, Q, W), NONE);
    for (int i = 0; i < K * ROOM * W; i++)
        wide_k[i] = wide_v[i] = NAN;
    for (int h = 0; h < K; h++) {
        memcpy(wide_k + (h * ROOM + AT) * W, k + h * S * W, S * W * sizeof *k);
        memcpy(wide_v + (h * ROOM + AT) * W, v + h * S * W, S * W * sizeof *v);
    }
    for (int t = 0; t < T; t++)
        begin[t] += AT, end[t] += AT;
    qr_array cache_k = F(wide_k, 1, K, AT + S + 3, W), cache_v = F(wide_v, 1, K, AT + S + 3, W);
    cache_k.stride[1] = cache_v.stride[1] = ROOM * W;
    RUN("attention", ARRAYS(F(q, 1, T, Q, W), cache_k, cache_v, I(begin, 1, T), I(end, 1, T)), SCALARS(0.3),
        F(packed, 1, T, Q, W), NONE);
    CHECK(same_floats(alone, packed, T * Q * W));

    /* one query at a time, as decode asks */
    for (int t = 0; t < T; t++) {
        RUN("attention", ARRAYS(F(q + t * Q * W, 1, 1, Q, W), cache_k, cache_v, I(begin + t, 1, 1), I(end + t, 1, 1)),
            SCALARS(0.3), F(packed + t * Q * W, 1, 1, Q, W), NONE);
    }
    CHECK(same_floats(alone, packed, T * Q * W));
    free(q), free(k), free(v), free(alone), free(packed), free(wide_k), free(wide_v);
}

TEST(attention_refuses_uneven_groups_and_ranges_outside_the_keys)
{
    float x[64] = {0}, o[64];
    int64_t begin[1] = {0}, end[1] = {2};
    RUN_FAILS(QR_BAD_SHAPE, "attention",
              ARRAYS(F(x, 1, 1, 3, 4), F(x, 1, 2, 2, 4), F(x, 1, 2, 2, 4), I(begin, 1, 1), I(end, 1, 1)), SCALARS(1),
              F(o, 1, 1, 3, 4), NONE);
    const int64_t wrong[][2] = {{0, 3}, {-1, 2}, {2, 1}};
    for (int i = 0; i < 3; i++) {
        begin[0] = wrong[i][0], end[0] = wrong[i][1];
        RUN_FAILS(QR_BAD_INPUT, "attention",
                  ARRAYS(F(x, 1, 1, 2, 4), F(x, 1, 2, 2, 4), F(x, 1, 2, 2, 4), I(begin, 1, 1), I(end, 1, 1)),
                  SCALARS(1), F(o, 1, 1, 2, 4), NONE);
    }
}

/* ---- steps shared by the two recurrent ops ---- */

enum { SKIP, ADVANCE, RESTART };

static void fill_steps(int64_t *step, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        step[i] = i % 7 == 2 ? SKIP : i % 11 == 8 ? RESTART : ADVANCE;
}

/* Prompt lengths that a prompt of `total` tokens is cut into: 1, 2, 3, ... */
static int64_t piece(int64_t done, int64_t total, int64_t nth)
{
    return done + nth < total ? nth : total - done;
}

/* ---- convolution ---- */

TEST(conv_matches_double_with_every_kind_of_step)
{
    const int64_t cases[][4] = {{1, 1, 1, 4},     {2, 9, 5, 4},  {1, 40, 67, 2}, {2, 12, 16, 1},
                                {2, 200, 300, 4}, {1, 3, 20, 7}, {0, 3, 4, 4},   {2, 0, 6, 4}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        for (int with = 0; with < 4; with++) { /* bit 0: a window is given; bit 1: steps are given */
            const int64_t B = cases[n][0], T = cases[n][1], C = cases[n][2], W = cases[n][3];
            float *const x = random_floats(B * T * C), *const w = random_floats(C * W);
            float *const window = random_floats(B * C * (W - 1)), *const y = empty_floats(B * T * C);
            float *const next = empty_floats(B * C * (W - 1));
            int64_t step[512];
            fill_steps(step, B * T);
            RUN("causal_conv1d",
                ARRAYS(F(x, B, T, C), F(w, C, 1, W), with & 1 ? F(window, B, C, W - 1) : NONE,
                       with & 2 ? I(step, B, T) : NONE),
                NULL, F(y, B, T, C), F(next, B, C, W - 1));
            for (int64_t i = 0; i < B * C; i++) {
                const int64_t b = i / C, c = i % C;
                double history[8] = {0};
                for (int64_t j = 0; j < W - 1 && (with & 1); j++)
                    history[j] = (double)window[i * (W - 1) + j];
                for (int64_t t = 0; t < T; t++) {
                    const int64_t at = (b * T + t) * C + c, code = with & 2 ? step[b * T + t] : ADVANCE;
                    double sum = 0, size = 0;
                    if (code == RESTART)
                        memset(history, 0, sizeof history);
                    history[W - 1] = (double)x[at];
                    for (int64_t j = 0; j < W && code != SKIP; j++) {
                        sum += (double)w[c * W + j] * history[j];
                        size += fabs((double)w[c * W + j] * history[j]);
                    }
                    CHECK_NEAR(y[at], sum, (double)W * UNIT * size);
                    if (code != SKIP)
                        memmove(history, history + 1, sizeof history - sizeof *history);
                }
                for (int64_t j = 0; j < W - 1; j++)
                    CHECK((double)next[i * (W - 1) + j] == history[j]);
            }
            free(x), free(w), free(window), free(y), free(next);
        }
}

TEST(conv_of_a_split_prompt_has_the_bits_of_one_call)
{
    enum { T = 23, C = 70, W = 4 };
    float *const x = random_floats(T * C), *const w = random_floats(C * W), *const whole = empty_floats(T * C);
    float *const parts = empty_floats(T * C), *const last = empty_floats(C * (W - 1));
    float *const window = empty_floats(C * (W - 1)), *const next = empty_floats(C * (W - 1));
    int64_t step[T];
    fill_steps(step, T);
    RUN("causal_conv1d", ARRAYS(F(x, 1, T, C), F(w, C, 1, W), NONE, I(step, 1, T)), NULL, F(whole, 1, T, C),
        F(last, 1, C, W - 1));
    for (int64_t done = 0, n = 1; done < T; n++) {
        const int64_t m = piece(done, T, n);
        RUN("causal_conv1d",
            ARRAYS(F(x + done * C, 1, m, C), F(w, C, 1, W), F(window, 1, C, W - 1), I(step + done, 1, m)), NULL,
            F(parts + done * C, 1, m, C), F(next, 1, C, W - 1));
        memcpy(window, next, C * (W - 1) * sizeof *next);
        done += m;
    }
    CHECK(same_floats(whole, parts, T * C));
    CHECK(same_floats(last, next, C * (W - 1)));
    RUN("causal_conv1d", ARRAYS(F(x, 1, T, C), F(w, C, 1, W), NONE, I(step, 1, T)), NULL, F(parts, 1, T, C), NONE);
    CHECK(same_floats(whole, parts, T * C));
    step[4] = 3;
    RUN_FAILS(QR_BAD_INPUT, "causal_conv1d", ARRAYS(F(x, 1, T, C), F(w, C, 1, W), NONE, I(step, 1, T)), NULL,
              F(parts, 1, T, C), NONE);
    free(x), free(w), free(whole), free(parts), free(last), free(window), free(next);
}

/* ---- gated delta rule ---- */

typedef struct delta_case {
    int64_t B, T, G, H, K, V;
    float *q, *k, *v, *g, *beta, *state;
    float *recalled, *written; /* outputs, or NULL */
    int64_t step[512];
} delta_case;

static delta_case delta_inputs(int64_t B, int64_t T, int64_t G, int64_t H, int64_t K, int64_t V)
{
    delta_case c = {.B = B, .T = T, .G = G, .H = H, .K = K, .V = V};
    c.q = random_floats(B * T * G * K);
    c.k = random_floats(B * T * G * K);
    c.v = random_floats(B * T * H * V);
    c.g = random_floats(B * T * H);
    c.beta = random_floats(B * T * H);
    c.state = random_floats(B * H * K * V);
    for (int64_t i = 0; i < B * T * H; i++) {
        c.g[i] = -fabsf(c.g[i]);
        c.beta[i] = fabsf(c.beta[i]);
    }
    for (int64_t i = 0; i < B * T * G; i++) { /* keys of length one, as the layer has them: the recurrence is stable */
        double sum = 1e-6;
        for (int64_t j = 0; j < K; j++)
            sum += (double)c.k[i * K + j] * (double)c.k[i * K + j];
        for (int64_t j = 0; j < K; j++)
            c.k[i * K + j] /= (float)sqrt(sum);
    }
    fill_steps(c.step, B * T);
    return c;
}

static void delta_free(delta_case *c)
{
    free(c->q), free(c->k), free(c->v), free(c->g), free(c->beta), free(c->state), free(c->recalled), free(c->written);
}

/* Tokens first to first + n - 1 of a case with B = 1. */
static qr_error delta_run(const delta_case *c, int64_t first, int64_t n, float *state, bool steps, float *o,
                          float *final)
{
    const qr_array in[7] = {
        F(c->q + first * c->G * c->K, c->B, n, c->G, c->K), F(c->k + first * c->G * c->K, c->B, n, c->G, c->K),
        F(c->v + first * c->H * c->V, c->B, n, c->H, c->V), F(c->g + first * c->H, c->B, n, c->H),
        F(c->beta + first * c->H, c->B, n, c->H),           state != NULL ? F(state, c->B, c->H, c->K, c->V) : NONE,
        steps ? I(c->step + first, c->B, n) : NONE};
    const qr_array out[4] = {F(o, c->B, n, c->H, c->V), final != NULL ? F(final, c->B, c->H, c->K, c->V) : NONE,
                             c->recalled != NULL ? F(c->recalled, c->B, n, c->H, c->V) : NONE,
                             c->written != NULL ? F(c->written, c->B, n, c->H, c->V) : NONE};
    return run_op("gated_delta_rule", in, SCALARS(0.25), out, 4);
}

/* One head in double, beside a bound on what float32 may have lost so far: each step adds its own roundings and passes
 * on those of the state it read. One column of the state at a time, since columns never meet. */
static void delta_check(const delta_case *c, int64_t b, int64_t h, bool state, bool steps, const float *o,
                        const float *final)
{
    const int64_t T = c->T, K = c->K, V = c->V, group = h / (c->H / c->G);
    const double chain = ((double)K / 4 + 4) * UNIT;
    for (int64_t col = 0; col < V; col++) {
        double S[128] = {0}, E[128] = {0};
        for (int64_t i = 0; i < K && state; i++)
            S[i] = (double)c->state[((b * c->H + h) * K + i) * V + col];
        for (int64_t t = 0; t < T; t++) {
            const int64_t token = b * T + t, code = steps ? c->step[token] : ADVANCE;
            const float *const q = c->q + (token * c->G + group) * K, *const k = c->k + (token * c->G + group) * K;
            const double decay = exp((double)c->g[token * c->H + h]), beta = (double)c->beta[token * c->H + h];
            const double v = (double)c->v[(token * c->H + h) * V + col];
            double read = 0, read_error = 0, out = 0, out_error = 0;
            if (code == SKIP) {
                const int64_t at = (token * c->H + h) * V + col;
                CHECK(o[at] == 0 && c->recalled[at] == 0 && c->written[at] == 0);
                continue;
            }
            for (int64_t i = 0; i < K; i++) {
                S[i] = code == RESTART ? 0 : S[i] * decay;
                E[i] = code == RESTART ? 0 : E[i] * decay + fabs(S[i]) * (2 * 2 + 1) * UNIT;
                read += (double)k[i] * S[i];
                read_error += fabs((double)k[i]) * (E[i] + chain * fabs(S[i]));
            }
            const double u = (v - read) * beta, u_error = beta * read_error + 2 * UNIT * fabs(u);
            for (int64_t i = 0; i < K; i++) {
                S[i] += (double)k[i] * u;
                E[i] += fabs((double)k[i]) * u_error + UNIT * fabs(S[i]);
                out += 0.25 * (double)q[i] * S[i];
                out_error += 0.25 * fabs((double)q[i]) * (E[i] + (chain + UNIT) * fabs(S[i]));
            }
            /* products of two small errors are what the factor 1.01 stands for */
            CHECK_NEAR(o[(token * c->H + h) * V + col], out, 1.01 * out_error);
            CHECK_NEAR(c->recalled[(token * c->H + h) * V + col], read, 1.01 * read_error);
            CHECK_NEAR(c->written[(token * c->H + h) * V + col], u, 1.01 * u_error);
        }
        for (int64_t i = 0; i < K; i++)
            CHECK_NEAR(final[((b * c->H + h) * K + i) * V + col], S[i], 1.01 * E[i]);
    }
}

TEST(delta_rule_matches_double_with_every_kind_of_step)
{
    const int64_t cases[][6] = {{1, 1, 1, 1, 1, 1},    {2, 5, 2, 4, 8, 8},      {1, 20, 1, 3, 24, 24},
                                {2, 30, 2, 2, 32, 40}, {1, 70, 2, 4, 128, 128}, {1, 9, 1, 2, 7, 33},
                                {0, 3, 1, 2, 8, 8},    {2, 0, 1, 2, 8, 8}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        for (int with = 0; with < 4; with++) { /* bit 0: a state is given; bit 1: steps are given */
            const int64_t *const d = cases[n];
            delta_case c = delta_inputs(d[0], d[1], d[2], d[3], d[4], d[5]);
            float *const o = empty_floats(c.B * c.T * c.H * c.V), *const final = empty_floats(c.B * c.H * c.K * c.V);
            const bool state = with & 1, steps = with & 2;
            c.recalled = empty_floats(c.B * c.T * c.H * c.V);
            c.written = empty_floats(c.B * c.T * c.H * c.V);
            CHECK_INT(delta_run(&c, 0, c.T, state ? c.state : NULL, steps, o, final).kind, QR_OK);
            for (int64_t i = 0; i < c.B * c.H; i++)
                delta_check(&c, i / c.H, i % c.H, state, steps, o, final);
            delta_free(&c);
            free(o), free(final);
        }
}

TEST(delta_rule_split_batched_or_without_its_state_has_the_same_bits)
{
    delta_case c = delta_inputs(1, 23, 2, 4, 32, 40);
    const int64_t size = c.H * c.K * c.V, row = c.H * c.V;
    float *const whole = empty_floats(c.T * row), *const parts = empty_floats(c.T * row);
    float *const last = empty_floats(size), *const state = empty_floats(size), *const before = empty_floats(size);
    memcpy(before, c.state, (size_t)size * sizeof *before);
    CHECK_INT(delta_run(&c, 0, c.T, c.state, true, whole, last).kind, QR_OK);
    CHECK(same_floats(before, c.state, size)); /* the state that was passed in is not touched */
    CHECK_INT(delta_run(&c, 0, c.T, c.state, true, parts, NULL).kind, QR_OK);
    CHECK(same_floats(whole, parts, c.T * row));

    memcpy(state, c.state, (size_t)size * sizeof *state);
    for (int64_t done = 0, n = 1; done < c.T; n++) {
        const int64_t m = piece(done, c.T, n);
        CHECK_INT(delta_run(&c, done, m, state, true, parts + done * row, before).kind, QR_OK);
        memcpy(state, before, (size_t)size * sizeof *state);
        done += m;
    }
    CHECK(same_floats(whole, parts, c.T * row));
    CHECK(same_floats(last, state, size));
    delta_free(&c);
    free(whole), free(parts), free(last), free(state), free(before);
}

TEST(delta_rule_may_write_its_final_state_over_the_state_it_read)
{
    delta_case c = delta_inputs(1, 6, 1, 2, 24, 40);
    const int64_t size = c.H * c.K * c.V;
    float *const o = empty_floats(c.T * c.H * c.V), *const last = empty_floats(size);
    CHECK_INT(delta_run(&c, 0, c.T, c.state, false, o, last).kind, QR_OK);
    const qr_array in[7] = {F(c.q, 1, c.T, c.G, c.K),
                            F(c.k, 1, c.T, c.G, c.K),
                            F(c.v, 1, c.T, c.H, c.V),
                            F(c.g, 1, c.T, c.H),
                            F(c.beta, 1, c.T, c.H),
                            F(c.state, 1, c.H, c.K, c.V),
                            NONE};
    CHECK_INT(run_once(QR_SCALAR, 3, "gated_delta_rule", in, SCALARS(0.25),
                       ARRAYS(F(o, 1, c.T, c.H, c.V), F(c.state, 1, c.H, c.K, c.V)), 2)
                  .kind,
              QR_OK);
    CHECK(same_floats(last, c.state, size));
    delta_free(&c);
    free(o), free(last);
}

static double largest(const float *x, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fabs((double)x[i]) > most ? fabs((double)x[i]) : most;
    return most;
}

/* On every level and thread count the bits of the first, with scratch that holds NaN; within what running sums of up to 64
 * times -1, each rounded, do to a decay. More is in the tests that know the definition in double. */
TEST(the_chunked_delta_rule_is_the_delta_rule)
{
    const int64_t cases[][6] = {{1, 1, 1, 1, 1, 1},    {2, 5, 2, 4, 8, 8},  {1, 200, 1, 3, 24, 20},
                                {2, 65, 2, 2, 32, 40}, {1, 9, 1, 2, 7, 33}, {1, 130, 2, 4, 16, 16},
                                {0, 3, 1, 2, 8, 8},    {2, 0, 1, 2, 8, 8}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        for (int with = 0; with < 4; with++) { /* bit 0: a state is given; bit 1: steps are given */
            const int64_t *const d = cases[n], B = d[0], T = d[1], G = d[2], H = d[3], K = d[4], V = d[5];
            delta_case c = delta_inputs(B, T, G, H, K, V);
            float *const o = empty_floats(B * T * H * V), *const final = empty_floats(B * H * K * V);
            float *const o2 = empty_floats(B * T * H * V), *const final2 = empty_floats(B * H * K * V);
            const qr_array in[7] = {F(c.q, B, T, G, K),
                                    F(c.k, B, T, G, K),
                                    F(c.v, B, T, H, V),
                                    F(c.g, B, T, H),
                                    F(c.beta, B, T, H),
                                    with & 1 ? F(c.state, B, H, K, V) : NONE,
                                    with & 2 ? I(c.step, B, T) : NONE};
            RUN("gated_delta_rule_chunked", in, SCALARS(0.25), F(o, B, T, H, V), F(final, B, H, K, V));
            CHECK_INT(delta_run(&c, 0, T, with & 1 ? c.state : NULL, with & 2, o2, final2).kind, QR_OK);
            for (int64_t i = 0; i < B * T * H * V; i++)
                CHECK_NEAR(o[i], o2[i], 65 * 64 * UNIT * largest(o2, B * T * H * V));
            for (int64_t i = 0; i < B * H * K * V; i++)
                CHECK_NEAR(final[i], final2[i], 65 * 64 * UNIT * largest(final2, B * H * K * V));
            RUN("gated_delta_rule_chunked", in, SCALARS(0.25), F(o2, B, T, H, V), NONE);
            CHECK(same_floats(o, o2, B * T * H * V));
            delta_free(&c);
            free(o), free(final), free(o2), free(final2);
        }
}

TEST(delta_rule_refuses_uneven_groups_and_unknown_steps)
{
    delta_case c = delta_inputs(1, 2, 2, 3, 4, 4);
    float o[24];
    CHECK_INT(delta_run(&c, 0, c.T, NULL, false, o, NULL).kind, QR_BAD_SHAPE);
    delta_free(&c);
    c = delta_inputs(1, 2, 1, 3, 4, 4);
    c.step[1] = -1;
    CHECK_INT(delta_run(&c, 0, c.T, NULL, true, o, NULL).kind, QR_BAD_INPUT);
    delta_free(&c);
}

RUN_TESTS()
