"""Rounding to bfloat16 and float16: every value of the format with its surroundings, and the definition in float64."""

import ml_dtypes
import numpy as np
import pytest

from qwenref import naive, ops

FORMATS = {"round_bf16": (ml_dtypes.bfloat16, 0x7F80), "round_f16": (np.float16, 0x7C00)}  # and the bits of infinity


def surroundings(dtype, infinity):
    """Every number of the format, infinity too, the middle between neighbours, and the float32 beside each."""
    numbers = np.arange(infinity + 1, dtype=np.uint16).view(dtype).astype(np.float64)
    numbers[-1] = 2 * numbers[-2] - numbers[-3]  # where it would be if the format went on: the middle before it counts
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    with np.errstate(over="ignore"):
        bits = exact.astype(np.float32).view(np.uint32)
    near = np.concatenate([bits - 1, bits, bits + 1])
    near = np.concatenate([near[near < 0x7F800000], [0x7F800000]]).astype(np.uint32)
    return np.concatenate([near, near | 0x80000000]).view(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_the_format_and_its_surroundings(name):
    dtype, infinity = FORMATS[name]
    x = surroundings(dtype, infinity)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    assert len(np.unique(expected)) == 2 * infinity + 1  # all numbers with their signs, infinities, one zero
    assert getattr(ops, name)(x).tobytes() == expected.tobytes()
    assert getattr(naive, name)(x).astype(np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_any_float32(name):
    dtype, _ = FORMATS[name]
    x = np.random.default_rng(0).integers(0, 2**32, 2_000_000, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype).astype(np.float32)
        definition = getattr(naive, name)(x).astype(np.float32)
    y, number = getattr(ops, name)(x), ~np.isnan(x)
    assert y[number].tobytes() == expected[number].tobytes() and np.isnan(y[~number]).all()
    assert np.array_equal(definition, y, equal_nan=True)
    assert getattr(ops, name)(y).tobytes() == y.tobytes()  # what is in the format stays as it is


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_stays_one_and_becomes_quiet(name):
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7FA0F123], np.uint32)
    y = getattr(ops, name)(bits.view(np.float32)).view(np.uint32)
    assert np.all((y & 0x7FC00000) == 0x7FC00000) and np.array_equal(y >> 31, bits >> 31)


def test_the_definition_rounds_once():
    """By way of float32 the first of each would become a tie, and go to the even neighbour."""
    for name, digits in (("round_bf16", 8), ("round_f16", 11)):
        half, step = 2.0**-digits, 2.0 ** (1 - digits)
        x = 1 + np.array([half + 2.0**-40, half, half - 2.0**-40, step + half, step + half - 2.0**-40])
        assert (getattr(naive, name)(x) - 1).tolist() == [step, 0, 0, 2 * step, step]
    assert naive.round_f16([2.0**-25, 2.0**-25 * (1 + 2.0**-50)]).tolist() == [0, 2.0**-24]
    assert naive.round_bf16([2.0**-134, 2.0**-134 * (1 + 2.0**-50)]).tolist() == [0, 2.0**-133]
