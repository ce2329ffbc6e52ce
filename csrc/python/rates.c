/* What the machine can do at most, measured on the threads that ops use: reading memory, and arithmetic in registers. */
#include "py.h"

#include "../core/cpu.h"

#include <time.h>

enum { READ_GRAIN = 1 << 18 }; /* bytes: small enough to share evenly, large enough for a stream */

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct reading {
    const unsigned char *data;
    uint64_t sum[QR_MAX_THREADS]; /* so that the reads have a use */
} reading;

static void
read_range(void *context, int64_t begin, int64_t end, int thread)
{
    reading *r = context;
    uint64_t sum[8] = {0}; /* more than one chain: the additions must not be what is measured */

    for (int64_t i = begin; i + 64 <= end; i += 64) {
        uint64_t word[8];
        memcpy(word, r->data + i, sizeof word);
        for (int k = 0; k < 8; k++)
            sum[k] ^= word[k];
    }
    for (int64_t i = end - (end - begin) % 64; i < end; i++)
        sum[0] ^= r->data[i];
    for (int k = 0; k < 8; k++)
        r->sum[thread] ^= sum[k];
}

PyDoc_STRVAR(read_seconds_doc, "read_seconds(buffer, /)\n--\n\n"
                               "Seconds in which the threads of the ops read every byte of a contiguous buffer once.");

static PyObject *
read_seconds(PyObject *module, PyObject *object)
{
    const qr_state *state = (qr_state *)PyModule_GetState(module);
    qr_pool *const pool = state->pool;
    reading r = {0};
    Py_buffer view;

    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    r.data = view.buf;
    PyThreadState *const thread = PyEval_SaveThread();
    const double start = seconds_now();
    if (view.len > 0)
        qr_pool_parallel(pool, qr_pool_size(pool), view.len, READ_GRAIN, read_range, &r);
    const double end = seconds_now();
    PyEval_RestoreThread(thread);
    PyBuffer_Release(&view);
    return PyFloat_FromDouble(end - start);
}

typedef struct arithmetic {
    qr_level level;
    bool dot;
    int64_t steps;
    int64_t done[QR_MAX_THREADS];
} arithmetic;

static void
calculate(void *context, int64_t begin, int64_t end, int thread)
{
    arithmetic *a = context;
    for (int64_t i = begin; i < end; i++)
        a->done[thread] += qr_cpu_arithmetic(a->level, a->dot, a->steps);
}

PyDoc_STRVAR(arithmetic_rate_doc,
             "arithmetic_rate(kind, steps=200_000, /)\n--\n\n"
             "Floating point operations per second of all threads together, in registers, of what "
             "the level in use has:\nkind \"fma\" or \"bf16\" (the bf16 dot instruction; 0.0 where "
             "the level has none). A multiply-add counts two.");

static PyObject *
arithmetic_rate(PyObject *module, PyObject *args)
{
    const qr_state *state = (qr_state *)PyModule_GetState(module);
    qr_pool *const pool = state->pool;
    const int threads = qr_pool_size(pool);
    const char *kind = NULL;
    long long steps = 200000;
    arithmetic a = {.level = qr_level_of(state)};
    int64_t done = 0;

    if (!PyArg_ParseTuple(args, "s|L:arithmetic_rate", &kind, &steps))
        return NULL;
    a.dot = strcmp(kind, "bf16") == 0;
    if ((!a.dot && strcmp(kind, "fma") != 0) || steps < 1) {
        qr_error error = {0};
        qr_fail(&error, QR_BAD_INPUT, "arithmetic_rate: kind '%.40s', %lld steps\n    expected fma or bf16, and a step",
                kind, steps);
        return qr_raise((qr_state *)PyModule_GetState(module), &error);
    }
    a.steps = steps;
    PyThreadState *const thread = PyEval_SaveThread();
    const double start = seconds_now();
    qr_pool_parallel(pool, threads, 4 * (int64_t)threads, 1, calculate, &a); /* four each: who is late does fewer */
    const double end = seconds_now();
    PyEval_RestoreThread(thread);
    for (int t = 0; t < threads; t++)
        done += a.done[t];
    return PyFloat_FromDouble(end > start ? (double)done / (end - start) : 0.0);
}

static PyMethodDef functions[] = {
    {"read_seconds", read_seconds, METH_O, read_seconds_doc},
    {"arithmetic_rate", arithmetic_rate, METH_VARARGS, arithmetic_rate_doc},
    {NULL, NULL, 0, NULL},
};

int
qr_add_rates(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
