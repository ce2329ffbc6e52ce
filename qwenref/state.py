"""What a tree of modules stores: loading arrays into it all or not at all, and changing its dtype."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from qwenref.exchange import as_array
from qwenref.parameter import Parameter

FLOATS = {np.dtype(t).name: np.dtype(t) for t in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)}
_CONVERTED = {*FLOATS.values(), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)}


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` returns."""

    missing_keys: list
    unexpected_keys: list

    def __repr__(self):
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return f"IncompatibleKeys(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"

    __str__ = __repr__


class Loading:
    """A state dict matched with a tree: what is to be put where, and everything that does not fit."""

    def __init__(self, module, state_dict, assign):
        self.keys = IncompatibleKeys([], [])
        self.faults = []
        self._state_dict, self._assign = state_dict, assign
        self._places = []
        self._match(module, list(state_dict), "")

    def _match(self, module, names, prefix):
        """Match the `names` that start with `prefix` with `module` and what is below it; changes nothing."""
        kept_out = module._non_persistent_buffers_set
        own = {name: module._buffers for name, array in module._buffers.items() if name not in kept_out}
        own = {**dict.fromkeys(module._parameters, module._parameters), **own}
        own = {name: registry for name, registry in own.items() if registry[name] is not None}
        for name, registry in own.items():
            key = prefix + name
            if key not in self._state_dict:
                self.keys.missing_keys.append(key)
                continue
            values, fault = _fitting(key, registry[name], self._state_dict[key], self._assign)
            if fault is None:
                self._places.append((registry, name, values))
            else:
                self.faults.append(fault)

        below = {name: [] for name, child in module._modules.items() if child is not None}
        for key in names:
            head, dot, _ = key[len(prefix) :].partition(".")
            if dot and head in below:
                below[head].append(key)
            elif dot or head not in own:
                self.keys.unexpected_keys.append(key)
        for name, rest in below.items():
            self._match(module._modules[name], rest, f"{prefix}{name}.")

    def complaint(self, strict):
        """Everything that forbids the loading, one line each; empty if nothing does."""
        lines = []
        if strict:
            for kind, names in (("Missing", self.keys.missing_keys), ("Unexpected", self.keys.unexpected_keys)):
                if names:
                    lines.append(f"{kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names) + ". ")
        return lines + self.faults

    def carry_out(self):
        for registry, name, values in self._places:
            if not self._assign:
                registry[name][...] = values
            elif isinstance(registry[name], Parameter) and not isinstance(values, Parameter):
                registry[name] = Parameter(values)
            else:
                registry[name] = values


def _fitting(key, old, new, assign):
    """The array to put where `old` is, or why `new` cannot go there: (values, None) or (None, reason)."""
    if not hasattr(new, "shape") or not hasattr(new, "dtype"):
        return None, f'While copying the parameter named "{key}", expected an array but received {type(new)}'
    if old.shape == () and tuple(new.shape) == (1,):
        new = new[0:1].reshape(())
    if tuple(new.shape) != old.shape:
        return None, (
            f"size mismatch for {key}: copying a param with shape {tuple(new.shape)} from checkpoint, "
            f"the shape in current model is {old.shape}."
        )
    try:
        values = new if isinstance(new, np.ndarray) else as_array(new)
        if values.dtype.hasobject:
            raise TypeError("an array of Python objects is no weight")
        np.zeros((), values.dtype).astype(old.dtype)
        if not assign and not old.flags.writeable:
            raise ValueError("the place has no memory to copy into (meta) or is read-only; pass assign=True")
    except Exception as error:
        return None, (
            f'While copying the parameter named "{key}", whose dimensions in the model are {old.shape} and whose '
            f"dimensions in the checkpoint are {tuple(new.shape)}, an exception occurred : {error.args}."
        )
    return values, None


def dtype_name(target):
    """Name of a dtype given by NumPy, by ml_dtypes, by name or by torch; None for what is a device."""
    try:
        return np.dtype(target).name
    except TypeError:
        name = str(target).removeprefix("torch.")
        return name if name in FLOATS or name != str(target) else None


def convert(module, dtype):
    """Put every floating parameter and buffer of the tree in another dtype; what was tied stays tied."""
    done = {}  # id of the old array -> (old, new); the old one is kept so that its id stays its own
    for node in module.modules():
        for registry in (node._parameters, node._buffers):
            for name, array in registry.items():
                if array is None or array.dtype not in _CONVERTED or array.dtype == dtype:
                    continue
                if id(array) not in done:
                    done[id(array)] = array, _converted(array, dtype)
                registry[name] = done[id(array)][1]


def _converted(array, dtype):
    if not isinstance(array, Parameter):
        return array.astype(dtype)
    return Parameter.meta(array.shape, dtype) if array.is_meta else Parameter(array.astype(dtype))
