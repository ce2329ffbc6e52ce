"""Engines with planted faults behind HTTP: what a comparison is told of them is what it would be told in process."""

import pytest
from standins.engine import Probabilities
from standins.opening import IDS_IN, behind
from standins.rows import same_rows

from qwenref.compare.errors import BadLogprobs, EngineContractViolation
from qwenref.compare.faulty import FaultyReference
from qwenref.compare.gather import gather
from qwenref.compare.suites import Conversation, Item, Suite

# A sum, rendered.
PROMPT = [
    1255,
    270,
    198,
    389,
    509,
    274,
    220,
    18,
    16,
    674,
    220,
    17,
    18,
    30,
    1256,
    198,
    1255,
    269,
    198,
    1278,
    198,
]


CONVERSATIONS = (Conversation("greeting", [{"role": "user", "content": "Hi"}], {"enable_thinking": False}),)


def values(done):
    return [(row.chosen, row.chosen_logprob) for row in done.rows]


@pytest.mark.parametrize("kind", IDS_IN)
@pytest.mark.parametrize("fault", ["rope-theta-1e7", "conv-no-history", "repetition-1.1", "eos-ignored"])
def test_a_fault_shows_over_http_as_in_process(kind, fault, tiny):
    own, sound = FaultyReference(tiny, fault), FaultyReference(tiny)
    with behind(kind, FaultyReference(tiny, fault), tiny.tokenizer) as engine:
        found, expected = engine.generate(PROMPT, 24, 4), own.generate(PROMPT, 24, 4)
        assert (found.output_ids, found.finish) == (expected.output_ids, expected.finish)
        same_rows(found.rows, expected.rows)
        assert values(found) != values(sound.generate(PROMPT, 24, 4))
        if fault == "rope-theta-1e7":
            same_rows(engine.score(PROMPT, 4).rows, own.score(PROMPT, 4).rows)


@pytest.mark.parametrize("kind", IDS_IN)
def test_probabilities_in_place_of_logarithms_are_refused(kind, tiny):
    with behind(kind, Probabilities(FaultyReference(tiny)), tiny.tokenizer) as engine:
        for ask in (lambda: engine.score(PROMPT, 4), lambda: engine.generate(PROMPT, 3, 4)):
            with pytest.raises(BadLogprobs, match="probabilities in place of log-probabilities"):
                ask()


@pytest.mark.parametrize("kind", ["sglang+http", "llama+http", "tgi+http"])
def test_a_list_that_has_not_the_likeliest_first_is_refused(kind, tiny):
    engine = FaultyReference(tiny)

    def upside_down(*asked):
        done = FaultyReference.generate(engine, *asked)
        turned = [r._replace(ids=r.ids[::-1], logprobs=r.logprobs[::-1]) if len(r.ids) > 1 else r for r in done.rows]
        return done._replace(rows=turned)

    engine.generate = upside_down
    with behind(kind, engine, tiny.tokenizer) as served, pytest.raises(BadLogprobs, match="out of order"):
        served.generate("How much is 31 plus 23?", 3, 4)


@pytest.mark.parametrize("kind", IDS_IN)
def test_a_prompt_that_the_server_cut_is_a_finding_and_the_comparison_goes_on(kind, tiny):
    """vLLM tells the ids it read, the others their number; nothing scored on a cut prompt is taken for a row."""
    suite = Suite("one", (Item("p", PROMPT, 4, "length", None),))
    with behind(kind, FaultyReference(tiny, "context-half"), tiny.tokenizer) as engine:
        seen = gather(tiny, engine, suite)
        with pytest.raises(EngineContractViolation, match="read another prompt than it was sent"):
            engine.score(PROMPT, 4)
    contract = [each for each in seen.findings if each["code"] == "engine-contract"]
    assert contract and all(each["severity"] == "error" for each in contract)
    assert not any(way.prefill for way in seen.trajectories)


@pytest.mark.parametrize("kind", ["vllm+http", "llama+http"])
def test_evidence_over_http_is_that_of_the_engine_in_process(kind, tiny):
    suite = Suite("one", (Item("p", PROMPT[:8], 3, "length", None),), ("Hello", "日本 🍎"), CONVERSATIONS)
    how = {"most": "all"} if kind == "vllm+http" else {}
    with behind(kind, FaultyReference(tiny, "norm-w"), tiny.tokenizer, how) as engine:
        found = gather(tiny, engine, suite)
    own = gather(tiny, FaultyReference(tiny, "norm-w"), suite)
    assert found.differences == own.differences == [] and found.asked == own.asked | {"batch": 4}
    for one, other in zip(found.trajectories, own.trajectories, strict=True):
        assert one.ids == other.ids
        same_rows(one.prefill, other.prefill)
        assert (one.decode is None) == (other.decode is None)
        if one.decode is not None:
            same_rows(one.decode, other.decode)
