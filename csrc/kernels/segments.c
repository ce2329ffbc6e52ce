/* Attention between all tokens of a segment, without a mask: whole or in its three steps, with the same bits.
 *
 * Sixteen queries are worked on together, one in each lane, so that neither the dot products nor the softmax add across
 * lanes. The order of a query, whatever the level, the batch and the number of threads: a score is one chain of fused
 * multiply-adds over D from zero, then the scale; the sum of exponentials is a chain in double; what is read is a chain
 * of fused multiply-adds for each 64 keys of the segment, and these are added in order. */
#include "kernel.h"

enum {
    QUERIES = LANES,
    MIX_KEYS = 64, /* of one chain; so many rows of v stay in the first cache while all columns take their turn */
#if defined(QR_HAVE_AVX512)
    TOGETHER = 12, /* keys, or columns of v, that share the load of their queries: one register each */
#elif defined(QR_HAVE_AVX2)
    TOGETHER = 6, /* two registers each */
#else
    TOGETHER = 4,
#endif
};

typedef struct segments_task {
    float *out, *p;     /* out[N,H,D]; p[H,N,N] or NULL */
    const float *given; /* scores or probabilities [H,N,N] that were passed in */
    const qr_array *q, *k, *v;
    const int64_t *length;    /* of each of G segments */
    float *keys, *values;     /* [H,N,D]: a head in one piece */
    float *tile;              /* [threads,16,N], each as [key][query] */
    float *queries, *columns; /* [threads,16,D], each as [column][query] */
    int64_t N, H, D, G, tiles;
    float scale;
} segments_task;

/* rows [begin, end) of head h, to a place where they lie side by side */
static void pack_head(float *to, const qr_array *from, int64_t h, int64_t begin, int64_t end, int64_t D)
{
    const float *const x = (const float *)from->data + h * from->stride[1];
    for (int64_t n = begin; n < end; n++)
        memcpy(to + n * D, x + n * from->stride[0], (size_t)D * sizeof *to);
}

static void pack_heads(void *context, int64_t begin, int64_t end, int thread)
{
    const segments_task *const task = context;
    const int64_t N = task->N, size = N * task->D;
    (void)thread;
    for (int64_t i = begin; i < end; i++) { /* (head, token) */
        const int64_t h = i / N, first = i % N, last = end - i < N - first ? first + end - i : N;
        if (task->keys != NULL)
            pack_head(task->keys + h * size, task->k, h, first, last, task->D);
        if (task->values != NULL)
            pack_head(task->values + h * size, task->v, h, first, last, task->D);
        i += last - first - 1;
    }
}

/* p[i] = q . k_i * scale for `together` keys and all queries */
QR_INLINE void score_some(float *p, const float *q, const float *k, int64_t D, lanes scale, const int together)
{
    lanes sum[TOGETHER];
    QR_UNROLL
    for (int i = 0; i < together; i++)
        sum[i] = lanes_set(0);
    for (int64_t d = 0; d < D; d++) {
        const lanes x = lanes_load(q + d * LANES);
        QR_UNROLL
        for (int i = 0; i < together; i++)
            sum[i] = lanes_fma(lanes_set(k[i * D + d]), x, sum[i]);
    }
    QR_UNROLL
    for (int i = 0; i < together; i++)
        lanes_store(p + i * LANES, lanes_mul(sum[i], scale));
}

static __attribute__((noinline)) void segment_score_keys(float *p, const float *q, const float *k, int64_t keys,
                                                         int64_t D, float scale)
{
    const lanes factor = lanes_set(scale);
    int64_t i = 0;
    for (; i + TOGETHER <= keys; i += TOGETHER)
        score_some(p + i * LANES, q, k + i * D, D, factor, TOGETHER);
    for (; i < keys; i++)
        score_some(p + i * LANES, q, k + i * D, D, factor, 1);
}

/* softmax over the keys, for each query; a NaN leaves the maximum as it is and makes the sum one */
static __attribute__((noinline)) void segment_softmax_keys(float *p, int64_t keys)
{
    lanes top = lanes_set(-INFINITY);
    float most[LANES], scale[LANES];
    double sum[LANES] = {0};

    for (int64_t i = 0; i < keys; i++)
        top = lanes_max(lanes_load(p + i * LANES), top);
    lanes_store(most, top);
    for (int64_t i = 0; i < keys; i++) {
        float *const at = p + i * LANES;
        for (int j = 0; j < LANES; j++)
            at[j] = qr_exp(at[j] - most[j]);
        for (int j = 0; j < LANES; j++)
            sum[j] += (double)at[j];
    }
    for (int j = 0; j < LANES; j++)
        scale[j] = (float)(1.0 / sum[j]);
    for (int64_t i = 0; i < keys; i++)
        lanes_store(p + i * LANES, lanes_mul(lanes_load(p + i * LANES), lanes_load(scale)));
}

/* o[c] += sum of p[i] v[i][c] over some keys, for `together` columns and all queries */
QR_INLINE void mix_some(float *o, const float *p, const float *v, int64_t keys, int64_t D, const int together)
{
    lanes sum[TOGETHER];
    QR_UNROLL
    for (int c = 0; c < together; c++)
        sum[c] = lanes_set(0);
    for (int64_t i = 0; i < keys; i++) {
        const lanes x = lanes_load(p + i * LANES);
        QR_UNROLL
        for (int c = 0; c < together; c++)
            sum[c] = lanes_fma(lanes_set(v[i * D + c]), x, sum[c]);
    }
    QR_UNROLL
    for (int c = 0; c < together; c++)
        lanes_store(o + c * LANES, lanes_add(lanes_load(o + c * LANES), sum[c]));
}

static __attribute__((noinline)) void segment_mix_keys(float *o, const float *p, const float *v, int64_t keys,
                                                       int64_t D)
{
    memset(o, 0, (size_t)(D * LANES) * sizeof *o);
    for (int64_t i = 0; i < keys; i += MIX_KEYS) {
        const int64_t some = keys - i < MIX_KEYS ? keys - i : MIX_KEYS;
        int64_t c = 0;
        for (; c + TOGETHER <= D; c += TOGETHER)
            mix_some(o + c * LANES, p + i * LANES, v + i * D + c, some, D, TOGETHER);
        for (; c + 2 <= D; c += 2)
            mix_some(o + c * LANES, p + i * LANES, v + i * D + c, some, D, 2);
        for (; c < D; c++)
            mix_some(o + c * LANES, p + i * LANES, v + i * D + c, some, D, 1);
    }
}

enum { SEGMENT_SCORES = 1, SEGMENT_SOFTMAX = 2, SEGMENT_MIX = 4 };

/* Of the queries `first` on, at most 16, of head h: what they see is the segment [begin, end). */
QR_INLINE void segment_tile(const segments_task *task, int64_t h, int64_t begin, int64_t end, int64_t first, int thread,
                            const int steps)
{
    const int64_t N = task->N, H = task->H, D = task->D, keys = end - begin;
    const int queries = (int)(end - first < QUERIES ? end - first : QUERIES);
    float *const tile = task->tile + thread * QUERIES * N;

    if (steps & SEGMENT_SCORES) {
        float *const q = task->queries + thread * QUERIES * D;
        const float *const x = (const float *)task->q->data + first * task->q->stride[0] + h * task->q->stride[1];
        for (int r = 0; r < QUERIES; r++) /* a lane without a query is worked on as a copy of the last */
            for (int64_t d = 0; d < D; d++)
                q[d * LANES + r] = x[(r < queries ? r : queries - 1) * task->q->stride[0] + d];
        segment_score_keys(tile, q, task->keys + (h * N + begin) * D, keys, D, task->scale);
    } else {
        for (int r = 0; r < QUERIES; r++) {
            const float *const x = task->given + (h * N + first + (r < queries ? r : queries - 1)) * N + begin;
            for (int64_t i = 0; i < keys; i++)
                tile[i * LANES + r] = x[i];
        }
    }
    if (steps & SEGMENT_SOFTMAX)
        segment_softmax_keys(tile, keys);
    for (int r = 0; task->p != NULL && r < queries; r++) {
        float *const p = task->p + (h * N + first + r) * N;
        fill_outside(p, steps & SEGMENT_SOFTMAX ? 0.0f : -INFINITY, begin, end, N);
        for (int64_t i = 0; i < keys; i++)
            p[begin + i] = tile[i * LANES + r];
    }
    if (steps & SEGMENT_MIX) {
        float *const o = task->columns + thread * QUERIES * D;
        segment_mix_keys(o, tile, task->values + (h * N + begin) * D, keys, D);
        for (int r = 0; r < queries; r++)
            for (int64_t d = 0; d < D; d++)
                task->out[((first + r) * H + h) * D + d] = o[d * LANES + r];
    }
}

/* Tiles [first, last) of all heads in turn; a tile has queries of one segment only. */
QR_INLINE void segment_tiles(const segments_task *task, int64_t first, int64_t last, int thread, const int steps)
{
    int64_t head = first / task->tiles, before = head * task->tiles;
    for (; before < last; head++)
        for (int64_t g = 0, begin = 0; g < task->G; begin += task->length[g], g++) {
            const int64_t end = begin + task->length[g], tiles = (task->length[g] + QUERIES - 1) / QUERIES;
            int64_t i = first > before ? first - before : 0;
            for (; i < tiles && before + i < last; i++)
                segment_tile(task, head, begin, end, begin + i * QUERIES, thread, steps);
            before += tiles;
        }
}

static void segments_whole(void *context, int64_t begin, int64_t end, int thread)
{
    segment_tiles(context, begin, end, thread, SEGMENT_SCORES | SEGMENT_SOFTMAX | SEGMENT_MIX);
}

static void segments_scores(void *context, int64_t begin, int64_t end, int thread)
{
    segment_tiles(context, begin, end, thread, SEGMENT_SCORES);
}

static void segments_softmax(void *context, int64_t begin, int64_t end, int thread)
{
    segment_tiles(context, begin, end, thread, SEGMENT_SOFTMAX);
}

static void segments_mix(void *context, int64_t begin, int64_t end, int thread)
{
    segment_tiles(context, begin, end, thread, SEGMENT_MIX);
}

static void segments_run(qr_call *call, segments_task *task, qr_range tiles)
{
    const int64_t N = DIM('N'), G = DIM('G');
    int64_t longest = 0, sum = 0;
    for (int64_t g = 0; g < G; g++) {
        const int64_t n = task->length[g];
        if (n < 0 || n > N - sum) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "%s: segment %lld does not lie among the tokens\n    found    length %lld behind %lld tokens\n"
                    "    expected lengths from 0 up that add to N=%lld",
                    call->name, (long long)g, (long long)n, (long long)sum, (long long)N);
            return;
        }
        sum += n;
        longest = n > longest ? n : longest;
        task->tiles += (n + QUERIES - 1) / QUERIES;
    }
    if (sum != N) {
        qr_fail(call->error, QR_BAD_INPUT,
                "%s: the segments end before the tokens do\n    found    lengths that add to %lld\n    expected N=%lld",
                call->name, (long long)sum, (long long)N);
        return;
    }
    task->N = N, task->G = G, task->H = DIM('H');
    if (N == 0 || task->H == 0)
        return;
    if (task->keys != NULL || task->values != NULL)
        qr_parallel(call, task->H * N, grain_of((double)task->D), pack_heads, task);
    qr_parallel(call, task->H * task->tiles, grain_of((double)QUERIES * (double)longest * (double)(task->D + 1)), tiles,
                task);
}

QR_OP(segment_attention,
      "segment_attention(q[N,H,D]:s, k[N,H,D]:s, v[N,H,D]:s, lengths[G]:i, scale) -> o[N,H,D]:f, p[H,N,N]:f?, "
      "_k[H,N,D]:f, _v[H,N,D]:f, _tile[#,16,N]:f, _q[#,16,D]:f, _o[#,16,D]:f",
      "softmax(q k^T scale) v among the tokens of a segment; lengths says how many follow each other in one")
{
    segments_task task = {.out = OUT(0),
                          .p = OUT(1),
                          .q = ARRAY(0),
                          .k = ARRAY(1),
                          .v = ARRAY(2),
                          .length = IN_I64(3),
                          .keys = OUT(2),
                          .values = OUT(3),
                          .tile = OUT(4),
                          .queries = OUT(5),
                          .columns = OUT(6),
                          .D = DIM('D'),
                          .scale = (float)SCALAR(0)};
    segments_run(call, &task, segments_whole);
}

QR_OP(segment_scores,
      "segment_scores(q[N,H,D]:s, k[N,H,D]:s, lengths[G]:i, scale) -> s[H,N,N]:f, _k[H,N,D]:f, _tile[#,16,N]:f, "
      "_q[#,16,D]:f",
      "s = q k^T scale between tokens of a segment, -inf elsewhere")
{
    segments_task task = {.p = OUT(0),
                          .q = ARRAY(0),
                          .k = ARRAY(1),
                          .length = IN_I64(2),
                          .keys = OUT(1),
                          .tile = OUT(2),
                          .queries = OUT(3),
                          .D = DIM('D'),
                          .scale = (float)SCALAR(0)};
    segments_run(call, &task, segments_scores);
}

QR_OP(segment_softmax, "segment_softmax(s[H,N,N]:f, lengths[G]:i) -> p[H,N,N]:f, _tile[#,16,N]:f",
      "softmax of the scores between tokens of a segment, zero elsewhere")
{
    segments_task task = {.p = OUT(0), .given = IN(0), .length = IN_I64(1), .tile = OUT(1)};
    segments_run(call, &task, segments_softmax);
}

QR_OP(segment_mix,
      "segment_mix(p[H,N,N]:f, v[N,H,D]:s, lengths[G]:i) -> o[N,H,D]:f, _v[H,N,D]:f, _tile[#,16,N]:f, _o[#,16,D]:f",
      "o = p v over the tokens of a segment")
{
    segments_task task = {.out = OUT(0),
                          .given = IN(0),
                          .v = ARRAY(1),
                          .length = IN_I64(2),
                          .values = OUT(1),
                          .tile = OUT(2),
                          .columns = OUT(3),
                          .D = DIM('D')};
    segments_run(call, &task, segments_mix);
}
