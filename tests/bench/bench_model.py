"""Decode and prefill of a 0.8B-shaped model beside eager torch, in turns in one process.

    python tests/bench/bench_model.py [--folder DIR] [--tokens 16] [--prefill 128] [--rounds 5] [--threads 2]

Both sides read the same checkpoint (random weights, made once in DIR).  torch: transformers' eager code in bfloat16 and
float32 under inference mode, logits of the last token only.  qwenref: its default profile, float32 activations over the
same bfloat16 weights.  Unset OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE for the run.  Prints medians and the median of the
ratios round by round; absolute figures of a shared machine mean little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import qwenref

SHAPE = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


class Ours:
    def __init__(self, folder):
        self.model = qwenref.from_pretrained(folder)

    def run(self, prompt, tokens):
        """(seconds of the prompt, seconds of `tokens` further tokens)."""
        cache = qwenref.Cache(self.model)
        start = time.perf_counter()
        logits = self.model(prompt, cache=cache, logits_to_keep=1).logits
        middle = time.perf_counter()
        for _ in range(tokens):
            logits = self.model([[int(logits[0, -1].argmax())]], cache=cache, logits_to_keep=1).logits
        return middle - start, time.perf_counter() - middle


class Theirs:
    def __init__(self, folder, dtype):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def run(self, prompt, tokens):
        with self.torch.inference_mode():
            start = time.perf_counter()
            out = self.model(self.torch.tensor(prompt), use_cache=True, logits_to_keep=1)
            middle = time.perf_counter()
            for _ in range(tokens):
                ids = out.logits[:, -1:].argmax(-1)
                out = self.model(ids, cache=out.cache, use_cache=True, logits_to_keep=1)
            return middle - start, time.perf_counter() - middle


def plain_read(folder):
    """Bytes per second of summing the weights once: what decoding cannot beat."""
    data = np.memmap(folder / "model.safetensors", np.uint64, "r", offset=0, shape=(2**27,))
    start = time.perf_counter()
    np.bitwise_xor.reduce(data)
    return data.nbytes / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qwenref-bench-0.8b")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", default="bfloat16,float32", help="torch dtypes, comma-separated; empty for none")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        qwenref.from_config(SHAPE, seed=0).save_pretrained(options.folder)
    qwenref.set_num_threads(options.threads)
    sides = {"qwenref": Ours(options.folder)}
    for dtype in filter(None, options.against.split(",")):
        sides[f"torch {dtype}"] = Theirs(options.folder, dtype)
        sides[f"torch {dtype}"].torch.set_num_threads(options.threads)
    prompt = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, options.prefill))
    times = {name: [] for name in sides}
    read = []
    for side in sides.values():
        side.run(prompt[:, :8], 1)  # warm up: pages, kernels, threads
    for _ in range(options.rounds):
        read.append(plain_read(options.folder))
        for name, side in sides.items():
            times[name].append(side.run(prompt, options.tokens))
    nbytes = qwenref.parameters(sides["qwenref"].model).nbytes
    print(f"0.8B shape, {nbytes:,} bytes of weights; {options.threads} threads; level {qwenref._C.cpu_level()}")
    print(f"plain read by one thread {statistics.median(read) / 1e9:.1f} GB/s")
    for name, rows in times.items():
        prefill, decode = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [statistics.median(b[k] / a[k] for a, b in zip(times["qwenref"], rows, strict=True)) for k in (0, 1)]
        prefill, decode = options.prefill / prefill, options.tokens / decode
        print(
            f"{name:<16} prefill {options.prefill}: {prefill:7.1f} tok/s (ours {ratios[0]:.2f} x)   "
            f"decode: {decode:6.2f} tok/s (ours {ratios[1]:.2f} x), {nbytes * decode / 1e9:.1f} GB/s of weights"
        )


if __name__ == "__main__":
    main()
