"""Experiments made of edits: values of another run put in place, and parts of a model taken out."""

from collections.abc import Mapping

import numpy as np

from qwenref.capture import Counting
from qwenref.editing import Edit, is_numbers
from qwenref.errors import InputError, ShapeError, UnknownName, a_kind, compose
from qwenref.exchange import as_array
from qwenref.sites import ROOTS, resolve

# A decay whose exponential is exactly 0 in float32 and float64 alike: the state is forgotten before each token.
_FORGETS = -1e4

# Where the heads of a mixer are still apart: the last value before its output projection.
_BY_HEAD = {"Attention": "gated", "GatedDeltaNet": "normed"}


# ---- patching ------------------------------------------------------------------------------------------------------


class Patch(Edit, Counting):
    """Values of a capture in the place of those of the block's call with the same number."""

    def __init__(self, model, source, names, tokens=None, step=0):
        names = [names] if isinstance(names, str) else list(names)
        self._tokens, self._call = tokens, step
        found = resolve(model, names)
        self._source = {name: _taken(source, name, step) for name in found}
        super().__init__(model, dict.fromkeys(names, self._source_of))
        for site in self.targets.values():
            if tokens is not None and (site.tokens is not None or site.axis("T") is None):
                raise InputError(
                    compose(
                        f"patch: {site.name} has no token axis",
                        found=f"[{', '.join(site.dims)}]",
                        do="leave tokens out; for the state after one token name state@t",
                    )
                )

    def _source_of(self, value):
        raise AssertionError("a patch puts values in place itself")

    def on_value(self, site, value):
        if self.step not in (None, self._call):
            return value
        there = self._source[site.name]
        axis = site.axis("T")
        self._check(site, there.shape, value.shape, axis)
        if self._tokens is None:
            return np.array(there, value.dtype, order="C")
        place = (slice(None),) * axis + (self._chosen(site, there.shape[axis], value.shape[axis]),)
        result = value.copy()
        result[place] = there[place]
        return result

    def on_state(self, site, column, value):
        if self.step not in (None, self._call):
            return value
        there = self._source[site.name]
        shape = self.shape if self.step is not None else {"T": there.shape[1], "S": there.shape[1]}
        columns = list(site.columns(shape["T"], shape["S"])) if shape else []
        self._check(site, there.shape, (len(value), len(columns), *value.shape[1:]), None)
        return np.array(there[:, columns.index(column)], value.dtype, order="C")

    def _check(self, site, there, here, axis):
        free = axis if self._tokens is not None else None  # with tokens named, the two runs may be of different length
        fits = len(there) == len(here) and all(
            a == b for i, (a, b) in enumerate(zip(there, here, strict=True)) if i != free
        )
        if not fits:
            raise ShapeError(
                compose(
                    f"patch: {site.name}: the captured value does not fit this call",
                    found=f"[{site.labelled(there)}] in the capture",
                    expected=f"[{site.labelled(here)}]",
                    do=None if axis is None or free is not None else "tokens=... patches some tokens of longer runs",
                )
            )

    def _chosen(self, site, there, here):
        """Token numbers, the same in both runs: negative ones count from the end of the shorter."""
        shorter = min(there, here)
        if isinstance(self._tokens, slice):
            return list(range(*self._tokens.indices(shorter)))
        columns = np.atleast_1d(np.asarray(self._tokens))
        if columns.dtype.kind not in "iu" or ((columns < -shorter) | (columns >= shorter)).any():
            raise InputError(
                compose(
                    f"patch: {site.name}: tokens {self._tokens!r}",
                    found=f"{there} tokens in the capture, {here} in this call",
                    expected=f"numbers from 0 to {shorter - 1}, or a slice",
                )
            )
        return [int(c) % shorter for c in columns]


def _taken(source, name, step):
    """The array called `name` in a Capture, or in a plain mapping of names to arrays."""
    if hasattr(source, "steps"):
        return source[name, step]
    if not isinstance(source, Mapping):
        raise InputError(compose(f"patch: values from {a_kind(source)}", expected="a Capture, or {name: array}"))
    for root in ROOTS:
        short = name.removeprefix(root)
        if short in source:
            return as_array(source[short])
    raise UnknownName(compose(f"patch: {name} is not among the given values", found=", ".join(list(source)[:5])))


def patch(model, source, names, tokens=None, step=0):
    """Put values of a capture in place, in the calls made inside a `with` block.

    names: patterns over `model.sites()`, all captured in `source` (a Capture, or {name: array}).  tokens: numbers or a
    slice, to replace only theirs; all when None.  step: number of the call whose values are taken, which is also the
    call of the block they are put into; a part called by itself always gets them.
    """
    return Patch(model, source, names, tokens, step)


# ---- ablation ------------------------------------------------------------------------------------------------------


def ablate(model, names, heads=None, value=0.0):
    """Take parts out of a model, in the calls made inside a `with` block.

    A layer (`layers.5`) passes its input through.  A mixer or MLP (`layers.5.mlp`) adds nothing; with `heads` these
    heads of the mixer contribute nothing.  `layers.0.linear_attn.state` remembers nothing between tokens (of these
    heads; the convolution still sees its few tokens).  Any other name is replaced by `value`.

    value: a number, an array that can be broadcast to what is replaced, or "mean", the mean over the rows and tokens
    of the same call; for a mixer's heads it takes the place of what they hand to the output projection.
    """
    edits = {}
    for name, site in resolve(model, [names] if isinstance(names, str) else list(names)).items():
        kind = type(site.module).__name__
        if site.site is None and kind == "DecoderLayer":
            _only_zero(name, "a layer that passes its input through", heads, value)
            edits |= _passing(name)
        elif site.site == "state" and site.tokens is None:
            _only_zero(name, "a state that is forgotten", None, value)
            decay = name.removesuffix("state") + "g"
            edits[decay] = _replaced(_site(model, decay), heads, _FORGETS)
        elif site.site is None and heads is not None and kind in _BY_HEAD:
            inner = f"{name}.{_BY_HEAD[kind]}"
            edits[inner] = _replaced(_site(model, inner), heads, value)
        else:
            edits[name] = _replaced(site, heads, value)
    return Edit(model, edits)


def _site(model, name):
    return resolve(model, [name])[name]


def _only_zero(name, what, heads, value):
    if heads is not None or not np.isscalar(value) or value != 0:
        raise InputError(
            compose(
                f"ablate: {name}: {what} takes neither heads nor a value"
                if heads is not None
                else f"ablate: {name}: {what} takes no value",
                do="name what is inside the layer, such as its self_attn, linear_attn or mlp",
            )
        )


def _passing(name):
    """Edits that let a layer hand on what it was given."""
    given = []

    def keep(value):
        given[:] = [value]

    return {f"{name}.resid_pre": keep, f"{name}.resid_post": lambda value: given.pop()}


def _replaced(site, heads, value):
    """A function that puts `value` in the place of an array, or of its `heads`."""
    axis, parts = _head_axis(site) if heads is not None else (None, None)
    if heads is not None:
        heads = _checked_heads(site, heads, parts)
    if isinstance(value, str) and value != "mean":
        raise InputError(compose(f"ablate: value {value!r}", expected='a number, an array, or "mean"'))
    if not is_numbers(value):
        raise InputError(compose(f"ablate: value {value!r}", expected='a number, an array, or "mean"'))
    means = tuple(i for i, label in enumerate(site.dims) if label in ("B", "T"))
    if isinstance(value, str) and (not means or site.tokens is not None):
        raise InputError(compose(f"ablate: {site.name} has no mean over tokens", found=f"[{', '.join(site.dims)}]"))

    def change(x):
        split = x if axis is None else x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
        place = ... if axis is None else (slice(None),) * axis + (heads,)
        result = split.copy()
        result[place] = _mean(split, means)[place] if isinstance(value, str) else value
        return result.reshape(x.shape)

    def checked(x):
        try:
            return change(x)
        except ValueError as error:
            raise ShapeError(
                compose(
                    f"ablate: {site.name}: the value does not fit",
                    found=f"{list(np.shape(value))}",
                    expected=f"something to be broadcast to [{site.labelled(x.shape)}]"
                    + ("" if heads is None else f", heads {list(map(int, heads))}"),
                )
            ) from error

    return checked


def _mean(x, axes):
    return np.broadcast_to(x.mean(axis=axes, keepdims=True, dtype=np.float64), x.shape)


def _head_axis(site):
    """(axis that holds heads, how many): an axis of its own, or the flat one of a DeltaNet layer's output."""
    axis = site.axis("head")
    if axis is not None and site.tokens is None:
        return axis, site.shape[axis]
    if site.site in ("normed", "core"):
        return len(site.dims) - 1, site.module.sizes["V-head"]
    raise InputError(
        compose(
            f"ablate: {site.name} has no heads",
            found=f"[{', '.join(site.dims)}]",
            do="name a mixer (self_attn, linear_attn) or one of its sites with a head axis",
        )
    )


def _checked_heads(site, heads, count):
    array = np.atleast_1d(np.asarray(heads))
    if array.dtype.kind not in "iu" or array.ndim != 1 or ((array < -count) | (array >= count)).any():
        raise InputError(compose(f"ablate: {site.name}: heads {heads!r}", expected=f"numbers from 0 to {count - 1}"))
    return array % count
