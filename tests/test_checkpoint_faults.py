"""Checkpoint files that are refused: by which first line, and that nothing of them is left behind."""

import json
import os
import random
import resource
import struct
from pathlib import Path

import checkpoints as make
import fresh
import numpy as np
import pytest
from checkpoints import arrays, descriptors, maps_of

from qwenref import _C
from qwenref.errors import CheckpointError

F4 = make.entry("F32", [1], 0, 4)
ONE = {"a": F4}

HEADERS = {
    "no object": ("[]", b"", "m: header is not a JSON object"),
    "a number": ("12345678", b"", "m: header is not a JSON object"),
    "empty": ("", b"", "m: header is not a JSON object"),
    "blanks first": (" {}", b"", "m: header is not a JSON object"),
    "not JSON": ('{"a": }', b"", "m: header: line 1, column 7: found }, expected well-formed JSON"),
    "cut off": (
        '{"a": {"dtype": "F32", "shape"',
        b"",
        "m: header: line 1, column 31: found the end of the text, expected well-formed JSON",
    ),
    "text after it": ("{} {}", b"", "m: header: line 1, column 4: found {}, expected well-formed JSON"),
    "nesting bomb": (
        '{"a": ' + "[" * 100_000,
        b"",
        f"m: header: line 1, column 9: found {'[' * 23}, expected less nesting",
    ),
    "long list": (
        '{"a": [' + "0," * 70 + "0]}",
        b"",
        "m: header: line 1, column 135: found ,0, expected a shorter list",
    ),
    "bad UTF-8": (b'{"\xff": 1}', b"", 'm: header: line 1, column 3: found ?":, expected UTF-8'),
    "overlong UTF-8": (b'{"\xc0\x80": 1}', b"", 'm: header: line 1, column 3: found ??":, expected UTF-8'),
    "UTF-8 surrogate": (b'{"\xed\xa0\x80": 1}', b"", 'm: header: line 1, column 3: found ???":, expected UTF-8'),
    "lone surrogate": (
        '{"\\ud800": 1}',
        b"",
        'm: header: line 1, column 3: found \\ud800":, expected well-formed JSON',
    ),
    "NUL": (
        b'{"a\0b": 1}',
        b"",
        'm: header: line 1, column 4: found ?b":, expected no control character inside a string',
    ),
    "escaped NUL": (
        '{"a\\\\\\u0000b": 1}',
        b"",
        'm: header: line 1, column 6: found \\u0000b":, expected no NUL inside a string',
    ),
    "control character": (
        '{"a\nb": 1}',
        b"",
        'm: header: line 1, column 4: found ?b":, expected no control character inside a string',
    ),
    "row is no object": ({"a": 3}, b"", "m: a: is not described by an object"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, b"1234", "m: a: has no dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "m: a: has no shape"),
    "no offsets": ({"a": {"dtype": "F32", "shape": []}}, b"1234", "m: a: has no data_offsets"),
    "unknown field": ({"a": F4 | {"scale": 2}}, b"1234", 'm: a: unknown field "scale"'),
    "repeated field": (
        '{"a": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}',
        b"1234",
        'm: header: a: found the key "dtype" twice, expected it once',
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
        'm: header: top level: found the key "a" twice, expected it once',
    ),
    "metadata no object": ({"__metadata__": [], **ONE}, b"1234", "m: __metadata__ is not an object of strings"),
    "metadata not text": ({"__metadata__": {"k": 1}, **ONE}, b"1234", 'm: __metadata__["k"] is not a string'),
    "metadata twice": (
        '{"__metadata__":{},"__metadata__":{}}',
        b"",
        'm: header: top level: found the key "__metadata__" twice, expected it once',
    ),
    "metadata key twice": (
        '{"__metadata__":{"k":"1","k":"2"}}',
        b"",
        'm: header: __metadata__: found the key "k" twice, expected it once',
    ),
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
    done = fresh.python(code, path)
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
    "not JSON": ("{", "I: line 1, column 2: found the end of the text, expected well-formed JSON"),
    "no object": ("[]", "I: found JSON that is no object, expected an object of keys"),
    "no map": ({"metadata": {}}, "I: has no weight_map"),
    "map is a list": ({"weight_map": []}, "I: has no weight_map"),
    "empty map": ({"weight_map": {}}, "I: its weight_map is empty"),
    "file no text": ({"weight_map": {"a": 1}}, "I: a: its file is not a string"),
    "twice": (
        '{"weight_map": {"a": "s1", "b": "s1", "a": "s2"}}',
        'I: weight_map: found the key "a" twice, expected it once',
    ),
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
