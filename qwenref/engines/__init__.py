"""Engines to hold against the reference: one file each, all with the methods of `base.Engine`."""

import importlib

from qwenref.engines.base import ALL, Capabilities, Completion, Engine, Prompt, Row, Scores

# How an engine is written on the command line -> the file that talks to it and its function `open(rest, **options)`.
ADAPTERS = {
    "reference": "reference",
    "transformers": "transformers",
    "llama-cpp": "llama_cpp",
    "openvino": "openvino",
    "mlx": "mlx",
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


__all__ = ["ADAPTERS", "ALL", "Capabilities", "Completion", "Engine", "Prompt", "Row", "Scores", "adapter"]
