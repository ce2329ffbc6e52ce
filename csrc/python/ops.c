/* The ops as Python callables: one type, one vectorcall, one object per row of the registry.  Knows no op by name. */
#include "op_call.h"

#include "../core/fpenv.h"

#include <structmember.h>

/* Below this many elements touched, giving the GIL away costs more than the work. */
enum { KEEP_GIL_BELOW = 1 << 15 };

static qr_state *
op_state(const qr_op_object *op)
{
    return (qr_state *)PyModule_GetState(op->module);
}

const char *
qr_op_text(const qr_op_object *op)
{
    return qr_ops(QR_SCALAR)[op->index]->signature;
}

/* ---- the call ---------------------------------------------------------------------------------------------------- */

static void
run(qr_op_call *c)
{
    const qr_op *op = qr_ops(qr_level_of(c->state))[c->op->index];
    int64_t touched = 0;

    for (int i = 0; i < c->op->signature.arrays && touched < KEEP_GIL_BELOW; i++)
        if (c->call.array[i].data != NULL)
            touched += qr_elements(&c->call.array[i]);
    PyThreadState *thread = touched < KEEP_GIL_BELOW ? NULL : PyEval_SaveThread();
    const qr_fpenv before = qr_fpenv_enter();
    op->run(&c->call);
    qr_fpenv_leave(before);
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

/* Only what is read before it is written: the whole of it is some kilobytes, and most ops are short. */
static void
begin(qr_op_call *c, qr_state *state, const qr_op_object *op)
{
    const size_t n = (size_t)op->signature.params;

    c->state = state;
    c->op = op;
    c->error.kind = QR_OK;
    memset(c->given, 0, n * sizeof *c->given);
    memset(c->held, 0, n * sizeof *c->held);
    memset(c->scratch, 0, n * sizeof *c->scratch);
    for (int i = 0; i < op->signature.arrays; i++)
        c->call.array[i].data = NULL;
    c->call.name = op->signature.name;
    c->call.error = &c->error;
    c->call.threads = qr_pool_size(state->pool);
    c->call.pool = state->pool;
    c->call.parallel = qr_pool_parallel;
}

/* The call as compiled, whatever profile is in force. */
static PyObject *
call_compiled(const qr_op_object *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    qr_state *state = op_state(op);
    PyObject *result = NULL;
    qr_op_call c;

    begin(&c, state, op);
    if (qr_take_arguments(&c, args, nargs, kwnames) == 0 && qr_take_inputs(&c) == 0 && qr_make_outputs(&c) == 0) {
        run(&c);
        if (c.error.kind == QR_OK)
            result = qr_op_results(&c);
    }
    if (c.error.kind != QR_OK && !PyErr_Occurred())
        qr_raise(state, &c.error);
    for (int i = 0; i < op->signature.params; i++) {
        Py_XDECREF(c.held[i]);
        qr_free_scratch(&c, i);
    }
    return result;
}

static PyObject *
op_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const qr_op_object *op = (const qr_op_object *)self;
    PyObject *profile = NULL, *other = NULL;

    if (PyContextVar_Get(op_state(op)->numerics, NULL, &profile) < 0)
        return NULL;
    const int rc = profile != Py_None /* a dict: numerics.py sets nothing else */
                       ? PyDict_GetItemRef(profile, op->name, &other)
                       : 0;
    Py_DECREF(profile);
    if (other != NULL) {
        PyObject *result = PyObject_Vectorcall(other, args, nargsf, kwnames);
        Py_DECREF(other);
        return result;
    }
    if (rc < 0)
        return NULL;
    return call_compiled(op, args, PyVectorcall_NARGS(nargsf), kwnames);
}

/* What a profile's own version of an op is built on: called through the op, it would find itself. */
static PyObject *
op_compiled(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return call_compiled((const qr_op_object *)self, args, nargs, kwnames);
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *
op_doc(PyObject *self, void *unused)
{
    const qr_op_object *op = (const qr_op_object *)self;
    (void)unused;
    return PyUnicode_FromFormat("%s\n\n%s", qr_op_text(op), qr_ops(QR_SCALAR)[op->index]->doc);
}

static PyObject *
op_signature(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(qr_op_text((const qr_op_object *)self));
}

/* "(x, w, eps=1e-06, *, p=False)": what inspect.signature() and the stubs are made from. */
static PyObject *
op_text_signature(PyObject *self, void *unused)
{
    const qr_signature *s = &((const qr_op_object *)self)->signature;
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
    return PyUnicode_FromFormat("<op %s>", qr_op_text((const qr_op_object *)self));
}

/* Ops are looked up by name again, so that pickled functions and modules that hold one stay small. */
static PyObject *
op_reduce(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(((qr_op_object *)self)->name);
}

static int
op_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((qr_op_object *)self)->module);
    return 0;
}

static int
op_clear(PyObject *self)
{
    Py_CLEAR(((qr_op_object *)self)->module);
    return 0;
}

static void
op_dealloc(PyObject *self)
{
    qr_op_object *op = (qr_op_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)op_clear(self);
    Py_CLEAR(op->name);
    for (int i = 0; i < QR_MAX_PARAMS; i++)
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
    {"__name__", T_OBJECT, offsetof(qr_op_object, name), READONLY, NULL},
    {"__qualname__", T_OBJECT, offsetof(qr_op_object, name), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(qr_op_object, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef op_methods[] = {
    {"__reduce__", op_reduce, METH_NOARGS, NULL},
    {"compiled", (PyCFunction)(void (*)(void))op_compiled, METH_FASTCALL | METH_KEYWORDS,
     "compiled($self, /, *args, **kwargs)\n--\n\nThe op as compiled, whatever numerics are in force."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot op_slots[] = {
    {Py_tp_call, (void *)PyVectorcall_Call},
    {Py_tp_repr, (void *)op_repr},
    {Py_tp_traverse, (void *)op_traverse},
    {Py_tp_clear, (void *)op_clear},
    {Py_tp_dealloc, (void *)op_dealloc},
    {Py_tp_getset, op_getset},
    {Py_tp_members, op_members},
    {Py_tp_methods, op_methods},
    {0, NULL},
};

static PyType_Spec op_spec = {
    .name = "qwenref.ops.Op",
    .basicsize = sizeof(qr_op_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = op_slots,
};

/* New reference. */
static PyObject *
op_new(PyObject *module, qr_state *state, int index)
{
    qr_error error = {0};
    const qr_op *row = qr_ops(QR_SCALAR)[index];
    qr_op_object *op = PyObject_GC_New(qr_op_object, (PyTypeObject *)state->op_type);

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
        if (op == NULL || PyDict_SetItem(ops, ((qr_op_object *)op)->name, op) < 0)
            goto fail;
        Py_CLEAR(op);
    }
    rc = PyModule_AddObjectRef(module, "ops", ops);
fail:
    Py_XDECREF(op);
    Py_XDECREF(ops);
    return rc;
}
