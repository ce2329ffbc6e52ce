"""Not mistakes: the two arithmetics of DeltaNet that engines follow, where what was published leaves both open.

The reference rounds at none of these points.  The choices are those of the profiles `hf` and `fla`.
"""

from qwenref.compare.faults_base import add
from qwenref.compare.faults_model import Ops
from qwenref.compare.faults_ops import has_delta
from qwenref.numerics import profile
from qwenref.rounding import POINTS

_POINTS = ("conv", "silu", "beta", "qk", "read", "gated_norm")  # those inside DeltaNet


def _rounding_as(name):
    """The choices of a profile on top of what is in force, inside DeltaNet alone."""
    choices = {point: profile(name).choices[point] for point in _POINTS}
    choices = {point: choice for point, choice in choices.items() if choice != POINTS[point].default}

    def make(here):
        made, base = {}, here.base
        for point, choice in choices.items():
            made.update(POINTS[point].make(choice, lambda op: made[op] if op in made else base.get(op), base))
        return made

    return Ops("GatedDeltaNet", make)


# fmt: off
add("delta-as-torch", "semantics", "DeltaNet rounds in bf16 as transformers' own path does", _rounding_as("hf"),
    number=39, applies=has_delta)
add("delta-as-fla", "semantics", "DeltaNet rounds in bf16 as flash-linear-attention and causal-conv1d do",
    _rounding_as("fla"), number=39, applies=has_delta)
# fmt: on
