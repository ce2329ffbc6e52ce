"""Small models that see, prompts that mix text with pictures, and what a call gives the rotary embedding."""

import numpy as np
from vision_configs import Prompt, vision_config

import qwenref

LAYERS = {"hybrid": "llf", "only attention": "ff", "only DeltaNet": "ll"}
TWO_IMAGES = [3, (1, 4, 6), 2, (1, 8, 2), 4]
EVERYTHING = [2, (1, 6, 4), 1, [3, 2, 4], 3, (1, 2, 6), [2, 4, 2], 2]


def opened(layers):
    return qwenref.from_config(vision_config(layers), seed=2)


def prompt(parts, seed=5):
    return Prompt(np.random.default_rng(seed), parts)


def positions_seen(model, call):
    """What `call` gives the rotary embedding: int64 [3, B, T]."""
    seen = []
    with model.model.language_model.rotary_emb.register_forward_pre_hook(lambda _, args: seen.append(args[1])):
        call()
    assert len(seen) == 1
    return np.array(seen[0])
