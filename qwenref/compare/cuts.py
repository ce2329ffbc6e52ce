"""Unlikely ids that an engine cuts away: whether it does, and by which rule - top-k, top-p, min-p."""

import numpy as np

from qwenref.compare.differences import centred

LEEWAY = 4.0  # of the bounds of a cut, in units of what rounding does to them
CUT = 0.9  # of the positions with something to cut away
TAIL = 1e-3  # probability beyond a list, to see whether an engine has any there
LOST = -80.0  # log-probability below which float32 may have no softmax: -inf there is no cut
# Positions where nothing is left beyond a list, for that to be a cut: where the truth leaves a thousandth, a fault of
# kernels leaves none at one or two.
FEWEST = 8
# Values that are a setting.  A top-p or min-p nearer to 1 and 0 cuts nothing that a sum in float32 tells from rounding,
# and no engine has one for a default.
TOP_P, MIN_P = (0.01, 0.9999), (1e-4, 0.99)


def cut(table):
    """(kind, value) of the cut that all positions of a Table agree with, None where nothing is cut away.

    kind "top_k", "top_p" or "min_p"; "unknown", without a value, where none of them does it or several do.
    """
    known = np.isfinite(table.truth) & ~np.isnan(table.engine)
    kept = known & np.isfinite(table.engine)
    slope = _slope(table.truth, table.engine, kept)
    lost = known & ~kept & (slope * table.truth < LOST)
    gone = known & ~kept & ~lost
    mass = np.where(kept, np.exp(np.where(kept, table.engine, 0)), 0).sum(axis=-1)
    whole = gone.any(axis=-1) | (mass > 1 - TAIL / 10)
    telling = kept.any(axis=-1) & (gone.any(axis=-1) | (_beyond(table, kept, slope) > TAIL))
    if not telling.any() or np.mean(whole[telling]) < CUT:
        return None
    if not gone.any() and telling.sum() < FEWEST:
        return None
    rows = telling & whole
    return _solved(table.select(rows), kept[rows], lost[rows], slope)


def _beyond(table, kept, slope):
    """Probability [N] that the truth has, at the engine's slope, beyond what is kept.

    Of ids that have no column only the sum is known, which counts as it is.
    """
    finite = np.isfinite(table.truth)
    scaled = np.where(finite, slope * np.where(finite, table.truth, 0), -np.inf)
    scaled -= scaled.max(axis=-1, keepdims=True, initial=-1e300)
    q = np.exp(scaled)
    share = np.where(kept, q, 0).sum(axis=-1) / np.maximum(q.sum(axis=-1), 1e-300)
    listed = np.where(finite, np.exp(np.where(finite, table.truth, 0)), 0).sum(axis=-1)
    return 1 - share if table.full else 1 - share * np.minimum(listed, 1)


def _solved(table, kept, lost, slope):
    """The kind of cut that positions agree on: each gives bounds of its value, as wide as rounding moves them."""
    number, share = _number(table.engine, kept, lost)
    held = {"top_k": (number, share if len(kept) > 1 and number > 1 else 0.0)}  # one id is left by any rule
    spans = _bounds(slope * table.truth, kept, lost)
    moved = [_bounds(slope * values, kept, lost) for values in table.jitters]
    for kind, (low, high) in spans.items():
        apart = [other - own for each in moved for other, own in zip(each[kind], (low, high), strict=True)]
        leeway = LEEWAY * np.sqrt(np.mean(np.square(apart), axis=0)) if apart else 0.0
        value, share = _agreed(low - leeway, high + leeway)
        least, most = TOP_P if kind == "top_p" else MIN_P
        held[kind] = value, share if value is not None and least <= value <= most else 0.0
    kind = max(held, key=lambda kind: held[kind][1])
    value, share = held[kind]
    return (kind, value) if share >= CUT else ("unknown", None)


def _number(engine, kept, lost):
    """(k of a top-k that leaves what is kept at most positions, the share of them): ids as likely as the last stay."""
    least = np.where(kept, engine, np.inf).min(axis=-1, keepdims=True)
    most = kept.sum(axis=-1)
    above, most = (kept & (engine > least)).sum(axis=-1), most + lost.sum(axis=-1)
    numbers = np.unique(most)
    shares = [np.mean((above < number) & (number <= most)) for number in numbers]
    return int(numbers[np.argmax(shares)]), max(shares)


def _bounds(values, kept, lost):
    """{kind: (low [n], high [n])}: where top-p and min-p lie if `kept` is what they leave of log-probabilities."""
    finite = np.isfinite(values)
    q = np.where(finite, np.exp(np.where(finite, values, 0)), 0)
    q /= q.sum(axis=-1, keepdims=True)
    inside, least = np.where(kept, q, 0).sum(axis=-1), np.where(kept, q, np.inf).min(axis=-1)
    top = q.max(axis=-1)
    return {"top_p": (inside - least, inside), "min_p": (np.where(kept | lost, 0, q).max(axis=-1) / top, least / top)}


def _slope(truth, engine, kept):
    """The engine's gaps to the truth's where both are finite, over all positions."""
    x, y = (centred(np.where(kept, values, 0), np.zeros_like(truth), kept) for values in (truth, engine))
    size = (x * x).sum()
    return (x * y).sum() / size if size > 0 else 1.0


def _agreed(low, high):
    """(the value that lies in most of the spans, in the middle of where it does; the share of them)."""
    edges = np.unique(np.concatenate([low, high]))
    middles = (edges[:-1] + edges[1:]) / 2
    if not len(middles):
        return None, 0.0
    inside = np.searchsorted(np.sort(low), middles, "right") - np.searchsorted(np.sort(high), middles, "left")
    at = np.flatnonzero(inside == inside.max())
    return float((edges[at[0]] + edges[at[-1] + 1]) / 2), float(inside.max() / len(low))
