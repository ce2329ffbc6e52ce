"""Answers of real engines in this process: written down once, held against the reference ever after.

To write one down again, from the top folder, with the engine's package installed:

    PYTHONPATH=.:tests python -m standins.runs tiny llama-cpp:tiny-f32.gguf tests/data/runs/llama_cpp.jsonl

The first argument is the checkpoint that the engine runs, as `checkpoint` knows it; DIR in a spec is its folder.
"""

import functools
import shutil
import sys
import tempfile
from pathlib import Path

import qwenref
from qwenref import engines
from qwenref.compare.scoring import continued
from qwenref.compare.suites import suite
from qwenref.engines.record import record
from qwenref.hub import EMBEDDED

DATA = Path(__file__).parent.parent / "data" / "runs"
NEW, K = 24, 8


# Random weights under the embedded model's tokenizer: what is another in its text_config.
SHAPES = {
    # As wide as vLLM's kernels for CPUs ask for.
    "wide": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    # With as many rows in q_proj as there are ids.
    "square": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
_folders = {}  # temporary ones, which end with the process


def folder(name):
    """Where the checkpoint of a name lies: "tiny", or one of SHAPES, written here."""
    if name not in SHAPES:
        return EMBEDDED[name]
    if name not in _folders:
        _folders[name] = tempfile.TemporaryDirectory()
        config = qwenref.from_pretrained("tiny").config.to_dict()
        config["text_config"] |= {**SHAPES[name], "mtp_num_hidden_layers": 0}
        qwenref.from_config(config, seed=7).save_pretrained(_folders[name].name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(EMBEDDED["tiny"] / file, _folders[name].name)
    return Path(_folders[name].name)


@functools.cache
def checkpoint(name):
    """The model of a name."""
    return qwenref.from_pretrained(folder(name))


@functools.cache
def asked(name):
    """Two prompts of suite quick, with few tokens to follow: a file of tens of kilobytes."""
    whole = suite("quick", checkpoint(name))
    return whole._replace(prompts=tuple(item._replace(new=NEW) for item in whole.prompts[1:3]))


def write(name, spec, path):
    model = checkpoint(name)
    with engines.open(spec.replace("DIR", str(folder(name)))) as engine:
        other = functools.partial(continued, model)
        record(engine, asked(name), path, k=K, continuations=other, force=True)


if __name__ == "__main__":
    write(*sys.argv[1:])
