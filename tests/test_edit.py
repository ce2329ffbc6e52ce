"""Edit: what a function or an array puts in the place of a value, in both phases, and what is refused."""

import numpy as np
import pytest
from cache_arrays import cache_bits, run
from text_configs import CONFIGS

import qwenref
from qwenref.sites import chain

T = 8


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=2)


IDS = np.random.default_rng(4).integers(0, 211, (2, T))


def logits(model, lengths=(T,)):
    return run(model, IDS, lengths, qwenref.Cache(model, batch=2))


def writable(model):
    """Names of everything that can be edited."""
    return [name for name, site in model.sites().items() if site.site not in getattr(site.module, "READ_ONLY", ())]


# What an edit does


def test_the_same_value_changes_no_bit_and_another_one_shows(model):
    plain = logits(model)
    for name in writable(model):
        with qwenref.edit(model, {name: lambda x: x.copy()}):
            assert logits(model).tobytes() == plain.tobytes(), name
        with qwenref.edit(model, {name: lambda x: np.where(np.isfinite(x), x * 1.5 + 0.5, x)}):
            changed = logits(model).tobytes() != plain.tobytes()
        last = name.rpartition(".")[2]
        # `state` is what the next call starts from.
        assert changed == (last != "state"), name
    assert logits(model).tobytes() == plain.tobytes() and chain() is None


def test_edits_hold_in_prefill_and_decode_alike(model):
    """An edit token by token gives the same bits however the prompt is split."""
    edits = {"**.beta": lambda x: x * 0.5, "layers.1.self_attn.k_rot": lambda x: x + 1, "layers.2.mlp": lambda x: x * 0}
    with qwenref.edit(model, edits):
        whole = logits(model)
        for lengths in ((5, 1, 1, 1), (1,) * T, (3, 5)):
            assert logits(model, lengths).tobytes() == whole.tobytes()
    assert whole.tobytes() != logits(model).tobytes()


def test_writing_in_place_is_the_same_as_returning(model):
    def in_place(x):
        x *= 2

    plain, beta = logits(model), "layers.0.linear_attn.beta"
    for name in (beta, "layers.0.linear_attn.state@3", "layers.1.self_attn.scores", "layers.2.mlp"):
        with qwenref.edit(model, {name: in_place}):
            written = logits(model)
        with qwenref.edit(model, {name: lambda x: x * 2}):
            returned = logits(model)
        assert written.tobytes() == returned.tobytes() != plain.tobytes(), name


def test_an_array_is_put_in_place_or_broadcast(model):
    value = np.random.default_rng(0).standard_normal((2, T, 64)).astype(np.float32)
    with qwenref.capture(model, "layers.1") as c, qwenref.edit(model, {"layers.0": value}):
        logits(model)
    with qwenref.edit(model, {"layers.0": value}), qwenref.capture(model, "layers.0", "layers.1") as d:
        logits(model)
    assert d["layers.0"].tobytes() == value.tobytes() and c["layers.1"].tobytes() == d["layers.1"].tobytes()
    with qwenref.edit(model, {"layers.0": value[:, :1, :].astype(np.float64)}), qwenref.capture(model, "layers.0") as e:
        logits(model)
    assert (
        np.array_equal(e["layers.0"], np.broadcast_to(value[:, :1], value.shape)) and e["layers.0"].dtype == np.float32
    )
    with qwenref.edit(model, {"layers.0.mlp": 0}), qwenref.capture(model, "layers.0.mlp") as f:
        logits(model)
    assert not f["layers.0.mlp"].any()


def test_what_was_given_is_never_written_to_and_no_cache_holds_it(model):
    """Whoever comes later writes in place: into a copy."""
    state = np.random.default_rng(0).standard_normal((2, 6, 16, 16)).astype(np.float32)
    given, kept = state.copy(), state.copy()

    def double(x):
        x *= 2

    cache = qwenref.Cache(model, batch=2)
    with qwenref.edit(model, {"layers.0.linear_attn.state": state}), qwenref.edit(model, {"**.state": double}):
        model(IDS, cache=cache)
    assert np.array_equal(state, given) and np.array_equal(cache.layers[0].recurrent_state, 2 * given)
    with qwenref.edit(model, {"layers.0.linear_attn.state": lambda x: kept}):
        model(IDS, cache=cache)
    kept += 1
    assert np.array_equal(cache.layers[0].recurrent_state, given)


def test_several_edits_of_one_name_apply_in_order(model):
    edits = {"layers.0.mlp": lambda x: x + 1, "layers.*.mlp": lambda x: x * 2}
    with qwenref.capture(model, "**.mlp") as before, qwenref.edit(model, edits), qwenref.capture(model, "**.mlp") as c:
        logits(model)
    assert np.array_equal(c["layers.0.mlp"], (before["layers.0.mlp"] + 1) * 2)
    assert np.array_equal(c["layers.1.mlp"], before["layers.1.mlp"] * 2)


# Meanings one can check by hand


def test_attention_weights_are_what_is_mixed(model):
    """All weight on the first key: the context is its value, for every query."""
    with (
        qwenref.edit(model, {"layers.1.self_attn.attn_weights": lambda p: np.eye(1, p.shape[-1]) + 0 * p}),
        qwenref.capture(model, "layers.1.self_attn.*") as c,
    ):
        logits(model)
    first = np.repeat(c["layers.1.self_attn.v"][:, :1], 4, axis=2)  # GQA: 4 queries share the one value head
    assert np.array_equal(c["layers.1.self_attn.context"], np.broadcast_to(first, (2, T, 4, 32)))


def test_a_dead_layer_leaves_the_residual_alone(model):
    with (
        qwenref.edit(model, {"layers.2.mlp": 0, "layers.2.linear_attn": 0}),
        qwenref.capture(model, "layers.2*.**") as c,
    ):
        logits(model)
    assert c["layers.2.resid_pre"].tobytes() == c["layers.2.resid_post"].tobytes()


def test_a_state_put_to_zero_forgets_what_came_before(model):
    """Zero states and a window of a fresh start: the mixer reads as if the prompt began there."""
    mixer = model.model.layers[0].linear_attn
    hidden = np.asarray(model.model.embed_tokens(IDS))
    with qwenref.edit(mixer, {"state@4": 0}), qwenref.capture(mixer, "q", "k", "v", "g", "beta", "read") as c:
        mixer(hidden)
    rest = [np.ascontiguousarray(c[name][:, 5:]) for name in ("q", "k", "v", "g", "beta")]
    read = qwenref.ops.gated_delta_rule(*rest, scale=mixer.scaling)
    assert read.tobytes() == np.ascontiguousarray(c["read"][:, 5:]).tobytes()


def test_the_state_after_the_last_token_is_what_the_cache_keeps(model):
    for name in ("layers.0.linear_attn.state", f"layers.0.linear_attn.state@{T - 1}"):
        cache = qwenref.Cache(model, batch=2)
        with qwenref.edit(model, {name: 3}):
            edited = model(IDS, cache=cache).logits
        assert (cache.layers[0].recurrent_state == 3).all()
        assert edited.tobytes() == logits(model).tobytes()


def test_modules_that_return_several_values_are_edited_in_the_first(model):
    plain = logits(model)
    with qwenref.edit(model, {"layers.1.self_attn": 0}), qwenref.capture(model, "layers.1.resid_*") as c:
        model(IDS, output_attentions=True)
    assert c["layers.1.resid_pre"].tobytes() == c["layers.1.resid_mid"].tobytes()
    for name in ("rotary_emb", "layers.0.linear_attn.conv1d", "model"):
        with qwenref.edit(model, {name: lambda x: x * 0}):
            assert logits(model).tobytes() != plain.tobytes()
    with qwenref.edit(model, {"model": 0}):
        out = model(IDS, output_hidden_states=True)
    assert not out.logits.any() and out.hidden_states[-1].any()


def test_a_run_is_patched_with_values_of_another(model):
    with qwenref.capture(model, "layers.1.resid_mid") as source:
        model(IDS[:1])

    def patch(x):
        x[:, 2] = source["layers.1.resid_mid"][:, 2]

    with qwenref.edit(model, {"layers.1.resid_mid": patch}), qwenref.capture(model, "layers.1.resid_mid") as c:
        model(IDS[1:])
    assert np.array_equal(c["layers.1.resid_mid"][:, 2], source["layers.1.resid_mid"][:, 2])


def test_edits_of_a_thread_are_invisible_to_another(model):
    import threading

    plain, found = logits(model), {}
    with qwenref.edit(model, {"lm_head": 0}):
        thread = threading.Thread(target=lambda: found.update(other=logits(model)))
        thread.start()
        thread.join()
        assert not logits(model).any()
    assert found["other"].tobytes() == plain.tobytes()


# What is refused


def returning(value):
    return lambda x: value


def write(x):
    x[...] = 0


class Boom(Exception):
    pass


BAD = {
    "nothing": ({}, qwenref.InputError, "edit: nothing to edit"),
    "no such name": (
        {"layers.0.self_attn": 0},
        qwenref.UnknownName,
        "'layers.0.self_attn' matches nothing. Near: layers.*.self_attn (2 names)",
    ),
    "by-product": (
        {"layers.0.linear_attn.delta_write": 0},
        qwenref.InputError,
        "edit: model.layers.0.linear_attn.delta_write can be read, not changed",
    ),
    "shape": (
        {"layers.0.linear_attn.beta": returning(np.zeros((2, 3)))},
        qwenref.HookError,
        "model.layers.0.linear_attn.beta: returning.<locals>.<lambda> ({file}, line {line}) has the wrong shape",
    ),
    "number for an array": (
        {"layers.0.mlp": returning(0.0)},
        qwenref.HookError,
        "model.layers.0.mlp: returning.<locals>.<lambda> ({file}, line {line}) has the wrong shape",
    ),
    "no array": ({"layers.0.mlp": None}, qwenref.InputError, "edit: 'layers.0.mlp': a NoneType"),
    "no array of numbers": ({"lm_head": [[1, 2], [3]]}, qwenref.InputError, "edit: 'lm_head': a list"),
    "names alone": (["lm_head"], qwenref.InputError, "edit: a list"),
    "output and weights": (
        {"layers.1.self_attn": returning((np.zeros((2, T, 64)), None))},
        qwenref.HookError,
        "model.layers.1.self_attn: returning.<locals>.<lambda> ({file}, line {line}) returned a tuple",
    ),
    "array": (
        {"lm_head": np.zeros((2, 3, 7))},
        qwenref.HookError,
        "lm_head: the given array has the wrong shape",
    ),
    "state": (
        {"layers.0.linear_attn.state@2": np.zeros((5, 16, 16))},
        qwenref.HookError,
        "model.layers.0.linear_attn.state@2: the given array has the wrong shape",
    ),
    "dtype": (
        {"lm_head": returning(np.zeros((2, T, 211), complex))},
        qwenref.HookError,
        "lm_head: returning.<locals>.<lambda> ({file}, line {line}) holds complex128",
    ),
    "words": (
        {"lm_head": returning(np.full((2, T, 211), "zero"))},
        qwenref.HookError,
        "lm_head: returning.<locals>.<lambda> ({file}, line {line}) holds <U4",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_input(model, row):
    edits, error, first = BAD[row]
    cache = qwenref.Cache(model, batch=2)
    before = cache_bits(cache)
    with pytest.raises(error) as caught, qwenref.edit(model, edits):
        model(IDS, cache=cache)
    code = returning(0).__code__
    assert str(caught.value).split("\n")[0] == first.format(file=code.co_filename, line=code.co_firstlineno)
    assert cache_bits(cache) == before and chain() is None


def test_a_wrong_shape_says_what_was_found_and_expected(model):
    with (
        pytest.raises(qwenref.HookError) as caught,
        qwenref.edit(model, {"layers.0.linear_attn.beta": np.zeros((2, 5))}),
    ):
        model(IDS)
    assert str(caught.value).split("\n")[1:] == [
        "    found    float64 [2, 5]",
        "    expected float32 [B 2, T 8, V-head 6]",
    ]


def test_a_value_that_cannot_be_written_is_named(model):
    hidden = np.asarray(model.model.embed_tokens(IDS)).copy()
    hidden.flags.writeable = False
    with (
        pytest.raises(
            qwenref.HookError, match="^model.layers.0.resid_pre: edited in place, but it cannot be written\n"
        ),
        qwenref.edit(model, {"layers.0.resid_pre": write}),
    ):
        model(inputs_embeds=hidden)
    with qwenref.edit(model, {"layers.0.resid_pre": lambda x: x + 1}):
        returned = model(inputs_embeds=hidden).logits
    assert returned.tobytes() == model(inputs_embeds=hidden + 1).logits.tobytes()


def test_errors_of_the_function_itself_come_through(model):
    def fails(x):
        raise Boom("mine")

    with pytest.raises(Boom, match="^mine"), qwenref.edit(model, {"lm_head": fails}):
        model(IDS)
    with pytest.raises(ValueError, match="^invalid literal"), qwenref.edit(model, {"lm_head": lambda x: int("x")}):
        model(IDS)
    assert chain() is None
