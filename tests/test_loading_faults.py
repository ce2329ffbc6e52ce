"""Checkpoints that do not fit: one error lists everything at once, with counts, files, what was found and expected."""

import gc
import json
import time

import numpy as np
import pytest
from checkpoints import descriptors, entry, maps_of, raw, shard, sharded
from folders import TEXT, composite, flagged, folder, named, weights
from text_configs import text_config

import qwenref
from qwenref import CheckpointError

UP = "model.layers.1.mlp.up_proj.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture
def stored():
    return named(weights(), "model.")


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        qwenref.from_pretrained(path)
    assert type(caught.value) is CheckpointError and caught.value.code == "checkpoint"
    return caught.value


def test_everything_is_listed_at_once(tmp_path, stored):
    """Two shards, six kinds of faults: none hides another."""
    C, _, W = stored[CONV].shape
    del stored["model.norm.weight"], stored["model.layers.3.self_attn.q_norm.weight"]
    stored[CONV] = stored[CONV].reshape(C, W, 1)
    stored[UP] = stored[UP].astype(np.float64)
    first = dict(stored)
    second = {
        "language_model.layers.1.mlp.gate_proj.weight": stored["model.layers.1.mlp.gate_proj.weight"],
        "model.layers.0.linear_attn.in_proj_ba.weight": np.zeros((2, 3), np.float32),
        "model.layers.4.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
        "audio.weight": np.zeros((4,), np.float32),
    }
    path = folder(tmp_path, TEXT, first, second)
    error = refused(path)
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    twice = "layers.1.mlp.gate_proj.weight"
    assert error.faults == {
        "found twice": [f"{a}: model.{twice}, and {b}: language_model.{twice}"],
        "not part of this model": [f"{b}: audio.weight: F32 [4]"],
        "missing": [
            "model.layers.3.self_attn.q_norm.weight: expected [32]",
            "model.norm.weight: expected [64]",
        ],
        "of another shape": [
            f"{a}: {CONV}: found [{C}, {W}, 1], expected [{C}, 1, {W}] (the layout of a converted file)"
        ],
        "of a dtype no weight has": [f"{a}: {UP}: found F64, expected F32, BF16, F16"],
        "left over": [
            f"{b}: model.layers.0.linear_attn.in_proj_ba.weight: F32 [2, 3]",
            f"{b}: model.layers.4.mlp.up_proj.weight: F32 [2, 2]",
        ],
    }
    first_line, *lines = str(error).splitlines()
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in error.faults.items())
    assert first_line == f"{path}: the weights do not fit the model: {counts}"
    for names in error.faults.values():
        assert all(f"        {name}" in lines for name in names)
    assert lines[-1] == f"    files    model.safetensors.index.json: {a}, {b}"


def test_long_lists_stop_at_five_and_are_whole_in_faults(tmp_path, stored):
    kept = {name: array for name, array in stored.items() if ".mlp." not in name}
    error = refused(folder(tmp_path, TEXT, kept))
    assert len(error.faults["missing"]) == 12
    assert str(error).splitlines()[0].endswith(": 12 missing")
    assert "        … 7 more" in str(error).splitlines()
    assert sum(".mlp." in line for line in str(error).splitlines()) == 5


def test_a_missing_name_points_at_the_unclaimed_one_of_its_layer(tmp_path, stored):
    stored["model.layers.1.mlp.up_projection.weight"] = stored.pop(UP)
    error = refused(folder(tmp_path / "near", TEXT, stored))
    assert error.faults["missing"] == [f"{UP}: expected [96, 64] (there is model.layers.1.mlp.up_projection.weight)"]
    del stored["model.layers.1.mlp.up_projection.weight"]  # layer 0 has its own, which is no substitute
    error = refused(folder(tmp_path / "none", TEXT, stored))
    assert error.faults == {"missing": [f"{UP}: expected [96, 64]"]}


@pytest.mark.measured
def test_a_stranger_of_27b_size_is_refused_in_seconds(tmp_path):
    """851 names, all of them near to one another; comparing each with all others takes a minute."""
    model = qwenref.from_config(text_config("lllf" * 16), device="meta")
    other = {name: name.replace("mlp", "ffn").replace("_attn", "_mixer") for name in model.state_dict()}
    one = np.zeros(1, np.float32)
    path = folder(tmp_path, text_config("lllf" * 16), dict.fromkeys(other.values(), one))
    began = time.perf_counter()
    error = refused(path)
    assert time.perf_counter() - began < 10
    renamed = sum(a != b for a, b in other.items())
    assert len(error.faults["missing"]) == len(error.faults["left over"]) == renamed
    assert all("there is" in name for name in error.faults["missing"])


@pytest.mark.parametrize("columns", [64, 32])
def test_a_quantised_tensor_is_one_fault_among_others(tmp_path, stored, columns):
    """float8 has no array type here; it is listed with the rest, its scale and its shape if that is wrong as well."""
    path = folder(tmp_path, TEXT, {name: array for name, array in stored.items() if name != UP})
    size = 96 * columns
    quantised = raw(tmp_path / "8bit.safetensors", {UP: entry("F8_E4M3", (96, columns), 0, size)}, bytes(size))
    scale = shard(tmp_path / "scale.safetensors", {UP + "_scale_inv": np.ones((1, 1), np.float32)})
    names = dict.fromkeys(set(stored) - {UP}, "model.safetensors")
    names |= {UP: quantised.name, UP + "_scale_inv": scale.name}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    error = refused(path)
    assert error.faults.pop("of a dtype no weight has") == [
        f"8bit.safetensors: {UP}: found F8_E4M3, expected F32, BF16, F16"
    ]
    assert error.faults.pop("left over") == [f"scale.safetensors: {UP}_scale_inv: F32 [1, 1]"]
    wrong = error.faults.pop("of another shape", [])
    assert wrong == [f"8bit.safetensors: {UP}: found [96, 32], expected [96, 64]"][: int(columns != 64)]
    assert not error.faults


def different(stored):
    return {"lm_head.weight": stored["lm_head.weight"]}


def one_bit(stored):
    head = stored["model.embed_tokens.weight"].copy()
    head.view(np.uint16)[-1, -1] ^= 1
    return {"lm_head.weight": head}


def wider(stored):
    return {"lm_head.weight": stored["model.embed_tokens.weight"].astype(np.float32)}


def shorter(stored):
    return {"lm_head.weight": stored["model.embed_tokens.weight"][:-1]}


def scalars(stored):
    return dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], stored["lm_head.weight"][0, 0])


@pytest.mark.parametrize("change", [different, one_bit, wider, shorter])
def test_tied_with_another_head_in_the_file(tmp_path, stored, change):
    error = refused(folder(tmp_path, TEXT | {"tie_word_embeddings": True}, stored | change(stored)))
    where = "model.safetensors: lm_head.weight is not model.embed_tokens.weight"
    assert error.faults == {"tied but different": [f"{where}; config says true"]}


def test_heads_without_dimensions_are_compared_as_well(tmp_path, stored):
    error = refused(folder(tmp_path, TEXT | {"tie_word_embeddings": True}, stored | scalars(stored)))
    assert error.faults == {
        "of another shape": ["model.safetensors: model.embed_tokens.weight: found [], expected [211, 64]"]
    }


@pytest.mark.parametrize(
    "config, said",
    [
        (TEXT, "config says false"),
        (composite(), "config says false and text_config says false"),
        (flagged(None, False), "text_config says false"),
        (flagged(None, None), "no flag, class default false"),
    ],
    ids=["text", "both", "text section", "neither"],
)
def test_untied_without_a_head(tmp_path, stored, config, said):
    """Using the embedding instead would run, and answer nonsense."""
    del stored["lm_head.weight"]
    error = refused(folder(tmp_path, config, stored))
    assert error.faults == {"untied but absent": [f"lm_head.weight; {said}"]}
    assert str(error).endswith("    files    model.safetensors")


def test_two_vision_towers_are_one_too_many(tmp_path, stored):
    """A part nothing here runs is still saved again, so it has to be there once."""
    extra = dict.fromkeys(["visual.a.weight", "model.visual.a.weight"], np.zeros(2, np.float32))
    error = refused(folder(tmp_path, TEXT, stored | extra))
    assert list(error.faults) == ["found twice"] and len(error.faults["found twice"]) == 1


def test_an_index_that_forgets_a_tensor_is_named(tmp_path, stored):
    path = folder(tmp_path, TEXT, stored)
    (path / "model.safetensors").unlink()
    rest = {name: array for name, array in stored.items() if name != UP}
    sharded(path, [dict(list(rest.items())[:5]), dict(list(rest.items())[5:])])
    assert str(refused(path)).splitlines()[-1].startswith("    files    model.safetensors.index.json: model-00001-of-")


def test_a_refused_checkpoint_leaves_nothing_open(tmp_path, stored):
    del stored["model.norm.weight"]
    path, before = folder(tmp_path, TEXT, stored), descriptors()
    refused(path)
    gc.collect()  # the traceback and its frames hold one another
    assert descriptors() == before and not maps_of(path)
