"""One picture of any kind as RGB bytes: files, Pillow objects, arrays; orientation, palettes, transparency, 16 bits."""

import base64
import binascii
import io
import os
from typing import NamedTuple

import numpy as np

from qwenref.errors import CapabilityMissing, DTypeError, InputError, QwenrefError, ShapeError, a_kind, compose


class Picture(NamedTuple):
    """An RGB picture.

    rgb       Pillow image of mode RGB
    name      what to call it: a file's name, or what it was handed over as
    handed    it came as pixels, not as a file: whoever made it may have resized it
    """

    rgb: object
    name: str
    handed: bool

    @property
    def size(self):
        """(height, width)"""
        return self.rgb.height, self.rgb.width


def pillow():
    """The module PIL.Image, or an error that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise CapabilityMissing(
            compose(
                "pictures need Pillow",
                found=error,
                do='pip install "qwenref[vision]", or pass pixel_values ready made',
            )
        ) from error
    return Image


def open_picture(source, where="image"):
    """The `Picture` of a path, bytes, file object, data URI, Pillow image, or array uint8 or uint16 [H, W (, 1, 3, 4)].

    The orientation an EXIF tag asks for is applied; what is transparent is laid over white; 16 bits are scaled to 8;
    of an animation, the first frame (of a Pillow image, the frame it stands at).

    A file of more than twice PIL.Image.MAX_IMAGE_PIXELS is refused; above that limit itself, Pillow's own
    DecompressionBombWarning goes to Python's filters, and is an error here where they make it one.
    """
    Image = pillow()
    from PIL import UnidentifiedImageError

    if isinstance(source, Image.Image):
        return Picture(_to_rgb(source, Image, where), f"Pillow {source.mode}", source.format is None)
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        array = np.asarray(source)
        return Picture(_from_array(array, Image, where), f"array {array.dtype}", True)
    file, name = as_file(source, where)
    try:
        with Image.open(file) as opened:
            return Picture(_to_rgb(opened, Image, where, name), name, False)
    except QwenrefError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(where, name, _first_line(error)) from error
    except Exception as error:  # decoders of a few dozen formats raise whatever they meet
        unknown = isinstance(error, UnidentifiedImageError)  # its text is where the object lies in memory
        raise InputError(
            compose(
                f"{where} ({name}): cannot be read as a picture",
                found="no format that Pillow knows" if unknown else f"{type(error).__name__}: {_first_line(error)}",
                expected="a whole file of a format that Pillow reads",
            )
        ) from error


def as_file(source, where, expected="a Pillow image, a path, bytes, a file object, or an array"):
    """(what a decoder opens, name) of a path, bytes, file object or data URI; `expected` is for anything else."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source), f"{len(source):,} bytes"
    if isinstance(source, str) and source.startswith("data:"):
        return io.BytesIO(_data_of(source, where)), f"data URI, {len(source):,} characters"
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        raise CapabilityMissing(
            compose(f"{where}: a web address", found=source[:80], expected="a file", do="download it first")
        )
    if isinstance(source, (str, os.PathLike)):
        path = os.path.expanduser(os.fspath(source))
        if not os.path.isfile(path):
            what = "a folder" if os.path.isdir(path) else "no file" if os.path.exists(path) else "no such file"
            shown = path if 0 < len(path) <= 200 else repr(path[:60]) + f"… ({len(path):,} characters)" * bool(path)
            raise InputError(compose(f"{where}: cannot be read", found=f"{shown}: {what}"))
        return path, os.path.basename(path)
    if hasattr(source, "read"):
        return source, os.path.basename(str(getattr(source, "name", type(source).__name__)))
    raise InputError(
        compose(
            f"{where}: {a_kind(source)}",
            found=" ".join(f"{source!r:.60}".split()),
            expected=expected,
        )
    )


def _data_of(uri, where):
    head, comma, body = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(
            compose(f"{where}: a data URI that cannot be read", found=error, expected="data:...;base64,...")
        ) from error


def too_large(where, name, found):
    """The error of what Pillow's limit of pixels keeps from being decoded."""
    return InputError(
        compose(
            f"{where} ({name}): too large to be decoded",
            found=found,
            do="make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it",
        )
    )


def _first_line(error):
    return (str(error).strip() or "no reason given").splitlines()[0]


def _to_rgb(image, Image, where, name="Pillow image"):
    from PIL import ImageOps

    if 0 in image.size:
        raise _empty(where, image.height, image.width)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(where, name, _first_line(error)) from error
    except Exception as error:
        raise InputError(
            compose(
                f"{where} ({name}): cannot be decoded",
                found=f"{type(error).__name__}: {_first_line(error)}",
                expected="a whole file",
            )
        ) from error
    try:
        if image.mode.startswith("I"):
            return _narrowed(image, Image, where)
        if image.mode == "F":
            raise _unsupported(where, name, image.mode, "its values have no known range")
        if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        return image.convert("RGB")
    except QwenrefError:
        raise
    except Exception as error:  # what Pillow says of a conversion it does not have
        raise _unsupported(where, name, image.mode, _first_line(error)) from error


def _narrowed(image, Image, where):
    """Grey values of 16 bits in 8; Pillow's own conversion would cut them off at 255."""
    wide = np.asarray(image)
    if wide.min() < 0 or wide.max() > 0xFFFF:
        raise _unsupported(where, "Pillow image", image.mode, f"values {wide.min():,} to {wide.max():,}, not 16 bits")
    grey = _to_bytes(wide.astype(np.uint16))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(wide == transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _to_bytes(wide):
    """uint16 -> uint8, 65535 to 255, rounded to the nearest."""
    return ((wide.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _from_array(array, Image, where):
    if array.dtype.kind != "u" or array.dtype.itemsize > 2:
        ask = "np.round(a * 255).astype(np.uint8) if it runs from 0 to 1" if array.dtype.kind == "f" else None
        raise DTypeError(
            compose(f"{where}: an array of {array.dtype}", expected="uint8 0..255, or uint16 0..65535", do=ask)
        )
    if array.ndim not in (2, 3) or array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        do = None
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            do = "a.transpose(1, 2, 0) puts channels last"
        elif array.ndim == 4:
            do = "pass list(a) for several images, or a as a video"
        raise ShapeError(
            compose(
                f"{where}: an array of shape {list(array.shape)}",
                expected="[height, width], or [height, width, channels] with 1, 3 or 4 channels",
                do=do,
            )
        )
    if 0 in array.shape:
        raise _empty(where, *array.shape[:2])
    if array.dtype.itemsize == 2:
        array = _to_bytes(array)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), Image, where)


def _empty(where, height, width):
    return InputError(
        compose(f"{where}: no pixels", found=f"height {height}, width {width}", expected="at least 1 x 1")
    )


def _unsupported(where, name, mode, why):
    return InputError(
        compose(f"{where} ({name}): mode {mode} cannot be made RGB", found=why, do="convert it, and pass RGB")
    )
