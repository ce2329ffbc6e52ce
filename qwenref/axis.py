"""A number's place on the axis of a picture, and where its ticks are."""

from math import ceil, floor, log10

_STEPS = (1, 2, 2.5, 5, 10)


class Axis:
    """A logarithmic axis: numbers from `low` to `high` to pixels from `begin` to `end`."""

    def __init__(self, low, high, begin, end):
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def share(self, x):
        return (log10(x) - log10(self.low)) / (log10(self.high) - log10(self.low))

    def __call__(self, x):
        return self.begin + self.share(x) * (self.end - self.begin)

    def ticks(self):
        """The whole powers of ten."""
        return [10.0**n for n in range(round(log10(self.low)), round(log10(self.high)) + 1)]


class Linear(Axis):
    def share(self, x):
        return (x - self.low) / (self.high - self.low)

    def ticks(self, most=6):
        """Round numbers, at most so many."""
        rough = (self.high - self.low) / most
        power = 10.0 ** floor(log10(rough))
        step = next(step * power for step in _STEPS if step * power >= rough * 0.999)
        return [n * step for n in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)]


def whole_powers(values):
    """The powers of ten below and above all values."""
    low, high = log10(min(values)), log10(max(values))
    return 10.0 ** (low // 1), 10.0 ** -(-high // 1)
