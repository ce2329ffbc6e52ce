"""What is asked of an engine, and the reference's numbers beside its answers."""

import contextlib
import threading

import numpy as np
import pytest
import scores

import qwenref
from qwenref.compare import scoring
from qwenref.compare.faults_model import opened
from qwenref.compare.faulty import FaultyReference
from qwenref.compare.gather import gather
from qwenref.compare.numbers import Numbers
from qwenref.compare.scoring import PLAIN, Task, perform, score
from qwenref.compare.suites import suite
from qwenref.compare.table import Table
from qwenref.logprobs import log_softmax

VARIANTS = [(seed, "bfloat16") for seed in range(2)]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def quick(model):
    return suite("quick", model)


def test_a_task_gives_the_likeliest_ids_and_what_was_asked_for_besides(model):
    ids = tuple(model.tokenizer.encode("Once upon a time, there was a"))
    extra = np.array([[5, 5], [-1, ids[2]]] + [[-1, -1]] * (len(ids) - 4))
    found = perform(model, Task(ids, 2, PLAIN, extra=extra, top=3))
    whole = log_softmax(model(np.array([ids])).logits[0].astype(np.float64))[1:-1]
    assert found.support.shape == (len(ids) - 2, 5)
    for t, row in enumerate(whole):
        order = np.argsort(-row, kind="stable")[:3]
        assert found.support[t, :3].tolist() == order.tolist() and found.best[t] == order[0]
        there = found.support[t] >= 0
        assert np.array_equal(found.logprobs[t, there], row[found.support[t, there]])
        assert np.isnan(found.logprobs[t, ~there]).all()
    assert found.support[0, 3:].tolist() == [5, -1]  # an id named twice is asked for once


def test_windows_and_single_tokens_change_no_bit(model, monkeypatch):
    ids = tuple(model.tokenizer.encode("The fox ran over the hill. " * 12))
    once = perform(model, Task(ids, 7, PLAIN))
    monkeypatch.setattr("qwenref.compare.scoring.AT_ONCE", 64 * 1280)
    for task in (Task(ids, 7, PLAIN), Task(ids, 7, PLAIN, decode=True), Task(ids, 7, PLAIN, support=once.support)):
        again = perform(model, task)
        assert np.array_equal(again.support, once.support)
        assert again.logprobs.tobytes() == once.logprobs.tobytes()


def test_a_fault_is_planted_once_for_tasks_that_follow_one_another(model, monkeypatch):
    names = ("gate-off", "state-bf16", "int8-g128", "state-stale-half")
    hows = [("fault", profile, (name,)) for name in names for profile in ("fp32", "fp64")]
    tasks = [Task(ids, 3, how, decode=True) for how in hows for ids in (tuple(range(9)), tuple(range(5, 20)))]
    apart, planted = [perform(model, task) for task in tasks], []
    monkeypatch.setattr(scoring, "opened", lambda model, faults: planted.append(faults) or opened(model, faults))
    assert scores.same(score(model, tasks), apart) and len(planted) == len(hows)


def test_a_fault_is_scored_and_the_model_stays_what_it_was(model):
    ids = tuple(model.tokenizer.encode("Once upon a time, there was a"))
    before, faulty, after = score(
        model, [Task(ids, 1, PLAIN), Task(ids, 1, ("fault", "fp32", ("gate-off",))), Task(ids, 1, PLAIN)]
    )
    assert before.logprobs.tobytes() == after.logprobs.tobytes() != faulty.logprobs.tobytes()


@pytest.mark.parametrize("tier", "ABCD")
def test_every_tier_is_asked_what_it_gives_and_no_more(model, quick, tier):
    seen = gather(model, FaultyReference(model, tier=tier), quick)
    assert not [found for found in seen.findings if found["severity"] != "info"] and not seen.differences
    asked = {"A": 300, "B": 300, "C": None, "D": None}
    assert seen.asked.get("strings") == asked[tier]
    assert all((way.prefill is not None) == (tier == "A") for way in seen.trajectories)
    assert all(any(row is not None for row in way.decode) == (tier != "D") for way in seen.trajectories)
    assert seen.assumed == (tier == "D")


def test_the_reference_as_an_engine_is_itself_to_the_bit(model, quick):
    seen = gather(model, FaultyReference(model), quick)
    assert {way.origin for way in seen.trajectories} == {"engine"}  # it goes no other way than the reference
    numbers = Numbers(model, seen.trajectories, VARIANTS)
    assert numbers.bitwise() and numbers.whole
    table = numbers.table("decode")
    assert np.abs(table.engine - table.truth).max() < 1e-4 and (table.emitted == table.best).all()
    assert table.jitters.shape == (2, *table.truth.shape) and np.abs(table.jitters - table.truth).max() > 1e-2
    other = Numbers(model, gather(model, FaultyReference(model, jitter=1), quick).trajectories, VARIANTS)
    assert not other.bitwise()


def test_a_large_vocabulary_is_compared_at_the_ids_that_either_side_names(model, quick, monkeypatch):
    seen = gather(model, FaultyReference(model, jitter=1, tier="B"), quick)
    whole = Numbers(model, seen.trajectories, VARIANTS[:1]).table("decode")
    monkeypatch.setattr("qwenref.compare.numbers.FULL", 0)
    some = Numbers(model, seen.trajectories, VARIANTS[:1]).table("decode")
    assert not some.full and some.truth.shape[1] < 60
    assert ((some.support >= 0).sum(axis=1) >= 20).all()
    for name in ("truth", "engine"):
        found = np.where(some.support >= 0, np.take_along_axis(getattr(whole, name), some.support, axis=1), np.nan)
        assert np.array_equal(found, getattr(some, name), equal_nan=True)
    assert np.isfinite(some.engine).sum() == np.isfinite(whole.engine).sum()  # nothing the engine said is lost


def test_differences_of_strings_and_conversations_are_kept_with_how_many_there_are(model, quick):
    seen = gather(model, FaultyReference(model, "regex-gpt2", "newline-added"), quick)
    by = {difference.what: difference for difference in seen.differences}
    assert by["tokenizer"].found != by["tokenizer"].expected and by["tokenizer"].where in quick.texts
    assert by["template"].found == by["template"].expected + "\n" and by["template"].more > 10


def test_a_prompt_that_was_cut_and_tokens_that_are_missing_are_findings(model, quick):
    seen = gather(model, FaultyReference(model, "context-half"), quick)
    assert [found["code"] for found in seen.findings] == ["engine-contract"] * 4
    assert seen.findings[0]["evidence"] == {"sent": 65, "read": 32, "prompt": "00-code-65"}

    class Short(FaultyReference):
        def generate(self, prompt, n, k, sampling=None):
            return super().generate(prompt, min(n, 3), k, sampling)

    seen = gather(model, Short(model), quick)
    assert any("3 tokens of 64 asked for" in found["message"] for found in seen.findings)


def test_an_engine_that_answers_otherwise_each_time_is_noticed(model, quick):
    seen = gather(model, FaultyReference(model, repeatable=False), quick)
    assert "engine_nondeterministic" in {found["code"] for found in seen.findings} and seen.spread > 0


@pytest.mark.parametrize("tier", ["A", "D"])
def test_an_engine_whose_first_token_changes_is_noticed_without_numbers(model, quick, tier):
    class Turning(FaultyReference):
        def generate(self, prompt, n, k, sampling=None):
            self.turn = getattr(self, "turn", 0) + 1
            done = super().generate(prompt, n, k, sampling)
            if tier == "D":
                return done._replace(text=f"{self.turn}{done.text}")
            return done._replace(output_ids=[self.turn, *done.output_ids[1:]], rows=[None] * len(done.output_ids))

    seen = gather(model, Turning(model, tier=tier), quick)
    [found] = [found for found in seen.findings if found["code"] == "engine_nondeterministic"]
    assert (
        found["message"] == "equal requests are answered with other tokens" and "token 0" in found["evidence"]["first"]
    )


def test_tables_are_joined_to_the_widest(model):
    assert Table.concatenate([]).positions == 0


class Batching(FaultyReference):
    """Takes four requests at once, and waits for the fourth; `rounds` elsewhere in such a batch, if told to."""

    wide = rounds = False

    @contextlib.contextmanager
    def together(self, count):
        self.wide, self.all, self.lock = True, threading.Barrier(count), threading.Lock()
        try:
            yield
        finally:
            self.wide = False

    def generate(self, prompt, n, k, sampling=None):
        if not self.wide:
            return super().generate(prompt, n, k, sampling)
        self.all.wait(timeout=60)
        with self.lock:
            self._vary(7 if self.rounds else None)
            done = super().generate(prompt, n, k, sampling)
            self._vary(None)
        return done


@pytest.mark.parametrize("tier", ["A", "B"])
def test_a_request_among_four_at_once_is_answered_as_alone(model, quick, tier):
    few = quick._replace(prompts=tuple(item._replace(new=12) for item in quick.prompts[:2]), texts=(), conversations=())
    engine = Batching(model, tier=tier)
    seen = gather(model, engine, few)
    assert seen.asked["batch"] == 4 and seen.spread == 0
    assert "engine_nondeterministic" not in {found["code"] for found in seen.findings}
    engine.rounds = True
    seen = gather(model, engine, few)
    [found] = [found for found in seen.findings if found["code"] == "engine_nondeterministic"]
    assert "among 4 at once" in found["message"] and seen.spread > 0
    assert "batch" not in gather(model, FaultyReference(model, tier=tier), few).asked
