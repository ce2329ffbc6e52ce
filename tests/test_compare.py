"""A comparison from beginning to end: engines whose faults are known, and what has to be said of each.

`python -m qwenref.compare.selftest` plants every row of `planted.ROWS` into models of several seeds; here are single
rows, one for each question of the decision.
"""

import json
import os

import jsonschema
import numpy as np
import pytest

import qwenref
from qwenref.compare import FaultyReference, Suite, compare, pasted, suite
from qwenref.compare.document import schema
from qwenref.compare.errors import SeedNotComparable, TooFewPositions
from qwenref.compare.sampling import neutral
from qwenref.engines.reference import Reference
from qwenref.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def scores(tmp_path_factory):
    """Scores of the tests here are kept: what several of them need is computed once."""
    before = os.environ.get("QWENREF_CACHE")
    os.environ["QWENREF_CACHE"] = str(tmp_path_factory.mktemp("scores"))
    yield
    del os.environ["QWENREF_CACHE"]
    if before is not None:
        os.environ["QWENREF_CACHE"] = before


@pytest.fixture(scope="module")
def quick(tiny):
    """The suite, with fewer strings."""
    whole = suite("quick", tiny)
    return whole._replace(texts=whole.texts[:60])


@pytest.fixture(scope="module")
def short(quick):
    """The two of its prompts with the longest answers."""
    kept = tuple(item for item in quick.prompts if item.kind in ("cjk", "recall"))
    return Suite("quick", kept, quick.texts, quick.conversations)


def names(report):
    return [row["id"] for row in report.hypotheses if row["accepted"]]


def codes(report):
    return {found["code"] for found in report.findings}


# ---- engines that are right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", "ABCD")
def test_an_engine_that_rounds_elsewhere_is_inside(tiny, short, tier):
    report = compare(tiny, FaultyReference(tiny, jitter=1001, tier=tier), short)
    assert (report.status, report.exit_code, report.cause) == ("AGREE_WITHIN_NOISE", 0, "none")
    assert report.tier == tier and report.engine["dtype" if tier != "D" else "name"]
    assert not [stage for stage in report.stages if stage["verdict"] == "red"]
    report.assert_agrees(max_R=10)
    jsonschema.validate(report.to_dict(), schema())


def test_the_reference_agrees_to_the_bit(tiny, short):
    report = compare(tiny, Reference(tiny), short)
    assert report.status == "AGREE" and report.summary and report.flips == []
    assert {stage["verdict"] for stage in report.stages} <= {"green", "skipped"}


def test_the_profile_of_transformers_is_inside_in_bfloat16(tiny, short):
    report = compare("tiny", "reference:tiny?numerics=hf", short)
    assert report.status == "AGREE_WITHIN_NOISE" and report.engine["dtype"] == "bfloat16"
    assert report.envelope["J"] == 8 and report.envelope["sigma_bar"] > 0 and report.envelope["kl_median"] > 0


# ---- engines with a fault ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults, tier, causes, named",
    [
        (("rope-q+1",), "A", ("kernels", "config"), ("rope-q+1",)),
        (("gate-silu",), "C", ("kernels",), ("gate-silu",)),
        (("norm-w",), "B", ("kernels", "weights"), ("norm-w",)),
        (("conv-no-history",), "A", ("state_or_cache",), ("conv-no-history",)),
        (("shards-swapped",), "A", ("weights",), ("shards-swapped",)),
        (("int4-g32",), "A", ("quantization",), ("int4-g32",)),
        (("temperature-0.8",), "A", ("sampling_config",), ("temperature-0.8",)),
        (("presence-1.5",), "A", ("sampling_config",), ("presence-1.5",)),
        (("temperature-0.8", "q-gate-flat"), "A", ("sampling_config",), ("temperature-0.8", "q-gate-flat")),
        (("newline-added",), "A", ("chat_template",), ()),
        (("bos-added",), "D", ("tokenizer",), ("bos-added",)),
        (("regex-gpt2",), "A", ("tokenizer",), ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_fault_is_found_and_named(tiny, quick, faults, tier, causes, named):
    from qwenref.compare.planted import Planted

    row = Planted(0, faults, ("DIVERGED",), tier=tier)
    resolved = [fault.name for fault in row.resolved(tiny)]
    report = compare(*row.sides(tiny, 7), quick)
    assert report.status == "DIVERGED" and report.exit_code == 1 and report.cause in causes
    assert {fault for fault, name in zip(resolved, faults, strict=True) if name in named} <= set(names(report))
    assert report.decision_path and report.summary
    jsonschema.validate(report.to_dict(), schema())


@pytest.mark.parametrize("tier", ["A", "C"])
def test_settings_that_explain_nothing_are_not_believed(tiny, short, monkeypatch, tier):
    words = "unlikely ids are cut away"
    found = neutral()._replace(truncated=("top_p", 0.9), slope_se=0.01, findings=[{"code": "truncated-support",
                               "severity": "error", "message": words, "evidence": None}])  # fmt: skip
    monkeypatch.setattr("qwenref.compare.judge.fit", lambda *_: found)
    fault = "conv-no-history" if tier == "A" else "gate-off"  # of decode alone where there is prefill to hold it to
    report = compare(tiny, FaultyReference(tiny, fault, tier=tier, jitter=3), short, explain="never")
    assert report.cause in ("state_or_cache", "kernels") and names(report) == []
    assert any(words in step and "set aside" in step for step in report.decision_path)
    clean = compare(tiny, FaultyReference(tiny, tier=tier, jitter=3), short, explain="never")
    assert clean.cause == "sampling_config" and names(clean) == ["top-p-0.9"]


def test_an_end_that_is_none_is_found(tiny, quick):
    report = compare(tiny, FaultyReference(tiny, "eos-ignored", jitter=3), quick)
    assert report.cause == "stop_tokens" and "stop-tokens" in codes(report)


def test_what_changes_no_distribution_is_inside(tiny, short):
    report = compare(tiny, FaultyReference(tiny, "rope-qk+1", jitter=3), short)
    assert report.status == "AGREE_WITHIN_NOISE" and any("rotary" in spot for spot in report.blind_spots)


def test_a_stale_cache_is_told_from_a_state(tiny, quick):
    report = compare(tiny, FaultyReference(tiny, "state-stale-half", jitter=3), quick)
    assert report.cause == "state_or_cache" and "prefix-cache" in codes(report)
    assert any("cache of prompts off" in step for step in report.decision_path)


def test_a_fault_that_is_not_in_the_library_is_not_named(tiny, quick):
    engine = FaultyReference(tiny, "gate-off", jitter=3)
    report = compare(tiny, engine, quick, without=("gate-off",))
    assert report.summary == "the numbers are outside, and no known fault explains them"
    assert report.status == "DIVERGED" and report.confidence == "statistical" and names(report) == []
    assert report.cause == "kernels" and "nearest-shape" in codes(report)


def test_own_weights_take_the_blame_for_what_they_lose(tiny, short):
    from qwenref.compare.planted import Planted

    weights, engine = Planted(30, ("int4-g32",), (), weights=True).sides(tiny, 5)
    report = compare(tiny, engine, short, engine_weights=weights)
    assert report.status == "AGREE_WITHIN_NOISE" and "quantization_loss" in codes(report)
    lost = next(found for found in report.findings if found["code"] == "quantization_loss")["evidence"]
    assert lost["R"] > 2 and lost["kl"] > 0


# ---- drawn tokens --------------------------------------------------------------------------------------------------


def test_drawn_tokens_are_tested_as_drawn(tiny, short):
    report = compare(tiny, FaultyReference(tiny, jitter=9), short, mode="rl", draws=400, explain="never")
    assert report.status == "AGREE_WITHIN_NOISE" and report.mode == "rl" and "pit" in report.arrays
    assert report.stats["rl"]["ess"] > 0.5 and {flip["class"] for flip in report.flips} <= {"tie", "benign"}
    cut = compare(tiny, FaultyReference(tiny, "top-k-20", jitter=9), short, mode="sample", draws=400, explain="never")
    assert cut.cause == "sampling_config" and "truncated-support" in codes(cut)


def test_a_text_that_was_drawn_is_not_taken_for_a_fault_of_kernels(tiny, quick):
    report = compare(tiny, FaultyReference(tiny, "temperature-1.0", tier="D"), quick)
    assert report.cause == "sampling_config" and "temperature" in codes(report)


def test_until_decided_ends_as_soon_as_the_odds_decide(tiny, quick):
    report = compare(tiny, FaultyReference(tiny, "norm-w", jitter=9), quick, until_decided=True, explain="never")
    found = next(found for found in report.findings if found["code"] == "until-decided")
    assert report.status == "DIVERGED" and found["evidence"]["tokens"] < quick.positions
    clean = compare(tiny, FaultyReference(tiny, jitter=9), quick, until_decided=True, explain="never")
    found = next(found for found in clean.findings if found["code"] == "until-decided")
    assert "not decided" in found["message"] and found["evidence"]["events"] == 0


# ---- two of them ---------------------------------------------------------------------------------------------------


def test_of_two_engines_the_one_outside_is_named(tiny, short):
    clean, faulty = FaultyReference(tiny, jitter=2), FaultyReference(tiny, "gate-off", jitter=3)
    clean.name, faulty.name = "clean", "faulty"
    report = compare(tiny, [clean, faulty], short)
    assert report.arbiter["outside"] == ["faulty"] and report.exit_code == 1 and report.cause == "kernels"
    assert report.verdict == "engine faulty is outside the reference's envelope"
    jsonschema.validate(report.to_dict(), schema())
    alone = compare(tiny, faulty, short)
    assert set(report.sides[1].arrays) == set(alone.arrays) > {"kl", "margin", "flip"}
    assert all(
        np.array_equal(report.arrays[f"2.{name}"], array, equal_nan=True) for name, array in alone.arrays.items()
    )
    both = compare(tiny, [clean, Reference(tiny)], short)
    assert both.exit_code == 0 and both.arbiter["outside"] == [] and both.verdict.startswith("neither")


def test_pasted_texts_and_their_prompt_get_an_answer(tiny):
    ids = [int(id) for id in tiny.tokenizer.encode("Once upon a time,")]
    right = tiny.generate(ids, max_new_tokens=48).text
    with qwenref.numerics("hf"):
        rounded = tiny.generate(ids, max_new_tokens=48).text
    wrong = right[: len(right) // 2] + " rotary positions of the keys" + right[len(right) // 2 :]
    report = pasted(tiny, ids, right, wrong)
    assert report.arbiter["outside"] == ["text B"] and report.exit_code == 1
    assert report.first_divergence["class"] == "non-benign" and report.tier == "D"
    assert [each["tier"] for each in report.arbiter["reports"]] == ["D", "D"]
    assert any("log-probabilities" in spot for spot in report.blind_spots)
    told = report.text()
    assert report.summary.startswith("tokens are outside; text alone") and "not decided by this comparison\n" in told
    assert "***" not in told  # nothing of it is taken for a secret
    assert told.count("first divergence\n") == 1 and "class        non-benign" in told
    if rounded != right:
        assert pasted(tiny, ids, right, rounded).arbiter["outside"] == []
    with pytest.raises(InputError, match="both texts are the same"):
        pasted(tiny, ids, right, right)
    with pytest.raises(InputError, match="text A is empty"):
        pasted(tiny, ids, "", right)


# ---- how it runs ---------------------------------------------------------------------------------------------------


def test_the_same_comparison_is_the_same_document(tiny, short):
    def made(**options):
        document = compare(tiny, FaultyReference(tiny, "gate-off", jitter=3), short, **options).to_dict()
        return json.dumps({**document, "created": None})

    assert made() == made() == made(workers=2)


def test_an_interruption_keeps_what_is_there(tiny, short):
    class Interrupted(FaultyReference):
        def score(self, ids, k):
            raise KeyboardInterrupt

    report = compare(tiny, Interrupted(tiny, "regex-gpt2"), short)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2) and "interrupted" in codes(report)
    assert report.suite["prompts"] == 2


def test_probabilities_are_no_logprobs(tiny, short):
    report = compare(tiny, FaultyReference(tiny, "logprobs-probabilities"), short)
    assert (report.status, report.exit_code) == ("INVALID", 3)
    assert "bad-logprobs" in codes(report)


def test_too_few_positions_are_undecided(tiny, quick):
    one = Suite("one", (quick.prompts[0]._replace(new=4, ids=quick.prompts[0].ids[:4]),))
    report = compare(tiny, FaultyReference(tiny, jitter=3, tier="B"), one)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"seed": 1}, SeedNotComparable, "equal seeds"),
        ({"jitter": 3}, TooFewPositions, "3 rounding variants"),
        ({"jitter": 0}, InputError, "jitter"),
        ({"mode": "beam"}, InputError, "mode"),
        ({"explain": "maybe"}, InputError, "explain"),
        ({"workers": 0}, InputError, "workers"),
        ({"precision": "banana"}, InputError, "(?s)precision.*'banana'.*bf16, fp16, fp32, fp8, int8, int4, or a GGUF"),
        ({"precision": 16}, InputError, "precision"),
        ({"mode": "rl", "draws": 0}, InputError, "draws"),
        ({"draws": 100}, InputError, "draws in mode greedy"),
        ({"mode": "sample", "until_decided": True}, InputError, "until-decided in mode sample"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_refused_before_any_work(tiny, short, options, error, message):
    class Silent(FaultyReference):
        def generate(self, *asked):
            raise AssertionError("was asked")

    with pytest.raises(error, match=message):
        compare(tiny, Silent(tiny), short, **options)
