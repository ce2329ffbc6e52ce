"""A rendered prompt: its text, its ids, which of them came from where, and the first place where two prompts part."""

import bisect
import functools
import re
from typing import NamedTuple

from qwenref.errors import InputError, compose
from qwenref.text_display import (
    difference_html,
    difference_text,
    rendered_headline,
    rendered_html,
    rendered_text,
    shown_as_html,
    shown_as_text,
)


class Span(NamedTuple):
    """A stretch of a prompt: characters start:stop, ids first:last (last exclusive).

    message   index into the conversation, None where the template speaks for itself
    part      "content", "content[1].text", "reasoning_content", "tool_calls[0].name", "tool_calls[0].city": the text
              of the message; "frame": what the template puts around it; "tools[0]"; "tail": what follows the last
              message, and makes the model answer; "template": other text of the template
    """

    message: int | None
    part: str
    start: int
    stop: int
    first: int
    last: int


class _Pair(NamedTuple):
    text: str
    ids: list


class Rendered(_Pair):
    """A prompt: `text, ids = rendered`, and what is known about it.

    spans             list of `Span`: every character and every id in exactly one; an id across a border belongs to
                      the span of its first character
    tail              the exact text after the last message
    enable_thinking   True or False as it came out, None where the template's switch changes nothing in this prompt
    """

    def __new__(cls, text, ids, run=None, tokenizer=None):
        made = super().__new__(cls, text, ids)
        made._run, made.tokenizer = run, tokenizer
        return made

    def __reduce__(self):  # what was compiled stays behind: a copy in another process is text and ids
        return Rendered, (self.text, self.ids)

    @functools.cached_property
    def spans(self):
        return [] if self._run is None else template_spans(self._run, self.tokenizer)

    @property
    def tail(self):
        return "".join(self.text[span.start : span.stop] for span in self.spans if span.part == "tail")

    @functools.cached_property
    def enable_thinking(self):
        return None if self._run is None else self._run.effective_thinking()

    def ids_of(self, message, part=None):
        """The ids that came from a message, or from one part of it."""
        wanted = [span for span in self.spans if span.message == message and part in (None, span.part)]
        return [id for span in wanted for id in self.ids[span.first : span.last]]

    def to_dict(self):
        """All of it as JSON has it: text, ids, spans with the role of their message, tail, enable_thinking."""
        roles = [] if self._run is None else [message["role"] for message in self._run.values["messages"]]
        spans = [
            {"message": span.message, "role": None if span.message is None else roles[span.message]}
            | {name: getattr(span, name) for name in ("part", "start", "stop", "first", "last")}
            for span in self.spans
        ]
        return {
            "text": self.text,
            "ids": list(self.ids),
            "spans": spans,
            "tail": self.tail,
            "enable_thinking": self.enable_thinking,
        }

    def __repr__(self):
        return shown_as_text(rendered_headline, self, "Rendered")

    def __str__(self):
        return shown_as_text(rendered_text, self, "Rendered")

    def _repr_html_(self):
        return shown_as_html(rendered_html, self, "Rendered")


def render(tokenizer, messages, tools=None, **options):
    """`Rendered` of a conversation by a `Tokenizer`; the options of `ChatTemplate.render`."""
    run = tokenizer.chat_template(tools).run(messages, tools, **options)
    return Rendered(run.text, tokenizer.encode(run.text, add_special_tokens=False), run, tokenizer)


# Spans


def template_spans(run, tokenizer):
    """The spans of what a template made, every character in one of them."""
    pieces = run.template.pieces(run.values)
    whole = "".join(text for text, _, _ in pieces)
    if not whole.startswith(run.text):  # a template of clock or chance
        return with_ids([(None, "template", 0, len(run.text))], run.text, tokenizer)
    leaves = _leaves(run, whole)
    owned, at = [], 0
    for text, message, tool in pieces:
        inside = {leaf[0] for leaf in leaves if leaf[2] < at + len(text) and leaf[3] > at}
        if message is None and len(inside) == 1:
            message = inside.pop()
        part = "frame" if message is not None else "template" if tool is None else f"tools[{tool}]"
        owned.append((message, part, at, at + len(text)))
        at += len(text)
    last = max((i for i, row in enumerate(owned) if row[0] is not None), default=len(owned))
    owned[last + 1 :] = [(None, "tail", start, stop) for _, _, start, stop in owned[last + 1 :]]
    return with_ids(_overlaid(owned, leaves, len(run.text)), run.text, tokenizer)


def _overlaid(owned, leaves, length):
    """Stretches of the template with those of the messages laid over them, neighbours of one kind joined."""
    cuts = sorted({0, length, *(end for row in owned + leaves for end in row[2:] if end < length)})
    rows = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        covering = [row for row in leaves if row[2] <= start < row[3]] or [
            row for row in owned if row[2] <= start < row[3]
        ]
        message, part = covering[-1][:2]
        if rows and rows[-1][:2] == (message, part):
            start = rows.pop()[2]
        rows.append((message, part, start, stop))
    return rows


def with_ids(rows, text, tokenizer):
    """`Span`s of (message, part, start, stop) rows: which ids begin in each."""
    begins = tokenizer.encode_offsets(text, add_special_tokens=False)[1][:, 0].tolist()
    return [Span(*row, bisect.bisect_left(begins, row[2]), bisect.bisect_left(begins, row[3])) for row in rows]


# The texts of messages are found by rendering once more with marks set around them. Marks stand inside the outer
# blanks, which templates trim, and outside of tags, which templates look for; and what a marked rendering says counts
# only if it is the unmarked one with marks.
_MARKS = range(0x100000, 0x10FF00)
_TAGS = re.compile(r"(</?[a-z_]+>)")


def _leaves(run, whole):
    """[(message, part, start, stop)] in `whole`, in order."""
    if any(ord(character) in _MARKS for character in whole):
        return []
    messages = run.values["messages"]
    found = _marked(run, whole, range(len(messages)))
    if found is None:
        found = [leaf for at in range(len(messages)) for leaf in _marked(run, whole, [at]) or ()]
    return sorted(found, key=lambda leaf: leaf[2])


def _marked(run, whole, which):
    names, sources = [], []

    def mark(text, message, part):
        code = _MARKS.start + 2 * len(names)
        if code + 1 not in _MARKS:
            return text
        names.append((message, part))
        sources.append(text.strip())
        return "".join(
            piece if at % 2 else _around(piece, chr(code), chr(code + 1)) for at, piece in enumerate(_TAGS.split(text))
        )

    messages = [
        _with_marks(message, at, mark) if at in which else message for at, message in enumerate(run.values["messages"])
    ]
    try:
        text = run.template.fill({**run.values, "messages": messages})
    except Exception:  # the template looked at a text that marks have changed
        return None
    bounds, plain, position = {}, [], 0
    for character in text:
        if ord(character) not in _MARKS:
            plain.append(character)
            position += 1
            continue
        leaf = (ord(character) - _MARKS.start) // 2
        first, _ = bounds.get(leaf, (position, position))
        bounds[leaf] = (first, position)
    if "".join(plain) != whole:
        return None
    found = [(*names[leaf], *_with_tags(whole, sources[leaf], *ends)) for leaf, ends in bounds.items()]
    return [row for row in found if row[2] < row[3]]


def _with_tags(whole, source, start, stop):
    """The stretch together with the tags that begin and end its source, if the whole of it stands there."""
    inner = next((at for at, piece in _pieces_of(source) if piece.strip()), 0)
    begin = start - inner
    return (begin, begin + len(source)) if begin >= 0 and whole.startswith(source, begin) else (start, stop)


def _pieces_of(source):
    """Where each text between tags begins, less its blanks, and the text."""
    position = 0
    for at, piece in enumerate(_TAGS.split(source)):
        if at % 2 == 0:
            yield position + len(piece) - len(piece.lstrip()), piece
        position += len(piece)


def _around(text, opening, closing):
    core = text.strip()
    if not core:
        return text
    at = text.index(core)
    return text[:at] + opening + core + closing + text[at + len(core) :]


def _with_marks(message, at, mark):
    marked = dict(message)
    for key in ("content", "reasoning_content"):
        value = message.get(key)
        if isinstance(value, str):
            marked[key] = mark(value, at, key)
        elif isinstance(value, (list, tuple)):
            marked[key] = [_marked_part(part, at, f"{key}[{i}]", mark) for i, part in enumerate(value)]
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        marked["tool_calls"] = [_marked_call(call, at, f"tool_calls[{i}]", mark) for i, call in enumerate(calls)]
    return marked


def _marked_part(part, at, name, mark):
    if isinstance(part, str):
        return mark(part, at, name)
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": mark(part["text"], at, f"{name}.text")}
    return part


def _marked_call(call, at, name, mark):
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], at, name, mark)}
    marked = dict(call)
    if isinstance(call.get("name"), str):
        marked["name"] = mark(call["name"], at, f"{name}.name")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        marked["arguments"] = mark(arguments, at, f"{name}.arguments")
    elif isinstance(arguments, dict):
        marked["arguments"] = {
            key: mark(value, at, f"{name}.{key}") if isinstance(value, str) else value
            for key, value in arguments.items()
        }
    return marked


# Where two prompts part


class Difference(NamedTuple):
    """The first place where two prompts part.

    char      index of the first character that differs, None where the texts are equal
    token     index of the first id that differs, None where ids are equal or not known
    a, b      the text from a little before it on, made visible
    a_token, b_token   (id, visible text) there, None past the end
    a_span, b_span     the `Span` there, None where not known
    """

    char: int | None
    line: int | None
    column: int | None
    token: int | None
    common: str
    a: str
    b: str
    a_token: tuple | None
    b_token: tuple | None
    a_span: Span | None
    b_span: Span | None

    def __str__(self):
        return shown_as_text(difference_text, self, "Difference")

    __repr__ = __str__

    def _repr_html_(self):
        return shown_as_html(difference_html, self, "Difference")


def first_difference(a, b, tokenizer=None):
    """The first `Difference` of two prompts, or None if they are the same.

    a, b   `Rendered`, or texts; ids of texts are compared where a `tokenizer` (or a model) is given
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    (a_text, a_ids, a_by), (b_text, b_ids, b_by) = (_read(side, tokenizer) for side in (a, b))
    char = _parting(a_text, b_text)
    token = None if a_ids is None or b_ids is None else _parting(a_ids, b_ids)
    if char is None and token is None:
        return None
    before = a_text[:char] if char is not None else ""
    return Difference(
        char,
        None if char is None else before.count("\n") + 1,
        None if char is None else char - (before.rfind("\n") + 1) + 1,
        token,
        visible(before[-24:]),
        "" if char is None else visible(a_text[char : char + 32]),
        "" if char is None else visible(b_text[char : char + 32]),
        _token(a_ids, token, a_by),
        _token(b_ids, token, b_by),
        _span_at(a, char, token),
        _span_at(b, char, token),
    )


def visible(text):
    """Text with its blanks and what has no shape of its own made visible."""
    from qwenref.tokenizer import _visible

    return "".join(
        _visible(character) if character.isprintable() or character in "\n\t\r" or ord(character) < 0x80
        else f"⟨U+{ord(character):04X}⟩"
        for character in text
    )  # fmt: skip


def _read(side, tokenizer):
    if isinstance(side, Rendered):
        return side.text, side.ids, side.tokenizer or tokenizer
    if not isinstance(side, str):
        raise InputError(
            compose("first_difference: not a prompt", found=type(side).__name__, expected="a Rendered, or text")
        )
    return side, None if tokenizer is None else tokenizer.encode(side, add_special_tokens=False), tokenizer


def common(a, b):
    """How many entries two sequences share from the start."""
    return next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def _parting(a, b):
    return None if a == b else common(a, b)


def _token(ids, at, tokenizer):
    if at is None or at >= len(ids):
        return None
    return ids[at], "" if tokenizer is None else tokenizer.token_text(ids[at])


def _span_at(side, char, token):
    if not isinstance(side, Rendered):
        return None
    if char is None:
        return next((span for span in side.spans if span.first <= token < span.last), None)
    return next((span for span in side.spans if span.start <= char < span.stop), None)
