"""Whole checkpoint folders of one small model, under the names and with the flags that savers give them."""

import json

import numpy as np
from checkpoints import shard, sharded
from text_configs import text_config

import qwenref
from qwenref.loading import split_name

TEXT = text_config("lflf", delta=(2, 6))
MARKS = {"image_token_id": 207, "video_token_id": 208, "vision_start_token_id": 209, "vision_end_token_id": 210}
VISION = {"model_type": "qwen3_5_vision", "depth": 1, "out_hidden_size": 64}


def composite(text=TEXT, **root):
    """A text config inside the root of a model with vision."""
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": VISION,
        **MARKS,
    } | root


def weights(config=TEXT, seed=0):
    """{bare name: array} of random weights, A_log and the gated norm in float32 as published."""
    model = qwenref.from_config(config, seed=seed)
    arrays = {split_name(name)[1]: np.asarray(array) for name, array in model.named_parameters()}
    kept = ("A_log", "linear_attn.norm.weight")
    return {name: array.astype(np.float32) if name.endswith(kept) else array for name, array in arrays.items()}


def named(arrays, prefix, head="lm_head.weight"):
    """The same under a saver's names."""
    return {head if name == "lm_head.weight" else prefix + name: array for name, array in arrays.items()}


def folder(path, config, *shards):
    """A checkpoint folder: one file, or several shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        shard(path / "model.safetensors", shards[0])
    else:
        sharded(path, shards)
    return path


def flagged(root, text):
    """A composite config with these two flags; None leaves one out."""
    inner = {key: value for key, value in TEXT.items() if key != "tie_word_embeddings"}
    config = composite(TEXT, text_config=inner | ({} if text is None else {"tie_word_embeddings": text}))
    del config["tie_word_embeddings"]
    return config if root is None else config | {"tie_word_embeddings": root}
