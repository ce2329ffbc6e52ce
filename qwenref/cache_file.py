"""Caches and states as safetensors files: what stands in them under which name, and what is refused on the way back.

A cache (format "qwenref.cache", version 1) has one tensor for each thing a cache remembers:

    length, rope_deltas, sequence_begin    int64 [B]
    mask                                   bool [B, columns]
    sequence                               int64 [B], only after packed rows
    pictures                               int64 [n, 9], pictures not met yet: row, kind (1 image, 2 video), number,
                                           frame group, frame groups, merged height and width, position of its first
                                           placeholder (-1: none came yet), placeholders met
    picture_embeds                         [sum of height x width, H], of one after the other
    met                                    int64 [m, 7], pictures met: row, first token, placeholders, positions taken,
                                           kind, first token of the image or video, frame groups of it that follow
    layers.I.keys, layers.I.values         [B, K-head, S, D], S the longest row, rotated as attention uses them
    layers.I.conv_state                    [B, C, W-1], oldest first
    layers.I.recurrent_state               [B, V-head, K, D], value heads in the checkpoint's order

The names of pictures are there where a row was given any.  Metadata, all text: format, version, dtype, config (JSON of
the text section), snapshot_every, digest (SHA-256 over names, types, shapes and bytes).  States at chosen tokens have a
format of their own, see `qwenref.states`.
"""

import json
import os

import numpy as np

from qwenref import _C
from qwenref.cache import ROWS, AttentionLayerCache, same_geometry
from qwenref.errors import CheckpointError, compose
from qwenref.pictures import Met
from qwenref.positions import NOTHING, Begun, Picture, Waiting

VERSION = "1"


def save(cache, path):
    tensors = {name: getattr(cache, name) for name in ROWS}
    if cache.sequence is not None:
        tensors["sequence"] = cache.sequence
    tensors.update(pictures_to_arrays(cache.waiting, cache.met))
    for i, layer in enumerate(cache.layers):
        tensors.update({f"layers.{i}.{name}": array for name, array in layer.arrays().items()})
    extra = {"snapshot_every": json.dumps(cache.snapshot_every)}
    write(path, "qwenref.cache", cache.config, cache.dtype, tensors, extra)


def load(kind, path, expected):
    tensors, metadata, config = read(path, "qwenref.cache", expected)
    length = tensors.get("length")
    rows = len(length) if isinstance(length, np.ndarray) and length.ndim == 1 else 0
    if rows < 1:
        raise CheckpointError(compose(f"{path}: no rows", found=sorted(tensors)[:5], expected="length int64 [B]"))
    cache = kind(config, rows, json.loads(metadata["snapshot_every"]))
    cache._build(np.dtype(metadata["dtype"]))
    shapes = dict.fromkeys((*ROWS, *(["sequence"] if "sequence" in tensors else [])), (rows,))
    shapes["mask"] = (rows, int(tensors["mask"].shape[-1]) if "mask" in tensors else 0)
    dtypes = dict.fromkeys(shapes, np.int64) | {"mask": bool}
    for name, width in _WIDTHS.items():
        if name in tensors:
            shapes[name], dtypes[name] = (len(tensors[name]), width), np.int64
    if "pictures" in tensors:
        placeholders = int(tensors["pictures"][:, 5:7].prod(axis=1).sum()) if tensors["pictures"].ndim == 2 else 0
        shapes["picture_embeds"] = placeholders, config.hidden_size
    for i, layer in enumerate(cache.layers):
        for name, array in layer.arrays().items():
            grown = isinstance(layer, AttentionLayerCache)
            shapes[f"layers.{i}.{name}"] = (
                (*array.shape[:2], int(length.max()), array.shape[3]) if grown else array.shape
            )
    check(path, tensors, {name: (np.dtype(dtypes.get(name, cache.dtype)), shape) for name, shape in shapes.items()})
    if (tensors["mask"].sum(axis=1) != length).any():
        raise CheckpointError(compose(f"{path}: length and mask disagree", expected="as many columns kept as tokens"))
    for name in _WIDTHS:
        if name in tensors and ((tensors[name][:, 0] < 0) | (tensors[name][:, 0] >= rows)).any():
            raise CheckpointError(
                compose(f"{path}: {name} of a row that is not there", expected=f"rows 0 to {rows - 1}")
            )
    waiting, met = _pictures_of(tensors, rows)
    cache._become(
        waiting=waiting,
        met=met,
        layers=[
            layer.holding({name: tensors[f"layers.{i}.{name}"] for name in layer.arrays()})
            for i, layer in enumerate(cache.layers)
        ],
        sequence=tensors.get("sequence"),
        **{name: tensors[name] for name in ROWS},
    )
    return cache


_WIDTHS = {"pictures": 9, "met": 7}


def pictures_to_arrays(waiting, met):
    """{name: array} of what rows wait for and have met, without the names of what there is nothing of."""
    lines, embeds = [], []
    for row, (begun, pictures) in enumerate(waiting):
        for picture, base, done in (*((begun,) if begun else ()), *((picture, -1, 0) for picture in pictures)):
            grid = picture.frame, picture.frames, picture.height, picture.width
            lines.append((row, picture.kind, picture.number, *grid, base, done))
            embeds.append(picture.embeds)
    arrays = {}
    if lines:
        arrays["pictures"], arrays["picture_embeds"] = np.array(lines, np.int64), np.concatenate(embeds)
    entries = [(row, *entry) for row, own in enumerate(met) for entry in own]
    return arrays | ({"met": np.array(entries, np.int64)} if entries else {})


def _pictures_of(tensors, rows):
    """(waiting, met) of each row, from the arrays of `pictures_to_arrays`."""
    waiting, at = [NOTHING] * rows, 0
    for row, kind, number, frame, frames, height, width, base, done in tensors.get("pictures", ()):
        picture = Picture(int(kind), int(number), int(height), int(width), int(frame), int(frames))
        picture.embeds = tensors["picture_embeds"][at : at + picture.tokens].copy()
        picture.embeds.flags.writeable = False
        at += picture.tokens
        begun, pictures = waiting[row]
        if base >= 0:
            waiting[row] = Waiting(Begun(picture, int(base), int(done)), pictures)
        else:
            waiting[row] = Waiting(begun, (*pictures, picture))
    met = [()] * rows
    for row, *entry in tensors.get("met", ()):
        met[row] = (*met[row], Met(*map(int, entry)))
    return waiting, met


def write(path, form, config, dtype, tensors, extra):
    """One file of the given format, complete or not there."""
    metadata = {"format": form, "version": VERSION, "dtype": np.dtype(dtype).name, "config": config.to_json(), **extra}
    metadata["digest"] = _digest(tensors, metadata)
    _C.save_safetensors(path, tensors, metadata)


def read(path, form, expected):
    """({name: array of one's own}, metadata, text config) of a file of that format, every byte of it as written.

    CheckpointError for any other file, and for one that was made with a model of another geometry than `expected`.
    """
    path = os.fspath(path)
    file = _C.Checkpoint(path)
    metadata = dict(file.metadata)
    if metadata.get("format") != form:
        found = metadata.get("format") or "no format"
        raise CheckpointError(compose(f"{path}: not a file of this kind", found=found, expected=form))
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            compose(
                f"{path}: {form} of an unknown version",
                found=metadata.get("version"),
                expected=VERSION,
                do="read it with the version of qwenref that wrote it",
            )
        )
    tensors = {name: np.array(array, order="C") for name, array in file.items()}
    written = metadata.pop("digest", None)
    if _digest(tensors, metadata) != written:
        raise CheckpointError(
            compose(
                f"{path}: damaged",
                found="its content has another digest than was written",
                do="take another copy of it",
            )
        )
    from qwenref.loading import as_config

    config = as_config(json.loads(metadata["config"])).text_config
    if expected is not None:
        advice = "open it with the model it was made with"
        same_geometry(config, expected, f"{path}: made with another model", CheckpointError, advice)
        config = expected
    return tensors, metadata, config


def check(path, tensors, expected):
    """CheckpointError unless the tensors are exactly those expected: {name: (dtype, shape)}."""
    found = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    if found == expected:
        return
    name = min(name for name in {*found, *expected} if found.get(name) != expected.get(name))

    def shown(one):
        return "nothing of that name" if one is None else f"{one[0]} {list(one[1])}"

    raise CheckpointError(compose(f"{path}: {name}", found=shown(found.get(name)), expected=shown(expected.get(name))))


def _digest(tensors, metadata):
    """SHA-256 of names, types, shapes and bytes, and of the metadata."""
    import hashlib

    sha = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        sha.update(array.reshape(-1).view(np.uint8))
    return sha.hexdigest()
