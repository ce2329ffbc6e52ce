"""What a comparison can be asked for, checked before any work."""

from typing import NamedTuple

from qwenref.checks import is_whole
from qwenref.compare.errors import SeedNotComparable, TooFewPositions
from qwenref.errors import InputError, compose

MODES = ("greedy", "sample", "rl")
EXPLAIN = ("auto", "always", "never")
FEWEST = 4  # rounding variants that noise can be told from
VARIANTS = {"quick": 8}  # of a suite; 16 of all others
DRAWS = 4096  # tokens of the modes that draw
PRECISIONS = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "f32": "float32", "float32": "float32",
    "fp16": "float16", "f16": "float16", "float16": "float16", "half": "float16",
}  # fmt: skip


class Options(NamedTuple):
    """mode · precision, what the engine claims to compute in · family of rounding variants for it · variants, their
    (seed, family) · explain · draws, tokens that are drawn, None in mode greedy · until_decided · without, names of
    known faults that are not tried"""

    mode: str
    precision: str
    family: str
    variants: tuple
    explain: str
    draws: int | None
    until_decided: bool
    without: tuple = ()


def options(
    suite, said, mode="greedy", precision=None, jitter=None, explain="auto", draws=None, until_decided=False, seed=None,
    without=(),
):  # fmt: skip
    """Options for a Suite and for what the engine says of itself; raises what the arguments deserve."""
    if seed is not None:
        do = "leave the seed out: tokens that were drawn are tested against the reference's distribution"
        raise SeedNotComparable(compose("compare: equal tokens of equal seeds", found=f"seed {seed}", do=do))
    _one_of("mode", mode, MODES)
    _one_of("explain", explain, EXPLAIN)
    count = VARIANTS.get(suite.name, 16) if jitter is None else jitter
    if not is_whole(count) or count < 1:
        raise InputError(compose("compare: jitter", found=repr(jitter), expected=f"a whole number, at least {FEWEST}"))
    if count < FEWEST:
        do = f"at least {FEWEST} rounding variants: noise cannot be told from fewer"
        raise TooFewPositions(compose(f"compare: {count} rounding variants", do=do))
    claimed = precision if precision is not None else said.get("dtype") or "bf16"
    claimed = PRECISIONS.get(str(claimed).lower(), str(claimed).lower())
    family = "float32" if claimed == "float32" else "bfloat16"
    drawn = None if mode == "greedy" else DRAWS if draws is None else draws
    return Options(mode, claimed, family, tuple((seed, family) for seed in range(count)), explain, drawn, until_decided,
                   tuple(without))  # fmt: skip


def _one_of(name, value, known):
    if value not in known:
        raise InputError(compose(f"compare: {name}", found=repr(value), expected=", ".join(known)))
