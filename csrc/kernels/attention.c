/* Grouped-query attention over a range of keys per query, whole or in its three steps with the same bits. */
#include "kernel.h"

/* Query rows that share a key head and go over the keys together, so that a key is read from memory once. */
enum { TILE = 8, KEYS_PER_BLOCK = 32 };

typedef struct attention_task {
    float *out, *p, *row; /* out[B,T,Q,D]; p[B,Q,T,S] or NULL; row[threads,8,S] used when p is NULL */
    const float *q;       /* q[B,T,Q,D] */
    const float *given;   /* scores or probabilities [B,Q,T,S] that were passed in */
    const qr_array *k, *v;
    const int64_t *begin, *end;
    int64_t T, Q, K, S, D, tile, tiles;
    float scale;
} attention_task;

typedef struct attention_tile {
    int rows;
    const float *q[TILE], *given[TILE];
    float *p[TILE], *o[TILE];
    int64_t begin[TILE], end[TILE];
} attention_tile;

/* The next n <= 16 elements of rows x keys dot products */
QR_INLINE void dot_step(lanes *sum, const float *const *q, const float *k, int64_t stride, int64_t d, int64_t n,
                        const int rows, const int keys)
{
    lanes x[4];
    QR_UNROLL
    for (int r = 0; r < rows; r++)
        x[r] = n >= LANES ? lanes_load(q[r] + d) : lanes_load_tail(q[r] + d, n, 0);
    QR_UNROLL
    for (int j = 0; j < keys; j++) {
        const float *const at = k + j * stride + d;
        const lanes y = n >= LANES ? lanes_load(at) : lanes_load_tail(at, n, 0);
        QR_UNROLL
        for (int r = 0; r < rows; r++)
            sum[r * keys + j] = lanes_fma(x[r], y, sum[r * keys + j]);
    }
}

/* out[r * keys + j] = q_r . k_j * scale, each as qr_dot forms it */
QR_INLINE void dot_tile(float *out, const float *const *q, const float *k, int64_t stride, int64_t D, float scale,
                        const int rows, const int keys)
{
    lanes sum[8];
    int64_t d = 0;
    QR_UNROLL
    for (int i = 0; i < rows * keys; i++)
        sum[i] = lanes_set(0);
    for (; d + LANES <= D; d += LANES)
        dot_step(sum, q, k, stride, d, LANES, rows, keys);
    if (d < D)
        dot_step(sum, q, k, stride, d, D - d, rows, keys);
    QR_UNROLL
    for (int i = 0; i < rows * keys; i += 4)
        lanes_sum4(out + i, sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    QR_UNROLL
    for (int i = 0; i < rows * keys; i++)
        out[i] *= scale;
}

/* Scores of the tile for keys first to last - 1; a row may receive some beyond its own range, which nobody reads. */
static void score_keys(const attention_tile *tile, const float *k, int64_t stride, int64_t D, float scale,
                       int64_t first, int64_t last)
{
    float s[8];
    int r = 0;
    for (; r + 2 <= tile->rows; r += 2) {
        int64_t i = first;
        for (; i + 2 <= last; i += 2) {
            dot_tile(s, tile->q + r, k + i * stride, stride, D, scale, 2, 2);
            memcpy(tile->p[r] + i, s, 2 * sizeof *s);
            memcpy(tile->p[r + 1] + i, s + 2, 2 * sizeof *s);
        }
        for (; i < last; i++) {
            tile->p[r][i] = qr_dot(tile->q[r], k + i * stride, D) * scale;
            tile->p[r + 1][i] = qr_dot(tile->q[r + 1], k + i * stride, D) * scale;
        }
    }
    for (; r < tile->rows; r++) {
        int64_t i = first;
        for (; i + 4 <= last; i += 4)
            dot_tile(tile->p[r] + i, tile->q + r, k + i * stride, stride, D, scale, 1, 4);
        for (; i < last; i++)
            tile->p[r][i] = qr_dot(tile->q[r], k + i * stride, D) * scale;
    }
}

static void tile_scores(const attention_task *task, const attention_tile *tile, const float *k)
{
    int64_t first = task->S, last = 0;
    for (int r = 0; r < tile->rows; r++)
        if (tile->begin[r] < tile->end[r]) {
            first = tile->begin[r] < first ? tile->begin[r] : first;
            last = tile->end[r] > last ? tile->end[r] : last;
        }
    for (int64_t i = first; i < last; i += KEYS_PER_BLOCK)
        score_keys(tile, k, task->k->stride[2], task->D, task->scale, i,
                   i + KEYS_PER_BLOCK < last ? i + KEYS_PER_BLOCK : last);
}

/* o_r[c] += sum p_r[i] v[i,c] for `columns` x 16 columns: one chain of fused multiply-adds per element, in key order */
QR_INLINE void mix_columns(float *const *o, const float *const *p, const float *v, int64_t stride, int64_t first,
                           int64_t last, int64_t width, const int rows, const int columns)
{
    lanes sum[8];
    QR_UNROLL
    for (int r = 0; r < rows; r++) {
        QR_UNROLL
        for (int c = 0; c < columns; c++)
            sum[r * columns + c] = width >= LANES ? lanes_load(o[r] + c * LANES) : lanes_load_tail(o[r], width, 0);
    }
    for (int64_t i = first; i < last; i++) {
        const float *const at = v + i * stride;
        lanes x[4];
        QR_UNROLL
        for (int r = 0; r < rows; r++)
            x[r] = lanes_set(p[r][i]);
        QR_UNROLL
        for (int c = 0; c < columns; c++) {
            const lanes y = width >= LANES ? lanes_load(at + c * LANES) : lanes_load_tail(at, width, 0);
            QR_UNROLL
            for (int r = 0; r < rows; r++)
                sum[r * columns + c] = lanes_fma(x[r], y, sum[r * columns + c]);
        }
    }
    QR_UNROLL
    for (int r = 0; r < rows; r++) {
        QR_UNROLL
        for (int c = 0; c < columns; c++) {
            if (width >= LANES)
                lanes_store(o[r] + c * LANES, sum[r * columns + c]);
            else
                lanes_store_tail(o[r], sum[r * columns + c], width);
        }
    }
}

QR_INLINE void mix_keys(float *const *o, const float *const *p, const float *v, int64_t stride, int64_t D,
                        int64_t first, int64_t last, const int rows)
{
    float *at[2] = {o[0], rows > 1 ? o[1] : NULL};
    const int columns = 4 / rows;
    int64_t d = 0;
    for (; d + columns * LANES <= D; d += columns * LANES) {
        mix_columns(at, p, v + d, stride, first, last, LANES, rows, columns);
        for (int r = 0; r < rows; r++)
            at[r] += columns * LANES;
    }
    for (; d < D; d += LANES) {
        mix_columns(at, p, v + d, stride, first, last, D - d, rows, 1);
        for (int r = 0; r < rows; r++)
            at[r] += LANES;
    }
}

/* Keys outside a row's own range are never multiplied in, not even by zero: they may be anything. So the rows walk
 * together over the keys all of them see, and each alone over what comes before and after. */
static void tile_mix(const attention_task *task, const attention_tile *tile, const float *v)
{
    const int64_t stride = task->v->stride[2], D = task->D;
    const float *const *const p = tile->given[0] != NULL ? tile->given : (const float *const *)tile->p;
    int64_t first = 0, last = task->S;
    for (int r = 0; r < tile->rows; r++) {
        memset(tile->o[r], 0, (size_t)D * sizeof(float));
        first = tile->begin[r] > first ? tile->begin[r] : first;
        last = tile->end[r] < last ? tile->end[r] : last;
    }
    if (first >= last) {
        for (int r = 0; r < tile->rows; r++)
            mix_keys(tile->o + r, p + r, v, stride, D, tile->begin[r], tile->end[r], 1);
        return;
    }
    for (int r = 0; r < tile->rows; r++)
        mix_keys(tile->o + r, p + r, v, stride, D, tile->begin[r], first, 1);
    for (int64_t i = first; i < last; i += KEYS_PER_BLOCK) {
        const int64_t to = i + KEYS_PER_BLOCK < last ? i + KEYS_PER_BLOCK : last;
        int r = 0;
        for (; r + 2 <= tile->rows; r += 2)
            mix_keys(tile->o + r, p + r, v, stride, D, i, to, 2);
        for (; r < tile->rows; r++)
            mix_keys(tile->o + r, p + r, v, stride, D, i, to, 1);
    }
    for (int r = 0; r < tile->rows; r++)
        mix_keys(tile->o + r, p + r, v, stride, D, last, tile->end[r], 1);
}

static void fill_outside(float *p, float value, int64_t begin, int64_t end, int64_t S)
{
    for (int64_t i = 0; i < begin; i++)
        p[i] = value;
    for (int64_t i = end; i < S; i++)
        p[i] = value;
}

static const float *head_of(const qr_array *a, int64_t b, int64_t h)
{
    return (const float *)a->data + b * a->stride[0] + h * a->stride[1];
}

enum { SCORES = 1, SOFTMAX = 2, MIX = 4 };

/* Tile `index` counts (b, key head, tile); the rows of a key head are its tokens times the query heads of its group. */
QR_INLINE void attention_one(const attention_task *task, int64_t index, int thread, const int steps)
{
    const int64_t T = task->T, Q = task->Q, S = task->S, D = task->D, group = Q / task->K;
    const int64_t b = index / task->tiles / task->K, head = index / task->tiles % task->K;
    const int64_t row0 = index % task->tiles * task->tile, rest = T * group - row0;
    attention_tile tile = {.rows = (int)(rest < task->tile ? rest : task->tile)};

    for (int r = 0; r < tile.rows; r++) {
        const int64_t t = (row0 + r) / group, h = head * group + (row0 + r) % group;
        const int64_t token = b * T + t, at = (token * Q + h) * D, line = ((b * Q + h) * T + t) * S;
        tile.begin[r] = task->begin[token];
        tile.end[r] = task->end[token];
        if (steps & SCORES)
            tile.q[r] = task->q + at;
        if (steps & MIX)
            tile.o[r] = task->out + at;
        if (task->given != NULL)
            tile.given[r] = task->given + line;
        if (task->p != NULL)
            tile.p[r] = task->p + line;
        else if (task->row != NULL)
            tile.p[r] = task->row + (thread * TILE + r) * S;
    }
    if (steps & SCORES)
        tile_scores(task, &tile, head_of(task->k, b, head));
    for (int r = 0; r < tile.rows; r++) {
        const int64_t begin = tile.begin[r], end = tile.end[r];
        if (steps & SOFTMAX) /* lanes are counted from `begin`, so a packed sequence equals the sequence alone */
            softmax_row(tile.p[r] + begin, (steps & SCORES ? tile.p[r] : tile.given[r]) + begin, end - begin);
        if (task->p != NULL)
            fill_outside(tile.p[r], steps & SOFTMAX ? 0.0f : -INFINITY, begin, end, S);
    }
    if (steps & MIX)
        tile_mix(task, &tile, head_of(task->v, b, head));
}

static void fused_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    for (int64_t i = begin; i < end; i++)
        attention_one(context, i, thread, SCORES | SOFTMAX | MIX);
}

static void scores_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    for (int64_t i = begin; i < end; i++)
        attention_one(context, i, thread, SCORES);
}

static void softmax_only_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    for (int64_t i = begin; i < end; i++)
        attention_one(context, i, thread, SOFTMAX);
}

static void mix_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    for (int64_t i = begin; i < end; i++)
        attention_one(context, i, thread, MIX);
}

static void attention_run(qr_call *call, attention_task *task, qr_range tiles)
{
    const int64_t B = DIM('B'), T = task->T, K = task->K;
    if (K == 0 ? task->Q > 0 : task->Q % K != 0) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "%s: query heads do not fall into groups of equal size\n"
                "    found    %lld query heads\n    expected a multiple of the %lld key heads",
                call->name, (long long)task->Q, (long long)K);
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
    if (B == 0 || T == 0 || task->Q == 0)
        return;
    /* smaller tiles only where larger ones would leave threads without work; the bits do not depend on it */
    const int64_t rows = T * (task->Q / K);
    const double cost = (double)task->S * (double)(task->D + 1);
    task->tile = TILE;
    while (task->tile > 1 && B * K * ((rows + task->tile - 1) / task->tile) < call->threads)
        task->tile /= 2;
    task->tiles = (rows + task->tile - 1) / task->tile;
    qr_parallel(call, B * K * task->tiles, grain_of((double)task->tile * cost), tiles, task);
}

QR_OP(attention,
      "attention(q[B,T,Q,D]:f, k[B,K,S,D]:s, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D]:f, "
      "p[B,Q,T,S]:f?, _row[#,8,S]:f",
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
    attention_run(call, &task, fused_tiles);
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
    attention_run(call, &task, scores_tiles);
}

QR_OP(attention_softmax, "attention_softmax(s[B,Q,T,S]:f, begin[B,T]:i, end[B,T]:i) -> p[B,Q,T,S]:f",
      "softmax of the scores begin <= s < end, zero elsewhere")
{
    attention_task task = {.p = OUT(0),
                           .given = IN(0),
                           .begin = IN_I64(1),
                           .end = IN_I64(2),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = DIM('Q'),
                           .S = DIM('S')};
    attention_run(call, &task, softmax_only_tiles);
}

QR_OP(attention_mix, "attention_mix(p[B,Q,T,S]:f, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i) -> o[B,T,Q,D]:f",
      "o = p v over the keys begin <= s < end")
{
    attention_task task = {.out = OUT(0),
                           .given = IN(0),
                           .v = ARRAY(1),
                           .begin = IN_I64(2),
                           .end = IN_I64(3),
                           .T = DIM('T'),
                           .Q = DIM('Q'),
                           .K = DIM('K'),
                           .S = DIM('S'),
                           .D = DIM('D')};
    attention_run(call, &task, mix_tiles);
}
