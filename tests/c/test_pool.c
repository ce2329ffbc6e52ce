/* The thread pool: every output exactly once, whatever calls, nests, forks or resizes meanwhile. */
#include "../../csrc/core/pool.h"

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { N = 10007 };

typedef struct job {
    atomic_int visits[N];
    atomic_int threads_seen[QR_MAX_THREADS];
    atomic_int bad_pieces;
    int64_t grain;
    int allowed;
    qr_pool *pool;
} job;

static void visit(void *context, int64_t begin, int64_t end, int thread)
{
    job *j = context;
    if (begin < 0 || end > N || begin >= end || begin % j->grain != 0 || thread < 0 || thread >= j->allowed)
        atomic_fetch_add(&j->bad_pieces, 1);
    atomic_fetch_add(&j->threads_seen[thread], 1);
    for (int64_t i = begin; i < end; i++)
        atomic_fetch_add(&j->visits[i], 1);
}

/* Run `visit` once over everything and count the outputs that were not visited exactly once. */
static int faults_of_a_job(job *j, qr_pool *pool, int threads, int64_t grain)
{
    int faults = 0;

    memset(j, 0, sizeof *j);
    j->grain = grain;
    j->allowed = threads;
    qr_pool_parallel(pool, threads, N, grain, visit, j);
    for (int i = 0; i < N; i++)
        faults += atomic_load(&j->visits[i]) != 1;
    return faults + atomic_load(&j->bad_pieces);
}

static int faults_of_a_run(qr_pool *pool, int threads, int64_t grain)
{
    job *j = malloc(sizeof *j);
    const int faults = faults_of_a_job(j, pool, threads, grain);
    free(j);
    return faults;
}

static void nap(long microseconds)
{
    nanosleep(&(struct timespec){.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000}, NULL);
}

TEST(every_output_is_visited_once)
{
    for (int threads = 1; threads <= 8; threads++) {
        qr_pool *pool = qr_pool_new(threads);
        for (int64_t grain = 1; grain <= 4 * N; grain = grain * 3 + 1)
            CHECK_INT(faults_of_a_run(pool, threads, grain), 0);
        qr_pool_free(pool);
    }
}

TEST(many_short_jobs_lose_nothing)
{
    qr_pool *pool = qr_pool_new(4);
    int faults = 0;
    for (int i = 0; i < 2000; i++)
        faults += faults_of_a_run(pool, 2 + i % 3, 1000);
    CHECK_INT(faults, 0);
    qr_pool_free(pool);
}

TEST(sleeping_workers_are_woken)
{
    qr_pool *pool = qr_pool_new(3);
    int faults = 0;
    for (int i = 0; i < 100; i++) {
        faults += faults_of_a_run(pool, 3, 100);
        nap(i % 2 ? 40 : 300); /* about when they fall asleep, and well after */
    }
    CHECK_INT(faults, 0);
    qr_pool_free(pool);
}

static void wait_for_the_other(void *context, int64_t begin, int64_t end, int thread)
{
    atomic_int *arrived = context;
    (void)begin, (void)end, (void)thread;
    atomic_fetch_add(arrived, 1);
    for (int i = 0; i < 20000 && atomic_load(arrived) < 2; i++)
        nap(100);
}

TEST(two_threads_work_at_the_same_time)
{
    qr_pool *pool = qr_pool_new(2);
    atomic_int arrived = 0;
    const time_t start = time(NULL);
    qr_pool_parallel(pool, 2, 2, 1, wait_for_the_other, &arrived); /* each piece waits until the other has begun */
    CHECK_INT(atomic_load(&arrived), 2);
    CHECK(time(NULL) - start < 2);
    qr_pool_free(pool);
}

static void nested(void *context, int64_t begin, int64_t end, int thread)
{
    job *j = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        if (faults_of_a_run(j->pool, 2, 1000) != 0)
            atomic_fetch_add(&j->bad_pieces, 1);
}

TEST(a_call_from_inside_a_piece_does_all_the_work_itself)
{
    job *j = calloc(1, sizeof *j);
    j->pool = qr_pool_new(3);
    qr_pool_parallel(j->pool, 3, 20, 1, nested, j);
    CHECK_INT(atomic_load(&j->bad_pieces), 0);
    qr_pool_free(j->pool);
    free(j);
}

/* Static, so that a child forked meanwhile neither inherits a half-made allocation nor seems to leak one. */
static struct calling {
    qr_pool *pool;
    int faults;
    job job;
} callings[4];

static void *caller(void *context)
{
    struct calling *c = context;
    for (int i = 0; i < 300; i++)
        c->faults += faults_of_a_job(&c->job, c->pool, 2 + i % 2, 500);
    return NULL;
}

static void start_calling(pthread_t *thread, struct calling *c, qr_pool *pool)
{
    c->pool = pool;
    c->faults = 0;
    CHECK_INT(pthread_create(thread, NULL, caller, c), 0);
}

TEST(callers_on_several_threads_share_one_pool)
{
    qr_pool *pool = qr_pool_new(3);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        start_calling(&threads[i], &callings[i], pool);
    for (int i = 0; i < 200; i++) {
        qr_pool_resize(pool, 1 + i % 5);
        nap(100);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        CHECK_INT(callings[i].faults, 0);
    }
    qr_pool_free(pool);
}

TEST(a_call_never_gets_more_threads_than_it_asked_for)
{
    qr_pool *pool = qr_pool_new(8);
    job *j = calloc(1, sizeof *j);
    int seen = 0;
    CHECK_INT(faults_of_a_run(pool, 8, 10), 0); /* all seven workers exist now */
    j->grain = 10;
    j->allowed = 3;
    for (int i = 0; i < 50; i++)
        qr_pool_parallel(pool, 3, N, 10, visit, j);
    for (int i = 3; i < QR_MAX_THREADS; i++)
        seen += atomic_load(&j->threads_seen[i]);
    CHECK_INT(seen, 0);
    CHECK_INT(atomic_load(&j->bad_pieces), 0);
    free(j);
    qr_pool_free(pool);
}

TEST(size_is_clamped)
{
    qr_pool *pool = qr_pool_new(0);
    CHECK_INT(qr_pool_size(pool), 1);
    qr_pool_resize(pool, 1 << 20);
    CHECK_INT(qr_pool_size(pool), QR_MAX_THREADS);
    qr_pool_free(pool);
    qr_pool_free(NULL);
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1 /* as gcc says it */
#endif
#endif
#if !defined(MAY_FORK)           /* 0 where an emulator cannot */
#if defined(__SANITIZE_THREAD__) /* its runtime does not allow threads in a child of a process with threads */
enum { MAY_FORK = 0 };
#else
enum { MAY_FORK = 1 };
#endif
#endif

/* Exit status of a child that uses the pool, forks once more, and lets that child use and free it. */
static int use_pool_in_children(qr_pool *pool)
{
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        alarm(20); /* a lost wake-up must end as a failure, not as a hang */
        const int faults = faults_of_a_run(pool, 3, 100);
        pid_t grandchild = fork();
        if (grandchild == 0) {
            alarm(20);
            const int more = faults_of_a_run(pool, 3, 100);
            qr_pool_free(pool);
            _exit(more != 0);
        }
        waitpid(grandchild, &status, 0);
        _exit(faults != 0 || status != 0);
    }
    waitpid(child, &status, 0);
    return status;
}

TEST(a_forked_child_gets_threads_of_its_own)
{
    qr_pool *pool = qr_pool_new(3);
    if (MAY_FORK) {
        CHECK_INT(use_pool_in_children(pool), 0); /* before any worker exists */
        CHECK_INT(faults_of_a_run(pool, 3, 100), 0);
        CHECK_INT(use_pool_in_children(pool), 0); /* workers spinning */
        nap(2000);
        CHECK_INT(use_pool_in_children(pool), 0); /* workers asleep */
    }
    CHECK_INT(faults_of_a_run(pool, 3, 100), 0);
    qr_pool_free(pool);
}

TEST(fork_while_another_thread_is_in_a_call)
{
    qr_pool *pool = qr_pool_new(3);
    pthread_t busy;
    start_calling(&busy, &callings[0], pool);
    for (int i = 0; MAY_FORK && i < 20; i++)
        CHECK_INT(use_pool_in_children(pool), 0);
    CHECK_INT(pthread_join(busy, NULL), 0);
    CHECK_INT(callings[0].faults, 0);
    qr_pool_free(pool);
}

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(idle_workers_sleep)
{
    qr_pool *pool = qr_pool_new(4);
    CHECK_INT(faults_of_a_run(pool, 4, 100), 0);
    nap(20 * 1000);
    const double before = cpu_seconds();
    nap(200 * 1000);
    CHECK(cpu_seconds() - before < 0.05); /* three workers that spun would take 0.2 s or more on any machine */
    qr_pool_free(pool);
}

RUN_TESTS()
