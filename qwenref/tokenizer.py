"""Text to token ids and back, over a checkpoint's own tokenizer.json; stop ids; the checkpoint's chat template.

The merging itself is the `tokenizers` library's. Bytes are ours: decoding never loses one, and a stream never shows
half a character.
"""

import codecs
import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qwenref.checks import as_whole, is_row
from qwenref.errors import CapabilityMissing, CheckpointError, InputError, TemplateError, compose
from qwenref.hub import read_json
from qwenref.inputs import check_text
from qwenref.template import ChatTemplate, find_templates

_IDS = 2**32  # how many ids the library below can be asked for


class StopIds(NamedTuple):
    """The ids that end a text, and which file says what."""

    ids: tuple  # used: those of generation_config.json, or else of the other two files together
    sources: dict  # {"generation_config" | "config" | "tokenizer_config": ids or None}

    @property
    def agree(self):
        """Whether all files that name an id name the same ones."""
        return len({frozenset(ids) for ids in self.sources.values() if ids is not None}) <= 1


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    `encode(text)` gives a list of ids, `decode(ids)` text, `stream()` a decoder that takes one id at a time,
    `render(messages)` the prompt text of a conversation.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise CapabilityMissing(
                compose(
                    f"{self.folder}: no tokenizer.json",
                    found=_listing(self.folder),
                    do="add the model's tokenizer.json, or pass token ids",
                )
            )
        self._backend = _open(path)
        self.config = read_json(self.folder / "tokenizer_config.json")
        self.model_vocab_size = _text_config(read_json(self.folder / "config.json")).get("vocab_size")

        added = self._backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: id for id, token in sorted(added.items())}
        self.special_tokens = {token.content: id for id, token in sorted(added.items()) if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._check_added_tokens()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.stop = find_stop_ids(self.folder, self._eos_id())
        self._bytes = {}

    def __repr__(self):
        stop = ", ".join(f"{self.token_text(id)} {id}" for id in self.stop.ids) or "none"
        template = "chat template" if self.has_chat_template else "no chat template"
        return f"Tokenizer({self.vocab_size:,} ids, {len(self.special_tokens)} special, stop {stop}, {template})"

    def __len__(self):
        return self.vocab_size

    # Text and ids

    def encode(self, text, add_special_tokens=True, special_tokens="ids"):
        """Token ids of a text.

        add_special_tokens   put around it what tokenizer.json asks to be put around, if anything
        special_tokens       "ids": added tokens written out in the text (`<|im_end|>`, `<think>`) become their ids;
                             "text": they are taken apart like any other text, so that no text can end a turn
        """
        return self._encoding(text, add_special_tokens, special_tokens).ids

    def encode_offsets(self, text, add_special_tokens=True, special_tokens="ids"):
        """(ids, int64 [n, 2]): beside each id, where in `text` the characters begin and end that it stands for.

        Ids that share a character all have all of it; an id put around the text has an empty range.
        """
        encoding = self._encoding(text, add_special_tokens, special_tokens)
        return encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _encoding(self, text, add_special_tokens, special_tokens):
        if not isinstance(special_tokens, str) or special_tokens not in ("ids", "text"):
            raise InputError(compose("encode: special_tokens", found=repr(special_tokens), expected='"ids" or "text"'))
        if not isinstance(add_special_tokens, (bool, np.bool_)):
            raise InputError(
                compose("encode: add_special_tokens", found=repr(add_special_tokens), expected="True or False")
            )
        backend = self._backend if special_tokens == "ids" else self._without_added_tokens
        encoding = backend.encode(check_text(text, "encode"), add_special_tokens=bool(add_special_tokens))
        ids = encoding.ids
        if self.model_vocab_size is not None and ids and max(ids) >= self.model_vocab_size:
            at = next(i for i, id in enumerate(ids) if id >= self.model_vocab_size)
            raise InputError(
                compose(
                    f"token {at} of the text is {ids[at]:,}; the vocabulary has {self.model_vocab_size:,}",
                    found=f"{self.token_text(ids[at])!r} in {self.folder / 'tokenizer.json'}",
                    expected=f"ids 0 to {self.model_vocab_size - 1:,}   (vocab_size of config.json)",
                    do="use the tokenizer.json that belongs to this model",
                )
            )
        return encoding

    @functools.cached_property
    def _without_added_tokens(self):
        return _open(self.folder / "tokenizer.json", added_tokens=False)

    def report(self):
        """`TokenizerReport`: regex, normaliser, vocabulary, padding rows, stop ids, and what looks wrong about them."""
        from qwenref.tokenizer_facts import report

        return report(self)

    def decode(self, ids, skip_special_tokens=False):
        """Text of token ids, or of one.  Bytes of no character become U+FFFD, an id without a token `⟨id 1300⟩`."""
        stream = self.stream(skip_special_tokens)
        return "".join([stream.put(id) for id in ids_of_tokens("decode: ids", ids)]) + stream.flush()

    def decode_bytes(self, ids):
        """The exact UTF-8 bytes that token ids stand for, complete characters or not."""
        return b"".join(map(self.token_bytes, ids_of_tokens("decode: ids", ids)))

    def stream(self, skip_special_tokens=False):
        """A `StreamDecoder` for this tokenizer."""
        return StreamDecoder(self, skip_special_tokens)

    def token_bytes(self, id):
        """The bytes of one token; of an id without a token, its visible form."""
        id = _checked_id("token_bytes", id)
        known = self._bytes.get(id)
        if known is None:
            token = self._backend.id_to_token(id)
            if token is None:
                known = f"⟨id {id}⟩".encode()
            elif token in self.added_tokens:
                known = token.encode()
            else:
                known = _bytes_of(token)
            self._bytes[id] = known
        return known

    def token_text(self, id):
        """One token made visible: space `␣`, newline `⏎`, tab `⇥`, bytes that are no character `⟨e6⟩`."""
        id = _checked_id("token_text", id)
        if self._backend.id_to_token(id) is None:
            return f"⟨id {id}⟩"
        return "".join(map(_visible, self.token_bytes(id).decode("utf-8", "surrogateescape")))

    def token_id(self, token):
        """The id of a token by its text (`"<|im_end|>"`), or None."""
        id = self.added_tokens.get(check_text(token, "token_id"))
        return id if id is not None else self._backend.token_to_id("".join(_alphabet()[b] for b in token.encode()))

    def ids_without_token(self, rows):
        """int64 [n], ascending: which of the ids 0 .. rows - 1 (a model's logit rows) stand for no token."""
        return np.setdiff1d(np.arange(_checked_id("ids_without_token", rows, "a number of rows")), self._known_ids)

    @functools.cached_property
    def _known_ids(self):
        return np.fromiter(self._backend.get_vocab(with_added_tokens=True).values(), np.int64)

    # Special ids

    def _check_added_tokens(self):
        """tokenizer_config.json may repeat the added tokens; a second truth that differs would move every prompt."""
        differing = [
            f"{id}: {token.get('content')!r}, tokenizer.json has {self._backend.id_to_token(int(id))!r}"
            for id, token in self.config.get("added_tokens_decoder", {}).items()
            if self._backend.id_to_token(int(id)) != token.get("content")
        ]
        if differing:
            more = f"\n… {len(differing) - 5} more" if len(differing) > 5 else ""
            raise CheckpointError(
                compose(
                    f"{self.folder}: tokenizer_config.json and tokenizer.json disagree on {len(differing)} tokens",
                    found="\n".join(differing[:5]) + more,
                    do="take both files from one revision of the model",
                )
            )

    def _eos_id(self):
        eos = self.config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        return None if eos is None else self._backend.token_to_id(eos)

    # Chat

    @functools.cached_property
    def chat_templates(self):
        """{name: (source, where)} of every template the folder carries."""
        return find_templates(self.folder)

    @property
    def has_chat_template(self):
        return bool(self.chat_templates)

    def chat_template(self, tools=None):
        """The template that applies: "tool_use" when there are tools and such a one exists, else "default"."""
        names = self.chat_templates
        name = "tool_use" if tools is not None and "tool_use" in names else "default"
        if name not in names:
            raise TemplateError(
                compose(
                    f"{self.folder}: no chat template" + (' named "default"' if names else ""),
                    found=", ".join(sorted(names)) or _listing(self.folder),
                    expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                    do="pass plain text or token ids; on the command line: --raw",
                )
            )
        return self._compiled(name)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a tokenizer lives as long as its model
    def _compiled(self, name):
        source, where = self.chat_templates[name]
        return ChatTemplate(source, where, self._named_tokens())

    def _named_tokens(self):
        """The tokens a template may name: eos_token, pad_token, image_token, ..."""
        named = {}
        for key, value in self.config.items():
            value = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(value, str):
                named[key] = value
        return named

    def render(self, messages, tools=None, add_generation_prompt=None, enable_thinking=None, **variables):
        """The prompt text of a conversation; see `ChatTemplate.render`."""
        return self.chat_template(tools).render(messages, tools, add_generation_prompt, enable_thinking, **variables)


class StreamDecoder:
    """Token ids one at a time into text that is whole characters; what is incomplete waits for the next id.

    The pieces and the final `flush()` joined are `Tokenizer.decode` of the same ids.
    """

    def __init__(self, tokenizer, skip_special_tokens=False):
        self._tokenizer = tokenizer
        self._skip = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, id):
        """The text that this id completes, often empty inside a character of several tokens."""
        id = _checked_id("stream", id)
        return "" if id in self._skip else self._decoder.decode(self._tokenizer.token_bytes(id))

    @property
    def pending(self):
        """The bytes held back."""
        return self._decoder.getstate()[0]

    def flush(self):
        """What is left at the end: U+FFFD for the bytes of a character that never got complete."""
        return self._decoder.decode(b"", final=True)


def _open(path, added_tokens=True):
    from tokenizers import Tokenizer as Backend

    try:
        if added_tokens:
            backend = Backend.from_file(str(path))
        else:
            backend = Backend.from_str(json.dumps({**read_json(path), "added_tokens": []}))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(compose(f"{path}: not a tokenizer this library reads", found=error)) from error
    stages = read_json(path).get("decoder") or {}
    kinds = [stage.get("type") for stage in stages.get("decoders", [stages])]
    if "ByteLevel" not in kinds:
        raise CapabilityMissing(
            compose(f"{path}: the decoder is not byte-level", found=kinds, expected="ByteLevel, as in the Qwen family")
        )
    backend.no_truncation()  # settings some exports leave behind; they would cut or pad prompts silently
    backend.no_padding()
    return backend


@functools.cache
def _alphabet():
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves, the others
    in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + at) for at, byte in enumerate(others)}}


@functools.cache
def _byte_of_character():
    return {character: byte for byte, character in _alphabet().items()}


def _bytes_of(token):
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # not written in the byte alphabet: the token stands for itself
        return token.encode()


def _visible(character):
    code = ord(character)
    if code < 0x20 or code == 0x7F or 0xDC80 <= code <= 0xDCFF:  # a control, or a byte that surrogateescape kept
        return {"\n": "⏎", "\t": "⇥", "\r": "␍"}.get(character, f"⟨{code & 0xFF:02x}⟩")
    return "␣" if character == " " else character


def ids_of_tokens(where, ids):
    """[int, ...] of one id or a row of them in any form that has an order."""
    if not is_row(ids):
        return [_checked_id(where, ids)]
    return [
        id if type(id) is int and 0 <= id < _IDS else _checked_id(f"{where}[{at}]", id) for at, id in enumerate(ids)
    ]


def _checked_id(where, id, what="a token id"):
    """A whole number that the library below can take; where it stands for no token, that is for it to say."""
    if type(id) is int and 0 <= id < _IDS:  # quick, since text passes through here id by id
        return id
    whole = as_whole(id)
    if whole is None or not 0 <= whole < _IDS:
        raise InputError(
            compose(
                f"{where}: not {what}",
                found=repr(id)[:80],
                expected="a whole number from 0 to 2**32 - 1",
                do=None if what != "a token id" else "pass what encode or generate gave, one row of it",
            )
        )
    return whole


def find_stop_ids(folder, eos_id=None):
    """The `StopIds` of a checkpoint folder; `eos_id` is what its tokenizer calls eos_token."""
    config = read_json(Path(folder) / "config.json")
    named = _text_config(config).get("eos_token_id", config.get("eos_token_id"))
    generation = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    sources = {
        "generation_config": _id_tuple(generation, "generation_config.json"),
        "config": _id_tuple(named, "config.json"),
        "tokenizer_config": _id_tuple(eos_id, "tokenizer_config.json"),
    }
    ids = sources["generation_config"]
    if ids is None:
        ids = tuple(dict.fromkeys((sources["tokenizer_config"] or ()) + (sources["config"] or ())))
    return StopIds(ids, sources)


def stop_ids(model):
    """Ids that end a text by the files of a model's checkpoint; none of a model that was opened from no folder."""
    return () if model.path is None else find_stop_ids(model.path).ids


def _id_tuple(value, where):
    if value is None:
        return None
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(id) is int and 0 <= id < _IDS for id in ids):
        raise CheckpointError(compose(f"{where}: eos_token_id is not an id or a list of ids", found=repr(value)))
    return ids


def _text_config(config):
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _listing(folder):
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return str(error)
    return ", ".join(names[:5]) + (f", … {len(names) - 5} more" if len(names) > 5 else "") if names else "empty folder"
