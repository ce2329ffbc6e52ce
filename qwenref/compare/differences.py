"""Differences of log-probabilities from the truth, the engine's and those of rounding variants.

They are centred at every position by their mean over the ids the engine gave, weighted with the truth's probabilities:
a normalisation over other ids than the vocabulary cancels.
"""

import functools

import numpy as np

PSEUDO = 4  # a position's own noise counts as J observations, that of all positions as so many
TOP = 20  # likeliest ids that R is made of
WILD = 4.0  # times what variants differ by at the median position: a position where they differ by more counts as that


def given(table):
    """bool [N, K], where truth and engine have finite values."""
    return np.isfinite(table.truth) & np.isfinite(table.engine)


def centred(difference, truth, there):
    """`difference` [..., N, K] less its mean by probability over `there`; 0 elsewhere."""
    weights = np.where(there, np.exp(np.where(there, truth, 0)), 0)
    mass = weights.sum(axis=-1, keepdims=True)
    weights = np.divide(weights, mass, out=np.zeros_like(weights), where=mass > 0)
    difference = np.where(there, difference, 0)
    return np.where(there, difference - (weights * difference).sum(axis=-1, keepdims=True), 0)


def likeliest(table, there, count=TOP):
    """`there`, the `count` likeliest ids of each position alone."""
    if table.truth.shape[1] <= count:
        return there
    among = np.where(there, table.truth, -np.inf)
    bound = np.partition(among, -count, axis=-1)[:, -count][:, None]
    return there & (among >= bound)


def likeliest_columns(table, count=TOP):
    """int64 [N, count], columns of the likeliest ids that have numbers, where the table is wider; else None."""
    if table.truth.shape[1] <= count:
        return None
    return np.argpartition(np.where(given(table), -table.truth, np.inf), count - 1, axis=-1)[:, :count]


def at_columns(values, columns):
    """values [..., N, K] at columns [N, k]; all of them for None."""
    if columns is None:
        return values
    return np.take_along_axis(values, np.broadcast_to(columns, (*values.shape[:-1], columns.shape[-1])), axis=-1)


class Differences:
    """Of a table: `.there` the ids they are about, `.engine` [N, K], `.jitters` [J, N, K], all centred and tamed.

    Tamed: multiplied by `.weights` [N, 1].  In some models variants part by 20 nats at a few positions and by 0.1 at
    all others; no fault would be seen beside those few.  A variant has the weights that the others give it, as the
    engine has, so that one that goes wild where no other does stays so.
    """

    def __init__(self, table):
        self.there = likeliest(table, given(table))
        differences = (table.engine - table.truth, *(values - table.truth for values in table.jitters))
        engine, *jitters = (centred(np.where(self.there, each, 0), table.truth, self.there) for each in differences)
        squares = np.array([np.square(each).mean(axis=-1) for each in jitters])
        self.weights = _taming(squares)[:, None]
        self.engine = self.weights * engine
        self.jitters = np.stack(
            [_taming(np.delete(squares, j, axis=0))[:, None] * each for j, each in enumerate(jitters)]
        )

    def rms(self, difference):
        count = self.there.sum()
        return float(np.sqrt(np.square(difference).sum() / count)) if count else float("nan")

    @functools.cached_property
    def sizes(self):
        """[J] of the variants' root mean square errors."""
        return [self.rms(each) for each in self.jitters]

    def ratio(self):
        """R: root mean square error to the median of the variants'."""
        median = np.median(self.sizes)
        return self.rms(self.engine) / median if median > 0 else float("nan")


def _taming(squares):
    """[N] of variants' mean squares [J, N]: 1, and less at the positions where they differ most."""
    if not len(squares):
        return np.ones(squares.shape[1])
    spread = np.sqrt(squares.mean(axis=0))
    bound = WILD * np.median(spread)
    return np.where(spread > bound, bound / np.where(spread > 0, spread, 1), 1.0) if bound > 0 else np.ones(len(spread))


def gap(values, first, second):
    """[..., N] of values [..., N, K]: the column `first` less the column `second` of each position."""
    rows = np.arange(values.shape[-2])
    return values[..., rows, first] - values[..., rows, second]


def noise(table, other, spread=0.0):
    """sigma [N] of the gap between the best column and `other`, drawn towards that of all positions."""
    moved = gap(table.jitters - table.truth, table.best, other)
    pooled = np.nanmean(np.square(gap(table.jitters - table.truth, table.best, table.second)))
    return np.sqrt(shrunk(moved, pooled) + spread**2)


def shrunk(moved, pooled):
    """Mean square [...] of what J variants moved [J, ...], NaN left out, drawn towards that of all places together."""
    own, count = np.nansum(np.square(moved), axis=0), np.isfinite(moved).sum(axis=0)
    return (own + PSEUDO * pooled) / (count + PSEUDO)
