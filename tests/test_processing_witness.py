"""Pictures made ready against transformers' own processors: grids, pixels, frames, times and ids."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from witness import torch
from witness_pictures import FILMS, ROUNDING, their_video, video_module

from qwenref import hub
from qwenref.processing import Processor
from qwenref.processing.geometry import image_size, video_size

TINY = hub.resolve("tiny")
SIZES = [
    (1, 1), (1, 2), (1, 200), (200, 1), (2, 399), (5, 1000), (16, 16), (16, 48), (17, 31), (31, 33), (32, 32), (33, 47),
    (48, 80), (63, 65), (64, 64), (64, 128), (80, 2000), (90, 150), (100, 20000), (101, 99), (112, 112), (128, 127),
    (250, 250), (336, 336), (400, 400), (480, 640), (720, 1280), (1040, 1040), (1280, 720), (2000, 1500),
]  # fmt: skip
LIMITS = {"as the file says": {}, "as published": {"min_pixels": 65_536, "max_pixels": 16_777_216}}


@pytest.fixture(scope="module")
def processor():
    return Processor(TINY)


@pytest.fixture(scope="module")
def theirs():
    return video_module()


def picture(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


@pytest.mark.filterwarnings("ignore:image 0:qwenref.QwenrefWarning")
@pytest.mark.parametrize("limits", LIMITS)
def test_pixels_and_grids_of_30_images_are_those_of_transformers(processor, limits):
    options = LIMITS[limits]
    size = {"shortest_edge": options["min_pixels"], "longest_edge": options["max_pixels"]} if options else None
    witness = Qwen2VLImageProcessorPil.from_pretrained(TINY, **({"size": size} if size else {}))
    for at, shape in enumerate(SIZES if not options else [size for size in SIZES if size[0] * size[1] < 300_000]):
        image = Image.fromarray(picture(at, *shape))
        expected = witness(images=[image])
        ours = processor(images=image.copy(), **options)
        assert ours.image_grid_thw.tolist() == np.asarray(expected["image_grid_thw"]).tolist(), shape
        assert np.abs(ours.pixel_values - expected["pixel_values"]).max() <= ROUNDING, shape


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK", "YCbCr", "HSV"])
def test_pictures_of_other_modes_are_those_of_transformers(processor, mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 4), np.uint8))
    image = (image if mode in ("RGBA", "LA") else image.convert("RGB")).convert(mode)
    expected = Qwen2VLImageProcessorPil.from_pretrained(TINY)(images=[image])
    assert np.abs(processor(images=image).pixel_values - expected["pixel_values"]).max() <= ROUNDING


def test_sizes_of_20000_images_and_videos_are_those_of_transformers(theirs):
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        height, width = np.exp(rng.uniform(0, 9, 2)).astype(int).tolist()
        least, most = sorted(np.exp(rng.uniform(7, 17, 2)).astype(int).tolist())
        frames = int(rng.integers(2, 50))
        if max(height, width) <= 200 * min(height, width):
            assert image_size(height, width, 32, least, most) == smart_resize(height, width, 32, least, most)
            expected = theirs.smart_resize(frames, height, width, 2, 32, least, most)
            assert video_size(frames, height, width, 32, 2, least, most) == expected


def enlarged(small, height, width):
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("film", FILMS, ids=str)
def test_frames_grids_pixels_and_ids_of_6_videos_are_those_of_transformers(processor, theirs, film):
    *shape, fps = film
    frames = picture(1, *shape)
    for smooth in (False, True):
        if smooth:  # noise overshoots: Pillow cuts between its two passes, torch at the end
            frames = np.stack([enlarged(picture(at, 5, 7), *shape[1:]) for at in range(shape[0])])
        values, grid, metadata = their_video(theirs, frames, fps)
        text = "a<|vision_start|><|video_pad|><|vision_end|>b"
        ours = processor(text, videos=frames, native_fps=fps, video_marks="nested")
        assert ours.video_grid_thw.tolist() == [grid]
        steps = np.abs(ours.pixel_values_videos - values) * 127.5  # of 255
        assert steps.max() <= (2.001 if smooth else 32), steps.max()
        if ours.items[0].original == ours.items[0].resized:
            assert np.abs(ours.pixel_values_videos - values).max() == 0
    witness = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>", video_token="<|video_pad|>",
        _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
    )  # fmt: skip
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    filled = text.replace("<|video_pad|>", Qwen3VLProcessor.replace_video_token(witness, inputs, 0))
    assert ours.text == filled
    assert ours.ids == AutoTokenizer.from_pretrained(TINY)(filled)["input_ids"]
