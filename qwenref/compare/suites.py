"""What engines are asked: prompts as token ids, strings to tokenize, conversations to render.

A suite is fixed by its name and the checkpoint: the texts are shipped, the ids are those of the checkpoint's tokenizer,
and border prompts are found by the reference in them.
"""

import hashlib
import itertools
import json
import os
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from qwenref.compare.borders import borders
from qwenref.compare.errors import OutputExists, RecordError
from qwenref.errors import CapabilityMissing, UnknownName, compose

SCHEMA = "qwenref.suite/1"
KINDS = ("length", "repeat", "recall", "code", "cjk", "marks", "emoji", "tools", "thinking", "border")

# Where the convolution's window, a block of the chunked recurrence and a block of a paged cache begin and end.
LENGTHS = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129)
_WRITTEN = ("length", "code", "cjk", "marks", "emoji", "repeat", "recall")


class Item(NamedTuple):
    """A prompt and how many tokens are to follow it."""

    id: str
    ids: list  # of int
    new: int
    kind: str  # one of KINDS
    text: str | None  # whose ids these are, None where no text has them


class Conversation(NamedTuple):
    """What a chat template is asked to render."""

    id: str
    messages: list
    options: dict  # for `Tokenizer.render`


class Suite(NamedTuple):
    """`.prompts` Items · `.texts` strings · `.conversations` · `.notes` what the model's size changed."""

    name: str
    prompts: tuple
    texts: tuple = ()
    conversations: tuple = ()
    notes: tuple = ()

    @property
    def positions(self):
        """Tokens to be decoded in all."""
        return sum(item.new for item in self.prompts)

    @property
    def sha256(self):
        """Of the lines `save` writes."""
        return hashlib.sha256(self._lines().encode()).hexdigest()

    def _lines(self):
        head = {"schema": SCHEMA, "name": self.name, "notes": list(self.notes)}
        records = [
            head,
            *({"prompt": item._asdict()} for item in self.prompts),
            *({"text": text} for text in self.texts),
            *({"conversation": conversation._asdict()} for conversation in self.conversations),
        ]
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def save(self, path, force=False):
        """Write JSON lines that `load` reads; OutputExists where there is such a file."""
        try:
            with open(path, "w" if force else "x", encoding="utf-8", newline="\n") as file:
                file.write(self._lines())
        except FileExistsError:
            do = "choose another path, or pass force=True"
            raise OutputExists(compose(f"{path}: there is such a file", do=do)) from None

    @classmethod
    def load(cls, path):
        """The suite of a file; RecordError names the first line that is none of one."""
        return _loaded(path)


class _Size(NamedTuple):
    new: int
    written: tuple  # (kind, tokens of the prompt)
    chats: tuple  # which of the shipped conversations
    borders: int


# 7 kinds and 10 lengths in turns: all pairs are different, but a few tokens of "recall" are those of "length".
_PAIRS = zip(_WRITTEN * len(LENGTHS), LENGTHS * len(_WRITTEN), strict=True)
_MANY = tuple(itertools.islice((pair for pair in _PAIRS if pair[0] != "recall" or pair[1] > 32), 50))
SIZES = {
    "quick": _Size(64, (("code", 65), ("cjk", 63), ("recall", 129)), (), 1),
    "standard": _Size(
        256,
        (
            ("length", 1), ("length", 3), ("length", 4), ("length", 5), ("code", 63), ("cjk", 64), ("marks", 65),
            ("emoji", 127), ("repeat", 128), ("recall", 129),
        ),
        (0, 2, 3),
        3,
    ),
    "deep": _Size(512, (*_MANY, ("recall", 8192), ("length", 8192)), (0, 1, 2, 3, 4, 5), 8),
}  # fmt: skip


def suite(name, model):
    """The Suite "quick", "standard" or "deep" for a checkpoint, or that of a JSONL file.

    Without a tokenizer there are ids alone: the bytes of the shipped texts, and no strings and no conversations.
    """
    if os.fspath(name).endswith(".jsonl"):
        return Suite.load(name)
    if name not in SIZES:
        raise UnknownName(
            compose(f"suite {name!r}: there is none", expected=", ".join(SIZES), do="or the path of a .jsonl file")
        )
    size, text = SIZES[name], model.config.text_config
    encoder = _Encoder(model)
    new = min(size.new, max(1, text.max_position_embeddings // 2))
    room = text.max_position_embeddings - new
    written = [(kind, encoder.prompt(_source(kind), min(length, room))) for kind, length in size.written]
    chats = [(chat["kind"], encoder.chat(chat)) for chat in (_chats()[at] for at in size.chats)]
    chats = [(kind, ids[-room:]) for kind, ids in chats if ids is not None]
    known = [encoder.prompt(_source(kind), min(192, room)) for kind in ("recall", "length", "code")]
    found = [("border", ids) for ids in borders(model, known, size.borders)]
    prompts = _items([*written, *chats, *found], new, encoder)
    notes = _notes(size, new, room, prompts, encoder)
    if encoder.tokenizer is None:
        return Suite(name, prompts, notes=notes)
    with_template = encoder.tokenizer.has_chat_template
    return Suite(name, prompts, texts(), conversations() if with_template else (), notes)


def _items(prompts, new, encoder):
    return tuple(
        Item(f"{number:02}-{kind}-{len(ids)}", ids, new, kind, encoder.text(ids))
        for number, (kind, ids) in enumerate(prompts)
    )


def _notes(size, new, room, prompts, encoder):
    notes = []
    if new < size.new:
        notes.append(f"{new} new tokens in place of {size.new}: the model has positions for {new + room:,}")
    cut = sum(length > room for _, length in size.written)
    if cut:
        notes.append(f"{cut} prompts cut to {room:,} tokens: the model has positions for {new + room:,}")
    if encoder.tokenizer is None:
        notes.append("no tokenizer: prompts are bytes of the texts, and neither strings nor conversations are asked")
    elif not encoder.tokenizer.has_chat_template:
        notes.append("no chat template: no conversations are asked")
    found = sum(item.kind == "border" for item in prompts)
    if found < size.borders:
        notes.append(f"{found} border prompts in place of {size.borders}: there are no more in the texts")
    return tuple(notes)


class _Encoder:
    """Ids of the shipped texts: the tokenizer's, or bytes where there is none."""

    def __init__(self, model):
        self.vocab = model.config.text_config.vocab_size
        try:
            self.tokenizer = model.tokenizer
        except CapabilityMissing:
            self.tokenizer = None

    def encode(self, text):
        if self.tokenizer is None:
            return [byte % self.vocab for byte in text.encode()]
        return list(map(int, self.tokenizer.encode(text)))

    def prompt(self, source, length):
        """So many ids of a text said over and over, its question last; a place to begin whose ids are those of a text
        is taken where there is one."""
        ask = self.encode(source["ask"]) if "ask" in source and length > 32 else []
        once = self.encode(source["text"])
        ids = once * (2 + length // len(once))
        rest = length - len(ask)
        cuts = ([*ids[begin : begin + rest], *ask] for begin in range(len(once)))
        return next((cut for cut in cuts if self.tokenizer is None or self.text(cut) is not None), [*ids[:rest], *ask])

    def chat(self, chat):
        """Ids of a rendered conversation, None without a template."""
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            return None
        return self.encode(self.tokenizer.render(chat["messages"], **chat["options"]))

    def text(self, ids):
        """The text whose ids these are, or None."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(ids)
        return text if self.encode(text) == ids else None


# ---- what is shipped -----------------------------------------------------------------------------------------------


def texts():
    """300 strings on which tokenizers are known to part: scripts, marks, joiners, blanks, digits, code, look-alikes."""
    return tuple(_shipped("texts"))


def conversations():
    """24 Conversations of every form a chat template has to take."""
    return tuple(Conversation(**record) for record in _shipped("conversations"))


def _chats():
    return [source for source in _shipped("prompts") if "messages" in source]


def _source(kind):
    return next(source for source in _shipped("prompts") if source["kind"] == kind)


def _shipped(name):
    lines = (resources.files("qwenref.compare") / "suites" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.split("\n") if line]


# ---- files ---------------------------------------------------------------------------------------------------------


def _loaded(path):
    head, prompts, texts, conversations = None, [], [], []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(compose(f"{path}: cannot be read", found=error)) from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        record = _record(path, number, line)
        if head is None:
            head = _head(path, number, record)
        elif set(record) == {"text"} and isinstance(record["text"], str):
            texts.append(record["text"])
        elif set(record) == {"prompt"}:
            prompts.append(_item(path, number, record["prompt"], {item.id for item in prompts}))
        elif set(record) == {"conversation"}:
            conversations.append(_conversation(path, number, record["conversation"]))
        else:
            raise _fault(path, number, found=line[:80], expected="one of prompt, text, conversation")
    if head is None:
        raise _fault(path, 1, found="no lines", expected=f"a header of {SCHEMA}")
    return Suite(head["name"], tuple(prompts), tuple(texts), tuple(conversations), tuple(head.get("notes", ())))


def _record(path, number, line):
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _fault(path, number, found=error, expected="JSON") from None
    if not isinstance(record, dict):
        raise _fault(path, number, found=line[:80], expected="an object")
    return record


def _head(path, number, record):
    if record.get("schema") != SCHEMA or not isinstance(record.get("name"), str):
        raise _fault(path, number, found=str(record)[:80], expected=f"a header of {SCHEMA} with a name")
    return record


def _item(path, number, fields, known):
    if not isinstance(fields, dict) or set(fields) != set(Item._fields):
        raise _fault(path, number, found=str(fields)[:80], expected=", ".join(Item._fields))
    item = Item(**fields)
    if item.id in known:
        raise _fault(path, number, found=f"the id {item.id!r} a second time", expected="an id for each prompt")
    whole = isinstance(item.ids, list) and all(type(id) is int and id >= 0 for id in item.ids)
    if not whole or not item.ids or type(item.new) is not int or item.new < 1 or item.kind not in KINDS:
        raise _fault(path, number, found=str(fields)[:80], expected="ids of 0 or more, some new tokens, a known kind")
    return item


def _conversation(path, number, fields):
    if not isinstance(fields, dict) or set(fields) != set(Conversation._fields):
        raise _fault(path, number, found=str(fields)[:80], expected=", ".join(Conversation._fields))
    return Conversation(**fields)


def _fault(path, number, **parts):
    error = RecordError(compose(f"{path}, line {number}: no line of a suite", **parts))
    error.line = number
    return error


__all__ = ["KINDS", "LENGTHS", "SIZES", "Conversation", "Item", "Suite", "conversations", "suite", "texts"]
