"""Pictures and placeholders that do not match are one error, before anything runs."""

import numpy as np
import pytest
from cache_arrays import cache_bits
from picture_kits import opened, prompt
from text_configs import text_config
from vision_configs import CLOSE, IMAGE, OPEN, VIDEO, WIDTH

import qwenref
from qwenref.errors import InputError, ShapeError


@pytest.fixture(scope="module")
def hybrid():
    return opened("llf")


PIXELS = np.ones((16, WIDTH), np.float32)
FOUR = {"pixel_values": PIXELS, "image_grid_thw": [[1, 4, 4]]}
TEXT_AND_FOUR = [5, OPEN, *[IMAGE] * 4, CLOSE, 6]
CALLS = {  # name: (arguments, error, first line)
    "fewer placeholders": (
        {"input_ids": [5, *[IMAGE] * 3, 6], **FOUR}, InputError, "image 0: 3 placeholders, its grid makes 4",
    ),
    "more placeholders": (
        {"input_ids": [5, *[IMAGE] * 5, 6], **FOUR}, InputError, "image 0: 5 placeholders, its grid makes 4",
    ),
    "swapped grids": (
        {
            "input_ids": [*[IMAGE] * 4, 6, *[IMAGE] * 2], "pixel_values": np.ones((24, WIDTH), np.float32),
            "image_grid_thw": [[1, 4, 2], [1, 4, 4]],
        },
        InputError, "image 0: 4 placeholders, its grid makes 2",
    ),
    "forgotten image": (
        {"input_ids": TEXT_AND_FOUR}, InputError,
        "row 0, column 2: 4 image placeholders and no image for them",
    ),
    "forgotten video": (
        {"input_ids": [OPEN, VIDEO, CLOSE]}, InputError, "row 0, column 1: 1 video placeholder and no video for it",
    ),
    "a video as an image": (
        {"input_ids": [OPEN, *[VIDEO] * 4, CLOSE], **FOUR}, InputError,
        "row 0, column 1: 4 video placeholders and no video for them",
    ),
    "no placeholder": ({"input_ids": [5, 6], **FOUR}, InputError, "image 0: 0 placeholders, its grid makes 4"),
    "grid without pixels": (
        {"input_ids": TEXT_AND_FOUR, "image_grid_thw": [[1, 4, 4]]}, InputError,
        "forward: image_grid_thw without pixel_values",
    ),
    "pixels without grid": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS}, InputError,
        "forward: pixel_values without image_grid_thw",
    ),
    "grid of other pixels": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS, "image_grid_thw": [[1, 4, 6]]}, ShapeError,
        "pixel_values: 16 patches, image_grid_thw makes 24",
    ),
    "pixels of another width": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS[:, 1:], "image_grid_thw": [[1, 4, 4]]}, ShapeError,
        f"pixel_values: patches of {WIDTH - 1} values",
    ),
    "pixels as a picture": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": np.ones((1, 3, 16, 16)), "image_grid_thw": [[1, 4, 4]]},
        ShapeError, "pixel_values: 4-D",
    ),
    "bytes as pixels": (
        {"input_ids": TEXT_AND_FOUR, **FOUR, "pixel_values": PIXELS.astype(np.uint8)}, qwenref.DTypeError,
        "pixel_values: uint8 values",
    ),
    "float grid": ({"input_ids": TEXT_AND_FOUR, **FOUR, "image_grid_thw": [[1.0, 4, 4]]}, qwenref.DTypeError,
        "image_grid_thw: float64 values",
    ),
    "embeddings without types": (
        {"inputs_embeds": np.zeros((1, 4, 64), np.float32), **FOUR}, InputError, "forward: pictures with inputs_embeds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_D13_what_does_not_match_is_refused_before_anything_runs(hybrid, name):
    arguments, kind, line = CALLS[name]
    cache, ran = qwenref.Cache(hybrid), []
    with (
        hybrid.model.visual.register_forward_pre_hook(lambda *_: ran.append(1)),
        hybrid.model.language_model.layers[0].register_forward_pre_hook(lambda *_: ran.append(2)),
        pytest.raises(kind) as caught,
    ):
        hybrid(**arguments)
    assert str(caught.value).split("\n")[0] == line and not ran
    if name not in ("fewer placeholders", "no placeholder"):  # with a cache, more may come
        with pytest.raises(kind):
            hybrid(cache=cache, **arguments)
    assert cache_bits(cache) == cache_bits(qwenref.Cache(hybrid))


def test_D13_a_prompt_that_breaks_off_inside_of_a_picture_names_it(hybrid):
    row = prompt([2, (1, 4, 6), [2, 2, 4], 1])
    cache = qwenref.Cache(hybrid)
    hybrid(row.ids[: row._first[1][0] + 2], cache=cache, **row.pictures())
    bits = cache_bits(cache)
    with pytest.raises(InputError, match="image 0: 2 placeholders, its grid makes 6"):
        hybrid([[CLOSE, 5]], cache=cache)
    with pytest.raises(InputError, match="image 0: 7 placeholders, its grid makes 6"):
        hybrid([[IMAGE] * 5], cache=cache)
    assert cache_bits(cache) == bits
    hybrid([[IMAGE] * 4], cache=cache)
    with pytest.raises(InputError, match="row 0, column 0: one placeholder more than the image before has"):
        hybrid([[IMAGE]], cache=cache)


def test_a_batch_is_handed_each_picture_with_its_call(hybrid):
    rows = [prompt([3, (1, 2, 4), 2]), prompt([1, (1, 2, 2), 5], 6)]
    cache = qwenref.Cache(hybrid, batch=2)
    ids = np.array([row.ids[:3] for row in rows])
    with pytest.raises(InputError, match="image 1: no placeholder in this call, and more than one row to wait for it"):
        hybrid(ids, cache=cache, pixel_values=np.ones((12, WIDTH), np.float32), image_grid_thw=[[1, 2, 2], [1, 2, 4]])
    assert not cache.length.any() and cache.waiting == [(None, ())] * 2


def test_a_text_model_takes_no_pictures_and_any_id():
    model = qwenref.from_config(text_config("lf"), seed=1)
    with pytest.raises(qwenref.CapabilityMissing, match="pixel_values for a model of text alone"):
        model([5, 6], pixel_values=PIXELS, image_grid_thw=[[1, 4, 4]])
    assert model([5, IMAGE, IMAGE, 6]).logits.shape == (1, 4, 211)
