"""Answer a conversation, know what becomes of the answer in the next prompt, and go on by ids where that matters."""

import functools
import warnings

from qwenref.answers import compared
from qwenref.errors import CapabilityMissing, InputError, QwenrefError, QwenrefWarning, compose
from qwenref.generate import generate, render
from qwenref.generation import Generation
from qwenref.processing import conversation, placeholders
from qwenref.processing.prompt import PicturePrompt, fill, prepare
from qwenref.rendering import Rendered


class Reply(Generation):
    """A `Generation` that answers a conversation: all its fields, and besides

    prompt     `Rendered`: what the model was given
    answer     `Answer`: thinking, content, tool calls
    messages   the conversation with the answer in it, for `model.chat([*out.messages, question])`
    round_trip   `RoundTrip`: whether rendering `messages` gives the ids the model has seen; an error where the
                 template refuses them
    """

    def __init__(self, out, model, prompt, messages, tools=None, enable_thinking=None, processing=None):
        super().__init__(out.rows, out.steps, True)
        self.prompt, self.tools, self.enable_thinking = prompt, tools, enable_thinking
        self._tokenizer, self._asked, self._processing = model.tokenizer, messages, processing
        self._processor = model.processor if isinstance(prompt, PicturePrompt) else None

    @functools.cached_property
    def answer(self):
        return self.parse(self.tools)

    @property
    def messages(self):
        return [*self._asked, self.answer.message]

    @functools.cached_property
    def round_trip(self):
        again = render(self._tokenizer, self.messages, self.tools, False, self.enable_thinking)
        if isinstance(self.prompt, PicturePrompt):
            again = fill(again, self.prompt.prepared, self._processor, self._processing)
        return compared(self.ids, again.ids, self.answer)

    def to_dict(self):
        """The answer as JSON has it."""
        return {
            "prompt": self.prompt.text,
            "prompt_ids": list(self.prompt.ids),
            "text": self.text,
            "new_ids": self.new_ids,
            "finish": self.finish,
            "thinking": self.answer.thinking,
            "content": self.answer.content,
            "tool_calls": [call._asdict() for call in self.answer.tool_calls],
            "problems": list(self.answer.problems),
            "round_trip": self._way_back(),
        } | (self.prompt.prepared.to_dict() if isinstance(self.prompt, PicturePrompt) else {})

    def _way_back(self):
        try:
            return {"same": self.round_trip.same, "at": self.round_trip.at}
        except QwenrefError as error:  # of the template
            return {"same": False, "at": None, "error": str(error)}


def chat(
    model,
    messages,
    tools=None,
    enable_thinking=None,
    after=None,
    images=None,
    videos=None,
    processing=None,
    **options,
):
    """Answer a conversation: the checkpoint's template, then `generate` with the given options; a `Reply`.

    messages, tools, enable_thinking, images, videos, processing   as for `render`; `out.messages` keeps the pictures
    after   a `Reply`: `messages` are then the new ones alone, and the prompt is all ids of that reply with those of
            the new messages behind them.  Nothing is rendered again, so the model sees what it wrote.  A `cache` is
            the one that reply was made with; what it holds is not run again, nor its pictures handed over again.
            `tools` and `enable_thinking` are those of the reply where they are None.

    Without `after`, a QwenrefWarning says when the ids of the answer change as it is rendered as history: the next
    prompt is then not what the model has seen, and a cache does not hold it.  `out.round_trip` shows where.
    """
    messages = conversation.attached(messages, images, videos)
    if after is None:
        prompt, held = render(model, messages, tools, None, enable_thinking, processing=processing), 0
    else:
        tools, enable_thinking, messages, prompt = _behind(after, model, messages, tools, enable_thinking, processing)
        held = _held(options.get("cache"), after)
    out = generate(model, prompt.ids[held:], **_pictures(model, prompt, held), **options)
    out.rows[0].prompt_ids = list(prompt.ids)
    reply = Reply(out, model, prompt, messages, tools, enable_thinking, processing)
    if after is None:
        _warn_of_changes(reply)
    return reply


def _pictures(model, prompt, held):
    """{name: array} of the pictures that begin behind the first `held` ids of a prompt."""
    ids = {kind: getattr(model.config, f"{kind}_token_id", None) for kind in conversation.KINDS}
    if isinstance(prompt, PicturePrompt):
        return prompt.prepared.behind({kind: prompt.ids[:held].count(id) for kind, id in ids.items()}).inputs
    for kind, id in ids.items():
        if id in prompt.ids:
            raise InputError(
                compose(
                    f"chat: a place for {kind}s and no {kind}",
                    found=f"{prompt.ids.count(id)} x {model.tokenizer.token_text(id)} in the prompt",
                    expected=f'parts {{"type": "{kind}", "{kind}": ...}} in the messages, or {kind}s=[...]',
                )
            )
    return {}


def _warn_of_changes(reply):
    try:
        if reply.round_trip.same:
            return
        words = "the ids of the answer change when it is rendered as history; out.round_trip shows where"
    except QwenrefError as error:  # of the template; the answer is there all the same
        words = f"the answer cannot be rendered as history: {str(error).splitlines()[0]}"
    warnings.warn(
        compose(f"chat: {words}", do="go on by ids: model.chat(new_messages, after=out)"), QwenrefWarning, stacklevel=4
    )


# Going on by ids


def _behind(after, model, messages, tools, enable_thinking, processing):
    """(tools, enable_thinking, all messages, prompt) of new messages behind a reply."""
    if not isinstance(after, Reply):
        raise InputError(
            compose("chat: after", found=type(after).__name__, expected="a Reply, which model.chat returns")
        )
    tools = after.tools if tools is None else tools
    enable_thinking = after.enable_thinking if enable_thinking is None else enable_thinking
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(compose("chat: no new messages", found=repr(messages)[:80], expected="a list of messages"))
    every, tokenizer = [*after.messages, *messages], model.tokenizer
    text = _turn_behind(after, render(tokenizer, every, tools, True, enable_thinking), tokenizer)
    prepared = prepare(model, messages, processing)
    if prepared is not None:
        form = (processing or {}).get("video_marks", "plain")
        text = placeholders.applied(text, model.processor.edits(text, prepared, form))
    ids = after.ids + tokenizer.encode(text, add_special_tokens=False)
    if isinstance(after.prompt, PicturePrompt):
        prepared = after.prompt.prepared if prepared is None else after.prompt.prepared + prepared
    whole = tokenizer.decode(ids)
    prompt = Rendered(whole, ids) if prepared is None else PicturePrompt(whole, ids, prepared=prepared)
    return tools, enable_thinking, every, prompt


def _turn_behind(after, rendered, tokenizer):
    """What the template writes after the answer, less the stop token where the model has written that itself.

    The text of the answer may have changed on its way through the template; what follows its stop token has not.
    """
    answered = len(after.messages) - 1
    spans = [span for span in rendered.spans if span.message == answered]
    stops = [tokenizer.decode([id]) for id in tokenizer.stop.ids]
    frame = spans[-1] if spans and spans[-1].part == "frame" else None
    found = [(at, stop) for stop in stops if frame and (at := rendered.text.rfind(stop, frame.start, frame.stop)) >= 0]
    if not found:
        raise CapabilityMissing(
            compose(
                "chat: after: the template does not show where an answer ends",
                found=repr(rendered.text[frame.start : frame.stop]) if frame else "no text around the answer",
                expected=f"one of {', '.join(stops)} behind it",
                do="give all messages and no `after`",
            )
        )
    at, stop = max(found)
    written = after.new_ids[-1:] and tokenizer.decode(after.new_ids[-1:]) == stop
    return rendered.text[at + len(stop) if written else at :]


def _held(cache, after):
    """How many ids of the reply a cache holds."""
    if cache is None:
        return 0
    held = int(cache.length[0])
    if cache.batch != 1 or held > len(after.ids):
        raise InputError(
            compose(
                "chat: cache: not the one this reply was made with",
                found=f"{held:,} tokens in {cache.batch} row{'s' * (cache.batch != 1)}",
                expected=f"one row, at most the {len(after.ids):,} ids of the reply",
            )
        )
    return held
