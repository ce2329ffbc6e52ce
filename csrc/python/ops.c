/* The one binder: a Python call of any op becomes a qr_call by the op's signature.  Knows no op by name. */
#include "py.h"

#include <structmember.h>

enum { MAX_PARAMS = QR_MAX_ARRAYS + QR_MAX_SCALARS };

/* Below this many elements touched, giving the GIL away costs more than the work. */
enum { KEEP_GIL_BELOW = 1 << 15 };

typedef struct Op {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *module; /* owned: keeps the state alive */
    PyObject *name;
    PyObject *param_name[MAX_PARAMS]; /* owned, interned */
    int index;                        /* row of the table of every level */
    qr_signature signature;
} Op;

/* One call in the making: what Python handed over, what has to be released. */
typedef struct Call {
    qr_state *state;
    const Op *op;
    PyObject *given[MAX_PARAMS]; /* borrowed from the caller */
    PyObject *held[MAX_PARAMS];  /* owned arrays behind qr_call.array, by parameter */
    void *scratch[MAX_PARAMS];   /* owned blocks */
    qr_call call;
    qr_star star;
    qr_error error;
} Call;

static qr_state *
op_state(const Op *op)
{
    return (qr_state *)PyModule_GetState(op->module);
}

static const char *
op_signature_text(const Op *op)
{
    return qr_ops(QR_SCALAR)[op->index]->signature;
}

/* ---- arguments ----------------------------------------------------------------------------------------------- */

static int
type_error(const Op *op, const char *format, PyObject *what)
{
    PyObject *first = PyUnicode_FromFormat(format, op->signature.name, what); /* new */
    if (first != NULL)
        PyErr_Format(PyExc_TypeError, "%U\n    expected %s", first, op_signature_text(op));
    Py_XDECREF(first);
    return -1;
}

static int
find_param(const Op *op, PyObject *name)
{
    for (int i = 0; i < op->signature.params; i++)
        if (op->param_name[i] == name)
            return i;
    for (int i = 0; i < op->signature.params; i++)
        if (PyUnicode_Compare(op->param_name[i], name) == 0)
            return i;
    return -1;
}

static int
take_arguments(Call *c, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const qr_signature *s = &c->op->signature;
    Py_ssize_t used = 0;

    for (int i = 0; i < s->params && used < nargs && !s->param[i].output; i++)
        c->given[i] = args[used++];
    if (used < nargs) {
        PyErr_Format(PyExc_TypeError, "%s: %zd positional arguments\n    expected %s", s->name, nargs,
                     op_signature_text(c->op));
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
take_scalar(Call *c, int i)
{
    const qr_param *p = &c->op->signature.param[i];
    double value = p->value;
    if (c->given[i] != NULL) {
        value = PyFloat_AsDouble(c->given[i]);
        if (value == -1.0 && PyErr_Occurred())
            return -1;
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

static int
wrong_dtype(Call *c, int i, PyArrayObject *array, const char *expected)
{
    const qr_param *p = &c->op->signature.param[i];
    PyObject *found = PyObject_Str((PyObject *)PyArray_DESCR(array)); /* new */
    if (found == NULL)
        return -1;
    qr_fail(&c->error, QR_BAD_DTYPE, "%s: %s has the wrong dtype\n    found    %.60s\n    expected %s",
            c->op->signature.name, p->name, PyUnicode_AsUTF8(found), expected);
    Py_DECREF(found);
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
conform(Call *c, int i)
{
    const qr_param *p = &c->op->signature.param[i];
    PyObject *given = c->given[i]; /* borrowed */
    const bool listed = !PyArray_Check(given);
    PyArrayObject *array = (PyArrayObject *)(listed ? PyArray_FROM_O(given) : Py_NewRef(given)); /* new */
    PyObject *result = NULL;

    if (array == NULL)
        return NULL;
    const bool loose = listed && (PyList_Check(given) || PyTuple_Check(given) || PyFloat_Check(given));
    const int typenum = PyArray_TYPE(array);
    const qr_dtype dtype = qr_dtype_of(c->state, typenum);
    const bool half = dtype == QR_BF16 || dtype == QR_F16;

    if ((p->kind == 'w' || p->kind == 'v') && has_no_data(array)) {
        qr_fail(&c->error, QR_NOT_CAPABLE,
                "%s: %s is a parameter without data (device \"meta\")\n    do       open the checkpoint with "
                "from_pretrained(...), or draw weights with from_config(..., seed=0)",
                c->op->signature.name, p->name);
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
describe(Call *c, int i, PyArrayObject *array)
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

static int
take_inputs(Call *c)
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

/* ---- outputs --------------------------------------------------------------------------------------------------- */

static int64_t
elements(const qr_array *a)
{
    int64_t n = 1;
    for (int d = 0; d < a->ndim; d++)
        n *= a->shape[d];
    return n;
}

/* Scratch starts on a cache line; the block's own address is kept for freeing. */
static int
make_scratch(Call *c, int i, qr_array *a)
{
    const size_t bytes = (size_t)elements(a) * qr_dtype_size(a->dtype);
    c->scratch[i] = PyMem_RawMalloc(bytes + 64);
    if (c->scratch[i] == NULL)
        return qr_fail(&c->error, QR_NO_MEMORY, "%s: no memory for %zu bytes of scratch", c->op->signature.name, bytes);
    a->data = (void *)(((uintptr_t)c->scratch[i] + 63) & ~(uintptr_t)63);
    return 0;
}

static bool
overlaps_an_input(const Call *c, PyArrayObject *array)
{
    const char *begin = PyArray_BYTES(array), *end = begin + PyArray_NBYTES(array);
    for (int i = 0; i < c->op->signature.params; i++) {
        PyArrayObject *other = (PyArrayObject *)c->held[i];
        if (other == NULL || c->op->signature.param[i].output || !PyArray_ISCARRAY_RO(other))
            continue;
        const char *from = PyArray_BYTES(other), *to = from + PyArray_NBYTES(other);
        if (from < end && begin < to)
            return true;
    }
    return false;
}

/* An array the caller wants the result in: it must be exactly what would have been allocated. */
static int
take_buffer(Call *c, int i, const qr_array *want)
{
    const qr_param *p = &c->op->signature.param[i];
    const char *name = c->op->signature.name;
    PyArrayObject *array = (PyArrayObject *)c->given[i]; /* borrowed */
    bool same = PyArray_NDIM(array) == want->ndim;

    for (int d = 0; same && d < want->ndim; d++)
        same = PyArray_DIM(array, d) == want->shape[d];
    if (!same || qr_dtype_of(c->state, PyArray_TYPE(array)) != want->dtype) {
        char text[96];
        return qr_fail(&c->error, QR_BAD_SHAPE, "%s: the array given for %s does not fit\n    expected %s %s, %lld elements",
                       name, p->name, qr_dtype_name(want->dtype), qr_param_text(p, text, sizeof text),
                       (long long)elements(want));
    }
    if (!PyArray_ISCARRAY(array) || !PyArray_ISNOTSWAPPED(array))
        return qr_fail(&c->error, QR_BAD_INPUT,
                       "%s: the array given for %s cannot be written in place\n    expected writeable, aligned, contiguous",
                       name, p->name);
    if (overlaps_an_input(c, array))
        return qr_fail(&c->error, QR_BAD_INPUT, "%s: the array given for %s overlaps an input", name, p->name);
    c->held[i] = Py_NewRef(array);
    return 0;
}

static int
make_outputs(Call *c)
{
    const qr_signature *s = &c->op->signature;
    for (int i = 0; i < s->params; i++) {
        const qr_param *p = &s->param[i];
        if (!p->output)
            continue;
        qr_array *a = &c->call.array[p->slot];
        const bool buffer = c->given[i] != NULL && PyArray_Check(c->given[i]);
        int wanted = !p->optional;
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
            c->held[i] = PyArray_EMPTY(a->ndim, shape, qr_typenum(c->state, a->dtype), 0);
            if (c->held[i] == NULL)
                return -1;
        }
        a->data = PyArray_DATA((PyArrayObject *)c->held[i]);
    }
    return 0;
}

/* New reference: the one array asked for, or a tuple of them in the order of the signature. */
static PyObject *
results(Call *c)
{
    const qr_signature *s = &c->op->signature;
    PyObject *found[MAX_PARAMS]; /* borrowed from held */
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

/* ---- the call ---------------------------------------------------------------------------------------------------- */

static void
run(Call *c)
{
    const qr_op *op = qr_ops(c->state->level)[c->op->index];
    int64_t touched = 0;

    for (int i = 0; i < c->op->signature.arrays; i++)
        if (c->call.array[i].data != NULL)
            touched += elements(&c->call.array[i]);
    if (touched < KEEP_GIL_BELOW) {
        op->run(&c->call);
    } else {
        PyThreadState *thread = PyEval_SaveThread();
        op->run(&c->call);
        PyEval_RestoreThread(thread);
    }
}

static PyObject *
op_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const Op *op = (const Op *)self;
    qr_state *state = op_state(op);
    PyObject *profile = NULL, *result = NULL;

    if (PyContextVar_Get(state->numerics, NULL, &profile) < 0)
        return NULL;
    if (profile != Py_None) { /* a dict: numerics.py sets nothing else */
        PyObject *other = Py_XNewRef(PyDict_GetItemWithError(profile, op->name));
        Py_DECREF(profile);
        if (other != NULL) {
            result = PyObject_Vectorcall(other, args, nargsf, kwnames);
            Py_DECREF(other);
            return result;
        }
        if (PyErr_Occurred())
            return NULL;
    } else {
        Py_DECREF(profile);
    }

    Call c = {.state = state, .op = op};
    c.call.name = op->signature.name;
    c.call.error = &c.error;
    c.call.threads = qr_pool_size(state->pool);
    c.call.pool = state->pool;
    c.call.parallel = qr_pool_parallel;
    if (take_arguments(&c, args, PyVectorcall_NARGS(nargsf), kwnames) == 0 && take_inputs(&c) == 0 &&
        make_outputs(&c) == 0) {
        run(&c);
        if (c.error.kind == QR_OK)
            result = results(&c);
    }
    if (c.error.kind != QR_OK && !PyErr_Occurred())
        qr_raise(state, &c.error);
    for (int i = 0; i < op->signature.params; i++) {
        Py_XDECREF(c.held[i]);
        PyMem_RawFree(c.scratch[i]); /* accepts NULL */
    }
    return result;
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *
op_doc(PyObject *self, void *unused)
{
    const Op *op = (const Op *)self;
    (void)unused;
    return PyUnicode_FromFormat("%s\n\n%s", op_signature_text(op), qr_ops(QR_SCALAR)[op->index]->doc);
}

static PyObject *
op_signature(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(op_signature_text((const Op *)self));
}

/* "(x, w, eps=1e-06, *, p=False)": what inspect.signature() and the stubs are made from. */
static PyObject *
op_text_signature(PyObject *self, void *unused)
{
    const qr_signature *s = &((const Op *)self)->signature;
    char text[512];
    size_t n = 0;
    bool starred = false;
    (void)unused;

    for (int i = 0; i < s->params && n < sizeof text; i++) {
        const qr_param *p = &s->param[i];
        const char *comma = i > 0 ? ", " : "";
        if (p->scratch)
            continue;
        if (p->output && !starred) {
            n += (size_t)snprintf(text + n, sizeof text - n, "%s*", comma);
            starred = true;
        }
        if (n >= sizeof text)
            break;
        if (p->output)
            n += (size_t)snprintf(text + n, sizeof text - n, ", %s=%s", p->name, p->optional ? "False" : "None");
        else if (p->kind == 0 && p->has_default)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s=%g", comma, p->name, p->value);
        else
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s%s", comma, p->name, p->optional ? "=None" : "");
    }
    return PyUnicode_FromFormat("(%s)", text);
}

static PyObject *
op_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<op %s>", op_signature_text((const Op *)self));
}

/* Ops are looked up by name again, so that pickled functions and modules that hold one stay small. */
static PyObject *
op_reduce(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(((Op *)self)->name);
}

static int
op_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Op *)self)->module);
    return 0;
}

static int
op_clear(PyObject *self)
{
    Py_CLEAR(((Op *)self)->module);
    return 0;
}

static void
op_dealloc(PyObject *self)
{
    Op *op = (Op *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)op_clear(self);
    Py_CLEAR(op->name);
    for (int i = 0; i < MAX_PARAMS; i++)
        Py_CLEAR(op->param_name[i]);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyGetSetDef op_getset[] = {
    {"__doc__", op_doc, NULL, NULL, NULL},
    {"__text_signature__", op_text_signature, NULL, NULL, NULL},
    {"signature", op_signature, NULL, "The signature: parameters with symbolic shapes and kinds.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef op_members[] = {
    {"__name__", T_OBJECT, offsetof(Op, name), READONLY, NULL},
    {"__qualname__", T_OBJECT, offsetof(Op, name), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Op, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef op_methods[] = {
    {"__reduce__", op_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot op_slots[] = {
    {Py_tp_call, (void *)PyVectorcall_Call}, {Py_tp_repr, (void *)op_repr},     {Py_tp_traverse, (void *)op_traverse},
    {Py_tp_clear, (void *)op_clear},         {Py_tp_dealloc, (void *)op_dealloc}, {Py_tp_getset, op_getset},
    {Py_tp_members, op_members},             {Py_tp_methods, op_methods},       {0, NULL},
};

static PyType_Spec op_spec = {
    .name = "qwenref.ops.Op",
    .basicsize = sizeof(Op),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = op_slots,
};

/* New reference. */
static PyObject *
op_new(PyObject *module, qr_state *state, int index)
{
    qr_error error = {0};
    const qr_op *row = qr_ops(QR_SCALAR)[index];
    Op *op = PyObject_GC_New(Op, (PyTypeObject *)state->op_type);

    if (op == NULL)
        return NULL;
    op->vectorcall = op_vectorcall;
    op->module = Py_NewRef(module);
    op->index = index;
    op->name = PyUnicode_InternFromString(row->name);
    memset(op->param_name, 0, sizeof op->param_name);
    PyObject_GC_Track(op);
    if (op->name == NULL)
        goto fail;
    if (qr_signature_parse(row->signature, &op->signature, &error) < 0) {
        qr_raise(state, &error);
        goto fail;
    }
    for (int i = 0; i < op->signature.params; i++) {
        op->param_name[i] = PyUnicode_InternFromString(op->signature.param[i].name);
        if (op->param_name[i] == NULL)
            goto fail;
    }
    return (PyObject *)op;
fail:
    Py_DECREF(op);
    return NULL;
}

int
qr_add_ops(PyObject *module)
{
    qr_state *state = (qr_state *)PyModule_GetState(module);
    PyObject *ops = NULL, *op = NULL;
    int rc = -1;

    state->op_type = PyType_FromModuleAndSpec(module, &op_spec, NULL);
    ops = PyDict_New();
    if (state->op_type == NULL || ops == NULL)
        goto fail;
    for (int i = 0; i < qr_op_count(); i++) {
        op = op_new(module, state, i);
        if (op == NULL || PyDict_SetItem(ops, ((Op *)op)->name, op) < 0)
            goto fail;
        Py_CLEAR(op);
    }
    rc = PyModule_AddObjectRef(module, "ops", ops);
fail:
    Py_XDECREF(op);
    Py_XDECREF(ops);
    return rc;
}
