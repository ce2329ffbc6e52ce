"""Activations of an engine: brought to our names and shapes, and the first site outside of what rounding explains."""

import ml_dtypes
import numpy as np
import pytest

import qwenref
from qwenref import _C
from qwenref.compare import layouts
from qwenref.compare.errors import ActivationShape, BadTokenIds, NonFinite, UnknownSite
from qwenref.compare.localise import ASKED, GATE, Localisation, localise, localised
from qwenref.compare.report import Report
from qwenref.deltanet import to_gguf_order
from qwenref.errors import InputError
from qwenref.numerics import jitter

T = 12
INSIDE = ("layers.*.resid_post", "layers.*.resid_mid", "layers.*.linear_attn.*", "layers.*.self_attn.*", "layers.*.mlp")


@pytest.fixture(scope="module")
def ids(tiny):
    return np.array(tiny.tokenizer.encode("Once upon a time there was a fox who could count")[:T])


def recorded(model, ids, edits=None, sites=ASKED, seed=77):
    """Activations and logits of a rounding variant of the reference, with something edited."""
    import contextlib

    with contextlib.ExitStack() as stack:
        stack.enter_context(jitter(seed))
        if edits:
            stack.enter_context(qwenref.edit(model, edits))
        captured = stack.enter_context(qwenref.capture(model, *sites))
        logits = model(ids[None]).logits[0]
    return {name: captured[name] for name in captured.names() if not name.endswith("state")}, logits


# ---- localisation --------------------------------------------------------------------------------------------------


def test_a_clean_engine_has_no_site_outside(tiny, ids):
    found = localise(tiny, ids, *recorded(tiny, ids))
    assert found.first_bad is None and found.document["splice"] == []
    assert "inside" in found.document["conclusion"]
    assert found.matrix.shape == (len(found.document["sites"]), T) and np.median(found.matrix) < 2


PLANTED = [
    ("layers.3.self_attn.gate", lambda x: x * 0.7, 3),
    ("layers.2.linear_attn.beta", lambda x: x * 0.8, 2),
    ("layers.4.linear_attn.normed", lambda x: -x, 4),
    ("layers.5.mlp", lambda x: x * 1.2, 5),
    ("layers.0.linear_attn.conv_out", lambda x: x * 1.1, 0),
    ("embed_tokens", lambda x: x * 1.1, None),
]


@pytest.mark.parametrize("site,change,layer", PLANTED, ids=[site for site, _, _ in PLANTED])
def test_the_planted_site_is_the_first_outside(tiny, ids, site, change, layer):
    found = localise(tiny, ids, *recorded(tiny, ids, {site: change}))
    first = found.first_bad
    assert (first["site"], first["layer"], first["pos"]) == (site, layer, 0) and first["ratio"] > GATE


def test_a_fault_from_some_token_on_is_found_there(tiny, ids):
    def late(x):
        return np.concatenate([x[:, :7], x[:, 7:] * 1.5], axis=1)

    found = localise(tiny, ids, *recorded(tiny, ids, {"layers.3.self_attn.gated": late}))
    assert (found.first_bad["site"], found.first_bad["pos"]) == ("layers.3.self_attn.gated", 7)


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_the_splice_agrees_with_the_site(tiny, ids, layer):
    edits = {f"layers.{layer}.mlp": lambda x: x * 1.3}
    values, logits = recorded(tiny, ids, edits, sites=("embed_tokens", "layers.*.resid_post", "norm"))
    found = localise(tiny, ids, values, logits)
    assert found.first_bad["site"] == f"layers.{layer}.resid_post"
    before = "behind the embeddings" if layer == 0 else f"behind layer {layer - 1}"
    assert found.document["conclusion"] == (
        f"Spliced {before} the logits are the reference's, behind layer {layer} the engine's: "
        "the fault is between the two."
    )
    assert len(found.document["splice"]) <= 4  # of 10 places
    for row in found.document["splice"]:
        assert (row["to_engine"] < row["to_truth"]) == (row["layer"] > layer)


@pytest.mark.parametrize("site,words", [("layers.6.mlp", "before it"), ("lm_head", "behind it")])
def test_the_last_hidden_state_alone_tells_trunk_from_head(tiny, ids, site, words):
    rng = np.random.default_rng(0)
    edits = {site: (lambda x: x * 1.3) if site != "lm_head" else lambda x: x + rng.standard_normal(x.shape)}
    values, logits = recorded(tiny, ids, edits, sites=("norm",))
    found = localise(tiny, ids, values, logits)
    assert (
        found.document["conclusion"].endswith(f"{words}.") and "behind the final norm" in found.document["conclusion"]
    )


def test_the_result_is_a_part_of_a_report(tiny, ids):
    seen = []
    values, logits = recorded(tiny, ids, {"layers.3.self_attn.gate": lambda x: x * 0.7})
    found = localise(tiny, ids, values, logits, variants=4, progress=lambda *step: seen.append(step))
    made = Report(
        {"engine": {"name": "e"}, "reference": {"model": "tiny"}, "localisation": found.document},
        {"layer_error": found.matrix},
    )
    assert "first outside at layers.3.self_attn.gate, position 0" in str(made)
    assert "first outside: layers.3.self_attn.gate" in made._repr_html_()
    assert seen == [(n, 5) for n in range(1, 6)]


def test_no_activations_are_no_finding(tiny, ids):
    assert localise(tiny, ids, {}).first_bad is None
    with pytest.raises(BadTokenIds):
        localise(tiny, [[1, 2]], {})


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tiny, ids):
    with qwenref.capture(tiny, *INSIDE, "layers.*.mlp.*", "norm") as captured:
        tiny(ids[None])
    return {name: captured[name] for name in captured.names() if not name.endswith("state")}


def same(found, plain):
    assert found and all(np.array_equal(value, plain[name]) for name, value in found.items())


def test_names_and_shapes_are_those_of_sites(tiny, plain):
    same(layouts.aligned(tiny, plain, T), plain)
    short = {name.removeprefix("model.language_model."): value for name, value in plain.items()}
    same(layouts.aligned(tiny, short, T), plain)


LAYOUTS = {
    "without rows": lambda x: x[0] if x.shape[0] == 1 else x,
    "heads joined": lambda x: x.reshape(1, T, -1) if x.ndim == 4 and x.shape[1] == T else x,
    "heads joined, no rows": lambda x: x.reshape(T, -1) if x.ndim == 4 and x.shape[1] == T else x,
    "heads before tokens": lambda x: x.swapaxes(1, 2) if x.ndim == 4 and x.shape[1] == T else x,
    "transposed": lambda x: x[0].T if x.ndim == 3 and x.shape[2] != T else x,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_come_out_as_ours(tiny, plain, layout):
    changed = {name: layout(value) for name, value in plain.items()}
    assert sum(changed[name].shape != plain[name].shape for name in plain) > 10
    same(layouts.aligned(tiny, changed, T), plain)


def test_fused_linears_are_taken_apart(tiny, plain):
    head = "model.language_model.layers."
    fused = {
        "self_attn.qkv_proj": (3, "self_attn", ("q_proj", "k_proj", "v_proj")),
        "linear_attn.in_proj_qkvz": (0, "linear_attn", ("in_proj_qkv", "in_proj_z")),
        "linear_attn.in_proj_ba": (0, "linear_attn", ("in_proj_b", "in_proj_a")),
        "mlp.gate_up_proj": (3, "mlp", ("gate_proj", "up_proj")),
    }
    for name, (layer, module, parts) in fused.items():
        names = [f"{head}{layer}.{module}.{part}" for part in parts]
        value = np.concatenate([plain[part] for part in names], axis=-1)
        found = layouts.aligned(tiny, {f"layers.{layer}.{name}": value[0]}, T)
        assert list(found) == names
        same(found, plain)
        with pytest.raises(ActivationShape, match=f"{name}.*\n.*\n    expected .T, {value.shape[-1]}"):
            layouts.aligned(tiny, {f"layers.{layer}.{name}": value[..., 1:]}, T)


def test_value_heads_in_gguf_order_come_back(tiny, plain):
    config = tiny.text_model.config
    G, V = config.linear_num_key_heads, config.linear_num_value_heads
    first = config.conv_dim - config.value_dim
    inside = {name.rpartition(".linear_attn.")[2]: name for name in plain if ".0.linear_attn." in name}
    tiled = {}
    for short, name in inside.items():
        value = plain[name]
        if short in ("mixed_qkv", "conv_out", "in_proj_qkv", "conv1d"):
            value = np.concatenate([value[..., :first], to_gguf_order(value[..., first:], G, V, axis=-1)], axis=-1)
        elif short == "norm":
            value = to_gguf_order(value.reshape(T, V, -1), G, V, axis=1).reshape(value.shape)
        elif short not in ("q", "k", "out_proj"):
            value = to_gguf_order(value, G, V, axis=2)
        tiled[name] = value
    assert sum(not np.array_equal(tiled[name], plain[name]) for name in tiled) >= 14
    same(layouts.aligned(tiny, tiled, T, order="gguf"), plain)
    others = {name: value for name, value in plain.items() if "linear_attn" not in name}
    same(layouts.aligned(tiny, others, T, order="gguf"), plain)


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_files_of_any_width_are_read_with_their_ids(tiny, ids, plain, tmp_path, ending, dtype):
    names = [name for name in plain if "resid_post" in name]
    values = {name: plain[name].astype(dtype) for name in names}
    path = tmp_path / f"a.{ending}"
    if ending == "npz":
        np.savez(path, input_ids=ids, **values)
    else:
        _C.save_safetensors(path, {**values, "input_ids": ids}, {})
    stored = layouts.read(path)
    assert stored.ids == ids.tolist() and list(stored.values) and set(stored.values) == set(names)
    found = layouts.aligned(tiny, stored.values, T)
    assert all(np.array_equal(found[name], values[name].astype(np.float32)) for name in names)


BAD = [
    ({"layers.0.resid_pst": np.ones((1, T, 128))}, UnknownSite, "matches nothing. Near: layers.*.resid_post"),
    ({"layers.*.resid_post": np.ones((1, T, 128))}, UnknownSite, "is a pattern"),
    ({"layers.0.linear_attn.state": np.ones((1, 6, 32, 32))}, UnknownSite, "no tokens to be compared by"),
    ({"visual.blocks.0": np.ones((1, T, 64))}, UnknownSite, "visual|matches nothing"),
    ({"layers.0.resid_post": np.ones((1, T + 1, 128))}, ActivationShape, r"found    \[1, 13, 128\]"),
    ({"layers.0.resid_post": np.ones(())}, ActivationShape, r"expected \[B 1, T 12, H 128\]"),
    (
        {"layers.0.resid_post": np.full((1, T, 128), np.nan)},
        NonFinite,
        r"1,536 values not finite, the first at \[0, 0, 0\]",
    ),
]


@pytest.mark.parametrize("values,error,message", BAD)
def test_activations_that_do_not_fit_are_refused(tiny, values, error, message):
    with pytest.raises(error, match=message):
        layouts.aligned(tiny, values, T)


def test_files_that_hold_no_activations_are_refused(tmp_path, tiny):
    for name in ("a.npz", "a.safetensors", "a.txt"):
        (tmp_path / name).write_bytes(b"not a file of arrays")
        with pytest.raises(InputError, match=name):
            layouts.read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="b.npz"):
        layouts.read(tmp_path / "b.npz")
    with pytest.raises(InputError, match="order 'mlx'"):
        layouts.aligned(tiny, {}, T, order="mlx")


def test_a_place_takes_the_stead_of_a_name_and_contradicts_no_verdict():
    import compare_documents

    first = {"layer": 3, "site": "layers.3.self_attn.gate", "pos": 9, "ratio": 41.0}
    found = Localisation({"first_bad": first, "sites": [], "gate": GATE, "splice": []}, np.ones((1, 5)))
    unnamed = localised(Report(compare_documents.document(confidence="statistical")), found)
    assert unnamed.confidence == "localised" and unnamed.summary.endswith("layers.3.self_attn.gate, position 9.")
    assert np.array_equal(unnamed.arrays["layer_error"], found.matrix)
    named = localised(compare_documents.report(), found)
    assert (named.confidence, named.summary) == ("named", compare_documents.report().summary)
    clean = localised(Report(compare_documents.clean()), found)
    assert clean.agrees and [f["code"] for f in clean.findings] == ["activations-outside"]
