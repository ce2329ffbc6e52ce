"""How an engine is written down, and opened by that.

KIND:REST[?NAME=VALUE&...]      reference:tiny?numerics=hf   transformers:DIR?dtype=bfloat16   llama-cpp:FILE.gguf
KIND+http://HOST:PORT[?...]     vllm+http://127.0.0.1:8000?model=NAME   openai+https://HOST/BASE?tokenizer=DIR
PATH.jsonl                      a recorded run

KIND is one of `ADAPTERS`; names and values are options of its `open`.  A key has no place here, where shells, logs and
reports would show it: `key_env` names the variable that holds it.
"""

import difflib
import re
from urllib.parse import parse_qsl

from qwenref.errors import InputError, UnknownName, compose

_FORM = re.compile(r"([a-z][a-z0-9-]*)(\+https?)?:(.*)", re.S)
_WORDS = {"true": True, "false": False, "none": None}


def parse(spec, kinds):
    """(kind, rest, options) of a spec; InputError, or UnknownName for another kind than `kinds`."""
    if not isinstance(spec, str) or not spec:
        raise _bad(spec)
    path, _, query = spec.partition("?")
    form = _FORM.fullmatch(path)
    if form is None or not _known(form, kinds) and path.endswith(".jsonl"):
        if not path.endswith(".jsonl"):
            raise _bad(spec)
        return "recorded", path, _options(query, spec)
    if not _known(form, kinds):
        raise _unknown(form, kinds)
    name, web, rest = form.groups()
    if not web:
        return name, rest, _options(query, spec)
    if not rest.startswith("//"):
        raise _bad(spec)
    return f"{name}+http", f"{web[1:]}:{rest}", _options(query, spec)


def _known(form, kinds):
    return form[1] + ("+http" if form[2] else "") in kinds


def _options(query, spec):
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise _bad(spec) from None
    found = {}
    for name, value in pairs:
        if name in found:
            raise InputError(compose(f"engine: option {name} twice"))
        if name == "key":
            raise InputError(
                compose("engine: a key in its spec would be shown", do="key_env=NAME of the variable that holds it")
            )
        found[name] = _value(value)
    return found


def _value(text):
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _unknown(form, kinds):
    kind = form[1] + ("+http" if form[2] else "")
    near = difflib.get_close_matches(kind, kinds, n=2) or [each for each in kinds if each.startswith(kind)]
    return UnknownName(
        compose(
            f"engine: no kind {kind}",
            expected=", ".join(kinds),
            do=f"did you mean {' or '.join(near)}?" if near else None,
        )
    )


def _bad(spec):
    shown = re.sub(r"//[^/@]*@", "//", spec) if isinstance(spec, str) else repr(spec)  # no password
    return InputError(
        compose(
            f"engine: {shown or 'an empty spec'}",
            expected="KIND:REST, KIND+http://HOST:PORT, or a recorded run PATH.jsonl",
            do="reference:tiny, transformers:FOLDER, vllm+http://127.0.0.1:8000",
        )
    )
