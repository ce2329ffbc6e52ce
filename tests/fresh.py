"""A fresh interpreter for tests: the same qwenref as here, wherever it is installed, and nothing else imported."""

import os
import subprocess
import sys
from pathlib import Path

import qwenref

TESTS = Path(__file__).resolve().parent


def python(code, *args, check=True, **environment):
    """CompletedProcess of running `code` with text output; its folder is that of the tests, which hides no package."""
    place = str(Path(qwenref.__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        check=check,
        timeout=300,
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": place} | environment,
    )
