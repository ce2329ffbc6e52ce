"""Where in a text an engine errs more: late against early, and by blocks of 64 and 128 positions."""

import numpy as np

from qwenref.compare.distributions import holm, one_more
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
        usual = one_more([each for each in variants if each is not None], CHANCE / 2)
        low, high = min(PROFILE[0], usual[0]), max(PROFILE[1], usual[1])
        verdict = GREEN if low <= value <= high else AMBER
        stages.append(stage("profile", "error late against early", verdict, value, f"{low:.2g} to {high:.2g}"))
    probabilities, peaks = {}, {}
    for period in PERIODS:
        phase = position % period
        arrays[f"error_mod{period}"] = _by_phase(np.sqrt(squares), phase, period)
        if len(squares) >= PERIODIC:
            own, others = _standardised(np.sqrt(squares)), _sizes(jitters[:, finite])
            probabilities[period] = _permuted(own, phase, random)
            peaks[period] = _peak(own, phase), [_peak(_standardised(each), phase) for each in others]
    if probabilities:
        stats["period"] = {str(period): p for period, p in probabilities.items()}
        rejected = holm(list(probabilities.values()), 0.002)
        # Where what is fed is more sensitive at some phases, the variants' errors have a peak there as well.
        unusual = [own > one_more(others, CHANCE)[1] for own, others in peaks.values()]
        verdict = AMBER if any(a and b for a, b in zip(rejected, unusual, strict=True)) else GREEN
        stages.append(stage("period", "error by position mod 64, 128", verdict, min(probabilities.values()), 0.001))


def _late_to_early(squares, early, late):
    """Error of the late rows to that of the early ones, None where there is none."""
    if not len(early) or not len(late):
        return None
    before, behind = np.nanmean(squares[early]), np.nanmean(squares[late])
    return float(np.sqrt(behind / before)) if before > 0 and behind > 0 else None


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


def _sizes(errors):
    return np.where(np.isfinite(errors), np.abs(errors), 0)


def _standardised(values):
    """Logarithms of 1 + values, so that one large error is no period, less their mean and by their spread."""
    values = np.log1p(values)
    values -= values.mean()
    spread = values.std()
    return values / spread if spread > 0 else np.zeros_like(values)


def _permuted(values, phase, random, draws=2000):
    """How probable so large a peak of standardised values is where phases do not matter."""
    seen = _peak(values, phase)
    others = (_peak(random.permutation(values), phase) for _ in range(draws))
    return (1 + sum(other >= seen for other in others)) / (1 + draws)


def _peak(values, phase):
    """Largest mean of standardised values at one phase, in standard errors."""
    count = np.bincount(phase)
    several = count > 1
    sums = np.bincount(phase, weights=values)[several]
    return float((sums / np.sqrt(count[several])).max()) if sums.size else 0.0
