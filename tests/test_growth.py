"""How rounding grows over 64 layers: float32 here and in transformers against the float64 definition."""

import numpy as np
import pytest
from text_configs import CONFIGS
from witness import open_witness, torch

import qwenref

DEEP = CONFIGS["27B proportions"] | {
    "num_hidden_layers": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}
T = 70  # more than one chunk of transformers' prefill


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """(ours, transformers'), each the relative error of the residual stream behind every layer, then of the logits."""
    model = qwenref.from_config(DEEP, seed=64)
    ids = np.random.default_rng(64).integers(0, DEEP["vocab_size"], (1, T))
    floor = qwenref.numerics.bound(model, ids)
    with qwenref.numerics("fp64"):
        exact = model(ids, output_hidden_states=True)
    witness, seen = open_witness(model, tmp_path_factory.mktemp("witness")), []
    for layer in witness.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.double().numpy()))
    with torch.inference_mode():
        logits = witness(torch.tensor(ids), use_cache=False).logits.double().numpy()
    values = [*exact.residuals[1:], exact.logits]
    theirs = [relative(found, value) for found, value in zip([*seen, logits], values, strict=True)]
    return np.array([*floor.relative[1:], floor.logits_relative]), np.array(theirs)


def relative(found, exact):
    return np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))


def test_the_error_of_every_depth_is_at_most_that_of_torch(errors):
    ours, theirs = errors
    assert len(ours) == len(theirs) == 65
    assert (ours <= theirs).all(), np.flatnonzero(ours > theirs)


def test_the_error_grows_no_faster_than_the_layers_add_to_it(errors):
    ours, _ = errors
    assert ours.max() < 64 * 2**-24 * 10  # a layer adds a few roundings of values as large as the stream
