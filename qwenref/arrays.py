"""What an array holds, in one line of text, and as a small picture.  Works in pieces; keeps no copy of an array."""

import struct
import zlib
from base64 import b64encode
from collections import namedtuple

import numpy as np

EXACT = 1 << 24  # elements up to which every one is looked at
_PIECE = 1 << 15

Statistics = namedtuple("Statistics", "mean std min max nan inf masked first_bad stride")


def statistics(array, limit=EXACT):
    """Statistics of an array: mean, std, min and max over the finite entries, counts of the others, the index of the
    first NaN or +inf.  `-inf` counts as masked.  Above `limit` elements one in `stride` is looked at."""
    array = np.asarray(array)
    stride = max(1, -(-array.size // limit)) if limit else 1
    if stride > 1 and stride % 2 == 0:
        stride += 1  # widths are even: an even stride would look at the same columns again and again
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    count = nan = inf = masked = 0
    mean = squares = 0.0
    low, high, first = np.inf, -np.inf, None
    for begin in range(0, array.size, _PIECE * stride):
        piece = np.asarray(flat[begin : begin + _PIECE * stride : stride])
        good = np.isfinite(piece)
        if not good.all():
            nans, infs = np.isnan(piece), np.isposinf(piece)
            nan, inf, masked = nan + int(nans.sum()), inf + int(infs.sum()), masked + int(np.isneginf(piece).sum())
            if first is None and (nans | infs).any():
                first = begin + int(np.argmax(nans | infs)) * stride
            piece = piece[good]
        if piece.size:
            values = piece.astype(np.float64)
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            # Sums of squares around the piece's own mean, joined: no cancellation when the mean is large.
            own = float(values.mean())
            spread = float(np.square(values - own).sum())
            total = count + values.size
            squares += spread + (own - mean) ** 2 * count * values.size / total
            mean += (own - mean) * values.size / total
            count = total
    if not count:
        mean = low = high = float("nan")
    index = None if first is None else tuple(int(i) for i in np.unravel_index(first, array.shape))
    return Statistics(mean, (squares / count) ** 0.5 if count else mean, low, high, nan, inf, masked, index, stride)


def extent(array, limit):
    """Statistics of which only range, counts and stride are looked for: quick where every entry is finite."""
    array = np.asarray(array)
    stride = max(1, -(-array.size // limit))
    stride += stride > 1 and stride % 2 == 0
    if array.size and array.flags.c_contiguous:
        some = array.reshape(-1)[::stride]
        low, high = float(some.min()), float(some.max())  # either would be NaN or infinite if an entry were
        if abs(low) < np.inf and abs(high) < np.inf:
            return Statistics(None, None, low, high, 0, 0, 0, None, stride)
    return statistics(array, limit)


def shape_text(array, labels=None):
    """ "float32 [B 1, T 64, V-head 48]"; labels that are not one per dimension are left out."""
    labels = labels if labels is not None and len(labels) == array.ndim else ("",) * array.ndim
    sizes = ", ".join(f"{label} {size:,}".strip() for label, size in zip(labels, array.shape, strict=True))
    return f"{array.dtype.name} [{sizes}]"


def array_line(array, labels=None, limit=EXACT):
    """The line that stands for an array everywhere: dtype, named dimensions, statistics, and whether it is finite."""
    array = np.asarray(array)
    words = [shape_text(array, labels)]
    if array.size == 0:
        return f"{words[0]} · empty"
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        return f"{words[0]} · {array.dtype}"
    found = statistics(array, limit)
    if found.min == found.min:
        words += [f"mean {found.mean:.4g}", f"std {found.std:.4g}", range_text(found)]
    words.append(finite_text(found))
    if found.stride > 1:
        words.append(f"sample of 1 in {found.stride:,}")
    return " · ".join(words)


def range_text(found):
    return f"{found.min:.4g} … {found.max:.4g}"


def finite_text(found):
    """ "finite", "masked 2,016", or what is wrong and where it begins."""
    bad = [f"{n:,} {name}" for n, name in ((found.nan, "NaN"), (found.inf, "inf")) if n]
    masked = [f"masked {found.masked:,}"] if found.masked else []
    if bad:
        return " · ".join([*masked, f"{' and '.join(bad)} first at {list(found.first_bad)}"])
    return masked[0] if masked else "finite"


# ---- pictures -----------------------------------------------------------------------------------------------------

SEQUENTIAL = ("#ffffff", "#9ecae1", "#0072b2", "#001e3c")
DIVERGING = ("#004478", "#56b4e9", "#f7f7f7", "#e69f00", "#823c00")
_BAD = 255  # index of entries that are not finite
_BAD_COLOUR = "#808080"


def palette(stops, n=_BAD):
    """uint8 [n, 3]: the stops, joined by straight lines."""
    colours = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops], float)
    at = np.linspace(0, len(stops) - 1, n)
    return (
        np.stack([np.interp(at, np.arange(len(stops)), channel) for channel in colours.T], 1).round().astype(np.uint8)
    )


def png(indices, colours):
    """Bytes of an 8-bit indexed PNG; `indices` uint8 [height, width], `colours` uint8 [n, 3]."""
    height, width = indices.shape

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = np.zeros((height, width + 1), np.uint8)  # every row begins with its filter: none
    rows[:, 1:] = indices
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", np.ascontiguousarray(colours, np.uint8).tobytes())
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def shrunk(matrix, most=96):
    """At most most x most entries: of each block the one with the largest magnitude, NaN before any."""
    blocks = [-(-size // most) for size in matrix.shape]
    if max(blocks) == 1:
        return np.asarray(matrix, np.float32), False
    for axis, block in enumerate(blocks):
        begins = np.arange(0, matrix.shape[axis], block)
        high, low = np.maximum.reduceat(matrix, begins, axis), np.minimum.reduceat(matrix, begins, axis)
        matrix = np.where(np.abs(high) >= np.abs(low), high, low)
        matrix = np.where(np.isnan(high), high, matrix)
    return np.asarray(matrix, np.float32), True


def picture(matrix, most=96):
    """(data URI of a PNG, smallest value of the scale, largest, whether blocks were taken) of a 2-D array."""
    values, blocks = shrunk(matrix, most)
    good = np.isfinite(values)
    low, high = (float(values[good].min()), float(values[good].max())) if good.any() else (0.0, 0.0)
    if low < 0:
        high = max(-low, high)
        low = -high
    scale = np.where(good, (values - low) / (high - low), 0) if high > low else np.zeros(values.shape)
    indices = np.where(good, np.rint(scale * (_BAD - 1)), _BAD).astype(np.uint8)
    bad = [[int(_BAD_COLOUR[i : i + 2], 16) for i in (1, 3, 5)]]
    colours = np.concatenate([palette(DIVERGING if low < 0 else SEQUENTIAL), np.array(bad, np.uint8)])
    return "data:image/png;base64," + b64encode(png(indices, colours)).decode(), low, high, blocks
