"""The verbs around engines: what they print, write and refuse, with their exit codes; nothing is computed in vain."""

import json

import pytest

import qwenref
from qwenref import cli, doctor
from qwenref.cli_base import BAD_INPUT, FINDING, FINE, UNREACHABLE
from qwenref.compare.suites import Suite, suite
from qwenref.engines import run_file

REFERENCE = "reference:tiny?numerics=hf"
NOBODY = "vllm+http://127.0.0.1:9?model=x"  # the port of the discard service: nobody answers


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file with a small suite: one prompt, a few new tokens."""
    whole = suite("quick", qwenref.from_pretrained("tiny"))
    item = next(item for item in whole.prompts if item.kind == "cjk")
    path = tmp_path_factory.mktemp("suite") / "one.jsonl"
    Suite("one", (item._replace(new=8),), (), ()).save(path)
    return str(path)


def run(capsys, *words):
    code = cli.main(list(map(str, words)))
    said = capsys.readouterr()
    return code, said.out, said.err


# ---- record --------------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_and_can_be_gone_on_with(capsys, asked, tmp_path):
    path = tmp_path / "run.jsonl"
    words = ("record", "tiny", "--engine", REFERENCE, "--suite", asked, "-o", path)
    code, out, err = run(capsys, *words)
    assert (code, err) == (FINE, "") and out.startswith(f"{path}: ")
    assert f"next: qwenref compare tiny --engine {path} --suite {asked}" in out
    whole = run_file.read(path)
    assert {record.path for record in whole.records} == {"prefill", "decode"}
    assert {len(row.ids) for record in whole.records for row in record.rows} == {20}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    code, out, err = run(capsys, *words, "--resume", "--json")
    assert code == FINE and json.loads(out)["schema"] == "qwenref.record/1"
    assert json.loads(out)["records"] == len(whole.records) == len(run_file.read(path).records)
    assert run(capsys, *words, "--force", "--k", 3)[0] == FINE
    assert {len(row.ids) for record in run_file.read(path).records for row in record.rows} == {3}


def test_a_suite_of_ids_needs_no_model(capsys, asked, tmp_path):
    path = tmp_path / "run.jsonl"
    code, out, _ = run(capsys, "record", "--engine", REFERENCE, "--suite", asked, "-o", path)
    assert code == FINE and path.exists()


REFUSED = [
    (("--engine", REFERENCE), "the following arguments are required: -o/--output", BAD_INPUT),
    (("-o", "r.jsonl"), "the following arguments are required: --engine", BAD_INPUT),
    (("--engine", "vlm:x", "-o", "r.jsonl"), "UnknownName: engine: no kind vlm", BAD_INPUT),
    (("--engine", "tiny", "-o", "r.jsonl"), "InputError: engine: tiny", BAD_INPUT),
    (("--engine", REFERENCE, "-o", "no/r.jsonl"), "no/r.jsonl: cannot be written", BAD_INPUT),
    (("--engine", REFERENCE, "-o", "taken.jsonl"), "OutputExists: taken.jsonl: there is a file already", BAD_INPUT),
    (("--engine", NOBODY, "-o", "taken.jsonl"), "OutputExists", BAD_INPUT),  # before the engine is looked for
    (("--engine", REFERENCE, "-o", "r.jsonl", "--suite", "quik"), "quik", BAD_INPUT),
    (("--engine", REFERENCE, "-o", "r.jsonl", "--suite", "no.jsonl"), "no.jsonl", BAD_INPUT),
    (("--engine", REFERENCE, "-o", "r.jsonl", "--k", "0"), "'0' is not a number of at least 1", BAD_INPUT),
    (("--engine", REFERENCE, "-o", "r.jsonl", "--force", "--resume"), "not allowed with argument", BAD_INPUT),
    (("--engine", NOBODY, "-o", "r.jsonl"), "EngineUnreachable: ", UNREACHABLE),
]


@pytest.mark.parametrize("words,message,code", REFUSED, ids=[" ".join(words) for words, _, _ in REFUSED])
def test_what_cannot_be_recorded_is_refused_and_no_file_is_made(capsys, tmp_path, monkeypatch, words, message, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").write_text("mine")
    found, out, err = run(capsys, "record", "tiny", *words)
    assert (found, out) == (code, "") and message in err and "internal error" not in err
    assert (tmp_path / "taken.jsonl").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_suite_by_name_needs_a_model(capsys, tmp_path):
    code, _, err = run(capsys, "record", "--engine", REFERENCE, "-o", tmp_path / "r.jsonl")
    assert code == BAD_INPUT and "suite 'quick' without a model" in err


# ---- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_there(capsys):
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (FINE, "") and out.endswith("no faults\n")
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("versions", "packages", "arithmetic", "threads", "BLAS of NumPy", "engines in process"):
        assert " ok " in lines[name] or " warning " in lines[name]
    assert f"qwenref {qwenref.__version__} · Python 3." in lines["versions"]
    assert "8 tokens, finite, the same bits on 1 and" in lines["embedded model"]
    assert max(map(len, out.splitlines())) <= 100


def test_doctor_looks_at_a_checkpoint(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "tiny", "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == FINE and json.loads(out)["schema"] == "qwenref.doctor/1"
    assert found["model"]["status"] == found["tokenizer"]["status"] == found["runs"]["status"] == "ok"
    assert found["stop ids"]["status"] == "warning" and "different ids" in found["stop ids"]["means"]
    code, out, _ = run(capsys, "doctor", tmp_path)
    assert code == FINDING and "faults: model" in out and "<error: " in out


def test_a_missing_package_is_a_fault_and_a_missing_extra_is_not(monkeypatch):
    there = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name in ("jinja2", "av") else there(name))
    found = {check.name: check for check in doctor.doctor()}
    assert found["packages"].status == "fault" and found["packages"].do == "pip install jinja2"
    assert found["extra vision"].status == "ok" and found["extra vision"].do == "pip install 'qwenref[vision]'"
    assert doctor.text(list(found.values())).endswith("faults: packages")


def test_what_cannot_be_looked_at_is_a_fault_and_ends_nothing(monkeypatch):
    def broken():
        raise RuntimeError("no such register")

    monkeypatch.setattr(doctor._C, "cpu_level", broken)
    found = {check.name: check for check in doctor.doctor()}
    assert found["arithmetic"].found == "<error: RuntimeError: no such register>" and len(found) == 12
