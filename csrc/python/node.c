/* The heap type _C.Module: what a node of the tree stores, how its attributes resolve, the call, and site().
 * The hook algorithm and the walks over the tree are Python (qwenref/module.py). */
#include "py.h"

#include <structmember.h>

/* Hook tables come last and are made when first asked for: most modules never have a hook. */
enum {
    PARAMETERS,
    BUFFERS,
    MODULES,
    NON_PERSISTENT,
    FORWARD_HOOKS,
    FORWARD_HOOKS_WITH_KWARGS,
    FORWARD_HOOKS_ALWAYS_CALLED,
    FORWARD_PRE_HOOKS,
    FORWARD_PRE_HOOKS_WITH_KWARGS,
    TABLES
};
enum { REGISTRIES = MODULES + 1, ARGS_ON_STACK = 8 };

typedef struct Node {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    qr_state *state; /* borrowed: the type keeps the extension module alive */
    PyObject *dict, *weakrefs;
    PyObject *table[TABLES]; /* the registries are NULL until __init__ has run */
    PyObject *path;          /* name in the tree that was named last, or NULL */
} Node;

static const char *const what[REGISTRIES] = {"parameter", "buffer", "module"};

static bool
filled(PyObject *table)
{
    return table != NULL && PyDict_GET_SIZE(table) > 0;
}

/* ---- attributes ---------------------------------------------------------------------------------------------- */

/* `name` and `obj` are what lets the interpreter add "Did you mean" when it prints the traceback, and only then. */
static PyObject *
raise_no_attribute(Node *self, PyObject *name)
{
    PyObject *text = PyUnicode_FromFormat("'%.200s' object has no attribute '%U'", Py_TYPE(self)->tp_name, name);
    PyObject *args = text != NULL ? PyTuple_Pack(1, text) : NULL;
    PyObject *context = Py_BuildValue("{sOsO}", "name", name, "obj", (PyObject *)self);
    PyObject *error = args != NULL && context != NULL ? PyObject_Call(PyExc_AttributeError, args, context) : NULL;

    if (error != NULL)
        PyErr_SetObject(PyExc_AttributeError, error);
    Py_XDECREF(error);
    Py_XDECREF(context);
    Py_XDECREF(args);
    Py_XDECREF(text);
    return NULL;
}

static PyObject *
node_getattro(PyObject *op, PyObject *name)
{
    Node *self = (Node *)op;
    PyObject *found = NULL; /* borrowed throughout */

    /* The class is asked through its method cache before anything can raise, so that reading a child or a weight does
     * not pay for an exception. The order is the ordinary one: class, instance, then what is registered. */
    if (_PyType_Lookup(Py_TYPE(op), name) != NULL)
        return PyObject_GenericGetAttr(op, name);
    if (self->dict != NULL)
        found = PyDict_GetItemWithError(self->dict, name);
    for (int i = 0; i < REGISTRIES && found == NULL && self->table[i] != NULL; i++)
        found = PyDict_GetItemWithError(self->table[i], name);
    if (found != NULL)
        return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : raise_no_attribute(self, name);
}

/* Imported when first needed: this type exists before qwenref.parameter can be imported. Borrowed. */
static PyTypeObject *
parameter_type(qr_state *state)
{
    if (state->parameter == NULL) {
        PyObject *module = PyImport_ImportModule("qwenref.parameter");
        if (module == NULL)
            return NULL;
        state->parameter = PyObject_GetAttrString(module, "Parameter");
        Py_DECREF(module);
    }
    return (PyTypeObject *)state->parameter;
}

/* 1 if `name` is registered there, 0 if not, -1 with an exception set. */
static int
registered(const Node *self, int registry, PyObject *name)
{
    return self->table[registry] != NULL ? PyDict_Contains(self->table[registry], name) : 0;
}

static int
forget(PyObject *dict, PyObject *name)
{
    if (dict == NULL)
        return 0;
    const int found = PyDict_Contains(dict, name);
    return found > 0 ? PyDict_DelItem(dict, name) : found;
}

/* A name means one thing: whatever else it meant goes. */
static int
forget_elsewhere(Node *self, int registry, PyObject *name)
{
    if (forget(self->dict, name) < 0)
        return -1;
    for (int i = 0; i < REGISTRIES; i++)
        if (i != registry && forget(self->table[i], name) < 0)
            return -1;
    return self->table[NON_PERSISTENT] != NULL && PySet_Discard(self->table[NON_PERSISTENT], name) < 0 ? -1 : 0;
}

static int
raise_before_init(int registry)
{
    PyErr_Format(PyExc_AttributeError,
                 "cannot assign %s before Module.__init__() call\n"
                 "    do       call super().__init__() first in the __init__ of your class",
                 registry == PARAMETERS ? "parameters" : what[registry]);
    return -1;
}

static int
set_registered(Node *self, int registry, PyObject *name, PyObject *value, bool fits, const char *expected)
{
    if (!fits && value != Py_None) {
        PyErr_Format(PyExc_TypeError, "cannot assign '%.200s' as %s%s '%U' (%s or None expected)%s",
                     Py_TYPE(value)->tp_name, registry == MODULES ? "child " : "", what[registry], name, expected,
                     registry == PARAMETERS ? "\n    do       assign to [...] to change its values, or wrap the array "
                                              "in Parameter to put another one in its place"
                                            : "");
        return -1;
    }
    return PyDict_SetItem(self->table[registry], name, value);
}

static int
node_delattr(Node *self, PyObject *name)
{
    for (int i = 0; i < REGISTRIES; i++) {
        const int found = registered(self, i, name);
        if (found < 0)
            return -1;
        if (found == 0)
            continue;
        if (i == BUFFERS && self->table[NON_PERSISTENT] != NULL && PySet_Discard(self->table[NON_PERSISTENT], name) < 0)
            return -1;
        return PyDict_DelItem(self->table[i], name);
    }
    return PyObject_GenericSetAttr((PyObject *)self, name, NULL);
}

/* The questions are asked in this order because a value may fit several: a Parameter is also an array. */
static int
node_setattro(PyObject *op, PyObject *name, PyObject *value)
{
    Node *self = (Node *)op;
    PyTypeObject *parameter = NULL; /* borrowed */
    int found = 0;

    if (value == NULL)
        return node_delattr(self, name);
    parameter = parameter_type(self->state);
    if (parameter == NULL)
        return -1;
    if (PyObject_TypeCheck(value, parameter)) {
        if (self->table[PARAMETERS] == NULL)
            return raise_before_init(PARAMETERS);
        if (forget_elsewhere(self, PARAMETERS, name) < 0)
            return -1;
        PyObject *done = PyObject_CallMethod(op, "register_parameter", "OO", name, value);
        Py_XDECREF(done);
        return done != NULL ? 0 : -1;
    }
    if ((found = registered(self, PARAMETERS, name)) != 0)
        return found < 0 ? -1 : set_registered(self, PARAMETERS, name, value, false, "Parameter");

    if (PyObject_TypeCheck(value, (PyTypeObject *)self->state->node_type)) {
        if (self->table[MODULES] == NULL)
            return raise_before_init(MODULES);
        if (forget_elsewhere(self, MODULES, name) < 0)
            return -1;
        return PyDict_SetItem(self->table[MODULES], name, value);
    }
    if ((found = registered(self, MODULES, name)) != 0)
        return found < 0 ? -1 : set_registered(self, MODULES, name, value, false, "Module");

    if ((found = registered(self, BUFFERS, name)) != 0)
        return found < 0 ? -1 : set_registered(self, BUFFERS, name, value, PyArray_Check(value), "array");

    return PyObject_GenericSetAttr(op, name, value);
}

/* ---- tables as attributes ------------------------------------------------------------------------------------ */

static PyObject *
new_table(const Node *self, int index)
{
    if (index < REGISTRIES)
        return PyDict_New();
    return index == NON_PERSISTENT ? PySet_New(NULL) : PyObject_CallNoArgs(self->state->hook_table);
}

static PyObject *
table_get(PyObject *op, void *closure)
{
    Node *self = (Node *)op;
    const int index = (int)(intptr_t)closure;

    if (self->table[index] == NULL && index < REGISTRIES) {
        PyErr_Format(PyExc_AttributeError, "'%.200s' has no %ss before Module.__init__() call", Py_TYPE(op)->tp_name,
                     what[index]);
        return NULL;
    }
    if (self->table[index] == NULL)
        self->table[index] = new_table(self, index);
    return Py_XNewRef(self->table[index]);
}

static int
table_set(PyObject *op, PyObject *value, void *closure)
{
    Node *self = (Node *)op;
    const int index = (int)(intptr_t)closure;
    PyTypeObject *type = &PyDict_Type;

    if (index >= NON_PERSISTENT)
        type = index == NON_PERSISTENT ? &PySet_Type : (PyTypeObject *)self->state->hook_table;
    if (value == NULL || !PyObject_TypeCheck(value, type)) {
        PyErr_Format(PyExc_TypeError, "the table has to be a %.200s", type->tp_name);
        return -1;
    }
    Py_XSETREF(self->table[index], Py_NewRef(value));
    return 0;
}

/* ---- the call ------------------------------------------------------------------------------------------------ */

/* self.name(*args), with the function found on the class called directly: no bound method, no tuple, no dict. */
static PyObject *
call_method(Node *self, PyObject *name, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    const Py_ssize_t total = nargs + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *on_stack[ARGS_ON_STACK + 1], **stack = on_stack;
    PyObject *method = _PyType_Lookup(Py_TYPE(self), name); /* borrowed */
    PyObject *result = NULL;
    const int own = self->dict != NULL ? PyDict_Contains(self->dict, name) : 0; /* someone set m.forward = f */

    if (own < 0)
        return NULL;
    if (own || method == NULL || !PyType_HasFeature(Py_TYPE(method), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
        method = PyObject_GetAttr((PyObject *)self, name); /* new */
        if (method != NULL)
            result = PyObject_Vectorcall(method, args, nargsf, kwnames);
        Py_XDECREF(method);
        return result;
    }

    Py_INCREF(method); /* a forward may replace itself */
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
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(notes); i++) {
        PyObject *note = PyList_GET_ITEM(notes, i); /* borrowed */
        const char *text = PyUnicode_Check(note) ? PyUnicode_AsUTF8(note) : "";
        if (text != NULL && strncmp(text, "in module ", 10) == 0)
            return true;
    }
    return false;
}

/* One note (PEP 678; a plain attribute, so 3.10 has it too) saying in which module the pending exception arose.
 * Whatever goes wrong here is dropped: the exception matters more than the note. */
static void
note_path(const Node *self)
{
    PyObject *type = NULL, *error = NULL, *trace = NULL, *notes = NULL, *note = NULL;

    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error == NULL)
        goto done;
    notes = PyObject_GetAttrString(error, "__notes__");
    if (notes == NULL) {
        PyErr_Clear();
        notes = PyList_New(0);
        if (notes == NULL || PyObject_SetAttrString(error, "__notes__", notes) < 0)
            goto done;
    }
    if (!PyList_Check(notes) || noted(notes))
        goto done;
    if (self->path != NULL && PyUnicode_Check(self->path) && PyUnicode_GET_LENGTH(self->path) > 0)
        note = PyUnicode_FromFormat("in module %U (%.200s)", self->path, Py_TYPE(self)->tp_name);
    else
        note = PyUnicode_FromFormat("in module %.200s", Py_TYPE(self)->tp_name);
    if (note != NULL)
        (void)PyList_Append(notes, note);
done:
    Py_XDECREF(note);
    Py_XDECREF(notes);
    PyErr_Restore(type, error, trace); /* steals; replaces whatever failed above */
}

static PyObject *
node_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Node *self = (Node *)op;
    const qr_state *state = self->state;
    const bool hooked = filled(self->table[FORWARD_HOOKS]) || filled(self->table[FORWARD_PRE_HOOKS]) ||
                        filled(state->global_forward_hooks) || filled(state->global_forward_pre_hooks);
    PyObject *result = call_method(self, hooked ? state->call_hooked : state->forward, args, nargsf, kwnames);

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
        Py_XSETREF(self->table[i], table);
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
    {"_path", T_OBJECT, offsetof(Node, path), 0, "Name in the tree that was named last; None before."},
    {NULL, 0, 0, 0, NULL},
};

#define TABLE(name, index)                                                                                             \
    {                                                                                                                  \
        name, table_get, table_set, NULL, (void *)(intptr_t)(index)                                                    \
    }

static PyGetSetDef getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    TABLE("_parameters", PARAMETERS),
    TABLE("_buffers", BUFFERS),
    TABLE("_modules", MODULES),
    TABLE("_non_persistent_buffers_set", NON_PERSISTENT),
    TABLE("_forward_hooks", FORWARD_HOOKS),
    TABLE("_forward_hooks_with_kwargs", FORWARD_HOOKS_WITH_KWARGS),
    TABLE("_forward_hooks_always_called", FORWARD_HOOKS_ALWAYS_CALLED),
    TABLE("_forward_pre_hooks", FORWARD_PRE_HOOKS),
    TABLE("_forward_pre_hooks_with_kwargs", FORWARD_PRE_HOOKS_WITH_KWARGS),
    {NULL, NULL, NULL, NULL, NULL},
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
    {Py_tp_getattro, (void *)node_getattro},
    {Py_tp_setattro, (void *)node_setattro},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
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
