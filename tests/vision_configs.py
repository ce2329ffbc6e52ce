"""Small models that see, and prompts of text, images and videos for them."""

import numpy as np
from text_configs import text_config

IMAGE, VIDEO, OPEN, CLOSE = 201, 202, 203, 204  # ids of the placeholders and of the marks around them
MERGE, WIDTH = 2, 3 * 2 * 4 * 4


def vision_config(layers="lllf", **changes):
    """A qwen3_5 config as a dict: a text model of the given layers and a tower of two blocks."""
    text = text_config(layers, **changes)
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "num_position_embeddings": 64,
            "out_hidden_size": text["hidden_size"],
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": OPEN,
        "vision_end_token_id": CLOSE,
        "tie_word_embeddings": False,
    }


class Prompt:
    """A row of ids with what its pictures need: `.ids`, `.types` as mm_token_type_ids, `.images`, `.videos` grids."""

    def __init__(self, rng, parts):
        """parts: a number of text tokens, or a grid (t, h, w): an image if it is a tuple, a video if it is a list."""
        self.ids, self.types, self.images, self.videos = [], [], [], []
        self._pixels, self._first = {1: [], 2: []}, {1: [], 2: []}
        for part in parts:
            if isinstance(part, int):
                self._add(rng.integers(0, 200, part).tolist(), 0)
                continue
            t, h, w = part
            (self.images if isinstance(part, tuple) else self.videos).append([t, h, w])
            kind, id = (1, IMAGE) if isinstance(part, tuple) else (2, VIDEO)
            self._pixels[kind].append(rng.standard_normal((t * h * w, WIDTH), np.float32))
            for frame in range(t):
                if kind == 2:
                    self._add(rng.integers(0, 200, 3).tolist(), 0)
                self._add([OPEN], 0)
                self._first[kind] += [len(self.ids)] * (frame == 0)
                self._add([id] * (h * w // MERGE**2), kind)
                self._add([CLOSE], 0)

    def _add(self, ids, kind):
        self.ids += ids
        self.types += [kind] * len(ids)

    def __len__(self):
        return len(self.ids)

    def pictures(self, start=0, stop=None):
        """Keyword arguments with the pictures whose first placeholder is among the tokens start:stop."""
        return joined([self], start, stop)


def joined(prompts, start=0, stop=None):
    """`Prompt.pictures` of several rows in one call."""
    arguments = {}
    for kind, names in ((1, ("pixel_values", "image_grid_thw")), (2, ("pixel_values_videos", "video_grid_thw"))):
        pixels, grids = [], []
        for prompt in prompts:
            for n, first in enumerate(prompt._first[kind]):
                if start <= first < (len(prompt) if stop is None else stop):
                    pixels.append(prompt._pixels[kind][n])
                    grids.append((prompt.images if kind == 1 else prompt.videos)[n])
        if grids:
            arguments |= dict(zip(names, (np.concatenate(pixels), np.array(grids)), strict=True))
    return arguments


def left_padded(prompts):
    """(ids, mask) int64 [B, T] of rows of different length."""
    T = max(map(len, prompts))
    ids, mask = (np.zeros((len(prompts), T), np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, T - len(prompt) :], mask[row, T - len(prompt) :] = prompt.ids, 1
    return ids, mask


def types_of(prompts, mask):
    """mm_token_type_ids int64 [B, T] of rows that `left_padded` has put together."""
    types = np.zeros_like(mask)
    for row, prompt in enumerate(prompts):
        types[row, mask[row] == 1] = prompt.types
    return types
