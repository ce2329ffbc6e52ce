"""What a comparison can be asked for, checked before any work."""

import re
from typing import NamedTuple

from qwenref.checks import is_whole
from qwenref.compare.errors import SeedNotComparable, TooFewPositions
from qwenref.errors import InputError, compose

TRUTHS = ("fp64", "fp32")
MODES = ("greedy", "sample", "rl")
EXPLAIN = ("auto", "always", "never")
FEWEST = 4  # rounding variants that noise can be told from
VARIANTS = {"quick": 8}  # of a suite; 16 of all others
DRAWS = 4096  # tokens of the modes that draw
PRECISIONS = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "f32": "float32", "float32": "float32",
    "fp16": "float16", "f16": "float16", "float16": "float16", "half": "float16",
}  # fmt: skip
QUANTISED = ("fp8", "int8", "int4")
_GGUF = re.compile(r"q[2-8]_(0|1|k)(_(s|m|l|xl))?|iq[1-4]_(xxs|xs|s|m|nl)|tq[12]_0|mxfp4")


class Options(NamedTuple):
    """mode · precision, what the engine claims to compute in · family of rounding variants for it · variants, their
    (seed, family) · explain · draws, tokens that are drawn, None in mode greedy · until_decided · without, names of
    known faults that are not tried · truth, the profile that errors are counted from"""

    mode: str
    precision: str
    family: str
    variants: tuple
    explain: str
    draws: int | None
    until_decided: bool
    without: tuple = ()
    truth: str = "fp64"


def options(
    suite, said, mode="greedy", precision=None, jitter=None, explain="auto", draws=None, until_decided=False, seed=None,
    without=(), truth="fp64",
):  # fmt: skip
    """Options for a Suite and for what the engine says of itself; raises what the arguments deserve."""
    refuse(mode, precision, jitter, explain, draws, until_decided, seed, truth)
    count = VARIANTS.get(suite.name, 16) if jitter is None else jitter
    claimed = precision if precision is not None else said.get("dtype")
    claimed = "bf16" if claimed in (None, "", "auto") else claimed
    claimed = PRECISIONS.get(str(claimed).lower(), str(claimed).lower())
    family = "float32" if claimed == "float32" else "bfloat16"
    drawn = None if mode == "greedy" else DRAWS if draws is None else draws
    return Options(mode, claimed, family, tuple((seed, family) for seed in range(count)), explain, drawn, until_decided,
                   tuple(without), truth)  # fmt: skip


def refuse(
    mode="greedy", precision=None, jitter=None, explain="auto", draws=None, until_decided=False, seed=None,
    truth="fp64",
):  # fmt: skip
    """Raise what the arguments deserve, whatever the engine and the suite are."""
    if seed is not None:
        do = "leave the seed out: tokens that were drawn are tested against the reference's distribution"
        raise SeedNotComparable(compose("compare: equal tokens of equal seeds", found=f"seed {seed}", do=do))
    _one_of("mode", mode, MODES)
    _one_of("explain", explain, EXPLAIN)
    _one_of("truth", truth, TRUTHS)
    if precision is not None and str(precision).lower() not in PRECISIONS and not is_quantised(precision):
        expected = "bf16, fp16, fp32, fp8, int8, int4, or a GGUF type such as q8_0 or q4_k_m"
        raise InputError(compose("compare: precision", found=repr(precision), expected=expected))
    for name, value, least in (("jitter", jitter, FEWEST), ("draws", draws, 1)):
        if value is not None and (not is_whole(value) or value < 1):
            expected = f"a whole number, at least {least}"
            raise InputError(compose(f"compare: {name}", found=repr(value), expected=expected))
    if jitter is not None and jitter < FEWEST:
        do = f"at least {FEWEST} rounding variants: noise cannot be told from fewer"
        raise TooFewPositions(compose(f"compare: {jitter} rounding variants", do=do))
    if draws is not None and mode == "greedy":
        raise InputError(compose("compare: draws in mode greedy", do="mode sample or rl, which draw tokens"))
    if until_decided and mode != "greedy":
        do = "mode greedy; in modes that draw, fewer draws end it sooner"
        raise InputError(compose(f"compare: until-decided in mode {mode}: drawn tokens are no choices", do=do))


def is_quantised(precision):
    """Whether a word that an engine, or who asks, gives for its precision means weights of few bits."""
    word = str(precision).lower()
    return word in QUANTISED or _GGUF.fullmatch(word) is not None


def _one_of(name, value, known):
    if value not in known:
        raise InputError(compose(f"compare: {name}", found=repr(value), expected=", ".join(known)))
