"""Real engines in this process, where they are installed: QWENREF_ENGINES="llama-cpp=tiny.gguf openvino=FOLDER".

Behind `=` stands what stands behind `:` in a spec. They run the checkpoint that QWENREF_ENGINES_CHECKPOINT names, or
the embedded model. `-m engines` runs these tests.
"""

import os

import numpy as np
import pytest

from qwenref import engines
from qwenref.compare.errors import BadTokenIds

NAMED = [pair.split("=", 1) for pair in os.environ.get("QWENREF_ENGINES", "").split()]
HERE = [(kind, rest) for kind, rest in NAMED if not kind.endswith("+http")]
TEXT = "How much is 31 plus 23? 日本語, ภาษาไทย 🦀"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not HERE, reason="QWENREF_ENGINES names no engine in process"),
]


@pytest.fixture(params=HERE, ids=lambda pair: pair[0], scope="module")
def engine(request):
    with engines.open(":".join(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference():
    return engines.open("reference:" + os.environ.get("QWENREF_ENGINES_CHECKPOINT", "tiny"))


def far(row, own):
    """How far the numbers of a row are from those of a row of the whole vocabulary."""
    expected = own.logprobs[np.argsort(own.ids)]
    return np.abs(row.logprobs - expected[row.ids]).max()


def test_what_is_generated_has_the_references_log_probabilities(engine, reference):
    """In 16 bits two ways to one value differ by some tenths at most; a row off by one, by whole numbers."""
    prompt = TEXT if not engine.capabilities().ids_in else reference.tokenize(TEXT)
    done = engine.generate(prompt, 12, 5, {"ignore_eos": True})
    own = reference.score(reference.tokenize(TEXT) + done.output_ids, "all").rows[-13:]
    assert len(done.output_ids) == 12
    for row, expected in zip(done.rows, own, strict=False):
        assert row.chosen == row.ids[0] and far(row, expected) < 0.5


def test_a_prompt_has_the_references_log_probabilities(engine, reference):
    if not engine.capabilities().prompt_logprobs:
        pytest.skip("it gives none of a prompt")
    for ids in (reference.tokenize(TEXT), reference.tokenize("Once upon a time")):
        rows, own = engine.score(ids, 5).rows, reference.score(ids, "all").rows
        assert [row.chosen for row in rows] == [*ids[1:], None]
        assert max(map(far, rows, own)) < 0.5


def test_text_and_conversations_are_those_of_the_checkpoint(engine, reference):
    able = engine.capabilities()
    if able.tokenize:
        assert engine.tokenize(TEXT) == reference.tokenize(TEXT)
    if able.render:
        messages = [{"role": "user", "content": TEXT}]
        assert engine.render(messages) == reference.render(messages)


def test_the_vocabulary_and_the_ends_are_those_of_the_checkpoint(engine, reference):
    assert engine.vocab == reference.vocab == engine.config()["vocab_size"]
    assert set(reference.stop_ids) <= set(engine.config()["stop_ids"])


def test_activations_are_those_of_the_reference(engine, reference):
    if not engine.capabilities().activations:
        pytest.skip("it gives none")
    ids = reference.tokenize(TEXT)
    found = engine.activations(ids, ["model.language_model.layers.*", "model.language_model.norm"])
    own = reference.activations(ids, list(found))
    assert len(found) > 10
    for name, value in found.items():
        assert np.abs(value - own[name]).mean() < 0.05 * np.abs(own[name]).mean(), name


def test_what_are_no_ids_is_refused(engine):
    if engine.capabilities().ids_in:
        for ids in ([engine.vocab], [-1], []):
            with pytest.raises(BadTokenIds):
                engine.score(ids, 1)


def test_it_writes_nothing_on_the_terminal(engine, capfd):
    engine.generate(TEXT, 2, 2)
    assert capfd.readouterr() == ("", "")
