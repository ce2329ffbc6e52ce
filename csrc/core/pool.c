/* The thread pool.  One word, `gate`, says whether a job is open, for how many threads, and how many workers are inside;
 * a worker that comes late finds the gate shut and goes back to sleep, so the caller never waits for a thread that the
 * system did not run. */
#include "pool.h"

#include "cpu.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Layout of the gate: number of the job (32 bits) | threads that may take part (15) | open (1) | workers inside (16). */
#define INSIDE UINT64_C(0xffff)
#define OPEN UINT64_C(0x10000)
#define MAY_JOIN(gate) ((int)((gate) >> 17 & 0x7fff))
#define JOB(gate) ((uint32_t)((gate) >> 32))
#define NEW_GATE(job, threads) ((uint64_t)(job) << 32 | (uint64_t)(threads) << 17 | OPEN)

/* Longer than the gap between the ops of a forward pass, shorter than anyone notices on an idle machine. */
enum { SPIN_NS = 50 * 1000, CACHE_LINE = 64 };

typedef struct worker {
    qr_pool *pool;
    pthread_t thread;
    int id;
} worker;

struct qr_pool {
    alignas(CACHE_LINE) _Atomic uint64_t gate;
    alignas(CACHE_LINE) _Atomic int64_t next; /* first output nobody has taken */

    /* The job. Written while the gate is shut and nobody is inside, read only by those inside. */
    alignas(CACHE_LINE) int64_t n;
    int64_t grain;
    qr_range work;
    void *context;

    alignas(CACHE_LINE) atomic_bool taken; /* one job at a time */
    atomic_bool stop;
    atomic_int sleepers;       /* workers in wake, or about to be */
    atomic_bool caller_sleeps; /* the caller is in left, or about to be */
    atomic_int owner; /* process whose threads these are; negative while a forked child makes the pool its own */
    atomic_int threads;
    int cpus;
    atomic_int started; /* workers 1..started exist; changed only by the thread that took the pool */
    pthread_mutex_t mutex;
    pthread_cond_t wake, left;
    worker workers[QR_MAX_THREADS];
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int clamp_threads(int threads)
{
    return threads < 1 ? 1 : threads > QR_MAX_THREADS ? QR_MAX_THREADS : threads;
}

/* Spinning helps only while every thread has a CPU of its own. */
static bool may_spin(const qr_pool *pool)
{
    return pool->started < pool->cpus;
}

static void take_part(qr_pool *pool, int thread)
{
    const int64_t n = pool->n, grain = pool->grain;
    int64_t begin;

    while ((begin = atomic_fetch_add_explicit(&pool->next, grain, memory_order_relaxed)) < n)
        pool->work(pool->context, begin, n - begin < grain ? n : begin + grain, thread);
}

/* A job is open that thread `id` may join and has not joined yet. */
static bool invites(uint64_t gate, int id, uint32_t last_job)
{
    return (gate & OPEN) && id < MAY_JOIN(gate) && JOB(gate) != last_job;
}

static void wait_for_job(qr_pool *pool, int id, uint32_t last_job)
{
    if (may_spin(pool)) {
        const int64_t deadline = nanoseconds() + SPIN_NS;
        do {
            for (int i = 0; i < 32; i++, relax())
                if (invites(atomic_load(&pool->gate), id, last_job) || atomic_load(&pool->stop))
                    return;
        } while (nanoseconds() < deadline);
    }

    /* The worker announces itself, then looks at the gate; open_gate() changes the gate, then looks for sleepers. Both in
     * sequentially consistent order, so one of them sees the other and no call is missed. */
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!invites(atomic_load(&pool->gate), id, last_job) && !atomic_load(&pool->stop))
        pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument)
{
    const worker *self = argument;
    qr_pool *pool = self->pool;
    uint32_t last_job = 0; /* jobs count from 1 */

    fesetenv(FE_DFL_ENV); /* a thread inherits rounding and flushing from whoever happened to start it */
    while (!atomic_load(&pool->stop)) {
        uint64_t gate = atomic_load(&pool->gate);
        if (!invites(gate, self->id, last_job)) {
            wait_for_job(pool, self->id, last_job);
            continue;
        }
        if (!atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1))
            continue;
        last_job = JOB(gate);
        take_part(pool, self->id);
        if ((atomic_fetch_sub(&pool->gate, 1) & (OPEN | INSIDE)) == 1 && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->left);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
    return NULL;
}

/* Have workers 1..wanted-1, as far as the system grants them: a job gets done with any number. */
static void start_workers(qr_pool *pool, int wanted)
{
    sigset_t all, before;

    if (pool->started >= wanted - 1)
        return;
    sigfillset(&all); /* signals belong to the threads of the host program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->started < wanted - 1) {
        worker *w = &pool->workers[pool->started + 1];
        *w = (worker){.pool = pool, .id = pool->started + 1};
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0)
            break;
        atomic_fetch_add(&pool->started, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void open_gate(qr_pool *pool, int threads)
{
    atomic_store(&pool->next, 0);
    atomic_store(&pool->gate, NEW_GATE(JOB(atomic_load(&pool->gate)) + 1, threads));
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void shut_gate(qr_pool *pool)
{
    if ((atomic_fetch_and(&pool->gate, ~OPEN) & INSIDE) == 0)
        return;
    if (may_spin(pool)) {
        const int64_t deadline = nanoseconds() + SPIN_NS;
        do {
            for (int i = 0; i < 32; i++, relax())
                if ((atomic_load(&pool->gate) & INSIDE) == 0)
                    return;
        } while (nanoseconds() < deadline);
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->gate) & INSIDE)
        pthread_cond_wait(&pool->left, &pool->mutex);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->mutex);
}

static void forget_workers(qr_pool *pool)
{
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->left, NULL);
    atomic_store(&pool->gate, 0);
    atomic_store(&pool->sleepers, 0);
    atomic_store(&pool->caller_sleeps, false);
    atomic_store(&pool->taken, false);
    atomic_store(&pool->started, 0);
}

/* After fork the child has the memory of the pool but none of its threads, and perhaps a mutex that one of them held.
 * The first thread of the child that comes along starts afresh; false for others meanwhile. */
static bool belongs_to_this_process(qr_pool *pool)
{
    const int self = (int)getpid();
    int owner = atomic_load(&pool->owner);

    if (owner == self)
        return true;
    if (owner == -self || !atomic_compare_exchange_strong(&pool->owner, &owner, -self))
        return false;
    forget_workers(pool);
    atomic_store(&pool->owner, self);
    return true;
}

qr_pool *qr_pool_new(int threads)
{
    qr_pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);

    if (pool == NULL)
        return NULL;
    atomic_init(&pool->owner, (int)getpid());
    atomic_init(&pool->threads, clamp_threads(threads));
    atomic_init(&pool->stop, false);
    pool->cpus = qr_cpu_count();
    forget_workers(pool);
    return pool;
}

void qr_pool_free(qr_pool *pool)
{
    bool free_to_take = false;

    if (pool == NULL)
        return;
    if (!belongs_to_this_process(pool) || !atomic_compare_exchange_strong(&pool->taken, &free_to_take, true))
        return;
    atomic_store(&pool->stop, true);
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int id = 1; id <= pool->started; id++)
        pthread_join(pool->workers[id].thread, NULL);
    pthread_cond_destroy(&pool->left);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void qr_pool_resize(qr_pool *pool, int threads)
{
    atomic_store(&pool->threads, clamp_threads(threads));
}

int qr_pool_size(const qr_pool *pool)
{
    return atomic_load(&pool->threads);
}

void qr_pool_parallel(void *handle, int threads, int64_t n, int64_t grain, qr_range work, void *context)
{
    qr_pool *pool = handle;
    bool free_to_take = false;

    if (n <= 0)
        return;
    grain = grain < 1 ? 1 : grain;
    const int64_t grains = (n - 1) / grain + 1;
    threads = clamp_threads(threads < grains ? threads : (int)grains);
    if (threads == 1 || !belongs_to_this_process(pool) ||
        !atomic_compare_exchange_strong(&pool->taken, &free_to_take, true)) {
        work(context, 0, n, 0);
        return;
    }
    pool->n = n;
    pool->grain = grain;
    pool->work = work;
    pool->context = context;
    start_workers(pool, threads);
    open_gate(pool, threads);
    take_part(pool, 0);
    shut_gate(pool);
    atomic_store(&pool->taken, false);
}
