"""The verb compare from its words to its exit code: real engines, recorded runs, servers, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from standins.engine import Probabilities
from standins.opening import standing

import qwenref
from qwenref import cli
from qwenref.compare import FaultyReference, Suite, suite
from qwenref.compare.document import schema
from qwenref.compare.localise import ASKED
from qwenref.compare.report import Report
from qwenref.engines.record import record

REFERENCE = "reference:tiny?numerics=hf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    """A folder with a suite of one prompt, a shorter one, and runs of engines that were asked it."""
    folder = tmp_path_factory.mktemp("files")
    item = next(item for item in suite("quick", tiny).prompts if item.kind == "cjk")
    one = Suite("one", (item._replace(new=40),))
    one.save(folder / "one.jsonl")
    Suite("few", (item._replace(ids=item.ids[:4], new=4),)).save(folder / "few.jsonl")
    record(FaultyReference(tiny, "gate-silu", jitter=1), one, folder / "faulty.jsonl", k="all")
    record(FaultyReference(tiny, jitter=1), one, folder / "clean.jsonl", k="all")
    head, *lines = (folder / "clean.jsonl").read_text().splitlines()
    spoilt = json.loads(lines[0])
    spoilt["top"][0]["logprobs"] = np.exp(spoilt["top"][0]["logprobs"]).tolist()
    write(folder / "probabilities.jsonl", head, json.dumps(spoilt), *lines[1:])
    write(folder / "cut.jsonl", head, *lines[:-1], lines[-1][:40], lines[-1])
    return folder


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def here(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QWENREF_CACHE", str(tmp_path_factory.getbasetemp() / "scores"))  # what is scored once is kept


def run(capsys, *words):
    code = cli.main(["compare", "tiny", "--suite", "one.jsonl", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


ENDS = [
    (0, "AGREE", ("--engine", "reference:tiny", "--explain", "never")),
    (0, "AGREE_WITHIN_NOISE", ("--engine", REFERENCE, "--explain", "never")),
    (0, "AGREE_WITHIN_NOISE", ("--engine", "clean.jsonl", "--explain", "never")),
    (1, "DIVERGED", ("--engine", "faulty.jsonl", "--explain", "never")),
    (1, "DIVERGED", ("--engine", "clean.jsonl", "--engine", "faulty.jsonl", "--explain", "never")),
    (2, "INCONCLUSIVE", ("--engine", REFERENCE, "--suite", "few.jsonl", "--explain", "never")),
]


@pytest.mark.parametrize("code,status,words", ENDS, ids=[" ".join(words) for _, _, words in ENDS])
def test_a_report_has_its_status_and_the_command_its_exit_code(capsys, code, status, words):
    found, out, err = run(capsys, *words, "--json", "--force")
    document = json.loads(out)
    assert (found, err) == (code, "") and (document["status"], document["exit_code"]) == (status, code)


def test_a_server_that_answers_nonsense_is_an_invalid_input(capsys, tiny):
    with standing("llama+http", Probabilities(FaultyReference(tiny)), tiny.tokenizer) as (url, _):
        code, out, err = run(capsys, "--engine", f"llama+{url}", "--explain", "never", "--json")
    assert (code, err) == (3, "")
    document = json.loads(out)
    assert (document["status"], document["exit_code"]) == ("INVALID", 3)
    assert "probabilities in place of log-probabilities" in document["summary"]


def test_a_recorded_fault_is_named_in_the_terminal(capsys):
    code, out, _ = run(capsys, "--engine", "faulty.jsonl", "--html", "faulty.html", "--force")
    assert code == 1 and out.startswith("engine ") and " is outside the reference's envelope" in out.splitlines()[0]
    assert "gate-silu" in out and out.endswith("written: faulty.html\n")


def test_activations_say_where_a_fault_without_a_name_is(capsys, tiny):
    ids = suite("quick", tiny).prompts[0].ids
    seen = FaultyReference(tiny, "gate-silu", jitter=1).activations(ids, ASKED)
    np.savez("faulty.npz", input_ids=ids, **seen)
    words = ("--explain", "never", "--activations", "faulty.npz", "--force")
    code, out, err = run(capsys, "--engine", "faulty.jsonl", *words, "--json", "faulty.json")
    report = Report.load("faulty.json")
    assert (code, err, report.status, report.cause) == (1, "", "DIVERGED", "kernels")
    assert report.confidence == "localised" and "localised" in out
    first = report.localisation["first_bad"]
    assert first["site"] == "layers.3.self_attn.gated" and f"First outside: {first['site']}" in report.summary
    assert report.arrays["layer_error"].shape == (len(report.localisation["sites"]), len(ids))
    inside = run(capsys, "--engine", "clean.jsonl", *words, "--json")
    document = json.loads(inside[1])
    assert inside[0] == 0 and document["findings"][-1]["code"] == "activations-outside"


STOPS = [
    (2, "TooFewPositions: compare: 3 rounding variants", ("--engine", REFERENCE, "--jitter", "3")),
    (3, "BadLogprobs: ", ("--engine", "probabilities.jsonl")),
    (3, "RecordError: ", ("--engine", "cut.jsonl")),
    (3, "no/r.html: cannot be written", ("--engine", "clean.jsonl", "--html", "no/r.html")),
    (4, "EngineUnreachable: ", ("--engine", "vllm+http://127.0.0.1:9?model=x")),
    (4, "ClusterUnreachable: ", ("--engine", REFERENCE, "--dask", "tcp://127.0.0.1:9")),
]


@pytest.mark.parametrize("code,message,words", STOPS, ids=[" ".join(words) for _, _, words in STOPS])
def test_what_cannot_be_compared_is_one_error_with_its_exit_code(capsys, monkeypatch, code, message, words):
    found, out, err = run(capsys, *words)
    assert (found, out) == (code, "") and message in err and "internal error" not in err


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def started(cache, *words):
    words = ("compare", "tiny", "--suite", "one.jsonl", *words)
    root = str(Path(qwenref.__file__).parent.parent)
    environment = {**os.environ, "QWENREF_CACHE": str(cache), "PYTHONPATH": root}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "qwenref", *words], env=environment, **streams)


def entries(cache):
    """{path: inode} of what a store holds."""
    return {path: path.stat().st_ino for path in cache.glob("scores/??/*") if not path.name.startswith(".")}


def test_an_interrupted_comparison_tells_what_it_has_and_goes_on_from_there(tmp_path):
    process = started(tmp_path, "--engine", "faulty.jsonl", "--json", tmp_path / "r.json")
    ends = time.monotonic() + 60
    while len(entries(tmp_path)) < 12 and time.monotonic() < ends:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    kept = entries(tmp_path)
    assert (process.returncode, err) == (130, "") and out.startswith("undecided: not enough to tell")
    report = Report.load(tmp_path / "r.json")
    assert report.status == "INCONCLUSIVE" and "interrupted" in {found["code"] for found in report.findings}
    assert report.exit_code == 2 and "the command ends with 130" in schema()["properties"]["exit_code"]["description"]
    process = started(tmp_path, "--engine", "faulty.jsonl", "--json")
    out, err = process.communicate(timeout=100)
    document, after = json.loads(out), entries(tmp_path)
    assert (process.returncode, err, document["status"]) == (1, "", "DIVERGED")
    assert len(after) > len(kept) >= 12 and kept.items() <= after.items()  # none of them was written again


def test_an_interruption_of_the_first_engine_is_one_of_the_command(capsys, monkeypatch):
    def interrupted(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwenref.engines.reference.Reference.generate", interrupted)
    code, out, _ = run(capsys, "--engine", REFERENCE, "--engine", "clean.jsonl", "--explain", "never")
    assert code == 130 and "undecided" in out


def test_an_interruption_while_activations_are_looked_at_keeps_the_report(capsys, tiny, monkeypatch):
    with qwenref.capture(tiny, "layers.*.resid_post") as seen:
        tiny([[1, 2, 3, 4]])
    np.savez("a.npz", input_ids=[1, 2, 3, 4], **{name: seen[name] for name in seen.names()})

    def interrupted(*asked, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwenref.compare.localise.localise", interrupted)
    words = ("--engine", "faulty.jsonl", "--explain", "never", "--activations", "a.npz", "--json")
    code, out, _ = run(capsys, *words)
    document = json.loads(out)
    assert code == 130 and document["status"] == "DIVERGED" and document["localisation"] is None
    assert document["findings"][-1]["message"] == "interrupted: activations were not looked at"


@pytest.mark.parametrize("engines", [["faulty.jsonl"], ["clean.jsonl", "faulty.jsonl"]])
def test_an_engine_that_cannot_be_closed_costs_no_report(capsys, monkeypatch, engines):
    def stuck(recorded):
        raise OSError("its memory is held\nby another")

    monkeypatch.setattr("qwenref.engines.recorded.Recorded.close", stuck)
    named = [word for engine in engines for word in ("--engine", engine)]
    code, out, err = run(capsys, *named, "--explain", "never", "--json")
    document = json.loads(out)
    assert (code, err, document["status"]) == (1, "", "DIVERGED")
    said = [found for found in document["findings"] if found["code"] == "engine-close"]
    assert len(said) == len(engines) and said[0]["severity"] == "warning"
    assert all(found["message"].endswith("could not be closed: its memory is held") for found in said)


def test_an_interruption_before_there_is_anything_is_silent(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwenref.compare.opening.reference", interrupted)
    assert run(capsys, "--engine", REFERENCE) == (130, "", "\n")
