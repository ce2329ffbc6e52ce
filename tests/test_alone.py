"""Layers called alone, and numerics chosen for a while."""

import threading

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS

import qwenref
from qwenref.errors import InputError

CONFIG = CONFIGS["values 2 x keys, GQA 2"]
T = 11


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=31)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(0, CONFIG["vocab_size"], (2, 3 * T))


def watch(model, names, call):
    """{name: (hidden states given, output)} of modules during a call."""
    seen, handles = {}, []
    for name in names:

        def look(module, args, kwargs, output, name=name):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            seen[name] = hidden.copy(), output

        handles.append(model.get_submodule(name).register_forward_hook(look, with_kwargs=True))
    call()
    for handle in handles:
        handle.remove()
    return seen


PARTS = [f"model.layers.{i}" for i in range(4)]
PARTS += ["model.layers.0.linear_attn", "model.layers.2.linear_attn", "model.layers.3.self_attn"]
PARTS += ["model.layers.0.mlp", "model.layers.3.input_layernorm", "model.norm", "lm_head"]


def bits(output):
    return [a.tobytes() for a in (output if isinstance(output, tuple) else (output,)) if a is not None]


@pytest.mark.parametrize("profile", ["fp32", "fp64"])
def test_a_part_alone_gives_its_slice_of_a_full_run(model, ids, profile):
    with qwenref.numerics(profile):
        seen = watch(model, PARTS, lambda: model(ids[:, :T], output_attentions=True))
        for name, (hidden, output) in seen.items():
            assert bits(model.get_submodule(name)(hidden)) == bits(output), name


def test_a_part_alone_reads_a_cache_and_changes_nothing(model, ids):
    cache = qwenref.Cache(model, batch=2)
    mask = np.array([[1] * T, [1] * 3 + [0] * (T - 3)])  # a short row has slots that a careless part would fill
    model(ids[:, :T], attention_mask=mask, cache=cache)
    before, saved = cache_bits(cache), cache.snapshot()
    mixing = PARTS[:7]
    seen = watch(model, mixing, lambda: model(ids[:, T:], cache=cache, output_attentions=True))
    cache.restore(saved)
    for name, (hidden, output) in seen.items():
        for _ in range(2):
            assert bits(model.get_submodule(name)(hidden, cache=cache)) == bits(output), name
            assert cache_bits(cache) == before, name
        assert bits(model.get_submodule(name)(hidden)) != bits(output), name
    assert cache.step is None


def test_a_part_alone_takes_a_mask_and_positions(model, ids):
    layer, attention = model.model.layers[0].linear_attn, model.model.layers[3].self_attn
    x = model.model.embed_tokens(ids[:, :T])
    mask = np.array([[0, 0] + [1] * (T - 2)] * 2)
    assert layer(x, attention_mask=mask)[:, 2:].tobytes() == layer(x[:, 2:]).tobytes()
    assert attention(x, attention_mask=mask)[0][:, 2:].tobytes() == attention(x[:, 2:])[0].tobytes()
    own = np.arange(T)[None]
    assert attention(x, position_ids=own)[0].tobytes() == attention(x)[0].tobytes()
    assert attention(x, position_ids=2 * own)[0].tobytes() != attention(x)[0].tobytes()


def test_a_part_alone_leaves_an_empty_cache_of_another_dtype(model, ids):
    cache = qwenref.Cache(model, batch=2)
    before = cache_bits(cache)
    with qwenref.numerics("fp64"):
        x = model.model.embed_tokens(ids[:, :T])
        assert model.model.layers[0].linear_attn(x, cache=cache).dtype == np.float64
    assert cache_bits(cache) == before and cache.dtype == np.float32


def test_rotary_positions_without_axes_stand_for_all_three(model):
    """As transformers' module takes them; three rows of a batch are not mistaken for time, height and width."""
    rotary, positions = model.model.rotary_emb, np.array([[0, 1, 2, 9], [5, 6, 7, 8], [3, 3, 4, 4]])
    x = np.zeros((3, 4, 64), np.float32)
    for part, whole in zip(rotary(x, positions), rotary(x, np.stack([positions] * 3)), strict=True):
        assert part.shape[:2] == (3, 4) and part.tobytes() == whole.tobytes()


def test_the_backbone_alone(model, ids):
    out = model.model(ids[:, :T], output_hidden_states=True)
    whole = model(ids[:, :T], output_hidden_states=True)
    assert model.lm_head(out.last_hidden_state).tobytes() == whole.logits.tobytes()
    embedded = model(inputs_embeds=model.model.embed_tokens(ids[:, :T]))
    assert embedded.logits.tobytes() == whole.logits.tobytes()
    cache = qwenref.Cache(model, batch=2)
    parts = [model.model(ids[:, s], cache=cache).last_hidden_state for s in (slice(4), slice(4, T))]
    assert np.concatenate(parts, 1).tobytes() == out.last_hidden_state.tobytes()
    assert cache.length.tolist() == [T, T]


# ---------------------------------------------------------------------------------------------- numerics


def dtype_of(model, ids):
    return str(model(ids[:, :2]).logits.dtype)


def test_fp64_is_float64_everywhere(model, ids):
    with qwenref.numerics("fp64"):
        out = model(ids[:, :T], output_hidden_states=True, output_attentions=True, use_cache=True)
        embedded = model(inputs_embeds=out.hidden_states[0].astype(np.float32), output_hidden_states=True)
    arrays = [out.logits, *out.hidden_states, *out.residuals, *out.attentions, *embedded.hidden_states]
    arrays += [array for layer in out.cache.layers for array in layer.arrays().values()]
    assert {str(array.dtype) for array in arrays} == {"float64"}
    exact = np.array_equal(out.hidden_states[0].astype(np.float32), out.hidden_states[0])
    assert exact and embedded.logits.tobytes() == out.logits.tobytes()


def test_profiles_nest_and_end(model, ids):
    outer = qwenref.numerics("fp64")
    assert dtype_of(model, ids) == "float32"
    with outer:
        assert dtype_of(model, ids) == "float64"
        with qwenref.numerics("fp32"):
            assert dtype_of(model, ids) == "float32"
            with outer:  # the same object may be open twice
                assert dtype_of(model, ids) == "float64"
            assert dtype_of(model, ids) == "float32"
        assert dtype_of(model, ids) == "float64"
        with pytest.raises(InputError), qwenref.numerics("fp32"):
            model([-1])
        assert dtype_of(model, ids) == "float64"
    assert dtype_of(model, ids) == "float32" and qwenref._C.numerics_var.get() is None


def test_a_models_own_profile_yields_to_an_explicit_one(ids):
    arbiter = qwenref.from_config(CONFIG, seed=31, numerics="fp64")
    assert arbiter.numerics == "fp64" and dtype_of(arbiter, ids) == "float64"
    with qwenref.numerics("fp32"):
        assert dtype_of(arbiter, ids) == "float32"
    arbiter.numerics = "fp32"
    assert dtype_of(arbiter, ids) == "float32"
    arbiter.numerics = "fp64"
    with pytest.raises(InputError):
        arbiter.numerics = "fp16"
    assert arbiter.numerics == "fp64"
    for fail in (lambda: arbiter([-1]), lambda: arbiter(ids[:, :3], logits_to_keep=-1)):
        with pytest.raises(InputError):
            fail()
        assert qwenref._C.numerics_var.get() is None
    with arbiter.lm_head.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        arbiter(ids[:, :3])
    assert qwenref._C.numerics_var.get() is None and dtype_of(arbiter, ids) == "float64"


def test_a_profile_holds_in_its_thread_only(model, ids):
    shared, found = qwenref.numerics("fp64"), []
    inside, seen = threading.Event(), threading.Event()

    def work():
        found.append(dtype_of(model, ids))
        with shared:  # opened here while open in the other thread, closed after it
            inside.set()
            assert seen.wait(20)
            found.append(dtype_of(model, ids))
        found.append(dtype_of(model, ids))

    thread = threading.Thread(target=work)
    with shared:
        thread.start()
        assert inside.wait(20)
        assert dtype_of(model, ids) == "float64"
    seen.set()
    thread.join()
    assert found == ["float32", "float64", "float32"] and dtype_of(model, ids) == "float32"


def test_every_profile_says_what_it_is():
    assert qwenref.numerics.profiles()[:1] == ("fp32",) and "fp64" in qwenref.numerics.profiles()
    for name in qwenref.numerics.profiles():
        assert qwenref.numerics.describe(name)
