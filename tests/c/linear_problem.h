/* Linear maps of random numbers for tests: at every instruction level, the emulated ones included, on threads that really
 * run side by side, with scratch of the size the signature asks for. */
#ifndef LINEAR_PROBLEM_H
#define LINEAR_PROBLEM_H

#include "../../csrc/core/op.h"

#include "check.h"
#include "digest.h"

#include <pthread.h>
#include <stdlib.h>

/* ---- levels ------------------------------------------------------------------------------------------------------- */

enum { LINEAR, LINEAR_BLAS, EMBEDDING, LINEAR_F64, LINEAR_PARTS, OPS };
static const char *const OP_NAMES[OPS] = {"linear", "linear_blas", "embedding", "linear_f64", "linear_parts"};

#if defined(QR_SIMDE)
extern const qr_op *const linear_ops_avx512_emulated[OPS], *const linear_ops_avx512bf16_emulated[OPS];
#endif

typedef struct level {
    const char *name;
    const qr_op *ops[OPS];
} level;

static level levels[QR_LEVELS + 2];
static int level_count;

static void add_level(qr_level id)
{
    level *l = &levels[level_count++];
    l->name = qr_level_name(id);
    for (int i = 0; i < qr_op_count(); i++)
        for (int op = 0; op < OPS; op++)
            if (strcmp(qr_ops(id)[i]->name, OP_NAMES[op]) == 0)
                l->ops[op] = qr_ops(id)[i];
}

#if defined(QR_SIMDE)
static void add_emulated(const char *name, const qr_op *const *ops)
{
    level *l = &levels[level_count++];
    l->name = name;
    memcpy(l->ops, ops, sizeof l->ops);
}
#endif

__attribute__((constructor)) static void find_levels(void)
{
    add_level(QR_SCALAR);
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2)
        add_level(QR_AVX2);
    if (avx512)
        add_level(QR_AVX512);
    if (avx512 && __builtin_cpu_supports("avx512bf16"))
        add_level(QR_AVX512BF16);
#if defined(QR_SIMDE)
    if (avx2) {
        add_emulated("avx512 emulated", linear_ops_avx512_emulated);
        add_emulated("avx512bf16 emulated", linear_ops_avx512bf16_emulated);
    }
#endif
#endif
    for (int i = 0; i < level_count; i++)
        printf("%s%s", i == 0 ? "levels: " : ", ", levels[i].name);
    printf("\n");
}

/* ---- numbers ------------------------------------------------------------------------------------------------------- */

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void)
{
    return (float)random_bits() * 0x1p-31f - 1.0f;
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float truncate_to_bf16(float value)
{
    return from_bits(to_bits(value) & 0xffff0000u);
}

static float half_value(uint16_t h)
{
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float value = exponent == 31
                            ? (fraction ? NAN : INFINITY)
                            : ldexpf((float)(fraction + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
    return h & 0x8000 ? -value : value;
}

/* One stored element: random, or random bits of any magnitude with subnormals, zeros of both signs, and no NaN. */
static void random_element(void *w, int64_t i, qr_dtype dtype, bool wild)
{
    float *f = w;
    uint16_t *h = w;
    if (dtype == QR_F32) {
        f[i] = wild ? from_bits(random_bits() % 4 == 0 ? random_bits() & 0x80ffffffu : random_bits() & 0xbfffffffu)
                    : random_float();
    } else if (dtype == QR_BF16) {
        h[i] = (uint16_t)(wild ? random_bits() % 4 == 0 ? random_bits() & 0x80ff : random_bits() & 0xbfff
                               : to_bits(random_float()) >> 16);
    } else {
        do
            h[i] = (uint16_t)random_bits();
        while ((h[i] & 0x7c00) == 0x7c00 || (!wild && (h[i] >> 10 & 31) >= 15));
    }
}

static float stored_value(const void *w, int64_t i, qr_dtype dtype)
{
    if (dtype == QR_F32)
        return ((const float *)w)[i];
    const uint16_t h = ((const uint16_t *)w)[i];
    return dtype == QR_BF16 ? from_bits((uint32_t)h << 16) : half_value(h);
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */

typedef struct piece {
    qr_range work;
    void *context;
    int64_t begin, end;
    int thread;
} piece;

static void *run_piece(void *argument)
{
    piece *p = argument;
    p->work(p->context, p->begin, p->end, p->thread);
    return NULL;
}

/* A pool without mercy: piece by piece on `threads` threads that really run side by side. */
static void parallel(void *pool, int threads, int64_t n, int64_t grain, qr_range work, void *context)
{
    pthread_t ids[16];
    piece pieces[16];
    (void)pool;
    for (int64_t begin = 0; begin < n;) {
        int started = 0;
        for (; started < threads && begin < n; started++, begin += grain) {
            pieces[started] = (piece){work, context, begin, n - begin < grain ? n : begin + grain, started};
            pthread_create(&ids[started], NULL, run_piece, &pieces[started]);
        }
        for (int i = 0; i < started; i++)
            pthread_join(ids[i], NULL);
    }
}

/* At a cache line, as scratch is; never all zero to begin with. */
static void *fresh_bytes(int64_t bytes)
{
    void *block = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64 + 64);
    memset(block, 0x7f, ((size_t)bytes + 63) / 64 * 64 + 64);
    return block;
}

static float *fresh(int64_t floats)
{
    return fresh_bytes(floats * (int64_t)sizeof(float));
}

typedef struct problem {
    int64_t M, O, I;
    qr_dtype dtype;
    float *x, *bias;
    double *fine; /* x with more digits, for ops that take doubles */
    void *w;
} problem;

static problem make_problem(int64_t M, int64_t O, int64_t I, qr_dtype dtype, bool wild, bool exact)
{
    problem p = {.M = M, .O = O, .I = I, .dtype = dtype};
    p.x = malloc((size_t)(M * I + 1) * sizeof *p.x);
    p.fine = malloc((size_t)(M * I + 1) * sizeof *p.fine);
    p.bias = malloc((size_t)(O + 1) * sizeof *p.bias);
    p.w = malloc((size_t)(O * I + 1) * sizeof(float));
    for (int64_t i = 0; i < M * I; i++) {
        random_element(p.x, i, QR_F32, wild);
        if (exact)
            p.x[i] = truncate_to_bf16(p.x[i]);
        p.fine[i] = (double)p.x[i] * (1 + 0x1p-30 * (double)random_float());
    }
    for (int64_t i = 0; i < O * I; i++)
        random_element(p.w, i, dtype, wild);
    for (int64_t i = 0; i < O; i++)
        p.bias[i] = random_float();
    return p;
}

static void free_problem(problem *p)
{
    free(p->x);
    free(p->fine);
    free(p->w);
    free(p->bias);
}

/* y of tokens [first, first + M), which has the type the op returns; scratch is what the signature asks for. `options` are
 * the values of all scalars, or NULL for an op without any. */
static void run_with(const qr_op *op, const problem *p, const double *options, int64_t first, int64_t M, bool bias,
                     int threads, void *y)
{
    qr_error error = {0};
    qr_call call = {.name = op->name, .threads = threads, .parallel = parallel, .error = &error};
    qr_signature signature;
    qr_star star;
    void *scratch[QR_MAX_ARRAYS] = {NULL};

    QR_TRY(qr_signature_parse(op->signature, &signature, &error));
    if (signature.param[0].kind == 'd')
        call.array[0] = (qr_array){p->fine + first * p->I, {M, p->I}, {p->I, 1}, 2, QR_F64};
    else
        call.array[0] = (qr_array){p->x + first * p->I, {M, p->I}, {p->I, 1}, 2, QR_F32};
    call.array[1] = (qr_array){p->w, {p->O, p->I}, {p->I, 1}, 2, p->dtype};
    if (bias)
        call.array[2] = (qr_array){p->bias, {p->O}, {1}, 1, QR_F32};
    for (int i = 0; i < signature.scalars; i++)
        call.scalar[i] = options[i];
    QR_TRY(qr_bind_inputs(&signature, &call, &star, &error));
    for (int i = 0; i < signature.params; i++) {
        const qr_param *param = &signature.param[i];
        qr_array *slot = &call.array[param->slot];
        int64_t bytes = param->kind == 'd' ? 8 : 4;
        if (!param->output)
            continue;
        QR_TRY(qr_bind_output(&signature, param, &call, &star, slot, &error));
        for (int d = 0; d < slot->ndim; d++)
            bytes *= slot->shape[d];
        slot->data = param->scratch ? scratch[param->slot] = fresh_bytes(bytes) : y;
    }
    op->run(&call);
    for (int i = 0; i < OPS; i++) /* the portable level, which every machine has; a BLAS has bits of its own */
        if (op == levels[0].ops[i] && i != LINEAR_BLAS)
            digest(op->name, y, (size_t)(M * p->O) * (i == LINEAR_F64 ? 8 : 4), i == LINEAR_F64 ? QR_F64 : QR_F32);
done:
    CHECK_SAY(error.kind == QR_OK, "%s", error.text);
    for (int i = 0; i < QR_MAX_ARRAYS; i++)
        free(scratch[i]);
}

static inline void run(const qr_op *op, const problem *p, int64_t first, int64_t M, bool bias, int threads, void *y)
{
    run_with(op, p, NULL, first, M, bias, threads, y);
}

static const qr_dtype DTYPES[] = {QR_F32, QR_BF16, QR_F16};
static const char *const DTYPE_NAMES[] = {"f32", "f64", "bf16", "f16"};

#endif
