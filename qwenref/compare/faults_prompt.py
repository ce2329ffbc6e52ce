"""Faults of prompts: other ids than those that were meant.

tokenizer   what an engine adds to, or cuts out of, any text
template    what it makes of a conversation: told from the rendered text
context     what is left of a prompt that was too long for it
"""

import functools
import re

from qwenref.compare.faults_base import add
from qwenref.errors import CapabilityMissing
from qwenref.hub import read_json
from qwenref.tokenizer import stop_ids
from qwenref.tokenizer_facts import PATTERNS, PROBES

_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_ANSWER = f"{_BEGIN}assistant\n"
_SYSTEM = f"{_BEGIN}system\nYou are a helpful assistant.{_END}\n"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

# ---- what a model has ----------------------------------------------------------------------------------------------


def tokenizer_of(model):
    """The model's tokenizer, or None."""
    try:
        return model.tokenizer
    except CapabilityMissing:
        return None


def _has_template(model):
    tokenizer = tokenizer_of(model)
    return tokenizer is not None and tokenizer.has_chat_template and _BEGIN in tokenizer.added_tokens


def begin_id(model):
    """The id that older tokenizers put in front of a text, or None."""
    named = [model.config.text_config.get("bos_token_id")]
    if model.path is not None:
        named.insert(0, read_json(model.path / "generation_config.json").get("bos_token_id"))
    return next((id for id in named if isinstance(id, int)), None)


# ---- by ids --------------------------------------------------------------------------------------------------------


def _with_begin(ids, model):
    return [begin_id(model), *ids]


def _with_end(ids, model):
    return [*ids, stop_ids(model)[0]]


def _last(tokens):
    return lambda ids, model: ids[-tokens:]


def _last_half(ids, model):
    return ids[-max(1, len(ids) // 2) :]


# ---- by text -------------------------------------------------------------------------------------------------------


def _rewritten(change):
    """Ids of the text after a change; a text that stays what it is keeps its ids."""

    def prompt(ids, model):
        tokenizer = model.tokenizer
        text = tokenizer.decode(ids)
        changed = change(text)
        return ids if changed == text else tokenizer.encode(changed)

    return prompt


def _as_text(ids, model):
    """Special tokens taken apart like any other text."""
    return model.tokenizer.encode(model.tokenizer.decode(ids), special_tokens="text")


def _cut_by(pattern):
    """Ids by another regex for what is merged at all."""

    def prompt(ids, model):
        other = _other_regex(str(model.tokenizer.folder), pattern)
        return other.encode(model.tokenizer.decode(ids)).ids

    return prompt


@functools.lru_cache(maxsize=4)
def _other_regex(folder, pattern):
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    return tokenizer


def _tells_apart(pattern):
    """Whether a model's vocabulary has merges that the two ways of cutting lead to."""
    prompt = _cut_by(pattern)

    def applies(model):
        if tokenizer_of(model) is None:
            return False
        known = map(model.tokenizer.encode, PROBES.values())
        return any(prompt(ids, model) != ids for ids in known)

    return applies


def _newline_more(text):
    return text + "\n"


def _newline_less(text):
    return text.removesuffix("\n")


def _with_system(text):
    return text if text.startswith(f"{_BEGIN}system") else _SYSTEM + text


def _answer_begins(with_):
    """The answer that is asked for begins with this, whatever it began with."""

    def change(text):
        before, begin, tail = text.rpartition(_ANSWER)
        return before + begin + with_ if begin and _END not in tail else text

    return change


def _twice(text):
    """The rendered prompt taken for what a user says."""
    return f"{_BEGIN}user\n{text.strip()}{_END}\n{_ANSWER}<think>\n"


def _without_thoughts(text):
    """No thoughts in the history; those of the answer that is asked for stay."""
    before, begin, tail = text.rpartition(_ANSWER)
    return _THOUGHT.sub("", before) + begin + tail


# fmt: off
_tokenizer = functools.partial(add, kind="prompt", family="tokenizer",
                               applies=lambda model: tokenizer_of(model) is not None)
add("bos-added", "prompt", "a token that begins a text in front of it", _with_begin, number=14, family="tokenizer",
    applies=lambda model: begin_id(model) is not None)
add("eos-added", "prompt", "a token that ends a text behind it", _with_end, family="tokenizer",
    applies=lambda model: bool(stop_ids(model)))
for _name, _pattern in (("regex-qwen2", "Qwen2 to Qwen3"), ("regex-gpt2", "GPT-2")):
    _tokenizer(_name, what=f"text cut by the regex of {_pattern}", mechanism=_cut_by(_pattern), number=17,
               applies=_tells_apart(_pattern))
_tokenizer("specials-as-text", what="special tokens encoded as text", mechanism=_as_text, number=18)
_tokenizer("stripped", what="blanks around the text left out", mechanism=_rewritten(str.strip))

_template = functools.partial(add, kind="prompt", family="template", applies=_has_template)
_template("newline-added", what="a newline more at the end of the prompt", number=15,
          mechanism=_rewritten(_newline_more))
_template("newline-dropped", what="no newline at the end of the prompt", number=15,
          mechanism=_rewritten(_newline_less))
_template("system-added", what="a system message nobody gave", mechanism=_rewritten(_with_system), number=16)
_template("think-open", what="the answer begins with an open thought", number=16,
          mechanism=_rewritten(_answer_begins("<think>\n")))
_template("think-empty", what="the answer begins with an empty thought", number=16,
          mechanism=_rewritten(_answer_begins("<think>\n\n</think>\n\n")))
_template("think-absent", what="the answer begins with nothing of a thought", number=16,
          mechanism=_rewritten(_answer_begins("")))
_template("template-twice", what="the rendered prompt rendered again", mechanism=_rewritten(_twice))
_template("history-thoughts-cut", what="thoughts of the history left out", mechanism=_rewritten(_without_thoughts))

_context = functools.partial(add, kind="prompt", family="context")
_context("context-half", what="the second half of the prompt alone", mechanism=_last_half, number=36)
for _tokens in (512, 2048, 4096, 8192):
    _context(f"context-{_tokens}", what=f"the last {_tokens:,} tokens of the prompt alone", mechanism=_last(_tokens))
# fmt: on
