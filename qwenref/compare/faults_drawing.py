"""Faults of what is made of logits: sampling nobody asked for, where a text ends, what is reported."""

import ml_dtypes
import numpy as np

from qwenref.compare.faults_base import add, through
from qwenref.sampling import Sampler
from qwenref.tokenizer import stop_ids

NEVER = -1e30  # a logit of what is never drawn, where a sampler takes numbers alone


class Drawing:
    """Sampling as an engine does it although it was asked for none: `options` of a `Sampler`, in the order of vllm.

    `.draws` whether it takes other tokens than the likeliest one.
    """

    def __init__(self, **options):
        self.draws = "temperature" in options
        self.sampler = Sampler(**{"order": "vllm", "mask": (), **options})

    def logits(self, logits, context, prompt_length):
        """float64 [V], logarithms of the probabilities a token is drawn with: logits like any other."""
        given = np.maximum(logits, NEVER)
        with np.errstate(divide="ignore"):
            return np.log(self.sampler.distribution(given, context, prompt_length).probs)


def _sampling(name, what, number=None, family=None, **options):
    add(name, "sampling", what, Drawing(**options), number=number, family=family)


# fmt: off
for _value in (0.6, 0.7, 0.8, 1.0):
    _sampling(f"temperature-{_value}", f"drawn at temperature {_value}", 11, "temperature", temperature=_value)
for _value in (1.05, 1.1):
    _sampling(f"repetition-{_value}", f"repetition penalty {_value}", 12, "penalty", repetition_penalty=_value)
for _value in (1.0, 1.5):
    _sampling(f"presence-{_value}", f"presence penalty {_value}", 12, "penalty", presence_penalty=_value)
_sampling("frequency-0.5", "frequency penalty 0.5", family="penalty", frequency_penalty=0.5)
for _value in (20, 40):
    _sampling(f"top-k-{_value}", f"the {_value} likeliest alone", 13, "cut", top_k=_value)
for _value in (0.9, 0.95):
    _sampling(f"top-p-{_value}", f"the likeliest up to a probability of {_value}", 13, "cut", top_p=_value)
_sampling("min-p-0.05", "what has a twentieth of the largest probability", 13, "cut", min_p=0.05)
_sampling("defaults-checkpoint", "temperature 0.6, top-k 20, top-p 0.95: what checkpoints of the family ask for", 11,
          "defaults", temperature=0.6, top_k=20, top_p=0.95)
_sampling("defaults-llama.cpp", "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05: defaults of llama.cpp", None,
          "defaults", temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, order="llama.cpp")
_sampling("defaults-ollama", "temperature 0.8, top-k 40, top-p 0.9: defaults of Ollama", None, "defaults",
          temperature=0.8, top_k=40, top_p=0.9, order="llama.cpp")
# fmt: on


def _several_stops(model):
    return len(stop_ids(model)) > 1


add("eos-other", "stop", "the end of a turn is none, the end of a text alone is", lambda model: stop_ids(model)[1:],
    number=10, applies=_several_stops, family="stop")  # fmt: skip
add("eos-ignored", "stop", "no id ends a text", lambda model: (), number=10, applies=stop_ids, family="stop")


# fmt: off
add("logprobs-bf16", "logprobs", "log-probabilities rounded to bf16", through(ml_dtypes.bfloat16), number=38,
    hypothesis=False)
add("logprobs-top5", "logprobs", "the five likeliest alone", lambda values: values[:5], number=38, hypothesis=False)
add("logprobs-probabilities", "logprobs", "probabilities where logarithms are asked for", np.exp, number=38,
    hypothesis=False)
# fmt: on
