"""The goals: what is measured, how much is wanted, and whether more or less is better.  Reported, never asserted."""

from collections import namedtuple

Goal = namedtuple("Goal", "key what unit better goal stretch")
MORE, LESS = "more", "less"

GOALS = (
    Goal("decode.read", "decode: weights per second against a plain read of the same bytes", "", MORE, 0.75, 0.85),
    Goal("decode.torch", "decode against eager torch bf16", "x", MORE, 2.5, 4.0),
    Goal("decode.llama.cpp", "decode against llama.cpp bf16 (goal on Intel: 1.5)", "x", MORE, 1.0, 1.5),
    Goal("prefill.peak", "prefill: dense operations against the peak usable (goal on AMD: 0.9)", "", MORE, 0.55, 0.9),
    Goal("prefill.torch", "prefill against eager torch bf16", "x", MORE, 2.0, 3.0),
    Goal("prefill.llama.cpp", "prefill against llama.cpp bf16", "x", MORE, 1.5, None),
    Goal("delta.torch", "delta rule over a prompt against torch's chunked form", "x", MORE, 8.0, None),
    Goal("op.smallest", "smallest op from Python, no hooks", "µs", LESS, 0.3, None),
    Goal("capture.all", "capture of everything against the plain forward plus the copies", "x", LESS, 1.3, None),
    Goal("fp64.decode", "profile fp64: decode against fp32", "x", LESS, 2.5, None),
    Goal("fp64.prefill", "profile fp64: prefill against fp32", "x", LESS, 8.0, None),
    Goal("open.seconds", "open a 27B checkpoint and print its tree: time", "s", LESS, 1.0, None),
    Goal("open.memory", "open a 27B checkpoint and print its tree: memory", "MB", LESS, 200.0, None),
    Goal("import.seconds", "import qwenref, no optional package loaded", "s", LESS, 0.15, None),
    Goal("forward.memory", "memory of a forward against the largest activations plus the cache", "x", LESS, 1.2, None),
)
KEYS = tuple(goal.key for goal in GOALS)


class Row:
    """One goal and what was reached: `.figure`, `.low`, `.high` over the turns, `.note` how; or `.reason` for none."""

    def __init__(self, goal, figure=None, low=None, high=None, note="", reason=None):
        self.goal, self.figure, self.note, self.reason = goal, figure, note, reason
        self.low, self.high = figure if low is None else low, figure if high is None else high

    @property
    def met(self):
        """Whether the goal is reached; None where nothing was measured."""
        if self.figure is None:
            return None
        return self.figure >= self.goal.goal if self.goal.better == MORE else self.figure <= self.goal.goal

    @property
    def verdict(self):
        if self.met is None:
            return "not run"
        stretch = self.goal.stretch
        if self.met and stretch is not None and (self.figure >= stretch) == (self.goal.better == MORE):
            return "stretch"
        return "met" if self.met else "missed"

    def to_dict(self):
        facts = self.goal._asdict() | {"figure": self.figure, "low": self.low, "high": self.high}
        return facts | {"met": self.met, "verdict": self.verdict, "note": self.note, "reason": self.reason}
