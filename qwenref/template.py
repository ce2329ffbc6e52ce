"""Chat templates: find a checkpoint's own, render it in a sandbox with the functions transformers gives templates.

Never repairs a conversation: what the template refuses is reported with the template's words and the message.
"""

import datetime
import difflib
import json
import os
import warnings
from pathlib import Path
from typing import NamedTuple

from qwenref.errors import CheckpointError, InputError, QwenrefWarning, TemplateError, compose, frames_of_the_package
from qwenref.hub import read_json
from qwenref.messages import (
    REASONING_NAMES,
    checked_messages,
    checked_switch,
    checked_tools,
    has_written_arguments,
    plain,
)

_TAG = "\U0010fffd\U0010fffc "  # stands where a continued message ends; no text uses these two


def find_templates(folder):
    """{name: (source text, where it stands)} of a checkpoint folder; the usual one is called "default".

    A `chat_template.jinja` beats what `tokenizer_config.json` holds, because that is what writers of both keep current.
    """
    folder = Path(folder)
    found = {}
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    inline = read_json(folder / "tokenizer_config.json").get("chat_template")
    for name, value in (("chat_template.json", legacy), ("tokenizer_config.json", inline)):
        found.update(_named_templates(value, folder / name))
    files = [("default", folder / "chat_template.jinja")]
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        files += [(path.stem, path) for path in sorted(extra.glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                found[name] = (path.read_text(encoding="utf-8"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(compose(f"{path}: cannot be read as UTF-8", found=error)) from error
    return found


def _named_templates(value, path):
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, str(path))}
    if isinstance(value, list) and all(isinstance(row, dict) and {"name", "template"} <= set(row) for row in value):
        value = {row["name"]: row["template"] for row in value}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return {name: (text, f"{path} ({name})") for name, text in value.items()}
    raise CheckpointError(
        compose(
            f"{path}: chat_template has no known form",
            found=type(value).__name__,
            expected='text, or a list of {"name", "template"}',
        )
    )


class Run(NamedTuple):
    """What a template made, and of what."""

    text: str
    values: dict
    template: "ChatTemplate"

    def effective_thinking(self):
        """Whether the model is asked to think, by what the text is with the switch on and off.

        None where the switch changes nothing: the template has none, or the text has no place for it.
        """
        on, off = (self.template.fill({**self.values, "enable_thinking": choice}) for choice in (True, False))
        mine = self.template.fill(self.values)
        return None if on == off or mine not in (on, off) else mine == on


class ChatTemplate:
    """One compiled chat template.  `render(messages, ...)` gives the exact prompt text."""

    def __init__(self, source, where="chat template", special_tokens=None):
        import jinja2

        self.source, self.where = source, where
        self.special_tokens = dict(special_tokens or {})
        try:
            self._environment, self._reads = _environment(), None
            self._compiled = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                compose(f"{os.path.basename(where)}: line {error.lineno}: {error.message}", found=where)
            ) from error

    def __repr__(self):
        return f"ChatTemplate({len(self.source):,} characters from {self.where})"

    def render(
        self,
        messages,
        tools=None,
        add_generation_prompt=None,
        enable_thinking=None,
        continue_final_message=False,
        **variables,
    ):
        """The prompt text of a conversation.

        messages   a list of {"role", "content", ...}; further keys are the template's business
        tools      a list of JSON schemas, or None
        enable_thinking=None leaves the choice to the template, which differs between checkpoints of one family
        add_generation_prompt   None is True, but not where a message is continued
        continue_final_message  True, or the name of a key of the last message: the text ends inside that message,
                   after its content (its last text, of a content of parts), as written by an assistant so far
        variables  anything else the template reads; they beat the checkpoint's special tokens of the same name.  A
                   QwenrefWarning names those that it reads nowhere
        """
        return self.run(
            messages, tools, add_generation_prompt, enable_thinking, continue_final_message, **variables
        ).text

    def run(
        self,
        messages,
        tools=None,
        add_generation_prompt=None,
        enable_thinking=None,
        continue_final_message=False,
        **variables,
    ):
        """The same as a `Run`, which knows the values the template saw."""
        messages = checked_messages(messages)
        if not isinstance(continue_final_message, str):
            continue_final_message = checked_switch("continue_final_message", continue_final_message)
        if continue_final_message:
            if add_generation_prompt:
                raise InputError(
                    compose(
                        "render: continue_final_message and add_generation_prompt",
                        expected="one of them: the first goes on with a message, the second begins one",
                    )
                )
            name = continue_final_message if isinstance(continue_final_message, str) else "content"
            messages = [*messages[:-1], self._tagged(messages[-1], name, len(messages) - 1)]
        values = {**self.special_tokens, "documents": None, **plain(variables, "render")}
        if variables:
            self._warn_of_unread(variables)
        if enable_thinking is not None:
            values["enable_thinking"] = checked_switch("enable_thinking", enable_thinking)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        values.update(
            messages=messages,
            tools=checked_tools(tools),
            add_generation_prompt=checked_switch("add_generation_prompt", add_generation_prompt),
        )
        text = self.fill(values)
        return Run(self._cut(text, messages) if continue_final_message else text, values, self)

    def fill(self, values):
        """The template filled in with all the values it reads."""
        try:
            return self._compiled.render(values)
        except Exception as error:  # a template is a program of the checkpoint and may fail in any way
            raise self._explain(error, values["messages"]) from error

    def _warn_of_unread(self, variables):
        from jinja2.meta import find_undeclared_variables

        if self._reads is None:
            self._reads = find_undeclared_variables(self._environment.parse(self.source))
        unread = sorted(set(variables) - self._reads)
        near = [close for name in unread for close in difflib.get_close_matches(name, self._reads, n=1, cutoff=0.8)]
        if unread:
            warnings.warn(
                compose(
                    f"render: the chat template does not read {', '.join(unread)}",
                    found=self.where,
                    do=f"did you mean {near[0]}?" if near else "leave it out: it changes nothing",
                ),
                QwenrefWarning,
                stacklevel=frames_of_the_package(),
            )

    def pieces(self, values):
        """The pieces of text that `fill` joins, each with the message and the tool the template was looking at.

        [(text, index of a message or None, index of a tool or None), ...].  Read off the template's own loop
        variables while it is halted at the piece, so nothing about it has to be known.
        """
        messages = {id(message): at for at, message in enumerate(values["messages"])}
        tools = {id(tool): at for at, tool in enumerate(values["tools"] or ())}
        running = self._compiled.root_render_func(self._compiled.new_context(values))
        return [(text, _looked_at(running, messages), _looked_at(running, tools)) for text in running]

    def _tagged(self, message, name, at):
        found = message.get(name)
        if isinstance(found, str):
            names = [key for key in REASONING_NAMES if message.get(key) == found] if name in REASONING_NAMES else [name]
            if any(key in self.source for key in names):
                return {**message, **dict.fromkeys(names, found + _TAG)}
        if isinstance(found, (list, tuple)) and name in self.source:
            last = next((i for i in reversed(range(len(found))) if "text" in found[i]), None)
            if last is not None:
                part = {**found[last], "text": found[last]["text"] + _TAG}
                return {**message, name: [*found[:last], part, *found[last + 1 :]]}
        raise _cannot_continue(at, f"no text {name!r} that the template reads", ", ".join(sorted(message)))

    def _cut(self, text, messages):
        at = text.rfind(_TAG[:-1])
        if at < 0:
            raise _cannot_continue(
                len(messages) - 1, "the template leaves its end out", f"role {messages[-1]['role']!r}"
            )
        # The blank that ends the tag is gone where the template trims: then it trims the message, too.
        return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()

    def _explain(self, error, messages):
        at = _message_of(error, messages)
        place = "chat template" if at is None else f"chat template, messages[{at}]"
        words = str(error) or type(error).__name__
        found = None if at is None else f"role {messages[at]['role']!r}, keys {', '.join(sorted(messages[at]))}"
        do = f"change the conversation, or read {self.where}"
        if at is not None and has_written_arguments(messages[at]):
            do = f"json.loads the arguments of its tool calls, which are text; or read {self.where}"
        wrapped = TemplateError(
            compose(
                f"{place}: {words}",
                found=found,
                expected="what this template takes",
                do=do,
            )
        )
        wrapped.message_index = at
        return wrapped


def _cannot_continue(at, why, found):
    error = TemplateError(
        compose(f"chat template, messages[{at}]: cannot be continued: {why}", found=found, do="continue by ids instead")
    )
    error.message_index = at
    return error


def _looked_at(running, index):
    """Which of the objects of `index` the innermost loop of a halted template is at, or None."""
    found = {}
    while running is not None and getattr(running, "gi_frame", None) is not None:
        for name, value in running.gi_frame.f_locals.items():
            if id(value) in index and name.startswith("l_"):
                found.setdefault(int(name.split("_")[1]), set()).add(index[id(value)])
        running = running.gi_yieldfrom
    held = found[max(found)] if found else ()
    return next(iter(held)) if len(held) == 1 else None


def _environment():
    from jinja2 import TemplateError as Raised
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training; here the marked text is simply rendered."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message):
        raise Raised(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # jinja's own escapes <, > and & for HTML
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _message_of(error, messages):
    """Index of the message a failing template was looking at, or None.

    jinja rebuilds the traceback with the template's own variables, so the loop variable of the innermost frame that
    holds one of the messages tells; two different ones in a frame tell nothing.
    """
    index = {id(message): at for at, message in enumerate(messages)}
    best, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            held = {index[id(value)] for value in trace.tb_frame.f_locals.values() if id(value) in index}
            if len(held) == 1:
                best = held.pop()
        trace = trace.tb_next
    return best
