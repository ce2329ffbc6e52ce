/* An op as a Python object, and one call of it in the making: shared by the files that bind, run and return. */
#ifndef QR_OP_CALL_H
#define QR_OP_CALL_H

#include "py.h"

enum { QR_MAX_PARAMS = QR_MAX_ARRAYS + QR_MAX_SCALARS };

typedef struct qr_op_object {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *module; /* owned: keeps the state alive */
    PyObject *name;
    PyObject *param_name[QR_MAX_PARAMS]; /* owned, interned */
    int index;                           /* row of the table of every level */
    qr_signature signature;
} qr_op_object;

/* What Python handed over, what has to be released, and the call itself. */
typedef struct qr_op_call {
    qr_state *state;
    const qr_op_object *op;
    PyObject *given[QR_MAX_PARAMS]; /* borrowed from the caller */
    PyObject *held[QR_MAX_PARAMS];  /* owned arrays behind qr_call.array, by parameter */
    void *scratch[QR_MAX_PARAMS];   /* owned blocks */
    bool large[QR_MAX_PARAMS];      /* the block is one of the kept buffers */
    qr_call call;
    qr_star star;
    qr_error error;
} qr_op_call;

/* Each returns 0, or -1 with a Python exception or c->error set. */
int qr_take_arguments(qr_op_call *c, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
int qr_take_inputs(qr_op_call *c);
int qr_make_outputs(qr_op_call *c);

void qr_free_scratch(qr_op_call *c, int i);

/* New reference: the one array asked for, or a tuple of them in the order of the signature. */
PyObject *qr_op_results(qr_op_call *c);

const char *qr_op_text(const qr_op_object *op);

static inline int64_t
qr_elements(const qr_array *a)
{
    int64_t n = 1;
    for (int d = 0; d < a->ndim; d++)
        n *= a->shape[d];
    return n;
}

#endif
