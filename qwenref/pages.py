"""Weights on their way from disk: read ahead of the layer that needs them, given up behind it where memory is short.

The files are mapped, so the system reads a page when it is first touched, a little at a time.  Telling it one layer
ahead lets the disk work while the layer before computes.  In a model larger than memory the pages that a pass reads
last push out those it reads first, and the next pass finds nothing; so some layers stay, and the others are given up
after use.  Advice to the system changes no value.
"""

import os
import warnings
from pathlib import Path

from qwenref.errors import InputError, QwenrefError, QwenrefWarning, compose

STAY = 0.6  # of the memory there is: the rest is for activations, cache and the layers passing through
_VARIABLE = "QWENREF_STREAM_WEIGHTS"


def memory_limit():
    """Bytes this process may use: the machine's memory, or less where a control group sets a limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        return limits[0]
    for names, path in groups.items():
        if names == "":
            found = _limits("/sys/fs/cgroup", path, "memory.max")
        elif "memory" in names.split(","):
            found = _limits("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
        else:
            continue
        limits += found
    return min(limits)


def _limits(root, path, name):
    """The limits of a control group and of those around it; inside a container the root may be the group itself."""
    found = []
    for part in (path, *map(str, Path(path).parents)):
        try:
            found.append(int(Path(root + part, name).read_text()))
        except (OSError, ValueError):  # none here, or "max"
            continue
    return found


class WeightPages:
    """Advice about the pages of a model's weights.

    `layers` [[name of a tensor in the files, ...], ...], an entry a layer; `behind` names what is used after them (the
    head) and `before` what is used ahead of them (the embedding): these always stay.  `limit` bytes of memory; None:
    what there is.  `.bytes` of each layer, `.nbytes` of all.
    """

    def __init__(self, checkpoint, layers, behind=(), before=(), limit=None):
        self._checkpoint, self._parts = checkpoint, [*map(list, layers), list(behind)]
        self.bytes = [self._size(part) for part in self._parts[:-1]]
        self._fixed = self._size({*behind, *before})
        self.nbytes = sum(self.bytes) + self._fixed
        self._limit, self._ahead, self._stay = limit, set(), None

    def __reduce__(self):
        return type(None), ()  # a copy of the model has its weights in memory of its own

    def _size(self, names):
        return sum(self._checkpoint.info(name).nbytes for name in names)

    @property
    def stay(self):
        """Number of layers, from the first, that stay in memory; all of them where there is room."""
        if self._stay is None:
            self._stay = self._choose()
        return self._stay

    @property
    def streams(self):
        """Some of the weights are read again in every pass."""
        return self.stay < len(self.bytes)

    def _choose(self):
        word = os.environ.get(_VARIABLE, "")
        if word not in ("", "0", "1"):
            raise InputError(compose(f"{_VARIABLE}: {word!r}", expected="0, 1, or nothing", do="unset it"))
        limit = memory_limit() if self._limit is None else self._limit
        if word == "0" or (word == "" and self.nbytes <= 0.9 * limit):
            return len(self.bytes)
        room, stay = STAY * limit - self._fixed, 0
        while stay < len(self.bytes) and room >= self.bytes[stay]:
            room -= self.bytes[stay]
            stay += 1
        if stay < len(self.bytes):
            passing = sum(self.bytes[stay:])
            warnings.warn(
                compose(
                    f"weights of {self.nbytes / 1e9:,.1f} GB in {limit / 1e9:,.1f} GB of memory",
                    found=f"{passing / 1e9:,.1f} GB are read from disk in every pass, for every new token",
                    expected=f"{passing / 1e9:,.0f} seconds or more per pass from a disk of 1 GB/s",
                    do="long prompts in one call cost one pass; a smaller model, or more memory, costs none",
                ),
                QwenrefWarning,
                stacklevel=8,
            )
        return stay

    def before(self, index):
        """Layer `index` is about to be used: have the next one read, or what comes behind the last."""
        after = index + 1
        if after not in self._ahead or self.stay <= after < len(self.bytes):
            self._ahead.add(after)
            self._advise(after, "willneed")

    def behind(self, index):
        """Layer `index` has been used: give it up, unless it stays."""
        if index >= self.stay:
            self._advise(index, "dontneed")

    def _advise(self, part, advice):
        try:
            for name in self._parts[part]:
                self._checkpoint.advise(name, advice)
        except QwenrefError:  # only advice: what the system does not take, it does not need
            pass
