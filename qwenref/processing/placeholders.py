"""Where pictures stand in a prompt: placeholders found, filled up to as many as the picture has tokens, and mapped."""

import re
from typing import NamedTuple

from qwenref.errors import InputError, compose

FORMS = ("plain", "nested")


class Marks(NamedTuple):
    """The texts of the four tokens around and in place of pictures."""

    image: str
    video: str
    start: str
    end: str


class Edit(NamedTuple):
    """text[start:stop] is replaced by `pieces`: (part, text), the part None where the template speaks."""

    start: int
    stop: int
    pieces: list

    @property
    def text(self):
        return "".join(text for _, text in self.pieces)


def count(text, marks):
    """(placeholders of images, of videos) in a text."""
    return text.count(marks.image), text.count(marks.video)


def edits(text, prepared, marks, form="plain"):
    """The `Edit`s that fill a text's placeholders with the `Prepared` pictures of each kind, in order.

    A video is written as one pair of marks per frame group, behind its time; the pair that stands around its
    placeholder is left out ("plain") or kept ("nested", as transformers' processor does).
    Parts are named "image[k]", "video[k][t]" (group t) and "video[k].time[t]".
    """
    if form not in FORMS:
        raise InputError(compose(f"video_marks: {form!r}", expected=" or ".join(map(repr, FORMS))))
    kinds = {marks.image: "image", marks.video: "video"}
    queues = {kind: prepared.of(kind) for kind in kinds.values()}
    _refuse_other_counts(text, queues, marks)
    found = []
    for match in re.finditer("|".join(map(re.escape, kinds)), text):
        kind = kinds[match.group()]
        item = queues[kind].pop(0)
        start, stop = match.span()
        if kind == "image":
            found.append(Edit(start, stop, [(f"image[{item.index}]", marks.image * item.tokens)]))
            continue
        around = text.startswith(marks.end, stop) and text.endswith(marks.start, 0, start)
        if form == "plain" and around:
            start, stop = start - len(marks.start), stop + len(marks.end)
        found.append(Edit(start, stop, _of_video(item, marks)))
    return found


def _of_video(item, marks):
    pads, pieces = marks.video * (item.tokens // item.grid[0]), []
    for at, seconds in enumerate(item.times):
        pieces += [
            (f"video[{item.index}].time[{at}]", f"<{seconds:.1f} seconds>"),
            (None, marks.start),
            (f"video[{item.index}][{at}]", pads),
            (None, marks.end),
        ]
    return pieces


def _refuse_other_counts(text, queues, marks):
    for kind, places in zip(("image", "video"), count(text, marks), strict=True):
        given = len(queues[kind])
        if places != given:
            mark = getattr(marks, kind)
            raise InputError(
                compose(
                    f"{given} {kind}{'s' * (given != 1)} for {places} place{'s' * (places != 1)} in the prompt",
                    found=f"{places} x {mark}",
                    expected="one for each",
                    do=f'a message\'s content takes parts {{"type": "{kind}", "{kind}": ...}}; {mark} written in a '
                    "text is a place, too",
                )
            )


def applied(text, made):
    """The text with its edits."""
    pieces, at = [], 0
    for edit in made:
        pieces += [text[at : edit.start], edit.text]
        at = edit.stop
    return "".join([*pieces, text[at:]])


def overlaid(rows, made):
    """Spans (message, part, start, stop) of a text as spans of the text with its edits."""
    atoms, at, pending = [], 0, list(made)
    for message, part, start, stop in rows:
        at = max(at, start)
        while pending and pending[0].start < stop:
            edit = pending.pop(0)
            atoms.append((message, part, edit.start - at))
            atoms += [(message, name or part, len(text)) for name, text in edit.pieces]
            at = edit.stop
        atoms.append((message, part, stop - at))
        at = max(at, stop)
    result, end = [], 0
    for message, part, length in atoms:
        if length > 0:
            begin = result.pop()[2] if result and result[-1][:2] == (message, part) else end
            end += length
            result.append((message, part, begin, end))
    return result
