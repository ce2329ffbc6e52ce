"""Questions about arguments that many modules ask; what is done about the answer, and in which words, is theirs."""

import operator
from collections.abc import Mapping, Set

import numpy as np


def is_whole(value):
    """Whether a value is a whole number, Python's or NumPy's; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_whole(value):
    """int of a whole number of any library, also in an array of no dimension; None of all else, booleans too."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_row(values):
    """Whether something holds values in an order: a list, an array, an iterator; no text, no mapping, no set."""
    unordered = isinstance(values, (str, bytes, bytearray, Mapping, Set))
    return hasattr(values, "__iter__") and not unordered and getattr(values, "ndim", None) != 0
