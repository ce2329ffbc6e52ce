"""A comparison from beginning to end: what is asked, scored, judged and told, also of one that was interrupted."""

import contextlib
import datetime
import os

import qwenref
from qwenref.compare.arbiter import between, distinct
from qwenref.compare.asking import Asked
from qwenref.compare.described import described
from qwenref.compare.errors import INVALID, UNDECIDED, CompareError, EngineRejected, EngineUnreachable
from qwenref.compare.evidence import Evidence
from qwenref.compare.gather import gather, stop_ids
from qwenref.compare.judge import Judge
from qwenref.compare.memory import check_memory
from qwenref.compare.numbers import Numbers
from qwenref.compare.options import options, refuse
from qwenref.compare.report import Report
from qwenref.compare.sampled import EProcess
from qwenref.compare.sampling import as_reported
from qwenref.compare.scoring import score
from qwenref.compare.statistics import CLASSES, measure
from qwenref.compare.store import open_store
from qwenref.compare.suites import Suite, suite
from qwenref.engines.model_files import model_facts
from qwenref.errors import InputError, compose
from qwenref.progress import Progress


class Comparison:
    """One engine against the reference.  `.report()` tells what there is, whatever came of `.run()`."""

    def __init__(self, model, engine, asked, wanted, weights=None, executor=None, progress=None):
        self.original, self.model, self.suite = model, weights or model, asked
        self.engine = engine = Asked(engine, model.config.text_config.vocab_size)
        self.seen = Evidence(engine.name, engine.capabilities())
        self.options = options(asked, engine.config() if self.seen.gives.config else {}, **wanted)
        self.has_weights, self._executor, self._progress = weights is not None, executor, progress
        self._store = open_store()
        self.numbers = self.judge = None
        self.ended = (UNDECIDED, "the engine was not asked: the comparison was interrupted before")
        self.interrupted = False
        self.unanswered = None  # the error of an engine that could not be asked at all

    def run(self):
        """Ask, score, judge; an interruption or a bad answer ends it early and is a finding."""
        self.ended = None
        line = Progress(self._progress, unit="steps")
        self._tell = line.at
        try:
            self._asked_and_judged()
        except KeyboardInterrupt:
            self.interrupted = True
            self._end(UNDECIDED, "interrupted", "interrupted: what was there until then is told")
        except (EngineRejected, EngineUnreachable) as error:
            self.unanswered = error
            self._end(error.exit_code, error.code, str(error))
        except CompareError as error:
            if error.exit_code not in (INVALID, UNDECIDED):
                raise
            self._end(error.exit_code, error.code, str(error))
        finally:
            line.end()
        return self

    def _asked_and_judged(self):
        self._ask()
        failed = self.seen.failed
        if isinstance(failed, (EngineRejected, EngineUnreachable)) and not self.seen.heard:
            raise failed
        self.numbers = self.numbers_of(self.seen.trajectories)
        self.judge = Judge(self.model, self.suite, self.options, self.seen, self.numbers, stop_ids(self.model),
                           self.has_weights, self._without_cache)  # fmt: skip
        self.judge.judged()
        if self.has_weights:
            self._loss()
        if failed is not None and not self.judge.reasons:
            answered = len({way.prompt for way in self.numbers.ways})
            words = f"the engine failed, {answered} of {len(self.suite.prompts)} prompts have an answer: {failed}"
            self.ended = (failed.exit_code, words)

    def _ask(self):
        watch = _Odds(self) if self.options.until_decided else None
        enough = (lambda: False) if watch is None else watch.decided
        gather(self.model, self.engine, self.suite, self._tell, self.seen, self.options.draws, enough)
        if watch is not None:
            watch.tell()

    def numbers_of(self, ways):
        """Numbers of trajectories, by the truth and the variants that were asked for."""
        return Numbers(self.model, ways, self.options.variants, ("truth", self.options.truth), self._score)

    def _score(self, model, tasks):
        return score(model, tasks, self._executor, lambda done, total: self._tell(done, total, "scores"), self._store)

    def _without_cache(self):
        """Trajectories of the prompts asked again without a cache of prompts; None where that cannot be asked for."""
        if not getattr(self.engine, "prefix_cache", False):
            return None
        again = Evidence(self.engine.name, self.seen.gives)
        self.engine.prefix_cache = False
        try:
            prompts = Suite(self.suite.name, self.suite.prompts)
            gather(self.model, self.engine, prompts, self._tell, again, self.options.draws)
        except CompareError as error:
            words = f"asked again without a cache of prompts: {error}"
            self.seen.find(error.code, "warning", words.partition("\n")[0], {"said": words})
            return None
        finally:
            self.engine.prefix_cache = True
        return [way for way in again.trajectories if way.decode is not None]

    def _loss(self):
        """What the engine's own weights lose against the checkpoint's: column one to column two."""
        table = self.numbers.table("decode") if self.judge.tables["D"].positions else self.numbers.table("prefill")
        ways = {n: table.way == n for n in dict.fromkeys(table.way.tolist())}
        tasks = [
            self.numbers.at(n, self.numbers.truth, int(table.position[rows][0]), table.support[rows])
            for n, rows in ways.items()
        ]
        truths = self._score(self.original, tasks)
        moved = table.truth.copy()
        for rows, scored in zip(ways.values(), truths, strict=True):
            moved[rows] = scored.logprobs
        lost = measure(table.with_engine(moved)).stats
        figures = {"R": lost["R"]["value"], "kl": lost["kl"]["mean"]}
        words = f"the engine's own weights are R {figures['R']:.3g}, KL {figures['kl']:.3g} nats from the checkpoint's"
        self.seen.find("quantization_loss", "info", words, figures)

    def _end(self, code, name, words):
        self.ended = (code, words)
        self.seen.find(name, "error" if code == INVALID else "warning", words.partition("\n")[0], {"said": words})

    def report(self):
        """The Report of what there is."""
        fields, arrays = {"findings": self.seen.findings, "config_diff": self.seen.differing_config}, {}
        if self.judge is not None:
            verdict = self.judge.verdict()
            fields, arrays = verdict.fields, verdict.arrays
            fields = {**fields, **described(self.judge)}
        if self.ended is not None:
            code, words = self.ended
            status = "INVALID" if code == INVALID else "INCONCLUSIVE"
            fields |= {"status": status, "exit_code": code, "cause": "none", "confidence": None}
            fields["summary"] = words.partition("\n")[0]
        return Report({**self._identity(), **fields}, arrays)

    def _identity(self):
        text, said = self.original.config.text_config, self.seen.config
        facts = {} if self.original.path is None else model_facts(self.original.path)
        hashes = {key.removesuffix("_sha256"): value for key, value in facts.items() if key.endswith("_sha256")}
        name = "" if self.original.path is None else os.path.basename(os.path.abspath(self.original.path))
        return {
            "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tier": self.seen.gives.tier,
            "mode": self.options.mode,
            "reference": {"model": name, "dtype": text.get("dtype") or text.get("torch_dtype"), "hashes": hashes,
                          "semantics": "none: no rounding inside of DeltaNet"},
            "engine": {"name": self.seen.name, "precision": self.options.precision,
                       **{key: value for key, value in said.items() if key not in ("name", "model", "defaults")}},
            "suite": {"name": self.suite.name, "sha256": self.suite.sha256, "prompts": len(self.suite.prompts),
                      "positions": self.suite.positions},
            "envelope": self._envelope(),
        }  # fmt: skip

    def _envelope(self):
        found = {"J": len(self.options.variants), "axes": [self.options.family], "truth": self.options.truth}
        return found if self.judge is None else found | self.judge.envelope()


class _Odds:
    """Evidence, prompt by prompt, that choices which rounding does not explain are more than rare."""

    def __init__(self, comparison):
        self._comparison, self._looked, self._odds = comparison, 0, EProcess()

    def decided(self):
        comparison = self._comparison
        ways = [way for way in comparison.seen.trajectories[self._looked :] if way.origin == "engine"]
        self._looked = len(comparison.seen.trajectories)
        if ways:
            table = comparison.numbers_of(ways).table("decode")
            found = measure(as_reported(table), comparison.seen.spread)
            self._odds.add(found.arrays["flip"] == len(CLASSES) if "flip" in found.arrays else [])
        return self._odds.decided

    def tell(self):
        odds = self._odds
        if odds.decided:
            words = f"decided after {odds.n:,} tokens: more than {odds.good:g} of the choices are outside of rounding"
        else:
            words = (
                f"not decided after {odds.n:,} tokens: at most {odds.bound:.2g} of the choices are outside of rounding"
            )
        self._comparison.seen.find("until-decided", "info", words, {"tokens": odds.n, "events": odds.events})


def compare(ref, engine, suite="quick", *, mode="greedy", precision=None, jitter=None, explain="auto",
            engine_weights=None, draws=None, until_decided=False, seed=None, without=(), truth="fp64", executor=None,
            workers=None, dask=None, progress=None):  # fmt: skip
    """The `Report` of an engine held against the reference: whether rounding explains what differs, else what does.

    ref             a Model, a folder, "tiny" or a hub name
    engine          an engine (`qwenref.engines`), its spec, or two of either: the reference is the arbiter
    suite           "quick", "standard", "deep", a Suite or the path of one
    mode            "greedy"; "sample": tokens drawn at temperature 1; "rl": these, with importance weights
    precision       what the engine claims to compute in: "bf16", "fp16", "fp32", "fp8", "int8", "int4" or a GGUF type;
                    None: what it says itself
    jitter          rounding variants that noise is made of, 16, or 8 for "quick"
    explain         when known faults are tried: "auto" on two prompts, on all where something is off; "always"; "never"
    engine_weights  the engine's own weights, dequantised: a Model or a folder
    draws           tokens to be drawn, 4,096, in modes "sample" and "rl"
    until_decided   stop asking as soon as the odds decide, in mode "greedy"
    without         names of known faults that are not tried
    truth           "fp64", or "fp32", which needs about half the memory: what errors are counted from
    executor        what scores are computed on: a `concurrent.futures.Executor`; or workers, a number of processes; or
                    dask, the address of a cluster.  The bits are the same

    An interruption gives the report of what there is, and so does an engine that fails on the way: where nothing it
    answered before is outside, with status INCONCLUSIVE and exit code 4.  Raises what its arguments deserve, and
    EngineUnreachable or EngineRejected where no question was answered; what is wrong with an engine's answers is a
    report with status INVALID.
    """
    wanted = {"mode": mode, "precision": precision, "jitter": jitter, "explain": explain, "draws": draws,
              "until_decided": until_decided, "seed": seed, "without": without, "truth": truth}  # fmt: skip
    refuse(mode, precision, jitter, explain, draws, until_decided, seed, truth)
    several = list(engine) if isinstance(engine, (list, tuple)) else [engine]
    if len(several) not in (1, 2):
        raise InputError(compose("compare: engines", found=f"{len(several)}", expected="one or two"))
    model, weights = _model(ref), None if engine_weights is None else _model(engine_weights)
    asked = suite if isinstance(suite, Suite) else _suite(suite, model)
    check_memory(weights or model, asked, truth, workers)
    unclosed = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(_opened(each, unclosed)) for each in several]
        run_on = _executor(model, executor, workers, dask, stack)
        made = [Comparison(model, each, asked, wanted, weights, run_on, progress) for each in engines]
        report = run_all(made)
    for name, error in unclosed:
        said = str(error) or type(error).__name__
        words = f"{name} could not be closed: {said.partition(chr(10))[0]}"
        report = report.noted("engine-close", "warning", words, {"said": said})
    return report


def run_all(made):
    """The Report of one Comparison, or of two; an interruption of the first leaves the second unasked.

    Raises EngineUnreachable or EngineRejected where no engine could be asked at all.
    """
    for comparison, name in zip(made, distinct(made), strict=True):
        comparison.seen.name = name
    for comparison in made:
        if comparison.run().interrupted:
            break
    if all(comparison.unanswered is not None for comparison in made):
        raise made[0].unanswered
    return made[0].report() if len(made) == 1 else between(made)


def _model(ref):
    from qwenref.compare.opening import reference

    return reference(os.fspath(ref)) if isinstance(ref, (str, os.PathLike)) else ref


def _suite(name, model):
    return suite(name, model)


@contextlib.contextmanager
def _opened(engine, unclosed):
    """An engine, or what a spec names, closed behind the comparison: (name, error) of what cannot be is `unclosed`."""
    if not isinstance(engine, str):
        yield engine
        return
    opened = qwenref.engines.open(engine)
    try:
        yield opened
    finally:
        try:
            opened.close()
        except Exception as error:  # whatever it is, there is a report, or an error that says more
            unclosed.append((opened.name, error))


def _executor(model, executor, workers, dask, stack):
    if executor is None and workers is None and dask is None:
        return None
    from qwenref.compare.workers import open_executor

    return stack.enter_context(open_executor(model, workers, dask, executor))
