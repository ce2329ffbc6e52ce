"""Sizes a picture is given, frames a video is read at, and the times they are shown at: numbers only, no pixel.

Rounding is Python's: halves go to the even neighbour, so 720 becomes 704.
"""

import math

import numpy as np

from qwenref.errors import InputError, compose

MOST_STRETCHED = 200  # a longer side of more than this many shorter ones is refused
UNKNOWN_RATE = 24.0  # frames per second where nobody knows


def image_size(height, width, factor, least, most, where="image"):
    """(height, width) an image is resized to: multiples of `factor`, `least` to `most` pixels together.

    Each side goes to the nearest multiple.  Only where the product is then out of bounds, both sides are scaled by the
    root of what is missing, rounded down (not below one `factor`) or up.
    """
    _refuse_stretched(height, width, where)
    fitted = _nearest(height, factor), _nearest(width, factor)
    return _within(fitted, fitted[0] * fitted[1], height, width, height * width, factor, least, most)


def video_size(frames, height, width, factor, temporal, least, most, where="video"):
    """(height, width) the frames of a video are resized to; the bounds hold for frames * height * width.

    The test takes the frames rounded to a multiple of `temporal`, the scale takes them as they are.  Frames with a
    side below `factor` are enlarged first.
    """
    if frames < temporal:
        raise InputError(
            compose(
                f"{where}: {frames} frame{'s' * (frames != 1)}",
                expected=f"at least {temporal}   (temporal_patch_size)",
                do="pass a single picture as an image",
            )
        )
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _refuse_stretched(height, width, where)
    fitted = _nearest(height, factor), _nearest(width, factor)
    volume = _nearest(frames, temporal) * fitted[0] * fitted[1]
    return _within(fitted, volume, height, width, frames * height * width, factor, least, most)


def _nearest(length, unit):
    return round(length / unit) * unit


def _within(fitted, volume, height, width, original, factor, least, most):
    if volume > most:
        scale = math.sqrt(original / most)
        return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    if volume < least:
        scale = math.sqrt(least / original)
        return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))
    return fitted


def _refuse_stretched(height, width, where):
    ratio = max(height, width) / min(height, width)
    if ratio > MOST_STRETCHED:
        raise InputError(
            compose(
                f"{where}: one side is {ratio:.4g} times the other",
                found=f"height {height:,}, width {width:,}",
                expected=f"at most {MOST_STRETCHED} times",
                do="crop it, or cut it into pieces",
            )
        )


def sampled_frames(total, native_fps, fps, least, most):
    """int64 [n], ascending: which of `total` frames are taken, spread evenly from the first to the last.

    n is what `fps` frames per second of a video of `native_fps` come to, at least `least`, at most `most`, and no more
    than there are.
    """
    count = min(max(int(min(total / native_fps * fps, most)), least), most, total)
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def group_times(indices, native_fps, temporal):
    """Seconds, one float per group of `temporal` frames: the mean of its first and last; the last frame fills up."""
    seconds = [int(index) / native_fps for index in indices]
    seconds += seconds[-1:] * (-len(seconds) % temporal)
    return [(seconds[at] + seconds[at + temporal - 1]) / 2 for at in range(0, len(seconds), temporal)]
