/* y = x Wᵀ + b through the system's BLAS: a second opinion on linear.c, with no promise about bits.  Each block of W is
 * widened to float32 first. */
#include <cblas.h>
#include <limits.h>
#undef I /* the imaginary unit, which comes with that header */

/* Present in OpenBLAS only. Threads are ours: those of the library would be a second pool fighting for the same cores. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));
extern int openblas_get_num_threads(void) __attribute__((weak));

enum { BLAS_ROWS = 128 };

typedef struct linear_blas_job {
    const float *x, *bias;
    const char *w;
    float *y, *wide;
    int64_t M, O, I;
    qr_dtype dtype;
} linear_blas_job;

static void linear_blas_work(void *context, int64_t begin, int64_t end, int thread)
{
    const linear_blas_job *j = context;

    for (int64_t block = begin; block < end; block++) {
        const int64_t row = block * BLAS_ROWS, rows = j->O - row < BLAS_ROWS ? j->O - row : BLAS_ROWS;
        const char *stored = j->w + row * j->I * element_size(j->dtype);
        const float *w = (const float *)(const void *)stored;
        if (j->dtype != QR_F32) {
            float *wide = j->wide + thread * BLAS_ROWS * j->I;
            qr_widen(wide, stored, j->dtype, rows * j->I);
            w = wide;
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)j->M, (int)rows, (int)j->I, 1.0f, j->x, (int)j->I, w,
                    (int)j->I, 0.0f, j->y + row, (int)j->O);
        if (j->bias != NULL)
            for (int64_t m = 0; m < j->M; m++)
                for (int64_t r = row; r < row + rows; r++)
                    j->y[m * j->O + r] += j->bias[r];
    }
}

QR_OP(linear_blas, "linear_blas(x[*,I]:f, w[O,I]:w, b[O]:v?) -> y[*,O]:f, _w[#,128,I]:f",
      "y = x w^T + b by the system's BLAS in float32; close to linear, with bits that depend on its version and the "
      "sizes")
{
    linear_blas_job j = {
        .x = IN(0),
        .w = ARRAY(1)->data,
        .bias = IN(2),
        .y = OUT(0),
        .wide = OUT(1),
        .M = DIM('*'),
        .O = DIM('O'),
        .I = DIM('I'),
        .dtype = ARRAY(1)->dtype,
    };
    if (j.M > INT_MAX || j.O > INT_MAX || j.I > INT_MAX) {
        qr_fail(call->error, QR_BAD_SHAPE,
                "%s: a dimension is beyond what BLAS counts\n    found    %lld x %lld times %lld x %lld\n"
                "    expected at most %d each\n    do       use linear",
                call->name, (long long)j.M, (long long)j.I, (long long)j.O, (long long)j.I, INT_MAX);
        return;
    }
    if (j.I == 0) { /* no product to form, and leading dimensions of 0 are an error in BLAS */
        for (int64_t i = 0; i < j.M * j.O; i++)
            j.y[i] = j.bias != NULL ? j.bias[i % j.O] : 0.0f;
        return;
    }
    if (j.M == 0)
        return;
    /* The count belongs to the whole process. Calls side by side leave it as they found it: each puts back what it read
     * unless that was 1, and puts it back after its own 1. One of them may for a while run on the library's threads. */
    const bool openblas = openblas_set_num_threads != NULL && openblas_get_num_threads != NULL;
    const int before = openblas ? openblas_get_num_threads() : 0;
    if (openblas && before != 1)
        openblas_set_num_threads(1);
    qr_parallel(call, (j.O + BLAS_ROWS - 1) / BLAS_ROWS, 1, linear_blas_work, &j);
    if (openblas && before != 1)
        openblas_set_num_threads(before);
}
