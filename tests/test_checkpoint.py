"""Checkpoint files as they are read: arrays, the mapping, edits that stay here, sizes, folders."""

import os
import random
import struct
import threading
from collections.abc import Mapping

import checkpoints as make
import fresh
import ml_dtypes
import numpy as np
import pytest
from checkpoints import arrays, maps_of, same

from qwenref import _C
from qwenref.errors import DTypeError, InputError

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
        with pytest.raises(KeyError) as error:
            checkpoint[key]
        assert error.value.args == (key,)


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
    done = fresh.python(SPARSE_PROBE, tmp_path)
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


# ---------------------------------------------------------------------------------------------- written pages


def test_written_pages_are_told_from_read_ones(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    names = ["a", "b", "c"]
    tensors = {name: np.full(4 * page, i, np.uint8) for i, name in enumerate(names)}
    path = make.shard(tmp_path / "m.safetensors", tensors)
    stored = path.read_bytes()
    checkpoint = _C.Checkpoint(path)
    start = {name: checkpoint.info(name).offset for name in names}

    def pages(name, *numbers):
        """Byte ranges of pages of the file, cut to a tensor."""
        cut = [(max(n * page - start[name], 0), min((n + 1) * page - start[name], 4 * page)) for n in numbers]
        return [(begin, end) for begin, end in cut if end > 0]

    assert [checkpoint.touched(name) for name in names] == [[]] * 3
    assert checkpoint["a"].sum() == 0 and checkpoint["c"].sum() == 8 * page
    assert [checkpoint.touched(name) for name in names] == [[]] * 3  # reading is no writing
    checkpoint["b"][2 * page] = 7
    at = (start["b"] + 2 * page) // page
    assert [checkpoint.touched(name) for name in names] == [[], pages("b", at), []]
    checkpoint["b"][0] = 9  # on the page that holds the end of "a" as well, since the header is no whole page
    first = start["b"] // page
    assert [checkpoint.touched(name) for name in names] == [pages("a", first), pages("b", first, at), []]
    checkpoint["b"][page] = 3
    assert checkpoint.touched("b") == [(0, (at + 1) * page - start["b"])]  # neighbouring pages are one range
    freed = checkpoint.revert("b")
    assert freed == 3 * page
    assert checkpoint["b"][2 * page] == 1 and checkpoint["b"][0] == 9  # the edge is the caller's
    assert checkpoint.touched("b") == pages("b", first)
    checkpoint["a"][:] = 5
    assert checkpoint.revert("b") == freed and (checkpoint["a"] == 5).all()
    assert path.read_bytes() == stored
    for method in (checkpoint.touched, checkpoint.revert):
        with pytest.raises(KeyError, match="Near: a"):
            method("aa")
    assert _C.Checkpoint(make.shard(tmp_path / "e.safetensors", {"x": np.zeros((0, 3))})).touched("x") == []


def test_a_long_tensor_is_looked_through_to_its_end(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    checkpoint = _C.Checkpoint(make.shard(tmp_path / "m.safetensors", {"x": np.zeros(5000 * page, np.uint8)}))
    assert checkpoint.touched("x") == []
    checkpoint["x"][-1] = 1
    checkpoint["x"][: 200 * page : 2 * page] = 1
    found = checkpoint.touched("x")
    assert len(found) == 101 and found[-1][1] == 5000 * page and all(end - begin <= page for begin, end in found)
    assert checkpoint.revert("x") > 4997 * page
