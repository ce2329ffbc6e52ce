"""How far from its definition the result of an op may be, by counting roundings; and the numbers tests are made of.

U = 2^-24 is the largest relative error of one float32 rounding; a result that went through n of them carries at most
n U times the sum of the magnitudes it was made of.  Terms of second order (n^2 U^2, below 2e-9 of the first for the
sizes here) are covered by SECOND_ORDER.
"""

import math

import numpy as np

from qwenref import naive

U = 2.0**-24
SECOND_ORDER = 1.001
TINY = 2.0**-126  # what may be lost where a result, or a term of a linear map, is subnormal
ULP = 2 * U  # one unit in the last place, relative to the smallest number that has it
FUNCTION = 2 * ULP  # exp, sigmoid, silu, softplus: at most two units in the last place each


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def unit(*shape, seed=0):
    x = normal(*shape, seed=seed)
    return x / np.sqrt(np.maximum((x * x).sum(-1, keepdims=True), np.float32(1e-30)))


def f64(*arrays):
    return [None if a is None else np.asarray(a).astype(np.float64) for a in arrays]


def lanes(n):
    """Roundings of a term on its way into a sum of n in 16 lanes: its product, its chain, the tree of 16"""
    return 1 + math.ceil(n / 16) + 4


# ---------------------------------------------------------------------------------------------- bounds


def exact(y, **_):
    return 0 * y


def rounded(y, **_):
    return U * abs(y)


def bound_linear(y, x, w, b=None):
    """Class order: sixteen chains of fused multiply-adds over I/16 elements (pairs, so I/32 rounded up, twice), a tree
    of 16 and the bias. Subnormal terms count as zero."""
    x, w, b = f64(x, w, np.zeros(len(w)) if b is None else b)
    return (2 * math.ceil(x.shape[-1] / 32) + 4 + 1) * U * (abs(x) @ abs(w).T + abs(b)) + x.shape[-1] * TINY


def bound_linear_f64(y, x, w, b=None):
    """Class order in float64; as many roundings again as the definition's own sum, in whatever order NumPy takes it."""
    x, w, b = f64(x, w, np.zeros(len(w)) if b is None else b)
    return (2 * math.ceil(x.shape[-1] / 32) + 5 + x.shape[-1] + 1) * 2.0**-53 * (abs(x) @ abs(w).T + abs(b))


def bound_linear_parts(y, x, w, b=None, parts=2, partials=0, **_):
    """As linear, a block being shorter, and one addition for each block. Where sums of blocks are rounded to bfloat16,
    the op and the definition round numbers that differ, in the worst case to neighbours: 2^-7 of each sum apart."""
    x, w, b = f64(x, w, np.zeros(len(w)) if b is None else b)
    magnitude = abs(x) @ abs(w).T + abs(b)
    bound = bound_linear(y, x, w, b) + parts * U * magnitude
    return bound + partials * (2.0**-7 * magnitude + parts * 2.0**-133)


def bound_linear_blas(y, x, w, b=None):
    """Any order at all: a term passes its product, at most I - 1 additions and the bias."""
    x, w, b = f64(x, w, np.zeros(len(w)) if b is None else b)
    return (x.shape[-1] + 1) * U * (abs(x) @ abs(w).T + abs(b))


def bound_norm(y, D, more):
    """Sum of squares: lanes, then / D and + eps (itself rounded); the root halves that and adds its own and the
    division's; then `more` products."""
    return ((lanes(D) + 3) / 2 + 2 + more) * U * abs(y) + TINY


def bound_softmax(x, y):
    """x - max is rounded, which exp turns into a relative error; exp; the sum averages those; one division. [*,D]"""
    d = abs(x - x.max(-1, keepdims=True, initial=-np.inf))
    relative = np.where(np.isfinite(d), U * d + FUNCTION, 0)
    return y * (relative + (y * relative).sum(-1, keepdims=True) + (lanes(x.shape[-1]) + 1) * U) + TINY


def bound_log_softmax(y, x):
    """As softmax for the log of the sum (absolute there), then that log, x - max and their difference are rounded."""
    (x,) = f64(x)
    d = abs(x - x.max(-1, keepdims=True, initial=-np.inf))
    p = np.exp(y)
    of_sum = (p * (U * d + FUNCTION)).sum(-1, keepdims=True) + lanes(x.shape[-1]) * U
    return U * (2 * abs(y) + 2 * d) + of_sum + ULP


def bound_delta_decay(y, a, A_log, dt_bias):
    """a + dt_bias is rounded: softplus passes that on times its slope, sigmoid. Softplus, exp, product."""
    a, A_log, dt_bias = f64(a, A_log, dt_bias)
    s = a + dt_bias
    return np.exp(A_log) * U * abs(s) * naive.sigmoid(s) + (2 * FUNCTION + U) * abs(y) + TINY


def bound_rope_frequencies(y, index, theta, width):
    """In double: the exponent carries up to four roundings, which the power turns into log(theta^..) as many."""
    return 2.0**-53 * (4 + 4 * abs(np.log(y))) * y


def bound_rope_table(cos, sin, positions, axis, f):
    """The angle is one double product, cos and sin of it are good to a few double roundings; then one to float32."""
    angle = abs(np.moveaxis(np.asarray(positions)[axis], 0, -1) * f)
    slack = 2.0**-53 * (angle + 4)
    return U * abs(cos) + slack, U * abs(sin) + slack


def bound_rope(y, x, cos, sin):
    """Two products and their sum: each product passes two roundings. What lies at 2F and beyond is copied."""
    x, cos, sin = map(abs, f64(x, cos, sin))
    F, cos, sin = cos.shape[-1], cos[:, :, None], sin[:, :, None]
    first, second, rest = x[..., :F], x[..., F : 2 * F], x[..., 2 * F :]
    return 2 * U * np.concatenate([first * cos + second * sin, second * cos + first * sin, 0 * rest], -1)


def bound_attention_scores(y, q, k, begin, end, scale):
    """A dot product over D in lanes, the scale rounded to float32, and the product with it"""
    magnitude = naive.attention_scores(abs(f64(q)[0]), abs(f64(k)[0]), begin, end, abs(scale))
    return np.where(np.isfinite(y), (lanes(q.shape[-1]) + 2) * U * np.where(np.isfinite(y), magnitude, 0), 0)


def bound_attention_softmax(y, s, begin, end):
    return seen(y, begin, end) * bound_softmax(np.where(seen(y, begin, end), f64(s)[0], -np.inf), y)


def bound_attention_mix(y, p, v, begin, end):
    """A sum over the keys in any order"""
    return (p.shape[-1] + 1) * U * naive.attention_mix(abs(f64(p)[0]), abs(f64(v)[0]), begin, end)


def bound_attention(y, p, q, k, v, begin, end, scale):
    """An error e of the scores becomes p (e + sum of p e); with the softmax's own it goes through v into the sum."""
    s = naive.attention_scores(q, k, begin, end, scale)
    e = bound_attention_scores(s, q, k, begin, end, scale)
    of_p = p * (e + (p * e).sum(-1, keepdims=True)) + bound_attention_softmax(p, s, begin, end)
    of_y = naive.attention_mix(of_p, abs(f64(v)[0]), begin, end) + bound_attention_mix(y, p, v, begin, end)
    return of_y, of_p


def seen(p, begin, end):
    """[B,1,T,S]: which keys each query may look at"""
    s = np.arange(p.shape[-1])
    return ((np.asarray(begin)[..., None] <= s) & (s < np.asarray(end)[..., None]))[:, None]


def bound_layer_norm(y, x, w, b, eps=1e-6):
    """Mean, differences and their squares are in double, whose roundings a mean far from zero multiplies: each is at
    most 2^-53 of the largest |x|, against differences of which the root is taken. One rounding to float32."""
    x, w, b = f64(x, w, b)
    D = x.shape[-1]
    largest = abs(x).max(-1, keepdims=True, initial=0)
    spread = np.sqrt(np.mean((x - x.mean(-1, keepdims=True)) ** 2, -1, keepdims=True) + eps) if D else largest
    return U * abs(y) + (D + 8) * 2.0**-53 * (abs(w) * (1 + largest / spread) ** 2 * (1 + abs(x)) + abs(b)) + TINY


def bound_segment_scores(y, q, k, lengths, scale):
    """A chain of D products, the scale rounded to float32, and the product with it"""
    magnitude = naive.segment_scores(abs(f64(q)[0]), abs(f64(k)[0]), lengths, abs(scale))
    seen = np.isfinite(y)
    return np.where(seen, (q.shape[-1] + 2) * U * np.where(seen, magnitude, 0), 0)


def bound_segment_softmax(y, s, lengths):
    """As softmax, the sum being in double. Elsewhere there are zeros."""
    seen = naive.segment_softmax(np.zeros_like(s), lengths) > 0
    return seen * bound_softmax(np.where(seen, f64(s)[0], -np.inf), y)


def bound_segment_mix(y, p, v, lengths):
    """A chain of 64 keys, and a sum of the chains"""
    longest = max([0, *np.asarray(lengths).tolist()])
    roundings = min(longest, 64) + math.ceil(longest / 64)
    return roundings * U * naive.segment_mix(abs(f64(p)[0]), abs(f64(v)[0]), lengths) + TINY


def bound_segment_attention(y, p, q, k, v, lengths, scale):
    """As bound_attention"""
    s = naive.segment_scores(q, k, lengths, scale)
    e = bound_segment_scores(s, q, k, lengths, scale)
    of_p = p * (e + (p * e).sum(-1, keepdims=True)) + bound_segment_softmax(p, s, lengths)
    return naive.segment_mix(of_p, abs(f64(v)[0]), lengths) + bound_segment_mix(y, p, v, lengths), of_p


def bound_sample_table(y, w, row, column):
    """In double, where each term passes eight roundings: two differences, products of weights, product, sums."""
    return U * abs(y) + 8 * 2.0**-53 * naive.sample_table(abs(f64(w)[0]), row, column) + TINY


def bound_grid_table(cos, sin, positions, f):
    """As bound_rope_table"""
    slack = 2.0**-53 * (abs(np.asarray(positions).T[:, :, None] * f) + 4)
    return U * abs(cos) + slack, U * abs(sin) + slack


def bound_rope_whole(y, x, cos, sin):
    """As bound_rope"""
    return bound_rope(y[None], x[None], cos[None], sin[None])[0]


def bound_causal_conv1d(y, next, x, w, window=None, step=None):
    """W products and their sum, in any order. The window is copied."""
    x, w, window = f64(x, w, window)
    window = None if window is None else abs(window)
    return w.shape[-1] * U * naive.causal_conv1d(abs(x), abs(w), window, step) + TINY, 0 * next


def bound_gated_delta_rule(y, final, recalled, written, q, k, v, g, beta, state=None, step=None, scale=1):
    """Running error of every column of S, as its length E over K. A step maps an old error by (I - beta k k^T) e^g,
    which never lengthens it for |k| <= 1 and 0 <= beta <= 1, and adds what its own roundings leave:
    e^g S (exp, one product), u (a sum over K, difference, product, times |k|), the product k u and the sum."""
    q, k, v, g, beta = f64(q, k, v, g, beta)
    B, T, H, V = v.shape
    K = q.shape[3]
    q, k = np.repeat(q, H // q.shape[2], 2) * scale, np.repeat(k, H // k.shape[2], 2)
    S = np.zeros((B, H, K, V)) if state is None else f64(state)[0]
    length = lambda a, axis: np.sqrt((a * a).sum(axis))  # noqa: E731
    E, of_y, of_recalled, of_written = np.zeros((B, H, V)), *(np.zeros(y.shape) for _ in range(3))
    for b, t in np.ndindex(B, T):
        code = 1 if step is None else step[b, t]
        if code == 0:
            continue
        if code == 2:
            S[b], E[b] = 0, 0
        S[b] *= np.exp(g[b, t])[:, None, None]
        E[b] *= np.exp(g[b, t])[:, None]
        r = np.einsum("hk,hkv->hv", k[b, t], S[b])
        r_sum = np.einsum("hk,hkv->hv", abs(k[b, t]), abs(S[b]))
        u = (v[b, t] - r) * beta[b, t][:, None]
        of_u = beta[b, t][:, None] * ((K + 1) * U * r_sum + 2 * U * abs(v[b, t] - r))
        before = (FUNCTION + U) * length(S[b], 1)
        S[b] += k[b, t][:, :, None] * u[:, None, :]
        k_length = length(k[b, t], -1)[:, None]
        of_recalled[b, t] = k_length * (E[b] + before) + (K + 1) * U * r_sum
        of_written[b, t] = beta[b, t][:, None] * (of_recalled[b, t] + 2 * U * abs(v[b, t] - r))
        E[b] += before + k_length * (of_u + U * abs(u)) + U * length(S[b], 1)
        of_y[b, t] = length(q[b, t], -1)[:, None] * E[b]
        of_y[b, t] += (K + 3) * U * np.einsum("hk,hkv->hv", abs(q[b, t]), abs(S[b]))
    return of_y, np.broadcast_to(E[:, :, None], final.shape), of_recalled, of_written


def bound_gated_delta_rule_chunked(y, final, q, k, v, g, beta, state=None, step=None, scale=1):
    """Every product of a chunk with the magnitudes of its factors. A decay e^(c_i - c_j) carries exp's own error and
    that of the running sums, which grows with |c|; an error on the right of (I + A) X = Y, or in A, comes out
    multiplied by |(I + A)^-1|; sums of n terms add n roundings of theirs."""
    q, k, v, g, beta = f64(q, k, v, g, beta)
    B, T, H, V = v.shape
    K = q.shape[3]
    q, k = np.repeat(q, H // q.shape[2], 2) * scale, np.repeat(k, H // k.shape[2], 2)
    S, E = np.zeros((B, H, K, V)) if state is None else f64(state)[0], np.zeros((B, H, K, V))
    of_y = np.zeros(y.shape)
    for b, h in np.ndindex(B, H):
        runs = []
        for t in range(T):
            code = 1 if step is None else step[b, t]
            if code == 2 or (code == 1 and (not runs or len(runs[-1][1]) == 64)):
                runs.append((code == 2, []))
            if code:
                runs[-1][1].append(t)
        for restart, at in runs:
            if restart:
                S[b, h], E[b, h] = 0, 0
            of_y[b, at, h], S[b, h], E[b, h] = bound_chunk(
                q[b, at, h], k[b, at, h], v[b, at, h], g[b, at, h], beta[b, at, h][:, None], S[b, h], E[b, h]
            )
    return of_y, E


def bound_chunk(q, k, v, g, beta, S, E):
    """(bound on o, state, bound on the state) of one chunk of one head"""
    n, K = k.shape
    c = np.cumsum(g)
    of_decay = FUNCTION + (n + 1) * U * abs(c).max()
    D = np.exp(np.where(np.tri(n, dtype=bool), c[:, None] - c, -np.inf))
    A, A_abs = np.tril(beta * (k @ k.T) * D, -1), np.tril(beta * (abs(k) @ abs(k).T) * D, -1)
    of_A = (of_decay + (lanes(K) + 2) * U) * A_abs
    inverse = np.linalg.inv(np.eye(n) + A)
    X, W = inverse @ (beta * v), inverse @ (beta * k * np.exp(c)[:, None])
    solved = lambda x, y, of_y: abs(inverse) @ ((of_A + n * U * A_abs) @ abs(x) + of_y * abs(y))  # noqa: E731
    of_X, of_W = solved(X, beta * v, U), solved(W, beta * k * np.exp(c)[:, None], of_decay + 2 * U)
    N = X - W @ S
    of_N = of_X + of_W @ abs(S) + abs(W) @ E + (K + 1) * U * (abs(X) + abs(W) @ abs(S))
    Q, P, P_abs = q * np.exp(c)[:, None], q @ k.T * D, abs(q) @ abs(k).T * D
    of_o = abs(Q) @ E + (of_decay + (K + n + 4) * U) * (abs(Q) @ abs(S)) + abs(P) @ of_N
    of_o += (of_decay + (lanes(K) + K + n + 4) * U) * (P_abs @ abs(N))
    carried, kept = k * np.exp(c[-1] - c)[:, None], np.exp(c[-1])
    of_S = kept * (E + (of_decay + (n + 2) * U) * abs(S)) + abs(carried).T @ of_N
    of_S += (of_decay + (n + 2) * U) * (abs(carried).T @ abs(N))
    return of_o, kept * S + carried.T @ N, of_S
