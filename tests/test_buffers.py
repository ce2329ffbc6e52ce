"""Large results come from buffers that are kept: arrays as any other of NumPy, and memory stays within bounds."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qwenref import _C, ops

LARGE = (1100, 1024)  # float32: 4.3 MiB, over the border of 4 MiB


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture
def ones():
    _C.drop_buffers()
    yield np.ones(LARGE, np.float32)
    _C.drop_buffers()


def test_the_memory_of_a_large_result_serves_the_next_one(ones):
    first = ops.add(ones, ones)
    place = address(first)
    assert _C.kept_buffers() == 0
    del first
    assert _C.kept_buffers() >= ones.nbytes
    second = ops.add(ones, second_ones := ones * 2)
    assert address(second) == place and (second == 3).all() and (second_ones == 2).all()


def test_a_small_result_is_left_to_numpy(ones):
    del ones
    small = np.ones(1024, np.float32)
    ops.add(small, small)
    assert _C.kept_buffers() == 0


def test_results_in_use_are_never_handed_out_again(ones):
    results = [ops.add(ones, ones * i) for i in range(6)]
    views = [r[1:, ::2] for r in results]
    del results
    more = [ops.add(ones, ones * -i) for i in range(6)]
    assert len({address(a) for a in more}) == 6
    assert all((v == 1 + i).all() for i, v in enumerate(views))


def test_a_result_can_be_resized_copied_and_pickled_as_any_array(ones):
    import pickle

    result = ops.add(ones, ones)
    assert (pickle.loads(pickle.dumps(result)) == result).all()
    assert (result.copy() == 2).all()
    result.resize((2000, 1024), refcheck=False)
    assert (result[:1100] == 2).all() and (result[1100:] == 0).all()
    result.resize((10, 10), refcheck=False)
    assert (result == 2).all() and result.shape == (10, 10)


def test_other_arrays_do_not_come_from_the_kept_buffers(ones):
    ops.add(ones, ones)
    kept = _C.kept_buffers()
    assert kept > 0
    others = [np.empty(LARGE, np.float32) for _ in range(4)]
    assert _C.kept_buffers() == kept and len(others) == 4


def test_what_is_kept_stays_within_half_a_gibibyte_and_a_sixteenth_of_memory(ones):
    many = [ops.add(ones, ones) for _ in range(140)]  # 0.6 GiB, 6 MiB each with its rounding up
    del many
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < _C.kept_buffers() <= min(512 << 20, memory // 16)
    _C.drop_buffers()
    assert _C.kept_buffers() == 0


def test_large_scratch_is_kept_as_well():
    _C.drop_buffers()
    x, w = np.ones((1100, 1024), np.float32), np.ones((8, 1024), np.float32)
    y = ops.linear(x, w)  # packs x: 4.5 MiB of scratch
    assert (y == 1024).all() and _C.kept_buffers() >= x.nbytes
    _C.drop_buffers()


def test_threads_that_make_large_results_at_once_get_their_own(ones):
    def work(i):
        return all((ops.add(ones, np.float32(i) * ones) == 1 + i).all() for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
