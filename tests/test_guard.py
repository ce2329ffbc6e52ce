"""The guard against NaN: no false alarm, and the birth place of a bad value named wherever it is planted."""

import copy
import gc
import pickle
import re
import sys
import threading
import warnings

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS

import qwenref
from qwenref.errors import NonFiniteError
from qwenref.sites import chain

NAN = float("nan")
CONFIG = CONFIGS["values 3 x keys, GQA 4"]  # l f l f; 4 query heads over 1, 6 value heads over 2
T = 6
IDS = np.random.default_rng(0).integers(0, 211, (2, T))


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=2)


@pytest.fixture(scope="module")
def guarded():
    """A model whose guard is left on."""
    model = qwenref.from_config(CONFIG, seed=2)
    model._kept = qwenref.check_finite(model)
    return model


def caught(model, *args, **options):
    """The error of a guarded call."""
    with pytest.raises(NonFiniteError) as found:
        model(*args, **options)
    return found.value


def planted(index, value=NAN):
    """An edit that puts one bad value into a copy."""

    def change(x):
        x = x.copy()
        x[index] = value
        return x

    return change


def written(index, value=NAN):
    """The same, in place."""

    def change(x):
        x[index] = value

    return change


# No false alarm


@pytest.mark.parametrize("profile", ["fp32", "fp64", "hf"])
@pytest.mark.parametrize("name", CONFIGS, ids=lambda name: name.replace(" ", "-"))
def test_finite_calls_come_through_with_their_bits(name, profile):
    model = qwenref.from_config(CONFIGS[name], seed=3)
    ids = np.random.default_rng(1).integers(0, 211, (3, 7))
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0] * 7])
    packed = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5, 6]])

    def calls():
        cache = qwenref.Cache(model, batch=3)
        yield model(ids, attention_mask=mask, cache=cache, output_attentions=True, output_hidden_states=True).logits
        yield model(ids[:, :1], cache=cache).logits
        yield model(ids[:, :2], cache=cache, logits_to_keep=[]).logits
        yield model(ids, sequence_ids=packed).logits

    with qwenref.numerics(profile):
        plain = [logits.tobytes() for logits in calls()]
        with qwenref.check_finite(model), qwenref.capture(model, "**"):
            watched = [logits.tobytes() for logits in calls()]
    assert watched == plain


def test_large_finite_values_are_finite(guarded):
    """Their squares are not, in float32."""
    large = {
        "layers.0.mlp.up_proj": lambda x: np.full_like(x, 1e30),
        "layers.0.mlp.hidden": lambda x: x * 0,
    }
    with qwenref.edit(guarded, large):
        assert np.isfinite(guarded(IDS).logits).all()


def test_minus_infinity_is_fine_where_it_means_nothing_at_all(guarded):
    """Scores behind the mask are -inf, and so may be the decay of a head that is to forget."""
    forget = {"layers.0.linear_attn.g": lambda x: np.full_like(x, -np.inf)}
    with qwenref.edit(guarded, forget), qwenref.capture(guarded, "**.scores") as c:
        assert np.isfinite(guarded(IDS).logits).all()
    assert np.isneginf(c["layers.1.self_attn.scores"]).any()
    with qwenref.edit(guarded, {**forget, "layers.1.self_attn.context": planted((1, 2, 3, 4))}):
        assert caught(guarded, IDS).site == "context"
    with qwenref.edit(guarded, {**forget, "layers.0.linear_attn.read": planted((1, 2, 3, 4))}):
        assert caught(guarded, IDS).site == "read"


# Weights

WEIGHTS = [name for name, _ in qwenref.from_config(CONFIG, device="meta").named_parameters() if ".layers.2" not in name]


@pytest.mark.parametrize("name", [name for name in WEIGHTS if ".layers.3" not in name])
def test_a_bad_weight_is_named(name):
    model = qwenref.from_config(CONFIG, seed=2)
    weight = model.get_parameter(name)
    index = (int(IDS[0, 2]), 5) if name.endswith("embed_tokens.weight") else (1,) * weight.ndim
    index = (1, 0, 1) if name.endswith("conv1d.weight") else index
    weight[index] = NAN
    with qwenref.check_finite(model):
        error = caught(model, IDS)
    owner, _, leaf = name.rpartition(".")
    assert (error.module, error.site) == (owner, "g" if leaf in ("A_log", "dt_bias") else None)
    assert error.op is not None and error.inputs_finite and error.count > 0 and np.isnan(error.value)
    first = f"1 of {weight.size:,} not finite, first nan at {list(index)}"
    assert f"    do       mend the weight {name}: {first}" in str(error)


# q_proj holds 32 rows of query and 32 of gate per head; in_proj_qkv 2 x 16 rows of q, as many of k, then 6 x 16 of v.
HEADS = {
    "layers.1.self_attn.q_proj": [(0, 0), (63, 0), (64, 1), (255, 3)],
    "layers.1.self_attn.k_proj": [(31, 0)],
    "layers.0.linear_attn.in_proj_qkv": [(0, 0), (16, 1), (32, 0), (63, 1), (64, 0), (159, 5)],
    "layers.0.linear_attn.in_proj_z": [(15, 0), (16, 1), (95, 5)],
    "layers.0.linear_attn.in_proj_b": [(4, 4)],
    "layers.0.linear_attn.in_proj_a": [(5, 5)],
    "layers.0.linear_attn.conv1d": [(40, 0), (50, 1), (100, 2)],
}


@pytest.mark.parametrize(("name", "row", "head"), [(name, *pair) for name, pairs in HEADS.items() for pair in pairs])
def test_the_head_of_a_row_of_a_weight(model, name, row, head):
    weight = model.get_submodule(f"model.{name}").weight
    weight[row] = NAN
    try:
        with qwenref.check_finite(model):
            error = caught(model, IDS)
    finally:
        model.reset()
    assert (error.module, error.head, error.index) == (f"model.{name}", head, (0, 0, row))


# Every place a value can be edited in


def writable():
    """Names in the layers 2 and 3, one of each kind, and outside of the layers; by-products cannot be edited."""
    model = qwenref.from_config(CONFIG, device="meta")
    for name, site in model.sites().items():
        if "layers.0" not in name and "layers.1" not in name and site.site not in ("delta_read", "delta_write"):
            yield name
    yield "model.layers.2.linear_attn.state@3"


def last_of(model, name, T):
    """Index of the last entry of a value in a call of 2 rows and T tokens, and its site."""
    site = qwenref.sites.resolve(model, [name])[name]
    call = {"B": 2, "T": T, "S": 6}
    dims = site.dims[:1] + site.dims[2:] if site.tokens else site.dims
    sizes = {**site.module.sizes, **call}
    return tuple(int(np.prod([sizes[part] for part in label.split("*")])) - 1 for label in dims), site


@pytest.mark.parametrize("change", [planted, written])
@pytest.mark.parametrize("name", list(writable()))
def test_a_bad_value_in_an_edit_is_named_in_prefill_and_decode(guarded, name, change):
    for before, T in ((0, 6), (4, 2), (5, 1)):
        index, site = last_of(guarded, name, T)
        if site.tokens and site.tokens[0] < before:
            continue
        cache = qwenref.Cache(guarded, batch=2)
        if before:
            guarded(IDS[:, :before], cache=cache)
        bits = cache_bits(cache)
        with qwenref.edit(guarded, {name: change(index)}):
            error = caught(guarded, IDS[:, before:], cache=cache)
        assert cache_bits(cache) == bits and cache.step is None and chain() is None
        path = name if site.site is None else name.rpartition(".")[0]
        assert (error.module, error.site) == (path, name.rpartition(".")[2] if site.site else None)
        assert (error.count, error.index) == (1, index) and np.isnan(error.value)
        assert error.op is None and error.inputs_finite
        assert error.layer == (int(name.split(".")[2]) if ".layers." in name else None)
        assert error.row == 1
        if site.site == "state":
            assert error.token == (site.tokens[0] - before if site.tokens else None)
        else:
            assert error.token == T - 1
        heads = [int(site.shape[i]) for i, label in enumerate(site.dims) if re.fullmatch(r"[^*]*-head", label)]
        assert not heads or error.head == heads[0] - 1
        assert error.__notes__ == [f"in module {path} ({type(site.module).__name__})"]
        text = str(error).split("\n")
        assert text[0].startswith(f"{path} ({type(site.module).__name__}): ")
        assert any("column 5 of the cache" in line for line in text) == (before > 0 and error.token is not None)
    # The search has left nothing behind.
    assert np.isfinite(guarded(IDS).logits).all()


def test_what_an_edit_spoils_further_on_is_told_from_the_edit(guarded):
    """Finite edits whose product is not: the op and its site are named, all that went into it being finite."""
    huge = {f"layers.2.mlp.{name}": lambda x: np.full_like(x, 1e30) for name in ("gate", "up")}
    with qwenref.edit(guarded, huge):
        error = caught(guarded, IDS)
    assert str(error) == (
        "model.layers.2.mlp (MLP): site hidden is not finite, all its inputs are\n"
        "    found    inf at [B 0, T 0, I 0], 1,152 of 1,152 values, made by ops.mul\n"
        "    do       see with qwenref.trace(model) how values grow: made from finite ones, it went out of range"
    )
    grows = {"layers.2.linear_attn.beta": lambda x: np.full_like(x, 1e30)}
    with qwenref.edit(guarded, grows):
        error = caught(guarded, IDS)
    assert (error.site, error.op, error.inputs_finite) == ("delta_write", "gated_delta_rule", True)
    assert 0 < error.token < T  # the first writes are large, not infinite


# Hooks


def test_what_a_hook_puts_in_place_is_named(model):
    up = model.model.layers[2].mlp.up_proj
    spoil = planted((1, 2, 3))
    hooks = {
        "output": lambda: up.register_forward_hook(lambda m, args, out: spoil(out)),
        "input 'input'": lambda: up.register_forward_pre_hook(lambda m, args: (spoil(args[0]),)),
    }
    for what, register in hooks.items():
        for first in (True, False):
            handle = register() if first else None
            with qwenref.check_finite(model):
                handle = handle or register()
                error = caught(model, IDS)
                handle.remove()
            assert str(error).startswith(f"model.layers.2.mlp.up_proj (Linear): {what} is not finite")
            assert "look at edits and hooks, no op made it" in str(error)
            assert (error.row, error.token, error.count, error.op) == (1, 2, 1, None)


def test_a_hook_that_does_it_once_is_still_met(guarded):
    def once():
        calls = []
        return lambda m, args, out: None if calls.append(1) or len(calls) > 1 else out * NAN

    with guarded.model.layers[2].mlp.act_fn.register_forward_hook(once()):
        error = caught(guarded, IDS)
    assert error.module == "model.layers.2.mlp.down_proj" and not error.inputs_finite
    assert "look at edits and hooks that count calls: it did not come up when the call was repeated" in str(error)


def test_a_search_that_fails_says_so(guarded):
    calls = []

    def change(x):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("again")
        x[...] = NAN

    with qwenref.edit(guarded, {"layers.1.self_attn.context": change}):
        error = caught(guarded, IDS)
    assert error.module == "model.layers.1.self_attn.o_proj" and not error.inputs_finite
    assert "the search for it ended with KeyError: 'again'" in str(error)


# Inputs and memory


def test_a_bad_input_is_told_from_a_value_that_was_born_here(guarded):
    embeds = np.zeros((2, 3, 64), np.float32)
    embeds[1, 2, 7] = np.inf
    error = caught(guarded.model.layers[1], embeds)
    assert "look at hidden_states, not finite when model.layers.1 was called" in str(error)
    error = caught(guarded, inputs_embeds=embeds)
    assert str(error).split("\n")[0] == (
        "model.layers.0.input_layernorm (RMSNorm): output is not finite, nor are all its inputs"
    )
    assert "look at inputs_embeds, not finite when ForCausalLM was called" in str(error)
    assert (error.row, error.token, error.inputs_finite) == (1, 2, False)


@pytest.mark.parametrize(
    ("layer", "array", "index", "where"),
    [
        (2, "recurrent_state", (1, 2, 3, 4), ("model.layers.2.linear_attn", "delta_write")),
        (2, "conv_state", (1, 4, 2), ("model.layers.2.linear_attn.conv1d", None)),
        (1, "keys", (1, 0, 3, 4), ("model.layers.1.self_attn", "scores")),
        (1, "values", (1, 0, 3, 4), ("model.layers.1.self_attn", "context")),
    ],
)
def test_what_the_cache_held_already_is_told(guarded, layer, array, index, where):
    cache = qwenref.Cache(guarded, batch=2)
    guarded(IDS, cache=cache)
    getattr(cache.layers[layer], array)[index] = NAN
    bits = cache_bits(cache)
    error = caught(guarded, IDS[:, :1], cache=cache)
    assert (error.module, error.site) == where
    assert f"this one was not before the call, in {array} of layer {layer}" in str(error)
    assert cache_bits(cache) == bits


# Parts, profiles, other ways to run


@pytest.mark.parametrize("profile", ["fp64", "hf"])
def test_a_profile_of_its_own_is_searched_as_it_runs(guarded, profile):
    with qwenref.numerics(profile), qwenref.edit(guarded, {"layers.2.linear_attn.k": planted((1, 3, 1, 2))}):
        error = caught(guarded, IDS)
    assert (error.module, error.site, error.row, error.token, error.head) == (
        "model.layers.2.linear_attn", "k", 1, 3, 1,
    )  # fmt: skip
    weight = guarded.model.layers[3].mlp.up_proj.weight
    weight[4, 5] = NAN
    try:
        with qwenref.numerics(profile):
            error = caught(guarded, IDS)
    finally:
        guarded.reset()
    assert (error.module, error.op, error.index) == ("model.layers.3.mlp.up_proj", "linear", (0, 0, 4))
    assert "mend the weight" in str(error)


def test_a_part_of_a_model_may_be_guarded(model):
    layer = model.model.layers[1]
    hidden = np.ones((1, 3, 64), np.float32)
    with qwenref.check_finite(layer), qwenref.edit(model, {"layers.[01].self_attn.gated": planted((0, 1, 2, 3))}):
        error = caught(layer, hidden)
    assert (error.module, error.site, error.head) == ("model.layers.1.self_attn", "gated", 2)
    with qwenref.check_finite(layer), qwenref.edit(model, {"layers.0": planted((1, 1, 1))}):
        error = caught(model, IDS)
    assert "look at hidden_states, not finite when model.layers.1 was called" in str(error)


def test_a_module_of_ones_own():
    class Halves(qwenref.Module):
        def __init__(self):
            super().__init__()
            self.inner = qwenref.SiLUActivation()

        def forward(self, x):
            with np.errstate(divide="ignore"):
                return 1 / self.inner(x)

    module, x = Halves(), np.ones((2, 3), np.float32)
    x[1, 2] = 0
    with qwenref.check_finite(module):
        error = caught(module, x)
    assert str(error).split("\n")[:2] == [
        "Halves: output is not finite, all its inputs are",
        "    found    inf at [axis 0 1, axis 1 2], 1 of 6 values",
    ]


def test_a_model_that_works_on_its_logits():
    class Scaled(qwenref.ForCausalLM):
        def forward(self, *args, **options):
            out = super().forward(*args, **options)
            out.logits = out.logits * np.float32(np.inf)
            return out

    model = Scaled(qwenref.from_config(CONFIG, device="meta").config)
    model.load_state_dict(qwenref.from_config(CONFIG, seed=2).state_dict(), assign=True)
    cache = qwenref.Cache(model, batch=2)
    bits = cache_bits(cache)
    with qwenref.check_finite(model):
        error = caught(model, IDS, cache=cache)
    assert (error.module, error.inputs_finite, error.count) == ("", True, IDS.size * 211)
    assert str(error).startswith("Scaled: output is not finite, all its inputs are\n") and cache_bits(cache) == bits


def test_generation_stops_at_the_step():
    model = qwenref.from_pretrained("tiny")
    ids = model.tokenizer.encode("Once upon a time,")
    with qwenref.check_finite(model):
        assert model.generate(ids, max_new_tokens=3, stop=[]).steps == 3
        with qwenref.edit(model, {"layers.5.mlp": lambda x: x if x.shape[1] > 1 else x * NAN}):
            error = caught(model.generate, ids, max_new_tokens=3, stop=[])
    assert error.layer == 5 and f"column {len(ids)} of the cache" in str(error)


def test_no_token_is_chosen_without_a_guard_either():
    model = qwenref.from_pretrained("tiny")
    with qwenref.edit(model, {"layers.5.mlp": lambda x: x * NAN}):
        error = caught(model.generate, [1, 2, 3], max_new_tokens=3)
    assert str(error).startswith("generate: step 1, row 0: 1,280 of 1,280 logits are not finite\n")
    assert "qwenref.check_finite(model) names" in str(error)


# Threads


def test_every_thread_is_watched_and_none_hears_of_another(guarded):
    results, start = {}, threading.Barrier(4)
    expected = guarded(IDS).logits.tobytes()

    def clean(name):
        start.wait()
        results[name] = {guarded(IDS).logits.tobytes() for _ in range(25)}

    def broken(name, layer):
        start.wait()
        found = set()
        with qwenref.edit(guarded, {f"layers.{layer}.mlp.up": planted((1, 2, 3))}):
            for _ in range(25):
                error = caught(guarded, IDS)
                found.add((error.module, error.site, error.row, error.token, error.count))
        results[name] = found

    threads = [threading.Thread(target=clean, args=(name,)) for name in "ab"]
    threads += [threading.Thread(target=broken, args=(layer, layer)) for layer in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["a"] == results["b"] == {expected}
    assert all(results[i] == {(f"model.layers.{i}.mlp", "up", 1, 2, 1)} for i in (0, 3))


# The guard itself


def test_a_guard_is_on_until_it_is_closed(model):
    spoil = qwenref.edit(model, {"layers.0.mlp": planted((0, 0, 0))})
    guard = qwenref.check_finite(model)
    assert repr(guard) == f"<check_finite of ForCausalLM, on {len(list(model.modules()))} modules>"
    with spoil:
        caught(model, IDS)
        guard.close()
        guard.close()
        assert np.isnan(model(IDS).logits).any()
    assert repr(guard) == "<check_finite of ForCausalLM, closed>" and not qwenref.hooks(model)
    with pytest.raises(RuntimeError, match="^check_finite: closed"), guard:
        raise AssertionError("not reached")
    with spoil, qwenref.check_finite(model), qwenref.check_finite(model), warnings.catch_warnings():
        warnings.simplefilter("error")  # one of them speaks, the other has nothing to add
        assert caught(model, IDS).module == "model.layers.0.mlp"
    assert not qwenref.hooks(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(qwenref.InputError, match="^check_finite: a list\n    expected a model or a part of one"):
        qwenref.check_finite([1, 2])


def python_calls(model):
    """Python functions that a call of a model runs."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        model(IDS)
    finally:
        sys.setprofile(None)
    return count


def test_what_a_guard_adds_to_a_call_is_bounded_and_ends_with_it():
    """For most modules: the hooked call, the table of its hooks, the hook, whether somebody searches, one look."""
    model = qwenref.from_config(CONFIG, seed=1)
    python_calls(model)  # what waits for a first call
    plain = python_calls(model)
    with qwenref.check_finite(model):
        added = python_calls(model) - plain
    assert added <= 8 * len(list(model.modules())), added
    assert python_calls(model) == plain


def test_an_old_error_in_hand_does_not_confuse_the_next_call(guarded):
    with qwenref.edit(guarded, {"layers.0.mlp": planted((0, 0, 0))}):
        first = caught(guarded, IDS)
    text = str(first)
    try:
        raise first
    except NonFiniteError:
        assert np.isfinite(guarded(IDS).logits).all()
        with pytest.raises(qwenref.ShapeError):
            guarded(inputs_embeds=np.zeros((1, 2, 3), np.float32))
        with qwenref.edit(guarded, {"layers.3.mlp": planted((0, 0, 0))}):
            assert caught(guarded, IDS).module == "model.layers.3.mlp"
    assert str(first) == text


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_guarded_by_a_guard_of_its_own(twin_of):
    model = qwenref.from_config(CONFIGS["one DeltaNet layer"], seed=1)
    guard = qwenref.check_finite(model)
    twin = twin_of(model)
    guard.close()
    twin.model.layers[0].mlp.up_proj.weight[3] = NAN
    model.model.layers[0].mlp.up_proj.weight[3] = NAN
    assert caught(twin, [1, 2]).module == "model.layers.0.mlp.up_proj"
    assert np.isnan(model([1, 2]).logits).any()
    qwenref.clear_hooks(twin)
    assert np.isnan(twin([1, 2]).logits).any()


def test_the_error_keeps_no_model_alive_and_can_be_sent(guarded):
    with qwenref.edit(guarded, {"layers.1.self_attn.v": planted((1, 2, 0, 4))}):
        error = caught(guarded, IDS)
    data = pickle.dumps(error)
    again = pickle.loads(data)
    assert len(data) < 10_000 and str(again) == str(error)
    names = ("module", "layer", "site", "op", "row", "token", "head", "count", "index", "inputs_finite")
    assert [getattr(again, name) for name in names] == [getattr(error, name) for name in names]
    assert [getattr(error, name) for name in names] == [
        "model.layers.1.self_attn", 1, "v", None, 1, 2, 0, 1, (1, 2, 0, 4), True,
    ]  # fmt: skip


def test_cycles_leave_nothing_behind():
    model = qwenref.from_config(CONFIGS["one DeltaNet layer"], seed=1)

    def cycle():
        with qwenref.check_finite(model):
            model([1, 2])
            with qwenref.edit(model, {"layers.0.mlp.up": planted((0, 0, 0))}):
                caught(model, [1, 2])

    def counts():
        gc.collect()
        return [sys.getrefcount(m) for m in model.modules()], len(gc.get_objects())

    for _ in range(30):
        cycle()
    references, objects = counts()
    for _ in range(100):
        cycle()
    after = counts()
    assert after[0] == references and abs(after[1] - objects) < 50
    assert not qwenref.hooks(model) and chain() is None
