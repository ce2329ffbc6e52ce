"""Which mistake of a prompt explains what an engine read: by equal ids where it tells them, else by its answers."""

import numpy as np

from qwenref.compare.faults import hypotheses
from qwenref.compare.scoring import PLAIN, Task

NATS = 10.0  # of log-likelihood that a prompt has to gain
EXPLAINED = 0.75  # of what the answers give up against the likeliest tokens, that it has to take away
PROMPTS = 4  # answers that are asked
TOKENS = 128  # of each
CAUSES = {"tokenizer": "tokenizer", "context": "tokenizer", "template": "chat_template"}


def named(model, difference):
    """Names of the faults that make what was found out of what was expected."""
    families = ("tokenizer",) if difference.what == "tokenizer" else ("template", "tokenizer")
    ids, found = difference.expected, difference.found
    texts = isinstance(found, str)
    if isinstance(ids, str):
        ids = list(map(int, model.tokenizer.encode(ids)))
    names = []
    for fault in _faults(model, families):
        made = fault.prompt(ids, model)
        if (model.tokenizer.decode(made) if texts else made) == (found if texts else list(found)):
            names.append(fault.name)
    return names


def cut(model, sent, read):
    """Names of the faults that make the ids an engine read out of those it was sent."""
    return [fault.name for fault in _faults(model, CAUSES) if fault.prompt(list(sent), model) == list(read)]


def likelier(model, suite, ways, run):
    """(rows of a report's hypotheses, the best first; the name that explains the answers, or None).

    A row's lambda_nats is what the engine's tokens gain in log-likelihood where the prompt has the fault in it.
    """
    ways = sorted((way for way in ways if way.origin == "engine"), key=lambda way: way.start - len(way.ids))[:PROMPTS]
    plain = [_answer(way, suite.prompts[way.prompt].ids) for way in ways]
    changed, tasks = [], [_task(*each) for each in plain]
    for fault in _faults(model, CAUSES):
        for n, way in enumerate(ways):
            ids = fault.prompt(list(suite.prompts[way.prompt].ids), model)
            if ids and ids != list(suite.prompts[way.prompt].ids):
                changed.append((fault, n))
                tasks.append(_task(*_answer(way, ids)))
    found = [_fit(each) for each in run(model, tasks)]
    base, others = found[: len(plain)], found[len(plain) :]
    gained, left = {}, {}
    for (fault, n), (likelihood, given_up) in zip(changed, others, strict=True):
        gained[fault.name] = gained.get(fault.name, 0.0) + likelihood - base[n][0]
        left[fault.name] = left.get(fault.name, 0.0) + given_up - base[n][1]
    whole = sum(given_up for _, given_up in base)
    rows = [
        {"id": fault.name, "class": "prompt", "what": fault.what, "family": fault.family, "detectable": True,
         "lambda_nats": gained[fault.name]}
        for fault in {fault.name: fault for fault, _ in changed}.values()
    ]  # fmt: skip
    rows.sort(key=lambda row: -row["lambda_nats"])
    fits = (r["id"] for r in rows if r["lambda_nats"] >= NATS and -left[r["id"]] >= EXPLAINED * whole)
    best = next(fits, None)
    return [{**row, "accepted": row["id"] == best} for row in rows], best


def _faults(model, families):
    return [fault for fault in hypotheses(model, ("prompt",)) if fault.family in families]


def _answer(way, prompt):
    """(ids of the prompt and the first tokens of an answer, where the answer begins)."""
    end = len(way.ids) - bool(way.closing)
    output = way.ids[way.start : min(end, way.start + TOKENS)]
    return (*map(int, prompt), *output), len(prompt)


def _task(ids, start):
    return Task(ids, start, PLAIN, extra=np.array(ids[start:], np.int64)[:, None], top=1)


def _fit(scored):
    """(log-likelihood of the answer, what it gives up against the likeliest tokens)."""
    best = scored.logprobs[:, 0]
    chosen = np.where(np.isnan(scored.logprobs[:, 1]), best, scored.logprobs[:, 1])
    return float(chosen.sum()), float((best - chosen).sum())
