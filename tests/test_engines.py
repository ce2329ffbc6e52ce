"""Engines in this process beside each other: the reference, and transformers on the same weights."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from fresh import python
from witness import torch

import qwenref
from qwenref import engines
from qwenref.compare.errors import BadTokenIds
from qwenref.engines import ALL, dump_activations
from qwenref.errors import CapabilityMissing, InputError

PROMPT = list(range(300, 390))  # more than one chunk of 64
MESSAGES = [{"role": "user", "content": "How much is 31 plus 23?"}]
# Root mean square of all logits at these positions: 3e-6 and 4e-2 as measured.  A fault of an engine is above 1e-1.
CLOSE = {"float32": 2e-5, "bfloat16": 1e-1}


@pytest.fixture(scope="module")
def reference():
    return engines.open("reference:tiny")


@pytest.fixture(scope="module", params=["float32-eager", "float32-sdpa", "bfloat16-eager", "bfloat16-sdpa"])
def theirs(request):
    dtype, attention = request.param.split("-")
    with engines.open(f"transformers:tiny?dtype={dtype}&attn_implementation={attention}") as engine:
        yield engine


@pytest.fixture(scope="module")
def exact():
    return engines.open("transformers:tiny?dtype=float32&attn_implementation=eager")


def rms(values):
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


# What transformers gives


def test_transformers_scores_as_the_reference_does_within_its_rounding(reference, theirs):
    ours, found = reference.score(PROMPT, 20), theirs.score(PROMPT, 20)
    assert rms(found.dense - ours.dense) < CLOSE[theirs.config()["dtype"]]
    assert len(found.rows) == len(PROMPT) and found.ids == PROMPT
    assert [row.chosen for row in found.rows] == [*PROMPT[1:], None]


def test_transformers_decodes_what_it_scores(theirs):
    """State and window handed from the prompt to single steps: rows of both ways differ by rounding alone."""
    done = theirs.generate(PROMPT, 8, ALL, {"ignore_eos": True})
    again = theirs.score(PROMPT + done.output_ids, ALL)
    both = [(row, again.rows[len(PROMPT) - 1 + t]) for t, row in enumerate(done.rows)]
    gaps = [a.logprobs[np.argsort(a.ids)] - b.logprobs[np.argsort(b.ids)] for a, b in both]
    assert len(both) == 8 and rms(gaps) < CLOSE[theirs.config()["dtype"]]


def test_transformers_in_float32_writes_the_reference_text(reference, exact):
    ours, found = (engine.generate(engine.render(MESSAGES).ids, 60, 2) for engine in (reference, exact))
    assert found.finish == ours.finish == "stop"
    assert found.output_ids == ours.output_ids and found.stop_id == ours.stop_id == ours.output_ids[-1]


def test_transformers_tokenizes_and_renders_as_the_reference_does(reference, exact):
    text = "naïve ภาษาไทย 🦀 <|im_end|> x = [1, 2]"
    assert exact.tokenize(text) == reference.tokenize(text)
    for options in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}):
        assert exact.render(MESSAGES, **options) == reference.render(MESSAGES, **options)


def test_transformers_says_which_code_it_runs(theirs):
    found = theirs.config()
    assert found["version"] and found["flags"]["delta_rule"].split()[0] in ("torch", "flash-linear-attention")
    assert found["flags"]["attn_implementation"] in theirs.name and found["dtype"] in theirs.name
    assert found["model"] == engines.open("reference:tiny").config()["model"]


def test_transformers_writes_nothing_on_the_terminal():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from qwenref import engines\n"
        "e = engines.open('transformers:tiny'); e.generate([1, 2, 3], 2, 2); e.activations([1, 2], ['lm_head'])"
    )
    done = python(code)
    assert done.stdout == done.stderr == ""


# Activations


def test_every_activation_of_transformers_is_the_reference_s(reference, exact):
    """All that a hook can see, by name and shape, for both kinds of layers."""
    found = exact.activations(PROMPT, ["model.language_model.*", "lm_head"])
    ours = reference.activations(PROMPT, list(found))
    assert set(found) == set(ours)
    for name, value in found.items():
        assert value.dtype == np.float32 and value.shape == ours[name].shape, name
        assert rms(value - ours[name]) < 1e-4 * rms(ours[name]), name
    kinds = {re.sub(r"layers\.\d+\.", "", name) for name in found}
    assert len(kinds) > 30 and {"self_attn.gate", "linear_attn.read", "mlp.hidden", "resid_mid"} < {
        kind.removeprefix("model.language_model.") for kind in kinds
    }


def test_activations_answer_to_the_names_they_were_asked_by(exact):
    long, short = "model.language_model.layers.3.resid_post", "layers.3.resid_post"
    assert list(exact.activations(PROMPT[:3], [long])) == [long]
    assert list(exact.activations(PROMPT[:3], [short, "lm_head"])) == [short, "lm_head"]
    with pytest.raises(CapabilityMissing, match="hooks on modules do not see them"):
        exact.activations(PROMPT[:3], ["layers.0.linear_attn.delta_read"])


def test_the_hook_script_runs_without_this_package_and_writes_its_names(tmp_path, exact):
    """As somebody copies it: beside a script, where qwenref cannot be imported."""
    source = Path(dump_activations.__file__).read_text(encoding="utf-8")
    (tmp_path / "dump_activations.py").write_text(source, encoding="utf-8")
    code = (
        "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, ''); sys.modules['qwenref'] = None\n"
        "import torch, transformers\n"
        "from dump_activations import Recorder\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)\n"
        "with Recorder(model, 'layers.*.resid_post', 'norm') as recorder, torch.inference_mode():\n"
        "    model(torch.tensor([[5, 6, 7, 8]]))\n"
        "recorder.save('a.npz'); recorder.save('a.safetensors')\n"
    )
    python(code, tmp_path, exact.folder)
    from safetensors.numpy import load_file

    found, again = dict(np.load(tmp_path / "a.npz")), load_file(tmp_path / "a.safetensors")
    assert set(found) == set(again) == {"norm", *(f"layers.{i}.resid_post" for i in range(8))}
    assert all(np.array_equal(found[name], again[name]) for name in found)
    ours = exact.activations([5, 6, 7, 8], ["layers.6.resid_post"])["layers.6.resid_post"]
    assert rms(found["layers.6.resid_post"] - ours) < 1e-5 * rms(ours)


def test_a_recorder_sees_nothing_behind_its_end_and_joins_calls(exact):
    recorder = dump_activations.Recorder(exact.model, "layers.0.resid_post")
    with recorder, torch.inference_mode():
        exact.model(torch.tensor([[1, 2, 3]]), use_cache=False)
        exact.model(torch.tensor([[4]]), use_cache=False)
    exact.feed([5])
    assert recorder.values["layers.0.resid_post"].shape[:2] == (1, 4)
    with pytest.raises(ValueError, match="one prompt at a time"), recorder, torch.inference_mode():
        exact.model(torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match="no module named layers.0"):
        dump_activations.Recorder(torch.nn.Linear(2, 2), config=exact.model.config)


# What all of them share


def test_the_reference_scores_as_its_model_does(reference):
    logits = reference.model(np.array([PROMPT])).logits[0]
    found = reference.score(PROMPT, 5)
    assert np.array_equal(found.dense, logits)
    assert all(row.ids[0] == values.argmax() for row, values in zip(found.rows, logits, strict=True))
    assert reference.score(PROMPT, ALL).rows[4].ids.shape == (1280,)


def test_the_reference_generates_as_its_model_does(reference):
    done = reference.generate(PROMPT, 30, 2)
    assert done.output_ids == reference.model.generate(PROMPT, max_new_tokens=30).new_ids
    request = {"temperature": 0.7, "top_k": 20, "seed": 5}
    sampler = qwenref.Sampler(temperature=0.7, top_k=20, mask=())
    drawn = reference.model.generate(PROMPT, max_new_tokens=30, sampler=sampler, seed=5).new_ids
    assert reference.generate(PROMPT, 30, 2, request).output_ids == drawn != done.output_ids


def test_a_stop_id_ends_a_text_unless_it_is_to_be_ignored(reference):
    prompt = reference.render(MESSAGES).ids
    ended, longer = (reference.generate(prompt, 60, 0, {"ignore_eos": flag}) for flag in (False, True))
    assert ended.finish == "stop" and longer.finish == "length" and len(longer.output_ids) == 60
    assert longer.output_ids[: len(ended.output_ids)] == ended.output_ids


def test_a_profile_is_an_engine_of_its_own():
    found = {name: engines.open("reference:tiny", numerics=name) for name in ("fp32", "fp64", "hf", "fp32+state=bf16")}
    dense = {name: engine.score(PROMPT, 2).dense for name, engine in found.items()}
    assert 0 < rms(dense["fp32"] - dense["fp64"]) < 1e-5 < rms(dense["hf"] - dense["fp64"]) < 1e-1
    assert dense["fp64"].dtype == np.float64 and found["hf"].name == "reference hf"
    assert found["fp32+state=bf16"].config()["state_dtype"] != found["fp32"].config()["state_dtype"] == "float32"


@pytest.mark.parametrize("prompt", [[], [1.0], [True], [-1], [1280], [1] * 5000, "", 7, {1, 2}])
def test_what_are_no_ids_is_refused_before_anything_runs(reference, prompt):
    for call in (reference.generate, reference.score):
        with pytest.raises((BadTokenIds, InputError)):
            call(prompt, 1, *([1] if call == reference.generate else []))


def test_a_request_that_no_sampler_knows_is_refused(reference):
    with pytest.raises(InputError, match="'top_q'"):
        reference.generate([1], 1, 1, {"top_q": 1})


@pytest.mark.parametrize("module, spec", [("torch", "transformers:tiny"), ("transformers", "transformers:tiny")])
def test_an_engine_whose_package_is_missing_says_how_to_install_it(monkeypatch, module, spec):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CapabilityMissing, match=f"needs the package {module}(.|\n)*do +pip install"):
        engines.open(spec)
