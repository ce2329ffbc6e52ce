"""Reading values on the way: capture keeps copies of them, trace keeps a log of what went by."""

import time
from collections import namedtuple

import numpy as np

from qwenref.errors import BudgetExceeded, InputError, UnknownName, compose
from qwenref.numerics import active
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
    as a call of its own.
    """

    def opened(self):
        self.calls = []  # shape of each call, in order
        self._inside = False
        before = self.model.register_forward_pre_hook(self._call_begins, prepend=True, with_kwargs=True)
        after = self.model.register_forward_hook(self._call_ends, always_call=True)
        self._handles += [before, after]

    def _call_begins(self, module, args, kwargs):
        if self.is_open_here():
            self._inside = True
            self.calls.append(_call_shape(args, kwargs))
            self.call_begins(self.calls[-1])

    def _call_ends(self, module, args, output):
        self._inside = False

    def call_begins(self, shape):
        """A call with `shape` {"B", "T", "S"} begins (empty where it cannot be told)."""

    @property
    def step(self):
        """Number of the call that is being made; None outside of one."""
        return len(self.calls) - 1 if self._inside else None


def _call_shape(args, kwargs):
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
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    past = 0 if cache is None else int(cache.mask.shape[1])
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
        self.patterns, self.max_bytes, self.reduce = patterns, max_bytes, reduce
        self._steps, self._tokens, self._heads = steps, tokens, heads
        self._stop = set(resolve(model, [stop_at] if isinstance(stop_at, str) else stop_at)) if stop_at else set()
        unwatched = self._stop - set(self.targets)
        if unwatched:
            raise InputError(
                compose(
                    f"capture: stop_at names {sorted(unwatched)[0]}, which is not captured",
                    do="capture it as well, or stop at something that is",
                )
            )
        self._values, self._pending, self._waiting = {}, {}, set()
        self.nbytes = 0

    # ---- recording

    def call_begins(self, shape):
        self._waiting = set(self._stop)
        self._pending = {}
        if shape and self._keeps(len(self.calls) - 1):
            self._check_budget(shape)

    def on_value(self, site, value):
        self._record(site, value)
        return value

    def on_state(self, site, column, value):
        """States after several tokens of one call are one array; it is complete when the call's last one is in."""
        step = self.step
        if self._keeps(step):
            self._pending.setdefault(site.name, []).append(self._selected(site, value[:, None], state=True))
            joined = np.concatenate(self._pending[site.name], axis=1) if self.reduce is None else None
            if joined is None:
                self._store(site, step, self._pending[site.name][-1], replace=False)
            else:
                self._store(site, step, joined, replace=len(self._pending[site.name]) > 1)
        return value

    def _keeps(self, step):
        if self._steps is None or step is None or self._steps == "last":
            return True
        if isinstance(self._steps, slice):
            return step in range(*self._steps.indices(step + 1))
        return step in ([self._steps] if isinstance(self._steps, int) else self._steps)

    def _record(self, site, value):
        step = self.step
        if self._keeps(step) and value is not None:
            self._store(site, step, self._selected(site, value))
        self._waiting.discard(site.name)
        if self._stop and not self._waiting and step is not None:
            raise StopForward(self)

    def _selected(self, site, value, state=False):
        """The tokens and heads asked for, reduced if asked, as an array of the caller's own."""
        for ending, wanted in (("T", None if state else self._tokens), ("head", self._heads)):
            axis = site.axis(ending)
            if wanted is not None and axis is not None and np.ndim(value) == len(site.dims):
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
        if self.reduce is not None:
            value = self.reduce(value)
        return np.array(value)

    def _store(self, site, step, array, replace=False):
        if step is None:  # a part called by itself
            step = len(self.calls) + len(self._values.get(site.name, ()))
        kept = self._values.setdefault(site.name, {})
        if self._steps == "last" or replace:
            for old in [step] if replace else list(kept):
                self.nbytes -= kept.pop(old).nbytes if old in kept else 0
        if self.nbytes + array.nbytes > self.max_bytes:
            raise BudgetExceeded(
                compose(
                    f"capture: {site.name} does not fit",
                    found=f"{self.nbytes:,} B held, {array.nbytes:,} B more",
                    expected=f"at most {self.max_bytes:,} B",
                    do="raise max_bytes, or keep fewer names, steps, tokens or heads",
                )
            )
        kept[step] = array
        self.nbytes += array.nbytes

    def _check_budget(self, shape):
        """Refuse before the first value if the call's values cannot fit."""
        if self.reduce is not None:
            return
        width = active().dtype.itemsize
        sizes = {name: width * self._elements(site, shape) for name, site in self.targets.items()}
        total = sum(sizes.values())
        if self.nbytes + total <= self.max_bytes:
            return
        largest = sorted(sizes, key=sizes.get, reverse=True)[:5]
        fitting = [p for p in self.patterns if sum(sizes[n] for n in resolve(self.model, [p])) <= self.max_bytes]
        raise BudgetExceeded(
            compose(
                f"capture: this call would hold {total:,} B in {len(sizes):,} names",
                found="\n".join(f"{sizes[name]:>15,} B  {name}" for name in largest),
                expected=f"at most {self.max_bytes:,} B, {self.nbytes:,} B of them held already",
                do=f"raise max_bytes, or capture {fitting[0]!r}, which fits" if fitting else "raise max_bytes",
            )
        )

    def _elements(self, site, shape):
        n = site.elements(**shape)
        for ending, wanted, whole in (("T", self._tokens, shape["T"]), ("head", self._heads, None)):
            axis = site.axis(ending)
            if wanted is None or axis is None:
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
        except UnknownName:
            return False
        return True

    def __getitem__(self, key):
        name, step = key if isinstance(key, tuple) else (key, None)
        name = self._full(name)
        kept = self._values[name]
        if step is None:
            if len(kept) == 1:
                return next(iter(kept.values()))
            raise UnknownName(
                f"{name} was captured in {len(kept)} steps\n"
                f"    do       c[name, {min(kept)}], c[name, -1] or c.cat(name) for all of them"
            )
        order = sorted(kept)
        if step < 0 and -step <= len(order):
            step = order[step]
        if step not in kept:
            raise UnknownName(f"{name} was not captured in step {step}\n    expected {', '.join(map(str, order[:12]))}")
        return kept[step]

    def cat(self, name):
        """All steps of `name`, joined along the tokens."""
        name = self._full(name)
        site, kept = self.targets[name], self._values[name]
        axis = site.axis("T")
        if axis is None:
            raise InputError(compose(f"cat: {name} has no token axis", found=f"[{', '.join(site.dims)}]"))
        return np.concatenate([kept[step] for step in sorted(kept)], axis=axis)

    def to_dict(self):
        """{name: array}, or {name: [arrays]} where there are several steps."""
        return {
            name: next(iter(kept.values())) if len(kept) == 1 else [kept[step] for step in sorted(kept)]
            for name, kept in self._values.items()
        }

    def save(self, path):
        """Write a safetensors file: tensors "name" for a single step, "name#step" for several."""
        from qwenref import _C

        tensors = {}
        for name, kept in self._values.items():
            for step, array in kept.items():
                tensors[name if len(kept) == 1 else f"{name}#{step}"] = np.asarray(array)
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
        return CaptureView(calls, self._values, self.targets, self.nbytes, self.max_bytes, **options)

    def _full(self, name):
        for root in ROOTS:
            if root + name in self._values:
                return root + name
        if any(root + name in self.targets for root in ROOTS):
            raise UnknownName(f"{name} was asked for, but no call has passed it yet")
        import difflib

        near = difflib.get_close_matches(name, self._values, n=3, cutoff=0.4)
        raise UnknownName(f"{name!r} was not captured" + (f". Near: {', '.join(near)}" if near else ""))

    def _ipython_key_completions_(self):
        return self.names()


def capture(model, *patterns, **options):
    """Keep copies of named values of the calls made inside a `with` block.

    patterns: globs over the names of `model.sites()`; `**` is everything.  max_bytes: refuse, before the call, to hold
    more.  steps: a number, a list, a slice or "last".  tokens, heads: numbers or a slice.  reduce: a function of one
    array, whose result is kept instead.  stop_at: name or pattern; when all it names is there the forward ends, and so
    does the block.
    """
    return Capture(model, *patterns, **options)


# ---- trace ---------------------------------------------------------------------------------------------------------

Row = namedtuple("Row", "step name kind of shape dtype min max rms nonfinite ms")


class Trace(Counting):
    """Ordered log of every value that went by: `.rows`, each with name, kind, class, shape, statistics and time.

    Times include everything below a module; a site's time is that since the row before it.
    """

    def __init__(self, model, *patterns):
        super().__init__(model, patterns or ("**",))
        self.rows = []
        self._began, self._last = {}, 0.0

    def opened(self):
        super().opened()
        for module in self._outputs:
            self._handles.append(module.register_forward_pre_hook(self._module_begins, prepend=True))

    def _module_begins(self, module, args):
        if self.is_open_here():
            self._began[module] = time.perf_counter()

    def on_value(self, site, value):
        now = time.perf_counter()
        began = self._began.pop(site.module, now) if site.site is None else (self._last or now)
        if isinstance(value, np.ndarray):
            kind = "site" if site.site else "module"
            row = (self.step, site.name, kind, type(site.module).__name__, value.shape, str(value.dtype))
            self.rows.append(Row(*row, *statistics(value), (now - began) * 1e3))
        self._last = time.perf_counter()
        return value

    def __repr__(self):
        lines = [f"Trace · {len(self.rows):,} values in {len(self.calls)} calls"]
        for row in self.rows[:37]:
            values = f"{row.min:.4g} … {row.max:.4g}" + (f" · {row.nonfinite} not finite" if row.nonfinite else "")
            shape = "x".join(map(str, row.shape))
            lines.append(f"  {row.step!s:>4}  {row.name:<58} {shape:<16} {values}")
        if len(self.rows) > 37:
            lines.append(f"  … {len(self.rows) - 37:,} more: .rows")
        return "\n".join(lines)


def statistics(value):
    """(min, max, rms, how many are not finite) of an array; the first three over the finite ones."""
    finite = np.isfinite(value)
    bad = int(value.size - np.count_nonzero(finite))
    good = value if not bad else value[finite]
    if good.size == 0:
        return float("nan"), float("nan"), float("nan"), bad
    rms = float(np.sqrt(np.mean(np.square(good, dtype=np.float64))))
    return float(good.min()), float(good.max()), rms, bad


def trace(model, *patterns):
    """Log every module and site (or those the patterns name) of the calls made inside a `with` block."""
    return Trace(model, *patterns)
