"""Where the weights of a model came from, which of them were changed since, and the way back.

A weight is changed by writing into it, or by putting another array in its place.  Neither ever reaches a file.
"""

import copy
import os
import weakref
from collections import namedtuple

import numpy as np

from qwenref import _C
from qwenref.errors import CapabilityMissing, CheckpointError, UnknownName, compose
from qwenref.parameter import Parameter
from qwenref.plain import plain
from qwenref.sites import matches

_CHUNK = 1 << 22  # bytes compared at a time

WeightEdit = namedtuple("WeightEdit", "name kind elements size largest")
WeightEdit.__doc__ = """One changed weight: `.kind` "written" in place, "replaced" by another array, "added" or
"removed" · `.elements` changed of `.size` · `.largest` change of a value, None where there is nothing to compare."""


class Edits(list):
    """WeightEdits in the order of the tree."""

    def __repr__(self):
        if not self:
            return "no weight was changed"
        lines = [f"{len(self):,} weight{'s' * (len(self) > 1)} changed in memory, file unchanged"]
        wide = max(len(edit.name) for edit in self[:37])
        for edit in self[:37]:
            size = f" {edit.elements:,} of {edit.size:,}" if edit.kind in ("written", "replaced") else ""
            change = "" if edit.largest is None else f" · largest change {edit.largest:.4g}"
            lines.append(f"  {edit.name:<{wide}}  {edit.kind:<8}{size}{change}".rstrip())
        if len(self) > 37:
            lines.append(f"  … {len(self) - 37:,} more: list(...)")
        return plain("\n".join(lines))


# ---- origins -------------------------------------------------------------------------------------------------------

_by_checkpoint = weakref.WeakValueDictionary()  # id of a checkpoint, which its Stored keeps alive -> Stored


class Stored:
    """Weights that are views of checkpoint files.  `tensors` {parameter: its name in the files}, ties included.

    It pickles as the path, and each weight as a name with what was changed: gigabytes stay where they are.
    """

    def __init__(self, path, checkpoint, tensors):
        self.path, self.tensors = os.path.abspath(path), tensors
        self._checkpoint, self._untouched, self._copied = checkpoint, None, None
        self._files = self._identity()
        self._parameters, self._names = {}, {}
        _by_checkpoint[id(checkpoint)] = self

    def parameter(self, tensor):
        """The one Parameter over a tensor of the files."""
        if tensor not in self._parameters:
            parameter = self._parameters[tensor] = Parameter(self._checkpoint[tensor])
            self._names[_address(parameter)] = tensor
        return self._parameters[tensor]

    def name_of(self, parameter):
        """The tensor a Parameter is the view of, or None."""
        tensor = self._names.get(_address(parameter))
        return tensor if tensor is not None and self._parameters[tensor] is parameter else None

    def original(self, tensor):
        """The Parameter there was when the model was opened or copied."""
        return self.parameter(tensor) if self._copied is None else self._copied[tensor]

    def fresh(self, tensor):
        """What the files hold, in a map of its own that nobody writes to."""
        if self._untouched is None:
            if not self.unchanged:
                raise CheckpointError(
                    compose(
                        f"{self.path}: the files have changed since the model was opened",
                        do="open the model again; what this one holds in memory stays as it is",
                    )
                )
            self._untouched = _C.Checkpoint(self.path)
        return self._untouched[tensor]

    @property
    def tells_writes(self):
        """Whether what was written in place is known without comparing."""
        return self._copied is None

    @property
    def unchanged(self):
        """Whether the files are those the model was opened from, as far as inode, size and time of change tell."""
        return self._identity() == self._files

    def suspects(self, tensor):
        """[(begin, end)] in bytes of the original outside of which nothing was written; None if all may be."""
        return None if self._copied is not None else self._checkpoint.touched(tensor)

    def release(self, tensor):
        """Give up what was written to the original where the system can."""
        if self._copied is None:
            self._checkpoint.revert(tensor)

    def _identity(self):
        """What tells the files on disk from others that took their place."""
        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        try:
            stats = [os.stat(os.path.join(folder, file)) for file in self._checkpoint.files]
        except OSError:
            return None
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]

    def __deepcopy__(self, memo):
        """A copied model has arrays of its own, which are compared with the file as a whole."""
        twin = object.__new__(Stored)
        vars(twin).update(vars(self))
        held = self._parameters if self._copied is None else self._copied
        twin._copied = {tensor: copy.deepcopy(parameter, memo) for tensor, parameter in held.items()}
        return twin

    def __reduce__(self):
        shapes = {tensor: (p.shape, p.dtype.name) for tensor, p in self._parameters.items()}
        return _reopened, (self.path, self.tensors, shapes), {"_copied": self._copied}


def _reopened(path, tensors, shapes):
    checkpoint = _C.Checkpoint(path)
    for tensor, (shape, dtype) in shapes.items():
        found = checkpoint.get(tensor)
        if found is None or found.shape != shape or found.dtype.name != dtype:
            raise CheckpointError(
                compose(
                    f"{path}: not the files the model was opened from",
                    found=f"{tensor}: " + ("absent" if found is None else f"{found.dtype} {list(found.shape)}"),
                    expected=f"{dtype} {list(shape)}",
                )
            )
    return Stored(path, checkpoint, tensors)


class Drawn:
    """Weights drawn from a seed; what they were is found by drawing again.

    It holds no weight: an original that was replaced and that nobody else keeps is gone, and drawn anew by a reset.
    `tensors` {parameter: the name it was drawn under}, which for a tied one is the first of its names.
    """

    tells_writes = False

    def __init__(self, seed, tensors, originals):
        self.seed, self.tensors = seed, tensors
        self._originals = {source: weakref.ref(parameter) for source, parameter in originals.items()}
        self._shapes = {source: (parameter.shape, parameter.dtype) for source, parameter in originals.items()}

    @classmethod
    def of(cls, model, seed):
        originals = dict(model.named_parameters())
        first = {id(parameter): name for name, parameter in originals.items()}
        return cls(seed, {name: first[id(parameter)] for name, parameter in _every_parameter(model)}, originals)

    def original(self, source):
        """The Parameter that was drawn, or None when it is gone."""
        reference = self._originals.get(source)
        return None if reference is None else reference()

    def fresh(self, source):
        from qwenref.loading import drawn

        return drawn(source, *self._shapes[source], self.seed)

    def suspects(self, source):
        return None

    def release(self, source):
        pass

    def _alive(self):
        pairs = ((source, reference()) for source, reference in self._originals.items())
        return {source: parameter for source, parameter in pairs if parameter is not None}

    def __deepcopy__(self, memo):
        twin = object.__new__(Drawn)
        twin.__setstate__({**vars(self), "_originals": copy.deepcopy(self._alive(), memo)})
        return twin

    def __getstate__(self):
        return {**vars(self), "_originals": self._alive()}

    def __setstate__(self, state):
        vars(self).update(state)
        self._originals = {source: weakref.ref(parameter) for source, parameter in state["_originals"].items()}


# ---- pickling ------------------------------------------------------------------------------------------------------


def reduced(parameter):
    """How a Parameter that is the view of a checkpoint is pickled; None for every other."""
    base = parameter.base
    while isinstance(base, np.ndarray):
        base = base.base
    stored = _by_checkpoint.get(id(base)) if isinstance(base, _C.Checkpoint) else None
    tensor = None if stored is None else stored.name_of(parameter)
    if tensor is None:
        return None
    now = _bytes(parameter)
    pieces = [(begin, now[begin:end].tobytes()) for begin, end in _changed_bytes(stored, tensor, parameter)]
    return _restored, (stored, tensor, pieces)


def _restored(stored, tensor, pieces):
    parameter = stored.parameter(tensor)
    for begin, changed in pieces:
        _bytes(parameter)[begin : begin + len(changed)] = np.frombuffer(changed, np.uint8)
    return parameter


# ---- comparing -----------------------------------------------------------------------------------------------------


def _every_parameter(model):
    return model.named_parameters(remove_duplicate=False)


def _address(array):
    return array.__array_interface__["data"][0]


def _bytes(array):
    """The memory of a contiguous array as bytes."""
    return np.asarray(array).view(np.ndarray).reshape(-1).view(np.uint8)


def _chunks(ranges):
    """The ranges in pieces of at most _CHUNK bytes."""
    for begin, end in ranges:
        for at in range(begin, end, _CHUNK):
            yield at, min(at + _CHUNK, end)


def _changed_bytes(origin, source, original):
    """Pieces [(begin, end)] of an original that hold all bytes which are not the file's or the seed's."""
    ranges = origin.suspects(source)
    if ranges == []:
        return []
    now, then = _bytes(original), _bytes(origin.fresh(source))
    whole = [(0, len(now))] if ranges is None else ranges
    return [(b, e) for b, e in _chunks(whole) if not np.array_equal(now[b:e], then[b:e])]


def _origin(model):
    if model.origin is not None:
        return model.origin
    without = model.device == "meta"
    raise CapabilityMissing(
        compose(
            f"{type(model).__name__}: " + ("a model without data" if without else "nothing to compare weights with"),
            found='device "meta"' if without else "weights that came neither from a file nor from a seed",
            do="open a checkpoint with from_pretrained(...), or draw weights with from_config(..., seed=0)",
        )
    )


def _compared(model, origin):
    """(name, parameter or None, kind) of every weight; a tied one once."""
    seen, present = set(), dict(_every_parameter(model))
    for name in [*present, *(name for name in origin.tensors if name not in present)]:
        parameter = present.get(name)
        if parameter is None:
            yield name, None, "removed"
        elif id(parameter) not in seen:
            seen.add(id(parameter))
            source = origin.tensors.get(name)
            kind = "added" if source is None else "replaced"
            yield name, parameter, "written" if source and parameter is origin.original(source) else kind


def edits(model):
    """Edits of a model against its file or its seed.  Of a file, only pages that were written are read."""
    origin, found = _origin(model), Edits()
    for name, parameter, kind in _compared(model, origin):
        if kind in ("added", "removed"):
            size = 0 if parameter is None else parameter.size
            found.append(WeightEdit(name, kind, size, size, None))
            continue
        source = origin.tensors[name]
        ranges = origin.suspects(source) if kind == "written" else None
        if ranges == []:
            continue
        then = origin.fresh(source)
        if parameter.shape != then.shape:
            found.append(WeightEdit(name, kind, parameter.size, parameter.size, None))
            continue
        changed, largest = _difference(parameter, then, ranges)
        if changed or parameter.dtype != then.dtype:
            found.append(WeightEdit(name, kind, changed, parameter.size, largest))
    return found


def edited(model):
    """Names of changed weights, without reading or drawing whole weights: for displays.

    Of weights in memory of their own (of a seed, or of a copied model) it knows the replaced ones only.
    """
    origin = model.origin
    if origin is None:
        return []
    return [
        name
        for name, parameter, kind in _compared(model, origin)
        if kind != "written"
        or (origin.suspects(origin.tensors[name]) and _changed_bytes(origin, origin.tensors[name], parameter))
    ]


def _difference(now, then, ranges):
    """(elements that differ, largest difference) of two arrays of one shape, looked at in pieces."""
    now, then = (np.asarray(a).view(np.ndarray).reshape(-1) for a in (now, then))
    width, same = now.itemsize, now.dtype == then.dtype
    if ranges is None:
        ranges = [(0, now.size * width)]
    changed, largest = 0, 0.0
    for begin, end in _chunks((begin // width * width, end) for begin, end in ranges):
        a, b = (array[begin // width : -(-end // width)] for array in (now, then))
        if same:  # by bits: a NaN is what it was, and -0 is not 0
            differing = np.any(_bytes(a).reshape(-1, width) != _bytes(b).reshape(-1, width), axis=1)
            a, b = a[differing].astype(np.float64), b[differing].astype(np.float64)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            differing = (a != b) & ~(np.isnan(a) & np.isnan(b))
            a, b = a[differing], b[differing]
        changed += a.size
        if a.size:
            with np.errstate(invalid="ignore"):
                largest = float(np.maximum(largest, np.abs(a - b).max()))
    return changed, largest


# ---- the way back --------------------------------------------------------------------------------------------------


def reset(model, names=None):
    """Give weights their original numbers, and the original arrays their places; the names of those that were changed.

    names: patterns over parameter names, all when None.  Arrays that had been put in a weight's place are left alone.
    """
    origin = _origin(model)
    places = []
    for name in _wanted(origin, names):  # all or nothing: every place is found before the first is filled
        owner, _, leaf = name.rpartition(".")
        try:
            places.append((name, model.get_submodule(owner), leaf))
        except AttributeError:
            raise UnknownName(
                compose(f"reset: {name} has no place in the model any more", do="put the module it was in back first")
            ) from None
    done, originals = [], {}
    for name, owner, leaf in places:
        source, present = origin.tensors[name], owner._parameters.get(leaf)
        if source not in originals:
            originals[source] = _renewed(origin, source)
        original, was_changed = originals[source]
        if present is not original:
            owner._parameters[leaf] = original
        if was_changed or present is not original:
            done.append(name)
    return done


def _wanted(origin, patterns):
    names = list(origin.tensors)
    if patterns is None:
        return names
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UnknownName(
                compose(f"reset: '{pattern}' matches no weight", do="model.edits() lists those that were changed")
            )
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def _renewed(origin, source):
    """(the original array with its original numbers, whether these had been changed)."""
    original = origin.original(source)
    if original is None:  # drawn once, replaced, and kept by nobody
        return Parameter(origin.fresh(source)), True
    if not _changed_bytes(origin, source, original):
        return original, False
    origin.release(source)
    now, then = _bytes(original), _bytes(origin.fresh(source))
    for begin, end in _changed_bytes(origin, source, original):  # at the edges, or all of it
        now[begin:end] = then[begin:end]
    return original, True


# ---- torch ---------------------------------------------------------------------------------------------------------


def to_torch_state_dict(model):
    """{name: torch tensor} over the model's own memory, under the names transformers loads strictly.

    No number is copied, bfloat16 included: a change on either side is seen on the other.  What opening found and has no
    place in the tree but in transformers' (a vision tower) comes along from the files.
    """
    import torch

    if model.device == "meta":
        raise CapabilityMissing(
            compose("to_torch_state_dict: a model without data", do="open a checkpoint, or draw weights with a seed")
        )
    arrays = dict(model.state_dict())
    if getattr(model, "report", None) is not None:
        from qwenref.loading import left_over

        arrays |= {name: array for name, array in left_over(model).items() if not name.startswith("mtp.")}
    tensors, made = {}, {}
    for name, array in arrays.items():
        key = _address(array), array.shape, array.dtype.name  # tied weights are one tensor
        if key not in made:
            made[key] = _torch_tensor(torch, np.asarray(array).view(np.ndarray))
        tensors[name] = made[key]
    return tensors


def _torch_tensor(torch, array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
