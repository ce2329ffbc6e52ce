"""One row per op: calls that cover its shapes and edges, and how far from its definition a result may be."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from op_bounds import (
    FUNCTION,
    TINY,
    U,
    bound_attention,
    bound_attention_mix,
    bound_attention_scores,
    bound_attention_softmax,
    bound_causal_conv1d,
    bound_delta_decay,
    bound_gated_delta_rule,
    bound_gated_delta_rule_chunked,
    bound_grid_table,
    bound_layer_norm,
    bound_linear,
    bound_linear_blas,
    bound_linear_f64,
    bound_linear_parts,
    bound_log_softmax,
    bound_norm,
    bound_rope,
    bound_rope_frequencies,
    bound_rope_table,
    bound_rope_whole,
    bound_sample_table,
    bound_segment_attention,
    bound_segment_mix,
    bound_segment_scores,
    bound_segment_softmax,
    bound_softmax,
    exact,
    f64,
    normal,
    rounded,
    unit,
)

from qwenref import naive


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


def segmented(*names, **more):
    """Segments of one token, of many, of none; widths beside what registers hold; longer than a chain of the mix"""
    arrays = {
        "q": lambda N, H, D: normal(N, H, D),
        "k": lambda N, H, D: normal(N, H, D, seed=1),
        "v": lambda N, H, D: normal(N, H, D, seed=2),
        "s": lambda N, H, D: normal(H, N, N, scale=3),
        "p": lambda N, H, D: naive.softmax(normal(H, N, N, seed=3)).astype(np.float32),
    }
    shapes = [([5, 1, 30], 3, 8), ([1], 1, 1), ([], 2, 4), ([0, 4, 0], 1, 72), ([64, 17], 2, 33), ([150], 1, 14)]
    return [
        {n: arrays[n](sum(L), H, D) for n in names} | {"lengths": np.array(L, np.int64)} | more for L, H, D in shapes
    ]


def sampled(R, C, D, N):
    """Places between the entries, and at the corners"""
    rng = np.random.default_rng([R, C, N])
    row, column = rng.uniform(0, R - 1, N), rng.uniform(0, C - 1, N)
    row[:2], column[:2] = [0, R - 1][:N], [0, C - 1][:N]
    return {"w": normal(R, C, D), "row": row, "column": column}


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
    "layer_norm": Row(
        over_rows("x", vectors=("w", "b")) + [{"x": 100 + normal(2, 70), "w": normal(70), "b": normal(70, seed=1)}],
        bound_layer_norm,
    ),
    "add": binary("a", "b", rounded),
    "mul": binary("a", "b", lambda y, **_: U * abs(y) + TINY),
    "silu": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY),
    "sigmoid": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "softplus": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "exp": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY, np.append(SPECIAL, np.float32(-np.inf))),
    "gelu": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY),
    "gelu_tanh": unary("x", lambda y, **_: FUNCTION * abs(y) + TINY),
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
    "segment_attention": Row(segmented("q", "k", "v", scale=0.25), bound_segment_attention),
    "segment_scores": Row(segmented("q", "k", scale=0.3), bound_segment_scores),
    "segment_softmax": Row(segmented("s"), bound_segment_softmax),
    "segment_mix": Row(segmented("p", "v"), bound_segment_mix),
    "sample_table": Row([sampled(4, 5, 7, 9), sampled(1, 1, 3, 1), sampled(48, 48, 20, 70)], bound_sample_table),
    "grid_table": Row(
        [
            {"positions": POSITIONS[:, 0], "f": 1e4 ** -(np.arange(4) / 4)},
            {"positions": POSITIONS[:2, 0, :0], "f": np.array([1.0, 0.5])},
        ],
        bound_grid_table,
    ),
    "rope_whole": Row(
        [
            {"x": normal(N, H, 2 * F), "cos": np.cos(normal(N, F, scale=9)), "sin": np.sin(normal(N, F, scale=9))}
            for N, H, F in [(3, 4, 4), (1, 1, 1), (0, 2, 3), (5, 2, 36)]
        ],
        bound_rope_whole,
    ),
    "causal_conv1d": Row(conv_calls(), bound_causal_conv1d),
    "gated_delta_rule": Row(delta_calls(), bound_gated_delta_rule),
    "gated_delta_rule_chunked": Row(delta_calls(), bound_gated_delta_rule_chunked),
}
