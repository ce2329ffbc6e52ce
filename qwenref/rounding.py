"""The places where implementations of this family differ, as switches: what each choice does to the ops it touches.

A point has a name, the ops it is about, and choices, of which the first is that of the reference.  A profile is a base
(the compiled ops in float32, or the definitions in float64) and a choice at every point; `build` makes the functions
that take the place of ops.  Points are applied in the order of POINTS, each around what those before it have made.
"""

from collections import namedtuple
from functools import partial

import ml_dtypes
import numpy as np

from qwenref import _C

_WIDER = (np.dtype(np.float32), np.dtype(np.float64))


class Base:
    """What ops are before any point is applied: `.get(op)` the callable, `.dtype` of activations."""

    def __init__(self, dtype, replaced=()):
        self.dtype, self.replaced = np.dtype(dtype), dict(replaced)

    def get(self, op):
        return self.replaced[op] if op in self.replaced else _C.ops[op].compiled

    def rounder(self, choice):
        """A function that rounds an array to the format `choice`, in the dtype of this base."""
        return self.get({"bf16": "round_bf16", "fp16": "round_f16"}[choice])


class Point(namedtuple("Point", "name ops choices make")):
    """`.choices` {choice: what it does}; `.make(choice, get, base)` the replacements {op: callable}, `get(op)` being
    what stands in the op's place so far.  A point without ops is asked for by name (`Profile.stored`)."""

    __slots__ = ()

    @property
    def default(self):
        return next(iter(self.choices))


POINTS = {}


def point(name, ops, **choices):
    """Register the maker below as the point `name`; a choice is written as a keyword, `_` for `-`."""

    def register(make):
        texts = {choice.replace("_", "-"): text for choice, text in choices.items()}
        POINTS[name] = Point(name, tuple(ops.split()), texts, make)
        return make

    return register


def build(base, chosen):
    """({op: callable}, {stored value: rounding}) of a base with the given choices; those not given are the default."""
    changed, stores = {}, {}

    def get(op):
        return changed[op] if op in changed else base.get(op)

    for name, at in POINTS.items():
        choice = chosen.get(name, at.default)
        if choice != at.default:
            made = at.make(choice, get, base)
            if at.ops:
                changed.update(made)
            else:
                stores[name] = made
    _fuse(changed, get)
    return {**base.replaced, **changed}, stores


def _fuse(changed, get):
    """Fused ops follow the parts they stand for, where one of these was changed."""
    if changed.keys() & {"silu", "mul"}:
        silu, mul = get("silu"), get("mul")
        changed["silu_mul"] = lambda g, u: mul(silu(g), u)
    if changed.keys() & {"attention_scores", "attention_softmax", "attention_mix"}:
        scores, softmax, mix = get("attention_scores"), get("attention_softmax"), get("attention_mix")

        def attention(q, k, v, begin, end, scale, p=None):
            weights = softmax(scores(q, k, begin, end, scale), begin, end)
            mixed = mix(weights, v, begin, end)
            if isinstance(p, np.ndarray):
                p[...] = weights
            return (mixed, p if isinstance(p, np.ndarray) else weights) if _wanted(p) else mixed

        changed["attention"] = attention
    if changed.keys() & {"segment_scores", "segment_softmax", "segment_mix"}:
        changed["segment_attention"] = in_segments(get("segment_scores"), get("segment_softmax"), get("segment_mix"))


_AT_ONCE = 1 << 24  # scores that exist at a time


def in_segments(scores, softmax, mix):
    """segment_attention of its three steps, some heads of a segment at a time: a picture has too many pairs for all."""

    def segment_attention(q, k, v, lengths, scale, p=None):
        if _wanted(p):
            weights = softmax(scores(q, k, lengths, scale), lengths)
            if isinstance(p, np.ndarray):
                p[...] = weights
            return mix(weights, v, lengths), p if isinstance(p, np.ndarray) else weights
        context, H, end = np.zeros(q.shape, np.result_type(q, v)), q.shape[1], 0
        for length in np.asarray(lengths).tolist():
            begin, end, heads = end, end + length, max(1, _AT_ONCE // max(1, length * length))
            for h in range(0, H if length else 0, heads):
                at, one = np.s_[begin:end, h : h + heads], np.array([length])
                weights = softmax(scores(q[at], k[at], one, scale), one)
                context[at] = mix(weights, v[at], one)
        return context

    return segment_attention


def _wanted(output):
    """Whether an optional output was asked for, by True or with an array to fill."""
    return isinstance(output, np.ndarray) or bool(output)


def _rounded(ops, choice, get, base):
    """The ops with their first result rounded."""
    to = base.rounder(choice)

    def rounded(inner):
        def call(*args, **kwargs):
            result = inner(*args, **kwargs)
            return (to(result[0]), *result[1:]) if isinstance(result, tuple) else to(result)

        return call

    return {op: rounded(get(op)) for op in ops.split()}


def _rounds(name, ops, doc):
    """A point at which the result of an op, or of some that are alike, is rounded."""
    point(name, ops, float32="as computed", bf16=f"{doc} rounded to bf16", fp16=f"{doc} rounded to fp16")(
        partial(_rounded, ops)
    )


def _stores(name, doc, where=""):
    """A point that belongs to no op: a value is rounded where it is kept."""
    point(name, "", float32="as computed", bf16=f"{doc} bf16{where}", fp16=f"{doc} fp16{where}")(
        lambda choice, get, base: base.rounder(choice)
    )


# ---- products ------------------------------------------------------------------------------------------------------

_ORDERS = {
    "split2": {"parts": 2},
    "split4": {"parts": 4},
    "split8": {"parts": 8},
    "split2-bf16": {"parts": 2, "partials": 1},
    "split4-bf16": {"parts": 4, "partials": 1},
    "rotated2": {"parts": 2, "rotate": 1},
    "rotated4": {"parts": 4, "rotate": 1},
    "rotated8": {"parts": 8, "rotate": 5},
    "reversed4": {"parts": 4, "reverse": 1},
    "reversed8": {"parts": 8, "reverse": 1},
}


@point(
    "matmul",
    "linear",
    class_order="one fixed order of summation, whatever the CPU, the batch and the number of threads",
    openblas="the system's BLAS in float32: bits depend on its version and on the sizes",
    split2="K in 2 blocks, their sums added",
    split4="K in 4 blocks, their sums added",
    split8="K in 8 blocks, their sums added",
    split2_bf16="K in 2 blocks, each sum rounded to bf16 before they are added",
    split4_bf16="K in 4 blocks, each sum rounded to bf16 before they are added",
    rotated2="K in 2 blocks, added from the second on",
    rotated4="K in 4 blocks, added from the second on",
    rotated8="K in 8 blocks, added from the sixth on",
    reversed4="K in 4 blocks, added from the last one back",
    reversed8="K in 8 blocks, added from the last one back",
)
def _matmul(choice, get, base):
    if choice == "openblas":
        return {"linear": base.get("linear_blas")}
    parts, order = base.get("linear_parts"), _ORDERS[choice]
    return {"linear": lambda x, w, b=None: parts(x, w, b, **order)}


_rounds("linear", "linear", "every projection, bias added before,")

_stores("logits", "the logits rounded to")


# ---- the block -----------------------------------------------------------------------------------------------------

_rounds("norm", "rms_norm", "what an RMSNorm returns,")
_rounds("residual", "add", "the residual stream after each addition,")
_rounds("silu", "silu", "SiLU, in the MLP and after the convolution,")
_rounds("product", "mul", "silu(gate) * up")


# ---- attention -----------------------------------------------------------------------------------------------------


@point(
    "rope_table",
    "rope_frequencies rope_table",
    float64="angles, cosines and sines in float64, rounded once",
    float32="frequencies, angles, cosines and sines in float32",
    float32_bf16="the same, cosines and sines then rounded to bf16",
    bf16="formed in float64, rounded to bf16",
)
def _rope_table(choice, get, base):
    inner, to = get("rope_table"), base.rounder("bf16")
    if choice == "bf16":
        return {"rope_table": lambda *args, **kwargs: tuple(map(to, inner(*args, **kwargs)))}

    def frequencies(index, theta, width):
        power = np.float64(np.float32(theta)) ** (np.float32(2) * np.float32(index) / np.float32(width))
        return (np.float32(1) / power.astype(np.float32)).astype(np.float64)

    def table(positions, axis, f):
        angle = np.moveaxis(np.asarray(positions)[axis], 0, -1).astype(np.float32) * np.asarray(f, np.float32)
        turned = (np.cos(angle, dtype=np.float64), np.sin(angle, dtype=np.float64))
        cos, sin = (x.astype(np.float32).astype(base.dtype) for x in turned)
        return (to(cos), to(sin)) if choice.endswith("bf16") else (cos, sin)

    return {"rope_frequencies": frequencies, "rope_table": table}


@point(
    "rotation",
    "rope",
    float32="as computed",
    bf16="both products and their sum rounded to bf16, one after the other",
    bf16_once="the rotated vector rounded to bf16",
)
def _rotation(choice, get, base):
    if choice == "bf16-once":
        return _rounded("rope", "bf16", get, base)
    to = base.rounder("bf16")

    def rope(x, cos, sin):
        F = cos.shape[-1]
        c, s = cos[:, :, None], sin[:, :, None]
        first, second = x[..., :F], x[..., F : 2 * F]
        turned = to(first * c) - to(second * s), to(second * c) + to(first * s)
        return np.concatenate([*map(to, turned), x[..., 2 * F :]], axis=-1)

    return {"rope": rope}


@point(
    "scores",
    "attention_scores segment_scores",
    float32="as computed",
    bf16="q k rounded to bf16, and once more after the scale",
    fp16="q k rounded to fp16, and once more after the scale",
)
def _scores(choice, get, base):
    inner, in_segment, to = get("attention_scores"), get("segment_scores"), base.rounder(choice)

    def scaled(products, scale):
        return to(to(products) * base.dtype.type(scale))

    def scores(q, k, begin, end, scale):
        return scaled(inner(q, k, begin, end, 1.0), scale)

    def segment_scores(q, k, lengths, scale):
        return scaled(in_segment(q, k, lengths, 1.0), scale)

    return {"attention_scores": scores, "segment_scores": segment_scores}


_rounds("probabilities", "attention_softmax segment_softmax", "attention weights")
_rounds("context", "attention_mix segment_mix", "weights times values")

_stores("kv", "keys and values kept in")


@point("gate", "sigmoid_mul", float32="as computed", bf16="sigmoid(gate), then its product, rounded to bf16")
def _gate(choice, get, base):
    sigmoid, to = base.get("sigmoid"), base.rounder(choice)
    return {"sigmoid_mul": lambda x, g: to(x * to(sigmoid(g)))}


# ---- Gated DeltaNet ------------------------------------------------------------------------------------------------

_rounds("conv", "causal_conv1d", "the convolution, before SiLU,")
_rounds("beta", "sigmoid", "beta")


@point(
    "qk",
    "l2_norm",
    float32="q and k normalised in float32 or better",
    bf16="normalised q and k rounded to bf16",
    bf16_inside="squares, their sum, its root and the quotient each rounded to bf16",
)
def _qk(choice, get, base):
    if choice == "bf16":
        return _rounded("l2_norm", "bf16", get, base)
    to = base.rounder("bf16")

    def l2_norm(x, eps=1e-6):
        total = np.sum(to(x * x), axis=-1, keepdims=True, dtype=np.float64).astype(base.dtype)
        root = 1 / np.sqrt(to(to(total) + base.dtype.type(eps)).astype(np.float64))
        return to(x * to(root.astype(base.dtype)))

    return {"l2_norm": l2_norm}


@point(
    "delta",
    "gated_delta_rule",
    recurrent="token by token: the definition",
    chunk64="calls of several tokens in the chunked form, 64 tokens at a time; one token as the definition",
)
def _delta(choice, get, base):
    chunked, recurrent = base.get("gated_delta_rule_chunked"), get("gated_delta_rule")

    def rule(q, k, v, g, beta, state=None, step=None, scale=1, final=None, **by_products):
        tokens = (q, k, v, g, beta, state, step, scale)
        if v.shape[1] == 1:
            return recurrent(*tokens, final=final, **by_products)
        results = chunked(*tokens, final=final)
        results = results if isinstance(results, tuple) else (results,)
        if any(map(_wanted, by_products.values())):  # the chunked form has none: those of the definition
            results += recurrent(*tokens, **by_products)[1:]
        return results if len(results) > 1 else results[0]

    return {"gated_delta_rule": rule}


_rounds("read", "gated_delta_rule", "what the state is read as")

_stores("state", "kept in", " between calls")


@point(
    "gated_norm",
    "rms_norm_gated",
    float32="as computed",
    bf16="rounded to bf16 once",
    bf16_inside="norm, norm * weight and the gated product each rounded to bf16",
)
def _gated_norm(choice, get, base):
    if choice == "bf16":
        return _rounded("rms_norm_gated", "bf16", get, base)
    norm, silu, to = base.get("rms_norm"), base.get("silu"), base.rounder("bf16")

    def rms_norm_gated(x, z, w, eps=1e-6):
        normed = to(norm(x, np.zeros(x.shape[-1], base.dtype), eps))
        weighted = to(np.asarray(w).astype(base.dtype) * normed)
        return to(weighted * silu(z))

    return {"rms_norm_gated": rms_norm_gated}


# ---- the vision tower ----------------------------------------------------------------------------------------------

_stores("pixels", "pixels in")


@point(
    "positions",
    "sample_table",
    float32="places in the table in float64, what is sampled there rounded once",
    bf16="places in float32, what is sampled there rounded to bf16",
)
def _positions(choice, get, base):
    inner, to = get("sample_table"), base.rounder(choice)

    def sample(w, row, column):
        row, column = (np.asarray(at, np.float32).astype(np.float64) for at in (row, column))
        return to(inner(w, row, column))

    return {"sample_table": sample}


_rounds("layer_norm", "layer_norm", "what a LayerNorm returns,")


@point(
    "patch_table",
    "grid_table",
    float64="angles, cosines and sines of rows and columns in float64, rounded once",
    float32="angles, cosines and sines of rows and columns in float32",
)
def _patch_table(choice, get, base):
    def table(positions, f):
        angle = np.asarray(positions).T[:, :, None].astype(np.float32) * np.asarray(f, np.float32)
        turned = (np.cos(angle, dtype=np.float64), np.sin(angle, dtype=np.float64))
        return tuple(x.astype(np.float32).astype(base.dtype) for x in turned)

    return {"grid_table": table}


_rounds("patch_rotation", "rope_whole", "a patch's rotated query and key, once,")
_rounds("gelu", "gelu gelu_tanh", "GELU, in blocks and in the merger,")


# ---- parameters ----------------------------------------------------------------------------------------------------

# Last, so that it is around whatever has taken the place of an op.
_PARAMETERS = {  # op -> places of its parameters among the arguments
    "linear": (1, 2), "rms_norm": (1,), "rms_norm_gated": (2,), "delta_decay": (1, 2), "causal_conv1d": (1,),
    "layer_norm": (1, 2), "sample_table": (0,),
}  # fmt: skip


@point(
    "parameters",
    "embedding linear rms_norm rms_norm_gated delta_decay causal_conv1d layer_norm sample_table",
    stored="as stored in the file, each in its own dtype",
    bf16="every parameter in bf16, those the file holds in float32 too",
)
def _parameters(choice, get, base):
    def narrow(inner, places):
        def call(*args, **kwargs):
            return inner(*(_narrowed(a) if i in places else a for i, a in enumerate(args)), **kwargs)

        return call

    narrowed = {op: narrow(get(op), places) for op, places in _PARAMETERS.items()}
    return narrowed | _rounded("embedding", choice, get, base)  # rows, rather than the whole table


def _narrowed(array):
    """A wider array in bf16; what is narrow already, or missing, stays as it is."""
    return array.astype(ml_dtypes.bfloat16) if isinstance(array, np.ndarray) and array.dtype in _WIDER else array
