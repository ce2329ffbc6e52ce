"""What a prompt was continued with, row by row: ids, text as it grows, why it ended, and how all that is shown."""

import numpy as np

from qwenref.answers import opens_thinking, parse
from qwenref.errors import CapabilityMissing, compose
from qwenref.plain import plain
from qwenref.text_display import Tokens, generation_html, harmless, row_html, shown_as_html
from qwenref.ties import two_largest, undecided


class Generation:
    """What a prompt was continued with.

    prompt_ids   the ids given, pads left out           new_ids   the new ones, with the id that ended the text
    ids      both, one behind the other
    text     the new text, special tokens left out and cut before a stop string; None without a tokenizer
    finish   why it ended, in words                     steps     calls of the model
    logits   [new, vocab] when asked for, else None; float32, by the profile fp64 float64
    logprobs         `Logprobs` when asked for, else None
    masked           int64 [n]: logit rows that could not be drawn, because no token belongs to them
    masked_mass      the largest probability the model gave them at any token; a right model gives them next to none
    margins          float64 [new]: how far apart the two largest logits were, before any penalty or cut

    From a 2-D input every field but `steps` is a list with one entry per row, and `rows` are the rows alone.
    """

    def __init__(self, rows, steps, single):
        self.rows = rows
        self.steps = steps
        self._single = single

    prompt_ids = property(lambda self: self._field("prompt_ids"))
    ids = property(lambda self: self._field("ids"))
    new_ids = property(lambda self: self._field("new_ids"))
    text = property(lambda self: self._field("text"))
    finish = property(lambda self: self._field("finish"))
    logits = property(lambda self: self._field("logits"))
    logprobs = property(lambda self: self._field("logprobs"))
    masked = property(lambda self: self._field("masked"))
    masked_mass = property(lambda self: self._field("masked_mass"))
    margins = property(lambda self: self._field("margins"))

    def undecided(self, dtype="bfloat16"):
        """int64 [n], ascending: the new tokens whose `margins` are below one unit in the last place of `dtype`.

        A greedy program with logits of that type may take either id there and be as right: where it parts from these
        ids, look for the first step that is not among these.  InputError for what is no floating-point type.
        """
        values = [row.undecided(dtype) for row in self.rows]
        return values[0] if self._single else values

    def parse(self, tools=None):
        """The `Answer` in each text: thinking, content and tool calls; `tools` as the prompt listed them."""
        values = [row.parse(tools) for row in self.rows]
        return values[0] if self._single else values

    def _field(self, name):
        values = [getattr(row, name) for row in self.rows]
        return values[0] if self._single else values

    def tokens(self):
        """Prompt and new tokens with their ids under them, to be looked at."""
        return Tokens(self.rows[:8])

    def __repr__(self):
        head = f"Generation · {self.steps:,} step" + ("" if self.steps == 1 else "s")
        if not self._single:
            head += f" · {len(self.rows)} rows"
        shown = self.rows[:8]
        lines = [line for row in shown for line in row.lines(38 // len(shown))]
        return plain("\n".join([head, *lines, *([f"… {len(self.rows) - 8} more rows"] * (len(self.rows) > 8))]))

    def _repr_html_(self):
        return shown_as_html(lambda out: generation_html(out, self._single), self, "Generation")


class Row:
    """One row of a `Generation`: the same fields, flat."""

    def __init__(self, prompt_ids, tokenizer, stop, streamer, vocab, recorder):
        self.prompt_ids, self.new_ids = prompt_ids, []
        self.masked, self.masked_mass = np.empty(0, np.int64), 0.0
        self.recorder = recorder
        self.finish = None
        self._largest = []  # the two largest logits of each step
        self.tokenizer, self._stop = tokenizer, stop
        self._logits = [np.empty((0, vocab), np.float32)] if vocab else None
        self._text = None if tokenizer is None else _Text(tokenizer, stop.texts, streamer)

    @property
    def ids(self):
        return self.prompt_ids + self.new_ids

    @property
    def text(self):
        return None if self._text is None else self._text.shown

    @property
    def logits(self):
        return None if self._logits is None else np.concatenate(self._logits)

    @property
    def logprobs(self):
        return None if self.recorder is None else self.recorder.result(self.tokenizer)

    @property
    def margins(self):
        return np.array([first - second for first, second in self._largest], np.float64)

    def undecided(self, dtype="bfloat16"):
        return undecided(self._largest, dtype)

    def parse(self, tools=None):
        """The `Answer` in the new text, read with its special tokens; see `qwenref.parse`."""
        if self.tokenizer is None:
            raise CapabilityMissing(compose("parse: an answer needs a tokenizer", do="open the model from its folder"))
        ids = self.new_ids[:-1] if self.new_ids[-1:] and self.new_ids[-1] in self._stop.ids else self.new_ids
        text = self.tokenizer.decode(ids)
        cut = min((at for stop in self._stop.texts if (at := text.find(stop)) >= 0), default=len(text))
        return parse(text[:cut], tools, opens_thinking(self.tokenizer.decode(self.prompt_ids)))

    def take(self, id, logits, distribution):
        """One more id, and what it was drawn from; sets `finish` when it ends the text."""
        self.new_ids.append(id)
        self._largest.append(two_largest(logits))
        if distribution is not None:
            self.masked = distribution.masked
            self.masked_mass = max(self.masked_mass, distribution.masked_mass)
        if self.recorder is not None:
            self.recorder.take(
                id, logits, np.eye(1, len(logits), id)[0] if distribution is None else distribution.probs
            )
        if self._logits is not None:
            self._logits.append(logits[None].copy())
        hit = self._text.put(id) if self._text is not None else None
        if id in self._stop.ids:
            name = f"{self.tokenizer.token_text(id)} " if self.tokenizer is not None else ""
            self.finish = f"stop token {name}{id}"
        elif hit is not None:
            self.finish = f"stop string {hit!r}"

    def end(self, finish=None):
        hit = self._text.flush() if self._text is not None else None
        self.finish = self.finish or (finish if hit is None else f"stop string {hit!r}")

    def headline(self):
        """How much there is and why it ended; more lines where logit rows were masked or the largest logits equal."""
        tokens = f"{len(self.new_ids):,} new token" + ("" if len(self.new_ids) == 1 else "s")
        head = f"{tokens} after {len(self.prompt_ids):,} · ended by {self.finish}"
        if len(self.masked):
            head += (
                f"\n{len(self.masked):,} logit rows without a token masked, {self.masked_mass:.2g} of the probability"
            )
        ties = np.flatnonzero(self.margins == 0)
        if len(ties):
            more = f", … {len(ties) - 5:,} more" if len(ties) > 5 else ""
            head += f"\nthe two largest logits are equal at new token {', '.join(map(str, ties[:5]))}{more}"
        return head

    def lines(self, limit=16):
        """At most so many lines: the headline, the end of the prompt, and the new text behind `▏`."""
        head = self.headline().split("\n")
        if self.tokenizer is None:
            return [*head, f"▏{self.new_ids[:24]}" + (" …" if len(self.new_ids) > 24 else "")][:limit]
        room = max(1, limit - len(head) - 1)
        prompt = _last_lines(self.tokenizer.decode(self.prompt_ids), min(3, room // 4)) if room >= 4 else []
        new, room = self.text.splitlines(), max(1, min(12, room - len(prompt)))
        more = [f"… {len(new) - room} more lines: .text"] if len(new) > room else []
        return [harmless(line) for line in [*head, *prompt, *(f"▏{line}" for line in new[:room]), *more][:limit]]

    def __repr__(self):
        return plain("\n".join(self.lines()))

    def _repr_html_(self):
        return shown_as_html(row_html, self, "Row")


# Text


class _Text:
    """The text of one row as it grows: whole characters, and nothing that may yet turn out to begin a stop string."""

    def __init__(self, tokenizer, stops, streamer):
        self._stream = tokenizer.stream(skip_special_tokens=True)
        self._stops, self._emit = stops, getattr(streamer, "put", streamer)
        self._pieces, self._held, self._ended = [], "", False

    @property
    def shown(self):
        return "".join(self._pieces)

    def put(self, id):
        """The stop string that this id completes, or None."""
        self._held += self._stream.put(id)
        return self._advance()

    def flush(self):
        """Let out what was held back; called once, at the end.  A stop string that broken bytes complete, or None."""
        hit = None
        if not self._ended:
            self._held += self._stream.flush()
            hit = self._advance()
            self._show(len(self._held))
        return hit

    def _advance(self):
        found = [(at, text) for text in self._stops if (at := self._held.find(text)) >= 0]
        if found:
            at, text = min(found)
            self._show(at)
            self._held, self._ended = "", True
            return text
        self._show(len(self._held) - max((_overlap(self._held, text) for text in self._stops), default=0))
        return None

    def _show(self, count):
        piece, self._held = self._held[:count], self._held[count:]
        if piece:
            self._pieces.append(piece)
            if self._emit is not None:
                self._emit(piece)


def _overlap(text, stop):
    """Length of the longest end of `text` that begins `stop`, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _last_lines(text, limit):
    lines = text.splitlines()
    left = len(lines) - limit
    return [f"… {left:,} line{'s' * (left > 1)} before", *lines[-limit:]] if left > 0 else lines
