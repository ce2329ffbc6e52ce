/* GELU in its two forms, as straight-line arithmetic like expm.h. Holds no ops.
 *
 * Both are x less what lies behind x: with a = |x| and h = a tail(a), gelu(x) = x - h for x > 0 and -h below, so that
 * the small results of negative arguments are as good, relative to themselves, as the others. Exponents are formed with
 * their own rounding errors beside them, since exp would multiply those.
 * Largest errors over all float32 arguments, in units in the last place of the result: qr_gelu 1.0, qr_gelu_tanh 1.3. */
#ifndef QR_GELU_H
#define QR_GELU_H

/* x where it is above zero, else the zero of its sign */
QR_INLINE float qr_above_zero(float x)
{
    return qr_select(qr_sign_mask(x), -0.0f, x);
}

/* |x|, at most `limit`. A condition would become a branch to what is constant there, and branches stop SIMD. */
QR_INLINE float qr_size_up_to(float x, float limit)
{
    const float size = fabsf(x);
    return qr_select(0u - (uint32_t)(size > limit), limit, size);
}

/* x Phi(x), Phi being the normal distribution: h = a e^(-a^2/2) q(a), and q falls from 1/2 like 1/a. What follows the
 * exponential is in double: near zero, float32 would lose some units in the differences alone. */
QR_INLINE float qr_gelu(float x)
{
    const float a = qr_size_up_to(x, 15.0f); /* from there on h is zero */
    const float square = a * a, square_low = fmaf(a, a, -square);
    const qr_exp_parts e = qr_exp_split(-0.5f * square);
    const double power = (double)e.p + (double)fmaf(e.p, -0.5f * square_low, e.tail);
    const double t = ((double)a - 4.0) / ((double)a + 4.0);
    double q = 1.189351059e-05;
    q = q * t - 4.712211545e-05;
    q = q * t - 0.0001733444096;
    q = q * t + 0.0006419992287;
    q = q * t + 0.0005028091236;
    q = q * t - 0.008493082689;
    q = q * t + 0.03086554714;
    q = q * t - 0.07170731483;
    q = q * t + 0.1243792115;
    q = q * t - 0.1703977232;
    q = q * t + 0.09441064172;
    const int32_t half = e.n >> 1;
    const double scale = (double)qr_power_of_two(half) * (double)qr_power_of_two(e.n - half);
    return (float)((double)qr_above_zero(x) - (double)a * q * power * scale);
}

#define QR_SLOPE_HIGH 0x1.988454p+0f  /* 2 sqrt(2/pi) */
#define QR_SLOPE_LOW -0x1.857936p-25f /* what that lost */
#define QR_CUBE_HIGH 0x1.2444f2p-4f   /* 0.044715 times it */
#define QR_CUBE_LOW 0x1.49b16ap-29f

/* x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(w), w being twice the argument of tanh: h = a sigmoid(-w). */
QR_INLINE float qr_gelu_tanh(float x)
{
    const float a = qr_size_up_to(x, 12.0f);
    const float square = a * a, square_low = fmaf(a, a, -square);
    const float cube = QR_CUBE_HIGH * square;
    const float cube_low = fmaf(QR_CUBE_HIGH, square, -cube) + fmaf(QR_CUBE_HIGH, square_low, QR_CUBE_LOW * square);
    const float sum = QR_SLOPE_HIGH + cube, part = sum - QR_SLOPE_HIGH;
    const float sum_low = ((QR_SLOPE_HIGH - (sum - part)) + (cube - part)) + (cube_low + QR_SLOPE_LOW);
    const float w = a * sum, w_low = fmaf(a, sum, -w) + a * sum_low;
    qr_exp_parts e = qr_exp_split(-w);
    e.tail = fmaf(e.p, -w_low, e.tail);
    return qr_above_zero(x) - qr_logistic_of(e, ~0u, a);
}

#endif
