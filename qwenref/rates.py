"""What this machine can do at most, measured on the threads and at the instruction level in use."""

from collections import namedtuple

import numpy as np

from qwenref import _C

READ_BYTES = 128 << 20  # more than a last-level cache keeps
_known = {}


class Rates(namedtuple("Rates", "read fma bf16 threads level")):
    """Bytes read and operations done per second at most: `.read`, `.fma` float32, `.bf16` dot (0.0: none).

    `.threads` and `.level` say what they were measured on.
    """

    __slots__ = ()

    def peak(self, double=False, rounded=False):
        """Operations per second: in float64 half of them; with operands exact in bf16 those of the dot, if faster."""
        return self.fma / 2 if double else max(self.fma, self.bf16) if rounded else self.fma

    def least_seconds(self, flops, nbytes, double=False, rounded=False):
        """The time neither memory nor arithmetic can beat."""
        return max(nbytes / self.read, flops / self.peak(double, rounded))

    def __str__(self):
        dot = f" · bf16 dot {quantity(self.bf16, 'FLOP/s')}" if self.bf16 else ""
        fma = quantity(self.fma, "FLOP/s")
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"plain read {quantity(self.read, 'B/s')} · float32 {fma}{dot} · {threads}, level {self.level}"


def rates(again=False):
    """Rates of the threads and level in use now; measured once (about 0.1 s).

    Asked for `again` they are measured anew, and the best that was seen stays: what disturbs a machine slows it down.
    """
    key = _C.get_num_threads(), _C.cpu_level()
    if again or key not in _known:
        block = np.ones(READ_BYTES, np.uint8)  # written, since a page nobody wrote to is everybody's page of zeros
        read = min(_C.read_seconds(block) for _ in range(3))
        fma, bf16 = (max(_C.arithmetic_rate(kind) for _ in range(3)) for kind in ("fma", "bf16"))
        before = _known.get(key, (0.0, 0.0, 0.0))
        _known[key] = Rates(*map(max, (block.nbytes / read, fma, bf16), before[:3]), *key)
    return _known[key]


def quantity(n, unit):
    """A number with a decimal prefix: 14_240_000_000, "B/s" -> "14.24 GB/s"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(n) < 999.95 or prefix == "T":
            break
        n /= 1000
    digits = f"{n:.4g}" if prefix else f"{n:,.4g}"
    return f"{digits} {prefix}{unit}"


def duration(seconds):
    """0.00042 -> "0.42 ms", 3.14 -> "3.14 s"."""
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    factor, unit = (1, "s") if seconds >= 0.9995 else (1e3, "ms") if seconds >= 0.9995e-4 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
