"""Opening checkpoints: every form of names gives the same model, weights are views of the files, saving keeps both."""

import gc
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoints import maps_of, raw
from folders import MARKS, TEXT, composite, flagged, folder, named, weights
from text_configs import CONFIGS, text_config
from vision_configs import vision_config

import qwenref
from qwenref import _C, CapabilityMissing, CheckpointError, ConfigError, InputError
from qwenref.loading import split_name

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
# Names of the backbone that savers have written, each a prefix of `layers`, `embed_tokens` and `norm`.
PREFIXES = [
    "model.language_model.",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.language_model.",
    "model.language_model.language_model.language_model.",
    "model.model.",
    "model.model.model.",
    "",
]


def text_in_root(text):
    return {key: value for key, value in composite(text).items() if key != "vision_config"}


def bits(model):
    return model(IDS).logits.tobytes()


@pytest.fixture(scope="module")
def arrays():
    return weights()


@pytest.fixture(scope="module")
def truth(arrays, tmp_path_factory):
    """Logit bits of the model under its plain names."""
    return bits(qwenref.from_pretrained(folder(tmp_path_factory.mktemp("plain"), TEXT, named(arrays, "model."))))


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("wrap", [dict, composite], ids=["text only", "composite"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_form_of_names_is_the_same_model(tmp_path, arrays, truth, prefix, wrap, shards):
    stored = list(named(arrays, prefix).items())
    parts = [dict(stored[i::shards]) for i in range(shards)]
    model = qwenref.from_pretrained(folder(tmp_path, wrap(TEXT), *parts))
    assert bits(model) == truth
    assert model.report.tensors == len(arrays) and len(model.report.files) == shards
    bare = 1 + (len(arrays) - 1) * (prefix == "")
    assert sum(model.report.prefixes.values()) == len(arrays) and model.report.prefixes[""] == bare


@pytest.mark.parametrize("head", ["lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"])
def test_a_head_may_have_a_prefix(tmp_path, arrays, truth, head):
    assert bits(qwenref.from_pretrained(folder(tmp_path, TEXT, named(arrays, "model.", head)))) == truth


def test_every_parameter_is_assigned_once(tmp_path, arrays):
    """Each has the bytes of its own tensor, and no two share memory."""
    model = qwenref.from_pretrained(folder(tmp_path, composite(), named(arrays, "model.language_model.")))
    seen = {}
    for name, parameter in model.named_parameters():
        stored = arrays[split_name(name)[1]]
        assert parameter.dtype == stored.dtype and parameter.tobytes() == stored.tobytes(), name
        assert seen.setdefault(parameter.__array_interface__["data"][0], name) == name
    assert len(seen) == len(arrays) and not any(p.is_meta for p in model.parameters())


def test_the_embedded_model_opens():
    model = qwenref.from_pretrained("tiny")
    assert type(model) is qwenref.ForConditionalGeneration and model.device == "cpu"
    assert model.report.tensors == len(list(model.parameters())) == 109 + 33
    assert model.report.dtypes == {"bfloat16": 97 + 33, "float32": 12}
    assert {part: len(names) for part, names in model.report.leftovers.items()} == {"mtp": 15}
    stored = _C.Checkpoint(model.path)
    assert len(stored) == 109 + 33 + 15
    for part, names in model.report.leftovers.items():
        assert all(f"{part}." in name and stored.info(name).shape == shape for name, shape in names.items())


def test_A6_stored_dtypes_stay(tmp_path, arrays):
    """A_log and the gated norm are float32 in published files; rounding them moves the decay of every token."""
    model = qwenref.from_pretrained(folder(tmp_path, TEXT, named(arrays, "model.")))
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == np.float32}
    assert wide == {f"model.layers.{i}.linear_attn.{leaf}" for i in (0, 2) for leaf in ("A_log", "norm.weight")}
    assert model.report.dtypes == {"bfloat16": len(arrays) - 4, "float32": 4}
    for word in (f"{len(arrays) - 4} bfloat16", "4 float32"):
        assert word in repr(model.report)
    assert {p.dtype.name for p in model.parameters()} == {"bfloat16", "float32"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_float_dtypes_are_weights_too(tmp_path, arrays, dtype):
    """float32 holds every bfloat16, so its logits are the same bits; float16 holds these up to its own rounding."""
    stored = {name: array.astype(dtype) for name, array in named(arrays, "model.").items()}
    same = qwenref.from_pretrained(folder(tmp_path / "same", TEXT, stored))
    widened = {name: array.astype(np.float32) for name, array in stored.items()}
    assert bits(same) == bits(qwenref.from_pretrained(folder(tmp_path / "wide", TEXT, widened)))


@pytest.mark.parametrize("wrap", [dict, text_in_root], ids=["text only", "composite without vision_config"])
def test_what_is_left_over_is_listed(tmp_path, arrays, truth, wrap):
    extra = {
        "model.visual.blocks.0.attn.qkv.bias": np.zeros(9, np.float32),
        "visual.pos_embed.weight": np.zeros((4, 2), np.float32),
        "mtp.fc.weight": np.zeros((3, 6), np.float32),
    }
    model = qwenref.from_pretrained(folder(tmp_path, wrap(TEXT), named(arrays, "model.") | extra))
    assert model.report.leftovers == {
        "mtp": {"mtp.fc.weight": (3, 6)},
        "visual": {"model.visual.blocks.0.attn.qkv.bias": (9,), "visual.pos_embed.weight": (4, 2)},
    }
    assert "2 tensors of the vision tower (visual.*)" in repr(model.report)
    assert "1 tensors of the next-token head (mtp.*)" in repr(model.report)
    count = qwenref.parameters(model)
    assert (count.visual, count.mtp) == (17, 18)
    assert bits(model) == truth


def test_a_config_that_sees_opens_without_a_tower_where_the_files_have_none(tmp_path, arrays, truth):
    model = qwenref.from_pretrained(folder(tmp_path, composite(), named(arrays, "model.language_model.")))
    assert model.report.without == ("visual",) and bits(model) == truth
    assert "vision tower: the config describes one, no file has a tensor of it" in repr(model.report)
    with pytest.raises(AttributeError, match="Model has no visual: the checkpoint has no vision tower"):
        model.model.visual  # noqa: B018
    pixels = np.zeros((4, 1536), np.float32)
    with pytest.raises(qwenref.CapabilityMissing, match="without a tower"):
        model([[MARKS["image_token_id"]]], pixel_values=pixels, image_grid_thw=[[1, 2, 2]])


def test_a_tower_of_which_a_part_is_missing_is_refused(tmp_path, arrays):
    extra = {"model.visual.pos_embed.weight": np.zeros((2304, 1152), np.float32)}
    with pytest.raises(qwenref.CheckpointError, match="20 missing") as caught:
        qwenref.from_pretrained(folder(tmp_path, composite(), named(arrays, "model.language_model.") | extra))
    assert any("model.visual.merger.norm.weight: expected [1152]" in line for line in caught.value.faults["missing"])


def test_D2_a_packed_position_table_is_refused(tmp_path, arrays):
    """Quantised to four bits in 32, its rows would all but vanish where they are taken for numbers."""
    model = qwenref.from_config(vision_config("lf"), seed=0)
    model.save_pretrained(tmp_path)
    tensors = {name: np.array(array) for name, array in _C.Checkpoint(tmp_path).items()}
    name = "model.visual.pos_embed.weight"
    for packed in (np.zeros((64, 4), np.uint32), np.zeros((64, 4), np.float32)):
        _C.save_safetensors(tmp_path / "model.safetensors", tensors | {name: packed})
        with pytest.raises(qwenref.CheckpointError, match=r"pos_embed.weight: found \[64, 4\], expected \[64, 32\]"):
            qwenref.from_pretrained(tmp_path)


# ---- views ------------------------------------------------------------------------------------------------------


def test_a_weight_is_a_view_of_the_file(tmp_path, arrays, truth):
    path = folder(tmp_path, TEXT, named(arrays, "model."))
    before = (path / "model.safetensors").read_bytes()
    model = qwenref.from_pretrained(path)
    weight = model.model.layers[1].self_attn.o_proj.weight
    kept = weight.copy()
    weight[...] = 0
    assert bits(model) != truth
    assert (path / "model.safetensors").read_bytes() == before
    assert bits(qwenref.from_pretrained(path)) == truth  # nobody else sees the edit
    weight[...] = kept
    assert bits(model) == truth


def test_a_view_outlives_the_model(tmp_path, arrays):
    path = folder(tmp_path, TEXT, named(arrays, "model."))
    model = qwenref.from_pretrained(path)
    row = model.model.embed_tokens.weight[7]
    del model
    gc.collect()
    assert maps_of(path)
    assert row.tobytes() == arrays["embed_tokens.weight"][7].tobytes()
    del row
    gc.collect()
    assert not maps_of(path)


@pytest.mark.parametrize("shift", range(1, 8))
def test_tensors_at_odd_addresses_give_the_same_bits(tmp_path, arrays, truth, shift):
    """A header whose length is no multiple of 8 leaves every tensor behind it unaligned."""
    path = folder(tmp_path, TEXT, named(arrays, "model."))
    file = path / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    raw(file, content[8 : 8 + length] + b" " * shift, content[8 + length :], pad=0)
    model = qwenref.from_pretrained(path)
    wide = model.model.layers[0].linear_attn.A_log
    assert wide.dtype == np.float32 and wide.flags.aligned == (shift == 4)
    assert bits(model) == truth


# ---- tied heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "root, text, tied",
    [(True, True, True), (True, None, True), (None, True, True), (False, None, False), (None, None, False)],
)
def test_the_root_flag_else_the_texts_says_whether_the_head_is_tied(tmp_path, arrays, root, text, tied):
    stored = named(arrays, "model.")
    if tied:
        del stored["lm_head.weight"]
    model = qwenref.from_pretrained(folder(tmp_path, flagged(root, text), stored))
    assert model.report.tied is tied
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) is tied
    assert model.report.tensors == len(arrays) - tied == len(list(model.parameters()))


@pytest.mark.parametrize("root, text", [(True, False), (False, True)])
@pytest.mark.parametrize("head", [True, False])
def test_flags_that_differ_yield_to_the_file(tmp_path, arrays, root, text, head):
    stored = named(arrays, "model.")
    if not head:
        del stored["lm_head.weight"]
    model = qwenref.from_pretrained(folder(tmp_path, flagged(root, text), stored))
    assert model.report.tied is (not head)
    said = f"config says {str(root).lower()} and text_config says {str(text).lower()}"
    assert model.report.tied_by == f"{said}: lm_head.weight is {'present' if head else 'absent'}"
    expected = arrays["lm_head.weight" if head else "embed_tokens.weight"]
    assert model.lm_head.weight.tobytes() == expected.tobytes()


def test_a_tied_head_may_be_stored_twice(tmp_path, arrays):
    stored = named(arrays, "model.") | {"lm_head.weight": arrays["embed_tokens.weight"]}
    model = qwenref.from_pretrained(folder(tmp_path, TEXT | {"tie_word_embeddings": True}, stored))
    assert model.report.tied and model.lm_head.weight is model.model.embed_tokens.weight
    model.model.embed_tokens.weight[5] = 0
    assert not model.lm_head.weight[5].any()


# ---- saving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["values 3 x keys, GQA 4", "tied embedding", "attention bias", "only DeltaNet"])
def test_saving_and_opening_changes_no_bit(tmp_path, name):
    model = qwenref.from_config(CONFIGS[name], seed=4)
    model.save_pretrained(tmp_path / "new" / "folder")
    again = qwenref.from_pretrained(tmp_path / "new" / "folder")
    assert bits(again) == bits(model)
    assert again.config == model.config
    stored = _C.Checkpoint(tmp_path / "new" / "folder")
    assert ("lm_head.weight" in stored) is not CONFIGS[name]["tie_word_embeddings"]
    assert set(stored) == {name for name, _ in model.named_parameters()}


def test_saving_keeps_edits_and_what_was_left_over(tmp_path):
    """A composite checkpoint keeps its vision tower, under the names transformers gives it."""
    model = qwenref.from_pretrained("tiny")
    model.lm_head.weight[...] *= 2
    model.save_pretrained(tmp_path)
    before, after = _C.Checkpoint(model.path), _C.Checkpoint(tmp_path)
    assert set(after) == set(before)
    changed = {name for name in after if after[name].tobytes() != before[name].tobytes()}
    assert changed == {"lm_head.weight"}
    assert after.dtypes == before.dtypes
    assert bits(qwenref.from_pretrained(tmp_path)) == bits(model)


def test_saving_over_its_own_file_is_safe(tmp_path, arrays):
    path = folder(tmp_path, TEXT, named(arrays, "model."))
    model = qwenref.from_pretrained(path)
    model.lm_head.weight[...] *= 2
    edited = bits(model)
    model.save_pretrained(path)
    assert bits(model) == edited == bits(qwenref.from_pretrained(path))


def test_saving_beside_another_checkpoint_is_refused(tmp_path, arrays):
    """Two checkpoints in one folder are none: neither could be opened afterwards."""
    stored = list(named(arrays, "model.").items())
    path = folder(tmp_path, TEXT, dict(stored[:9]), dict(stored[9:]))
    model = qwenref.from_pretrained(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="holds another checkpoint"):
        model.save_pretrained(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_model_without_data_is_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match="without data"):
        qwenref.from_config(TEXT, device="meta").save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("wrap", [dict, composite], ids=["text only", "composite"])
def test_transformers_opens_what_was_saved(tmp_path, arrays, wrap):
    transformers = pytest.importorskip("transformers", reason="the witness needs transformers (extra 'test')")
    torch = pytest.importorskip("torch", reason="the witness needs PyTorch (extra 'test')")
    source = folder(tmp_path / "source", wrap(TEXT), named(arrays, "model."))
    model = qwenref.from_pretrained(source)
    model.save_pretrained(tmp_path / "saved")
    kind = getattr(transformers, wrap(TEXT)["architectures"][0])
    theirs, info = kind.from_pretrained(tmp_path / "saved", dtype=torch.float32, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all("visual" in name for name in info["missing_keys"])  # this checkpoint never had a tower
    weights = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        assert np.array_equal(weights[name].detach().numpy(), np.asarray(parameter, np.float32)), name


# ---- without data, and from a seed ------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["fp32", "fp64"])
def test_a_model_without_data_refuses_to_run(profile):
    model = qwenref.from_config(TEXT, device="meta")
    assert model.device == "meta" and all(p.is_meta for p in model.parameters())
    cache = qwenref.Cache(model)
    with qwenref.numerics(profile), pytest.raises(CapabilityMissing, match="w is a parameter without data") as caught:
        model(IDS, cache=cache)
    assert caught.value.__notes__ == ["in module model.embed_tokens (Embedding)"]
    assert not cache.length.any()


@pytest.mark.parametrize("profile", ["fp32", "fp64"])
def test_one_parameter_without_data_leaves_the_cache_as_it_was(profile):
    model = qwenref.from_config(TEXT, seed=0)
    with qwenref.numerics(profile):
        cache = qwenref.Cache(model)
        model(IDS, cache=cache)
        before = cache.snapshot()
        place = model.model.layers[3].mlp.up_proj
        held, place.weight = place.weight, qwenref.Parameter.meta(place.weight.shape, "bfloat16")
        assert model.device == "meta"
        with pytest.raises(CapabilityMissing, match="without data") as caught:
            model(IDS, cache=cache)
        assert caught.value.__notes__ == ["in module model.layers.3.mlp.up_proj (Linear)"]
        after = cache.snapshot()
        for old, new in zip(before["layers"], after["layers"], strict=True):
            assert all(old[name].tobytes() == new[name].tobytes() for name in old)
        place.weight = held
        fresh = qwenref.Cache(model)
        model(IDS, cache=fresh)
        assert model(IDS, cache=cache).logits.tobytes() == model(IDS, cache=fresh).logits.tobytes()


def test_a_seed_decides_every_weight():
    one, same, other = (qwenref.from_config(TEXT, seed=seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.tobytes() == b.tobytes() and a.tobytes() != c.tobytes(), name


def test_a_weight_depends_on_no_other():
    """Fewer layers, a tied head or a vision section change no weight that is still there."""
    whole = {split_name(n)[1]: p.tobytes() for n, p in qwenref.from_config(TEXT, seed=3).named_parameters()}
    short = text_config("lf", delta=(2, 6), tie_word_embeddings=True)
    for config in (short, composite()):
        part = {split_name(n)[1]: p.tobytes() for n, p in qwenref.from_config(config, seed=3).named_parameters()}
        part = {name: value for name, value in part.items() if not name.startswith("visual.")}
        assert part and part.items() <= whole.items()
    assert len(set(whole.values())) == len(whole)


def test_random_weights_make_a_model_that_tells_tokens_apart():
    """Decays of 0.2 to 0.999 a token keep memory; logits of deviation 1 to 10 are neither flat nor saturated."""
    model = qwenref.from_config(CONFIGS["27B proportions"], seed=0)
    logits = model(np.arange(64)[None]).logits
    assert np.isfinite(logits).all() and 1 < logits.std() < 10
    assert model.report is None and model.path is None


@pytest.mark.parametrize("dtype", ["float32", np.float16, ml_dtypes.bfloat16])
def test_the_dtype_of_random_weights(dtype):
    model = qwenref.from_config(TEXT, seed=0, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {np.dtype(dtype)}
    assert np.isfinite(model(IDS).logits).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "1"])
def test_a_seed_is_a_number_of_64_bits(seed):
    with pytest.raises(InputError, match="from_config: seed"):
        qwenref.from_config(TEXT, seed=seed)
    assert bits(qwenref.from_config(TEXT, seed=2**64 - 1)) != bits(qwenref.from_config(TEXT, seed=0))


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", object])
def test_a_dtype_no_op_takes_is_refused_at_once(dtype):
    with pytest.raises(InputError, match="from_config: dtype"):
        qwenref.from_config(TEXT, device="meta", dtype=dtype)


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "meta", "seed": 0}, {"numerics": "fp99"}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(InputError):
        qwenref.from_config(TEXT, **options)


def test_a_config_by_any_name(tmp_path, monkeypatch):
    """A dict, a Config, a folder, a file; "tiny" is the embedded model whatever the working folder holds."""
    tiny = qwenref.from_pretrained("tiny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in ("tiny", tiny.config, tiny.config.to_dict(), tiny.path, tiny.path / "config.json"):
        assert qwenref.from_config(source, device="meta").config == tiny.config
    for source in (5, None, ["tiny"]):
        with pytest.raises(ConfigError, match="config: "):
            qwenref.from_config(source, device="meta")
