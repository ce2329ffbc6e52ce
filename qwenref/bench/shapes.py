"""The shapes that are measured, as configs, and folders of random weights made from them once."""

import json
import os
import shutil
import struct
import tempfile
from math import prod
from pathlib import Path

from qwenref.errors import InputError, compose


def text_config(hidden, inner, layers, heads, delta, tied, vocabulary=248_320):
    """A text model of the family.  heads: query and key heads of 256; delta: key and value heads of 128."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": delta[0],
        "linear_num_value_heads": delta[1],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }


WHOLE_27B = text_config(5120, 17_408, 64, (24, 4), (16, 48), tied=False)
SHAPES = {
    "0.8b": text_config(1024, 3584, 24, (8, 2), (16, 16), tied=True),
    "2b": text_config(2048, 6144, 24, (8, 2), (16, 16), tied=True),
    "4b": text_config(2560, 9216, 32, (16, 4), (16, 32), tied=True),
    "9b": text_config(4096, 12_288, 32, (16, 4), (16, 32), tied=False),
    # One repeat of three DeltaNet layers and one of attention; a vocabulary that does not count.
    "27b-layer": {**WHOLE_27B, "num_hidden_layers": 4, "vocab_size": 1024},
}
REPEATS_27B = WHOLE_27B["num_hidden_layers"] // SHAPES["27b-layer"]["num_hidden_layers"]


def random_folder(shape, root):
    """A folder under `root` with the random weights of a shape, made (seed 0) if it is not there yet.

    InputError where another config lies in its place, and where the disk has no room for it.
    """
    import qwenref

    config, folder = SHAPES[shape], Path(root) / f"qwenref-{shape}-seed0"
    if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if {key: found.get(key) for key in config} != config:
            raise InputError(compose(f"{folder}: holds another model", do="remove it, or name another --folder"))
        return folder
    Path(root).mkdir(parents=True, exist_ok=True)
    needed, free = qwenref.parameters(config).nbytes, shutil.disk_usage(root).free
    if needed > free:
        raise InputError(
            compose(f"{root}: no room for random weights of shape {shape}", found=f"{free:,} B free",
                    expected=f"{needed:,} B", do="name another --folder")
        )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=root) as made:  # so that what stands under the name is always whole
        qwenref.from_config(config, seed=0).save_pretrained(made)
        folder.mkdir(exist_ok=True)
        for file in ("model.safetensors", "config.json"):
            os.replace(Path(made) / file, folder / file)
    return folder


def sparse_folder(config, folder):
    """A checkpoint of full size whose data is one hole: it takes no blocks on disk, and reading it would show."""
    import qwenref

    header, end = {}, 0
    for name, parameter in qwenref.from_config(config, device="meta").named_parameters():
        nbytes = prod(parameter.shape) * 2
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(Path(folder) / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return end
