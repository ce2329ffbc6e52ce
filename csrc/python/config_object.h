/* The struct behind _C.Config, _C.TextConfig and _C.VisionConfig; shared by the config files of python/ only. */
#ifndef QR_CONFIG_OBJECT_H
#define QR_CONFIG_OBJECT_H

#include "py.h"

#include "../core/config.h"

typedef struct config_object {
    PyObject_HEAD
    PyObject *capsule;       /* keeps `config` alive; shared by a root and its sections */
    const qr_config *config; /* borrowed from capsule */
    qr_config_part part;
    PyObject *stored;        /* dict: the section as it is in the file; handed out only as copies */
    PyObject *json, *source; /* str: the text of the whole file, and its name for messages */
    PyObject *text, *vision; /* sections of a root; NULL where there is none */
} config_object;

static inline config_object *
as_config(PyObject *self)
{
    return (config_object *)self;
}

/* A text-only file has no sections: its root answers for the text section as well. */
static inline bool
is_text_root(const config_object *self)
{
    return self->part == QR_PART_ROOT && !self->config->composite;
}

/* config_attributes.c: one table per type. */
extern PyGetSetDef qr_root_attributes[], qr_text_attributes[], qr_vision_attributes[];

/* config_lookup.c: slots and methods of all three. */
const char *qr_config_section_name(const config_object *self);
PyObject *qr_config_dir(PyObject *self, PyObject *unused);
PyObject *qr_config_getattr(PyObject *self, PyObject *name);
int qr_config_setattr(PyObject *self, PyObject *name, PyObject *value);
Py_ssize_t qr_config_length(PyObject *self);
int qr_config_contains(PyObject *self, PyObject *key);
PyObject *qr_config_getitem(PyObject *self, PyObject *key);
PyObject *qr_config_get(PyObject *self, PyObject *args);
PyObject *qr_config_to_dict(PyObject *self, PyObject *unused);
PyObject *qr_config_keys(PyObject *self, PyObject *unused);
PyObject *qr_config_values(PyObject *self, PyObject *unused);
PyObject *qr_config_items(PyObject *self, PyObject *unused);
PyObject *qr_config_iter(PyObject *self);

#endif
