/* The gated delta rule: a recurrence over tokens on a state of K x V per value head. */
#include "kernel.h"

enum { DELTA_BLOCK = 32 }; /* value columns that run through the whole prompt together, contiguous and in L1 */

typedef struct delta_task {
    float *o, *final, *recalled, *written, *block, *query; /* block[threads,K,32], query[threads,K] */
    const float *q, *k, *v, *g, *beta, *state;
    const int64_t *step;
    int64_t T, G, H, K, V, blocks;
    float scale;
} delta_task;

/* One token on sixteen columns:
 *     S *= exp(g);  u = (v - k^T S) beta;  S += k u^T;  o = (q scale)^T S
 * Each sum over the key index is four chains of fused multiply-adds, index i in chain i mod 4, added as (0+1)+(2+3).
 * The decayed S is computed again in the second pass instead of being stored in the first: same rounding, fewer writes. */
QR_INLINE lanes delta_read(lanes sum, const float *S, float k, lanes decay)
{
    return lanes_fma(lanes_set(k), lanes_mul(lanes_load(S), decay), sum);
}

QR_INLINE lanes delta_write(lanes sum, float *S, float q, float k, lanes u, lanes decay)
{
    const lanes s = lanes_fma(lanes_set(k), u, lanes_mul(lanes_load(S), decay));
    lanes_store(S, s);
    return lanes_fma(lanes_set(q), s, sum);
}

static void delta_token(float *o, float *recalled, float *written, float *S, const float *q, const float *k,
                        const float *v, int64_t K, float exp_g, float beta)
{
    enum { ROW = DELTA_BLOCK };
    const lanes decay = lanes_set(exp_g);
    lanes s0 = lanes_set(0), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 4 <= K; i += 4) {
        s0 = delta_read(s0, S + i * ROW, k[i], decay);
        s1 = delta_read(s1, S + (i + 1) * ROW, k[i + 1], decay);
        s2 = delta_read(s2, S + (i + 2) * ROW, k[i + 2], decay);
        s3 = delta_read(s3, S + (i + 3) * ROW, k[i + 3], decay);
    }
    if (i < K)
        s0 = delta_read(s0, S + i * ROW, k[i], decay);
    if (i + 1 < K)
        s1 = delta_read(s1, S + (i + 1) * ROW, k[i + 1], decay);
    if (i + 2 < K)
        s2 = delta_read(s2, S + (i + 2) * ROW, k[i + 2], decay);

    const lanes read = lanes_add(lanes_add(s0, s1), lanes_add(s2, s3));
    const lanes u = lanes_mul(lanes_sub(lanes_load(v), read), lanes_set(beta));
    lanes_store(recalled, read);
    lanes_store(written, u);

    s0 = s1 = s2 = s3 = lanes_set(0);
    for (i = 0; i + 4 <= K; i += 4) {
        s0 = delta_write(s0, S + i * ROW, q[i], k[i], u, decay);
        s1 = delta_write(s1, S + (i + 1) * ROW, q[i + 1], k[i + 1], u, decay);
        s2 = delta_write(s2, S + (i + 2) * ROW, q[i + 2], k[i + 2], u, decay);
        s3 = delta_write(s3, S + (i + 3) * ROW, q[i + 3], k[i + 3], u, decay);
    }
    if (i < K)
        s0 = delta_write(s0, S + i * ROW, q[i], k[i], u, decay);
    if (i + 1 < K)
        s1 = delta_write(s1, S + (i + 1) * ROW, q[i + 1], k[i + 1], u, decay);
    if (i + 2 < K)
        s2 = delta_write(s2, S + (i + 2) * ROW, q[i + 2], k[i + 2], u, decay);
    lanes_store(o, lanes_add(lanes_add(s0, s1), lanes_add(s2, s3)));
}

/* K rows of `width` columns. By registers: a call of memcpy for each
 * row of 128 bytes took most of the time of a single token. */
static void copy_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t K, int64_t width)
{
    for (int64_t i = 0; i < K; i++, to += to_stride, from += from_stride) {
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES)
            lanes_store(to + c, lanes_load(from + c));
        if (c < width)
            lanes_store_tail(to + c, lanes_load_tail(from + c, width - c, 0), width - c);
    }
}

static void delta_block(const delta_task *task, int64_t b, int64_t h, int64_t block, int thread)
{
    const int64_t T = task->T, G = task->G, H = task->H, K = task->K, V = task->V;
    const int64_t c0 = block * DELTA_BLOCK, width = V - c0 < DELTA_BLOCK ? V - c0 : DELTA_BLOCK;
    const int64_t at = (b * H + h) * K * V + c0, group = h / (H / G);
    const size_t bytes = (size_t)width * sizeof(float), all = (size_t)(K * DELTA_BLOCK) * sizeof(float);
    float *const S = task->block + thread * K * DELTA_BLOCK, *const scaled = task->query + thread * K;
    float v[DELTA_BLOCK] = {0}, o[DELTA_BLOCK], recalled[DELTA_BLOCK], written[DELTA_BLOCK];

    if (task->state == NULL || width < DELTA_BLOCK)
        memset(S, 0, all);
    if (task->state != NULL)
        copy_rows(S, DELTA_BLOCK, task->state + at, V, K, width);
    for (int64_t t = 0; t < T; t++) {
        const int64_t token = b * T + t, code = task->step != NULL ? task->step[token] : STEP_ADVANCE;
        const int64_t place = (token * H + h) * V + c0;
        if (code == STEP_SKIP) {
            memset(task->o + place, 0, bytes);
            if (task->recalled != NULL)
                memset(task->recalled + place, 0, bytes);
            if (task->written != NULL)
                memset(task->written + place, 0, bytes);
            continue;
        }
        if (code == STEP_RESTART)
            memset(S, 0, all);
        memcpy(v, task->v + place, bytes);
        const float *const q = task->q + (token * G + group) * K, *const k = task->k + (token * G + group) * K;
        const float exp_g = qr_exp(task->g[token * H + h]), beta = task->beta[token * H + h];
        for (int64_t i = 0; i < K; i++)
            scaled[i] = q[i] * task->scale;
        for (int64_t c = 0; c < width; c += LANES)
            delta_token(o + c, recalled + c, written + c, S + c, scaled, k, v + c, K, exp_g, beta);
        memcpy(task->o + place, o, bytes);
        if (task->recalled != NULL)
            memcpy(task->recalled + place, recalled, bytes);
        if (task->written != NULL)
            memcpy(task->written + place, written, bytes);
    }
    if (task->final != NULL)
        copy_rows(task->final + at, V, S, DELTA_BLOCK, K, width);
}

static void delta_blocks(void *context, int64_t begin, int64_t end, int thread)
{
    const delta_task *const task = context;
    for (int64_t i = begin; i < end; i++)
        delta_block(task, i / task->blocks / task->H, i / task->blocks % task->H, i % task->blocks, thread);
}

static bool heads_fall_into_groups(qr_call *call, int64_t G, int64_t H)
{
    if (G == 0 ? H == 0 : H % G == 0)
        return true;
    qr_fail(call->error, QR_BAD_SHAPE,
            "%s: value heads do not fall into groups of equal size\n    found    %lld value heads, %lld key heads",
            call->name, (long long)H, (long long)G);
    return false;
}

QR_OP(gated_delta_rule,
      "gated_delta_rule(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?, "
      "step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?, recalled[B,T,H,V]:f?, written[B,T,H,V]:f?, "
      "_block[#,K,32]:f, _query[#,K]:f",
      "per token: S *= exp(g), recalled = k^T S, written = u = (v - recalled) beta, S += k u^T, o = (q scale)^T S; "
      "step 0 skips, 2 zeroes S first")
{
    const int64_t B = DIM('B'), T = DIM('T'), G = DIM('G'), H = DIM('H'), K = DIM('K'), V = DIM('V');
    delta_task task = {.o = OUT(0),
                       .final = OUT(1),
                       .recalled = OUT(2),
                       .written = OUT(3),
                       .block = OUT(4),
                       .query = OUT(5),
                       .q = IN(0),
                       .k = IN(1),
                       .v = IN(2),
                       .g = IN(3),
                       .beta = IN(4),
                       .state = IN(5),
                       .step = IN_I64(6),
                       .T = T,
                       .G = G,
                       .H = H,
                       .K = K,
                       .V = V,
                       .blocks = (V + DELTA_BLOCK - 1) / DELTA_BLOCK,
                       .scale = (float)SCALAR(0)};
    if (heads_fall_into_groups(call, G, H) && steps_are_valid(call, task.step, B * T, T))
        qr_parallel(call, B * H * task.blocks, grain_of((double)(T + 1) * (double)(K + 1) * DELTA_BLOCK), delta_blocks,
                    &task);
}
