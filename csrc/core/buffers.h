/* Large buffers that are kept for the next use: a fresh map of this size costs a page fault for every page of it. */
#ifndef QR_BUFFERS_H
#define QR_BUFFERS_H

#include "../qr.h"

enum {
    QR_BUFFER_LARGE = 4 << 20 /* bytes from which this is worth while; below, malloc keeps memory by itself */
};

typedef struct qr_buffers qr_buffers;

/* A list that keeps at most `limit` bytes; NULL without memory. */
qr_buffers *qr_buffers_new(int64_t limit);

/* Gives up the list and what it keeps. Buffers in use must have come back. */
void qr_buffers_free(qr_buffers *list);

/* At least `size` bytes of unknown contents on a cache line, or NULL. From any thread; never waits for another one. */
void *qr_buffers_take(qr_buffers *list, size_t size);

/* Hand a buffer back; NULL is accepted. It is kept, in place of older ones where the limit asks for it, or unmapped. */
void qr_buffers_give(qr_buffers *list, void *buffer);

/* Bytes a buffer has room for. */
size_t qr_buffer_room(const void *buffer);

/* Bytes kept and not in use. */
int64_t qr_buffers_kept(qr_buffers *list);

/* Unmap what is kept. */
void qr_buffers_drop(qr_buffers *list);

#endif
