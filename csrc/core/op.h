/* Signatures: parse one, unify the arrays of a call with it, size its outputs.  No Python.h, no kernels. */
#ifndef QR_OP_H
#define QR_OP_H

#include "dtype.h"

/* "rms_norm(x[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f"
 *   f  float32 activation, contiguous          s  float32, last dimension contiguous, other strides free (caches)
 *   v  small vector, widened to float32        w  matrix as stored: float32, bfloat16 or float16
 *   i  int64                                   d  float64
 *   ?  optional input, or output computed only when asked for (with the same arithmetic)
 *   _  a leading underscore marks scratch: allocated for the call, not returned
 * Dimensions are letters A-Z, a number, `W-1` or `W+1`, `*` (any leading dimensions) or `#` (threads). */
typedef struct qr_dim {
    char letter;    /* 'A'..'Z', '*', '#', or 0 for a plain number */
    int64_t offset; /* added to the letter's value; the number itself when letter is 0 */
} qr_dim;

typedef struct qr_param {
    char name[24];
    char kind; /* f s v w i d, or 0 for a scalar */
    bool optional, output, scratch, has_default;
    int slot; /* index into qr_call.array or qr_call.scalar */
    int ndim;
    qr_dim dim[QR_MAX_DIMS];
    double value; /* default of a scalar */
} qr_param;

typedef struct qr_signature {
    char name[32];
    int params, inputs, arrays, scalars; /* params: everything before "->" first, then outputs and scratch */
    qr_param param[QR_MAX_ARRAYS + QR_MAX_SCALARS];
} qr_signature;

/* Dimensions that `*` stands for in one call. */
typedef struct qr_star {
    int ndim; /* -1 until the first array fixed it */
    int64_t shape[QR_MAX_DIMS];
} qr_star;

int qr_signature_parse(const char *text, qr_signature *out, qr_error *error);

/* Unify every input array that is present with the signature; fills call->dim. */
int qr_bind_inputs(const qr_signature *signature, qr_call *call, qr_star *star, qr_error *error);

/* Shape and dtype of one output or scratch array, from the bound dimensions. */
int qr_bind_output(const qr_signature *signature, const qr_param *param, const qr_call *call, const qr_star *star,
                   qr_array *out, qr_error *error);

/* "x[*,D]" as text, for messages. Returns `buffer`. */
const char *qr_param_text(const qr_param *param, char *buffer, size_t size);

#endif
