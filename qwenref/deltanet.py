"""Gated DeltaNet laid open: the exact token-to-token map, and the two orders its value heads are stored in."""

import numpy as np

from qwenref import naive
from qwenref.capture import Capture
from qwenref.errors import InputError, ShapeError, compose
from qwenref.exchange import as_array
from qwenref.numerics import active, unless_chosen


def token_map(layer, ids_or_hidden):
    """M float64 [B, V-head, T, T] of a GatedDeltaNet with an empty state; see `GatedDeltaNet.token_map`."""
    with unless_chosen(getattr(layer.root, "numerics", "fp32")):
        return _token_map(layer, as_array(ids_or_hidden))


def _token_map(layer, hidden):
    if hidden.dtype.kind in "iu":
        hidden = _hidden_of(layer, hidden)
    if hidden.ndim != 3 or hidden.shape[2] != layer.sizes["H"]:
        raise ShapeError(
            compose(
                "token_map: neither ids nor hidden states",
                found=f"{hidden.dtype} {list(hidden.shape)}",
                expected=f"int [T] or [B, T], or float [B, T, H {layer.sizes['H']:,}]",
            )
        )
    with Capture(layer, "q", "k", "g", "beta") as c:
        layer(hidden.astype(active().dtype, copy=False))
    return naive.token_map(c["q"], c["k"], c["g"], c["beta"], layer.scaling)


def _hidden_of(layer, ids):
    """What the mixer gets when the model it belongs to reads `ids`."""
    model = layer.root
    if model is None or not hasattr(model, "text_model"):
        raise InputError(compose("token_map: a layer outside of a model takes hidden states, not ids"))
    name = f"layers.{layer.layer_idx}.input_layernorm"
    with Capture(model, name, stop_at=name) as c:
        model(ids)
    return c[name]


def to_gguf_order(array, key_heads, value_heads, axis=0):
    """Move value heads from the checkpoint's order to that of GGUF files.

    A checkpoint groups them: value head h reads key head h // r, r = value_heads / key_heads.  GGUF files tile them:
    head h reads key head h % key_heads.  `axis` holds the value heads one after the other, any number of entries each.
    """
    return _reordered(array, key_heads, value_heads, axis, grouped=True)


def from_gguf_order(array, key_heads, value_heads, axis=0):
    """The way back from `to_gguf_order`."""
    return _reordered(array, key_heads, value_heads, axis, grouped=False)


def _reordered(array, key_heads, value_heads, axis, grouped):
    array = np.asarray(array)
    axis = axis % array.ndim
    size = array.shape[axis]
    if key_heads < 1 or value_heads % key_heads or size % value_heads:
        raise ShapeError(
            compose(
                f"axis {axis} of {size:,} entries does not hold {value_heads} value heads over {key_heads} key heads",
                found=list(array.shape),
                expected="value heads a multiple of key heads, entries a multiple of value heads",
            )
        )
    ratio, width = value_heads // key_heads, size // value_heads
    pair = (key_heads, ratio) if grouped else (ratio, key_heads)
    split = array.reshape(*array.shape[:axis], *pair, width, *array.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(array.shape)
