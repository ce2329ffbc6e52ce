"""Faults of config and kernels: an op that is another one inside the modules it belongs to.

A function in a table gets a Here, the op as it would have run, and that op's arguments.
"""

import functools

import ml_dtypes
import numpy as np

from qwenref.compare.faults_base import add, through
from qwenref.compare.faults_model import Ops

# ---- what a model has ----------------------------------------------------------------------------------------------


def text(model):
    return model.config.text_config


def has_attention(model):
    return "full_attention" in text(model).layer_types


def has_delta(model):
    return "linear_attention" in text(model).layer_types


def shares_keys(model):
    """Whether there is a wrong way to share key heads: with one alone, or one for each, all ways are the same."""
    return has_attention(model) and 1 < text(model).num_key_value_heads < text(model).num_attention_heads


def shares_delta_keys(model):
    return has_delta(model) and 1 < text(model).linear_num_key_heads < text(model).linear_num_value_heads


def rotates_in_part(model):
    return has_attention(model) and text(model).rotary_dim < text(model).head_dim


def _widened(*arrays):
    return (np.asarray(array).astype(np.float64) for array in arrays)


# ---- rotary positions ----------------------------------------------------------------------------------------------


def _turned(by, which):
    """Rotation of queries ("q") or of both ("qk") by so many positions more."""

    def make(here):
        was, angle = here.op("rope"), by * here.frequencies(here.config.rotary_dim)
        calls = iter("qk")  # a layer turns its queries, then its keys

        def rope(x, cos, sin):
            if next(calls) in which:
                c, s = _widened(cos, sin)
                cos = (c * np.cos(angle) - s * np.sin(angle)).astype(here.dtype)
                sin = (s * np.cos(angle) + c * np.sin(angle)).astype(here.dtype)
            return was(x, cos, sin)

        return {"rope": rope}

    return Ops("Attention", make)


def _side_by_side(here, was, x, cos, sin):
    """Pairs (2i, 2i + 1) turned where the family turns (i, i + F)."""
    F = cos.shape[-1]
    turned = was(np.concatenate([x[..., : 2 * F : 2], x[..., 1 : 2 * F : 2], x[..., 2 * F :]], axis=-1), cos, sin)
    result = turned.copy()
    result[..., : 2 * F : 2], result[..., 1 : 2 * F : 2] = turned[..., :F], turned[..., F : 2 * F]
    return result


def _other_base(theta):
    return lambda here, was, positions, axis, f: was(positions, axis, here.frequencies(here.config.rotary_dim, theta))


def _whole_head(here, was, positions, axis, f):
    D = here.config.head_dim
    return was(positions, np.zeros(D // 2, np.int64), here.frequencies(D))


def _next_axis(here, was, positions, axis, f):
    return was(positions, (axis + 1) % 3, f)


_rope = functools.partial(add, applies=has_attention)
# fmt: off
_rope("rope-q+1", "kernels", "queries stand one position further than keys", _turned(1, "q"), number=1, family="rope-q")
_rope("rope-q+1/decode", "kernels", "queries stand one position further than keys, in decode alone", _turned(1, "q"),
      number=2, on="decode", family="rope-q")
_rope("rope-q-1", "kernels", "queries stand one position nearer than keys", _turned(-1, "q"), family="rope-q")
_rope("rope-qk+1", "kernels", "queries and keys stand one position further", _turned(1, "qk"),
      number=3, equivalent=True, hypothesis=False)
for _theta in ("1e4", "1e5", "1e6", "1e7"):
    add(f"rope-theta-{_theta}", "config", f"rotary base {_theta}",
        Ops("RotaryEmbedding", rope_table=_other_base(float(_theta))), number=4, family="rope-table",
        applies=lambda model, theta=float(_theta): has_attention(model) and text(model).rope_theta != theta)
add("rotary-whole-head", "config", "every channel of a head is rotated, not the first ones alone",
    Ops("RotaryEmbedding", rope_table=_whole_head), number=4, family="rope-table", applies=rotates_in_part)
_rope("rope-interleaved", "kernels", "neighbouring channels are rotated as pairs", Ops("Attention", rope=_side_by_side),
      number=4, family="rope-table")
_rope("rope-sections", "config", "the rotary axes in another order: the same for text",
      Ops("RotaryEmbedding", rope_table=_next_axis), number=34, equivalent=True, hypothesis=False)
# fmt: on


# ---- norms ---------------------------------------------------------------------------------------------------------


def _norm_weight(by):
    """An RMSNorm whose weight is so much more: it computes 1 + w."""
    return lambda here, was, x, w, *eps: was(x, np.asarray(w).astype(np.float32) + np.float32(by), *eps)


def _norm_rounded(here, was, x, w, *eps):
    """1 + w rounded to bf16, whatever type it is multiplied in."""
    return was(x, _in_bf16(np.asarray(w).astype(np.float32) + np.float32(1)) - np.float32(1), *eps)


_in_bf16 = through(ml_dtypes.bfloat16)


def _decay_rounded(here, was, a, A_log, dt_bias):
    """exp(A_log) rounded to bf16, as A_log is before."""
    return was(a, np.log(_in_bf16(np.exp(_in_bf16(np.asarray(A_log).astype(np.float32))))), dt_bias)


def _norm_eps(here, was, *args):
    return was(*args[:-1], 1e-5)  # every module of ours gives its eps, last


# fmt: off
add("norm-w", "kernels", "RMSNorm multiplies by w, not by 1 + w", Ops("RMSNorm", rms_norm=_norm_weight(-1)),
    number=5, family="norm")
add("norm-2+w", "weights", "RMSNorm multiplies by 2 + w: one was added before",
    Ops("RMSNorm", rms_norm=_norm_weight(1)), number=5, family="norm")
add("norm-1+w-bf16", "weights", "RMSNorm multiplies by 1 + w rounded to bf16", Ops("RMSNorm", rms_norm=_norm_rounded),
    family="norm")
add("loaded-in-bf16", "weights", "all weights rounded to bf16: 1 + w of norms, gated norms and decays as well",
    Ops(("RMSNorm", "RMSNormGated", "GatedDeltaNet"), rms_norm=_norm_rounded, delta_decay=_decay_rounded,
        rms_norm_gated=lambda here, was, x, z, w, eps: was(x, z, _in_bf16(np.asarray(w).astype(np.float32)), eps)),
    family="norm", applies=has_delta)
add("rms-eps-1e-5", "config", "rms_norm_eps 1e-5",
    Ops(("RMSNorm", "RMSNormGated"), rms_norm=_norm_eps, rms_norm_gated=_norm_eps),
    number=25, applies=lambda model: text(model).rms_norm_eps != 1e-5)
# fmt: on


# ---- attention -----------------------------------------------------------------------------------------------------


def attending(change):
    """Ops of attention with other keys, values, bounds or scale: `change(here, k, v, begin, end, scale)` gives all.

    A step that has no keys, values or scale is given None for them.
    """

    def whole(here, was, q, k, v, begin, end, scale, **outputs):
        return was(q, *change(here, q.shape[2], k, v, begin, end, scale), **outputs)

    def scores(here, was, q, k, begin, end, scale):
        k, _, begin, end, scale = change(here, q.shape[2], k, None, begin, end, scale)
        return was(q, k, begin, end, scale)

    def softmax(here, was, s, begin, end):
        _, _, begin, end, _ = change(here, s.shape[1], None, None, begin, end, None)
        return was(s, begin, end)

    def mix(here, was, p, v, begin, end):
        _, v, begin, end, _ = change(here, p.shape[1], None, v, begin, end, None)
        return was(p, v, begin, end)

    return Ops("Attention", attention=whole, attention_scores=scores, attention_softmax=softmax, attention_mix=mix)


def each(change, *arrays):
    return tuple(None if array is None else change(array) for array in arrays)


def _tiled(here, heads, k, v, begin, end, scale):
    """Query head h reads key head h modulo their number, where it is h over their ratio."""

    def tile(x):
        return x[:, np.arange(heads) % x.shape[1]]

    return *each(tile, k, v), begin, end, scale


def _sees_next(here, heads, k, v, begin, end, scale):
    if here.phase.decoding:  # a token that is fed alone has none behind it
        return k, v, begin, end, scale
    return k, v, begin, np.minimum(end + 1, end.max(axis=1, keepdims=True)), scale


def _misses_itself(here, heads, k, v, begin, end, scale):
    return k, v, begin, np.maximum(end - 1, np.minimum(begin + 1, end)), scale  # the first token has itself alone


def _window(tokens):
    def seen(here, heads, k, v, begin, end, scale):
        return k, v, np.maximum(begin, end - tokens), end, scale

    return seen


def _hidden_scale(here, heads, k, v, begin, end, scale):
    return k, v, begin, end, (here.config.hidden_size / heads) ** -0.5


def _flat(here, was, x, w, b=None, **outputs):
    """Rows of q_proj taken as all queries, then all gates."""
    y, heads = was(x, w, b, **outputs), here.config.num_attention_heads
    return np.ascontiguousarray(y.reshape(*y.shape[:-1], 2, heads, -1).swapaxes(-3, -2)).reshape(y.shape)


_attention = functools.partial(add, applies=has_attention)
# fmt: off
_attention("q-gate-flat", "kernels", "q_proj split into all queries and all gates, not head by head",
           Ops("q_proj", linear=_flat), number=6)
_attention("gate-off", "kernels", "attention without its output gate",
           Ops("Attention", sigmoid_mul=lambda here, was, x, g: x), number=7, family="gate")
_attention("gate-silu", "kernels", "the output gate of attention is silu, not sigmoid",
           Ops("Attention", sigmoid_mul=lambda here, was, x, g: here.op("mul")(x, here.op("silu")(g))),
           number=7, family="gate")
add("gqa-tile", "kernels", "query heads share key heads tiled, not grouped", attending(_tiled),
    number=8, applies=shares_keys)
_attention("mask-sees-next", "kernels", "a token of a prompt sees the one behind it", attending(_sees_next),
           number=33, family="mask")
_attention("mask-misses-itself", "kernels", "a token does not see itself", attending(_misses_itself),
           number=33, family="mask")
for _tokens in (64, 128, 4096):
    _attention(f"window-{_tokens}", "config", f"attention over the last {_tokens} tokens alone",
               attending(_window(_tokens)), family="window")
add("head-dim-scale", "config", "scores scaled by hidden size over heads, not by the head's own width",
    attending(_hidden_scale),
    applies=lambda model: has_attention(model)
    and text(model).head_dim * text(model).num_attention_heads != text(model).hidden_size)
# fmt: on


# ---- Gated DeltaNet ------------------------------------------------------------------------------------------------


def _delta(name, what, number=None, family=None, applies=has_delta, where="GatedDeltaNet", **functions):
    add(name, "kernels", what, Ops(where, **functions), number=number, family=family, applies=applies)


def _tiled_keys(here, was, q, k, v, *others, **outputs):
    heads = np.arange(v.shape[2]) % q.shape[2]
    return was(q[:, :, heads], k[:, :, heads], v, *others, **outputs)


def _unscaled(here, was, q, k, v, g, beta, state=None, step=None, scale=1, **outputs):
    return was(q, k, v, g, beta, state, step, 1, **outputs)


def _l2(root):
    """q and k divided by `root` of the sum of their squares, per head."""

    def l2_norm(here, was, x, *eps):
        (wide,) = _widened(x)
        return (wide / root(np.sum(wide * wide, axis=-1, keepdims=True), x.shape[-1])).astype(here.dtype)

    return l2_norm


def _gate_first(here, was, x, z, w, eps):
    return here.op("rms_norm")(here.op("mul")(x, here.op("silu")(z)), np.asarray(w).astype(np.float32) - 1, eps)


def _sigmoid_gated(here, was, x, z, w, eps):
    normed = here.op("rms_norm")(x, np.asarray(w).astype(np.float32) - 1, eps)
    return here.op("sigmoid_mul")(normed, z)


def _taps(order):
    """A convolution whose taps [C, 1, W] are `order(w)`."""
    return lambda here, was, x, w, *others, **outputs: was(x, np.ascontiguousarray(order(w)), *others, **outputs)


def _later(w):
    return np.concatenate([w[..., 1:], np.zeros_like(w[..., :1])], axis=-1)


# fmt: off
_delta("delta-tile", "value heads of DeltaNet share key heads tiled, not grouped", 8, applies=shares_delta_keys,
       gated_delta_rule=_tiled_keys)
_delta("delta-q-unscaled", "queries of DeltaNet without their scale", 27, gated_delta_rule=_unscaled)
_delta("l2norm-off", "q and k of DeltaNet not normalised", family="l2norm", l2_norm=lambda here, was, x, *eps: x)
_delta("l2norm-eps-1e-5", "q and k of DeltaNet normalised with eps 1e-5", 24, family="l2norm",
       l2_norm=lambda here, was, x, *eps: was(x, 1e-5))
_delta("l2norm-sum", "q and k of DeltaNet divided by their length plus eps", 24, family="l2norm",
       l2_norm=_l2(lambda total, width: np.sqrt(total) + 1e-6))
_delta("l2norm-max", "q and k of DeltaNet divided by their length, eps at least", family="l2norm",
       l2_norm=_l2(lambda total, width: np.maximum(np.sqrt(total), 1e-6)))
_delta("l2norm-mean", "q and k of DeltaNet normalised with eps on the mean, not on the sum", family="l2norm",
       l2_norm=_l2(lambda total, width: np.sqrt(total + 1e-6 * width)))
_delta("dt-bias-off", "the decay without dt_bias", 27, family="decay",
       delta_decay=lambda here, was, a, A_log, dt_bias: was(a, A_log, np.zeros_like(dt_bias)))
_delta("A-log-sign", "the decay with the sign of A_log turned", 27, family="decay",
       delta_decay=lambda here, was, a, A_log, dt_bias: was(a, -np.asarray(A_log), dt_bias))
_delta("beta-raw", "beta without its sigmoid", 27, sigmoid=lambda here, was, x: x)
_delta("conv-no-silu", "no SiLU behind the convolution", family="conv", silu=lambda here, was, x: x)
_delta("conv-reversed", "taps of the convolution in the opposite order", family="conv", where="Conv1d",
       causal_conv1d=_taps(lambda w: w[..., ::-1]))
_delta("conv-late", "the convolution ends one token early", family="conv", where="Conv1d", causal_conv1d=_taps(_later))
_delta("gate-before-norm", "the gated norm multiplies by its gate first", family="gated-norm", where="RMSNormGated",
       rms_norm_gated=_gate_first)
_delta("norm-gate-sigmoid", "the gated norm takes sigmoid of its gate, not silu", family="gated-norm",
       where="RMSNormGated", rms_norm_gated=_sigmoid_gated)
# fmt: on


# ---- the end -------------------------------------------------------------------------------------------------------

# fmt: off
add("logits-bf16", "kernels", "logits rounded to bf16",
    Ops("lm_head", linear=lambda here, was, *args, **outputs: here.op("round_bf16")(was(*args, **outputs))),
    number=32, hypothesis=False)
# fmt: on
