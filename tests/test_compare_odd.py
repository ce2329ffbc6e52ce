"""Comparisons with what is odd: engines that answer nonsense or fail, interruptions, two engines of one name.

One prompt each, and no known faults are tried: what is looked at is how a comparison ends.
"""

import pytest

import qwenref
from qwenref.compare import FaultyReference, Suite, compare, pasted, suite
from qwenref.errors import InputError


@pytest.fixture(scope="module")
def tiny():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def one(tiny):
    item = next(item for item in suite("quick", tiny).prompts if item.kind == "cjk")
    return Suite("quick", (item._replace(new=40),))


def codes(report):
    return {found["code"] for found in report.findings}


# ---- two of them ---------------------------------------------------------------------------------------------------


class Interrupted(FaultyReference):
    def generate(self, *asked):
        raise KeyboardInterrupt


class Silent(FaultyReference):
    def generate(self, *asked):
        raise AssertionError("was asked")


def test_an_interruption_ends_the_comparison_of_both(tiny, one):
    report = compare(tiny, [Interrupted(tiny), Silent(tiny)], one, explain="never")
    first, second = report.arbiter["reports"]
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2)
    assert "interrupted" in first["summary"] and "was not asked" in second["summary"]
    late = compare(tiny, [FaultyReference(tiny, jitter=1), Interrupted(tiny)], one, explain="never")
    assert late.exit_code == 2 and late.arbiter["near_tie"] is None
    assert [each["status"] for each in late.arbiter["reports"]] == ["AGREE_WITHIN_NOISE", "INCONCLUSIVE"]


def test_what_was_interrupted_is_no_near_tie(tiny, monkeypatch):
    def interrupted(judge):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwenref.compare.judge.Judge._paths", interrupted)
    report = pasted(tiny, [5, 6, 7, 8], "one answer", "another answer")
    assert report.arbiter["near_tie"] is None and report.exit_code == 2


def test_engines_of_one_name_are_told_apart(tiny, one):
    clean, faulty = FaultyReference(tiny, jitter=1), FaultyReference(tiny, "gate-off", jitter=1)
    clean.name = faulty.name = "engine"
    report = compare(tiny, [clean, faulty], one, explain="never")
    assert report.arbiter["outside"] == ["engine (2)"] and "engine (2)" in report.verdict


@pytest.mark.parametrize("count", [0, 3])
def test_engines_are_one_or_two(tiny, one, count):
    with pytest.raises(InputError, match=f"found +{count}"):
        compare(tiny, [Silent(tiny)] * count, one)
