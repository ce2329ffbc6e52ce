"""What the machine can do at most, as the extension measures it: figures of the right kind, wrong words refused."""

import numpy as np
import pytest

from qwenref import _C
from qwenref.errors import InputError


def test_reading_takes_time_and_any_contiguous_buffer():
    assert _C.read_seconds(np.ones(1 << 22, np.uint8)) > 0.0
    assert _C.read_seconds(b"") >= 0.0 and _C.read_seconds(b"odd") >= 0.0
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _C.read_seconds(np.ones((4, 4))[:, ::2])
    with pytest.raises(TypeError):
        _C.read_seconds("text")


def test_arithmetic_is_a_rate_and_bf16_belongs_to_its_level():
    assert _C.arithmetic_rate("fma", 1000) > 0.0
    assert (_C.arithmetic_rate("bf16", 1000) > 0.0) == (_C.cpu_level() == "avx512bf16")
    for wrong in (("fp8",), ("fma", 0), ("fma", -1)):
        with pytest.raises(InputError):
            _C.arithmetic_rate(*wrong)
