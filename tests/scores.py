"""Tasks of every form for tests of stores and workers, and whether results are the same to the bit."""

import numpy as np

from qwenref.compare.scoring import PLAIN, TRUTH, Task, perform

HOWS = (TRUTH, PLAIN, ("jitter", 3, "bfloat16"), ("fault", "fp32", ("gate-off",)))


def forms(model, length=24):
    """A task of each form: ids chosen, some or all of them; ids given, with gaps, or all of them; token by token."""
    vocab = model.config.text_config.vocab_size
    ids = tuple(np.random.default_rng(length).integers(0, vocab, length).tolist())
    positions = length - 5
    given = np.random.default_rng(1).integers(-1, vocab, (positions, 7))
    everything = np.broadcast_to(np.arange(vocab), (positions, vocab))
    return [
        Task(ids, 5, PLAIN),
        Task(ids, 5, TRUTH, extra=given[:, :3], top=6),
        Task(ids, 5, PLAIN, top=vocab),
        Task(ids, 5, HOWS[2], support=given),
        Task(ids, 5, HOWS[3], support=given),
        Task(ids, 5, HOWS[2], support=everything),
        Task(ids, 5, PLAIN, support=given, decode=True),
    ]


def many(model, count):
    """Tasks of some ten milliseconds each."""
    vocab = model.config.text_config.vocab_size
    random = np.random.default_rng(0)
    return [Task(tuple(random.integers(0, vocab, 72).tolist()), 40, HOWS[n % len(HOWS)]) for n in range(count)]


def done_here(model, tasks):
    return [perform(model, task) for task in tasks]


def same(found, expected):
    """Whether lists of Scored have the same types, shapes and bytes."""
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs)


class Counting:
    """An executor that works here and counts what it was given."""

    arithmetic = "this one"

    def __init__(self):
        self.given = []

    def run(self, model, tasks):
        self.given += tasks
        for at in reversed(range(len(tasks))):  # any order will do
            yield at, perform(model, tasks[at])
