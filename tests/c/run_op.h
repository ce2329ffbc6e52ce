/* Runs an op from C on every instruction level and thread count, and fails the test where two of them differ in a bit. */
#ifndef RUN_OP_H
#define RUN_OP_H

#include "../../csrc/core/op.h"
#include "check.h"
#include "digest.h"

#include <stdlib.h>

#define UNIT 0x1p-24 /* largest relative error of one float32 rounding */

/* Uniform in [-1, 1), the same numbers in every run. */
static float random_float(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(random_state >> 32) * 0x1p-31f;
}

static float *random_floats(int64_t n)
{
    float *const x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = random_float();
    return x;
}

static float *empty_floats(int64_t n)
{
    return calloc((size_t)n + 1, sizeof(float));
}

static qr_array array_of(qr_dtype dtype, void *data, int ndim, const int64_t *shape)
{
    qr_array a = {.data = data, .ndim = ndim, .dtype = dtype};
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        a.shape[d] = shape[d];
        a.stride[d] = stride;
        stride *= shape[d];
    }
    return a;
}

#define DIMS(...)                                                                                                      \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                                             \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }
#define F(data, ...) array_of(QR_F32, (void *)(uintptr_t)(data), DIMS(__VA_ARGS__))
#define I(data, ...) array_of(QR_I64, (void *)(uintptr_t)(data), DIMS(__VA_ARGS__))
#define D(data, ...) array_of(QR_F64, (void *)(uintptr_t)(data), DIMS(__VA_ARGS__))
#define NONE ((qr_array){0})
#define ARRAYS(...) ((qr_array[]){__VA_ARGS__})
#define SCALARS(...) ((double[]){__VA_ARGS__})

/* Stands for the thread pool: the grains one after the other, last first, each as another thread. */
static void backward_pool(void *pool, int threads, int64_t n, int64_t grain, qr_range work, void *context)
{
    (void)pool;
    for (int64_t i = (n - 1) / grain; i >= 0; i--)
        work(context, i * grain, i * grain + grain < n ? i * grain + grain : n, (int)(i % threads));
}

static bool level_runs(qr_level level)
{
#if defined(__x86_64__)
    switch (level) {
    case QR_SCALAR:
        return true;
    case QR_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case QR_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case QR_AVX512BF16:
        return level_runs(QR_AVX512) && __builtin_cpu_supports("avx512bf16");
    default:
        return false;
    }
#else
    return level == QR_SCALAR;
#endif
}

static const qr_op *find_op(qr_level level, const char *name)
{
    for (int i = 0; i < qr_op_count(); i++)
        if (strcmp(qr_ops(level)[i]->name, name) == 0)
            return qr_ops(level)[i];
    fprintf(stderr, "no op named %s\n", name);
    abort();
}

static size_t array_bytes(const qr_array *a)
{
    size_t n = a->dtype == QR_F32 ? 4 : 8;
    for (int d = 0; d < a->ndim; d++)
        n *= (size_t)a->shape[d];
    return n;
}

/* One call: binds the inputs, checks the outputs that were given against the signature, makes the scratch (full of NaN,
 * so that nothing may rely on what it holds). Outputs with data == NULL must be optional ones, as must those that `outputs`
 * does not reach. */
static qr_error run_once(qr_level level, int threads, const char *name, const qr_array *inputs, const double *scalars,
                         const qr_array *outputs, int output_count)
{
    qr_error error = {.kind = QR_OK};
    qr_signature signature;
    qr_star star;
    qr_call call = {.name = name, .threads = threads, .parallel = backward_pool, .error = &error};
    void *scratch[QR_MAX_ARRAYS] = {NULL};
    const qr_op *const op = find_op(level, name);

    QR_TRY(qr_signature_parse(op->signature, &signature, &error));
    memcpy(call.array, inputs, (size_t)signature.inputs * sizeof *inputs);
    for (int i = 0; i < signature.scalars; i++)
        call.scalar[i] = scalars[i];
    QR_TRY(qr_bind_inputs(&signature, &call, &star, &error));
    for (int i = 0; i < signature.params; i++) {
        const qr_param *const param = &signature.param[i];
        if (!param->output)
            continue;
        qr_array *const slot = &call.array[param->slot], expected;
        QR_TRY(qr_bind_output(&signature, param, &call, &star, &expected, &error));
        if (param->scratch) {
            *slot = expected;
            slot->data = scratch[param->slot] = malloc(array_bytes(slot) + 1);
            memset(slot->data, 0xff, array_bytes(slot));
            continue;
        }
        const int at = param->slot - signature.inputs;
        *slot = at < output_count ? outputs[at] : NONE;
        CHECK(slot->data != NULL || param->optional);
        CHECK(slot->data == NULL || array_bytes(slot) == array_bytes(&expected));
    }
    op->run(&call);
done:
    for (int i = 0; i < QR_MAX_ARRAYS; i++)
        free(scratch[i]);
    return error;
}

/* Equal bits, except that one NaN is as good as another. */
static bool same_bits(const void *a, const void *b, size_t bytes, bool floats)
{
    if (memcmp(a, b, bytes) == 0)
        return true;
    const float *const x = a, *const y = b;
    for (size_t i = 0; floats && i < bytes / sizeof *x; i++)
        if (memcmp(x + i, y + i, sizeof *x) != 0 && !(isnan(x[i]) && isnan(y[i])))
            return false;
    return floats;
}

static bool same_floats(const float *a, const float *b, int64_t n)
{
    return same_bits(a, b, (size_t)n * sizeof *a, true);
}

/* The op at the scalar level on one thread, into `outputs`; then at every other level and on three threads, where every
 * bit must come out again. Returns the error of the first run. */
static qr_error run_op(const char *name, const qr_array *inputs, const double *scalars, const qr_array *outputs,
                       int output_count)
{
    const qr_error error = run_once(QR_SCALAR, 1, name, inputs, scalars, outputs, output_count);
    for (int i = 0; i < output_count; i++)
        if (error.kind == QR_OK && outputs[i].data != NULL)
            digest(name, outputs[i].data, array_bytes(&outputs[i]), outputs[i].dtype);
    for (int level = QR_SCALAR; level < QR_LEVELS; level++)
        for (int threads = 1; threads <= 3; threads += 2) {
            qr_array again[QR_MAX_ARRAYS];
            if ((level == QR_SCALAR && threads == 1) || !level_runs((qr_level)level))
                continue;
            for (int i = 0; i < output_count; i++) {
                again[i] = outputs[i];
                if (outputs[i].data != NULL) {
                    again[i].data = malloc(array_bytes(&again[i]) + 1);
                    memset(again[i].data, 0xff, array_bytes(&again[i]));
                }
            }
            const qr_error other = run_once((qr_level)level, threads, name, inputs, scalars, again, output_count);
            CHECK_INT(other.kind, error.kind);
            for (int i = 0; i < output_count; i++) {
                if (error.kind == QR_OK && outputs[i].data != NULL)
                    CHECK_SAY(
                        same_bits(again[i].data, outputs[i].data, array_bytes(&again[i]), again[i].dtype == QR_F32),
                        "%s: output %d differs at level %s on %d threads", name, i, qr_level_name((qr_level)level),
                        threads);
                free(again[i].data);
            }
        }
    return error;
}

#define OUTPUT_COUNT(...) (int)(sizeof((qr_array[]){__VA_ARGS__}) / sizeof(qr_array))

/* RUN("op", ARRAYS(inputs...), SCALARS(...) or NULL, outputs...): must succeed. */
#define RUN(name, inputs, scalars, ...)                                                                                \
    do {                                                                                                               \
        const qr_error run_error = run_op(name, inputs, scalars, ARRAYS(__VA_ARGS__), OUTPUT_COUNT(__VA_ARGS__));      \
        CHECK_SAY(run_error.kind == QR_OK, "%s failed: %s", name, run_error.text);                                     \
    } while (0)

#define RUN_FAILS(kind_expected, name, inputs, scalars, ...)                                                           \
    do {                                                                                                               \
        const qr_error run_error = run_op(name, inputs, scalars, ARRAYS(__VA_ARGS__), OUTPUT_COUNT(__VA_ARGS__));      \
        CHECK_INT(run_error.kind, kind_expected);                                                                      \
    } while (0)

#endif
