"""What watching costs on a 0.8B-shaped model: capture of everything, and the guard against NaN, beside the plain call.

    python tests/bench/bench_watch.py [--folder DIR] [--prefill 64] [--rounds 7] [--threads 2]

Random weights are made once in DIR, where `qwenref bench` finds them too.  Each round runs the plain call, the guarded
and the captured one in turns, in prefill and in a decode step behind it, and copies once more what was captured.
Prints medians, and medians of the ratios round by round.  The last lines count Python functions of one call, a
figure that does not depend on the machine: with nobody watching, each is one `forward` or work on the cache.
"""

import argparse
import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import qwenref
from qwenref.bench.shapes import random_folder


def seconds(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def captured(model, call):
    with qwenref.capture(model, "**", max_bytes=2**33) as c:
        call()
    return c


def functions(call):
    """Counter of the Python functions of the package that a call runs, by file."""
    counts, place = collections.Counter(), Path(qwenref.__file__).parent

    def profile(frame, event, arg):
        if event == "call" and place in Path(frame.f_code.co_filename).parents:
            counts[Path(frame.f_code.co_filename).stem] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    qwenref.set_num_threads(options.threads)
    model = qwenref.from_pretrained(random_folder("0.8b", options.folder))
    vocabulary = model.config.text_config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, (1, options.prefill))
    cache = qwenref.Cache(model)
    model(prompt, cache=cache)
    saved = cache.snapshot()

    def decode():
        cache.restore(saved)
        return model(prompt[:, :1], cache=cache)

    calls = {f"prefill {options.prefill}": lambda: model(prompt), "decode": decode}
    rows = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        for _ in range(options.rounds * (5 if name == "decode" else 1)):
            before, _ = seconds(call)
            with qwenref.check_finite(model):  # left on: opening it is not part of a call
                guard, _ = seconds(call)
            after, _ = seconds(call)
            capture, c = seconds(lambda call=call: captured(model, call))
            copies, _ = seconds(lambda c=c: [np.array(c[name]) for name in c.names()])
            rows[name].append(((before + after) / 2, guard, capture, copies, c.nbytes))
            del c
    print(f"0.8B shape; {options.threads} threads; level {qwenref._C.cpu_level()}")
    for name, times in rows.items():
        plain, guard, capture, copies, nbytes = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{name:<11} plain {plain * 1e3:8.2f} ms   check_finite {guard * 1e3:8.2f} ms, "
            f"{statistics.median(g / p for p, g, *_ in times):.3f} x   "
            f"capture '**' {capture * 1e3:8.2f} ms, {statistics.median(c / (p + k) for p, _, c, k, _ in times):.3f} x "
            f"plain and copies ({copies * 1e3:.1f} ms, {nbytes / 1e6:,.1f} MB)"
        )
    modules = sum(type(m).__name__ != "ModuleList" for m in model.modules())
    counted = {"nobody": functions(decode)}
    with qwenref.check_finite(model):
        counted["check_finite"] = functions(decode)
    with qwenref.capture(model, "**"):
        counted["capture '**'"] = functions(decode)
    for name, counts in counted.items():
        most = ", ".join(f"{file} {n:,}" for file, n in counts.most_common(7))
        total = f"{sum(counts.values()):,} Python calls"
        print(f"watched by {name}: {total} in a decode step over {modules} modules ({most})")


if __name__ == "__main__":
    main()
