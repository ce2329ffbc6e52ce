"""The binder of ops: sizes, what may be given for an input or an output, and what a call leaves behind."""

import ctypes
import gc
import sys
import threading

import numpy as np
import pytest
from op_rows import ROWS
from test_ops import all_outputs, as_tuple, same_bits, signature

import qwenref
from qwenref import naive, ops
from qwenref.errors import DTypeError, InputError, ShapeError

# ---------------------------------------------------------------------------------------------- sizes

LETTERS = [(n, d) for n in ROWS for d in sorted({d for p in signature(n)[0] for d in p.dims if d.isalpha()})]


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name, letter", LETTERS)
def test_any_dimension_may_be_empty(name, letter, many):
    """The result is what the definition says, or the op refuses by name; few rows and many, which linears tell apart"""
    call = dict(ROWS[name].calls[0])
    for p in signature(name)[0]:
        for axis, dim in enumerate(p.dims):
            if many and dim == "*" and axis == 0 and p.name in call:
                call[p.name] = np.concatenate([call[p.name]] * 20)
        for axis, dim in enumerate(reversed(p.dims)):
            if dim == letter and p.name in call:
                call[p.name] = np.take(call[p.name], [], -1 - axis)
            elif dim[0] == letter and p.name in call:  # W-1: nothing is as long as -1
                del call[p.name]
    if letter == "S":  # no keys to attend to
        call["begin"], call["end"] = np.zeros_like(call["begin"]), np.zeros_like(call["end"])
    try:
        y = as_tuple(getattr(ops, name)(**call, **all_outputs(name)))
    except (ShapeError, InputError) as error:
        assert str(error).startswith(f"{name}: ")
        return
    expected = as_tuple(getattr(naive, name)(**call, **all_outputs(name)))
    assert [a.shape for a in y] == [a.shape for a in expected]
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(y, expected, strict=True))


def test_a_size_beyond_memory_is_refused_before_anything_is_written():
    """An empty array may be as long as it likes; scratch of that length would wrap around in 64 bits"""
    S = 2**60
    none, one = np.zeros((1, 1, S, 0), np.float32), np.zeros((1, 1), np.int64)
    q = np.zeros((1, 1, 1, 0), np.float32)
    with pytest.raises(
        ShapeError, match="attention: _row would have an impossible shape\n    found .*1152921504606846976"
    ):
        ops.attention(q, none, none, one, one + S, 1.0)


def test_beside_an_empty_dimension_the_others_may_have_any_size():
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    T = 2**58 - 1
    assert ops.causal_conv1d(zeros(0, T, 1), zeros(1, 1, 1)).shape == (0, T, 1)
    keys, values, gates = zeros(0, T, 1, 0), zeros(0, T, 1, 1), zeros(0, T, 1)
    assert ops.gated_delta_rule(keys, keys, values, gates, gates).shape == (0, T, 1, 1)


# ---------------------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize("values", [["1.5"], [1 + 2j], [None], [b"1"]])
def test_a_list_of_anything_but_real_numbers_is_refused(values):
    with pytest.raises(DTypeError, match="add: b has the wrong dtype"):
        ops.add([1.0], values)
    assert ops.add([1.0, True], (2, 2.5)).tolist() == [3.0, 3.5]


def test_a_scalar_that_is_no_number_is_named():
    x, w = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="rms_norm: 'eps' is not a number\n    expected rms_norm"):
        ops.rms_norm(x, w, "much")

    class Odd:
        def __float__(self):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ops.rms_norm(x, w, Odd())


def test_an_output_that_is_no_array_is_refused():
    for y in ([0.0], True, "y"):
        with pytest.raises(TypeError, match="add: 'y' has to be an array, not .*\n    expected add"):
            ops.add([1.0], [2.0], y=y)
    assert ops.add([1.0], [2.0], y=None) == 3


def test_outputs_may_not_share_memory():
    both = np.zeros((4, 2), np.float32)
    call = np.arange(3)[None], np.zeros(2, int), np.ones(2)
    with pytest.raises(InputError, match="rope_table: the array given for sin overlaps cos"):
        ops.rope_table(*call, cos=both[:3], sin=both[1:])
    assert not both.any()
    apart = np.zeros((6, 2), np.float32)
    ops.rope_table(*call, cos=apart[:3], sin=apart[3:])
    assert apart[0].all()


def test_an_output_may_not_lie_in_a_cache_that_is_read():
    """Kind s: rows of a longer array, of which the gaps count as well"""
    cache, q = np.ones((1, 1, 9, 4), np.float32), np.ones((1, 2, 1, 4), np.float32)
    begin, end = np.zeros((1, 2), int), np.full((1, 2), 4)
    inside, behind = (cache.reshape(-1)[at:][:8].reshape(1, 1, 2, 4) for at in (8, 28))
    with pytest.raises(InputError, match="attention_scores: the array given for s overlaps k"):
        ops.attention_scores(q, cache[:, :, :8:2], begin, end, 1.0, s=inside)
    assert ops.attention_scores(q, cache[:, :, :8:2], begin, end, 1.0, s=behind) is behind


# ---------------------------------------------------------------------------------------------- beside a profile


def test_the_compiled_op_runs_whatever_numerics_are_in_force():
    """Same bits, arguments, buffers and errors; a version made of it does not find itself."""
    call = ROWS["rms_norm"].calls[0]
    plain, buffer = ops.rms_norm(**call), np.empty_like(call["x"])
    with qwenref.numerics("fp64"):
        assert ops.rms_norm(**call).dtype == np.float64
        assert same_bits([ops.rms_norm.compiled(**call)], [plain])
        assert ops.rms_norm.compiled(call["x"], call["w"], y=buffer) is buffer and same_bits([buffer], [plain])
    token = qwenref._C.numerics_var.set({"add": lambda a, b: ops.add.compiled(a, b) + 1})
    try:
        assert ops.add([1.0], [2.0]).tolist() == [4] and ops.add.compiled([1.0], [2.0]).tolist() == [3]
    finally:
        qwenref._C.numerics_var.reset(token)
    with pytest.raises(TypeError, match="add: missing argument 'b'\n    expected add"):
        ops.add.compiled([1.0])
    with pytest.raises(ShapeError, match="^add: "):
        ops.add.compiled([1.0], [1.0, 2.0])


# ---------------------------------------------------------------------------------------------- what is left behind


def test_calls_of_linear_blas_side_by_side_leave_the_threads_of_the_library_as_they_were():
    library = ctypes.CDLL(qwenref._C.__file__)  # a name is looked up in what the extension is linked to as well
    if not hasattr(library, "openblas_get_num_threads"):
        pytest.skip("the BLAS here is not OpenBLAS: it has no count of threads to change")
    count, change = library.openblas_get_num_threads, library.openblas_set_num_threads
    before, x, w = count(), np.ones((40, 300), np.float32), np.ones((400, 300), np.float32)
    change(2)
    start = threading.Barrier(3)

    def work():
        start.wait()
        for _ in range(100):
            ops.linear_blas(x, w)

    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count() == 2
    finally:
        change(before)


class Fails:
    """Fails in every way a call may ask for a value"""

    def fail(self, *args, **kwargs):
        raise ZeroDivisionError

    __float__ = __bool__ = __array__ = fail


@pytest.mark.parametrize("name", ROWS)
def test_a_call_keeps_no_reference_whether_it_succeeds_or_fails(name):
    op, good, fails = getattr(ops, name), dict(ROWS[name].calls[0]), Fails()
    inputs, outputs = signature(name)
    calls = [good, good | all_outputs(name), good | {"nonsense": 1}]
    for p in inputs:
        if p.name in good:
            a = np.asarray(good[p.name])
            swapped = a.astype(a.dtype.newbyteorder(">"))
            calls += [
                good | {p.name: wrong} for wrong in (fails, a.astype(complex), np.zeros((1,) * 9, a.dtype), swapped)
            ]
    calls += [good | {p.name: wrong} for p in outputs for wrong in (fails, np.zeros(3, np.float32))]
    watched = [
        op,
        fails,
        np.dtype(np.float32),
        *(a for call in calls for a in call.values() if isinstance(a, np.ndarray)),
    ]

    def try_all(times):
        failed = 0
        for call in calls * times:
            try:
                op(**call)
            except (ShapeError, InputError, TypeError, ZeroDivisionError):
                failed += 1
        gc.collect()
        return failed, [sys.getrefcount(thing) for thing in watched]

    _, before = try_all(1)
    failed, after = try_all(50)
    assert failed >= 50 * (len(calls) - 3 - 2 * len(inputs)) and after == before
