"""Packages that an adapter needs and this package does not."""

import contextlib
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path

from qwenref.checks import is_whole
from qwenref.compare.errors import EngineRejected
from qwenref.engines.refusals import line
from qwenref.errors import CapabilityMissing, CheckpointError, InputError, QwenrefError, compose


def imported(module, extra=None, install=None):
    """The module, imported now; CapabilityMissing says how it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        do = f"pip install 'qwenref[{extra}]'" if install is None else f"pip install {install}"
        raise CapabilityMissing(compose(f"this engine needs the package {module}", found=error, do=do)) from error


def version(distribution):
    """Version of an installed distribution, None where it is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def counts(engine, **options):
    """InputError for an option that has to be a whole number above 0, or None, and is not."""
    for name, value in options.items():
        if value is not None and not (is_whole(value) and value > 0):
            raise InputError(compose(f"{engine}: {name}", found=repr(value), expected="a whole number above 0"))


@contextlib.contextmanager
def opening(rest, engine, **parts):
    """What a library raises while it opens `rest`, as CheckpointError; `parts` as of `compose`."""
    with _raising(CheckpointError, f"{rest}: {engine} does not open it", parts):
        yield


@contextlib.contextmanager
def running(where):
    """What a library raises while it computes, as EngineRejected."""
    with _raising(EngineRejected, f"{where}: the engine failed", {}):
        yield


@contextlib.contextmanager
def silenced():
    """Nothing on the terminal of a library that writes there and knows no other way, be it from C."""
    with Path(os.devnull).open("w") as nowhere, contextlib.ExitStack() as stack:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            if stream is not None:
                stream.flush()
            try:
                whole = os.dup(number)
            except OSError:  # a process without a terminal
                continue
            stack.callback(os.close, whole)
            stack.callback(os.dup2, whole, number)
            os.dup2(nowhere.fileno(), number)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


@contextlib.contextmanager
def _raising(kind, first, parts):
    try:
        yield
    except QwenrefError:
        raise
    except Exception as error:  # libraries have no class in common
        said = f"{type(error).__name__}: {line(str(error), 600)}".removesuffix(": ")
        raise kind(compose(first, **{"found": said, **parts})) from error
