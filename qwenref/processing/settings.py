"""What a checkpoint's files say about its pictures: patches, limits, normalisation, frames."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from qwenref.errors import CapabilityMissing, CheckpointError, compose
from qwenref.hub import read_json

FILES = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
JOINT_FILE = "processor_config.json"  # holds both, under "image_processor" and "video_processor"

# Taken where a video's file says nothing: what all processors of the family have.
_FRAMES = {"fps": 2, "min_frames": 4, "max_frames": 768}
# A value other than these asks for a step that is not made here. The resampling is Pillow's number for bicubic.
_FIXED = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "do_center_crop": False,
    "do_pad": False, "do_sample_frames": True, "cap_pixels_per_frame": False, "num_frames": None, "resample": 3,
}  # fmt: skip


class Settings(NamedTuple):
    """How images (or videos) are prepared.

    patch, temporal, merge   side of a patch in pixels, frames in a patch, patches per side of a token
    least, most              pixels of an item: height * width, of a video times its frames
    mean, std                of each channel, after `scale`, which takes a byte to 0 .. 1
    fps, min_frames, max_frames   frames taken of a video (None for images)
    where                    the file
    assumed                  {key: value} of what no file says
    """

    patch: int
    temporal: int
    merge: int
    least: int
    most: int
    mean: tuple
    std: tuple
    scale: float
    fps: float | None
    min_frames: int | None
    max_frames: int | None
    where: str
    assumed: dict

    @property
    def factor(self):
        """Sides are multiples of this many pixels: one token's worth."""
        return self.patch * self.merge

    def table(self):
        """float32 [3, 256]: the value each byte of each channel becomes, rounded once."""
        bytes_ = np.arange(256) * self.scale
        return np.array([(bytes_ - m) / s for m, s in zip(self.mean, self.std, strict=True)]).astype(np.float32)


def read(folder, kind, vision=None):
    """The `Settings` of a checkpoint folder for "image" or "video"; `vision` is the vision_config they have to fit."""
    folder = Path(folder)
    found, where = read_json(folder / JOINT_FILE).get(f"{kind}_processor"), folder / JOINT_FILE
    if not isinstance(found, dict):
        where = folder / FILES[kind]
        if not where.is_file():
            raise CapabilityMissing(
                compose(
                    f"{folder}: no {FILES[kind]}",
                    expected=f"the checkpoint's own limits and normalisation for {kind}s: defaults of programs differ",
                    do=f"add the file to the folder, or pass pixel_values{'_videos' * (kind == 'video')} ready made",
                )
            )
        found = read_json(where)
    return _Reader(found, where).settings(kind, vision)


class _Reader:
    def __init__(self, found, where):
        self.found, self.where, self.assumed = found, where, {}

    def fault(self, key, found, expected):
        return CheckpointError(compose(f"{self.where}: {key}", found=repr(found), expected=expected))

    def settings(self, kind, vision):
        for key, fixed in _FIXED.items():
            value = self.found.get(key, fixed)
            if value is not None and value != fixed:
                raise CapabilityMissing(
                    compose(f"{self.where}: {key} is {value!r}", expected=f"{fixed!r}, or no such key")
                )
        sides = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size",
                 "merge_size": "spatial_merge_size"}  # fmt: skip
        patch, temporal, merge = (self.side(key, name, vision) for key, name in sides.items())
        least, most = self.limits()
        video = kind == "video"
        frames = {key: self.number(key, default) for key, default in _FRAMES.items()} if video else {}
        if video and not frames["min_frames"] <= frames["max_frames"]:
            raise self.fault("min_frames and max_frames", frames, "min_frames no larger")
        return Settings(
            patch, temporal, merge, least, most, self.channels("image_mean"), self.channels("image_std", above=0),
            self.number("rescale_factor", 1 / 255), frames.get("fps"), frames.get("min_frames"),
            frames.get("max_frames"), str(self.where), self.assumed,
        )  # fmt: skip

    def side(self, key, config_key, vision):
        expected = None if vision is None else getattr(vision, config_key)
        value = self.number(key, expected, whole=True)
        if expected is not None and value != expected:
            raise self.fault(key, value, f"{expected}   (vision_config.{config_key} of config.json)")
        return value

    def limits(self):
        size = self.found.get("size")
        size = size if isinstance(size, dict) else {}
        # The older names beat the newer ones where a file has both.
        named = [("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")]
        limits = [self.found.get(older) or size.get(newer) for older, newer in named]
        if not all(type(limit) is int and limit > 0 for limit in limits) or limits[0] > limits[1]:
            raise self.fault("size", self.found.get("size"), "shortest_edge and longest_edge, numbers of pixels")
        return limits

    def channels(self, key, above=None):
        value = self.found.get(key)
        value = [value] * 3 if type(value) in (int, float) else value
        good = isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
        if not good or not np.isfinite(value).all() or (above is not None and min(value) <= above):
            raise self.fault(key, value, "three numbers" + (f" above {above}" if above is not None else ""))
        return tuple(map(float, value))

    def number(self, key, default, whole=False):
        value = self.found.get(key)
        if value is None and default is not None:
            if key != "rescale_factor":
                self.assumed[key] = default
            return default
        kinds = (int,) if whole or key.endswith("_frames") else (int, float)
        if type(value) not in kinds or not 0 < value < float("inf"):
            raise self.fault(key, value, "a whole number above 0" if kinds == (int,) else "a number above 0")
        return value
