"""Where in a text an engine errs more: late against early, and by blocks of 64 and 128 positions."""

import numpy as np

from qwenref.compare.distributions import holm
from qwenref.compare.stages import AMBER, GREEN, stage

PROFILE = (0.6, 1.6)  # error of the last quarter to that of the first
QUARTER = 128  # positions of a quarter for it
PERIODS = (64, 128)
PERIODIC = 256  # positions for a period to show


def profiles(table, scaled, random, stats, stages, arrays):
    finite = np.isfinite(scaled)
    squares, prompt, position = np.square(scaled[finite]), table.prompt[finite], table.position[finite]
    late, early = _quarters(squares, prompt, position)
    if min(len(late), len(early)) >= QUARTER and early.mean() > 0:
        value = float(np.sqrt(late.mean() / early.mean()))
        stats["profile"] = {"value": value, "positions": int(len(late))}
        verdict = GREEN if PROFILE[0] <= value <= PROFILE[1] else AMBER
        stages.append(stage("profile", "error late against early", verdict, value, f"{PROFILE[0]} to {PROFILE[1]}"))
    probabilities = {}
    for period in PERIODS:
        means = _by_phase(np.sqrt(squares), position % period, period)
        arrays[f"error_mod{period}"] = means
        if len(squares) >= PERIODIC:
            probabilities[period] = _permuted(np.sqrt(squares), position % period, period, random)
    if probabilities:
        stats["period"] = {str(period): p for period, p in probabilities.items()}
        rejected = holm(list(probabilities.values()), 0.002)
        least = min(probabilities.values())
        stages.append(stage("period", "error by position mod 64, 128", AMBER if any(rejected) else GREEN, least, 0.001))


def _quarters(squares, prompt, position):
    late, early = [], []
    for number in np.unique(prompt):
        here = np.flatnonzero(prompt == number)
        here = here[np.argsort(position[here], kind="stable")]
        part = len(here) // 4
        if part:
            early.append(squares[here[:part]])
            late.append(squares[here[-part:]])
    none = np.empty(0)
    return np.concatenate([none, *late]), np.concatenate([none, *early])


def _by_phase(values, phase, period):
    total, count = np.bincount(phase, weights=values, minlength=period), np.bincount(phase, minlength=period)
    return np.divide(total, count, out=np.full(period, np.nan), where=count > 0)


def _permuted(values, phase, period, random, draws=2000):
    """How probable so large a mean at one phase is where phases do not matter."""
    values = np.log1p(values)  # one large error is no period

    def peak(values):
        count = np.bincount(phase, minlength=period)
        means = np.bincount(phase, weights=values - values.mean(), minlength=period)[count > 1] / count[count > 1]
        return (means * np.sqrt(count[count > 1])).max() if means.size else 0.0

    seen = peak(values)
    return (1 + sum(peak(random.permutation(values)) >= seen for _ in range(draws))) / (1 + draws)
