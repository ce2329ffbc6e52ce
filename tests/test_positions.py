"""Positions on three axes and rope_deltas, against figures done by hand and against transformers."""

import numpy as np
import pytest
from vision_configs import IMAGE, VIDEO, Prompt, vision_config

import qwenref

CONFIG = vision_config("lf")
LAYOUTS = {  # rows of parts: text tokens, images (t, h, w), videos [t, h, w]
    "text": [[9]],
    "one image": [[3, (1, 4, 6), 5]],
    "an image first and last": [[(1, 8, 4), (1, 2, 2)]],
    "two of different size": [[2, (1, 4, 10), 1, (1, 12, 2), 7]],
    "a video": [[1, [3, 4, 6], 2]],
    "images and videos": [[2, (1, 6, 4), 3, [2, 4, 4], (1, 2, 8), [5, 2, 6], 1]],
    "batch": [[4, (1, 4, 6), 2], [1, (1, 10, 4), 1, (1, 2, 2), 3], [20]],
    "batch of videos, T 3 and 5": [[2, [3, 4, 6], 4], [1, [5, 6, 2], (1, 4, 4), 1]],
}


def batch(layout, seed=0, left=True):
    """(ids, mask, types, image grids, video grids), shorter rows padded."""
    rng = np.random.default_rng(seed)
    rows = [Prompt(rng, parts) for parts in layout]
    T = max(len(row.ids) for row in rows)
    ids, mask, types = (np.zeros((len(rows), T), np.int64) for _ in range(3))
    for b, row in enumerate(rows):
        own = slice(T - len(row.ids), T) if left else slice(0, len(row.ids))
        ids[b, own], types[b, own], mask[b, own] = row.ids, row.types, 1
    images, videos = ([grid for row in rows for grid in getattr(row, name)] for name in ("images", "videos"))
    return ids, mask, types, *(np.array(grids, np.int64).reshape(-1, 3) for grids in (images, videos))


def test_T10_positions_of_text_and_two_images():
    ids = [5, 6, *[IMAGE] * 4, 7, *[IMAGE] * 4, 8]
    positions, deltas = qwenref.rope_index(CONFIG, ids, image_grid_thw=[[1, 4, 4], [1, 2, 8]])
    shown = ["".join(map(str, column)) for column in positions[:, 0].T.tolist()]
    assert shown == ["000", "111", "222", "223", "232", "233", "444", "555", "556", "557", "558", "999"]
    assert deltas.tolist() == [-2] and len(ids) + deltas[0] == 10  # the position of what is decoded next


def test_T10_frequencies_take_their_axis_in_turns():
    config = qwenref.from_config(vision_config("f", head_dim=256), device="meta").config.text_config
    assert "".join("THW"[axis] for axis in config.mrope_axes) == "THW" * 10 + "TH"


@pytest.mark.parametrize("left", (True, False), ids=("left pads", "right pads"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_D9_positions_and_deltas_are_those_of_transformers(name, left):
    torch, transformers = (pytest.importorskip(module) for module in ("torch", "transformers"))
    ids, mask, types, images, videos = batch(LAYOUTS[name], left=left)
    positions, deltas = qwenref.rope_index(CONFIG, ids, images, videos, mask)
    config = transformers.Qwen3_5Config(**CONFIG)
    with torch.device("meta"):
        witness = transformers.Qwen3_5Model(config)
    grids = [torch.tensor(grid) if len(grid) else None for grid in (images, videos)]
    expected, delta = witness.get_rope_index(torch.tensor(ids), torch.tensor(types), *grids, torch.tensor(mask))
    assert (positions == expected.numpy()).all() and positions.dtype == np.int64
    assert (deltas == delta.numpy()[:, 0]).all()


def test_positions_of_a_hundred_random_mixtures_are_those_of_transformers():
    torch, transformers = (pytest.importorskip(module) for module in ("torch", "transformers"))
    with torch.device("meta"):
        witness = transformers.Qwen3_5Model(transformers.Qwen3_5Config(**CONFIG))
    rng = np.random.default_rng(10)
    for seed in range(100):
        layout = []
        for _ in range(rng.integers(1, 4)):
            parts = []
            for kind in rng.integers(0, 3, rng.integers(1, 7)):
                h, w = (2 * rng.integers(1, 7, 2)).tolist()
                parts.append([int(rng.integers(1, 9)), (1, h, w), [int(rng.integers(1, 6)), h, w]][kind])
            layout.append(parts)
        ids, mask, types, images, videos = batch(layout, seed)
        positions, deltas = qwenref.rope_index(CONFIG, ids, images, videos, mask, types)
        grids = [torch.tensor(grid) if len(grid) else None for grid in (images, videos)]
        expected, delta = witness.get_rope_index(torch.tensor(ids), torch.tensor(types), *grids, torch.tensor(mask))
        assert (positions == expected.numpy()).all() and (deltas == delta.numpy()[:, 0]).all()


def test_text_has_the_same_position_on_all_axes_and_no_delta():
    ids, mask, *_ = batch([[7], [4]])
    positions, deltas = qwenref.rope_index(CONFIG, ids, attention_mask=mask)
    assert (positions == np.maximum(mask.cumsum(1) - 1, 0)).all() and not deltas.any()


def test_what_the_types_call_text_is_text():
    ids = [5, IMAGE, 6, *[IMAGE] * 4, VIDEO]
    types = [0, 0, 0, 1, 1, 1, 1, 0]
    positions, deltas = qwenref.rope_index(CONFIG, ids, [[1, 4, 4]], mm_token_type_ids=types)
    assert positions[0, 0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5] and deltas.tolist() == [-2]


# name of the case: (ids, images, videos, types, the message)
WRONG = {
    "fewer": ([5, *[IMAGE] * 3, 6], [[1, 4, 4]], None, None, "image 0: 3 placeholders, its grid makes 4"),
    "more": ([5, *[IMAGE] * 6, 6], [[1, 4, 4]], None, None, "image 0: 6 placeholders, its grid makes 4"),
    "swapped grids": (
        [5, *[IMAGE] * 4, 6, *[IMAGE] * 8, 7], [[1, 4, 8], [1, 4, 4]], None, None,
        "image 0: 4 placeholders, its grid makes 8",
    ),
    "the second": (
        [5, *[IMAGE] * 4, 6, *[IMAGE] * 6, 7], [[1, 4, 4], [1, 4, 8]], None, None,
        "image 1: 6 placeholders, its grid makes 8",
    ),
    "no image": ([5, *[IMAGE] * 4, 6], None, None, None, "row 0, column 1: 4 image placeholders and no image"),
    "one image of two": (
        [5, *[IMAGE] * 4, 6, IMAGE], [[1, 4, 4]], None, None, "row 0, column 6: 1 image placeholder and no image",
    ),
    "one too many": ([5, IMAGE, 6], [[1, 2, 2], [1, 4, 4]], None, None, "image 1: 0 placeholders, its grid makes 4"),
    "a frame group too few": (
        [5, VIDEO, 6, VIDEO, 7], None, [[3, 2, 2]], None,
        "video 0, frame group 2 of 3: 0 placeholders, its grid makes 1",
    ),
    "frame groups that touch": (
        [5, VIDEO, VIDEO, 7], None, [[2, 2, 2]], None, "video 0, frame group 0 of 2: 2 placeholders, its grid makes 1",
    ),
    "an image for a video": ([5, VIDEO], [[1, 2, 2]], None, None, "row 0, column 1: 1 video placeholder and no video"),
    "an odd grid": ([5, IMAGE], [[1, 2, 3]], None, None, "image 0: image_grid_thw[0] is [1, 2, 3]"),
    "an empty grid": ([5, VIDEO], None, [[0, 2, 2]], None, "video 0: video_grid_thw[0] is [0, 2, 2]"),
    "an image of two frame groups": ([5, IMAGE], [[2, 2, 2]], None, None, "image 0: image_grid_thw[0] is [2, 2, 2]"),
    "a grid of more than 64 bits": (
        [5, VIDEO], None, [[2**62, 2, 2]], None, "video 0: video_grid_thw[0] is [4611686018427387904, 2, 2]\n    found",
    ),
    "a grid of four numbers": ([5, IMAGE], [[1, 2, 2, 2]], None, None, "image_grid_thw: wrong shape"),
    "types of other tokens": ([5, IMAGE], [[1, 2, 2]], None, [0], "mm_token_type_ids: wrong shape"),
    "types against ids": ([5, IMAGE], None, [[1, 2, 2]], [0, 2], "mm_token_type_ids[0, 1] is 2, where the id is an"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_D13_a_wrong_number_of_placeholders_names_the_item_and_both_numbers(case):
    ids, images, videos, types, message = WRONG[case]
    with pytest.raises(qwenref.QwenrefError) as error:
        qwenref.rope_index(CONFIG, ids, images, videos, mm_token_type_ids=types)
    assert str(error.value).startswith(message)


def test_a_model_of_text_alone_has_no_pictures_to_place():
    with pytest.raises(qwenref.CapabilityMissing, match="without vision"):
        qwenref.rope_index(CONFIG["text_config"], [1, 2])
