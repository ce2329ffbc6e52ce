"""transformers in this process as an engine, beside the reference on the embedded model."""

import numpy as np
import pytest

import qwenref
from qwenref import engines

pytest.importorskip("torch", reason="needs torch and transformers (extra 'test')")


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_tokens_and_activations_are_those_of_the_reference(model, attention):
    engine = engines.open(f"transformers:{model.path}", dtype="float32", attn_implementation=attention)
    ids = list(map(int, model.tokenizer.encode("Once upon a time, there was a")))
    scores = engine.score(ids, 5)
    # Both are within the float32 error of the definition, 1e-5 of logits of size 10.
    assert np.abs(scores.dense - model(np.array([ids])).logits[0]).max() < 1e-4
    assert engine.generate(ids, 5, 3).output_ids == model.generate(ids, max_new_tokens=5).new_ids
    with qwenref.capture(model, "layers.0") as kept:
        model(np.array([ids]))
    assert np.abs(engine.activations(ids, ["layers.0"])["layers.0"] - kept["layers.0"]).max() < 1e-4
    assert engine.config()["version"] == "5.24.0"
