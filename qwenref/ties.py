"""The two largest logits of a step, and whether a program that computes in fewer bits can tell which is the larger."""

import ml_dtypes
import numpy as np

from qwenref.errors import InputError, compose


def two_largest(logits):
    """(largest, second) of [vocab], as Python floats; the second is -infinity where there is one logit only."""
    at = int(logits.argmax())
    rest = max(float(part.max(initial=-np.inf)) for part in (logits[:at], logits[at + 1 :]))
    return float(logits[at]), rest


def undecided(pairs, dtype):
    """int64 [n]: which of the pairs of largest logits are less than one unit in the last place of `dtype` apart."""
    try:
        bits = ml_dtypes.finfo("nothing" if dtype is None else dtype).nmant  # to NumPy, None is float64
    except (ValueError, TypeError):
        raise InputError(
            compose("undecided: dtype", found=repr(dtype), expected='a floating-point type: "bfloat16", "float16", ...')
        ) from None
    pairs = np.array(pairs, np.float64).reshape(-1, 2)
    with np.errstate(invalid="ignore"):
        margins, reach = pairs[:, 0] - pairs[:, 1], np.abs(pairs).max(axis=1, initial=0, where=np.isfinite(pairs))
    unit = np.ldexp(1.0, np.frexp(reach)[1] - 1 - bits)
    return np.flatnonzero(margins < unit)
