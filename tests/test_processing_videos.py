"""Videos made ready: arrays, lists of frames and files are the same video; times, odd counts, and what is refused."""

import io
import struct
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from qwenref import hub
from qwenref.errors import CapabilityMissing, DTypeError, InputError, QwenrefWarning, ShapeError
from qwenref.processing import Processor
from qwenref.processing.videos import open_clip


@pytest.fixture(scope="module")
def processor():
    return Processor(hub.resolve("tiny"))


def frames(count, height=48, width=80, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def write(file, pictures, fps=8, form="matroska", codec="ffv1", pixels="bgr0", turned=None):
    """A video file without loss: Matroska says no number of frames, AVI and QuickTime do."""
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], pixels
        if turned is not None:
            stream.set_display_rotation(turned)
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file


def png(form="mov", **options):
    return {"form": form, "codec": "png", "pixels": "rgb24", **options}


def same(a, b):
    grids = (a.video_grid_thw == b.video_grid_thw).all()
    return grids and a.pixel_values_videos.tobytes() == b.pixel_values_videos.tobytes()


# One video, handed over in many ways


def test_arrays_lists_and_files_are_the_same_video(processor, tmp_path):
    film = frames(12)
    expected = processor(videos=film, native_fps=8)
    assert expected.items[0].frames == (0, 4, 7, 11) and expected.items[0].total == 12
    path = write(str(tmp_path / "a.mkv"), film)
    data = (tmp_path / "a.mkv").read_bytes()
    with open(path, "rb") as file:
        for source in (path, tmp_path / "a.mkv", data, io.BytesIO(data), file):
            assert same(processor(videos=source), expected)
    for source in (list(film), [Image.fromarray(frame) for frame in film], tuple(film)):
        assert same(processor(videos=[source], native_fps=8), expected)
    named = []
    for at, frame in enumerate(film):
        named.append(tmp_path / f"{at}.png")
        Image.fromarray(frame).save(named[-1])
    assert same(processor(videos=[named], native_fps=8), expected)


@pytest.mark.parametrize("form", ["mov", "avi"])
def test_a_file_that_says_its_number_of_frames_is_the_same_video(processor, tmp_path, form):
    film = frames(12)
    path = write(str(tmp_path / "a"), film, **png(form))
    assert av.open(path).streams.video[0].frames == 12
    prepared = processor(videos=path)
    assert same(prepared, processor(videos=film, native_fps=8)) and prepared.items[0].native_fps == 8
    assert prepared.items[0].name == "a"


@pytest.mark.parametrize(("turned", "turns"), [(90, 1), (-90, 3), (180, 2)])
def test_a_film_held_upright_is_turned(tmp_path, turned, turns):
    film = frames(3)
    clip = open_clip(write(str(tmp_path / "a.mov"), film, **png(turned=turned)))
    assert (clip.height, clip.width) == ((80, 48) if turns % 2 else (48, 80))
    for frame, expected in zip(clip.frames([0, 2]), film[[0, 2]], strict=True):
        assert (np.asarray(frame) == np.rot90(expected, turns)).all()


def test_D8_frames_are_resized_once_each_from_the_original(processor):
    film = frames(4, 90, 150)
    video = processor(videos=film, native_fps=2)
    assert video.items[0].resized == (96, 160)
    alone = processor(images=list(film), min_pixels=96 * 160, max_pixels=96 * 160 * 2)
    slots = alone.pixel_values.reshape(4, 60, 3, 2, 256)[:, :, :, 0]
    expected = np.stack([slots[0::2], slots[1::2]], axis=3).reshape(120, -1)
    assert (video.pixel_values_videos == expected).all()


# Frames and times


def test_an_odd_number_of_frames_repeats_the_last_in_pixels_and_times(processor):
    film = frames(5)
    odd = processor(videos=film, native_fps=2)
    even = processor(videos=np.concatenate([film, film[-1:]]), native_fps=2)
    assert odd.video_grid_thw.tolist() == [[3, 4, 4]] == even.video_grid_thw.tolist()
    assert odd.pixel_values_videos.tobytes() == even.pixel_values_videos.tobytes()
    assert odd.items[0].frames == (0, 1, 2, 3, 4, 4) and odd.items[0].times == (0.25, 1.25, 2.0)
    assert even.items[0].times == (0.25, 1.25, 2.25)
    assert "5 of 5 frames at 2 per second, the last one twice" in odd.describe()


def test_frames_per_second_are_those_asked_for_or_of_the_file(processor):
    film = frames(16)
    assert processor(videos=film, native_fps=8, fps=4).items[0].frames == tuple(np.linspace(0, 15, 8).round())
    every = processor(videos=film, native_fps=8, sample=False).items[0]
    assert every.frames == tuple(range(16)) and every.times[0] == 1 / 16
    two = processor(videos=[film, film], native_fps=[8, 2])
    assert [len(item.frames) for item in two.items] == [4, 16]
    rates = [Fraction(8), np.float32(8), np.int64(8)]
    assert [item.times for item in processor(videos=[film] * 3, native_fps=rates).items] == [two.items[0].times] * 3
    with pytest.raises(InputError, match=r"native_fps\n.*1 rates\n.*2 videos"):
        processor(videos=[film, film], native_fps=[8])
    with pytest.raises(InputError, match="fps: 0"):
        processor(videos=film, native_fps=8, fps=0)


def test_an_unknown_rate_counts_as_24_and_is_told(processor):
    with pytest.warns(QwenrefWarning, match=r"video 0 \(array uint8\): nobody says(.|\n)*24(.|\n)*native_fps=") as told:
        item = processor(videos=frames(48)).items[0]
    assert [warning.filename for warning in told] == [__file__]
    assert item.native_fps == 24 and item.frames == (0, 16, 31, 47)


def test_two_videos_of_other_lengths_in_one_call_are_as_each_alone(processor):
    films = [frames(6, 40, 70), frames(10, 64, 64, seed=1)]
    both = processor(videos=films, native_fps=2)
    alone = [processor(videos=film, native_fps=2) for film in films]
    assert both.video_grid_thw.tolist() == [[3, 2, 4], [5, 4, 4]]
    assert both.pixel_values_videos.tobytes() == b"".join(one.pixel_values_videos.tobytes() for one in alone)


# What is refused


def _silent():
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
    return file.getvalue()


def _without_frames():
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("png", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "rgb24"
        container.start_encoding()
    return file.getvalue()


REFUSED = {
    "no file": ("nowhere.mp4", InputError, r"video 1: cannot be read\n.*no such file"),
    "an object": (None, InputError, r"video 1: a NoneType\n(.|\n)*expected a path, .* or a list of pictures"),
    "no video": (b"this is text" * 100, InputError, r"video 1 \(1,200 bytes\): cannot be read as a video"),
    "sound alone": (_silent(), InputError, r"video 1 \(.* bytes\): no video in the file"),
    "no frames": (np.zeros((0, 32, 32, 3), np.uint8), InputError, r"video 1 \(array uint8\): no frames"),
    "a file without frames": (_without_frames(), InputError, r"video 1 \(.* bytes\): no frames\n"),
    "no bytes": (b"", InputError, r"video 1 \(0 bytes\): cannot be read as a video"),
    "an empty list": ([], InputError, r"video 1 \(a list\): no frames"),
    "one frame": (frames(1), InputError, r"video 1: 1 frame\n(.|\n)*as an image"),
    "a list of one": ([frames(1)[0]], InputError, r"video 1: 1 frame\n"),
    "a picture": (frames(1)[0], ShapeError, r"video 1: .*\[48, 80, 3\](.|\n)*list of them"),
    "frames that differ": (
        [frames(1)[0], frames(1, 48, 81)[0], frames(1)[0]], ShapeError,
        r"video 1: frames of different size\n.*frame 1 is 48 x 81 .*\n.*48 x 80",
    ),
    "floats": (frames(4).astype(np.float32), DTypeError, r"video 1, frame 0: an array of float32"),
    "stretched": (frames(4, 33, 6700), InputError, r"video 1: one side is 203 times the other"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_video_is_one_error_that_names_it(processor, case):
    source, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        processor(videos=[frames(4), source], native_fps=2)


def test_a_file_that_ends_early_is_told_with_both_numbers(processor, tmp_path):
    data = (write(str(tmp_path / "a.avi"), frames(20), **png("avi")) and (tmp_path / "a.avi")).read_bytes()
    with pytest.raises(
        InputError, match=r"video 0 \(.*\): (ends early\n.*\d+ frames(.|\n)*20, as the file says|cannot)"
    ):
        processor(videos=data[: len(data) // 2])


@pytest.mark.parametrize("sample", (True, False), ids=("sampled", "every frame"))
def test_a_file_that_claims_two_thousand_million_frames_takes_no_memory_for_them(processor, tmp_path, sample):
    data = bytearray((write(str(tmp_path / "a.avi"), frames(4), **png("avi")) and (tmp_path / "a.avi")).read_bytes())
    at = data.index(b"strh") + 8 + 32  # dwLength of the stream
    assert data[at : at + 4] == struct.pack("<I", 4)
    data[at : at + 4] = struct.pack("<I", 2**31 - 1)
    early = r"ends early\n.* 4 frames that can be decoded\n.*2,147,483,647, as the file"
    with pytest.raises(InputError, match=early if sample else r"too much for one call\n.* 2,147,483,647 frames of"):
        processor(videos=bytes(data), sample=sample)


def test_frames_beyond_pillows_limit_are_refused_before_they_are_decoded(processor, tmp_path, monkeypatch):
    path = write(str(tmp_path / "a.mov"), frames(4), **png())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 80 // 2)
    assert processor(videos=path).items[0].tokens
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 80 // 2 - 1)
    with pytest.raises(
        InputError, match=r"video 0 \(a.mov\): too large to be decoded\n.*48 x 80 pixels(.|\n)*MAX_IMAGE_PIX"
    ):
        processor(videos=path)
    for limit in (10**12, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert processor(videos=path).items[0].tokens


def test_a_frame_that_is_larger_than_the_file_says_is_no_way_around_the_limit(processor, monkeypatch):
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("png", rate=8)
        stream.height, stream.width, stream.pix_fmt = 48, 80, "rgb24"
        container.start_encoding()
        for at, size in enumerate([(80, 48), (800, 480)]):
            held = io.BytesIO()
            Image.new("RGB", size).save(held, "PNG")
            packet = av.Packet(held.getvalue())
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, 8), at, at
            container.mux(packet)
    with pytest.raises(ShapeError, match="frames of different size\n.*frame 1 is 480 x 800"):
        processor(videos=file)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 80)
    with pytest.raises(InputError, match="cannot be read as a video"):
        processor(videos=file)


def test_without_pyav_the_extra_is_named_and_arrays_still_work(processor, monkeypatch, tmp_path):
    path = write(str(tmp_path / "a.mkv"), frames(4))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(CapabilityMissing, match=r"video 0 \(a.mkv\): video files need PyAV(.|\n)*qwenref\[vision\]"):
        processor(videos=path)
    assert processor(videos=frames(4), native_fps=2).items[0].tokens == 8
