"""From one row of logits to one token: the distribution an engine would draw from, and a draw that can be repeated.

Four engines, four orders.  Each is a list of steps over the ids still in play; all arithmetic is float64.

order         before the steps                                         steps
hf            repetition (prompt and new)                              temperature, top-k, top-p, min-p
vllm          repetition (prompt and new), frequency, presence (new)   temperature, min-p, top-k, top-p
llama.cpp     repetition, frequency, presence (last 64, prompt too)    top-k, top-p, min-p, temperature
sglang        frequency, presence, then repetition (new)               temperature, top-k and top-p together, min-p

Equal values at a cut: hf and vllm keep all that tie with the k-th largest, and top-p drops lower ids of a tie first, as
a stable sort does; llama.cpp keeps exactly k, lower ids first; sglang never parts a tie.  The sorts of torch and
llama.cpp leave the order of a tie open, so there another id of it may stay.
"""

import math
from typing import NamedTuple

import numpy as np

from qwenref.card import warn_of_penalties
from qwenref.checks import as_whole
from qwenref.errors import CapabilityMissing, DTypeError, InputError, NonFiniteError, ShapeError, compose
from qwenref.exchange import as_array
from qwenref.hub import read_json
from qwenref.sampling_steps import ORDERS, softmax
from qwenref.text_display import distribution_html, distribution_text, shown_as_html, shown_as_text


class Distribution(NamedTuple):
    """What a token is drawn from."""

    probs: np.ndarray  # float64 [vocab], sums to 1
    support: np.ndarray  # int64 [n], ascending: the ids that are still in play
    masked: np.ndarray  # int64 [m], ascending: logit rows that were ruled out beforehand, such as those without a token
    masked_mass: float  # the probability softmax(logits) gives those rows

    def __repr__(self):
        return shown_as_text(distribution_text, self, "Distribution")

    def _repr_html_(self):
        return shown_as_html(distribution_html, self, "Distribution")


class Sampler:
    """A way of choosing tokens: `model.generate(ids, sampler=Sampler(temperature=0.6, top_p=0.95), seed=1)`.

    temperature          0 or more; 0 takes the largest logit after penalties, the lowest id wins ties
    top_k                keep the k largest; 0 and -1 are off, whichever of the two the engine writes
    top_p                keep the smallest set of at least this probability, 0 < top_p <= 1; 1 is off
    min_p                keep what has at least min_p times the largest probability, 0 to 1; 0 is off
    repetition_penalty   above 0; a positive logit of a seen id is divided by it, another one multiplied; 1 is off
    presence_penalty     taken from the logit of an id that was seen; 0 is off
    frequency_penalty    taken once for every time the id was seen; 0 is off
    order                "hf", "vllm", "llama.cpp" or "sglang": the order of these steps and what counts as seen
    penalty_last_n       llama.cpp only: how many ids back penalties look (64 there; 0 none, -1 all)
    mask                 ids that are never drawn.  None: `generate` rules out the logit rows without a token; () none

    hf knows no presence or frequency penalty, so with that order they are refused; checkpoints whose model card asks
    for one mean another order.

    Sources, run or read in 2026; what the engines gave for some hundred cases is in tests/data/engine_samplers.json.
      hf         transformers 5.24.0: generation/utils.py (_get_logits_processor), generation/logits_process.py
      vllm       vLLM 0.32.0, V1 engine: v1/sample/sampler.py, v1/sample/logits_processor/builtin.py (min-p),
                 v1/sample/ops/topk_topp_sampler.py (the PyTorch path, which a request with a seed takes),
                 model_executor/layers/utils.py (apply_penalties), sampling_params.py (a temperature above 0 and below
                 0.01 is raised to 0.01)
      llama.cpp  as in xllamacpp 2026.10.11549: src/llama-sampler.cpp, common/common.h (the default
                 chain and penalty_last_n = 64), tools/server (the prompt goes through the sampler too; it refuses the
                 -1 that older ones take).  The links of the chain that default to off are left out
      sglang     SGLang 0.5.23: srt/layers/sampler.py (the flashinfer backend, of FlashInfer 0.7.4 sampling.cuh: with
                 min-p, top-p sees the top-k renormalised, without, both look at the same probabilities; its "pytorch"
                 backend, taken without a GPU and for deterministic inference, parts ties and never renormalises),
                 srt/sampling/sampling_batch_info.py (additive penalties before the scaling one; top_k 1 is greedy),
                 srt/sampling/penaltylib (new ids only), srt/sampling/sampling_params.py (below 1e-6: greedy)

    Engines work in float32; where a cut falls within rounding of a threshold, one of them may keep one id more or less.
    """

    def __init__(
        self,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        order="hf",
        penalty_last_n=None,
        mask=None,
    ):
        self.order = _checked_order(order)
        self.temperature = _number("temperature", temperature, lambda v: v >= 0, "0 or more")
        self.top_k = _whole("top_k", top_k, -1, "a whole number of 1 or more; 0 or -1 for off")
        self.top_p = _number("top_p", top_p, lambda v: 0 < v <= 1, "above 0, at most 1")
        self.min_p = _number("min_p", min_p, lambda v: 0 <= v <= 1, "0 to 1")
        self.repetition_penalty = _number("repetition_penalty", repetition_penalty, lambda v: v > 0, "above 0")
        self.presence_penalty = _number("presence_penalty", presence_penalty, lambda v: True, "a number")
        self.frequency_penalty = _number("frequency_penalty", frequency_penalty, lambda v: True, "a number")
        if order == "hf" and (self.presence_penalty or self.frequency_penalty):
            raise InputError(
                compose(
                    "Sampler: order 'hf' has no presence or frequency penalty",
                    found=f"presence_penalty {presence_penalty}, frequency_penalty {frequency_penalty}",
                    expected="0 for both, as in transformers",
                    do="order='vllm', 'sglang' or 'llama.cpp', as the engine you compare with",
                )
            )
        if order != "llama.cpp" and penalty_last_n is not None:
            raise InputError(
                compose(
                    f"Sampler: penalty_last_n with order {order!r}",
                    found=f"penalty_last_n {penalty_last_n!r}",
                    expected="None: only llama.cpp looks back so far",
                    do="leave it out, or order='llama.cpp'",
                )
            )
        self.penalty_last_n = None
        if order == "llama.cpp":
            last = 64 if penalty_last_n is None else penalty_last_n
            self.penalty_last_n = _whole("penalty_last_n", last, -1, "a whole number; 0 for none, -1 for all")
        self.mask = None if mask is None else _ids("mask", mask)

    @classmethod
    def from_generation_config(cls, model, order="hf", **changes):
        """The sampling a checkpoint's generation_config.json asks for, read as the engine `order` reads it.

        What the file leaves out has that engine's default: hf draws only with `do_sample` and then cuts at top_k 50;
        vllm and sglang ignore `do_sample` and leave everything off; llama.cpp has temperature 0.8, top_k 40,
        top_p 0.95, min_p 0.05.  vllm alone reads presence and frequency penalties there.  `changes` are arguments of
        Sampler and win.  CheckpointError for a file that cannot be read, CapabilityMissing without a file, or where it
        asks for something Sampler does not have.  A QwenrefWarning where the model card beside it (README.md) gives a
        penalty that this sampler then has not; an argument that names it, 0 as well, is an answer to that.
        """
        _checked_order(order)
        path = None if model.path is None else model.path / "generation_config.json"
        if path is None or not path.is_file():
            raise CapabilityMissing(
                compose("Sampler: the model has no generation_config.json", do="name the parameters: Sampler(...)")
            )
        found = {name: value for name, value in read_json(path).items() if value is not None}
        unknown = {name: found[name] for name, off in _NOT_HERE.items() if found.get(name, off) != off}
        if unknown and order == "hf":  # the other engines do not read these
            raise CapabilityMissing(
                compose(
                    f"Sampler: {path.name} asks for what Sampler does not have",
                    found=", ".join(f"{name} {value}" for name, value in unknown.items()),
                    do="name the parameters: Sampler(...)",
                )
            )
        options = {**_ENGINE_DEFAULTS.get(order, {})}
        options.update((name, found[name]) for name in _READ.get(order, _READ_BY_ALL) if name in found)
        if order == "hf" and not found.get("do_sample", False):
            options = {"temperature": 0.0, "repetition_penalty": options.get("repetition_penalty", 1.0)}
        sampler = cls(**{**options, "order": order, **changes})
        warn_of_penalties(path.parent, sampler, changes, stacklevel=2)
        return sampler

    def __repr__(self):
        off = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "repetition_penalty": (1.0,)}
        off.update({"presence_penalty": (0.0,), "frequency_penalty": (0.0,), "penalty_last_n": (None, 64)})
        shown = [f"temperature={self.temperature:g}"]
        shown += [f"{name}={getattr(self, name):g}" for name in off if getattr(self, name) not in off[name]]
        masked = [] if self.mask is None else [f"mask={len(self.mask)} ids"]
        return f"Sampler({', '.join([*shown, f'order={self.order!r}', *masked])})"

    @property
    def penalises(self):
        """Whether any penalty is on, so that the ids before this token matter."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def distribution(self, logits, context_ids=(), prompt_length=None, mask=()):
        """The `Distribution` of the next token.

        logits         floating point [vocab], finite: the model's own, untouched
        context_ids    the ids before this token, oldest first: prompt and new ones, no pads
        prompt_length  how many of them are prompt; needed where a penalty is on that treats the two differently
        mask           ids to rule out where the sampler has no mask of its own

        NonFiniteError names the first logit that is no number; ShapeError, DTypeError, InputError for other misuse.
        """
        z = checked_logits(logits)
        masked = self._masked(len(z), mask)
        ids = np.delete(np.arange(len(z)), masked)
        # Far logits may differ by more than float64 holds, and their probability be less: -inf and 0 are right then.
        with np.errstate(over="ignore", under="ignore"):
            mass = float(softmax(z)[masked].sum())
            kept, z = self._kept(ids, self._penalised(z, context_ids, prompt_length)[ids])
            probs = np.zeros(len(ids) + len(masked))
            probs[kept] = softmax(z)
        return Distribution(probs, kept, masked, mass)

    def sample(self, logits, context_ids, rng, prompt_length=None, mask=()):
        """One token id: `pick` of the distribution at `rng.random()`.  Arguments as for `distribution`."""
        found = self.distribution(logits, context_ids, prompt_length, mask)
        return pick(found, rng.random())

    def _masked(self, vocab, mask):
        masked = np.unique(_ids("mask", mask) if self.mask is None else self.mask)
        if masked.size and not 0 <= masked[0] <= masked[-1] < vocab:
            raise InputError(compose("Sampler: mask", found=f"ids {masked[0]} to {masked[-1]}", expected=_below(vocab)))
        if masked.size == vocab:
            raise InputError(compose("Sampler: mask", found="every id", expected="at least one id left to draw"))
        return masked

    def _penalised(self, z, context_ids, prompt_length):
        if not self.penalises:
            return z
        context = _ids("context_ids", context_ids)
        if context.size and not 0 <= context.min() <= context.max() < len(z):
            bad = int(np.flatnonzero((context < 0) | (context >= len(z)))[0])
            raise InputError(compose(f"Sampler: context_ids[{bad}] is {context[bad]}", expected=_below(len(z))))
        new = context
        if self.order == "llama.cpp":
            last = len(context) if self.penalty_last_n == -1 else min(self.penalty_last_n, len(context))
            context = new = context[len(context) - last :]
        elif self.order != "hf":
            new = context[self._checked_length(prompt_length, len(context)) :]
        counts = np.bincount(new, minlength=len(z))
        if self.order == "sglang":
            z = self._scaled(self._lowered(z, counts), counts > 0)
        else:
            z = self._lowered(self._scaled(z, np.bincount(context, minlength=len(z)) > 0), counts)
        if not np.isfinite(z).all():
            raise InputError(compose("Sampler: the penalties carry logits beyond float64", found=repr(self)))
        return z

    def _checked_length(self, prompt_length, tokens):
        if prompt_length is None:
            raise InputError(
                compose(
                    f"Sampler: penalties of order {self.order!r} need prompt_length",
                    expected="how many of context_ids are prompt: it tells prompt and new ids apart",
                )
            )
        length = _whole("prompt_length", prompt_length, 0, "0 or more")
        if length > tokens:
            raise InputError(compose(f"Sampler: prompt_length {length}", found=f"{tokens} context_ids"))
        return length

    def _lowered(self, z, counts):
        return z - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

    def _scaled(self, z, seen):
        penalty = self.repetition_penalty
        return np.where(seen, np.where(z > 0, z / penalty, z * penalty), z)

    def _kept(self, ids, z):
        """The ids that survive all steps, ascending, and their logits over the temperature."""
        if self.temperature == 0 or (self.order == "sglang" and (self.temperature < 1e-6 or self.top_k == 1)):
            best = int(np.argmax(z))
            return ids[best : best + 1], z[best : best + 1]
        for step in ORDERS[self.order]:
            z, keep = step(z, self)
            if keep is not None:
                ids, z = ids[keep], z[keep]
        return ids, z


# What checkpoints say

_READ_BY_ALL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_READ = {"vllm": (*_READ_BY_ALL, "presence_penalty", "frequency_penalty")}
_ENGINE_DEFAULTS = {
    "hf": {"top_k": 50},
    "llama.cpp": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
# Fields of generation_config.json that change what transformers draws from, and the value that changes nothing.
_NOT_HERE = {
    "num_beams": 1,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "sequence_bias": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
}


# Drawing


def generator(seed, row_key, position):
    """The random numbers of one token: NumPy's Philox 4x64 with key (seed, row_key), counter (0, 0, 0, position).

    The three numbers, 0 to 2**64 - 1, are all it depends on: not the batch, not the calls before.  `.random()` of it is
    the float64 in [0, 1) that `pick` takes: the upper 53 bits of the first of the four words that the ten rounds make
    of counter (1, 0, 0, position), since NumPy counts up before it draws.
    """
    key = [_whole64("seed", seed), _whole64("row key", row_key)]
    counter = [0, 0, 0, _whole64("position", position)]
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64)))


def pick(distribution, u):
    """The id at `u` in [0, 1) of the cumulative distribution over ascending ids."""
    total = np.cumsum(distribution.probs[distribution.support])
    below = min(u * total[-1], np.nextafter(total[-1], 0))  # u < 1, but the product may round up to the total
    return int(distribution.support[np.searchsorted(total, below, side="right")])


# Checking


def checked_logits(logits, where="Sampler"):
    """float64 [vocab], or an error that names what is wrong and where."""
    try:
        z = as_array(logits)
    except ValueError:
        raise ShapeError(compose(f"{where}: logits", found="rows of different lengths", expected="[vocab]")) from None
    if z.ndim != 1 or not z.size:
        raise ShapeError(compose(f"{where}: logits", found=f"shape {list(z.shape)}", expected="one row, [vocab]"))
    if "float" not in z.dtype.name:  # float32 and the others, bfloat16, float8_e4m3fn
        raise DTypeError(compose(f"{where}: logits", found=z.dtype.name, expected="floating point"))
    z = z.astype(np.float64)
    refuse_non_finite(z, where, "", "look for the first module whose output is not finite")
    return z


def refuse_non_finite(logits, where, after, do):
    """NonFiniteError where one of the logits [vocab] is no number; `after` is said behind the first of them."""
    finite = np.isfinite(logits)
    if finite.all():
        return
    bad = int(np.argmin(finite))
    raise NonFiniteError(
        compose(
            f"{where}: {int((~finite).sum()):,} of {len(logits):,} logits are not finite",
            found=f"{logits[bad]} for id {bad}{after}",
            expected="numbers: no token is chosen from NaN or infinity",
            do=do,
        )
    )


def _below(vocab):
    return f"0 to {vocab - 1:,}: one of the {vocab:,} logits"


def _checked_order(order):
    if not isinstance(order, str) or order not in ORDERS:
        raise InputError(compose(f"Sampler: order {order!r}", expected=", ".join(map(repr, ORDERS))))
    return order


def _number(name, value, allowed, words):
    try:
        number = float(value) if not isinstance(value, (bool, np.bool_, str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and allowed(number)):
        raise InputError(compose(f"Sampler: {name} {value!r}", expected=f"a number, {words}"))
    return number


def _whole(name, value, least, words):
    whole = as_whole(value)
    if whole is None or whole < least:
        raise InputError(compose(f"Sampler: {name} {value!r}", expected=words))
    return whole


def _whole64(name, value):
    whole = _whole(name, value, 0, "a whole number from 0 to 2**64 - 1")
    if whole >= 2**64:
        raise InputError(compose(f"Sampler: {name} {value!r}", expected="a whole number from 0 to 2**64 - 1"))
    return whole


def _ids(name, ids):
    """int64 [n] of any sequence, set or iterator of whole numbers."""
    try:
        found = as_array(ids if hasattr(ids, "__getitem__") or not hasattr(ids, "__iter__") else list(ids))
    except (ValueError, OverflowError):  # rows of different lengths; numbers beyond 64 bits
        found = np.array(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        what = f"{found.dtype} {list(found.shape)}" if found.dtype != object else repr(ids)
        raise InputError(compose(f"Sampler: {name}", found=what, expected="ids, [n]"))
    return np.minimum(found, np.iinfo(np.int64).max).astype(np.int64)  # what is larger is refused as no logit's id
