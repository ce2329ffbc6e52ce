"""A video of any kind as frames one at a time: arrays, lists of pictures, files through PyAV."""

from typing import NamedTuple

import numpy as np

from qwenref.errors import CapabilityMissing, InputError, ShapeError, compose
from qwenref.processing.images import as_file, open_picture, pillow, too_large


class Clip(NamedTuple):
    """A video that has been looked at, not yet decoded.

    total, height, width   frames, and pixels of each
    fps      frames per second by the file, None where nobody says
    name     what to call it
    handed   it came as pixels, not as a file
    frames   function of ascending indices: an iterator over Pillow images of mode RGB
    """

    total: int
    height: int
    width: int
    fps: float | None
    name: str
    handed: bool
    frames: object


def open_clip(source, where="video"):
    """The `Clip` of an array uint8 [T, H, W, 3], a list of pictures, or a file (path, bytes, file object)."""
    if isinstance(source, (list, tuple)):
        return _of_list(source, where)
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        array = np.asarray(source)
        if array.ndim != 4:
            raise ShapeError(
                compose(
                    f"{where}: an array of shape {list(array.shape)}",
                    expected="[frames, height, width, channels]",
                    do="a video of pictures is a list of them inside the list of videos" if array.ndim < 4 else None,
                )
            )
        return _of_list(array, where, f"array {array.dtype}")
    return _of_file(source, where)


def _of_list(frames, where, name=None):
    if len(frames) == 0:
        raise _no_frames(where, name or "a list")
    first = open_picture(frames[0], f"{where}, frame 0")

    def decode(indices):
        for index in indices:
            picture = open_picture(frames[index], f"{where}, frame {index}")
            if picture.size != first.size:
                raise ShapeError(
                    compose(
                        f"{where}: frames of different size",
                        found=f"frame {index} is {picture.size[0]} x {picture.size[1]} (height x width)",
                        expected=f"{first.size[0]} x {first.size[1]}, as frame 0",
                    )
                )
            yield picture.rgb

    name = name or f"{len(frames)} pictures"
    return Clip(len(frames), *first.size, None, name, first.handed, decode)


def _no_frames(where, name):
    return InputError(compose(f"{where} ({name}): no frames", expected="a video of at least two frames"))


# Files


def _of_file(source, where):
    file, name = as_file(source, where, "a path, bytes, a file object, an array, or a list of pictures")
    try:
        import av
    except ImportError as error:
        raise CapabilityMissing(
            compose(
                f"{where} ({name}): video files need PyAV",
                found=error,
                do='pip install "qwenref[vision]", or pass the frames as an array',
            )
        ) from error
    opener = _Opener(av, file, where, name)
    with opener() as container:
        stream = opener.stream(container)
        rate = stream.average_rate or stream.guessed_rate
        first = opener.guarded(lambda: next(container.decode(stream), None))
        if first is None:
            raise _no_frames(where, name)
        turns = _quarter_turns(first)
        height, width = (first.width, first.height) if turns % 2 else (first.height, first.width)
        total = stream.frames
    if total <= 0:  # the container does not say
        with opener() as container:
            decoded = container.decode(opener.stream(container))
            total = opener.guarded(lambda: sum(1 for _ in decoded))
    return Clip(total, height, width, float(rate) if rate else None, name, False, opener.decoder(total, height, width))


class _Opener:
    """Opens one file again and again, and turns what goes wrong into errors that name it."""

    def __init__(self, av, file, where, name):
        self.av, self.file, self.where, self.name = av, file, where, name

    def __call__(self):
        if hasattr(self.file, "seek"):
            self.file.seek(0)
        return self.guarded(lambda: self.av.open(self.file))

    def stream(self, container):
        if not container.streams.video:
            raise InputError(compose(f"{self.where} ({self.name}): no video in the file", expected="a video stream"))
        stream = container.streams.video[0]
        limit = pillow().MAX_IMAGE_PIXELS
        if limit is not None:  # twice as much is what Pillow refuses
            if stream.width * stream.height > 2 * limit:
                found = f"frames of {stream.height:,} x {stream.width:,} pixels, and a limit of {2 * limit:,}"
                raise too_large(self.where, self.name, found)
            # Of a frame that is larger than the file says; FFmpeg counts what it pads, too.
            stream.codec_context.options = {"max_pixels": str(min(4 * limit, 2**31 - 1))}
        stream.thread_type = "AUTO"
        return stream

    def guarded(self, step):
        try:
            return step()
        except (self.av.error.FFmpegError, OSError, ValueError, EOFError) as error:
            raise InputError(
                compose(
                    f"{self.where} ({self.name}): cannot be read as a video",
                    found=f"{type(error).__name__}: {error}",
                    expected="a whole file of a format that FFmpeg reads",
                )
            ) from error

    def ended(self, at, total):
        return InputError(
            compose(
                f"{self.where} ({self.name}): ends early",
                found=f"{at:,} frames that can be decoded",
                expected=f"{total:,}, as the file says",
                do="write the file anew, or pass the frames as an array",
            )
        )

    def decoder(self, total, height, width):
        def decode(indices):
            Image, at = pillow(), -1
            with self() as container:
                decoded = container.decode(self.stream(container))
                for index in map(int, indices):
                    while at < index:
                        frame, at = self.guarded(lambda: next(decoded, None)), at + 1
                        if frame is None:
                            raise self.ended(at, total)
                    pixels = self.guarded(lambda frame=frame: frame.to_ndarray(format="rgb24"))
                    pixels = np.rot90(pixels, _quarter_turns(frame))
                    if pixels.shape[:2] != (height, width):
                        raise ShapeError(
                            compose(
                                f"{self.where} ({self.name}): frames of different size",
                                found=f"frame {at} is {pixels.shape[0]} x {pixels.shape[1]} (height x width)",
                                expected=f"{height} x {width}, as frame 0",
                            )
                        )
                    yield Image.fromarray(np.ascontiguousarray(pixels))

        return decode


def _quarter_turns(frame):
    """Counter-clockwise turns that set a frame upright, as a phone held upright asks for."""
    return round(getattr(frame, "rotation", 0) / 90) % 4
