"""Named arithmetic: which implementation each op has for a while.

A profile is a dict from op name to the callable that takes the op's place; the extension looks it up in a context
variable, so a choice made in one thread or task is invisible to the others.
"""

from contextvars import ContextVar

import numpy as np

from qwenref import _C
from qwenref.errors import InputError, compose


class Profile(dict):
    """Replacements by op name; an op that is not listed runs as compiled.  `dtype` is that of activations and state."""

    def __init__(self, name, dtype, summary, replacements=()):
        super().__init__(replacements)
        self.name, self.dtype, self.summary = name, np.dtype(dtype), summary

    def __repr__(self):
        return f"<numerics {self.name}: {self.summary}>"


def _fp32():
    return Profile("fp32", np.float32, "float32 activations and state over the stored weights, widened exactly")


def _fp64():
    from qwenref import naive

    definitions = {name: getattr(naive, name) for name in _C.ops}
    return Profile("fp64", np.float64, "every op by its definition in float64: the arbiter", definitions)


# What was in force outside each open `with`, innermost first, as nested pairs.  A context variable and not the object's
# own attribute, so that one object may be open in several threads or tasks at once.
_outer = ContextVar("qwenref_numerics_outer", default=None)

_MAKERS = {"fp32": _fp32, "fp64": _fp64}
_made = {}


def profile(name):
    """The profile called `name`; InputError lists the names there are."""
    if not isinstance(name, str) or name not in _MAKERS:
        raise InputError(compose(f"numerics: no profile {name!r}", expected=", ".join(_MAKERS)))
    if name not in _made:
        _made[name] = _MAKERS[name]()
    return _made[name]


def active():
    """The profile in force here and now."""
    return _C.numerics_var.get() or profile("fp32")


class numerics:
    """`with qwenref.numerics("fp64"): ...` runs every op inside by that profile; it beats a model's own."""

    def __init__(self, name="fp32"):
        self.profile = profile(name)

    def __enter__(self):
        _outer.set((_C.numerics_var.get(), _outer.get()))
        _C.numerics_var.set(self.profile)
        return self.profile

    def __exit__(self, *exception):
        before, outer = _outer.get()
        _C.numerics_var.set(before)
        _outer.set(outer)

    @staticmethod
    def profiles():
        """Names of all profiles."""
        return tuple(_MAKERS)

    @staticmethod
    def describe(name):
        """One sentence on what the profile computes."""
        return profile(name).summary


class unless_chosen:
    """Run by the profile `name`, unless the caller has already chosen one."""

    def __init__(self, name):
        self.profile = profile(name)

    def __enter__(self):
        chosen = _C.numerics_var.get() is not None or self.profile.name == "fp32"
        self._token = None if chosen else _C.numerics_var.set(self.profile)

    def __exit__(self, *exception):
        if self._token is not None:
            _C.numerics_var.reset(self._token)


__all__ = ["Profile", "active", "numerics", "profile", "unless_chosen"]
