"""Test set-up shared by all files: which qwenref is tested, and that nothing is kept outside of temporary folders."""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ["QWENREF_CACHE"] = "0"  # scores of earlier runs would hide what computes them

# `python -m pytest` puts the source folder on sys.path, where qwenref/ without its compiled part would hide the
# installed package. Unless the extension was built in place, test what is installed.
if not any((ROOT / "qwenref" / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@pytest.fixture(scope="module")
def tiny():
    """The embedded model, of each file its own."""
    import qwenref

    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def one(tiny):
    """A Suite of one prompt, answered with 40 tokens, for what needs a comparison and not its figures."""
    from qwenref.compare import Suite, suite

    item = next(item for item in suite("quick", tiny).prompts if item.kind == "cjk")
    return Suite("quick", (item._replace(new=40),))
