"""Whether answers that two engines drew come from one distribution, known by the answers alone.

The kernel of two answers is the share of places that have the same token (Hamming).  The squared maximum mean
discrepancy is how much more alike answers of one engine are than those of two; how large it comes out by chance is
told by dealing the answers to each prompt out again.
"""

import numpy as np

ALPHA = 0.01
FEWEST = 2  # answers of each engine to a prompt
_DRAWS = 999
_ENDED = -1  # in place of tokens behind an answer's end


def apart(first, second, seed=0):
    """{"mmd", "p", "prompts", "answers"} of answers {prompt: [ids]} of two engines; None: no prompt has enough.

    mmd    mean over prompts of the unbiased squared discrepancy, which is below 0 half of the time where they are alike
    p      share of other deals, this one among them, with as large a mean
    """
    both = [(first[n], second[n]) for n in sorted(first.keys() & second.keys())]
    both = [pair for pair in both if min(map(len, pair)) >= FEWEST]
    if not both:
        return None
    random, counts = np.random.default_rng(seed), [len(a) for a, _ in both]
    kernels = [alike([*a, *b]) for a, b in both]
    value = np.mean([discrepancy(kernel, np.arange(n)) for kernel, n in zip(kernels, counts, strict=True)])
    others = np.zeros(_DRAWS)
    for kernel, n in zip(kernels, counts, strict=True):
        others += [discrepancy(kernel, random.permutation(len(kernel))[:n]) for _ in range(_DRAWS)]
    p = (1 + np.count_nonzero(others / len(kernels) >= value - 1e-12)) / (1 + _DRAWS)
    return {"mmd": float(value), "p": float(p), "prompts": len(both), "answers": sum(map(len, kernels))}


def alike(answers):
    """float64 [n, n], shares of places with the same token; where both have ended is no difference."""
    longest = max(1, *map(len, answers))
    ids = np.full((len(answers), longest), _ENDED, np.int64)
    for row, answer in zip(ids, answers, strict=True):
        row[: len(answer)] = answer
    return np.stack([(ids == row).mean(axis=-1) for row in ids])


def discrepancy(kernel, own):
    """Unbiased squared discrepancy of the rows `own` of a kernel [n, n] and all others, an answer never with itself."""
    mine = np.zeros(len(kernel), bool)
    mine[own] = True
    return _within(kernel[mine][:, mine]) + _within(kernel[~mine][:, ~mine]) - 2 * kernel[mine][:, ~mine].mean()


def _within(kernel):
    n = len(kernel)
    return (kernel.sum() - np.trace(kernel)) / (n * (n - 1))
