"""Pictures ready for the model, and what became of each on the way."""

from typing import NamedTuple

import numpy as np

NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}

RESAMPLING = (
    "resized by Pillow's bicubic filter; torchvision's differs by at most 2 of 255 on smooth pictures, 32 on noise"
)


class Item(NamedTuple):
    """What became of one picture.

    kind, index        "image" or "video", and which of its kind
    name               of the file, or what it was handed over as
    original, resized  (height, width) in pixels
    grid               (frame groups, height, width) in patches
    tokens             placeholders it takes in a prompt
    pixels             by which the limits go: height * width, of a video times its frames, after resizing
    total, native_fps  frames of the video and their rate; None for an image
    frames             indices of those taken, the last one twice where they were an odd number; None for an image
    times              seconds at which the frame groups are; () for an image
    """

    kind: str
    index: int
    name: str
    original: tuple
    resized: tuple
    grid: tuple
    tokens: int
    pixels: int
    total: int | None = None
    native_fps: float | None = None
    frames: tuple | None = None
    times: tuple = ()


class Prepared:
    """Pictures ready for the model: `model(ids, **prepared.inputs)`.

    pixel_values, pixel_values_videos   float32 [patches, channels * temporal * patch * patch], or None
    image_grid_thw, video_grid_thw      int64 [n, 3]: frame groups, height, width in patches; or None
    items                               list of `Item`, images before videos
    text, ids                           the prompt with its placeholders filled, where one was given
    """

    def __init__(self, items, pixels, text=None, ids=None):
        self.items, self.text, self.ids = list(items), text, ids
        for kind, (values, grids) in NAMES.items():
            mine = [item.grid for item in self.of(kind)]
            setattr(self, values, pixels.get(kind))
            setattr(self, grids, np.array(mine, np.int64) if mine else None)

    @property
    def inputs(self):
        """{name: array} of what there is, as `model(...)` and `model.generate(...)` take it."""
        names = [name for pair in NAMES.values() for name in pair]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def nbytes(self):
        return sum(array.nbytes for array in self.inputs.values())

    def of(self, kind):
        """The items of one kind, in order."""
        return [item for item in self.items if item.kind == kind]

    def __add__(self, other):
        """The pictures of both, those of `other` behind; numbered anew, without a prompt."""
        items, pixels = [], {}
        for kind, (values, _) in NAMES.items():
            mine = self.of(kind) + other.of(kind)
            items += [item._replace(index=at) for at, item in enumerate(mine)]
            arrays = [array for array in (getattr(self, values), getattr(other, values)) if array is not None]
            if arrays:
                pixels[kind] = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        return Prepared(items, pixels)

    def behind(self, tokens):
        """The pictures that begin behind {kind: number of placeholders}, as where a cache holds those before."""
        items, pixels = [], {}
        for kind, (values, _) in NAMES.items():
            mine, first, gone = self.of(kind), 0, 0
            for item in mine:
                if first >= tokens.get(kind, 0):
                    break
                first, gone = first + item.tokens, gone + 1
            rows = sum(int(np.prod(item.grid)) for item in mine[:gone])
            if gone < len(mine):
                items += [item._replace(index=at) for at, item in enumerate(mine[gone:])]
                pixels[kind] = getattr(self, values)[rows:]
        return Prepared(items, pixels)

    def to_dict(self):
        """The facts of each item, as JSON has them."""
        return {"items": [item._asdict() for item in self.items]}

    def __repr__(self):
        counts = []
        for kind in NAMES:
            mine = self.of(kind)
            if mine:
                tokens = sum(item.tokens for item in mine)
                counts.append(f"{len(mine)} {kind}{'s' * (len(mine) != 1)}, {tokens:,} tokens")
        return f"Prepared · {' · '.join(counts) or 'no pictures'} · {self.nbytes / 2**20:.4g} MiB"

    def describe(self):
        """Text: each item from its original size over the resized one and the grid to its tokens."""
        rows = [_row(item) for item in self.items]
        widths = [max((len(row[at]) for row in rows), default=0) for at in range(5)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        for at, item in enumerate(self.items):
            if item.kind == "video":
                lines[at] += f"\n{' ' * widths[0]}  {_frames(item)}"
        return "\n".join([repr(self), *(line.rstrip() for line in lines), RESAMPLING])

    __str__ = describe


def _row(item):
    size = "{:,} x {:,}".format
    resized = f"-> {size(*item.resized)}" if item.resized != item.original else "as it is"
    tokens = f"-> {item.tokens:,} token{'s' * (item.tokens != 1)}"
    grid = f"-> grid {' x '.join(map(str, item.grid))}"
    return f"{item.kind} {item.index}", f"{size(*item.original)} ({item.name})", resized, grid, tokens


def _frames(item):
    times = [f"{seconds:.1f}" for seconds in item.times]
    times = times if len(times) <= 6 else [*times[:3], "…", times[-1]]
    count = len(set(item.frames))
    twice = ", the last one twice" if count < len(item.frames) else ""
    said = f"{count:,} of {item.total:,} frames at {item.native_fps:.4g} per second{twice}"
    return f"{said}; groups at {' '.join(times)} s"
