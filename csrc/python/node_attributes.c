/* How attributes of a module resolve, what assigning one registers, and its tables as attributes. */
#include "node.h"

static const char *const what[REGISTRIES] = {"parameter", "buffer", "module"};

/* The message for an attribute that is not there (new). A class that knows more than the usual words has a method
 * `_absent(name)`, which returns a message or None. It is looked up on the class only, so that it cannot ask for itself.
 */
static PyObject *
absent_text(Node *self, PyObject *name)
{
    PyObject *method = PyUnicode_InternFromString("_absent");
    PyObject *text = NULL;

    if (method == NULL)
        return NULL;
    if (_PyType_Lookup(Py_TYPE(self), method) != NULL) {
        text = PyObject_CallMethodObjArgs((PyObject *)self, method, name, NULL);
        if (text == NULL || PyUnicode_Check(text)) {
            Py_DECREF(method);
            return text;
        }
        Py_DECREF(text);
    }
    Py_DECREF(method);
    return PyUnicode_FromFormat("'%.200s' object has no attribute '%U'", Py_TYPE(self)->tp_name, name);
}

/* `name` and `obj` are what lets the interpreter add "Did you mean" when it prints the traceback, and only then. */
static PyObject *
raise_no_attribute(Node *self, PyObject *name)
{
    PyObject *text = absent_text(self, name);
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

/* Only a call through the slot itself, Module.__getattribute__(m, 5), gets here with another name. */
static int
check_name(PyObject *name)
{
    if (PyUnicode_Check(name))
        return 0;
    PyErr_Format(PyExc_TypeError, "attribute name must be string, not '%.200s'", Py_TYPE(name)->tp_name);
    return -1;
}

int
qr_node_find(Node *self, PyObject *const *field, PyObject *name, PyObject **found)
{
    PyObject *dict = qr_hold((PyObject *)self, field); /* comparing keys may run code, which may drop the dict */
    *found = NULL;
    if (dict == NULL)
        return 0;
    const int rc = PyDict_GetItemRef(dict, name, found);
    Py_DECREF(dict);
    return rc < 0 ? -1 : 0;
}

PyObject *
qr_node_getattro(PyObject *op, PyObject *name)
{
    Node *self = (Node *)op;
    PyObject *found = NULL; /* new */

    if (check_name(name) < 0)
        return NULL;

    /* The class is asked through its method cache before anything can raise, so that reading a child or a weight does
     * not pay for an exception. The order is the ordinary one: class, instance, then what is registered. */
    if (_PyType_Lookup(Py_TYPE(op), name) != NULL)
        return PyObject_GenericGetAttr(op, name);
    if (qr_node_find(self, &self->dict, name, &found) < 0)
        return NULL;
    for (int i = 0; i < REGISTRIES && found == NULL; i++)
        if (qr_node_find(self, &self->table[i], name, &found) < 0)
            return NULL;
    return found != NULL ? found : raise_no_attribute(self, name);
}

/* Imported when first needed: this type exists before qwenref.parameter can be imported. Borrowed: it stays. */
static PyTypeObject *
parameter_type(qr_state *state)
{
    PyObject *type = __atomic_load_n(&state->parameter, __ATOMIC_ACQUIRE), *none = NULL;
    if (type == NULL) {
        PyObject *module = PyImport_ImportModule("qwenref.parameter");
        if (module == NULL)
            return NULL;
        type = PyObject_GetAttrString(module, "Parameter");
        Py_DECREF(module);
        if (type != NULL &&
            !__atomic_compare_exchange_n(&state->parameter, &none, type, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            Py_DECREF(type); /* another thread was first */
            type = none;
        }
    }
    return (PyTypeObject *)type;
}

/* 1 if `name` is registered there, 0 if not, -1 with an exception set. */
static int
registered(Node *self, int registry, PyObject *name)
{
    PyObject *table = qr_hold((PyObject *)self, &self->table[registry]);
    const int found = table != NULL ? PyDict_Contains(table, name) : 0;
    Py_XDECREF(table);
    return found;
}

/* 1 if the name was in the dict of that field and has been taken out, 0 if not, -1 with an exception set. */
static int
forget(Node *self, PyObject *const *field, PyObject *name)
{
    PyObject *dict = qr_hold((PyObject *)self, field);
    int found = dict != NULL ? PyDict_Contains(dict, name) : 0;
    if (found > 0 && PyDict_DelItem(dict, name) < 0) {
        found = PyErr_ExceptionMatches(PyExc_KeyError) ? 0 : -1; /* another thread was first */
        if (found == 0)
            PyErr_Clear();
    }
    Py_XDECREF(dict);
    return found;
}

/* The same for the set of buffers that are not saved. */
static int
forget_buffer(Node *self, PyObject *name)
{
    PyObject *set = qr_hold((PyObject *)self, &self->table[NON_PERSISTENT]);
    const int found = set != NULL ? PySet_Discard(set, name) : 0;
    Py_XDECREF(set);
    return found;
}

/* A name means one thing: whatever else it meant goes. */
static int
forget_elsewhere(Node *self, int registry, PyObject *name)
{
    if (forget(self, &self->dict, name) < 0)
        return -1;
    for (int i = 0; i < REGISTRIES; i++)
        if (i != registry && forget(self, &self->table[i], name) < 0)
            return -1;
    return forget_buffer(self, name) < 0 ? -1 : 0;
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

/* 0, or -1 with an exception set. */
static int
put_into(Node *self, int registry, PyObject *name, PyObject *value)
{
    PyObject *table = qr_hold((PyObject *)self, &self->table[registry]);
    const int rc = table != NULL ? PyDict_SetItem(table, name, value) : raise_before_init(registry);
    Py_XDECREF(table);
    return rc;
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
    return put_into(self, registry, name, value);
}

static int
node_delattr(Node *self, PyObject *name)
{
    for (int i = 0; i < REGISTRIES; i++) {
        const int found = forget(self, &self->table[i], name);
        if (found < 0 || (found > 0 && i == BUFFERS && forget_buffer(self, name) < 0))
            return -1;
        if (found > 0)
            return 0;
    }
    return PyObject_GenericSetAttr((PyObject *)self, name, NULL);
}

/* The questions are asked in this order because a value may fit several: a Parameter is also an array. */
int
qr_node_setattro(PyObject *op, PyObject *name, PyObject *value)
{
    Node *self = (Node *)op;
    PyTypeObject *parameter = NULL; /* borrowed */
    int found = 0;

    if (check_name(name) < 0)
        return -1;
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
        return put_into(self, MODULES, name, value);
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

    PyObject *table = qr_hold(op, &self->table[index]), *absent = NULL;

    if (table == NULL && index < REGISTRIES) {
        PyErr_Format(PyExc_AttributeError, "'%.200s' has no %ss before Module.__init__() call", Py_TYPE(op)->tp_name,
                     what[index]);
        return NULL;
    }
    if (table != NULL)
        return table;
    table = new_table(self, index);
    if (table == NULL)
        return NULL;
    Py_INCREF(table);
    if (__atomic_compare_exchange_n(&self->table[index], &absent, table, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return table;
    Py_DECREF(table); /* somebody asked for the same meanwhile: another thread, or a collection in this one */
    Py_DECREF(table);
    return qr_hold(op, &self->table[index]);
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
    qr_put(op, &self->table[index], Py_NewRef(value));
    return 0;
}

static PyObject *
path_get(PyObject *op, void *unused)
{
    PyObject *path = qr_hold(op, &((Node *)op)->path);
    (void)unused;
    return path != NULL ? path : Py_NewRef(Py_None);
}

static int
path_set(PyObject *op, PyObject *value, void *unused)
{
    (void)unused;
    qr_put(op, &((Node *)op)->path, Py_XNewRef(value));
    return 0;
}

#define TABLE(name, index)                                                                                             \
    {                                                                                                                  \
        name, table_get, table_set, NULL, (void *)(intptr_t)(index)                                                    \
    }

PyGetSetDef qr_node_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {"_path", path_get, path_set, "Name in the tree that was named last; None before.", NULL},
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
