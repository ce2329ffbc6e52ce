"""What the reference says of given ids: by the truth, by rounding variants, with a fault in it.

A Task is one sequence under one of these.  It holds no model and it pickles, so that `workers` can do it elsewhere and
`store` keep what came of it; that is the log-probabilities of a few ids for each position, not of the vocabulary.
"""

from contextlib import closing
from typing import NamedTuple

import numpy as np

from qwenref.cache import Cache
from qwenref.compare.faults import find
from qwenref.compare.faults_model import opened
from qwenref.logprobs import log_softmax
from qwenref.numerics import jitter, numerics
from qwenref.pictures import as_text

AT_ONCE = 2**26  # logits of one call
SMALL = 4096  # a vocabulary that is compared as a whole
BLOCK = 64  # calls end at multiples of it, where variants that take tokens 64 at a time begin anew

TRUTH = ("truth", "fp64")
PLAIN = ("truth", "fp32")


class Task(NamedTuple):
    """Log-probabilities of the ids from `start` on, each given all ids before it.

    how      ("truth", profile) · ("jitter", seed, dtype) · ("fault", profile, names), all by name
    support  int64 [T, K] the ids asked for, -1 where fewer; None: the `top` likeliest ones, those of `extra` behind
    extra    int64 [T, E], ids that are wanted besides the likeliest, -1 where there is none; None: none
    decode   whether the ids from `start` on are fed one by one, behind one call of those before
    """

    ids: tuple
    start: int
    how: tuple = TRUTH
    support: np.ndarray | None = None
    extra: np.ndarray | None = None
    top: int = 20
    decode: bool = False


class Scored(NamedTuple):
    """T = len(ids) - start positions.  Columns behind the vocabulary's likeliest may be empty: id -1, value NaN."""

    support: np.ndarray  # int64 [T, K]
    logprobs: np.ndarray  # float64 [T, K]
    best: np.ndarray  # int64 [T], the likeliest id of the vocabulary, the lower one among equals
    logz: np.ndarray  # float64 [T], log of the sum of exp(logits): logits are log-probabilities and this


def score(model, tasks, executor=None, progress=None, store=None):
    """[Scored] of tasks, in their order.

    executor   what they run on, `workers.open_executor`; None: here.  run(model, tasks) is a generator of (index,
               Scored), in any order, and `.arithmetic` says what computes
    progress   progress(done, total) is called after each
    store      a `store.Store` that is asked first and keeps every result as soon as it is there
    """
    tasks, results = list(tasks), {}
    kept = None if store is None else store.of(model, executor)
    if kept is not None:
        results = {n: found for n, task in enumerate(tasks) if (found := kept.get(task)) is not None}
    left = [n for n in range(len(tasks)) if n not in results]
    if progress is not None and results:
        progress(len(results), len(tasks))
    asked = [tasks[n] for n in left]
    with closing(_run(model, asked) if executor is None else executor.run(model, asked)) as run:
        for at, scored in run:
            results[left[at]] = scored
            if kept is not None:
                kept.put(asked[at], scored)
            if progress is not None:
                progress(len(results), len(tasks))
    return [results[n] for n in range(len(tasks))]


def _run(model, tasks):
    faulty = _Faulty(model)
    for at, task in enumerate(tasks):
        yield at, perform(model, task, faulty)


def perform(model, task, faulty=None):
    """One task, here and now; `faulty` has the model with faults in it, where several tasks follow one another."""
    kind, *rest = task.how
    if kind == "fault":
        with numerics(rest[0]):
            return _scored((faulty or _Faulty(model))(*rest), task, whole=True)
    with jitter(*rest) if kind == "jitter" else numerics(*rest):
        return _scored(model, task)


class _Faulty:
    """Twins of a model with faults in them, one at a time: tasks of a fault follow one another."""

    def __init__(self, model):
        self._model, self._last, self._twin = model, None, None

    def __call__(self, *of):
        if of != self._last:
            self._last = self._twin = None  # its weights go before others come
            self._twin = opened(self._model, tuple(map(find, of[1])))
            self._last = of
        return self._twin


def _scored(model, task, whole=False):
    support, values, best, logz = [], [], [], []
    first = 0
    for logits in _few(_logits(model, task, whole)):
        here = slice(first, first + len(logits))
        first += len(logits)
        rows = log_softmax(np.asarray(logits, np.float64))
        best.append(logits.argmax(axis=-1))
        logz.append(np.asarray(logits[:, 0], np.float64) - rows[:, 0])
        if task.support is not None:
            asked = task.support[here]
        else:
            extra = np.empty((len(rows), 0), np.int64) if task.extra is None else task.extra[here]
            asked = _likeliest(rows, task.top, extra)
        support.append(asked)
        found = np.take_along_axis(rows, np.maximum(asked, 0), axis=-1)
        values.append(np.where(asked < 0, np.nan, found))
    joined = [np.concatenate(each) for each in (support, values, best, logz)]
    return Scored(*joined[:2], joined[2].astype(np.int64), joined[3])


def _few(parts):
    """The same rows, a few at a time: what is made of logits is float64, several times over."""
    for logits in parts:
        yield from (logits[at : at + BLOCK] for at in range(0, len(logits), BLOCK))


def _logits(model, task, whole):
    """[n, V] after [n, V] of the positions that predict `ids[start:]`."""
    ids, start = np.asarray(task.ids, np.int64), task.start
    cache, vocab = Cache(model), model.config.text_config.vocab_size
    if task.decode:
        yield _fed(model, cache, ids[:start], 1)
        # To a fault, several tokens on a cache are decode as one is; variants take the two ways apart.
        step = BLOCK if whole else 1
        for at in range(start, len(ids) - 1, step):
            yield _fed(model, cache, ids[at : min(at + step, len(ids) - 1)])
        return
    fed = len(ids) - 1  # behind the last one nothing is asked
    room = tokens_at_once(vocab)
    ends = [fed] if whole else [*range(room, fed, room), fed]
    begin = 0
    for end in ends:
        keep = min(end - begin, max(0, end - start + 1))
        logits = _fed(model, cache, ids[begin:end], max(1, keep))
        begin = end
        if keep:
            yield logits


def tokens_at_once(vocab):
    """How many tokens a call of the model takes at most, but where a fault needs all of them."""
    return max(BLOCK, AT_ONCE // vocab // BLOCK * BLOCK)


def _fed(model, cache, ids, keep=0):
    """Logits [keep, V] behind the last ones of more ids; all are text: an engine may write what means a picture."""
    return model(ids[None], cache=cache, logits_to_keep=keep, **as_text(model, ids[None])).logits[0]


def _likeliest(rows, top, extra):
    """int64 [T, top + E]: the likeliest ids, then those of `extra` that are not among them, -1 in place of others."""
    top = min(top, rows.shape[1])
    if top == rows.shape[1]:
        return np.broadcast_to(np.arange(top), rows.shape).astype(np.int64)
    among = np.argpartition(-rows, top - 1, axis=-1)[:, :top]
    among.sort(axis=-1)  # so that the lower id comes first among equals
    order = np.argsort(-np.take_along_axis(rows, among, axis=-1), axis=-1, kind="stable")
    among = np.take_along_axis(among, order, axis=-1)
    known = (extra[:, :, None] == among[:, None, :]).any(axis=-1)
    earlier = np.tril(np.ones((extra.shape[1],) * 2, bool), -1)
    twice = ((extra[:, :, None] == extra[:, None, :]) & earlier).any(axis=-1)
    return np.concatenate([among, np.where(known | twice, -1, extra)], axis=-1)


# What travels and is kept: a whole vocabulary is known by its size, and ids that were asked for are in the task.


def lightened(task, vocab):
    """The task in fewer bytes, with the same result: two of which this is one and the same are the same work."""
    if task.support is not None:
        if task.support.shape[1] != vocab or not np.array_equal(task.support, _everything(task, vocab)):
            return task._replace(extra=None, top=0)
    elif task.top < vocab:
        return task
    return task._replace(support=None, extra=None, top=vocab)


def lightly(task, vocab, scored):
    """The arrays of a result that a lightened task does not tell."""
    return scored[1:] if task.support is not None or task.top >= vocab else tuple(scored)


def restored(task, vocab, arrays):
    """The Scored of a lightened task from these arrays; ValueError where they are not those of such a task."""
    if task.support is not None:
        arrays = (task.support.copy(), *arrays)
    elif task.top >= vocab:
        arrays = (np.array(_everything(task, vocab)), *arrays)
    support, logprobs, best, logz = arrays
    positions = len(task.ids) - task.start
    if support.shape != logprobs.shape or not len(support) == len(best) == len(logz) == positions:
        raise ValueError(f"shapes {support.shape}, {logprobs.shape}, {best.shape} of {positions} positions")
    return Scored(support, logprobs, best, logz)


def _everything(task, vocab):
    return np.broadcast_to(np.arange(vocab), (len(task.ids) - task.start, vocab))


def continued(model, ids, new):
    """The reference's own greedy continuation, a stop id that ends it included."""
    with numerics("fp32"):
        return model.generate(list(ids), max_new_tokens=new).new_ids
