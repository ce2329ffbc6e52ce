/* Read-only attributes of a config: the rows of config_keys.h, and what follows from them. */
#include "config_object.h"

static PyObject *
get_key(PyObject *self, void *closure)
{
    const config_object *object = as_config(self);
    const qr_key *key = closure;
    const char *base = object->part == QR_PART_ROOT   ? (const char *)object->config
                       : object->part == QR_PART_TEXT ? (const char *)&object->config->text
                                                      : (const char *)&object->config->vision;
    const void *field = base + key->offset;

    if (is_text_root(object)) { /* the rows of a root belong to composite files */
        PyErr_SetString(PyExc_AttributeError, key->name);
        return NULL;
    }
    switch (key->type) {
    case QR_KEY_SIZE:
    case QR_KEY_COUNT:
        return PyLong_FromLongLong(*(const int64_t *)field);
    case QR_KEY_REAL:
    case QR_KEY_REAL0:
        return PyFloat_FromDouble(*(const double *)field);
    case QR_KEY_BOOL:
    case QR_KEY_FIXED:
        return PyBool_FromLong(*(const bool *)field);
    case QR_KEY_NAME:
        return PyUnicode_FromString(field);
    }
    Py_UNREACHABLE();
}

/* Derived integers and numbers of the text and vision sections, by the offset of their field in qr_config. */
#define OFFSET(field) ((void *)offsetof(qr_config, field))

static PyObject *
get_integer(PyObject *self, void *closure)
{
    return PyLong_FromLongLong(*(const int64_t *)((const char *)as_config(self)->config + (size_t)closure));
}

static PyObject *
get_number(PyObject *self, void *closure)
{
    return PyFloat_FromDouble(*(const double *)((const char *)as_config(self)->config + (size_t)closure));
}

static PyObject *
get_interval(PyObject *self, void *closure)
{
    (void)closure;
    const int64_t every = as_config(self)->config->text.full_attention_interval;
    return every > 0 ? PyLong_FromLongLong(every) : Py_NewRef(Py_None);
}

static PyObject *
get_layer_types(PyObject *self, void *closure)
{
    const qr_text_config *text = &as_config(self)->config->text;
    PyObject *kinds[2] = {PyUnicode_InternFromString("linear_attention"), PyUnicode_InternFromString("full_attention")};
    PyObject *types = NULL;

    (void)closure;
    if (kinds[0] != NULL && kinds[1] != NULL)
        types = PyTuple_New((Py_ssize_t)text->num_hidden_layers);
    for (Py_ssize_t i = 0; types != NULL && i < (Py_ssize_t)text->num_hidden_layers; i++)
        PyTuple_SET_ITEM(types, i, Py_NewRef(kinds[text->full_attention[i]])); /* steals */
    Py_XDECREF(kinds[0]);
    Py_XDECREF(kinds[1]);
    return types;
}

static PyObject *
get_mrope_section(PyObject *self, void *closure)
{
    const int64_t *section = as_config(self)->config->text.mrope_section;
    (void)closure;
    return Py_BuildValue("(LLL)", (long long)section[0], (long long)section[1], (long long)section[2]);
}

static PyObject *
get_mrope_axes(PyObject *self, void *closure)
{
    const qr_text_config *text = &as_config(self)->config->text;
    PyObject *axes = PyTuple_New((Py_ssize_t)(text->rotary_dim / 2));

    (void)closure;
    for (Py_ssize_t f = 0; axes != NULL && f < PyTuple_GET_SIZE(axes); f++) {
        PyObject *axis = PyLong_FromLong(qr_rope_axis(text->mrope_section, f));
        if (axis == NULL)
            Py_CLEAR(axes);
        else
            PyTuple_SET_ITEM(axes, f, axis); /* steals */
    }
    return axes;
}

static PyObject *
get_interleaved(PyObject *self, void *closure)
{
    (void)self;
    (void)closure;
    Py_RETURN_TRUE; /* the only form that is read */
}

/* The text section's own flag where it has one, else what holds for the model. */
static PyObject *
get_tie(PyObject *self, void *closure)
{
    const config_object *object = as_config(self);
    const qr_flag own = object->config->tie_text;
    (void)closure;
    if (object->part == QR_PART_TEXT && own != QR_FLAG_ABSENT)
        return PyBool_FromLong(own == QR_FLAG_TRUE);
    return PyBool_FromLong(object->config->tie_word_embeddings);
}

static PyObject *
get_tie_conflict(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(qr_config_tie_conflict(as_config(self)->config));
}

static PyObject *
get_section(PyObject *self, void *closure)
{
    PyObject *section = closure != NULL ? as_config(self)->vision : as_config(self)->text;
    return Py_NewRef(section != NULL ? section : Py_None);
}

static PyObject *
get_names(PyObject *self, void *closure)
{
    const qr_config *config = as_config(self)->config;
    const qr_names *names = closure != NULL ? &config->unknown : &config->defaults;
    PyObject *list = PyList_New((Py_ssize_t)names->count);

    for (Py_ssize_t i = 0; list != NULL && i < (Py_ssize_t)names->count; i++) {
        PyObject *name = PyUnicode_FromString(names->item[i]);
        if (name == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, name); /* steals */
    }
    return list;
}

static PyObject *
get_source(PyObject *self, void *closure)
{
    (void)closure;
    return Py_NewRef(as_config(self)->source);
}

#define ROOT_GETTER(type, name, value, values, report)                                                                 \
    {#name, get_key, NULL, NULL, (void *)&qr_root_keys[QR_ROOT_##name]},
#define TEXT_GETTER(type, name, value, values, report)                                                                 \
    {#name, get_key, NULL, NULL, (void *)&qr_text_keys[QR_TEXT_##name]},
#define VISION_GETTER(type, name, value, values, report)                                                               \
    {#name, get_key, NULL, NULL, (void *)&qr_vision_keys[QR_VISION_##name]},
#define END_GETTER                                                                                                     \
    {                                                                                                                  \
        NULL, NULL, NULL, NULL, NULL                                                                                   \
    }
#define SECOND ((void *)1) /* tells the second of two attributes that share a getter */

static PyObject *
get_composite(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(as_config(self)->config->composite);
}

static PyObject *
get_self(PyObject *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self);
}

PyGetSetDef qr_root_attributes[] = {
    {"composite", get_composite, NULL, "Text and vision sections under one root, rather than text alone.", NULL},
    {"text_config", get_section, NULL, "The text section; a text-only file is its own.", NULL},
    {"vision_config", get_section, NULL, "The vision section, or None.", SECOND},
    {"tie_word_embeddings", get_tie, NULL, "The root's flag, else the text section's, else False.", NULL},
    {"tie_conflict", get_tie_conflict, NULL, "Root and text section disagree on tie_word_embeddings.", NULL},
    {"defaults", get_names, NULL, "Dotted keys that are absent and took their class default.", NULL},
    {"unknown", get_names, NULL, "Dotted keys of the file that mean nothing here.", SECOND},
    {"source", get_source, NULL, "Name of the file, for messages.", NULL},
    QR_ROOT_KEYS(ROOT_GETTER) END_GETTER,
};

PyGetSetDef qr_text_attributes[] = {
    {"text_config", get_self, NULL, "Itself, so that code need not ask which of the two it holds.", NULL},
    {"tie_word_embeddings", get_tie, NULL, "The section's own flag, else the root's.", NULL},
    {"layer_types", get_layer_types, NULL, "Kind of each layer: linear_attention or full_attention.", NULL},
    {"full_attention_interval", get_interval, NULL, "As stored; None where layer_types alone decides.", NULL},
    {"rope_theta", get_number, NULL, NULL, OFFSET(text.rope_theta)},
    {"partial_rotary_factor", get_number, NULL, NULL, OFFSET(text.partial_rotary_factor)},
    {"rotary_dim", get_integer, NULL, "Rotated dimensions of a head.", OFFSET(text.rotary_dim)},
    {"mrope_section", get_mrope_section, NULL, "Frequencies of the axes T, H, W.", NULL},
    {"mrope_interleaved", get_interleaved, NULL, "Sections take frequencies in turn, always.", NULL},
    {"mrope_axes", get_mrope_axes, NULL, "Axis of each rotary frequency: 0 T, 1 H, 2 W.", NULL},
    {"key_dim", get_integer, NULL, "DeltaNet key heads x width.", OFFSET(text.key_dim)},
    {"value_dim", get_integer, NULL, "DeltaNet value heads x width.", OFFSET(text.value_dim)},
    {"conv_dim", get_integer, NULL, "Channels of the convolution: 2 * key_dim + value_dim.", OFFSET(text.conv_dim)},
    {"source", get_source, NULL, "Name of the file, for messages.", NULL},
    QR_TEXT_KEYS(TEXT_GETTER) END_GETTER,
};

PyGetSetDef qr_vision_attributes[] = {
    {"rope_theta", get_number, NULL, NULL, OFFSET(vision.rope_theta)},
    {"head_dim", get_integer, NULL, "hidden_size / num_heads.", OFFSET(vision.head_dim)},
    {"grid_side", get_integer, NULL, "Side of the square position table.", OFFSET(vision.grid_side)},
    {"source", get_source, NULL, "Name of the file, for messages.", NULL},
    QR_VISION_KEYS(VISION_GETTER) END_GETTER,
};
