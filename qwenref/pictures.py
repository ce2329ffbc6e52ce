"""Pictures handed to a model: what is refused, which tokens they stand for, and what a cache keeps of them.

Everything is checked before the tower or a layer runs.
"""

import itertools
from collections import namedtuple

import numpy as np

from qwenref import _C
from qwenref.errors import CapabilityMissing, InputError, ShapeError, compose
from qwenref.inputs import checked_grids, checked_patches, integers
from qwenref.positions import (
    IMAGE,
    NAMES,
    NOTHING,
    TEXT,
    VIDEO,
    WORDS,
    Begun,
    Supply,
    Waiting,
    miscounted,
    pictures_of,
    token_kinds,
    walk,
)

# Of a picture a row has begun: number of its first token, placeholders, positions it takes; the same of the image or
# video it belongs to: first token, and how many frame groups follow.
Met = namedtuple("Met", "begin tokens reach kind item left")


def composite(source):
    """The config of a model that sees, from a model, config, dict or path."""
    config = getattr(source, "config", source)
    if not isinstance(config, (_C.Config, _C.TextConfig)):
        from qwenref.loading import as_config

        config = as_config(config)
    if getattr(config, "vision_config", None) is None:
        raise CapabilityMissing(
            compose("pictures: a model without vision", found="no vision_config in its config", do="pass text alone")
        )
    return config


def grids_of(kind, grids, merge):
    """int64 [n, 3], the checked grids of images or videos."""
    return checked_grids(grids, NAMES[kind][1], merge, WORDS[kind], still=kind == IMAGE)


def checked_types(types, shape, kinds=None):
    """int64 [B, T] of 0 text, 1 image, 2 video: the placeholders `kinds`, or fewer."""
    types = integers(types, "mm_token_type_ids", (1, 2))
    types = types[None] if types.ndim == 1 else types
    wrong = types.shape != shape or (types < TEXT) | (types > VIDEO)
    if wrong is True:
        raise ShapeError(compose("mm_token_type_ids: wrong shape", found=list(types.shape), expected=list(shape)))
    if kinds is not None:
        wrong |= (types != TEXT) & (types != kinds)
    if wrong.any():
        row, t = np.argwhere(wrong)[0]
        own = "" if kinds is None else f", where the id is {('text', 'an image', 'a video')[kinds[row, t]]}"
        raise InputError(
            compose(
                f"mm_token_type_ids[{row}, {t}] is {types[row, t]}{own}",
                expected="0 for text, 1 at image placeholders, 2 at video placeholders",
            )
        )
    return types


class Handed:
    """What a call brings: kinds of its tokens [B, T], and the pictures, with their patches.

    `exact` when nothing may be left over: a call without a cache.  `.pixels` and `.grids` are what the tower gets, all
    images before all videos; `.offsets` where each Picture begins in what it returns.
    """

    def __init__(self, config, input_ids, shape, images, videos, mm_token_type_ids=None, exact=True):
        """images, videos: (pixels, grids) as they came, None for what did not · input_ids int64 [B, T], or None"""
        self.exact, self.grids, self.pixels, self.items = exact, {}, {}, {}
        self.kinds = self.opened = None
        if config.vision_config is None:
            if (*images, *videos) != (None,) * 4:
                composite(config)
            return
        vision = config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        for kind, (pixels, grids) in ((IMAGE, images), (VIDEO, videos)):
            if (pixels is None) != (grids is None):
                have, lack = NAMES[kind] if grids is None else NAMES[kind][::-1]
                raise InputError(
                    compose(f"forward: {have} without {lack}", do=f"pass {lack} as the processor returns it")
                )
            if grids is not None:
                name, grid_name = NAMES[kind]
                self.grids[kind] = grids_of(kind, grids, merge)
                self.pixels[kind] = checked_patches(pixels, name, width, self.grids[kind], grid_name, WORDS[kind])
                self.items[kind] = pictures_of(kind, self.grids[kind], merge)
        if input_ids is not None:
            self.kinds = token_kinds(input_ids, config.image_token_id, config.video_token_id)
            if mm_token_type_ids is not None:
                self.kinds = checked_types(mm_token_type_ids, shape, self.kinds)
            self.opened = input_ids == config.vision_start_token_id
        elif mm_token_type_ids is not None:
            self.kinds = checked_types(mm_token_type_ids, shape)
        elif self.given:
            raise InputError(
                compose(
                    "forward: pictures with inputs_embeds",
                    found="no token ids, which say where the pictures stand",
                    do="pass input_ids, or mm_token_type_ids with 1 at image and 2 at video placeholders",
                )
            )

    @property
    def given(self):
        """How many images and videos came."""
        return sum(map(len, self.items.values()))

    def features(self, visual, hidden):
        """{Picture: rows [tokens, H]} of what the tower makes of the patches, in one call."""
        if not self.given:
            return {}
        if visual is None:
            raise CapabilityMissing(
                compose("forward: pictures for a model without a tower", do="open a checkpoint that has model.visual.*")
            )
        pixels, grids = (np.concatenate([own[kind] for kind in own]) for own in (self.pixels, self.grids))
        merged = visual(pixels, grid_thw=grids)
        pictures = [picture for kind in self.items for item in self.items[kind] for picture in item]
        total = sum(picture.tokens for picture in pictures)
        if np.shape(merged) != (total, hidden):
            raise ShapeError(
                compose("model.visual: wrong shape", found=list(np.shape(merged)), expected=f"[{total}, H {hidden:,}]")
            )
        ends = np.cumsum([picture.tokens for picture in pictures])
        return {p: merged[end - p.tokens : end] for p, end in zip(pictures, ends.tolist(), strict=True)}


class Placing:
    """Where the tokens of a call stand, and which of them are pictures.

    `.positions` int64 [3, B, T], 0 at pads · `.deltas` int64 [B, T]: rope_delta of the row after each kept token ·
    `.spans` [row] of `Span` over kept tokens · `.waiting`, `.met` [row]: what the cache keeps after the call.
    """

    def __init__(self, cache, handed, kept, begin, end):
        self._cache, self._handed, self._kept, self._end = cache, handed, kept, end
        B, T = kept.shape
        self.deltas = np.where(begin == cache.sequence_begin[:, None], cache.rope_deltas[:, None], 0)
        text = np.where(kept, end - 1 - begin + self.deltas, 0)
        self.positions = np.broadcast_to(text, (3, B, T))
        self.spans, self.waiting, self.met = [()] * B, list(cache.waiting), list(cache.met)
        self._walk(begin, end)
        last = T - 1 - kept[:, ::-1].argmax(axis=1)
        self.rope_deltas = np.where(kept.any(axis=1), self.deltas[np.arange(B), last], cache.rope_deltas)

    @property
    def merges(self):
        """Whether any token is a picture's."""
        return any(self.spans)

    def _walk(self, begin, end):
        cache, handed, kept = self._cache, self._handed, self._kept
        given = handed is not None and handed.given
        named = handed is not None and handed.kinds is not None and handed.kinds[kept].any()
        if not given and not named and all(waiting == NOTHING for waiting in self.waiting):
            return  # text, the usual call
        supply = Supply({} if handed is None else handed.items)
        exact = handed is not None and handed.exact
        for row, own in enumerate(kept):
            kinds, waiting = self._kinds(row), self.waiting[row]
            if not kinds.any() and waiting == NOTHING and not given:
                continue
            columns, begun = np.flatnonzero(own), waiting.begun
            supply.enter(waiting)
            if len(columns):
                fresh = np.diff(np.concatenate([cache.sequence_begin[row : row + 1], begin[row, columns]])) != 0
                tokens = end[row, columns] - begin[row, columns]
                self._refuse_more(row, kinds, fresh, columns)
                position = int(tokens[0] - 1 + self.deltas[row, columns[0]])
                stands, after, spans, begun = walk(kinds, fresh, position, waiting, supply, not exact, row, columns)
                if spans:
                    self._take(row, columns, spans, stands, after - tokens)
            if not exact and cache.batch == 1:
                supply.keep_rest()
            self.waiting[row] = Waiting(begun, supply.row)
            if exact and self.waiting[row] != NOTHING:
                raise miscounted(begun.picture, begun.met, row) if begun else miscounted(supply.row[0], 0, row)
        if supply.rest is not None:
            self._refuse_rest(supply.rest, exact)

    def _take(self, row, columns, spans, stands, deltas):
        if not self.positions.flags.writeable:
            self.positions = self.positions.copy()
        self.positions[:, row, columns], self.deltas[row, columns] = stands, deltas
        self.spans[row], self.met[row] = tuple(spans), (*self.met[row], *self._entries(row, spans))

    def _kinds(self, row):
        """Kinds of the kept tokens of a row.

        A lone placeholder outside of vision marks, in a row that was given nothing, is text: models write such ids.
        """
        handed, kept = self._handed, self._kept[row]
        if handed is None or handed.kinds is None:
            return np.zeros(int(kept.sum()), np.int64)
        kinds = handed.kinds[row, kept]
        if handed.given or self.waiting[row] != NOTHING or not kinds.any() or handed.opened is None:
            return kinds
        before = np.concatenate([[False], ((kinds != TEXT) | handed.opened[row, kept])[:-1]])
        behind = np.concatenate([(kinds != TEXT)[1:], [False]])
        return np.where(before | behind, kinds, TEXT)

    def _refuse_more(self, row, kinds, fresh, columns):
        """Placeholders that go on where a picture has ended are none of the next one: nothing stands between them."""
        met, length = self.met[row], self._cache.length[row]
        if met and not fresh[0] and met[-1].begin + met[-1].tokens == length and kinds[0] == met[-1].kind:
            raise InputError(
                compose(
                    f"row {row}, column {columns[0]:,}: one placeholder more than the {WORDS[met[-1].kind]} before has",
                    expected=f"{met[-1].tokens:,} in a row",
                )
            )

    def _entries(self, row, spans):
        """`Met` of the pictures that begin in this call."""
        length, entries = int(self._cache.length[row]), []
        for span in spans:
            picture, begin = span.picture, length + span.start
            if span.met:
                continue
            item = begin
            if picture.frame:
                item = next(met.item for met in reversed((*self.met[row], *entries)) if met.kind == VIDEO)
            reach = max(picture.height, picture.width)
            entries.append(Met(begin, picture.tokens, reach, picture.kind, item, picture.left))
        return entries

    def _refuse_rest(self, picture, exact):
        if exact:
            raise miscounted(picture, 0)
        raise InputError(
            compose(
                f"{picture.name}: no placeholder in this call, and more than one row to wait for it",
                found=f"{self._cache.batch} rows",
                do="hand each picture over with the call of its first placeholder",
            )
        )

    def waiting_after(self, row, column):
        """What the row has begun and not met after the token in `column`: a `Waiting` without whole items."""
        index, begun, ahead = int(self._kept[row, : column + 1].sum()), self._cache.waiting[row].begun, []
        for span in self.spans[row]:
            if span.start < index:
                met = span.met + min(index, span.stop) - span.start
                begun = Begun(span.picture, span.base, met) if met < span.picture.tokens else None
            else:
                ahead.append(span.picture)
        ahead += self.waiting[row].pictures
        frames = (picture for picture in ahead if picture.kind == VIDEO)
        return Waiting(begun, tuple(itertools.takewhile(lambda picture: picture.frame > 0, frames)))

    def embedded(self, hidden, features):
        """hidden [B, T, H] with the rows of pictures in the places of their tokens, as a new array."""
        hidden = hidden.copy()
        for row, spans in enumerate(self.spans):
            columns = np.flatnonzero(self._kept[row])
            for start, stop, picture, _, met in spans:
                rows = features.get(picture, picture.embeds)
                hidden[row, columns[start:stop]] = rows[met : met + stop - start]
        return hidden

    def own(self, features, marks):
        """Let pictures that the cache goes on to hold have their embeddings to themselves."""
        for waiting in (*self.waiting, *marks):
            for picture in (*waiting.pictures, *((waiting.begun.picture,) if waiting.begun else ())):
                if picture.embeds is None and picture in features:
                    picture.embeds = features[picture].copy()
                    picture.embeds.flags.writeable = False


class PromptPictures:
    """The pictures of whole prompts [B, T], checked: each is met, and none of them or of the cache is left over.

    `arguments` are those of a forward by name, without what is None; `of(part)` gives those of some columns.
    """

    def __init__(self, config, ids, kept, cache, images, videos, mm_token_type_ids):
        names = (*NAMES[IMAGE], *NAMES[VIDEO], "mm_token_type_ids")
        given = zip(names, (*images, *videos, mm_token_type_ids), strict=True)
        self.arguments, self._firsts = {name: value for name, value in given if value is not None}, {}
        handed = Handed(config, ids, ids.shape, images, videos, mm_token_type_ids)
        begin = np.broadcast_to(cache.sequence_begin[:, None], ids.shape)
        placing = Placing(cache, handed, kept, begin, cache.length[:, None] + np.cumsum(kept, axis=1))
        self._grids, self._pixels = handed.grids, handed.pixels
        self._types = None if mm_token_type_ids is None else handed.kinds
        for kind, items in handed.items.items():
            first = {
                span.picture: np.flatnonzero(kept[row])[span.start]
                for row, spans in enumerate(placing.spans)
                for span in spans
            }
            self._firsts[kind] = np.array([first[item[0]] for item in items], np.int64)

    def of(self, part):
        """Arguments of the call that feeds the columns `part`, a slice: the pictures that begin there."""
        arguments = {}
        for kind, firsts in self._firsts.items():
            chosen = (firsts >= part.start) & (firsts < part.stop)
            if chosen.any():
                each = np.repeat(chosen, self._grids[kind].prod(axis=1))
                values = self._pixels[kind][each], self._grids[kind][chosen]
                arguments |= dict(zip(NAMES[kind], values, strict=True))
        if self._types is not None:
            arguments["mm_token_type_ids"] = self._types[:, part]
        return arguments


def as_text(model, ids):
    """Options of a call of a whole model that make text of all of its ids [B, T], placeholders of pictures too."""
    return {"mm_token_type_ids": np.zeros(np.shape(ids), np.int64)} if model._SEES else {}


def met_before(met, tokens):
    """The pictures that stand among the first `tokens` of a row, whole: None where the last of them, or the video it is
    part of, ends behind; then with the token at which that begins."""
    kept = tuple(one for one in met if one.begin < tokens)
    cut = bool(kept) and (kept[-1].begin + kept[-1].tokens > tokens or kept[-1].left > 0)
    return kept, kept[-1].item if cut else tokens


def waiting_arrays(waiting):
    """{id: array} of the embeddings that rows wait for, each once."""
    held = {}
    for begun, pictures in waiting:
        for picture in (*((begun.picture,) if begun else ()), *pictures):
            held[id(picture.embeds)] = picture.embeds
    return held
