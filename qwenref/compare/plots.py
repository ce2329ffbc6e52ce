"""The plots of a report, each from the arrays of `report.ARRAYS`; None where there are not the arrays for it."""

from html import escape
from statistics import NormalDist

import numpy as np

from qwenref.compare.plot import Plot, figure
from qwenref.compare.statistics import CLASSES, RATIO, SURE

FLIPS = ("", *CLASSES)  # by the numbers in the array `flip`
AMBER, RED = RATIO
_LEAST = 1e-12  # what a logarithmic axis shows of zero


def _has(arrays, *names):
    return all(name in arrays and np.size(arrays[name]) for name in names)


def _numbers(values):
    """float64, 0 in the place of what is not finite."""
    values = np.asarray(values, np.float64)
    return np.where(np.isfinite(values), values, 0.0)


class _Blocks:
    """Positions of which each stands for several, where there are more than fit."""

    def __init__(self, count, most):
        self.size = -(-count // most)
        self._begins = np.arange(0, count, self.size)
        self.x = np.minimum(self._begins + (self.size - 1) / 2, count - 1)

    def __call__(self, how, values):
        return np.maximum(how.reduceat(_numbers(values), self._begins), _LEAST)

    def said(self, words):
        return f" Each point stands for {self.size:,} positions: {words}." if self.size > 1 else ""


def _log_ends(*values, least=1e-9):
    seen = np.concatenate([np.ravel(v) for v in values])
    seen = seen[seen > least]
    return (float(seen.min()), float(seen.max()) * 1.001) if seen.size else (0.1, 1.0)


def margin(report, most=1000):
    """(3) how clear the reference's choices are, beside the noise, and where the engine chose otherwise."""
    arrays = report.arrays
    if not _has(arrays, "margin", "sigma"):
        return None
    margins, sigma = _numbers(arrays["margin"]), _numbers(arrays["sigma"])
    given_up = _numbers(arrays.get("u", np.zeros(len(margins))))
    blocks = _Blocks(len(margins), most)
    lowest, noise = blocks(np.minimum, margins), blocks(np.maximum, sigma)
    crit = (report.stats.get("zmax") or {}).get("crit")
    ends = _log_ends(lowest, SURE * noise, least=1e-5)
    plot = Plot((0, max(1, len(margins) - 1)), ends, ("position, prompt after prompt", "margin, nats"), log=True).grid()
    plot.band(blocks.x, np.full(len(noise), plot.y.low), SURE * noise).line(blocks.x, lowest)
    if crit:
        plot.line(blocks.x, crit * noise, "d")
    kinds = np.clip(np.asarray(arrays.get("flip", np.zeros(len(margins)))).astype(int), 0, len(FLIPS) - 1)
    chosen = _worst(np.flatnonzero(kinds), kinds, given_up, 200)
    for i in chosen:
        figures = f"margin {margins[i]:.4g}, sigma {sigma[i]:.4g}, u {given_up[i]:.4g}"
        plot.mark(i, margins[i], FLIPS[kinds[i]], f"{FLIPS[kinds[i]]}: {figures}")
    clear = int((margins > SURE * sigma).sum())
    count = ", ".join(f"{(kinds == n).sum():,} {name}" for n, name in enumerate(FLIPS) if n and (kinds == n).any())
    left = np.count_nonzero(kinds) - len(chosen)
    return plot.figure(
        f"{clear:,} of {len(margins):,} positions have a margin above {SURE:g} sigma; other choices: {count or 'none'}",
        f"Line: margin of the reference's choice. Area: up to {SURE:g} sigma, where rounding may take either. "
        + ("Dashed: the critical value. " if crit else "")
        + "Marks: the engine chose otherwise (ring tie, disc benign, square ambiguous, triangle non-benign)."
        + (f" {left:,} milder ones are left out." if left else "")
        + blocks.said("the least margin, the largest sigma"),
    )


def _worst(places, kinds, u, most):
    """At most so many places, those of the worst class and the largest u first, in their order."""
    if len(places) <= most:
        return places
    return np.sort(places[np.lexsort((-u[places], -kinds[places]))[:most]])


def divergence(report, most=1000):
    """(4) KL by position, with the ribbon of the rounding variants."""
    arrays = report.arrays
    if not _has(arrays, "kl"):
        return None
    values = _numbers(arrays["kl"])
    blocks = _Blocks(len(values), most)
    kl = blocks(np.maximum, values)
    ribbon = [blocks(np.maximum, arrays[f"kl_jitter_{end}"]) for end in ("min", "max") if f"kl_jitter_{end}" in arrays]
    names = ("position, prompt after prompt", "KL, nats")
    plot = Plot((0, max(1, len(values) - 1)), _log_ends(kl, *ribbon), names, log=True).grid()
    finding = f"largest divergence {values.max():.4g} nats at position {int(values.argmax()):,}"
    if len(ribbon) == 2:
        plot.band(blocks.x, *ribbon)
        outside = int((values > _numbers(arrays["kl_jitter_max"])).sum())
        finding += f"; {outside:,} of {len(values):,} above every rounding variant"
    plot.line(blocks.x, kl)
    caption = "Line: the engine. Area: from the least to the largest of the rounding variants."
    return plot.figure(finding, caption + blocks.said("the largest of each"))


def ratios(report):
    """(5) R of each prompt with its interval and the gates."""
    arrays = report.arrays
    if not _has(arrays, "R_prompt"):
        return None
    values = _numbers(arrays["R_prompt"])
    low, high = (_numbers(arrays.get(f"R_prompt_{end}", values)) for end in ("low", "high"))
    top = max(float(values.max()), float(high.max()), RED) * 1.1
    plot = Plot((-0.5, len(values) - 0.5), (0, top), ("prompt", "R"), height=180)
    plot.grid(range(0, len(values), -(-len(values) // 16))).across(AMBER, f"{AMBER:g}", below=True).across(
        RED, f"{RED:g}"
    )
    for i, value in enumerate(values):
        plot.whisker(i, low[i], high[i])
        kind = "benign" if value <= AMBER else "ambiguous" if value <= RED else "non-benign"
        plot.mark(i, value, kind, f"prompt {i}: R {value:.4g}")
    worst = int(values.argmax())
    return plot.figure(
        f"largest R {values[worst]:.4g}, prompt {worst}; {(values > RED).sum()} of {len(values)} prompts above {RED:g}",
        "R: error of the engine to that of a rounding variant, with 95 % interval; "
        f"disc at most {AMBER:g}, square at most {RED:g}, triangle above.",
    )


def hypotheses(report, most=12):
    """(6) share of the engine's error that each hypothesis explains, with beta and z."""
    found = [row for row in report.hypotheses if row.get("r2") is not None][:most]
    if not found:
        return None
    return _bars(
        [(row["id"], max(0.0, min(1.0, row["r2"])), row["accepted"], _figures(row)) for row in found],
        f"{found[0]['id']} explains {100 * found[0]['r2']:.1f} % of the error; "
        + ("accepted" if found[0]["accepted"] else "not accepted"),
        "Bar: R2, the share of the engine's squared error; filled where the hypothesis is accepted.",
    )


def _figures(row):
    shown = [
        f"{name} {row[key]:.2g}"
        for name, key in (("R2", "r2"), ("beta", "beta"), ("z", "z"))
        if row.get(key) is not None
    ]
    return " · ".join(shown)


def _bars(rows, finding, caption):
    parts, left, full = [], 140, 130
    for i, (name, share, filled, words) in enumerate(rows):
        y = 6 + 20 * i
        shown = name if len(name) <= 24 else name[:23] + "…"
        parts.append(f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(shown)}</text>')
        shape, wide = "b" if filled else "o", max(1, share * full)
        parts.append(f'<rect class="{shape}" x="{left}" y="{y}" width="{wide:.1f}" height="14"/>')
        parts.append(f'<text class="q" x="{left + full + 8}" y="{y + 11}">{escape(words)}</text>')
    return figure("".join(parts), 12 + 20 * len(rows), finding, caption)


def period(report, length):
    """(8) error by position modulo the length of a chunk or cache block."""
    values = report.arrays.get(f"error_mod{length}")
    if values is None or not np.size(values):
        return None
    values = _numbers(values)
    names = (f"position mod {length}", "error, sigmas")
    plot = Plot((0, len(values)), (0, max(float(values.max()) * 1.1, 1e-9)), names, height=150).grid()
    for i, value in enumerate(values):
        plot.bar(i + 0.1, i + 0.9, value)
    middle = float(np.median(values))
    plot.across(middle, "median")
    ratio = f"{values.max() / middle:.3g} times the median" if middle else "median 0"
    return plot.figure(f"largest at {int(values.argmax())} of {length}: {ratio}", f"Error by position mod {length}.")


def quantiles(report, most=400):
    """(9) errors in sigmas against the normal distribution."""
    values = np.asarray(report.arrays.get("qq", ()), np.float64)
    values = np.sort(values[np.isfinite(values)])
    if len(values) < 2:
        return None
    keep = np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))
    normal = NormalDist()
    expected = [normal.inv_cdf((i + 0.5) / len(values)) for i in keep]
    end = max(3.0, abs(expected[0]), abs(expected[-1]))
    low, high = min(-end, float(values[0])), max(end, float(values[-1]))
    plot = (
        Plot((-end, end), (low, high), ("normal quantile", "error, sigmas")).grid().line([-end, end], [-end, end], "d")
    )
    plot.line(expected, values[keep])
    widest = float(np.abs(values).max())
    return plot.figure(
        f"largest error {widest:.4g} sigmas", "Line: errors in sigmas, in ascending order. Dashed: normal."
    )


def transform(report, bins=20):
    """(10) histogram of the probability integral transform, in sampling mode."""
    values = report.arrays.get("pit")
    if values is None or not np.size(values):
        return None
    counts = np.histogram(np.asarray(values, np.float64), bins, (0.0, 1.0))[0]
    expected = counts.sum() / bins
    spread = 2 * np.sqrt(expected * (1 - 1 / bins))
    plot = Plot(
        (0, 1),
        (0, max(counts.max(), expected + spread) * 1.1),
        ("probability integral transform", "tokens"),
        height=160,
    )
    plot.band([0, 1], [max(0.0, expected - spread)] * 2, [expected + spread] * 2).grid()
    for i, count in enumerate(counts):
        plot.bar((i + 0.08) / bins, (i + 0.92) / bins, count, "o")
    outside = int((np.abs(counts - expected) > spread).sum())
    return plot.figure(
        f"{outside} of {bins} bars outside of what chance explains at 2 sd",
        "Level where tokens are drawn as declared; area: two standard deviations.",
    )
