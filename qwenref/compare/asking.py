"""An engine as a comparison asks it: what it raises has a name, and what it answers is looked at.

An engine may be any object.  What it raises is `EngineFailed`, errors of a comparison and CapabilityMissing aside;
an answer of another kind than `engines.base` has is EngineContractViolation; ids and numbers that are none are
BadTokenIds and BadLogprobs, as of the adapters.
"""

import contextlib
from collections.abc import Mapping

from qwenref.checks import as_whole, is_whole
from qwenref.compare.document import plain_values
from qwenref.compare.errors import CompareError, EngineContractViolation, EngineFailed, EngineRejected, NotRecorded
from qwenref.compare.scoring import SMALL
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Completion, Prompt, Row, Scores
from qwenref.engines.refusals import line
from qwenref.errors import CapabilityMissing, InputError, QwenrefError, a_kind, compose

LISTED = 20  # log-probabilities asked for at a position of a large vocabulary
FINISHES = ("stop", "length", "cancelled", "unknown")
KINDS = ("raw", "processed", "unknown")
# What `config()` may say, by the kind of value that the comparison reads it as.
_TEXTS = ("name", "version", "backend", "dtype", "quant", "kv_dtype", "state_dtype", "url")
_OBJECTS = ("flags", "defaults", "model")


# What ends one request and not the comparison; an engine that cannot be reached is not asked again.
ONE = (EngineContractViolation, EngineFailed, CapabilityMissing)


class Asked:
    """An engine behind the checks, with the same methods; `vocab` is how many ids the reference has.

    `.complaints` are pairs (code, words) of what `config()` says and cannot mean: that is left out of its answer.
    """

    def __init__(self, engine, vocab):
        self._engine, self._vocab, self._rows = engine, vocab, vocab
        name = getattr(engine, "name", None)
        self.name = name if isinstance(name, str) and name else type(engine).__name__
        self.asks_again = bool(getattr(engine, "asks_again", True))
        self.complaints, self._said = [], None

    @property
    def prefix_cache(self):
        return bool(getattr(self._engine, "prefix_cache", False))

    @prefix_cache.setter
    def prefix_cache(self, on):
        self._engine.prefix_cache = on

    @property
    def together(self):
        """The engine's own `together(count)`, a span in which so many requests may be under way; None without."""
        return getattr(self._engine, "together", None)

    def capabilities(self):
        """Capabilities; InputError where they are none."""
        with self._running("capabilities", QwenrefError):
            found = self._engine.capabilities()
        where = f"{self.name}: capabilities"
        if not isinstance(found, Capabilities):
            raise InputError(compose(where, found=_kind(found), expected="qwenref.engines.Capabilities"))
        for name in ("output_logprobs", "prompt_logprobs"):
            most = getattr(found, name)
            if most != ALL and not (is_whole(most) and most >= 0):
                expected = '0, the most per position, or "all"'
                raise InputError(compose(f"{where}: {name}", found=line(repr(most), 60), expected=expected))
        if found.kind not in KINDS:
            expected = ", ".join(KINDS)
            raise InputError(compose(f"{where}: kind", found=line(repr(found.kind), 60), expected=expected))
        return found

    def config(self):
        """What it says of itself, asked once: plain values, and of those that have a meaning here only what has it."""
        if self._said is None:
            self._said = {}
            try:
                with self._running("config", QwenrefError):
                    found = self._engine.config()
                self._said = self._meant(found)
            except EngineFailed as error:
                self.complaints.append((error.code, str(error).partition("\n")[0]))
            self._rows = max(self._vocab, self._said.get("vocab_size") or 0)
        return dict(self._said)

    def _meant(self, found):
        if not isinstance(found, Mapping):
            if found is not None:
                self._complain("", found, "an object")
            return {}
        with self._running("config"):
            said = plain_values(dict(found))
        for name, value in list(said.items()):
            meant = _meaning(name, value)
            if value is not None and meant is None:
                self._complain(f": {name}", found.get(name), _EXPECTED[name])
            said[name] = meant
        return said

    def _complain(self, what, found, expected):
        words = f"config{what} is {line(repr(found), 60)}, not {expected}: taken as unknown"
        self.complaints.append((EngineContractViolation.code, words))

    def tokenize(self, text):
        with self._running("tokenize"):
            found = self._engine.tokenize(text)
            found = list(found) if found is not None else found
        return checked.ids(found, self._vocab, where=f"{self.name}: tokenize", some=False)

    def render(self, messages, **options):
        where = f"{self.name}: render"
        with self._running("render"):
            found = self._engine.render(messages, **options)
        _same_kind(found, Prompt, where)
        ids = None if found.ids is None else checked.ids(found.ids, self._vocab, where=where, some=False)
        return Prompt(_text(found.text, where), ids)

    def score(self, ids, k):
        where = f"{self.name}: score"
        with self._running("score"):
            found = self._engine.score(ids, k)
        _same_kind(found, Scores, where)
        read = checked.ids(found.ids, self._vocab, where=where)
        rows = self._checked(found.rows, [*read[1:], None], where)
        if len(rows) != len(read):
            raise EngineContractViolation(
                compose(f"{where}: rows", found=f"{len(rows):,}", expected=f"{len(read):,}, one behind each id")
            )
        return Scores(read, rows)

    def generate(self, prompt, n, k, sampling=None):
        where = f"{self.name}: generate"
        with self._running("generate"):
            found = self._engine.generate(prompt, n, k, *(() if sampling is None else (sampling,)))
        _same_kind(found, Completion, where)
        read = None if found.prompt_ids is None else checked.ids(found.prompt_ids, self._vocab, where=where, some=False)
        output = None
        if found.output_ids is not None:
            output = checked.ids(found.output_ids, self._vocab, where=f"{where}: output", some=False)
            if len(output) > n:
                raise EngineContractViolation(
                    compose(f"{where}: more tokens than were asked for", found=f"{len(output):,}", expected=f"{n:,}")
                )
        rows = self._checked(() if found.rows is None else found.rows, output, where)
        stop = found.stop_id
        if stop is not None:
            [stop] = checked.ids([stop], self._vocab, where=f"{where}: stop_id")
        finish = found.finish if found.finish in FINISHES else "unknown"
        return Completion(read, output, _text(found.text, where), finish, rows, stop, _meta(found.meta, where))

    def _checked(self, rows, following, where):
        """Rows, None among them; `following` are the ids that come behind each, None where they are not known."""
        try:
            rows = list(rows)
        except TypeError:
            raise EngineContractViolation(compose(f"{where}: rows", found=_kind(rows), expected="a list")) from None
        if following is not None and len(rows) > len(following):
            found, expected = f"{len(rows):,}", f"{len(following):,} at most, one per id"
            raise EngineContractViolation(compose(f"{where}: rows", found=found, expected=expected))
        return [
            None if row is None else self._row(row, None if following is None else following[t], f"{where}, row {t}")
            for t, row in enumerate(rows)
        ]

    def _row(self, row, following, where):
        """A Row of the reference's ids; what padding rows of a larger vocabulary were given is left out."""
        _same_kind(row, Row, where)
        row = checked.row(row.ids, row.logprobs, self._rows, where, row.chosen, row.chosen_logprob)
        if row.chosen is not None and following is not None and row.chosen != following:
            raise EngineContractViolation(
                compose(f"{where}: of another id than follows", found=f"{row.chosen:,}", expected=f"{following:,}")
            )
        if self._rows == self._vocab:
            return row
        known = row.ids < self._vocab
        return row._replace(ids=row.ids[known], logprobs=row.logprobs[known])

    @contextlib.contextmanager
    def _running(self, what, let=(CompareError, CapabilityMissing)):
        """What is raised inside and not to be `let` pass, as EngineFailed."""
        try:
            yield
        except let:
            raise
        except Exception as error:  # engines have no class in common
            said = f"{type(error).__name__}: {line(str(error), 400)}".removesuffix(": ")
            raise EngineFailed(compose(f"{self.name}: {what} failed with {said}")) from error


def _meaning(name, value):
    """A plain value as its name wants it, None where it cannot be."""
    if name in _TEXTS:
        return None if isinstance(value, (dict, list, bool)) or value is None else str(value).removeprefix("torch.")
    if name in _OBJECTS:
        return value if isinstance(value, dict) else {} if value is None else None
    if name in ("vocab_size", "tp"):
        return value if is_whole(value) and value > 0 else None
    if name == "stop_ids":
        values = [value] if is_whole(value) else value
        return values if isinstance(values, list) and all(map(is_whole, values)) else None
    return value


_EXPECTED = {
    **dict.fromkeys(_TEXTS, "a text"), **dict.fromkeys(_OBJECTS, "an object"),
    **dict.fromkeys(("vocab_size", "tp"), "a whole number above 0"), "stop_ids": "a list of ids",
}  # fmt: skip


def _same_kind(found, kind, where):
    if not isinstance(found, kind):
        raise EngineContractViolation(compose(where, found=_kind(found), expected=f"qwenref.engines.{kind.__name__}"))


def _kind(found):
    return "nothing" if found is None else a_kind(found)


def _text(found, where):
    """A text that UTF-8 can hold, or None."""
    if found is None:
        return None
    if not isinstance(found, str) or any("\ud800" <= c <= "\udfff" for c in found):
        found = "half of a surrogate pair" if isinstance(found, str) else _kind(found)
        raise EngineContractViolation(compose(f"{where}: text", found=found, expected="text that UTF-8 can hold"))
    return found


def _meta(found, where):
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise EngineContractViolation(compose(f"{where}: meta", found=_kind(found), expected="an object"))
    cached = found.get("cached_tokens")
    return {**found, "cached_tokens": None if cached is None else as_whole(cached)}


# ---- one request of a comparison ---------------------------------------------------------------------------------


def request(item, seen):
    """What a prompt is sent as: ids, its text to an engine that takes no ids, None where there is none."""
    return list(item.ids) if seen.gives.ids_in else item.text


def listed(vocab, limit):
    """How many log-probabilities to ask for where an engine gives at most `limit`."""
    if limit == ALL:
        return ALL if vocab <= SMALL else LISTED
    return min(limit, vocab, LISTED)


def kept(seen, item, ask):
    """What `ask` gives; None where the engine failed or broke its contract, or a run lacks it: a finding."""
    try:
        return ask()
    except NotRecorded as error:
        seen.find("not-recorded", "info", f"prompt {item.id}: {first_line(error)}")
        return None
    except EngineContractViolation as error:
        seen.find("engine-contract", "error", f"prompt {item.id}: {first_line(error)}", {"said": str(error)})
        return None
    except ONE as error:
        if isinstance(error, (EngineFailed, EngineRejected)):
            seen.failed = seen.failed or error
        seen.find(error.code, "error", f"prompt {item.id}: {first_line(error)}", {"said": str(error)})
        return None


def first_line(error):
    return str(error).partition("\n")[0]
