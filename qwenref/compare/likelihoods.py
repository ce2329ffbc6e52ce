"""Figures that are told and decide nothing: order of the likeliest ids, probabilities of tokens that were chosen."""

import numpy as np

from qwenref.compare.differences import given


def ranks(table):
    """Overlap of the likeliest ids, and how often the first is the same."""
    there = given(table)
    orders = [
        np.argsort(-np.where(there, values, -np.inf), axis=-1, kind="stable") for values in (table.truth, table.engine)
    ]
    facts = {"same_top": float(np.mean(orders[0][:, 0] == orders[1][:, 0]))}
    for k in (5, 20):
        if table.truth.shape[1] >= k:
            both = (orders[0][:, :k, None] == orders[1][:, None, :k]).any(axis=-1).sum(axis=-1)
            facts[f"jaccard{k}"] = float(np.mean(both / (2 * k - both)))
    return facts


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
