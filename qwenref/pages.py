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
    found = [_number(folder / names[0]) for folder, names in _groups()]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(n for n in found if n is not None)])


def memory_left():
    """Bytes this process may still take: what the machine has left, or less where a control group has less.

    Files that are only kept for the next reader count as free.
    """
    left = [_left(folder, *names) for folder, names in _groups()]
    available = _counts("/proc/meminfo").get("MemAvailable")
    return min([memory_limit() if available is None else 1024 * available, *(n for n in left if n is not None)])


# Files of a control group: its limit, what is in use, and the part of that which is files, by version of the interface.
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")


def _groups():
    """(folder, names of its files) of the memory's control groups around this process."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        return []
    found = []
    for names, path in groups.items():
        if names == "":
            found += [(folder, _V2) for folder in _around("/sys/fs/cgroup", path)]
        elif "memory" in names.split(","):
            found += [(folder, _V1) for folder in _around("/sys/fs/cgroup/memory", path)]
    return found


def _around(root, path):
    """Folders of a control group and of those around it; inside a container the root may be the group itself."""
    return [Path(root + part) for part in (path, *map(str, Path(path).parents))]


def _number(path):
    """The number in a file, or None: there is none, or "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _counts(path):
    """{name: number} of a file with a name and a number in each line; nothing where there is no such file."""
    try:
        lines = [line.replace(":", " ").split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _left(folder, limit, used, files):
    most, now = _number(folder / limit), _number(folder / used)
    if most is None or now is None:
        return None
    counts = _counts(folder / "memory.stat")
    return max(0, most - max(0, now - sum(counts.get(name, 0) for name in files)))


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
