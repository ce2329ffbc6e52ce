"""What two processes have to have in common for a score to have the same bits: a model's files, and the arithmetic.

Files are known by the SHA-256 of their content: config.json, every file of tensors, and the index if there is one.
Sizes and headers would not do: fine-tuned weights have those of their origin.  A file is read once; its digest is then
remembered for as long as inode, size and both times of change stay.

What is in memory alone is no part of it, so a model with hooks, changed weights or faults has no such name: no score of
it is kept or made elsewhere.  A method that was replaced by hand goes unnoticed.
"""

import functools
import hashlib
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qwenref import _C
from qwenref._version import __version__
from qwenref.compare.scoring import PLAIN, TRUTH, Task, perform
from qwenref.errors import InputError, compose
from qwenref.hub import EMBEDDED, cache_folder

_BLOCK = 1 << 22  # bytes read at a time
_SETTLED = 2.0  # seconds a file has to be old: a later write in the same tick of its clock would leave no trace


class Files(NamedTuple):
    """A model's files.

    path     the folder, as it is called here
    within   where it is in the package or in the Hugging Face cache, where other machines have it elsewhere; or None
    stats    ((name, inode, bytes, nanoseconds), ...) of the files that decide about bits
    content  SHA-256 of all of them, or None where nobody asked
    """

    path: str
    within: str | None
    stats: tuple
    content: str | None

    def found(self, store=None):
        """The folder that holds these very files on this machine, or None."""
        return next((folder for folder in self._places() if self._are_in(folder, store)), None)

    def _places(self):
        yield Path(self.path)
        if self.within in EMBEDDED:
            yield EMBEDDED[self.within]
        elif self.within is not None:
            yield cache_folder() / self.within

    def _are_in(self, folder, store):
        names = [name for name, *_ in self.stats]
        try:
            if _stats(folder, names) == self.stats:
                return True
            return self.content is not None and contents(folder, names, store) == self.content
        except OSError:
            return False


def files_of(model, store=None, content=True):
    """`Files` of a model; InputError if it is not what its files hold."""
    found = _not_its_files(model)
    if found is not None:
        raise InputError(
            compose(
                "this model cannot be opened by another process, nor scores of it be kept",
                found=found,
                expected="a model as it is in its folder",
                do="save_pretrained(folder) and open that, or work in this process and thread",
            )
        )
    folder = Path(os.path.abspath(model.path))
    names = ["config.json", *model.report.files]
    if (folder / "model.safetensors.index.json").exists():
        names.append("model.safetensors.index.json")
    digest = contents(folder, names, store) if content else None
    return Files(str(folder), _within(folder), _stats(folder, names), digest)


def contents(folder, names, store=None):
    """SHA-256 over names and contents of files."""
    sha = hashlib.sha256()
    for name in names:
        sha.update(f"{name} {digest_of(Path(folder, name), store)}\n".encode())
    return sha.hexdigest()


def digest_of(path, store=None):
    """SHA-256 of a file; a `store` remembers it by inode, size and times of change."""
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        known = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
        key = hashlib.sha256(repr(("file", os.path.abspath(path), known)).encode()).hexdigest()
        kept = None if store is None else store.read(key)
        if kept is not None:
            return kept.hex()
        sha, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        while count := file.readinto(block):
            sha.update(block[:count])
        after = os.fstat(file.fileno())
    same = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == known[2:]
    if store is not None and same and time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED:
        store.write(key, sha.digest())
    return sha.hexdigest()


@functools.cache
def arithmetic():
    """{part: what it is} of all that decides about bits here, but for the model: equal parts give equal bits.

    NumPy's exponentials and sums in float64 have other last bits on CPUs with other instructions; so `numpy` and `cpu`
    are parts, and `bits` is the digest of a small calculation through all of it.
    """
    package = Path(_C.__file__).parent
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    found = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    return {
        "qwenref": __version__,
        "sources": sources.hexdigest(),
        "extension": hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest(),
        "numpy": np.__version__,
        "cpu": " ".join([platform.machine(), *found]),
        "bits": _bits(),
    }


def kind(parts):
    """One word for what decides about bits by promise: how the extension was compiled does not."""
    return digest({name: what for name, what in parts.items() if name != "extension"})


def digest(parts):
    """One word for all parts."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def _bits():
    import qwenref

    sha, model = hashlib.sha256(), qwenref.from_pretrained("tiny")
    for how in (TRUTH, PLAIN, ("jitter", 1, "bfloat16")):
        scored = perform(model, Task(tuple(range(3, 35)), 1, how))
        sha.update(scored.logprobs.tobytes())
    square = np.sin(np.arange(160 * 160, dtype=np.float64)).reshape(160, 160)
    for array in (square @ square, square[:7] @ square.T, np.expm1(square), np.log1p(square + 1)):
        sha.update(array.tobytes())
    return sha.hexdigest()


def _not_its_files(model):
    """What keeps a model from being what its files hold; None if it is."""
    from qwenref.weights import edited

    origin = model.origin
    if model.path is None or model.report is None or not getattr(origin, "tells_writes", False):
        return "weights in memory"
    if "_sound" in vars(model):
        return "faults in it: " + ", ".join(fault.name for fault in vars(model)["_sound"][1])
    if not origin.unchanged:
        return f"files in {model.path} that have changed since it was opened"
    changed = edited(model)
    if changed:
        return f"changed weights: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    if hooked or _C.global_forward_hooks or _C.global_forward_pre_hooks:
        return f"hooks of {hooked[0] or 'the model'}" if hooked else "hooks of every module"
    return None


def _stats(folder, names):
    found = [(name, os.stat(os.path.join(folder, name))) for name in names]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _within(folder):
    for name, embedded in EMBEDDED.items():
        if folder == Path(os.path.abspath(embedded)):
            return name
    root = Path(os.path.abspath(cache_folder()))
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else None
