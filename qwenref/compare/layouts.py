"""Activations of other engines, brought to the names and shapes of our sites: fused linears, value heads in GGUF order,
heads before tokens, transposed linears, half widths; from npz and safetensors files."""

import os
from typing import NamedTuple
from zipfile import BadZipFile

import ml_dtypes
import numpy as np

from qwenref import _C
from qwenref.compare.errors import ActivationShape, NonFinite, UnknownSite
from qwenref.deltanet import from_gguf_order
from qwenref.errors import CheckpointError, InputError, UnknownName, compose
from qwenref.exchange import as_array
from qwenref.sites import resolve

ORDERS = ("hf", "gguf")
_IDS = ("input_ids", "prompt_ids", "ids")

# Linears that engines join -> ours, in the order of the rows.
_FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


class Activations(NamedTuple):
    """What a file holds: arrays by name, and the ids they belong to, None where it does not say."""

    values: dict
    ids: list | None


def read(path):
    """Activations of a .npz or .safetensors file."""
    path = os.fspath(path)
    ending = os.path.splitext(path)[1]
    if ending not in (".npz", ".safetensors"):
        raise InputError(compose(f"{path}: activations", expected="a .npz or .safetensors file"))
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        if ending == ".safetensors":
            values = {name: np.array(array, order="C") for name, array in _C.Checkpoint(path).items()}
        else:
            with np.load(path, allow_pickle=False) as stored:
                values = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, OSError, BadZipFile, CheckpointError) as error:
        raise InputError(compose(f"{path}: no activations", found=str(error).splitlines()[0])) from error
    ids = next((values.pop(name) for name in _IDS if name in values), None)
    return Activations(values, None if ids is None else [int(id) for id in np.ravel(ids)])


def aligned(model, values, tokens, order="hf"):
    """{site: float32 array in its shape, one row of so many tokens} of arrays under our names, or fused ones.

    order: "gguf" where value heads stand as in GGUF files.  Raises UnknownSite, ActivationShape, NonFinite.
    """
    if order not in ORDERS:
        raise InputError(compose(f"activations: order {order!r}", expected=", ".join(ORDERS)))
    found, config = {}, model.text_model.config
    for name, value in values.items():
        for part, array in _parts(model, name, as_array(value)):
            site = _site(model, part)
            array = _shaped(site, _widened(array), tokens)
            _check_finite(site, array)
            found[site.name] = _heads_in_order(config, site, array, tokens) if order == "gguf" else array
    return found


def _parts(model, name, array):
    """A fused array in its parts, any other as it is."""
    fused = next((key for key in _FUSED if name.endswith(key)), None)
    if fused is None:
        return [(name, array)]
    head = name[: len(name) - len(fused)] + fused.split(".")[0]
    names = [f"{head}.{part}" for part in _FUSED[fused]]
    widths = [_site(model, part).shape[-1] for part in names]
    if array.ndim == 0 or array.shape[-1] != sum(widths):
        expected = (
            f"[T, {sum(widths)}]: {' + '.join(f'{part} {n}' for part, n in zip(_FUSED[fused], widths, strict=True))}"
        )
        raise ActivationShape(compose(f"activations: {name}", found=list(array.shape), expected=expected))
    return list(zip(names, np.split(array, np.cumsum(widths)[:-1], axis=-1), strict=True))


def _site(model, name):
    try:
        sites = resolve(model, [name])
    except UnknownName as error:
        raise UnknownSite(f"activations: {error}") from None
    if len(sites) != 1:
        raise UnknownSite(compose(f"activations: {name!r} is a pattern", expected="the name of one site"))
    site = next(iter(sites.values()))
    if token_axis(site) is None:
        raise UnknownSite(
            compose(
                f"activations: {site.name} has no tokens to be compared by",
                found=f"[{', '.join(site.dims)}]",
                do="leave it out; read, core and normed show what a state does",
            )
        )
    return site


def token_axis(site):
    """The axis of a site that counts tokens, or None; a joined axis that begins with them counts."""
    if site.name.endswith("rotary_emb") or "visual" in site.name.split("."):
        return None
    if site.dims[0].startswith("B*T"):
        return 0
    return site.axis("T") if site.tokens is None else None


def by_token(site, array, tokens):
    """[T, everything else] of a value of one row; masked scores count as 0."""
    array = np.asarray(array)
    rows = array if site.dims[0].startswith("B*T") else np.moveaxis(array, token_axis(site), 0)
    rows = rows.reshape(tokens, -1).astype(np.float64)
    return np.where(np.isneginf(rows), 0.0, rows) if site.site == "scores" else rows


def _widened(array):
    """float32 of any width; NumPy keeps bfloat16 in npz files as two bytes without a type."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32)


def _shape(site, tokens):
    sizes = {"B": 1, "T": tokens, "S": tokens, **site.module.sizes}
    return tuple(
        int(label) if label.isdigit() else int(np.prod([sizes[part] for part in label.split("*")]))
        for label in site.dims
    )


def _shaped(site, array, tokens):
    """The array in the site's shape, whichever of the usual layouts it is in."""
    shape = _shape(site, tokens)
    for layout in _layouts(site, array, tokens, shape):
        if layout.shape == shape:
            return np.ascontiguousarray(layout)
    raise ActivationShape(
        compose(
            f"activations: {site.name}",
            found=list(array.shape),
            expected=f"[{site.labelled(shape)}], without the row, heads joined, heads before tokens, or transposed",
            do="run the engine on the ids that are compared, one row, from an empty cache",
        )
    )


def _layouts(site, array, tokens, shape):
    """The array read in one way after the other: as it is; without rows; heads joined; heads first; transposed."""
    yield array
    if array.shape[:1] == (1,) and array.ndim > 1 and array.shape[1:2] != (1,):
        array = array[0]
    yield array[None]
    size = int(np.prod(shape))
    if array.size != size or array.ndim == 0:
        return
    if array.shape[0] == tokens and token_axis(site) in (0, 1):
        yield array.reshape(shape)
    if len(shape) == 4 and array.ndim == 3 and array.shape == (shape[2], shape[1], shape[3]):
        yield array.swapaxes(0, 1)[None]
    if array.ndim == 2 and array.shape[1] == tokens != array.shape[0]:
        yield array.T.reshape(shape)


def _check_finite(site, array):
    masked = np.isneginf(array) if site.site == "scores" else False
    bad = ~(np.isfinite(array) | masked)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        error = NonFinite(
            compose(f"activations: {site.name}", found=f"{bad.sum():,} values not finite, the first at {list(index)}")
        )
        error.index = index
        raise error


def _heads_in_order(config, site, array, tokens):
    """Value heads moved from GGUF's order to the checkpoint's."""
    name = site.name.rpartition("linear_attn.")[2]
    if ".linear_attn." not in site.name or name in ("out_proj", "q", "k"):
        return array
    G, V = config.linear_num_key_heads, config.linear_num_value_heads
    if name in ("mixed_qkv", "conv_out", "in_proj_qkv", "conv1d"):
        first = config.conv_dim - config.value_dim
        return np.concatenate([array[..., :first], from_gguf_order(array[..., first:], G, V, axis=-1)], axis=-1)
    if site.dims[0].startswith("B*T"):
        return from_gguf_order(array.reshape(tokens, V, -1), G, V, axis=1).reshape(array.shape)
    axis = site.axis("V-head") if site.axis("V-head") is not None else array.ndim - 1
    return from_gguf_order(array, G, V, axis=axis)
