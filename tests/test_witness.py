"""Whole models against transformers and against the float64 definition.

The yardstick of every error is the float64 definition (numerics "fp64").  transformers computes in float32 what we
compute in float32, so its own distance from the definition says how far rounding alone takes a correct program.  The
largest error of a configuration, over every way of running it, may be half as large again as transformers'; the root
mean square, which no single ill-conditioned token decides, may not exceed it.  A prompt in several calls needs no
error of its own: it has the bits of one call.
"""

import numpy as np
import pytest
from text_configs import CONFIGS
from witness import logits, logits_in_calls, open_witness

import qwenref

PREFILLS = (1, 2, 3, 5, 64, 65, 130)
DECODED = 20
SPLITS = ((1, 129), (2, 128), (3, 127), (63, 67), (64, 66), (65, 65), (1,) * 130)  # field case of every state bug
REAL = (65, 62, 1)  # tokens of the three rows of the padded batch
LARGEST, MEAN_SQUARE = 1.5, 1.0  # our error in units of transformers'


class Case:
    """One configuration: our model, transformers' model, ids [3, 150], and the logits of the definition."""

    def __init__(self, name, folder):
        config = CONFIGS[name]
        self.model = qwenref.from_config(config, seed=list(CONFIGS).index(name))
        self.witness = open_witness(self.model, folder)
        self.ids = np.random.default_rng(7).integers(0, config["vocab_size"], (3, max(PREFILLS) + DECODED))
        with qwenref.numerics("fp64"):
            self.truth = self.model(self.ids).logits
        assert self.truth.dtype == np.float64
        self.has_attention = "full_attention" in config["layer_types"]

    def ours_in_calls(self, lengths):
        cache, at, rows = qwenref.Cache(self.model, batch=3), 0, []
        for n in lengths:
            rows.append(self.model(self.ids[:, at : at + n], cache=cache).logits)
            at += n
        return np.concatenate(rows, 1)

    def theirs_in_calls(self, lengths):
        """transformers keeps no cache for a stack without attention: its plain call stands in."""
        if self.has_attention:
            return logits_in_calls(self.witness, self.ids, lengths)
        return logits(self.witness, self.ids[:, : sum(lengths)])

    def padded(self):
        """(ids, mask) [3, 65] with REAL tokens at the end of each row."""
        T = max(REAL)
        ids, mask = np.zeros((3, T), np.int64), np.zeros((3, T), np.int64)
        for row, n in enumerate(REAL):
            ids[row, T - n :], mask[row, T - n :] = self.ids[row, :n], 1
        return ids, mask

    def errors(self):
        """{way: (our errors, transformers' errors)}, flat arrays of distances from the definition."""
        ways = {}
        for n in PREFILLS:
            ids, truth = self.ids[:, :n], self.truth[:, :n]
            ways[f"prefill {n}"] = self.model(ids).logits - truth, logits(self.witness, ids) - truth
        decode = [max(PREFILLS)] + [1] * DECODED
        ways["decode"] = self.ours_in_calls(decode) - self.truth, self.theirs_in_calls(decode) - self.truth
        ids, mask = self.padded()
        ours, theirs = self.model(ids, attention_mask=mask).logits, logits(self.witness, ids, mask)
        rows = [(ours[r, -n:] - self.truth[r, :n], theirs[r, -n:] - self.truth[r, :n]) for r, n in enumerate(REAL)]
        ways["left pads"] = tuple(np.concatenate(side) for side in zip(*rows, strict=True))
        return ways


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda name: name.replace(" ", "-"))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("witness"))


def test_errors_are_no_larger_than_those_of_transformers(case):
    ours, theirs = (np.concatenate([e.ravel() for e in side]) for side in zip(*case.errors().values(), strict=True))
    largest = np.abs(ours).max(), np.abs(theirs).max()
    assert largest[0] <= LARGEST * largest[1], largest
    mean_square = np.sqrt(np.mean(ours**2)), np.sqrt(np.mean(theirs**2))
    assert mean_square[0] <= MEAN_SQUARE * mean_square[1], mean_square


def test_any_split_of_a_prompt_gives_the_bits_of_one_call(case):
    whole = case.model(case.ids[:, :130]).logits
    for split in SPLITS:
        assert case.ours_in_calls(split).tobytes() == whole.tobytes(), split


def test_a_padded_row_gives_the_bits_of_the_row_alone(case):
    ids, mask = case.padded()
    ours = case.model(ids, attention_mask=mask).logits
    for row, n in enumerate(REAL):
        assert ours[row, -n:].tobytes() == case.model(case.ids[row, :n]).logits.tobytes()


def test_hidden_states_and_attentions_are_laid_out_as_transformers(case):
    """n + 1 hidden states, the last one after the final norm; attentions of the attention layers only."""
    import torch

    ids = case.ids[:, :9]
    out = case.model(ids, output_hidden_states=True, output_attentions=True)
    with torch.inference_mode():
        want = case.witness(torch.tensor(ids), output_hidden_states=True, output_attentions=True, use_cache=False)
    with qwenref.numerics("fp64"):
        truth = case.model(ids, output_hidden_states=True, output_attentions=True)
    assert len(out.attentions) == len(want.attentions) == case.model.config.layer_types.count("full_attention")
    for name in ("hidden_states", "attentions"):
        for ours, theirs, exact in zip(out[name] or (), want[name], truth[name] or (), strict=True):
            theirs = theirs.double().numpy()
            assert ours.shape == theirs.shape
            assert np.abs(theirs - exact).max() <= 1e-3 * np.abs(exact).max()  # the same quantity at all
            rounding = 2**-24 * np.abs(exact).max()
            assert np.sqrt(np.mean((ours - exact) ** 2)) <= np.sqrt(np.mean((theirs - exact) ** 2)) + rounding
    assert case.model.text_model.norm(out.residuals[-1]).tobytes() == out.hidden_states[-1].tobytes()


def test_modules_and_parameters_have_the_names_of_transformers(case):
    assert [name for name, _ in case.model.named_modules()] == [name for name, _ in case.witness.named_modules()]
    ours = [(name, tuple(p.shape)) for name, p in case.model.named_parameters()]
    assert ours == [(name, tuple(p.shape)) for name, p in case.witness.named_parameters()]
