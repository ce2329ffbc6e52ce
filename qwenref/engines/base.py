"""What an engine is to a comparison: what it can do, and the shapes its answers come in.

An adapter is any object with `name`, `capabilities()` and the methods below whose capability it declares; there is no
class to derive from.  What an engine does not give raises `CapabilityMissing`; an adapter never makes up ids.

    tokenize(text) -> [int]                                 its own tokenizer, special tokens as tokens
    render(messages, **options) -> Prompt                   its own chat template
    score(ids, k) -> Scores                                 prefill: one row per id, the last one the next token's
    generate(prompt, n, k, sampling=None) -> Completion     prompt: ids or text; greedy and neutral without `sampling`
    config() -> dict                                        what it says of itself: version, dtype, defaults, hashes
    activations(ids, sites) -> {site: float32 array}        by the names of `Model.sites()`
    close()                                                 let go of what it holds
"""

from typing import NamedTuple, Protocol

import numpy as np

ALL = "all"  # of log-probabilities: the whole vocabulary


class Capabilities(NamedTuple):
    """What an engine gives; log-probabilities as the most per position: 0, a number, or "all"."""

    ids_in: bool = False
    ids_out: bool = False
    output_logprobs: int | str = 0
    prompt_logprobs: int | str = 0
    tokenize: bool = False
    render: bool = False
    config: bool = False
    activations: bool = False
    kind: str = "raw"  # "raw": of softmax(logits); "processed": after temperature and penalties; "unknown"

    @property
    def tier(self):
        """A: ids and log-probabilities of prompt and output; B: of the output only; C: text with them; D: text only."""
        if self.ids_in and self.ids_out and self.output_logprobs:
            return "A" if self.prompt_logprobs else "B"
        return "C" if self.output_logprobs else "D"


class Row(NamedTuple):
    """The distribution of one token: its likeliest ids, or all of them."""

    ids: np.ndarray  # int64 [K], likeliest first
    logprobs: np.ndarray  # float64 [K], natural logarithms
    chosen: int | None = None  # the id that follows, whose value may lie outside the K
    chosen_logprob: float | None = None


class Scores(NamedTuple):
    """Rows of distributions; `rows[t]` is of the id behind `ids[:t + 1]`, None where the engine gave none."""

    ids: list  # of int
    rows: list  # of Row or None, as long as ids
    dense: np.ndarray | None = None  # float32 [len(ids), vocab] logits or log-probabilities, where all were given


class Completion(NamedTuple):
    """What was generated.  `rows[t]` is the distribution `output_ids[t]` was chosen from."""

    prompt_ids: list | None  # as the engine read them
    output_ids: list | None  # the end token included where the engine gives it
    text: str | None
    finish: str  # "stop", "length", "cancelled" or "unknown"
    rows: list = ()
    stop_id: int | None = None
    meta: dict | None = None  # cached_tokens, batch, timings: as the engine has them


class Prompt(NamedTuple):
    """A rendered conversation; a side the engine does not give is None."""

    text: str | None
    ids: list | None


class Closing:
    """What the adapters of this package have in common: an engine is a context that closes it, and says its name."""

    name = None

    def close(self):
        """Let go of what is held; of nothing here."""

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def __repr__(self):
        return f"<engine {self.name}>"


class Engine(Protocol):
    name: str

    def capabilities(self) -> Capabilities: ...
    def tokenize(self, text: str) -> list: ...
    def render(self, messages: list, **options) -> Prompt: ...
    def score(self, ids: list, k: int) -> Scores: ...
    def generate(self, prompt, n: int, k: int, sampling: dict | None = None) -> Completion: ...
    def config(self) -> dict: ...
    def activations(self, ids: list, sites: list) -> dict: ...
    def close(self) -> None: ...
