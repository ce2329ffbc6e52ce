"""Reading values on the way: capture keeps copies of them, of the calls, tokens and heads asked for."""

import difflib
import numbers
import operator

import numpy as np

from qwenref import _C
from qwenref.cache import Cache
from qwenref.errors import BudgetExceeded, InputError, UnknownName, a_kind, compose
from qwenref.numerics import active, unless_chosen
from qwenref.sites import ROOTS, Watcher, resolve

GIB = 2**30


class StopForward(Exception):
    """Ends a forward whose last wanted value is there; the block of the capture that raised it swallows it."""

    def __init__(self, watcher):
        super().__init__("stopped: every wanted value is there")
        self.watcher = watcher


class Counting(Watcher):
    """A watcher that knows which call of the model a value belongs to.

    Steps count from 0, the first call of the watched module after the block was opened.  A part called by itself counts
    as a call of its own; a call made by a hook inside of another is the next one, and the other one goes on after it.
    Opened again after its end, a watcher starts over.
    """

    def __init__(self, model, patterns):
        super().__init__(model, patterns)
        self.calls, self._inside = [], []  # shape of each call, in order; numbers of those being made, outermost first

    def opened(self):
        self.calls, self._inside = [], []
        before = self.model.register_forward_pre_hook(self._call_begins, prepend=True, with_kwargs=True)
        after = self.model.register_forward_hook(self._call_ends, always_call=True)
        self._handles += [before, after]

    def _call_begins(self, module, args, kwargs):
        if self.is_open_here():
            self._inside.append(len(self.calls))
            self.calls.append(call_shape(args, kwargs))
            self.call_begins(self.calls[-1])

    def _call_ends(self, module, args, output):
        if self.is_open_here() and self._inside:
            self.call_ends()
            self._inside.pop()

    def call_begins(self, shape):
        """A call with `shape` {"B", "T", "S"} begins (empty where it cannot be told)."""

    def call_ends(self):
        """The call that began last has come through, or failed."""

    @property
    def step(self):
        """Number of the call that is being made; None outside of one."""
        return self._inside[-1] if self._inside else None

    @property
    def shape(self):
        """{"B", "T", "S"} of the call that is being made; empty outside of one, or where it cannot be told."""
        return self.calls[self._inside[-1]] if self._inside else {}


def call_shape(args, kwargs):
    """Rows, new tokens and tokens seen of a model call, as far as its arguments tell."""
    names = ("input_ids", "inputs_embeds", "hidden_states", "hidden", "input", "x")
    first = next((kwargs[name] for name in names if kwargs.get(name) is not None), args[0] if args else None)
    try:
        shape = np.shape(first)
    except ValueError:
        return {}
    if not shape:
        return {}
    B, T = (1, shape[0]) if len(shape) == 1 else shape[:2]
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    past = int(caches[0].mask.shape[1]) if caches else 0
    return {"B": int(B), "T": int(T), "S": past + int(T)}


class Capture(Counting):
    """Copies of named values of the calls made inside its block.

    `c[name]` the array of a single step · `c[name, step]` · `c.cat(name)` all steps joined along the tokens ·
    `c.names()`, `c.steps(name)`, `c.tree()`, `c.to_dict()`, `c.save(path)`.  Arrays belong to the caller.
    """

    def __init__(self, model, *patterns, max_bytes=GIB, steps=None, tokens=None, heads=None, reduce=None, stop_at=None):
        if not patterns:
            raise InputError(compose("capture: no pattern", do='name what to keep, "**" for everything'))
        super().__init__(model, patterns)
        if reduce is not None and not callable(reduce):
            raise InputError(compose(f"capture: reduce={reduce!r}", expected="a function of one array"))
        self.patterns, self.max_bytes, self.reduce = patterns, _checked_bytes(max_bytes), reduce
        self._steps = _checked_steps(steps)
        self._tokens, self._heads = self._checked("tokens", "T", tokens), self._checked("heads", "head", heads)
        self._stop = set(resolve(model, [stop_at] if isinstance(stop_at, str) else stop_at)) if stop_at else set()
        unwatched = self._stop - set(self.targets)
        if unwatched:
            raise InputError(
                compose(
                    f"capture: stop_at names {sorted(unwatched)[0]}, which is not captured",
                    do="capture it as well, or stop at something that is",
                )
            )
        self._forget()

    def _checked(self, option, axis, wanted):
        """Numbers or a slice of an axis that something captured has."""
        if wanted is not None and not isinstance(wanted, slice):
            array = np.atleast_1d(wanted)
            if array.ndim > 1 or array.dtype.kind not in "iu":
                raise InputError(
                    compose(f"capture: {option}={wanted!r}", expected="a number, a list of them, or a slice")
                )
        if wanted is not None and all(site.axis(axis) is None for site in self.targets.values()):
            raise InputError(
                compose(
                    f"capture: {option}={wanted!r}, but nothing that is named has {option}",
                    found="\n".join(f"{name} [{', '.join(site.dims)}]" for name, site in [*self.targets.items()][:5]),
                )
            )
        return wanted

    def _forget(self):
        """Start with nothing: {name: {step: array}}, and of states {name: (step, column)} of the last one seen."""
        self._values, self._states, self._waiting = {}, {}, set()
        self._outer = []  # states and waiting of the calls this one is made inside of
        self.nbytes = 0

    # ---- recording

    def opened(self):
        self._forget()
        super().opened()

    def call_begins(self, shape):
        self._outer.append((self._waiting, self._states))
        self._waiting, self._states = set(), {}
        if self._keeps(self.step):
            self._waiting = {name for name in self._stop if self._comes(self.targets[name], shape)}
            if shape:
                self._check_budget(shape)

    def call_ends(self):
        for name in self._states:
            self._array(name, self.step)
        self._waiting, self._states = self._outer.pop()

    @staticmethod
    def _comes(site, shape):
        """Whether a call passes the site; one without any of the columns asked for does not."""
        return site.tokens is None or (bool(shape) and len(site.columns(shape["T"], shape["S"])) > 0)

    def on_value(self, site, value):
        self._record(site, value)
        return value

    def on_state(self, site, column, value):
        """States after several tokens of one call are one entry, joined when the call is over."""
        if self._keeps(self.step):
            step, last = self._states.get(site.name, (None, column))
            if last >= column:  # the first of this call
                step = self._step_of(site)
            self._store(site, step, self._selected(site, value if self.reduce else value[:, None]), joins=last < column)
            self._states[site.name] = step, column
        if self.shape and column == max(site.columns(self.shape["T"], self.shape["S"]), default=None):
            self._passed(site)
        return value

    def _keeps(self, step):
        if self._steps is None or step is None or self._steps == "last":
            return True
        if isinstance(self._steps, slice):
            return step in range(*self._steps.indices(step + 1))
        return step in self._steps

    def _record(self, site, value):
        if self._keeps(self.step):
            self._store(site, self._step_of(site), self._selected(site, value))
        self._passed(site)

    def _passed(self, site):
        """End the forward if this was the last value it was made for."""
        if site.name in self._waiting:
            self._waiting.remove(site.name)
            if not self._waiting:
                raise StopForward(self)

    def _step_of(self, site):
        """The call that is being made; a part called by itself counts on from what there is of the site."""
        if self.step is not None:
            return self.step
        return max(self._values.get(site.name, ()), default=len(self.calls) - 1) + 1

    def _selected(self, site, value):
        """The tokens and heads asked for, reduced if asked, as an array of the caller's own."""
        for ending, wanted in (("T", None if site.tokens else self._tokens), ("head", self._heads)):
            axis = site.axis(ending)
            if wanted is not None and axis is not None:
                axis -= site.tokens is not None and value.ndim < len(site.dims)  # a state to be reduced: no token axis
                index = wanted if isinstance(wanted, slice) else np.atleast_1d(wanted)
                try:
                    value = value[(slice(None),) * axis + (index,)]
                except IndexError:
                    raise InputError(
                        compose(
                            f"capture: {site.name} has no {'token' if ending == 'T' else 'head'} {wanted}",
                            found=f"[{site.labelled(np.shape(value))}]",
                        )
                    ) from None
        if self.reduce is None:
            return np.array(value)
        reduced = self.reduce(value)
        array = np.array(reduced)
        if array.dtype.hasobject:
            raise InputError(
                compose(f"capture: {site.name}: reduce returned {a_kind(reduced)}", expected="a number or an array")
            )
        return array

    def _store(self, site, step, array, joins=False):
        kept = self._values.setdefault(site.name, {})
        if self._steps == "last" and not joins:
            for old in list(kept):
                self.nbytes -= _nbytes(kept.pop(old))
        if self.nbytes + array.nbytes > self.max_bytes:
            raise BudgetExceeded(
                compose(
                    f"capture: {site.name} does not fit",
                    found=f"{self.nbytes:,} B held, {array.nbytes:,} B more",
                    expected=f"at most {self.max_bytes:,} B",
                    do="raise max_bytes, or keep fewer names, steps, tokens or heads",
                )
            )
        self.nbytes += array.nbytes
        if site.tokens is not None:
            kept.setdefault(step, []).append(array)
        elif step in kept:  # a module that is called more than once in a call
            self.nbytes -= _nbytes(kept[step])
            kept[step] = array
        else:
            kept[step] = array

    def _array(self, name, step):
        """What is kept of one step; states are joined along their tokens, reduced ones along a new first axis."""
        kept = self._values[name]
        if isinstance(kept[step], list):
            kept[step] = np.stack(kept[step]) if self.reduce else np.concatenate(kept[step], axis=1)
        return kept[step]

    def _check_budget(self, shape):
        """Refuse before the first value if the call's values cannot fit."""
        if self.reduce is not None:
            return
        sizes = self._predicted(shape)
        total, held = sum(sizes.values()), 0 if self._steps == "last" else self.nbytes
        if held + total <= self.max_bytes:
            return
        largest = sorted(sizes, key=sizes.get, reverse=True)[:5]
        fitting = [p for p in self.patterns if sum(sizes[n] for n in resolve(self.model, [p])) <= self.max_bytes]
        raise BudgetExceeded(
            compose(
                f"capture: this call would hold {total:,} B in {len(sizes):,} names",
                found="\n".join(f"{sizes[name]:>15,} B  {name}" for name in largest),
                expected=f"at most {self.max_bytes:,} B, {held:,} B of them held already",
                do=f"raise max_bytes, or capture {fitting[0]!r}, which fits" if fitting else "raise max_bytes",
            )
        )

    def _predicted(self, shape):
        """{name: bytes} of a call with `shape` {"B", "T", "S"}, none of them reduced."""
        with unless_chosen(getattr(self.model, "numerics", "fp32")):  # a model's own comes into force further in
            width = active().dtype.itemsize
        return {name: width * self._elements(site, shape) for name, site in self.targets.items()}

    def _elements(self, site, shape):
        n = site.elements(**shape)
        for ending, wanted, whole in (("T", self._tokens, shape["T"]), ("head", self._heads, None)):
            axis = site.axis(ending)
            if wanted is None or axis is None or (ending == "T" and site.tokens is not None):
                continue
            size = whole or site.shape[axis]
            kept = len(range(*wanted.indices(size))) if isinstance(wanted, slice) else np.size(wanted)
            n = n // size * kept
        return n

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        return isinstance(error, StopForward) and error.watcher is self

    # ---- reading

    def names(self):
        """Full names of everything that was captured."""
        return list(self._values)

    def steps(self, name):
        """Steps in which `name` was captured."""
        return sorted(self._values[self._full(name)])

    def __len__(self):
        return len(self._values)

    def __iter__(self):
        return iter(self._values)

    def __contains__(self, name):
        try:
            self._full(name)
        except InputError:  # no text at all
            return False
        except UnknownName:
            return False
        return True

    def __getitem__(self, key):
        name, step = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        name = self._full(name)
        kept = self._values[name]
        if step is None:
            if len(kept) == 1:
                return self._array(name, next(iter(kept)))
            raise UnknownName(
                f"{name} was captured in {len(kept)} steps\n"
                f"    do       c[name, {min(kept)}], c[name, -1] or c.cat(name) for all of them"
            )
        order = sorted(kept)
        try:
            step = operator.index(step)
        except TypeError:
            raise InputError(
                compose(f"c[name, {step!r}]", expected="the number of a step", do="c.cat(name) joins all steps")
            ) from None
        if step < 0 and -step <= len(order):
            step = order[step]
        if step not in kept:
            raise UnknownName(f"{name} was not captured in step {step}\n    expected {', '.join(map(str, order[:12]))}")
        return self._array(name, step)

    def cat(self, name):
        """All steps of `name`, joined along the tokens."""
        name = self._full(name)
        site, axis = self.targets[name], self.targets[name].axis("T")
        if axis is None or self.reduce is not None:
            found = "reduced values" if self.reduce else f"[{', '.join(site.dims)}]"
            raise InputError(compose(f"cat: {name} has no token axis", found=found, do="c[name, step] is one step"))
        arrays = [self._array(name, step) for step in self.steps(name)]
        if "S" in site.dims:  # later calls see more keys: what an earlier one did not see has no weight
            seen = max(array.shape[-1] for array in arrays)
            blank = -np.inf if site.site == "scores" else 0
            arrays = [_widened(array, seen, blank) for array in arrays]
        return np.concatenate(arrays, axis=axis)

    def to_dict(self):
        """{name: array}, or {name: [arrays]} where there are several steps."""
        found = {}
        for name in self._values:
            arrays = [self._array(name, step) for step in self.steps(name)]
            found[name] = arrays[0] if len(arrays) == 1 else arrays
        return found

    def save(self, path):
        """Write a safetensors file: tensors "name" for a single step, "name#step" for several."""
        tensors = {}
        for name, kept in self._values.items():
            for step in kept:
                tensors[name if len(kept) == 1 else f"{name}#{step}"] = self._array(name, step)
        _C.save_safetensors(path, tensors, {"format": "qwenref.capture", "calls": str(len(self.calls))})

    # ---- looking

    def tree(self):
        """Every call and every pattern of names, however many."""
        return self._view(limit=None)

    def save_html(self, path):
        """Write one HTML file that stands alone, with every pattern and more pictures than a notebook cell shows."""
        from qwenref.capture_display import save_html

        save_html(self._view(limit=None, pictures=48), path)

    def __repr__(self):
        return str(self._view())

    def _repr_html_(self):
        return self._view()._repr_html_()

    def _view(self, **options):
        from qwenref.capture_display import CaptureView

        calls = getattr(self, "calls", [])  # there are none before the block is opened
        values = {name: {step: self._array(name, step) for step in kept} for name, kept in self._values.items()}
        return CaptureView(calls, values, self.targets, self.nbytes, self.max_bytes, **options)

    def _full(self, name):
        if not isinstance(name, str):
            raise InputError(compose(f"c[...]: {a_kind(name)}", expected="c[name] or c[name, step], the name as text"))
        for root in ROOTS:
            if root + name in self._values:
                return root + name
        if any(root + name in self.targets for root in ROOTS):
            raise UnknownName(f"{name} was asked for, but no call has passed it yet")
        near = difflib.get_close_matches(name, self._values, n=3, cutoff=0.4)
        raise UnknownName(f"{name!r} was not captured" + (f". Near: {', '.join(near)}" if near else ""))

    def _ipython_key_completions_(self):
        return self.names()


def _nbytes(kept):
    return sum(array.nbytes for array in kept) if isinstance(kept, list) else kept.nbytes


def _widened(array, size, blank):
    missing = [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])]
    return np.pad(array, missing, constant_values=blank)


def _checked_bytes(number):
    if not isinstance(number, numbers.Real) or isinstance(number, bool) or not 0 <= number < float("inf"):
        raise InputError(compose(f"capture: max_bytes={number!r}", expected="a number of bytes, such as 2**30"))
    return int(number)


def _checked_steps(steps):
    """None, "last", a slice, or a set of numbers; steps are counted as they come, so none is counted from the end."""
    if steps is None or (isinstance(steps, str) and steps == "last"):
        return steps
    if isinstance(steps, slice):
        given = [n for n in (steps.start, steps.stop, steps.step) if n is not None]
    else:
        given = np.atleast_1d(steps).tolist() if not isinstance(steps, str) else [steps]
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in given):
        raise InputError(
            compose(
                f"capture: steps={steps!r}",
                expected='numbers from 0, a list of them, a slice, or "last"',
                do='how many steps will come is not known before: "last" keeps the last one',
            )
        )
    return steps if isinstance(steps, slice) else set(given)


def capture(model, *patterns, **options):
    """Keep copies of named values of the calls made inside a `with` block.

    patterns: globs over the names of `model.sites()`; `**` is everything.  max_bytes: refuse, before the call, to hold
    more.  steps: a number, a list, a slice or "last".  tokens, heads: numbers or a slice.  reduce: a function of one
    array, whose result is kept instead; states after tokens are reduced one by one and stacked.  stop_at: name or
    pattern; when all it names is there the forward ends, and so does the block.
    """
    return Capture(model, *patterns, **options)
