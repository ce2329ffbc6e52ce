"""What a Cache shows: how much it holds and for what, then one line per kind of layer."""

from html import escape

from qwenref.html import block, table
from qwenref.pictures import waiting_arrays
from qwenref.plain import broken
from qwenref.tree import index_ranges


def cache_text(cache):
    """Lines: the sum with its parts, then layers and shapes of each kind."""
    try:
        return [headline(cache), *("  " + "  ".join(row) for row in rows(cache))]
    except Exception as error:
        return [f"Cache · {broken(error)}"]


def cache_html(cache):
    try:
        return block(f"<p><b>{escape(headline(cache))}</b></p>\n" + table((), rows(cache)))
    except Exception as error:
        return block(f"<p>Cache · {escape(broken(error))}</p>")


def headline(cache):
    lengths = cache.length.tolist()
    tokens = f"{lengths[0]:,}"
    if len(set(lengths)) > 1:
        more = [f"… {len(lengths) - 4:,} more"] if len(lengths) > 4 else []
        tokens = ", ".join([*(f"{n:,}" for n in lengths[:4]), *more])
    rows = "1 row" if cache.batch == 1 else f"{cache.batch:,} rows"
    sums = {}
    for layer in cache.layers:
        for name, array in layer.arrays().items():
            part = _PARTS[name]
            layers, nbytes = sums.get(part, (set(), 0))
            sums[part] = layers | {id(layer)}, nbytes + array.nbytes
    ordered = [(part, *sums[part]) for part in ("keys/values", "state", "conv") if part in sums]
    parts = " + ".join(f"{len(layers)} x {part} {_size(nbytes)}" for part, layers, nbytes in ordered)
    pictures = waiting_arrays(cache.waiting).values()
    if pictures:
        parts += f" + {len(pictures)} x picture {_size(sum(array.nbytes for array in pictures))}"
    one = "" if tokens == "1" else "s"
    return f"Cache · {rows}, {tokens} token{one} · {_size(cache.nbytes)} = {parts}"


_PARTS = {"keys": "keys/values", "values": "keys/values", "recurrent_state": "state", "conv_state": "conv"}
_DIMS = {
    "keys": "B {}, K-head {}, S {:,}, D {}",
    "recurrent_state": "B {}, V-head {}, K {}, D {}",
    "conv_state": "B {}, C {:,}, W-1 {}",
}


def rows(cache):
    """(kind, layers, arrays) of each kind there is."""
    for kind, first, words in (("attention", "keys", "keys, values"), ("DeltaNet", "recurrent_state", "state")):
        at = [i for i, layer in enumerate(cache.layers) if first in layer.arrays()]
        if not at:
            continue
        arrays = cache.layers[at[0]].arrays()
        shown = [f"{words} {_shape(first, arrays[first])}"]
        if "conv_state" in arrays:
            shown.append(f"conv {_shape('conv_state', arrays['conv_state'])}")
        yield f"{kind:<9}", f"layer{'s' * (len(at) > 1)} {index_ranges(at)}", " · ".join(shown)
    for row, (begun, pictures) in enumerate(cache.waiting):
        inside = [f"inside {begun.picture.name} ({begun.met:,} of {begun.picture.tokens:,} tokens)"] if begun else []
        later = [", ".join(picture.name for picture in pictures[:4]) + (", …" if len(pictures) > 4 else "")]
        if begun or pictures:
            yield "pictures", f"row {row}", " · ".join(inside + [f"waits for {text}" for text in later if text])
    if cache.snapshot_every is not None:
        held = len({id(mark) for marks in cache._marks for mark in marks.values()})
        every = f"every {cache.snapshot_every:,} token{'s' * (cache.snapshot_every > 1)}"
        yield "snapshots", every, f"{held:,} held, {_size(cache.snapshot_nbytes)}"


def _shape(name, array):
    return f"{array.dtype.name} [{_DIMS[name].format(*array.shape)}]"


def _size(nbytes):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.{3 if unit == 'GiB' else 1}f} {unit}"
    return f"{nbytes} B"
