"""Step 10 of a comparison: which known fault, planted in the reference, explains the numbers that are outside."""

import numpy as np

from qwenref.compare import explaining
from qwenref.compare.causes import Reason, kind_of
from qwenref.compare.faults import find, unconfined
from qwenref.compare.faults_weights import GGUF
from qwenref.compare.numbers import Numbers
from qwenref.compare.readback import quantised
from qwenref.compare.replay import points_there
from qwenref.compare.sampling import as_reported
from qwenref.compare.stages import AMBER, RED
from qwenref.compare.statistics import measure

PATHS = {"P": "prefill", "D": "decode"}


class Naming:
    """Tries known faults on the paths of a Judge, and leaves there what explains them."""

    def __init__(self, judge):
        self._judge = judge

    def named(self):
        if self._judge.options.explain != "never":
            for name, confined in self._questions():
                if self._replayed(name, confined):
                    break
            else:
                self._behind_sampling()
        if not any(reason.numeric for reason in self._judge.reasons) and (self._judge.bad("P") or self._judge.bad("D")):
            self._unnamed()

    def _behind_sampling(self):
        """Two faults: of the kernels, and behind them settings that alone were not believed."""
        judge, found = self._judge, self._judge.aside
        if found is None:
            return
        kept = judge.tables["D"]
        judge.tables["D"] = judge.without(found)
        named = self._replayed("D", None)
        judge.tables["D"] = kept
        if named:
            judge.believe(found)

    def _questions(self):
        """(path, what faults are confined to) to be replayed, the next only where one explained nothing."""
        prefill, decode = self._judge.tables["P"].positions, self._judge.tables["D"].positions
        if prefill:
            if not (self._judge.bad("D") and not self._judge.bad("P")):
                yield "P", "prefill" if self._judge.bad("P") and decode and not self._judge.bad("D") else None
            if np.isfinite(self._judge.tables["D"].engine).any():
                yield "D", "decode"
        elif np.isfinite(self._judge.tables["D"].engine).any():
            yield "D", None
            yield "D", "decode"

    def _replayed(self, name, confined):
        """Whether known faults explain the errors of a path: on a few prompts, then on all of them."""
        path, table = PATHS[name], self._judge.tables[name]
        few = table.select(np.isin(table.way, explaining.first_ways(self._judge.numbers, table)))
        few = few.select(explaining.few_rows(few, path))
        names = explaining.candidates(self._judge.model, path, confined, self._judge.options.without)
        found = explaining.replay(self._judge.numbers, few, path, names)
        whole = few.positions == table.positions
        if not whole and not found.accepted and (self._judge.options.explain == "always" or self._off(name)):
            found, whole = explaining.replay(self._judge.numbers, table, path, names), True
        elif not whole and found.accepted:
            again = explaining.replay(self._judge.numbers, table, path, self._short_list(found))
            kept = {row["id"]: row for row in again.rows}
            found = again._replace(
                rows=sorted((kept.get(row["id"], {**row, "accepted": False}) for row in found.rows),
                            key=lambda row: not row["accepted"]),
                undetectable=found.undetectable,
            )  # fmt: skip
        self._told(found)
        if not found.accepted:
            return False
        self._accepted(name, found, confined)
        return True

    def _off(self, name):
        return bool(self._judge.measures[name].gates(RED) or self._judge.measures[name].gates(AMBER))

    @staticmethod
    def _short_list(found):
        """Names that may explain all prompts: those that explain a few, and the next best."""
        others = [row["id"] for row in found.rows if row["id"] not in found.accepted]
        return [*found.accepted, *others[:3]]

    def _told(self, found):
        known = {row["id"]: row for row in self._judge.hypotheses}
        for row in found.rows:
            if row["id"] not in known or row["accepted"]:
                known[row["id"]] = row
        self._judge.hypotheses = sorted(known.values(), key=lambda row: not row["accepted"])
        self._judge.runner_up, self._judge.undetectable = found.runner_up, found.undetectable

    def _accepted(self, name, found, confined):
        first = find(found.accepted[0])
        share = next(row["r2"] for row in found.rows if row["id"] == first.name)
        if found.how == "together":
            words = "faults together explain the error: " + ", ".join(find(each).what for each in found.accepted)
        else:
            words = f"explains {share:.0%} of the error of {PATHS[name]}: {first.what}"
            words += f" (or {', '.join(found.accepted[1:])})" if found.how == "alike" else ""
        self._judge.path.append(f"step 10: {words}")
        if first.kind == "semantics":
            self._judge.seen.find("semantics", "info", f"the engine {words}", {"id": first.name})
            return
        names = found.accepted
        if confined is not None and self._everywhere(first, confined):
            names, confined = tuple(unconfined(each) for each in names), None
            self._judge.path.append("step 10: in the other path as well, where rounding hides it from the gates")
            first = find(names[0])
            self._judge.hypotheses = [{**row, "id": unconfined(row["id"])} if row["accepted"] else row
                                      for row in self._judge.hypotheses]  # fmt: skip
        cause = kind_of(first, confined)
        if cause == "quantization" and self._judge.own_weights:
            cause = "kernels" if isinstance(first.mechanism, GGUF) else "weights"
            words += "; the weights of the reference are already said to be the engine's own"
        self._judge.reasons.append(Reason(cause, "named", names, words, True))
        if cause == "state_or_cache":
            self._cache()

    def _everywhere(self, fault, confined):
        """Whether a fault confined to a path is as likely in the other, which is inside: seen there, or too small."""
        name, whole = "D" if confined == "prefill" else "P", unconfined(fault.name)
        table = self._judge.tables[name]
        if whole == fault.name or self._judge.bad(name) or not np.isfinite(table.engine).any():
            return False
        (row,) = explaining.replay(self._judge.numbers, table, PATHS[name], [whole]).rows
        return not row["detectable"] or points_there(row)

    def _unnamed(self):
        prefill, decode = self._judge.bad("P"), self._judge.bad("D")
        has_prefill = bool(self._judge.tables["P"].positions)
        period = any(row["id"] == "P period" and row["verdict"] == AMBER for row in self._judge.stages)
        quant = quantised(self._judge)
        if quant and (prefill or not has_prefill):
            cause, words = "quantization", f"the engine's weights are said to be {quant}"
            words += ": consistent with quantization"
        elif has_prefill and decode and (not prefill or self._judge.apart()):
            cause, words = "state_or_cache", "decode is outside and prefill is not"
            if prefill:
                words = "both paths are outside, and differ"
        elif prefill and (not decode or period) and self._judge.tables["D"].positions:
            cause, words = "prefill_kernel", "prefill is outside" + (", by blocks of 64 or 128" if period else "")
        elif not any(np.isfinite(table.engine).any() for table in self._judge.tables.values()):
            cause = "kernels"
            words = "tokens are outside; text alone does not tell state, weights, config and kernels apart"
        else:
            tried = self._judge.options.explain != "never"
            known = "and no known fault explains them" if tried else "and known faults were not tried"
            cause, words = "kernels", f"the numbers are outside, {known}"
        self._judge.reasons.append(Reason(cause, "statistical", (), words, True))
        near = self._nearest()
        self._judge.path.append(f"step 10: {words}" + (f"; {near}" if near else ""))
        if near:
            self._judge.seen.find("nearest-shape", "info", near)
        if cause == "state_or_cache":
            self._cache()

    def _nearest(self):
        """What the best known fault leaves of an error that none explains."""
        if self._judge.runner_up is None:
            return None
        row = next((row for row in self._judge.hypotheses if row["id"] == self._judge.runner_up), None)
        if row is None or row.get("rho") is None:
            return None
        return f"nearest shape: {row['id']}, residual {row['rho']:.3g}"

    def _cache(self):
        """Whether what is off in decode is a cache of prompts: asked again without one."""
        ways = None if self._judge.retry is None else self._judge.retry()
        if not ways:
            return
        first = self._judge.numbers
        again = Numbers(self._judge.model, ways, first.variants, first.truth, first.run)
        if measure(as_reported(again.table("decode")), self._judge.seen.spread).gates(RED):
            self._judge.seen.find("cache-not-the-cause", "info", "decode is outside without a cache of prompts, too")
        else:
            self._judge.seen.find("prefix-cache", "error", "decode is inside when no cache of prompts is used")
            self._judge.path.append("step 8: repaired with the cache of prompts off")
