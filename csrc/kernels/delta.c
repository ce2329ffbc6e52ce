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

/* A token is
 *     S *= exp(g);  u = (v - k^T S) beta;  S += k u^T;  o = (q scale)^T S
 * and costs one pass over the state: a row is written for this token, read by its query, decayed for the token that
 * comes next and read by the key of that one, all while it is in a register. Between two tokens S is therefore decayed
 * already, and `recalled` = k^T S known.
 * Each sum over the key index is four chains of fused multiply-adds, index i in chain i mod 4, added as (0+1)+(2+3). */
enum {
    DELTA_CHAINS = 4,
#if defined(QR_HAVE_AVX512)
    DELTA_PASS = 4 /* chains in one pass over the rows: as many as have registers for both sums */
#else
    DELTA_PASS = 2
#endif
};

/* Columns of a state: where a pass finds their rows and where it leaves them. */
typedef struct delta_rows {
    const float *from;
    float *to;
    int64_t from_stride, to_stride;
} delta_rows;

QR_INLINE void delta_row(delta_rows S, int64_t i, lanes *o, lanes *recalled, const float *q, const float *k, lanes u,
                         const float *next_k, lanes decay, const bool writes, const bool reads)
{
    lanes s = lanes_load(S.from + i * S.from_stride);
    if (writes) {
        s = lanes_fma(lanes_set(k[i]), u, s);
        *o = lanes_fma(lanes_set(q[i]), s, *o);
    }
    if (reads) {
        s = lanes_mul(s, decay);
        *recalled = lanes_fma(lanes_set(next_k[i]), s, *recalled);
    }
    lanes_store(S.to + i * S.to_stride, s);
}

QR_INLINE void store_chains(float *y, const lanes *sum)
{
    lanes_store(y, lanes_add(lanes_add(sum[0], sum[1]), lanes_add(sum[2], sum[3])));
}

/* All rows of sixteen columns: `writes` u by key k and sums o by query q; decays for the next token and `reads` by its
 * key. The two are constants; arguments of the half that is left out are not looked at. */
QR_INLINE void delta_pass(delta_rows S, int64_t K, float *o, const float *q, const float *k, lanes u, float *recalled,
                          const float *next_k, lanes decay, const bool writes, const bool reads)
{
    lanes out[DELTA_CHAINS], read[DELTA_CHAINS];

    for (int64_t first = 0; first < DELTA_CHAINS; first += DELTA_PASS) {
        lanes y[DELTA_PASS], r[DELTA_PASS];
        int64_t i = first;
        QR_UNROLL
        for (int64_t c = 0; c < DELTA_PASS; c++)
            y[c] = r[c] = lanes_set(0);
        for (; i + DELTA_PASS <= K; i += DELTA_CHAINS) {
            QR_UNROLL
            for (int64_t c = 0; c < DELTA_PASS; c++)
                delta_row(S, i + c, y + c, r + c, q, k, u, next_k, decay, writes, reads);
        }
        QR_UNROLL
        for (int64_t c = 0; c < DELTA_PASS; c++) {
            if (i + c < K)
                delta_row(S, i + c, y + c, r + c, q, k, u, next_k, decay, writes, reads);
            out[first + c] = y[c];
            read[first + c] = r[c];
        }
    }
    if (writes)
        store_chains(o, out);
    if (reads)
        store_chains(recalled, read);
}

/* The columns of one block on their way through the tokens of one row and head. */
typedef struct delta_columns {
    float *S, *query; /* S[K,32]; query[K] of a token, scaled */
    delta_rows
        rows; /* S, but for the first pass from the state that was given, and the last one to where it is wanted */
    int64_t b, h, first, width;
    float recalled[DELTA_BLOCK]; /* of the token that comes next */
} delta_columns;

static int64_t token_of(const delta_task *task, const delta_columns *at, int64_t t)
{
    return at->b * task->T + t;
}

static int64_t code_of(const delta_task *task, const delta_columns *at, int64_t t)
{
    return task->step != NULL ? task->step[token_of(task, at, t)] : STEP_ADVANCE;
}

/* Where the values of a token begin for these columns. */
static int64_t place_of(const delta_task *task, const delta_columns *at, int64_t t)
{
    return (token_of(task, at, t) * task->H + at->h) * task->V + at->first;
}

static const float *key_of(const delta_task *task, const delta_columns *at, int64_t t)
{
    return task->k + (token_of(task, at, t) * task->G + at->h / (task->H / task->G)) * task->K;
}

static lanes decay_of(const delta_task *task, const delta_columns *at, int64_t t)
{
    return lanes_set(qr_exp(task->g[token_of(task, at, t) * task->H + at->h]));
}

/* The first token from t on that is not skipped; those before it are answered with zeros. */
static int64_t next_token(const delta_task *task, const delta_columns *at, int64_t t)
{
    const size_t bytes = (size_t)at->width * sizeof(float);
    for (; t < task->T && code_of(task, at, t) == STEP_SKIP; t++) {
        const int64_t place = place_of(task, at, t);
        memset(task->o + place, 0, bytes);
        if (task->recalled != NULL)
            memset(task->recalled + place, 0, bytes);
        if (task->written != NULL)
            memset(task->written + place, 0, bytes);
    }
    return t;
}

/* K rows of `width` columns. By registers: a call of memcpy for each
 * row of 128 bytes took most of the time of a single token. */
QR_INLINE void copy_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t K, int64_t width)
{
    for (int64_t i = 0; i < K; i++, to += to_stride, from += from_stride) {
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES)
            lanes_store(to + c, lanes_load(from + c));
        if (c < width)
            lanes_store_tail(to + c, lanes_load_tail(from + c, width - c, 0), width - c);
    }
}

QR_INLINE delta_rows columns_from(delta_rows rows, int64_t c)
{
    return (delta_rows){rows.from + c, rows.to + c, rows.from_stride, rows.to_stride};
}

static delta_rows own_rows(const delta_columns *at)
{
    return (delta_rows){at->S, at->S, DELTA_BLOCK, DELTA_BLOCK};
}

/* Decays the state for the first token of a run and recalls what it holds for the key. */
static void delta_begin(const delta_task *task, delta_columns *at, int64_t t)
{
    const float *const k = key_of(task, at, t);
    const lanes decay = decay_of(task, at, t);
    for (int64_t c = 0; c < at->width; c += LANES)
        delta_pass(columns_from(at->rows, c), task->K, NULL, NULL, NULL, decay, at->recalled + c, k, decay, false,
                   true);
    at->rows = own_rows(at);
}

/* Token t, and the state made ready for token `next`, or left as it is where that is negative. */
static void delta_token(const delta_task *task, delta_columns *at, int64_t t, int64_t next)
{
    const int64_t place = place_of(task, at, t), width = at->width, head = token_of(task, at, t) * task->H + at->h;
    const float *const k = key_of(task, at, t), *const q = task->q + (k - task->k);
    const float *const next_k = next < 0 ? NULL : key_of(task, at, next);
    const lanes beta = lanes_set(task->beta[head]), decay = next < 0 ? beta : decay_of(task, at, next);
    float o[DELTA_BLOCK], u[DELTA_BLOCK], v[DELTA_BLOCK] = {0};

    copy_rows(v, 0, task->v + place, 0, 1, width);
    for (int64_t c = 0; c < width; c += LANES)
        lanes_store(u + c, lanes_mul(lanes_sub(lanes_load(v + c), lanes_load(at->recalled + c)), beta));
    for (int64_t i = 0; i < task->K; i++)
        at->query[i] = q[i] * task->scale;
    if (task->recalled != NULL)
        copy_rows(task->recalled + place, 0, at->recalled, 0, 1, width);
    if (task->written != NULL)
        copy_rows(task->written + place, 0, u, 0, 1, width);
    for (int64_t c = 0; c < width; c += LANES)
        if (next < 0)
            delta_pass(columns_from(at->rows, c), task->K, o + c, at->query, k, lanes_load(u + c), NULL, NULL, decay,
                       true, false);
        else
            delta_pass(columns_from(at->rows, c), task->K, o + c, at->query, k, lanes_load(u + c), at->recalled + c,
                       next_k, decay, true, true);
    copy_rows(task->o + place, 0, o, 0, 1, width);
}

/* Where the columns of this head begin in `state` and `final`. */
static int64_t place_in_state(const delta_task *task, const delta_columns *at)
{
    return (at->b * task->H + at->h) * task->K * task->V + at->first;
}

/* A full block is read where it lies; one at the edge is copied and filled up with zeros. */
static void delta_open(const delta_task *task, delta_columns *at)
{
    const bool given = task->state != NULL, whole = at->width == DELTA_BLOCK;
    at->rows = own_rows(at);
    if (!given || !whole)
        memset(at->S, 0, (size_t)(task->K * DELTA_BLOCK) * sizeof(float));
    if (given && !whole)
        copy_rows(at->S, DELTA_BLOCK, task->state + place_in_state(task, at), task->V, task->K, at->width);
    if (given && whole)
        at->rows.from = task->state + place_in_state(task, at), at->rows.from_stride = task->V;
}

/* The last token leaves a full block where it is wanted; what it did not leave there is copied. */
static void delta_close(const delta_task *task, const delta_columns *at)
{
    if (task->final != NULL && at->rows.to == at->S)
        copy_rows(task->final + place_in_state(task, at), task->V, at->rows.from, at->rows.from_stride, task->K,
                  at->width);
}

static void delta_block(const delta_task *task, int64_t b, int64_t h, int64_t block, int thread)
{
    const int64_t K = task->K, T = task->T, first = block * DELTA_BLOCK;
    delta_columns at = {.S = task->block + thread * K * DELTA_BLOCK,
                        .query = task->query + thread * K,
                        .b = b,
                        .h = h,
                        .first = first,
                        .width = task->V - first < DELTA_BLOCK ? task->V - first : DELTA_BLOCK};
    bool begun = false;

    delta_open(task, &at);
    for (int64_t t = next_token(task, &at, 0), next; t < T; t = next) {
        const bool restarts = code_of(task, &at, t) == STEP_RESTART;
        if (restarts) {
            memset(at.S, 0, (size_t)(K * DELTA_BLOCK) * sizeof(float));
            at.rows = own_rows(&at);
        }
        if (restarts || !begun)
            delta_begin(task, &at, t);
        begun = true;
        next = next_token(task, &at, t + 1);
        if (next == T && task->final != NULL && at.width == DELTA_BLOCK)
            at.rows.to = task->final + place_in_state(task, &at), at.rows.to_stride = task->V;
        delta_token(task, &at, t, next < T && code_of(task, &at, next) != STEP_RESTART ? next : -1);
    }
    delta_close(task, &at);
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
