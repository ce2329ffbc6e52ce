/* Included once by each level_*.c after it has chosen the instruction set: all kernels, then this level's table. */
#include "kernel.h"

#include "lanes.h"
#include "expm.h"
#include "gelu.h"

#define QR_PASTE_(a, b) a##b
#define QR_PASTE(a, b) QR_PASTE_(a, b)

/* Order of inclusion is order of dependence: later files may use the static loops of earlier ones. */
#include "linear.c"
#include "linear_parts.c"
#include "linear_f64.c"
#include "linear_blas.c"
#include "norm.c"
#include "pointwise.c"
#include "reduce.c"
#include "rope.c"
#include "attention.c"
#include "segments.c"
#include "vision.c"
#include "conv.c"
#include "delta.c"
#include "delta_chunked.c"

extern const qr_op *const QR_PASTE(qr_ops_, QR_LEVEL_NAME)[];
const qr_op *const QR_PASTE(qr_ops_, QR_LEVEL_NAME)[] = {
#define OP(name) &qr_op_##name,
#include "ops.h"
#undef OP
};
