"""`python -m qwenref.compare.selftest`: engines with known faults, what a comparison says of them, and clean ones.

Every row of `planted.ROWS` is planted into the reference, which also rounds elsewhere, as an engine does; random models
of given seeds are the checkpoints.  Three things are counted: right verdicts, wrong names where the true fault is not
in the library, and alarms at clean engines.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import NamedTuple

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_VARIANTS = 6  # that all have to come to the id a text ends at, so that an engine does


class Job(NamedTuple):
    """One comparison: a row by its number in `planted.ROWS`, or None for a clean engine.

    without   leave the true faults out of the library
    jitter    seed of the engine's rounding
    """

    folder: str
    seed: int
    row: int | None
    tier: str
    jitter: int
    without: bool = False


class Result(NamedTuple):
    """What came of a Job: what it was, whether the verdict is right, and the verdict."""

    id: str
    seed: int
    tier: str
    without: bool
    right: bool
    status: str
    cause: str
    names: list
    alarms: list  # ids of stages that are amber or red
    wrong: str  # what is not as it should be
    seconds: float


# ---- models --------------------------------------------------------------------------------------------------------


def folder(seed, root):
    """The folder of a random model of this seed, with the embedded model's tokenizer; seed 0 is the embedded model."""
    import qwenref

    tiny = resources.files("qwenref").joinpath("tiny")
    if seed == 0:
        return str(tiny)
    made = Path(root) / f"seed-{seed}"
    config = json.loads(tiny.joinpath("config.json").read_text(encoding="utf-8"))["text_config"]
    rope = {**config["rope_parameters"], "rope_theta": 1e7}
    config |= {"rope_parameters": rope, "tie_word_embeddings": seed % 2 == 0}
    qwenref.from_config(config, seed=seed).save_pretrained(made)
    for name in _FILES:
        made.joinpath(name).write_bytes(tiny.joinpath(name).read_bytes())
    _give_an_end(made)
    return str(made)


def _give_an_end(made):
    """Have the checkpoint end a text at an id that it comes to: what random weights write ends by no other."""
    from qwenref.compare.faulty import FaultyReference
    from qwenref.compare.suites import suite

    model = _model(str(made))
    engines = [FaultyReference(model, jitter=seed) for seed in range(_VARIANTS)]
    answers = [
        [engine.generate(list(item.ids), item.new, 1).output_ids for engine in engines]
        for item in suite("quick", model).prompts
    ]
    at = made / "generation_config.json"
    said = json.loads(at.read_text(encoding="utf-8"))
    said["eos_token_id"][0] = _common(answers)
    at.write_text(json.dumps(said), encoding="utf-8")
    del _OPEN[str(made)]


def _common(answers):
    """The id that variants come to latest in one of the answers [[variants'] of prompts], and in no other answer."""
    found = []
    for variants in answers:
        others = {id for other in answers if other is not variants for answer in other for id in answer}
        shared = set.intersection(*map(set, variants)) - others
        at = {id: [answer.index(id) for answer in variants] for id in shared}
        found += [(min(places), id) for id, places in at.items() if max(places) < min(map(len, variants)) - 1]
    return max(found)[1]


# ---- one comparison ------------------------------------------------------------------------------------------------


def perform(job):
    """The Result of a Job."""
    from qwenref.compare.faulty import FaultyReference
    from qwenref.compare.planted import ROWS
    from qwenref.compare.running import compare

    model, begun = _model(job.folder), time.perf_counter()
    if job.row is None:
        report = compare(
            model, FaultyReference(model, jitter=job.jitter), _suite("quick", job.folder), precision="bf16"
        )
        return _result(job, "clean", report, report.status == "AGREE_WITHIN_NOISE", "", begun)
    row = ROWS[job.row].through(job.tier)
    sound, engine = row.sides(model, job.jitter)
    names = [fault.name for fault in row.resolved(sound)] if job.without else []
    options = {"mode": row.mode, "precision": "bf16", "without": (*names, *map(_base, names))}
    if row.weights:
        sound, options["engine_weights"] = model, sound
    report = compare(sound, engine, _suite(row.suite, job.folder), **options)
    wrong = _named_wrongly(row, report) if job.without else _wrong(row, report, sound)
    return _result(job, row.id, report, not wrong, wrong, begun)


def _result(job, id, report, right, wrong, begun):
    alarms = [stage["id"] for stage in report.stages if stage["verdict"] in ("amber", "red")]
    said = (report.status, report.cause, _names(report), alarms)
    return Result(id, job.seed, job.tier, job.without, right, *said, wrong, time.perf_counter() - begun)


def _names(report):
    return [row["id"] for row in report.hypotheses if row["accepted"]]


def _wrong(row, report, model):
    """What of a report is not what the row asks for; "" where all is."""
    if report.status not in row.status:
        return f"{report.status} in place of {row.status[0]}"
    if report.cause not in row.causes:
        return f"cause {report.cause} in place of {', '.join(row.causes)}"
    if row.named and report.confidence != "proved":
        there = {_base(name) for name in _names(report)}
        missing = [f.name for f in row.resolved(model) if f.hypothesis and not _kin(f.name, there)]
        if missing:
            return f"{', '.join(missing)} is not named"
    return ""


def _named_wrongly(row, report):
    """A name that was given although the true one was not to be had; its kin is no wrong name."""
    from qwenref.compare.faults import find

    families = {find(name).family for name in row.faults} - {None}
    kinds = {find(name).kind for name in row.faults}
    for each in report.hypotheses:
        if not each["accepted"]:
            continue
        name, kind = each["id"], each["class"]
        fitted = kind in ("prompt", "sampling")  # values come from the engine, not from the library
        if (kind in kinds) if fitted else (find(name).family in families or _kin(name, row.faults)):
            continue
        return f"named {name}"
    return ""


def _base(name):
    """A fault's name without its layers and its path."""
    from qwenref.compare.faults import unconfined

    return unconfined(name).partition("@")[0]


def _kin(name, others):
    return _base(name) in {_base(other) for other in others}


_OPEN = {}


def _model(path):
    import qwenref

    if path not in _OPEN:
        _OPEN[path] = qwenref.from_pretrained(path)
    return _OPEN[path]


def _suite(name, path):
    from qwenref.compare.suites import suite

    if (name, path) not in _OPEN:
        _OPEN[name, path] = suite(name, _model(path))
    return _OPEN[name, path]


# ---- all of them ---------------------------------------------------------------------------------------------------


def jobs(folders, tiers, clean, without, only=None, deep=False):
    """The Jobs of {seed: folder}: rows through tiers, rows without the true fault, clean engines."""
    from qwenref.compare.planted import ROWS

    found = []
    for seed, path in folders.items():
        model = _model(path)
        for number, row in enumerate(ROWS):
            if (only and only not in row.id) or (row.suite == "deep" and not deep) or not row.fits(model):
                continue
            here = [tier for tier in (tiers if row.tier == "A" else (row.tier,)) if row.through(tier) is not None]
            found += [Job(path, seed, number, tier, 1000 * seed + number) for tier in here]
            if without and row.named and row.tier == "A":
                found.append(Job(path, seed, number, "A", 1000 * seed + number, True))
    seeds = list(folders)
    found += [Job(folders[seeds[n % len(seeds)]], seeds[n % len(seeds)], None, "A", 50_000 + n) for n in range(clean)]
    return found


def run(found, workers, tell):
    """[Result] of Jobs, in their order."""
    if workers == 1:
        return [tell(perform(job)) for job in found]
    spawn = multiprocessing.get_context("spawn")
    with _one_thread(), concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        return [tell(result) for result in pool.map(perform, found)]


@contextlib.contextmanager
def _one_thread():
    """Processes that are started have a thread each."""
    before = os.environ.get("QWENREF_NUM_THREADS")
    os.environ["QWENREF_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["QWENREF_NUM_THREADS"]
        if before is not None:
            os.environ["QWENREF_NUM_THREADS"] = before


def summary(results):
    """Counts: {"planted": {...}, "without": {...}, "clean": {...}}."""
    planted = [each for each in results if each.id != "clean" and not each.without]
    without = [each for each in results if each.without]
    clean = [each for each in results if each.id == "clean"]
    return {
        "planted": {"rows": len(planted), "right": sum(each.right for each in planted)},
        "without": {"rows": len(without), "wrong_names": sum(not each.right for each in without)},
        "clean": {
            "engines": len(clean),
            "red": sum(each.status not in ("AGREE", "AGREE_WITHIN_NOISE") for each in clean),
            "amber": sum(bool(each.alarms) for each in clean),
        },
    }


def table(results):
    """Rows by seeds as text: how often right, and what was said instead."""
    groups = {}
    for each in results:
        groups.setdefault((each.id, each.tier, each.without), []).append(each)
    lines = []
    for (id, tier, without), group in groups.items():
        right = sum(each.right for each in group)
        said = sorted({f"seed {each.seed}: {each.wrong or each.status}" for each in group if not each.right})
        where = "without" if without else f"tier {tier}"
        lines.append(f"{id:44} {where:8} {right:3} of {len(group):3}  {'; '.join(said)}")
    return "\n".join(lines)


def main(words=None):
    options = _options(words)
    with tempfile.TemporaryDirectory() as root:
        folders = {seed: folder(seed, root) for seed in options.seeds}
        found = jobs(folders, options.tiers, options.clean, options.without, options.only, options.deep)
        begun, done = time.perf_counter(), []

        def tell(result):
            done.append(result)
            left = (time.perf_counter() - begun) / len(done) * (len(found) - len(done))
            mark = "" if result.right else f"  {result.wrong or result.status} {result.names}"
            print(f"{len(done)}/{len(found)} {left:.0f} s left  {result.id} tier {result.tier}{mark}", file=sys.stderr)
            return result

        results = run(found, options.workers, tell)
    counted = summary(results)
    print(table(results))
    print(json.dumps(counted))
    if options.json:
        Path(options.json).write_text(
            json.dumps({"summary": counted, "results": [each._asdict() for each in results]}, indent=1) + "\n",
            encoding="utf-8",
        )
    return int(any(not each.right for each in results))


def _options(words):
    asked = argparse.ArgumentParser(prog="python -m qwenref.compare.selftest", description=__doc__.partition("\n\n")[0])
    asked.add_argument("--seeds", type=_numbers, default="1,2,3,4,5", help="models; 0 is the embedded one")
    asked.add_argument("--tiers", type=lambda text: text.split(","), default="A,C")
    asked.add_argument("--clean", type=int, default=100, metavar="N", help="clean engines, in all")
    without = "rows whose true fault is not in the library"
    asked.add_argument("--without", action=argparse.BooleanOptionalAction, default=True, help=without)
    asked.add_argument("--only", metavar="TEXT", help="rows with this in their names, and no others")
    asked.add_argument("--deep", action="store_true", help="rows of the suite deep, too: hours")
    asked.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes")
    asked.add_argument("--json", metavar="FILE", help="every result")
    return asked.parse_args(words)


def _numbers(text):
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
