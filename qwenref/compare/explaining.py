"""Known faults are planted in the reference and held against an engine's error: which of them, on which prompts."""

import numpy as np

from qwenref.compare.differences import at_columns, likeliest_columns
from qwenref.compare.faults import MODEL_KINDS, find, hypotheses
from qwenref.compare.replay import explain
from qwenref.compare.scoring import PLAIN

PROMPTS, POSITIONS = 2, 128  # that known faults are tried on first, the last ones of each
PRECISE = 4.0  # effects in units of what clean float32 engines are apart, that float32 gives to some per cent


def candidates(model, path, confined=None, without=()):
    """Names of the faults that may show in rows of "prefill" or of "decode".

    confined    "prefill" or "decode": those that can be are confined to it, as the other path is inside the envelope
    without     names that are left out, wherever they are confined to
    """
    names = []
    for fault in hypotheses(model, MODEL_KINDS):
        if (path == "prefill" and fault.on == "decode") or fault.name in without:
            continue
        if confined is None or fault.on == confined or fault.kind == "state":
            names.append(fault.name)
        elif fault.confined and fault.on == "both":
            names.append(fault.during(confined).name)
    return list(dict.fromkeys(names))


def first_ways(numbers, table):
    """int64: the trajectories of a Table that known faults are tried on first, the longest and the reference's.

    Those are the same for every engine, so that a store of scores has them the second time.
    """
    ways, count = np.unique(table.way, return_counts=True)
    others = np.array([numbers.ways[way].origin != "reference" for way in ways])
    return ways[np.lexsort((others, -np.minimum(count, POSITIONS)))[:PROMPTS]]


def few_rows(table, path):
    """bool [N]: POSITIONS rows of every trajectory, of decode the first ones behind the prompt, of prefill the last."""
    kept = np.zeros(table.positions, bool)
    for way in np.unique(table.way):
        here = np.flatnonzero(table.way == way)
        kept[here[:POSITIONS] if path == "decode" else here[-POSITIONS:]] = True
    return kept


def replay(numbers, table, path, names):
    """Explanation of the errors in a Table of `numbers`, rows of "prefill" or of "decode", by faults of these names.

    The rows of a trajectory follow one another; those of decode begin where its continuation does.  A fault's effect is
    the difference of two float32 runs.  Where the envelope itself is that of float32, that has its noise: small effects
    are then computed once more in float64.
    """
    table = narrowed(table)
    effects = _Effects(numbers, table, path)
    replays = effects.in_float32(names)
    found = _explained(table, replays)
    if numbers.variants[0][1] == "float32":
        small = [row["id"] for row in found.rows if row["D"] < PRECISE]
        if small:
            found = _explained(table, {**replays, **effects.in_float64(small)})
    return found


def _explained(table, replays):
    faults = {name: find(name) for name in replays}
    found = explain(
        table,
        replays,
        {name: fault.kind for name, fault in faults.items()},
        {name: fault.family for name, fault in faults.items()},
    )
    for row in found.rows:
        row["what"] = faults[row["id"]].what
    return found


class _Effects:
    """Log-probabilities [N, K] at the rows of a Table as they are with a fault, {name: array}."""

    def __init__(self, numbers, table, path):
        self._numbers, self._table, self._decode = numbers, table, path == "decode"
        self._parts = {n: np.flatnonzero(table.way == n) for n in np.unique(table.way)}

    def in_float32(self, names):
        plain, *found = self._under([PLAIN, *(("fault", PLAIN[1], (name,)) for name in names)])
        return {name: values - plain + self._table.truth for name, values in zip(names, found, strict=True)}

    def in_float64(self, names):
        found = self._under([("fault", self._numbers.truth[1], (name,)) for name in names])
        return dict(zip(names, found, strict=True))

    def _under(self, hows):
        """[float64 [N, K]] of each way of computing."""
        table, parts = self._table, self._parts
        tasks = [
            self._numbers.at(n, how, int(table.position[rows[0]]), table.support[rows], decode=self._decode)
            for how in hows
            for n, rows in parts.items()
        ]
        scored = self._numbers.run(self._numbers.model, tasks)
        found = []
        for at in range(0, len(scored), len(parts)):
            values = np.full(table.truth.shape, np.nan)
            for rows, each in zip(parts.values(), scored[at : at + len(parts)], strict=True):
                values[rows] = each.logprobs
            found.append(values)
        return found


def narrowed(table):
    """The Table of the likeliest ids alone."""
    columns = likeliest_columns(table)
    if columns is None:
        return table
    names, none = ("support", "truth", "engine", "jitters"), np.zeros(table.positions, np.int64)
    cut = {name: at_columns(getattr(table, name), columns) for name in names}
    return table._replace(**cut, best=none, second=none, emitted=none - 1)
