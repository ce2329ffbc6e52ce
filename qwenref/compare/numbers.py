"""The reference's numbers beside the engine's: every trajectory scored, and tables of both for the statistics."""

import numpy as np

from qwenref.compare.differences import TOP
from qwenref.compare.scoring import PLAIN, SMALL, TRUTH, Task, score
from qwenref.compare.table import Table, two_best

BEFORE = 512  # positions of a long prompt that are scored, the last ones
# Variants in float32 differ in the order of sums alone; exp and rsqrt of libraries differ by several units in the last
# place as well.  Of engines that are right, llama.cpp, mistral.rs and transformers came out at R 1.1 to 1.6 of
# the variants, OpenVINO at 6 to 8; faults of the library lie above 100.
SLACK = {"float32": 8.0}
FULL = 2**26  # values of all tables together up to which whole small vocabularies are held


class Numbers:
    """Truth, plain float32 and rounding variants of every trajectory, at the same ids.

    `.first` [int] per trajectory, the first id that is scored · `.truth` how `.truths` [Scored] are computed · `.plain`
    [Scored] · `.jitters` [J][Scored] · `.slack` how much further than a variant a clean engine may be
    """

    def __init__(self, model, ways, variants, truth=TRUTH, run=score):
        self.model, self.ways, self.variants = model, list(ways), tuple(variants)
        self.slack = max((SLACK.get(family, 1.0) for _, *rest in self.variants for family in rest), default=1.0)
        self.first = [max(1, way.start - BEFORE) if way.prefill is not None else way.start for way in self.ways]
        vocab = model.config.text_config.vocab_size
        positions = sum(len(way.ids) - first for way, first in zip(self.ways, self.first, strict=True))
        held = positions * vocab * (len(self.variants) + 4)
        self.whole = vocab <= SMALL and held <= FULL
        self.top = vocab if self.whole else TOP
        self.run, self.truth = run, truth
        self.truths = run(model, [self.task(n, truth) for n in range(len(self.ways))])
        self.plain, *self.jitters = self._under([PLAIN, *(("jitter", *variant) for variant in self.variants)])

    def task(self, n, how):
        """The task that chooses the ids of a trajectory."""
        way = self.ways[n]
        return Task(tuple(way.ids), self.first[n], how, extra=None if self.whole else self._extra(n), top=self.top)

    def _under(self, hows):
        """[[Scored]]: for each way of computing all trajectories, at the ids the truth has chosen."""
        count = len(self.ways)
        tasks = [self.at(n, how, self.first[n], self.truths[n].support) for how in hows for n in range(count)]
        scored = self.run(self.model, tasks)
        return [scored[at * count : (at + 1) * count] for at in range(len(hows))]

    def at(self, n, how, first, support, decode=False):
        """The task of positions of a trajectory from `first` on, at given ids [T, K].

        With `decode` these are fed one by one; `first` is then where the continuation begins.
        """
        return Task(tuple(self.ways[n].ids[: first + len(support)]), first, how, support=support, decode=decode)

    def table(self, path, which=None):
        """Table of the trajectories that have rows of "prefill" or of "decode"."""
        which = range(len(self.ways)) if which is None else sorted(which)
        return Table.concatenate(self._part(n, path) for n in which if getattr(self.ways[n], path) is not None)

    def _rows(self, n, path):
        """(a trajectory's rows of this path where it is scored, scored positions before the first)."""
        way, first = self.ways[n], self.first[n]
        return (way.decode, way.start - first) if path == "decode" else (way.prefill[first - 1 :], 0)

    def _part(self, n, path):
        way, (rows, skip) = self.ways[n], self._rows(n, path)
        truth, support = self.truths[n].logprobs[skip:], self.truths[n].support[skip:]
        engine, choice = _aligned(rows, support)
        if path == "decode":
            choice = np.array(way.ids[way.start :], np.int64)
            if way.closing:
                choice[-1] = -1
        best, second = two_best(truth)
        return Table(
            prompt=np.full(len(rows), way.prompt),
            way=np.full(len(rows), n),
            position=np.arange(len(way.ids) - len(rows), len(way.ids)),
            support=support,
            truth=truth,
            jitters=np.stack([truth + self.slack * (each[n].logprobs[skip:] - truth) for each in self.jitters]),
            engine=engine,
            best=best,
            second=second,
            emitted=_column(support, choice),
            full=self.whole,
        )

    def logz(self, table):
        """float64 [N] for the rows of a Table: what makes logits of the truth's log-probabilities."""
        at = [int(t) - self.first[w] for w, t in zip(table.way, table.position, strict=True)]
        return np.array([self.truths[w].logz[n] for w, n in zip(table.way, at, strict=True)], np.float64)

    def bitwise(self):
        """Whether every number the engine gave is that of the reference in float32, to the bit."""
        some = False
        for n, way in enumerate(self.ways):
            for path in ("prefill", "decode"):
                if getattr(way, path) is None:
                    continue
                rows, skip = self._rows(n, path)
                given, _ = _aligned(rows, self.plain[n].support[skip:])
                there = ~np.isnan(given)
                some |= bool(there.any())
                if not np.array_equal(given[there], self.plain[n].logprobs[skip:][there]):
                    return False
        return some

    def _extra(self, n):
        """int64 [T, E]: the ids the engine named at each position, and the one that follows."""
        way, first = self.ways[n], self.first[n]
        named = [{way.ids[t]} for t in range(first, len(way.ids))]
        for rows, begin in ((way.prefill, 1), (way.decode, way.start)):
            for t, row in enumerate(rows or (), begin):
                if row is not None and t >= first:
                    named[t - first].update(row.ids.tolist())
        extra = np.full((len(named), max(map(len, named), default=0)), -1, np.int64)
        for at, ids in enumerate(named):
            extra[at, : len(ids)] = sorted(ids)
        return extra


def _aligned(rows, support):
    """(float64 [T, K] values of the rows at these ids, NaN where there is none; int64 [T] each row's likeliest id)."""
    values, likeliest = np.full(support.shape, np.nan), np.full(len(support), -1, np.int64)
    for t, row in enumerate(rows):
        if row is None or not len(row.ids):
            continue
        likeliest[t] = row.ids[0]
        order = np.argsort(row.ids)
        at = order[np.minimum(np.searchsorted(row.ids, support[t], sorter=order), len(order) - 1)]
        values[t] = np.where(row.ids[at] == support[t], row.logprobs[at], np.nan)
        if row.chosen is not None and row.chosen_logprob is not None:
            values[t] = np.where(support[t] == row.chosen, row.chosen_logprob, values[t])
    return values, likeliest


def _column(support, ids):
    """int64 [T], where each id stands among its position's columns; -1 for none."""
    here = (support == ids[:, None]) & (ids >= 0)[:, None]
    return np.where(here.any(axis=-1), here.argmax(axis=-1), -1)
