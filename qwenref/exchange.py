"""Arrays to and from other libraries without a copy, bfloat16 included, which NumPy itself cannot hand on."""

import ctypes
import sys

import ml_dtypes
import numpy as np

# The head of what a DLPack capsule points at, as the standard lays it out (https://dmlc.github.io/dlpack).

_BFLOAT = 4  # kDLBfloat


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


_LAYOUTS = {b"dltensor": 0, b"dltensor_versioned": _Versioned.tensor.offset}


def bfloat16_capsule(array, **options):
    """DLPack capsule of a bfloat16 array: NumPy exports the same memory as int16, here it gets its type back."""
    capsule = array.view(np.ndarray).view(np.int16).__dlpack__(**options)
    api = ctypes.pythonapi
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", api))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    name, offset = next(layout for layout in _LAYOUTS.items() if is_valid(capsule, layout[0]))
    _Tensor.from_address(pointer(capsule, name) + offset).code = _BFLOAT
    return capsule


def as_array(values):
    """`values` as an array: what NumPy takes, and torch tensors that it does not (bfloat16, or with a gradient)."""
    if type(values).__module__.partition(".")[0] == "torch" and hasattr(values, "detach"):
        values, torch = values.detach(), sys.modules["torch"]
        if values.dtype == torch.bfloat16 and values.device.type == "cpu":
            return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(values)
