/* _C.save_safetensors: arrays to one file, complete or not at all. */
#include "checkpoint.h"

int
qr_file_typenum(const qr_state *state, qr_file_dtype dtype)
{
    switch (dtype) {
    case QR_FILE_BOOL:
        return NPY_BOOL;
    case QR_FILE_U8:
        return NPY_UINT8;
    case QR_FILE_I8:
        return NPY_INT8;
    case QR_FILE_I16:
        return NPY_INT16;
    case QR_FILE_U16:
        return NPY_UINT16;
    case QR_FILE_F16:
        return NPY_FLOAT16;
    case QR_FILE_BF16:
        return state->bf16_typenum;
    case QR_FILE_I32:
        return NPY_INT32;
    case QR_FILE_U32:
        return NPY_UINT32;
    case QR_FILE_F32:
        return NPY_FLOAT32;
    case QR_FILE_C64:
        return NPY_COMPLEX64;
    case QR_FILE_F64:
        return NPY_FLOAT64;
    case QR_FILE_I64:
        return NPY_INT64;
    case QR_FILE_U64:
        return NPY_UINT64;
    default:
        return -1;
    }
}

qr_file_dtype
qr_file_dtype_of(const qr_state *state, PyArrayObject *array)
{
    for (int i = 0; i < QR_FILE_DTYPES; i++) {
        const int typenum = qr_file_typenum(state, (qr_file_dtype)i);
        if (typenum >= 0 && PyArray_EquivTypenums(typenum, PyArray_TYPE(array)))
            return (qr_file_dtype)i;
    }
    return QR_FILE_DTYPES;
}

/* One call's working set. Arrays are held (and so cannot be resized) until the file is complete. */
typedef struct job {
    qr_tensor *tensor;
    PyObject **array; /* owned, in the order given; tensor[i].shard holds that position through the sort */
    Py_ssize_t tensors;
    qr_pair *metadata;
    Py_ssize_t pairs;
} job;

/* A name as the format can hold it: UTF-8, no NUL. The text belongs to `object`. */
static const char *
plain_text(qr_state *state, PyObject *object, const char *what)
{
    qr_error error = {0};
    Py_ssize_t length = 0;
    const char *text = NULL;

    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "save_safetensors: %s is %s, expected str", what, Py_TYPE(object)->tp_name);
        return NULL;
    }
    text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text == NULL && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return NULL;
    if (text != NULL && (size_t)length == strlen(text))
        return text;
    PyErr_Clear();
    qr_fail(&error, QR_BAD_INPUT, "save_safetensors: %s holds a NUL or a lone surrogate, which the format cannot",
            what);
    qr_raise(state, &error);
    return NULL;
}

static int
describe(qr_state *state, PyObject *name, PyObject *value, Py_ssize_t at, job *job)
{
    qr_error error = {0};
    qr_tensor *t = &job->tensor[at];
    PyArrayObject *array = NULL;

    t->name = plain_text(state, name, "a tensor name");
    if (t->name == NULL)
        return -1;
    job->array[at] = PyArray_FROM_O(value); /* new; the array itself if it is one */
    if (job->array[at] == NULL)
        return -1;
    array = (PyArrayObject *)job->array[at];
    t->shard = (int)at;
    t->ndim = PyArray_NDIM(array);
    t->dtype = qr_file_dtype_of(state, array);
    if (t->dtype == QR_FILE_DTYPES) {
        PyObject *found = PyObject_Str((PyObject *)PyArray_DESCR(array));  /* new */
        const char *text = found != NULL ? PyUnicode_AsUTF8(found) : NULL; /* borrowed from found */
        if (text != NULL)
            qr_fail(&error, QR_BAD_DTYPE,
                    "save_safetensors: %.100s: %.60s cannot be stored\n    expected bool, int8 to uint64, float16, "
                    "bfloat16, float32, float64 or complex64",
                    t->name, text);
        Py_XDECREF(found);
        if (!PyErr_Occurred())
            qr_raise(state, &error);
        return -1;
    }
    if (t->ndim > QR_MAX_DIMS) {
        qr_fail(&error, QR_BAD_SHAPE, "save_safetensors: %.100s: %d dimensions, expected at most %d", t->name, t->ndim,
                QR_MAX_DIMS);
        qr_raise(state, &error);
        return -1;
    }
    for (int i = 0; i < t->ndim; i++)
        t->shape[i] = PyArray_DIM(array, i);
    return 0;
}

/* Both are borrowed. The items() of a mapping of somebody's own may give anything. */
static bool
take_pair(PyObject *item, PyObject **key, PyObject **value)
{
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
        PyErr_Format(PyExc_TypeError, "save_safetensors: items() of the mapping gave %.100s, expected pairs",
                     Py_TYPE(item)->tp_name);
        return false;
    }
    *key = PyTuple_GET_ITEM(item, 0);
    *value = PyTuple_GET_ITEM(item, 1);
    return true;
}

/* Lists of (key, value) pairs, as PyMapping_Items gives them, into the job. Keys and values are borrowed from them. */
static int
collect(qr_state *state, PyObject *tensors, PyObject *metadata, job *job)
{
    const Py_ssize_t n = PyList_GET_SIZE(tensors), pairs = metadata != NULL ? PyList_GET_SIZE(metadata) : 0;

    job->tensor = PyMem_Calloc((size_t)n + 1, sizeof *job->tensor);
    job->array = PyMem_Calloc((size_t)n + 1, sizeof *job->array);
    job->metadata = PyMem_Calloc((size_t)pairs + 1, sizeof *job->metadata);
    if (job->tensor == NULL || job->array == NULL || job->metadata == NULL || n > INT32_MAX) {
        PyErr_NoMemory();
        return -1;
    }
    for (; job->tensors < n; job->tensors++) {
        PyObject *name = NULL, *value = NULL; /* borrowed */
        if (!take_pair(PyList_GET_ITEM(tensors, job->tensors), &name, &value) ||
            describe(state, name, value, job->tensors, job) < 0)
            return -1;
    }
    for (; job->pairs < pairs; job->pairs++) {
        PyObject *key = NULL, *value = NULL; /* borrowed */
        qr_pair *pair = &job->metadata[job->pairs];
        if (!take_pair(PyList_GET_ITEM(metadata, job->pairs), &key, &value))
            return -1;
        pair->key = plain_text(state, key, "a metadata key");
        pair->value = pair->key != NULL ? plain_text(state, value, "a metadata value") : NULL;
        if (pair->value == NULL)
            return -1;
    }
    return 0;
}

/* The data of one tensor, copied only if it is strided or byte-swapped. */
static int
write_tensor(qr_state *state, qr_writer *writer, const qr_tensor *t, PyObject *array)
{
    qr_error error = {0};
    PyObject *rows = PyArray_FROM_OF(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_NOTSWAPPED); /* new */
    if (rows == NULL)
        return -1;
    const void *data = PyArray_DATA((PyArrayObject *)rows);
    PyThreadState *thread = PyEval_SaveThread();
    const int rc = qr_writer_data(writer, data, t->end - t->begin, &error);
    PyEval_RestoreThread(thread);
    Py_DECREF(rows);
    if (rc < 0)
        qr_raise(state, &error);
    return rc;
}

static int
write_file(qr_state *state, const char *path, job *job)
{
    qr_error error = {0};
    qr_writer *writer = NULL;
    int rc;

    PyThreadState *thread = PyEval_SaveThread();
    rc = qr_writer_open(path, job->tensor, job->tensors, job->metadata, job->pairs, &writer, &error);
    PyEval_RestoreThread(thread);
    if (rc < 0) {
        qr_raise(state, &error);
        return -1;
    }
    for (Py_ssize_t i = 0; i < job->tensors; i++) {
        const qr_tensor *t = &job->tensor[i];
        if (write_tensor(state, writer, t, job->array[t->shard]) < 0 || PyErr_CheckSignals() < 0) {
            qr_writer_abort(writer); /* an error or Ctrl-C between tensors leaves nothing behind */
            return -1;
        }
    }
    thread = PyEval_SaveThread();
    rc = qr_writer_finish(writer, &error);
    PyEval_RestoreThread(thread);
    if (rc < 0)
        qr_raise(state, &error);
    return rc;
}

PyDoc_STRVAR(save_doc,
             "save_safetensors(path, tensors, metadata=None)\n--\n\n"
             "Write a mapping of names to arrays as one safetensors file.\n\n"
             "The file appears under its name complete and on disk, or not at all: an older file of that name stays\n"
             "until then, and arrays mapped from it remain valid. metadata maps str to str.");

static PyObject *
save_safetensors(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", "tensors", "metadata", NULL};
    PyObject *path = NULL, *tensors = NULL, *metadata = Py_None; /* path new; the others borrowed */
    PyObject *items = NULL, *pairs = NULL, *result = NULL;
    qr_state *state = PyModule_GetState(module);
    job job = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O|O:save_safetensors", keywords, PyUnicode_FSConverter, &path,
                                     &tensors, &metadata))
        return NULL;
    items = PyMapping_Items(tensors);
    if (items == NULL)
        goto done;
    if (metadata != Py_None && (pairs = PyMapping_Items(metadata)) == NULL)
        goto done;
    if (collect(state, items, pairs, &job) < 0 || write_file(state, PyBytes_AS_STRING(path), &job) < 0)
        goto done;
    result = Py_NewRef(Py_None);
done:
    for (Py_ssize_t i = 0; job.array != NULL && i < PyList_GET_SIZE(items); i++)
        Py_XDECREF(job.array[i]);
    PyMem_Free(job.tensor);
    PyMem_Free(job.array);
    PyMem_Free(job.metadata);
    Py_XDECREF(pairs);
    Py_XDECREF(items);
    Py_DECREF(path);
    return result;
}

static PyMethodDef functions[] = {
    {"save_safetensors", (PyCFunction)(void (*)(void))save_safetensors, METH_VARARGS | METH_KEYWORDS, save_doc},
    {NULL, NULL, 0, NULL},
};

int
qr_add_save_safetensors(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
