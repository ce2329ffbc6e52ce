"""A log of what went by: every value of a call in order, with its statistics and the time it took."""

import time
from collections import namedtuple

import numpy as np

from qwenref.capture import Counting

Row = namedtuple("Row", "step name kind of shape dtype min max rms nonfinite ms")


class Trace(Counting):
    """Ordered log of every value that went by.

    `.rows`, of each value: `step` · `name` · `kind` "module" or "site" · `of` class of the module · `shape` · `dtype` ·
    `min`, `max`, `rms` of the finite numbers · `nonfinite` how many are NaN or infinite, masked scores not counted ·
    `ms` milliseconds: of a module with everything below it, of a site since the row before it.  `.labels` has the
    names of each value's dimensions.
    """

    def __init__(self, model, *patterns):
        super().__init__(model, patterns or ("**",))
        self.rows, self.labels = [], []
        self._began, self._last = {}, 0.0

    def opened(self):
        super().opened()
        self.rows, self.labels, self._began, self._last = [], [], {}, 0.0
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
            found = statistics(value, masked=site.site == "scores")
            self.rows.append(Row(*row, *found, (now - began) * 1e3))
            self.labels.append(site.dims)
        self._last = time.perf_counter()
        return value

    def on_state(self, site, column, value):
        here = site._replace(name=f"{site.name.partition('@')[0]}@{column}", dims=site.dims[:1] + site.dims[2:])
        return self.on_value(here, value)

    def __repr__(self):
        from qwenref.capture_display import trace_text

        return trace_text(self)

    def _repr_html_(self):
        from qwenref.capture_display import trace_html

        return trace_html(self)


def statistics(value, masked=False):
    """(min, max, rms, how many are not finite) of an array; the first three over the finite ones.

    `masked`: minus infinity is what a mask has put there, and counts as nothing.
    """
    finite = np.isfinite(value)
    bad = int(value.size - np.count_nonzero(finite))
    good = value if not bad else value[finite]
    bad -= int(np.count_nonzero(np.isneginf(value))) if masked and bad else 0
    if good.size == 0:
        return float("nan"), float("nan"), float("nan"), bad
    rms = float(np.sqrt(np.mean(np.square(good, dtype=np.float64))))
    return float(good.min()), float(good.max()), rms, bad


def trace(model, *patterns):
    """Log every module and site (or those the patterns name) of the calls made inside a `with` block."""
    return Trace(model, *patterns)
