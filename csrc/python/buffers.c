/* Large results and scratch from the list of core/buffers.c, which NumPy reaches as a data handler. The handler and its
 * list belong to a capsule that every such array holds, so they outlive the module where arrays do. */
#include "py.h"

#include "../core/buffers.h"

#include <unistd.h>

typedef struct handler {
    PyDataMem_Handler numpy; /* first: what NumPy sees in the capsule */
    qr_buffers *list;
} handler;

/* NumPy's name for the capsule of a handler. */
static const char capsule_name[] = "mem_handler";

static void *
take(void *list, size_t size)
{
    return qr_buffers_take(list, size);
}

static void *
take_zeros(void *list, size_t count, size_t size)
{
    if (size != 0 && count > SIZE_MAX / size)
        return NULL;
    void *buffer = qr_buffers_take(list, count * size);
    return buffer != NULL ? memset(buffer, 0, count * size) : NULL;
}

static void
give(void *list, void *buffer, size_t size)
{
    (void)size; /* what the array has become; the buffer knows its own */
    qr_buffers_give(list, buffer);
}

static void *
take_again(void *list, void *buffer, size_t size)
{
    void *other = qr_buffers_take(list, size);
    if (other != NULL && buffer != NULL) {
        const size_t room = qr_buffer_room(buffer);
        memcpy(other, buffer, size < room ? size : room);
        qr_buffers_give(list, buffer);
    }
    return other;
}

static void
destroy(PyObject *capsule)
{
    handler *h = PyCapsule_GetPointer(capsule, capsule_name);
    if (h == NULL) {
        PyErr_Clear();
        return;
    }
    qr_buffers_free(h->list);
    PyMem_RawFree(h);
}

/* A sixteenth of the machine's memory, at most 512 MiB. */
static int64_t
default_limit(void)
{
    const int64_t pages = (int64_t)sysconf(_SC_PHYS_PAGES), page = (int64_t)sysconf(_SC_PAGESIZE);
    const int64_t most = INT64_C(512) << 20;
    return pages <= 0 || page <= 0 || pages / 16 > most / page ? most : pages / 16 * page;
}

static PyObject *
kept_buffers(PyObject *module, PyObject *unused)
{
    qr_state *state = PyModule_GetState(module);
    (void)unused;
    return PyLong_FromLongLong(qr_buffers_kept(state->buffers));
}

PyDoc_STRVAR(kept_buffers_doc, "kept_buffers()\n--\n\n"
                               "Bytes of freed large results kept for the next ones: at most 512 MiB, and a sixteenth "
                               "of the machine's memory.");

static PyObject *
drop_buffers(PyObject *module, PyObject *unused)
{
    qr_state *state = PyModule_GetState(module);
    (void)unused;
    qr_buffers_drop(state->buffers);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(drop_buffers_doc, "drop_buffers()\n--\n\nGive the memory that `kept_buffers` counts back to the system.");

static PyMethodDef methods[] = {
    {"kept_buffers", kept_buffers, METH_NOARGS, kept_buffers_doc},
    {"drop_buffers", drop_buffers, METH_NOARGS, drop_buffers_doc},
    {NULL, NULL, 0, NULL},
};

int
qr_add_buffers(PyObject *module)
{
    qr_state *state = PyModule_GetState(module);
    handler *h = PyMem_RawCalloc(1, sizeof *h);

    if (h == NULL || (h->list = qr_buffers_new(default_limit())) == NULL) {
        PyMem_RawFree(h);
        PyErr_NoMemory();
        return -1;
    }
    strcpy(h->numpy.name, "qwenref_buffers");
    h->numpy.version = 1;
    h->numpy.allocator = (PyDataMemAllocator){h->list, take, take_zeros, take_again, give};
    state->buffer_handler = PyCapsule_New(h, capsule_name, destroy);
    if (state->buffer_handler == NULL) {
        qr_buffers_free(h->list);
        PyMem_RawFree(h);
        return -1;
    }
    state->buffers = h->list;
    return PyModule_AddFunctions(module, methods);
}

PyObject *
qr_new_array(qr_state *state, int ndim, npy_intp *shape, int typenum, int64_t bytes)
{
    if (bytes < QR_BUFFER_LARGE)
        return PyArray_EMPTY(ndim, shape, typenum, 0);
    PyObject *before = PyDataMem_SetHandler(state->buffer_handler);
    if (before == NULL)
        return NULL;
    PyObject *array = PyArray_EMPTY(ndim, shape, typenum, 0);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *ours = PyDataMem_SetHandler(before);
    Py_DECREF(before);
    Py_XDECREF(ours);
    if (ours == NULL) { /* another array must not come from the list unasked */
        Py_XDECREF(array);
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return NULL;
    }
    PyErr_Restore(kind, value, trace);
    return array;
}
