"""Whether tokens that an engine drew come from the reference's distribution, one sample against a known one.

Equal seeds draw other tokens in other engines, so only the distribution can be tested.  Rounding moves it a little too:
a test that fires counts where the divergence it proves is larger than several times that of a rounding variant.
"""

from math import exp, lgamma, log, log1p

import numpy as np

from qwenref.compare.distributions import anderson_darling, chi_square_tail, holm, normal_tail

ALPHA = 0.01  # of all tests together
TOLERANT = 4.0  # times the divergence of a rounding variant
NUCLEUS, RANKS = 0.95, 20  # beyond either, an engine that cuts draws nothing
SURE = 3.09  # sigmas of a one-sided bound, 0.999
BINS = 20
EXPECTED = 5.0  # draws in a cell of a G-test
POWER = 13.0  # tokens times divergence that show at 0.001 in nine of ten runs, with about 10 degrees of freedom
_TILTS = np.array([-2.0, -1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])


def sample_tests(logprobs, chosen, jitter_kl=0.0, seed=0, support=None, below=None, prefix=None):
    """Tests of tokens that were drawn at N positions, as a dict.

    logprobs    float64 [N, V] of the reference under the declared sampler, -inf for what it never draws; with `support`
                [N, K], of these ids alone: all others are one outcome of the probability that is left
    chosen      int64 [N], the ids drawn
    jitter_kl   divergence of a rounding variant in nats per token
    support     int64 [N, K] ids, -1 where there are fewer
    below       float64 [N], how many sigmas a drawn id lies beyond the declared cut; None: whatever is -inf counts
    prefix      int64 [N], equal for positions of one distribution; None: no G-test

    `pit` A squared, its probability and the values · `surprisal` z and p · `forbidden` draws of what is never drawn ·
    `tail` draws beyond the nucleus and beyond the likeliest ones: seen, expected, p · `g` of the prefixes ·
    `kl_low` divergence that is proved · `detectable_kl` what so many tokens show · `decision` "differs" or "within"
    """
    if not len(chosen):
        return {"n": 0, "forbidden": 0, "detectable_kl": None, "decision": "within", "kl_low": 0.0}
    p, at, ranks = _outcomes(np.asarray(logprobs, np.float64), np.asarray(chosen, np.int64), support)
    rows = np.arange(len(p))
    drawn = p[rows, at] > 0
    forbidden = int((~drawn).sum()) if below is None else int((np.asarray(below) > 4).sum())
    p, at, ranks = p[drawn], at[drawn], ranks[drawn]
    n = len(p)
    facts = {"n": n, "forbidden": forbidden, "detectable_kl": POWER / n if n else None}
    if not n:
        return facts | {"decision": "differs" if forbidden else "within", "kl_low": 0.0}
    facts["pit"], pit_low = _pit(p, at, np.random.default_rng(seed))
    facts["surprisal"], surprisal_low = _surprisal(p, at)
    facts["tail"], tails, tail_low = _tails(p, at, ranks)
    facts["g"], g_low = (None, 0.0) if prefix is None else _g_test(p, at, np.asarray(prefix)[drawn])
    fired = holm([facts["pit"]["p"], facts["surprisal"]["p"], *tails, facts["g"]["p"] if facts["g"] else 1.0], ALPHA)
    proved = [low for low, one in zip([pit_low, surprisal_low, *tail_low, g_low], fired, strict=True) if one]
    facts["kl_low"] = max(proved, default=0.0)
    differs = forbidden > 0 or facts["kl_low"] > TOLERANT * jitter_kl
    return facts | {"decision": "differs" if differs else "within"}


def _outcomes(logprobs, chosen, support):
    """(probabilities [N, K or K + 1] in descending order, all others last; column of the choice; its rank) of each."""
    finite = np.isfinite(logprobs)
    p = np.where(finite, np.exp(np.where(finite, logprobs, 0)), 0)
    if support is None:
        here = chosen
    else:
        match = (support == chosen[:, None]) & (support >= 0)
        here = np.where(match.any(axis=-1), match.argmax(axis=-1), p.shape[1])
    order = np.argsort(-p, axis=-1, kind="stable")
    p = np.take_along_axis(p, order, axis=-1)
    place = np.argsort(order, axis=-1)
    if support is not None:
        p = np.concatenate([p, np.maximum(1 - p.sum(axis=-1, keepdims=True), 0)], axis=-1)
        place = np.concatenate([place, np.full((len(p), 1), p.shape[1] - 1)], axis=-1)
    at = place[np.arange(len(p)), here]
    return p / p.sum(axis=-1, keepdims=True), at, at


def _pit(p, at, random):
    """Probability integral transform, the likeliest first; (facts, divergence that its histogram proves)."""
    rows = np.arange(len(p))
    before = np.cumsum(p, axis=-1)[rows, at] - p[rows, at]
    values = np.clip(before + random.random(len(p)) * p[rows, at], 0, 1)
    squared, probability = anderson_darling(values)
    seen = np.histogram(values, BINS, (0, 1))[0]
    return {"a2": squared, "p": probability, "values": values}, _above_chance(
        _g(seen, np.full(BINS, len(p) / BINS)), BINS - 1, len(p)
    )


def _above_chance(g, freedom, n):
    """Lower bound of the mean divergence that G of n draws shows: a noncentral chi-square less SURE of its sigmas."""
    away = max(0.0, g - freedom)
    return max(0.0, away - SURE * np.sqrt(2 * (freedom + 2 * away))) / (2 * n)


def _g(seen, expected):
    there = seen > 0
    return float(2 * (seen[there] * np.log(seen[there] / expected[there])).sum())


def _surprisal(p, at):
    """Mean surprisal against entropy; (facts, divergence that its shift proves).

    The bound is that of Donsker and Varadhan: for every t the divergence is at least t times the shift less the log of
    the mean of exp(t times the deviation).
    """
    logs = np.log(np.where(p > 0, p, 1))
    entropy = -(p * logs).sum(axis=-1)
    variance = (p * logs**2).sum(axis=-1) - entropy**2
    shift, n = -logs[np.arange(len(p)), at] - entropy, len(p)
    spread = float(np.sqrt(max(variance.sum(), 0.0)))
    z = float(shift.sum() / spread) if spread > 0 else 0.0
    error = SURE * np.sqrt(max(variance.sum(), np.square(shift - shift.mean()).sum())) / n
    sure = np.copysign(max(0.0, abs(shift.mean()) - error), shift.mean())
    bounds = []
    for tilt in _TILTS:
        mean = np.where(p > 0, np.exp((1 - tilt) * logs), 0).sum(axis=-1)
        bounds.append(tilt * sure - float(np.mean(np.log(mean) - tilt * entropy)))
    return {"z": z, "p": 2 * normal_tail(abs(z)), "mean": float(shift.mean())}, max(0.0, *bounds)


def _tails(p, at, ranks):
    """Draws beyond the nucleus and beyond the likeliest; (facts, probabilities of so few, divergences they prove)."""
    before = np.cumsum(p, axis=-1) - p
    beyond = {"nucleus": before >= NUCLEUS, "ranks": np.broadcast_to(np.arange(p.shape[1]) >= RANKS, p.shape)}
    facts, probabilities, proved = {}, [], []
    for name, columns in beyond.items():
        mass = np.where(columns, p, 0).sum(axis=-1)
        seen = int(columns[np.arange(len(p)), at].sum())
        probability = poisson_binomial(mass, seen)
        facts[name] = {"seen": seen, "expected": float(mass.sum()), "p": probability}
        probabilities.append(probability)
        most, mean = binomial_bound(seen, len(p), 1e-3), float(mass.mean())
        proved.append(_binary(most, mean) if most < mean else 0.0)
    return facts, probabilities, proved


def _binary(q, p):
    parts = [(q, p), (1 - q, 1 - p)]
    return sum(a * log(a / b) for a, b in parts if a > 0 and b > 0)


def _g_test(p, at, prefix):
    """G of every prefix with enough draws, unlikely outcomes as one; (facts or None, divergence that it proves)."""
    g, freedom, n = 0.0, 0, 0
    for name in np.unique(prefix):
        here = np.flatnonzero(prefix == name)
        expected = len(here) * p[here].mean(axis=0)
        enough = int((expected >= EXPECTED).sum())  # in descending order
        rest = expected[enough:].sum()
        if 0 < rest < EXPECTED:
            enough -= 1
        if enough < 1 or (enough == 1 and rest == 0):
            continue
        seen = np.bincount(np.minimum(at[here], enough), minlength=enough + 1)
        cells = np.append(expected[:enough], expected[enough:].sum())
        kept = cells > 0
        g += _g(seen[kept], cells[kept])
        freedom += int(kept.sum()) - 1
        n += len(here)
    if not freedom:
        return None, 0.0
    low = _above_chance(g, freedom, n)
    return {"g": g, "df": freedom, "p": chi_square_tail(g, freedom), "n": n}, low


def poisson_binomial(probabilities, seen):
    """P(X <= seen) of the number of events that happen independently, each with its own probability."""
    count = np.zeros(seen + 1)
    count[0] = 1.0
    for p in probabilities:
        count[1:] = count[1:] * (1 - p) + count[:-1] * p
        count[0] *= 1 - p
    return float(min(1.0, count.sum()))


def binomial_bound(seen, n, alpha=0.05):
    """The largest rate at which as few as `seen` events of n have the probability alpha (Clopper and Pearson)."""
    if seen >= n:
        return 1.0
    low, high = seen / n, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if _binomial_tail(seen, n, middle) < alpha else (middle, high)
    return (low + high) / 2


def _binomial_tail(seen, n, p):
    if p >= 1:
        return 0.0
    return sum(
        exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log1p(-p)) if p > 0 else k == 0
        for k in range(seen + 1)
    )


class EProcess:
    """An e-process: evidence that events come at the rate `bad` and not `good`, which may be looked at at any time.

    By Ville's inequality `.value` exceeds 1 / alpha with at most the probability alpha at rates of `good` or less.
    """

    def __init__(self, good=1e-3, bad=1e-2, alpha=ALPHA):
        self.good, self.bad, self.alpha = good, bad, alpha
        self.n = self.events = 0
        self._log = self._most = 0.0

    def add(self, happened):
        """Take in bool [n] of what was seen, in its order; True once it is decided."""
        for event in np.atleast_1d(happened):
            self.n += 1
            self.events += bool(event)
            self._log += log(self.bad / self.good) if event else log1p(-self.bad) - log1p(-self.good)
            self._most = max(self._most, self._log)
        return self.decided

    @property
    def value(self):
        return exp(min(self._log, 700.0))

    @property
    def decided(self):
        """Whether the evidence was ever large enough."""
        return self._most >= -log(self.alpha)

    @property
    def bound(self):
        """Upper 95 % bound of the rate."""
        return binomial_bound(self.events, self.n) if self.n else 1.0
