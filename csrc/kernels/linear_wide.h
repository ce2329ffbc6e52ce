/* Many tokens in linear.c: both sides packed class by class, then a blocked product.
 *
 * Class c of a panel is a matrix of its own, depth x width: what a class needs lies in one piece, so walking K class by
 * class is an ordinary blocked product with inner length I/16, and a finished tile climbs the tree like a carry. */

LINEAR_INLINE int64_t wide_depth(const linear *l)
{
    return l->dots ? l->steps : 2 * l->steps;
}

LINEAR_INLINE int wide_width(const linear *l, int64_t panel)
{
    const int64_t left = l->M - panel * PANEL;
    return left >= PANEL ? PANEL : (int)((left + VECTOR - 1) / VECTOR * VECTOR);
}

LINEAR_INLINE float *wide_panel(const linear *l, int64_t panel)
{
    return panel < l->M / PANEL ? l->px + panel * PANEL * STEP * l->steps : l->ragged;
}

/* Eight rows (of x or W) from `first` on, those behind the end taken as the last one: their results are dropped. */
static void strip_of(const char *rows[8], const void *base, int64_t row_bytes, int64_t first, int64_t count)
{
    for (int i = 0; i < 8; i++) {
        const int64_t row = first + i < count ? first + i : count - 1;
        rows[i] = (const char *)base + row * row_bytes;
    }
}

static void wide_pack(void *context, int64_t begin, int64_t end, int thread)
{
    const linear *l = context;
    const char *rows[8];
    (void)thread;

    for (int64_t panel = begin; panel < end; panel++) {
        const int width = wide_width(l, panel);
        const pack_layout to = {.class_stride = wide_depth(l) * width, .depth_stride = width, .half_stride = 4};
        for (int t = 0; t < width; t += 8) {
            strip_of(rows, l->x, l->x_stride * (int64_t)sizeof(float), panel * PANEL + t, l->M);
            pack_strip(wide_panel(l, panel) + t, &to, rows, l->I, QR_F32, l->dots);
        }
    }
}

/* Eight rows x eight tokens of a finished tile; the rows of a group are `width` floats apart. */
LINEAR_INLINE void store_square(const linear *l, int64_t token, int64_t row, const float *done, int64_t width)
{
    const __m256 bias = l->bias != NULL ? _mm256_loadu_ps(l->bias + row) : _mm256_setzero_ps();
    __m256 v[8];

#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
        v[r] = _mm256_loadu_ps(done + r / GROUP * GROUP * PANEL + r % GROUP * width);
    transpose8(v);
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
        const __m256 sum = l->bias != NULL ? _mm256_add_ps(v[t], bias) : v[t];
        const __m256 number = _mm256_cmp_ps(sum, sum, _CMP_ORD_Q);
        _mm256_storeu_ps(l->y + (token + t) * l->O + row, _mm256_blendv_ps(_mm256_set1_ps(NAN), sum, number));
    }
}

/* The outputs of `rows` rows from `row` on, for the tokens of a panel. */
static void store_panel(const linear *l, int64_t panel, int64_t row, int rows, const float *done)
{
    const int width = wide_width(l, panel);
    const int64_t first = panel * PANEL, tokens = l->M - first < PANEL ? l->M - first : PANEL;
    const bool plain = !l->add && !l->narrowed;

    for (int r = 0; r < rows; r += 8, done += 8 * PANEL) {
        int64_t t = 0;
        for (; plain && rows - r >= 8 && t + 8 <= tokens; t += 8)
            store_square(l, first + t, row + r, done + t, width);
        for (; t < tokens; t++)
            for (int i = 0; i < 8 && r + i < rows; i++)
                linear_store(l, first + t, row + r + i, done[i / GROUP * GROUP * PANEL + i % GROUP * width + t]);
    }
}

/* One block of at most BLOCK_ROWS rows of W against all tokens. */
static __attribute__((noinline)) void wide_block(const linear *l, int64_t row, int rows, float *pw, float *part)
{
    const int groups = (rows + GROUP - 1) / GROUP;
    const int64_t depth = wide_depth(l), panels = (l->M + PANEL - 1) / PANEL;
    /* an odd number of cache lines, so that the sixteen classes being written do not meet in one cache set */
    const int64_t class_stride = ((groups + 8 / GROUP - 1) / (8 / GROUP) * 8 * depth + 15) / 16 * 16 | 16;
    const pack_layout to = {
        .class_stride = class_stride, .depth_stride = GROUP, .half_stride = GROUP == 4 ? depth * 4 : 4};
    const char *strip[8];

    for (int r = 0; r < rows; r += 8) {
        strip_of(strip, l->w, l->row_bytes, row + r, row + rows);
        pack_strip(pw + r * depth, &to, strip, l->I, l->dtype, l->dots);
    }
    for (int64_t first = 0; first < panels; first += BLOCK_TOKENS / PANEL) {
        const int64_t end = panels - first < BLOCK_TOKENS / PANEL ? panels : first + BLOCK_TOKENS / PANEL;

        for (int c = 0; c < 16; c++)
            for (int64_t panel = first; panel < end; panel++) {
                const int width = wide_width(l, panel);
                const float *x = wide_panel(l, panel) + c * depth * width;
                for (int g = 0; g < groups; g++) {
                    float *tile = part + ((panel - first) * groups + g) * GROUP * PANEL;
                    wide_tile(tile, pw + c * class_stride + g * GROUP * depth, x, depth, width / VECTOR, c, l->dots);
                }
            }
        for (int64_t panel = first; panel < end; panel++)
            store_panel(l, panel, row, rows, part + 4 * PART_LEVEL + (panel - first) * groups * GROUP * PANEL);
    }
}

static void wide_work(void *context, int64_t begin, int64_t end, int thread)
{
    const linear *l = context;
    const flushing_state before = enter_flushing();

    for (int64_t block = begin; block < end; block++) {
        const int64_t row = block * l->rows, rows = l->O - row < l->rows ? l->O - row : l->rows;
        wide_block(l, row, (int)rows, l->pw + thread * l->pw_size, l->part + (int64_t)thread * 5 * PART_LEVEL);
    }
    leave_flushing(before);
}

static void linear_wide(qr_call *call, linear *l)
{
    if (l->O == 0) /* no block would have a row, and blocks are counted by their rows */
        return;
    const int64_t share = ((l->O + call->threads - 1) / call->threads + 7) / 8 * 8;
    l->rows = share < BLOCK_ROWS ? share : BLOCK_ROWS;
    qr_parallel(call, (l->M + PANEL - 1) / PANEL, 1, wide_pack, l);
    qr_parallel(call, (l->O + l->rows - 1) / l->rows, 1, wide_work, l);
}
