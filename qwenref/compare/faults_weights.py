"""Faults of weights: which tensor is where, and in how few bits."""

import functools

import ml_dtypes
import numpy as np

from qwenref.compare.faults_base import add
from qwenref.compare.faults_model import Ops, Weights
from qwenref.compare.faults_ops import has_delta
from qwenref.parameter import Parameter

_KEPT = 1 << 29  # bytes of rounded weights a faulty model holds; those above are made again in each call

# ---- in the wrong place --------------------------------------------------------------------------------------------


def _tied(model, layers):
    model.tie_weights()


def _small_keys(model, layers):
    """Taps of the convolution of DeltaNet's keys, a thousandth: keys so short that an eps counts."""
    for layer in model.text_model.layers:
        if layer.layer_type == "linear_attention":
            mixer = layer.linear_attn
            taps = np.array(mixer.conv1d.weight.numpy())
            taps[mixer.key_dim : 2 * mixer.key_dim] *= taps.dtype.type(1e-3)
            mixer.conv1d.weight = Parameter(taps)


def _untied(model, layers):
    """A head nobody loaded: numbers as a fresh one has."""
    shape, dtype = model.lm_head.weight.shape, model.lm_head.weight.dtype
    drawn = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.02)
    model.lm_head.weight = Parameter(drawn.astype(dtype))


def _exchange(a, b):
    """Let two modules of one kind have each other's parameters."""
    for (path, first), (_, second) in zip(a.named_modules(), b.named_modules(), strict=True):
        assert type(first).__name__ == type(second).__name__, path  # a fault in one of them makes a class of its own
        for name, parameter in list(first._parameters.items()):
            first._parameters[name], second._parameters[name] = second._parameters[name], parameter


def _swapped(model, layers):
    _exchange(*(model.text_model.layers[i] for i in layers))


def _borrowed(model, layers):
    """The MLP of the first layer has the weights of the second's."""
    to, source = (model.text_model.layers[i].mlp for i in layers)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(to, name).weight = getattr(source, name).weight


def _missing(model, layers):
    for i in layers:
        mlp = model.text_model.layers[i].mlp
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(mlp, name)
            linear.weight = Parameter(np.zeros(linear.weight.shape, linear.weight.dtype))


def _down(change):
    """The down projections of the layers, their columns changed: `change(first half, second half)` gives both."""

    def changed(model, layers):
        for i in layers:
            linear = model.text_model.layers[i].mlp.down_proj
            halves = np.split(linear.weight.numpy(), 2, axis=1)
            linear.weight = Parameter(np.concatenate(change(*halves), axis=1))

    return changed


def _transposed(model, layers):
    for i in layers:
        linear = _square(model.text_model.layers[i])
        linear.weight = Parameter(np.ascontiguousarray(linear.weight.numpy().T))


def _head_early(model, layers):
    """The last MLP adds nothing, and its norm is in the place of the final one."""
    last = model.text_model.layers[-1]
    last.mlp.down_proj.weight = Parameter(np.zeros_like(last.mlp.down_proj.weight.numpy()))
    model.text_model.norm.weight = last.post_attention_layernorm.weight


def _square(layer):
    """The first linear of a layer with as many rows as columns, or None."""
    linears = (module for module in layer.modules() if type(module).__name__ == "Linear")
    return next((linear for linear in linears if linear.in_features == linear.out_features), None)


# Where each of them can be: tuples of layers.


def each_layer(model):
    return [(i,) for i in range(model.config.text_config.num_hidden_layers)]


def _neighbours(model):
    """Pairs of a layer and the next one of its kind."""
    kinds = model.config.text_config.layer_types
    following = (
        (i, next((j for j in range(i + 1, len(kinds)) if kinds[j] == kinds[i]), None)) for i in range(len(kinds))
    )
    return [pair for pair in following if pair[1] is not None]


def _next_layers(model):
    return [(i, i + 1) for i in range(model.config.text_config.num_hidden_layers - 1)]


def _with_square(model):
    return [(i,) for (i,) in each_layer(model) if _square(model.text_model.layers[i]) is not None]


def _halves(model):
    return each_layer(model) if model.config.text_config.intermediate_size % 2 == 0 else []


def _is_tied(model):
    return model.lm_head.weight is model.text_model.embed_tokens.weight


def _weights(name, what, change, number=26, **facts):
    add(name, "weights", what, Weights(change), number=number, **facts)


# fmt: off
_weights("head-tied", "the embedding in the place of the head", _tied, 9, applies=lambda model: not _is_tied(model))
_weights("head-untied", "a head of its own, drawn at random, where it is the embedding", _untied, 9, applies=_is_tied)
_weights("layers-swapped", "two layers have each other's weights", _swapped, sites=_neighbours, family="layers")
_weights("mlp-borrowed", "an MLP has the weights of the next layer's", _borrowed, sites=_next_layers, family="shards")
_weights("shard-zero", "the weights of an MLP are zeros", _missing, sites=each_layer, family="shards")
_weights("half-zero", "half of the columns of a down projection are zeros",
         _down(lambda a, b: (a, np.zeros_like(b))), sites=_halves, family="shards")
_weights("shards-swapped", "the two halves of a down projection have changed places", _down(lambda a, b: (b, a)),
         sites=_halves, family="shards")
_weights("transposed", "a square matrix is transposed", _transposed, sites=_with_square)
_weights("head-early", "the head reads what the last MLP reads, not what is behind the final norm", _head_early, None)
_weights("keys-small", "keys of DeltaNet a thousandth as long: a probe for eps", _small_keys, None, hypothesis=False,
         applies=has_delta)
# fmt: on


# ---- in few bits ---------------------------------------------------------------------------------------------------


def integers(bits, group):
    """Weights as whole numbers of so many bits times a scale for each `group` columns: largest magnitude / largest."""

    def rounded(w):
        O, I = w.shape
        if I % group:  # such a tensor is left as it is
            return w
        groups = w.astype(np.float32).reshape(O, I // group, group)
        most = np.float32(2 ** (bits - 1) - 1)
        scale = np.max(np.abs(groups), axis=-1, keepdims=True) / most
        scale[scale == 0] = 1
        return (np.clip(np.rint(groups / scale), -most, most) * scale).reshape(O, I)

    return rounded


def fp8_blocks(w, size=128):
    """Weights as fp8 (e4m3) times a scale for each block of 128 by 128: largest magnitude / 448."""
    O, I = w.shape
    wide = np.zeros((-(-O // size) * size, -(-I // size) * size), np.float32)
    wide[:O, :I] = w
    blocks = wide.reshape(wide.shape[0] // size, size, -1, size)
    scale = np.abs(blocks).max(axis=(1, 3), keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    made = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return np.ascontiguousarray(made.reshape(wide.shape)[:O, :I])


def _blocks(w):
    """Blocks of 32 columns, or None where there are no whole ones."""
    O, I = w.shape
    return None if I % 32 else w.astype(np.float32).reshape(O, I // 32, 32)


def q8_0(w):
    """GGUF's Q8_0: whole numbers up to 127 times a float16 for each 32 columns."""
    blocks = _blocks(w)
    if blocks is None:
        return w
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    steps = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    # Halves go away from zero there.
    steps = np.copysign(np.floor(np.abs(steps) + np.float32(0.5)), steps)
    return (steps * scale.astype(np.float16).astype(np.float32)).reshape(w.shape)


def q4_0(w):
    """GGUF's Q4_0: 16 levels from -8 to 7 times a float16 for each 32 columns, the largest being -8 of it."""
    blocks = _blocks(w)
    if blocks is None:
        return w
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scale = largest / np.float32(-8)
    steps = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    steps = np.minimum(np.trunc(steps + np.float32(8.5)), 15) - 8
    return (steps * scale.astype(np.float16).astype(np.float32)).reshape(w.shape)


class GGUF:
    """Projections over weights of a type, their inputs rounded to Q8_0 as llama.cpp multiplies; the embedding too."""

    confined = False

    def __init__(self, rounded, head):
        self.rounded, self.head = rounded, head

    def install(self, model, fault):
        kept = _Rounded(self.rounded)

        def linear(here, was, x, w, b=None, **outputs):
            x = np.asarray(x)
            return was(q8_0(x.reshape(-1, x.shape[-1])).reshape(x.shape), kept.weight(w), b, **outputs)

        Ops((*PROJECTIONS, "lm_head") if self.head else PROJECTIONS, linear=linear).install(model, fault)
        embedding = model.text_model.embed_tokens
        embedding.weight = Parameter(self.rounded(np.asarray(embedding.weight)).astype(np.float32))


class _Rounded:
    """`linear` with weights that `rounded(w)` makes, and which are kept as long as they are few."""

    def __init__(self, rounded):
        self.rounded, self.made, self.size = rounded, {}, 0

    def __call__(self, here, was, x, w, b=None, **outputs):
        return was(x, self.weight(w), b, **outputs)

    def weight(self, w):
        kept = self.made.get(id(w))
        if kept is not None and kept[0] is w:
            return kept[1]
        made = self.rounded(np.asarray(w).view(np.ndarray))
        if self.size + made.nbytes <= _KEPT:
            self.size += made.nbytes
            self.made[id(w)] = w, made
        return made


class Rounding(Ops):
    """Every projection of the layers over weights in few bits; embedding, convolution, norms and head as they are."""

    def __init__(self, rounded):
        self.rounded = rounded

    def install(self, model, fault):
        Ops(PROJECTIONS, linear=_Rounded(self.rounded)).install(model, fault)  # each twin holds its own


PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def _head_rounds(model):
    return model.lm_head.weight.dtype != ml_dtypes.bfloat16


_few = functools.partial(add, kind="quantization", family="weight-bits")
# fmt: off
for _bits, _group in ((8, 32), (8, 128), (4, 32), (4, 128)):
    _few(f"int{_bits}-g{_group}", what=f"weights of {_bits} bits, a scale for each {_group}", number=29,
         mechanism=Rounding(integers(_bits, _group)))
_few("q8_0", what="a GGUF of type Q8_0, multiplied as llama.cpp does", mechanism=GGUF(q8_0, head=True))
_few("q4_0", what="a GGUF of type Q4_0, multiplied as llama.cpp does; its head is not known",
     mechanism=GGUF(q4_0, head=False))
_few("fp8-weights", what="weights in fp8 (e4m3), a scale for each 128 by 128", mechanism=Rounding(fp8_blocks))
add("head-bf16", "quantization", "the head rounded to bf16", applies=_head_rounds,
    mechanism=Ops("lm_head", linear=lambda here, was, x, w, *b: was(x, w.astype(ml_dtypes.bfloat16), *b)))
# fmt: on
