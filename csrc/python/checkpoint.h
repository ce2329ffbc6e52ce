/* What the checkpoint files of this folder share: the object, and element types of the format as NumPy's. */
#ifndef QR_PY_CHECKPOINT_H
#define QR_PY_CHECKPOINT_H

#include "py.h"

#include "../core/checkpoint.h"

typedef struct Checkpoint {
    PyObject_HEAD
    qr_checkpoint *files; /* immutable after construction, so no lock; arrays keep the object alive by their base */
} Checkpoint;

/* The tensor called `key`, borrowed from the checkpoint; NULL with KeyError, which names the nearest ones. */
const qr_tensor *qr_require_tensor(PyObject *self, PyObject *key);

/* checkpoint_info.c */
PyObject *qr_tensor_info(PyObject *self, PyObject *key);
PyObject *qr_new_tensor_info_type(void);
extern PyGetSetDef qr_checkpoint_getset[];

/* save.c: NumPy's number of an element type, or -1 for those it has no arrays of; the element type an array is stored
 * as, or QR_FILE_DTYPES. */
int qr_file_typenum(const qr_state *state, qr_file_dtype dtype);
qr_file_dtype qr_file_dtype_of(const qr_state *state, PyArrayObject *array);

int qr_add_save_safetensors(PyObject *module);

#endif
