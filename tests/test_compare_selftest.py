"""The self-test's command: rows and clean engines on the embedded model, and what it makes of their verdicts."""

import json

import pytest

from qwenref.compare import Suite, explaining, planted, selftest
from qwenref.compare.report import Report


def result(id="01 rope-q+1", right=True, **facts):
    facts = {"seed": 1, "tier": "A", "without": False, "status": "DIVERGED", "cause": "kernels", "names": [],
             "alarms": [], "wrong": "", "seconds": 1.0, **facts}  # fmt: skip
    return selftest.Result(id=id, right=right, **facts)


@pytest.mark.parametrize("tried", [("gate", "norm"), pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_row_its_fault_left_out_and_clean_engines_are_counted_and_written(tmp_path, monkeypatch, capsys, tried):
    if tried is not None:  # of a hundred known faults those whose names begin so
        every = explaining.candidates

        def some(*asked):
            return [name for name in every(*asked) if name.startswith(tried)]

        monkeypatch.setattr(explaining, "candidates", some)
    monkeypatch.setenv("QWENREF_CACHE", str(tmp_path / "scores"))
    whole = selftest._suite("quick", selftest.folder(0, None))
    few = Suite("quick", tuple(item._replace(new=40) for item in whole.prompts if item.kind == "cjk"))
    monkeypatch.setattr(selftest, "_suite", lambda name, path: few)
    file = tmp_path / "found.json"
    words = ["--seeds", "0", "--tiers", "A", "--clean", "2", "--only", "07 gate-off", "--workers", "1"]
    assert selftest.main([*words, "--json", str(file)]) == 0
    counted = {
        "planted": {"rows": 1, "right": 1}, "without": {"rows": 1, "wrong_names": 0},
        "clean": {"engines": 2, "red": 0, "amber": 0},
    }  # fmt: skip
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == counted and said.err.count("s left") == 4
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["summary"] == counted
    named, unnamed, *clean = document["results"]
    assert named["names"] == ["gate-off"] and named["cause"] == "kernels"
    assert unnamed["without"] and unnamed["names"] == [] and unnamed["status"] == "DIVERGED"
    assert {each["status"] for each in clean} == {"AGREE_WITHIN_NOISE"}


def report(status="DIVERGED", cause="kernels", names=(), confidence="named", kind="kernels"):
    hypotheses = [{"id": name, "class": kind, "accepted": True} for name in names]
    hypotheses.append({"id": "gate-off", "class": "kernels", "accepted": False})
    return Report({"status": status, "cause": cause, "confidence": confidence, "hypotheses": hypotheses}, {})


def row(number, fault):
    return next(each for each in planted.ROWS if each.number == number and fault in each.faults)


@pytest.fixture(scope="module")
def tiny():
    return selftest._model(selftest.folder(0, None))


def test_what_is_wrong_with_a_verdict_is_said(tiny):
    wanted = row(7, "gate-silu")
    assert selftest._wrong(wanted, report(names=["gate-silu"]), tiny) == ""
    assert selftest._wrong(wanted, report(names=["gate-silu/decode"]), tiny) == ""  # the fault, confined
    assert selftest._wrong(wanted, report(), tiny) == "gate-silu is not named"
    coarse = row(38, "gate-off")  # that log-probabilities are bf16 is no hypothesis
    assert selftest._wrong(coarse, report(names=["gate-off"]), tiny) == ""
    assert selftest._wrong(coarse, report(), tiny) == "gate-off is not named"
    assert selftest._wrong(wanted, report(cause="weights"), tiny) == "cause weights in place of kernels"
    assert selftest._wrong(wanted, report(status="AGREE"), tiny) == "AGREE in place of DIVERGED"
    assert selftest._wrong(row(14, "bos-added"), report(cause="tokenizer", confidence="proved"), tiny) == ""


def test_a_wrong_name_is_one_of_another_family():
    wanted = row(7, "gate-silu")
    assert selftest._named_wrongly(wanted, report(names=["norm-w"])) == "named norm-w"
    fitted = report(names=["top-p-0.973"], kind="sampling")  # a value that is no name of the library
    assert selftest._named_wrongly(wanted, fitted) == "named top-p-0.973"
    assert selftest._named_wrongly(row(13, "top-p-0.95"), fitted) == ""
    assert selftest._named_wrongly(row(1, "rope-q+1"), report(names=["rope-q+1/decode"])) == ""


def test_counts_and_table_tell_rows_from_clean_engines():
    found = [
        result(), result(right=False, seed=2, wrong="cause none in place of kernels"),
        result(without=True, right=False, wrong="named norm-w"),
        result("clean", False, status="DIVERGED", alarms=["R"]),
        result("clean", status="AGREE_WITHIN_NOISE", alarms=["P R"]),
        result("clean", status="AGREE"),
    ]  # fmt: skip
    assert selftest.summary(found) == {
        "planted": {"rows": 2, "right": 1},
        "without": {"rows": 1, "wrong_names": 1},
        "clean": {"engines": 3, "red": 1, "amber": 2},
    }
    first = selftest.table(found).splitlines()[0].split()
    assert first[:2] == ["01", "rope-q+1"] and " ".join(first[2:]) == (
        "tier A 1 of 2 seed 2: cause none in place of kernels"
    )


def test_jobs_are_every_row_that_fits_by_seed_and_tier():
    folders = {0: selftest.folder(0, None)}
    found = selftest.jobs(folders, ["A", "C"], 3, True)
    assert len(set(found)) == len(found) and sum(job.row is None for job in found) == 3
    tiers = {(planted.ROWS[job.row].id, job.tier) for job in found if job.row is not None and not job.without}
    assert ("17 regex-gpt2", "A") in tiers and ("17 regex-gpt2", "C") not in tiers  # nothing of it reaches texts
    assert ("14 bos-added tier D", "D") in tiers and ("07 gate-off", "C") in tiers
    assert not any(planted.ROWS[job.row].suite == "deep" for job in found if job.row is not None)


def test_a_text_ends_where_all_variants_come_to():
    first = [[5, 1, 2, 3, 4, 8], [5, 1, 3, 2, 9, 8]]  # 4 is one variant's alone, 8 the end anyway
    assert selftest._common([first, [[2, 6, 0], [2, 7, 0]]]) == 3
    assert selftest._common([first, [[2, 3, 0], [2, 3, 0]]]) == 1
