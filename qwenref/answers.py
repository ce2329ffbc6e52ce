"""Take an answer apart: thinking, content and tool calls with the types of their schema; and whether it survives that.

Reads the XML form of tool calls, as the chat templates of the family write it:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

import json
import math
import re
import warnings
from typing import NamedTuple

from qwenref.errors import InputError, QwenrefWarning, compose
from qwenref.rendering import common
from qwenref.tokenizer import ids_of_tokens

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
# A value may itself hold tags; it ends where another parameter or the end of the call follows.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>\s*</tool_call>))")
_CALL_END = re.compile(r"\s*</function>\s*</tool_call>")

_WORDS = {
    "boolean": {"true": True, "false": False, "True": True, "False": False},
    "null": {"null": None, "None": None},
}


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: dict  # {parameter: value of the type its schema asks for}


class Answer(NamedTuple):
    """The parts of an answer.  No text gets lost: what could not be read as a call stands in `content`."""

    thinking: str | None  # without its tags and the newlines at its ends; None where there was no thinking part
    content: str  # without the newlines that set it off from thinking and calls
    tool_calls: tuple  # of ToolCall, in order
    problems: tuple  # of str: what is cut off, malformed or not as the tools' schemas say; empty for a clean answer

    @property
    def message(self):
        """The answer as a message for `render`."""
        message = {"role": "assistant", "content": self.content}
        if self.thinking is not None:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", "function": call._asdict()} for call in self.tool_calls]
        return message


class RoundTrip(NamedTuple):
    """Whether an answer, taken apart and rendered as history, gives the ids the model has seen."""

    same: bool
    at: int | None  # index of the first id that differs, counted from the start of the prompt
    went: list  # prompt ids and the generated ones
    comes: list  # ids of the conversation with the answer in it
    answer: Answer

    def __repr__(self):
        if self.same:
            return f"RoundTrip · the {len(self.went):,} ids come back"
        sides = [
            " ".join(map(str, ids[max(0, self.at - 2) : self.at + 4])) or "nothing" for ids in (self.went, self.comes)
        ]
        head = f"RoundTrip · id {self.at:,} of {len(self.went):,} changes; from {max(0, self.at - 2):,} on"
        return f"{head}\n  went   {sides[0]}\n  comes  {sides[1]}"


def parse(text, tools=None, thinking=None):
    """The `Answer` in a generated text.

    text       what the model wrote, tags included, without the token that ended it
    tools      the JSON schemas the prompt listed ({"type": "function", "function": {...}}, or the inner object alone).
               An argument gets the type its schema asks for: string as it stands; integer, number, boolean, array,
               object, null read as JSON (True, False and None too, as some templates write them).  Where several types
               are allowed, string comes last.  Without a schema, or where the text is no such value, it stays text.
    thinking   whether the prompt has opened the thinking part; None: yes if the text ends one that it did not begin

    A text of a model is never an error: see `Answer.problems`.
    """
    if not isinstance(text, str):
        raise InputError(compose("parse: not text", found=type(text).__name__, expected="str"))
    schemas, problems = _schemas(tools), []
    thought, rest = _split_thinking(text, thinking, problems)
    content, calls = _split_calls(rest, schemas, problems)
    return Answer(thought, content, tuple(calls), tuple(problems))


def opens_thinking(prompt):
    """Whether a prompt's text ends inside a thinking part."""
    last = prompt.rpartition("<|im_start|>")[2]  # a message before may talk about the tags
    return last.rfind("<think>") > last.rfind("</think>")


def round_trip(model, messages, new_ids, tools=None, enable_thinking=None, **variables):
    """Render `messages` with the answer `new_ids` parsed and put behind them, and compare ids: a `RoundTrip`.

    `model` is a model or a Tokenizer; the other arguments are those the prompt was rendered with.  A QwenrefWarning
    shows the first id that changes: from there on a model that gets the rendered history sees something else than it
    wrote, and nothing that was cached behind it holds.  Where that matters, go on with the ids themselves.
    """
    tokenizer = getattr(model, "tokenizer", model)
    prompt = tokenizer.render(messages, tools, True, enable_thinking, **variables)
    new_ids = ids_of_tokens("round_trip: new_ids", new_ids)
    ended = new_ids[-1:] and new_ids[-1] in tokenizer.stop.ids
    answer = parse(tokenizer.decode(new_ids[:-1] if ended else new_ids), tools, opens_thinking(prompt))
    again = tokenizer.render([*messages, answer.message], tools, False, enable_thinking, **variables)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    went, comes = prompt_ids + new_ids, tokenizer.encode(again, add_special_tokens=False)
    found = compared(went, comes, answer)
    if not found.same:
        at = found.at
        place = f"in the prompt ({len(prompt_ids):,} ids)" if at < len(prompt_ids) else "in the answer"
        warnings.warn(
            compose(
                f"round_trip: id {at:,}, {place}, changes when the answer is rendered as history",
                found=_around(tokenizer, comes, at),
                expected=_around(tokenizer, went, at) + ", as generated",
                do="go on with the generated ids instead of the messages",
            ),
            QwenrefWarning,
            stacklevel=2,
        )
    return found


def compared(went, comes, answer):
    """`RoundTrip`: whether the ids that went in and came out begin the ids of the history."""
    at = common(went, comes)
    return RoundTrip(at == len(went), None if at == len(went) else at, list(went), list(comes), answer)


def _around(tokenizer, ids, at):
    return " ".join(f"{id}:{tokenizer.token_text(id)}" for id in ids[max(0, at - 2) : at + 4]) or "nothing"


# Thinking


def _split_thinking(text, inside, problems):
    begin, end = text.find("<think>"), text.find("</think>")
    begins_itself = text.lstrip().startswith("<think>")
    if inside is None:
        inside = end >= 0 and not 0 <= begin < end
    if not inside and not begins_itself:
        return None, text
    if begins_itself:
        text = text[begin + len("<think>") :]
    thought, closed, rest = text.partition("</think>")
    if not closed:
        problems.append("the thinking part is not closed")
    return thought.strip("\n"), rest.lstrip("\n")


# Calls


def _split_calls(text, schemas, problems):
    pieces, calls, at = [], [], 0
    while (begin := text.find("<tool_call>", at)) >= 0:
        pieces.append(text[at:begin])
        found = len(problems)
        call, at = _read_call(text, begin + len("<tool_call>"), schemas, problems)
        if call is None:
            end = text.find("</tool_call>", begin)
            at = len(text) if end < 0 else end + len("</tool_call>")
            problems[found:] = [f"tool call at character {begin:,}: {problems[-1]}"]
            pieces.append(text[begin:at])
        else:
            problems[found:] = [f"tool call {len(calls)}: {problem}" for problem in problems[found:]]
            calls.append(call)
    pieces.append(text[at:])
    if calls and pieces[-1].strip():
        problems.append("there is text after a tool call")
    kept = [pieces[0].rstrip("\n") if calls else pieces[0], *(piece for piece in pieces[1:] if piece.strip())]
    content = "".join(kept)
    if not calls and "<tool_call>" not in text and _FUNCTION.search(text):
        problems.append("there is a <function=...> outside of <tool_call>")
    return content, calls


def _read_call(text, at, schemas, problems):
    """(ToolCall, where the text goes on), or (None, at) with the reason as the last problem."""
    head = _FUNCTION.match(text, at)
    if head is None:
        json_form = text[at:].lstrip().startswith("{")
        problems.append("JSON inside, the form of older models" if json_form else "no <function=NAME>")
        return None, at
    name, arguments, at = head[1].strip(), {}, head.end()
    schema = schemas.get(name) if schemas is not None else None
    if schemas is not None and schema is None:
        problems.append(f"no tool is called {name!r}")
    while (end := _CALL_END.match(text, at)) is None:
        begin = _PARAMETER.match(text, at)
        stop = _VALUE_END.search(text, begin.end()) if begin else None
        if stop is None:
            problems.append("not closed" if begin or not text[at:].strip() else "neither a parameter nor the end")
            return None, at
        key = begin[1].strip()
        if key in arguments:
            problems.append(f"parameter {key!r} is given twice; the later one is kept")
        arguments[key] = _argument(text[begin.end() : stop.start()], key, schema, problems)
        at = stop.end()
    missing = [key for key in _names((schema or {}).get("required")) if key not in arguments]
    if missing:
        problems.append(f"no parameter {', '.join(map(repr, missing))}")
    return ToolCall(name, arguments), end.end()


def _argument(text, key, schema, problems):
    if schema is None:
        return text
    inner = _object(schema.get("properties")).get(key)
    if inner is None:
        inner = schema.get("additionalProperties")
        if not isinstance(inner, dict):
            problems.append(f"{key!r} is no parameter of this tool")
            return text
    kinds = _kinds(inner, schema)
    for kind in sorted(kinds, key=lambda kind: kind == "string"):  # stable: else in the order of the schema
        fits, value = _read(text, kind)
        if fits:
            return value
    if kinds:
        problems.append(f"{key!r} is not {' or '.join(kinds)}: {text[:40]!r}")
    return text


# Schemas


def _schemas(tools):
    """{name: parameters} of the tools, or None."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, dict)) or not hasattr(tools, "__iter__"):
        raise InputError(compose("tools is not a list", found=type(tools).__name__, expected="a list of JSON schemas"))
    found = {}
    for at, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise InputError(
                compose(f"tools[{at}] has no name", found=repr(tool)[:80], expected='{"name": ..., "parameters": ...}')
            )
        found[inner["name"]] = _object(inner.get("parameters"))
    return found


def _kinds(schema, root, seen=()):
    """The JSON types a schema allows, in its order; () for any."""
    schema = _object(schema)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        target = root
        for step in reference.removeprefix("#/").split("/"):
            target = _object(target).get(step.replace("~1", "/").replace("~0", "~"))
        return _kinds(target, root, (*seen, reference))
    if "type" in schema:
        kinds = schema["type"]
        return (kinds,) if isinstance(kinds, str) else tuple(_names(kinds))
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list):
            inner = [_kinds(one, root, seen) for one in schema[several]]
            return tuple(dict.fromkeys(kind for kinds in inner for kind in kinds))
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    return tuple(dict.fromkeys(map(_kind_of, values if isinstance(values, (list, tuple)) else ())))


def _kind_of(value):
    for kind, types in (("null", type(None)), ("boolean", bool), ("integer", int), ("number", float), ("string", str)):
        if isinstance(value, types):
            return kind
    return "array" if isinstance(value, (list, tuple)) else "object"


def _read(text, kind):
    """(whether the text is a value of the kind, the value)."""
    if kind == "string":
        return True, text
    word = text.strip()
    if kind in _WORDS:
        return word in _WORDS[kind], _WORDS[kind].get(word)
    try:
        value = json.loads(word, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return False, None
    found = _kind_of(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return True, int(value)
    return found == kind or (kind == "number" and found == "integer"), value


def _refuse_constant(word):
    raise ValueError(f"{word} is no JSON")


def _finite(word):
    value = float(word)
    return value if math.isfinite(value) else _refuse_constant(word)  # 1e999 would be rendered as Infinity


def _names(value):
    """The strings of a list; none of anything else, since a schema may be wrong without the text being so."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, (list, tuple)) else []


def _object(value):
    return value if isinstance(value, dict) else {}
