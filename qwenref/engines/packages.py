"""Packages that an adapter needs and this package does not."""

import importlib
import importlib.metadata

from qwenref.errors import CapabilityMissing, compose


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
