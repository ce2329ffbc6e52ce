"""The linear op on bf16 weights beside a plain read of the same bytes, its two variants, the system's BLAS and torch.

python tests/bench/bench_linear.py [--threads 2]

All in one run: contenders take turns on weights larger than the caches, and every column is a median of ratios taken
side by side, because an absolute figure means nothing on a shared machine.
"""

import argparse
from statistics import median

import ml_dtypes
import numpy as np

import qwenref
from qwenref import _C, ops
from qwenref.bench.timing import ratio, seconds, turns

SHAPES = [(1024, 3584), (1024, 1024), (5120, 17408), (17408, 5120)]  # inner width, rows of W
FEW = 16  # tokens up to which reading W decides; beyond, arithmetic does
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
POOL_BYTES = 192 << 20  # more than any last-level cache keeps
TURNS, TURN_SECONDS = 5, 0.15


def torch_linears(x, weights, threads):
    """torch's linear in bf16 and in float32 over the same numbers, if torch is installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(w.view(np.int16)).view(torch.bfloat16) for w in weights]
    x32 = torch.from_numpy(x)
    x16, wide = x32.bfloat16(), tensors[0].float()

    def bf16():
        with torch.inference_mode():
            for w in tensors:
                torch.nn.functional.linear(x16, w)

    def float32():
        with torch.inference_mode():
            for _ in tensors:
                torch.nn.functional.linear(x32, wide)

    return {"torch bf16": bf16, "torch f32": float32}


def measure(inner, rows, tokens, threads, random):
    copies = max(1, POOL_BYTES // (inner * rows * 2)) if tokens <= FEW else 1
    shape = (rows, inner)
    weights = [random.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(copies)]
    x = random.standard_normal((tokens, inner), dtype=np.float32)
    fine = x.astype(np.float64)
    bytes_of = [w.view(np.uint8) for w in weights]
    contenders = {
        "linear": lambda: [ops.linear(x, w) for w in weights],
        "read": lambda: [_C.read_seconds(piece) for piece in bytes_of],
        "BLAS": lambda: [ops.linear_blas(x, w) for w in weights],
        "double": lambda: [ops.linear_f64(fine, w) for w in weights],
        "4 parts": lambda: [ops.linear_parts(x, w, parts=4) for w in weights],
        **torch_linears(x, weights, threads),
    }
    repeats = {name: max(1, round(TURN_SECONDS / seconds(run))) for name, run in contenders.items()}

    def repeated(name):
        return lambda: seconds(lambda: [contenders[name]() for _ in range(repeats[name])]) / repeats[name]

    taken = turns({name: repeated(name) for name in contenders}, TURNS)
    work = 2 * tokens * inner * rows * copies
    return work / median(taken["linear"]) * 1e-9, {name: ratio(taken[name], taken["linear"])[0] for name in taken}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=qwenref.get_num_threads())
    threads = parser.parse_args().threads
    qwenref.set_num_threads(threads)
    random = np.random.default_rng(0)
    print(f"{threads} threads; read: share of a plain read; others: how many times as fast as they are")
    columns = ("BLAS", "double", "4 parts", "torch bf16", "torch f32")
    print(" ".join(f"{head:>6}" for head in ("I", "O", "tokens", "GF/s", "read")), *(f"{c:>10}" for c in columns))
    for inner, rows in SHAPES:
        for tokens in TOKENS:
            rate, ratios = measure(inner, rows, tokens, threads, random)
            read = f"{ratios['read']:.2f}" if tokens <= FEW else ""
            others = (f"{ratios[name]:>10.2f}" for name in columns if name in ratios)
            print(f"{inner:>6} {rows:>6} {tokens:>6} {rate:>6.1f} {read:>6}", *others)


if __name__ == "__main__":
    main()
