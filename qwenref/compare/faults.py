"""The library of faults: planted into a reference to test a comparison, and tried as explanations of an engine.

LIBRARY                 {name: Fault}, in a fixed order
find("rope-q+1/decode") a fault by its name; "gate-off@2,5" in these layers, "gate-off/prefill" in prefill alone
hypotheses(model)       those that this checkpoint can have; one of single layers once for each place

with qwenref.numerics("fp64"):
    logits = find("gate-off").open(model)(ids).logits

To a fault, a call on a cache that holds tokens is decode, and behind it any number of tokens may come in one call.
Not here: experts, which no dense model has; a pattern of layers off by one, for which no weights would fit; thoughts of
a history that were kept, which no prompt without them can tell.
"""

from qwenref.compare import (  # noqa: F401, I001 - they fill the library, in this order
    faults_prompt,
    faults_drawing,
    faults_ops,
    faults_semantics,
    faults_state,
    faults_weights,
)
from qwenref.compare.faults_base import KINDS, LIBRARY, MODEL_KINDS, Fault
from qwenref.errors import UnknownName, compose

_SIDES = ("prefill", "decode")


def unconfined(name):
    """A fault's name without the path it is confined to."""
    return name.partition("/")[0]


def find(name):
    """The Fault of a name, with `@layers` and `/prefill` or `/decode` behind it; UnknownName lists the names."""
    if name in LIBRARY:
        return LIBRARY[name]
    rest, _, side = name.partition("/")
    base, at, layers = rest.partition("@")
    known = base in LIBRARY and (not side or side in _SIDES) and all(n.isdigit() for n in layers.split(",") if at)
    if not known:
        raise UnknownName(compose(f"fault {name!r}: there is none", expected=", ".join(LIBRARY)))
    fault = LIBRARY[base]
    if (side and not fault.confined) or (at and not fault.confined and fault.sites is None):
        raise UnknownName(compose(f"fault {name!r}: {base} is one of the whole model", do=f"find({base!r})"))
    fault = fault.at(*map(int, layers.split(","))) if at else fault
    return fault.during(side) if side else fault


def hypotheses(model, kinds=KINDS):
    """Faults of these kinds that the model can have: those of single layers once for each place."""
    found = []
    for fault in LIBRARY.values():
        if fault.hypothesis and fault.kind in kinds:
            found += [one for one in places(fault, model) if one.fits(model)]
    return found


def places(fault, model):
    """The fault, or where it is one of single layers, the faults it is in each place the model has for it."""
    return [fault] if fault.sites is None else [fault.at(*layers) for layers in fault.sites(model)]


__all__ = ["KINDS", "LIBRARY", "MODEL_KINDS", "Fault", "find", "hypotheses", "places"]
