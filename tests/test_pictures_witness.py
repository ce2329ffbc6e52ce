"""Pictures inside the text model against transformers: logits of mixtures, and the embedded model's golden runs.

The tower has tests of its own; here it is transformers' in both models, so that what is compared is the rest: places,
positions, merging and the text model behind them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from vision_configs import Prompt, joined, left_padded, types_of, vision_config
from witness import torch
from witness_pictures import open_witness, their_run

import qwenref
from qwenref.numerics import active

DATA = Path(__file__).parent / "data"
RUNS = [json.loads(line) for line in (DATA / "tiny_examples.jsonl").read_text().splitlines()]
RUNS = [run for run in RUNS if run.get("images") or run.get("video_frames")]
LARGEST, MEAN_SQUARE = 1.5, 1.0  # our error in units of transformers', as in test_witness.py
MIXTURES = {
    "an image": [[5, (1, 6, 10), 9]],
    "images of different size": [[(1, 4, 12), 1, (1, 10, 2), 30, (1, 2, 2), 1]],
    "a video": [[4, [4, 4, 6], 12]],
    "all of it": [[7, (1, 6, 4), 3, [3, 2, 8], (1, 8, 8), [2, 4, 4], 20]],
    "a batch": [[7, (1, 6, 4), 3, [3, 2, 8], 2], [40], [1, [5, 4, 2], 4], [(1, 8, 6), 1]],
}


class Borrowed(qwenref.Module):
    """transformers' tower as a module of ours."""

    def __init__(self, witness):
        super().__init__()
        self.visual = [witness.model.visual]

    @torch.inference_mode()
    def forward(self, pixel_values, grid_thw):
        pixels = torch.tensor(np.asarray(pixel_values, np.float32))
        rows = self.visual[0](pixels, grid_thw=torch.tensor(np.asarray(grid_thw))).pooler_output
        return rows.numpy().astype(active().dtype)


@pytest.fixture(scope="module", params=("lllf", "ff"))
def pair(request, tmp_path_factory):
    model = qwenref.from_config(vision_config(request.param, heads=(4, 1)), seed=4)
    folder = tmp_path_factory.mktemp("witness")
    model.save_pretrained(folder)
    witness = open_witness(folder)
    model.model.visual = Borrowed(witness)
    return model, witness


def test_logits_of_mixtures_are_no_further_from_the_definition_than_those_of_transformers(pair):
    model, witness = pair
    ours, theirs = [], []
    for seed, layout in enumerate(MIXTURES.values()):
        rows = [Prompt(np.random.default_rng(seed), parts) for parts in layout]
        ids, mask = left_padded(rows)
        types = types_of(rows, mask)
        pictures, kept = joined(rows), mask == 1
        with qwenref.numerics("fp64"):
            truth = model(ids, attention_mask=mask, **pictures).logits[kept]
        ours.append((model(ids, attention_mask=mask, **pictures).logits[kept] - truth).ravel())
        theirs.append((their_run(witness, ids, types, pictures, mask)["logits"][kept] - truth).ravel())
    ours, theirs = np.concatenate(ours), np.concatenate(theirs)
    largest = np.abs(ours).max(), np.abs(theirs).max()
    assert largest[0] <= LARGEST * largest[1] < 1e-3, largest  # a position that is off by one moves logits by 0.01
    mean_square = np.sqrt(np.mean(ours**2)), np.sqrt(np.mean(theirs**2))
    assert mean_square[0] <= MEAN_SQUARE * mean_square[1], mean_square


def patches(names):
    """(pixel_values, grid) of pictures whose sides are multiples of 32: an image, or the frames of a video."""
    image = pytest.importorskip("PIL.Image", reason="reading pictures needs Pillow (extra 'test')")
    x = np.stack([np.asarray(image.open(DATA / name).convert("RGB"), np.float32) for name in names])
    x = np.concatenate([x, x[-1:]]) if len(x) % 2 else x
    t, h, w = len(x) // 2, x.shape[1] // 16, x.shape[2] // 16
    x = ((x / 255 - 0.5) / 0.5).reshape(t, 2, h // 2, 2, 16, w // 2, 2, 16, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(x.reshape(t * h * w, -1)), [t, h, w]


def pictures_of(run):
    if run.get("images"):
        pixels, grids = zip(*(patches([name]) for name in run["images"]), strict=True)
        assert list(grids) == run["image_grid_thw"]
        return {"pixel_values": np.concatenate(pixels), "image_grid_thw": list(grids)}
    pixels, grid = patches(run["video_frames"])
    assert [grid] == run["video_grid_thw"]
    return {"pixel_values_videos": pixels, "video_grid_thw": [grid]}


@pytest.fixture(scope="module")
def tiny():
    model = qwenref.from_pretrained("tiny")
    witness = open_witness(model.path)
    model.model.visual = Borrowed(witness)
    return model, witness


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['id']}-{run['task'].replace(' ', '-')}")
def test_the_golden_runs_with_pictures_come_out_token_for_token(tiny, run):
    model, witness = tiny
    pictures = pictures_of(run)
    out = model.generate(run["prompt_ids"], max_new_tokens=40, return_logits=True, **pictures)
    assert out.new_ids == run["output_ids"] and out.text == run["output_text"].removesuffix("<|im_end|>")
    for id, logit in run["first_top5"]:
        assert abs(out.logits[0, id] - logit) < 1e-4  # stored with four decimals
    ids = np.array([run["prompt_ids"]])
    config = model.config
    types = (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
    theirs = their_run(witness, ids, types, pictures)["logits"]
    with qwenref.numerics("fp64"):
        truth = model(ids, **pictures).logits
    ours = model(ids, **pictures).logits
    assert np.abs(ours - truth).max() <= LARGEST * np.abs(theirs - truth).max()
