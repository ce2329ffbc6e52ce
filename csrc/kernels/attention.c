/* Grouped-query attention over a range of keys per query, whole or in its three steps with the same bits. */
#include "kernel.h"

typedef struct attention_task {
    float *out, *p, *row; /* out[B,T,Q,D]; p[B,Q,T,S] or NULL; row[threads,S] when p is NULL */
    const float *q;       /* q[B,T,Q,D], or the scores s[B,Q,T,S] */
    const qr_array *k, *v;
    const int64_t *begin, *end;
    int64_t T, Q, K, S, D;
    float scale;
} attention_task;

/* s[i] = (q . k_i) * scale for the keys of the range, -inf elsewhere */
static void score_row(float *s, const float *q, const float *k, int64_t stride, int64_t begin, int64_t end, int64_t S,
                      int64_t D, float scale)
{
    for (int64_t i = 0; i < begin; i++)
        s[i] = -INFINITY;
    for (int64_t i = begin; i < end; i++)
        s[i] = qr_dot(q, k + i * stride, D) * scale;
    for (int64_t i = end; i < S; i++)
        s[i] = -INFINITY;
}

/* p = softmax of the range, in place or not, zero elsewhere; lanes are counted from `begin` */
static void probability_row(float *p, const float *s, int64_t begin, int64_t end, int64_t S)
{
    memset(p, 0, (size_t)begin * sizeof *p);
    softmax_row(p + begin, s + begin, end - begin);
    memset(p + end, 0, (size_t)(S - end) * sizeof *p);
}

/* o[d] = sum p[i] v[i,d], one chain of fused multiply-adds over the keys of the range in order */
static void mix_row(float *o, const float *p, const float *v, int64_t stride, int64_t begin, int64_t end, int64_t D)
{
    memset(o, 0, (size_t)D * sizeof *o);
    for (int64_t i = begin; i < end; i++)
        for (int64_t d = 0; d < D; d++)
            o[d] = fmaf(p[i], v[i * stride + d], o[d]);
}

static const float *head_of(const qr_array *a, int64_t b, int64_t h)
{
    return (const float *)a->data + b * a->stride[0] + h * a->stride[1];
}

typedef enum attention_steps { SCORES = 1, SOFTMAX = 2, MIX = 4 } attention_steps;

QR_INLINE void attention_rows(const attention_task *task, int64_t first, int64_t last, int thread, int steps)
{
    const int64_t T = task->T, Q = task->Q, S = task->S, D = task->D;
    for (int64_t r = first; r < last; r++) { /* r counts (b, h, t) */
        const int64_t t = r % T, h = r / T % Q, b = r / T / Q;
        const int64_t begin = task->begin[b * T + t], end = task->end[b * T + t];
        const int64_t group = task->K > 0 ? h / (Q / task->K) : 0;
        const int64_t at = ((b * T + t) * Q + h) * D;
        float *const p = task->p != NULL ? task->p + r * S : task->row != NULL ? task->row + thread * S : NULL;
        if (steps & SCORES)
            score_row(p, task->q + at, head_of(task->k, b, group), task->k->stride[2], begin, end, S, D, task->scale);
        if (steps & SOFTMAX)
            probability_row(p, steps & SCORES ? p : task->q + r * S, begin, end, S);
        if (steps & MIX)
            mix_row(task->out + at, p != NULL ? p : task->q + r * S, head_of(task->v, b, group), task->v->stride[2],
                    begin, end, D);
    }
}

static void fused_rows(void *context, int64_t first, int64_t last, int thread)
{
    attention_rows(context, first, last, thread, SCORES | SOFTMAX | MIX);
}

static void scores_rows(void *context, int64_t first, int64_t last, int thread)
{
    attention_rows(context, first, last, thread, SCORES);
}

static void softmax_only_rows(void *context, int64_t first, int64_t last, int thread)
{
    attention_rows(context, first, last, thread, SOFTMAX);
}

static void mix_rows(void *context, int64_t first, int64_t last, int thread)
{
    attention_rows(context, first, last, thread, MIX);
}

static void attention_run(qr_call *call, attention_task *task, qr_range rows)
{
    const int64_t B = DIM('B'), T = task->T;
    if (task->K >= 0 && (task->K == 0 ? task->Q > 0 : task->Q % task->K != 0)) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "%s: query heads do not fall into groups of equal size\n    found    %lld query heads, %lld key heads",
                call->name, (long long)task->Q, (long long)task->K);
        return;
    }
    for (int64_t i = 0; i < B * T; i++)
        if (task->begin[i] < 0 || task->begin[i] > task->end[i] || task->end[i] > task->S) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "%s: token %lld of row %lld attends outside the keys\n    found    begin=%lld, end=%lld\n"
                    "    expected 0 <= begin <= end <= S=%lld",
                    call->name, (long long)(i % T), (long long)(i / T), (long long)task->begin[i],
                    (long long)task->end[i], (long long)task->S);
            return;
        }
    qr_parallel(call, B * task->Q * T, 1, rows, task);
}

QR_OP(attention,
      "attention(q[B,T,Q,D]:f, k[B,K,S,D]:s, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D]:f, "
      "p[B,Q,T,S]:f?, _row[#,S]:f",
      "softmax(q k^T scale) v over the keys begin <= s < end; query head h reads key head h / (Q/K)")
{
    attention_task task = {.out = OUT(0),
                           .p = OUT(1),
                           .row = OUT(2),
                           .q = IN(0),
                           .k = ARRAY(1),
                           .v = ARRAY(2),
                           .begin = IN_I64(3),
                           .end = IN_I64(4),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = DIM('K'),
                           .S = DIM('S'),
                           .D = DIM('D'),
                           .scale = (float)SCALAR(0)};
    attention_run(call, &task, fused_rows);
}

QR_OP(attention_scores, "attention_scores(q[B,T,Q,D]:f, k[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> s[B,Q,T,S]:f",
      "s = q k^T scale for the keys begin <= s < end, -inf elsewhere")
{
    attention_task task = {.p = OUT(0),
                           .q = IN(0),
                           .k = ARRAY(1),
                           .begin = IN_I64(2),
                           .end = IN_I64(3),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = DIM('K'),
                           .S = DIM('S'),
                           .D = DIM('D'),
                           .scale = (float)SCALAR(0)};
    attention_run(call, &task, scores_rows);
}

QR_OP(attention_softmax, "attention_softmax(s[B,Q,T,S]:f, begin[B,T]:i, end[B,T]:i) -> p[B,Q,T,S]:f",
      "softmax of the scores begin <= s < end, zero elsewhere")
{
    attention_task task = {.p = OUT(0),
                           .q = IN(0),
                           .begin = IN_I64(1),
                           .end = IN_I64(2),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = -1,
                           .S = DIM('S')};
    attention_run(call, &task, softmax_only_rows);
}

QR_OP(attention_mix, "attention_mix(p[B,Q,T,S]:f, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i) -> o[B,T,Q,D]:f",
      "o = p v over the keys begin <= s < end")
{
    attention_task task = {.out = OUT(0),
                           .q = IN(0),
                           .v = ARRAY(1),
                           .begin = IN_I64(2),
                           .end = IN_I64(3),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = DIM('K'),
                           .S = DIM('S'),
                           .D = DIM('D')};
    attention_run(call, &task, mix_rows);
}
