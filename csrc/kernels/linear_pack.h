/* Loading and packing for linear.c with AVX2: eight pairs of any stored type as floats, and the transposition that turns
 * rows into classes. */

/* The high (odd) elements of the eight pairs at p. Separate from the low ones so that a loop may use them in turn without
 * keeping both in registers. */
LINEAR_INLINE __m256 high8(const void *p, qr_dtype dtype)
{
    if (dtype == QR_BF16)
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), _mm256_set1_epi32((int)0xffff0000u)));
    if (dtype == QR_F16) {
        const __m256i pairs = _mm256_srli_epi32(_mm256_loadu_si256(p), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(pairs, pairs), 0xd8);
        return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    }
    const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps((const float *)p + 8);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8));
}

LINEAR_INLINE __m256 low8(const void *p, qr_dtype dtype)
{
    if (dtype == QR_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16));
    if (dtype == QR_F16) {
        const __m256i pairs = _mm256_and_si256(_mm256_loadu_si256(p), _mm256_set1_epi32(0xffff));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(pairs, pairs), 0xd8);
        return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    }
    const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps((const float *)p + 8);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xd8));
}

/* v[i] lane j becomes v[j] lane i */
LINEAR_INLINE void transpose8(__m256 *v)
{
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* Where element d of the chain of class c of row r goes, in floats: c * class_stride + d * depth_stride + r, rows 4 to 7
 * half_stride after rows 0 to 3. */
typedef struct pack_layout {
    int64_t class_stride, depth_stride, half_stride;
} pack_layout;

LINEAR_INLINE void store_classes(float *out, const pack_layout *to, const __m256 *v)
{
#pragma GCC unroll 8
    for (int c = 0; c < 8; c++) {
        _mm_storeu_ps(out + c * to->class_stride, _mm256_castps256_ps128(v[c]));
        _mm_storeu_ps(out + c * to->class_stride + to->half_stride, _mm256_extractf128_ps(v[c], 1));
    }
}

/* One step of eight rows: 32 elements of each at rows[i] + offset. */
LINEAR_INLINE void pack_step(float *out, const pack_layout *to, const char *const rows[8], int64_t offset,
                             qr_dtype dtype, bool dots)
{
    const int64_t half_bytes = 16 * element_size(dtype);
    for (int half = 0; half < 2; half++, out += 8 * to->class_stride, offset += half_bytes) {
        __m256 high[8], low[8];
        if (dtype == QR_BF16) { /* a pair is one 32-bit word: move pairs, then take them apart */
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                high[i] = _mm256_loadu_ps((const float *)(const void *)(rows[i] + offset));
            transpose8(high);
            if (!dots) {
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const __m256i pairs = _mm256_castps_si256(high[i]);
                    high[i] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
                    low[i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
                }
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                high[i] = high8(rows[i] + offset, dtype);
                low[i] = low8(rows[i] + offset, dtype);
                if (dots)
                    high[i] = _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(high[i]),
                                                                  _mm256_srli_epi32(_mm256_castps_si256(low[i]), 16)));
            }
            transpose8(high);
            if (!dots)
                transpose8(low);
        }
        store_classes(out, to, high);
        if (!dots)
            store_classes(out + to->depth_stride, to, low);
    }
}

LINEAR_INLINE void pack_strip_as(float *out, const pack_layout *to, const char *const rows[8], int64_t I,
                                 qr_dtype dtype, bool dots)
{
    const int64_t full = I / STEP, step_bytes = STEP * element_size(dtype), tail = I % STEP * element_size(dtype);
    const int64_t step_out = (dots ? 1 : 2) * to->depth_stride;

    for (int64_t s = 0; s < full; s++)
        pack_step(out + s * step_out, to, rows, s * step_bytes, dtype, dots);
    if (tail > 0) {
        char last[8][STEP * sizeof(float)];
        const char *ends[8];
        memset(last, 0, sizeof last);
        for (int i = 0; i < 8; i++) {
            memcpy(last[i], rows[i] + full * step_bytes, (size_t)tail);
            ends[i] = last[i];
        }
        pack_step(out + full * step_out, to, ends, 0, dtype, dots);
    }
}

static void pack_strip(float *out, const pack_layout *to, const char *const rows[8], int64_t I, qr_dtype dtype,
                       bool dots)
{
    if (dtype == QR_F32 && dots)
        pack_strip_as(out, to, rows, I, QR_F32, true);
    else if (dtype == QR_F32)
        pack_strip_as(out, to, rows, I, QR_F32, false);
    else if (dtype == QR_F16)
        pack_strip_as(out, to, rows, I, QR_F16, false);
    else if (dots)
        pack_strip_as(out, to, rows, I, QR_BF16, true);
    else
        pack_strip_as(out, to, rows, I, QR_BF16, false);
}

/* The roots of eight trees over sixteen class sums each, which lie one behind the other: neighbours are added, then those
 * sums, and so on, which is the order of class_tree. */
LINEAR_INLINE void eight_trees(float *roots, const float *sums)
{
    __m128 halves[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, sums += 32) {
        const __m256 a = _mm256_hadd_ps(_mm256_loadu_ps(sums), _mm256_loadu_ps(sums + 8));
        const __m256 b = _mm256_hadd_ps(_mm256_loadu_ps(sums + 16), _mm256_loadu_ps(sums + 24));
        const __m256 fours = _mm256_hadd_ps(a, b);
        halves[i] = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
    }
    _mm_storeu_ps(roots, _mm_hadd_ps(halves[0], halves[1]));
    _mm_storeu_ps(roots + 4, _mm_hadd_ps(halves[2], halves[3]));
}
