"""What a long context costs: memory of a prompt fed in windows, and the time of a token by mixer against length.

    python tests/bench/bench_context.py [--shape 0.8b] [--tokens 32768] [--window 2048] [--folder DIR] [--svg FILE]

Random weights are made once in DIR, where `qwenref bench` finds them too.  The prompt goes into one cache; between
windows some tokens are decoded, at lengths that double.  Prints for each length the median time of one
DeltaNet mixer and of one attention mixer of such a token, and at the end the peak of memory beside what it is made of.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import qwenref
from qwenref.bench.shapes import random_folder

COLOURS = {"linear_attention": "#0072b2", "full_attention": "#b34700"}
NAMES = {"linear_attention": "Gated DeltaNet", "full_attention": "attention"}


class Mixers:
    """Seconds of every mixer's forward, by kind, while hooks are on."""

    def __init__(self, model):
        self.seconds, self._begun, self._handles = {}, {}, []
        for layer in model.text_model.layers:
            kind = layer.block_type
            mixer = layer.linear_attn if kind == "linear_attention" else layer.self_attn
            self._handles.append(mixer.register_forward_pre_hook(lambda m, a: self._begun.update({m: self._now()})))
            self._handles.append(mixer.register_forward_hook(lambda m, a, out, kind=kind: self._ends(m, kind)))

    _now = staticmethod(time.perf_counter)

    def _ends(self, mixer, kind):
        self.seconds.setdefault(kind, []).append(self._now() - self._begun.pop(mixer))

    def remove(self):
        for handle in self._handles:
            handle.remove()


def decode(model, cache, repeats=7):
    """{kind: median seconds of one mixer} of a token behind the cache, which is as many tokens longer afterwards."""
    mixers = Mixers(model)
    for _ in range(repeats):
        model([1], cache=cache, logits_to_keep=1)
    mixers.remove()
    return {kind: statistics.median(seconds) for kind, seconds in mixers.seconds.items()}


def picture(title, rows):
    """SVG: microseconds of one mixer and token against the tokens before it."""
    width, height, left, top, bottom = 620, 320, 60, 44, 40
    most = max(us for _, kinds in rows for us in kinds.values()) * 1.1
    longest = rows[-1][0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font:12px sans-serif;fill:#1b1b1b}",
        "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.b{fill:#111}}</style>",
        f'<title>{title}</title><rect class="b" width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="18">{title}</text><text x="{left}" y="34">microseconds of one mixer and token</text>',
    ]

    def at(tokens, us):
        x = left + (width - left - 130) * tokens / longest
        return f"{x:.1f},{height - bottom - (height - top - bottom) * us / most:.1f}"

    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(longest * share, most / 1.1 * share).split(",")
        parts.append(f'<text x="{x}" y="{height - 20}" text-anchor="middle">{longest * share:,.0f}</text>')
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{most / 1.1 * share:,.0f}</text>')
    for kind, colour in COLOURS.items():
        points = [at(tokens, kinds[kind]) for tokens, kinds in rows]
        dash = "" if kind == "linear_attention" else ' stroke-dasharray="6 3"'
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = points[-1].split(",")
        parts.append(f'<text x="{float(x) + 6:.1f}" y="{float(y) + 4:.1f}">{NAMES[kind]}</text>')
    parts.append(f'<text x="{left}" y="{height - 4}">tokens before it</text></svg>')
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.8b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    qwenref.set_num_threads(options.threads)
    model = qwenref.from_pretrained(random_folder(options.shape, options.folder))
    ids = np.random.default_rng(0).integers(0, model.config.text_config.vocab_size, options.tokens)
    cache, rows, due = qwenref.Cache(model), [], options.window
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for begin in range(0, options.tokens, options.window):
        start = time.perf_counter()
        model(ids[begin : begin + options.window], cache=cache, logits_to_keep=1)
        tokens, seconds = int(cache.length[0]), time.perf_counter() - start
        if tokens >= due or tokens == options.tokens:
            due *= 2
            rows.append((tokens, {kind: 1e6 * s for kind, s in decode(model, cache).items()}))
            each = " · ".join(f"{NAMES[kind]} {us:,.0f} us" for kind, us in rows[-1][1].items())
            print(f"{tokens:>7,} tokens · window {options.window / seconds:,.0f} tok/s · {each}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"peak {peak / 2**10:,.0f} MiB, of which {before / 2**10:,.0f} before the prompt; weights "
        f"{model.report.nbytes / 2**20:,.0f} MiB, cache {cache.nbytes / 2**20:,.0f} MiB"
    )
    if options.svg is not None:
        options.svg.write_text(picture(f"{options.shape} shape: a token behind a context", rows))


if __name__ == "__main__":
    main()
