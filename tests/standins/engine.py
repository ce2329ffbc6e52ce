"""What the stand-ins share: asking the engine they stand around, and values as each form writes them."""

import numpy as np

from qwenref.checks import is_whole
from qwenref.engines import ALL

NEUTRAL = {
    "temperature": 0, "top_k": (0, -1), "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "ignore_eos": False,
}  # fmt: skip


class Behind:
    """The engine behind a server, with the tokenizer of the model it runs."""

    def __init__(self, engine, tokenizer, name="tiny"):
        self.engine, self.tokenizer, self.name = engine, tokenizer, name

    def ids(self, prompt):
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def generate(self, prompt, n, k, fields):
        """Sampling fields by the names of `stepping.SAMPLING`; those that mean nothing are left out."""
        drawn = {name: v for name, v in fields.items() if v is not None and name in NEUTRAL and not _off(name, v)}
        if "temperature" in drawn:
            drawn["seed"] = fields.get("seed") or 0
        elif set(drawn) - {"ignore_eos"}:
            drawn["temperature"] = 0
        return self.engine.generate(self.ids(prompt), n, k, drawn or None)

    def score(self, ids, k):
        return self.engine.score(ids, k)

    def spelled(self, id):
        """A token as text, as a server writes it: bytes of no character become U+FFFD."""
        return self.tokenizer.token_bytes(id).decode("utf-8", "replace")

    def texts(self, done):
        """Completion without its end token, as chat routes give it: (text, ids, rows)."""
        end = done.finish == "stop" and done.output_ids
        ids = done.output_ids[:-1] if end else done.output_ids
        return self.tokenizer.decode(ids), ids, done.rows[: len(ids)]

    def entries(self, ids, rows, k):
        """[{token, bytes, logprob, top_logprobs}] of chat routes."""
        return [
            {**self.entry(id, row.chosen_logprob), "top_logprobs": [self.entry(*pair) for pair in pairs(row, k)]}
            for id, row in zip(ids, rows, strict=True)
        ]

    def entry(self, id, value):
        return {"token": self.spelled(id), "bytes": list(self.tokenizer.token_bytes(id)), "logprob": value}


def _off(name, value):
    off = NEUTRAL[name]
    return value in off if isinstance(off, tuple) else value == off


def pairs(row, k=ALL):
    """[(id, value)] of a row, likeliest first."""
    found = list(zip(row.ids.tolist(), row.logprobs.tolist(), strict=True))
    return found[:k] if is_whole(k) else found


def with_chosen(row):
    """{id: value} of a row and of the id that follows."""
    found = dict(pairs(row))
    if row.chosen is not None:
        found.setdefault(row.chosen, row.chosen_logprob)
    return found


class Tokenizer:
    """What is used of a tokenizer of transformers."""

    chat_template = "{{ messages }}"

    def __init__(self, engine, tokenizer):
        self.engine, self.tokenizer = engine, tokenizer

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": self.tokenizer.encode(text)}

    def apply_chat_template(self, messages, tokenize, **options):
        assert tokenize is False
        return self.engine.render(messages, **options).text


class Probabilities:
    """An engine that gives probabilities in place of their logarithms."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, *asked):
        return self._changed(self._engine.score(*asked))

    def generate(self, *asked):
        return self._changed(self._engine.generate(*asked))

    def _changed(self, given):
        return given._replace(rows=[self._row(row) for row in given.rows])

    def _row(self, row):
        chosen = None if row.chosen_logprob is None else float(np.exp(row.chosen_logprob))
        return row._replace(logprobs=np.exp(row.logprobs), chosen_logprob=chosen)
