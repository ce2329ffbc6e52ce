"""What engines behind a server share: how a request is spelled, how much an answer may weigh, what is read the same."""

import functools
import re

import numpy as np

from qwenref.checks import is_whole
from qwenref.compare.errors import BadLogprobs, BadTokenIds, EngineContractViolation, EngineRejected
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Closing, Row
from qwenref.engines.http import SMALL, Client
from qwenref.engines.stepping import SAMPLING, lacks, named
from qwenref.errors import CapabilityMissing, InputError, compose

ENTRY = 400  # bytes that one log-probability may take: id, number, the token as text and in bytes
SAME = 1e-3  # two ways in which an engine writes one log-probability differ by rounding alone
ROUNDING = 1e-6  # what the order of a list may be off by
SAME_NAMES = {name: name for name in SAMPLING}  # of an engine that spells sampling as a request here does
UNBOUNDED = 1 << 16  # log-probabilities a position, where the server has no bound and does not tell its vocabulary

WRONG = (BadLogprobs, BadTokenIds, EngineContractViolation)  # of what answers a probe: real prompts will show it


class Served(Closing):
    """Base of engines over HTTP.  An adapter says what its server gives, spells requests and reads answers.

    model        the name the server knows its model by, asked of /v1/models without
    vocab        logit rows: ids outside of them are a breach of contract; asked of the server where it says so
    tokenizer    a `qwenref` tokenizer, or a folder with one, for servers that give tokens as text alone
    key, key_env, deadline, at_once, certificates   of `http.Client`
    """

    kind = None  # as in `engines.ADAPTERS`
    NEUTRAL = {}  # the fields of greedy decoding without any penalty or cut, as this engine spells them
    SPELLED = {}  # names of `stepping.SAMPLING` -> this engine's
    OPTIONAL = ()  # fields a server may not know and can do without
    PROBE = [0, 1, 2, 3]  # a prompt to try things with

    def __init__(self, address, *, model=None, vocab=None, tokenizer=None, **options):
        self.client = Client(_with_scheme(address), **options)
        self.vocab, self._model, self._tokenizer = vocab, model, tokenizer
        self.name = f"{self.kind} {self.client.url}"

    def together(self, count):
        """A span in which `count` requests may be under way at once, for a test of repeatability in a batch."""
        return self.client.together(count)

    @functools.cached_property
    def model(self):
        """The name the server knows its model by; of several, the caller has to name one."""
        if self._model is not None:
            return self._model
        names = [item["id"].text() for item in self.client.get("/v1/models")["data"].items()]
        if len(names) != 1:
            raise InputError(
                compose(f"{self.name}: which model", found=", ".join(names[:8]) or "none", do="name it: model=...")
            )
        return names[0]

    def capabilities(self):
        return self._capabilities

    @functools.cached_property
    def _capabilities(self):
        return self.probed()

    def probed(self):
        """`Capabilities` by what this server says and does; an adapter's."""
        return Capabilities()

    def tokenize(self, text):
        raise lacks(self.name, "tokenizer")

    def render(self, messages, **options):
        raise lacks(self.name, "rendering of a conversation")

    def score(self, ids, k):
        raise lacks(self.name, "log-probabilities of a prompt")

    def activations(self, ids, sites):
        raise lacks(self.name, "activations")

    def config(self):
        """What the server says of itself, by the names of a run's header."""
        return {
            "name": self.kind.partition("+")[0], "version": None, "backend": None, "dtype": None, "quant": None,
            "kv_dtype": None, "state_dtype": None, "tp": None, "flags": {}, "vocab_size": self.vocab, "stop_ids": None,
            "defaults": {}, "model": {"id": self.model}, "url": self.client.url,
            "refused_fields": sorted(self.client.dropped),
        }  # fmt: skip

    def close(self):
        self.client.close()

    # For adapters

    def count(self, k, most, what):
        """How many log-probabilities a position gets: CapabilityMissing where the server gives fewer."""
        k = checked.count(k, f"{self.name}: {what}")
        if most != ALL and (k == ALL or k > most):
            raise lacks(self.name, f"{k} log-probabilities a position", f"{most} at most")
        return k

    def sampling(self, request):
        """The fields of `NEUTRAL`, changed by what is asked for, as this engine spells it."""
        fields = dict(self.NEUTRAL)
        for name, value in named(request, self.name).items():
            if name not in self.SPELLED:
                raise lacks(self.name, f"sampling with {name}")
            if value is not None:
                fields[self.SPELLED[name]] = value
        return fields

    def room(self, positions, k):
        """The most bytes an answer about so many positions may have, k log-probabilities each."""
        per = (self.vocab or 1 << 18) if k == ALL else k
        return SMALL + positions * (per + 2) * ENTRY

    def new_ids(self, output, n):
        """Checks that no more came than was asked for."""
        if len(output) > n:
            raise EngineContractViolation(
                compose(f"{self.name}: more tokens than were asked for", found=f"{len(output):,}", expected=f"{n:,}")
            )
        return output

    def ids_of(self, prompt, what):
        """The ids of a prompt, None of a text."""
        return None if isinstance(prompt, str) else checked.ids(prompt, self.vocab, where=f"{self.name}: {what}")

    def same_prompt(self, read, sent):
        """EngineContractViolation where the server read another prompt, or another number of ids, than it was sent."""
        same = read == len(sent) if is_whole(read) else read == list(sent)
        if not same:
            found, expected = (read, len(sent)) if is_whole(read) else (len(read), len(sent))
            at = "" if is_whole(read) else f"; the first that differs: {_first_difference(read, sent)}"
            raise EngineContractViolation(
                compose(
                    f"{self.name}: read another prompt than it was sent",
                    found=f"{found:,} ids{at}",
                    expected=f"{expected:,} ids, as they were",
                    do="turn off what adds or cuts tokens: BOS, templates, a short context",
                )
            )

    def try_out(self, k, sampling=None):
        """`Completion` of one token behind `PROBE`."""
        return self.generate(self.PROBE, 1, k, sampling)

    @functools.cached_property
    def follows_temperature(self):
        """Whether the log-probabilities change with the temperature: of what is drawn from, not of softmax(logits).

        Found by asking for one token at two temperatures.  None where the server does not take the question.
        """
        try:
            one, two = (self.try_out(2, {"temperature": t, "seed": 0}).rows for t in (1.0, 2.0))
        except WRONG:
            return None
        except (EngineRejected, CapabilityMissing) as error:
            if getattr(error, "status", 400) not in (400, 422):
                raise
            return None
        if not one or not two or None in (one[0], two[0]) or len(one[0].ids) < 2 or len(two[0].ids) < 2:
            return None
        if one[0].ids[:2].tolist() != two[0].ids[:2].tolist():
            return None
        first, second = (float(rows[0].logprobs[0] - rows[0].logprobs[1]) for rows in (one, two))
        return abs(first - second) > 0.25 * abs(first)

    @functools.cached_property
    def tokenizer(self):
        """The tokenizer that was given, opened where it is a folder; None without."""
        if self._tokenizer is None or hasattr(self._tokenizer, "token_id"):
            return self._tokenizer
        from qwenref.hub import resolve
        from qwenref.tokenizer import Tokenizer

        return Tokenizer(resolve(self._tokenizer))


def dense_rows(rows, vocab):
    """float32 [n, vocab] of rows that hold every id, or None."""
    if not rows or any(row is None or len(row.ids) != vocab for row in rows):
        return None
    found = np.empty((len(rows), vocab), np.float32)
    for values, row in zip(found, rows, strict=True):
        values[row.ids] = row.logprobs
    return found


def table(pairs, where):
    """{id: log-probability} of pairs; an id twice is a breach of contract."""
    found = {}
    for id, value in pairs:
        if id in found:
            raise EngineContractViolation(compose(f"{where}: an id twice", found=f"id {id:,}"))
        found[id] = value
    return found


def listed(pairs, where):
    """`table` of a list that has the likeliest first; BadLogprobs where it has not."""
    found = table(pairs, where)
    values = list(found.values())
    for before, value in zip(values, values[1:], strict=False):
        if value > before + ROUNDING:
            raise BadLogprobs(
                compose(
                    f"{where}: out of order", found=f"{before:.9g}, then {value:.9g}", expected="the likeliest first"
                )
            )
    return found


def with_own(values, id, own):
    """{id: log-probability} with the chosen id's, a `Field`; one that is in it already has to be the same."""
    value = own.logprob()
    if abs(values.setdefault(id, value) - value) > SAME:
        raise own.wrong(f"{value:.9g}", f"{values[id]:.9g}, as in the list of the likeliest")
    return values


def row_of(values, k, vocab, where, chosen=None):
    """`Row` of {id: log-probability}: the k likeliest, and the value of the chosen id, which may be on top of them."""
    row = checked.row_of(values, vocab, where, chosen)
    if k != ALL and len(row.ids) > k:
        keep = row.ids != chosen if row.ids[k:].tolist() == [chosen] else slice(0, k)
        row = Row(row.ids[keep], row.logprobs[keep], row.chosen, row.chosen_logprob)
    return row


def row_with(pairs, own, k, vocab, where, chosen):
    """`Row` of a list of (id, log-probability), the likeliest first, and the chosen id's own value, a `Field`."""
    return row_of(with_own(listed(pairs, where), chosen, own), k, vocab, where, chosen)


def most_allowed(error):
    """The bound that a server named when it was asked for too much; None where it named none."""
    said = str(error).partition("HTTP ")[2]
    found = re.search(r"(?:max(?:imum)?[^0-9]{0,40}?|<= ?|less than or equal to )(\d{1,9})\b", said, re.I)
    return int(found[1]) if found else None


def _first_difference(read, sent):
    at = next((i for i, (a, b) in enumerate(zip(read, sent, strict=False)) if a != b), min(len(read), len(sent)))
    return f"id {at} is {read[at] if at < len(read) else 'missing'}"


def _with_scheme(address):
    """An address as people write it behind `vllm+http:`: "http://host:port", "//host:port" or "host:port"."""
    if not isinstance(address, str) or "://" in address:
        return address
    return "http://" + address.removeprefix("//")
