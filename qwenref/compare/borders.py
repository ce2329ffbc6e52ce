"""Border prompts: beginnings of texts whose next token is nearly, but not quite, left to rounding.

At such a place a fault that is small everywhere shows as another token.  The margin of a place is the distance of the
two largest logits; sigma is how far that distance moves between roundings that are as right as one another.
"""

import numpy as np

from qwenref.compare.differences import shrunk
from qwenref.compare.table import two_best
from qwenref.numerics import jitter, numerics

LEAST, MOST = 1.0, 10.0  # margins of a border, in sigma
SHORTEST = 16  # tokens of a border prompt


def borders(model, texts, count, jitters=4):
    """At most `count` prompts [int] out of texts [int], one for each step of margins from 1 to 10 sigma.

    The same model and texts give the same prompts.
    """
    if not count:
        return []
    places = [(ids, end, ratio) for ids in texts for end, ratio in enumerate(ratios(model, ids, jitters), 1)]
    places = [place for place in places if place[1] >= SHORTEST and LEAST <= place[2] <= MOST]
    found = []
    for step in range(count):
        wanted = LEAST * (MOST / LEAST) ** ((step + 0.5) / count)
        if places:
            nearest = min(places, key=lambda place: abs(np.log(place[2] / wanted)))
            places.remove(nearest)
            found.append(nearest[0][: nearest[1]])
    return found


def ratios(model, ids, jitters=4):
    """float64 [len(ids)], the margin of the token behind each id in sigma."""
    with numerics("fp32"):
        logits = model([ids]).logits[0]
    rows, best = np.arange(len(logits)), two_best(logits)
    margin = _gap(logits, rows, best)
    moved = np.empty((jitters, len(ids)))
    for seed in range(jitters):
        with jitter(seed):
            moved[seed] = _gap(model([ids]).logits[0], rows, best) - margin
    return margin / np.sqrt(shrunk(moved, np.mean(moved**2)))


def _gap(logits, rows, best):
    return logits[rows, best[0]].astype(np.float64) - logits[rows, best[1]]
