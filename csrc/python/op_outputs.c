/* Results of an op: sized by its signature, allocated or taken from the caller, and handed back. */
#include "op_call.h"

#include "../core/buffers.h"

/* Scratch starts on a cache line; the block's own address is kept for freeing. */
static int
make_scratch(qr_op_call *c, int i, qr_array *a)
{
    const size_t bytes = (size_t)qr_elements(a) * qr_dtype_size(a->dtype);
    c->large[i] = bytes >= QR_BUFFER_LARGE;
    c->scratch[i] = c->large[i] ? qr_buffers_take(c->state->buffers, bytes) : PyMem_RawMalloc(bytes + 64);
    if (c->scratch[i] == NULL)
        return qr_fail(&c->error, QR_NO_MEMORY, "%s: no memory for %zu bytes of scratch", c->op->signature.name, bytes);
    a->data = (void *)(((uintptr_t)c->scratch[i] + 63) & ~(uintptr_t)63);
    return 0;
}

void
qr_free_scratch(qr_op_call *c, int i)
{
    if (c->scratch[i] != NULL && c->large[i])
        qr_buffers_give(c->state->buffers, c->scratch[i]);
    else
        PyMem_RawFree(c->scratch[i]); /* accepts NULL */
}

/* From the first byte of an array to behind its last. No stride here is negative: see what inputs are made to be. */
static void
extent(PyArrayObject *array, const char **begin, const char **end)
{
    *begin = PyArray_BYTES(array);
    *end = *begin + PyArray_ITEMSIZE(array);
    for (int d = 0; d < PyArray_NDIM(array); d++) {
        if (PyArray_DIM(array, d) == 0) {
            *end = *begin;
            return;
        }
        *end += (PyArray_DIM(array, d) - 1) * PyArray_STRIDE(array, d);
    }
}

/* Name of an input, or of an output before this one, that shares memory with the array; NULL if none does. */
static const char *
overlapped(const qr_op_call *c, PyArrayObject *array)
{
    const char *begin, *end, *from, *to;

    extent(array, &begin, &end);
    for (int i = 0; begin < end && i < c->op->signature.params; i++) {
        if (c->held[i] == NULL)
            continue;
        extent((PyArrayObject *)c->held[i], &from, &to);
        if (from < end && begin < to && from < to)
            return c->op->signature.param[i].name;
    }
    return NULL;
}

/* An array the caller wants the result in: it must be exactly what would have been allocated. */
static int
take_buffer(qr_op_call *c, int i, const qr_array *want)
{
    const qr_param *p = &c->op->signature.param[i];
    const char *name = c->op->signature.name;
    PyArrayObject *array = (PyArrayObject *)c->given[i]; /* borrowed */
    bool same = PyArray_NDIM(array) == want->ndim;

    for (int d = 0; same && d < want->ndim; d++)
        same = PyArray_DIM(array, d) == want->shape[d];
    if (!same || qr_dtype_of(c->state, PyArray_TYPE(array)) != want->dtype) {
        char text[96];
        return qr_fail(&c->error, QR_BAD_SHAPE,
                       "%s: the array given for %s does not fit\n    expected %s %s, %lld elements", name, p->name,
                       qr_dtype_name(want->dtype), qr_param_text(p, text, sizeof text), (long long)qr_elements(want));
    }
    if (!PyArray_ISCARRAY(array) || !PyArray_ISNOTSWAPPED(array))
        return qr_fail(
            &c->error, QR_BAD_INPUT,
            "%s: the array given for %s cannot be written in place\n    expected writeable, aligned, contiguous", name,
            p->name);
    const char *other = overlapped(c, array);
    if (other != NULL)
        return qr_fail(&c->error, QR_BAD_INPUT, "%s: the array given for %s overlaps %s", name, p->name, other);
    c->held[i] = Py_NewRef(array);
    return 0;
}

int
qr_make_outputs(qr_op_call *c)
{
    const qr_signature *s = &c->op->signature;
    for (int i = 0; i < s->params; i++) {
        const qr_param *p = &s->param[i];
        if (!p->output)
            continue;
        qr_array *a = &c->call.array[p->slot];
        const bool buffer = c->given[i] != NULL && PyArray_Check(c->given[i]);
        int wanted = !p->optional;
        if (!p->optional && !buffer && c->given[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s: '%s' has to be an array, not %.100s\n    expected %s", s->name, p->name,
                         Py_TYPE(c->given[i])->tp_name, qr_op_text(c->op));
            return -1;
        }
        if (p->optional && !buffer && c->given[i] != NULL && (wanted = PyObject_IsTrue(c->given[i])) < 0)
            return -1;
        if (!wanted && !buffer)
            continue;
        if (qr_bind_output(s, p, &c->call, &c->star, a, &c->error) < 0)
            return -1;
        if (p->scratch) {
            if (make_scratch(c, i, a) < 0)
                return -1;
            continue;
        }
        if (buffer) {
            if (take_buffer(c, i, a) < 0)
                return -1;
        } else {
            npy_intp shape[QR_MAX_DIMS];
            for (int d = 0; d < a->ndim; d++)
                shape[d] = (npy_intp)a->shape[d];
            c->held[i] = qr_new_array(c->state, a->ndim, shape, qr_typenum(c->state, a->dtype),
                                      qr_elements(a) * (int64_t)qr_dtype_size(a->dtype));
            if (c->held[i] == NULL)
                return -1;
        }
        a->data = PyArray_DATA((PyArrayObject *)c->held[i]);
    }
    return 0;
}

PyObject *
qr_op_results(qr_op_call *c)
{
    const qr_signature *s = &c->op->signature;
    PyObject *found[QR_MAX_PARAMS]; /* borrowed from held */
    Py_ssize_t n = 0;

    for (int i = 0; i < s->params; i++)
        if (s->param[i].output && c->held[i] != NULL)
            found[n++] = c->held[i];
    if (n == 1)
        return Py_NewRef(found[0]);
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(found[i])); /* steals */
    return tuple;
}
