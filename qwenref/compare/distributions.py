"""Tails and quantiles of the distributions that gates are made of, in double precision.

Continued fractions and series of the incomplete beta and gamma functions: NIST Digital Library of Mathematical
Functions, 8.17.22, 8.11.4 and 8.9.2.
"""

import functools
from math import erfc, exp, lgamma, log, log1p, sqrt

import numpy as np

_STEPS, _SMALL = 500, 1e-300


def one_more(sizes, chance):
    """(low, high): what one size more is below, or above, with this probability each; (inf, 0) of fewer than two.

    All are taken as draws of one log-normal distribution, of which only `sizes` [J] are known.
    """
    middle, spread, freedom = _one_more(sizes)
    if freedom < 1:
        return float("inf"), 0.0
    reach = student_quantile(1 - chance, freedom) * spread
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


def chance_of_one_more(sizes, value):
    """The chance that one size more is `value` or larger, by the same distribution.

    0 where fewer than two are known: there a gate alone decides.
    """
    middle, spread, freedom = _one_more(sizes)
    if freedom < 1 or not value > 0:
        return 0.0 if value > 0 else 1.0
    away = np.log(value) - middle
    if not spread > 0:
        return 0.0 if away > 0 else 1.0
    tail = student_tail(abs(away) / spread, freedom)
    return tail if away > 0 else 1 - tail


def _one_more(sizes):
    """(middle, spread, degrees of freedom) of Student's t of the logarithm of one size more; 0 of fewer than two."""
    sizes = np.asarray(sizes, np.float64)
    logs = np.log(sizes[np.isfinite(sizes) & (sizes > 0)])
    if len(logs) < 2:
        return 0.0, 0.0, 0
    return logs.mean(), logs.std(ddof=1) * np.sqrt(1 + 1 / len(logs)), len(logs) - 1


def largest(sizes, chance):
    """What the largest size of one row more exceeds with this probability; `sizes` [J, N] are rows like it.

    Beyond its twentieth part the distribution is taken to fall as a power of the size, by Hill's estimator: a few rows
    say little of their largest values, and much of how these thin out.
    """
    ordered = np.sort(sizes, axis=None)[::-1]
    count = min(max(8, ordered.size // 20), ordered.size - 1)
    if count < 1 or not ordered[count] > 0:
        return 0.0
    index = np.log(ordered[:count] / ordered[count]).mean()
    return float(ordered[count] * (count / (len(sizes) * chance)) ** index)


@functools.lru_cache
def student_quantile(p, freedom):
    """t with P(T <= t) = p, 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while 1 - student_tail(high, freedom) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - student_tail(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def student_tail(t, freedom):
    """P(T > t) of Student's t, t >= 0."""
    return 0.5 * _beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def normal_tail(z):
    """P(Z > z) of the normal distribution."""
    return 0.5 * erfc(z / sqrt(2))


def chi_square_tail(x, freedom):
    """P(X > x) of the chi-square distribution."""
    return _gamma_tail(freedom / 2, x / 2) if x > 0 else 1.0


def anderson_darling(values):
    """(A squared, probability of more) of values that are uniform on [0, 1] by hypothesis.

    The probability is Marsaglia and Marsaglia's approximation of the limiting distribution (Journal of Statistical
    Software 9, 2004), off by less than 0.001 from 8 values on.
    """
    u = np.clip(np.sort(np.asarray(values, np.float64)), 1e-300, 1 - 1e-16)
    n = len(u)
    odd = 2 * np.arange(1, n + 1) - 1
    a = float(-n - np.mean(odd * (np.log(u) + np.log1p(-u[::-1]))))
    return a, 1 - _anderson_darling_limit(a)


def _anderson_darling_limit(a):
    if a <= 0:
        return 0.0
    if a < 2:
        series = 2.00012 + (0.247105 - (0.0649821 - (0.0347962 - (0.011672 - 0.00168691 * a) * a) * a) * a) * a
        return exp(-1.2337141 / a) / sqrt(a) * series
    return exp(-exp(1.0776 - (2.30695 - (0.43424 - (0.082433 - (0.008056 - 0.0003146 * a) * a) * a) * a) * a))


def holm(probabilities, alpha=0.01):
    """[bool]: which hypotheses are rejected by Holm's procedure at this rate for the whole family."""
    order = sorted(range(len(probabilities)), key=lambda n: probabilities[n])
    rejected = [False] * len(order)
    for rank, n in enumerate(order):
        if probabilities[n] > alpha / (len(order) - rank):
            break
        rejected[n] = True
    return rejected


def _beta(a, b, x):
    """The regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _gamma_tail(a, x):
    """The regularised upper incomplete gamma function."""
    front = exp(-x + a * log(x) - lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, _STEPS):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return 1 - front * total
    b = x + 1 - a
    c, d = 1 / _SMALL, 1 / b
    value = d
    for n in range(1, _STEPS):
        term = -n * (n - a)
        b += 2
        d = 1 / _away(term * d + b)
        c = _away(b + term / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _away(x):
    return x if abs(x) > _SMALL else _SMALL
