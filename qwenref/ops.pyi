"""Types of the ops, made from their signatures by tests/stubs.py: change those, not this file."""

from typing import Any, Literal, overload

from numpy import ndarray
from numpy.typing import ArrayLike

_Array = ndarray[Any, Any]

def names() -> tuple[str, ...]:
    """Names of all ops, in the order of the registry."""

def embedding(ids: ArrayLike, w: ArrayLike, *, y: _Array | None = None) -> _Array:
    """embedding(ids[*]:i, w[V,H]:w) -> y[*,H]:f

    y = the rows of w that ids name, exactly
    """

def linear(x: ArrayLike, w: ArrayLike, b: ArrayLike | None = None, *, y: _Array | None = None) -> _Array:
    """linear(x[*,I]:f, w[O,I]:w, b[O]:v?) -> y[*,O]:f

    y = x w^T + b: sums in float32 in one order for every CPU, batch and thread count
    """

def linear_parts(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None = None,
    parts: float = 2,
    rotate: float = 0,
    reverse: float = 0,
    partials: float = 0,
    *,
    y: _Array | None = None,
) -> _Array:
    """linear_parts(x[*,I]:f, w[O,I]:w, b[O]:v?, parts=2, rotate=0, reverse=0, partials=0) -> y[*,O]:f

    y = x w^T + b: K in blocks, each summed as linear does, added from block `rotate` on, or back with reverse=1;
    partials=1 rounds the sum of each block to bfloat16 first
    """

def linear_f64(x: ArrayLike, w: ArrayLike, b: ArrayLike | None = None, *, y: _Array | None = None) -> _Array:
    """linear_f64(x[*,I]:d, w[O,I]:w, b[O]:v?) -> y[*,O]:d

    y = x w^T + b: as linear, in double
    """

def linear_blas(x: ArrayLike, w: ArrayLike, b: ArrayLike | None = None, *, y: _Array | None = None) -> _Array:
    """linear_blas(x[*,I]:f, w[O,I]:w, b[O]:v?) -> y[*,O]:f

    y = x w^T + b by the system's BLAS in float32; close to linear, with bits that depend on its version and the
    sizes
    """

def rms_norm(x: ArrayLike, w: ArrayLike, eps: float = 1e-06, *, y: _Array | None = None) -> _Array:
    """rms_norm(x[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f

    y = x * rsqrt(mean(x^2) + eps) * (1 + w)
    """

def rms_norm_gated(x: ArrayLike, z: ArrayLike, w: ArrayLike, eps: float = 1e-06, *, y: _Array | None = None) -> _Array:
    """rms_norm_gated(x[*,D]:f, z[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f

    y = w * (x * rsqrt(mean(x^2) + eps)) * silu(z)
    """

def l2_norm(x: ArrayLike, eps: float = 1e-06, *, y: _Array | None = None) -> _Array:
    """l2_norm(x[*,D]:f, eps=1e-6) -> y[*,D]:f

    y = x * rsqrt(sum(x^2) + eps)
    """

def layer_norm(x: ArrayLike, w: ArrayLike, b: ArrayLike, eps: float = 1e-06, *, y: _Array | None = None) -> _Array:
    """layer_norm(x[*,D]:f, w[D]:v, b[D]:v, eps=1e-6) -> y[*,D]:f

    y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b
    """

def add(a: ArrayLike, b: ArrayLike, *, y: _Array | None = None) -> _Array:
    """add(a[*]:f, b[*]:f) -> y[*]:f

    y = a + b
    """

def mul(a: ArrayLike, b: ArrayLike, *, y: _Array | None = None) -> _Array:
    """mul(a[*]:f, b[*]:f) -> y[*]:f

    y = a * b
    """

def silu(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """silu(x[*]:f) -> y[*]:f

    y = x / (1 + exp(-x))
    """

def silu_mul(g: ArrayLike, u: ArrayLike, *, y: _Array | None = None) -> _Array:
    """silu_mul(g[*]:f, u[*]:f) -> y[*]:f

    y = silu(g) * u
    """

def sigmoid(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """sigmoid(x[*]:f) -> y[*]:f

    y = 1 / (1 + exp(-x))
    """

def sigmoid_mul(x: ArrayLike, g: ArrayLike, *, y: _Array | None = None) -> _Array:
    """sigmoid_mul(x[*]:f, g[*]:f) -> y[*]:f

    y = x * sigmoid(g)
    """

def softplus(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """softplus(x[*]:f) -> y[*]:f

    y = log(1 + exp(x))
    """

def gelu(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """gelu(x[*]:f) -> y[*]:f

    y = x/2 (1 + erf(x / sqrt(2)))
    """

def gelu_tanh(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """gelu_tanh(x[*]:f) -> y[*]:f

    y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    """

def exp(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """exp(x[*]:f) -> y[*]:f

    y = exp(x)
    """

def round_bf16(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """round_bf16(x[*]:f) -> y[*]:f

    y = the value of bfloat16 nearest to x, ties to even
    """

def round_f16(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """round_f16(x[*]:f) -> y[*]:f

    y = the value of float16 nearest to x, ties to even, infinite from 65520
    """

def delta_decay(a: ArrayLike, A_log: ArrayLike, dt_bias: ArrayLike, *, g: _Array | None = None) -> _Array:
    """delta_decay(a[*,V]:f, A_log[V]:v, dt_bias[V]:v) -> g[*,V]:f

    g = -exp(A_log) * softplus(a + dt_bias)
    """

def softmax(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """softmax(x[*,D]:f) -> y[*,D]:f

    y = exp(x - max) / sum(exp(x - max)), the sum in double
    """

def log_softmax(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """log_softmax(x[*,D]:f) -> y[*,D]:f

    y = x - log(sum(exp(x))), the sum in double
    """

def argmax(x: ArrayLike, *, y: _Array | None = None) -> _Array:
    """argmax(x[*,D]:f) -> y[*]:i

    index of the largest element: the first one, and a NaN before any number
    """

def rope_frequencies(index: ArrayLike, theta: float, width: float, *, f: _Array | None = None) -> _Array:
    """rope_frequencies(index[F]:i, theta, width) -> f[F]:d

    f = theta ^ (-2 index / width), in float64
    """

def rope_table(
    positions: ArrayLike, axis: ArrayLike, f: ArrayLike, *, cos: _Array | None = None, sin: _Array | None = None
) -> tuple[_Array, _Array]:
    """rope_table(positions[A,*]:i, axis[F]:i, f[F]:d) -> cos[*,F]:f, sin[*,F]:f

    cos and sin of positions[axis[i]] * f[i], computed in float64
    """

def rope(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, y: _Array | None = None) -> _Array:
    """rope(x[B,T,H,D]:f, cos[B,T,F]:f, sin[B,T,F]:f) -> y[B,T,H,D]:f

    rotate the pairs (i, i+F) of every head; dimensions from 2F on pass through
    """

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    begin: ArrayLike,
    end: ArrayLike,
    scale: float,
    *,
    o: _Array | None = None,
    p: Literal[False] | None = False,
) -> _Array:
    """attention(q[B,T,Q,D]:f, k[B,K,S,D]:s, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D]:f,
        p[B,Q,T,S]:f?

    softmax(q k^T scale) v over the keys begin <= s < end; query head h reads key head h / (Q/K)
    """

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    begin: ArrayLike,
    end: ArrayLike,
    scale: float,
    *,
    o: _Array | None = None,
    p: Literal[True] | _Array,
) -> tuple[_Array, _Array]:
    """attention(q[B,T,Q,D]:f, k[B,K,S,D]:s, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D]:f,
        p[B,Q,T,S]:f?

    softmax(q k^T scale) v over the keys begin <= s < end; query head h reads key head h / (Q/K)
    """

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    begin: ArrayLike,
    end: ArrayLike,
    scale: float,
    *,
    o: _Array | None = None,
    p: bool,
) -> Any:
    """attention(q[B,T,Q,D]:f, k[B,K,S,D]:s, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> o[B,T,Q,D]:f,
        p[B,Q,T,S]:f?

    softmax(q k^T scale) v over the keys begin <= s < end; query head h reads key head h / (Q/K)
    """

def attention_scores(
    q: ArrayLike, k: ArrayLike, begin: ArrayLike, end: ArrayLike, scale: float, *, s: _Array | None = None
) -> _Array:
    """attention_scores(q[B,T,Q,D]:f, k[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i, scale) -> s[B,Q,T,S]:f

    s = q k^T scale for the keys begin <= s < end, -inf elsewhere
    """

def attention_softmax(s: ArrayLike, begin: ArrayLike, end: ArrayLike, *, p: _Array | None = None) -> _Array:
    """attention_softmax(s[B,Q,T,S]:f, begin[B,T]:i, end[B,T]:i) -> p[B,Q,T,S]:f

    softmax of the scores begin <= s < end, zero elsewhere
    """

def attention_mix(p: ArrayLike, v: ArrayLike, begin: ArrayLike, end: ArrayLike, *, o: _Array | None = None) -> _Array:
    """attention_mix(p[B,Q,T,S]:f, v[B,K,S,D]:s, begin[B,T]:i, end[B,T]:i) -> o[B,T,Q,D]:f

    o = p v over the keys begin <= s < end
    """

@overload
def segment_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lengths: ArrayLike,
    scale: float,
    *,
    o: _Array | None = None,
    p: Literal[False] | None = False,
) -> _Array:
    """segment_attention(q[N,H,D]:s, k[N,H,D]:s, v[N,H,D]:s, lengths[G]:i, scale) -> o[N,H,D]:f, p[H,N,N]:f?

    softmax(q k^T scale) v among the tokens of a segment; lengths says how many follow each other in one
    """

@overload
def segment_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lengths: ArrayLike,
    scale: float,
    *,
    o: _Array | None = None,
    p: Literal[True] | _Array,
) -> tuple[_Array, _Array]:
    """segment_attention(q[N,H,D]:s, k[N,H,D]:s, v[N,H,D]:s, lengths[G]:i, scale) -> o[N,H,D]:f, p[H,N,N]:f?

    softmax(q k^T scale) v among the tokens of a segment; lengths says how many follow each other in one
    """

@overload
def segment_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, lengths: ArrayLike, scale: float, *, o: _Array | None = None, p: bool
) -> Any:
    """segment_attention(q[N,H,D]:s, k[N,H,D]:s, v[N,H,D]:s, lengths[G]:i, scale) -> o[N,H,D]:f, p[H,N,N]:f?

    softmax(q k^T scale) v among the tokens of a segment; lengths says how many follow each other in one
    """

def segment_scores(q: ArrayLike, k: ArrayLike, lengths: ArrayLike, scale: float, *, s: _Array | None = None) -> _Array:
    """segment_scores(q[N,H,D]:s, k[N,H,D]:s, lengths[G]:i, scale) -> s[H,N,N]:f

    s = q k^T scale between tokens of a segment, -inf elsewhere
    """

def segment_softmax(s: ArrayLike, lengths: ArrayLike, *, p: _Array | None = None) -> _Array:
    """segment_softmax(s[H,N,N]:f, lengths[G]:i) -> p[H,N,N]:f

    softmax of the scores between tokens of a segment, zero elsewhere
    """

def segment_mix(p: ArrayLike, v: ArrayLike, lengths: ArrayLike, *, o: _Array | None = None) -> _Array:
    """segment_mix(p[H,N,N]:f, v[N,H,D]:s, lengths[G]:i) -> o[N,H,D]:f

    o = p v over the tokens of a segment
    """

def sample_table(w: ArrayLike, row: ArrayLike, column: ArrayLike, *, y: _Array | None = None) -> _Array:
    """sample_table(w[R,C,D]:w, row[N]:d, column[N]:d) -> y[N,D]:f

    y = w between the four places around (row, column), bilinearly: whole numbers are the places themselves
    """

def grid_table(
    positions: ArrayLike, f: ArrayLike, *, cos: _Array | None = None, sin: _Array | None = None
) -> tuple[_Array, _Array]:
    """grid_table(positions[A,N]:i, f[F]:d) -> cos[N,A,F]:f, sin[N,A,F]:f

    cos and sin of positions[a] * f[i] for every axis a, computed in float64
    """

def rope_whole(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, y: _Array | None = None) -> _Array:
    """rope_whole(x[N,H,D]:s, cos[N,F]:f, sin[N,F]:f) -> y[N,H,D]:f

    rotate the pairs (i, i+F) of every head, which are all there is: D = 2F
    """

@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    window: ArrayLike | None = None,
    step: ArrayLike | None = None,
    *,
    y: _Array | None = None,
    next: Literal[False] | None = False,
) -> _Array:
    """causal_conv1d(x[B,T,C]:f, w[C,1,W]:v, window[B,C,W-1]:f?, step[B,T]:i?) -> y[B,T,C]:f, next[B,C,W-1]:f?

    y[t] = sum of w[tap] x[t-W+1+tap]; step 0 skips a token, 1 advances, 2 forgets the window first
    """

@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    window: ArrayLike | None = None,
    step: ArrayLike | None = None,
    *,
    y: _Array | None = None,
    next: Literal[True] | _Array,
) -> tuple[_Array, _Array]:
    """causal_conv1d(x[B,T,C]:f, w[C,1,W]:v, window[B,C,W-1]:f?, step[B,T]:i?) -> y[B,T,C]:f, next[B,C,W-1]:f?

    y[t] = sum of w[tap] x[t-W+1+tap]; step 0 skips a token, 1 advances, 2 forgets the window first
    """

@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    window: ArrayLike | None = None,
    step: ArrayLike | None = None,
    *,
    y: _Array | None = None,
    next: bool,
) -> Any:
    """causal_conv1d(x[B,T,C]:f, w[C,1,W]:v, window[B,C,W-1]:f?, step[B,T]:i?) -> y[B,T,C]:f, next[B,C,W-1]:f?

    y[t] = sum of w[tap] x[t-W+1+tap]; step 0 skips a token, 1 advances, 2 forgets the window first
    """

@overload
def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    step: ArrayLike | None = None,
    scale: float = 1,
    *,
    o: _Array | None = None,
    final: Literal[False] | None = False,
    recalled: Literal[False] | None = False,
    written: Literal[False] | None = False,
) -> _Array:
    """gated_delta_rule(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?,
        step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?, recalled[B,T,H,V]:f?, written[B,T,H,V]:f?

    per token: S *= exp(g), recalled = k^T S, written = u = (v - recalled) beta, S += k u^T, o = (q scale)^T S; step
    0 skips, 2 zeroes S first
    """

@overload
def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    step: ArrayLike | None = None,
    scale: float = 1,
    *,
    o: _Array | None = None,
    final: bool | _Array | None = False,
    recalled: bool | _Array | None = False,
    written: bool | _Array | None = False,
) -> Any:
    """gated_delta_rule(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?,
        step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?, recalled[B,T,H,V]:f?, written[B,T,H,V]:f?

    per token: S *= exp(g), recalled = k^T S, written = u = (v - recalled) beta, S += k u^T, o = (q scale)^T S; step
    0 skips, 2 zeroes S first
    """

@overload
def gated_delta_rule_chunked(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    step: ArrayLike | None = None,
    scale: float = 1,
    *,
    o: _Array | None = None,
    final: Literal[False] | None = False,
) -> _Array:
    """gated_delta_rule_chunked(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?,
        step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?

    gated_delta_rule, 64 tokens at a time as matrix products; a token with step 2 begins a chunk
    """

@overload
def gated_delta_rule_chunked(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    step: ArrayLike | None = None,
    scale: float = 1,
    *,
    o: _Array | None = None,
    final: Literal[True] | _Array,
) -> tuple[_Array, _Array]:
    """gated_delta_rule_chunked(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?,
        step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?

    gated_delta_rule, 64 tokens at a time as matrix products; a token with step 2 begins a chunk
    """

@overload
def gated_delta_rule_chunked(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    step: ArrayLike | None = None,
    scale: float = 1,
    *,
    o: _Array | None = None,
    final: bool,
) -> Any:
    """gated_delta_rule_chunked(q[B,T,G,K]:f, k[B,T,G,K]:f, v[B,T,H,V]:f, g[B,T,H]:f, beta[B,T,H]:f, state[B,H,K,V]:f?,
        step[B,T]:i?, scale=1) -> o[B,T,H,V]:f, final[B,H,K,V]:f?

    gated_delta_rule, 64 tokens at a time as matrix products; a token with step 2 begins a chunk
    """
