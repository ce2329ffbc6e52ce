"""Which cause of a report a fault, or a fitted setting, stands for."""

from typing import NamedTuple

from qwenref.compare.faults import LIBRARY

# In the order of the way a token takes: the first is that of the report.
ORDER = (
    "tokenizer", "chat_template", "sampling_config", "stop_tokens", "state_or_cache", "prefill_kernel", "weights",
    "quantization", "config", "kernels", "none",
)  # fmt: skip
_OF_KIND = {"state": "state_or_cache", "weights": "weights", "quantization": "quantization", "config": "config"}
_CLOSE = {"temperature": 0.02, "repetition": 0.01, "presence": 0.1, "frequency": 0.05, "top-p": 0.02, "min-p": 0.01}


class Reason(NamedTuple):
    """Why an engine is outside: a cause, how sure it is, the faults that explain it."""

    cause: str
    confidence: str  # "proved", "named", "statistical"
    names: tuple
    words: str
    numeric: bool = False  # found in the numbers of both paths

    @property
    def rank(self):
        return ORDER.index(self.cause)


def kind_of(fault, confined=None):
    """The cause that a fault stands for; `confined` to "prefill" or "decode" where the other path is inside."""
    if fault.on == "decode" or confined == "decode":
        return "state_or_cache"
    if fault.on == "prefill" or confined == "prefill":
        return "prefill_kernel"
    return _OF_KIND.get(fault.kind, "kernels")


def sampling_rows(fit):
    """Rows of a report's hypotheses for what a SamplingFit found, by the names of the library where one is near."""
    values = {"temperature": fit.temperature}
    values |= {name: getattr(fit, name) for name in ("repetition", "presence", "frequency")}
    if fit.truncated is not None:
        values[fit.truncated[0].replace("_", "-")] = fit.truncated[1]
    return [_fitted(kind, value) for kind, value in values.items() if value is not None]


def sampling_row(name):
    """The row of a report's hypotheses for a setting of the library."""
    return _row(name, LIBRARY[name].what)


def _row(name, what):
    return {"id": name, "class": "sampling", "what": what, "family": None, "accepted": True, "detectable": True}


def _fitted(kind, value):
    close = _CLOSE.get(kind, 0)
    near = [name for name in LIBRARY if name.startswith(f"{kind}-") and abs(_number(name, kind) - value) <= close]
    name = min(near, key=lambda name: abs(_number(name, kind) - value), default=f"{kind}-{value:.3g}")
    if near:
        return sampling_row(name)
    what = f"{kind} of about {value:.3g}"
    return _row(name, what)


def _number(name, kind):
    return float(name.removeprefix(f"{kind}-"))
