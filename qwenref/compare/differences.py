"""Differences of log-probabilities from the truth, the engine's and those of rounding variants.

They are centred at every position by their mean over the ids the engine gave, weighted with the truth's probabilities:
a normalisation over other ids than the vocabulary cancels.
"""

import functools

import numpy as np

PSEUDO = 4  # a position's own noise counts as J observations, that of all positions as so many
TOP = 20  # likeliest ids that R is made of


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
    """Of a table: `.there` the ids they are about, `.engine` [N, K], `.jitters` [J, N, K], all centred."""

    def __init__(self, table):
        self.there = likeliest(table, given(table))
        difference = np.where(self.there, table.engine - table.truth, 0)
        self.engine = centred(difference, table.truth, self.there)
        self.jitters = np.stack(
            [
                centred(np.where(self.there, values - table.truth, 0), table.truth, self.there)
                for values in table.jitters
            ]
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
