"""Figures that are told and decide nothing: order of the likeliest ids, probabilities of tokens that were chosen."""

import numpy as np

from qwenref.compare.differences import given, likeliest


def ranks(table):
    """Overlap and order of the likeliest ids, how often the first is the same, and ranks of the tokens chosen."""
    there = given(table)
    orders = [
        np.argsort(-np.where(there, values, -np.inf), axis=-1, kind="stable") for values in (table.truth, table.engine)
    ]
    facts = {"same_top": float(np.mean(orders[0][:, 0] == orders[1][:, 0]))}
    for k in (5, 20):
        if table.truth.shape[1] >= k:
            both = (orders[0][:, :k, None] == orders[1][:, None, :k]).any(axis=-1).sum(axis=-1)
            facts[f"jaccard{k}"] = float(np.mean(both / (2 * k - both)))
    listed = likeliest(table, there)
    orders = [kendall(*each) for each in zip(table.truth, table.engine, listed, strict=True)]
    orders = [each for each in orders if each is not None]
    facts["kendall"] = float(np.mean(orders)) if orders else None
    rows = np.flatnonzero(table.emitted >= 0)
    if rows.size:
        truth = np.where(np.isfinite(table.truth[rows]), table.truth[rows], -np.inf)
        own = truth[np.arange(len(rows)), table.emitted[rows]]
        above = 1 + (truth > own[:, None]).sum(axis=-1)
        facts["emitted"] = {"mean": float(above.mean()), "max": int(above.max())}
    return facts


def kendall(a, b, which):
    """Kendall's tau-b of two orders of the ids `which`; None where all are tied in one."""
    pairs = np.triu_indices(int(which.sum()), 1)
    first, second = (np.sign(values[which][pairs[0]] - values[which][pairs[1]]) for values in (a, b))
    size = np.sqrt(np.count_nonzero(first) * np.count_nonzero(second))
    return float((first * second).sum() / size) if size else None


def likelihoods(table):
    """Of the tokens chosen: change of probability, and ratio of perplexities with its standard error; None of none."""
    rows = np.flatnonzero(table.emitted >= 0)
    ours, theirs = (values[rows, table.emitted[rows]] for values in (table.truth, table.engine))
    there = np.isfinite(ours) & np.isfinite(theirs)
    if not there.any():
        return None, None
    ours, theirs = ours[there], theirs[there]
    change, moved = np.exp(theirs) - np.exp(ours), ours - theirs
    ratio = float(np.exp(moved.mean()))
    return (
        {"mean": float(change.mean()), "rms": float(np.sqrt(np.mean(change**2)))},
        {"ratio": ratio, "se": ratio * float(moved.std() / np.sqrt(len(moved)))},
    )


def rl_block(reference, engine):
    """Figures of importance weights, of log-probabilities [N] of the tokens a policy was given."""
    r = np.asarray(reference, np.float64) - np.asarray(engine, np.float64)
    weights = np.exp(r)
    return {
        "mean_exp_abs": float(np.exp(np.abs(r)).mean()),
        "k3": float(np.mean(weights - 1 - r)),
        "quantiles": [float(x) for x in np.quantile(weights, [0.01, 0.5, 0.99])],
        "outside": float(np.mean((weights < 0.5) | (weights > 2))),
        "ess": float(weights.sum() ** 2 / np.square(weights).sum() / len(r)),
    }
