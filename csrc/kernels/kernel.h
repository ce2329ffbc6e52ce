/* What every kernel file begins with: how an op is declared and how it reads its call.
 * A kernel file holds static loops and QR_OP bodies; it allocates nothing, does no I/O, keeps no state and never sees
 * Python.h. Each file is compiled once per instruction level by the level_*.c files, which include it. */
#ifndef QR_KERNEL_H
#define QR_KERNEL_H

#include "../half.h"
#include "../qr.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* QR_OP(name, signature, doc) { body using call }: defines the op and its row of the table. */
#define QR_OP(op, signature_text, doc_text)                                                                            \
    static void qr_run_##op(qr_call *call);                                                                            \
    static const qr_op qr_op_##op = {#op, signature_text, doc_text, qr_run_##op};                                      \
    static void qr_run_##op(qr_call *call)

/* Typed access to the arrays of `call`, in the order of the signature. */
#define IN(i) ((const float *)call->array[i].data)
#define IN_I64(i) ((const int64_t *)call->array[i].data)
#define IN_F64(i) ((const double *)call->array[i].data)
#define OUT(i) ((float *)call->array[call->inputs + (i)].data)
#define OUT_I64(i) ((int64_t *)call->array[call->inputs + (i)].data)
#define OUT_F64(i) ((double *)call->array[call->inputs + (i)].data)
#define ARRAY(i) (&call->array[i])
#define SCALAR(i) (call->scalar[i])
#define DIM(letter) QR_DIM(call, letter)

#endif
