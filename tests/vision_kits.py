"""Towers of several shapes with random weights, and pictures for them; transformers' tower over the same weights."""

import numpy as np

import qwenref

SHAPES = {  # what differs from the small tower of vision_configs.py
    "heads of 16": {},
    "heads of 72": {"hidden_size": 144, "intermediate_size": 200, "num_heads": 2},
    "deep": {"depth": 9, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96},
    "merge of 3, table of 5": {"spatial_merge_size": 3, "num_position_embeddings": 25},
    "patches of 16": {"patch_size": 16, "num_position_embeddings": 2304},
}
GRIDS = {  # in merge blocks
    "an image": [(1, 5, 7)],
    "images of several sizes": [(1, 1, 1), (1, 9, 2), (1, 3, 4)],
    "videos": [(3, 2, 5), (1, 4, 4), (2, 1, 3)],
}


def vision_model(**changes):
    """A tower with random weights, of a whole model that is kept by it."""
    from vision_configs import vision_config

    config = vision_config("f")
    config["vision_config"] |= changes
    return qwenref.from_config(config, seed=5)


def pictures(tower, blocks, seed=0):
    """(pixels [N, width], grids [n, 3]) of pictures of so many frame groups, rows and columns of blocks."""
    config, merge = tower.config, tower.spatial_merge_size
    grids = np.array([(t, h * merge, w * merge) for t, h, w in blocks])
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return np.random.default_rng(seed).standard_normal((int(grids.prod(axis=1).sum()), width), np.float32), grids


def parts_of(pixels, grids):
    """The pictures one by one."""
    ends = np.cumsum(grids.prod(axis=1))
    return [(pixels[end - grid.prod() : end], grid[None]) for grid, end in zip(grids, ends, strict=True)]
