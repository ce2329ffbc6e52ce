/* What a node of the tree stores. Shared by node.c (call, life) and node_attributes.c. */
#ifndef QR_NODE_H
#define QR_NODE_H

#include "py.h"

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
enum { REGISTRIES = MODULES + 1 };

typedef struct Node {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    qr_state *state; /* borrowed: the type keeps the extension module alive */
    PyObject *dict, *weakrefs;
    PyObject *table[TABLES]; /* the registries are NULL until __init__ has run */
    PyObject *path;          /* name in the tree that was named last, or NULL */
} Node;

extern PyGetSetDef qr_node_getset[];

/* Of the dict in a field of the node: dict[name] as a new reference, NULL where there is none (or no dict); 0, or -1 with
 * an exception set. */
int qr_node_find(Node *self, PyObject *const *dict, PyObject *name, PyObject **found);
PyObject *qr_node_getattro(PyObject *self, PyObject *name);
int qr_node_setattro(PyObject *self, PyObject *name, PyObject *value);

#endif
