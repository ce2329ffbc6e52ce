"""What engines in this process share: scoring and decoding from one function, the logits behind each id that is fed."""

import numpy as np

from qwenref import sampling
from qwenref.compare.errors import EngineContractViolation
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Closing, Completion, Prompt, Scores
from qwenref.engines.packages import running
from qwenref.errors import CapabilityMissing, InputError, compose

KEPT_LOGITS = 2**28  # `Scores.dense` is left out above so many: 1 GiB
AT_A_TIME = 2**27  # logits of one call, where the engine may be fed in pieces

MORE = "open it with room for more: context=N"  # what a caller does who needs more than `limit`

# How a request for sampling is spelled; all but the last two are `Sampler`'s.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "ignore_eos",
)  # fmt: skip


class Stepping(Closing):
    """Base of engines that give all logits; an adapter adds loading, `config()` and three things more.

    vocab, limit, stop_ids   logit rows, positions (None: unknown), ids that end a text
    fresh()                  forget every id
    feed(ids) -> [n, vocab]  logits behind each of `ids`, which come after those fed since `fresh`

    A single id that is fed goes the way of decoding, several the way of a prompt.
    """

    vocab = limit = None
    stop_ids = ()
    more = None  # MORE, of an engine with that option
    order = "hf"  # of the steps of sampling: those of the engine
    in_pieces = False  # whether a prompt fed in several calls is what the engine would do itself
    sites = False  # whether it has `activations`
    tokenizer = None  # a Hugging Face tokenizer, or an adapter defines tokenize and render

    def capabilities(self):
        """All ids, all log-probabilities; see `base.Capabilities`."""
        text, template = self.tokenizer is not None, getattr(self.tokenizer, "chat_template", None) is not None
        return Capabilities(True, True, ALL, ALL, tokenize=text, render=template, config=True, activations=self.sites)

    def score(self, ids, k):
        """`Scores` of a prefill of `ids`; `dense` are logits [len(ids), vocab]."""
        where = f"{self.name}: score"
        ids, k = self.ids(ids, where), checked.count(k, where)
        window = max(1, AT_A_TIME // self.vocab) if self.in_pieces else len(ids)
        keep = len(ids) * self.vocab <= KEPT_LOGITS
        rows, dense = [], []
        self._begin(where)
        for begin in range(0, len(ids), window):
            logits = self._asked(ids[begin : begin + window], where)
            following = [*ids[begin + 1 : begin + len(logits) + 1], None]
            for t, (values, chosen) in enumerate(zip(logits, following, strict=False), begin):
                rows.append(checked.row_of_logits(values, k, chosen, f"{where}, behind id {t}"))
            if keep:
                dense.append(logits)
        return Scores(ids, rows, np.concatenate(dense) if keep else None)

    def generate(self, prompt, n, k, sampling=None):
        """`Completion` of `prompt` (ids or text) by at most `n` ids, fed one by one; greedy without `sampling`.

        sampling: {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed"}, all optional, applied here to the engine's logits in the engine's order of steps;
        "ignore_eos": True goes on behind a stop id.
        """
        where = f"{self.name}: generate"
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        ids, k = self.ids(ids, where), checked.count(k, where)
        choose, ignore_eos = chooser(sampling, self.order, where)
        output, rows, finish, stop_id = [], [], "length", None
        self._begin(where)
        fed = ids
        for _ in range(n):
            if self.limit is not None and len(ids) + len(output) > self.limit:
                break
            [logits] = self._asked(fed, where, least=1)[-1:]
            token = choose(logits, ids + output, len(ids))
            rows.append(checked.row_of_logits(logits, k, token, f"{where}, step {len(output)}"))
            output.append(token)
            fed = [token]
            if token in self.stop_ids and not ignore_eos:
                finish, stop_id = "stop", token
                break
        return Completion(ids, output, None, finish, rows, stop_id, {"cached_tokens": 0, "batch": 1})

    def tokenize(self, text):
        """Ids of a text as the engine's own tokenizer reads it, with whatever it puts around a prompt."""
        self._needs_tokenizer("tokenize")
        return list(self.tokenizer(text)["input_ids"])

    def render(self, messages, **options):
        """`Prompt` of a conversation by the engine's own template; `options` are the template's."""
        self._needs_tokenizer("render")
        options = {"add_generation_prompt": True, **options}
        with running(f"{self.name}: render"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return Prompt(text, list(self.tokenizer(text, add_special_tokens=False)["input_ids"]))

    def activations(self, ids, sites):
        raise lacks(self.name, "activations")

    def ids(self, values, where):
        """`checked.ids` of what this engine takes."""
        return checked.ids(values, self.vocab, self.limit, where, more=self.more)

    def _begin(self, where):
        with running(where):
            self.fresh()

    def _asked(self, ids, where, least=None):
        """What `feed` gives: a row for each of `ids`, or `least` rows where the last one alone is looked at."""
        with running(where):
            logits = self.feed(ids)
        rows = len(ids) if least is None else least
        enough = len(logits) == rows or (least is not None and len(logits) > least)
        if logits.ndim != 2 or logits.shape[1] != self.vocab or not enough:
            found = " by ".join(f"{n:,}" for n in logits.shape)
            expected = f"{rows:,} by {self.vocab:,}"
            raise EngineContractViolation(compose(f"{where}: the shape of logits", found=found, expected=expected))
        return logits

    def _needs_tokenizer(self, what):
        if self.tokenizer is None:
            raise lacks(self.name, what, "its folder has none, or transformers, which opens it, is not installed")


def lacks(engine, what, why=None):
    """The error for something an engine does not give."""
    return CapabilityMissing(compose(f"{engine}: no {what}", found=why, do="engine.capabilities() says what it gives"))


def named(request, where):
    """A request for sampling as a dict of its own; InputError for a name that is none of `SAMPLING`."""
    request = dict(request or {})
    for name in request:
        if name not in SAMPLING:
            raise InputError(compose(f"{where}: sampling", found=repr(name), expected=", ".join(SAMPLING)))
    return request


def chooser(request, order, where):
    """(function of logits [vocab], ids so far, length of the prompt -> id, whether stop ids end nothing)."""
    request = named(request, where)
    ignore_eos, seed = bool(request.pop("ignore_eos", False)), request.pop("seed", 0)
    request = {name: value for name, value in request.items() if value is not None}
    request.setdefault("temperature", 0)
    sampler = sampling.Sampler(order=order, mask=(), **request)

    def choose(logits, ids, prompt_length):
        if sampler.temperature == 0 and set(request) == {"temperature"}:
            return int(np.argmax(logits))
        distribution = sampler.distribution(logits, ids, prompt_length)
        return sampling.pick(distribution, sampling.generator(seed, 0, len(ids)).random())

    return choose, ignore_eos
