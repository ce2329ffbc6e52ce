/* Causal depthwise convolution over time, and the window of inputs it carries from call to call. */
#include "kernel.h"

/* What a token does to a state that moves along the sequence. */
typedef enum step_code { STEP_SKIP = 0, STEP_ADVANCE = 1, STEP_RESTART = 2 } step_code;

/* True when every code is one of the three; otherwise the error is set. */
static bool steps_are_valid(qr_call *call, const int64_t *step, int64_t n, int64_t T)
{
    for (int64_t i = 0; step != NULL && i < n; i++)
        if (step[i] < STEP_SKIP || step[i] > STEP_RESTART) {
            qr_fail(call->error, QR_BAD_INPUT,
                    "%s: step of token %lld of row %lld is not a step code\n    found    %lld\n"
                    "    expected 0 skip, 1 advance or 2 restart",
                    call->name, (long long)(i % T), (long long)(i / T), (long long)step[i]);
            return false;
        }
    return true;
}

enum { CONV_BLOCK = 64 }; /* channels that run through the whole prompt together */

typedef struct conv_task {
    float *y, *next, *tap, *ring; /* tap[threads,W,64]: weights by tap; ring[threads,W,64]: the last W inputs */
    const float *x, *w, *window;
    const int64_t *step;
    int64_t T, C, W, blocks;
} conv_task;

/* y[t,c] = w[c,0] x[t-W+1,c] + ... + w[c,W-1] x[t,c]: oldest tap first, one chain of fused multiply-adds from zero */
QR_INLINE void conv_block(const conv_task *task, int64_t b, int64_t block, int thread, const int64_t W)
{
    const int64_t T = task->T, C = task->C;
    const int64_t c0 = block * CONV_BLOCK, width = C - c0 < CONV_BLOCK ? C - c0 : CONV_BLOCK;
    const size_t bytes = (size_t)width * sizeof(float);
    float *const tap = task->tap + thread * W * CONV_BLOCK, *const ring = task->ring + thread * W * CONV_BLOCK;

    memset(ring, 0, (size_t)(W * CONV_BLOCK) * sizeof *ring);
    if (width < CONV_BLOCK)
        memset(tap, 0, (size_t)(W * CONV_BLOCK) * sizeof *tap);
    for (int64_t i = 0; i < W; i++)
        for (int64_t c = 0; c < width; c++)
            tap[i * CONV_BLOCK + c] = task->w[(c0 + c) * W + i];
    for (int64_t i = 0; task->window != NULL && i < W - 1; i++)
        for (int64_t c = 0; c < width; c++)
            ring[i * CONV_BLOCK + c] = task->window[(b * C + c0 + c) * (W - 1) + i];
    int64_t newest = W - 1; /* slot the next input goes to; the oldest input of its window is in the slot after it */
    for (int64_t t = 0; t < T; t++) {
        const int64_t code = task->step != NULL ? task->step[b * T + t] : STEP_ADVANCE;
        float *const y = task->y + (b * T + t) * C + c0;
        if (code == STEP_SKIP) {
            memset(y, 0, bytes);
            continue;
        }
        if (code == STEP_RESTART)
            memset(ring, 0, (size_t)(W * CONV_BLOCK) * sizeof *ring);
        memcpy(ring + newest * CONV_BLOCK, task->x + (b * T + t) * C + c0, bytes);
        for (int64_t c = 0; c < width; c += LANES) {
            lanes sum = lanes_set(0);
            for (int64_t i = 0, slot = newest; i < W; i++) {
                slot = slot + 1 < W ? slot + 1 : 0;
                sum = lanes_fma(lanes_load(tap + i * CONV_BLOCK + c), lanes_load(ring + slot * CONV_BLOCK + c), sum);
            }
            if (c + LANES <= width)
                lanes_store(y + c, sum);
            else
                lanes_store_tail(y + c, sum, width - c);
        }
        newest = newest + 1 < W ? newest + 1 : 0;
    }
    for (int64_t c = 0; task->next != NULL && c < width; c++)
        for (int64_t i = 0; i < W - 1; i++)
            task->next[(b * C + c0 + c) * (W - 1) + i] = ring[(newest + 1 + i) % W * CONV_BLOCK + c];
}

static void conv_blocks(void *context, int64_t begin, int64_t end, int thread)
{
    const conv_task *const task = context;
    for (int64_t i = begin; i < end; i++)
        if (task->W == 4) /* the width of every published model: its loops over taps unroll */
            conv_block(task, i / task->blocks, i % task->blocks, thread, 4);
        else
            conv_block(task, i / task->blocks, i % task->blocks, thread, task->W);
}

QR_OP(causal_conv1d,
      "causal_conv1d(x[B,T,C]:f, w[C,1,W]:v, window[B,C,W-1]:f?, step[B,T]:i?) -> y[B,T,C]:f, next[B,C,W-1]:f?, "
      "_tap[#,W,64]:f, _ring[#,W,64]:f",
      "y[t] = sum of w[tap] x[t-W+1+tap]; step 0 skips a token, 1 advances, 2 forgets the window first")
{
    const int64_t B = DIM('B'), T = DIM('T'), C = DIM('C'), W = DIM('W');
    conv_task task = {OUT(0), OUT(1),    OUT(2), OUT(3), IN(0), IN(1),
                      IN(2),  IN_I64(3), T,      C,      W,     (C + CONV_BLOCK - 1) / CONV_BLOCK};
    if (W < 1) {
        qr_fail(call->error, QR_BAD_SHAPE, "causal_conv1d: w has no taps\n    expected W >= 1");
        return;
    }
    if (steps_are_valid(call, task.step, B * T, T))
        qr_parallel(call, B * task.blocks, grain_of(CONV_BLOCK * (double)(T + W)), conv_blocks, &task);
}
