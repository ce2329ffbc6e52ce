"""What a benchmark found: every goal as a line, work by op against the limits, as text, JSON types or a picture."""

from statistics import median

from qwenref.bench.svg import picture
from qwenref.profile_display import columns
from qwenref.rates import Rates, duration, quantity
from qwenref.sizes import memory

FEW = 12  # ops of a phase that are shown; the rest is one line


class Report:
    """`.facts` of machine and settings · `.rows` one per goal · `.times` {run: [seconds]} · `.roofline` {phase: ops} ·
    `.extrapolated` to the whole 27B model, or None.  `.text()`, `.to_dict()`, `.svg()`."""

    def __init__(self, facts, rows, times, roofline, extrapolated=None):
        self.facts, self.rows, self.times = facts, rows, times
        self.roofline, self.extrapolated = roofline, extrapolated

    @property
    def rates(self):
        return Rates(**self.facts["rates"])

    def to_dict(self):
        """Everything, made of JSON types."""
        return {
            **self.facts,
            "rows": [row.to_dict() for row in self.rows],
            "times": self.times,
            "roofline": self.roofline,
            "extrapolated": self.extrapolated,
        }

    def svg(self):
        """The roofline as one SVG picture: each op by operations per byte and the rate it reached."""
        return picture(self.facts, self.rates, self.roofline)

    def __repr__(self):
        met = sum(row.met is True for row in self.rows)
        run = sum(row.met is not None for row in self.rows)
        return f"Report · {self.facts['model']} · {met} of {run} goals met · {len(self.rows) - run} not run"

    # ---- text

    def text(self):
        parts = [self._head(), self._goals()]
        parts += [self._times()] if self.times else []
        parts += [self._phase(phase) for phase in self.roofline]
        parts += [self._whole()] if self.extrapolated else []
        return "\n\n".join("\n".join(part) for part in parts)

    def _head(self):
        f = self.facts
        lines = [
            f"qwenref {f['version']} · {f['model']} · {f['layers']} layers, width {f['hidden_size']:,} · "
            f"{f['weights']:,} B of weights per step",
            f"cpu      {f['cpu']} · Python {f['python']}, NumPy {f['numpy']}",
            f"limits   {self.rates}",
        ]
        lines += [f"{name:<8} {settings}" for name, settings in f["settings"].items()]
        lines += [f"warning  {warning}" for warning in f["warnings"]]
        return lines + [
            f"turns    {f['rounds']}, a prompt of {f['prefill']:,} tokens, then {f['tokens']:,}; medians of ratios"
        ]

    def _goals(self):
        rows = []
        for row in self.rows:
            goal = row.goal
            sign = ">=" if goal.better == "more" else "<="
            wanted = f"{sign} {goal.goal:g}" + (f", {goal.stretch:g}" if goal.stretch else "")
            spread = "" if row.figure is None or row.low == row.high else f"{_figure(row.low)} to {_figure(row.high)}"
            reached = "-" if row.figure is None else f"{_figure(row.figure)} {goal.unit}".rstrip()
            words = goal.what + (f" ({row.note or row.reason})" if row.note or row.reason else "")
            rows.append((reached, spread, wanted, row.verdict, words))
        return columns(("reached", "spread", "goal, stretch", "", "what"), rows)

    def _times(self):
        rows = [
            (name, duration(median(taken)), duration(min(taken)), duration(max(taken)))
            for name, taken in self.times.items()
            if name != "arithmetic"
        ]
        turned = [(middle, least, most, name) for name, middle, least, most in rows]
        return columns(("median", "least", "most", "seconds of a run (decode: of a token)"), turned)

    def _phase(self, phase):
        found = self.roofline[phase]
        head = (f"{phase}, by op: {duration(found['seconds'])}",)
        rows, rest = [], 0.0
        for i, (name, work) in enumerate(sorted(found["ops"].items(), key=lambda item: -item[1]["seconds"])):
            if i < FEW:
                rows.append(op_row(name, work, found["seconds"]))
            else:
                rest += work["seconds"]
        rest_rows = [(_percent(rest / found["seconds"]), duration(rest), "", "", "", "", "", "(the other ops)")]
        between = found["seconds"] - sum(work["seconds"] for work in found["ops"].values())
        last = (_percent(between / found["seconds"]), duration(between), "", "", "", "", "", "(between ops)")
        head_row = ("share", "time", "calls", "bytes", "flops", "flops/byte", "of limit", "op")
        return [*head, *columns(head_row, [*rows, *(rest_rows if rest else []), last])]

    def _whole(self):
        e = self.extrapolated
        lines = [
            f"The whole 27B model, extrapolated: {e['repeats']} repeats as measured, the head by its bytes",
            f"  decode    {e['decode_tokens_per_second']:.3g} tokens/s ({duration(e['decode_seconds'])} each)",
            f"  prefill   {e['prefill_tokens_per_second']:.4g} tokens/s ({e['prefill_tokens']:,} tokens in "
            f"{duration(e['prefill_seconds'])})",
            f"  weights   {quantity(e['weights'], 'B')}, in memory to reach this; from disk a step takes as long as "
            "reading them",
        ]
        return lines + [
            f"  {int(tokens):,} tokens of context: {memory(size)} of cache, {memory(e['memory'][tokens])} in all"
            for tokens, size in e["cache"].items()
        ]


def op_row(name, work, total):
    """One op as the roofline table shows it."""
    intensity = f"{work['flops'] / work['bytes']:.3g}" if work["bytes"] else "-"
    return (
        _percent(work["seconds"] / total),
        duration(work["seconds"]),
        f"{work['calls']:,}",
        quantity(work["bytes"], "B"),
        quantity(work["flops"], "FLOP"),
        intensity,
        _percent(work["of_limit"]),
        name,
    )


def _percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def _figure(x):
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"
