/* What the files of a _C.Checkpoint say about themselves: one tensor, and all of them together. */
#include "checkpoint.h"

static PyStructSequence_Field info_fields[] = {
    {"dtype", "name of the element type in the format"}, {"shape", "tuple of sizes"}, {"file", "which file holds it"},
    {"offset", "of its first byte in that file"},        {"nbytes", "its size"},      {NULL, NULL},
};

static PyStructSequence_Desc info_desc = {
    .name = "qwenref._C.TensorInfo",
    .doc = "What a checkpoint file says about one tensor.",
    .fields = info_fields,
    .n_in_sequence = 5,
};

PyObject *
qr_new_tensor_info_type(void)
{
    return (PyObject *)PyStructSequence_NewType(&info_desc);
}

PyObject *
qr_tensor_info(PyObject *self, PyObject *key)
{
    const qr_tensor *t = qr_require_tensor(self, key);
    PyObject *module = PyType_GetModule(Py_TYPE(self)); /* borrowed */
    PyObject *type = NULL, *shape = NULL, *file = NULL, *row = NULL, *info = NULL;

    if (t == NULL || module == NULL)
        return NULL;
    type = PyObject_GetAttrString(module, "TensorInfo");
    shape = PyTuple_New(t->ndim);
    for (int i = 0; shape != NULL && i < t->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(t->shape[i]);
        if (size == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, i, size); /* steals */
    }
    file = PyUnicode_DecodeFSDefault(((Checkpoint *)self)->files->shard[t->shard].label);
    if (type != NULL && shape != NULL && file != NULL)
        row = Py_BuildValue("(sONLL)", qr_file_dtype_name(t->dtype), shape, file, (long long)t->begin,
                            (long long)(t->end - t->begin)); /* N takes the reference to file, even on failure */
    else
        Py_XDECREF(file);
    if (row != NULL)
        info = PyObject_CallFunctionObjArgs(type, row, NULL);
    Py_XDECREF(row);
    Py_XDECREF(shape);
    Py_XDECREF(type);
    return info;
}

static PyObject *
get_files(PyObject *self, void *unused)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    PyObject *list = PyList_New(files->shards);

    (void)unused;
    for (int i = 0; list != NULL && i < files->shards; i++) {
        PyObject *name = PyUnicode_DecodeFSDefault(files->shard[i].label);
        if (name == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, name); /* steals */
    }
    return list;
}

static PyObject *
get_nbytes(PyObject *self, void *unused)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    int64_t total = 0;

    (void)unused;
    for (int64_t i = 0; i < files->tensors; i++)
        total += files->tensor[i]->end - files->tensor[i]->begin;
    return PyLong_FromLongLong(total);
}

static PyObject *
get_metadata(PyObject *self, void *unused)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    PyObject *dict = PyDict_New();

    (void)unused;
    for (int s = 0; dict != NULL && s < files->shards; s++)
        for (int64_t i = 0; dict != NULL && i < files->shard[s].pairs; i++) {
            PyObject *key = PyUnicode_FromString(files->shard[s].metadata[i].key);
            PyObject *value = PyUnicode_FromString(files->shard[s].metadata[i].value);
            if (key == NULL || value == NULL || PyDict_SetDefault(dict, key, value) == NULL)
                Py_CLEAR(dict);
            Py_XDECREF(key);
            Py_XDECREF(value);
        }
    return dict;
}

static PyObject *
get_dtypes(PyObject *self, void *unused)
{
    const qr_checkpoint *files = ((Checkpoint *)self)->files;
    int64_t count[QR_FILE_DTYPES] = {0};
    PyObject *dict = PyDict_New();

    (void)unused;
    for (int64_t i = 0; i < files->tensors; i++)
        count[files->tensor[i]->dtype]++;
    for (int i = 0; dict != NULL && i < QR_FILE_DTYPES; i++) {
        PyObject *number = count[i] > 0 ? PyLong_FromLongLong(count[i]) : NULL;
        if (count[i] > 0 &&
            (number == NULL || PyDict_SetItemString(dict, qr_file_dtype_name((qr_file_dtype)i), number) < 0))
            Py_CLEAR(dict);
        Py_XDECREF(number);
    }
    return dict;
}

PyGetSetDef qr_checkpoint_getset[] = {
    {"files", get_files, NULL, "Names of the files, sorted, relative to the checkpoint's folder.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of all tensors.", NULL},
    {"metadata", get_metadata, NULL, "The text stored with the weights; where files differ, the first one's.", NULL},
    {"dtypes", get_dtypes, NULL, "How many tensors there are of each dtype of the format.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
