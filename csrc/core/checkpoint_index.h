/* The index of a sharded checkpoint (weight_map: tensor -> file), and lists of faults for one message.  No Python.h. */
#ifndef QR_CHECKPOINT_INDEX_H
#define QR_CHECKPOINT_INDEX_H

#include "../qr.h"
#include "json_text.h"

typedef struct qr_index_row {
    const char *name;
    const char *path; /* of the shard, as written */
    int file;         /* in qr_index.file */
} qr_index_row;

typedef struct qr_index {
    qr_index_row *row; /* by name */
    int64_t rows;
    const char **file; /* distinct shards, sorted, relative to the folder and inside it */
    int files;
    size_t longest_file;
    void *tree; /* holds the strings */
} qr_index;

/* Returns 0, or -1 with *out empty. The caller owns *out (qr_index_free). */
int qr_index_read(const char *path, const char *label, qr_index *out, qr_error *error);
void qr_index_free(qr_index *index);

/* All faults of one kind become one message: how many, and the first five. Start from {0}. */
typedef struct qr_faults {
    char text[1200];
    size_t used;
    int64_t count;
} qr_faults;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void qr_fault(qr_faults *faults, const char *format, ...);

/* 0 if there were none. `summary` takes the count and the plural's "s"; `last` is the last line, without indent. */
int qr_faults_raise(const qr_faults *faults, const char *where, const char *summary, const char *last, qr_error *error);

#endif
