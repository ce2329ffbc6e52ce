"""The bits of a cache and of an output, as bytes that compare."""

import numpy as np

from qwenref.cache_file import pictures_to_arrays


def cache_bits(cache):
    """Everything a cache remembers, by name: dtype, shape and bytes."""
    arrays = {name: getattr(cache, name) for name in ("length", "mask", "rope_deltas", "sequence_begin")}
    arrays["sequence"] = np.zeros(0) if cache.sequence is None else cache.sequence
    arrays |= waiting_arrays(cache)
    for i, layer in enumerate(cache.layers):
        arrays.update({f"layers.{i}.{name}": array for name, array in layer.arrays().items()})
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def waiting_arrays(cache):
    """What the rows remember of pictures, as cache files name it."""
    return {name: np.asarray(array) for name, array in pictures_to_arrays(cache.waiting, cache.met).items()}


def row_of(cache, row):
    """What one row holds: its tokens of keys and values, its windows and states."""
    held = {}
    for i, layer in enumerate(cache.layers):
        for name, array in layer.arrays().items():
            tokens = slice(0, cache.length[row]) if name in ("keys", "values") else slice(None)
            held[f"layers.{i}.{name}"] = array[row][:, tokens].tobytes()
    return held


def run(model, ids, lengths, cache, **options):
    """(logits of all calls, cache) of a prompt handed over in pieces."""
    at, parts = 0, []
    for n in lengths:
        parts.append(model(ids[:, at : at + n], cache=cache, **options).logits)
        at += n
    return np.concatenate(parts, 1)
