"""The vision tower of the 0.8B on one image beside transformers' in float32, eager and with torch's fused attention;
before it, how long an image of that size takes to be made ready, beside Pillow's resize.

python tests/bench/bench_vision.py [--side 1024] [--depth 12] [--threads 2] [--turns 3] [--only preparation]

Both towers hold the same weights and take turns on the same pixels in one process; what counts is the median of the
ratios, turn by turn.  The goal is 1.5 times eager torch.  Below it, how our time is shared out.
Preparation may take 60 ms, or 1.2 times Pillow's resize of an image to that size where that is more.
"""

import argparse
import gc
import tempfile
import warnings
from statistics import median

import numpy as np

import qwenref
from qwenref import hub
from qwenref.bench.timing import ratio, turns
from qwenref.processing import Processor

GOAL = 1.5
PREPARED, RESIZES = 0.060, 1.2  # seconds, or so many of Pillow's resize
WIDTHS = {"hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "patch_size": 16, "out_hidden_size": 1024}


def model_of(depth):
    """A model with the tower of the 0.8B, its text as small as can be."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1}
    heads |= {"linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}
    text = {"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"vocab_size": 64, "layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope} | heads
    ids = {name: 60 + i for i, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id"))}
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_vision", "depth": depth} | WIDTHS,
        "vision_end_token_id": 63,
        **ids,
    }
    return qwenref.from_config(config, seed=0)


def torch_towers(model):
    """{how: transformers' tower over the weights of `model`, in float32}."""
    import transformers

    kind, towers = transformers.Qwen3_5ForConditionalGeneration, {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for how in ("eager", "sdpa"):
            whole = kind.from_pretrained(folder, dtype="float32", attn_implementation=how)
            towers[f"torch {how}"] = whole.eval().model.visual
    return towers


def preparation(side, rounds):
    """Print how long a noisy image of `side` takes, as it is and resized from one a half token larger."""
    from PIL import Image

    processor = Processor(hub.resolve("tiny"))
    limits = {"min_pixels": 65_536, "max_pixels": 16_777_216}  # of the published models
    fits, larger = (
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (n, n, 3), np.uint8)) for n in (side, side + 16)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qwenref.QwenrefWarning)  # what is handed over looks as if it had been resized
        made = processor(images=larger, **limits).items[0].resized
        runs = {
            "as it is": lambda: processor(images=fits, **limits),
            "resized": lambda: processor(images=larger, **limits),
            "Pillow's resize": lambda: larger.resize(made[::-1], Image.Resampling.BICUBIC),
        }
        taken = turns(runs, rounds)
    print(f"preparation of {side} x {side}, and of {side + 16} x {side + 16} resized to {made[0]} x {made[1]}")
    for name, times in taken.items():
        print(f"  {name:<16} {median(times) * 1e3:6.1f} ms   ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})")
    limit = max(PREPARED, RESIZES * median(taken["Pillow's resize"]))
    slowest = max(median(taken[name]) for name in ("as it is", "resized"))
    print(f"goal {limit * 1e3:.0f} ms: {'reached' if slowest <= limit else 'MISSED'} with {slowest * 1e3:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("side", 1024), ("depth", 12), ("threads", 2), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=["preparation"])
    args = parser.parse_args()
    qwenref.set_num_threads(args.threads)
    preparation(args.side // 32 * 32, 7 * args.turns)
    if args.only:
        return
    import torch

    torch.set_num_threads(args.threads)
    model, side = model_of(args.depth), args.side // 16 // 2 * 2
    tower, grid = model.model.visual, np.array([[1, side, side]])
    pixels = np.random.default_rng(0).uniform(-1, 1, (side * side, 3 * 2 * 16 * 16)).astype(np.float32)
    theirs = torch_towers(model)
    given = torch.from_numpy(pixels), torch.from_numpy(grid)

    def run(module):
        with torch.inference_mode():
            return module(given[0], grid_thw=given[1]).pooler_output

    apart = np.abs(tower(pixels, grid) - run(theirs["torch sdpa"]).numpy()).max()
    runs = {"qwenref": lambda: tower(pixels, grid)} | {k: lambda m=m: run(m) for k, m in theirs.items()}
    gc.collect()
    taken = turns(runs, args.turns)
    pixels_side = f"{side * 16} x {side * 16} pixels, {side * side:,} patches"
    print(f"tower of depth {args.depth}, {pixels_side}, {args.threads} threads")
    print(f"rows at most {apart:.1e} from those of torch sdpa")
    for name, times in taken.items():
        line = f"  {name:<12} {median(times):7.3f} s"
        if name != "qwenref":
            times_as_fast = ratio(times, taken["qwenref"])
            line += f"   {times_as_fast.median:.2f} times ours ({times_as_fast.low:.2f} to {times_as_fast.high:.2f})"
        print(line)
    reached = ratio(taken["torch eager"], taken["qwenref"]).median
    print(f"goal {GOAL} times eager torch: {'reached' if reached >= GOAL else 'MISSED'} with {reached:.2f}")
    with qwenref.profile(tower) as profile:
        tower(pixels, grid)
    print(profile)


if __name__ == "__main__":
    main()
