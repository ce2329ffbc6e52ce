"""A cache in a file: the bits come back, in another process too, and nothing else is taken for one."""

import hashlib
import json

import fresh
import numpy as np
import pytest
from cache_arrays import cache_bits
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from text_configs import CONFIGS, text_config

import qwenref
from qwenref import _C
from qwenref.errors import CheckpointError, InputError, QwenrefError

CONFIG = CONFIGS["aperiodic layers"]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=8)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(3).integers(0, CONFIG["vocab_size"], (2, 60))


def filled(model, ids, kind):
    """Caches that have something of everything."""
    cache = qwenref.Cache(model, batch=2, snapshot_every=8 if kind == "snapshots" else None)
    if kind == "fresh":
        return cache
    options = {}
    if kind == "pads":
        options["attention_mask"] = np.array([[0] * 7 + [1] * 13, [1] * 3 + [0] * 2 + [1] * 15])
    if kind == "packed":
        options["sequence_ids"] = np.array([[4] * 9 + [6] * 11, [2] * 20])
    model(ids[:, :20], cache=cache, **options)
    if kind == "deltas":
        cache.rope_deltas[:] = -3, 11
    return cache


KINDS = ("fresh", "plain", "pads", "packed", "deltas", "snapshots")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", ["fp32", "fp64"])
def test_the_bits_come_back_and_go_on(model, ids, tmp_path, kind, numerics):
    with qwenref.numerics(numerics):
        cache = filled(model, ids, kind)
        before = cache_bits(cache)
        cache.save(tmp_path / "cache.safetensors")
        assert cache_bits(cache) == before
        expected = model(ids[:, 20:31], cache=cache).logits.tobytes()
        for source in ((), (model,), (CONFIG,), (model.config,)):
            loaded = qwenref.Cache.load(tmp_path / "cache.safetensors", *source)
            assert cache_bits(loaded) == before and loaded.dtype == cache.dtype
            assert loaded.snapshot_every == cache.snapshot_every and loaded.snapshots == [[], []]
            assert model(ids[:, 20:31], cache=loaded).logits.tobytes() == expected
            assert cache_bits(loaded) == cache_bits(cache)


def test_a_conversation_goes_on_in_another_process(tmp_path):
    path = tmp_path / "cache.safetensors"
    tiny, tokens = qwenref.from_pretrained("tiny"), np.arange(70) * 7 % 900
    cache = qwenref.Cache(tiny)
    tiny(tokens[:40], cache=cache)
    cache.save(path)
    program = """
import hashlib, sys
import numpy as np, qwenref
tiny, tokens = qwenref.from_pretrained("tiny"), np.arange(70) * 7 % 900
cache = qwenref.Cache.load(sys.argv[1], tiny)
parts = [tiny(tokens[40:60], cache=cache).logits] + [tiny(tokens[t : t + 1], cache=cache).logits for t in range(60, 70)]
print(hashlib.sha256(np.concatenate(parts, 1).tobytes()).hexdigest())
cache.save(sys.argv[1])
"""
    done = fresh.python(program, path)
    expected = np.ascontiguousarray(tiny(tokens).logits[:, 40:])
    assert done.stdout.split() == [hashlib.sha256(expected.tobytes()).hexdigest()]
    tiny(tokens[40:], cache=cache)
    assert cache_bits(qwenref.Cache.load(path, tiny)) == cache_bits(cache)


def test_the_file_holds_the_documented_names(model, ids, tmp_path):
    """Read by another library: the layout is a format, not ours alone."""
    cache = filled(model, ids, "packed")
    cache.save(tmp_path / "c")
    tensors = load_file(tmp_path / "c")
    expected = {name: getattr(cache, name) for name in ("length", "mask", "rope_deltas", "sequence_begin", "sequence")}
    for i, layer in enumerate(cache.layers):
        kinds = (
            ("keys", "values") if CONFIG["layer_types"][i] == "full_attention" else ("conv_state", "recurrent_state")
        )
        expected.update({f"layers.{i}.{name}": getattr(layer, name) for name in kinds})
    assert sorted(tensors) == sorted(expected)
    for name, array in expected.items():
        assert tensors[name].dtype == array.dtype and tensors[name].tobytes() == np.ascontiguousarray(array).tobytes()
    with safe_open(tmp_path / "c", "numpy") as file:
        metadata = file.metadata()
    assert sorted(metadata) == ["config", "digest", "dtype", "format", "snapshot_every", "version"]
    assert (metadata["format"], metadata["version"], metadata["dtype"]) == ("qwenref.cache", "1", "float32")
    assert json.loads(metadata["config"])["layer_types"] == CONFIG["layer_types"]


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "other", ["GQA 6", "one attention layer", "conv width 2", "rotary half of the head", "only DeltaNet"]
)
def test_another_models_geometry_is_refused(model, ids, tmp_path, other):
    filled(model, ids, "plain").save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="c: made with another model\n    found .*\n    expected .*\n    do "):
        qwenref.Cache.load(tmp_path / "c", CONFIGS[other])


def test_another_rotation_of_the_same_shapes_is_refused(model, ids, tmp_path):
    filled(model, ids, "plain").save(tmp_path / "c")
    rope = CONFIG["rope_parameters"] | {"rope_theta": 1e6}
    with pytest.raises(CheckpointError, match="found    rope_theta 10000000.0\n    expected rope_theta 1000000.0"):
        qwenref.Cache.load(tmp_path / "c", CONFIG | {"rope_parameters": rope})
    assert qwenref.Cache.load(tmp_path / "c", CONFIG | {"rms_norm_eps": 1e-5}).length.tolist() == [20, 20]


def test_every_byte_of_the_file_matters(ids, tmp_path):
    """Flip any one byte, or cut the file anywhere: an error, never another cache."""
    small = text_config("lf", heads=(2, 1), delta=(1, 1), head_dim=16, hidden_size=8, intermediate_size=8, vocab_size=7)
    small |= {"linear_key_head_dim": 2, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 2}
    model = qwenref.from_config(small, seed=0)
    cache = qwenref.Cache(model)
    model(ids[:1, :2] % 7, cache=cache)
    cache.save(tmp_path / "c")
    good, before = (tmp_path / "c").read_bytes(), cache_bits(cache)
    start = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    places = {*range(8), *range(start, len(good)), *rng.integers(8, start, 300).tolist()}
    for at in sorted(places):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "bad").write_bytes(bad)
        try:
            found = cache_bits(qwenref.Cache.load(tmp_path / "bad", model))
        except QwenrefError:
            continue
        assert found == before and 8 <= at < start, at  # white space of the header says nothing
    for n in sorted({0, 1, 7, 8, 9, start - 1, start, *rng.integers(0, len(good), 60).tolist(), len(good) - 1}):
        (tmp_path / "bad").write_bytes(good[:n])
        with pytest.raises(QwenrefError):
            qwenref.Cache.load(tmp_path / "bad", model)


def rewritten(path, change):
    """The file with tensors and metadata changed and a digest that fits: what another program may write."""
    from qwenref.cache_file import _digest

    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    metadata.pop("digest", None)
    metadata["digest"] = _digest(tensors, metadata)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: m.update(version="2"), "qwenref.cache of an unknown version\n    found    2\n    expected 1\n"),
        (lambda t, m: m.update(format="qwenref.states"), "not a file of this kind\n    found    qwenref.states"),
        (lambda t, m: m.pop("format"), "not a file of this kind\n    found    no format"),
        (lambda t, m: t.pop("mask"), ": mask\n    found    nothing of that name\n"),
        (lambda t, m: t.pop("length"), ": no rows"),
        (lambda t, m: t.update(more=t["length"]), r": more\n    found    int64 \[2\]\n    expected nothing"),
        (lambda t, m: t.update({"layers.0.keys": t["layers.0.keys"][:, :, 1:]}), "keys\n.*, 19, 32]\n.*, 20, "),
        (lambda t, m: t.update({"layers.2.recurrent_state": t["layers.2.recurrent_state"].astype(float)}), "float64"),
        (lambda t, m: t.update(mask=~t["mask"]), "length and mask disagree"),
        (lambda t, m: t.update(length=t["length"] + 1), "layers.0.keys"),
        (lambda t, m: t.update(length=t["length"] - [0, 1]), "length and mask disagree"),
    ],
)  # fmt: skip
def test_what_is_no_cache_is_refused(model, ids, tmp_path, change, message):
    filled(model, ids, "plain").save(tmp_path / "c")
    rewritten(tmp_path / "c", change)
    with pytest.raises(CheckpointError, match=message):
        qwenref.Cache.load(tmp_path / "c", model)


def test_other_files_are_no_caches(model, tmp_path):
    with pytest.raises(QwenrefError):
        qwenref.Cache.load(tmp_path / "nothing", model)
    (tmp_path / "text").write_text("no cache")
    with pytest.raises(QwenrefError):
        qwenref.Cache.load(tmp_path / "text", model)
    save_file({"a": np.zeros(3)}, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="not a file of this kind\n    found    no format"):
        qwenref.Cache.load(tmp_path / "plain", model)


# ---------------------------------------------------------------------------------------------- never by halves


def test_a_save_that_fails_leaves_the_older_file(model, ids, tmp_path, monkeypatch):
    cache = filled(model, ids, "plain")
    cache.save(tmp_path / "c")
    good = (tmp_path / "c").read_bytes()
    monkeypatch.setattr(cache.layers[-1], "arrays", lambda: {"conv_state": np.array(["no number"])})
    with pytest.raises(QwenrefError):
        cache.save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == good and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_place_that_takes_no_file(model, ids, tmp_path):
    cache = filled(model, ids, "plain")
    before = cache_bits(cache)
    with pytest.raises((QwenrefError, OSError)):
        cache.save(tmp_path / "no folder" / "c")
    assert cache_bits(cache) == before and not any(tmp_path.iterdir())


def test_a_cache_is_not_saved_in_the_middle_of_a_call(model, ids, tmp_path):
    cache, found = filled(model, ids, "plain"), []

    def inside(*_):
        with pytest.raises(InputError, match="Cache.save: a call is being made on this cache"):
            cache.save(tmp_path / "c")
        found.append((tmp_path / "c").exists())

    with model.model.norm.register_forward_pre_hook(inside):
        model(ids[:, 20:25], cache=cache)
    assert found == [False]


def test_a_loaded_cache_has_memory_of_its_own(model, ids, tmp_path):
    cache = filled(model, ids, "plain")
    cache.save(tmp_path / "c")
    loaded = qwenref.Cache.load(tmp_path / "c", model)
    (tmp_path / "c").write_bytes(b"")  # a map of it would be gone now
    assert cache_bits(loaded) == cache_bits(cache)
    assert all(array.flags.writeable for layer in loaded.layers for array in layer.arrays().values())
    assert isinstance(loaded.config, _C.TextConfig)
