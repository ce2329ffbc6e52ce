"""Checkpoint files: what is read, written and refused, and that nothing is left behind when something is refused."""

import json
import os
import random
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import checkpoints as make
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from qwenref import _C
from qwenref.errors import CheckpointError, DTypeError, InputError, ShapeError

F4 = make.entry("F32", [1], 0, 4)
ONE = {"a": F4}


def arrays():
    """One array of every dtype NumPy has, a scalar and an empty one among them."""
    rng = np.random.default_rng(7)
    out = {f"t.{name}": rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in make.NUMPY.items()}
    return out | {"scalar": np.float32(2.5), "empty": np.zeros((0, 4), np.int16), "ünï": np.arange(3, dtype=np.uint8)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def maps_of(folder):
    with open("/proc/self/maps") as lines:
        return [line for line in lines if str(folder) in line]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------------------------------- reading


def test_every_array_of_a_file_is_read_as_stored(tmp_path):
    want = arrays()
    checkpoint = _C.Checkpoint(make.shard(tmp_path / "m.safetensors", want, {"format": "pt", "ä": "ö"}))
    assert list(checkpoint) == list(checkpoint.keys()) == sorted(want, key=str.encode)
    assert len(checkpoint) == len(want)
    assert all(same(checkpoint[name], np.asarray(want[name])) for name in want)
    assert {name: array.tobytes() for name, array in checkpoint.items()} == {
        name: np.asarray(array).tobytes() for name, array in want.items()
    }
    assert checkpoint.metadata == {"format": "pt", "ä": "ö"}
    assert checkpoint.files == ["m.safetensors"]
    assert checkpoint.nbytes == sum(np.asarray(array).nbytes for array in want.values())
    assert checkpoint.dtypes["F32"] == 2 and sum(checkpoint.dtypes.values()) == len(want)


def test_it_is_a_mapping(tmp_path):
    checkpoint = _C.Checkpoint(str(make.shard(tmp_path / "m.safetensors", {"a": np.ones(2), "b": np.ones(3)})))
    assert isinstance(checkpoint, Mapping)
    assert "a" in checkpoint and "c" not in checkpoint and 3 not in checkpoint and "a\0b" not in checkpoint
    assert "\ud800" not in checkpoint
    assert checkpoint.get("c") is None and checkpoint.get("c", 5) == 5 and checkpoint.get("b").shape == (3,)
    assert [array.shape for array in checkpoint.values()] == [(2,), (3,)]
    assert checkpoint.keys() & {"a", "z"} == {"a"}
    assert sorted(dict(checkpoint)) == ["a", "b"]
    assert repr(checkpoint) == "<Checkpoint: 2 tensors in 1 file>"


def test_a_missing_name_is_a_key_error_that_names_the_near_ones(tmp_path):
    names = ["model.language_model.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    checkpoint = _C.Checkpoint(make.shard(tmp_path / "m.safetensors", dict.fromkeys(names, np.ones(1))))
    with pytest.raises(KeyError) as error:
        checkpoint["model.layers.0.mlp.up_proj.weight"]
    assert error.value.args[0].startswith(
        "'model.layers.0.mlp.up_proj.weight' is not one of the 3 tensors. Near: " + names[0]
    )
    with pytest.raises(KeyError, match="Near: lm_head.weight"):
        checkpoint["lm_haed.weight"]
    with pytest.raises(KeyError) as error:
        checkpoint.info("nothing.like.it.at.all")
    assert error.value.args[0] == "'nothing.like.it.at.all' is not one of the 3 tensors"
    for key in (3, None, ("a",), "\ud800"):
        with pytest.raises(KeyError):
            checkpoint[key]


def test_info_says_where_the_bytes_are(tmp_path):
    path = make.shard(tmp_path / "m.safetensors", {"a": np.arange(3, dtype=np.int8), "b": np.float64(1.5)}, pad=0)
    info = _C.Checkpoint(path).info("b")
    assert (info.dtype, info.shape, info.file, info.nbytes) == ("F64", (), "m.safetensors", 8)
    assert struct.unpack("<d", path.read_bytes()[info.offset : info.offset + 8]) == (1.5,)


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("shift", range(8))
def test_arrays_are_right_at_any_alignment(tmp_path, pad, shift):
    values = {"x" * (shift + 1): np.zeros(shift, np.uint8), "y": np.arange(6, dtype=np.float32).reshape(2, 3)}
    values |= {"z": np.arange(5).astype(ml_dtypes.bfloat16), "i": np.arange(4, dtype=np.int64)}
    checkpoint = _C.Checkpoint(make.shard(tmp_path / "m.safetensors", values, pad=pad))
    for name, want in values.items():
        got = checkpoint[name]
        assert same(got, want) and same(np.require(got, requirements="A"), want)
        assert got.flags.aligned == (checkpoint.info(name).offset % want.dtype.alignment == 0)
    checkpoint["y"][1, 2] = 50
    assert checkpoint["y"][1, 2] == 50 and checkpoint["y"].sum() == 60


@pytest.mark.parametrize("dtype", [name for name in make.BITS if name not in make.NUMPY])
def test_a_dtype_without_arrays_is_described_and_refused_on_access_only(tmp_path, dtype):
    header, size = make.layout({"good": ("F32", (1,)), "odd": (dtype, (2, 4))})
    checkpoint = _C.Checkpoint(make.raw(tmp_path / "m.safetensors", header, bytes(size)))
    assert checkpoint.info("odd")[:2] == (dtype, (2, 4))
    assert checkpoint.info("odd").nbytes == make.BITS[dtype]
    assert checkpoint["good"].shape == (1,)
    with pytest.raises(DTypeError) as error:
        checkpoint["odd"]
    assert str(error.value).splitlines()[0] == f"m.safetensors: odd: {dtype} has no array type"


# ---------------------------------------------------------------------------------------------- copy on write


def test_an_edit_stays_in_this_process(tmp_path):
    path = make.shard(tmp_path / "m.safetensors", {"a": np.arange(4000, dtype=np.float32), "b": np.ones(3)})
    before = path.read_bytes()
    first, second = _C.Checkpoint(path), _C.Checkpoint(path)
    first["a"][:] = -1
    assert (first["a"] == -1).all(), "the same checkpoint sees the edit"
    assert (second["a"] == np.arange(4000)).all(), "another one does not"
    first.advise("a", "dontneed")
    assert (first["a"] == -1).all(), "advice loses no edit"
    del first, second
    assert path.read_bytes() == before


def test_an_array_outlives_the_checkpoint(tmp_path):
    path = make.shard(tmp_path / "m.safetensors", {"a": np.arange(4000.0)})
    array = _C.Checkpoint(path)["a"][10:]
    path.unlink()
    assert maps_of(tmp_path)
    assert array.sum() == sum(range(10, 4000))
    del array
    assert not maps_of(tmp_path)


def test_advice_and_residency(tmp_path):
    path = make.shard(tmp_path / "m.safetensors", {"a": np.ones(1 << 20, np.float32), "b": np.ones(5, np.int8)})
    checkpoint = _C.Checkpoint(path)
    checkpoint.advise("a", "willneed")
    assert checkpoint["a"].sum() == 1 << 20
    assert checkpoint.resident() == path.stat().st_size
    for name in checkpoint:
        checkpoint.advise(name, "dontneed")
    assert 0 <= checkpoint.resident() <= path.stat().st_size
    assert checkpoint["a"].sum() == 1 << 20
    with pytest.raises(InputError, match="^advise: 'sequential' is no advice"):
        checkpoint.advise("a", "sequential")
    with pytest.raises(KeyError):
        checkpoint.advise("c", "willneed")


def test_many_threads_may_read_at_once(tmp_path):
    want = {f"t{i}": np.full(100, i, np.float32) for i in range(50)}
    checkpoint = _C.Checkpoint(make.shard(tmp_path / "m.safetensors", want))
    faults = []

    def read(seed):
        rng = random.Random(seed)
        for _ in range(300):
            name = rng.choice(list(want))
            if not same(checkpoint[name], want[name]) or checkpoint.info(name).shape != (100,):
                faults.append(name)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# ---------------------------------------------------------------------------------------------- size

SPARSE_PROBE = """
import sys, time, resource
from qwenref import _C
status = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
_C.Checkpoint  # everything imported
before, start = status(), time.perf_counter()
checkpoint = _C.Checkpoint(sys.argv[1])
seconds = time.perf_counter() - start
for name in checkpoint:
    checkpoint[name], checkpoint.info(name)
last = checkpoint["zzz.last"]
last[-1] = 3.0
print(seconds, status() - before, len(checkpoint), checkpoint.nbytes, float(checkpoint["zzz.last"][-1]))
"""


@pytest.mark.parametrize("shards", [1, 12])
def test_a_27b_checkpoint_of_holes_opens_at_once(tmp_path, shards):
    tensors = make.text_27b()
    assert len(tensors) == 851
    if shards == 1:
        path = make.sparse(tmp_path / "model.safetensors", tensors | {"zzz.last": ("F32", (1024,))})
        assert path.stat().st_size > 50 << 30
    else:
        make.sparse_sharded(tmp_path, tensors | {"zzz.last": ("F32", (1024,))}, shards)
    done = subprocess.run(
        [sys.executable, "-c", SPARSE_PROBE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, grown, count, nbytes, edited = map(float, done.stdout.split())
    assert (count, edited) == (852, 3.0)
    assert nbytes == sum(make.nbytes(*spec) for spec in tensors.values()) + 4096
    assert seconds < 1.0
    assert grown < 50


def test_offsets_beyond_two_and_four_gib_point_at_their_bytes(tmp_path):
    tensors = {"a": ("U8", ((1 << 31) + 5,)), "b": ("U8", (1 << 31,)), "c": ("F32", (3,))}
    path = make.sparse(tmp_path / "m.safetensors", tensors)
    with open(path, "r+b") as file:
        file.seek(-12, os.SEEK_END)
        file.write(struct.pack("<3f", 1, 2, 3))
    checkpoint = _C.Checkpoint(path)
    assert checkpoint["c"].tolist() == [1, 2, 3]
    assert checkpoint.info("c").offset > 1 << 32
    assert checkpoint["a"].shape == ((1 << 31) + 5,)
    checkpoint["a"][-1] = 9
    assert checkpoint["a"][-1] == 9 and checkpoint["b"][0] == 0


# ---------------------------------------------------------------------------------------------- folders


def test_a_folder_of_shards_is_one_sorted_mapping(tmp_path):
    files = make.sharded(tmp_path, [{"c": np.ones(1), "a": np.ones(2)}, {"b": np.ones(3)}])
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", str(tmp_path) + "/"):
        checkpoint = _C.Checkpoint(path)
        assert list(checkpoint) == ["a", "b", "c"]
        assert [checkpoint[name].size for name in checkpoint] == [2, 3, 1]
        assert checkpoint.files == files
        assert checkpoint.info("b").file == files[1]
    assert list(_C.Checkpoint(tmp_path / files[1])) == ["b"]


def test_shards_may_be_links_out_of_the_folder(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    make.shard(tmp_path / "blobs" / "0123abc", {"a": np.ones(2)})
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123abc")
    assert _C.Checkpoint(tmp_path / "snapshot")["a"].sum() == 2


def test_an_index_may_name_the_single_file(tmp_path):
    make.shard(tmp_path / "model.safetensors", {"a": np.ones(2)})
    make.index(tmp_path, {"a": "model.safetensors"}, total_size=16)
    assert list(_C.Checkpoint(tmp_path)) == ["a"]


def test_first_file_wins_where_metadata_differs(tmp_path):
    make.shard(tmp_path / "x1", {"a": np.ones(1)}, {"format": "pt", "only": "1"})
    make.shard(tmp_path / "x2", {"b": np.ones(1)}, {"format": "np", "too": "2"})
    make.index(tmp_path, {"a": "x1", "b": "x2"})
    assert _C.Checkpoint(tmp_path).metadata == {"format": "pt", "only": "1", "too": "2"}


# ---------------------------------------------------------------------------------------------- refused files

HEADERS = {
    "no object": ("[]", b"", "m: header is not a JSON object"),
    "a number": ("12345678", b"", "m: header is not a JSON object"),
    "empty": ("", b"", "m: header is not a JSON object"),
    "blanks first": (" {}", b"", "m: header is not a JSON object"),
    "not JSON": ('{"a": }', b"", "m: header is not JSON (byte 6)"),
    "cut off": ('{"a": {"dtype": "F32", "shape"', b"", "m: header is not JSON (byte 29)"),
    "text after it": ("{} {}", b"", "m: header is not JSON (byte 3)"),
    "nesting bomb": ('{"a": ' + "[" * 100_000, b"", "m: header is nested deeper than 3 levels (byte 8)"),
    "long list": ('{"a": [' + "0," * 70 + "0]}", b"", "m: header holds a list of more than 64 items (byte 134)"),
    "bad UTF-8": (b'{"\xff": 1}', b"", "m: header is not UTF-8 (byte 2)"),
    "overlong UTF-8": (b'{"\xc0\x80": 1}', b"", "m: header is not UTF-8 (byte 2)"),
    "UTF-8 surrogate": (b'{"\xed\xa0\x80": 1}', b"", "m: header is not UTF-8 (byte 2)"),
    "lone surrogate": ('{"\\ud800": 1}', b"", "m: header is not JSON (byte 2)"),
    "NUL": (b'{"a\0b": 1}', b"", "m: header holds a NUL character (byte 3)"),
    "escaped NUL": ('{"a\\\\\\u0000b": 1}', b"", "m: header holds a NUL character (byte 5)"),
    "control character": ('{"a\nb": 1}', b"", "m: header is not JSON: raw control character in a string (byte 3)"),
    "row is no object": ({"a": 3}, b"", "m: a: is not described by an object"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, b"1234", "m: a: has no dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "m: a: has no shape"),
    "no offsets": ({"a": {"dtype": "F32", "shape": []}}, b"1234", "m: a: has no data_offsets"),
    "unknown field": ({"a": F4 | {"scale": 2}}, b"1234", 'm: a: unknown field "scale"'),
    "repeated field": (
        '{"a": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}',
        b"1234",
        'm: a: repeated field "dtype"',
    ),
    "unknown dtype": ({"a": F4 | {"dtype": "Q4_K"}}, b"1234", 'm: a: dtype "Q4_K" is not one of the format'),
    "dtype in lower case": ({"a": F4 | {"dtype": "f32"}}, b"1234", 'm: a: dtype "f32" is not one of the format'),
    "dtype is no string": ({"a": F4 | {"dtype": 3}}, b"1234", "m: a: dtype is not a string"),
    "shape is no list": ({"a": F4 | {"shape": 1}}, b"1234", "m: a: shape is not a list"),
    "negative size": ({"a": F4 | {"shape": [2, -1]}}, b"1234", "m: a: shape[1] is not a size"),
    "fractional size": ({"a": F4 | {"shape": [1.5]}}, b"1234", "m: a: shape[0] is not a size"),
    "size in words": ({"a": F4 | {"shape": ["1"]}}, b"1234", "m: a: shape[0] is not a size"),
    "size of 2^53": ({"a": F4 | {"shape": [2**53]}}, b"1234", "m: a: shape[0] is not a size"),
    "infinite size": (
        '{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
        b"1234",
        "m: a: shape[0] is not a size",
    ),
    "nine dimensions": ({"a": F4 | {"shape": [1] * 9}}, b"1234", "m: a: shape has more than 8 dimensions"),
    "product overflows": (
        {"a": F4 | {"shape": [2**32, 2**32]}},
        b"1234",
        "m: a: shape [4294967296, 4294967296] of F32 is not a possible size",
    ),
    "product wraps to 4": (
        {"a": F4 | {"shape": [2**31 + 1, 2**33 - 3, 2**50]}},
        b"1234",
        "m: a: shape [2147483649, 8589934589, 1125899906842624] of F32 is not a possible size",
    ),
    "half a byte": ({"a": make.entry("F4", [3], 0, 1)}, b"1", "m: a: shape [3] of F4 is not a possible size"),
    "one offset": ({"a": F4 | {"data_offsets": [0]}}, b"1234", "m: a: data_offsets is not a pair of positions"),
    "three offsets": (
        {"a": F4 | {"data_offsets": [0, 4, 8]}},
        b"1234",
        "m: a: data_offsets is not a pair of positions",
    ),
    "offsets no list": (
        {"a": F4 | {"data_offsets": {"0": 0}}},
        b"1234",
        "m: a: data_offsets is not a pair of positions",
    ),
    "offsets negative": (
        {"a": F4 | {"data_offsets": [-4, 0]}},
        b"1234",
        "m: a: data_offsets is not a pair of positions",
    ),
    "offsets backwards": ({"a": F4 | {"data_offsets": [40, 32]}}, b"1234", "m: a: offsets 40..32 run backwards"),
    "too few bytes": ({"a": F4 | {"shape": [2]}}, b"1234", "m: a: offsets hold 4 bytes, shape takes 8"),
    "too many bytes": ({"a": F4 | {"shape": [0]}}, b"1234", "m: a: offsets hold 4 bytes, shape takes 0"),
    "beyond the file": ({"a": make.entry("F32", [2], 0, 8)}, b"1234567", "m: a: offsets 0..8 go beyond the file"),
    "far beyond": (
        {"a": make.entry("U8", [4], 2**53 - 5, 2**53 - 1)},
        b"1234",
        "m: a: offsets 9007199254740987..9007199254740991 go beyond the file",
    ),
    "overlap": ({"a": make.entry("U8", [4], 0, 4), "b": make.entry("U8", [4], 2, 6)}, b"123456", "m: b: overlaps a"),
    "same bytes": ({"a": F4, "b": F4}, b"1234", "m: b: overlaps a"),
    "empty inside": ({"a": F4, "b": make.entry("U8", [0], 2, 2)}, b"1234", "m: b: overlaps a"),
    "hole": (
        {"a": F4, "b": make.entry("F32", [1], 8, 12)},
        b"123456789012",
        "m: b: offsets 4..8 of the data before it belong to no tensor",
    ),
    "hole first": (
        {"a": make.entry("F32", [1], 4, 8)},
        b"12345678",
        "m: a: offsets 0..4 of the data before it belong to no tensor",
    ),
    "trailing bytes": (ONE, b"123456", "m: 2 bytes follow the last tensor"),
    "data without tensors": ({}, b"123456", "m: 6 bytes follow the last tensor"),
    "name twice": (
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
        b"1234",
        "m: a: appears twice in the header",
    ),
    "metadata no object": ({"__metadata__": [], **ONE}, b"1234", "m: __metadata__ is not an object of strings"),
    "metadata not text": ({"__metadata__": {"k": 1}, **ONE}, b"1234", 'm: __metadata__["k"] is not a string'),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', b"", "m: __metadata__ appears twice"),
    "metadata key twice": ('{"__metadata__":{"k":"1","k":"2"}}', b"", 'm: __metadata__["k"] appears twice'),
    "name in a message": ({"a\tb" + "é" * 300: 3}, b"", "m: a?b" + "é" * 62 + "...: is not described by an object"),
}


def first_line_of(path):
    """The refusal's first line, after checking its form and that nothing stays open or mapped."""
    before = descriptors()
    with pytest.raises(CheckpointError) as error:
        _C.Checkpoint(path)
    first, *rest = str(error.value).splitlines()
    assert len(rest) <= 11 and all(line.startswith("    ") for line in rest)
    assert descriptors() == before
    assert not maps_of(path)
    return first


@pytest.mark.parametrize(("header", "data", "first"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_refused(tmp_path, header, data, first):
    assert first_line_of(make.raw(tmp_path / "m", header, data, pad=0)) == first


def bad_paths(folder):
    """name -> (path, first line of the error)"""
    good = make.shard(folder / "good.safetensors", {"a": np.ones(2)})
    size = good.stat().st_size
    for name, content in {
        "empty": b"",
        "seven": b"1234567",
        "limit": struct.pack("<Q", 100_000_001) + b"{}",
        "huge": struct.pack("<Q", 2**64 - 1) + b"{}",
        "long": struct.pack("<Q", 3) + b"{}",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        "gguf": b"GGUF\x03\0\0\0\x01\0\0\0",
        "zip": b"PK\x03\x04\0\0\x08\x08\0\0\0\0",
        "cut": good.read_bytes()[:-1],
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "dangling").mkdir()
    (folder / "dangling" / "model.safetensors").symlink_to("nowhere")
    (folder / "nested" / "model.safetensors").mkdir(parents=True)
    os.mkfifo(folder / "fifo")
    return {
        "missing": (folder / "none", f"{folder}/none: cannot be opened: No such file or directory"),
        "under a file": (good / "x", f"{good}/x: cannot be opened: Not a directory"),
        "empty": (folder / "empty", "empty: too short for a safetensors file"),
        "seven": (folder / "seven", "seven: too short for a safetensors file"),
        "limit": (folder / "limit", "limit: header length 100000001 is over the limit"),
        "huge": (folder / "huge", "huge: header length 18446744073709551615 is over the limit"),
        "long": (folder / "long", "long: header length 3 goes beyond the file"),
        "lfs": (folder / "lfs", "lfs: is not a safetensors file"),
        "gguf": (folder / "gguf", "gguf: is not a safetensors file"),
        "zip": (folder / "zip", "zip: is not a safetensors file"),
        "cut": (folder / "cut", "cut: a: offsets 0..16 go beyond the file"),
        "folder": (folder / "folder", f"{folder}/folder: holds no checkpoint"),
        "dangling": (folder / "dangling", "model.safetensors: cannot be opened: No such file or directory"),
        "nested": (folder / "nested", "model.safetensors: is a folder, expected a file"),
        "fifo": (folder / "fifo", "fifo: is not a regular file"),
        "device": ("/dev/zero", "zero: is not a regular file"),
    }, size


def test_what_is_no_checkpoint_is_refused(tmp_path):
    table, size = bad_paths(tmp_path)
    assert size > 16
    assert {name: first_line_of(path) for name, (path, _) in table.items()} == {
        name: first for name, (_, first) in table.items()
    }


def test_a_file_one_may_not_read_is_refused(tmp_path):
    path = make.shard(tmp_path / "m", {"a": np.ones(1)})
    path.chmod(0)
    if os.geteuid() != 0:
        assert first_line_of(path) == "m: cannot be opened: Permission denied"
        return
    # root reads everything: ask as somebody else, in a process of its own
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o011)
    code = (
        "import os, sys; from qwenref import _C\nos.setuid(65534)\n"
        "try: _C.Checkpoint(sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "CheckpointError m: cannot be opened: Permission denied\n"


def test_a_path_of_any_bytes_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        _C.Checkpoint(os.fsencode(tmp_path) + b"/\xff\xfe")
    with pytest.raises(CheckpointError, match="^: cannot be opened: No such file"):
        _C.Checkpoint("")
    for path in (None, 3, "a\0b"):
        with pytest.raises((TypeError, ValueError)):
            _C.Checkpoint(path)


INDEXES = {
    "not JSON": ("{", "I is not JSON (byte 0)"),
    "no object": ("[]", "I is not a JSON object"),
    "no map": ({"metadata": {}}, "I: has no weight_map"),
    "map is a list": ({"weight_map": []}, "I: has no weight_map"),
    "empty map": ({"weight_map": {}}, "I: its weight_map is empty"),
    "file no text": ({"weight_map": {"a": 1}}, "I: a: its file is not a string"),
    "twice": ('{"weight_map": {"a": "s1", "b": "s1", "a": "s2"}}', "I: 1 name is in weight_map more than once"),
    "upwards": ({"weight_map": {"a": "../s1", "b": "x/../../s1"}}, "I: 2 shard paths are outside the folder"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "I: 1 shard path is outside the folder"),
    "empty path": ({"weight_map": {"a": ""}}, "I: 1 shard path is outside the folder"),
    "missing": ({"weight_map": {"a": "s1", "b": "s8", "c": "s9"}}, "I: 2 shards are missing on disk"),
    "not there": (
        {"weight_map": {"a": "s1", "b": "s1", "x": "s1"}},
        "I: 1 name is in the index but not in the shard it gives",
    ),
    "elsewhere": (
        {"weight_map": {"a": "s2", "b": "s1", "c": "s1"}},
        "I: 2 names are in the index but not in the shard it gives",
    ),
    "not named": ({"weight_map": {"a": "s1", "c": "s2"}}, "I: 1 tensor is in a shard but not in the index"),
    "in two shards": ({"weight_map": {"a": "s1", "b": "s1", "c": "s3"}}, "I: 1 tensor is stored in two shards"),
    "shard is bad": ({"weight_map": {"a": "s1", "b": "s1", "c": "bad"}}, "bad: too short for a safetensors file"),
}


@pytest.mark.parametrize(("text", "first"), INDEXES.values(), ids=INDEXES)
def test_an_index_at_odds_with_its_shards_is_refused(tmp_path, text, first):
    make.shard(tmp_path / "s1", {"a": np.ones(1), "b": np.ones(1)})
    make.shard(tmp_path / "s2", {"c": np.ones(1)})
    make.shard(tmp_path / "s3", {"c": np.ones(1), "b": np.ones(1)})
    (tmp_path / "bad").write_bytes(b"")
    make.index(tmp_path, text if isinstance(text, str) else json.dumps(text))
    assert first_line_of(tmp_path) == first.replace("I", "model.safetensors.index.json", 1)


def test_many_faults_are_one_error_of_five_lines_and_a_count(tmp_path):
    make.shard(tmp_path / "s", {"a": np.ones(1)})
    make.index(tmp_path, {"a": "s"} | {f"x{i:02}": "s" for i in range(12)})
    with pytest.raises(CheckpointError) as error:
        _C.Checkpoint(tmp_path)
    assert str(error.value).splitlines() == [
        "model.safetensors.index.json: 12 names are in the index but not in the shard it gives",
        "    found    x00, said to be in s",
        *(f"             x{i:02}, said to be in s" for i in range(1, 5)),
        "             and 7 more",
        "    do       download the shards and the index again, from one revision",
    ]


def test_two_checkpoints_in_one_folder_are_refused(tmp_path):
    files = make.sharded(tmp_path, [{"a": np.ones(1)}])
    make.shard(tmp_path / "model.safetensors", {"a": np.zeros(1)})
    assert first_line_of(tmp_path) == f"{tmp_path}: holds two checkpoints"
    assert _C.Checkpoint(tmp_path / "model.safetensors")["a"] == 0
    assert _C.Checkpoint(tmp_path / "model.safetensors.index.json")["a"] == 1
    assert _C.Checkpoint(tmp_path / files[0])["a"] == 1


def test_a_good_file_opens_after_any_number_of_bad_ones(tmp_path):
    good = make.shard(tmp_path / "good", {"a": np.ones(1)})
    bad = make.raw(tmp_path / "bad", {"a": F4 | {"data_offsets": [40, 32]}}, b"1234")
    _C.Checkpoint(good)
    before = descriptors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):
        with pytest.raises(CheckpointError):
            _C.Checkpoint(bad)
    after = descriptors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after[0] == before[0]
    assert after[1] - before[1] < 4096, "3,000 leaked headers or messages would be 6 MB"
    assert _C.Checkpoint(good)["a"] == 1


def test_mutated_headers_are_read_or_refused(tmp_path):
    """Whatever the header says, the answer is an error of ours, or arrays that lie inside the file."""
    rng = random.Random(20)
    source = make.shard(tmp_path / "s", arrays(), {"format": "pt"}).read_bytes()
    (length,) = struct.unpack("<Q", source[:8])
    opened, pieces = 0, [b"0", b"-1", b"9" * 17, b"[", b"]", b"{", b"}", b'"', b"\\", b"\\u0000", b",", b"\xff", b"1e9"]
    path = tmp_path / "m"
    for round_ in range(3000):
        file = bytearray(source)
        for _ in range(rng.randint(1, 2)):
            at = 8 + rng.randrange(length)
            kind = rng.randrange(4)
            if kind == 0:
                file[at] = rng.randrange(256)
            elif kind == 1:
                file[at : at + rng.randint(0, 3)] = rng.choice(pieces)
            elif kind == 2:
                del file[at : at + rng.randint(1, 40)]
            else:
                other = 8 + rng.randrange(length)
                file[at:at] = file[other : other + rng.randint(1, 60)]
        if round_ % 4:  # let the length follow; or else the header ends early or in the data
            file[:8] = struct.pack("<Q", max(length + len(file) - len(source), 0))
        path.unlink(missing_ok=True)  # some file systems flush a file that is overwritten
        path.write_bytes(file)
        try:
            checkpoint = _C.Checkpoint(path)
        except CheckpointError as error:
            assert str(error).startswith("m: ")
            continue
        opened += 1
        for name in checkpoint:
            info = checkpoint.info(name)
            assert 8 <= info.offset <= info.offset + info.nbytes <= len(file)
            if info.dtype in make.NUMPY:
                assert checkpoint[name].tobytes() == file[info.offset : info.offset + info.nbytes]
    assert 30 < opened < 2000, "some edits (in names, blanks and text) are harmless; most are not"


# ---------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "k": 'quotes " and \n lines, ünï'}])
def test_what_is_written_is_read_back_here_and_by_the_reference_library(tmp_path, metadata):
    want = {name: np.asarray(array) for name, array in arrays().items()}
    path = tmp_path / "m.safetensors"
    _C.save_safetensors(path, want, metadata)
    checkpoint = _C.Checkpoint(path)
    assert all(same(checkpoint[name], want[name]) for name in want) and len(checkpoint) == len(want)
    assert checkpoint.metadata == (metadata or {})
    with safetensors.safe_open(path, "pt") as reference:
        assert set(reference.keys()) == set(want)
        assert (reference.metadata() or {}) == (metadata or {})
        for name in want:
            got = reference.get_tensor(name)
            assert tuple(got.shape) == want[name].shape
            assert got.reshape(-1).view(torch.uint8).numpy().tobytes() == want[name].tobytes(), name
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0
    assert all(checkpoint[name].flags.aligned for name in want)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_what_the_reference_library_writes_is_read_and_written_to_the_byte(tmp_path):
    tensors = {
        name: torch.from_numpy(np.asarray(a).view(np.int16 if a.dtype == ml_dtypes.bfloat16 else a.dtype))
        for name, a in arrays().items()
    }
    tensors = {name: t.view(torch.bfloat16) if name == "t.BF16" else t for name, t in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    checkpoint = _C.Checkpoint(tmp_path / "theirs")
    want = {name: np.asarray(array) for name, array in arrays().items()}
    assert all(same(checkpoint[name], want[name]) for name in want)
    _C.save_safetensors(tmp_path / "ours", checkpoint)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_strided_swapped_and_plain_values_are_written_as_their_values(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    want = {
        "columns": base[:, ::2],
        "turned": base.T,
        "backwards": base[::-1],
        "swapped": base.astype(">f4"),
        "repeated": np.broadcast_to(base[0], (3, 6)),
        "list": [1.5, 2.5],
        "number": 7,
        "longlong": np.arange(3, dtype=np.longlong),
    }
    _C.save_safetensors(tmp_path / "m", want)
    checkpoint = _C.Checkpoint(tmp_path / "m")
    for name, values in want.items():
        assert np.array_equal(checkpoint[name], values), name
    assert checkpoint.info("swapped").dtype == "F32" and checkpoint.info("longlong").dtype == "I64"
    assert checkpoint.info("number")[:2] == ("I64", ())


def test_an_empty_file_is_a_checkpoint_without_tensors(tmp_path):
    _C.save_safetensors(tmp_path / "m", {})
    assert (tmp_path / "m").read_bytes() == struct.pack("<Q", 8) + b"{}      "
    assert list(_C.Checkpoint(tmp_path / "m")) == [] and _C.Checkpoint(tmp_path / "m").nbytes == 0
    assert safetensors.numpy.load_file(tmp_path / "m") == {}


def test_a_checkpoint_may_be_saved_over_itself(tmp_path):
    path = make.shard(tmp_path / "m", {"a": np.arange(5000.0), "b": np.ones(3)})
    checkpoint = _C.Checkpoint(path)
    checkpoint["a"][0] = -1
    _C.save_safetensors(path, checkpoint)
    assert checkpoint["a"][0] == -1 and checkpoint["a"][4999] == 4999, "the old map stays good"
    assert _C.Checkpoint(path)["a"][0] == -1
    assert os.listdir(tmp_path) == ["m"]


def refused(function, *args):
    with pytest.raises(Exception) as error:
        function(*args)
    return type(error.value), str(error.value).splitlines()[0]


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path):
    one, path = {"a": np.ones(1)}, tmp_path / "m"
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path)), descriptors()
    save = _C.save_safetensors
    assert refused(save, tmp_path / "none" / "m", one) == (
        CheckpointError,
        f"{tmp_path}/none/m: cannot be written: No such file or directory (errno 2)",
    )
    assert refused(save, tmp_path / "folder", one) == (
        CheckpointError,
        f"{tmp_path}/folder: cannot be written: Is a directory (errno 21)",
    )
    assert refused(save, path, {"__metadata__": np.ones(1)}) == (
        CheckpointError,
        f"{path}: __metadata__ cannot name a tensor: the format keeps it for text",
    )
    assert refused(save, path, {"a": np.array(["x"])}) == (DTypeError, "save_safetensors: a: <U1 cannot be stored")
    assert refused(save, path, {"a": np.ones(1, np.longdouble)})[0] is DTypeError
    assert refused(save, path, {"a": np.ones(1, "m8[s]")})[0] is DTypeError
    assert refused(save, path, {"a": np.ones(1, ml_dtypes.float8_e4m3fn)})[0] is DTypeError
    assert refused(save, path, {"a": None})[0] is DTypeError
    assert refused(save, path, {"a": np.ones((1,) * 9)}) == (
        ShapeError,
        "save_safetensors: a: 9 dimensions, expected at most 8",
    )
    assert refused(save, path, {3: np.ones(1)}) == (TypeError, "save_safetensors: a tensor name is int, expected str")
    assert refused(save, path, {"a\0": np.ones(1)})[0] is InputError
    assert refused(save, path, {"\ud800": np.ones(1)})[0] is InputError
    assert refused(save, path, one, {"k": 3}) == (
        TypeError,
        "save_safetensors: a metadata value is int, expected str",
    )
    assert refused(save, path, [1])[0] in (TypeError, AttributeError)
    assert (sorted(os.listdir(tmp_path)), descriptors()) == before


FULL_DISK = """
import resource, signal, sys
import numpy as np
from qwenref import _C
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    _C.save_safetensors(sys.argv[1], {"a": np.ones(1 << 19), "b": np.ones(3, np.float32)})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    path = make.shard(tmp_path / "m", {"old": np.ones(1)})
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"CheckpointError {path}: cannot be written: File too large (errno 27)"
    assert os.listdir(tmp_path) == ["m"] and list(_C.Checkpoint(path)) == ["old"]


def test_a_new_file_has_the_ordinary_mode(tmp_path):
    mask = os.umask(0o027)
    try:
        _C.save_safetensors(tmp_path / "m", {"a": np.ones(1)})
    finally:
        os.umask(mask)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o640


def test_other_threads_run_while_a_file_is_written(tmp_path):
    done, ticks = threading.Event(), 0
    big = {"a": np.zeros(64 << 20, np.uint8)}
    writer = threading.Thread(target=lambda: (_C.save_safetensors(tmp_path / "m", big), done.set()))
    writer.start()
    while not done.is_set():
        time.sleep(0.0005)
        ticks += 1
    writer.join()
    assert ticks > 3, "64 MB and an fsync take several times half a millisecond"
