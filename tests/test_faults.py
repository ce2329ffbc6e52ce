"""Planted faults: each changes what it says and nothing else, and the given model never."""

import numpy as np
import pytest
from text_configs import CONFIGS, text_config

import qwenref
from qwenref.compare.faults import KINDS, LIBRARY, MODEL_KINDS, find, hypotheses, places
from qwenref.errors import InputError, UnknownName

PROMPT, NEW = 100, 5
IDS = np.random.default_rng(3).integers(0, 200, PROMPT + NEW)
IN_MODEL = [name for name, fault in LIBRARY.items() if fault.kind in MODEL_KINDS]
# Config of a model that has what most faults change: shared keys, square matrices, an untied head.
MODEL = text_config("llff", heads=(4, 2), delta=(2, 4), head_dim=32, hidden_size=64, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(MODEL, seed=5, dtype="float32")


def model_of(fault, model):
    """The shared model, or another that has what the fault changes."""
    if placed(fault, model).fits(model):
        return model
    rope = MODEL["rope_parameters"] | {"rope_theta": 1e6}
    return qwenref.from_config(MODEL | {"tie_word_embeddings": True, "rope_parameters": rope}, seed=5, dtype="float32")


def placed(fault, model):
    return places(fault, model)[0]


def logits(model, ids=IDS, prompt=PROMPT, numerics="fp64"):
    """(of the prompt, of tokens one by one behind it)."""
    with qwenref.numerics(numerics):
        cache = qwenref.Cache(model)
        first = model(ids[None, :prompt], cache=cache).logits[0]
        return first, np.concatenate([model([[id]], cache=cache).logits[0] for id in ids[prompt:].tolist()])


@pytest.fixture(scope="module")
def sound(model):
    return logits(model)


@pytest.mark.parametrize("name", IN_MODEL)
def test_a_fault_shows_in_the_calls_it_is_about_and_in_no_other(name, model, sound):
    own = model_of(LIBRARY[name], model)
    fault = placed(LIBRARY[name], own)
    expected = sound if own is model else logits(own)
    found = [np.abs(a - b).max() for a, b in zip(logits(fault.open(own)), expected, strict=True)]
    if fault.equivalent or name in ("window-128", "window-4096"):  # longer than these texts
        assert max(found) < 1e-10
    elif name == "l2norm-max":  # no vector here is shorter than eps
        assert 0 < max(found) < 1e-3
    else:
        assert found[0] == 0 if fault.on == "decode" or name.startswith("state-b") or name == "state-fp16" else found[0]
        assert found[1] > 1e-10


def test_the_given_model_keeps_its_weights_its_hooks_and_its_bits(model, sound):
    before = {name: (id(p), p.tobytes()) for name, p in model.named_parameters()}
    for name in IN_MODEL:
        if placed(LIBRARY[name], model).fits(model):
            logits(placed(LIBRARY[name], model).open(model), IDS[:3], 2)
    assert {name: (id(p), p.tobytes()) for name, p in model.named_parameters()} == before
    assert all(np.array_equal(a, b) for a, b in zip(logits(model), sound, strict=True))


def test_a_fault_of_ops_copies_no_weight(model):
    shared = {id(parameter) for parameter in model.parameters()}
    for name in ("gate-off", "int4-g32", "state-bf16", "rope-theta-1e4", "head-tied", "layers-swapped@0,1"):
        assert {id(parameter) for parameter in find(name).open(model).parameters()} <= shared, name
    changed = {id(parameter) for parameter in find("transposed@0").open(model).parameters()} - shared
    assert len(changed) == 1


def test_faults_add_up_and_opening_a_faulty_model_keeps_what_it_has(model):
    both = find("gate-off").open(find("norm-w").open(model))
    other = find("norm-w").open(find("gate-off").open(model))
    assert np.array_equal(logits(both)[0], logits(other)[0])
    assert not np.array_equal(logits(both)[0], logits(find("gate-off").open(model))[0])
    again = find("rope-qk+1").open(find("head-tied").open(model))
    assert again.lm_head.weight is model.model.embed_tokens.weight


def test_names_are_unique_and_find_finds_what_it_names(model):
    assert all(fault.name == name and fault.kind in KINDS and fault.what for name, fault in LIBRARY.items())
    assert len({fault.what for fault in LIBRARY.values()}) == len(LIBRARY)
    for fault in hypotheses(model):
        assert find(fault.name) == fault
    assert find("int4-g32@1/prefill").on == "prefill" and find("gate-off/decode").name == "gate-off/decode"
    whole = ("layers-swapped@0,1/decode", "state-stale-64@1", "head-tied/prefill", "bos-added@1", "bos-added/decode")
    for name in ("gate-of", "gate-off/later", "gate-off@x", "gate-off@", *whole):
        with pytest.raises(UnknownName):
            find(name)


def test_a_fault_confined_to_decode_leaves_the_prompt_alone(model, sound):
    first, behind = logits(find("gate-off/decode").open(model))
    assert np.array_equal(first, sound[0]) and not np.array_equal(behind, sound[1])
    first, behind = logits(find("gate-off/prefill").open(model))
    whole = logits(find("gate-off").open(model))
    assert np.array_equal(first, whole[0]) and not np.array_equal(behind, whole[1])


def test_hypotheses_are_those_a_config_can_have():
    def names(config):
        return {fault.name for fault in hypotheses(qwenref.from_config(config, seed=1))}

    delta, attention = names(CONFIGS["only DeltaNet"]), names(CONFIGS["one attention layer"])
    assert not {"gate-off", "rope-q+1", "kv-fp8", "gqa-tile", "mask-sees-next"} & delta
    assert not {"beta-raw", "state-bf16", "conv-reversed", "delta-as-fla"} & attention
    assert "gqa-tile" in attention and "gqa-tile" not in names(CONFIGS["values 1 x keys, GQA 1"])
    assert "delta-tile" in delta and "delta-tile" not in names(CONFIGS["values 1 x keys, GQA 1"])
    tied = names(CONFIGS["tied embedding"])
    assert "head-untied" in tied and "head-tied" not in tied
    assert {"layers-swapped@0,1", "layers-swapped@1,2"} <= tied and "layers-swapped@2,3" not in tied
    assert not {"rope-qk+1", "rope-sections", "logits-bf16"} & tied


def test_a_fault_a_model_cannot_have_says_so():
    model = qwenref.from_config(CONFIGS["only DeltaNet"], seed=1)
    with pytest.raises(InputError, match="gate-off"):
        find("gate-off").open(model)
    with pytest.raises(InputError, match="layers-swapped"):
        find("layers-swapped@0,9").open(model)
    with pytest.raises(InputError, match="kind"):
        find("gate-off").prompt([1], model)


def test_a_fault_of_one_layer_leaves_the_others_alone(model):
    at = ["layers.2.self_attn.gated", "layers.3.self_attn.gated"]

    def gated(model):
        with qwenref.capture(model, *at, "layers.2.self_attn.context", "layers.3.self_attn.context") as values:
            model([IDS])
        return [np.array_equal(values[name], values[name.replace("gated", "context")]) for name in at]

    assert gated(model) == [False, False] and gated(find("gate-off").open(model)) == [True, True]
    assert gated(find("gate-off@3").open(model)) == [False, True]
    with pytest.raises(InputError):
        find("gate-off@4").open(model)
    with pytest.raises(InputError, match="nothing it could change"):
        find("rope-theta-1e4@2").open(model)


@pytest.mark.parametrize("name", IN_MODEL)
def test_decode_in_one_call_is_decode_token_by_token(name, model):
    own = model_of(LIBRARY[name], model)
    faulty = placed(LIBRARY[name], own).open(own)
    _, single = logits(faulty)
    with qwenref.numerics("fp64"):
        cache = qwenref.Cache(faulty)
        faulty(IDS[None, :PROMPT], cache=cache)
        together = faulty(IDS[None, PROMPT:], cache=cache).logits[0]
    np.testing.assert_allclose(together, single, rtol=0, atol=1e-9)


def test_faults_go_with_every_rounding_variant_and_with_padded_batches(model):
    mask = np.ones((2, 80), int)
    mask[0, :7] = 0
    ids = np.where(mask, IDS[None, :80], 0)
    for number, name in enumerate(IN_MODEL):
        if not placed(LIBRARY[name], model).fits(model):
            continue
        faulty = placed(LIBRARY[name], model).open(model)
        with qwenref.numerics.jitter(number):
            cache = qwenref.Cache(faulty, batch=2)
            faulty(ids, attention_mask=mask, cache=cache)
            found = faulty([[5], [6]], cache=cache).logits
            alone = qwenref.Cache(faulty)
            faulty(ids[:1, 7:], cache=alone)
            row = faulty([[5]], cache=alone).logits
        assert np.isfinite(found).all() and found.dtype == np.float32, name
        assert np.array_equal(found[0], row[0]), name


def test_arguments_by_place_and_by_older_names_are_those_of_any_model(model):
    faulty = find("conv-no-history").open(find("state-padded").open(model))
    ids, caches = IDS[None, :9], [qwenref.Cache(model) for _ in range(3)]
    for arguments, options in (
        ((ids, None, None, caches[0]), {}),
        ((ids,), {"cache": caches[1]}),
        ((), {"input_ids": ids, "past_key_values": caches[2]}),
    ):
        faulty(*arguments, **options)
        last = faulty([[3]], cache=options.get("cache") or options.get("past_key_values") or arguments[3]).logits
        assert np.array_equal(last, faulty([[3]], cache=_after(faulty, ids)).logits)
    assert faulty(ids).cache is None and faulty(ids, use_cache=True).cache.length == 9
    with pytest.raises(TypeError, match="pixels"):
        faulty(ids, pixels=1)
    with pytest.raises(InputError, match="two caches"):
        faulty(ids, cache=caches[0], past_key_values=caches[1])


def _after(model, ids):
    cache = qwenref.Cache(model)
    model(ids, cache=cache)
    return cache
