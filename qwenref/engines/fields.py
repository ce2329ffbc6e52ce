"""An answer in JSON, read field by field: what is missing or of another kind is an error that says where."""

import json
import math

from qwenref.checks import is_whole
from qwenref.compare.errors import BadLogprobs, EngineContractViolation, EngineRejected
from qwenref.engines.refusals import line
from qwenref.errors import a_kind, compose

LARGEST = 1 << 53  # of a whole number: JSON promises no more
NOTHING = -9999  # and below: how vLLM and OpenAI's form write minus infinity; llama.cpp writes the least float32


def read(raw, asked, kind, hide=lambda text: text):
    """The `Field` of a body: JSON in UTF-8, every name once in its object, no deeper than Python's own limit.

    NaN and infinities, which no JSON has and engines write nevertheless, are refused where they are used, so that the
    error of a log-probability says which position it is of.
    """
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=named_once)
    except UnicodeDecodeError as error:
        raise _no_json(asked, kind, f"byte {error.start:,} is no UTF-8") from None
    except Twice as error:
        raise EngineContractViolation(
            compose(f"{asked}: an answer with the same name twice in one object", found=line(repr(error.args[0])))
        ) from None
    except RecursionError:
        raise _no_json(asked, kind, "brackets nested too deep") from None
    except ValueError as error:
        page = hide(line(raw[:400].decode("utf-8", "replace"), 120))
        raise _no_json(asked, kind, f"{line(str(error))}: {page!r}") from None
    return Field(value, "", asked)


def _no_json(asked, kind, found):
    error = EngineRejected(
        compose(
            f"{asked}: the answer is no JSON",
            found=found + (f" ({line(kind, 60)})" if kind else ""),
            expected="a JSON object in UTF-8",
            do="look whether this address is that of the engine named",
        )
    )
    error.status = 200
    return error


class Twice(Exception):
    """A name twice in one JSON object."""


def named_once(pairs):
    """The dict of a JSON object whose names are all different; `Twice` names the first that is not."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        raise Twice(next(name for name, _ in pairs if name in seen or seen.add(name)))
    return found


class Field:
    """A value in an answer, with its place in it.  `in` asks whether an object has a name with a value."""

    __slots__ = ("value", "where", "asked")

    def __init__(self, value, where, asked):
        self.value, self.where, self.asked = value, where, asked

    def __getitem__(self, key):
        if isinstance(key, int):
            items = self._of(list, "a list")
            if not -len(items) <= key < len(items):
                raise self.wrong(f"a list of {len(items)}", f"an item {key}")
            return Field(items[key], f"{self.where}[{key}]", self.asked)
        inside = self._of(dict, "an object")
        if inside.get(key) is None:
            there = ", ".join(line(str(name), 30) for name in list(inside)[:8])
            raise self.wrong(f"an object with {there}" if there else "an empty object", f"a field {key}")
        return Field(inside[key], f"{self.where}.{key}" if self.where else key, self.asked)

    def __contains__(self, key):
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def get(self, key):
        """The field, or one whose value is None."""
        return self[key] if key in self else Field(None, f"{self.where}.{key}" if self.where else key, self.asked)

    def items(self):
        return [self[i] for i in range(len(self._of(list, "a list")))]

    def object(self):
        return self._of(dict, "an object")

    def text(self):
        """A text that UTF-8 can hold."""
        found = self._of(str, "a text")
        if any("\ud800" <= c <= "\udfff" for c in found):
            raise self.wrong("half of a surrogate pair", "text")
        return found

    def flag(self):
        return self._of(bool, "true or false")

    def whole(self, least=0, most=LARGEST):
        if not is_whole(self.value) or not least <= self.value <= most:
            raise self.wrong(_short(self.value), f"a whole number from {least:,} to {most:,}")
        return self.value

    def logprob(self):
        """A number that is no NaN and not plus infinity; what else log-probabilities must be, `checked` knows."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadLogprobs(compose(f"{self.place}: no log-probability", found=_short(value), expected="a number"))
        if abs(value) > LARGEST and value > 0 or value != value:
            raise BadLogprobs(compose(f"{self.place}: no log-probability", found=_short(value), expected="0 at most"))
        return float(value) if value > NOTHING else -math.inf

    def id(self, vocab=None):
        """A token id, below `vocab` where it is known."""
        return self.whole(0, LARGEST if vocab is None else vocab - 1)

    def ids(self, vocab=None):
        return [item.id(vocab) for item in self.items()]

    @property
    def place(self):
        return f"{self.asked}: {self.where or 'the answer'}"

    def wrong(self, found, expected):
        """The error of a value that is not what the engine's form says."""
        return EngineContractViolation(compose(self.place, found=found, expected=expected))

    def _of(self, kind, name):
        if not isinstance(self.value, kind):
            raise self.wrong("nothing" if self.value is None else a_kind(self.value), name)
        return self.value


def _short(value):
    if isinstance(value, (dict, list)):
        return a_kind(value)
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a whole number of many digits"
    return line(repr(value), 60)
