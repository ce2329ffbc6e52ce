"""Scores kept on disk by what they are scores of, so that a comparison that was interrupted goes on with the same bits.

    <folder>/ab/cdef...     one entry: a line of format, SHA-256 of key and content, content

The folder is `scores` in $QWENREF_CACHE, else in $XDG_CACHE_HOME/qwenref, else in ~/.cache/qwenref; QWENREF_CACHE=0
keeps nothing.  A key is the SHA-256 of the model's files, of the arithmetic (`identity.py`) and of the task.  An entry
appears whole or not at all; one that was damaged or cut off is no entry, and is written again.  Any number of processes
may use the folder at once.  Those longest not used are removed before the whole exceeds 2 GiB (with several processes
at work, a sixteenth of it more for each).
"""

import contextlib
import hashlib
import io
import json
import operator
import os
import re
import secrets
import time
import warnings
import weakref
from pathlib import Path

import numpy as np

from qwenref.compare.identity import arithmetic, digest, files_of
from qwenref.compare.scoring import lightened, lightly, restored
from qwenref.errors import InputError, QwenrefWarning, compose, frames_of_the_package

LIMIT = 2**31  # bytes
VARIABLE = "QWENREF_CACHE"
_FORM = b"qwenref.scores/2\n"
_ENTRY = re.compile(r"[0-9a-f]{62}")
_PART = re.compile(r"\.[0-9a-f]{62}\.[0-9a-f]{8}")  # an entry that is being written
_ABANDONED = 3600  # seconds after which the writer of one must be gone


def open_store(folder=None):
    """A Store in this folder; None: where the environment says, or None where it says to keep nothing; False: None."""
    if folder is None:
        said = os.environ.get(VARIABLE)
        if said == "0":
            return None
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.path.join(said or os.path.join(base, "qwenref"), "scores")
    return None if folder is False else Store(folder)


class Store:
    """Entries of bytes in a folder, and through `of(model)` those that are scores."""

    def __init__(self, folder, limit=LIMIT):
        self.folder, self.limit = Path(os.path.expandvars(folder)).expanduser(), limit
        self._told = False
        self._unlooked = limit  # bytes written since the folder was last looked through: at once, the first time
        self._files = weakref.WeakKeyDictionary()  # {model: its Files, or None}

    def of(self, model, executor=None):
        """The `Scores` of a model, by what the executor computes with; None for a model that has no files of its own.

        The model is looked at once: what is changed in it later does not show.
        """
        if model not in self._files:
            try:
                self._files[model] = files_of(model, self)
            except (InputError, OSError):
                self._files[model] = None
        files = self._files[model]
        if files is None:
            return None
        by = executor.arithmetic if executor is not None else digest(arithmetic())
        return Scores(self, f"{files.content} {by}", model.config.text_config.vocab_size)

    def read(self, key):
        """The bytes under a key, None where there are none that are whole."""
        path = self._path(key)
        try:
            found = path.read_bytes()
            head = len(_FORM) + 32
            if found[: len(_FORM)] != _FORM or found[len(_FORM) : head] != _seal(key, found[head:]):
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read is as good
            os.utime(path)
        return found[head:]

    def write(self, key, content):
        """Keep bytes under a key.  A folder that cannot be written to is a warning, once."""
        whole = _FORM + _seal(key, content) + content
        if len(whole) > self.limit:
            return
        path = self._path(key)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            try:
                part.write_bytes(whole)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)
            return
        self._unlooked += len(whole)
        if self._unlooked > self.limit // 16:
            self._unlooked = 0
            self._make_room()

    def _path(self, key):
        return self.folder / key[:2] / key[2:]

    def _complain(self, error):
        if not self._told:
            self._told = True
            do = f"make it writable, or name another folder in {VARIABLE}; 0 keeps nothing"
            words = compose(f"{self.folder}: scores are not kept, and not found again", found=error, do=do)
            warnings.warn(words, QwenrefWarning, stacklevel=frames_of_the_package())

    def _make_room(self):
        """Remove what was longest not used, until an eighth of the limit is free; and what was left half written."""
        found, total = [], 0
        for path in self.folder.glob("??/*"):
            try:
                stat = path.stat()
                if _ENTRY.fullmatch(path.name):
                    found.append((stat.st_mtime_ns, stat.st_size, path))
                    total += stat.st_size
                elif _PART.fullmatch(path.name) and time.time() - stat.st_mtime > _ABANDONED:
                    path.unlink()
            except OSError:  # another process removed it
                continue
        if total <= self.limit - self.limit // 16:  # so much is written until the next look
            return
        for _, size, path in sorted(found):
            if total <= self.limit - self.limit // 8:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._complain(error)
            total -= size


class Scores:
    """Those of one model under one arithmetic: `get(task)` and `put(task, scored)`."""

    def __init__(self, store, prefix, vocab):
        self._store, self._prefix, self._vocab = store, prefix, vocab

    def get(self, task):
        """The Scored that was kept, or None."""
        light = lightened(task, self._vocab)
        found = self._store.read(self._key(light))
        if found is None:
            return None
        try:
            return restored(light, self._vocab, _arrays(found))
        except (ValueError, EOFError):  # whole, but not what this version would write
            return None

    def put(self, task, scored):
        """Keep it."""
        light = lightened(task, self._vocab)
        file = io.BytesIO()
        for array in lightly(light, self._vocab, scored):
            np.save(file, array, allow_pickle=False)
        self._store.write(self._key(light), file.getvalue())

    def _key(self, task):
        given = [np.array(task.ids), *(array for array in (task.support, task.extra) if array is not None)]
        shapes = [None if array is None else array.shape for array in (task.support, task.extra)]
        plain = [self._prefix, task.start, task.how, task.top, task.decode, len(task.ids), shapes]
        sha = hashlib.sha256(json.dumps(plain, default=operator.index).encode())
        for array in given:
            sha.update(np.ascontiguousarray(array, np.int64))
        return sha.hexdigest()


def _arrays(content):
    file, found = io.BytesIO(content), []
    while file.tell() < len(content):
        found.append(np.load(file, allow_pickle=False))
    return found


def _seal(key, content):
    return hashlib.sha256(key.encode() + content).digest()
