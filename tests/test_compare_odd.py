"""Comparisons with what is odd: engines that answer nonsense or fail, interruptions, two engines of one name.

One prompt each, and no known faults are tried: what is looked at is how a comparison ends.
"""

import pytest

from qwenref.compare import FaultyReference, Suite, compare, pasted, suite
from qwenref.compare.errors import EngineFailed, EngineRejected, EngineUnreachable
from qwenref.engines import Capabilities
from qwenref.errors import InputError

FAST = {"explain": "never", "jitter": 4}


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
    report = compare(tiny, [Interrupted(tiny), Silent(tiny)], one, **FAST)
    first, second = report.arbiter["reports"]
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2)
    assert "interrupted" in first["summary"] and "was not asked" in second["summary"]
    late = compare(tiny, [FaultyReference(tiny, jitter=1), Interrupted(tiny)], one, **FAST)
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
    report = compare(tiny, [clean, faulty], one, **FAST)
    assert report.arbiter["outside"] == ["engine (2)"] and "engine (2)" in report.verdict


@pytest.mark.parametrize("count", [0, 3])
def test_engines_are_one_or_two(tiny, one, count):
    with pytest.raises(InputError, match=f"found +{count}"):
        compare(tiny, [Silent(tiny)] * count, one)


# ---- engines that fail ---------------------------------------------------------------------------------------------


def failing(tiny, method, when, error, *faults):
    """An engine whose method raises in its calls of these numbers, or in all."""

    class Failing(FaultyReference):
        calls = 0

    def called(self, *asked, **options):
        self.calls += 1
        if when is None or self.calls in when:
            raise error
        return getattr(FaultyReference, method)(self, *asked, **options)

    setattr(Failing, method, called)
    return Failing(tiny, *faults, jitter=1)


@pytest.fixture(scope="module")
def two(tiny):
    whole = suite("quick", tiny)
    kept = [item._replace(new=20) for item in whole.prompts if item.kind in ("cjk", "recall")]
    return Suite("quick", tuple(kept), whole.texts[:6], whole.conversations[:2])


@pytest.mark.parametrize(
    "method, when, error, ends",
    [
        ("tokenize", (2,), RuntimeError("out of\nmemory"), ("AGREE_WITHIN_NOISE", 0)),
        ("tokenize", None, KeyError("x"), ("AGREE_WITHIN_NOISE", 0)),
        ("render", (1,), OSError(5, "disk"), ("AGREE_WITHIN_NOISE", 0)),
        ("config", None, AssertionError(), ("AGREE_WITHIN_NOISE", 0)),
        ("generate", (4,), InputError("too long"), ("INCONCLUSIVE", 4)),
        ("generate", None, MemoryError(), ("INCONCLUSIVE", 4)),
        ("score", (2,), RecursionError("deep"), ("INCONCLUSIVE", 4)),
    ],
)
def test_what_an_engine_raises_is_a_finding_and_the_rest_is_judged(tiny, two, method, when, error, ends):
    report = compare(tiny, failing(tiny, method, when, error), two, **FAST)
    assert (report.status, report.exit_code) == ends
    words = next(found["message"] for found in report.findings if found["code"] == "engine-failed")
    assert f"{method} failed with {type(error).__name__}" in words and "\n" not in words
    if when is not None:
        assert report.stats["R"]["value"] < 2  # of what there is
    if ends[1]:
        assert "failed" in report.summary and report.cause == "none"


def test_an_engine_that_is_outside_stays_so_when_it_fails_behind(tiny, two):
    report = compare(tiny, failing(tiny, "generate", (5,), ValueError("x"), "gate-off"), two, **FAST)
    assert (report.status, report.exit_code) == ("DIVERGED", 1) and "engine-failed" in codes(report)


def test_capabilities_that_are_none_are_refused_before_any_work(tiny, two):
    with pytest.raises(EngineFailed, match="capabilities failed with RuntimeError: x"):
        compare(tiny, failing(tiny, "capabilities", None, RuntimeError("x")), two)
    for wrong in (None, Capabilities(output_logprobs=-1), Capabilities(prompt_logprobs="some"), Capabilities(kind="?")):
        engine = FaultyReference(tiny)
        engine.capabilities = lambda wrong=wrong: wrong
        with pytest.raises(InputError, match="capabilities"):
            compare(tiny, engine, two)


def test_a_server_that_goes_away_leaves_what_it_said(tiny, two):
    gone = failing(tiny, "generate", (5,), EngineUnreachable("server: no answer"))
    report = compare(tiny, gone, two, **FAST)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 4) and report.stats["R"]["value"] < 2
    assert "engine-unreachable" in codes(report) and "1 of 2 prompts" in report.summary


def test_a_prompt_that_is_rejected_leaves_the_others(tiny, two):
    report = compare(tiny, failing(tiny, "generate", (4,), EngineRejected("server: refused")), two, **FAST)
    assert report.exit_code == 4 and "engine-rejected" in codes(report) and len(report.strips) == 1


@pytest.mark.parametrize("error", [EngineUnreachable("server: no answer"), EngineRejected("server: refused")])
def test_a_server_that_answers_nothing_is_an_error_and_beside_another_engine_a_report(tiny, one, error):
    with pytest.raises(type(error), match="server: "):
        compare(tiny, failing(tiny, "generate", None, error), one)
    engines = [FaultyReference(tiny, jitter=2), failing(tiny, "generate", None, error)]
    report = compare(tiny, engines, one, **FAST)
    assert [each["exit_code"] for each in report.arbiter["reports"]] == [0, 4] and report.exit_code == 2


# ---- numbers of which nobody says what they are --------------------------------------------------------------------


class Told(FaultyReference):
    """Gives the two likeliest of each position, too few to fit a temperature to."""

    kind = "unknown"

    def capabilities(self):
        return super().capabilities()._replace(output_logprobs=2, prompt_logprobs=0, kind=self.kind)


@pytest.mark.parametrize("kind", ["unknown", "processed"])
def test_log_probabilities_of_no_known_kind_decide_nothing(tiny, two, kind):
    engine = Told(tiny, jitter=1)
    engine.kind = kind
    report = compare(tiny, engine, two, **FAST)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2) and "logprob-kind-unknown" in codes(report)
    assert "log-probabilities" in report.summary
    engine.kind = "raw"
    assert compare(tiny, engine, two, **FAST).status == "AGREE_WITHIN_NOISE"


def test_tokens_beside_such_numbers_still_tell_what_is_outside(tiny, two):
    report = compare(tiny, Told(tiny, "gate-off", jitter=1), two, **FAST)
    assert (report.status, report.exit_code) == ("DIVERGED", 1) and "logprob-kind-unknown" not in codes(report)
