"""Changing values on the way: a function or an array takes the place of what a name stands for."""

from collections.abc import Mapping

import numpy as np

from qwenref.errors import HookError, InputError, a_kind, compose
from qwenref.exchange import as_array
from qwenref.handles import hook_name
from qwenref.sites import Watcher, resolve


class Edit(Watcher):
    """Functions applied to named values of the calls made inside its block."""

    def __init__(self, model, edits):
        if not isinstance(edits, Mapping):
            raise InputError(compose(f"edit: {a_kind(edits)}", expected="{pattern: function or array}"))
        if not edits:
            raise InputError(compose("edit: nothing to edit", expected="{pattern: function or array}"))
        for pattern, change in edits.items():
            if not callable(change) and not is_numbers(change):
                raise InputError(
                    compose(
                        f"edit: {pattern!r}: {a_kind(change)}", expected="a function, a number or an array of numbers"
                    )
                )
        super().__init__(model, list(edits))
        for site in self.targets.values():
            if site.site in getattr(site.module, "READ_ONLY", ()):
                raise InputError(
                    compose(
                        f"edit: {site.name} can be read, not changed",
                        do="edit k, v, beta or g before it, or state@t after it",
                    )
                )
        self._functions = {}
        for pattern, change in edits.items():
            for name in resolve(model, [pattern]):
                self._functions.setdefault(name, []).append(change)

    def on_value(self, site, value):
        for change in self._functions[site.name]:
            value = applied(site, change, value)
        return value

    def on_state(self, site, column, value):
        return self.on_value(site, value)


def applied(site, change, value):
    """`value` after one change: what the function returned, or the value itself if that was None (edited in place)."""
    try:
        result = change(value) if callable(change) else change
    except ValueError as error:
        if "read-only" in str(error):
            raise HookError(
                compose(f"{site.name}: edited in place, but it cannot be written", do="return a changed copy instead")
            ) from error
        raise
    if result is None:
        return value
    what = hook_name(change) if callable(change) else "the given array"
    if not is_numbers(result):
        raise HookError(
            compose(
                f"{site.name}: {what} returned {a_kind(result)}",
                expected=f"{value.dtype} [{site.labelled(value.shape)}]",
                do="return one array, or None for an array that was edited in place",
            )
        )
    result = as_array(result)
    if result.shape != value.shape:
        try:
            if callable(change):
                raise ValueError
            result = np.broadcast_to(result, value.shape)
        except ValueError:
            raise HookError(
                compose(
                    f"{site.name}: {what} has the wrong shape",
                    found=f"{result.dtype} {list(result.shape)}",
                    expected=f"{value.dtype} [{site.labelled(value.shape)}]",
                )
            ) from None
    if result.dtype.kind not in "fiub" and result.dtype.name != "bfloat16":
        raise HookError(compose(f"{site.name}: {what} holds {result.dtype}", expected=f"numbers like {value.dtype}"))
    return np.array(result, value.dtype, order="C")  # a copy: what comes later writes in place


def is_numbers(value):
    """Whether a value is one array of anything but Python objects."""
    try:
        return not as_array(value).dtype.hasobject
    except ValueError:  # parts of different shapes, such as an output and its weights
        return False


def edit(model, edits):
    """Change named values in the calls made inside a `with` block: {pattern: function or array}.

    A function gets the array, live: it may write into it and return None, or return what takes its place, of the same
    shape.  An array is put in place as it is, or broadcast.  Modules and sites alike; `state@t` reaches into the state.
    """
    return Edit(model, edits)
