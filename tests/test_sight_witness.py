"""From a picture to a logit against transformers, on the embedded model: 30 images and 6 videos, alone and in batches.

Of every prompt: pixels (equal, but for what is said), grid, ids, positions and delta; then, from the same pixels, the
rows of the tower, the merged embeddings and the logits.  Their errors are counted from the float64 definition, and
those of transformers say how far rounding alone takes a correct program, as in test_witness.py.
"""

import io
from collections import defaultdict

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from witness_pictures import FILMS, ROUNDING, open_witness, their_run, their_video, video_module

import qwenref

pytestmark = pytest.mark.filterwarnings("ignore:(image|video) .:qwenref.QwenrefWarning")  # of a second resize
LARGEST, MEAN_SQUARE = 1.5, 1.0  # our error in units of transformers'
PUBLISHED = {"min_pixels": 65_536, "max_pixels": 16_777_216}  # limits of the large models
SIZES = [
    (1, 1), (1, 200), (200, 1), (2, 399), (5, 1000), (16, 16), (17, 31), (31, 33), (33, 47), (63, 65), (64, 64),
    (64, 128), (80, 2000), (101, 99), (127, 128), (336, 336), (480, 640), (720, 1280), (1040, 1040), (2000, 1500),
]  # fmt: skip
KINDS = ("RGBA", "LA", "L", "1", "P", "transparent P", "CMYK", "16 bits", "photo on its side", "animation")
# What a resize by torch, for Pillow's, is off by: 2 of 255 on smooth frames; these are noise, where Pillow cuts values
# off between its two passes.
RESIZED = 32 / 127.5


def noise(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def file_of(kind):
    """Bytes of an image of 70 x 90 of a kind."""
    image = Image.fromarray(noise(8, 70, 90, 4 if kind == "RGBA" else 3))
    form, options = "PNG", {}
    if kind == "LA":
        image = Image.merge("LA", image.split()[:2])
    elif kind in ("L", "1", "CMYK"):
        image, form = image.convert(kind), "TIFF"
    elif kind.endswith("P"):
        image, options = image.quantize(40), {"transparency": 3} if kind != "P" else {}
    elif kind == "16 bits":
        image = Image.fromarray(noise(9, 70, 90).astype(np.uint16) * 257)
    elif kind == "photo on its side":
        form, options = "JPEG", {"exif": Image.Exif()}
        options["exif"][0x0112] = 6
    elif kind == "animation":
        form, options = "GIF", {"save_all": True, "append_images": [Image.fromarray(noise(7, 70, 90, 3))]}
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def opened(data):
    """The image as transformers' `load_image` has it, before it drops what is not RGB."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I;16"):  # transformers cuts values off at 255; ours are scaled
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    return image


IMAGES = {f"{height} x {width}": noise(at, height, width, 3) for at, (height, width) in enumerate(SIZES)}
IMAGES |= {kind: file_of(kind) for kind in KINDS}


class Sides:
    """Our model and transformers' over the same files, and the processors of both."""

    def __init__(self):
        self.model = qwenref.from_pretrained("tiny")
        self.witness = open_witness(self.model.path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model.path)
        self.videos = video_module()
        self.errors = defaultdict(lambda: ([], []))

    def prompt_of(self, images=(), films=(), question="What do you see?", **options):
        """The prompt of a question with pictures; its ids, grids and pixels have to be those of transformers."""
        theirs, marks, found = [], "", defaultdict(list)
        size = {"shortest_edge": options["min_pixels"], "longest_edge": options["max_pixels"]} if options else None
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.model.path, **({"size": size} if size else {}))
        for source in images:
            made = processor(images=[opened(source) if isinstance(source, bytes) else Image.fromarray(source)])
            grid = np.asarray(made["image_grid_thw"])[0]
            found["pixel_values"].append(made["pixel_values"])
            theirs.append(grid.tolist())
            marks += f"<|vision_start|>{'<|image_pad|>' * (grid.prod() // 4)}<|vision_end|>"
        for frames, fps in films:
            pixels, grid, metadata = their_video(self.videos, frames, fps)
            found["pixel_values_videos"].append(pixels)
            theirs.append(grid)
            taken = [*metadata.frames_indices, *metadata.frames_indices[-1:] * (len(metadata.frames_indices) % 2)]
            times = np.array(taken).reshape(-1, 2).mean(1) / fps
            pads = "<|video_pad|>" * (grid[1] * grid[2] // 4)
            marks += "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in times)
        content = [{"type": "text", "text": marks + question}]
        expected = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        prompt = qwenref.render(
            self.model, [{"role": "user", "content": question}], images=list(images) or None,
            videos=[film for film, _ in films] or None, processing={"native_fps": [fps for _, fps in films]} | options,
        )  # fmt: skip
        assert prompt.ids == expected
        assert [list(item.grid) for item in prompt.prepared.items] == theirs
        for name, parts in found.items():
            rows = np.split(prompt.inputs[name], np.cumsum([len(part) for part in parts])[:-1])
            items = prompt.prepared.of("image" if name == "pixel_values" else "video")
            for item, ours, expected in zip(items, rows, parts, strict=True):
                resized = item.kind == "video" and item.original != item.resized
                assert np.abs(ours - expected).max() <= (RESIZED if resized else ROUNDING), item
        return prompt

    def compare(self, prompts):
        """Positions and deltas of a batch, which have to be equal; errors of what is behind them, which are kept."""
        longest = max(len(prompt.ids) for prompt in prompts)
        ids, mask = (np.zeros((len(prompts), longest), np.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt.ids) :], mask[row, -len(prompt.ids) :] = prompt.ids, 1
        pictures = sum((prompt.prepared for prompt in prompts[1:]), prompts[0].prepared).inputs
        config, kept = self.model.config, mask == 1
        types = (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
        theirs = their_run(self.witness, ids, types, pictures, mask)
        grids = [pictures.get(name) for name in ("image_grid_thw", "video_grid_thw")]
        positions, deltas = qwenref.rope_index(self.model, ids, *grids, mask)
        assert (positions[:, kept] == theirs["positions"][:, kept]).all() and (deltas == theirs["deltas"]).all()
        with qwenref.numerics("fp64"):
            truth = self.run(ids, mask, pictures)
        ours = self.run(ids, mask, pictures)
        assert (ours["deltas"] == deltas).all()
        assert (ours["merged"][kept & (types == 0)] == theirs["merged"][kept & (types == 0)]).all()
        for name in ("tower", "merged", "logits"):
            for side, values in zip(self.errors[name], (ours, theirs), strict=True):
                error = values[name] - truth[name]
                side.append((error if name == "tower" else error[kept]).ravel())

    def run(self, ids, mask, pictures):
        with qwenref.capture(self.model, "model.visual", "layers.0.resid_pre") as seen:
            out = self.model(ids, attention_mask=mask, **pictures)
        merged = seen["model.language_model.layers.0.resid_pre"]
        return {"tower": seen["model.visual"], "merged": merged, "logits": out.logits, "deltas": out.rope_deltas}

    def settle(self):
        """No stage is further from the definition than transformers'."""
        assert set(self.errors) == {"tower", "merged", "logits"}
        for name, (ours, theirs) in self.errors.items():
            ours, theirs = np.concatenate(ours), np.concatenate(theirs)
            largest = np.abs(ours).max(), np.abs(theirs).max()
            mean_square = np.sqrt(np.mean(ours**2)), np.sqrt(np.mean(theirs**2))
            print(f"{name}: largest {largest[0]:.1e}, transformers' {largest[1]:.1e}")
            assert largest[0] <= LARGEST * largest[1] < 2e-4, (name, largest)
            assert mean_square[0] <= MEAN_SQUARE * mean_square[1], (name, mean_square)


@pytest.fixture(scope="module")
def models():
    return Sides()


@pytest.fixture
def sides(models):
    models.errors.clear()
    return models


def films():
    return [(noise(at, *shape, 3), fps) for at, (*shape, fps) in enumerate(FILMS)]


def test_30_images_from_file_to_logits(sides):
    assert len(IMAGES) == 30
    for image in IMAGES.values():
        sides.compare([sides.prompt_of([image])])
    sides.settle()


def test_6_videos_from_frames_to_logits(sides):
    for film in films():
        sides.compare([sides.prompt_of(films=[film])])
    sides.settle()


def test_D9_two_videos_with_different_numbers_of_frames_in_one_prompt(sides):
    four, nine = films()[:2]
    sides.compare([sides.prompt_of(films=[four, nine])])
    sides.compare([sides.prompt_of(films=[nine, four])])
    sides.settle()


def test_batches_of_2_with_different_items(sides):
    tall, wide, clear = IMAGES["2000 x 1500"], IMAGES["80 x 2000"], IMAGES["LA"]
    nine, forty = films()[1], films()[4]
    for first, second in (
        (sides.prompt_of([tall]), sides.prompt_of([wide], question="Which colour is it?")),
        (sides.prompt_of([wide, tall]), sides.prompt_of(films=[nine])),
        (sides.prompt_of([tall], [forty]), sides.prompt_of([clear], [nine, forty], question="What changes?")),
    ):
        sides.compare([first, second])
    sides.settle()


@pytest.mark.parametrize(
    "size",
    [
        (720, 1280),
        *(pytest.param(size, marks=pytest.mark.slow) for size in [(10, 2000), (2000, 10), (1040, 1040), (1500, 1000)]),
    ],
    ids="{0[0]} x {0[1]}".format,
)
def test_T1_images_at_the_published_limits(sides, size):
    """720 x 1280 becomes 44 x 80 patches, 880 tokens."""
    prompt = sides.prompt_of([noise(3, *size, 3)], **PUBLISHED)
    if size == (720, 1280):
        assert prompt.prepared.items[0].grid == (1, 44, 80) and prompt.prepared.items[0].tokens == 880
    sides.compare([prompt])
    sides.settle()
