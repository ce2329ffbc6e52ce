"""Questions about arguments that many modules ask; what is done about the answer, and in which words, is theirs."""

import numpy as np


def is_whole(value):
    """Whether a value is a whole number, Python's or NumPy's; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
