"""The binder of ops: empty and impossible sizes, what may be given for an input or an output, and what a call leaves."""

import numpy as np
import pytest
from op_rows import ROWS
from test_ops import all_outputs, as_tuple, signature

from qwenref import naive, ops
from qwenref.errors import InputError, ShapeError

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
    with pytest.raises(ShapeError, match="attention: _row would have an impossible shape\n    found .*1152921504606846976"):
        ops.attention(q, none, none, one, one + S, 1.0)
