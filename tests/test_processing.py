"""Pictures made ready: sizes, order of pixels, normalisation, kinds of images, what a checkpoint's files say."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import qwenref
from qwenref import hub
from qwenref.errors import CapabilityMissing, CheckpointError, InputError, QwenrefWarning
from qwenref.processing import Processor
from qwenref.processing.geometry import group_times, image_size, sampled_frames, video_size
from qwenref.processing.images import open_picture

TINY = hub.resolve("tiny")
FAMILY = (32, 65_536, 16_777_216)  # side of a token in pixels, and the limits of the published models


@pytest.fixture(scope="module")
def processor():
    return Processor(TINY)


def folder(path, image=None, video=None, joint=None):
    """The embedded model's small files, with some of the pictures' settings changed (None as a value: left out)."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path / name)
    for name, changes in (("preprocessor_config.json", image), ("video_preprocessor_config.json", video)):
        if changes != "no file":
            found = json.loads((TINY / name).read_text()) | (changes or {})
            (path / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    if joint is not None:
        (path / "processor_config.json").write_text(json.dumps(joint))
    return path


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def rgb(source):
    return np.asarray(open_picture(source).rgb)


# Sizes


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (720, 1280, (704, 1280)),
        (1040, 1040, (1024, 1024)),
        (336, 336, (320, 320)),
        (400, 400, (384, 384)),
        (80, 2000, (64, 1984)),
    ],
)
def test_T1_D6_halves_go_to_the_even_multiple(height, width, expected):
    assert image_size(height, width, *FAMILY) == expected
    if height == 720:
        assert (expected[0] // 16) * (expected[1] // 16) // 4 == 880


def test_a_side_ratio_of_200_is_the_last_one_taken():
    assert image_size(10, 2000, *FAMILY) == (32, 3648)
    with pytest.raises(InputError, match=r"picture 3: one side is 200\.1 times the other\n.*height 10, width 2,001"):
        image_size(10, 2001, *FAMILY, where="picture 3")


def test_limits_are_met_by_rounding_down_or_up_and_no_side_falls_below_one_token():
    height, width = image_size(6000, 8000, *FAMILY)
    assert (height, width) == (3520, 4704) and height * width <= FAMILY[2]
    height, width = image_size(1, 1, *FAMILY)
    assert (height, width) == (256, 256)
    assert image_size(40, 8000, 32, 1024, 4096) == (32, 896)  # the side cannot get thinner, so the limit is not met


def test_a_video_counts_its_frames_and_an_odd_number_of_them_by_the_nearest_even_one():
    family = (32, 2, 131_072, 786_432)
    assert video_size(4, 720, 1280, *family) == (320, 576)
    assert video_size(3, 512, 512, *family) == (512, 512)  # 3 is counted as 4, and 4 is just within
    assert video_size(5, 512, 384, *family) == (512, 384)  # 5 is counted as 4 (half to even): 6 would be too many
    assert video_size(2, 8, 16, *family) == (192, 384)  # enlarged to 32 x 64, then to the least number of pixels
    with pytest.raises(InputError, match=r"video 1: 1 frame\n.*\n.*as an image"):
        video_size(1, 512, 512, *family, where="video 1")


@pytest.mark.parametrize(
    ("total", "native", "expected"),
    [
        (10, 2, list(range(10))),
        (240, 24, [0, 13, 25, 38, 50, 63, 75, 88, 101, 113, 126, 138, 151, 164, 176, 189, 201, 214, 226, 239]),
        (5, 24, [0, 1, 3, 4]),  # at least four
        (3, 24, [0, 1, 2]),  # but no more than there are
        (6, 2.5, [0, 2, 3, 5]),  # 1.5 -> 2, 3.5 -> 4 of 5/3 steps: 0, 1.67, 3.33, 5
    ],
)
def test_frames_are_taken_evenly_from_first_to_last(total, native, expected):
    assert sampled_frames(total, native, 2, 4, 768).tolist() == expected
    assert len(sampled_frames(10**6, 30, 2, 4, 768)) == len(sampled_frames(10**6, 5e-324, 2, 4, 768)) == 768


def test_the_time_of_a_group_is_the_mean_of_its_ends_and_the_last_frame_fills_up():
    assert group_times([0, 1, 3], 2.0, 2) == [0.25, 1.5]
    assert group_times([0, 10, 20, 30], 10, 4) == [1.5]


# Pixels


def test_D3_every_value_of_a_patch_comes_from_its_row_column_and_channel(processor):
    row, column = np.mgrid[:64, :128]
    image = np.stack([row * 2 + 1, column, (row + column) % 200], axis=2).astype(np.uint8)
    values = processor(images=image).pixel_values.reshape(2, 4, 2, 2, 3, 2, 16, 16)
    exact = (image / 255 - 0.5) / 0.5
    for block_row, block_column, inner_row, inner_column in np.ndindex(2, 4, 2, 2):
        y, x = (block_row * 2 + inner_row) * 16, (block_column * 2 + inner_column) * 16
        patch = values[block_row, block_column, inner_row, inner_column]
        for channel in range(3):
            expected = exact[y : y + 16, x : x + 16, channel].astype(np.float32)
            assert (patch[channel, 0] == expected).all() and (patch[channel, 1] == expected).all()


def test_D4_mean_and_deviation_are_those_of_the_file(processor, tmp_path):
    black_and_white = np.zeros((64, 64, 3), np.uint8)
    black_and_white[:, 32:] = 255
    values = processor(images=black_and_white).pixel_values
    assert set(np.unique(values)) == {-1.0, 1.0}
    changes = {"image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 2.0], "rescale_factor": 0.00390625}
    other = Processor(folder(tmp_path, changes))
    colour = np.full((64, 64, 3), (64, 128, 255), np.uint8)
    values = other(images=colour).pixel_values.reshape(-1, 3, 512)
    assert np.unique(values[:, 0]) == 0.0 and np.unique(values[:, 1]) == 0.0
    assert np.unique(values[:, 2]) == np.float32((255 / 256 - 0.75) / 2)


def test_D5_the_resize_is_pillows_bicubic_and_torchvisions_is_this_far(processor):
    noise = Image.fromarray(pixels(0, 150, 90, 3))
    values = processor(images=noise).pixel_values.reshape(5, 3, 2, 2, 3, 2, 16, 16)[..., 0, :, :]
    back = np.rint((values.transpose(0, 2, 5, 1, 3, 6, 4) * 0.5 + 0.5) * 255).astype(np.uint8).reshape(160, 96, 3)
    assert (back == np.asarray(noise.resize((96, 160), Image.Resampling.BICUBIC))).all()
    smooth = Image.fromarray(pixels(1, 8, 8, 3)).resize((300, 200), Image.Resampling.BICUBIC)
    assert processor.resize_difference(smooth) <= 2 and processor.resize_difference(noise) <= 32
    assert "Pillow's bicubic" in processor.describe() and "2 of 255" in processor.describe()


def test_two_images_in_one_call_are_as_each_alone(processor):
    images = [pixels(0, 50, 90, 3), pixels(1, 120, 64, 3)]
    both = processor(images=images)
    alone = [processor(images=image) for image in images]
    assert (both.pixel_values == np.concatenate([one.pixel_values for one in alone])).all()
    assert both.image_grid_thw.tolist() == [one.image_grid_thw[0].tolist() for one in alone]
    assert both.pixel_values.dtype == np.float32 and both.image_grid_thw.dtype == np.int64
    assert [item.tokens for item in both.items] == [both.image_grid_thw[at].prod() // 4 for at in range(2)]


# Kinds of images


def test_a_picture_is_the_same_however_it_is_handed_over(tmp_path):
    picture = pixels(0, 40, 60, 3)
    data = encoded(Image.fromarray(picture))
    (tmp_path / "a.png").write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    with open(tmp_path / "a.png", "rb") as file:
        for source in (picture, Image.fromarray(picture), data, file, str(tmp_path / "a.png"), tmp_path / "a.png", uri):
            assert (rgb(source) == picture).all()
    assert (rgb(np.asfortranarray(picture)) == picture).all()
    wide = picture.astype(np.uint16) * 257
    assert (rgb(wide.astype(">u2")) == picture).all() and (rgb(wide.astype("<u2")) == picture).all()
    assert (rgb(picture[:, :, 0]) == picture[:, :, :1]).all() and (rgb(picture[:, :, :1]) == picture[:, :, :1]).all()


def test_the_orientation_of_a_photo_is_applied(processor):
    picture = pixels(0, 40, 60, 3)
    turned = {2: picture[:, ::-1], 3: picture[::-1, ::-1], 6: np.rot90(picture, -1), 8: np.rot90(picture)}
    for orientation, expected in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert (rgb(encoded(Image.fromarray(picture), exif=exif)) == expected).all()
    assert processor(images=encoded(Image.fromarray(picture), exif=exif)).items[0].original == (60, 40)


def test_what_is_transparent_is_laid_over_white():
    picture = np.zeros((2, 3, 4), np.uint8)
    picture[:, 0] = (255, 0, 0, 255)
    picture[:, 1] = (0, 0, 0, 128)
    expected = np.array([[255, 0, 0], [127, 127, 127], [255, 255, 255]])
    clear = Image.new("P", (2, 1))
    clear.putpalette([10, 20, 30, 200, 100, 50])
    clear.putpixel((1, 0), 1)
    for source in (picture, Image.fromarray(picture), encoded(Image.fromarray(picture))):
        assert (rgb(source) == expected).all()
    assert rgb(encoded(clear, transparency=0)).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    assert rgb(encoded(clear)).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert rgb(Image.merge("LA", [Image.new("L", (1, 1), 40), Image.new("L", (1, 1), 0)])).tolist() == [[[255] * 3]]


def test_grey_16_bit_one_bit_and_four_colour_pictures():
    grey = np.array([[0, 128, 255], [1, 2, 3]], np.uint8)
    assert (rgb(encoded(Image.fromarray(grey))) == grey[..., None]).all()
    wide = np.array([[0, 256, 65535], [32768, 257, 128]], np.uint16)
    expected = [[0, 1, 255], [128, 1, 0]]
    for source in (wide, Image.fromarray(wide), encoded(Image.fromarray(wide))):
        assert rgb(source)[..., 1].tolist() == expected
    assert rgb(np.stack([wide] * 3, 2))[..., 2].tolist() == expected
    assert rgb(Image.fromarray(wide.astype(np.int32)))[..., 0].tolist() == expected
    assert rgb(Image.new("1", (2, 2), 1)).tolist() == [[[255] * 3] * 2] * 2
    assert rgb(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))[0, 0].tolist() == [255, 0, 0]


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert rgb(data)[0, 0].tolist() == [255, 0, 0]


def test_the_callers_picture_is_left_as_it_is():
    picture = pixels(0, 40, 60, 4)
    image, kept = Image.fromarray(picture), picture.copy()
    open_picture(image), open_picture(picture)
    assert image.mode == "RGBA" and (np.asarray(image) == kept).all() and (picture == kept).all()


# Limits and second resizes


def test_D8_limits_are_pixels_of_the_whole_item_and_each_step_is_told(processor):
    image = processor(images=pixels(0, 300, 500, 3), max_pixels=np.int64(32_768))
    assert image.items[0].resized == (128, 224) and image.items[0].pixels == 128 * 224
    video = processor(videos=pixels(0, 4, 300, 500, 3), native_fps=2, max_pixels=32_768)
    assert video.items[0].resized == (64, 96) and video.items[0].pixels == 4 * 64 * 96
    assert processor(images=pixels(0, 64, 63, 3), min_pixels=16_384).items[0].resized == (160, 128)
    text = image.describe()
    assert "300 x 500 (array uint8)  -> 128 x 224  -> grid 1 x 8 x 14  -> 28 tokens" in text
    assert "4 of 4 frames at 2 per second; groups at 0.2 1.2 s" in video.describe()
    with pytest.raises(InputError, match="min_pixels and max_pixels"):
        processor(images=pixels(0, 64, 64, 3), min_pixels=20_000)


def test_D8_a_second_resize_is_warned_of(processor, recwarn):
    with pytest.warns(
        QwenrefWarning, match=r"320 x 320 is resized to 128 x 128(.|\n)*for this model(.|\n)*=False"
    ) as told:
        processor(images=pixels(0, 320, 320, 3))
    assert [warning.filename for warning in told] == [__file__]  # of whoever handed it over
    with pytest.warns(QwenrefWarning, match=r"84 x 84 is resized to 96 x 96(.|\n)*earlier model of the family"):
        processor(images=Image.fromarray(pixels(0, 84, 84, 3)))
    with pytest.warns(QwenrefWarning, match=r"video 0 \(array uint8\): 320 x 320 is resized to 160 x 160"):
        processor(videos=pixels(0, 4, 320, 320, 3), native_fps=2)
    recwarn.clear()
    processor(images=[pixels(0, 96, 96, 3), pixels(0, 90, 50, 3), encoded(Image.fromarray(pixels(0, 320, 320, 3)))])
    assert not [warning for warning in recwarn if warning.category is QwenrefWarning]


def test_resize_can_be_turned_off_where_the_sides_fit(processor):
    prepared = processor(images=pixels(0, 320, 32, 3), resize=False)
    assert prepared.image_grid_thw.tolist() == [[1, 20, 2]]
    with pytest.raises(InputError, match=r"image 0 \(array uint8\): 320 x 33 does not fit the patches as it is"):
        processor(images=pixels(0, 320, 33, 3), resize=False)


# Files of a checkpoint


def test_limits_by_their_older_names_beat_the_newer_ones(tmp_path):
    made = Processor(folder(tmp_path, {"min_pixels": 1024, "max_pixels": 2048}))
    assert (made.image.least, made.image.most) == (1024, 2048)


def test_the_joint_file_beats_the_separate_ones(tmp_path):
    own = json.loads((TINY / "preprocessor_config.json").read_text())
    joint = {"image_processor": own | {"size": {"shortest_edge": 1024, "longest_edge": 2048}}}
    made = Processor(folder(tmp_path, joint=joint))
    assert (made.image.least, made.image.most) == (1024, 2048)
    assert made.video.least == 4096 and made.image.where.endswith("processor_config.json")


def test_what_a_file_does_not_say_is_told(tmp_path):
    made = Processor(folder(tmp_path, {"patch_size": None}, {"fps": None, "max_frames": None}))
    assert made.image.patch == 16 and made.image.assumed == {"patch_size": 16}
    assert made.video.fps == 2 and made.video.assumed == {"fps": 2, "max_frames": 768}
    assert "not in the file, as usual in this family: fps 2, max_frames 768" in made.describe()


FILES = {
    "no file": ("no file", CapabilityMissing, r"no preprocessor_config.json(.|\n)*pixel_values ready made"),
    "no limits": ({"size": None}, CheckpointError, r"preprocessor_config.json: size\n"),
    "limits of another kind": ({"size": {"height": 5, "width": 5}}, CheckpointError, "shortest_edge and longest_edge"),
    "no mean": ({"image_mean": None}, CheckpointError, r": image_mean\n.*None"),
    "deviation 0": ({"image_std": [0.5, 0, 0.5]}, CheckpointError, r": image_std\n(.|\n)*three numbers above 0"),
    "another patch": ({"patch_size": 14}, CheckpointError, r": patch_size\n.*14\n.*16 .*vision_config.patch_size"),
    "another merge": ({"merge_size": 4}, CheckpointError, r": merge_size\n.*4\n.*2 .*spatial_merge_size"),
    "no resize": ({"do_resize": False}, CapabilityMissing, r": do_resize is False"),
    "another filter": ({"resample": 2}, CapabilityMissing, r": resample is 2\n.*3"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_asks_for_something_else_is_refused(tmp_path, case):
    changes, kind, message = FILES[case]
    with pytest.raises(kind, match=message):
        Processor(folder(tmp_path, changes))


def test_a_missing_video_file_is_told_with_the_first_video(tmp_path):
    made = Processor(folder(tmp_path, video="no file"))
    assert "no video_preprocessor_config.json" in made.describe()
    assert made(images=pixels(0, 64, 64, 3)).items[0].tokens == 4
    with pytest.raises(CapabilityMissing, match=r"no video_preprocessor_config.json(.|\n)*pixel_values_videos"):
        made(videos=pixels(0, 4, 64, 64, 3))


def test_a_model_has_its_processor_and_one_of_text_alone_says_that_it_has_none():
    model = qwenref.from_pretrained("tiny")
    assert model.processor is model.processor and model.processor.tokenizer is model.tokenizer
    with pytest.raises(CapabilityMissing, match="processor: this model was not opened from a folder"):
        qwenref.from_config(model.config, seed=0).processor  # noqa: B018
