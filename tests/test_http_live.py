"""Real servers, where some run: QWENREF_ENGINES="llama+http=http://127.0.0.1:8080 vllm+http=http://127.0.0.1:8000".

They may run any model; what is asked of them holds for all. `-m engines` runs these tests.
"""

import os

import pytest

from qwenref.compare.errors import EngineRejected
from qwenref.engines import adapter

NAMED = [pair.split("=", 1) for pair in os.environ.get("QWENREF_ENGINES", "").split()]
RUNNING = [pair for pair in NAMED if pair[0].endswith("+http")]
TEXT = "How much is 31 plus 23? 日本語, ภาษาไทย 🦀"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not RUNNING, reason="QWENREF_ENGINES names no running server"),
]


@pytest.fixture(params=RUNNING, ids=lambda pair: pair[0])
def engine(request):
    kind, address = request.param
    with adapter(kind).open(address, tokenizer=os.environ.get("QWENREF_ENGINES_TOKENIZER")) as opened:
        yield opened


def tier_a(engine):
    if engine.capabilities().tier != "A":
        pytest.skip(f"tier {engine.capabilities().tier}: no ids in, or no log-probabilities of a prompt")


def test_what_is_generated_is_scored_alike(engine):
    """In 16 bits two ways to one value differ by some tenths at most; a row off by one, by whole numbers."""
    tier_a(engine)
    prompt = engine.tokenize(TEXT)
    done = engine.generate(prompt, 12, 5)
    again = engine.score(prompt + done.output_ids, 5).rows[len(prompt) - 1 :]
    pairs = [(a, b) for a, b in zip(done.rows, again, strict=False) if a is not None and b is not None]
    assert len(pairs) >= len(done.output_ids) - 2 > 0
    for drawn, scored in pairs:
        assert drawn.chosen == scored.chosen == drawn.ids[0]
        if scored.chosen_logprob is not None:
            assert abs(drawn.chosen_logprob - scored.chosen_logprob) < 0.5


def test_a_greedy_answer_comes_again(engine):
    first, second = (engine.generate("Once upon a time", 8, 0) for _ in range(2))
    assert first.text == second.text and first.finish in ("stop", "length", "unknown")


def test_a_conversation_is_rendered_to_the_ids_of_its_text(engine):
    if not engine.capabilities().render:
        pytest.skip("its server renders no conversation")
    rendered = engine.render([{"role": "user", "content": TEXT}])
    assert rendered.ids or rendered.text
    if rendered.text and rendered.ids:
        assert engine.tokenize(rendered.text) == rendered.ids


def test_an_id_outside_of_the_vocabulary_is_refused(engine):
    tier_a(engine)
    engine.vocab = None  # so that it is the server that refuses
    with pytest.raises(EngineRejected):
        engine.generate([1, 2, 3, 2**30], 1, 0)


def test_it_says_what_it_is(engine):
    found = engine.config()
    assert found["model"]["id"] and found["url"].startswith("http")
