"""Where answers end: at an id that ends none, or not at one that does."""

import numpy as np

from qwenref.compare.statistics import SURE


def stop_findings(suite, numbers, seen, stops, drawn=False):
    """Findings (code "stop-tokens") of the engine's own answers; `stops` are the ids the checkpoint ends at.

    An end that was drawn may be an unlikely one.
    """
    found = []
    if not stops:
        return found
    for n, way in enumerate(numbers.ways):
        if way.origin != "engine" or seen.assumed:
            continue
        output, item = way.ids[way.start :], suite.prompts[way.prompt]
        past = next((t for t, id in enumerate(output[:-1]) if id in stops), None)
        if past is not None:
            words = f"prompt {item.id}: goes on behind id {output[past]:,}, which ends a text"
            found.append(_finding(words, item.id, way.start + past, output[past]))
        elif way.finish == "stop" and not drawn and (way.closing or output[-1] not in stops):
            sigmas = _away(numbers, n, stops, way.closing)
            if sigmas > SURE:
                name = "" if way.closing else f" at id {output[-1]:,}"
                by = f", by {sigmas:.1f} sigma" if np.isfinite(sigmas) else ""
                words = f"prompt {item.id}: ends{name} where the reference goes on{by}"
                found.append(_finding(words, item.id, len(way.ids) - 1, None if way.closing else output[-1]))
    return found


def _finding(words, prompt, position, id):
    evidence = {"prompt": prompt, "pos": position, "id": id}
    return {"code": "stop-tokens", "severity": "error", "message": words, "evidence": evidence}


def _away(numbers, n, stops, closing):
    """By how many sigmas the reference prefers its best id to any that ends a text, behind all but the last id.

    An id that ends none of the checkpoint's texts cannot be an end, whatever its probability.
    """
    if not closing:
        return float("inf")
    support, truth = numbers.truths[n].support[-1], numbers.truths[n].logprobs[-1]
    ends = np.isin(support, list(stops)) & np.isfinite(truth)
    best = int(np.nanargmax(truth))
    if not ends.any():
        return float("inf")
    end = int(np.argmax(np.where(ends, truth, -np.inf)))
    gap = truth[best] - truth[end]
    moved = [each[n].logprobs[-1][best] - each[n].logprobs[-1][end] - gap for each in numbers.jitters]
    noise = numbers.slack * float(np.sqrt(np.mean(np.square(moved)))) if moved else 0.0
    return float("inf") if noise == 0 and gap > 0 else float(gap / noise) if gap > 0 else 0.0
