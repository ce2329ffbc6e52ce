"""(7) the error of activations by site and position, as a picture with the first site outside outlined."""

from base64 import b64encode
from html import escape

import numpy as np

from qwenref.arrays import DIVERGING, palette, png, shrunk
from qwenref.compare.plot import LEFT, RIGHT, WIDTH, figure

_SPAN = 6.0  # the colours end at 2^-6 and 2^6 times a rounding variant's error
_BAD = 254


def heatmap(report, most=256):
    """The figure, or None where there are no activations."""
    found, values = report.localisation, report.arrays.get("layer_error")
    if found is None or values is None or not np.size(values) or np.ndim(values) != 2:
        return None
    values = np.asarray(values, np.float64)
    logs = np.log2(np.where(values > 0, values, np.nan))
    small, blocks = shrunk(logs, most)
    uri = "data:image/png;base64," + b64encode(png(_indices(small), _colours())).decode()
    names = [row["site"] for row in found["sites"]]
    height = max(60, min(6 * len(names), 360))
    parts = [
        f'<image href="{uri}" x="{LEFT}" y="6" width="{WIDTH - LEFT - RIGHT}" height="{height}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    ]
    parts += _layers(found["sites"], height)
    parts.append(_outline(found["first_bad"], names, values.shape, height))
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{height + 22}" text-anchor="middle">position</text>')
    caption = (
        "Sites downwards in the order of the forward pass, positions across; log2 of the error to that of a rounding "
        f"variant's: blue below, white equal, brown above, ends at {_SPAN:g}; grey where there is none."
    )
    return figure("".join(parts), height + 30, said(found), caption + (" The largest of each block." if blocks else ""))


def said(found):
    first = found["first_bad"]
    if first is None:
        return f"all {len(found['sites']):,} sites inside"
    place = f" at position {first['pos']:,}" if first.get("pos") is not None else ""
    return f"first outside: {first['site']}{place}"


def _indices(logs):
    share = np.clip((logs + _SPAN) / (2 * _SPAN), 0, 1)
    return np.where(np.isfinite(logs), np.nan_to_num(np.rint(share * (_BAD - 1))), _BAD).astype(np.uint8)


def _colours():
    return np.concatenate([palette(DIVERGING, _BAD), np.array([[128, 128, 128]], np.uint8)])


def _layers(sites, height):
    """The layer's number where a layer begins, as many as there is room for."""
    begins = [i for i, row in enumerate(sites) if i == 0 or row.get("layer") != sites[i - 1].get("layer")]
    apart, last = 12 * len(sites) / height, float("-inf")
    for i in begins:
        if i - last >= apart:
            last = i
            layer = sites[i].get("layer")
            name = str(layer) if layer is not None else sites[i]["site"][:8]
            y = 15 + i * height / len(sites)
            yield f'<text class="q" x="{LEFT - 4}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>'


def _outline(first, names, shape, height):
    if first is None or first["site"] not in names:
        return ""
    row, wide = names.index(first["site"]), (WIDTH - LEFT - RIGHT) / shape[1]
    x, width = (LEFT, WIDTH - LEFT - RIGHT) if first.get("pos") is None else (LEFT + first["pos"] * wide, max(wide, 4))
    high = height / len(names)
    return f'<rect class="x" x="{x:.1f}" y="{6 + row * high:.1f}" width="{width:.1f}" height="{max(high, 4):.1f}"/>'
