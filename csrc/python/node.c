/* The heap type _C.Module: its call, the note it leaves on an exception, site(), and its life.
 * Attributes are in node_attributes.c; the hook algorithm and the walks over the tree are Python (qwenref/module.py). */
#include "node.h"

#include <structmember.h>

enum { ARGS_ON_STACK = 8 };

static bool
filled(Node *self, int index)
{
    PyObject *table = qr_hold((PyObject *)self, &self->table[index]);
    const bool result = table != NULL && PyDict_GET_SIZE(table) > 0;
    Py_XDECREF(table);
    return result;
}

/* ---- the call ------------------------------------------------------------------------------------------------ */

/* self.name(*args), with the function found on the class called directly: no bound method, no tuple, no dict. */
static PyObject *
call_method(Node *self, PyObject *name, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    const Py_ssize_t total = nargs + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *on_stack[ARGS_ON_STACK + 1], **stack = on_stack;
    PyObject *own = NULL, *method = NULL, *result = NULL;

    if (qr_node_find(self, &self->dict, name, &own) < 0) /* someone set m.forward = f */
        return NULL;
    method = _PyType_LookupRef(Py_TYPE(self), name); /* held: a forward may replace itself */
    if (own != NULL || method == NULL || !PyType_HasFeature(Py_TYPE(method), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
        Py_XDECREF(own);
        Py_XSETREF(method, PyObject_GetAttr((PyObject *)self, name));
        if (method != NULL)
            result = PyObject_Vectorcall(method, args, nargsf, kwnames);
        Py_XDECREF(method);
        return result;
    }

    if (nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET) {
        PyObject **shifted = (PyObject **)args - 1; /* the flag lends us this place during the call */
        PyObject *kept = shifted[0];
        shifted[0] = (PyObject *)self;
        result = PyObject_Vectorcall(method, shifted, (size_t)nargs + 1, kwnames);
        shifted[0] = kept;
    } else {
        if (total > ARGS_ON_STACK)
            stack = PyMem_New(PyObject *, (size_t)total + 1);
        if (stack != NULL) {
            stack[0] = (PyObject *)self;
            for (Py_ssize_t i = 0; i < total; i++)
                stack[i + 1] = args[i];
            result = PyObject_Vectorcall(method, stack, (size_t)nargs + 1, kwnames);
        } else {
            PyErr_NoMemory();
        }
        if (stack != on_stack)
            PyMem_Free(stack);
    }
    Py_DECREF(method);
    return result;
}

/* True if a module further in has left its note already. */
static bool
noted(PyObject *notes)
{
    bool found = false;
    for (Py_ssize_t i = 0; !found && i < PyList_GET_SIZE(notes); i++) {
        PyObject *note = PyList_GetItemRef(notes, i);
        const char *text = note != NULL && PyUnicode_Check(note) ? PyUnicode_AsUTF8(note) : NULL;
        if (text != NULL)
            found = strncmp(text, "in module ", 10) == 0;
        else
            PyErr_Clear(); /* no text, a lone surrogate, or the list has become shorter */
        Py_XDECREF(note);
    }
    return found;
}

/* The pending exception, no longer pending: a new reference. */
static PyObject *
take_raised(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        (void)PyException_SetTraceback(error, trace);
    Py_XDECREF(trace);
    Py_DECREF(type);
    return error;
#endif
}

/* Steals `error`. */
static void
raise_again(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* One note (PEP 678; a plain attribute, so 3.10 has it too) saying in which module the pending exception arose.
 * Whatever goes wrong here is dropped: the exception matters more than the note. */
static void
note_path(Node *self)
{
    PyObject *error = take_raised(), *notes = NULL, *note = NULL;
    PyObject *path = qr_hold((PyObject *)self, &self->path);

    notes = PyObject_GetAttrString(error, "__notes__");
    if (notes == NULL) {
        PyErr_Clear();
        notes = PyList_New(0);
        if (notes == NULL || PyObject_SetAttrString(error, "__notes__", notes) < 0)
            goto done;
    }
    if (!PyList_Check(notes) || noted(notes))
        goto done;
    if (path != NULL && PyUnicode_Check(path) && PyUnicode_GET_LENGTH(path) > 0)
        note = PyUnicode_FromFormat("in module %U (%.200s)", path, Py_TYPE(self)->tp_name);
    else
        note = PyUnicode_FromFormat("in module %.200s", Py_TYPE(self)->tp_name);
    if (note != NULL)
        (void)PyList_Append(notes, note);
done:
    Py_XDECREF(note);
    Py_XDECREF(notes);
    Py_XDECREF(path);
    raise_again(error); /* steals; replaces whatever failed above */
}

static PyObject *
node_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Node *self = (Node *)op;
    const qr_state *state = self->state;
    const bool hooked = filled(self, FORWARD_HOOKS) || filled(self, FORWARD_PRE_HOOKS) ||
                        PyDict_GET_SIZE(state->global_forward_hooks) > 0 ||
                        PyDict_GET_SIZE(state->global_forward_pre_hooks) > 0;
    PyObject *result = NULL;

    /* A module that is its own forward would go round in C, where no frame is counted. */
    if (Py_EnterRecursiveCall(" while calling a module") == 0) {
        result = call_method(self, hooked ? state->call_hooked : state->forward, args, nargsf, kwnames);
        Py_LeaveRecursiveCall();
    }
    if (result == NULL)
        note_path(self);
    return result;
}

PyDoc_STRVAR(site_doc, "site(name, x, /)\n--\n\n"
                       "Name an intermediate value. Returns x, or what the active handler makes of it.");

static PyObject *
node_site(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *handler = NULL, *result = NULL;

    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "site() takes a name and a value (%zd given)", nargs);
        return NULL;
    }
    if (PyContextVar_Get(((Node *)op)->state->sites, NULL, &handler) < 0)
        return NULL;
    if (handler == NULL || handler == Py_None) {
        result = Py_NewRef(args[1]);
    } else {
        PyObject *call[] = {NULL, op, args[0], args[1]};
        result = PyObject_Vectorcall(handler, call + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(handler);
    return result;
}

/* ---- life ---------------------------------------------------------------------------------------------------- */

static PyObject *
node_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    qr_state *state = qr_state_of(type);
    Node *self = state != NULL ? (Node *)type->tp_alloc(type, 0) : NULL;

    (void)args;
    (void)kwargs;
    if (self == NULL)
        return NULL;
    self->vectorcall = node_vectorcall;
    self->state = state;
    return (PyObject *)self;
}

static int
node_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    Node *self = (Node *)op;

    if (PyTuple_GET_SIZE(args) > 0 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0)) {
        PyErr_SetString(PyExc_TypeError,
                        "Module.__init__() takes no arguments; those of a layer are for its own class");
        return -1;
    }
    for (int i = 0; i < TABLES; i++) {
        PyObject *table = i < REGISTRIES ? PyDict_New() : NULL;
        if (table == NULL && i < REGISTRIES)
            return -1;
        qr_put(op, &self->table[i], table);
    }
    return 0;
}

static int
node_traverse(PyObject *op, visitproc visit, void *arg)
{
    Node *self = (Node *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dict);
    for (int i = 0; i < TABLES; i++)
        Py_VISIT(self->table[i]);
    Py_VISIT(self->path);
    return 0;
}

static int
node_clear(PyObject *op)
{
    Node *self = (Node *)op;
    Py_CLEAR(self->dict);
    for (int i = 0; i < TABLES; i++)
        Py_CLEAR(self->table[i]);
    Py_CLEAR(self->path);
    return 0;
}

static void
node_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (((Node *)op)->weakrefs != NULL)
        PyObject_ClearWeakRefs(op);
    (void)node_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Node, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Node, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Node, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"site", (PyCFunction)(void (*)(void))node_site, METH_FASTCALL, site_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(node_doc, "Storage, attributes, call and site() of a module; qwenref.Module adds the rest.");

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)node_doc},
    {Py_tp_new, (void *)node_new},
    {Py_tp_init, (void *)node_init},
    {Py_tp_dealloc, (void *)node_dealloc},
    {Py_tp_traverse, (void *)node_traverse},
    {Py_tp_clear, (void *)node_clear},
    {Py_tp_call, (void *)PyVectorcall_Call},
    {Py_tp_getattro, (void *)qr_node_getattro},
    {Py_tp_setattro, (void *)qr_node_setattro},
    {Py_tp_members, members},
    {Py_tp_getset, qr_node_getset},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "qwenref._C.Module",
    .basicsize = sizeof(Node),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
qr_add_module_type(PyObject *module)
{
    qr_state *state = (qr_state *)PyModule_GetState(module);
    PyObject *collections = PyImport_ImportModule("collections");

    if (collections == NULL)
        return -1;
    state->hook_table = PyObject_GetAttrString(collections, "OrderedDict");
    Py_DECREF(collections);
    if (state->hook_table == NULL)
        return -1;
    state->global_forward_hooks = PyObject_CallNoArgs(state->hook_table);
    state->global_forward_pre_hooks = PyObject_CallNoArgs(state->hook_table);
    state->forward = PyUnicode_InternFromString("forward");
    state->node_type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (state->global_forward_hooks == NULL || state->global_forward_pre_hooks == NULL || state->forward == NULL ||
        state->node_type == NULL)
        return -1;
    if (PyModule_AddObjectRef(module, "global_forward_hooks", state->global_forward_hooks) < 0 ||
        PyModule_AddObjectRef(module, "global_forward_pre_hooks", state->global_forward_pre_hooks) < 0)
        return -1;
    return PyModule_AddType(module, (PyTypeObject *)state->node_type);
}
