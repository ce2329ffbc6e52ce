"""What needs a process of its own: import time, opening a 27B checkpoint, memory of a forward."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from qwenref.bench.shapes import WHOLE_27B, sparse_folder
from qwenref.errors import CapabilityMissing, compose

OPTIONAL = (
    "tokenizers", "jinja2", "torch", "transformers", "safetensors", "huggingface_hub", "PIL", "matplotlib", "httpx",
)  # fmt: skip

_IMPORT = """
import sys, time
import numpy, ml_dtypes  # as in any session that has arrays
began = time.perf_counter()
import qwenref
seconds = time.perf_counter() - began
import json
print(json.dumps([seconds, sorted(set(json.loads(sys.argv[1])) & set(sys.modules))]))
"""
_IMPORT_ALL = _IMPORT.replace("import numpy, ml_dtypes  # as in any session that has arrays\n", "")

_OPEN = """
import json, sys, time
import qwenref
began = time.perf_counter()
model = qwenref.from_pretrained(sys.argv[1])
lines = len(str(model.tree()).splitlines()) + len(str(model).splitlines())
seconds = time.perf_counter() - began
resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:"))
print(json.dumps([seconds, resident * 1024, lines]))
"""

# The peak of the second call, when all pages of weights are there: peak less file pages less what was there before.
_FORWARD = """
import json, sys
import numpy as np
import qwenref

def status(*names):
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(rows[name].split()[0]) * 1024 for name in names]

qwenref.set_num_threads(int(sys.argv[3]))
model = qwenref.from_pretrained(sys.argv[1])
size = model.config.text_config.vocab_size
ids = np.random.default_rng(0).integers(0, size, (1, int(sys.argv[2])))
before = status("RssAnon")[0]
model(ids, cache=qwenref.Cache(model), logits_to_keep=1)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
cache = qwenref.Cache(model)
out = model(ids, cache=cache, logits_to_keep=1)
peak, file = status("VmHWM", "RssFile")
print(json.dumps([peak - file - before, cache.nbytes]))
"""


def fresh(code, *args):
    """What the code prints as JSON, in a new interpreter that finds the same qwenref."""
    import qwenref

    place = str(Path(qwenref.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CapabilityMissing(compose("bench: a process of its own failed", found=last))
    return json.loads(done.stdout)


def import_seconds(repeats=5):
    """(seconds of each import, the share of numpy and ml_dtypes included; optional packages that were loaded)."""
    found = [fresh(_IMPORT_ALL, json.dumps(OPTIONAL)) for _ in range(repeats)]
    own = [fresh(_IMPORT, json.dumps(OPTIONAL))[0] for _ in range(repeats)]
    return [seconds for seconds, _ in found], median(own), sorted({name for _, names in found for name in names})


def open_27b():
    """(seconds, bytes resident, lines printed) of opening a sparse 27B checkpoint and printing its tree."""
    with tempfile.TemporaryDirectory() as folder:
        sparse_folder(WHOLE_27B, folder)
        return min(fresh(_OPEN, folder) for _ in range(3))


def forward_memory(folder, tokens, threads):
    """(bytes a forward needs beyond weights and interpreter, bytes of its cache)."""
    return fresh(_FORWARD, folder, tokens, threads)


def largest_activations(model, tokens):
    """Bytes of the values of one layer's larger half, all of which exist at once: of each module its interior values
    and results (`model.sites()`), beside the hidden states of the layer and the final norm."""
    text = model.config.text_config
    H, inner, T = text.hidden_size, text.intermediate_size, tokens
    mlp = 4 * inner  # gate, up, activated, product
    q = text.num_attention_heads * text.head_dim
    kv = text.num_key_value_heads * text.head_dim
    attention = 2 * q + 2 * q + 2 * kv + 2 * kv + 2 * q  # q_proj, q and q_rot, k and k_rot, v, context and gated
    delta = 3 * text.conv_dim + 2 * text.key_dim  # mixed, convolved, conv_out; q and k normed
    delta += 3 * text.value_dim  # z, read, normed
    kinds = set(text.layer_types)
    mixers = [attention] * ("full_attention" in kinds) + [delta] * ("linear_attention" in kinds)
    return 4 * (T * (3 * H + max(mlp, *mixers)) + text.vocab_size)  # residual, normed, result; one row of logits
