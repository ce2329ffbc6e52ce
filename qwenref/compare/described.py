"""What a person wants to see of a comparison: tokens that differ with their texts, both texts beside each other."""

import numpy as np

from qwenref.compare.differences import Differences, noise
from qwenref.compare.statistics import CLASSES, divergence
from qwenref.errors import CapabilityMissing

CONTEXT = 64  # ids before the first divergence
_WHAT = {"template": "chat_template", "tokenizer": "tokenizer"}


def described(judge):
    """Fields flips, first_divergence, strips and text_diffs of a report, of a Judge."""
    texts = _Texts(judge.model)
    return {**_choices(judge, texts), "text_diffs": [_text_diff(each, texts) for each in judge.seen.differences]}


def envelope(table):
    """How far rounding moves the reference at the positions of a Table: sigma_bar, rms_median, kl_median."""
    if not table.positions or not len(table.jitters):
        return {}
    divergences = [divergence(table.truth, each, table.full).mean() for each in table.jitters]
    return {
        "sigma_bar": float(np.sqrt(np.nanmean(np.square(noise(table, table.second))))),
        "rms_median": _root_mean_square(table),
        "kl_median": float(np.median(divergences)),
    }


def _root_mean_square(table):
    known = table.with_engine(table.truth)  # where the engine gives nothing, all ids count
    return float(np.median(Differences(known).sizes))


class _Texts:
    """Texts of ids, None where there is no tokenizer."""

    def __init__(self, model):
        try:
            self._decode = model.tokenizer.decode
        except CapabilityMissing:
            self._decode = None

    def of(self, ids):
        return None if self._decode is None else self._decode(list(map(int, ids)))

    def shown(self, id):
        """Text of one token, its number where it has none."""
        return (self.of([id]) if id >= 0 else None) or f"<{id}>"


def _choices(judge, texts):
    found = judge.measures.get("D") or judge.measures.get("P")
    if found is None or not found.flips:
        found = judge.measures.get("P") or found
    flips = [] if found is None else found.flips
    names = [item.id for item in judge.suite.prompts]
    told = [_flip(row, names, texts) for row in flips]
    return {
        "flips": told,
        "first_divergence": _first(judge, flips, told, texts),
        "strips": _strips(judge, names, texts),
    }


def _flip(row, names, texts):
    kept = {key: value for key, value in row.items() if key != "way"}
    spelled = {"ref_text": texts.of([row["ref_id"]]), "eng_text": texts.of([row["eng_id"]])}
    return {**kept, "prompt": names[row["prompt"]], **spelled}


def _first(judge, flips, told, texts):
    """The first token that rounding does not explain, else the first that differs at all."""
    if not flips:
        return None
    ranks = [(flip["class"] != CLASSES[-1], flip["prompt"], flip["pos"]) for flip in flips]
    first = ranks.index(min(ranks))
    before = judge.numbers.ways[flips[first]["way"]].ids[: flips[first]["pos"]][-CONTEXT:]
    return {**told[first], "context_ids": list(map(int, before)), "context_text": texts.of(before)}


def _strips(judge, names, texts):
    """Every answer of the engine, and what the reference would have said at each of its tokens."""
    kinds = {(flip["way"], flip["pos"]): flip["class"] for each in judge.measures.values() for flip in each.flips}
    strips = []
    for n, way in enumerate(judge.numbers.ways):
        if way.origin != "engine":
            continue
        truth = judge.numbers.truths[n]
        at = way.start - judge.numbers.first[n]
        ours = [int(ids[np.nanargmax(row)]) for ids, row in zip(truth.support[at:], truth.logprobs[at:], strict=True)]
        positions = range(way.start, len(way.ids) - bool(way.closing))
        strips.append(
            {
                "prompt": names[way.prompt],
                "start": way.start,
                "context_text": texts.of(way.ids[: way.start][-CONTEXT:]),
                "reference": [texts.shown(id) for id, _ in zip(ours, positions, strict=False)],
                "engine": [texts.shown(way.ids[t]) for t in positions],
                "classes": [kinds.get((n, t), "") for t in positions],
            }
        )
    return strips


def _text_diff(found, texts):
    sides = [_spelled(side, texts) for side in (found.expected, found.found)]
    note = f"and {found.more:,} more" if found.more else None
    return {"what": _WHAT[found.what], "id": found.where, "ref": sides[0], "engine": sides[1], "note": note}


def _spelled(side, texts):
    """A text as it is; ids one in a line, with their texts."""
    if isinstance(side, str):
        return side
    return "".join(f"{id} {texts.of([id])!r}\n" for id in side)
