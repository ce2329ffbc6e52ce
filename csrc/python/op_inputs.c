/* Arguments of an op: matched with the parameters of its signature, and made arrays a kernel can read. */
#include "op_call.h"

#include "../half.h"

static int
type_error(const qr_op_object *op, const char *format, PyObject *what)
{
    PyObject *first = PyUnicode_FromFormat(format, op->signature.name, what); /* new */
    if (first != NULL)
        PyErr_Format(PyExc_TypeError, "%U\n    expected %s", first, qr_op_text(op));
    Py_XDECREF(first);
    return -1;
}

static int
find_param(const qr_op_object *op, PyObject *name)
{
    for (int i = 0; i < op->signature.params; i++)
        if (op->param_name[i] == name)
            return i;
    for (int i = 0; i < op->signature.params; i++)
        if (PyUnicode_Compare(op->param_name[i], name) == 0)
            return i;
    return -1;
}

int
qr_take_arguments(qr_op_call *c, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const qr_signature *s = &c->op->signature;
    Py_ssize_t used = 0;

    for (int i = 0; i < s->params && used < nargs && !s->param[i].output; i++)
        c->given[i] = args[used++];
    if (used < nargs) {
        PyErr_Format(PyExc_TypeError, "%s: %zd positional arguments\n    expected %s", s->name, nargs,
                     qr_op_text(c->op));
        return -1;
    }
    for (Py_ssize_t k = 0; kwnames != NULL && k < PyTuple_GET_SIZE(kwnames); k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k); /* borrowed */
        const int i = find_param(c->op, name);
        if (i < 0 || s->param[i].scratch)
            return type_error(c->op, "%s: unexpected argument '%U'", name);
        if (c->given[i] != NULL)
            return type_error(c->op, "%s: argument '%U' given twice", name);
        c->given[i] = args[nargs + k];
    }
    for (int i = 0; i < s->params; i++) {
        const qr_param *p = &s->param[i];
        if (c->given[i] == Py_None && (p->optional || p->output))
            c->given[i] = NULL;
        if (c->given[i] == NULL && !p->output && !p->optional && !p->has_default)
            return type_error(c->op, "%s: missing argument '%U'", c->op->param_name[i]);
    }
    return 0;
}

static int
take_scalar(qr_op_call *c, int i)
{
    const qr_param *p = &c->op->signature.param[i];
    double value = p->value;
    if (c->given[i] != NULL) {
        value = PyFloat_AsDouble(c->given[i]);
        if (value == -1.0 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError))
                return -1;
            PyErr_Clear();
            return type_error(c->op, "%s: '%U' is not a number", c->op->param_name[i]);
        }
    }
    c->call.scalar[p->slot] = value;
    return 0;
}

/* A weight of the meta device: shape and dtype over one shared element. Copying it would make gigabytes of zeros. */
static bool
has_no_data(PyArrayObject *a)
{
    bool spread = PyArray_SIZE(a) > 1 && !PyArray_ISWRITEABLE(a);
    for (int d = 0; spread && d < PyArray_NDIM(a); d++)
        spread = PyArray_STRIDE(a, d) == 0;
    return spread;
}

static void
without_data(qr_op_call *c, const qr_param *p)
{
    qr_fail(&c->error, QR_NOT_CAPABLE,
            "%s: %s is a parameter without data (device \"meta\")\n    do       open the checkpoint with "
            "from_pretrained(...), or draw weights with from_config(..., seed=0)",
            c->op->signature.name, p->name);
}

static int
wrong_dtype(qr_op_call *c, int i, PyArrayObject *array, const char *expected)
{
    const qr_param *p = &c->op->signature.param[i];
    PyObject *found = PyObject_Str((PyObject *)PyArray_DESCR(array));  /* new */
    const char *text = found != NULL ? PyUnicode_AsUTF8(found) : NULL; /* borrowed from found */
    if (text != NULL)
        qr_fail(&c->error, QR_BAD_DTYPE, "%s: %s has the wrong dtype\n    found    %.60s\n    expected %s",
                c->op->signature.name, p->name, text, expected);
    Py_XDECREF(found);
    return -1;
}

/* A contiguous, aligned array of the wanted type; casting only where it is exact or the caller gave a plain list. */
static PyObject *
converted(PyObject *array, int typenum)
{
    return PyArray_FROMANY(array, typenum, 0, 0,
                           NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST | NPY_ARRAY_ENSUREARRAY);
}

static PyObject *
widened(PyArrayObject *array, qr_dtype dtype)
{
    PyObject *y = PyArray_EMPTY(PyArray_NDIM(array), PyArray_DIMS(array), NPY_FLOAT32, 0);
    if (y != NULL)
        qr_widen(PyArray_DATA((PyArrayObject *)y), PyArray_DATA(array), dtype, PyArray_SIZE(array));
    return y;
}

static bool
plain(PyArrayObject *a)
{
    return PyArray_ISCARRAY_RO(a) && PyArray_ISNOTSWAPPED(a);
}

/* Strides a kernel of kind `s` can follow: whole elements everywhere, neighbours adjacent in the last dimension. */
static bool
followable(PyArrayObject *a)
{
    const int n = PyArray_NDIM(a);
    const npy_intp size = PyArray_ITEMSIZE(a);
    if (!PyArray_ISALIGNED(a) || !PyArray_ISNOTSWAPPED(a) || n == 0)
        return false;
    for (int d = 0; d < n; d++)
        if (PyArray_STRIDE(a, d) % size != 0 || PyArray_STRIDE(a, d) < 0)
            return false;
    return PyArray_DIM(a, n - 1) <= 1 || PyArray_STRIDE(a, n - 1) == size;
}

/* New reference to an array that satisfies the parameter's kind, or NULL with an exception or c->error set. */
static PyObject *
conform(qr_op_call *c, int i)
{
    const qr_param *p = &c->op->signature.param[i];
    PyObject *given = c->given[i]; /* borrowed */
    const bool listed = !PyArray_Check(given);
    PyArrayObject *array = (PyArrayObject *)(listed ? PyArray_FROM_O(given) : Py_NewRef(given)); /* new */
    PyObject *result = NULL;

    if (array == NULL)
        return NULL;
    const int typenum = PyArray_TYPE(array);
    /* Written-out numbers have no dtype of their own; text and complex numbers in a list are still what they are. */
    const bool loose = (PyList_Check(given) || PyTuple_Check(given) || PyFloat_Check(given)) &&
                       (PyTypeNum_ISINTEGER(typenum) || PyTypeNum_ISFLOAT(typenum));
    const qr_dtype dtype = qr_dtype_of(c->state, typenum);
    const bool half = dtype == QR_BF16 || dtype == QR_F16;

    if ((p->kind == 'w' || p->kind == 'v') && has_no_data(array)) {
        without_data(c, p);
        Py_DECREF(array);
        return NULL;
    }
    switch (p->kind) {
    case 'i':
        if (dtype == QR_I64 && plain(array))
            result = Py_NewRef(array);
        else if ((PyTypeNum_ISINTEGER(typenum) && typenum != NPY_UINT64 && typenum != NPY_ULONGLONG) ||
                 (loose && PyArray_SIZE(array) == 0))
            result = converted((PyObject *)array, NPY_INT64);
        else
            wrong_dtype(c, i, array, "integers (int64)");
        break;
    case 'd':
        if (dtype == QR_F64 && plain(array))
            result = Py_NewRef(array);
        else if (dtype == QR_F64 || dtype == QR_F32 || half || loose)
            result = converted((PyObject *)array, NPY_FLOAT64);
        else
            wrong_dtype(c, i, array, "float64");
        break;
    case 'w':
        if ((dtype == QR_F32 || half) && plain(array))
            result = Py_NewRef(array);
        else if (dtype == QR_F32 || half)
            result = converted((PyObject *)array, typenum);
        else
            wrong_dtype(c, i, array, "float32, bfloat16 or float16");
        break;
    default: /* f s v: float32, the 16-bit types being widened exactly */
        if (dtype == QR_F32 && (plain(array) || (p->kind == 's' && followable(array))))
            result = Py_NewRef(array);
        else if (half && plain(array))
            result = widened(array, dtype);
        else if (dtype == QR_F32 || half || loose)
            result = converted((PyObject *)array, NPY_FLOAT32);
        else
            wrong_dtype(c, i, array, "float32 (or bfloat16, float16: widened exactly)");
        break;
    }
    Py_DECREF(array);
    return result;
}

static int
describe(qr_op_call *c, int i, PyArrayObject *array)
{
    const qr_param *p = &c->op->signature.param[i];
    qr_array *a = &c->call.array[p->slot];
    const int n = PyArray_NDIM(array);

    if (n > QR_MAX_DIMS)
        return qr_fail(&c->error, QR_BAD_SHAPE, "%s: %s has %d dimensions\n    expected at most %d",
                       c->op->signature.name, p->name, n, QR_MAX_DIMS);
    a->data = PyArray_DATA(array);
    a->ndim = n;
    a->dtype = qr_dtype_of(c->state, PyArray_TYPE(array));
    for (int d = 0; d < n; d++) {
        a->shape[d] = PyArray_DIM(array, d);
        a->stride[d] = PyArray_STRIDE(array, d) / PyArray_ITEMSIZE(array);
    }
    return 0;
}

int
qr_take_inputs(qr_op_call *c)
{
    const qr_signature *s = &c->op->signature;
    for (int i = 0; i < s->params && !s->param[i].output; i++) {
        if (s->param[i].kind == 0) {
            if (take_scalar(c, i) < 0)
                return -1;
        } else if (c->given[i] != NULL) {
            c->held[i] = conform(c, i);
            if (c->held[i] == NULL || describe(c, i, (PyArrayObject *)c->held[i]) < 0)
                return -1;
        }
    }
    return qr_bind_inputs(s, &c->call, &c->star, &c->error);
}
