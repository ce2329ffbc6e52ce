"""What makes a formula of `naive` an op: its arguments checked and widened to float64, its outputs handed over.

Like the formulas it shares no line with the C side that reads the same signatures.
"""

import functools
import inspect
import re

import numpy as np

from .errors import CapabilityMissing, DTypeError, ShapeError, compose


def op(signature):
    """Give a formula its shapes: arrays arrive checked, as fresh float64, `:i` as int64, `:w` in their stored dtype.

    The language is that of the C ops: letters unify, `*` is any run of dimensions, `?` may be left out. A formula
    returns all its outputs; the caller gets the optional ones only by keyword, `final=True` or `final=array_to_fill`.
    """
    parse = re.compile(r"(\w+)\[([^]]*)\](?::(\w))?(\??)")
    inputs, outputs = map(parse.findall, signature.split("->"))

    def decorate(formula):
        parameters = inspect.signature(formula)

        @functools.wraps(formula)
        def checked(*args, **kwargs):
            asked = {name: kwargs.pop(name, None) for name, *_ in outputs}
            call, known = parameters.bind(*args, **kwargs), {}
            for name, dims, kind, optional in inputs:
                value = call.arguments.get(name)
                if value is not None or not optional:
                    where = f"{formula.__name__}: {name}"
                    call.arguments[name] = _as_kind(where, value, kind)
                    _unify(where, call.arguments[name].shape, dims, known)
            with np.errstate(all="ignore"):
                results = formula(*call.args, **call.kwargs)
            results = results if len(outputs) > 1 else (results,)
            handed = [
                _fill(f"{formula.__name__}: {name}", asked[name], result)
                for (name, *_, optional), result in zip(outputs, results, strict=True)
                if isinstance(asked[name], np.ndarray) or asked[name] or not optional
            ]
            return handed[0] if len(handed) == 1 else tuple(handed)

        checked.signature = signature
        return checked

    return decorate


def _as_kind(where, value, kind):
    if getattr(value, "is_meta", False):  # its zeros would pass for weights
        do = "open the checkpoint with from_pretrained(...), or draw weights with from_config(..., seed=0)"
        raise CapabilityMissing(compose(f'{where} is a parameter without data (device "meta")', do=do))
    array = np.asarray(value)
    integers, numbers = array.dtype.kind in "iu", array.dtype.kind in "iufV"  # V: bfloat16
    if not numbers or integers != (kind == "i"):
        expected = "integers" if kind == "i" else "floating point"
        raise DTypeError(compose(f"{where} has the wrong dtype", found=array.dtype, expected=expected))
    return array if kind == "w" else array.astype(np.int64 if kind == "i" else np.float64)


def _unify(where, shape, dims, known):
    """Match one shape with its letters; `known` carries what earlier arrays of the call said."""
    letters, sizes = dims.split(","), list(shape)
    if "*" in letters and len(sizes) >= len(letters) - 1:
        at, run = letters.index("*"), len(sizes) - len(letters) + 1
        sizes[at : at + run] = [tuple(sizes[at : at + run])]
    detail = {"found": list(shape), "expected": f"[{dims}]"}
    if len(letters) != len(sizes):
        raise ShapeError(compose(f"{where} has the wrong number of dimensions", **detail))
    for letter, size in zip(letters, sizes, strict=True):
        base, less = re.fullmatch(r"(\w|\*)(?:-(\d+))?", letter).groups()
        if less:
            expected = known[base] - int(less)
        else:
            expected = int(base) if base.isdigit() else known.setdefault(base, size)
        if size != expected:
            raise ShapeError(compose(f"{where} has {letter}={size}, expected {expected}", **detail))


def _fill(where, buffer, result):
    """The result, in the caller's array if one was given"""
    if not isinstance(buffer, np.ndarray):
        return result
    if buffer.shape != np.shape(result):
        first = f"{where}: the array given does not fit"
        raise ShapeError(compose(first, found=list(buffer.shape), expected=list(np.shape(result))))
    buffer[...] = result
    return buffer
