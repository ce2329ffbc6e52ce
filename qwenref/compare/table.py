"""The numbers of a comparison side by side: positions of all prompts as rows, the ids compared there as columns."""

from typing import NamedTuple

import numpy as np


class Table(NamedTuple):
    """N positions, K ids at each, J rounding variants; log-probabilities, NaN where an id has none."""

    prompt: np.ndarray  # int64 [N], its number in the suite
    way: np.ndarray  # int64 [N], number of its trajectory
    position: np.ndarray  # int64 [N], index of the predicted id in prompt and continuation
    support: np.ndarray  # int64 [N, K], ids; -1 where there are fewer
    truth: np.ndarray  # float64 [N, K]
    jitters: np.ndarray  # float64 [J, N, K]
    engine: np.ndarray  # float64 [N, K]
    best: np.ndarray  # int64 [N], column of the truth's likeliest id in the vocabulary
    second: np.ndarray  # int64 [N], column of the runner-up
    emitted: np.ndarray  # int64 [N], column of the engine's choice, -1 where it made none
    full: bool  # whether the columns are the whole vocabulary

    @property
    def positions(self):
        return self.truth.shape[0]

    def select(self, rows):
        """The rows of a mask or of indices."""
        kept = {name: getattr(self, name)[rows] for name in self._fields if name not in ("jitters", "full")}
        return self._replace(jitters=self.jitters[:, rows], **kept)

    def with_engine(self, values):
        return self._replace(engine=values)

    @classmethod
    def concatenate(cls, tables, variants=0):
        """Rows one behind the other, columns filled up to the widest; an empty Table of no tables."""
        tables = list(tables)
        if not tables:
            none, flat = np.empty((0, 0)), np.empty(0, np.int64)
            ids = np.empty((0, 0), np.int64)
            return cls(flat, flat, flat, ids, none, np.empty((variants, 0, 0)), none, flat, flat, flat, False)
        width = max(table.truth.shape[1] for table in tables)
        joined = {
            name: np.concatenate([_widened(getattr(table, name), width, blank) for table in tables], axis=axis)
            for name, axis, blank in (
                ("support", 0, -1), ("truth", 0, np.nan), ("engine", 0, np.nan), ("jitters", 1, np.nan),
            )
        }  # fmt: skip
        flat = {n: np.concatenate([getattr(table, n) for table in tables]) for n in _FLAT}
        return cls(full=all(table.full for table in tables), **joined, **flat)


def two_best(values):
    """(int64 [N], int64 [N]) columns of the two largest of values [N, K], the first among equals; never of a NaN."""
    rest = np.where(np.isnan(values), -np.inf, values)
    first = rest.argmax(axis=-1)
    rest[np.arange(len(rest)), first] = -np.inf
    return first, rest.argmax(axis=-1)


def both_paths(prefill, decode):
    """(prefill, decode) at the positions of the trajectories that both Tables have, row by row."""
    places = [{place: n for n, place in enumerate(zip(t.way, t.position, strict=True))} for t in (prefill, decode)]
    both = [place for place in places[0] if place in places[1]]
    rows = [np.array([at[place] for place in both], np.int64) for at in places]
    return tuple(table.select(here) for table, here in zip((prefill, decode), rows, strict=True))


_FLAT = ("prompt", "way", "position", "best", "second", "emitted")


def _widened(array, width, blank):
    missing = width - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)], constant_values=blank) if missing else array
