/* Threads that share the outputs of one op: lazily started, asleep when idle, usable after fork.
 * Which thread works on what is left to chance; no result may depend on it. */
#ifndef QR_POOL_H
#define QR_POOL_H

#include "../qr.h"

enum { QR_MAX_THREADS = 256 };

typedef struct qr_pool qr_pool;

/* A pool for `threads` threads, the caller's included. Starts none of them. NULL when there is no memory. */
qr_pool *qr_pool_new(int threads);

/* Ends the threads and frees the pool; accepts NULL. A pool some thread is still working with is left to the process. */
void qr_pool_free(qr_pool *pool);

/* How many threads the calls from now on may use; clamped to 1..QR_MAX_THREADS. */
void qr_pool_resize(qr_pool *pool, int threads);
int qr_pool_size(const qr_pool *pool);

/* qr_call.parallel: run `work` over [0, n) in pieces of `grain`, on at most `threads` threads, and return when all of it
 * is done. While the pool is taken (a call from inside a piece, or from another thread) the caller does all the work
 * itself as thread 0, so scratch must belong to the call that is made, not to an enclosing one. */
void qr_pool_parallel(void *pool, int threads, int64_t n, int64_t grain, qr_range work, void *context);

#endif
