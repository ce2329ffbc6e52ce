"""Patching between runs, ablation of parts, and the logit lens."""

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS

import qwenref
from qwenref.errors import HookError, InputError, ShapeError, UnknownName
from qwenref.sites import chain

T = 8
RNG = np.random.default_rng(6)
CLEAN, OTHER = RNG.integers(0, 211, (2, 2, T))


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=8)  # layers lflf, 4 query and 6 value heads


def logits(model, ids=CLEAN, **options):
    return model(ids, **options).logits


def captured(model, *names, ids=CLEAN):
    with qwenref.capture(model, *names) as c:
        model(ids)
    return c


@pytest.fixture(autouse=True)
def nothing_stays(model):
    before = logits(model).tobytes()
    yield
    assert logits(model).tobytes() == before and chain() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------------------------------- patch


@pytest.mark.parametrize("name", ["layers.1", "layers.1.resid_post", "layers.2.resid_pre", "layers.3.resid_mid"])
def test_a_whole_residual_patched_makes_the_other_run(model, name):
    c = captured(model, name)
    with qwenref.patch(model, c, name):
        patched = logits(model, OTHER)
    if name == "layers.3.resid_mid":  # nothing behind it mixes tokens, but everything behind it depends on it
        assert patched.tobytes() == logits(model).tobytes()
    assert patched.tobytes() == logits(model, CLEAN).tobytes() != logits(model, OTHER).tobytes()


@pytest.mark.parametrize("name", ["layers.0.linear_attn.v", "layers.1.self_attn.k_rot", "layers.1.self_attn.gated"])
@pytest.mark.parametrize("tokens", [3, [3], slice(3, 4), [-5], np.array([3])])
def test_single_tokens_are_patched_and_the_past_is_not(model, name, tokens):
    c = captured(model, name)

    def by_hand(x):
        x[:, 3] = c[name][:, 3]

    with qwenref.edit(model, {name: by_hand}):
        expected = logits(model, OTHER)
    with qwenref.patch(model, c, [name], tokens=tokens):
        patched = logits(model, OTHER)
    assert patched.tobytes() == expected.tobytes()
    assert patched[:, :3].tobytes() == logits(model, OTHER)[:, :3].tobytes()
    assert patched[:, 3:].tobytes() != logits(model, OTHER)[:, 3:].tobytes()


def test_runs_of_different_length_share_the_tokens_that_are_named(model):
    c = captured(model, "layers.1")
    with qwenref.patch(model, c, "layers.1", tokens=slice(None)):
        longer = logits(model, np.concatenate([OTHER, OTHER], 1))
    assert longer[:, :T].tobytes() == logits(model, CLEAN).tobytes()
    with qwenref.patch(model, c, "layers.1"), pytest.raises(ShapeError) as error:
        logits(model, OTHER[:, :5])
    assert str(error.value).splitlines() == [
        "patch: model.layers.1: the captured value does not fit this call",
        "    found    [B 2, T 8, H 64] in the capture",
        "    expected [B 2, T 5, H 64]",
        "    do       tokens=... patches some tokens of longer runs",
    ]


def test_states_are_patched_token_by_token(model):
    name = "layers.0.linear_attn.state@2,5"
    c = captured(model, name)
    with qwenref.patch(model, c, name):
        with qwenref.capture(model, name) as seen:
            patched = logits(model, OTHER)
        assert seen[name].tobytes() == c[name].tobytes()
    plain = logits(model, OTHER)
    assert patched[:, :3].tobytes() == plain[:, :3].tobytes() and patched[:, 3].tobytes() != plain[:, 3].tobytes()


def test_a_step_goes_into_the_call_of_the_same_number(model):
    def run(block):
        cache = qwenref.Cache(model, batch=2)
        with block:
            return [logits(model, OTHER[:, part], cache=cache) for part in (slice(4), slice(4, 5), slice(5, 6))]

    with qwenref.capture(model, "layers.1") as c:
        cache = qwenref.Cache(model, batch=2)
        for part in (slice(4), slice(4, 5), slice(5, 6)):
            model(CLEAN[:, part], cache=cache)
    plain = run(qwenref.capture(model, "lm_head"))
    for step in range(3):
        patched = run(qwenref.patch(model, c, "layers.1", step=step))
        same = [a.tobytes() == b.tobytes() for a, b in zip(plain, patched, strict=True)]
        assert same == [n < step for n in range(3)]  # the later calls see its keys and states


def test_a_part_called_alone_is_patched_too(model):
    c = captured(model, "layers.1.mlp")
    x = np.ones((2, T, 64), np.float32)
    with qwenref.patch(model, c, "layers.1.mlp"):
        assert model.model.layers[1].mlp(x).tobytes() == c["layers.1.mlp"].tobytes()


def test_values_come_from_a_mapping_and_are_not_changed(model):
    value = captured(model, "layers.1")["layers.1"].astype(np.float64)
    value.flags.writeable = False
    for name in ("layers.1", "model.layers.1"):
        with qwenref.patch(model, {name: value}, "layers.1"), qwenref.edit(model, {"layers.1": lambda x: x.fill(0)}):
            model(OTHER)
    assert value.any()


def test_bad_patches_say_what_is_wrong(model):
    c = captured(model, "layers.1", "layers.0.linear_attn.state", "layers.0.linear_attn.delta_read")
    with pytest.raises(UnknownName, match=r"'layers.1.mpl' matches nothing. Near: layers.\*.mlp"):
        qwenref.patch(model, c, "layers.1.mpl")
    with pytest.raises(UnknownName, match="'model.layers.0' was not captured"):
        qwenref.patch(model, c, "layers.*")
    with pytest.raises(UnknownName, match="was not captured in step 1"):
        qwenref.patch(model, c, "layers.1", step=1)
    with pytest.raises(UnknownName, match=r"patch: model.layers.1 is not among the given values"):
        qwenref.patch(model, {"layers.2": 0}, "layers.1")
    with pytest.raises(InputError, match="values from a list"):
        qwenref.patch(model, [], "layers.1")
    with pytest.raises(InputError, match=r"linear_attn.state has no token axis\n    found    \[B, V-head, K, D\]"):
        qwenref.patch(model, c, "layers.0.linear_attn.state", tokens=3)
    with pytest.raises(InputError, match="can be read, not changed"):
        qwenref.patch(model, c, "layers.0.linear_attn.delta_read")
    for tokens in (8, -9, 1.5, [[0], [9]]):
        with (
            qwenref.patch(model, c, "layers.1", tokens=tokens),
            pytest.raises(InputError, match="patch: model.layers.1"),
        ):
            model(OTHER)


def test_a_failed_patch_leaves_the_cache(model):
    c, cache = captured(model, "layers.1"), qwenref.Cache(model, batch=2)
    before = cache_bits(cache)
    with qwenref.patch(model, c, "layers.1"), pytest.raises(ShapeError):
        model(OTHER[:, :3], cache=cache)
    assert cache_bits(cache) == before


# ---------------------------------------------------------------------------------------------- ablate


def test_a_layer_without_effect_is_a_stack_without_it(model):
    for n in range(4):
        with qwenref.ablate(model, f"layers.{n}"):
            without = model(CLEAN, output_hidden_states=True)
        skipped = model.run(hidden=model.run(CLEAN, stop=n), start=n + 1)
        assert without.residuals[-1].tobytes() == skipped.tobytes()
        assert model.lm_head(model.model.norm(skipped)).tobytes() == without.logits.tobytes()
    with qwenref.ablate(model, "layers.*"):
        assert model.run(CLEAN).tobytes() == model.model.embed_tokens(CLEAN).tobytes()


@pytest.mark.parametrize(
    "name, before, after", [("mlp", "resid_mid", "resid_post"), ("self_attn", "resid_pre", "resid_mid")]
)
def test_a_part_adds_nothing(model, name, before, after):
    with qwenref.ablate(model, f"layers.1.{name}"), qwenref.capture(model, "layers.1.*") as c:
        model(CLEAN)
    assert np.array_equal(c[f"layers.1.{before}"], c[f"layers.1.{after}"])


@pytest.mark.parametrize("heads", [0, [1, 3], [-1]])
@pytest.mark.parametrize(
    "name, linear, count", [("layers.1.self_attn", "o_proj", 4), ("layers.0.linear_attn", "out_proj", 6)]
)
def test_heads_contribute_nothing(model, name, linear, count, heads):
    weight = model.get_submodule(f"model.{name}.{linear}").weight
    kept, gone = np.array(weight), np.atleast_1d(heads) % count
    with qwenref.ablate(model, name, heads=heads):
        ablated = logits(model)
    try:
        weight.reshape(64, count, -1)[:, gone] = 0
        expected = logits(model)
    finally:
        weight[...] = kept
    assert np.array_equal(ablated, expected) and not np.array_equal(ablated, logits(model))
    with qwenref.ablate(model, name, heads=range(count)):
        every = logits(model)
    with qwenref.ablate(model, name):
        assert np.array_equal(every, logits(model))


@pytest.mark.parametrize("lengths", [(T,), (3, 1, T - 4)])
@pytest.mark.parametrize("heads", [None, [1, 4]])
def test_a_state_that_remembers_nothing(model, heads, lengths):
    def run(block, at=None):
        cache, at, rows = qwenref.Cache(model, batch=2), 0, []
        with block:
            for n in lengths:
                rows.append(logits(model, CLEAN[:, at : at + n], cache=cache))
                at += n
        return np.concatenate(rows, 1)

    def forget(state):
        state[:, slice(None) if heads is None else heads] = 0

    name = "layers.0.linear_attn"
    expected = run(qwenref.edit(model, {f"{name}.state@all": forget}))
    assert np.array_equal(run(qwenref.ablate(model, f"{name}.state", heads=heads)), expected)
    assert not np.array_equal(expected, logits(model))
    if heads is None:  # what is read is the token's own value, as far as its own key and query agree
        with qwenref.ablate(model, f"{name}.state"):
            c = captured(model, f"{name}.*")
        q, k = (np.repeat(c[f"{name}.{x}"], 3, axis=2) for x in "qk")
        own = np.einsum("bthk,bthk->bth", q, k) * c[f"{name}.beta"] * 16**-0.5
        # One product and a sum of 16 terms in float32.
        np.testing.assert_allclose(c[f"{name}.read"], own[..., None] * c[f"{name}.v"], rtol=1e-5, atol=1e-6)


def test_values_take_the_place(model):
    name = "layers.1.self_attn"
    plain = captured(model, f"{name}.gated", name)
    cases = [
        ({"value": "mean"}, name, lambda x: np.broadcast_to(x.mean((0, 1), dtype=np.float64), x.shape)),
        ({"value": 2.5}, name, lambda x: np.full_like(x, 2.5)),
        ({"value": np.arange(64)}, name, lambda x: np.broadcast_to(np.arange(64), x.shape)),
    ]
    for options, site, expected in cases:
        with qwenref.ablate(model, name, **options):
            c = captured(model, site)
        assert np.array_equal(c[site], expected(plain[site]).astype(np.float32))
    gated = plain[f"{name}.gated"]
    with qwenref.ablate(model, name, heads=[2], value="mean"):
        c = captured(model, f"{name}.gated")
    mean = gated.mean((0, 1), dtype=np.float64).astype(np.float32)
    assert np.array_equal(c[f"{name}.gated"][:, :, [0, 1, 3]], gated[:, :, [0, 1, 3]])
    assert np.array_equal(c[f"{name}.gated"][:, :, 2], np.broadcast_to(mean[2], (2, T, 32)))


def test_any_name_can_be_taken_out(model):
    for name, heads in (
        ("layers.0.input_layernorm", None),
        ("layers.1.self_attn.attn_weights", [1]),
        ("**.beta", None),
    ):
        with qwenref.ablate(model, name, heads=heads):
            c = captured(model, name)
        for array in c.to_dict().values():
            assert not (array if heads is None else array[:, heads]).any()
    with qwenref.ablate(model, ["layers.1.mlp", "layers.2"]):
        both = logits(model)
    with qwenref.ablate(model, "layers.1.mlp"), qwenref.ablate(model, "layers.2"):
        assert logits(model).tobytes() == both.tobytes()


BAD = [
    (("layers.9",), {}, UnknownName, "'layers.9' matches nothing"),
    (("layers.1",), {"heads": 0}, InputError, "takes neither heads nor a value"),
    (("layers.1",), {"value": 1}, InputError, "takes no value"),
    (("layers.0.linear_attn.state",), {"value": "mean"}, InputError, "takes no value"),
    (("layers.1.mlp",), {"heads": 0}, InputError, "layers.1.mlp has no heads"),
    (("layers.1.self_attn",), {"heads": 4}, InputError, "heads 4\n    expected numbers from 0 to 3"),
    (("layers.0.linear_attn",), {"heads": [0, -7]}, InputError, "expected numbers from 0 to 5"),
    (("layers.0.linear_attn",), {"heads": 0.5}, InputError, "heads 0.5"),
    (("layers.1.mlp",), {"value": "median"}, InputError, "value 'median'"),
    (("layers.1.mlp",), {"value": None}, InputError, "value None"),
    (("layers.0.linear_attn.state@2",), {"value": "mean"}, InputError, "has no mean over tokens"),
    (("layers.0.linear_attn.delta_write",), {}, InputError, "can be read, not changed"),
]


@pytest.mark.parametrize("names, options, kind, message", BAD)
def test_bad_ablations_say_what_is_wrong(model, names, options, kind, message):
    with pytest.raises(kind, match=message):
        qwenref.ablate(model, *names, **options)


def test_a_value_that_does_not_fit_is_named_when_it_is_used(model):
    with qwenref.ablate(model, "layers.1.mlp", value=np.zeros(3)), pytest.raises(ShapeError, match="does not fit"):
        model(CLEAN)


def test_edits_by_a_block_end_with_it_when_it_fails(model):
    with pytest.raises(HookError), qwenref.ablate(model, "layers.0"), qwenref.edit(model, {"layers.1": lambda x: x[0]}):
        model(CLEAN)


# ---------------------------------------------------------------------------------------------- logit lens


@pytest.mark.parametrize("profile", ["fp32", "fp64"])
@pytest.mark.parametrize("positions", [None, [2, -1], 3])
def test_every_row_is_the_head_over_a_residual(model, profile, positions):
    kept = {None: range(T), 3: range(T - 3, T)}.get(positions if not isinstance(positions, list) else 0, [2, T - 1])
    with qwenref.numerics(profile):
        out = model(CLEAN, output_hidden_states=True)
        lens = qwenref.logit_lens(model, CLEAN, positions=positions)
        assert lens.positions == tuple(kept) and lens.layers == ("embed", 0, 1, 2, 3)

    def same(a, b):
        # The definition leaves sums in float64 to BLAS, whose order depends on how many rows there are.
        assert np.array_equal(a, b) if profile == "fp32" else np.allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())

    same(lens.logits(), out.logits[:, lens.positions])
    for layer, residual in zip(lens.layers, out.residuals, strict=True):
        with qwenref.numerics(profile):
            row = model.lm_head(model.model.norm(residual))[:, lens.positions]
        same(lens.logits(layer), row)
        n = lens.layers.index(layer)
        order = np.argsort(-row, axis=-1, kind="stable")  # lowest id first among equals
        assert np.array_equal(lens.ids[n], order[..., :5])
        wide = np.exp(row.astype(np.float64) - row.max(-1, keepdims=True))
        wide /= wide.sum(-1, keepdims=True)
        # exp in float32: relative error below 1e-6.
        np.testing.assert_allclose(lens.probabilities[n], np.take_along_axis(wide, lens.ids[n], -1), rtol=2e-6)
        ranks = np.argmax(order == lens.answer[..., None], axis=-1) + 1
        assert np.array_equal(lens.rank[n], ranks)
    assert np.array_equal(lens.answer, out.logits[:, lens.positions].argmax(-1)) and (lens.rank[-1] == 1).all()


def test_a_bounded_number_of_logits_is_held(model, monkeypatch):
    whole = qwenref.logit_lens(model, CLEAN)
    sizes = []
    monkeypatch.setattr(qwenref.lens, "_HELD", 3 * 211)
    with model.lm_head.register_forward_hook(lambda m, a, out: sizes.append(out.shape)):
        pieces = qwenref.logit_lens(model, CLEAN)
    assert set(sizes) == {(1, 3, 211), (1, 2, 211)} and len(sizes) == 5 * 2 * 3
    for name in ("ids", "probabilities", "rank", "answer"):
        assert np.array_equal(getattr(whole, name), getattr(pieces, name))


def test_ties_and_nan_have_an_order():
    values = np.array([1, 3, np.nan, 3, 2, 2, 2], np.float32)
    assert qwenref.lens._best(values, 4).tolist() == [1, 3, 4, 5]
    assert qwenref.lens._best(values, 7).tolist() == [1, 3, 4, 5, 6, 0, 2]
    assert [qwenref.lens._rank(values, id) for id in (1, 3, 4, 6, 0)] == [1, 2, 3, 5, 6]
    assert qwenref.lens._best(np.full(3, np.nan), 2).tolist() == [0, 1]


def test_options_and_edits_hold(model):
    cache = qwenref.Cache(model, batch=2)
    model(CLEAN[:, :4], cache=cache)
    behind = qwenref.logit_lens(model, CLEAN[:, 4:], cache=cache)
    assert behind.logits().tobytes() == logits(model)[:, 4:].tobytes()
    with qwenref.ablate(model, "layers.2"):
        lens = qwenref.logit_lens(model, CLEAN)
    assert np.array_equal(lens.ids[2 + 1], lens.ids[1 + 1])


def test_the_lens_of_tiny_shows_tokens():
    tiny = qwenref.from_pretrained("tiny")
    ids = tiny.tokenizer.encode("The sum of 2 and\n3 is 5.")
    lens = qwenref.logit_lens(tiny, ids)
    text, lines = lens.text(width=100), lens.text(width=100).splitlines()
    assert lines[0] == f"Lens · 8 layers · 1 row · {len(ids)} of {len(ids)} tokens"
    assert lines[1].startswith("after") and lines[2].startswith("7 attention") and lines[-2].startswith("embed")
    assert lines[-1].startswith("… ") and "more tokens" in lines[-1]
    assert max(map(len, lines)) <= 100 and "5 DeltaNet" in text
    wide = lens.text(width=10_000)
    assert "⏎" in wide and "␣" in wide and "…" not in wide.splitlines()[-1]
    for line, row in zip(wide.splitlines()[2:], reversed(range(9)), strict=True):
        assert line.endswith(lens._cell(row, 0, len(ids) - 1))
        assert (" #" in lens._cell(row, 0, 0)) == (lens.rank[row, 0, 0] != 1)
    html = lens._repr_html_()
    assert "<script" not in html and html.count("<tr>") == 10 and len(html) < 100_000
    for cell in (lens._cell(4, 0, p) for p in range(len(ids))):
        assert cell.split(" ")[-1] in html


def test_a_lens_of_many_layers_stays_short(model):
    deep = qwenref.from_config(
        CONFIGS["aperiodic layers"] | {"num_hidden_layers": 48, "layer_types": ["linear_attention"] * 48}, seed=0
    )
    lens = qwenref.logit_lens(deep, CLEAN[:1], positions=2)
    lines = repr(lens).splitlines()
    assert len(lines) <= 40 and "more layers" in lines[-1]
    assert lines[2].startswith("47 DeltaNet") and lines[-2].startswith("embed")
    assert lens.text().count("DeltaNet") == 48


BAD_LENS = [
    ({"top": 0}, "logit_lens: top 0"),
    ({"top": 212}, "expected a number from 1 to 211"),
    ({"positions": [8]}, r"positions: \[8\]"),
    ({"positions": 1.5}, "positions: 1.5"),
]


@pytest.mark.parametrize("options, message", BAD_LENS)
def test_bad_lenses_say_what_is_wrong(model, options, message):
    with pytest.raises(InputError, match=message):
        qwenref.logit_lens(model, CLEAN, **options)


def test_a_lens_refuses_what_it_does_not_know(model):
    with pytest.raises(TypeError, match="^unexpected 'atention_mask'; did you mean attention_mask\\?"):
        qwenref.logit_lens(model, CLEAN, atention_mask=[[1]])
    with pytest.raises(TypeError, match="^unexpected 'output_attentions'"):
        qwenref.logit_lens(model, CLEAN, output_attentions=True)
    with pytest.raises(InputError, match="^logit_lens: a DecoderLayer in place of a model"):
        qwenref.logit_lens(model.model.layers[0], CLEAN)


def test_a_layer_that_is_not_there(model):
    lens = qwenref.logit_lens(model, CLEAN)
    for layer in (4, -5, "head", True, 1.0):
        with pytest.raises(InputError, match=f"lens: no layer {layer!r}"):
            lens.logits(layer)
