"""Every op in NumPy float64, written from the mathematics: the definition, the test oracle and the fp64 backend.

Nothing here may look at the C kernels or share a line with them, trade clarity for speed, or round below float64.
Inputs of any float dtype are widened exactly; inf and NaN travel silently, as they do in C.
"""

import math

import numpy as np

from .errors import InputError, ShapeError, compose
from .naive_op import op

_WIDENED_AT_ONCE = 1 << 22  # elements of a weight matrix held in float64 at a time, 32 MiB


# ---------------------------------------------------------------------------------------------- linear maps


@op("embedding(ids[*]:i, w[V,H]:w) -> y[*,H]")
def embedding(ids, w):
    """y = w[ids]"""
    bad = np.argwhere((ids < 0) | (ids >= len(w)))
    if len(bad):
        at = tuple(bad[0].tolist())
        first = f"embedding: ids{list(at) if at else ''} is {ids[at]:,}; w has {len(w):,} rows"
        found, expected = f"{len(bad):,} of {ids.size:,} ids out of range", f"0 <= id < {len(w):,}"
        raise InputError(compose(first, found=found, expected=expected))
    return w[ids].astype(np.float64)


@op("linear(x[*,I], w[O,I]:w, b[O]?) -> y[*,O]")
def linear(x, w, b=None):
    """y = x w^T + b, w widened in blocks of rows: a 248320 x 5120 head would be 10 GB at once."""
    O, I = w.shape
    y = np.empty((*x.shape[:-1], O))
    rows = max(1, _WIDENED_AT_ONCE // max(1, I))
    for o in range(0, O, rows):
        y[..., o : o + rows] = x @ w[o : o + rows].astype(np.float64).T
    return y if b is None else y + b


@op("linear_parts(x[*,I], w[O,I]:w, b[O]?, parts, rotate, reverse, partials) -> y[*,O]")
def linear_parts(x, w, b=None, parts=2, rotate=0, reverse=0, partials=0):
    """y = x w^T + b with the columns in blocks of whole groups of 32: only where the sum of each block is rounded to
    bfloat16 (partials) does it matter how many blocks there are, and their order never."""
    for name, value, least, most in (("parts", parts, 1, 4096), ("rotate", rotate, 0, 4096), ("reverse", reverse, 0, 1),
                                     ("partials", partials, 0, 1)):  # fmt: skip
        if not least <= value <= most or value != int(value):
            expected = f"a whole number from {least} to {most}"
            raise InputError(compose(f"linear_parts: {name} is {value}", expected=expected))
    if not partials:
        return linear(x, w, b)
    I, parts = x.shape[-1], int(parts)
    steps = -(-I // 32)
    edges = [min(I, 32 * (steps * block // parts)) for block in range(parts + 1)]
    blocks = [slice(*ends) for ends in zip(edges, edges[1:], strict=False)]
    y = sum(round_bf16(linear(x[..., block], w[:, block])) for block in blocks)
    return y if b is None else y + b


@op("linear_f64(x[*,I], w[O,I]:w, b[O]?) -> y[*,O]")
def linear_f64(x, w, b=None):
    """y = x w^T + b: what differs in C is that x and y are float64 there too."""
    return linear(x, w, b)


@op("linear_blas(x[*,I], w[O,I]:w, b[O]?) -> y[*,O]")
def linear_blas(x, w, b=None):
    """y = x w^T + b: what differs in C is only the order of the sum."""
    return linear(x, w, b)


# ---------------------------------------------------------------------------------------------- norms


@op("rms_norm(x[*,D], w[D], eps) -> y[*,D]")
def rms_norm(x, w, eps=1e-6):
    """y = x / sqrt(mean(x^2) + eps) * (1 + w): w is stored centred on zero."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * (1 + w)


@op("rms_norm_gated(x[*,D], z[*,D], w[D], eps) -> y[*,D]")
def rms_norm_gated(x, z, w, eps=1e-6):
    """y = w * x / sqrt(mean(x^2) + eps) * silu(z): norm before gate, w centred on one."""
    return w * (x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)) * silu(z)


@op("l2_norm(x[*,D], eps) -> y[*,D]")
def l2_norm(x, eps=1e-6):
    """y = x / sqrt(sum(x^2) + eps): eps inside the root, on the sum."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)


@op("layer_norm(x[*,D], w[D], b[D], eps) -> y[*,D]")
def layer_norm(x, w, b, eps=1e-6):
    """y = (x - m) / sqrt(mean((x - m)^2) + eps) * w + b with m = mean(x)"""
    x = x - np.mean(x, -1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w + b


# ---------------------------------------------------------------------------------------------- element by element


@op("add(a[*], b[*]) -> y[*]")
def add(a, b):
    """y = a + b"""
    return a + b


@op("mul(a[*], b[*]) -> y[*]")
def mul(a, b):
    """y = a b"""
    return a * b


@op("exp(x[*]) -> y[*]")
def exp(x):
    """y = e^x"""
    return np.exp(x)


@op("sigmoid(x[*]) -> y[*]")
def sigmoid(x):
    """y = 1 / (1 + e^-x), through e^-|x|, which cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


@op("silu(x[*]) -> y[*]")
def silu(x):
    """y = x sigmoid(x)"""
    return x * sigmoid(x)


@op("softplus(x[*]) -> y[*]")
def softplus(x):
    """y = log(1 + e^x), without the shortcut y = x that torch takes above 20."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@op("gelu(x[*]) -> y[*]")
def gelu(x):
    """y = x P, P the share of the normal distribution below x, through erfc, which stays exact where P is small."""
    return x * _erfc(-x / np.sqrt(2)) / 2


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@op("gelu_tanh(x[*]) -> y[*]")
def gelu_tanh(x):
    """y = x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), written as x sigmoid(2u), which does not cancel."""
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


@op("silu_mul(g[*], u[*]) -> y[*]")
def silu_mul(g, u):
    """y = silu(g) u"""
    return silu(g) * u


@op("sigmoid_mul(x[*], g[*]) -> y[*]")
def sigmoid_mul(x, g):
    """y = x sigmoid(g)"""
    return x * sigmoid(g)


def _nearest(x, digits, smallest, largest):
    """x rounded once to numbers of so many binary digits, ties to even: fewer digits below `smallest`, the least normal
    one, and infinity where the rounded number is beyond `largest`."""
    exponent = np.maximum(np.frexp(x)[1], np.frexp(smallest)[1])
    unit = np.ldexp(1.0, exponent - digits)
    y = np.rint(x / unit) * unit
    return np.where(np.isfinite(x), np.where(abs(y) > largest, np.copysign(np.inf, x), y), x)


@op("round_bf16(x[*]) -> y[*]")
def round_bf16(x):
    """y = the value of bfloat16 nearest to x: 8 binary digits, the range of float32"""
    return _nearest(x, 8, 2.0**-126, (2 - 2.0**-7) * 2.0**127)


@op("round_f16(x[*]) -> y[*]")
def round_f16(x):
    """y = the value of float16 nearest to x: 11 binary digits, up to 65504"""
    return _nearest(x, 11, 2.0**-14, 65504.0)


@op("delta_decay(a[*,V], A_log[V], dt_bias[V]) -> g[*,V]")
def delta_decay(a, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias): the log of what a state keeps, never above zero."""
    return -np.exp(A_log) * softplus(a + dt_bias)


# ---------------------------------------------------------------------------------------------- rows


@op("softmax(x[*,D]) -> y[*,D]")
def softmax(x):
    """y = e^x / sum(e^x), shifted by the largest x"""
    e = np.exp(x - np.max(x, -1, keepdims=True, initial=-np.inf))
    return e / np.sum(e, -1, keepdims=True)


@op("log_softmax(x[*,D]) -> y[*,D]")
def log_softmax(x):
    """y = x - log(sum(e^x)), shifted by the largest x"""
    x = x - np.max(x, -1, keepdims=True, initial=-np.inf)
    return x - np.log(np.sum(np.exp(x), -1, keepdims=True))


@op("argmax(x[*,D]) -> y[*]")
def argmax(x):
    """y = the lowest index that holds the largest x"""
    return np.argmax(x, -1)


# ---------------------------------------------------------------------------------------------- rotary positions


@op("rope_frequencies(index[F]:i, theta, width) -> f[F]")
def rope_frequencies(index, theta, width):
    """f = theta^(-2 index / width)"""
    return theta ** (-2 * index / width)


@op("rope_table(positions[A,*]:i, axis[F]:i, f[F]) -> cos[*,F], sin[*,F]")
def rope_table(positions, axis, f):
    """cos and sin of positions[axis[i]] f[i]: every frequency reads the position of its own axis (T, H or W)."""
    if np.any((axis < 0) | (axis >= len(positions))):
        expected = f"0 <= axis < {len(positions)}, the rows of positions"
        raise InputError(compose("rope_table: axis is out of range", found=axis, expected=expected))
    angle = np.moveaxis(positions[axis], 0, -1) * f
    return np.cos(angle), np.sin(angle)


@op("rope(x[B,T,H,D], cos[B,T,F], sin[B,T,F]) -> y[B,T,H,D]")
def rope(x, cos, sin):
    """(x_i, x_i+F) turned by its angle for i < F; what lies at 2F and above passes through."""
    F = cos.shape[-1]
    if x.shape[-1] < 2 * F:
        first = f"rope: x has D={x.shape[-1]}, too narrow for {F} pairs"
        raise ShapeError(compose(first, found=list(x.shape), expected=f"D >= {2 * F}"))
    cos, sin = cos[:, :, None], sin[:, :, None]  # one angle for all heads
    first, second = x[..., :F], x[..., F : 2 * F]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * F :]], -1)


# ---------------------------------------------------------------------------------------------- attention


def _visible(op, begin, end, S):
    """(b, t, lo, hi) of every query that sees a key. Keys outside are not touched: they may hold anything, even NaN."""
    bad = np.argwhere((begin < 0) | (begin > end) | (end > S))
    if len(bad):
        b, t = bad[0].tolist()
        found, expected = f"begin={begin[b, t]}, end={end[b, t]}", f"0 <= begin <= end <= S={S}"
        raise InputError(
            compose(f"{op}: token {t} of row {b} attends outside the keys", found=found, expected=expected)
        )
    for (b, t), lo in np.ndenumerate(begin):
        if lo < end[b, t]:
            yield b, t, lo, end[b, t]


def _per_head(where, x, H, axis):
    """Repeat the heads of x so that head h of H reads head h // (H / heads): grouped, not tiled."""
    heads = x.shape[axis]
    if heads == 0 or H % heads:
        first = f"{where}: {H} heads cannot share {heads} evenly"
        raise ShapeError(compose(first, found=f"{H} / {heads}", expected="a whole number"))
    return np.repeat(x, H // heads, axis)


@op("attention_scores(q[B,T,Q,D], k[B,K,S,D], begin[B,T]:i, end[B,T]:i, scale) -> s[B,Q,T,S]")
def attention_scores(q, k, begin, end, scale):
    """s = q . k * scale for begin <= key < end, minus infinity elsewhere"""
    B, T, Q, _ = q.shape
    k = _per_head("attention_scores", k, Q, 1)
    s = np.full((B, Q, T, k.shape[2]), -np.inf)
    for b, t, lo, hi in _visible("attention_scores", begin, end, k.shape[2]):
        s[b, :, t, lo:hi] = np.einsum("qd,qsd->qs", q[b, t], k[b, :, lo:hi]) * scale
    return s


@op("attention_softmax(s[B,Q,T,S], begin[B,T]:i, end[B,T]:i) -> p[B,Q,T,S]")
def attention_softmax(s, begin, end):
    """p = softmax(s) over begin <= key < end, zero elsewhere; a query that sees nothing attends to nothing"""
    p = np.zeros(s.shape)
    for b, t, lo, hi in _visible("attention_softmax", begin, end, s.shape[3]):
        p[b, :, t, lo:hi] = softmax(s[b, :, t, lo:hi])
    return p


@op("attention_mix(p[B,Q,T,S], v[B,K,S,D], begin[B,T]:i, end[B,T]:i) -> o[B,T,Q,D]")
def attention_mix(p, v, begin, end):
    """o = sum over begin <= key < end of p v"""
    B, Q, T, S = p.shape
    v = _per_head("attention_mix", v, Q, 1)
    o = np.zeros((B, T, Q, v.shape[3]))
    for b, t, lo, hi in _visible("attention_mix", begin, end, S):
        o[b, t] = np.einsum("qs,qsd->qd", p[b, :, t, lo:hi], v[b, :, lo:hi])
    return o


@op("attention(q[B,T,Q,D], k[B,K,S,D], v[B,K,S,D], begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D], p[B,Q,T,S]?")
def attention(q, k, v, begin, end, scale):
    """o = softmax(q . k * scale) v over begin <= key < end"""
    weights = attention_softmax(attention_scores(q, k, begin, end, scale), begin, end)
    return attention_mix(weights, v, begin, end), weights


# ---------------------------------------------------------------------------------------------- vision


def _segments(op, lengths, N):
    """(begin, end) of each segment: so many tokens each, one behind the other"""
    ends = np.cumsum(lengths)
    bad = np.flatnonzero((lengths < 0) | (ends > N))
    if len(bad) or ends[-1:].sum() != N:
        found = f"length {lengths[bad[0]]} of segment {bad[0]}" if len(bad) else f"lengths that add to {lengths.sum()}"
        expected = f"lengths from 0 up that add to N={N}"
        raise InputError(compose(f"{op}: the segments are not the tokens", found=found, expected=expected))
    return zip((ends - lengths).tolist(), ends.tolist(), strict=True)


@op("segment_scores(q[N,H,D], k[N,H,D], lengths[G]:i, scale) -> s[H,N,N]")
def segment_scores(q, k, lengths, scale):
    """s = q . k * scale between tokens of one segment, minus infinity elsewhere"""
    N, H, _ = q.shape
    s = np.full((H, N, N), -np.inf)
    for lo, hi in _segments("segment_scores", lengths, N):
        s[:, lo:hi, lo:hi] = q[lo:hi].transpose(1, 0, 2) @ k[lo:hi].transpose(1, 2, 0) * scale
    return s


@op("segment_softmax(s[H,N,N], lengths[G]:i) -> p[H,N,N]")
def segment_softmax(s, lengths):
    """p = softmax(s) over the tokens of the segment, zero elsewhere"""
    p = np.zeros(s.shape)
    for lo, hi in _segments("segment_softmax", lengths, s.shape[1]):
        p[:, lo:hi, lo:hi] = softmax(s[:, lo:hi, lo:hi])
    return p


@op("segment_mix(p[H,N,N], v[N,H,D], lengths[G]:i) -> o[N,H,D]")
def segment_mix(p, v, lengths):
    """o = sum over the tokens of the segment of p v"""
    o = np.zeros(v.shape)
    for lo, hi in _segments("segment_mix", lengths, len(v)):
        o[lo:hi] = (p[:, lo:hi, lo:hi] @ v[lo:hi].transpose(1, 0, 2)).transpose(1, 0, 2)
    return o


@op("segment_attention(q[N,H,D], k[N,H,D], v[N,H,D], lengths[G]:i, scale) -> o[N,H,D], p[H,N,N]?")
def segment_attention(q, k, v, lengths, scale):
    """o = softmax(q . k * scale) v among the tokens of one segment, in both directions"""
    weights = segment_softmax(segment_scores(q, k, lengths, scale), lengths)
    return segment_mix(weights, v, lengths), weights


@op("sample_table(w[R,C,D]:w, row[N], column[N]) -> y[N,D]")
def sample_table(w, row, column):
    """y between the four entries around (row, column), each weighted with how near it is in both directions"""
    R, C, _ = w.shape
    for what, at, size in (("row", row, R), ("column", column, C)):
        bad = np.flatnonzero(~((at >= 0) & (at <= size - 1)))
        if len(bad):
            expected = f"0 to {size - 1}"
            raise InputError(
                compose(f"sample_table: {what} {bad[0]} is outside the table", found=at[bad[0]], expected=expected)
            )
    r, c = (np.floor(at).astype(np.int64) for at in (row, column))
    down, across = (row - r)[:, None], (column - c)[:, None]
    below, beside = np.minimum(r + 1, R - 1), np.minimum(c + 1, C - 1)
    w = w.astype(np.float64)
    above = w[r, c] * (1 - across) + w[r, beside] * across
    return above * (1 - down) + (w[below, c] * (1 - across) + w[below, beside] * across) * down


@op("grid_table(positions[A,N]:i, f[F]) -> cos[N,A,F], sin[N,A,F]")
def grid_table(positions, f):
    """cos and sin of positions[a] f[i]: every axis turns all frequencies"""
    angle = positions.T[:, :, None] * f
    return np.cos(angle), np.sin(angle)


@op("rope_whole(x[N,H,D], cos[N,F], sin[N,F]) -> y[N,H,D]")
def rope_whole(x, cos, sin):
    """(x_i, x_i+F) turned by its angle for every i < F = D/2"""
    F = cos.shape[1]
    if x.shape[2] != 2 * F:
        first = f"rope_whole: x has D={x.shape[2]}, which is not twice {F}"
        raise ShapeError(compose(first, found=list(x.shape), expected=f"D = {2 * F}"))
    cos, sin = cos[:, None], sin[:, None]  # one angle for all heads
    first, second = x[..., :F], x[..., F:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


# ---------------------------------------------------------------------------------------------- Gated DeltaNet

SKIP, ADVANCE, RESTART = 0, 1, 2  # step[b,t]: a pad leaves no trace; a token; the first token of a packed sequence


def _steps(op, step, B, T):
    """(b, t, restart) of every token that is not skipped, in order of time"""
    step = np.full((B, T), ADVANCE) if step is None else step
    bad = np.argwhere((step < SKIP) | (step > RESTART))
    if len(bad):
        b, t = bad[0].tolist()
        first, expected = f"{op}: step of token {t} of row {b} is not a step code", "0 skip, 1 advance or 2 restart"
        raise InputError(compose(first, found=step[b, t], expected=expected))
    for (b, t), code in np.ndenumerate(step):
        if code != SKIP:
            yield b, t, code == RESTART


@op("causal_conv1d(x[B,T,C], w[C,1,W], window[B,C,W-1]?, step[B,T]:i?) -> y[B,T,C], next[B,C,W-1]?")
def causal_conv1d(x, w, window=None, step=None):
    """y_t = sum over i of w_i x_(t-W+1+i), channel by channel: tap W-1 meets the current token, missing history is 0.
    The window is the last W-1 inputs, oldest first."""
    B, T, C = x.shape
    W = w.shape[2]
    window = np.zeros((B, C, W - 1)) if window is None else window
    y = np.zeros(x.shape)
    for b, t, restart in _steps("causal_conv1d", step, B, T):
        if restart:
            window[b] = 0
        inputs = np.concatenate([window[b], x[b, t, :, None]], 1)  # [C,W]
        y[b, t] = np.sum(w[:, 0] * inputs, -1)
        window[b] = inputs[:, 1:]
    return y, window


@op(
    "gated_delta_rule(q[B,T,G,K], k[B,T,G,K], v[B,T,H,V], g[B,T,H], beta[B,T,H], state[B,H,K,V]?, step[B,T]:i?, scale)"
    " -> o[B,T,H,V], final[B,H,K,V]?, recalled[B,T,H,V]?, written[B,T,H,V]?"
)
def gated_delta_rule(q, k, v, g, beta, state=None, step=None, scale=1):
    """Token by token:  S *= exp(g);  u = (v - k^T S) beta;  S += k u^T;  o = (q scale)^T S

    By the way: recalled = k^T S, what S holds under k; written = u."""
    B, T, H, V = v.shape
    q, k = _per_head("gated_delta_rule", q, H, 2) * scale, _per_head("gated_delta_rule", k, H, 2)
    S = np.zeros((B, H, q.shape[3], V)) if state is None else state
    o, recalled, written = (np.zeros(v.shape) for _ in range(3))
    for b, t, restart in _steps("gated_delta_rule", step, B, T):
        if restart:
            S[b] = 0
        S[b] *= np.exp(g[b, t])[:, None, None]
        recalled[b, t] = np.einsum("hk,hkv->hv", k[b, t], S[b])
        written[b, t] = u = (v[b, t] - recalled[b, t]) * beta[b, t][:, None]
        S[b] += k[b, t][:, :, None] * u[:, None, :]
        o[b, t] = np.einsum("hk,hkv->hv", q[b, t], S[b])
    return o, S, recalled, written


# The same rule in two other forms, which only tests and explanations use. In both, per head and with time as rows:
#   G[i,j] = exp(sum of g over (j, i]) for j <= i        (I + A) U = diag(beta) (V - what the old state answers to K)
#   A      = stril(diag(beta) K K^T . G)                  O         = tril(Q K^T . G) U + what it answers to Q


def _retained(g):
    """G[...,i,j] of g[...,T]. Sums are of one sign and masked before exp, so nothing cancels and nothing overflows."""
    T = g.shape[-1]
    i, j = np.arange(T)[:, None], np.arange(T)
    log_G = np.cumsum(np.where(i > j, g[..., :, None], 0), -2)
    return np.exp(np.where(i >= j, log_G, -np.inf))


def _solve_unit_lower(A, Y):
    """U with (I + A) U = Y for strictly lower A, row after row: no inverse is formed"""
    U = Y.copy()
    for i in range(1, A.shape[-1]):
        U[..., i, :] -= (A[..., i : i + 1, :i] @ U[..., :i, :])[..., 0, :]
    return U


@op(
    "gated_delta_rule_chunked(q[B,T,G,K], k[B,T,G,K], v[B,T,H,V], g[B,T,H], beta[B,T,H], state[B,H,K,V]?, "
    "step[B,T]:i?, scale) -> o[B,T,H,V], final[B,H,K,V]?"
)
def gated_delta_rule_chunked(q, k, v, g, beta, state=None, step=None, scale=1, chunk=64):
    """gated_delta_rule, `chunk` tokens at a time as matrix products; a restart begins a chunk"""
    B, T, H, V = v.shape
    q, k = _per_head("gated_delta_rule_chunked", q, H, 2) * scale, _per_head("gated_delta_rule_chunked", k, H, 2)
    S = np.zeros((B, H, q.shape[3], V)) if state is None else state
    o, runs = np.zeros(v.shape), []
    for b, t, restart in _steps("gated_delta_rule_chunked", step, B, T):
        if restart or not runs or runs[-1][0] != b or len(runs[-1][1]) == chunk:
            runs.append((b, [], restart))
        runs[-1][1].append(t)
    for b, tokens, restart in runs:
        S[b] = 0 if restart else S[b]
        Q, K, X, g_, w = (np.moveaxis(a[b, tokens], 0, 1) for a in (q, k, v, g, beta))  # [H,T,...]
        G, w, kept = _retained(g_), w[..., None], np.exp(np.cumsum(g_, -1))[..., None]
        U = _solve_unit_lower(np.tril(w * (K @ K.swapaxes(-1, -2)) * G, -1), w * (X - kept * (K @ S[b])))
        o[b, tokens] = np.moveaxis(kept * (Q @ S[b]) + (Q @ K.swapaxes(-1, -2) * G) @ U, 1, 0)
        S[b] = kept[..., -1:, :] * S[b] + (K * G[..., -1, :, None]).swapaxes(-1, -2) @ U
    return o, S


@op("token_map(q[B,T,G,K], k[B,T,G,K], g[B,T,H], beta[B,T,H], scale) -> M[B,H,T,T]")
def token_map(q, k, g, beta, scale=1):
    """M = tril(Q K^T . G) (I + A)^-1 diag(beta), so that o = M v for a state that starts at zero"""
    T, H = g.shape[1:]
    Q, K = (np.moveaxis(_per_head("token_map", a, H, 2), 1, 2) for a in (q, k))
    g, b = np.moveaxis(g, 1, 2), np.moveaxis(beta, 1, 2)[..., None]
    G = _retained(g)
    U = _solve_unit_lower(np.tril(b * (K @ K.swapaxes(-1, -2)) * G, -1), b * np.eye(T))
    return scale * (Q @ K.swapaxes(-1, -2) * G) @ U
