/* A checkpoint: one safetensors file, or a folder of shards with an index, as one sorted set of named tensors.
 * No Python.h, no kernels. */
#ifndef QR_CHECKPOINT_H
#define QR_CHECKPOINT_H

#include "safetensors.h"

typedef struct qr_checkpoint {
    qr_shard *shard; /* by file name */
    int shards;
    const qr_tensor **tensor; /* of all shards, by name (order of bytes) */
    int64_t tensors;
} qr_checkpoint;

/* Open what `path` names: a folder with model.safetensors.index.json or model.safetensors, such an index itself, or one
 * safetensors file. Maps every shard and checks that index and shards agree in both directions; reads no weights.
 * Immutable from here on, so any number of threads may use it. Returns 0, or -1 with *out NULL. */
int qr_checkpoint_open(const char *path, qr_checkpoint **out, qr_error *error);
void qr_checkpoint_close(qr_checkpoint *checkpoint); /* accepts NULL */

const qr_tensor *qr_checkpoint_find(const qr_checkpoint *checkpoint, const char *name); /* or NULL */
unsigned char *qr_tensor_data(const qr_checkpoint *checkpoint, const qr_tensor *tensor);

/* Bytes of all maps that are in memory, edited pages included. The system counts its file cache, so pages read by
 * someone else count too; of a file this user could not write, Linux reports every page as present. Returns -1 with the
 * error set where the system cannot tell. */
int64_t qr_checkpoint_resident(const qr_checkpoint *checkpoint, qr_error *error);

/* Advice to the system about the pages of one tensor. It never changes what an array holds: giving pages up keeps edits
 * (the kernel swaps them or keeps them), and pages shared with a neighbour are left alone. */
typedef enum qr_advice { QR_WILL_NEED, QR_DONT_NEED } qr_advice;
int qr_tensor_advise(const qr_checkpoint *checkpoint, const qr_tensor *tensor, qr_advice advice, qr_error *error);

/* Bytes of a tensor, from its first one on. */
typedef struct qr_span {
    int64_t begin, end;
} qr_span;

/* Where this process has written to pages that hold part of the tensor: the number of ranges in *out (the caller frees
 * it), in order, or -1 with *out NULL where the system does not say. Bytes outside of them are those of the file; bytes
 * inside may be, since a page is written as a whole and may be shared with a neighbour. */
int64_t qr_tensor_touched(const qr_checkpoint *checkpoint, const qr_tensor *tensor, qr_span **out);

/* Throw away what was written to the pages that hold nothing but this tensor, and return their bytes; the edges, and
 * everything on systems that cannot, are left as they are. */
int64_t qr_tensor_revert(const qr_checkpoint *checkpoint, const qr_tensor *tensor);

#endif
