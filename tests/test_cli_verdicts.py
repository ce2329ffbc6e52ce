"""The verb compare: words in, a report in every form out, and one error for each bad input before any work."""

import json
import types
import xml.etree.ElementTree as xml

import compare_documents
import numpy as np
import pytest

import qwenref
import qwenref.compare
import qwenref.engines
from qwenref import cli, cli_compare
from qwenref.compare.errors import EngineUnreachable, TooFewPositions
from qwenref.compare.report import Report

ENGINE = "reference:tiny?numerics=hf"
ASKED = []  # what the comparison was asked for, call by call


@pytest.fixture(autouse=True)
def verb(monkeypatch, tmp_path):
    """The verb with a comparison that answers a known report, in an empty folder."""

    def answer(model, engines, suite, **given):
        for spec in engines:
            qwenref.engines.open(spec).close()
        ASKED.append((model, engines, suite, given))
        return compare_documents.report()

    def pasted(model, ids, a, b, **given):
        ASKED.append((model, ids, a, b, given))
        return Report(compare_documents.clean())

    ASKED.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_compare, "add", cli_compare._add_compare)
    monkeypatch.setattr(qwenref.compare, "compare", answer, raising=False)
    monkeypatch.setattr(qwenref.compare, "pasted", pasted, raising=False)
    for name in ("QWENREF_NUM_THREADS", "QWENREF_CPU"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *words):
    code = cli.main(["compare", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_report_is_printed_and_its_exit_code_is_that_of_the_command(capsys):
    code, out, err = run(capsys, "tiny", "--engine", ENGINE)
    assert (code, err) == (1, "") and out.startswith("engine vllm+http://host:8000 is outside the reference's envelope")
    assert out.splitlines()[-1] == f"again: qwenref compare tiny --engine '{ENGINE}'"
    model, engine, suite, given = ASKED[0]
    assert suite.name == "quick" and engine == [ENGINE] and given == {}


def test_options_reach_the_comparison(capsys, monkeypatch):
    monkeypatch.setenv("QWENREF_NUM_THREADS", "1")
    words = ("--jitter", 16, "--mode", "rl", "--precision", "bf16", "--explain", "never", "--workers", 2)
    _, out, _ = run(capsys, "tiny", "--engine", ENGINE, *words, "--engine-weights", "w", "--draws", "1,000")
    assert ASKED[0][3] == {
        "jitter": 16, "mode": "rl", "precision": "bf16", "explain": "never", "workers": 2, "engine_weights": "w",
        "draws": 1000,
    }  # fmt: skip
    assert "again: QWENREF_NUM_THREADS=1 qwenref compare" in out
    run(capsys, "tiny", "--engine", ENGINE, "--until-decided", "--precision", "Q4_K_M")
    assert ASKED[1][3] == {"until_decided": True, "precision": "Q4_K_M"}


def test_two_engines_are_given_together(capsys):
    run(capsys, "tiny", "--engine", ENGINE, "--engine", "reference:tiny")
    assert ASKED[0][1] == [ENGINE, "reference:tiny"]


def test_every_form_is_written_and_stdout_stays_clean(capsys, tmp_path):
    words = ("--html", "r.html", "--junit", "r.xml", "--json", "r.json")
    code, out, _ = run(capsys, "tiny", "--engine", ENGINE, *words)
    assert code == 1 and out.endswith("written: r.html, r.xml, r.json\n")
    report = Report.load("r.json")
    assert report.repro["argv"][:3] == ["qwenref", "compare", "tiny"] and set(report.arrays)
    assert xml.parse("r.xml").getroot().tag == "testsuites" and "<h1>" in (tmp_path / "r.html").read_text()
    assert run(capsys, "tiny", "--engine", ENGINE, *words)[0] == 3
    assert run(capsys, "tiny", "--engine", ENGINE, *words, "--force")[0] == 1
    code, out, _ = run(capsys, "tiny", "--engine", ENGINE, "--json")
    assert code == 1 and json.loads(out)["schema"] == "qwenref.compare/1"


def test_no_secret_of_the_command_line_is_told(capsys, monkeypatch):
    from qwenref import engines

    monkeypatch.setattr(engines, "open", lambda spec: types.SimpleNamespace(name="e", close=lambda: None))
    _, out, _ = run(capsys, "tiny", "--engine", "vllm+http://me:hunter2@127.0.0.1:9", "--json")
    assert "hunter2" not in out and "vllm+http://127.0.0.1:9" in out


def test_two_pasted_texts_are_compared_by_their_ids(capsys, tmp_path):
    for name, text in (("a.txt", "yes\r\n"), ("b.txt", "no"), ("ids.json", "[1, 2, 3]"), ("ids.txt", "1 2,\n3")):
        (tmp_path / name).write_bytes(text.encode())
    for ids in ("ids.json", "ids.txt"):
        for words, given in (((), {}), (("--jitter", 8, "--precision", "f32"), {"jitter": 8, "precision": "f32"})):
            code, out, err = run(capsys, "tiny", "--text", "a.txt", "b.txt", "--prompt-ids", ids, *words)
            assert (code, err) == (0, "") and "inside" in out
            assert ASKED.pop()[1:] == ([1, 2, 3], "yes\r\n", "no", given)


def test_activations_give_the_report_a_place(capsys, tmp_path):
    model = qwenref.from_pretrained("tiny")
    with qwenref.edit(model, {"layers.3.mlp": lambda x: -x}), qwenref.capture(model, "layers.*.resid_post") as c:
        model([[1, 2, 3, 4]])
    values = {name: c[name] for name in c.names()}
    np.savez("a.npz", input_ids=[1, 2, 3, 4], **values)
    code, out, _ = run(capsys, "tiny", "--engine", ENGINE, "--activations", "a.npz")
    assert code == 1 and "first outside at layers.3.resid_post, position 0" in out
    np.savez("b.npz", **values)
    assert "of which token ids?" in run(capsys, "tiny", "--engine", ENGINE, "--activations", "b.npz")[2]
    (tmp_path / "ids").write_text("1 2 3 4")
    assert run(capsys, "tiny", "--engine", ENGINE, "--activations", "b.npz", "--prompt-ids", "ids")[0] == 1
    (tmp_path / "ids").write_text("1 2 3")
    count = len(ASKED)
    code, _, err = run(capsys, "tiny", "--engine", ENGINE, "--activations", "b.npz", "--prompt-ids", "ids")
    assert code == 3 and err.startswith("ActivationShape") and len(ASKED) == count


PASTED = ("--text", "taken", "bytes", "--prompt-ids", "good")
REFUSED = [
    (("tiny",), "InputError: compare: nothing to compare with"),
    (("tiny", "--engine", ENGINE, "--engine", ENGINE, "--engine", ENGINE), "3 engines: at most two"),
    (("tiny", "--engine", ENGINE, "--text", "a", "b", "--prompt-ids", "i"), "--text is about two texts"),
    (("tiny", "--text", "a", "b"), "--text needs the ids both texts answer"),
    (("tiny", "--text", "a", "b", "--prompt-ids", "none"), "FileNotFoundError: "),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "taken"), "BadTokenIds: taken: token id 0\n"),
    (("tiny", "--text", "none", "taken", "--prompt-ids", "good"), "FileNotFoundError: "),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "empty"), "BadTokenIds: empty: no token ids"),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "halves"), "BadTokenIds: halves: token id 1\n"),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "truths"), "BadTokenIds: truths: token id 0\n"),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "large"), "expected whole numbers from 0 to 1,279"),
    (("tiny", "--text", "taken", "taken", "--prompt-ids", "long"), "BadTokenIds: long: "),
    (("tiny", "--text", "bytes", "taken", "--prompt-ids", "good"), "InputError: bytes: no text"),
    (("tiny", "--engine", ENGINE, "--prompt-ids", "good"), "--prompt-ids goes with --text or --activations"),
    (("tiny", "--engine", ENGINE, "--workers", "2", "--dask", "tcp://h:1"), "--workers or --dask"),
    (("tiny", "--engine", ENGINE, "--precision", "banana"), "InputError: compare: precision\n    found    'banana'"),
    (("tiny", "--engine", ENGINE, "--draws", "9"), "InputError: compare: draws in mode greedy"),
    (("tiny", "--engine", ENGINE, "--mode", "rl", "--draws", "0"), "--draws: '0' is not a number of at least 1"),
    (("tiny", "--engine", ENGINE, "--mode", "rl", "--until-decided"), "until-decided in mode rl: drawn tokens are no"),
    (("tiny", "--engine", ENGINE, "--engine", ENGINE, "--activations", "a.npz"), "are those of one engine: name it"),
    (("tiny", "--engine", ENGINE, "--activations-order", "hf"), "--activations-order goes with --activations"),
    (("tiny", *PASTED, "--suite", "deep", "--mode", "rl"), "--text takes no --suite, --mode, only --jitter and --prec"),
    (("tiny", *PASTED, "--activations", "a.npz"), "--text takes no --activations, only"),
    (("tiny", *PASTED, "--engine-weights", "w", "--until-decided"), "takes no --engine-weights, --until-decided, only"),
    (("tiny", *PASTED, "--workers", "2", "--explain", "always"), "--text takes no --explain, --workers, only"),
    (("tiny", *PASTED, "--precision", "banana"), "InputError: compare: precision"),
    (("tiny", "--engine", "what"), "InputError: engine: what"),
    (("tiny", "--engine", "vllmm:x"), "UnknownName: engine: no kind vllmm"),
    (("tiny", "--engine", "gone.jsonl"), "gone.jsonl"),
    (("tiny", "--engine", "vllm+http://h:1?key=hunter2"), "a key in its spec would be shown"),
    (("tiny", "--engine", ENGINE, "--html", "taken"), "OutputExists: taken"),
    (("tiny", "--engine", ENGINE, "--json", "taken"), "OutputExists: taken"),
    (("tiny", "--engine", ENGINE, "--junit", "taken"), "OutputExists: taken"),
    (("tiny", "--engine", ENGINE, "--json", "p.json"), "OutputExists: p.positions.npz"),
    (("tiny", "--engine", ENGINE, "--html", "no/r.html"), "FileNotFoundError: no/r.html: cannot be written"),
    (("tiny", "--engine", ENGINE, "--html", "r", "--junit", "./r"), "two results in one file"),
    (("tiny", "--engine", ENGINE, "--suite", "slow"), "slow"),
    (("tiny", "--engine", ENGINE, "--jitter", "none"), "--jitter: 'none' is not a number of at least 1"),
    (("tiny", "--engine", ENGINE, "--mode", "fast"), "invalid choice: 'fast'"),
    (("tiny", "--engine", ENGINE, "--activations", "a.txt"), "expected a .npz or .safetensors file"),
    (("tiny", "--engine", ENGINE, "--activations", "a.npz"), "FileNotFoundError: a.npz"),
    (("nowhere", "--engine", ENGINE), "ModelNotFound: "),
    (("folder", "--engine", ENGINE), "ModelFilesError: "),
    (("other", "--engine", ENGINE), "UnsupportedModel: "),
]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    contents = {
        "taken": "mine", "empty": "[]", "good": "[1]", "halves": "[1, 1.5]", "truths": "[true]", "large": "[0, 1280]",
        "long": str([1] * 300_000), "p.positions.npz": "",
    }  # fmt: skip
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, config in (("folder", None), ("other", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})):
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("words,message", REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_bad_input_is_one_clear_error_before_any_work(capsys, files, tmp_path, words, message):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    code, out, err = run(capsys, *words)
    assert (code, out) == (3, "") and message in err and "internal error" not in err and "hunter2" not in err
    assert not ASKED and {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_checkpoint_without_a_tokenizer_or_a_shard_is_told_by_name(capsys, tmp_path):
    import shutil
    from pathlib import Path

    for name in ("tokenizer.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        shutil.copytree(Path(qwenref.__file__).parent / "tiny", folder)
        for path in folder.glob(name.replace("model", "*")):
            path.unlink()
        code, _, err = run(capsys, folder, "--engine", ENGINE)
        assert code == 3 and err.startswith("ModelFilesError: ") and name.partition(".")[0] in err


@pytest.mark.parametrize("error,code", [(EngineUnreachable("gone"), 4), (TooFewPositions("31 positions"), 2)])
def test_errors_of_a_comparison_have_their_own_exit_codes(capsys, monkeypatch, error, code):
    def fail(*args, **given):
        raise error

    monkeypatch.setattr(qwenref.compare, "compare", fail)
    found, out, err = run(capsys, "tiny", "--engine", ENGINE, "--html", "r.html")
    assert (found, out) == (code, "") and str(error) in err
