"""A conversation in a terminal or through pipes: what is typed, what is answered, and the commands in between.

The prompt of every answer is the template's rendering of the whole conversation, and nothing else; a cache is used as
far as its tokens are the first of that prompt.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from qwenref.answers import opens_thinking
from qwenref.cache import Cache
from qwenref.chat import Reply
from qwenref.errors import InputError, QwenrefError, compose
from qwenref.plain import plain
from qwenref.rendering import common

HELP = """\
/reset          forget the conversation; the system message stays
/system TEXT    begin anew with this system message; without TEXT, with none
/show prompt    the exact prompt of the newest answer
/save FILE      the messages as JSON, as `qwenref render MODEL FILE` reads them
/help           these lines
/quit           leave, as does the end of input; Ctrl-C stops an answer
//TEXT          a message that begins with /TEXT"""

_DIM, _NORMAL, _END = "\x1b[2m", "\x1b[22m", "</think>"


class Conversation:
    """Messages, and a cache that holds the beginning of what they render to.

    The cache can go back to the newest question: a template that leaves old thinking out of the history makes the next
    prompt part from what the cache holds after an answer, but not from what it held before.
    """

    def __init__(self, model, system=None, enable_thinking=None, **options):
        self.model, self.options, self.enable_thinking = model, options, enable_thinking
        self.begin(system)

    def begin(self, system=None):
        """Forget everything, and begin with a system message or None."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.prompt = None  # of the newest answer
        self.reused = 0  # how many of its tokens were not run again
        self._cache, self._held = Cache(self.model), []
        self._asked = []  # ids up to the newest question, after which the cache has kept its states

    @property
    def system(self):
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def ask(self, text, begin=None, streamer=None):
        """The `Reply` to `text`; `begin(prompt)` is called first.  After an error all is as before."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._render(messages, True)
        history = self._render(messages, False)
        ids = list(prompt.ids)
        if begin is not None:
            begin(prompt.text)
        try:
            reused = self._go_back(ids)
            self._feed(ids[: min(common(ids, history.ids), len(ids) - 1)])
            asked = self._held
            out = self.model.generate(ids[len(asked) :], cache=self._cache, streamer=streamer, **self.options)
        except BaseException:
            self._held = None  # what the cache holds now is a part of an answer that nobody keeps
            raise
        self._asked, self.reused, self.prompt = asked, reused, prompt.text
        self._cache.forget_snapshots(before=len(asked))
        out.rows[0].prompt_ids = ids
        reply = Reply(out, self.model, prompt, messages, None, self.enable_thinking)
        self._held = reply.ids[: int(self._cache.length[0])]
        self.messages = reply.messages
        return reply

    def _render(self, messages, generation):
        from qwenref import render

        return render(self.model, messages, add_generation_prompt=generation, enable_thinking=self.enable_thinking)

    def _go_back(self, ids):
        """Let the cache hold a beginning of `ids`, as long as may be; the number of tokens."""
        if self._held is None or not _begins(ids, self._held):
            if len(self._asked) in self._cache.snapshots[0] and _begins(ids, self._asked):
                self._cache.crop(len(self._asked))
                self._held = self._asked
            else:
                self._cache.reset()
                self._held = []
        return len(self._held)

    def _feed(self, ids):
        """Run what is missing of `ids`, and keep the states after them."""
        if len(self._held) < len(ids):
            self._cache.snapshot_at(len(ids))
            self.model(ids[len(self._held) :], cache=self._cache, logits_to_keep=1)
            self._held = ids


def _begins(ids, held):
    return len(held) < len(ids) and ids[: len(held)] == held


def converse(conversation, show_json=None):
    """Read lines from standard input and answer them, until it ends or /quit.

    At a terminal an error or Ctrl-C costs one answer; through a pipe it ends the program, whose exit code tells.
    With `show_json(facts)` each answer is handed to it when it is whole, and standard output gets nothing else.
    """
    at_terminal = sys.stdin.isatty() and show_json is None
    if at_terminal:
        _line_editing()
        _note("a message, or /help")
    show = print if show_json is None else _note
    saved = set()
    while (line := _read(at_terminal)) is not None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not _command(conversation, line, saved, show):
                    return
            elif line.strip():
                text = line[1:] if line.startswith("//") else line
                if show_json is None:
                    _answer(conversation, text)
                else:
                    show_json({**conversation.ask(text).to_dict(), "reused": conversation.reused})
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            _note("\nstopped; question and answer are not kept")
        except (QwenrefError, OSError) as error:
            if not at_terminal or isinstance(error, BrokenPipeError):
                raise
            _note(f"{type(error).__name__}: {error}")


def _read(at_terminal):
    if at_terminal:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _line_editing():
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() a history and keys that move


def _answer(conversation, text):
    shown = _Shown(sys.stdout)
    try:
        out = conversation.ask(text, lambda prompt: shown.begin(opens_thinking(prompt)), shown.put)
    finally:
        shown.end()
    if out.finish == "max_new_tokens" or out.finish.startswith("context full"):
        _note(f"cut off: {out.finish}")
    elif not (way_back := out.to_dict()["round_trip"])["same"]:
        where = "" if way_back["at"] is None else f", from id {way_back['at']:,} of {len(out.ids):,}"
        _note(f"in the next prompt this answer has other ids{where}")


class _Shown:
    """An answer on a stream: thinking is dimmed where that can be seen, up to the tag that ends it."""

    def __init__(self, stream, colour=None):
        self._stream = stream
        seen = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colour = seen if colour is None else colour
        self._thinking, self._tail, self._last = False, "", ""

    def begin(self, thinking):
        self._thinking = thinking
        if thinking and self._colour:
            self._stream.write(_DIM)

    def put(self, piece):
        self._last = piece[-1:] or self._last
        if self._thinking:
            before = len(self._tail)
            seen = self._tail + piece
            at = seen.find(_END)
            if at >= 0:
                cut = at + len(_END) - before
                self._stream.write(piece[:cut])
                self._normal()
                piece = piece[cut:]
            else:
                self._tail = seen[-len(_END) + 1 :]
        self._stream.write(piece)
        self._stream.flush()

    def end(self):
        self._normal()
        if self._last not in ("", "\n"):
            self._stream.write("\n")
        self._stream.flush()

    def _normal(self):
        if self._thinking and self._colour:
            self._stream.write(_NORMAL)
        self._thinking = False


def _command(conversation, line, saved, show):
    """Obey a command; whether to go on."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word == "/quit" and not rest:
        return False
    if word == "/help" and not rest:
        show(HELP)
    elif word == "/reset" and not rest:
        conversation.begin(conversation.system)
        _note("forgotten")
    elif word == "/system":
        conversation.begin(rest or None)
        _note("a new conversation, with this system message" if rest else "a new conversation, no system message")
    elif word == "/show" and rest == "prompt":
        if conversation.prompt is None:
            raise InputError(compose("/show prompt: there is no answer yet", do="ask something first"))
        show(conversation.prompt)
    elif word == "/save" and rest:
        _save(conversation.messages, rest, saved)
    else:
        raise InputError(compose(f"chat: {line}", expected="a command:\n" + HELP))
    sys.stdout.flush()
    return True


def _save(messages, name, saved):
    path = Path(name).expanduser()
    if path.exists() and path.resolve() not in saved:
        raise InputError(compose(f"/save: {name} is there already", do="give another name"))
    path.write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    saved.add(path.resolve())
    _note(f"{len(messages):,} messages in {name}")


def _note(text):
    sys.stdout.flush()
    print(plain(text, sys.stderr), file=sys.stderr)
