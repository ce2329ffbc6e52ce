"""What the model card beside a checkpoint (README.md) asks of sampling and no file says in a form for programs."""

import re
import warnings

from qwenref.errors import QwenrefWarning, compose

_OFF = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_SETTING = re.compile(rf"\b({'|'.join(_OFF)})[\"'`]?\s*[=:]\s*([0-9]+(?:\.[0-9]+)?)")  # as JSON, too


def penalties(folder):
    """{name: [values, ascending]} of the penalties that the card of a checkpoint folder gives, those that are off left
    out; cards give several, for several tasks."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for name, value in _SETTING.findall(text):
        if float(value) != _OFF[name]:
            found.setdefault(name, set()).add(float(value))
    return {name: sorted(values) for name, values in found.items()}


def warn_of_penalties(folder, sampler, named, stacklevel):
    """A QwenrefWarning where the card gives a penalty that is off in `sampler`, and not among the `named` arguments."""
    missing = {
        name: values
        for name, values in penalties(folder).items()
        if name not in named and getattr(sampler, name) == _OFF[name]
    }
    if not missing:
        return
    given = [f"{name} {' or '.join(f'{value:g}' for value in values)}" for name, values in missing.items()]
    name, values = next(iter(missing.items()))
    order = ", with order='vllm'" if sampler.order == "hf" and name != "repetition_penalty" else ""
    warnings.warn(
        compose(
            f"Sampler: the model card asks for {', '.join(given)}",
            found="not in generation_config.json, and nothing else is read",
            expected="an argument for each: some tasks want none",
            do=f"{name}={values[-1]:g}{order}; {name}={_OFF[name]:g} leaves it off without this warning",
        ),
        QwenrefWarning,
        stacklevel=stacklevel + 1,
    )
