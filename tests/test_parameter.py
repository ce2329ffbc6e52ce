"""Tensor and Parameter: arrays that stay arrays."""

import copy
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from qwenref.parameter import Parameter, Tensor


def test_what_is_derived_from_a_parameter_is_not_one():
    w = Parameter(np.arange(6.0).reshape(2, 3))
    derived = [w[0], w[...], w.T, w.reshape(3, 2), w + 1, w @ w.T, w.sum(0), w.astype("f4"), w.copy(), w.detach(), -w]
    derived += [w[w > 2], w.clone(), w.float(), w.view(), np.empty_like(w)]
    assert [type(array) for array in derived] == [Tensor] * len(derived)
    assert type(w.numpy()) is np.ndarray
    w[0][...] = 9
    w.detach()[1] = 8
    assert w.tolist() == [[9, 9, 9], [8, 8, 8]]


def test_the_chain_people_type_without_thinking():
    w = Parameter(np.array([[1.5, 2.0]], ml_dtypes.bfloat16))
    assert w.detach().float().cpu().numpy().tolist() == [[1.5, 2.0]]
    assert (w.numel(), w.dim(), w.element_size(), w.size, w.device) == (2, 2, 2, 2, "cpu")
    assert (w.half().dtype, w.double().dtype, w.float().bfloat16().dtype) == (np.float16, np.float64, w.dtype)
    assert w.contiguous() is w and w.T.contiguous().flags.c_contiguous
    assert w.requires_grad is False and w.grad is None
    w.requires_grad = False
    with pytest.raises(NotImplementedError, match="inference only"):
        w.requires_grad = True
    with pytest.raises(NotImplementedError, match="inference only"):
        Parameter(np.zeros(1), requires_grad=True)


def test_a_parameter_shares_the_array_it_is_made_from():
    array = np.zeros(3)
    Parameter(array)[1] = 5
    assert array.tolist() == [0, 5, 0]
    w = Parameter(array)
    assert Parameter(w) is not w and type(Parameter(w)) is Parameter and np.shares_memory(Parameter(w), w)


def test_copies_and_pickles_of_a_parameter_are_parameters_of_their_own():
    w = Parameter(np.array([1.0, 2.0], ml_dtypes.bfloat16))
    for twin in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w)), pickle.loads(pickle.dumps(w, 5))):
        assert type(twin) is Parameter and twin.dtype == w.dtype and twin.tolist() == [1, 2]
        assert not np.shares_memory(twin, w) and twin.flags.writeable
    assert type(copy.deepcopy(w[:1])) is Tensor


def test_meta_parameters_have_shape_dtype_and_size_but_no_memory():
    tracemalloc.start()
    w = Parameter.meta((248_320, 5_120), ml_dtypes.bfloat16)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 10_000
    assert (w.shape, w.nbytes, w.numel(), w.is_meta, w.device) == (
        (248_320, 5_120),
        2_542_796_800,
        1_271_398_400,
        True,
        "meta",
    )
    assert w[3].is_meta and w.detach().is_meta and not (w[:2, :2] + 1).is_meta
    assert repr(w) == str(w) == "Parameter(meta, shape=(248320, 5120), dtype=bfloat16)"
    for twin in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(twin) is Parameter and twin.is_meta and twin.shape == w.shape
    assert len(pickle.dumps(w)) < 500
    with pytest.raises(ValueError, match="read-only"):
        w[0, 0] = 1
    assert Parameter.meta((), np.float32).is_meta and not Parameter(np.zeros(())).is_meta


def test_repr_of_a_parameter_names_it():
    assert repr(Parameter(np.array([1.0, 2.0]))) == "Parameter([1., 2.])"
