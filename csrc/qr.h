/* The types that kernels/, core/ and python/ share: arrays, one call of an op, an op, an error.
 * No function bodies beyond a few inline helpers; includes nothing of the project. */
#ifndef QR_H
#define QR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { QR_MAX_DIMS = 8, QR_MAX_ARRAYS = 14, QR_MAX_SCALARS = 4, QR_ERROR_SIZE = 2048 };

/* Element types arithmetic knows. Files may hold more (core/safetensors.h). */
typedef enum qr_dtype { QR_F32, QR_F64, QR_BF16, QR_F16, QR_I64, QR_DTYPES } qr_dtype;

/* Every fault a C function reports carries a kind; python/ maps it to an exception class of qwenref.errors. */
typedef enum qr_error_kind {
    QR_OK,
    QR_BAD_SHAPE,      /* ShapeError      */
    QR_BAD_DTYPE,      /* DTypeError      */
    QR_BAD_INPUT,      /* InputError      */
    QR_BAD_CONFIG,     /* ConfigError     */
    QR_BAD_CHECKPOINT, /* CheckpointError */
    QR_NOT_CAPABLE,    /* CapabilityMissing */
    QR_NO_MEMORY,      /* MemoryError     */
    QR_INTERNAL        /* RuntimeError: a bug of ours */
} qr_error_kind;

/* First line stands alone (what and where); further lines are indented by four: found, expected, do. */
typedef struct qr_error {
    qr_error_kind kind;
    char text[QR_ERROR_SIZE];
} qr_error;

/* Set the error (the first one wins) and return -1, so that `return qr_fail(...)` reads as what it is. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline int
qr_fail(qr_error *error, qr_error_kind kind, const char *format, ...)
{
    if (error->kind == QR_OK) {
        va_list args;
        error->kind = kind;
        va_start(args, format);
        (void)vsnprintf(error->text, sizeof error->text, format, args);
        va_end(args);
    }
    return -1;
}

/* Run `e`; on failure leave for the clean-up label. The one control-flow macro of the tree. */
#define QR_TRY(e)                                                                                                      \
    do {                                                                                                               \
        if ((e) < 0)                                                                                                   \
            goto done;                                                                                                 \
    } while (0)

/* A borrowed block of numbers. Row-major unless the signature's kind is `s`, where every stride but the last is free.
 * Strides count elements. An array that was not given (optional) has data == NULL. */
typedef struct qr_array {
    void *data;
    int64_t shape[QR_MAX_DIMS];
    int64_t stride[QR_MAX_DIMS];
    int ndim;
    qr_dtype dtype;
} qr_array;

/* Work on [begin, end) of some output range; `thread` is below qr_call.threads and unique among those running. */
typedef void (*qr_range)(void *context, int64_t begin, int64_t end, int thread);

/* Everything one call of an op may touch. Filled by core/op.c from the op's signature. */
typedef struct qr_call {
    const char *name;
    qr_array array[QR_MAX_ARRAYS]; /* inputs, then outputs and scratch, in the order of the signature */
    int inputs;                    /* how many of them are inputs */
    double scalar[QR_MAX_SCALARS];
    int64_t dim['Z' - '#' + 1]; /* value of each letter of the signature, '*' being the product of the leading ones */
    int threads;
    void *pool;
    void (*parallel)(void *pool, int threads, int64_t n, int64_t grain, qr_range work, void *context);
    qr_error *error;
} qr_call;

#define QR_DIM(call, letter) ((call)->dim[(letter) - '#'])

/* Split [0, n) into grains and run them on the pool (or inline when there is only one). Only outputs are ever split. */
static inline void qr_parallel(qr_call *call, int64_t n, int64_t grain, qr_range work, void *context)
{
    if (n <= 0)
        return;
    if (call->threads <= 1 || call->parallel == NULL || n <= grain)
        work(context, 0, n, 0);
    else
        call->parallel(call->pool, call->threads, n, grain, work, context);
}

/* One op: its name, its signature (the checker, allocator and documentation at once), one line of what it computes. */
typedef struct qr_op {
    const char *name, *signature, *doc;
    void (*run)(qr_call *call);
} qr_op;

/* Instruction levels. Each holds the same ops with the same bits; kernels/registry.c lists what was built. */
typedef enum qr_level { QR_SCALAR, QR_AVX2, QR_AVX512, QR_AVX512BF16, QR_LEVELS } qr_level;

int qr_op_count(void);
const qr_op *const *qr_ops(qr_level level); /* qr_op_count() rows, or NULL where the level was not built */
const char *qr_level_name(qr_level level);

#endif
