"""What an engine does to logits before it draws or reports: temperature, penalties, a support that is cut.

Within one position the gaps between log-probabilities are gaps between logits, so a temperature is the slope of the
engine's gaps on the truth's, and a penalty moves the ids that came before against those that did not.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from qwenref.compare.cuts import cut
from qwenref.compare.differences import at_columns, centred, given, likeliest_columns, shrunk
from qwenref.compare.table import both_paths
from qwenref.engines import checked

TOLERANCE = 0.02  # of a slope, besides two standard errors
SIGMAS = 5.0  # of a penalty
# Values that are a setting.  OpenAI's API, which those of engines follow, takes temperatures and additive penalties up
# to 2; penalties that multiply stay below that; what rewards repetition, below 0 or 1, is nobody's default.
TEMPERATURE, ADDED, MULTIPLIED = (0.05, 2.2), (0.0, 2.2), (1.0, 1.95)
EXPLAINED = 0.1  # of the squared error, for a penalty to be one
LINEAR = 0.5  # of the squared error, for a slope to be a temperature: faults of kernels stretch gaps too, among others
_NAMES = {"presence": "presence penalty", "frequency": "frequency penalty", "repetition": "repetition penalty"}


class SamplingFit(NamedTuple):
    """What was done to the logits, as far as it shows; neutral: slope 1, and None for all that is not there."""

    slope: float  # 1 / temperature
    slope_se: float
    temperature: float | None  # None where the slope is 1 within tolerance, or is no temperature
    truncated: tuple | None  # ("top_k", 20), ("top_p", 0.95), ("min_p", 0.05); ("unknown", None): cut another way
    presence: float | None
    frequency: float | None
    repetition: float | None
    scopes: dict  # {penalty: what it counts}: "new" ids, or "all" with those of the prompt
    explained: float  # share of the squared error that temperature and penalties explain
    findings: list  # dicts of code, severity, message, evidence

    @property
    def neutral(self):
        return not self.findings


def fit(table, contexts, lengths=None, logz=None):
    """SamplingFit of a Table.

    contexts   for each row the ids before the predicted one
    lengths    int [N], how many of these are the prompt's; None: penalties count all of them
    logz       float64 [N], log of the sum of exp(logits) of the truth; without it logits of seen ids are taken for
               positive where a repetition penalty scales them
    """
    truncated = cut(table)
    gaps = _Gaps(table, contexts, lengths, logz)
    plain = gaps.solve({})
    if plain is None:
        return neutral()._replace(truncated=truncated, findings=_findings(truncated))
    best, scopes = _penalties(gaps, plain)
    slope, se = best.slope, best.slope_se
    explained = 1 - best.variance / gaps.neutral if gaps.neutral > 0 else 0.0
    off = abs(slope - 1) > TOLERANCE + 2 * se and explained >= LINEAR and slope > 0 and _is_set(TEMPERATURE, 1 / slope)
    values = {kind: best.values.get(kind) for kind in _NAMES}
    temperature = 1 / slope if off else None
    found = _findings(truncated, temperature, slope, se, values, scopes)
    return SamplingFit(slope, se, temperature, truncated, **values, scopes=scopes, explained=explained, findings=found)


def neutral():
    """The SamplingFit of logits that nothing was done to, or nothing that shows."""
    return SamplingFit(1.0, float("inf"), None, None, None, None, None, {}, 0.0, [])


def as_listed(fit, listed):
    """The same without a top-k that is as long as the lists an engine gives: these end there anyway."""
    kind, value = fit.truncated or (None, None)
    if kind != "top_k" or value is None or value < listed:
        return fit
    rest = [found for found in fit.findings if found["code"] != "truncated-support"]
    return fit._replace(truncated=None, findings=rest)


def beside(decode, prefill):
    """The Table of decode with the engine's own prefill as its truth, at the positions both have.

    Only what is sampled from is processed: fitted to this one, a fault of the kernels on both sides cancels.
    """
    one, two = both_paths(prefill, decode)
    truth = np.where(given(one), one.engine, np.nan)
    return two._replace(truth=truth, jitters=two.jitters - two.truth + truth)


def undo(table, fit, contexts, lengths=None, logz=None):
    """The Table as it would be without what was fitted; what was cut away stays unknown.

    An engine's choice becomes the likeliest id of what is restored.
    """
    there = given(table)
    slope = fit.slope if fit.temperature is not None else 1.0
    values = np.where(there, table.engine, np.nan) / slope
    for kind in reversed(fit.scopes):
        counts = _counts(table.support, contexts, lengths if fit.scopes[kind] == "new" else None)
        values -= _shift(kind, getattr(fit, kind), table, values, counts, logz)
    restored = _with_mass(values, table, there)
    likeliest = np.where(there, restored, -np.inf)
    first, rows = likeliest.argmax(axis=-1), np.arange(table.positions)
    tied = likeliest[rows, table.emitted] == likeliest[rows, first]
    moved = (table.emitted >= 0) & there.any(axis=-1) & ~tied
    return table._replace(engine=restored, emitted=np.where(moved, first, table.emitted))


def as_reported(table):
    """The Table with variants rounded as the engine's log-probabilities are: to bf16, where all of these are in it."""
    values = table.engine[np.isfinite(table.engine) & (table.engine != 0)]
    if not values.size or checked.resolution(values) != "bf16":
        return table
    return table._replace(jitters=table.jitters.astype(ml_dtypes.bfloat16).astype(np.float64))


# ---- slope and penalties -------------------------------------------------------------------------------------------


class _Solution(NamedTuple):
    variance: float  # weighted squared error left, per degree of freedom
    slope: float
    slope_se: float
    values: dict  # {kind: value}
    errors: dict  # {kind: standard error}


class _Gaps:
    """Least squares of the engine's gaps on the truth's, each position with a constant of its own."""

    def __init__(self, table, contexts, lengths, logz):
        columns = likeliest_columns(table)
        names = ("truth", "engine", "support", "jitters")
        narrow = table._replace(**{n: at_columns(getattr(table, n), columns) for n in names})
        self.there = given(narrow) & (given(narrow).sum(axis=-1) > 2)[:, None]
        self.truth, self.engine = (np.where(self.there, values, 0) for values in (narrow.truth, narrow.engine))
        self.weights = _weights(narrow, self.there)
        self.logz = logz
        self.seen = {"all": _counts(narrow.support, contexts, None)}
        if lengths is not None:
            self.seen["new"] = _counts(narrow.support, contexts, lengths)
        moved = self._centre(self.engine - self.truth, [self.there])
        freedom = self.there.sum() - self.there.any(axis=-1).sum()
        self.neutral = float((self.weights * moved**2).sum() / freedom) if freedom > 0 else 0.0

    def solve(self, scopes):
        """_Solution with penalties {kind: scope}; None where there is too little to fit."""
        columns, groups = [self.truth], [self.there]
        for kind in _others(scopes):
            counts = self.seen[scopes[kind]]
            columns.append(np.where(self.there, counts > 0 if kind == "presence" else counts, 0).astype(np.float64))
        if "repetition" not in scopes:
            return self._solution(self._least_squares(columns, groups), scopes)
        counts = self.seen[scopes["repetition"]]
        if self.logz is None:
            seen = self.there & (counts > 0)
            columns.insert(1, np.where(seen, self.truth, 0))
            return self._solution(self._least_squares(columns, [seen, self.there & ~seen]), scopes, scaled=True)
        return self._repeated(columns, counts, scopes)

    def _repeated(self, columns, counts, scopes):
        """With a repetition penalty r of known logits: the r of the least error, by golden section on log r."""
        logits, seen = self.truth + self.logz[:, None], self.there & (counts > 0)

        def fitted(log_r):
            moved = np.where(seen, _scaled(logits, np.exp(log_r)), 0)
            return self._least_squares([self.truth + moved, *columns[1:]], [self.there])

        low, high, ratio = np.log(0.5), np.log(2.0), (np.sqrt(5) - 1) / 2
        while high - low > 1e-6:
            a, b = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (low, b) if _left(fitted(a)) < _left(fitted(b)) else (a, high)
        r, step = float(np.exp((low + high) / 2)), 1e-4
        moved = [np.where(seen, _scaled(logits, value), 0) for value in (r, r + step)]
        columns = [self.truth + moved[0], (moved[1] - moved[0]) / step, *columns[1:]]
        found = self._least_squares(columns, [self.there])
        return self._solution(found, scopes, repetition=r)

    def _solution(self, found, scopes, scaled=False, repetition=None):
        if found is None:
            return None
        coefficients, errors, variance = found
        slope, values, spread = coefficients[0], {}, {}
        if slope == 0:
            return None
        at = 1
        if scaled or repetition is not None:
            values["repetition"] = repetition if repetition is not None else 1 / (1 + coefficients[1] / slope)
            spread["repetition"] = float(abs(errors[1] / slope))
            at = 2
        for kind in _others(scopes):
            values[kind], spread[kind] = float(-coefficients[at] / slope), float(abs(errors[at] / slope))
            at += 1
        values = {kind: float(value) for kind, value in values.items()}
        return _Solution(variance, float(slope), float(errors[0]), values, spread)

    def _centre(self, values, groups):
        """Less the weighted mean of each position's ids in each group."""
        result = np.zeros_like(values, np.float64)
        for group in groups:
            weights = np.where(group, self.weights, 0)
            mass = weights.sum(axis=-1, keepdims=True)
            mean = (weights * values).sum(axis=-1, keepdims=True) / np.where(mass > 0, mass, 1)
            result += np.where(group, values - mean, 0)
        return result

    def _least_squares(self, columns, groups):
        """(coefficients, standard errors clustered by position, variance left); None for too few numbers."""
        x = np.stack([self._centre(column, groups) for column in columns])
        y = self._centre(self.engine, groups)
        means = sum(group.any(axis=-1).sum() for group in groups)
        freedom = int(self.there.sum() - means - len(x))
        weighted = x * self.weights
        normal = np.einsum("ank,bnk->ab", weighted, x)
        if freedom < 1 or np.linalg.matrix_rank(normal) < len(x):
            return None
        inverse = np.linalg.inv(normal)
        coefficients = inverse @ np.einsum("ank,nk->a", weighted, y)
        left = y - np.einsum("a,ank->nk", coefficients, x)
        scores = np.einsum("ank,nk->an", weighted, left)
        errors = np.sqrt(np.maximum(np.diag(inverse @ (scores @ scores.T) @ inverse), 0))
        return coefficients, errors, float((self.weights * left**2).sum() / freedom)


def _left(found):
    return np.inf if found is None else found[2]


def _weights(table, there):
    """One over the square of each number's noise, drawn towards that of all; 0 where there is none."""
    if not len(table.jitters):
        return there.astype(np.float64)
    moved = np.stack([centred(values - table.truth, table.truth, there) for values in table.jitters])
    pooled = np.square(moved[:, there]).mean() if there.any() else 0.0
    if pooled == 0:
        return there.astype(np.float64)
    return np.where(there, pooled / shrunk(moved, pooled), 0)


def _counts(support, contexts, lengths):
    """int64 [N, K]: how often each id came before, behind the first `lengths` ids where these are given."""
    counts = np.zeros(support.shape, np.int64)
    for n, context in enumerate(contexts):
        ids, times = np.unique(np.asarray(context[0 if lengths is None else int(lengths[n]) :]), return_counts=True)
        if len(ids):
            at = np.minimum(np.searchsorted(ids, support[n]), len(ids) - 1)
            counts[n] = np.where(ids[at] == support[n], times[at], 0)
    return counts


def _scaled(logits, r):
    """What a repetition penalty adds to logits: those above 0 are divided by it, others multiplied."""
    return np.where(logits > 0, logits / r, logits * r) - logits


def _others(scopes):
    return [kind for kind in scopes if kind != "repetition"]


def _penalties(gaps, plain):
    """(the _Solution that is worth its terms, {penalty: scope}): penalties are added one by one."""
    best, scopes = plain, {}
    for enough in (1 - EXPLAINED, 0.5):  # a second penalty has to halve what the first one left
        more = [{**scopes, kind: where} for kind in _NAMES if kind not in scopes for where in gaps.seen]
        tried = [(gaps.solve(each), each) for each in more]
        tried = [each for each in tried if each[0] is not None and _are_there(each[0])]
        if not tried:
            break
        least = min(found.variance for found, _ in tried)
        # Without known logits a repetition penalty has a constant more at each position: where others fit as well, they
        # come first.
        unsure = gaps.logz is None
        found, added = min(
            tried, key=lambda t: (t[0].variance > 1.05 * least, unsure and "repetition" in t[1], t[0].variance)
        )
        if not found.variance < enough * best.variance:
            break
        best, scopes = found, added
    return best, scopes


def _are_there(found):
    """Whether every penalty is a setting, and away from none by its own error and by a size worth telling."""
    for kind, value in found.values.items():
        if not _is_set(MULTIPLIED if kind == "repetition" else ADDED, value):
            return False
        away, least = abs(value - (kind == "repetition")), 0.005 if kind == "repetition" else TOLERANCE
        if not (away > least and away > SIGMAS * found.errors[kind]):
            return False
    return True


def _is_set(limits, value):
    return limits[0] < value <= limits[1]


def _shift(kind, value, table, values, counts, logz):
    """[N, K], what a penalty added to the gaps of `values`, the engine's at temperature 1."""
    if kind == "presence":
        return -value * (counts > 0)
    if kind == "frequency":
        return -value * counts
    seen = counts > 0
    if logz is not None:
        return np.where(seen, _scaled(table.truth + logz[:, None], value), 0)
    there = np.isfinite(values)
    moved = np.where(there, values - table.truth, 0)
    here, rest = seen & there, ~seen & there

    def mean(of, group):
        count = group.sum(axis=-1, keepdims=True)
        return np.where(group, of, 0).sum(axis=-1, keepdims=True) / np.maximum(count, 1)

    truth = np.where(there, table.truth, 0)
    constant = mean(moved, here) - mean(moved, rest)
    return np.where(here, constant + (1 / value - 1) * (truth - mean(truth, here)), 0)


def _with_mass(values, table, there):
    """Normalised so that the ids there have the probability that they have in the truth."""
    ours = np.where(there, np.exp(np.where(there, table.truth, 0)), 0).sum(axis=-1, keepdims=True)
    top = np.max(np.where(there, values, -np.inf), axis=-1, keepdims=True, initial=-1e300)
    theirs = np.where(there, np.exp(np.where(there, values - top, 0)), 0).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.where(there, values - top + np.log(ours) - np.log(theirs), np.nan)


# ---- what is told ----------------------------------------------------------------------------------------------------


def _findings(truncated, temperature=None, slope=None, se=None, penalties=None, scopes=None):
    found = []

    def add(code, message, **evidence):
        found.append({"code": code, "severity": "error", "message": message, "evidence": evidence})

    if temperature is not None:
        error = se / slope**2
        add("temperature", f"logits are divided by {temperature:.3f} ± {error:.3f}", value=temperature, se=error)
    for kind, value in (penalties or {}).items():
        if value is not None:
            where = "of new ids" if scopes[kind] == "new" else "of all ids before"
            add(f"{kind}-penalty", f"{_NAMES[kind]} of about {value:.3g}, {where}", value=value, scope=scopes[kind])
    if truncated is not None:
        kind, value = truncated
        of = f": {kind.replace('_', '-')} of about {value:.3g}" if value is not None else ""
        add("truncated-support", f"unlikely ids are cut away{of}", kind=kind, value=value)
    return found
