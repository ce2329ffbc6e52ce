"""Where tokens stand: positions on the axes time, height and width for text, images and videos, and their deltas.

Text advances all three axes by one.  A picture that begins at position p has T = p, H = p + row, W = p + column over
its merged grid of h x w placeholders, and what follows begins at p + max(h, w).  An image is one picture; a video is
one for each of its frame groups, behind timestamp text of its own.  `rope_delta` of a row is the next position minus
the number of its tokens: with it, text goes on as if it were counted.
"""

import itertools
from collections import namedtuple

import numpy as np

from qwenref.errors import InputError, compose

TEXT, IMAGE, VIDEO = 0, 1, 2  # as transformers numbers them in mm_token_type_ids
WORDS = {IMAGE: "image", VIDEO: "video"}
NAMES = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}

# A picture of which `met` placeholders came by so far, from position `base` on.
Begun = namedtuple("Begun", "picture base met")
# What a row was given and has not met: the picture it is in, or None, and those that follow, in order.
Waiting = namedtuple("Waiting", "begun pictures")
NOTHING = Waiting(None, ())
# Tokens start:stop of a call (counted without pads) are a picture's placeholders from number `met` on.
Span = namedtuple("Span", "start stop picture base met")


class Picture:
    """An image, or one frame group of a video: `height` x `width` placeholders that stand together.

    `.number` counts images, or videos, within the call that brought them; `.embeds` float [tokens, H] is what the tower
    made of it, None as long as it has not run.
    """

    def __init__(self, kind, number, height, width, frame=0, frames=1):
        self.kind, self.number, self.frame, self.frames = kind, number, frame, frames
        self.height, self.width = height, width
        self.embeds = None

    @property
    def tokens(self):
        return self.height * self.width

    @property
    def name(self):
        word = f"{WORDS[self.kind]} {self.number}"
        return word if self.kind == IMAGE else f"{word}, frame group {self.frame} of {self.frames}"

    @property
    def left(self):
        """How many frame groups of the same video follow."""
        return self.frames - self.frame - 1

    def positions(self, base, first=0, last=None):
        """int64 [3, n] of the placeholders first:last."""
        at = np.arange(first, self.tokens if last is None else last)
        return np.stack([np.full_like(at, base), base + at // self.width, base + at % self.width])

    def reach(self, met):
        """How far beyond its base position a picture has come after `met` placeholders: max(h, w) after all of them."""
        return np.maximum((met - 1) // self.width, np.minimum(met, self.width) - 1) + 1


def pictures_of(kind, grids, merge):
    """[[Picture, ...] of each image or video] for grids [n, 3] of patches (frame groups, height, width)."""
    return [
        [Picture(kind, number, h // merge, w // merge, frame, t) for frame in range(t)]
        for number, (t, h, w) in enumerate(np.asarray(grids).tolist())
    ]


class Supply:
    """Pictures in the order in which they are met: those a row waits for, then those of the call, row after row."""

    def __init__(self, items):
        self._new = {kind: list(reversed(own)) for kind, own in items.items()}
        self._given = {kind: len(own) for kind, own in items.items()}

    def enter(self, waiting):
        """Go on with a row."""
        self._row = list(waiting.pictures)

    def take(self, kind):
        """The next picture of that kind, or None."""
        at = next((i for i, picture in enumerate(self._row) if picture.kind == kind), None)
        if at is not None:
            return self._row.pop(at)
        if not self._new.get(kind):
            return None
        first, *others = self._new[kind].pop()
        self._row.extend(others)
        return first

    def keep_rest(self):
        """Let the row wait for everything that nobody has met."""
        for kind in (IMAGE, VIDEO):
            for frames in reversed(self._new.pop(kind, ())):
                self._row.extend(frames)

    @property
    def row(self):
        """What the row waits for."""
        return tuple(self._row)

    @property
    def rest(self):
        """First picture that nobody has met, or None."""
        return next((own[-1][0] for own in self._new.values() if own), None)

    def missing(self, kind, row, column, found):
        """The error of placeholders that no picture belongs to."""
        given, word, names = self._given.get(kind, 0), WORDS[kind], " and ".join(NAMES[kind])
        return InputError(
            compose(
                f"row {row}, column {column:,}: {found:,} {word} placeholder{'s' * (found > 1)} and no {word} for "
                + ("them" if found > 1 else "it"),
                found=f"{given:,} {word}{'s' * (given != 1)} handed over",
                expected=f"{word} {given}",
                do=f"pass {names}; where such an id is text, pass mm_token_type_ids with 0 there",
            )
        )


def miscounted(picture, found, row=None, column=None):
    """The error of a picture with another number of placeholders than its grid makes."""
    where = "any row" if row is None else f"row {row}" + ("" if column is None else f", column {column:,}")
    return InputError(
        compose(
            f"{picture.name}: {found:,} placeholder{'s' * (found != 1)}, its grid makes {picture.tokens:,}",
            found=f"{found:,} side by side in {where}",
            expected=f"{picture.tokens:,}   ({picture.height} x {picture.width} merged patches)",
            do="expand each placeholder with the processor that made the grids, and hand both over in the same order",
        )
    )


def walk(kinds, fresh, position, waiting, supply, open_end, row=0, columns=None):
    """Positions of the tokens of one row: (int64 [3, n], next positions [n], [Span], Begun or None).

    kinds [n] TEXT, IMAGE or VIDEO · fresh [n] tokens that begin a sequence · position of the first token ·
    waiting what the row has not met · supply the pictures, entered for this row · open_end whether the row may end
    inside of a picture · row, columns for messages.
    """
    n = len(kinds)
    where = range(n) if columns is None else columns
    positions, after, spans = np.empty((3, n), np.int64), np.empty(n, np.int64), []
    cuts = np.flatnonzero((np.diff(kinds) != 0) | fresh[1:]) + 1
    begun = waiting.begun
    for start, stop in itertools.pairwise([0, *cuts.tolist(), n]):
        kind = int(kinds[start])
        if begun is not None and (kind != begun.picture.kind or fresh[start]):
            raise miscounted(begun.picture, begun.met, row, where[start])
        if fresh[start]:
            position = 0
        if kind == TEXT:
            positions[:, start:stop] = np.arange(position, position + stop - start)
            after[start:stop] = positions[0, start:stop] + 1
            position += stop - start
            continue
        if begun is None:
            picture = supply.take(kind)
            if picture is None:
                raise supply.missing(kind, row, where[start], stop - start)
            begun = Begun(picture, position, 0)
        picture, base, met = begun
        last = met + stop - start
        if last > picture.tokens or (last < picture.tokens and not (stop == n and open_end)):
            raise miscounted(picture, last, row, where[start])
        spans.append(Span(start, stop, picture, base, met))
        positions[:, start:stop] = picture.positions(base, met, last)
        after[start:stop] = base + picture.reach(np.arange(met + 1, last + 1))
        position = int(after[stop - 1])
        begun = Begun(picture, base, last) if last < picture.tokens else None
    return positions, after, spans, begun


def token_kinds(ids, image_id, video_id):
    """int64 [B, T]: TEXT, IMAGE or VIDEO."""
    return np.where(ids == image_id, IMAGE, np.where(ids == video_id, VIDEO, TEXT))


def rope_index(
    model_or_config,
    input_ids,
    image_grid_thw=None,
    video_grid_thw=None,
    attention_mask=None,
    mm_token_type_ids=None,
):
    """Positions of whole prompts and their deltas: (int64 [3, B, T], int64 [B]).

    input_ids [T] or [B, T] with expanded placeholders · image_grid_thw [n, 3], video_grid_thw [m, 3] of patches in the
    order of the placeholders, row after row · attention_mask [B, T], 1 keep, 0 pad: a pad has position 0 · what
    `mm_token_type_ids` [B, T] calls 0 is text, whatever its id.

    InputError names the picture whose number of placeholders is another than its grid makes, with both numbers.
    What `model(...)` does with its own arguments; for engines and tools that need positions without a model.
    """
    from qwenref.inputs import checked_ids, checked_mask
    from qwenref.pictures import checked_types, composite, grids_of

    config = composite(model_or_config)
    ids = checked_ids(input_ids, config.text_config.vocab_size)
    kept = checked_mask(attention_mask, *ids.shape, np.ones((len(ids), 0), bool))
    kept = np.ones(ids.shape, bool) if kept is None else kept
    kinds = token_kinds(ids, config.image_token_id, config.video_token_id)
    if mm_token_type_ids is not None:
        kinds = checked_types(mm_token_type_ids, ids.shape, kinds)
    merge = config.vision_config.spatial_merge_size
    given = {kind: grids for kind, grids in ((IMAGE, image_grid_thw), (VIDEO, video_grid_thw)) if grids is not None}
    items = {kind: pictures_of(kind, grids_of(kind, grids, merge), merge) for kind, grids in given.items()}
    supply = Supply(items)
    positions, deltas = np.zeros((3, *ids.shape), np.int64), np.zeros(len(ids), np.int64)
    for row, own in enumerate(kept):
        columns = np.flatnonzero(own)
        if not len(columns):
            continue
        supply.enter(NOTHING)
        fresh = np.zeros(len(columns), bool)
        stands, after, _, _ = walk(kinds[row, own], fresh, 0, NOTHING, supply, False, row, columns)
        if supply.row:
            raise miscounted(supply.row[0], 0, row)
        positions[:, row, own] = stands
        deltas[row] = after[-1] - len(columns)
    if supply.rest is not None:
        raise miscounted(supply.rest, 0)
    return positions, deltas
