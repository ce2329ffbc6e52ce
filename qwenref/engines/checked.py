"""What an engine may answer: ids of its vocabulary, log-probabilities that can be some.  One check for all adapters.

`where` is what a message calls the place: "vllm: score of p03, position 17".
"""

import ml_dtypes
import numpy as np

from qwenref import logprobs
from qwenref.checks import as_whole, is_row, is_whole
from qwenref.compare.errors import BadLogprobs, BadTokenIds, NonFinite
from qwenref.engines.base import ALL, Row
from qwenref.errors import InputError, compose

ABOVE_ZERO = 1e-6  # what a log-probability may be above 0, by rounding
MASS = 1e-3  # what the probabilities of a list may be above 1 together, by rounding


def ids(values, vocab=None, limit=None, where="ids", some=True, more=None):
    """`values` as a list of int: 0 <= id < vocab, at most `limit` of them and, with `some`, at least one.

    more: what to do about more than `limit`.  Raises BadTokenIds, whose `index` is that of the first bad one.
    """
    if not is_row(values):
        raise _bad_ids(f"{where}: no list of ids", found=repr(values)[:80])
    values = list(values)
    found = [as_whole(value) for value in values]
    for index, id in enumerate(found):
        if id is None:
            raise _bad_ids(f"{where}: id {index} is no whole number", index, found=repr(values[index])[:80])
        if id < 0 or (vocab is not None and id >= vocab):
            expected = "0 or more" if vocab is None else f"0 to {vocab - 1:,}"
            raise _bad_ids(f"{where}: id {index} is outside the vocabulary", index, found=f"{id:,}", expected=expected)
    if some and not found:
        raise _bad_ids(f"{where}: no ids", expected="one at least")
    if limit is not None and len(found) > limit:
        first = f"{where}: more ids than there are positions for"
        raise _bad_ids(first, found=f"{len(found):,}", expected=f"at most {limit:,}", do=more)
    return found


def row(values, numbers, vocab=None, where="row", chosen=None, chosen_logprob=None):
    """`Row` of ids and their log-probabilities, likeliest first as the engine gave them.

    Raises BadTokenIds and BadLogprobs: NaN, +inf, above 0, of a sum above 1, unsorted, an id twice, probabilities.
    """
    found = _array_of_ids(values, vocab, f"{where}: ids")
    given = _numbers(numbers, where)
    if len(found) != len(given):
        raise _bad(f"{where}: ids and log-probabilities", found=f"{len(found)} and {len(given)}", expected="as many")
    _check_values(given, where)
    if len(np.unique(found)) != len(found):
        twice = next(id for n, id in enumerate(found.tolist()) if id in found[:n])
        raise _bad(f"{where}: an id twice", found=f"id {twice:,}")
    _check_order(given, where)
    if chosen is not None:
        [chosen] = ids([chosen], vocab, where=f"{where}: the chosen id")
    if chosen_logprob is not None:
        [chosen_logprob] = _numbers([chosen_logprob], f"{where}: of the chosen id").tolist()
        _check_values(np.array([chosen_logprob]), f"{where}: of the chosen id")
    return Row(found, given, chosen, chosen_logprob)


def row_of(table, vocab=None, where="row", chosen=None):
    """`Row` of {id: log-probability} in any order; the lower id first among equals."""
    numbers = _numbers(list(table.values()), where)
    order = sorted(range(len(numbers)), key=lambda n: (-numbers[n], list(table)[n])) if len(numbers) else []
    known = list(table)
    value = None if chosen is None or chosen not in table else float(numbers[known.index(chosen)])
    return row([known[n] for n in order], numbers[order] if order else [], vocab, where, chosen, value)


def row_of_logits(logits, k, chosen=None, where="logits"):
    """`Row` of the k likeliest of logits [vocab], k a number or "all"; raises NonFinite for NaN and +inf."""
    logits = np.asarray(logits)
    bad = np.flatnonzero(np.isnan(logits) | np.isposinf(logits))
    if bad.size or np.isneginf(logits).all():
        index = int(bad[0]) if bad.size else 0
        error = NonFinite(compose(f"{where}: a logit that is not finite", found=f"{logits[index]} at id {index:,}"))
        error.index = index
        raise error
    values = logprobs.log_softmax(logits)
    found, numbers = logprobs.top(values, len(values) if k == ALL else k)
    return Row(found, numbers, chosen, None if chosen is None else float(values[chosen]))


def count(k, where):
    """How many log-probabilities are asked for: a whole number of 0 or more, or "all"."""
    if k == ALL or (is_whole(k) and k >= 0):
        return k
    raise InputError(compose(f"{where}: k", found=repr(k), expected='0 or more, or "all"'))


def resolution(values):
    """The shortest of "bf16", "f16", "f32", "f64" that holds every one of the values: what they were rounded to.

    Of logits it shows the engine's own; log-probabilities it shows as the engine wrote them down.
    """
    values = np.asarray(values, np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16), ("f32", np.float32)):
        with np.errstate(over="ignore"):
            if np.array_equal(values.astype(dtype).astype(np.float64), values):
                return name
    return "f64"


def _array_of_ids(values, vocab, where):
    """`ids` as int64 [K]; an array is looked at as a whole, for rows that hold a vocabulary."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu" and values.size:
        most = np.iinfo(np.int64).max if vocab is None else vocab - 1
        if values.min() >= 0 and values.max() <= most:
            return values.astype(np.int64)
    return np.array(ids(values, vocab, where=where, some=False), np.int64)


def _numbers(values, where):
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind == "f":
        return values.astype(np.float64)
    try:
        if any(isinstance(value, (str, bytes, bool)) for value in values):
            raise TypeError
        found = np.array([float(value) for value in values], np.float64)
    except (TypeError, ValueError, OverflowError):
        raise _bad(f"{where}: log-probabilities that are no numbers", found=repr(values)[:80]) from None
    return found


def _check_values(given, where):
    bad = np.flatnonzero(np.isnan(given) | np.isposinf(given))
    if bad.size:
        raise _bad(f"{where}: a log-probability that is none", found=f"{given[bad[0]]}, number {bad[0]} of the list")
    mass = np.exp(given).sum() if (given <= ABOVE_ZERO).all() else None
    if mass is None:
        if (given >= 0).all() and given.sum() <= 1 + MASS:
            do = "record their natural logarithms, or have the engine give log-probabilities"
            raise _bad(f"{where}: probabilities in place of log-probabilities", found=f"{given[:5].tolist()}", do=do)
        at = int(np.argmax(given))
        found = f"{given[at]:.6g}, number {at} of the list"
        do = "logits have to be normalised: subtract the logarithm of the sum of their exponentials"
        raise _bad(f"{where}: a log-probability above 0", found=found, do=do)
    if mass > 1 + MASS:
        most = 1 + MASS + _rounded_up(given)
        if mass > most:
            raise _bad(f"{where}: probabilities of a sum above 1", found=f"{mass:.6g}", expected=f"at most {most:.6g}")


def _rounded_up(given):
    """What a sum of probabilities may gain by half a unit in the last place of each logarithm, if these are in bf16."""
    finite = given[np.isfinite(given)]
    return float(np.sum(np.exp(finite) * np.abs(finite))) * 2**-8 if resolution(finite) == "bf16" else 0.0


def _check_order(given, where):
    rising = np.flatnonzero(given[1:] > given[:-1])
    if rising.size:
        at = int(rising[0]) + 1
        found = f"{given[at - 1]:.6g}, then {given[at]:.6g} at number {at}"
        raise _bad(f"{where}: log-probabilities out of order", found=found, expected="the likeliest first")


def _bad(first, **parts):
    return BadLogprobs(compose(first, **parts))


def _bad_ids(first, index=None, **parts):
    error = BadTokenIds(compose(first, **parts))
    error.index = index
    return error
