/* What the two checkpoint files of this folder share: element types of the format as NumPy's. Include after py.h. */
#ifndef QR_PY_CHECKPOINT_H
#define QR_PY_CHECKPOINT_H

#include "../core/safetensors.h"

/* NumPy's number of an element type, or -1 for those it has no arrays of. */
int qr_file_typenum(const qr_state *state, qr_file_dtype dtype);

/* The element type an array is stored as, or QR_FILE_DTYPES. */
qr_file_dtype qr_file_dtype_of(const qr_state *state, PyArrayObject *array);

int qr_add_save_safetensors(PyObject *module);

#endif
