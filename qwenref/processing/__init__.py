"""Images and videos made into what the vision tower takes, exactly as the checkpoint's files ask for."""

import functools
import math
import numbers
import warnings
from pathlib import Path

import numpy as np

from qwenref.checks import is_whole
from qwenref.errors import (
    CapabilityMissing,
    CheckpointError,
    InputError,
    QwenrefWarning,
    compose,
    frames_of_the_package,
)
from qwenref.inputs import MOST_PATCHES, check_text
from qwenref.processing import placeholders, settings
from qwenref.processing.conversation import listed
from qwenref.processing.geometry import UNKNOWN_RATE, group_times, image_size, sampled_frames, video_size
from qwenref.processing.images import open_picture, pillow
from qwenref.processing.prepared import RESAMPLING, Item, Prepared
from qwenref.processing.videos import open_clip

_EARLIER_FACTOR = 28  # sides of pictures made for earlier models of the family are multiples of this


class Processor:
    """Prepares pictures for one checkpoint: `prepared = model.processor(images=[...], videos=[...])`.

    Everything comes from the checkpoint's preprocessor_config.json and video_preprocessor_config.json (or its
    processor_config.json): nothing is a default of this class, and `describe()` says what was taken from elsewhere.

    An image is a Pillow image, a path, bytes, a file object, or an array uint8 [H, W], [H, W, 3] or [H, W, 4] (uint16
    likewise).  A video is an array [T, H, W, 3], a list of images of one size, or a file.
    """

    def __init__(self, folder, open_tokenizer=None):
        from qwenref.loading import as_config

        self.folder = Path(folder)
        self._config = as_config(self.folder)
        self._open_tokenizer = open_tokenizer
        if getattr(self._config, "vision_config", None) is None:
            raise CapabilityMissing(
                compose(f"{self.folder}: a model without vision", found="no vision_config in config.json")
            )
        self.image  # noqa: B018 - what is missing is told when the processor is asked for, not at the first picture

    @functools.cached_property
    def image(self):
        """`Settings` for images."""
        return settings.read(self.folder, "image", self._config.vision_config)

    @functools.cached_property
    def video(self):
        """`Settings` for videos."""
        return settings.read(self.folder, "video", self._config.vision_config)

    @functools.cached_property
    def tokenizer(self):
        """Tokenizer of the folder."""
        if self._open_tokenizer is not None:
            return self._open_tokenizer()
        from qwenref.tokenizer import Tokenizer

        return Tokenizer(self.folder)

    @functools.cached_property
    def marks(self):
        """`Marks`: the texts of the placeholder tokens, by the ids that config.json gives them."""
        texts = []
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            id = getattr(self._config, name)
            text = self.tokenizer.decode([id])
            if self.tokenizer.added_tokens.get(text) != id:
                raise CheckpointError(
                    compose(
                        f"{self.folder}: {name} {id} is no added token",
                        found=self.tokenizer.token_text(id),
                        expected="config.json and tokenizer.json of one revision",
                    )
                )
            texts.append(text)
        return placeholders.Marks(*texts)

    def __call__(
        self,
        text=None,
        images=None,
        videos=None,
        *,
        min_pixels=None,
        max_pixels=None,
        resize=True,
        fps=None,
        native_fps=None,
        sample=True,
        video_marks="plain",
    ):
        """`Prepared` pictures, with the prompt `text` filled and encoded where one is given.

        images, videos   one, or a list; a list of frames is one video inside the list of videos: videos=[[a, b, c]]
        min_pixels, max_pixels   instead of the file's limits: pixels of the whole item, height * width, and for a
                     video height * width * frames
        resize       False: sides have to be multiples of patch * merge already
        fps          frames taken per second of a video, instead of the file's
        native_fps   frames per second a video was recorded at, for all or a list of one per video (None: the file's
                     own rate; 24 where that is unknown)
        sample       False: every frame is taken
        video_marks  how a video stands in the prompt: "plain", one pair of marks per frame group; "nested", another
                     pair around them all, as transformers' processor writes it

        Nothing is kept between calls.  A QwenrefWarning says when a picture that seems to have been resized for this
        model, or an earlier one, is resized again.
        """
        images, videos = listed(images) or [], listed(videos) or []
        text = None if text is None else check_text(text, "text")
        rates = _rates(native_fps, len(videos))
        items, pixels = [], {}
        if images:
            rules = self._limited(self.image, min_pixels, max_pixels)
            table = rules.table()
            made = [_image(rules, table, source, at, resize) for at, source in enumerate(images)]
            items += [item for item, _ in made]
            pixels["image"] = _joined([values for _, values in made])
        if videos:
            rules = self._limited(self.video, min_pixels, max_pixels)
            if fps is not None:
                rules = rules._replace(fps=_positive(fps, "fps"))
            table = rules.table()
            made = [
                _video(rules, table, source, at, rate, resize, sample)
                for at, (source, rate) in enumerate(zip(videos, rates, strict=True))
            ]
            items += [item for item, _ in made]
            pixels["video"] = _joined([values for _, values in made])
        prepared = Prepared(items, pixels)
        if text is not None:
            prepared.text = placeholders.applied(text, self.edits(text, prepared, video_marks))
            prepared.ids = self.tokenizer.encode(prepared.text)
        return prepared

    def _limited(self, rules, least, most):
        """The `Settings` with the limits that were passed."""
        least, most = rules.least if least is None else least, rules.most if most is None else most
        if not all(is_whole(limit) and limit > 0 for limit in (least, most)) or least > most:
            raise InputError(
                compose(
                    "min_pixels and max_pixels",
                    found=f"{least!r}, {most!r}",
                    expected="whole numbers above 0, the first no larger than the second",
                )
            )
        tokens = self._config.text_config.max_position_embeddings
        if least > tokens * rules.factor**2:  # every picture would be enlarged to that
            raise InputError(
                compose(
                    f"min_pixels: {int(least):,} for a picture are more than the model takes",
                    expected=f"at most {tokens * rules.factor**2:,}   (config.max_position_embeddings {tokens:,}, "
                    f"tokens of {rules.factor} x {rules.factor} pixels)",
                )
            )
        return rules._replace(least=int(least), most=int(most))

    def edits(self, text, prepared, video_marks="plain"):
        """What fills the placeholders of a text: list of `placeholders.Edit`."""
        return placeholders.edits(text, prepared, self.marks, video_marks)

    # What it does, in words

    def resize_difference(self, image):
        """Largest difference, of 255, between the image resized by Pillow and by torch (what torchvision uses).

        Needs torch, of which not all CPUs have the same path for bytes.
        """
        try:
            import torch
        except ImportError as error:
            raise CapabilityMissing(compose("resize_difference needs torch", found=error)) from error
        rgb = open_picture(image).rgb
        rules = self.image
        height, width = image_size(rgb.height, rgb.width, rules.factor, rules.least, rules.most)
        ours = np.asarray(_resized(rgb, height, width))
        planes = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[None]
        theirs = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
        return int(np.abs(theirs[0].permute(1, 2, 0).numpy().astype(int) - ours).max())

    def describe(self):
        """Text: limits, normalisation and frames, and which file says so."""
        lines = [f"Processor · {self.folder.name}"]
        for kind in ("image", "video"):
            try:
                rules = getattr(self, kind)
            except CapabilityMissing as error:
                lines.append(f"  {kind}s  {str(error).splitlines()[0]}")
                continue
            lines.append(
                f"  {kind}s  {rules.least:,} to {rules.most:,} pixels{' over all frames' * (kind == 'video')}, sides "
                f"multiples of {rules.factor} · patches {rules.temporal} x {rules.patch} x {rules.patch}, "
                f"{rules.merge} x {rules.merge} to a token"
            )
            mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (rules.mean, rules.std))
            lines.append(f"          mean {mean} · std {std} · {Path(rules.where).name}")
            if kind == "video":
                lines.append(f"          {rules.fps:g} frames per second, {rules.min_frames:,} to {rules.max_frames:,}")
            if rules.assumed:
                said = ", ".join(f"{key} {value}" for key, value in rules.assumed.items())
                lines.append(f"          not in the file, as usual in this family: {said}")
        return "\n".join([*lines, f"  {RESAMPLING}"])

    def __repr__(self):
        return self.describe()


def _image(rules, table, source, index, resize):
    where = f"image {index}"
    picture = open_picture(source, where)
    size = _target(picture, resize, rules, where, image_size, picture.size)
    patches = _patches(rules, table, [np.asarray(_resized(picture.rgb, *size))])
    grid = (1, size[0] // rules.patch, size[1] // rules.patch)
    tokens = len(patches) // rules.merge**2
    return Item("image", index, picture.name, picture.size, size, grid, tokens, math.prod(size)), patches


def _video(rules, table, source, index, native_fps, resize, sample):
    where = f"video {index}"
    clip = open_clip(source, where)
    rate = native_fps or clip.fps
    if rate is None:
        warnings.warn(
            compose(
                f"{where} ({clip.name}): nobody says how many frames per second it has",
                found=f"taken for {UNKNOWN_RATE:g}",
                do="pass native_fps=",
            ),
            QwenrefWarning,
            stacklevel=frames_of_the_package(),
        )
        rate = UNKNOWN_RATE
    taken = range(clip.total)  # a file may claim any number
    if sample:
        taken = sampled_frames(clip.total, rate, rules.fps, rules.min_frames, rules.max_frames).tolist()
    original = clip.height, clip.width
    size = _target(clip, resize, rules, where, functools.partial(_frames_size, len(taken), rules.temporal), original)
    rows, columns = size[0] // rules.patch, size[1] // rules.patch
    count = -(-len(taken) // rules.temporal) * rows * columns
    if count > MOST_PATCHES:  # before anything is decoded
        raise InputError(
            compose(
                f"{where} ({clip.name}): too much for one call",
                found=f"{len(taken):,} frames of {size[0]:,} x {size[1]:,}: {count:,} patches",
                expected=f"at most {MOST_PATCHES:,}",
                do="take fewer frames, by fps= or by cutting it" if sample else "leave sample=False out",
            )
        )
    groups, held = [], []
    for frame in clip.frames(taken):
        held.append(np.asarray(_resized(frame, *size)))
        if len(held) == rules.temporal:
            groups.append(_patches(rules, table, held))
            held = []
    if held:
        groups.append(_patches(rules, table, held))
    patches = _joined(groups)
    frames = (*taken, *[taken[-1]] * (-len(taken) % rules.temporal))
    item = Item(
        "video", index, clip.name, original, size,
        (len(groups), rows, columns), len(patches) // rules.merge**2,
        len(taken) * math.prod(size), clip.total, float(rate), frames,
        tuple(group_times(taken, rate, rules.temporal)),
    )  # fmt: skip
    return item, patches


def _frames_size(frames, temporal, height, width, factor, least, most, where):
    return video_size(frames, height, width, factor, temporal, least, most, where)


def _target(shown, resize, rules, where, sized, original):
    """(height, width) a picture gets; a second resize is warned of, a forbidden one refused."""
    size = sized(*original, rules.factor, rules.least, rules.most, where)
    whole = not any(side % rules.factor for side in original)
    if not resize:
        if not whole:
            raise InputError(
                compose(
                    f"{where} ({shown.name}): {original[0]:,} x {original[1]:,} does not fit the patches as it is",
                    expected=f"sides that are multiples of {rules.factor}",
                    do=f"leave resize=False out, or make it {size[0]:,} x {size[1]:,}",
                )
            )
        return original
    earlier = not any(side % _EARLIER_FACTOR for side in original)
    if shown.handed and size != original and (whole or earlier):
        why = f"multiples of {rules.factor if whole else _EARLIER_FACTOR}, as if it had been resized for "
        warnings.warn(
            compose(
                f"{where} ({shown.name}): {original[0]:,} x {original[1]:,} is resized to {size[0]:,} x {size[1]:,}",
                found=why + ("this model" if whole else "an earlier model of the family"),
                expected=f"one resize; {rules.least:,} to {rules.most:,} pixels count over the whole item",
                do="hand over the original, or pass resize=False" if whole else "hand over the original",
            ),
            QwenrefWarning,
            stacklevel=frames_of_the_package(),
        )
    return size


def _resized(image, height, width):
    return image if image.size == (width, height) else image.resize((width, height), pillow().Resampling.BICUBIC)


def _patches(rules, table, frames):
    """float32 [h * w, channels * temporal * patch * patch] of the frames (uint8 [H, W, 3]) of one patch in time.

    Rows go by blocks of merge x merge patches: block row, block column, row and column in the block.  Inside a row:
    channel, frame, pixel row, pixel column.  The last frame fills up.
    """
    P, M = rules.patch, rules.merge
    height, width, channels = frames[0].shape
    rows, columns = height // (P * M), width // (P * M)
    values = np.empty((rows, columns, M, M, channels, rules.temporal, P, P), np.float32)
    for at, frame in enumerate(frames):
        stop = at + 1 if at + 1 < len(frames) else rules.temporal
        bands = frame.reshape(rows, M, P, columns, M, P, channels).transpose(0, 6, 3, 1, 4, 2, 5)
        for row, channel in np.ndindex(rows, channels):  # so few values at a time that they stay in the caches
            found = table[channel].take(np.ascontiguousarray(bands[row, channel]))
            values[row, :, :, :, channel, at:stop] = found[:, :, :, None]
    return values.reshape(-1, channels * rules.temporal * P * P)


def _joined(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# Options


def _rates(given, count):
    rates = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(rates) != count:
        raise InputError(compose("native_fps", found=f"{len(rates)} rates", expected=f"one for each of {count} videos"))
    return [None if rate is None else _positive(rate, "native_fps") for rate in rates]


def _positive(value, name):
    """float of a number of any library, a fraction too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise InputError(compose(f"{name}: {value!r}", expected="frames per second, a number above 0"))
    return float(value)
