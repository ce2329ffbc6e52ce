"""The self-test of a comparison: engines with known faults, and what has to be said of each.

Row 28, experts of a mixture, has no place here: the family's dense models have none.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from qwenref.compare.faults import find, places
from qwenref.compare.faulty import FaultyReference

CONFIG_OR_KERNELS = ("config", "kernels")
STATE = ("state_or_cache",)
NUMERIC = ("state_or_cache", "prefill_kernel", "weights", "config", "kernels")
# What an engine of texts is not asked, and what the prompts of a suite have nothing of.
UNREAD = (
    "regex-gpt2", "regex-qwen2", "specials-as-text", "think-empty", "system-added", "newline-dropped", "eos-other",
)  # fmt: skip


class Planted(NamedTuple):
    """An engine with a fault, and the verdict it has to get.

    number    the row; several engines may share one
    faults    names; a fault of single layers is planted in the first place there is
    status    those that may be said, the one expected first
    causes    those that may be said
    named     whether the replay has to name the fault itself
    finding   what a finding or annotation has to be about, None where the verdict says it all
    tier      of the engine
    suite     on which it shows
    options   of `FaultyReference`
    probe     a fault the model of both sides has, None for the checkpoint as it is
    weights   whether the reference is given the engine's own weights
    mode      "greedy" or "sample"
    """

    number: int
    faults: tuple
    status: tuple
    causes: tuple = ("none",)
    named: bool = False
    finding: str | None = None
    tier: str = "A"
    suite: str = "quick"
    options: Mapping = MappingProxyType({})
    probe: str | None = None
    weights: bool = False
    mode: str = "greedy"

    @property
    def id(self):
        """What tests call it."""
        parts = [f"{self.number:02}", *self.faults, *([self.probe] if self.probe else [])]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        parts += ["weights"] if self.weights else []
        return " ".join([*parts, *([f"tier {self.tier}"] if self.tier != "A" else [])])

    def resolved(self, model):
        """The Faults, those of single layers in the first place the model has for them."""
        return tuple(places(find(name), model)[0] for name in self.faults)

    def fits(self, model):
        """Whether the model can have these faults."""
        found = [places(find(name), model) for name in self.faults]
        return all(here and here[0].fits(model) for here in found)

    def sides(self, model, jitter=None):
        """(the reference's model, the engine); `jitter` is the seed of a rounding variant the engine computes by."""
        base = model if self.probe is None else find(self.probe).open(model)
        faults = self.resolved(base)
        engine = FaultyReference(base, *faults, tier=self.tier, **{"jitter": jitter, **self.options})
        return engine.model if self.weights else base, engine

    def through(self, tier):
        """The row for an engine of another tier, None where nothing of the fault reaches it."""
        if tier == self.tier:
            return self
        if self.tier != "A":
            return None
        causes = self.causes
        if set(causes) & set(NUMERIC):
            causes = tuple(dict.fromkeys([*causes, *NUMERIC]))  # prefill and decode cannot be told apart
        return None if tier == "C" and set(self.faults) & set(UNREAD) else self._replace(tier=tier, causes=causes)


def _same(number, *faults, finding=None, **facts):
    return Planted(number, faults, ("AGREE_WITHIN_NOISE", "AGREE"), finding=finding, **facts)


def _off(number, *faults, causes, named=True, **facts):
    return Planted(
        number, faults, ("DIVERGED",), tuple([causes] if isinstance(causes, str) else causes), named, **facts
    )


ROWS = (
    _off(1, "rope-q+1", causes=CONFIG_OR_KERNELS),
    _off(2, "rope-q+1/decode", causes=STATE),
    _same(3, "rope-qk+1"),
    _off(4, "rope-theta-1e4", causes="config"),
    _off(4, "rope-theta-1e7", causes="config"),
    _off(4, "rotary-whole-head", causes="config"),
    _off(4, "rope-interleaved", causes=CONFIG_OR_KERNELS),
    _off(5, "norm-w", causes=("kernels", "weights")),
    _off(5, "norm-2+w", causes=("weights", "kernels")),
    _off(6, "q-gate-flat", causes="kernels"),
    _off(7, "gate-off", causes="kernels"),
    _off(7, "gate-silu", causes="kernels"),
    _off(8, "gqa-tile", causes="kernels"),
    _off(8, "delta-tile", causes="kernels"),
    _off(9, "head-tied", causes="weights"),
    _off(9, "head-untied", causes="weights"),
    _off(10, "eos-other", causes="stop_tokens", named=False),
    _off(10, "eos-ignored", causes="stop_tokens", named=False),
    _off(11, "temperature-0.8", causes="sampling_config"),
    _off(11, "temperature-0.6", causes="sampling_config"),
    # What a random model draws is no text that tokenises back: other ids are then held against the reference.
    _off(11, "temperature-1.0", causes=("sampling_config", "kernels"), named=False, tier="D"),
    _off(12, "repetition-1.05", causes="sampling_config"),
    _off(12, "presence-1.5", causes="sampling_config"),
    _off(13, "top-k-20", causes="sampling_config", mode="sample"),
    _off(13, "top-p-0.95", causes="sampling_config", mode="sample"),
    _off(14, "bos-added", causes="tokenizer"),
    _off(14, "bos-added", causes="tokenizer", tier="D"),
    _off(15, "newline-added", causes="chat_template"),
    _off(15, "newline-dropped", causes="chat_template"),
    _off(15, "newline-added", causes="chat_template", tier="D"),
    _off(16, "think-empty", causes="chat_template"),
    _off(16, "system-added", causes="chat_template"),
    _off(16, "system-added", causes="chat_template", tier="D"),
    _off(17, "regex-gpt2", causes="tokenizer", named=False),
    _off(17, "regex-qwen2", causes="tokenizer", named=False),
    _off(18, "specials-as-text", causes="tokenizer", named=False),
    _off(19, "conv-zero-handoff", causes=STATE),
    _off(20, "conv-no-history", causes=STATE),
    _off(21, "state-stale-half", causes=STATE, finding="cache"),
    _off(22, "state-reset-64", causes="prefill_kernel", named=False),
    _off(23, "state-bf16", causes=STATE, named=False, suite="deep"),
    _same(23, "state-bf16", finding="config_mismatch"),
    _same(24, "l2norm-eps-1e-5", finding="undetectable"),
    _same(24, "l2norm-sum", finding="undetectable"),
    _off(24, "l2norm-eps-1e-5", causes="kernels", probe="keys-small"),
    _off(25, "rms-eps-1e-5", causes="config"),
    _off(26, "shards-swapped", causes="weights"),
    _off(26, "layers-swapped", causes="weights"),
    _off(26, "mlp-borrowed", causes="weights"),
    _off(26, "shard-zero", causes="weights"),
    _off(27, "dt-bias-off", causes="kernels"),
    _off(27, "A-log-sign", causes="kernels"),
    _off(27, "beta-raw", causes="kernels"),
    _off(27, "delta-q-unscaled", causes="kernels"),
    _off(29, "int8-g128", causes="quantization"),
    _off(29, "int4-g32", causes="quantization"),
    _same(30, "int8-g128", weights=True, finding="quantization_loss"),
    _same(30, "int4-g32", weights=True, finding="quantization_loss"),
    _off(31, "kv-fp8", causes=("quantization", *STATE), named=False, suite="deep"),
    _same(31, "kv-fp8", finding="blind_spot"),
    _same(32, "logits-bf16", finding="tie"),
    _off(33, "mask-sees-next", causes="kernels"),
    _off(33, "mask-misses-itself", causes="kernels"),
    _same(34, "rope-sections"),
    _same(35, finding="engine_nondeterministic", options={"repeatable": False}),
    _off(36, "context-half", causes="tokenizer", finding="engine_contract"),
    _off(37, "temperature-0.8", "q-gate-flat", causes="sampling_config"),
    _same(38, "logprobs-bf16"),
    _same(38, "logprobs-top5"),
    _off(38, "logprobs-bf16", "gate-off", causes="kernels"),
    Planted(38, ("logprobs-probabilities",), ("INVALID",)),
    _same(39, "delta-as-torch", finding="semantics"),
    _same(39, "delta-as-fla", finding="semantics"),
)
