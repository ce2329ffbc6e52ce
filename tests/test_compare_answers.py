"""What engines may answer to a comparison: ids, log-probabilities and settings that are none, one at a time."""

from types import SimpleNamespace

import numpy as np
import pytest

from qwenref.compare import FaultyReference, Suite, compare, suite
from qwenref.compare.asking import Asked
from qwenref.compare.errors import BadLogprobs, BadTokenIds, VocabMismatch
from qwenref.compare.gather import gather, identify
from qwenref.compare.numbers import Numbers
from qwenref.compare.options import options
from qwenref.compare.readback import read_back
from qwenref.compare.running import Comparison
from qwenref.engines import Completion, Prompt, Row

FAST = {"explain": "never", "jitter": 4}


@pytest.fixture(scope="module")
def asked(tiny):
    whole = suite("quick", tiny)
    item = next(item for item in whole.prompts if item.kind == "cjk")
    return Suite("quick", (item._replace(new=40),), whole.texts[:4], whole.conversations[:2])


def changed(tiny, method, change, tier="A"):
    """An engine one method of which gives what `change` makes of it."""
    engine = FaultyReference(tiny, jitter=1, tier=tier)
    right = getattr(engine, method)
    setattr(engine, method, lambda *asked, **options: change(right(*asked, **options)))
    return engine


def codes(report):
    return {found["code"] for found in report.findings}


def row_with(value, at=1):
    """A change of one number in the third row."""

    def change(found):
        rows = list(found.rows)
        numbers = rows[2].logprobs.copy()
        numbers[at] = value
        rows[2] = rows[2]._replace(logprobs=numbers)
        return found._replace(rows=rows)

    return change


def of_row(**new):
    def change(found):
        rows = list(found.rows)
        rows[2] = rows[2]._replace(**{name: make(rows[2]) for name, make in new.items()})
        return found._replace(rows=rows)

    return change


def first_id(new):
    return lambda done: done._replace(output_ids=[new, *done.output_ids[1:]], rows=())


@pytest.mark.parametrize(
    "method, change, error",
    [
        ("generate", first_id(1280), BadTokenIds),
        ("generate", first_id(-1), BadTokenIds),
        ("generate", first_id(1.0), BadTokenIds),
        ("generate", first_id(True), BadTokenIds),
        ("generate", first_id("5"), BadTokenIds),
        ("generate", lambda done: done._replace(output_ids="abc"), BadTokenIds),
        ("generate", lambda done: done._replace(prompt_ids=[10**30]), BadTokenIds),
        ("generate", lambda done: done._replace(stop_id=-3), BadTokenIds),
        ("score", lambda scores: scores._replace(ids=[*scores.ids[:-1], 1280]), BadTokenIds),
        ("score", lambda scores: scores._replace(ids=[]), BadTokenIds),
        ("score", of_row(ids=lambda row: row.ids - 1), BadTokenIds),
        ("score", of_row(ids=lambda row: row.ids.astype(float)), BadTokenIds),
        ("score", of_row(chosen=lambda row: 1280), BadTokenIds),
        ("tokenize", lambda ids: [*ids, 99999], BadTokenIds),
        ("tokenize", lambda ids: None, BadTokenIds),
        ("render", lambda prompt: prompt._replace(ids=[None]), BadTokenIds),
        ("score", row_with(float("nan")), BadLogprobs),
        ("score", row_with(float("inf")), BadLogprobs),
        ("generate", row_with(float("nan"), at=-1), BadLogprobs),
        ("generate", row_with(0.5, at=0), BadLogprobs),
        ("generate", of_row(logprobs=lambda row: row.logprobs[::-1]), BadLogprobs),
        ("generate", of_row(logprobs=lambda row: row.logprobs[:-1]), BadLogprobs),
        ("generate", of_row(logprobs=lambda row: "abc"), BadLogprobs),
        ("generate", of_row(ids=lambda row: np.full_like(row.ids, row.ids[0])), BadLogprobs),
        ("generate", of_row(chosen_logprob=lambda row: float("nan")), BadLogprobs),
    ],
)
def test_ids_and_numbers_that_are_none_are_errors(tiny, asked, method, change, error):
    with pytest.raises(error, match="^faulty reference: "):
        gather(tiny, changed(tiny, method, change), asked)


def test_a_comparison_with_such_numbers_is_invalid_and_says_which(tiny, asked):
    report = compare(tiny, changed(tiny, "score", row_with(float("nan"))), asked, **FAST)
    assert (report.status, report.exit_code) == ("INVALID", 3) and "bad-logprobs" in codes(report)
    assert report.summary == "faulty reference: score, row 2: a log-probability that is none"


@pytest.mark.parametrize(
    "method, change, words",
    [
        ("generate", lambda done: None, "generate"),
        ("generate", lambda done: tuple(done), "generate"),
        ("generate", lambda done: done._replace(output_ids=[*done.output_ids, *[5] * 40]), "more tokens than"),
        ("generate", lambda done: done._replace(rows=[*done.rows, *done.rows]), "rows"),
        ("generate", lambda done: done._replace(rows=5), "rows"),
        ("generate", lambda done: done._replace(rows=[tuple(row) for row in done.rows]), "row 0"),
        ("generate", of_row(chosen=lambda row: 7), "of another id than follows"),
        ("generate", lambda done: done._replace(text="\ud800"), "text"),
        ("generate", lambda done: done._replace(text=b"abc"), "text"),
        ("generate", lambda done: done._replace(meta=3), "meta"),
        ("generate", lambda done: Completion(None, [], "", "length"), "0 tokens of 40 asked for"),
        ("score", lambda scores: None, "score"),
        ("score", lambda scores: scores._replace(rows=scores.rows[:-3]), "rows"),
        ("render", lambda prompt: prompt.text, "render"),
        ("render", lambda prompt: Prompt("\udfff", None), "text"),
    ],
)
def test_answers_of_another_kind_are_findings_and_the_rest_is_kept(tiny, asked, method, change, words):
    seen = gather(tiny, changed(tiny, method, change), asked)
    found = [found["message"] for found in seen.findings if found["code"] == "engine-contract"]
    assert any(words in message and "\n" not in message for message in found), seen.findings
    assert seen.asked["strings"] == 4 and (seen.completions or method == "generate")


def test_a_comparison_without_any_answer_is_undecided(tiny, asked):
    report = compare(tiny, changed(tiny, "generate", lambda done: None), asked, **FAST)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 2) and "engine-contract" in codes(report)


@pytest.mark.parametrize("finish, severity", [("stop", "info"), ("unknown", "warning")])
def test_an_empty_answer_is_a_finding(tiny, asked, finish, severity):
    engine = changed(tiny, "generate", lambda done: Completion(None, None, "", finish), tier="D")
    [found] = [found for found in gather(tiny, engine, asked).findings if found["code"] == "no-answer"]
    assert found["severity"] == severity and "the answer is empty" in found["message"]


def test_rows_and_ids_of_any_library_are_taken(tiny, asked):
    """Lists in place of arrays, NumPy's whole numbers, iterators: the same report."""

    def other(done):
        rows = [Row(row.ids.tolist(), row.logprobs.tolist(), row.chosen, row.chosen_logprob) for row in done.rows]
        return done._replace(output_ids=np.array(done.output_ids, np.int32), rows=iter(rows), finish=None, meta=None)

    one = gather(tiny, FaultyReference(tiny, jitter=1), asked)
    two = gather(tiny, changed(tiny, "generate", other), asked)
    a, b = (next(way for way in each.trajectories if way.decode is not None) for each in (one, two))
    assert a.ids == b.ids and type(b.ids[-1]) is int
    for x, y in zip(a.decode, b.decode, strict=True):
        assert np.array_equal(x.ids, y.ids) and np.array_equal(x.logprobs, y.logprobs)


# ---- what it says of itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, {}, {"vocab_size": None, "flags": None, "model": None, "stop_ids": None}])
def test_an_engine_may_say_nothing_of_itself(tiny, asked, said):
    comparison = Comparison(tiny, changed(tiny, "config", lambda _: said), asked, {})
    identify(tiny, comparison.engine, comparison.seen)
    assert comparison.options.precision == "bfloat16" and comparison.seen.findings == []


@pytest.mark.parametrize(
    "said, words",
    [
        ([1], "config is [1]"),
        ("bf16", "config is 'bf16'"),
        ({"vocab_size": "1280"}, "vocab_size is '1280'"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": 1280.0}, "vocab_size is 1280.0"),
        ({"flags": "--fast"}, "flags is '--fast'"),
        ({"model": 3}, "model is 3"),
        ({"stop_ids": "2"}, "stop_ids is '2'"),
        ({"stop_ids": [2, "x"]}, "stop_ids is [2, 'x']"),
        ({"dtype": ["bf16"]}, "dtype is ['bf16']"),
        ({"tp": "two"}, "tp is 'two'"),
    ],
)
def test_settings_that_are_none_are_a_finding_and_count_as_unknown(tiny, asked, said, words):
    comparison = Comparison(tiny, changed(tiny, "config", lambda _: said), asked, {})
    identify(tiny, comparison.engine, comparison.seen)
    [found] = comparison.seen.findings
    assert found["code"] == "engine-contract" and words in found["message"] and "unknown" in found["message"]


def test_a_comparison_goes_on_without_settings(tiny, asked):
    report = compare(tiny, changed(tiny, "config", lambda _: {"flags": 1, "stop_ids": "2"}), asked, **FAST)
    assert report.status == "AGREE_WITHIN_NOISE" and report.engine["flags"] is None


def test_settings_that_are_none_hide_no_prompt_that_was_read_otherwise(tiny, asked):
    engine = changed(tiny, "config", lambda _: [1])
    generate = engine.generate
    engine.generate = lambda *a: (lambda done: done._replace(prompt_ids=done.prompt_ids[1:]))(generate(*a))
    messages = [found["message"] for found in gather(tiny, engine, asked).findings]
    assert any("ids read of" in words for words in messages) and any("config is" in words for words in messages)


def test_settings_of_any_library_are_taken(tiny):
    class Type:
        def __str__(self):
            return "torch.bfloat16"

    said = {"dtype": Type(), "vocab_size": np.int64(1280), "stop_ids": 2, "flags": {"x": np.float32(1)}, "own": Type()}
    engine = Asked(changed(tiny, "config", lambda _: said), 1280)
    assert engine.config() == {
        "dtype": "bfloat16", "vocab_size": 1280, "stop_ids": [2], "flags": {"x": 1.0}, "own": "torch.bfloat16",
    }  # fmt: skip
    assert engine.complaints == []


# ---- rows without a token ------------------------------------------------------------------------------------------


def sized(tiny, rows):
    return changed(tiny, "config", lambda said: {**said, "vocab_size": rows})


@pytest.mark.parametrize("rows", [1281, 1300, 1290, 4096, 2048 + 512, 248320, 100, 1])
def test_another_vocabulary_is_no_padding(tiny, asked, rows):
    with pytest.raises(VocabMismatch, match="another vocabulary") as caught:
        gather(tiny, sized(tiny, rows), asked)
    assert f"{rows:,} ids" in str(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize("rows", [1536, 2048, 1280])
def test_padding_is_what_fills_up_to_a_power_of_two(tiny, asked, rows):
    seen = gather(tiny, sized(tiny, rows), asked)
    assert ("vocab-padding" in {found["code"] for found in seen.findings}) == (rows != 1280)


def test_rows_of_padding_are_left_out_of_what_is_compared(tiny, asked, monkeypatch):
    """An engine that lists ids behind the vocabulary it was filled up from; one that writes them is refused."""
    engine = sized(tiny, 1536)
    score, generate = engine.score, engine.generate

    def padded(found):
        rows = [row and row._replace(ids=np.append(row.ids, 1500), logprobs=np.append(row.logprobs, -99.0))
                for row in found.rows]  # fmt: skip
        return found._replace(rows=rows)

    engine.score, engine.generate = lambda *a: padded(score(*a)), lambda *a: padded(generate(*a))
    monkeypatch.setattr("qwenref.compare.numbers.FULL", 0)
    seen = gather(tiny, engine, asked)
    plain = gather(tiny, FaultyReference(tiny, jitter=1), asked)
    mine, theirs = (Numbers(tiny, each.trajectories, [(0, "bfloat16")]).table("decode") for each in (plain, seen))
    assert theirs.support.max() < 1280
    assert np.array_equal(mine.support, theirs.support) and np.array_equal(mine.engine, theirs.engine, equal_nan=True)
    engine.generate = lambda *a: first_id(1500)(generate(*a))
    with pytest.raises(BadTokenIds, match="outside the vocabulary"):
        gather(tiny, engine, asked)


# ---- readback ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, key, value, coarser",
    [
        ("bfloat16", "kv_dtype", "auto", False),
        ("auto", "kv_dtype", "auto", False),
        ("auto", "kv_dtype", "bfloat16", False),
        ("float32", "kv_dtype", "auto", False),
        ("float32", "kv_dtype", "bfloat16", True),
        ("bfloat16", "kv_dtype", "fp8_e4m3", True),
        ("float16", "kv_dtype", "half", False),
        ("bfloat16", "kv_dtype", "q8_0", True),
        ("bfloat16", "state_dtype", "auto", False),
        ("bfloat16", "state_dtype", "float", False),
        ("bfloat16", "state_dtype", "float32", False),
        ("bfloat16", "state_dtype", "bfloat16", True),
    ],
)
def test_a_type_of_fewer_bits_is_coarser_and_a_word_that_names_none_is_not(tiny, asked, dtype, key, value, coarser):
    comparison = Comparison(tiny, FaultyReference(tiny), asked, {})
    comparison.options = options(asked, {"dtype": dtype})
    comparison.seen.config = {"dtype": dtype, key: value}
    judge = SimpleNamespace(
        seen=comparison.seen, options=comparison.options, model=tiny, stops=(), path=[], own_weights=False
    )
    read_back(judge)
    assert [found["code"] for found in comparison.seen.findings] == ["config_mismatch"] * coarser
