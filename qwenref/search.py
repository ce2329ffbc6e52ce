"""Where a bad value was born: a module is run again with every op, site and module below it looked at."""

import inspect
import math
import re
from contextvars import ContextVar

import numpy as np

from qwenref import _C
from qwenref.cache import Cache
from qwenref.exchange import as_array
from qwenref.numerics import Profile, active
from qwenref.outputs import ModelOutput
from qwenref.parameter import Parameter
from qwenref.sites import Chain, chain, declared

# Values that are logarithms: minus infinity stands for nothing at all, a masked score or a state that is forgotten.
_LOGARITHMS = frozenset({"scores", "g", "attention_scores", "delta_decay"})

_ROW = 1 << 12  # elements of which BLAS makes a product with one thread, from the cache
_PIECE = 1 << 20

_current = ContextVar("qwenref_search", default=None)  # the Search that is being made here


def searching():
    """Whether a search is being made here: what looks at calls in general leaves its calls alone."""
    return _current.get() is not None


# ---- is it finite --------------------------------------------------------------------------------------------------


def is_finite(array):
    """Whether every number of an array is finite."""
    if array.dtype.char in "fd":
        # A sum of squares is finite only if each of them is; if it is not, they may have been large, so look again.
        if array.size <= _ROW:
            if math.isfinite(np.vdot(array, array)):
                return True
        elif math.isfinite(_squares(array.reshape(-1))):
            return True
    elif array.dtype.kind not in "fc" and array.dtype.name != "bfloat16":
        return True
    return bool(np.isfinite(array).all())


def _squares(flat):
    """Sum of the squares, row by row: no array of the size of this one is made, and BLAS starts no threads."""
    whole = flat.size - flat.size % _ROW
    rows = flat[:whole].reshape(-1, _ROW)
    with np.errstate(all="ignore"):
        return float(np.vecdot(rows, rows).sum()) + float(np.vdot(flat[whole:], flat[whole:]))


def bad(array, logarithm=False):
    """(how many are not finite, index of the first, its value), or None; of a logarithm -inf is no fault."""
    array = np.asarray(array)
    if is_finite(array):
        return None
    flat, count, first = array.reshape(-1), 0, None
    for begin in range(0, flat.size, _PIECE):
        piece = flat[begin : begin + _PIECE]
        wrong = np.isnan(piece) | np.isposinf(piece) if logarithm else ~np.isfinite(piece)
        count += int(np.count_nonzero(wrong))
        if first is None and count:
            first = begin + int(np.argmax(wrong))
    if first is None:
        return None
    return count, tuple(int(i) for i in np.unravel_index(first, array.shape)), float(flat[first])


def arrays_of(value):
    """The arrays in what a module was given or returned."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from arrays_of(part)
    elif isinstance(value, ModelOutput):
        yield from arrays_of(tuple(vars(value).get(name) for name in ("logits", "last_hidden_state")))


def bad_argument(module, args, kwargs):
    """(name, array) of the first argument of a call that is not finite, or None."""
    names = [*inspect.signature(module.forward).parameters]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, list) or (hasattr(value, "__array__") and not isinstance(value, np.ndarray)):
            value = as_array(value)  # what models take as well: lists, torch tensors
        for array in arrays_of(value):
            if not is_finite(array):
                return name, array
    return None


# ---- what is known of it -------------------------------------------------------------------------------------------

# Values in which the heads lie side by side: whose head, and how many entries it has in units of D.
_SIDE_BY_SIDE = {
    "q_proj": ("Q-head", 2), "k_proj": ("K-head", 1), "v_proj": ("K-head", 1), "in_proj_z": ("V-head", 1),
    "core": ("V-head", 1), "normed": ("V-head", 1), "in_proj_a": ("V-head", 0), "in_proj_b": ("V-head", 0),
}  # fmt: skip
_QKV = ("in_proj_qkv", "conv1d", "mixed_qkv", "conv_out")


class Spot:
    """A value that is not finite: of which module, which one, where in it.  Holds names and numbers only.

    `.what` name of a site, "output", or "input" and the argument's name · `.op` that made it · `.cause` in words.
    """

    def __init__(self, module, what, dims, array):
        self.path, self.kind, self.what = module._path or "", type(module).__name__, what
        self.site = what if what.partition("@")[0] in module.SITES else None
        self.size, (self.count, self.index, self.value) = array.size, bad(array, what in _LOGARITHMS)
        self.op = self.cause = None
        self.inputs_finite = True
        self._dims = dims if len(dims) == len(self.index) else [f"axis {i}" for i in range(len(self.index))]
        self._sizes = dict(module.sizes)
        self._leaf = what if self.site else self.path.rpartition(".")[2]
        self._around = self._sizes if self.site else _sizes_around(module)

    @property
    def name(self):
        return f"{self.path} ({self.kind})" if self.path else self.kind

    def place(self, call):
        """{label: number} of the first bad entry; what lies along one axis is taken apart by the sizes of the call."""
        found = []
        for label, number in zip(self._dims, self.index, strict=True):
            *outer, inner = label.split("*")
            apart = []
            while outer and (size := self._sizes.get(inner) or call.get(inner)):
                number, rest = divmod(number, size)
                apart.append((inner, rest))
                inner = outer.pop()
            found += [("*".join([*outer, inner]), number), *reversed(apart)]
        return dict(found)

    def head(self, place):
        """("Q-head", 3) of the first bad entry, or None where heads are not apart."""
        for label, number in place.items():
            if label.endswith("-head"):
                return label, number
        if not self.what.startswith("input ") and self.index:
            channel, sizes = self.index[-1], self._around
            kind, width = _SIDE_BY_SIDE.get(self._leaf, (None, 0))
            if kind in sizes:
                return kind, channel // (width * sizes["D"]) if width else channel
            if self._leaf in _QKV and "V-head" in sizes:
                keys = sizes["K-head"] * sizes["K"]
                return ("K-head", channel % keys // sizes["K"]) if channel < 2 * keys else (
                    "V-head", (channel - 2 * keys) // sizes["D"])  # fmt: skip
        return None


def _sizes_around(module):
    """Sizes of the module this one is part of."""
    above, _, leaf = (module._path or "").rpartition(".")
    try:
        return module.root.get_submodule(above).sizes if module.root is not None and leaf else {}
    except AttributeError:  # it was moved after it had been named
        return {}


# ---- the search ----------------------------------------------------------------------------------------------------


class _Found(Exception):
    """Ends a search."""


class Search:
    """A call to be made again under observation: by a watcher behind all others, by hooks behind all others, and by a
    profile whose ops tell what they make of what."""

    def __init__(self, module, args, kwargs):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.failure = None  # what ended the search before it had seen everything
        self._spot = self._op = None
        self._fed = []  # (name, whether it is a weight) of what that op was given that was not finite

    def run(self):
        """The Spot of the first bad value, or None."""
        before, profile = chain(), active()
        watching = Profile.__new__(Profile)
        vars(watching).update(vars(profile))
        watching.update((name, self._telling(name, profile.get(name, op.compiled))) for name, op in _C.ops.items())
        watchers = Chain((*(before.watchers if before else ()), self))
        pairs = ((_current, self), (_C.sites_var, watchers), (_C.numerics_var, watching))
        tokens = [(variable, variable.set(value)) for variable, value in pairs]
        handles = []
        try:
            for below in self.module.modules():
                if below is not self.module:
                    handles.append(below.register_forward_pre_hook(self._module_begins, with_kwargs=True))
                    handles.append(below.register_forward_hook(self._module_ends))
            self._module_ends(self.module, (), self.module.forward(*self.args, **self.kwargs))
        except _Found:
            pass
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            for handle in handles:
                handle.remove()
            for variable, token in reversed(tokens):
                variable.reset(token)
        return self._spot

    def _telling(self, name, compute):
        """The op, which remembers if it was the first to make something that is not finite."""

        def op(*args, **kwargs):
            result = compute(*args, **kwargs)
            if self._op is None and any(bad(array, name in _LOGARITHMS) for array in arrays_of(result)):
                inputs = _inputs_of(_C.ops[name])
                given = dict(zip(inputs, args, strict=False)) | {n: a for n, a in kwargs.items() if n in inputs}
                self._op = name
                self._fed = [
                    (label, isinstance(value, Parameter))
                    for label, value in given.items()
                    if isinstance(value, np.ndarray) and bad(value)
                ]
            return result

        return op

    # As a watcher.

    def wants(self, module, name):
        return name in module.SITES and name != "delta_read"  # would be seen before the write that spoils it

    def columns(self, module):
        return ()

    def on_site(self, module, name, value):
        base = name.partition("@")[0]
        if bad(value, base in _LOGARITHMS):
            self._end(Spot(module, name, declared(module.SITES.get(base, "")), value), module)
        return value

    # As hooks.

    def _module_begins(self, module, args, kwargs):
        found = bad_argument(module, args, kwargs) if _current.get() is self else None
        if found is not None:
            name, array = found
            dims = ("B", "T", "channel") if array.ndim == 3 and name != "window" else ()
            self._end(Spot(module, f"input {name!r}", dims, array), module)

    def _module_ends(self, module, args, output):
        if _current.get() is self:
            for i, array in enumerate(arrays_of(output)):
                if not is_finite(array):
                    self._end(Spot(module, "output", declared(module.output_dims) if i == 0 else (), array), module)

    def _end(self, spot, module):
        spot.op, spot.inputs_finite = self._op, all(weight for _, weight in self._fed)
        spot.cause = self._cause(spot, module)
        self._spot = spot
        raise _Found

    def _cause(self, spot, module):
        given = [label for label, weight in self._fed if not weight]
        if given or spot.what.startswith("input "):
            held = _bad_memory((*self.args, *self.kwargs.values()))
            if held:
                return f"start again from a cache that is finite: this one was not before the call, in {held}"
        if len(given) < len(self._fed):
            return _bad_weight(module) or f"look at the weights ops.{spot.op} was given"
        if self._op is None:
            return PUT_THERE
        if given:
            return f"look at {given[0]} of ops.{spot.op}: not finite, though nothing before it was seen to be"
        return "see with qwenref.trace(model) how values grow: made from finite ones, it went out of range"


PUT_THERE = "look at edits and hooks, no op made it: qwenref.hooks(model) lists hooks; or at NumPy in a forward"


def _inputs_of(op):
    """Names of what an op takes, in order, from its signature: "rms_norm(x[*,D]:f, w[D]:v, eps=1e-6) -> y[*,D]:f"."""
    inputs = re.sub(r"\[[^]]*\]:\w\??", "", op.signature.partition("(")[2].partition(") ->")[0])
    return [name.partition("=")[0].strip() for name in inputs.split(",")]


def _bad_weight(module):
    for name, parameter in module.named_parameters(recurse=False):
        found = bad(parameter.view(np.ndarray))
        if found is not None:
            count, index, value = found
            path = f"{module._path}.{name}" if module._path else name
            return f"mend the weight {path}: {count:,} of {parameter.size:,} not finite, first {value} at {list(index)}"
    return None


def _bad_memory(values):
    for cache in (value for value in values if isinstance(value, Cache)):
        for i, layer in enumerate(cache.layers):
            for name, array in layer.arrays().items():
                if bad(array):
                    return f"{name} of layer {i}"
    return None
