/* _C.Checkpoint, a mapping of tensor names to arrays over mapped files. */
#include "checkpoint.h"

#include "../core/json_text.h"
#include "../core/near.h"

static PyObject *
checkpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", NULL};
    PyObject *path = NULL; /* new, bytes */
    Checkpoint *self = NULL;
    qr_state *state = qr_state_of(type);
    qr_error error = {0};

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O&:Checkpoint", keywords, PyUnicode_FSConverter, &path))
        return NULL;
    self = (Checkpoint *)type->tp_alloc(type, 0);
    if (self != NULL) {
        PyThreadState *thread = PyEval_SaveThread();
        const int rc = qr_checkpoint_open(PyBytes_AS_STRING(path), &self->files, &error);
        PyEval_RestoreThread(thread);
        if (rc < 0) {
            qr_raise(state, &error);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static void
checkpoint_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    qr_checkpoint_close(((Checkpoint *)self)->files);
    type->tp_free(self);
    Py_DECREF(type);
}

/* The tensor called `key`. Without one, NULL; an exception is set only if `key` could not be examined. */
static const qr_tensor *
look_up(PyObject *self, PyObject *key)
{
    Py_ssize_t length = 0;
    const char *name = NULL; /* borrowed from key */

    if (!PyUnicode_Check(key))
        return NULL;
    name = PyUnicode_AsUTF8AndSize(key, &length);
    if (name == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) /* a lone surrogate, which no file can hold */
            PyErr_Clear();
        return NULL;
    }
    if ((size_t)length != strlen(name))
        return NULL;
    return qr_checkpoint_find(((Checkpoint *)self)->files, name);
}

static PyObject *
raise_missing(PyObject *self, PyObject *key)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    const char *asked = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL; /* borrowed */
    qr_near near = {0};
    PyObject *text = NULL, *longer = NULL;

    if (asked == NULL) {
        PyErr_Clear();
        return qr_raise_key(key);
    }
    for (int64_t i = 0; i < files->tensors; i++)
        qr_near_consider(&near, asked, files->tensor[i]->name);
    text = PyUnicode_FromFormat("%R is not one of the %lld tensors%s", key, (long long)files->tensors,
                                near.found > 0 ? ". Near:" : "");
    for (int i = 0; text != NULL && i < near.found; i++) {
        longer = PyUnicode_FromFormat("%U%s %s", text, i > 0 ? "," : "", near.name[i]);
        Py_SETREF(text, longer);
    }
    if (text != NULL)
        PyErr_SetObject(PyExc_KeyError, text);
    Py_XDECREF(text);
    return NULL;
}

const qr_tensor *
qr_require_tensor(PyObject *self, PyObject *key)
{
    const qr_tensor *tensor = look_up(self, key);
    if (tensor == NULL && !PyErr_Occurred())
        raise_missing(self, key);
    return tensor;
}

/* A writable array over the map. Where the file is not aligned for its element type the array says so (flags.aligned)
 * rather than being a copy: two accesses must give the same memory, or an edit through one would miss the other. */
static PyObject *
checkpoint_getitem(PyObject *self, PyObject *key)
{
    const qr_tensor *t = qr_require_tensor(self, key);
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    qr_state *state = qr_state_of(Py_TYPE(self));
    npy_intp shape[QR_MAX_DIMS];
    PyArray_Descr *descr = NULL;
    PyObject *array = NULL;
    char shown[QR_SHOWN_SIZE];
    qr_error error = {0};

    if (t == NULL || state == NULL)
        return NULL;
    const int typenum = qr_file_typenum(state, t->dtype);
    if (typenum < 0) {
        qr_fail(
            &error, QR_BAD_DTYPE,
            "%s: %s: %s has no array type\n    expected one of BOOL, U8 to U64, I8 to I64, F16, BF16, F32, F64, C64",
            files->shard[t->shard].label, qr_shown(t->name, shown, sizeof shown), qr_file_dtype_name(t->dtype));
        return qr_raise(state, &error);
    }
    for (int i = 0; i < t->ndim; i++)
        shape[i] = (npy_intp)t->shape[i];
    descr = PyArray_DescrFromType(typenum);
    if (descr == NULL)
        return NULL;
    array =
        PyArray_NewFromDescr(&PyArray_Type, descr, t->ndim, shape, NULL, qr_tensor_data(files, t), /* steals descr */
                             NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE, NULL);
    if (array == NULL)
        return NULL;
    PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_ALIGNED | NPY_ARRAY_F_CONTIGUOUS);
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) { /* steals, even on failure */
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

static Py_ssize_t
checkpoint_length(PyObject *self)
{
    return (Py_ssize_t)((Checkpoint *)self)->files->tensors;
}

static int
checkpoint_contains(PyObject *self, PyObject *key)
{
    const qr_tensor *tensor = look_up(self, key);
    return tensor != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
}

static PyObject *
name_list(const qr_checkpoint *files)
{
    PyObject *list = PyList_New((Py_ssize_t)files->tensors);
    for (int64_t i = 0; list != NULL && i < files->tensors; i++) {
        PyObject *name = PyUnicode_FromString(files->tensor[i]->name);
        if (name == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, name); /* steals */
    }
    return list;
}

static PyObject *
checkpoint_iter(PyObject *self)
{
    PyObject *list = name_list(((Checkpoint *)self)->files);
    PyObject *iterator = list != NULL ? PyObject_GetIter(list) : NULL;
    Py_XDECREF(list);
    return iterator;
}

static PyObject *
checkpoint_repr(PyObject *self)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    return PyUnicode_FromFormat("<Checkpoint: %lld tensors in %d file%s>", (long long)files->tensors, files->shards,
                                files->shards == 1 ? "" : "s");
}

/* keys, items and values as every mapping has them: views that make their arrays one by one. */
static PyObject *
mapping_view(PyObject *self, const char *name)
{
    PyObject *module = PyImport_ImportModule("collections.abc");
    PyObject *view = module != NULL ? PyObject_CallMethod(module, name, "O", self) : NULL;
    Py_XDECREF(module);
    return view;
}

PyDoc_STRVAR(keys_doc, "keys($self, /)\n--\n\nNames of all tensors, sorted.");

static PyObject *
checkpoint_keys(PyObject *self, PyObject *unused)
{
    (void)unused;
    return mapping_view(self, "KeysView");
}

PyDoc_STRVAR(items_doc, "items($self, /)\n--\n\nPairs of name and array, by name; arrays are made one at a time.");

static PyObject *
checkpoint_items(PyObject *self, PyObject *unused)
{
    (void)unused;
    return mapping_view(self, "ItemsView");
}

PyDoc_STRVAR(values_doc, "values($self, /)\n--\n\nArrays by name of their tensor, made one at a time.");

static PyObject *
checkpoint_values(PyObject *self, PyObject *unused)
{
    (void)unused;
    return mapping_view(self, "ValuesView");
}

PyDoc_STRVAR(get_doc, "get($self, name, default=None, /)\n--\n\nself[name], or default if there is no such tensor.");

static PyObject *
checkpoint_get(PyObject *self, PyObject *args)
{
    PyObject *key = NULL, *fallback = Py_None; /* both borrowed */

    if (!PyArg_ParseTuple(args, "O|O:get", &key, &fallback))
        return NULL;
    if (look_up(self, key) != NULL)
        return checkpoint_getitem(self, key);
    return PyErr_Occurred() ? NULL : Py_NewRef(fallback);
}

PyDoc_STRVAR(info_doc, "info($self, name, /)\n--\n\n"
                       "What the file says about a tensor: TensorInfo(dtype, shape, file, offset, nbytes).\n"
                       "dtype is the format's name (BF16); offset counts bytes from the start of the file.\n"
                       "Works for every dtype of the format, also those that have no array type.");

PyDoc_STRVAR(resident_doc, "resident($self, /)\n--\n\n"
                           "Bytes of the mapped files that are in memory, edited pages included. It is the system's\n"
                           "file cache that is counted, so pages another process read count too; of a file this user\n"
                           "may not write, Linux reports every page as present.");

static PyObject *
checkpoint_resident(PyObject *self, PyObject *unused)
{
    qr_error error = {0};

    (void)unused;
    PyThreadState *thread = PyEval_SaveThread();
    const int64_t bytes = qr_checkpoint_resident(((Checkpoint *)self)->files, &error);
    PyEval_RestoreThread(thread);
    if (bytes >= 0)
        return PyLong_FromLongLong(bytes);
    qr_state *state = qr_state_of(Py_TYPE(self));
    return state != NULL ? qr_raise(state, &error) : NULL;
}

PyDoc_STRVAR(advise_doc, "advise($self, name, advice, /)\n--\n\n"
                         "Tell the system about a tensor: 'willneed' reads it ahead, 'dontneed' gives its pages up.\n"
                         "It never changes what an array holds: edits survive 'dontneed'.");

static PyObject *
checkpoint_advise(PyObject *self, PyObject *args)
{
    PyObject *key = NULL;      /* borrowed */
    const char *advice = NULL; /* borrowed */
    const qr_tensor *t = NULL;
    qr_state *state = qr_state_of(Py_TYPE(self));
    qr_error error = {0};

    if (state == NULL || !PyArg_ParseTuple(args, "Us:advise", &key, &advice) ||
        (t = qr_require_tensor(self, key)) == NULL)
        return NULL;
    const bool need = strcmp(advice, "willneed") == 0;
    if (!need && strcmp(advice, "dontneed") != 0) {
        qr_fail(&error, QR_BAD_INPUT, "advise: '%.40s' is no advice\n    expected 'willneed' or 'dontneed'", advice);
        return qr_raise(state, &error);
    }
    PyThreadState *thread = PyEval_SaveThread();
    const int rc = qr_tensor_advise(((Checkpoint *)self)->files, t, need ? QR_WILL_NEED : QR_DONT_NEED, &error);
    PyEval_RestoreThread(thread);
    if (rc < 0)
        return qr_raise(state, &error);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(touched_doc,
             "touched($self, name, /)\n--\n\n"
             "Where this process may have changed a tensor: [(begin, end), ...] in bytes of the tensor, or\n"
             "None if the system does not say. Everything outside is as in the file; inside, whole pages\n"
             "are given, so bytes beside a changed one are listed with it.");

static PyObject *
checkpoint_touched(PyObject *self, PyObject *key)
{
    const qr_tensor *t = qr_require_tensor(self, key);
    qr_span *ranges = NULL; /* owned */
    PyObject *list = NULL;

    if (t == NULL)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const int64_t count = qr_tensor_touched(((Checkpoint *)self)->files, t, &ranges);
    PyEval_RestoreThread(thread);
    if (count < 0)
        Py_RETURN_NONE;
    list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(LL)", (long long)ranges[i].begin, (long long)ranges[i].end);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair); /* steals */
    }
    free(ranges);
    return list;
}

PyDoc_STRVAR(revert_doc, "revert($self, name, /)\n--\n\n"
                         "Throw away what was written to the pages that hold nothing but this tensor, and return\n"
                         "how many bytes these are. Bytes at its edges, on pages it shares, stay as they are.");

static PyObject *
checkpoint_revert(PyObject *self, PyObject *key)
{
    const qr_tensor *t = qr_require_tensor(self, key);

    if (t == NULL)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const int64_t bytes = qr_tensor_revert(((Checkpoint *)self)->files, t);
    PyEval_RestoreThread(thread);
    return PyLong_FromLongLong(bytes);
}

static PyMethodDef checkpoint_methods[] = {
    {"keys", checkpoint_keys, METH_NOARGS, keys_doc},
    {"items", checkpoint_items, METH_NOARGS, items_doc},
    {"values", checkpoint_values, METH_NOARGS, values_doc},
    {"get", checkpoint_get, METH_VARARGS, get_doc},
    {"info", qr_tensor_info, METH_O, info_doc},
    {"resident", checkpoint_resident, METH_NOARGS, resident_doc},
    {"advise", checkpoint_advise, METH_VARARGS, advise_doc},
    {"touched", checkpoint_touched, METH_O, touched_doc},
    {"revert", checkpoint_revert, METH_O, revert_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(checkpoint_doc,
             "Checkpoint(path)\n--\n\n"
             "A safetensors checkpoint as a mapping from tensor names, sorted, to arrays.\n\n"
             "path is a folder with model.safetensors or model.safetensors.index.json, such an index, or one file.\n"
             "Opening reads headers only. An array is a view of the mapped file in its stored dtype: writing to it\n"
             "changes this process's copy, never the file, and every later access sees the change. Arrays keep the\n"
             "map alive. Where a file is badly aligned, array.flags.aligned is False and its values are right;\n"
             "np.require(array, requirements='A') makes a copy that compiled loops can use.\n"
             "Do not shorten a file while it is open: reading what is gone kills the process, as with any map.");

static PyType_Slot checkpoint_slots[] = {
    {Py_tp_doc, (void *)checkpoint_doc},
    {Py_tp_new, (void *)checkpoint_new},
    {Py_tp_dealloc, (void *)checkpoint_dealloc},
    {Py_tp_repr, (void *)checkpoint_repr},
    {Py_tp_iter, (void *)checkpoint_iter},
    {Py_tp_methods, checkpoint_methods},
    {Py_tp_getset, qr_checkpoint_getset},
    {Py_mp_length, (void *)checkpoint_length},
    {Py_mp_subscript, (void *)checkpoint_getitem},
    {Py_sq_contains, (void *)checkpoint_contains},
    {0, NULL},
};

static PyType_Spec checkpoint_spec = {
    .name = "qwenref._C.Checkpoint",
    .basicsize = sizeof(Checkpoint),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_MAPPING,
    .slots = checkpoint_slots,
};

/* isinstance(checkpoint, Mapping) looks for registration rather than methods. */
static int
register_mapping(PyObject *type)
{
    PyObject *module = PyImport_ImportModule("collections.abc");
    PyObject *abc = module != NULL ? PyObject_GetAttrString(module, "Mapping") : NULL;
    PyObject *done = abc != NULL ? PyObject_CallMethod(abc, "register", "O", type) : NULL;
    const int rc = done != NULL ? 0 : -1;

    Py_XDECREF(done);
    Py_XDECREF(abc);
    Py_XDECREF(module);
    return rc;
}

int
qr_add_checkpoint_types(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &checkpoint_spec, NULL);
    PyObject *info = qr_new_tensor_info_type();
    int rc = -1;

    if (type != NULL && info != NULL && register_mapping(type) == 0 &&
        PyModule_AddObjectRef(module, "Checkpoint", type) == 0 &&
        PyModule_AddObjectRef(module, "TensorInfo", info) == 0)
        rc = qr_add_save_safetensors(module);
    Py_XDECREF(type);
    Py_XDECREF(info);
    return rc;
}
