/* Looking things up in a config: attributes, keys of the file, and what to say when there is neither. */
#include "config_object.h"

#include "../core/near.h"

#include <string.h>

/* A copy down to the leaves, so that no caller can reach the object's own dicts and lists. New reference. */
static PyObject *
copy_json(PyObject *value)
{
    PyObject *copy = NULL, *key, *item, *inner; /* key and item are borrowed */
    Py_ssize_t at = 0;

    if (PyDict_Check(value)) {
        copy = PyDict_New();
        while (copy != NULL && PyDict_Next(value, &at, &key, &item)) {
            inner = copy_json(item);
            if (inner == NULL || PyDict_SetItem(copy, key, inner) < 0)
                Py_CLEAR(copy);
            Py_XDECREF(inner);
        }
        return copy;
    }
    if (PyList_Check(value)) {
        copy = PyList_New(PyList_GET_SIZE(value));
        for (at = 0; copy != NULL && at < PyList_GET_SIZE(value); at++) {
            inner = copy_json(PyList_GET_ITEM(value, at));
            if (inner == NULL)
                Py_CLEAR(copy);
            else
                PyList_SET_ITEM(copy, at, inner); /* steals */
        }
        return copy;
    }
    return Py_NewRef(value);
}

const char *
qr_config_section_name(const config_object *self)
{
    return self->part == QR_PART_TEXT ? "text_config" : self->part == QR_PART_VISION ? "vision_config" : "the root";
}

/* Keys that mean "none" by being absent. */
static bool
absent_is_none(const char *name)
{
    static const char *const names[] = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0)
            return true;
    }
    return false;
}

/* The type has them for composite files. */
static int
drop_root_keys(PyObject *names)
{
    for (const qr_key *key = qr_root_keys; key->name != NULL; key++) {
        PyObject *name = PyUnicode_FromString(key->name);
        const int rc = name != NULL ? PySet_Discard(names, name) : -1;
        Py_XDECREF(name);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* Everything the object answers to, once: attributes of its type, keys of the file, and for a text-only root its
 * section's. New list of str. */
PyObject *
qr_config_dir(PyObject *self, PyObject *unused)
{
    const config_object *object = as_config(self);
    PyObject *names = PyObject_CallMethod((PyObject *)&PyBaseObject_Type, "__dir__", "O", self);
    PyObject *more = PyDict_Keys(object->stored), *unique = NULL, *list = NULL;

    (void)unused;
    if (names == NULL || more == NULL || PyList_SetSlice(names, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, more) < 0)
        goto done;
    if (is_text_root(object)) {
        Py_SETREF(more, PyObject_Dir(object->text));
        if (more == NULL || PyList_SetSlice(names, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, more) < 0)
            goto done;
    }
    unique = PySet_New(names);
    if (unique != NULL && (!is_text_root(object) || drop_root_keys(unique) == 0))
        list = PySequence_List(unique);
done:
    Py_XDECREF(names);
    Py_XDECREF(more);
    Py_XDECREF(unique);
    return list;
}

/* Raise `exception` for a name that is not among `names`, with where else it is or what is spelled nearly so. */
static PyObject *
raise_missing(PyObject *self, PyObject *exception, const char *name, PyObject *names)
{
    const config_object *object = as_config(self);
    qr_near near = {0};
    char found[240] = "";
    size_t used = 0;

    if (object->part == QR_PART_ROOT && object->config->composite && PyObject_HasAttrString(object->text, name))
        return PyErr_Format(exception, "%U: no '%s' in the root, but config.text_config has it", object->source, name);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
        const char *candidate = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i)); /* borrowed from names */
        if (candidate == NULL)
            return NULL;
        if (candidate[0] != '_')
            qr_near_consider(&near, name, candidate);
    }
    for (int i = 0; i < near.found; i++) {
        /* Names here have one part, and a part may be exchanged whole for 4: only less than that is a likeness. */
        if (near.distance[i] < 4 && (size_t)near.distance[i] <= 1 + strlen(name) / 5)
            used += (size_t)snprintf(found + used, sizeof found - used, "%s%.60s",
                                     used > 0 ? ", " : ". Near: ", near.name[i]);
    }
    return PyErr_Format(exception, "%U: no '%s' in %s%s", object->source, name, qr_config_section_name(object), found);
}

/* `value`, or NULL with no exception where it is only an AttributeError that says the name is not there. */
static PyObject *
unless_missing(PyObject *value)
{
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    return value;
}

PyObject *
qr_config_getattr(PyObject *self, PyObject *name)
{
    const config_object *object = as_config(self);
    PyObject *value = unless_missing(PyObject_GenericGetAttr(self, name));

    if (value == NULL && !PyErr_Occurred() && is_text_root(object))
        value = unless_missing(PyObject_GenericGetAttr(object->text, name));
    if (value != NULL || PyErr_Occurred())
        return value;
    value = PyDict_GetItemWithError(object->stored, name); /* borrowed */
    if (value != NULL || PyErr_Occurred())
        return value != NULL ? copy_json(value) : NULL;

    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL)
        return NULL;
    if (absent_is_none(text))
        Py_RETURN_NONE;
    if (text[0] == '_') { /* probes of protocols: no search for near names */
        PyErr_SetObject(PyExc_AttributeError, name);
        return NULL;
    }
    PyObject *names = qr_config_dir(self, NULL);
    if (names != NULL)
        (void)raise_missing(self, PyExc_AttributeError, text, names);
    Py_XDECREF(names);
    return NULL;
}

int
qr_config_setattr(PyObject *self, PyObject *name, PyObject *value)
{
    (void)value;
    PyErr_Format(PyExc_AttributeError,
                 "%U: a config is read-only: cannot change '%S'\n"
                 "    do       build a new one: Config.from_json(json.dumps(config.to_dict() | {...}))",
                 as_config(self)->source, name);
    return -1;
}

/* ---- the mapping -------------------------------------------------------------------------------------------------- */

Py_ssize_t
qr_config_length(PyObject *self)
{
    return PyDict_GET_SIZE(as_config(self)->stored);
}

int
qr_config_contains(PyObject *self, PyObject *key)
{
    return PyDict_Contains(as_config(self)->stored, key);
}

PyObject *
qr_config_getitem(PyObject *self, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(as_config(self)->stored, key); /* borrowed */
    if (value != NULL)
        return copy_json(value);
    if (PyErr_Occurred())
        return NULL;
    const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;
    PyObject *names = name != NULL ? PyDict_Keys(as_config(self)->stored) : NULL;
    if (names != NULL)
        (void)raise_missing(self, PyExc_KeyError, name, names);
    else if (!PyErr_Occurred())
        qr_raise_key(key);
    Py_XDECREF(names);
    return NULL;
}

PyObject *
qr_config_get(PyObject *self, PyObject *args)
{
    PyObject *key, *fallback = Py_None; /* borrowed */
    if (!PyArg_ParseTuple(args, "O|O:get", &key, &fallback))
        return NULL;
    PyObject *value = PyDict_GetItemWithError(as_config(self)->stored, key); /* borrowed */
    if (value != NULL)
        return copy_json(value);
    return PyErr_Occurred() ? NULL : Py_NewRef(fallback);
}

PyObject *
qr_config_to_dict(PyObject *self, PyObject *unused)
{
    (void)unused;
    return copy_json(as_config(self)->stored);
}

/* A view of a copy, which the view alone keeps alive. */
static PyObject *
view(PyObject *self, const char *method)
{
    PyObject *copy = copy_json(as_config(self)->stored);
    PyObject *result = copy != NULL ? PyObject_CallMethod(copy, method, NULL) : NULL;
    Py_XDECREF(copy);
    return result;
}

PyObject *
qr_config_keys(PyObject *self, PyObject *unused)
{
    (void)unused;
    return view(self, "keys");
}

PyObject *
qr_config_values(PyObject *self, PyObject *unused)
{
    (void)unused;
    return view(self, "values");
}

PyObject *
qr_config_items(PyObject *self, PyObject *unused)
{
    (void)unused;
    return view(self, "items");
}

PyObject *
qr_config_iter(PyObject *self)
{
    return view(self, "__iter__");
}
