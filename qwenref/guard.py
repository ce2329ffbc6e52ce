"""The guard against NaN and infinity: one cheap look at what every module returns, and a search when it fails."""

import re
import sys

import numpy as np

from qwenref import _C
from qwenref.capture import call_shape
from qwenref.errors import InputError, NonFiniteError, a_kind, compose
from qwenref.module import Module
from qwenref.outputs import ModelOutput
from qwenref.search import PUT_THERE, Search, Spot, arrays_of, bad_argument, is_finite, searching
from qwenref.sites import declared
from qwenref.step import undo_finished


class Guard:
    """What `check_finite` returns: `.close()` takes it away, as does the end of a `with` block."""

    def __init__(self, model):
        if not isinstance(model, Module):
            raise InputError(compose(f"check_finite: {a_kind(model)}", expected="a model or a part of one"))
        if model._path is None:
            model.name_tree()
        self._name = type(model).__name__
        self._handles = [
            module.register_forward_hook(self._module_ends, with_kwargs=True, always_call=True)
            for module in model.modules()
        ]

    def close(self):
        """Look no more; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self):
        if not self._handles:
            raise RuntimeError("check_finite: closed; a guard is used once, make another")
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        return f"<check_finite of {self._name}, {f'on {len(self._handles)} modules' if self._handles else 'closed'}>"

    def _module_ends(self, module, args, kwargs, output):
        if searching():
            return
        if output is not None:
            # Most modules return one array and get no cache; this line is most of what the guard costs.
            if type(output) is np.ndarray and not kwargs and is_finite(output):
                return
            seen = _first_bad(module, kwargs, output)
            if seen is None or _in_flight() is not None:  # another guard has raised it already
                return
            undo_finished(module)  # the search starts from the cache as it was
            error = NonFiniteError()
            error._guard, error._trail = id(self), Trail(seen)
        else:  # the module did not come through: was it for a value found further in?
            error = _in_flight()
            if vars(error or self).get("_guard") != id(self):
                return
        error._trail.passes(module, args, kwargs)
        error._trail.tell(error)
        if output is not None:
            raise error


def _in_flight():
    """The NonFiniteError that is leaving the call whose hook asks; not one that somebody has in hand."""
    error, frame = sys.exc_info()[1], sys._getframe()
    while frame.f_code is not Module._call_hooked.__code__:
        frame = frame.f_back
    leaving = isinstance(error, NonFiniteError) and error.__traceback__ and error.__traceback__.tb_frame is frame
    return error if leaving else None


def _first_bad(module, kwargs, output):
    """The Spot of the first bad value in what a module returned or handed to the cache, or None."""
    if isinstance(output, ModelOutput) and _passes_on(module):
        return None
    for i, array in enumerate(arrays_of(output)):
        if not is_finite(array):
            return Spot(module, "output", declared(module.output_dims) if i == 0 else (), array)
    if "state" in module.SITES and (step := getattr(kwargs.get("cache"), "step", None)) is not None:
        for array in arrays_of(step.handed_in(module.layer_idx)):
            if not is_finite(array):
                return Spot(module, "state", declared(module.SITES["state"]), array)
    return None


def _passes_on(module):
    """Whether what a module returns is what a module below it did, seen there and out of everybody's reach since."""
    ours = module.forward.__module__.startswith("qwenref.") and not _C.global_forward_hooks
    return ours and all(len(below._forward_hooks) == 1 for below in module.children())


class Trail:
    """What is known of a bad value while its error climbs out of the modules around it."""

    def __init__(self, seen):
        self.seen, self.born = seen, None  # Spots: where the guard met it, where a search found it
        self._given = self._finite = None  # outermost module and argument it came through; inputs of the first module
        self._failure, self._done = None, False
        self._call, self._past = {}, 0

    def passes(self, module, args, kwargs):
        """The error has come to `module`; the first whose inputs are finite is searched."""
        if module._modules:
            call = call_shape(args, kwargs)
            self._call, self._past = call, max(self._past, call.get("S", 0) - call.get("T", 0))
        if self._done:
            return
        argument = bad_argument(module, args, kwargs)
        first, self._finite = self._finite is None, argument is None if self._finite is None else self._finite
        if argument is not None:
            self._given = f"look at {argument[0]}, not finite when {module._path or type(module).__name__} was called"
            return
        search = Search(module, args, kwargs)
        self.born, self._given = search.run(), None
        self._failure, self._done = search.failure, search.failure is None
        if self.born is None and self._done and first:  # forward makes finite values, and a hook saw them before
            self.born = self.seen
            self.born.cause = PUT_THERE

    def tell(self, error):
        """Write into the error what is known by now."""
        spot = self.born or self.seen
        place = spot.place(self._call)
        head = spot.head(place)
        layer = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", spot.path)
        error.module, error.site, error.op = spot.path, spot.site, spot.op
        error.layer, error.row, error.token = layer and int(layer[1]), place.get("B"), place.get("T")
        error.head = head and head[1]
        error.count, error.value, error.index = spot.count, spot.value, spot.index
        error.inputs_finite = spot.inputs_finite if self.born else self._finite

        if error.token is None and "@" in spot.what:  # a state is named by its column
            error.token = int(spot.what.partition("@")[2]) - self._past

        what = f"site {spot.site}" if spot.site else spot.what
        first = f"{spot.name}: {what} is not finite"
        if not spot.what.startswith("input "):
            first += ", all its inputs are" if error.inputs_finite else ", nor are all its inputs"
        if head is not None and head[0] not in place:
            place |= dict([head])
        at = ", ".join(f"{label} {number}" for label, number in place.items())
        found = f"{spot.value} at [{at}], {spot.count:,} of {spot.size:,} values"
        if spot.op:
            found += f", made by ops.{spot.op}"
        if error.token is not None and self._past:
            found += f"\ntoken {error.token} of this call, column {self._past + error.token} of the cache"
        cause = spot.cause or self._given
        if cause is None and self._failure is not None:
            cause = f"look inside: the search for it ended with {self._failure}"
        elif cause is None:
            cause = "look at edits and hooks that count calls: it did not come up when the call was repeated"
        error.args = (compose(first, found=found, do=cause),)
        error.__notes__ = [f"in module {spot.name}"]


def check_finite(model):
    """Raise NonFiniteError at the first value of a call that is not finite, until closed.

    `with qwenref.check_finite(model): ...`, or `guard = qwenref.check_finite(model)` and later `guard.close()`: it is
    cheap enough to be left on.  It watches every module of `model` in every thread, and the states that go to the
    cache; -inf among attention scores is a mask and no fault.  The error says layer, module, site or output and the op
    that made it, row, token, head, how many values are bad and the first of them, and where it comes from: a weight, an
    edit or hook, the cache, an input, or finite numbers that went out of range.  The same is in its attributes: module,
    layer, site, op, row, token, head, count, value, index, inputs_finite.  The cache is as before the call.

    To find the place, the part of the model around it is run again: hooks and edits in there see it twice.  What hooks
    or edits make of the result of the whole model is not seen; `generate` refuses such logits by itself.

    The guard is hooks of the model and goes where they go: a deep copy or a pickle of a guarded model is guarded by a
    guard of its own, which `clear_hooks(copy)` takes away.  Closing one leaves the other.
    """
    return Guard(model)
