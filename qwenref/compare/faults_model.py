"""How a fault gets into a model: a twin of the model that shares its weights, with other ops inside some modules.

The twin is built anew from the config and given the same Parameters, so the given model keeps its tree, its hooks and
its numbers.  Three mechanisms are enough for every fault of the library:

    Ops      an op is another one while modules of a kind run: every profile of numerics stays in force around it
    Weights  Parameters of the twin are replaced; those that are not stay shared
    Calls    what a cache holds is changed before a call of the model
"""

import functools
import inspect
import weakref
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

from qwenref import _C
from qwenref.cache import Cache
from qwenref.errors import InputError, compose
from qwenref.loading import build
from qwenref.model import LanguageModel
from qwenref.numerics import Profile, active
from qwenref.rounding import Base


class Phase(NamedTuple):
    """Where in a conversation a call of the model stands."""

    decoding: bool = False  # whether the cache held tokens before
    handoff: bool = False  # whether it is the first such call
    before: np.ndarray | None = None  # int64 [B], tokens in the cache


_phase = ContextVar("qwenref_fault_phase", default=None)  # None: outside of a call of the model
_ALONE = Phase()


class Here:
    """What a changed op knows: `.module` that runs, `.phase` of the call, `.op(name)` what stands in an op's place."""

    def __init__(self, module, phase, profile):
        self.module, self.phase, self.profile = module, phase, profile

    def op(self, name):
        return self.profile[name] if name in self.profile else _C.ops[name].compiled

    @property
    def base(self):
        """The ops in force as a base that rounding points can be built upon."""
        return Base(self.profile.dtype, self.profile)

    @property
    def dtype(self):
        return self.profile.dtype

    @property
    def config(self):
        """Text section of the config of the model the module is in."""
        return self.module.root.config.text_config

    def frequencies(self, width, theta=None):
        """float64 [width / 2], what the pairs of a rotary width turn by."""
        theta = self.config.rope_theta if theta is None else theta
        return np.asarray(self.op("rope_frequencies")(np.arange(width // 2, dtype=np.int64), theta, width), np.float64)


class _Switched(Profile):
    """The profile in force with some ops replaced."""

    def __init__(self, outer, replaced):
        dict.__init__(self, outer)
        self.update(replaced)
        vars(self).update(vars(outer))


class Ops:
    """Ops replaced inside the modules called `where`: a class of the text model, or the last part of a path.

    Keywords: op=function(here, was, *args, **outputs), `was` being the op that would have run.  Or `make`, a function
    of a Here to {op: callable}.
    """

    confined = True  # whether single layers, and prefill or decode alone, can have the fault

    def __init__(self, where, make=None, **functions):
        self.where = (where,) if isinstance(where, str) else tuple(where)
        self.make = make or functools.partial(_bound, functions)

    def install(self, model, fault):
        found = [module for path, module in model.named_modules() if self._meant(path, module, fault.layers)]
        if not found:
            raise nothing_to_change(fault)
        for module in found:
            _rewire(module, functools.partial(self._run, fault.on))

    def _meant(self, path, module, layers):
        called = {type(module).__name__, path.rpartition(".")[2]}
        inside = not layers or any(f".layers.{layer}." in path for layer in layers)
        return inside and not called.isdisjoint(self.where)

    def _run(self, on, forward, module, args, kwargs):
        phase = _phase.get() or _ALONE
        if on != "both" and (on == "decode") != phase.decoding:
            return forward(*args, **kwargs)
        outer = active()
        token = _C.numerics_var.set(_Switched(outer, self.make(Here(module, phase, outer))))
        try:
            return forward(*args, **kwargs)
        finally:
            _C.numerics_var.reset(token)


def _bound(functions, here):
    return {op: functools.partial(function, here, here.op(op)) for op, function in functions.items()}


class Weights:
    """Parameters replaced: `change(model, layers)` gets the twin and the layers a fault names."""

    confined = False

    def __init__(self, change):
        self.change = change

    def install(self, model, fault):
        self.change(model, fault.layers)


class Calls:
    """What a cache holds changed before a call: `change(model, cache, phase, tokens)` with int64 [B] tokens to come."""

    confined = False

    def __init__(self, change):
        self.change = change

    def install(self, model, fault):
        _rewire(model, self._run)

    def _run(self, forward, model, args, kwargs):
        tokens, cache = _tokens(**kwargs), kwargs.get("cache")
        made = Cache(model, len(tokens)) if cache is None else cache
        self.change(model, made, _phase.get() or _ALONE, tokens)
        result = forward(**{**kwargs, "cache": made})
        if cache is None and not kwargs.get("use_cache"):
            result.cache = None
        return result


def _tokens(input_ids=None, inputs_embeds=None, attention_mask=None, **others):
    """int64 [B], the tokens of a call that are no pads."""
    given = np.asarray(inputs_embeds)[:, :, 0] if input_ids is None else np.atleast_2d(input_ids)
    if attention_mask is None:
        return np.full(len(given), given.shape[1], np.int64)
    return np.sum(np.asarray(attention_mask)[:, -given.shape[1] :], axis=1, dtype=np.int64)


def twin(model):
    """A model of the same config over the same Parameters, without hooks."""
    made = build(model.config)
    if getattr(model.model, "visual", None) is None and getattr(made.model, "visual", None) is not None:
        del made.model.visual
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, parameter)
    made.path, made.origin, made.report, made.numerics = model.path, model.origin, model.report, model.numerics
    made.text_model.weight_pages = model.text_model.weight_pages
    return made


def opened(model, faults):
    """A twin with faults in it, the first one innermost; one of a faulty model has those of that model as well."""
    sound, there = vars(model).get("_sound", (model, ()))
    made, faults = twin(sound), (*there, *faults)
    for fault in faults:
        fault.mechanism.install(made, fault)
    _rewire(made, _Phases())
    vars(made)["_sound"] = sound, faults  # in a tuple: a module that is an attribute would be a child
    return made


class _Phases:
    """Says to everything inside a call of the model where that call stands."""

    def __init__(self):
        self.decoded = weakref.WeakKeyDictionary()  # {cache: calls that found tokens in it}

    def __call__(self, forward, model, args, kwargs):
        kwargs = _by_name(model, args, kwargs)
        cache = kwargs.get("cache")
        before = None if cache is None else cache.length
        decoding = before is not None and bool(before.any())
        calls = self.decoded.get(cache, 0) if decoding else 0
        token = _phase.set(Phase(decoding, decoding and not calls, before))
        try:
            result = forward(**kwargs)
        finally:
            _phase.reset(token)
        if cache is not None:
            self.decoded[cache] = calls + decoding
        return result


def _by_name(model, args, kwargs):
    """The arguments of a call of a model by their names; a cache by its older name too, where it has no other."""
    given = _SIGNATURE.bind(model, *args, **kwargs).arguments
    given = {name: value for name, value in given.items() if name not in ("self", "unknown")}
    older = {name: kwargs[name] for name in kwargs if name not in given}
    if given.get("cache") is None and older.get("past_key_values") is not None:
        given["cache"] = older.pop("past_key_values")
    return given | older


_SIGNATURE = inspect.signature(LanguageModel.forward)


def _rewire(module, around):
    """Let `around(forward, module, args, kwargs)` take the place of a module's forward; its class keeps its name."""
    kind = type(module)

    def forward(self, *args, **kwargs):
        return around(functools.partial(kind.forward, self), self, args, kwargs)

    functools.update_wrapper(forward, kind.forward)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def nothing_to_change(fault):
    """The error for a fault that a model cannot have."""
    return InputError(
        compose(f"fault {fault.name}: this model has nothing it could change", do="ask hypotheses(model)")
    )
