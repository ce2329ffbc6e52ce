"""Contenders take turns in one process, and what counts is the median of their ratios, turn by turn."""

import time
from collections import namedtuple
from statistics import median

Ratio = namedtuple("Ratio", "median low high")


def seconds(function, *args):
    """Seconds of one call."""
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def turns(runs, rounds, tell=None):
    """{name: [seconds]}: every run of {name: function} once in each round; a function may return its own seconds."""
    taken = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            if tell is not None:
                tell(f"turn {turn + 1}/{rounds}: {name}")
            began = time.perf_counter()
            own = run()
            taken[name].append(own if isinstance(own, float) else time.perf_counter() - began)
    return taken


def ratio(numerators, denominators):
    """Median, least and largest of the ratios of what was measured side by side."""
    found = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(median(found), min(found), max(found))


def fastest(function, seconds_each=0.02, repeats=9):
    """Seconds of one call of something short: the least mean of some runs, what it costs when nobody disturbs."""
    number = 1
    while True:
        began = time.perf_counter()
        for _ in range(number):
            function()
        taken = time.perf_counter() - began
        if taken > seconds_each:
            break
        number *= 2
    best = taken
    for _ in range(repeats - 1):
        began = time.perf_counter()
        for _ in range(number):
            function()
        best = min(best, time.perf_counter() - began)
    return best / number
