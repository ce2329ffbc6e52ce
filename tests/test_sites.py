"""Names: every module and site fires once per call, looking changes no bit, patterns name what they should."""

import collections
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS, text_config

import qwenref
from qwenref.sites import resolve

NAMES = ("values 3 x keys, GQA 4", "aperiodic layers", "conv width 2")
LENGTHS = (5, 1, 1, 1)


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return qwenref.from_config(CONFIGS[request.param], seed=2)


@pytest.fixture(scope="module")
def small():
    return qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=2)


def ids_of(model):
    return np.random.default_rng(4).integers(0, model.config.text_config.vocab_size, (2, sum(LENGTHS)))


def run(model, lengths=LENGTHS, **options):
    """(outputs of the calls, bits of logits and of the cache)."""
    ids, cache, at, outs = ids_of(model), qwenref.Cache(model, batch=2), 0, []
    for n in lengths:
        outs.append(model(ids[:, at : at + n], cache=cache, **options))
        at += n
    return outs, {"logits": [out.logits.tobytes() for out in outs], **cache_bits(cache)}


# Every module and every site, once per call


def test_every_registered_module_fires_once_per_call(model):
    counts, handles = collections.Counter(), []
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, qwenref.ModuleList)}
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda m, args, name=name: counts.update([("pre", name)])))
        handles.append(module.register_forward_hook(lambda m, args, out, name=name: counts.update([("post", name)])))
    outs, bits = run(model)
    for handle in handles:
        handle.remove()
    assert {type(m).__name__ for m in modules.values()} >= {"Conv1d", "RMSNormGated", "RotaryEmbedding"}
    assert counts == {(when, name): len(LENGTHS) for name in modules for when in ("pre", "post")}
    assert bits == run(model)[1]


def test_every_site_fires_once_per_call(model):
    with qwenref.trace(model) as t:
        run(model)
    counts = collections.Counter((row.step, row.name) for row in t.rows)
    assert counts == {(step, name): 1 for step in range(len(LENGTHS)) for name in model.sites()}


def test_a_site_is_passed_after_what_it_is_made_of(small):
    with qwenref.trace(small) as t:
        small([1, 2, 3])
    order = [row.name for row in t.rows]
    linear = "linear_attn.mixed_qkv linear_attn.conv_out linear_attn.beta linear_attn.delta_write"
    linear = f"{linear} linear_attn.state linear_attn.read linear_attn.normed".split()
    block = "resid_pre input_layernorm {} resid_mid mlp.hidden mlp resid_post"
    attention = "self_attn.q self_attn.q_rot self_attn.scores self_attn.attn_weights self_attn.context self_attn.gated"
    for layer, mixer in ((0, [*linear, "linear_attn"]), (1, [*attention.split(), "self_attn.o_proj", "self_attn"])):
        chain = [f"layers.{layer}.{name}" for name in block.format(" ".join(mixer)).split()] + [f"layers.{layer}"]
        at = [order.index(f"model.{name}") for name in chain]
        assert at == sorted(at)


# Looking changes no bit


def test_hooks_captures_and_optional_outputs_change_no_bit(model):
    plain = run(model)[1]
    asked = run(model, output_hidden_states=True, output_attentions=True, use_cache=True)[1]
    assert asked == plain
    with qwenref.capture(model, "**", "**.state@all") as c:
        assert run(model)[1] == plain
    assert c["lm_head", 0].tobytes() == plain["logits"][0]
    with qwenref.trace(model), qwenref.edit(model, {"**.q": lambda x: None}), qwenref.capture(model, "**.scores"):
        assert run(model, output_attentions=True)[1] == plain
    for name, site in model.sites().items():  # one alone: no site leans on another that is watched
        if site.site is not None and (".layers.0." in name or ".layers.1." in name):
            with qwenref.capture(model, name):
                assert run(model)[1] == plain, name
    assert run(model)[1] == plain


def test_optional_outputs_are_the_captured_values(model):
    with qwenref.capture(model, "layers.*.resid_pre", "layers.*.self_attn.attn_weights", "norm") as c:
        outs, _ = run(model, output_hidden_states=True, output_attentions=True)
    layers = model.config.text_config.layer_types
    for step, out in enumerate(outs):
        for i, hidden in enumerate(out.hidden_states[:-1]):
            assert hidden.tobytes() == c[f"layers.{i}.resid_pre", step].tobytes()
        assert out.hidden_states[-1].tobytes() == c["norm", step].tobytes()
        attention = [i for i, kind in enumerate(layers) if kind == "full_attention"]
        for i, weights in zip(attention, out.attentions, strict=True):
            assert weights.tobytes() == c[f"layers.{i}.self_attn.attn_weights", step].tobytes()


# The table of names, and patterns over it


def test_every_name_has_the_shape_it_is_declared_with(model):
    with qwenref.capture(model, "**", "**.state@all", "**.state@1,6") as c:
        run(model)
    letters = {"B": 2}
    for name in c.names():
        site = c.targets[name]
        for step in c.steps(name):
            T, S = LENGTHS[step], sum(LENGTHS[: step + 1])
            shape = c[name, step].shape
            known = {**site.module.sizes, **letters, "T": T, "S": S}
            declared = [
                np.prod([known[f] for f in label.split("*")]) if not label.isdigit() else 1 for label in site.dims
            ]
            assert list(shape) == declared, name
            assert site.elements(B=2, T=T, S=S) == c[name, step].size
    assert set(c.names()) == set(c.targets)


def test_the_table_follows_the_tree_and_prints_one_line_per_pattern(small):
    names = list(small.sites())
    assert names[0] == "model" and names[-1] == "lm_head" and len(set(names)) == len(names)
    first, *lines = repr(small.sites()).split("\n")
    assert first == f"{len(names):,} names"
    assert sum(int(line.split(" x ")[1].split()[0]) for line in lines) == len(names)
    line = next(line for line in lines if line.split()[0] == "model.layers.*.linear_attn.beta")
    assert line.split("  ")[-1].strip() == "[B, T, V-head 6]"


PATTERNS = {
    "layers.1.self_attn": ["model.layers.1.self_attn"],
    "model.layers.1.self_attn": ["model.layers.1.self_attn"],
    "model.language_model.layers.1.self_attn": None,  # this model has no such level
    "layers.*.self_attn": ["model.layers.1.self_attn", "model.layers.3.self_attn"],
    "layers.?.self_attn.q": ["model.layers.1.self_attn.q", "model.layers.3.self_attn.q"],
    "layers.[0-1].resid_mid": ["model.layers.0.resid_mid", "model.layers.1.resid_mid"],
    "layers.[!123].resid_mid": ["model.layers.0.resid_mid"],
    "**.conv_out": ["model.layers.0.linear_attn.conv_out", "model.layers.2.linear_attn.conv_out"],
    "lm_head": ["lm_head"],
    "layers.0.linear_attn.state@3,1,3": ["model.layers.0.linear_attn.state@3,1,3"],
    "layers.0.**@all": ["model.layers.0.linear_attn.state@all"],
    "***.conv_out": ["model.layers.0.linear_attn.conv_out", "model.layers.2.linear_attn.conv_out"],
    "layers.[0": None,
    "layers.(0)": None,
    "": None,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(small, pattern):
    if PATTERNS[pattern] is None:
        with pytest.raises(qwenref.UnknownName):
            resolve(small, [pattern])
    else:
        assert list(resolve(small, [pattern])) == PATTERNS[pattern]


def test_many_stars_that_match_nothing_are_told_at_once(small):
    """Each star on its own would multiply the ways to fail: this pattern takes a backtracking matcher years."""
    began = time.perf_counter()
    with pytest.raises(qwenref.UnknownName):
        resolve(small, ["*" * 60 + "!"])
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    "pattern, near",
    [
        ("beta", "layers.*.linear_attn.beta (2 names)"),
        ("state@all", "layers.*.linear_attn.state (2 names)"),
        ("self_attn", "layers.*.self_attn (2 names)"),
        ("layers.0.attn_weights", "layers.*.self_attn.attn_weights (2 names)"),
    ],
)
def test_the_end_of_a_name_is_answered_with_the_whole_of_it(small, pattern, near):
    with pytest.raises(qwenref.UnknownName) as error:
        resolve(small, [pattern])
    assert str(error.value).splitlines()[0].endswith(f" matches nothing. Near: {near}")


@pytest.mark.parametrize("other", [None, 3, qwenref])
def test_what_is_no_model_is_named(other):
    with pytest.raises(qwenref.InputError, match=r"^edit: an? \w+ in place of a model\n"):
        qwenref.edit(other, {"lm_head": 0})


def test_the_leading_part_of_the_composite_may_be_left_out():
    tiny = qwenref.from_pretrained("tiny")
    assert isinstance(tiny, qwenref.ForConditionalGeneration)
    full = "model.language_model.layers.0.linear_attn.beta"
    for name in (full, "language_model.layers.0.linear_attn.beta", "layers.0.linear_attn.beta"):
        assert list(resolve(tiny, [name])) == [full]


def test_a_part_of_a_model_has_its_own_names(small):
    layer = small.model.layers[0]
    assert {"resid_pre", "linear_attn", "linear_attn.q", "mlp.gate_proj"} <= set(layer.sites())
    with qwenref.capture(layer, "linear_attn.q") as c:
        small([1, 2, 3])
    with qwenref.capture(small, "layers.0.linear_attn.q") as d:
        small([1, 2, 3])
    assert np.array_equal(c["linear_attn.q"], d["layers.0.linear_attn.q"])


# What the machinery costs when nobody looks


def functions_called(model, ids):
    """Counter of the Python functions of the package that a call of a model runs, by file and name."""
    counts, place = collections.Counter(), Path(qwenref.__file__).parent

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and place in Path(code.co_filename).parents and not code.co_name.startswith("<"):
            counts[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        model(ids)
    finally:
        sys.setprofile(None)
    return counts


def layer_cost(kind):
    """What one more layer of a kind adds to a call."""
    ids = np.array([[1, 2, 3]])
    one, two = (qwenref.from_config(text_config("lf" + more), seed=0) for more in ("", kind))
    one(ids), two(ids)  # imports that wait for a first call
    return functions_called(two, ids) - functions_called(one, ids)


# A module is one Python call, its forward: hooks are looked for, and sites without a watcher passed, in C.
ASKING = {"l": {"sites.chain": 1}, "f": {"module.wants": 2}}
WORKING = {"l": 12, "f": 16}  # step and cache: one layer's memory read, extended and handed in


@pytest.mark.parametrize("kind", "lf")
def test_an_unwatched_layer_runs_no_function_for_those_who_might_look(kind):
    """All a DeltaNet layer asks is whether anybody looks, an attention layer whether somebody wants scores or weights.
    A count that has grown is time added to every call: take it back or say here what for."""
    counts = layer_cost(kind)
    modules = sum(1 for _ in qwenref.from_config(text_config(kind), device="meta").model.layers[0].modules())
    assert counts.pop("text.forward") + counts.pop("layers.forward") == modules
    assert {name: counts.pop(name) for name in list(counts) if name in ASKING["l"] | ASKING["f"]} == ASKING[kind]
    assert sum(counts.values()) <= WORKING[kind], dict(counts)
