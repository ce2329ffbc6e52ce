"""One row per op: calls that cover its shapes and edges, and how far from its definition a result may be.

A bound counts roundings. U = 2^-24 is the largest relative error of one float32 rounding; a result that went through n
of them carries at most n U times the sum of the magnitudes it was made of. Terms of second order (n^2 U^2, below 2e-9
of the first for the sizes here) are covered by SECOND_ORDER.
"""

import math
from dataclasses import dataclass, field
from typing import Any

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


# ---------------------------------------------------------------------------------------------- one row per op


@dataclass
class Row:
    """Calls of an op, as keyword arguments, and how far from the definition each element of its results may be.

    The first call is the one whose arguments the tests of contract vary; it must have no empty dimension."""

    calls: list[dict[str, Any]]
    bound: Any
    extremes: list[dict[str, Any]] = field(default_factory=list)


STARS = [(3, 5), (), (1,), (7,), (0,), (2, 0, 3), (2, 1, 3)]
WIDTHS = [33, 1, 2, 15, 16, 17, 64, 130, 1000]
GRID = np.concatenate([np.linspace(-30, 30, 4001), [-110, -90, 88.5, -1e-3, 1e-6, -1e-20, 0, -0.0]]).astype(np.float32)
SPECIAL = np.array([np.inf, np.nan, 1e30, -1e30, 1e-40, -1e-40, 2e-45, 104, -104, 89], np.float32)


def unary(name, bound, special=SPECIAL):
    calls = [{name: normal(*star, scale=4)} for star in STARS] + [{name: GRID}, {name: normal(40001, scale=3)}]
    return Row(calls, bound, [{name: special}])


def binary(first, second, bound):
    calls = [{first: normal(*s, scale=4), second: normal(*s, seed=1, scale=4)} for s in STARS]
    return Row([*calls, {first: GRID, second: normal(GRID.size)}], bound)


def over_rows(*names, vectors=(), **more):
    """[*,D] arrays over all widths and runs of leading dimensions, with [D] vectors"""
    shapes = [(*star, D) for star, D in [((3, 5), 33), *[((2,), D) for D in WIDTHS], *[(star, 17) for star in STARS]]]
    return [
        {n: normal(*s, seed=i) for i, n in enumerate(names)}
        | {n: normal(s[-1], seed=9 + i, scale=0.3) for i, n in enumerate(vectors)}
        | more
        for s in shapes
    ]


def linear_calls():
    shapes = [((2, 3), 48, 20), ((), 33, 5), ((1,), 1, 1), ((1, 1), 64, 130), ((0,), 32, 4), ((2, 0), 7, 3)]
    shapes += [((m,), 70, 37) for m in (1, 2, 3, 8, 15, 16, 17, 48, 49, 100)] + [((2,), 31, 1), ((5,), 2, 129)]
    shapes += [((m,), 1030, 21) for m in (1, 20)] + [((2, 50), 1100, 200)]  # more than one panel in every direction
    calls = [{"x": normal(*s, i), "w": normal(o, i, seed=1)} for s, i, o in shapes]
    return [c | {"b": normal(len(c["w"]), seed=2)} for c in calls] + calls


def parts_calls():
    orders = [{"parts": 3, "rotate": 1}, {}, {"parts": 8, "reverse": 1}, {"parts": 4, "rotate": 3, "partials": 1}]
    return [call | order for call, order in zip(linear_calls(), orders * len(linear_calls()), strict=False)]


def f64_calls():
    """x with more digits than float32 has"""
    return [c | {"x": c["x"].astype(np.float64) / 3} for c in linear_calls()]


def rope_calls():
    shapes = [(2, 3, 4, 24, 4), (1, 1, 1, 2, 1), (1, 0, 2, 8, 2), (3, 5, 1, 16, 8), (1, 7, 3, 256, 32), (2, 2, 2, 9, 3)]
    return [
        {"x": normal(B, T, H, D), "cos": np.cos(normal(B, T, F, scale=9)), "sin": np.sin(normal(B, T, F, scale=9))}
        for B, T, H, D, F in shapes
    ]


def ranges(B, T, S):
    """Queries at the end of S keys: causal ones, and in the last row ranges that start late, and an empty one"""
    end = np.tile(np.arange(S - T, S) + 1, (B, 1))
    begin = np.zeros((B, T), np.int64)
    if B > 1 and T > 1:
        begin[-1] = end[-1] // 2
        begin[-1, 0], end[-1, 0] = S // 2, S // 2
    return {"begin": begin, "end": end}


ATTENDED = [  # B, T, Q, K, S, D
    (2, 5, 6, 2, 9, 16), (1, 1, 1, 1, 1, 1), (1, 1, 4, 4, 40, 33), (3, 0, 2, 1, 3, 8), (1, 65, 4, 2, 65, 24),
    (3, 3, 6, 1, 130, 7), (2, 7, 4, 1, 7, 256), (1, 1, 6, 6, 513, 16), (2, 2, 24, 4, 3, 64),
]  # fmt: skip


def attended(*names, **more):
    arrays = {
        "q": lambda B, T, Q, K, S, D: normal(B, T, Q, D),
        "k": lambda B, T, Q, K, S, D: normal(B, K, S, D, seed=1),
        "v": lambda B, T, Q, K, S, D: normal(B, K, S, D, seed=2),
        "s": lambda B, T, Q, K, S, D: normal(B, Q, T, S, scale=3),
        "p": lambda B, T, Q, K, S, D: naive.softmax(normal(B, Q, T, S, seed=3)).astype(np.float32),
    }
    return [{n: arrays[n](*s) for n in names} | ranges(s[0], s[1], s[4]) | more for s in ATTENDED]


def steps(B, T):
    step = np.random.default_rng(T).choice([0, 1, 1, 1, 2], (B, T))
    return {"step": step.astype(np.int64)}


def conv_calls():
    shapes = [(3, 5, 6, 4), (1, 1, 1, 1), (1, 1, 33, 4), (1, 0, 3, 4), (3, 2, 17, 2), (1, 70, 16, 4), (2, 3, 5, 1)]
    calls = []
    for B, T, C, W in [*shapes, (1, 2, 48, 4), (1, 3, 7, 3)]:
        plain = {"x": normal(B, T, C), "w": normal(C, 1, W, seed=1)}
        window = {"window": normal(B, C, W - 1, seed=2)}
        calls += [plain | window | steps(B, T), plain, plain | window, plain | steps(B, T)]
    return calls


def delta_calls():
    shapes = [(2, 5, 2, 6, 8, 4), (1, 1, 1, 1, 1, 1), (3, 1, 2, 2, 16, 16), (1, 0, 1, 2, 8, 8), (1, 70, 1, 2, 32, 20)]
    calls = []
    for B, T, G, H, K, V in [
        *shapes,
        (1, 3, 2, 4, 17, 33),
        (3, 9, 1, 3, 5, 7),
        (1, 4, 1, 1, 128, 128),
        (1, 6, 2, 6, 12, 70),
    ]:
        plain = {
            "q": unit(B, T, G, K), "k": unit(B, T, G, K, seed=1), "v": normal(B, T, H, V, seed=2),
            "g": -np.exp(normal(B, T, H, seed=3) - 1), "beta": 1 / (1 + np.exp(normal(B, T, H, seed=4))),
            "scale": K**-0.5,
        }  # fmt: skip
        state = {"state": normal(B, H, K, V, seed=5)}
        calls += [plain | state | steps(B, T), plain, plain | state, plain | steps(B, T)]
    no_decay = calls[-2] | {"g": 0 * calls[-2]["g"]}
    one_key = calls[16] | {"k": np.repeat(calls[16]["k"][:, :1], calls[16]["k"].shape[1], 1)}
    return [*calls, no_decay, one_key, calls[2] | {"g": calls[2]["g"] - 50}, calls[2] | {"g": calls[2]["g"] - 1000}]


POSITIONS = np.array([[[0, 1, 2], [1000, 10**4, 262143]], [[0, 1, 3], [7, 2**20, 2**30]], [[5, 4, 3], [2, 1, 0]]])

ROWS = {
    "embedding": Row(
        [
            {"ids": np.random.default_rng(len(s)).integers(0, 11, s), "w": normal(11, H)}
            for s, H in [((2, 3), 5), ((), 1), ((0,), 4), ((7,), 33), ((1, 1), 130)]
        ],
        exact,
    ),
    "linear": Row(linear_calls(), bound_linear),
    "linear_parts": Row(parts_calls(), bound_linear_parts),
    "linear_f64": Row(f64_calls(), bound_linear_f64),
    "linear_blas": Row(linear_calls(), bound_linear_blas),
    "rms_norm": Row(
        over_rows("x", vectors=("w",)) + over_rows("x", vectors=("w",), eps=0.1),
        lambda y, x, w, eps=0: bound_norm(y, x.shape[-1], more=3),  # x scale, 1 + w, their product
    ),
    "rms_norm_gated": Row(
        over_rows("x", "z", vectors=("w",)),
        lambda y, x, z, w, eps=0: bound_norm(y, x.shape[-1], more=3 + FUNCTION / U),  # x scale, w, silu
    ),
    "l2_norm": Row(
        over_rows("x") + [{"x": np.full((1, 128), a, np.float32)} for a in (1e-4, 1e-3, 1e-2, 1)],
        lambda y, x, eps=0: bound_norm(y, x.shape[-1], more=1),
    ),
    "add": binary("a", "b", rounded),
    "mul": binary("a", "b", lambda y, **_: U * abs(y) + TINY),
    "silu": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY),
    "sigmoid": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "softplus": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "exp": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "round_bf16": unary("x", exact, np.append(SPECIAL, np.float32([-np.inf, 3.4e38, -3.39e38]))),
    "round_f16": unary("x", exact, np.append(SPECIAL, np.float32([-np.inf, 65519.99, -65520, 2e-8, 3e-8]))),
    "silu_mul": binary("g", "u", lambda y, **_: (FUNCTION + U) * abs(y) + TINY),
    "sigmoid_mul": binary("x", "g", lambda y, **_: (FUNCTION + U) * abs(y) + TINY),
    "delta_decay": Row(
        [
            {"a": normal(*s, V, scale=6), "A_log": normal(V, seed=1), "dt_bias": normal(V, seed=2)}
            for s, V in [((2, 3), 6), ((), 1), ((0,), 4), ((1, 70), 48)]
        ],
        bound_delta_decay,
    ),
    "softmax": Row(
        over_rows("x"),
        lambda y, x: bound_softmax(f64(x)[0], y),
        [{"x": np.array([[1, -np.inf, 2], [0, 1e4, -1e4], [3e38, 3e38, -3e38], [7, 7, 7]], np.float32)}],
    ),
    "log_softmax": Row(over_rows("x"), bound_log_softmax, [{"x": np.array([[0, 1e4, -1e4], [7, 7, 7]], np.float32)}]),
    "argmax": Row(
        over_rows("x"),
        exact,
        [
            {"x": np.array([[1, 3, 3], [2, 2, 2], [-np.inf] * 3, [-0.0, 0.0, -1], [0.0, -0.0, -1]], np.float32)},
            {"x": np.array([[1, np.nan, np.inf], [np.nan] * 3, [-np.inf, np.nan, 0]], np.float32)},
            {"x": np.repeat(np.float32([1, 5, 5, 2]), 40)[None]},
        ],
    ),
    "rope_frequencies": Row(
        [
            {"index": np.arange(n), "theta": theta, "width": 2 * n}
            for n, theta in [(32, 1e7), (1, 1e4), (0, 1e4), (18, 1e4)]
        ],
        bound_rope_frequencies,
    ),
    "rope_table": Row(
        [
            {"positions": POSITIONS, "axis": np.array([0, 1, 2, 0, 0]), "f": 1e7 ** -(np.arange(5) / 5)},
            {"positions": POSITIONS[:1, :, :0], "axis": np.zeros(2, int), "f": np.array([1.0, 0.5])},
            {"positions": np.arange(3)[:, None][:, 0], "axis": np.array([2, 1, 0]), "f": np.array([1.0, 0.3, 0.1])},
        ],
        bound_rope_table,
    ),
    "rope": Row(rope_calls(), bound_rope),
    "attention": Row(attended("q", "k", "v", scale=0.25), bound_attention),
    "attention_scores": Row(attended("q", "k", scale=0.3), bound_attention_scores),
    "attention_softmax": Row(attended("s"), bound_attention_softmax),
    "attention_mix": Row(attended("p", "v"), bound_attention_mix),
    "causal_conv1d": Row(conv_calls(), bound_causal_conv1d),
    "gated_delta_rule": Row(delta_calls(), bound_gated_delta_rule),
    "gated_delta_rule_chunked": Row(delta_calls(), bound_gated_delta_rule_chunked),
}
