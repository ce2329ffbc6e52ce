/* The gated delta rule: a recurrence over tokens on a state of K x V per value head. */
#include "kernel.h"

enum { DELTA_BLOCK = 32 }; /* value columns that run through the whole prompt together, contiguous and in L1 */

typedef struct delta_task {
    float *o, *final, *block; /* block[threads,K,32] */
    const float *q, *k, *v, *g, *beta, *state;
    const int64_t *step;
    int64_t T, G, H, K, V, blocks;
    float scale;
} delta_task;

/* One token on one block of columns:
 *     S *= exp(g);  u = (v - k^T S) beta;  S += k u^T;  o = (q scale)^T S
 * Each sum over the key index is four chains of fused multiply-adds, index i in chain i mod 4, added as (0+1)+(2+3).
 * The decayed S is computed again in the second pass instead of being stored in the first: same rounding, fewer writes. */
QR_INLINE void delta_token(float *S, const float *q, const float *k, const float *v, float *o, int64_t K, float decay,
                           float beta, float scale)
{
    const lanes d = lanes_set(decay);
    for (int c = 0; c < DELTA_BLOCK; c += LANES) {
        lanes sum[4] = {lanes_set(0), lanes_set(0), lanes_set(0), lanes_set(0)};
        for (int64_t i = 0; i < K; i++)
            sum[i & 3] = lanes_fma(lanes_set(k[i]), lanes_mul(lanes_load(S + i * DELTA_BLOCK + c), d), sum[i & 3]);
        const lanes read = lanes_add(lanes_add(sum[0], sum[1]), lanes_add(sum[2], sum[3]));
        const lanes u = lanes_mul(lanes_sub(lanes_load(v + c), read), lanes_set(beta));
        for (int j = 0; j < 4; j++)
            sum[j] = lanes_set(0);
        for (int64_t i = 0; i < K; i++) {
            const lanes s = lanes_fma(lanes_set(k[i]), u, lanes_mul(lanes_load(S + i * DELTA_BLOCK + c), d));
            lanes_store(S + i * DELTA_BLOCK + c, s);
            sum[i & 3] = lanes_fma(lanes_set(q[i] * scale), s, sum[i & 3]);
        }
        lanes_store(o + c, lanes_add(lanes_add(sum[0], sum[1]), lanes_add(sum[2], sum[3])));
    }
}

static void delta_block(const delta_task *task, int64_t b, int64_t h, int64_t block, int thread)
{
    const int64_t T = task->T, G = task->G, H = task->H, K = task->K, V = task->V;
    const int64_t c0 = block * DELTA_BLOCK, width = V - c0 < DELTA_BLOCK ? V - c0 : DELTA_BLOCK;
    const int64_t at = (b * H + h) * K * V + c0, group = h / (H / G);
    const size_t bytes = (size_t)width * sizeof(float), all = (size_t)(K * DELTA_BLOCK) * sizeof(float);
    float *const S = task->block + thread * K * DELTA_BLOCK;
    float v[DELTA_BLOCK] = {0}, o[DELTA_BLOCK];

    memset(S, 0, all);
    for (int64_t i = 0; task->state != NULL && i < K; i++)
        memcpy(S + i * DELTA_BLOCK, task->state + at + i * V, bytes);
    for (int64_t t = 0; t < T; t++) {
        const int64_t token = b * T + t, code = task->step != NULL ? task->step[token] : STEP_ADVANCE;
        float *const out = task->o + (token * H + h) * V + c0;
        if (code == STEP_SKIP) {
            memset(out, 0, bytes);
            continue;
        }
        if (code == STEP_RESTART)
            memset(S, 0, all);
        memcpy(v, task->v + (token * H + h) * V + c0, bytes);
        delta_token(S, task->q + (token * G + group) * K, task->k + (token * G + group) * K, v, o, K,
                    qr_exp(task->g[token * H + h]), task->beta[token * H + h], task->scale);
        memcpy(out, o, bytes);
    }
    for (int64_t i = 0; task->final != NULL && i < K; i++)
        memcpy(task->final + at + i * V, S + i * DELTA_BLOCK, bytes);
}

static void delta_blocks(void *context, int64_t begin, int64_t end, int thread)
{
    const delta_task *const task = context;
    for (int64_t i = begin; i < end; i++)
        delta_block(task, i / task->blocks / task->H, i / task->blocks % task->H, i % task->blocks, thread);
}

QR_OP(gated_delta_rule,
      "gated_delta_rule(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?, "
      "step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?, _block[#,K,32]:f",
      "per token: S *= exp(g), u = (v - k^T S) beta, S += k u^T, o = (q scale)^T S; step 0 skips, 2 zeroes S first")
{
    const int64_t B = DIM('B'), T = DIM('T'), G = DIM('G'), H = DIM('H'), K = DIM('K'), V = DIM('V');
    delta_task task = {
        OUT(0),          OUT(1),    OUT(2), IN(0), IN(1), IN(2), IN(3), IN(4),
        IN(5),           IN_I64(6), T,      G,     H,     K,     V,     (V + DELTA_BLOCK - 1) / DELTA_BLOCK,
        (float)SCALAR(0)};
    if (G == 0 ? H > 0 : H % G != 0) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "gated_delta_rule: value heads do not fall into groups of equal size\n    found    %lld value heads, "
                "%lld key heads",
                (long long)H, (long long)G);
        return;
    }
    if (steps_are_valid(call, task.step, B * T, T))
        qr_parallel(call, B * H * task.blocks, 1, delta_blocks, &task);
}
