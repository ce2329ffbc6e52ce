/* _C.Config and its sections: config.json as read-only attributes, made from the rows of qr_config_keys.h, and as the
 * mapping it is in the file. The three types share one struct and all functions; only their attribute tables differ. */
#include "config_object.h"

#include <stdlib.h>
#include <string.h>

static int
config_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_config(self)->stored);
    Py_VISIT(as_config(self)->text);
    Py_VISIT(as_config(self)->vision);
    return 0;
}

static void
config_dealloc(PyObject *self)
{
    config_object *config = as_config(self);
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    Py_XDECREF(config->capsule);
    Py_XDECREF(config->stored);
    Py_XDECREF(config->json);
    Py_XDECREF(config->source);
    Py_XDECREF(config->text);
    Py_XDECREF(config->vision);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- text in, text out ---------------------------------------------------------------------------------------------- */

static void
free_config(PyObject *capsule)
{
    qr_config *config = PyCapsule_GetPointer(capsule, NULL);
    if (config != NULL)
        qr_config_clear(config);
    free(config);
}

/* `stored` is what json.loads made of the section: borrowed, or NULL where it made none. */
static PyObject *
new_object(qr_state *state, qr_config_part part, PyObject *capsule, PyObject *stored, PyObject *json, PyObject *source)
{
    config_object *self = NULL;

    if (stored == NULL || !PyDict_Check(stored)) /* our parser found an object there: somebody replaced json.loads */
        return PyErr_Format(PyExc_TypeError, "%U: json.loads did not give the dict that the text is", source);
    self = PyObject_GC_New(config_object, (PyTypeObject *)state->config_type[part]);
    if (self == NULL)
        return NULL;
    self->capsule = Py_NewRef(capsule);
    self->config = PyCapsule_GetPointer(capsule, NULL);
    self->part = part;
    self->stored = Py_NewRef(stored);
    self->json = Py_NewRef(json);
    self->source = Py_NewRef(source);
    self->text = self->vision = NULL;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* Parsed and checked, in a capsule that frees it. New reference. */
static PyObject *
parse(qr_state *state, PyObject *json, PyObject *source)
{
    qr_error error = {0};
    Py_ssize_t length = 0;
    qr_config *config = NULL;
    PyObject *capsule = NULL;
    const char *name = PyUnicode_AsUTF8(source);                                     /* borrowed */
    const char *text = name != NULL ? PyUnicode_AsUTF8AndSize(json, &length) : NULL; /* borrowed, ends in a 0 */

    if (text == NULL)
        return NULL;
    config = malloc(sizeof *config);
    if (config == NULL)
        return PyErr_NoMemory();
    if (qr_config_parse(text, (size_t)length, name, config, &error) < 0) {
        free(config);
        return qr_raise(state, &error);
    }
    capsule = PyCapsule_New(config, NULL, free_config);
    if (capsule == NULL) {
        qr_config_clear(config);
        free(config);
    }
    return capsule;
}

/* The text as str; a fault of its encoding is a fault of the file. New reference. */
static PyObject *
as_text(qr_state *state, PyObject *input, PyObject *source)
{
    PyObject *text = NULL;

    if (PyUnicode_Check(input))
        text = PyUnicode_AsUTF8(input) != NULL ? PyUnicode_FromObject(input) : NULL;
    else if (PyBytes_Check(input))
        text = PyUnicode_DecodeUTF8(PyBytes_AS_STRING(input), PyBytes_GET_SIZE(input), NULL);
    else
        return PyErr_Format(PyExc_TypeError, "Config.from_json: found %s, expected the text of a config.json",
                            Py_TYPE(input)->tp_name);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeError)) {
        qr_error error = {0};
        PyErr_Clear();
        const char *name = PyUnicode_AsUTF8(source);
        if (name != NULL) {
            qr_fail(&error, QR_BAD_CONFIG, "%s: found bytes that are not UTF-8, expected JSON in UTF-8", name);
            qr_raise(state, &error);
        }
    }
    return text;
}

PyDoc_STRVAR(from_json_doc, "from_json(text, source=\"config.json\")\n--\n\n"
                            "Read and check the text of a config.json (str or bytes).\n\n"
                            "`source` is the file's name in messages. ConfigError lists what cannot be run.");

static PyObject *
config_from_json(PyObject *class, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"text", "source", NULL};
    PyObject *input, *source = NULL; /* source is owned below */
    PyObject *json = NULL, *stored = NULL, *capsule = NULL, *loads = NULL, *root = NULL, *section;
    PyObject *module = PyType_GetModule((PyTypeObject *)class); /* borrowed */
    config_object *self = NULL;

    if (module == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O|U:from_json", names, &input, &source))
        return NULL;
    qr_state *state = PyModule_GetState(module);
    /* A path too long for a message would push the message out of it. */
    if (source == NULL || PyUnicode_GET_LENGTH(source) > 250)
        source = PyUnicode_FromString("config.json");
    else
        source = PyUnicode_FromObject(source); /* a plain str: a subclass could lead back to the config */
    if (source == NULL)
        return NULL;

    json = as_text(state, input, source);
    capsule = json != NULL ? parse(state, json, source) : NULL;
    if (capsule == NULL)
        goto done;
    /* What is stored keeps the file's own types (10000 and 10000.0 differ), which cJSON does not tell apart. */
    loads = PyImport_ImportModule("json");
    stored = loads != NULL ? PyObject_CallMethod(loads, "loads", "O", json) : NULL;
    if (stored == NULL)
        goto done;
    root = new_object(state, QR_PART_ROOT, capsule, stored, json, source);
    if (root == NULL)
        goto done;
    self = as_config(root);
    section = self->config->composite ? PyDict_GetItemString(stored, "text_config") : stored; /* borrowed, or NULL */
    self->text = new_object(state, QR_PART_TEXT, capsule, section, json, source);
    if (self->text != NULL && self->config->has_vision) {
        section = PyDict_GetItemString(stored, "vision_config"); /* borrowed, or NULL */
        self->vision = new_object(state, QR_PART_VISION, capsule, section, json, source);
    }
    if (self->text == NULL || (self->vision == NULL && self->config->has_vision))
        Py_CLEAR(root);
done:
    Py_DECREF(source);
    Py_XDECREF(json);
    Py_XDECREF(capsule);
    Py_XDECREF(loads);
    Py_XDECREF(stored);
    return root;
}

static PyObject *
config_to_json(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (as_config(self)->part == QR_PART_ROOT)
        return Py_NewRef(as_config(self)->json);
    PyObject *json = PyImport_ImportModule("json");
    PyObject *dumps = json != NULL ? PyObject_GetAttrString(json, "dumps") : NULL;
    PyObject *args = Py_BuildValue("(O)", as_config(self)->stored), *options = Py_BuildValue("{s:i}", "indent", 2);
    PyObject *text = dumps != NULL && args != NULL && options != NULL ? PyObject_Call(dumps, args, options) : NULL;

    Py_XDECREF(json);
    Py_XDECREF(dumps);
    Py_XDECREF(args);
    Py_XDECREF(options);
    return text;
}

/* A root is its text; a section is the attribute of a root of the same text. */
static PyObject *
config_reduce(PyObject *self, PyObject *unused)
{
    const config_object *object = as_config(self);
    PyObject *module = PyType_GetModule(Py_TYPE(self)); /* borrowed */
    PyObject *type = module != NULL ? PyObject_GetAttrString(module, "Config") : NULL;
    PyObject *make = type != NULL ? PyObject_GetAttrString(type, "from_json") : NULL;
    PyObject *root = NULL, *builtins = NULL, *getter = NULL, *reduced = NULL;

    (void)unused;
    if (make == NULL)
        goto done;
    if (object->part == QR_PART_ROOT) {
        reduced = Py_BuildValue("O(OO)", make, object->json, object->source);
        goto done;
    }
    root = PyObject_CallFunctionObjArgs(make, object->json, object->source, NULL);
    builtins = PyImport_ImportModule("builtins");
    getter = builtins != NULL ? PyObject_GetAttrString(builtins, "getattr") : NULL;
    if (root != NULL && getter != NULL)
        reduced = Py_BuildValue("O(Os)", getter, root, qr_config_section_name(object));
done:
    Py_XDECREF(type);
    Py_XDECREF(make);
    Py_XDECREF(root);
    Py_XDECREF(builtins);
    Py_XDECREF(getter);
    return reduced;
}

static PyObject *
config_repr(PyObject *self)
{
    const config_object *object = as_config(self);
    const char *source = PyUnicode_AsUTF8(object->source);
    char text[3072];

    if (source == NULL)
        return NULL;
    qr_config_describe(object->config, object->part, source, text, sizeof text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *
config_compare(PyObject *a, PyObject *b, int op)
{
    /* All three types have this function, and nothing else has. */
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(b)->tp_richcompare != config_compare)
        Py_RETURN_NOTIMPLEMENTED;
    return PyObject_RichCompare(as_config(a)->stored, as_config(b)->stored, op);
}

/* ---- the types ------------------------------------------------------------------------------------------------------ */

#define SHARED_METHODS                                                                                                 \
    {"keys", qr_config_keys, METH_NOARGS, "keys()\n--\n\nKeys of the file, in its order."},                            \
        {"values", qr_config_values, METH_NOARGS, "values()\n--\n\nValues of the file."},                              \
        {"items", qr_config_items, METH_NOARGS, "items()\n--\n\nKeys and values of the file."},                        \
        {"get", qr_config_get, METH_VARARGS,                                                                           \
         "get(key, default=None, /)\n--\n\nValue of a key of the file, or the default."},                              \
        {"to_dict", qr_config_to_dict, METH_NOARGS, "to_dict()\n--\n\nA copy of what the file holds."},                \
        {"to_json", config_to_json, METH_NOARGS, "to_json()\n--\n\nThe text of the file; of a section, its JSON."},    \
        {"__dir__", qr_config_dir, METH_NOARGS, NULL},                                                                 \
    {                                                                                                                  \
        "__reduce__", config_reduce, METH_NOARGS, NULL                                                                 \
    }

static PyMethodDef root_methods[] = {
    {"from_json", (PyCFunction)(void (*)(void))config_from_json, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     from_json_doc},
    SHARED_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyMethodDef section_methods[] = {
    SHARED_METHODS,
    {NULL, NULL, 0, NULL},
};

#define SHARED_SLOTS                                                                                                   \
    {Py_tp_dealloc, (void *)config_dealloc}, {Py_tp_traverse, (void *)config_traverse},                                \
        {Py_tp_getattro, (void *)qr_config_getattr}, {Py_tp_setattro, (void *)qr_config_setattr},                      \
        {Py_tp_repr, (void *)config_repr}, {Py_tp_richcompare, (void *)config_compare},                                \
        {Py_tp_hash, (void *)PyObject_HashNotImplemented}, {Py_tp_iter, (void *)qr_config_iter},                       \
        {Py_mp_length, (void *)qr_config_length}, {Py_mp_subscript, (void *)qr_config_getitem},                        \
    {                                                                                                                  \
        Py_sq_contains, (void *)qr_config_contains                                                                     \
    }

static PyType_Slot root_slots[] = {
    {Py_tp_doc, "A model's config.json: read-only attributes, and the mapping that the file is."},
    {Py_tp_methods, root_methods},
    {Py_tp_getset, qr_root_attributes},
    SHARED_SLOTS,
    {0, NULL},
};

static PyType_Slot text_slots[] = {
    {Py_tp_doc, "The text section of a config."},
    {Py_tp_methods, section_methods},
    {Py_tp_getset, qr_text_attributes},
    SHARED_SLOTS,
    {0, NULL},
};

static PyType_Slot vision_slots[] = {
    {Py_tp_doc, "The vision section of a config."},
    {Py_tp_methods, section_methods},
    {Py_tp_getset, qr_vision_attributes},
    SHARED_SLOTS,
    {0, NULL},
};

#define TYPE_FLAGS                                                                                                     \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE |          \
     Py_TPFLAGS_MAPPING)

int
qr_add_config_types(PyObject *module)
{
    qr_state *state = PyModule_GetState(module);
    PyType_Spec specs[] = {
        {"qwenref._C.Config", sizeof(config_object), 0, TYPE_FLAGS, root_slots},
        {"qwenref._C.TextConfig", sizeof(config_object), 0, TYPE_FLAGS, text_slots},
        {"qwenref._C.VisionConfig", sizeof(config_object), 0, TYPE_FLAGS, vision_slots},
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        state->config_type[i] = PyType_FromModuleAndSpec(module, &specs[i], NULL);
        if (state->config_type[i] == NULL || PyModule_AddType(module, (PyTypeObject *)state->config_type[i]) < 0)
            return -1;
    }
    return 0;
}
