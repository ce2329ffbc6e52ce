/* Sixteen floats as four NEON registers, which every aarch64 has. Included by lanes.h. */
#include <arm_neon.h>

typedef struct lanes {
    float32x4_t v[4];
} lanes;

QR_INLINE lanes lanes_set(float a)
{
    const float32x4_t v = vdupq_n_f32(a);
    return (lanes){{v, v, v, v}};
}

QR_INLINE lanes lanes_load(const float *p)
{
    return (lanes){{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}

QR_INLINE void lanes_store(float *p, lanes a)
{
    vst1q_f32(p, a.v[0]);
    vst1q_f32(p + 4, a.v[1]);
    vst1q_f32(p + 8, a.v[2]);
    vst1q_f32(p + 12, a.v[3]);
}

QR_INLINE lanes lanes_add(lanes a, lanes b)
{
    return (lanes){
        {vaddq_f32(a.v[0], b.v[0]), vaddq_f32(a.v[1], b.v[1]), vaddq_f32(a.v[2], b.v[2]), vaddq_f32(a.v[3], b.v[3])}};
}

QR_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return (lanes){
        {vsubq_f32(a.v[0], b.v[0]), vsubq_f32(a.v[1], b.v[1]), vsubq_f32(a.v[2], b.v[2]), vsubq_f32(a.v[3], b.v[3])}};
}

QR_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){
        {vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1]), vmulq_f32(a.v[2], b.v[2]), vmulq_f32(a.v[3], b.v[3])}};
}

QR_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){{vfmaq_f32(c.v[0], a.v[0], b.v[0]), vfmaq_f32(c.v[1], a.v[1], b.v[1]),
                    vfmaq_f32(c.v[2], a.v[2], b.v[2]), vfmaq_f32(c.v[3], a.v[3], b.v[3])}};
}

/* Not vmaxq, which gives NaN where one is. */
QR_INLINE float32x4_t lanes_larger(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

QR_INLINE lanes lanes_max(lanes a, lanes b)
{
    return (lanes){{lanes_larger(a.v[0], b.v[0]), lanes_larger(a.v[1], b.v[1]), lanes_larger(a.v[2], b.v[2]),
                    lanes_larger(a.v[3], b.v[3])}};
}

/* Two steps of the tree, each of which adds adjacent pairs: sums of four. */
QR_INLINE float32x4_t lanes_fours(lanes a)
{
    return vpaddq_f32(vpaddq_f32(a.v[0], a.v[1]), vpaddq_f32(a.v[2], a.v[3]));
}

/* The tree over the lanes of four sums at once. */
QR_INLINE void lanes_sum4(float *out, lanes a, lanes b, lanes c, lanes d)
{
    const float32x4_t ab = vpaddq_f32(lanes_fours(a), lanes_fours(b)), cd = vpaddq_f32(lanes_fours(c), lanes_fours(d));
    vst1q_f32(out, vpaddq_f32(ab, cd));
}

/* The tree over the lanes. */
QR_INLINE float lanes_sum(lanes a)
{
    const float32x4_t fours = lanes_fours(a), eights = vpaddq_f32(fours, fours);
    return vgetq_lane_f32(eights, 0) + vgetq_lane_f32(eights, 1);
}
