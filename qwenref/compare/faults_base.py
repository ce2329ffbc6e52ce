"""What a fault is: a mistake an engine can make, as a switch of the reference."""

from dataclasses import dataclass, field, replace

import numpy as np

from qwenref.compare.faults_model import nothing_to_change, opened
from qwenref.errors import InputError, compose

MODEL_KINDS = ("config", "kernels", "state", "weights", "quantization", "semantics")
KINDS = ("prompt", "sampling", *MODEL_KINDS, "stop", "logprobs")
LIBRARY = {}  # {name: Fault} in the order of the tables


def through(dtype):
    """A function: numbers rounded to another type, in the type they have."""

    def rounded(values):
        values = np.asarray(values)
        return values.astype(dtype).astype(values.dtype)

    return rounded


@dataclass(frozen=True)
class Fault:
    """A mistake by name.  What it can do depends on its kind; the other methods raise InputError.

    kind     "config", "kernels", "state", "weights", "quantization", "semantics": `open(model)`
             "prompt": `prompt(ids, model)` · "sampling": `logits(logits, context)` · "stop": `stops(model)` ·
             "logprobs": `logprobs(values)`, what an engine reports
    number   the row of the self-test it plants, None for one that is a hypothesis alone
    on       "both", or the calls it is confined to: "prefill" (an empty cache) or "decode" (one that holds tokens)
    family   faults that explain one another, or the part of a prompt fault: "tokenizer", "template", "context"
    """

    name: str
    kind: str
    what: str
    number: int | None = None
    on: str = "both"
    family: str | None = None
    layers: tuple = ()
    says: dict = field(default_factory=dict, hash=False, compare=False)  # what an engine with it says in its config
    hypothesis: bool = True  # whether it is worth asking if an engine has it
    equivalent: bool = False  # no distribution changes
    mechanism: object = field(default=None, repr=False, compare=False)
    applies: object = field(default=None, repr=False, compare=False)  # of a model: whether there is what it changes
    sites: object = field(default=None, repr=False, compare=False)  # of a model: the layers it comes in, as tuples

    def open(self, model):
        """A model of its own with the fault in it over the same weights; `model` stays what it is."""
        self._only(*MODEL_KINDS)
        if not self.fits(model):
            raise nothing_to_change(self)
        return opened(model, (self,))

    def prompt(self, ids, model):
        """The ids [int] an engine with the fault makes of a prompt's."""
        self._only("prompt")
        return list(map(int, self.mechanism(list(map(int, ids)), model)))

    def logits(self, logits, context, prompt_length=None):
        """float64 [V] of what an engine draws from, -inf where it never does; `context` the ids before."""
        self._only("sampling")
        context = np.asarray(context, np.int64)
        return self.mechanism.logits(logits, context, len(context) if prompt_length is None else prompt_length)

    def stops(self, model):
        """The set of ids an engine with the fault ends at."""
        self._only("stop")
        return set(self.mechanism(model))

    def logprobs(self, values):
        """What an engine reports for log-probabilities [K], the likeliest first."""
        self._only("logprobs")
        return self.mechanism(values)

    def fits(self, model):
        """Whether the model has what the fault changes."""
        if self.sites is not None and self.layers not in self.sites(model):
            return False
        if any(layer >= model.config.text_config.num_hidden_layers for layer in self.layers):
            return False
        return self.applies is None or bool(self.applies(model))

    @property
    def confined(self):
        """Whether single layers, and prefill or decode alone, can have it; those with `sites` have layers anyway."""
        return getattr(self.mechanism, "confined", False)

    def at(self, *layers):
        """The same fault in these layers alone."""
        return replace(self, name=f"{self.name}@{','.join(map(str, layers))}", layers=layers)

    def during(self, on):
        """The same fault in prefill or decode alone."""
        return self if on == self.on else replace(self, name=f"{self.name}/{on}", on=on)

    def _only(self, *kinds):
        if self.kind not in kinds:
            raise InputError(
                compose(f"fault {self.name} is of kind {self.kind}", expected=f"one of {', '.join(kinds)}")
            )


def add(name, kind, what, mechanism, **facts):
    """Enter a fault into the library."""
    assert name not in LIBRARY and kind in KINDS, name
    LIBRARY[name] = Fault(name, kind, what, mechanism=mechanism, **facts)
