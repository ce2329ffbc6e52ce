/* What every file of python/ shares: the two big headers included once in the right way, the module's state, raising. */
#ifndef QR_PY_H
#define QR_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL qr_numpy_api
#ifndef QR_IMPORTS_NUMPY /* extension.c alone calls import_array() */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "compat.h"

#include "../core/op.h"
#include "../core/pool.h"
#include "../qr.h"

/* State of one copy of the module. Every object below is owned; all but the last are visited by traverse and dropped by
 * clear. */
typedef struct qr_state {
    PyObject *numerics;       /* ContextVar: None, or a dict op name -> callable that takes the op's place */
    PyObject *sites;          /* ContextVar: None, or a callable (module, name, value) -> value */
    PyObject *errors;         /* the module qwenref.errors */
    PyObject *bf16;           /* ml_dtypes.bfloat16 as a numpy.dtype */
    PyObject *op_type;        /* _C.Op */
    PyObject *node_type;      /* _C.Module */
    PyObject *config_type[3]; /* _C.Config, _C.TextConfig, _C.VisionConfig, by qr_config_part */
    PyObject *parameter;      /* qwenref.parameter.Parameter, once it has been imported */
    PyObject *call_hooked;    /* name "_call_hooked", interned */
    PyObject *forward;        /* name "forward", interned */
    PyObject *hook_table;     /* collections.OrderedDict: handles hold hook tables weakly, which a plain dict refuses */
    PyObject *global_forward_hooks, *global_forward_pre_hooks; /* hook tables of the process */
    PyObject *buffer_handler;                                  /* capsule: NumPy's data handler of large results */
    int bf16_typenum;
    qr_level level; /* read and written atomically, like `parameter` */
    qr_pool *pool;
    struct qr_buffers *buffers; /* borrowed from buffer_handler */
} qr_state;

extern PyModuleDef qr_module;

static inline qr_level
qr_level_of(const qr_state *state)
{
    return __atomic_load_n(&state->level, __ATOMIC_RELAXED);
}

/* State of the module that made `type` or one of its bases; NULL with an exception set if there is none. */
qr_state *qr_state_of(PyTypeObject *type);

/* Raise what `error` describes as the matching class of qwenref.errors. Always returns NULL. */
PyObject *qr_raise(qr_state *state, const qr_error *error);

/* Raise KeyError(key). Always returns NULL. */
PyObject *qr_raise_key(PyObject *key);

/* NumPy's type number of a dtype of ours, and back (QR_DTYPES when it is none of ours). */
int qr_typenum(const qr_state *state, qr_dtype dtype);
qr_dtype qr_dtype_of(const qr_state *state, int typenum);

/* Each adds the types and functions of one file to the module; 0 or -1 with an exception set. */
int qr_add_ops(PyObject *module);
int qr_add_module_type(PyObject *module);
int qr_add_checkpoint_types(PyObject *module);
int qr_add_config_types(PyObject *module);
int qr_add_rates(PyObject *module);
int qr_add_buffers(PyObject *module);

/* A new array of undefined contents, its memory from the kept buffers where it is large. */
PyObject *qr_new_array(qr_state *state, int ndim, npy_intp *shape, int typenum, int64_t bytes);

#endif
