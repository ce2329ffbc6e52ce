/* The gated delta rule in its chunked form: the same recurrence as matrix products over 64 tokens at a time, rounded
 * as implementations round that run it so.  delta.c is the definition, and faster; this is for comparisons. */
#include "kernel.h"

enum { CHUNK = 64 };

typedef struct chunk_task {
    float *o, *final;
    float *values, *keys, *pairs, *state; /* per thread: [64,V], [256,K], [128,64], [K,V] */
    const float *q, *k, *v, *g, *beta, *initial;
    const int64_t *step;
    int64_t T, G, H, K, V;
    float scale;
} chunk_task;

/* y += a x; each element is a chain of its own, so its bits do not depend on how many are added at once. */
QR_INLINE void chunk_add(float *restrict y, float a, const float *restrict x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        lanes_store(y + i, lanes_fma(lanes_set(a), lanes_load(x + i), lanes_load(y + i)));
    for (; i < n; i++)
        y[i] = fmaf(a, x[i], y[i]);
}

QR_INLINE void chunk_scale(float *y, float a, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = a * x[i];
}

/* n tokens of one head, whose numbers are in `token`:
 *     c = running sum of g;  D[i,j] = exp(c_i - c_j) for j <= i
 *     U = (I + A)^-1 beta v,  W = (I + A)^-1 (beta k exp(c)),  A[i,j] = (beta k)_i . k_j D[i,j] for j < i
 *     N = U - W S;  o = (q exp(c)) S + (q k^T D) N;  S = exp(c_n) S + (k exp(c_n - c))^T N
 * Every sum runs from the first key or token to the last; exponents are never above zero. */
static void chunk_run(const chunk_task *task, const int64_t *token, int64_t n, int64_t h, int thread)
{
    const int64_t G = task->G, H = task->H, K = task->K, V = task->V, group = h / (H / G);
    float *const U = task->values + thread * CHUNK * V, *const S = task->state + thread * K * V;
    float *const W = task->keys + thread * 4 * CHUNK * K, *const weighted = W + CHUNK * K,
                 *const Q = weighted + CHUNK * K, *const carried = Q + CHUNK * K;
    float *const A = task->pairs + thread * 2 * CHUNK * CHUNK, *const P = A + CHUNK * CHUNK;
    float c[CHUNK];

    for (int64_t i = 0; i < n; i++) {
        const float beta = task->beta[token[i] * H + h];
        const float *const k = task->k + (token[i] * G + group) * K;
        c[i] = task->g[token[i] * H + h] + (i > 0 ? c[i - 1] : 0.0f);
        chunk_scale(weighted + i * K, beta, k, K);
        chunk_scale(Q + i * K, task->scale, task->q + (token[i] * G + group) * K, K);
        chunk_scale(W + i * K, qr_exp(c[i]), weighted + i * K, K);
        chunk_scale(U + i * V, beta, task->v + (token[i] * H + h) * V, V);
        for (int64_t j = 0; j <= i; j++) {
            const float *const other = task->k + (token[j] * G + group) * K, kept = qr_exp(c[i] - c[j]);
            A[i * CHUNK + j] = qr_dot(weighted + i * K, other, K) * kept;
            P[i * CHUNK + j] = qr_dot(Q + i * K, other, K) * kept;
        }
        for (int64_t j = 0; j < i; j++) {
            chunk_add(U + i * V, -A[i * CHUNK + j], U + j * V, V);
            chunk_add(W + i * K, -A[i * CHUNK + j], W + j * K, K);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        float *const o = task->o + (token[i] * H + h) * V;
        chunk_scale(Q + i * K, qr_exp(c[i]), Q + i * K, K);
        memset(o, 0, (size_t)V * sizeof *o);
        for (int64_t d = 0; d < K; d++) {
            chunk_add(U + i * V, -W[i * K + d], S + d * V, V);
            chunk_add(o, Q[i * K + d], S + d * V, V);
        }
        for (int64_t j = 0; j <= i; j++)
            chunk_add(o, P[i * CHUNK + j], U + j * V, V);
    }
    for (int64_t i = 0; i < n; i++)
        chunk_scale(carried + i * K, qr_exp(c[n - 1] - c[i]), task->k + (token[i] * G + group) * K, K);
    for (int64_t d = 0; d < K; d++) {
        chunk_scale(S + d * V, qr_exp(c[n - 1]), S + d * V, V);
        for (int64_t i = 0; i < n; i++)
            chunk_add(S + d * V, carried[i * K + d], U + i * V, V);
    }
}

static void chunk_heads(void *context, int64_t begin, int64_t end, int thread)
{
    const chunk_task *const task = context;
    const int64_t T = task->T, H = task->H, K = task->K, V = task->V;
    const size_t all = (size_t)(K * V) * sizeof(float);
    float *const S = task->state + thread * K * V;

    for (int64_t at = begin; at < end; at++) {
        const int64_t b = at / H, h = at % H;
        int64_t token[CHUNK], n = 0;
        if (task->initial != NULL)
            memcpy(S, task->initial + at * K * V, all);
        else
            memset(S, 0, all);
        for (int64_t t = 0; t < T; t++) {
            const int64_t code = task->step != NULL ? task->step[b * T + t] : STEP_ADVANCE;
            if (code == STEP_SKIP) {
                memset(task->o + ((b * T + t) * H + h) * V, 0, (size_t)V * sizeof(float));
                continue;
            }
            if (n == CHUNK || (code == STEP_RESTART && n > 0)) {
                chunk_run(task, token, n, h, thread);
                n = 0;
            }
            if (code == STEP_RESTART)
                memset(S, 0, all);
            token[n++] = b * T + t;
        }
        if (n > 0)
            chunk_run(task, token, n, h, thread);
        if (task->final != NULL)
            memcpy(task->final + at * K * V, S, all);
    }
}

QR_OP(gated_delta_rule_chunked,
      "gated_delta_rule_chunked(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, "
      "state[B,H,K,V]:f?, step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?, _values[#,64,V]:f, "
      "_keys[#,256,K]:f, _pairs[#,128,64]:f, _state[#,K,V]:f",
      "gated_delta_rule, 64 tokens at a time as matrix products; a token with step 2 begins a chunk")
{
    const int64_t B = DIM('B'), T = DIM('T'), G = DIM('G'), H = DIM('H'), K = DIM('K'), V = DIM('V');
    chunk_task task = {.o = OUT(0),
                       .final = OUT(1),
                       .values = OUT(2),
                       .keys = OUT(3),
                       .pairs = OUT(4),
                       .state = OUT(5),
                       .q = IN(0),
                       .k = IN(1),
                       .v = IN(2),
                       .g = IN(3),
                       .beta = IN(4),
                       .initial = IN(5),
                       .step = IN_I64(6),
                       .T = T,
                       .G = G,
                       .H = H,
                       .K = K,
                       .V = V,
                       .scale = (float)SCALAR(0)};
    if (heads_fall_into_groups(call, G, H) && steps_are_valid(call, task.step, B * T, T))
        qr_parallel(call, B * H, grain_of((double)(T + 1) * (double)(K + V + CHUNK) * CHUNK), chunk_heads, &task);
}
