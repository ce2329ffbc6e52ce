"""A rendered prompt with its pictures: placeholders filled, spans that say which ids are which picture."""

import functools
from collections.abc import Mapping

from qwenref import rendering
from qwenref.errors import InputError, a_kind, compose
from qwenref.processing import conversation, placeholders
from qwenref.rendering import Rendered


class PicturePrompt(Rendered):
    """A `Rendered` prompt that holds pictures: its text and ids are the filled ones.

    prepared   the `Prepared` pictures; `model.generate(prompt.ids, **prompt.inputs)`
    spans      as of every `Rendered`; the parts "image[k]" and "video[k][t]" are the placeholders of image k, and of
               frame group t of video k; "video[k].time[t]" is its time
    """

    def __new__(cls, text, ids, run=None, tokenizer=None, prepared=None, edits=()):
        made = super().__new__(cls, text, ids, run, tokenizer)
        made.prepared, made._edits = prepared, edits
        return made

    def __reduce__(self):
        return PicturePrompt, (self.text, self.ids, None, None, self.prepared)

    @property
    def inputs(self):
        """{name: array}: the pictures as `model(...)` and `model.generate(...)` take them."""
        return self.prepared.inputs

    @functools.cached_property
    def spans(self):
        if self._run is None:
            return []
        rows = [span[:4] for span in rendering.template_spans(self._run, self.tokenizer)]
        return rendering.with_ids(placeholders.overlaid(rows, self._edits), self.text, self.tokenizer)

    def to_dict(self):
        """All of it as JSON has it: as of every `Rendered`, and the facts of each picture."""
        return super().to_dict() | self.prepared.to_dict()

    def describe(self):
        """Text: each picture from its original size to its tokens."""
        return self.prepared.describe()


def prepare(model, messages, options=None):
    """The `Prepared` pictures that messages hold, by the processor of `model` (a model, or a Processor).

    None where they hold none, or where no part says what it shows: a prompt then keeps its placeholders as the
    template writes them.
    """
    held = {kind: found for kind, found in conversation.sources(messages).items() if found}
    given = {kind: [source for source in found if source is not None] for kind, found in held.items()}
    if not any(given.values()):
        return None
    for kind, found in held.items():
        if len(given[kind]) < len(found):
            at = next(at for at, source in enumerate(found) if source is None)
            raise InputError(
                compose(
                    f"messages: {kind} {at} of {len(found)} says not what it shows",
                    expected=f'{{"type": "{kind}", "{kind}": ...}} for all of them, or {kind}s=[...]',
                )
            )
    if not isinstance(options or {}, Mapping):
        expected = 'a dict of options of the Processor, such as {"native_fps": 2}'
        raise InputError(compose(f"processing: {a_kind(options)}", found=repr(options), expected=expected))
    options = {name: value for name, value in (options or {}).items() if name != "video_marks"}
    processor = getattr(model, "processor", model)
    return processor(images=given.get("image"), videos=given.get("video"), **options)


def fill(rendered, prepared, processor, options=None):
    """The `PicturePrompt` of a `Rendered` whose placeholders are still one per picture."""
    edits = processor.edits(rendered.text, prepared, (options or {}).get("video_marks", "plain"))
    text = placeholders.applied(rendered.text, edits)
    ids = rendered.tokenizer.encode(text, add_special_tokens=False)
    return PicturePrompt(text, ids, rendered._run, rendered.tokenizer, prepared, edits)
