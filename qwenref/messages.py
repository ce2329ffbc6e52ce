"""What may be said to a chat template: messages, tools and switches, checked and brought down to JSON types."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from qwenref.errors import InputError, a_kind, compose
from qwenref.inputs import check_text

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def checked_messages(messages):
    """Messages as templates take them, copies of JSON types; InputError where one is no message."""
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise InputError(
            compose(
                "messages is not a list",
                found=type(messages).__name__,
                expected='[{"role": "user", "content": "..."}, ...]',
            )
        )
    checked = []
    for at, message in enumerate(messages):
        message = plain(message, f"messages[{at}]", _check_content)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(
                compose(
                    f"messages[{at}] is not a message",
                    found=repr(message)[:80],
                    expected='a dict with "role" and "content", the role a text',
                )
            )
        # Servers hand out `"content": null` and the like; to a template an absent key and null are not the same.
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        checked.append(message)
    if not checked:
        raise InputError(compose("messages is empty", expected="at least one message"))
    return checked


def checked_tools(tools):
    """Tools as templates take them, copies of JSON types, or None; InputError where one is no object."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not hasattr(tools, "__iter__"):
        raise InputError(compose("tools is not a list", found=type(tools).__name__, expected="a list of JSON schemas"))
    tools = list(tools)
    for at, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InputError(
                compose(
                    f"tools[{at}] is not a JSON schema",
                    found=repr(_plain(tool))[:80],
                    expected="an object (dict)",
                    do='pass {"type": "function", "function": {"name": ..., "parameters": {...}}}',
                )
            )
    return plain(tools, "tools")


def checked_switch(name, value):
    """bool of True or False; of nothing else, since most texts and numbers that mean no are true."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(compose(f"render: {name}", found=repr(_plain(value))[:80], expected="True or False"))
    return bool(value)


def plain(value, where, check=None):
    """A copy built of JSON types only, whose texts UTF-8 can hold; `check` sees what it was made of."""
    try:
        if check is not None:
            check(value, where)
        made = _plain(value)
        _refuse_surrogates(made, where)
        return made
    except RecursionError:
        raise InputError(compose(f"{where} nests too deep, or holds itself", expected="what JSON could hold")) from None


def _check_content(message, where):
    """Content is text or parts.  Templates leave out the rest without a word, and the question is gone."""
    get = message.get if isinstance(message, Mapping) else lambda name: getattr(message, name, None)
    content = get("content")
    if content is not None and not isinstance(content, (str, list, tuple, Mapping)):
        raise InputError(
            compose(
                f"{where}.content is {a_kind(content)}",
                expected="text, or a list of parts",
                do='decode bytes, str() of numbers, {"type": "text", "text": ...} for a part',
            )
        )


def _refuse_surrogates(value, where):
    """No text of a conversation may be one that the tokenizer refuses afterwards, far from where it stands."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_surrogates(key, f"a key of {where}")
            _refuse_surrogates(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            _refuse_surrogates(inner, f"{where}[{at}]")


def _plain(value):
    # A template is foreign code and must not reach the methods of rich objects.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def has_written_arguments(message):
    """Whether a message has tool calls as services give them, with JSON text where most templates want an object."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, (list, tuple)) else ()
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return any(isinstance(function, dict) and isinstance(function.get("arguments"), str) for function in functions)
