/* y = x Wᵀ + b with W as it lies in the file, and rows of an embedding table. Holds the order of summation, the blocking
 * and what all loops share; linear_avx2.h, linear_avx512.h, linear_neon.h and linear_portable.h hold the loops.
 *
 * The order of every output: elements (2p, 2p+1) of a row form pair p; pair p belongs to class p mod 16; a class is one
 * chain of fused multiply-adds from +0, high element (2p+1) before low (2p); the class sums are added as the tree
 * ((0+1)+(2+3))+((4+5)+(6+7)) and so on; then the bias. Rows are filled up with zeros to a multiple of 32, and those are
 * multiplied too, because adding +0 turns a -0 into +0. Subnormals count as zero, as the bf16 dot instruction has it. A
 * result that is not a number is the one quiet NaN. So every level, blocking and number of threads gives the same bits. */
#include "simd.h"

#include "flushing.h"

#define LINEAR_INLINE static inline __attribute__((always_inline, unused))

enum {
    STEP = 32,           /* elements of a row that feed each class one pair */
    NARROW_ROWS = 8,     /* rows of W streamed side by side */
    NARROW_TOKENS = 16,  /* tokens that share one pass over W */
    NARROW_STEPS = 32,   /* steps after which the next tokens take their turn: 8 rows of that length fit into L1 */
    BLOCK_ROWS = 48,     /* rows of W packed at a time */
    BLOCK_TOKENS = 192,  /* tokens that use a packed block before the next class is taken */
    LINEAR_GRAIN = 65536 /* elements of W below which a second thread costs more than it brings */
};

/* One call, as the loops see it; x and w may be some columns of longer rows. */
typedef struct linear {
    const float *x, *bias;
    const char *w;
    float *y;
    int64_t M, O, I;
    int64_t x_stride, row_bytes; /* from token to token in floats, from row to row of W in bytes */
    int64_t steps;
    qr_dtype dtype;
    bool dots;          /* bf16 weights and x exact in bf16: a pair is one operand of the dot instruction */
    bool add, narrowed; /* to what y holds already; the sum rounded to bf16 first */
    float *px, *ragged; /* packed x; its last, incomplete panel */
    float *pw, *part;   /* per thread: packed W; class sums on their way up the tree */
    int64_t pw_size;    /* floats of pw per thread */
    int64_t rows;       /* rows of W per block */
} linear;

LINEAR_INLINE int64_t element_size(qr_dtype dtype)
{
    return dtype == QR_F32 ? 4 : 2;
}

/* ---- the loops of the level -------------------------------------------------------------------------------------- */

#if defined(QR_HAVE_AVX2)
#include "linear_pack.h"
#endif

#if defined(QR_HAVE_AVX512)
#include "linear_avx512.h"
#elif defined(QR_HAVE_AVX2)
#include "linear_avx2.h"
#elif defined(__aarch64__)
#include "linear_neon.h"
#else
#include "linear_portable.h"
#endif

/* ---- few tokens: W is streamed once, as it lies ------------------------------------------------------------------ */

/* The end of every output; `sum` is the root of the tree. */
LINEAR_INLINE void linear_store(const linear *l, int64_t token, int64_t row, float sum)
{
    if (l->narrowed)
        sum = qr_round_bf16(sum);
    if (l->add)
        sum = l->y[token * l->O + row] + sum;
    if (l->bias != NULL)
        sum += l->bias[row];
    l->y[token * l->O + row] = sum == sum ? sum : NAN;
}

LINEAR_INLINE float class_tree(const float *sums)
{
    float v[8];
    for (int i = 0; i < 8; i++)
        v[i] = sums[2 * i] + sums[2 * i + 1];
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* The roots of n trees whose class sums lie one behind the other. */
LINEAR_INLINE void class_trees(float *roots, const float *sums, int n)
{
    int i = 0;
#if defined(QR_HAVE_AVX2)
    for (; i + 8 <= n; i += 8)
        eight_trees(roots + i, sums + i * 16);
#endif
    for (; i < n; i++)
        roots[i] = class_tree(sums + i * 16);
}

/* Per token and step: 16 high elements, 16 low ones; or, for the dot instruction, the 16 pairs. */
static void narrow_pack(void *context, int64_t begin, int64_t end, int thread)
{
    const linear *l = context;
    const int64_t step_size = l->dots ? 16 : STEP;
    (void)thread;

    for (int64_t m = begin; m < end; m++) {
        const float *x = l->x + m * l->x_stride;
        float *out = l->px + m * l->steps * step_size;
        for (int64_t s = 0; s < l->steps; s++, x += STEP, out += step_size) {
            float last[STEP] = {0};
            const float *from = x;
            if ((s + 1) * STEP > l->I) {
                memcpy(last, x, (size_t)(l->I - s * STEP) * sizeof *x);
                from = last;
            }
            if (l->dots) {
                uint32_t pair[STEP];
                memcpy(pair, from, sizeof pair);
                for (int c = 0; c < 16; c++)
                    pair[c] = pair[2 * c + 1] | pair[2 * c] >> 16;
                memcpy(out, pair, 16 * sizeof *pair);
            } else {
                for (int c = 0; c < 16; c++) {
                    out[c] = from[2 * c + 1];
                    out[16 + c] = from[2 * c];
                }
            }
        }
    }
}

typedef void narrow_loop(float *sums, const char *w, int64_t w_stride, const float *x, int64_t x_stride, int64_t steps,
                         int rows, int tokens, qr_dtype dtype, bool dots);

/* Class sums of rows x tokens, from zero; from row to row it is `apart` rows. */
LINEAR_INLINE void narrow_sums(const linear *l, float *sums, int64_t row, int rows, int64_t apart, int64_t m,
                               int tokens, narrow_loop *tile)
{
    const int64_t full = l->I / STEP, tail = l->I % STEP * element_size(l->dtype);
    const int64_t step_bytes = STEP * element_size(l->dtype), x_step = l->dots ? 16 : STEP,
                  x_stride = l->steps * x_step;
    const float *x = l->px + m * x_stride;
    const char *w = l->w + row * l->row_bytes;
    const int64_t w_stride = apart * l->row_bytes;

    memset(sums, 0, (size_t)(rows * tokens) * 16 * sizeof *sums);
    for (int64_t s = 0; s < full; s += NARROW_STEPS) {
        const int64_t steps = full - s < NARROW_STEPS ? full - s : NARROW_STEPS;
        tile(sums, w + s * step_bytes, w_stride, x + s * x_step, x_stride, steps, rows, tokens, l->dtype, l->dots);
    }
    if (tail > 0) {
        _Alignas(64) char last[NARROW_ROWS * STEP * sizeof(float)];
        memset(last, 0, sizeof last);
        for (int r = 0; r < rows; r++)
            memcpy(last + r * step_bytes, w + r * w_stride + full * step_bytes, (size_t)tail);
        tile(sums, last, step_bytes, x + full * x_step, x_stride, 1, rows, tokens, l->dtype, l->dots);
    }
}

/* Up to 8 rows, so many apart, for up to 16 tokens. */
static __attribute__((noinline)) void narrow_outputs(const linear *l, int64_t row, int rows, int64_t apart, int64_t m,
                                                     int tokens)
{
    _Alignas(64) float sums[NARROW_ROWS * NARROW_TOKENS * 16];
    float roots[NARROW_ROWS * NARROW_TOKENS];

    narrow_sums(l, sums, row, rows, apart, m, tokens, narrow_tile);
#if defined(FLUSHES_EARLY)
    if (something_was_flushed(sums))
        narrow_sums(l, sums, row, rows, apart, m, tokens, careful_tile);
#endif
    class_trees(roots, sums, rows * tokens);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++)
            linear_store(l, m + t, row + r * apart, roots[r * tokens + t]);
}

/* The rows of a tile begin eight equal parts of the piece and go through them side by side: each is one long stream of
 * memory, which the hardware fetches ahead. Neighbours would be streams that end with the row. */
static void narrow_rows(const linear *l, int64_t begin, int64_t end)
{
    const int64_t apart = (end - begin) / NARROW_ROWS, rest = begin + apart * NARROW_ROWS;
    for (int64_t m = 0; m < l->M; m += NARROW_TOKENS) {
        const int tokens = (int)(l->M - m < NARROW_TOKENS ? l->M - m : NARROW_TOKENS);
        for (int64_t i = 0; i < apart; i++)
            narrow_outputs(l, begin + i, NARROW_ROWS, apart, m, tokens);
        if (rest < end)
            narrow_outputs(l, rest, (int)(end - rest), 1, m, tokens);
    }
}

static void narrow_work(void *context, int64_t begin, int64_t end, int thread)
{
    const flushing_state before = enter_flushing();
    (void)thread;
    narrow_rows(context, begin, end);
    leave_flushing(before);
}

static void linear_narrow(qr_call *call, linear *l)
{
    const int64_t rows = LINEAR_GRAIN / (l->I + 1) + 1; /* or tokens */
    qr_parallel(call, l->M, rows, narrow_pack, l);
    qr_parallel(call, l->O, (rows + NARROW_ROWS - 1) / NARROW_ROWS * NARROW_ROWS, narrow_work, l);
}

#if defined(LINEAR_WIDE)
#include "linear_wide.h"
#endif

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

#if defined(QR_HAVE_AVX512BF16)
/* All of x has the low half of every float clear. */
static bool exact_in_bf16(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4096) {
        const int64_t end = n - i < 4096 ? n : i + 4096;
        uint32_t seen = 0;
        for (int64_t k = i; k < end; k++) {
            uint32_t bits;
            memcpy(&bits, x + k, sizeof bits);
            seen |= bits;
        }
        if (seen & 0xffff)
            return false;
    }
    return true;
}
#endif

/* A call as the loops see it: outputs are y and the four kinds of scratch. */
static linear linear_of(const qr_call *call)
{
    linear l = {
        .x = IN(0),
        .w = ARRAY(1)->data,
        .bias = IN(2),
        .y = OUT(0),
        .M = DIM('*'),
        .O = DIM('O'),
        .I = DIM('I'),
        .dtype = ARRAY(1)->dtype,
        .px = OUT(1),
        .ragged = OUT(2),
        .pw = OUT(3),
        .part = OUT(4),
    };
    l.x_stride = l.I;
    l.row_bytes = l.I * element_size(l.dtype);
    l.steps = (l.I + STEP - 1) / STEP;
    l.pw_size = BLOCK_ROWS * (l.I + 63);
#if defined(QR_HAVE_AVX512BF16)
    l.dots = l.dtype == QR_BF16 && exact_in_bf16(l.x, l.M * l.I);
#endif
    return l;
}

static void linear_run(qr_call *call, linear *l)
{
#if defined(LINEAR_WIDE)
    if (l->M > (l->dtype == QR_BF16 ? BF16_UNPACKED : NARROW_TOKENS)) {
        linear_wide(call, l);
        return;
    }
#endif
    linear_narrow(call, l);
}

#define LINEAR_SCRATCH "_x[*,I+31]:f, _ragged[48,I+31]:f, _w[#,48,I+63]:f, _part[#,5,48,192]:f"

QR_OP(linear, "linear(x[*,I]:f, w[O,I]:w, b[O]:v?) -> y[*,O]:f, " LINEAR_SCRATCH,
      "y = x w^T + b: sums in float32 in one order for every CPU, batch and thread count")
{
    linear l = linear_of(call);
    linear_run(call, &l);
}

typedef struct embedding {
    const int64_t *ids;
    const char *w;
    float *y;
    int64_t H;
    qr_dtype dtype;
} embedding;

static void embedding_work(void *context, int64_t begin, int64_t end, int thread)
{
    const embedding *e = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        qr_widen(e->y + i * e->H, e->w + e->ids[i] * e->H * element_size(e->dtype), e->dtype, e->H);
}

/* "0, 12": where element `flat` sits in an array of this shape */
static const char *position(char *text, size_t size, const qr_array *array, int64_t flat)
{
    int64_t rest = 1;
    size_t n = 0;
    text[0] = '\0';
    for (int d = 0; d < array->ndim; d++)
        rest *= array->shape[d];
    for (int d = 0; d < array->ndim && n < size; d++) {
        rest /= array->shape[d];
        n += (size_t)snprintf(text + n, size - n, "%s%lld", d > 0 ? ", " : "", (long long)(flat / rest));
        flat %= rest;
    }
    return text;
}

QR_OP(embedding, "embedding(ids[*]:i, w[V,H]:w) -> y[*,H]:f", "y = the rows of w that ids name, exactly")
{
    const int64_t M = DIM('*'), V = DIM('V'), H = DIM('H');
    embedding e = {IN_I64(0), ARRAY(1)->data, OUT(0), H, ARRAY(1)->dtype};
    char where[128];

    for (int64_t i = 0; i < M; i++)
        if (e.ids[i] < 0 || e.ids[i] >= V) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "%s: ids[%s] is %lld; the vocabulary has %lld\n    found    %lld\n    expected 0 to %lld\n"
                    "    do       pass ids of this model's tokenizer; image and video ids are part of its vocabulary",
                    call->name, position(where, sizeof where, ARRAY(0), i), (long long)e.ids[i], (long long)V,
                    (long long)e.ids[i], (long long)(V - 1));
            return;
        }
    qr_parallel(call, M, LINEAR_GRAIN / (H + 1) + 1, embedding_work, &e);
}
