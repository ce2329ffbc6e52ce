"""The steps of every engine's sampler, a list for each order: which ids stay in play, and what their logits become.

A step takes the logits z float64 [n] over ascending ids and the `Sampler`, and gives (z, which of them to keep as
bool [n], or None for all).
"""

import numpy as np


def temperature(z, sampler):
    temperature = max(sampler.temperature, 0.01) if sampler.order == "vllm" else sampler.temperature
    # Only differences matter; taken first, even the smallest temperature sends others to -inf and the largest nowhere.
    return (z - z.max()) / temperature, None


def top_k_with_ties(z, sampler):
    k = sampler.top_k
    return z, None if k < 1 or k >= len(z) else z >= np.partition(z, len(z) - k)[len(z) - k]


def top_k_exactly(z, sampler):
    k = sampler.top_k
    if k < 1 or k >= len(z):
        return z, None
    keep = z > (least := np.partition(z, len(z) - k)[len(z) - k])
    keep[np.flatnonzero(z == least)[: k - keep.sum()]] = True
    return z, keep


def top_p_from_below(z, sampler):
    """Drop the least likely as long as they add up to no more than 1 - p; the last one always stays."""
    if sampler.top_p == 1:
        return z, None
    order = np.argsort(z, kind="stable")
    drop = np.cumsum(softmax(z[order])) <= 1 - sampler.top_p
    drop[-1] = False
    keep = np.ones(len(z), bool)
    keep[order[drop]] = False
    return z, keep


def top_p_from_above(z, sampler):
    """Take the most likely until they add up to p or more."""
    if sampler.top_p == 1:
        return z, None
    order = np.argsort(-z, kind="stable")
    enough = np.cumsum(softmax(z[order])) >= sampler.top_p
    keep = np.zeros(len(z), bool)
    keep[order[: 1 + int(np.argmax(enough)) if enough.any() else len(z)]] = True
    return z, keep


def top_k_and_p(z, sampler):
    """Keep what has fewer than k and less than p above it: both of the same probabilities unless min-p is on too."""
    _, keep = top_k_with_ties(z, sampler)
    if sampler.top_p == 1:
        return z, keep
    keep = np.ones(len(z), bool) if keep is None else keep
    probs = softmax(z)[keep]
    if sampler.min_p > 0:
        probs /= probs.sum()
    order = np.argsort(-z[keep], kind="stable")
    falling = -z[keep][order]
    above = np.concatenate([[0.0], np.cumsum(probs[order])])[np.searchsorted(falling, falling)]  # a tie has one place
    enough = np.empty(len(order), bool)
    enough[order] = above < sampler.top_p
    keep[keep] = enough
    return z, keep


def min_p(z, sampler):
    return z, None if sampler.min_p == 0 else np.exp(z - z.max()) >= sampler.min_p


ORDERS = {
    "hf": (temperature, top_k_with_ties, top_p_from_below, min_p),
    "vllm": (temperature, min_p, top_k_with_ties, top_p_from_below),
    "llama.cpp": (top_k_exactly, top_p_from_above, min_p, temperature),
    "sglang": (temperature, top_k_and_p, min_p),
}


def softmax(z):
    p = np.exp(z - z.max())
    return p / p.sum()
