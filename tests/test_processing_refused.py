"""What is no picture, or a broken one, is one error that names it: files, arrays, Pillow objects."""

import io
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image
from test_processing import TINY, encoded, pixels

from qwenref.errors import CapabilityMissing, DTypeError, InputError, ShapeError
from qwenref.processing import Processor


@pytest.fixture(scope="module")
def processor():
    return Processor(TINY)


def _truncated():
    return encoded(Image.fromarray(pixels(0, 64, 64, 3)))[:2000]


def _changed():
    data = bytearray(encoded(Image.fromarray(pixels(0, 64, 64, 3))))
    data[3000] ^= 255
    return bytes(data)


def _photo():
    return encoded(Image.fromarray(pixels(0, 64, 64, 3)), "JPEG")


def _header(height, width):
    """A PNG file that claims to hold so much, and holds nothing."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


REFUSED = {
    "no picture": (
        b"this is text", InputError,
        r"image 1 \(12 bytes\): cannot be read as a picture\n    found    no format that Pillow knows\n",
    ),
    "no bytes": (b"", InputError, r"image 1 \(0 bytes\): cannot be read as a picture"),
    "cut off": (_truncated(), InputError, r"image 1 \(2,000 bytes\): cannot be decoded"),
    "a wrong byte": (_changed(), InputError, r"image 1 \(.* bytes\): cannot be decoded\n.*broken data"),
    "a photo cut off": (_photo()[:900], InputError, r"image 1 \(900 bytes\): cannot be decoded\n.*truncated"),
    "a file of no pixels": (_header(0, 5), InputError, r"image 1 \(.* bytes\): cannot be read as a picture"),
    "a bomb": (
        _header(30_000, 30_000), InputError, r"image 1 \(.* bytes\): too large to be decoded\n.*900000000 pixels",
    ),
    "no file": ("nowhere.png", InputError, r"image 1: cannot be read\n.*nowhere.png: no such file"),
    "an address": ("https://example.org/a.png", CapabilityMissing, r"image 1: a web address(.|\n)*download it first"),
    "a data URI": ("data:image/png,abc", InputError, r"image 1: a data URI that cannot be read"),
    "a long name": ("a" * 5000, InputError, r"image 1: cannot be read\n.*'a{60}'… \(5,000 characters\): no such file$"),
    "no name": ("", InputError, r"image 1: cannot be read\n.*'': no such file"),
    "a device": ("/dev/null", InputError, r"image 1: cannot be read\n.*/dev/null: no file"),
    "a folder": (str(TINY), InputError, r"image 1: cannot be read\n.*: a folder"),
    "an object": (7, InputError, r"image 1: an int\n    found    7\n    expected a Pillow image, a path"),
    "a list": ([np.zeros((9, 9))], InputError, r"image 1: a list\n    found    \[array\(\[.*\n    expected"),
    "no rows": (np.zeros((0, 5, 3), np.uint8), InputError, r"image 1: no pixels\n.*height 0, width 5"),
    "empty Pillow image": (Image.new("RGB", (0, 5)), InputError, r"image 1: no pixels\n.*height 5, width 0"),
    "floats": (np.zeros((5, 5, 3), np.float32), DTypeError, r"image 1: an array of float32(.|\n)*a \* 255"),
    "whole numbers": (np.zeros((5, 5, 3), int), DTypeError, r"image 1: an array of int64"),
    "channels first": (np.zeros((3, 5, 5), np.uint8), ShapeError, r"image 1: .*\[3, 5, 5\](.|\n)*transpose\(1, 2, 0\)"),
    "several in one": (
        np.zeros((2, 5, 5, 3), np.uint8), ShapeError, r"image 1: .*\[2, 5, 5, 3\](.|\n)*list\(a\) for several images",
    ),
    "two channels": (np.zeros((5, 5, 2), np.uint8), ShapeError, r"image 1: an array of shape \[5, 5, 2\]"),
    "mode F": (Image.new("F", (5, 5)), InputError, r"image 1 \(Pillow image\): mode F cannot be made RGB"),
    "32 bits": (Image.new("I", (5, 5), 70_000), InputError, r"image 1 \(Pillow image\): mode I cannot(.|\n)*70,000"),
    "stretched": (np.zeros((1, 201), np.uint8), InputError, r"image 1: one side is 201 times the other"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_image_is_one_error_that_names_it(processor, case):
    source, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        processor(images=[pixels(0, 64, 64, 3), source])


def test_a_closed_pillow_image_is_told_as_one(processor):
    image = Image.open(io.BytesIO(_photo()))
    image.close()
    with pytest.raises(InputError, match=r"image 0 \(Pillow image\): cannot be decoded\n.*ValueError: .*closed image"):
        processor(images=image)


def test_a_prompt_that_is_no_text_is_refused(processor):
    with pytest.raises(InputError, match="text: not text\n.*int"):
        processor(5, images=pixels(0, 64, 64, 3))


def test_a_decompression_bomb_stays_refused(processor, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"image 0 \(.* bytes\): too large to be decoded(.|\n)*MAX_IMAGE_PIXELS"):
        processor(images=encoded(Image.new("RGB", (64, 64))))


def test_between_pillows_limit_and_twice_that_pillow_warns_and_a_filter_makes_it_an_error(processor, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    data = encoded(Image.new("RGB", (64, 64)))
    with pytest.warns(Image.DecompressionBombWarning, match="4096 pixels"):
        assert processor(images=data).items[0].tokens == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=r"image 0 \(.* bytes\): too large to be decoded\n.*4096 pixels"):
            processor(images=data)


def test_a_picture_is_not_enlarged_to_more_than_the_model_takes(processor, tmp_path):
    most = 4096 * 32 * 32  # max_position_embeddings, pixels of a token
    small = pixels(0, 64, 64, 3)
    for least in (most + 1, 10**15, 10**400):
        message = rf"^min_pixels: {least:,} for a picture are more(.|\n)*at most 4,194,304 "
        for options in ({"images": small}, {"videos": [[small, small]], "native_fps": 2}):
            with pytest.raises(InputError, match=message):
                processor(**options, min_pixels=least, max_pixels=least)
    assert processor(images=encoded(Image.fromarray(small)), min_pixels=most, max_pixels=most).items[0].tokens == 4096


def test_frames_that_make_too_many_patches_are_refused_before_any_is_looked_at(processor):
    film = np.broadcast_to(pixels(0, 1, 2, 2, 3), (2**23 + 1, 2, 2, 3))
    message = r"video 0 \(array uint8\): too much for one call\n.* 8,388,609 frames of 32 x 32: 16,777,220 patches\n"
    with pytest.raises(InputError, match=message + r".*at most 16,777,216\n.*leave sample=False out"):
        processor(videos=film, native_fps=2, sample=False)
    assert processor(videos=film, native_fps=2).items[0].tokens == 8


def test_without_pillow_the_extra_is_named(processor, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CapabilityMissing, match=r"pictures need Pillow(.|\n)*qwenref\[vision\]"):
        processor(images="a.png")
