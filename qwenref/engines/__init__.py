"""Engines to hold against the reference: one file each, all with the methods of `base.Engine`."""

import importlib

from qwenref.engines.base import ALL, Capabilities, Completion, Engine, Prompt, Row, Scores
from qwenref.engines.specs import parse
from qwenref.errors import InputError, compose

# How an engine is written on the command line -> the file that talks to it and its function `open(rest, **options)`.
ADAPTERS = {
    "reference": "reference",
    "transformers": "transformers",
    "llama-cpp": "llama_cpp",
    "ik-llama": "ik_llama",
    "openvino": "openvino",
    "mlx": "mlx",
    "mistralrs": "mistralrs",
    "ortgenai": "ortgenai",
    "vllm": "vllm",
    "vllm+http": "vllm_http",
    "sglang+http": "sglang",
    "llama+http": "llama_server",
    "ollama+http": "ollama",
    "tgi+http": "tgi",
    "lmstudio+http": "lmstudio",
    "openai+http": "openai",
    "recorded": "recorded",
}


def adapter(kind):
    """The module of an adapter."""
    return importlib.import_module(f"qwenref.engines.{ADAPTERS[kind]}")


def open(spec, **options):
    """The engine that a spec names (`specs` has the form); `options` are added to those in it.

    Raises InputError for what is no spec or no option of the engine, UnknownName for a kind there is none of, and
    whatever opening it raises.
    """
    kind, rest, written = parse(spec, ADAPTERS)
    try:
        return adapter(kind).open(rest, **{**written, **options})
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise InputError(
            compose(f"engine: an option that {kind} has not", found=str(error).rpartition(" ")[2])
        ) from None


__all__ = ["ADAPTERS", "ALL", "Capabilities", "Completion", "Engine", "Prompt", "Row", "Scores", "adapter", "open"]
