"""Checkpoint files as they are written: readable everywhere, complete or not there."""

import os
import struct
import threading
import time

import checkpoints as make
import fresh
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import arrays, descriptors, same

from qwenref import _C
from qwenref.errors import CheckpointError, DTypeError, InputError, ShapeError


@pytest.fixture
def torch():
    """What the reference library needs to hand out bfloat16"""
    return pytest.importorskip("torch", reason="the witness needs PyTorch (extra 'test')")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "k": 'quotes " and \n lines, ünï'}])
def test_what_is_written_is_read_back_here_and_by_the_reference_library(tmp_path, metadata, torch):
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


def test_what_the_reference_library_writes_is_read_and_written_to_the_byte(tmp_path, torch):
    tensors = {
        name: torch.from_numpy(np.asarray(a).view(np.int16 if a.dtype == ml_dtypes.bfloat16 else a.dtype))
        for name, a in arrays().items()
    }
    tensors = {name: t.view(torch.bfloat16) if name == "t.BF16" else t for name, t in tensors.items()}
    import safetensors.torch

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
    done = fresh.python(FULL_DISK, path)
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


def test_a_mapping_whose_items_are_no_pairs_is_refused(tmp_path):
    class Odd(dict):
        def items(self):
            return [["a", np.ones(1)]]

    with pytest.raises(TypeError, match=r"items\(\) of the mapping gave list, expected pairs"):
        _C.save_safetensors(tmp_path / "m", Odd())
    assert os.listdir(tmp_path) == []
