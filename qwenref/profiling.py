"""Where the time of a call goes: every module and op with its calls, time, work, and share of what the machine can do.

Hooks around modules and a profile of ops that times the one in force: nothing is computed differently.
"""

import json
import os
import time
from contextvars import ContextVar

from qwenref import _C, ops
from qwenref.costs import cost
from qwenref.errors import InputError, a_kind, compose
from qwenref.handles import register_module_forward_hook, register_module_forward_pre_hook
from qwenref.numerics import Profile, active, unless_chosen
from qwenref.rates import rates

_open = ContextVar("qwenref_profiles", default=())


class Work:
    """What was done under one name: `.calls`, `.seconds`, `.own_seconds`, `.flops`, `.bytes`, `.least_seconds`.

    `seconds` has everything inside, `own_seconds` leaves out the modules inside.  `least_seconds` is what memory and
    arithmetic allow, summed op by op.
    """

    __slots__ = ("calls", "seconds", "own_seconds", "flops", "bytes", "least_seconds")

    def __init__(self):
        self.calls = self.flops = self.bytes = 0
        self.seconds = self.own_seconds = self.least_seconds = 0.0

    def add(self, other):
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def of_limit(self):
        """Share of the limit that was reached; None where there is no work to speak of."""
        return self.least_seconds / self.seconds if self.seconds and self.least_seconds else None

    def to_dict(self):
        return {name: getattr(self, name) for name in self.__slots__} | {"of_limit": self.of_limit}


class _Timed(Profile):
    """A profile that does what another does, and tells a ModelProfile of every op."""

    def __init__(self, base, recorder):
        dict.__init__(self, {name: recorder.timed(name, base.get(name)) for name in ops.names()})
        self._base, self._stores = base, base._stores
        self.name, self.dtype, self.summary, self.choices = base.name, base.dtype, base.summary, base.choices

    def __contains__(self, name):  # whether the profile replaces an op, as the one below has it
        return name in self._base


class ModelProfile:
    """Calls, times and work of a model's modules and ops, for the calls made inside its block.

    `.modules` {path: Work} · `.ops` {op: Work} · `.seconds` of all outermost calls · `.rates` the machine's limits ·
    `.numerics` name of the profile · `.text()`, `.save_html(path)`, `.save_trace(path)`, `.to_dict()`.  Time spent on
    taking these notes is left out.  Calls in other threads are not seen, nor are ops under numerics chosen inside.
    """

    def __init__(self, model, max_events=200_000):
        if not hasattr(model, "named_modules"):
            raise InputError(compose(f"profile: {a_kind(model)} in place of a model", expected="a model or a part"))
        self.model, self.max_events = model, max_events
        self.modules, self.ops, self.events, self.dropped = {}, {}, [], 0
        self.rates = self.numerics = None
        self._kinds, self._stack, self._handles = {}, [], []
        self._spent = 0.0  # seconds of our own, taken off the clock
        self._is_open = False

    # ---- the block

    def __enter__(self):
        if self._is_open:
            raise RuntimeError("profile: already open; a profile is entered once at a time")
        self.__init__(self.model, self.max_events)
        self.rates = rates()
        self._paths = {}
        for path, module in self.model.named_modules():
            self._paths.setdefault(module, path)
        with unless_chosen(getattr(self.model, "numerics", "fp32")):
            base = active()
        self.numerics, self._rounded = base.name, base.choices["linear"] == "bf16"
        self._before = _C.numerics_var.get()
        _C.numerics_var.set(_Timed(base, self))
        _open.set((*_open.get(), self))
        self._handles = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        self._is_open, self._origin = True, self._clock()
        return self

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        self._is_open, self._stack = False, []
        _open.set(tuple(p for p in _open.get() if p is not self))
        _C.numerics_var.set(self._before)

    # ---- recording

    def _clock(self):
        return time.perf_counter() - self._spent

    def _module_begins(self, module, args):
        now = time.perf_counter()
        if self in _open.get() and module in self._paths:
            self._stack.append((module, now - self._spent, Work()))
        self._spent += time.perf_counter() - now

    def _module_ends(self, module, args, output):
        now = time.perf_counter()
        if self in _open.get() and any(entry[0] is module for entry in self._stack):
            while self._stack[-1][0] is not module:  # those that were left without an end, by Ctrl-C
                self._stack.pop()
            _, began, work = self._stack.pop()
            work.calls, work.seconds = 1, now - self._spent - began
            work.own_seconds += work.seconds  # from which the modules inside have been taken already
            path = self._paths[module]
            self._kinds[path] = type(module).__name__
            self.modules.setdefault(path, Work()).add(work)
            if self._stack:
                outer = self._stack[-1][2]
                outer.own_seconds -= work.seconds
                self._pass_on(outer, work)
            self._note("module", path or type(module).__name__, began, work)
        self._spent += time.perf_counter() - now

    def timed(self, name, run):
        """The op `name`, or what stands in its place, with a note of every call."""
        run = _C.ops[name].compiled if run is None else run
        linear = name.startswith("linear")

        def op(*args, **kwargs):
            began = time.perf_counter()
            result = run(*args, **kwargs)
            ended = time.perf_counter()
            if self._is_open:
                work, done = Work(), cost(name, args, kwargs, result)
                work.calls, work.flops, work.bytes = 1, done.flops, done.bytes
                work.seconds = work.own_seconds = ended - began
                work.least_seconds = self.rates.least_seconds(*done, rounded=linear and self._rounded)
                self.ops.setdefault(name, Work()).add(work)
                if self._stack:
                    self._pass_on(self._stack[-1][2], work)
                self._note("op", name, began - self._spent, work)
                self._spent += time.perf_counter() - ended
            return result

        return op

    @staticmethod
    def _pass_on(outer, work):
        outer.flops += work.flops
        outer.bytes += work.bytes
        outer.least_seconds += work.least_seconds

    def _note(self, kind, name, began, work):
        if len(self.events) < self.max_events:
            self.events.append((kind, name, began - self._origin, work))
        else:
            self.dropped += 1

    # ---- reading

    @property
    def seconds(self):
        """Seconds of the calls that were made, everything inside included."""
        return sum(work.own_seconds for work in self.modules.values())

    def groups(self):
        """{pattern: Work} in the order of the tree, layers of one kind together: "model.layers.*.mlp.gate_proj"."""
        found = {}
        for path in sorted(self.modules, key=list(self._paths.values()).index):
            kind = self._kinds[path]
            parts = ["*" if part.isdigit() else part for part in path.split(".")] if path else [kind]
            found.setdefault(".".join(parts), Work()).add(self.modules[path])
        return found

    def to_dict(self):
        """Everything but the events, made of JSON types."""
        return {
            "numerics": self.numerics,
            "seconds": self.seconds,
            "rates": self.rates and self.rates._asdict(),
            "modules": {path: work.to_dict() for path, work in self.modules.items()},
            "ops": {name: work.to_dict() for name, work in self.ops.items()},
        }

    def save_trace(self, path):
        """Write the calls one by one as a trace that chrome://tracing, Perfetto and speedscope open."""
        events = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "qwenref"}}]
        for kind, name, began, work in sorted(self.events, key=lambda event: (event[2], -event[3].seconds)):
            args = {"flops": work.flops, "bytes": work.bytes, "of_limit": work.of_limit}
            span = {"ts": began * 1e6, "dur": work.seconds * 1e6}
            events.append({"name": name, "cat": kind, "ph": "X", "pid": 1, "tid": 1, **span, "args": args})
        about = {"numerics": self.numerics, "limits": str(self.rates), "events left out": self.dropped}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, file)
        return os.fspath(path)

    # ---- looking

    def text(self, limit=None):
        """The tables as text, at most `limit` rows of each."""
        from qwenref.profile_display import text

        return text(self, limit)

    def __repr__(self):
        return self.text(limit=15)

    def _repr_html_(self):
        from qwenref.profile_display import html

        return html(self, limit=40)

    def save_html(self, path):
        """Write the tables as one HTML file that stands alone."""
        from qwenref.profile_display import save_html

        save_html(self, path)
        return os.fspath(path)


def profile(model, *args, **kwargs):
    """Where the time goes: a ModelProfile of the call `model(*args, **kwargs)`, or of the calls made in a `with` block.

    >>> with qwenref.profile(model) as p:
    ...     model.generate(ids, max_new_tokens=8)
    >>> p.save_trace("trace.json")

    Times in seconds; shares of the limit are against a plain read and multiply-adds on the same threads, measured once.
    """
    made = ModelProfile(model)
    if args or kwargs:
        with made:
            model(*args, **kwargs)
    return made
