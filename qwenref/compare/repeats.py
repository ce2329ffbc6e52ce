"""Step S1 of a comparison: whether an engine repeats itself, alone and among other requests."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from qwenref.compare.asking import kept, listed, request

REPEATS = 3  # equal requests
BATCH = 4  # requests at once


def repeats(model, engine, suite, seen, tell):
    """The same request some times; what differs goes into the noise."""
    item = next((item for item in suite.prompts if request(item, seen) is not None), None)
    if item is None or not getattr(engine, "asks_again", True):
        return
    k = listed(model.config.text_config.vocab_size, seen.gives.output_logprobs)
    answers = []
    for done in range(REPEATS):
        answers.append(kept(seen, item, lambda: engine.generate(request(item, seen), item.new, k)))
        if answers[-1] is None:
            return
        tell(done + 1, REPEATS, "equal requests")
    seen.asked["repeats"] = REPEATS
    first = answers[0]
    moved = [_moved(first, other) for other in answers[1:]]
    alike = not _noticed(seen, item, moved, "equal requests")
    among = _among_others(engine, suite, item, seen, k)
    if among is not None:
        seen.asked["batch"] = BATCH
        moved.append(_moved(first, among))
        if alike:
            _noticed(seen, item, moved[-1:], f"equal requests, alone and among {BATCH} at once,")
    seen.spread = _spread(moved)


def _noticed(seen, item, moved, what):
    """Whether answers that should be the same are not, which is a finding."""
    at = next((f"prompt {item.id}, token {at}" for _, at in moved if at is not None), None)
    spread = _spread(moved)
    if at is None and spread == 0:
        return False
    words = f"{what} are answered with other tokens" if at else f"log-probabilities of {what} differ"
    seen.find("engine_nondeterministic", "warning", words, {"spread": spread, "first": at})
    return True


def _spread(moved):
    """Standard deviation of a log-probability, of two that are apart each."""
    values = np.concatenate([values for values, _ in moved])
    return float(np.sqrt(np.mean(np.square(values)) / 2)) if values.size else 0.0


def _among_others(engine, suite, item, seen, k):
    """The answer to a prompt that is asked at once with others of the suite; None where the engine takes one at a time.

    What the others come to is not looked at: they are asked again, alone.
    """
    if engine.together is None:
        return None
    others = [each for each in suite.prompts if each is not item and request(each, seen) is not None]
    asked = [item, *(others + [item] * BATCH)[: BATCH - 1]]
    with engine.together(BATCH), ThreadPoolExecutor(BATCH) as threads:
        under_way = [threads.submit(engine.generate, request(each, seen), each.new, k) for each in asked]
    return kept(seen, item, under_way[0].result)


def _moved(first, other):
    """(float64 differences of equal requests' rows up to the first other token, that token's number or None)."""
    a, b = first.output_ids, other.output_ids
    if a is None or b is None:
        return np.empty(0), None if first.text == other.text else 0
    same = next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    pairs = zip(first.rows[: same + 1], other.rows[: same + 1], strict=False)
    values = [_difference(x, y) for x, y in pairs if x is not None and y is not None]
    at = None if same == len(a) == len(b) else same
    return np.concatenate(values) if values else np.empty(0), at


def _difference(x, y):
    _, at, to = np.intersect1d(x.ids, y.ids, return_indices=True)
    a, b = x.logprobs[at], y.logprobs[to]
    both = np.isfinite(a) & np.isfinite(b)  # what is cut away is -inf
    return a[both] - b[both]
