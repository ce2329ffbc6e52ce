"""Every op of the extension by name: `ops.rms_norm(x, w, eps)`.

An op's docstring is its signature, which says shapes, kinds and options; `ops.rms_norm.signature` is the same as text.
Optional outputs are asked for by keyword (`p=True`), or written into an array given by keyword (`final=buffer`).
"""

from qwenref import _C

globals().update(_C.ops)


def names():
    """Names of all ops, in the order of the registry."""
    return tuple(_C.ops)
