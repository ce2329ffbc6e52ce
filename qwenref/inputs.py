"""What a caller may hand to a model, made uniform, and the one error for everything else.

Nothing here changes a model or a cache: every check runs before the first op.
"""

import difflib
import itertools
import math

import numpy as np

from qwenref.checks import is_whole
from qwenref.errors import DTypeError, InputError, ShapeError, compose
from qwenref.exchange import as_array
from qwenref.numerics import active

_LARGEST = np.iinfo(np.int64).max
MOST_PATCHES = 2**24  # of all pictures of a call: 96 GiB of pixels


def refuse_unknown(unknown, known):
    """TypeError for keyword arguments that do not exist, with the nearest that does."""
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"unexpected '{name}'{hint}")


def integers(values, name, dims):
    """int64 array of one of the given numbers of dimensions, from any integer array-like."""
    array = rectangular(values, name)
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        text = "encode text with model.tokenizer" if array.dtype.kind in "US" else None
        raise DTypeError(compose(f"{name}: {array.dtype} values", expected="integers", do=text))
    if array.dtype.kind == "u" and array.size and array.max() > _LARGEST:
        raise InputError(f"{name}: {int(array.max()):,} is more than 64 bits hold")
    if array.ndim not in dims:
        expected = " or ".join(f"{n}-D" for n in dims)
        raise ShapeError(compose(f"{name}: {array.ndim}-D", found=f"shape {list(array.shape)}", expected=expected))
    return np.ascontiguousarray(array, np.int64)


def rectangular(values, name):
    """`values` as an array; rows of different lengths are an error, not an array of lists."""
    try:
        return as_array(values)
    except ValueError:
        raise ShapeError(compose(f"{name}: rows of different lengths", do="pad them and pass attention_mask")) from None


def check_text(text, where):
    """`text` itself, if it is text that UTF-8 can hold; `where` is what a message calls it."""
    if not isinstance(text, str):
        raise InputError(compose(f"{where}: not text", found=type(text).__name__, expected="str"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            compose(
                f"{where}: character {error.start} is a lone surrogate, U+{ord(text[error.start]):04X}",
                found=repr(text[max(0, error.start - 8) : error.start + 8]),
                expected="text that UTF-8 can hold",
                do='text.encode("utf-8", "replace").decode() loses it on purpose',
            )
        ) from None
    return text


def checked_ids(input_ids, vocab_size):
    """[B, T] int64 ids, each inside the vocabulary, at least one token."""
    ids = integers(input_ids, "input_ids", (1, 2))
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.size == 0:
        raise InputError(compose("input_ids: an empty prompt", found=f"shape {list(ids.shape)}", expected="a token"))
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        row, t = np.argwhere(bad)[0]
        raise InputError(
            compose(
                f"input_ids[{row}, {t}] is {int(ids[row, t]):,}; the vocabulary has {vocab_size:,}",
                found=f"{int(bad.sum()):,} of {ids.size:,} ids outside of it",
                expected=f"0 to {vocab_size - 1:,}",
                do="use the tokenizer that belongs to this model: model.tokenizer",
            )
        )
    return ids


def hidden_or_ids(config, input_ids, inputs_embeds, owner="forward", name="inputs_embeds"):
    """(ids, None) or (None, embeddings [B, T, H] of the active profile's dtype): exactly one of the two is given.

    `owner` and `name` are what a message calls the call and its second argument.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise InputError(compose(f"{owner}: input_ids or {name}", found=found, expected="exactly one of the two"))
    if input_ids is not None:
        return checked_ids(input_ids, config.vocab_size), None
    hidden = rectangular(inputs_embeds, name)
    if hidden.ndim != 3 or hidden.shape[2] != config.hidden_size or 0 in hidden.shape:
        raise ShapeError(
            compose(
                f"{name}: wrong shape",
                found=f"{hidden.dtype} {list(hidden.shape)}",
                expected=f"[B, T, H {config.hidden_size:,}]   (config.hidden_size)",
            )
        )
    dtype = active().dtype
    if not np.can_cast(hidden.dtype, dtype) or hidden.dtype.kind in "biu":
        raise DTypeError(
            compose(
                f"{name}: {hidden.dtype} values",
                expected=f"{dtype}, or a float type that it holds exactly",
                do=f'pass {name}.astype("{dtype}")',
            )
        )
    return None, np.ascontiguousarray(hidden, dtype)


def checked_layers(start, stop, count):
    """(start, stop) of a run of layers out of `count`, stop None meaning the last one."""
    stop = count if stop is None else stop
    whole = is_whole(start) and is_whole(stop)
    if not whole or not 0 <= start <= stop <= count:
        raise InputError(
            compose(
                "run: no such layers",
                found=f"start {start!r}, stop {stop!r}",
                expected=f"0 <= start <= stop <= {count}: layers start to stop - 1 are run",
            )
        )
    return int(start), int(stop)


def checked_mask(mask, batch, tokens, past):
    """bool [B, T] of the new tokens, or None.  `mask` may also cover what was fed before: [B, past + T]."""
    if mask is None:
        return None
    array = rectangular(mask, "attention_mask")
    if array.dtype != bool and array.dtype.kind not in "iuf":
        raise DTypeError(compose(f"attention_mask: {array.dtype}", expected="booleans, or 1 for keep and 0 for pad"))
    columns = past.shape[1]
    if array.shape not in ((batch, tokens), (batch, columns + tokens)):
        both = f"[{batch}, {tokens}]" + (f" or [{batch}, {columns + tokens}]" if columns else "")
        raise ShapeError(compose("attention_mask: wrong shape", found=list(array.shape), expected=both))
    if not np.isin(array, (0, 1)).all():
        raise InputError(
            compose("attention_mask: values other than 0 and 1", do="pass 1 to keep a token, 0 to skip it")
        )
    array = array.astype(bool)
    if array.shape[1] > tokens:
        if (array[:, :columns] != past).any():
            row, t = np.argwhere(array[:, :columns] != past)[0]
            raise InputError(
                compose(
                    f"attention_mask[{row}, {t}] differs from what was fed before",
                    found=int(array[row, t]),
                    expected=f"{int(past[row, t])}: a token in the cache cannot be masked afterwards",
                )
            )
        array = array[:, columns:]
    return array


def checked_positions(position_ids, batch, tokens, kept, sequences):
    """int64 [3, B, T] from [B, T], [3, B, T] or [4, B, T] (whose first row is the text's own), or None.

    Time never goes back inside a sequence: positions alone are no boundary, so packed rows have to say where they end.
    """
    if position_ids is None:
        return None
    array = integers(position_ids, "position_ids", (2, 3))
    shapes = {(batch, tokens), (1, tokens), (3, batch, tokens), (4, batch, tokens)}
    if array.shape not in shapes:
        raise ShapeError(
            compose(
                "position_ids: wrong shape",
                found=list(array.shape),
                expected=f"[{batch}, {tokens}] or [3, {batch}, {tokens}]",
            )
        )
    if (array < 0).any():
        raise InputError(compose("position_ids: negative positions", found=int(array.min()), expected="0 or more"))
    time = np.broadcast_to(array if array.ndim == 2 else array[-3], (batch, tokens))
    for row in range(batch):
        seen = np.flatnonzero(kept[row])
        back = np.diff(time[row, seen]) < 0
        if sequences is not None:
            back &= np.diff(sequences[row, seen]) == 0
        if back.any():
            before, t = seen[back.argmax()], seen[back.argmax() + 1]
            raise InputError(
                compose(
                    f"position_ids[{row}, {t}] goes back from {time[row, before]:,} to {time[row, t]:,}",
                    expected="positions that do not decrease inside a sequence",
                    do="pass sequence_ids to say where a packed row begins another sequence",
                )
            )
    return np.broadcast_to(array, (3, batch, tokens)) if array.ndim == 2 else array[-3:]


def checked_sequences(sequence_ids, batch, tokens):
    """int64 [B, T] sequence numbers of packed rows, or None."""
    if sequence_ids is None:
        return None
    array = integers(sequence_ids, "sequence_ids", (2,))
    if array.shape != (batch, tokens):
        raise ShapeError(compose("sequence_ids: wrong shape", found=list(array.shape), expected=f"[{batch}, {tokens}]"))
    return array


def checked_keep(keep, tokens, name="logits_to_keep"):
    """Numbers of the tokens that get logits, None for all.  `keep` is how many at the end, or a list."""
    array = rectangular(keep, name)
    whole = array.dtype.kind in "iu" or (array.size == 0 and array.ndim == 1)
    if not whole or array.ndim > 1 or (array.ndim == 0 and array < 0):
        raise InputError(compose(f"{name}: {keep!r}", expected="0 for all, n for the last n, or a list"))
    if array.ndim == 0:
        return None if array == 0 or array >= tokens else np.arange(tokens - int(array), tokens)
    array = array.astype(np.int64)
    if ((array < -tokens) | (array >= tokens)).any():
        raise InputError(compose(f"{name}: {keep}", expected=f"tokens 0 to {tokens - 1} of this call"))
    return array


def checked_grids(grids, name, merge, word=None, still=False):
    """int64 [n, 3] of patches: frame groups, height, width, whole merge blocks each; from [n, 3], [3] or nothing.

    `name` is what a message calls the array, `word` a picture of it; `still` ones have one frame group.
    """
    grids = integers(grids, name, (1, 2))
    grids = grids.reshape(-1, 3) if grids.size == 0 or grids.ndim == 1 and grids.size == 3 else grids
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise ShapeError(
            compose(f"{name}: wrong shape", found=list(grids.shape), expected="[n, 3]: frame groups, height, width")
        )
    sums = itertools.accumulate(map(math.prod, grids.tolist()))  # not in 64 bits
    for number, (grid, patches) in enumerate(zip(grids.tolist(), sums, strict=True)):
        found = expected = None
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge or still and grid[0] != 1:
            frames = "1 frame group" if still else "at least 1 frame group"
            expected = f"{frames}, and sides that are multiples of {merge}   (vision_config.spatial_merge_size)"
        elif patches > MOST_PATCHES:
            found, expected = f"{patches:,} patches up to here", f"at most {MOST_PATCHES:,}"
        if expected is not None:
            where = f"{word} {number}: " if word else ""
            raise InputError(compose(f"{where}{name}[{number}] is {grid}", found=found, expected=expected))
    return grids


def checked_patches(pixels, name, width, grids, grid_name, word="picture"):
    """[N, width] of the profile's dtype, contiguous: N patches as the checked grids say.

    The names are what a message calls the two arrays, `word` a picture of them.
    """
    pixels, each = rectangular(pixels, name), grids.prod(axis=1)
    if pixels.shape != (each.sum(), width):
        sums = " + ".join(f"{n:,}" for n in each[:6].tolist()) + (" + …" if len(each) > 6 else "")
        first = f"{name}: {pixels.ndim}-D"
        if pixels.ndim == 2:
            first = f"{name}: {len(pixels):,} patches, {grid_name} makes {each.sum():,}"
            if len(pixels) == each.sum():
                first = f"{name}: patches of {pixels.shape[1]:,} values"
        raise ShapeError(
            compose(
                first,
                found=f"{pixels.dtype} {list(pixels.shape)}",
                expected=f"[{each.sum():,}, {width:,}]   ({word}s of {sums or 0} patches)",
                do="pass the pixels and the grid that the processor returned together",
            )
        )
    dtype = active().dtype
    if pixels.dtype.kind in "biu" or not (np.can_cast(pixels.dtype, dtype) or pixels.dtype == np.float64):
        raise DTypeError(
            compose(f"{name}: {pixels.dtype} values", expected=f"{dtype}", do="normalise them with the processor")
        )
    return np.ascontiguousarray(pixels, dtype)
