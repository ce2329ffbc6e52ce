"""Tokens that an engine drew, against the distribution they should come from; what that says of its settings."""

import numpy as np

from qwenref.compare.differences import at_columns, likeliest_columns
from qwenref.compare.likelihoods import rl_block
from qwenref.compare.sampled import sample_tests
from qwenref.compare.stages import AMBER, GREEN, RED, SKIPPED, graded, stage
from qwenref.compare.statistics import divergence

TEMPERATURES = (1.0, 0.8, 0.7, 0.6)  # that engines draw by unless told otherwise
FEWEST = 48  # tokens that a temperature is told from
RL = (1.05, 1.2)  # gates of the mean of exp |difference|: amber as NeMo has it, red


class Drawn:
    """Rows of a Table whose engine's choices were drawn at temperature 1.

    `.facts` of `sample_tests` · `.stages` · `.arrays` · `.stats` importance weights, where asked for
    """

    def __init__(self, table, ways, weights=False):
        made = table.emitted >= 0
        self.table = table = table.select(made)
        contexts = [ways[w].ids[:t] for w, t in zip(table.way, table.position, strict=True)]
        _, prefix = np.unique([hash(context) for context in contexts], return_inverse=True)
        chosen = table.support[np.arange(table.positions), table.emitted]
        self.facts = sample_tests(table.truth, chosen, _noise(table), support=table.support, prefix=prefix)
        self.stages, self.arrays, self.stats = [self._stage()], {}, {}
        if "pit" in self.facts:
            self.arrays["pit"] = self.facts["pit"]["values"]
        if weights:
            self._weigh()

    @property
    def differs(self):
        return self.facts["decision"] == "differs"

    @property
    def words(self):
        """What differs, as a sentence."""
        if self.facts["forbidden"]:
            return f"{self.facts['forbidden']:,} drawn tokens have probability 0"
        found = [f"drawn tokens are {self.facts['kl_low']:.2g} nats from the reference's distribution"]
        for name, what in (("nucleus", "beyond the likeliest 0.95"), ("ranks", "beyond the 20 likeliest")):
            tail = self.facts["tail"][name]
            if tail["p"] < 1e-4:
                found.append(f"{tail['seen']:,} of {tail['expected']:,.0f} expected {what}")
        if abs(self.facts["surprisal"]["z"]) > 4:
            found.append(f"surprisal {self.facts['surprisal']['z']:+.1f} sigma from entropy")
        return ", ".join(found)

    def _stage(self):
        verdict = RED if self.differs else GREEN if self.facts["n"] else SKIPPED
        detail = f"{self.facts['n']:,} tokens show {self.facts['detectable_kl'] or np.inf:.2g} nats"
        return stage("S8", "drawn tokens: nats from the reference", verdict, self.facts["kl_low"], None, detail)

    def _weigh(self):
        """Importance weights of the engine's own log-probabilities."""
        rows = np.arange(self.table.positions)
        ours, theirs = (values[rows, self.table.emitted] for values in (self.table.truth, self.table.engine))
        both = np.isfinite(ours) & np.isfinite(theirs)
        if not both.any():
            return
        found = rl_block(ours[both], theirs[both])
        longest = int(np.bincount(self.table.way[both]).max())
        found["t_kl"] = longest * found["k3"]
        self.stats["rl"] = found
        value = found["mean_exp_abs"]
        self.stages.append(
            stage("RL", "importance weights: mean of exp |difference|", graded(value, *RL), value, RL[0])
        )
        verdict = GREEN if found["t_kl"] < 1 else AMBER
        self.stages.append(stage("RL-T", "divergence over a whole answer, nats", verdict, found["t_kl"], 1))


def _noise(table):
    """The median of the variants' divergences from the truth, in nats per token."""
    if not table.positions:
        return 0.0
    return float(np.median([divergence(table.truth, each, table.full).mean() for each in table.jitters]))


def temperature(table):
    """The temperature by which the choices of a Table without numbers look drawn, None where they do not."""
    table = table.select(table.emitted >= 0)
    if table.positions < FEWEST:
        return None
    table = _narrow(table)
    chosen = table.support[np.arange(table.positions), table.emitted]
    likely = {}
    for value in TEMPERATURES:
        logprobs = _cooled(table, value)
        found = sample_tests(logprobs, chosen, support=table.support)
        if not found["forbidden"] and min(found["pit"]["p"], found["surprisal"]["p"]) > 1e-3:
            likely[value] = float(logprobs[np.arange(table.positions), table.emitted].sum())
    return max(likely, key=likely.get, default=None)


def _narrow(table, count=256):
    """At most so many columns, the choices among them."""
    columns = likeliest_columns(table._replace(engine=table.truth), count)
    if columns is None:
        return table
    rows = np.arange(table.positions)
    columns = np.concatenate([table.emitted[:, None], columns], axis=-1)
    twice = (columns[:, 1:] == columns[:, :1]).any(axis=-1)
    support, truth = at_columns(table.support, columns).copy(), at_columns(table.truth, columns).copy()
    again = np.where(twice, 1 + (columns[:, 1:] == columns[:, :1]).argmax(axis=-1), 0)
    support[rows[twice], again[twice]] = -1
    truth[rows[twice], again[twice]] = -np.inf
    return table._replace(support=support, truth=truth, emitted=np.zeros(table.positions, np.int64))


def _cooled(table, value):
    """log-probabilities [N, K] at a temperature; ids that are not listed count at it as one."""
    scaled = np.where(np.isfinite(table.truth), table.truth, -np.inf) / value
    mass = np.exp(table.truth, where=np.isfinite(table.truth), out=np.zeros_like(table.truth)).sum(axis=-1)
    rest = np.log(np.maximum(1 - mass, 1e-300)) / value
    whole = np.logaddexp(np.logaddexp.reduce(scaled, axis=-1), np.where(table.full, -np.inf, rest))
    return scaled - whole[:, None]
