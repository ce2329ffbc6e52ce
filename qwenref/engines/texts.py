"""What servers share that take text and answer in text: tiers C and D, with and without log-probabilities."""

import functools
from typing import NamedTuple

from qwenref.compare.errors import EngineRejected
from qwenref.engines.base import Capabilities, Completion
from qwenref.engines.served import WRONG, Served
from qwenref.engines.spelled import Spelling, as_text
from qwenref.errors import CapabilityMissing, InputError, compose


class Said(NamedTuple):
    """What an adapter reads out of an answer."""

    text: str
    entries: list | None  # `Field`s {token, bytes, logprob, top_logprobs} of each token; None where there are none
    finish: str
    prompt_count: int | None = None  # ids of the prompt, as the server counts them
    cached: int | None = None


class TextServed(Served):
    """Base of these engines.  An adapter adds `say(prompt, n, k, sampling) -> Said`; prompt: text, or messages.

    Log-probabilities come as tokens in text: rows need a `tokenizer`, without which there are none.
    """

    MOST = 20  # log-probabilities a position, by the engine's form
    PROBE = "Hello, how are you?"  # several ids: a server of vLLM on a CPU ends at a prompt of one
    messages = False  # whether `generate` takes a conversation in place of a prompt

    def say(self, prompt, n, k, sampling):
        raise NotImplementedError

    def probed(self):
        """Tier C where one token comes with log-probabilities that can be read as ids, else D."""
        most = 0
        if self.tokenizer is not None:
            try:
                most = self.MOST if any(self.try_out(self.MOST).rows) else 0
            except WRONG:
                most = self.MOST
            except EngineRejected as error:
                if error.status not in (400, 422):
                    raise
        kind = {False: "raw", True: "processed"}.get(self.follows_temperature, "unknown") if most else "unknown"
        return Capabilities(output_logprobs=most, config=True, kind=kind)

    def try_out(self, k, sampling=None):
        return self._completion(None, self.PROBE, 1, k, sampling)

    def generate(self, prompt, n, k, sampling=None):
        """`Completion` of a text, of ids whose text tokenises back to them, or of messages where the server chats.

        `output_ids` are those that the tokens' bytes stand for, None where one of them stands for none.
        """
        k = self.count(k, self.capabilities().output_logprobs, "generate") if k else 0
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if not self.messages:
                raise CapabilityMissing(compose(f"{self.name}: no conversations", do="render it, and give the text"))
            return self._completion(None, prompt, n, k, sampling)
        ids, text = as_text(self, prompt, "generate")
        return self._completion(ids, text, n, k, sampling)

    def _completion(self, ids, prompt, n, k, sampling):
        said = self.say(prompt, n, k, sampling)
        if ids is not None and said.prompt_count is not None:
            self.same_prompt(said.prompt_count, ids)
        entries = said.entries or []
        if entries and said.finish == "stop" and _is_nothing(entries[-1]):
            entries = entries[:-1]  # the end token, which has no text: which of them it was is not told
        rows = self._spelling.rows(entries, k) if k and self.tokenizer else []
        whole = bool(rows) and None not in rows
        output = self.new_ids([row.chosen for row in rows], n) if whole else None
        stop_id = output[-1] if output and said.finish == "stop" and output[-1] in self._stops else None
        meta = {"cached_tokens": said.cached, "batch": None, "unread_tokens": sum(row is None for row in rows)}
        return Completion(ids, output, said.text, said.finish, rows, stop_id, meta)

    @functools.cached_property
    def _spelling(self):
        return Spelling(self.tokenizer)

    @functools.cached_property
    def _stops(self):
        from qwenref.tokenizer import find_stop_ids

        return find_stop_ids(self.tokenizer.folder).ids


def _is_nothing(entry):
    return not entry["token"].text() and not entry.get("bytes").value


def messages_of(prompt):
    """Messages as they are; a text as what a user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def text_of(prompt, name):
    """A text as it is; InputError for messages."""
    if not isinstance(prompt, str):
        raise InputError(compose(f"{name}: this route takes text", found="messages", do='route="chat"'))
    return prompt
