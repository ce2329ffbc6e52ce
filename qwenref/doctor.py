"""What this installation, machine and checkpoint have, a row for each check: ok, warning or fault, and what to do."""

import os
import platform
from typing import NamedTuple

import numpy as np

from qwenref import _C
from qwenref._version import __version__
from qwenref.engines.packages import version
from qwenref.plain import aligned, broken

OK, WARNING, FAULT = "ok", "warning", "fault"
NEEDED = ("numpy", "ml_dtypes", "tokenizers", "jinja2")

# Extras -> the packages in them and what they are for.
EXTRAS = {
    "vision": (("pillow", "av"), "pictures and video files"),
    "hub": (("huggingface_hub",), "download by name"),
    "compare": (("httpx",), "engines over HTTP"),
    "plot": (("matplotlib",), "figures"),
    "cluster": (("distributed",), "comparisons on several machines"),
}
ENGINES = {
    "transformers": ("transformers", "torch"),
    "llama-cpp": ("llama_cpp_python",),
    "ik-llama": ("ik_llama_cpp_python",),
    "openvino": ("openvino",),
    "mlx": ("mlx-lm",),
    "mistralrs": ("mistralrs",),
    "ortgenai": ("onnxruntime-genai",),
    "vllm": ("vllm",),
}
_IDS = (1, 2, 3, 5, 8, 13, 21, 34)


class Check(NamedTuple):
    """What was looked at · ok, warning or fault · what was found · what it means · what to do; empty where nothing."""

    name: str
    status: str
    found: str
    means: str = ""
    do: str = ""


def doctor(model=None):
    """[Check] of this installation and machine, and of a model (a folder, "tiny" or a hub name) where one is named."""
    made = [_guarded(*pair) for pair in _OWN]
    made += [_extra(name) for name in EXTRAS] + [_guarded("engines in process", _engines)]
    return made + (_of_model(model) if model is not None else [_guarded("embedded model", lambda: _runs("tiny"))])


def text(checks, width=100):
    """The rows, what to do below them."""
    rows = aligned([(check.name, check.status, check.found) for check in checks])
    lines = []
    for row, check in zip(rows, checks, strict=True):
        lines.append(row if len(row) <= width else row[: width - 1] + "…")
        lines += [f"    {label:<8} {words}" for label, words in (("means", check.means), ("do", check.do)) if words]
    worst = [check.name for check in checks if check.status == FAULT]
    return "\n".join([*lines, "", f"faults: {', '.join(worst)}" if worst else "no faults"])


def _guarded(name, look):
    """The Check of a function, also of one that fails."""
    try:
        return Check(name, *look())
    except Exception as error:
        return Check(name, FAULT, broken(error))


# ---- installation and machine --------------------------------------------------------------------------------------


def _versions():
    return OK, f"qwenref {__version__} · Python {platform.python_version()} · {platform.system()} {platform.machine()}"


def _packages():
    found = {name: version(name) for name in NEEDED}
    missing = [name for name, installed in found.items() if installed is None]
    shown = " · ".join(f"{name} {installed or 'missing'}" for name, installed in found.items())
    return (FAULT, shown, "", f"pip install {' '.join(missing)}") if missing else (OK, shown)


def _arithmetic():
    level = _C.cpu_level()
    if level != "scalar":
        return OK, level
    forced = os.environ.get("QWENREF_CPU") == "scalar"
    do = "unset QWENREF_CPU" if forced else ""
    return WARNING, level, "the same bits, several times slower than with vector instructions", do


def _threads():
    threads = _C.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{threads} of {usable} CPUs this process may use"
    if threads > usable:
        return WARNING, found, "threads wait for each other; the bits do not change", "set QWENREF_NUM_THREADS lower"
    return OK, found


def _blas():
    known = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    means = "sums of attention and DeltaNet under fp64 are NumPy's; nothing else depends on it"
    return OK, f"{known.get('name')} {known.get('version')}", means


def _extra(name):
    packages, use = EXTRAS[name]
    found = {package: version(package) for package in packages}
    shown = " · ".join(f"{package} {installed or 'not installed'}" for package, installed in found.items())
    do = "" if all(found.values()) else f"pip install 'qwenref[{name}]'"
    return Check(f"extra {name}", OK, f"{shown} ({use})", do=do)


def _engines():
    found = [
        " ".join(f"{package} {version(package)}" for package in packages)
        for packages in ENGINES.values()
        if all(version(package) for package in packages)
    ]
    return OK, " · ".join(found) or "none", "" if found else "engines over HTTP and recorded runs need none"


_OWN = (
    ("versions", _versions),
    ("packages", _packages),
    ("arithmetic", _arithmetic),
    ("threads", _threads),
    ("BLAS of NumPy", _blas),
)


# ---- a model -------------------------------------------------------------------------------------------------------


def _of_model(name):
    from qwenref.overview import overview

    try:
        import qwenref

        facts = overview(qwenref.from_pretrained(name), name, None)
    except Exception as error:
        return [Check("model", FAULT, broken(error), do=f"qwenref inspect {name} says more")]
    opened = Check("model", OK, f"{name}: every tensor assigned once")
    looks = (("tokenizer", lambda: _tokenizer(facts["tokenizer"])), ("stop ids", lambda: _stops(facts["tokenizer"])))
    return [opened, *(_guarded(*look) for look in looks), _guarded("runs", lambda: _runs(name))]


def _tokenizer(facts):
    if facts["error"]:
        return FAULT, facts["error"], "text cannot be read or written", "take tokenizer.json from the published model"
    if not facts["present"]:
        return WARNING, "absent", "token ids only"
    if not facts["chat_template"]:
        return WARNING, "present, without a chat template", "no chat; text as it is"
    return OK, "present, with a chat template"


def _stops(facts):
    if not facts["present"] or facts["error"]:
        return OK, "none: there is no tokenizer"
    ids = " ".join(f"{entry['token']} {entry['id']}" for entry in facts["stop"]) or "none"
    if facts["stop_sources_agree"]:
        return OK, ids
    return WARNING, ids, "files of the checkpoint name different ids; engines stop at different places", "pass stop ids"


def _runs(name):
    """A few tokens on one thread and on all: finite, and the same bits."""
    import qwenref

    model, threads = qwenref.from_pretrained(name), _C.get_num_threads()
    ids = np.minimum(np.array([_IDS]), model.config.text_config.vocab_size - 1)
    try:
        whole = model(ids).logits
        _C.set_num_threads(1)
        alone = model(ids).logits
    finally:
        _C.set_num_threads(threads)
    if not np.isfinite(whole).all():
        return FAULT, f"{int((~np.isfinite(whole)).sum()):,} logits of {whole.size:,} are not finite", "damaged weights"
    if whole.tobytes() != alone.tobytes():
        return FAULT, "other bits on one thread than on all", "a damaged build", "build and install again"
    return OK, f"{ids.size} tokens, finite, the same bits on 1 and {threads} threads"
