"""Where the bytes of weights lie: which file backs an array, and how much of it this process has in memory.

Asks the system (/proc, Linux only) about pages and touches none of them.
"""

import os
from bisect import bisect_left

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PRESENT = (1 << 63) | (1 << 62)  # in memory, or swapped out: either way this process has paid for it


def _address(array):
    return array.__array_interface__["data"][0]


def _mappings():
    """(begin, end, file or "", resident bytes) of every mapping of this process, in order."""
    found = []
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                begin, _, end = word.partition("-")
                fields = rest.split(maxsplit=4)
                path = fields[4].strip() if len(fields) > 4 and fields[3] != "0" else ""
                found.append([int(begin, 16), int(end, 16), path, 0])
            elif word == "Rss:":
                found[-1][3] = int(rest.split()[0]) * 1024
    return found


def resident(arrays):
    """Bytes of the arrays that this process has in memory, neighbours in the same pages included; None if unknown.

    Of a mapped file the whole map counts; an array in memory of its own counts whole.
    """
    try:
        mappings = _mappings()
    except OSError:
        return None
    own, sizes = 0, sorted((_address(a), a.nbytes) for a in arrays if not a.is_meta)
    starts = [address for address, _ in sizes]
    for begin, end, path, rss in mappings:
        inside = sizes[bisect_left(starts, begin) : bisect_left(starts, end)]
        if inside:
            own += rss if path else sum(n for _, n in inside)
    return min(own, sum(n for _, n in sizes))


def where(array):
    """(file name or None, bytes in memory or None) of one array."""
    try:
        address = _address(array)
        path = next((path for begin, end, path, _ in _mappings() if begin <= address < end), "")
        return os.path.basename(path) or None, _present(address, array.nbytes)
    except OSError:
        return None, None


def _present(address, nbytes, step=1 << 15):
    first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
    pages = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        for begin in range(first, last, step):
            pagemap.seek(begin * 8)
            entries = memoryview(pagemap.read(8 * (min(begin + step, last) - begin))).cast("Q")
            pages += sum(entry & _PRESENT != 0 for entry in entries)
    return min(pages * _PAGE, nbytes)
