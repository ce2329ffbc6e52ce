"""Answers of real engines in this process: written down once, held against the reference ever after.

To write one down again, from the top folder, with the engine's package installed:

    PYTHONPATH=.:tests python -m standins.runs tiny llama-cpp:tiny-f32.gguf tests/data/runs/llama_cpp.jsonl

The first argument is the checkpoint that the engine runs, as `checkpoint` knows it; DIR in a spec is its folder.
"""

import functools
import sys
import tempfile
from pathlib import Path

import qwenref
from qwenref import engines
from qwenref.compare.scoring import continued
from qwenref.compare.suites import suite
from qwenref.engines.record import record

DATA = Path(__file__).parent.parent / "data" / "runs"
NEW, K = 24, 8


@functools.cache
def checkpoint(name):
    """The model of a name: "tiny"."""
    return qwenref.from_pretrained(name)


@functools.cache
def asked(name):
    """Two prompts of suite quick, with few tokens to follow: a file of tens of kilobytes."""
    whole = suite("quick", checkpoint(name))
    return whole._replace(prompts=tuple(item._replace(new=NEW) for item in whole.prompts[1:3]))


def write(name, spec, path):
    model = checkpoint(name)
    with tempfile.TemporaryDirectory() as folder:
        if "DIR" in spec:
            model.save_pretrained(folder)
        with engines.open(spec.replace("DIR", folder)) as engine:
            other = lambda ids, new: continued(model, ids, new)  # noqa: E731
            record(engine, asked(name), path, k=K, continuations=other, force=True)


if __name__ == "__main__":
    write(*sys.argv[1:])
