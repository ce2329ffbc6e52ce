"""The version, in the one place that the package and its metadata read."""

__version__ = "0.1.0"
