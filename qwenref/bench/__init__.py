"""Speed, measured: the machine's limits, this package, and the rivals asked for, in turns in one process."""

from qwenref.bench.goals import GOALS, KEYS
from qwenref.bench.shapes import SHAPES

__all__ = ["GOALS", "KEYS", "SHAPES", "bench"]


def __getattr__(name):
    if name != "bench":
        raise AttributeError(f"module 'qwenref.bench' has no attribute {name!r}")
    from qwenref.bench.measure import bench

    return bench
