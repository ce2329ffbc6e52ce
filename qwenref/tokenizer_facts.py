"""What a tokenizer.json does to text, and where two of them part: facts read from the files, then tried on texts."""

import hashlib
import unicodedata
from pathlib import Path
from typing import NamedTuple

from qwenref.checks import is_row
from qwenref.errors import InputError, compose
from qwenref.hub import read_json, resolve
from qwenref.inputs import check_text
from qwenref.rendering import common
from qwenref.text_display import (
    comparison_html,
    comparison_text,
    parting_html,
    parting_text,
    report_html,
    report_text,
    shown_as_html,
    shown_as_text,
)
from qwenref.tokenizer import Tokenizer, _alphabet, _open

# How text is cut before merging. Two of these over one vocabulary give other ids for the same text.
_WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "Qwen3.5": _WORDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen2 to Qwen3": _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}

# Each text tells one pair of rules apart; their names are shown.
PROBES = {
    "combining marks": "नमस्ते दुनिया",
    "tone marks": "ภาษาไทยที่นี่",
    "decomposed letters": unicodedata.normalize("NFD", "naïve café Å Tiếng Việt"),
    "compatibility characters": "ﬁne ½ Ⅳ ﷺ",
    "composition exclusions": "\u0958\u2126\u212b",
    "digits": "1234567 3.14159 ١٢٣",
    "contractions": "don't WE'LL I'd it’s",
    "blanks": "a  b   \n\n\n  c\t\td \r\n e  ",
    "code": "def f(x):\n        return x**2  # ==>\n\n\n",
    "emoji": "👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "right to left": "مَرْحَبًا שָׁלוֹם",
    "chinese": "你好，世界。狐狸在哪里？",
    "markers": "<|im_start|>user\n<think>x</think><tool_call></tool_call><tool_response><|fim_pad|><|im_end|>\n",
}


class TokenizerReport(NamedTuple):
    """Facts of one tokenizer.  `findings` are sentences on what deserves a look; `print` shows all."""

    path: str
    sha256: str
    tokens: int  # in the merging vocabulary
    merges: int
    added: dict  # {text: id}
    special: dict  # {text: id}, those of `added` that are special
    normalizer: str
    regex: str | None
    regex_of: str | None  # the family whose regex it is
    pre_tokenizer: str
    post_processor: str
    decoder: str
    rows: int | None  # logit rows of the model
    padding_rows: tuple  # (first, stop) ranges of rows that no token belongs to
    stop: object  # StopIds
    template: str | None  # sha256 of the chat template
    findings: tuple

    @property
    def padding(self):
        """How many logit rows no token belongs to."""
        return sum(stop - first for first, stop in self.padding_rows)

    def facts(self):
        """(name, value) of each fact in words, the path first."""
        rows = "unknown" if self.rows is None else f"{self.rows:,}, {self.padding:,} without a token"
        if self.padding_rows:
            rows += f": {_ranges(self.padding_rows)}"
        sources = ", ".join(f"{name} {list(ids)}" for name, ids in self.stop.sources.items() if ids is not None)
        return [
            ("Tokenizer", self.path),
            ("sha256", self.sha256[:16]),
            (
                "vocabulary",
                f"{self.tokens:,} tokens, {self.merges:,} merges, "
                f"{len(self.added):,} added, {len(self.special):,} of them special",
            ),
            ("logit rows", rows),
            ("normaliser", self.normalizer),
            ("regex", self.regex or "none"),
            ("", f"that of {self.regex_of}" if self.regex_of else "of no family known here"),
            ("cut by", self.pre_tokenizer),
            ("adds", self.post_processor),
            ("decoder", self.decoder),
            ("stop ids", f"{', '.join(map(str, self.stop.ids)) or 'none'}   ({sources or 'no file names one'})"),
            ("template", "none" if self.template is None else self.template[:16]),
        ]

    def __str__(self):
        return shown_as_text(report_text, self, "Tokenizer")

    __repr__ = __str__

    def _repr_html_(self):
        return shown_as_html(report_html, self, "Tokenizer")


def report(tokenizer):
    """`TokenizerReport` of a `Tokenizer`."""
    path = tokenizer.folder / "tokenizer.json"
    data = read_json(path)
    facts = _facts(data)
    rows = tokenizer.model_vocab_size
    padding = _as_ranges(tokenizer.ids_without_token(rows).tolist()) if rows is not None else ()
    template = tokenizer.chat_templates.get("default")
    return TokenizerReport(
        path=str(path),
        sha256=_sha256(path.read_bytes()),
        tokens=len(data["model"]["vocab"]),
        merges=len(data["model"].get("merges", ())),
        added=dict(tokenizer.added_tokens),
        special=dict(tokenizer.special_tokens),
        **facts,
        rows=rows,
        padding_rows=padding,
        stop=tokenizer.stop,
        template=None if template is None else _sha256(template[0].encode()),
        findings=tuple(_findings(data, facts, tokenizer, rows, padding)),
    )


def _findings(data, facts, tokenizer, rows, padding):
    if facts["regex_of"] != "Qwen3.5":
        whose = facts["regex_of"] or "no family known here"
        yield f"the regex is that of {whose}, not of Qwen3.5: text with combining marks may get other ids"
    if facts["normalizer"] != "NFC":
        yield f"the normaliser is {facts['normalizer']}, not NFC: decomposed letters get other ids"
    vocab = data["model"]["vocab"]
    missing = [byte for byte, character in _alphabet().items() if character not in vocab]
    if missing:
        yield f"{len(missing)} of the 256 bytes have no token, the first {missing[0]:#04x}: texts lose them"
    ids = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
    moved = [text for text, id in ids.items() if tokenizer.added_tokens.get(text) != id]
    if moved:
        yield (
            f"{len(moved)} added tokens get other ids than the file gives them, as {moved[0]}: "
            f"{tokenizer.added_tokens.get(moved[0])}, not {ids[moved[0]]}"
        )
    unnormalised = [token["content"] for token in data.get("added_tokens", ()) if token.get("normalized")]
    if unnormalised:
        yield f"{len(unnormalised)} of the added tokens are looked for after normalising: {', '.join(unnormalised[:3])}"
    for key in ("truncation", "padding"):
        if data.get(key):
            yield f"the file sets {key}, which is not applied here; other readers may apply it"
    if data["model"].get("dropout"):
        yield f"merges are dropped at random ({data['model']['dropout']}): ids differ from call to call"
    if rows is not None and tokenizer.vocab_size > rows:
        yield f"{tokenizer.vocab_size - rows:,} ids are beyond the {rows:,} rows of the model"
    inner = [(first, stop) for first, stop in padding if stop != rows]
    if inner:
        yield f"ids without a token inside the vocabulary: {_ranges(inner)}"
    if not tokenizer.stop.agree:
        yield "the files name different stop ids"


# Two tokenizers


class TokenizerComparison(NamedTuple):
    """How two tokenizers differ.  Empty `differences` and `texts`: the same ids, as far as tried.

    differences   {what: sentence}: "normaliser", "regex", "tokens", "merges", "added tokens", ...
    texts         `TextDifference` of every tried text that got other ids
    tried         how many texts were tried
    """

    a: str
    b: str
    differences: dict
    texts: list
    tried: int

    @property
    def same(self):
        return not self.differences and not self.texts

    def __str__(self):
        return shown_as_text(comparison_text, self, "Comparison")

    __repr__ = __str__

    def _repr_html_(self):
        return shown_as_html(comparison_html, self, "Comparison")


class TextDifference(NamedTuple):
    """One text that two tokenizers cut differently; `at` is the first id that differs."""

    name: str
    text: str
    at: int
    a: list  # ids
    b: list
    a_tokens: list  # the same, readable
    b_tokens: list

    def __str__(self):
        return shown_as_text(parting_text, self, "TextDifference")

    __repr__ = __str__

    def _repr_html_(self):
        return shown_as_html(parting_html, self, "TextDifference")


def compare_tokenizers(a, b, texts=None):
    """`TokenizerComparison` of two tokenizers: rules and vocabulary of the files, then ids on texts.

    a, b    `Tokenizer`s, models, folders, tokenizer.json files (under any name), or names of models
    texts   tried besides the built-in ones: a list, or {name: text}
    """
    left, right = _Side(a), _Side(b)
    tried = dict(PROBES)
    if texts is not None:
        if not hasattr(texts, "items") and not is_row(texts):
            raise InputError(
                compose("compare_tokenizers: texts", found=type(texts).__name__, expected="a list, or {name: text}")
            )
        given = texts if hasattr(texts, "items") else {f"texts[{at}]": text for at, text in enumerate(texts)}
        tried.update((name, check_text(text, f"compare_tokenizers: {name}")) for name, text in given.items())
    differing = []
    for name, text in tried.items():
        ids = [side.backend.encode(text, add_special_tokens=True).ids for side in (left, right)]
        if ids[0] != ids[1]:
            differing.append(TextDifference(name, text, common(*ids), *ids, left.tokens(ids[0]), right.tokens(ids[1])))
    return TokenizerComparison(left.name, right.name, dict(_differences(left, right)), differing, len(tried))


class _Side:
    """One of two tokenizers: its file, and the library's reading of it."""

    def __init__(self, given):
        given = getattr(given, "tokenizer", given)
        if isinstance(given, Tokenizer):
            path, backend = given.folder / "tokenizer.json", given._backend
        elif not isinstance(given, (str, Path)):
            raise InputError(
                compose(
                    "compare_tokenizers: not a tokenizer",
                    found=type(given).__name__,
                    expected="a Tokenizer, a model, a folder, a tokenizer.json, or the name of a model",
                )
            )
        elif Path(given).is_file():
            path, backend = Path(given), _open(Path(given))
        else:
            path, backend = (found := Tokenizer(resolve(given))).folder / "tokenizer.json", found._backend
        self.name, self.data, self.backend = str(path), read_json(path), backend
        self.facts = _facts(self.data)
        self.vocab = self.data["model"]["vocab"]
        rows = self.data["model"].get("merges", ())  # older files write each as one text
        self.merges = [row.split(" ") if isinstance(row, str) else row for row in rows]
        self.added = {token["id"]: token for token in self.data.get("added_tokens", ())}

    def tokens(self, ids):
        from qwenref.tokenizer import _bytes_of, _visible

        added = {id: token["content"].encode() for id, token in self.added.items()}
        texts = [added.get(id) or _bytes_of(self.backend.id_to_token(id)) for id in ids]
        return ["".join(map(_visible, text.decode("utf-8", "surrogateescape"))) for text in texts]


_FACT_NAMES = {"normalizer": "normaliser", "pre_tokenizer": "cut by", "post_processor": "adds", "decoder": "decoder"}


def _differences(left, right):
    for key, name in {"regex": "regex", **_FACT_NAMES}.items():
        a, b = left.facts[key], right.facts[key]
        if a != b:
            whose = [f"   ({side.facts['regex_of'] or 'of no family known here'})" for side in (left, right)]
            whose = whose if key == "regex" else ["", ""]
            yield name, f"a {a}{whose[0]}\nb {b}{whose[1]}"
    yield from _vocabulary(left.vocab, right.vocab)
    if left.merges != right.merges:
        rank = common(left.merges, right.merges)
        pairs = [" + ".join(side.merges[rank]) if rank < len(side.merges) else "no more" for side in (left, right)]
        yield (
            "merges",
            f"{len(left.merges):,} and {len(right.merges):,}; first other at rank {rank:,}: {pairs[0]} | {pairs[1]}",
        )
    rows = []
    for id in sorted(left.added.keys() | right.added.keys()):
        a, b = left.added.get(id), right.added.get(id)
        if a != b:
            rows.append(f"{id}: {_added(a, b)} | {_added(b, a)}")
    if rows:
        yield "added tokens", "\n".join(rows[:8] + [f"… {len(rows) - 8} more"] * (len(rows) > 8))
    for key in ("dropout", "byte_fallback", "ignore_merges", "unk_token"):
        a, b = (side.data["model"].get(key) or None for side in (left, right))
        if a != b:
            yield key, f"{a} | {b}"


def _vocabulary(a, b):
    moved = sorted(token for token in a.keys() & b.keys() if a[token] != b[token])
    only = [sorted(a.keys() - b.keys(), key=a.get), sorted(b.keys() - a.keys(), key=b.get)]
    parts = []
    if moved:
        parts.append(f"{len(moved):,} with another id, as {moved[0]!r}: {a[moved[0]]:,} | {b[moved[0]]:,}")
    for label, tokens in zip("ab", only, strict=True):
        if tokens:
            parts.append(f"{len(tokens):,} only in {label}, as {', '.join(map(repr, tokens[:3]))}")
    if parts:
        yield "tokens", "\n".join(parts)


def _added(token, other):
    if token is None:
        return "none"
    if other is None or token["content"] != other["content"]:
        return repr(token["content"])
    changed = [f"{key}={token.get(key)}" for key in token if token.get(key) != other.get(key)]
    return f"{token['content']!r} {', '.join(changed)}"


# Reading the file


def _facts(data):
    pre = _stages(data.get("pre_tokenizer"), "pretokenizers")
    regexes = [stage["pattern"]["Regex"] for stage in pre if "Regex" in (stage.get("pattern") or {})]
    # A ByteLevel stage cuts by GPT-2's regex of its own, unless told not to.
    regexes += [PATTERNS["GPT-2"] for stage in pre if stage["type"] == "ByteLevel" and stage.get("use_regex", True)]
    regex = " then ".join(regexes) or None
    return {
        "normalizer": _chain(_stages(data.get("normalizer"), "normalizers")),
        "regex": regex,
        "regex_of": next((name for name, pattern in PATTERNS.items() if pattern == regex), None),
        "pre_tokenizer": _chain(pre),
        "post_processor": _post(_stages(data.get("post_processor"), "processors")),
        "decoder": _chain(_stages(data.get("decoder"), "decoders")),
    }


def _stages(value, inner):
    if value is None:
        return []
    return [stage for entry in value[inner] for stage in _stages(entry, inner)] if inner in value else [value]


_SAID_ELSEWHERE = {"type", "pattern", "trim_offsets"}


def _chain(stages):
    """ "NFC", "Split(behavior=Isolated) → ByteLevel": the stages with the options that change ids or text."""
    shown = []
    for stage in stages:
        options = [f"{key}={value}" for key, value in stage.items() if key not in _SAID_ELSEWHERE and value]
        options += ["pattern"] if "String" in (stage.get("pattern") or {}) else []
        shown.append(stage["type"] + (f"({', '.join(options)})" if options else ""))
    return " → ".join(shown) or "none"


def _post(stages):
    added = [
        item["SpecialToken"]["id"] if "SpecialToken" in item else "text"
        for stage in stages
        for item in stage.get("single", ())
    ]
    return " ".join(added) or "nothing"


def _as_ranges(ids):
    ranges = []
    for id in ids:
        if ranges and ranges[-1][1] == id:
            ranges[-1][1] = id + 1
        else:
            ranges.append([id, id + 1])
    return tuple(map(tuple, ranges))


def _ranges(ranges):
    shown = [f"{first:,}" if stop == first + 1 else f"{first:,} to {stop - 1:,}" for first, stop in ranges]
    return ", ".join(shown[:4]) + (f", … {len(shown) - 4} more" if len(shown) > 4 else "")


def _sha256(data):
    return hashlib.sha256(data).hexdigest()
