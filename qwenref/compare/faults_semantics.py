"""Not mistakes: the two arithmetics of DeltaNet that engines follow, which the published code leaves open."""

from qwenref.compare.faults_base import add
from qwenref.compare.faults_model import Ops
from qwenref.compare.faults_ops import has_delta
from qwenref.rounding import POINTS


def _rounding_as(**choices):
    """Choices at rounding points, on top of what is in force, inside DeltaNet alone."""

    def make(here):
        made, base = {}, here.base
        for name, choice in choices.items():
            made.update(POINTS[name].make(choice, lambda op: made[op] if op in made else base.get(op), base))
        return made

    return Ops("GatedDeltaNet", make)


# fmt: off
add("delta-as-torch", "semantics", "DeltaNet rounds in bf16 as transformers' own path does", number=39,
    applies=has_delta,
    mechanism=_rounding_as(conv="bf16", silu="bf16", beta="bf16", read="bf16", gated_norm="bf16-inside"))
add("delta-as-fla", "semantics", "DeltaNet rounds in bf16 as flash-linear-attention and causal-conv1d do", number=39,
    applies=has_delta, mechanism=_rounding_as(qk="bf16", silu="bf16", beta="bf16", read="bf16", gated_norm="bf16"))
# fmt: on
