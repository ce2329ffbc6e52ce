"""Two engines, same weights, same prompt, different text: which one is outside what rounding explains, and where.

from qwenref.compare import compare

report = compare("tiny", "reference:tiny?numerics=hf")
report.assert_agrees()
"""

import importlib

_LAZY = {
    "compare": "running",
    "FaultyReference": "faulty",
    "Report": "report",
    "Suite": "suites",
    "pasted": "two_texts",
    "suite": "suites",
}


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__():
    return sorted({*globals(), *_LAZY})


__all__ = sorted(_LAZY)
