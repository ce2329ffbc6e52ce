"""Where in a text an engine errs more: late against early, and by blocks of 64 and 128 positions."""

import numpy as np

from qwenref.compare.distributions import holm, student_quantile
from qwenref.compare.stages import AMBER, GREEN, stage

PROFILE = (0.6, 1.6)  # error of the last quarter to that of the first
QUARTER = 128  # positions of a quarter for it
PERIODS = (64, 128)
CHANCE = 0.002  # that a clean engine is outside of what its variants say of one more
PERIODIC = 256  # positions for a period to show


def profiles(table, scaled, jitters, random, stats, stages, arrays):
    """Both profiles of errors in sigmas [N]; `jitters` [J, N] those of variants, which say how far a clean one goes."""
    finite = np.isfinite(scaled)
    squares, prompt, position = np.square(scaled[finite]), table.prompt[finite], table.position[finite]
    early, late = _quarters(prompt, position)
    value = _late_to_early(squares, early, late)
    if min(len(late), len(early)) >= QUARTER and value is not None:
        stats["profile"] = {"value": value, "positions": int(len(late))}
        variants = [_late_to_early(np.square(each[finite]), early, late) for each in jitters]
        low, high = _usual([each for each in variants if each is not None])
        verdict = GREEN if low <= value <= high else AMBER
        stages.append(stage("profile", "error late against early", verdict, value, f"{low:.2g} to {high:.2g}"))
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


def _late_to_early(squares, early, late):
    """Error of the late rows to that of the early ones, None where there is none."""
    if not len(early) or not len(late):
        return None
    before, behind = np.nanmean(squares[early]), np.nanmean(squares[late])
    return float(np.sqrt(behind / before)) if before > 0 and behind > 0 else None


def _usual(variants):
    """PROFILE, or where one variant more may come out."""
    if len(variants) < 2:
        return PROFILE
    logs = np.log(variants)
    far = student_quantile(1 - CHANCE / 2, len(logs) - 1) * logs.std(ddof=1) * np.sqrt(1 + 1 / len(logs))
    middle = logs.mean()
    return min(PROFILE[0], float(np.exp(middle - far))), max(PROFILE[1], float(np.exp(middle + far)))


def _quarters(prompt, position):
    """(rows of the first quarter of each prompt, rows of the last)."""
    early, late = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number in np.unique(prompt):
        here = np.flatnonzero(prompt == number)
        here = here[np.argsort(position[here], kind="stable")]
        part = len(here) // 4
        early.append(here[:part])
        late.append(here[len(here) - part :])
    return np.concatenate(early), np.concatenate(late)


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
