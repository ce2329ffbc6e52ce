"""Log-probabilities that come as tokens in text or bytes, and not as ids: read back into ids, or left out."""

import functools
import math

from qwenref.engines import checked
from qwenref.engines.served import row_of, with_own
from qwenref.engines.stepping import lacks

NO_CHARACTER = "\ufffd"


class Spelling:
    """Which id a token stands for, by the bytes of every token of a `qwenref` tokenizer."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    @functools.cached_property
    def _ids(self):
        """{bytes: id}; None where two tokens have the same bytes."""
        tokenizer, found = self._tokenizer, {}
        missing = set(tokenizer.ids_without_token(len(tokenizer)).tolist())
        for id in range(len(tokenizer)):
            if id not in missing:
                spelled = tokenizer.token_bytes(id)
                found[spelled] = None if spelled in found else id
        return found

    def id(self, entry):
        """The id of an entry {token, bytes}; None where its bytes are not known, or are those of no token or of two.

        `bytes` may be left out or null, and so may `token` be cut at half a character: then only bytes tell.
        """
        spelled = entry.get("bytes").value
        if spelled:
            spelled = bytes(item.whole(0, 255) for item in entry["bytes"].items())
        else:
            text = entry["token"].text()
            spelled = text.encode() if NO_CHARACTER not in text else None
        return self._ids.get(spelled) if spelled else None

    def rows(self, entries, k):
        """Rows of entries {token, bytes, logprob, top_logprobs: [the same]}; None for a token of no known id."""
        return [self._row(entry, k) for entry in entries]

    def _row(self, entry, k):
        chosen = self.id(entry)
        if chosen is None:
            entry["logprob"].logprob()
            return None
        values = {}
        for other in entry.get("top_logprobs").items() if "top_logprobs" in entry else []:
            id, value = self.id(other), other["logprob"].logprob()
            if id is not None:
                if id in values:
                    raise other.wrong(f"the token of id {id:,} a second time", "every token once")
                values[id] = value
        if entry["logprob"].logprob() == -math.inf:  # in OpenAI's form: outside of what was looked at
            values.pop(chosen, None)
        else:
            values = with_own(values, chosen, entry["logprob"])
        return row_of(values, max(k, 1), None, entry.place, chosen)


def as_text(engine, prompt, what):
    """(ids or None, text) of a prompt for a server that takes text: of ids the text that tokenises back to them."""
    if isinstance(prompt, str):
        return (engine.tokenizer.encode(prompt) if engine.tokenizer else None), prompt
    ids = checked.ids(prompt, where=f"{engine.name}: {what}")
    if engine.tokenizer is None:
        raise lacks(engine.name, f"{what} of ids", "it takes text; a tokenizer turns ids into it: tokenizer=FOLDER")
    text = engine.tokenizer.decode(ids)
    again = engine.tokenizer.encode(text)
    if again != ids:
        why = f"it takes text, and that of these {len(ids):,} ids tokenises to {len(again):,} others"
        raise lacks(engine.name, f"{what} of these ids", why)
    return ids, text
