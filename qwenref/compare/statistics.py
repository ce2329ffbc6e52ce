"""How far an engine is from the truth, in units of how far rounding moves the reference: arrays in, figures out.

Columns are the ids of a Table; `differences` says what an error is.
"""

from typing import NamedTuple

import numpy as np

from qwenref.compare.differences import PSEUDO, Differences, centred, gap, given, likeliest, noise
from qwenref.compare.distributions import chance_of_one_more, largest, one_more, student_quantile
from qwenref.compare.family import ALPHA, OF_BOTH, held, of_any, of_largest
from qwenref.compare.likelihoods import likelihoods, ranks
from qwenref.compare.profiles import profiles
from qwenref.compare.stages import AMBER, GREEN, RED, SKIPPED, graded, stage
from qwenref.compare.table import both_paths

# Gates and constants, from simulations of 30 clean engines and 21 kinds of faults on an 8-layer hybrid model; CHANCE is
# of 96 variants of the embedded model, each as an engine.
SURE = 4.0  # sigmas: a choice with a larger margin has to agree
AMBIGUOUS = 2  # so many flips between SURE and the critical value are to be expected
RATIO = (1.5, 2.0)  # of the root mean square error to a variant's: amber, red
DIVERGENCE = (2.25, 4.0)  # the same of KL: squares of these
CHANCE = (0.01, 0.002)  # that one variant more is beyond them: where variants are far apart, gates are wider
_DRAWS = 1000

CLASSES = ("tie", "benign", "ambiguous", "non-benign")


class Measures(NamedTuple):
    """`.stats` by names of a report · `.stages` rows of its table · `.flips` · `.arrays` by position · `.ratio` R"""

    stats: dict
    stages: list
    flips: list
    arrays: dict
    ratio: float | None

    def gates(self, verdict):
        """The stages that came out so."""
        return [stage["id"] for stage in self.stages if stage["verdict"] == verdict]


def critical(positions, variants):
    """How many sigmas may be seen at one of so many positions of a clean engine, at the rate ALPHA.

    Of Student's t with a degree of freedom for every square that a sigma is made of: fewer variants, wider limits.
    """
    return student_quantile(1 - ALPHA / (2 * max(1, positions)), variants + PSEUDO)


def limits(sizes, gates):
    """(amber, red) of a size to the median of the variants' sizes [J]: `gates`, or where one more may come out."""
    middle = float(np.median(sizes))
    if not middle > 0:
        return gates
    reach = [one_more(sizes, chance)[1] / middle for chance in CHANCE]
    return tuple(map(max, gates, reach))


# ---- divergences ---------------------------------------------------------------------------------------------------


def divergence(truth, other, full):
    """KL [N] of distributions `other` from `truth` [N, K]; where not `full`, of these ids and one bucket of all others.

    The second is a lower bound of the first, by the log-sum inequality.
    """
    p, q = _masses(truth, other, full)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(axis=-1), 0)


def _masses(truth, other, full):
    there = np.isfinite(truth) & ~np.isnan(other)
    p, q = (np.where(there, np.exp(np.where(there, values, 0)), 0) for values in (truth, other))
    if full:
        return p, q
    rest = [np.maximum(1 - mass.sum(axis=-1, keepdims=True), 1e-12) for mass in (p, q)]
    return np.concatenate([p, rest[0]], axis=-1), np.concatenate([q, rest[1]], axis=-1)


def distances(truth, other, full):
    """(total variation, Jensen-Shannon divergence, Bhattacharyya coefficient), each [N]."""
    p, q = _masses(truth, other, full)
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(x > 0, x * (np.log(x) - np.log(middle)), 0).sum(axis=-1) for x in (p, q)]
    return np.abs(p - q).sum(axis=-1) / 2, sum(parts) / 2, np.sqrt(p * q).sum(axis=-1)


# ---- everything ----------------------------------------------------------------------------------------------------


def measure(table, spread=0.0, seed=0, path=""):
    """Measures of a Table; of the choices alone where it has no numbers of the engine.

    spread       standard deviation of the engine's log-probabilities between equal requests
    path         put in front of the ids of stages: "P" or "D"
    """
    there = given(table).any(axis=-1)
    stats, stages, arrays, ratio = {}, [], {}, None
    if there.any():
        table = table.select(there)
    elif not (table.emitted >= 0).any():
        missing = stage(f"{path}R", "error against rounding", SKIPPED, detail="no numbers")
        return Measures(stats, [missing], [], arrays, ratio)
    random, crit = np.random.default_rng(seed), critical(table.positions, len(table.jitters))
    choices = _Choices(table, spread, crit)
    if there.any():
        differences = Differences(table)
        ratio = _ratio(table, differences, random, stats, stages, arrays)
        _divergences(table, random, stats, stages, arrays)
    choices.told(stats, stages, len(table.jitters) + PSEUDO)
    if there.any():
        error = gap(np.where(given(table), table.engine, np.nan) - table.truth, table.best, table.second)
        scaled = error / choices.pair
        moved = gap(table.jitters - table.truth, table.best, table.second)
        _hot_spot(table, scaled, crit, _standing_out(moved), stats, stages)
        profiles(table, scaled, moved / choices.pair, random, stats, stages, arrays)
        stats["rank"] = ranks(table)
        stats["dp"], stats["ppl"] = likelihoods(table)
        arrays["qq"] = np.sort(scaled[np.isfinite(scaled)])
    arrays |= choices.arrays(table)
    held(stages)
    for row in stages:
        row["id"] = path + row["id"]
    return Measures(stats, stages, choices.flips(table), arrays, ratio)


class _Choices:
    """The engine's choices against the truth's, position by position: `.margin`, `.sigma`, `.u`, `.kinds` 0 the same,
    then 1 and the place among CLASSES."""

    def __init__(self, table, spread, crit):
        self.pair = noise(table, table.second, spread)
        self.margin = gap(table.truth, table.best, table.second)
        self.made = table.emitted >= 0
        self.other = np.where(self.made, table.emitted, table.best)
        self.same = self.made & (self.other == table.best)
        own = noise(table, self.other, spread)
        self.sigma = np.where(self.other == table.best, self.pair, own)
        self.u = gap(table.truth, table.best, self.other) / self.sigma
        self.kinds = _classes(table, self.other, self.u, crit)

    def told(self, stats, stages, freedom):
        sure = self.made & (self.margin > SURE * self.pair)
        n, agree = int(sure.sum()), int((sure & (self.same | (self.kinds == 1))).sum())
        bound = 3 / n if n and agree == n else None  # the rule of three
        stats["sure_agreement"] = {"n": n, "agree": agree, "bound95": bound}
        if not self.made.any():
            stages.append(stage("flips", "choices", SKIPPED, detail="no tokens"))
            return
        tied, benign, between, far = (int((self.kinds == kind).sum()) for kind in (1, 2, 3, 4))
        verdict = RED if far else AMBER if between > AMBIGUOUS else GREEN
        counts = f"{far} non-benign, {between} ambiguous, {benign} benign, {tied} ties"
        chance = of_any(float(self.u[self.kinds == 4].max()), len(self.u), freedom) if far else 1.0
        row = stage("flips", "choices that rounding does not explain", verdict, far, 0, counts)
        stages.append(row | {"chance": chance})
        detail = f"{agree:,} of {n:,} with a margin above {SURE:g} sigma"
        share = agree / n if n else None
        row = stage("sure", "sure choices", SKIPPED if not n else RED if far else GREEN, share, 1, detail)
        stages.append(row | {"chance": chance})

    def flips(self, table):
        return [
            {
                "prompt": int(table.prompt[n]), "pos": int(table.position[n]), "class": CLASSES[self.kinds[n] - 1],
                "ref_id": int(table.support[n, table.best[n]]), "eng_id": int(table.support[n, self.other[n]]),
                "margin": float(self.margin[n]), "sigma": float(self.sigma[n]), "u": float(self.u[n]),
                "way": int(table.way[n]),
            }
            for n in np.flatnonzero(self.kinds)
        ]  # fmt: skip

    def arrays(self, table):
        return {
            "prompt": table.prompt, "pos": table.position, "margin": self.margin, "sigma": self.sigma, "u": self.u,
            "flip": np.minimum(self.kinds, 4),
        }  # fmt: skip


def _classes(table, other, u, crit):
    """int64 [N]: 0 the same choice, then 1 and the place among CLASSES."""
    rows = np.arange(table.positions)
    values = table.engine[rows, other], table.engine[rows, table.best]
    tied = np.isfinite(values[0]) & (values[0] == values[1])
    kinds = np.select([tied, u <= SURE, u <= crit], [1, 2, 3], 4)
    return np.where((other == table.best) | (table.emitted < 0), 0, kinds)


def _ratio(table, differences, random, stats, stages, arrays):
    ratio = differences.ratio()
    prompts, number = np.unique(table.prompt, return_inverse=True)
    count = np.array([differences.there[number == n].sum() for n in range(len(prompts))])
    squares = np.array([_by_prompt(np.square(each), number) for each in (differences.engine, *differences.jitters)])
    low, high = _interval(lambda drawn: _drawn_ratio(squares[:, drawn], count[drawn]), len(prompts), random)
    stats["R"] = {"value": ratio, "ci": [low, high]}
    amber, red = limits(differences.sizes, RATIO)
    row = stage("R", "error against rounding", graded(ratio, amber, red), ratio, amber)
    stages.append(row | {"chance": chance_of_one_more(differences.sizes, differences.rms(differences.engine))})
    with np.errstate(invalid="ignore", divide="ignore"):
        own = np.sqrt(squares[0] / count) / np.median(np.sqrt(squares[1:] / count), axis=0)
    arrays["R_prompt"] = own
    spans = [_spans(differences, number == n, random) for n in range(len(prompts))]
    arrays["R_prompt_low"], arrays["R_prompt_high"] = (np.array(each) for each in zip(*spans, strict=True))
    return ratio


def _by_prompt(squares, number):
    return np.bincount(number, weights=squares.sum(axis=-1))


def _drawn_ratio(squares, count):
    rms = np.sqrt(squares.sum(axis=-1) / max(1, count.sum()))
    middle = np.median(rms[1:])
    return rms[0] / middle if middle > 0 else np.nan


def _spans(differences, rows, random, draws=200):
    """Bounds of a prompt's own R, its positions drawn again."""
    squares = np.array([np.square(each[rows]).sum(axis=-1) for each in (differences.engine, *differences.jitters)])
    count = differences.there[rows].sum(axis=-1)
    return _interval(lambda drawn: _drawn_ratio(squares[:, drawn], count[drawn]), squares.shape[1], random, draws)


def _interval(figure, clusters, random, draws=_DRAWS):
    """95 % bounds of a figure of clusters that are drawn again; None where there is one cluster alone."""
    if clusters < 2:
        return float("nan"), float("nan")
    values = [figure(random.integers(0, clusters, clusters)) for _ in range(draws)]
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def _divergences(table, random, stats, stages, arrays):
    there = given(table)
    engine = np.where(there, table.engine, np.nan)
    full = table.full and bool(there.all())
    own = divergence(table.truth, engine, full)
    jitters = np.stack([divergence(table.truth, np.where(there, each, np.nan), full) for each in table.jitters])
    middle = float(np.median(jitters.mean(axis=-1)))
    ratio = float(own.mean()) / middle if middle > 0 else float("nan")
    _, number = np.unique(table.prompt, return_inverse=True)
    sums, counts = np.bincount(number, weights=own), np.bincount(number)
    low, high = _interval(lambda drawn: sums[drawn].sum() / counts[drawn].sum(), len(sums), random)
    stats["kl"] = {
        "mean": float(own.mean()), "ci": [low, high], "p50": float(np.median(own)),
        "p99": float(np.quantile(own, 0.99)), "max": float(own.max()), "kind": "full" if full else "top and tail",
        "ratio": ratio,
    }  # fmt: skip
    amber, red = limits(jitters.mean(axis=-1), DIVERGENCE)
    row = stage("KL", "divergence against rounding", graded(ratio, amber, red), ratio, amber)
    stages.append(row | {"chance": chance_of_one_more(jitters.mean(axis=-1), float(own.mean()))})
    variation, shannon, overlap = distances(table.truth, engine, full)
    for name, values in (("tv", variation), ("js", shannon), ("bc", overlap)):
        stats[name] = {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}
    arrays |= {"kl": own, "kl_jitter_min": jitters.min(axis=0), "kl_jitter_max": jitters.max(axis=0)}


def _hot_spot(table, scaled, crit, usual, stats, stages):
    size = np.where(np.isfinite(scaled), np.abs(scaled), -1)
    at = int(size.argmax())
    value = float(size[at]) if size[at] >= 0 else None
    crit, chance = max(crit, largest(usual, CHANCE[1])), None
    if value is not None:
        chance = max(of_any(value, len(size), len(table.jitters) + PSEUDO), of_largest(usual, value))
    stats["zmax"] = {"value": value, "crit": crit, "prompt": int(table.prompt[at]), "pos": int(table.position[at])}
    detail = f"prompt {table.prompt[at]}, position {table.position[at]}"
    row = stage("Zmax", "largest single error", graded(value, crit, crit), value, crit, detail)
    stages.append(row | {"chance": chance})


def _standing_out(moved):
    """[J, N] of what variants moved, each held against the noise of all others: where single positions are far more
    sensitive in some ways of computing than in others, Student's t is too narrow.  Zeros where there are too few.
    """
    others = len(moved) - 1
    squares = np.square(np.nan_to_num(moved))
    pooled = squares.mean()
    if others < 2 or not pooled > 0:
        return np.zeros(moved.shape)
    rest = (squares.sum(axis=0) - squares + PSEUDO * pooled) / (others + PSEUDO)
    return np.sqrt(squares / rest)


def prefill_against_decode(prefill, decode):
    """(R_PD, stage) of the positions that both tables have: decode against prefill, two noises added in quadrature."""
    one, two = both_paths(prefill, decode)
    if not one.positions:
        return None, stage("PD", "decode against prefill", SKIPPED)
    there = likeliest(one, given(one) & given(two))
    moved = centred(two.engine - one.engine, one.truth, there)
    jitters = [centred(each - one.truth, one.truth, there) for each in one.jitters]
    sizes = np.sqrt(2) * np.array([np.sqrt(np.square(each).sum()) for each in jitters])
    middle = np.median(sizes)
    value = float(np.sqrt(np.square(moved).sum()) / middle) if middle > 0 else float("nan")
    amber, red = limits(sizes, RATIO)
    row = stage("PD", "decode against prefill", graded(value, amber, red), value, amber)
    row["chance"] = chance_of_one_more(sizes, float(np.sqrt(np.square(moved).sum())))
    held([row], OF_BOTH)
    return value, row
