"""What the numbers of a comparison mean: whether the engine is inside the envelope, and if not, why.

The order of the questions is that of the way a token takes: ids, template, sampling, stops, then the numbers of both
paths, prefill and decode.  What is found on the way is put right, and the questions go on behind it.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from qwenref.compare import prompts
from qwenref.compare.blind import blind_spots
from qwenref.compare.causes import Reason, sampling_row, sampling_rows
from qwenref.compare.described import envelope
from qwenref.compare.differences import Differences
from qwenref.compare.drawn import Drawn, temperature
from qwenref.compare.errors import LogprobKindUnknown
from qwenref.compare.faults import LIBRARY, find
from qwenref.compare.naming import PATHS, Naming
from qwenref.compare.numbers import Numbers
from qwenref.compare.readback import read_back
from qwenref.compare.replay import RESIDUAL
from qwenref.compare.sampling import as_listed, as_reported, beside, fit, neutral, undo
from qwenref.compare.stages import GREEN, RED, SKIPPED, stage
from qwenref.compare.statistics import limits, measure, prefill_against_decode
from qwenref.compare.stops import stop_findings
from qwenref.engines.base import ALL
from qwenref.errors import compose

ENOUGH = 32  # usable positions


class Verdict(NamedTuple):
    """Fields of a report, and its arrays."""

    fields: dict
    arrays: dict


@dataclasses.dataclass
class Judge:
    """The questions one by one; each leaves what it found in the attributes, so that a half-asked one can be told."""

    model: object
    suite: object
    options: object
    seen: object  # Evidence
    numbers: object  # Numbers
    stops: tuple
    own_weights: bool = False  # whether the model has the engine's own weights, dequantised
    retry: object = None  # () -> decode rows asked again without a cache: a list of Trajectory, or None
    path: list = dataclasses.field(default_factory=list)
    reasons: list = dataclasses.field(default_factory=list)
    stages: list = dataclasses.field(default_factory=list)
    hypotheses: list = dataclasses.field(default_factory=list)
    measures: dict = dataclasses.field(default_factory=dict)  # {"P" or "D": Measures}
    runner_up: str | None = None
    undetectable: tuple = ()
    pd: float | None = None
    drawn: object = None  # Drawn, in modes that draw
    aside: object = None  # a SamplingFit that leaves the error outside
    unknown: object = None  # LogprobKindUnknown, where the numbers of decode say nothing

    def judged(self):
        self._strings()
        self._prompts()
        self._sampling()
        self._stops()
        self._paths()
        Naming(self).named()
        self._outside_of_chance()
        read_back(self)
        self._counted()
        if self.unknown is not None and not self.reasons:
            raise self.unknown
        return self

    # ---- 2 to 4: ids and prompts ---------------------------------------------------------------------------------

    def _strings(self):
        for what, cause, asked, step in (
            ("tokenizer", "tokenizer", "strings", "S2"), ("template", "chat_template", "conversations", "S3"),
        ):  # fmt: skip
            differing = [each for each in self.seen.differences if each.what == what]
            count = self.seen.asked.get(asked, 0)
            if not count and not differing:
                self.stages.append(stage(step, what, SKIPPED, detail="not given by the engine"))
                continue
            off = sum(1 + each.more for each in differing)
            self.stages.append(stage(step, what, RED if off else GREEN, off, 0, f"{off:,} of {count:,} {asked} differ"))
            for difference in differing:
                names = prompts.named(self.model, difference)
                self._prompt_reason(cause, names, "proved", f"{off:,} of {count:,} {asked} give another result")

    def _prompts(self):
        for number, done in self.seen.completions.items():
            sent = self.suite.prompts[number].ids
            if self.seen.gives.ids_in and done.prompt_ids is not None and list(done.prompt_ids) != list(sent):
                names = prompts.cut(self.model, sent, done.prompt_ids)
                self._prompt_reason("tokenizer", names, "proved", "other ids were read than were sent")
                break
        if self.seen.gives.ids_in or not any(way.origin == "engine" for way in self.numbers.ways):
            return
        rows, best = prompts.likelier(self.model, self.suite, self.numbers.ways, self.numbers.run)
        known = {row["id"] for row in self.hypotheses}
        self.hypotheses += [row for row in rows if row["id"] not in known]
        if best is None:
            self.path.append("step 4: no other prompt explains the text")
            return
        fault = find(best)
        nats = next(row["lambda_nats"] for row in rows if row["id"] == best)
        words = f"the text is likelier by {nats:.0f} nats behind another prompt: {fault.what}"
        self.reasons.append(Reason(prompts.CAUSES[fault.family], "named", (best,), words))
        self.path.append(f"step 4: {words}")
        self.numbers = self._behind(fault)

    def _behind(self, fault):
        """Numbers of the same answers behind the prompts that have a fault in them."""
        ways = []
        for way in self.numbers.ways:
            ids = fault.prompt(list(self.suite.prompts[way.prompt].ids), self.model)
            ways.append(way._replace(ids=(*ids, *way.ids[way.start :]), start=len(ids)))
        return Numbers(self.model, ways, self.numbers.variants, self.numbers.truth, self.numbers.run)

    def _prompt_reason(self, cause, names, confidence, words):
        for name in names:
            if name not in {row["id"] for row in self.hypotheses}:
                fault = find(name)
                self.hypotheses.append(
                    {"id": name, "class": "prompt", "what": fault.what, "family": fault.family, "accepted": True,
                     "detectable": True}
                )  # fmt: skip
        if names:
            words += f": {find(names[0]).what}"
        self.reasons.append(Reason(cause, confidence, tuple(names), words))
        self.path.append(f"step {3 if cause == 'chat_template' else 2}: {words}")

    # ---- 5, 6: sampling and stops --------------------------------------------------------------------------------

    def _tables(self):
        return {name: as_reported(self.numbers.table(path)) for name, path in PATHS.items()}

    def _sampling(self):
        self.tables = self._tables()
        decode, prefill = self.tables["D"], self.tables["P"]
        if self.options.draws is not None:
            self._drawn(decode)
            decode = self.tables["D"]
        if not np.isfinite(decode.engine).any():
            self._texts(decode)
            return
        table = beside(decode, prefill) if prefill.positions else decode
        if not table.positions:
            table = decode
        found = fit(table, *self._before(table))
        if found.slope_se == float("inf") and self.seen.gives.kind != "raw" and self.drawn is None:
            self._of_unknown_kind(decode)
            return
        if self.seen.gives.output_logprobs != ALL:
            found = as_listed(found, int(np.isfinite(decode.engine).sum(axis=-1).max()))
        if not found.neutral and not self._brings_back(found, table, table is not decode):
            self.path.append(f"step 5: {_words(found)}: undone, the error is still outside; set aside")
            self.aside, found = found, neutral()
        value = None if found.slope_se == float("inf") else found.slope
        self.stages.append(stage("S4", "sampling", GREEN if found.neutral else RED, value, "1 ± 0.02"))
        if found.neutral:
            self.path.append("step 5: what is sampled from are the logits themselves")
            return
        self.believe(found)

    def _of_unknown_kind(self, decode):
        """Numbers that may be of anything are left out; the tokens beside them still are what was chosen."""
        kind = self.seen.gives.kind
        what = "of unknown kind" if kind == "unknown" else "after temperature and penalties, which are not stated"
        self.unknown = LogprobKindUnknown(
            compose(
                f"{self.seen.name}: log-probabilities {what}",
                found="too few at a position to tell by them",
                do="have the engine give those of softmax(logits), or at least three of the likeliest a position",
            )
        )
        self.stages.append(stage("S4", "sampling", SKIPPED, detail=f"log-probabilities {what}"))
        self.path.append(f"step 5: log-probabilities {what}; left out")
        self.tables["D"] = decode.with_engine(np.full(decode.engine.shape, np.nan))

    def believe(self, found):
        """A SamplingFit is what the engine does; it is undone."""
        self.seen.findings += found.findings
        rows = sampling_rows(found)
        self.hypotheses += rows
        words = _words(found)
        self.reasons.append(Reason("sampling_config", "named", tuple(row["id"] for row in rows), words))
        self.path.append(f"step 5: {words}; undone")
        self.tables["D"] = self.without(found)

    def without(self, found):
        """The Table of decode without what a SamplingFit says was done to it."""
        return undo(self.tables["D"], found, *self._before(self.tables["D"]))

    def _brings_back(self, found, table, paths):
        """Whether a fit, undone, leaves an error like that of rounding: kernels at fault look like one in part.

        Between the engine's own two `paths`, rounding is there twice.
        """
        before, behind = (Differences(each) for each in (table, undo(table, found, *self._before(table))))
        inside = limits(behind.sizes, (RESIDUAL[0], RESIDUAL[0]))[0] * (np.sqrt(2) if paths else 1)
        return not behind.ratio() > max(inside, before.ratio() / RESIDUAL[1])

    def _drawn(self, decode):
        """Tokens that were to be drawn are tested as such, and are no choices."""
        self.drawn = Drawn(decode, self.numbers.ways, weights=self.options.mode == "rl")
        self.stages += self.drawn.stages
        self.tables["D"] = decode._replace(emitted=np.full(decode.positions, -1))

    def _texts(self, decode):
        """An answer without numbers: whether its tokens are not chosen but drawn."""
        value = None
        if self.options.draws is None and measure(decode).gates(RED):
            value = temperature(decode)
        if value is None:
            self.stages.append(stage("S4", "sampling", SKIPPED, detail="no log-probabilities of the output"))
            return
        words = f"the tokens are as if drawn at temperature {value:g}, not the likeliest ones"
        self.stages.append(stage("S4", "sampling: temperature", RED, value, 0))
        self.seen.find("temperature", "error", words, {"temperature": value})
        name = f"temperature-{value}"
        if name in LIBRARY:
            self.hypotheses.append(sampling_row(name))
        self.reasons.append(Reason("sampling_config", "statistical", (name,), words))
        self.path.append(f"step 5: {words}")
        self.tables["D"] = decode._replace(emitted=np.full(decode.positions, -1))

    def _before(self, table):
        ways = self.numbers.ways
        contexts = [ways[w].ids[:t] for w, t in zip(table.way, table.position, strict=True)]
        return contexts, np.array([ways[w].start for w in table.way], np.int64), self.numbers.logz(table)

    def _stops(self):
        found = stop_findings(self.suite, self.numbers, self.seen, self.stops, self.drawn is not None)
        asked = sum(way.origin == "engine" for way in self.numbers.ways)
        verdict = SKIPPED if self.seen.assumed or not self.stops else RED if found else GREEN
        self.stages.append(stage("S6", "ends of answers", verdict, len(found), 0, f"of {asked} answers"))
        if found:
            self.seen.findings += found
            self.reasons.append(Reason("stop_tokens", "statistical", (), found[0]["message"]))
            self.path.append(f"step 6: {found[0]['message']}")

    # ---- 7 to 9: both paths --------------------------------------------------------------------------------------

    def _paths(self):
        for name, path in PATHS.items():
            found = measure(self.tables[name], self.seen.spread, path=f"{name} ")
            for row in found.stages:
                row["name"] = f"{path}: {row['name']}"
            self.measures[name] = found
            self.stages += found.stages
        self.pd, row = prefill_against_decode(self.tables["P"], self.tables["D"])
        self.stages.append(row)
        for step, (name, path) in enumerate(PATHS.items(), 7):
            if self.tables[name].positions:
                red = self.measures[name].gates(RED)
                self.path.append(f"step {step}: {path} is {'outside: ' + ', '.join(red) if red else 'inside'}")
        if row["verdict"] != SKIPPED:
            self.path.append(f"step 9: decode is {'not ' if row['verdict'] == RED else ''}like prefill")

    def _outside_of_chance(self):
        """Drawn tokens that differ where nothing else does."""
        if self.drawn is None or self.reasons or not (self.drawn.differs or self._weighs()):
            return
        cause = "sampling_config" if self.drawn.differs else "kernels"
        words = self.drawn.words if self.drawn.differs else "importance weights are far from 1"
        self.reasons.append(Reason(cause, "statistical", (), words))
        self.path.append(f"step 5: {words}")

    def _weighs(self):
        return any(row["id"] == "RL" and row["verdict"] == RED for row in self.stages)

    def bad(self, name):
        return bool(self.measures[name].gates(RED))

    def apart(self):
        return any(row["id"] == "PD" and row["verdict"] == RED for row in self.stages)

    # ---- 13: what it comes to ----------------------------------------------------------------------------------------

    def usable(self):
        """Positions that say something."""
        tables = getattr(self, "tables", {})
        return sum(
            int((np.isfinite(table.engine).any(axis=-1) | (table.emitted >= 0)).sum()) for table in tables.values()
        ) + (self.drawn.facts["n"] if self.drawn else 0)

    def _counted(self):
        if not self.reasons and self.usable() < ENOUGH:
            self.seen.find("too-few-positions", "warning", f"{self.usable()} usable positions, {ENOUGH} are needed")
            self.path.append("step 13: too few usable positions")

    def verdict(self):
        first = min(self.reasons, key=lambda reason: reason.rank, default=None)
        status, code = "AGREE_WITHIN_NOISE", 0
        if first is not None:
            status, code = "DIVERGED", 1
        elif self.usable() < ENOUGH:
            status, code = "INCONCLUSIVE", 2
        elif self.numbers.bitwise() and not self.seen.findings:
            status = "AGREE"
        summary = "; ".join(reason.words for reason in sorted(self.reasons, key=lambda reason: reason.rank))
        shown = self.measures.get("P" if self._shows_prefill() else "D")
        stats = dict(shown.stats) if shown else {}
        stats["pd"] = {"value": self.pd}
        if self.drawn is not None:
            stats |= self.drawn.stats
        fields = {
            "status": status, "exit_code": code, "cause": first.cause if first else "none",
            "confidence": first.confidence if first else None, "summary": summary or _agreeing(shown, status),
            "decision_path": self.path, "stages": self.stages, "stats": stats, "hypotheses": self.hypotheses,
            "runner_up": self.runner_up, "detection_limit": self._limit(), "findings": self.seen.findings,
            "config_diff": self.seen.differing_config, "blind_spots": blind_spots(self),
        }  # fmt: skip
        arrays = {**(shown.arrays if shown else {}), **(self.drawn.arrays if self.drawn else {})}
        return Verdict(fields, arrays)

    def envelope(self):
        """Figures of the noise, at the positions whose figures are shown."""
        tables = getattr(self, "tables", None)
        return {} if tables is None else envelope(tables["P" if self._shows_prefill() else "D"])

    def _shows_prefill(self):
        """Whether figures and pictures are of prefill: it alone is outside, or there is no decode."""
        if "D" not in self.measures or not self.measures["P"].stats:
            return False
        return not self.measures["D"].stats or (self.bad("P") and not self.bad("D"))

    def _limit(self):
        return "cannot be seen here: " + ", ".join(self.undetectable) if self.undetectable else None


def _words(fit):
    return "; ".join(each["message"] for each in fit.findings)


def _agreeing(shown, status):
    if status == "INCONCLUSIVE":
        return "Too little to tell."
    if shown is None or shown.ratio is None:
        return "No choice is further from the reference's than rounding explains."
    return f"R is {shown.ratio:.2f}: errors are as large as those of rounding."
