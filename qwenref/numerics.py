"""Named arithmetic: which implementation each op has for a while, and where values are rounded.

A profile is a base with a choice at some rounding points (`rounding.py`): `fp32`, `hf`, or `fp32+state=bf16+kv=bf16`.
It is a dict from op name to the callable that takes the op's place; the extension looks it up in a context variable, so
a choice made in one thread or task is invisible to the others.
"""

import random
from contextvars import ContextVar
from html import escape

import numpy as np

from qwenref import _C, rounding
from qwenref.checks import is_whole
from qwenref.errors import InputError, compose
from qwenref.html import block, table
from qwenref.rounding import POINTS


class Profile(dict):
    """Replacements by op name; an op that is not listed runs as compiled.

    `.name` base and choices, from which `profile` makes it again · `.dtype` of activations and state · `.choices`
    {point: choice} of every point · `.summary` one sentence.  There is one object of each name.
    """

    # As a dict, `kv-bf16` would be equal to `fp32`: neither replaces an op.
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __init__(self, name, base, choices, summary):
        replaced, self._stores = rounding.build(base, choices)
        super().__init__(replaced)
        self.name, self.dtype, self.summary = name, base.dtype, summary
        self.choices = {point: choices.get(point, at.default) for point, at in POINTS.items()}

    @property
    def in_pieces(self):
        """Whether a recurrence run in pieces has the bits of the whole."""
        return self.choices["delta"] == "recurrent"

    @property
    def splits_freely(self):
        """Whether a prompt in several calls has the bits of one call."""
        return self.in_pieces and self.dtype == np.float32 and "state" not in self._stores

    @property
    def rounds_stored(self):
        """Whether `stored` changes anything."""
        return bool(self._stores)

    def stored(self, what, array):
        """`array` as the point `what`, which belongs to no op, rounds it."""
        to = self._stores.get(what)
        return array if to is None else to(array)

    def __repr__(self):
        return f"<numerics {self.name}: {self.summary}>"

    def _repr_html_(self):
        return Description(self)._repr_html_()

    def __reduce__(self):
        return profile, (self.name,)


def _float32():
    return rounding.Base(np.float32)


def _float64():
    from qwenref import naive

    def linear(x, w, b=None, **outputs):
        return _C.ops["linear_f64"].compiled(np.asarray(x, np.float64), w, b, **outputs)

    definitions = {name: getattr(naive, name) for name in _C.ops}
    segments = rounding.in_segments(naive.segment_scores, naive.segment_softmax, naive.segment_mix)
    return rounding.Base(np.float64, definitions | {"linear": linear, "segment_attention": segments})


_BASES = {"fp32": _float32, "fp64": _float64}

_BF16 = (
    "linear", "norm", "residual", "silu", "product", "rotation", "scores", "probabilities", "context", "gate", "conv",
    "beta", "read", "pixels", "positions", "layer_norm", "patch_rotation", "gelu",
)  # fmt: skip
_HF = dict.fromkeys(_BF16, "bf16") | {
    "parameters": "bf16", "rope_table": "float32-bf16", "gated_norm": "bf16-inside", "delta": "chunk64",
    "patch_table": "float32",
}  # fmt: skip

_NAMED = {  # name -> (base, choices, summary)
    "fp32": ("fp32", {}, "float32 activations and state over the stored weights, widened exactly: the reference"),
    "fp64": ("fp64", {}, "every op and every activation, state and logit in float64: the arbiter"),
    "hf": ("fp32", _HF, "rounds to bf16 where eager transformers 5.24 in bf16 rounds"),
    "hf-5.12": (
        "fp32",
        _HF | {"qk": "bf16-inside", "state": "bf16"},
        "as hf, with q and k normalised in bf16 and the recurrent state kept in bf16, as transformers 5.12 has it",
    ),
    "fla": (
        "fp32",
        _HF | {"qk": "bf16", "conv": "float32", "gated_norm": "bf16"},
        "as hf, with DeltaNet as the kernels of flash-linear-attention and causal-conv1d round it: q and k to bf16 "
        "after the norm, convolution and SiLU once, the gated norm once",
    ),
    "state-bf16": ("fp32", {"state": "bf16"}, "fp32, with the recurrent state kept in bf16 between calls"),
    "kv-bf16": ("fp32", {"kv": "bf16"}, "fp32, with keys and values kept in bf16"),
    "chunk64": ("fp32", {"delta": "chunk64"}, "fp32, with DeltaNet in the chunked form, 64 tokens at a time"),
}

_made, _bases = {}, {}


def profile(name):
    """The profile called `name`, which may be followed by choices: "hf+state=bf16"; a Profile stays what it is.

    InputError lists what there is.
    """
    if isinstance(name, (Profile, numerics)):
        return getattr(name, "profile", name)
    return _with_choices(*_parsed(name))


def _parsed(name):
    """(head, {point: choice}) of "head+point=choice+..."."""
    head, *rest = name.split("+") if isinstance(name, str) else (name,)
    if not isinstance(head, str) or head not in _NAMED:
        raise InputError(compose(f"numerics: no profile {head!r}", expected=", ".join(_NAMED)))
    pairs = [part.partition("=")[::2] for part in rest]
    own = dict(pairs)
    if len(own) < len(pairs):
        raise InputError(compose("numerics: a rounding point twice", found=name, expected="one choice at each"))
    return head, own


def _changed(start, choices):
    """The profile `start` with other choices at some points."""
    head, own = _parsed(start.name)
    return _with_choices(head, {**own, **choices})


def _with_choices(head, wanted):
    base, choices, summary = _NAMED[head]
    for point, choice in wanted.items():
        if point not in POINTS:
            raise InputError(compose(f"numerics: no rounding point {point!r}", expected=", ".join(POINTS)))
        if not isinstance(choice, str) or choice not in POINTS[point].choices:
            expected = ", ".join(POINTS[point].choices)
            raise InputError(compose(f"numerics: {point}: no choice {choice!r}", expected=expected))
    own = {p: wanted[p] for p in POINTS if p in wanted and wanted[p] != choices.get(p, POINTS[p].default)}
    name = "+".join([head, *(f"{point}={choice}" for point, choice in own.items())])
    if name not in _made:
        if base not in _bases:
            _bases[base] = _BASES[base]()
        said = f"{summary}; changed: {', '.join(own)}" if own else summary
        _made.setdefault(name, Profile(name, _bases[base], {**choices, **own}, said))  # another thread may be first
    return _made[name]


def active():
    """The profile in force here and now."""
    chosen = _C.numerics_var.get()
    return profile("fp32") if chosen is None else chosen  # a profile without replacements is an empty dict


def stored(what, array):
    """`array` as the profile in force keeps it: at "kv", "state" or "logits"."""
    chosen = _C.numerics_var.get()
    return array if chosen is None else chosen.stored(what, array)


# What was in force outside each open `with`, innermost first, as nested pairs.  A context variable and not the object's
# own attribute, so that one object may be open in several threads or tasks at once.
_outer = ContextVar("qwenref_numerics_outer", default=None)


class numerics:
    """`with qwenref.numerics("fp64"): ...` runs every op inside by that profile; it beats a model's own.

    Choices change single points: `numerics("fp32", state="bf16", matmul="openblas")`; `numerics.points()` lists them.
    It holds for the thread or task it was entered in, and may be nested; InputError for names there are not.
    `.name` and `.profile` say what was chosen.
    """

    def __init__(self, name="fp32", **choices):
        start = profile(name)
        self.profile = _changed(start, choices) if choices else start

    @property
    def name(self):
        """Base and choices; wherever a profile is asked for by name, this is one."""
        return self.profile.name

    def __enter__(self):
        _outer.set((_C.numerics_var.get(), _outer.get()))
        _C.numerics_var.set(self.profile)
        return self.profile

    def __exit__(self, *exception):
        entered = _outer.get()
        if entered is not None:  # else a generator that another thread closes: there is nothing to undo here
            before, outer = entered
            _C.numerics_var.set(before)
            _outer.set(outer)

    def __repr__(self):
        return f"numerics({self.name!r})"

    def _repr_html_(self):
        return self.profile._repr_html_()

    @staticmethod
    def profiles():
        """Names of all named profiles."""
        return tuple(_NAMED)

    @staticmethod
    def points():
        """{rounding point: {choice: what it does}}, the reference's choice first."""
        return {name: dict(at.choices) for name, at in POINTS.items()}

    @staticmethod
    def describe(name):
        """What a profile computes: a sentence, and a table of rounding points with the ops they are about."""
        return Description(profile(name))

    @staticmethod
    def jitter(seed, dtype="bfloat16", base="fp32"):
        """`with qwenref.numerics.jitter(7): ...` rounds elsewhere and is as right: one seed, one variant.

        Variants span how far apart two correct implementations come out.  dtype: "bfloat16" for those whose activations
        are rounded to bf16, "float32" for other orders of summation only; what they leave open is as in `base`.
        """
        return jitter(seed, dtype, base)

    @staticmethod
    def bound(
        model, input_ids, name="fp32", against="fp64", *, attention_mask=None, position_ids=None, sequence_ids=None
    ):
        """NoiseFloor: how far, layer by layer, the profile `name` comes out from `against` on these ids [T] or [B, T].

        The options are those of a call.  Pads are left out of every figure.
        """
        from qwenref.noise import bound

        options = {"attention_mask": attention_mask, "position_ids": position_ids, "sequence_ids": sequence_ids}
        return bound(model, input_ids, name, against, options)


class Description:
    """A profile as a table: `.rows` of (point, ops, choice, what it does); those that differ from fp32 are marked."""

    def __init__(self, profile):
        self.profile = profile
        self.rows = [
            (name, " ".join(at.ops) or "-", profile.choices[name], at.choices[profile.choices[name]])
            for name, at in POINTS.items()
        ]

    def _changed(self, row):
        return row[2] != POINTS[row[0]].default

    def __str__(self):
        head = ("point", "ops", "choice", "what it does")
        rows = [("* " if self._changed(row) else "  ", *row) for row in self.rows]
        widths = [max(len(row[i + 1]) for row in [("", *head), *rows]) for i in range(3)]
        widths[1] = min(widths[1], 36)
        lines = [f"{self.profile.name}: {self.profile.summary}", ""]
        for mark, *cells in [("  ", *head), *rows]:
            cells[1] = cells[1] if len(cells[1]) <= widths[1] else cells[1][: widths[1] - 1] + "…"
            lines.append((mark + "  ".join(c.ljust(w) for c, w in zip(cells, (*widths, 0), strict=True))).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        rows = [(("* " if self._changed(row) else "") + row[0], *row[1:]) for row in self.rows]
        title = f"<p><b>{escape(self.profile.name)}</b>: {escape(self.profile.summary)}</p>"
        return block(title + table(("point", "ops", "choice", "what it does"), rows))


# Benign alternatives at each point, for variants; every one is what some implementation does.
_ORDERS = ("class-order", *(c for c in POINTS["matmul"].choices if c.startswith(("split", "rotated", "reversed"))))
_FREE = {
    "matmul": tuple(c for c in _ORDERS if "bf16" not in c),
    "delta": ("recurrent", "chunk64"),
    "rope_table": ("float64", "float32"),
    "patch_table": ("float64", "float32"),
}
_ROUNDED = {
    "matmul": _ORDERS,
    "delta": ("recurrent", "chunk64"),
    "rope_table": ("float64", "float32", "float32-bf16", "bf16"),
    "rotation": ("bf16", "bf16-once"),
    "norm": ("float32", "bf16"),
    "residual": ("float32", "bf16"),
    "scores": ("float32", "bf16"),
    "probabilities": ("float32", "bf16"),
    "context": ("float32", "bf16"),
    "gate": ("float32", "bf16"),
    "silu": ("float32", "bf16"),
    "product": ("bf16",),
    "linear": ("bf16",),
    "conv": ("float32", "bf16"),
    "beta": ("float32", "bf16"),
    "qk": ("float32", "bf16"),
    "read": ("float32", "bf16"),
    "gated_norm": ("bf16", "bf16-inside"),
    "logits": ("float32", "bf16"),
    "pixels": ("float32", "bf16"),
    "positions": ("float32", "bf16"),
    "layer_norm": ("float32", "bf16"),
    "patch_table": ("float64", "float32"),
    "patch_rotation": ("float32", "bf16"),
    "gelu": ("float32", "bf16"),
}
_FAMILIES = {"bfloat16": _ROUNDED, "float32": _FREE}


def jitter(seed, dtype="bfloat16", base="fp32"):
    """The `numerics` of a variant; see `numerics.jitter`."""
    if dtype not in _FAMILIES:
        raise InputError(compose(f"jitter: dtype {dtype!r}", expected=", ".join(_FAMILIES)))
    if not is_whole(seed):
        raise InputError(compose(f"jitter: seed {seed!r}", expected="an integer"))
    start, draw = profile(base), random.Random(f"{dtype} {int(seed)}")
    while True:  # the reference itself is no variant of itself
        made = _changed(start, {point: draw.choice(choices) for point, choices in _FAMILIES[dtype].items()})
        if made is not start:
            return numerics(made)


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


__all__ = ["Profile", "active", "jitter", "numerics", "profile", "stored", "unless_chosen"]
