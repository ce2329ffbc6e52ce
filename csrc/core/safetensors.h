/* The safetensors format: its element types, one mapped file, and a writer.  No Python.h, no kernels.
 * A file is an 8-byte little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the data
 * of all tensors, without holes. */
#ifndef QR_SAFETENSORS_H
#define QR_SAFETENSORS_H

#include "../qr.h"

/* In the order in which the reference library writes them (descending), which keeps every tensor aligned. */
#define QR_FILE_TYPES(X)                                                                                               \
    X(BOOL, 8)                                                                                                         \
    X(F4, 4)                                                                                                           \
    X(F6_E2M3, 6)                                                                                                      \
    X(F6_E3M2, 6)                                                                                                      \
    X(U8, 8)                                                                                                           \
    X(I8, 8)                                                                                                           \
    X(F8_E5M2, 8)                                                                                                      \
    X(F8_E4M3, 8)                                                                                                      \
    X(F8_E8M0, 8)                                                                                                      \
    X(F8_E4M3FNUZ, 8)                                                                                                  \
    X(F8_E5M2FNUZ, 8)                                                                                                  \
    X(I16, 16)                                                                                                         \
    X(U16, 16)                                                                                                         \
    X(F16, 16)                                                                                                         \
    X(BF16, 16)                                                                                                        \
    X(I32, 32)                                                                                                         \
    X(U32, 32)                                                                                                         \
    X(F32, 32)                                                                                                         \
    X(C64, 64)                                                                                                         \
    X(F64, 64)                                                                                                         \
    X(I64, 64)                                                                                                         \
    X(U64, 64)

typedef enum qr_file_dtype {
#define X(name, bits) QR_FILE_##name,
    QR_FILE_TYPES(X)
#undef X
        QR_FILE_DTYPES
} qr_file_dtype;

const char *qr_file_dtype_name(qr_file_dtype dtype);
int qr_file_dtype_bits(qr_file_dtype dtype); /* of one element: 4 and 6 exist */

/* One tensor of a mapped file. Names and data belong to the shard. */
typedef struct qr_tensor {
    const char *name; /* UTF-8 without NUL */
    qr_file_dtype dtype;
    int ndim; /* 0: a scalar */
    int64_t shape[QR_MAX_DIMS];
    int64_t begin, end; /* bytes of the file, header included */
    int shard;          /* which file of a checkpoint; 0 for a single one */
} qr_tensor;

typedef struct qr_pair {
    const char *key, *value;
} qr_pair;

/* One file: privately mapped, so that a write to the map stays in this process and never reaches the file. */
typedef struct qr_shard {
    char *label; /* how messages call it */
    unsigned char *map;
    size_t size;
    qr_tensor *tensor; /* by position in the file */
    int64_t tensors;
    qr_pair *metadata; /* by key */
    int64_t pairs;
    char *names; /* storage of all strings */
} qr_shard;

/* Map one file and read its header; no page of weights is touched. The file must not shrink while it is mapped: reading
 * beyond its new end kills the process (SIGBUS), as for every map. Returns 0, or -1 with *out empty; the caller owns
 * *out (qr_shard_close). */
int qr_shard_open(const char *path, const char *label, qr_shard *out, qr_error *error);
void qr_shard_close(qr_shard *shard); /* accepts an empty one */

/* What one tensor of a file to be written looks like; the writer sets begin and end. */
typedef struct qr_writer qr_writer;

/* Lay out the file: sorts `tensor` into file order (dtype descending, then name), checks names, sets begin and end, and
 * writes the header to a temporary file beside `path`. The caller then passes the data of each tensor in that order, and
 * either finishes, which makes the file appear under its name complete and on disk, or aborts, which leaves no trace.
 * Both free the writer. */
int qr_writer_open(const char *path, qr_tensor *tensor, int64_t tensors, const qr_pair *metadata, int64_t pairs,
                   qr_writer **out, qr_error *error);
int qr_writer_data(qr_writer *writer, const void *data, int64_t bytes, qr_error *error);
int qr_writer_finish(qr_writer *writer, qr_error *error);
void qr_writer_abort(qr_writer *writer); /* accepts NULL */

/* Bytes a tensor of this shape takes, or -1: negative size, product beyond 2^53, or not a whole number of bytes. */
int64_t qr_tensor_bytes(qr_file_dtype dtype, int ndim, const int64_t *shape);

/* "[2, 3]" for messages. Returns `buffer`. */
const char *qr_shape_text(int ndim, const int64_t *shape, char *buffer, size_t size);

#endif
