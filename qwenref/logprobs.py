"""Log-probabilities of a generation: of the chosen tokens, of the likeliest ones, and of the prompt."""

from typing import NamedTuple

import numpy as np

from qwenref.checks import is_whole
from qwenref.errors import InputError, compose
from qwenref.text_display import logprobs_html, logprobs_text, shown_as_html, shown_as_text

KINDS = ("raw", "processed")


class _Fields(NamedTuple):
    kind: str  # "raw" or "processed"
    chosen: np.ndarray  # float64 [new]
    top_ids: np.ndarray  # int64 [new, k], likeliest first, the lower id first among equals
    top: np.ndarray  # float64 [new, k]
    prompt: np.ndarray | None  # float64 [prompt], with prompt_logprobs=True
    prompt_top_ids: np.ndarray | None  # int64 [prompt, k]; -1 for the first id
    prompt_top: np.ndarray | None  # float64 [prompt, k]
    ids: np.ndarray  # int64 [new], those whose values `chosen` are
    prompt_ids: np.ndarray | None  # int64 [prompt]


class Logprobs(_Fields):
    """Natural logarithms of probabilities, float64, for one row.

    `kind` says of which: "raw" of softmax(logits) over every logit row, before penalties, temperature and cuts;
    "processed" of the distribution the token was drawn from, where what was cut away is -inf.  The prompt was not
    drawn, so its values are raw in either case; those of its first id are NaN, because nothing came before it here.

    chosen float64 [new] and ids int64 [new]: of the new ids · top_ids int64 [new, k], top float64 [new, k]: the
    likeliest at each step, the lower id first among equals · with prompt_logprobs=True prompt float64 [prompt],
    prompt_ids, prompt_top_ids [prompt, k] (-1 for the first id) and prompt_top; else None
    """

    tokenizer = None  # names the tokens where it is shown

    def __reduce__(self):
        return Logprobs, tuple(self)

    def __repr__(self):
        return shown_as_text(logprobs_text, self, "Logprobs")

    def _repr_html_(self):
        return shown_as_html(logprobs_html, self, "Logprobs")


class Recorder:
    """Collects the `Logprobs` of one row while it is generated."""

    def __init__(self, kind, k, prompt_ids, with_prompt):
        self._kind, self._k = kind, k
        self._ids, self._chosen, self._top = [], [], []
        self._prompt_ids = np.array(prompt_ids, np.int64) if with_prompt else None
        self._prompt, self._prompt_top = [], []
        self._scored = 1  # the first id of the prompt has no logits before it

    def take(self, id, logits, probs):
        """One new id; logits [vocab], probs [vocab] it was drawn from."""
        if self._kind == "raw":
            values = log_softmax(logits)
        else:
            with np.errstate(divide="ignore"):
                values = np.log(probs)
        self._ids.append(id)
        self._chosen.append(values[id])
        self._top.append(top(values, self._k))

    def score(self, logits):
        """The logits [n, vocab] after the next n ids of the prompt."""
        following = self._prompt_ids[self._scored : self._scored + len(logits)]
        self._scored += len(following)
        for id, row in zip(following, logits, strict=False):
            values = log_softmax(row)
            self._prompt.append(values[id])
            self._prompt_top.append(top(values, self._k))

    def result(self, tokenizer=None):
        """What was collected so far; the tokenizer names tokens where it is shown."""
        new = np.array(self._chosen, np.float64), *_stacked(self._top, self._k)
        prompt = None, None, None
        if self._prompt_ids is not None:
            first = (np.full(self._k, -1), np.full(self._k, np.nan))
            prompt = np.array([np.nan, *self._prompt], np.float64), *_stacked([first, *self._prompt_top], self._k)
        found = Logprobs(self._kind, *new, *prompt, np.array(self._ids, np.int64), self._prompt_ids)
        found.tokenizer = tokenizer
        return found


def _stacked(pairs, k):
    ids = np.array([ids for ids, _ in pairs], np.int64).reshape(len(pairs), k)
    return ids, np.array([values for _, values in pairs], np.float64).reshape(len(pairs), k)


def log_softmax(logits):
    """Natural logarithms of softmax over the last axis, float64.  NaN and +inf make the whole row NaN."""
    z = np.asarray(logits).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        z = z - z.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def top(values, k):
    """(ids int64 [k], values float64 [k]) of the k largest of [vocab], the lower id first among equals."""
    candidates = np.arange(len(values))
    if 0 < k < len(values) and not np.isnan(values).any():
        candidates = np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    ids = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return ids, values[ids]


def checked_options(kind, k, with_prompt, vocab):
    """(kind, k) as generate uses them, or InputError; (None, 0) when no log-probabilities are asked for."""
    if kind is None:
        if k or with_prompt:
            raise InputError(
                compose(
                    "generate: top_logprobs and prompt_logprobs need return_logprobs",
                    do='return_logprobs="raw", or "processed"',
                )
            )
        return None, 0
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(compose(f"generate: return_logprobs {kind!r}", expected=" or ".join(map(repr, KINDS))))
    if not is_whole(k) or not 0 <= k <= vocab:
        raise InputError(compose(f"generate: top_logprobs {k!r}", expected=f"a whole number from 0 to {vocab:,}"))
    return kind, int(k)
