"""An adapter before a stand-in, opened as a user would open it."""

import contextlib
import importlib
import threading

from qwenref.engines import adapter
from standins.serving import serving

STANDIN = {
    "vllm+http": "vllm", "sglang+http": "sglang", "llama+http": "llama_server", "ollama+http": "ollama",
    "tgi+http": "tgi", "lmstudio+http": "lmstudio", "openai+http": "openai",
}  # fmt: skip
IDS_IN = ("vllm+http", "sglang+http", "llama+http")
TEXT_IN = ("ollama+http", "tgi+http", "openai+http")
CHAT = ("lmstudio+http", "openai+http")


def answering(kind, engine, tokenizer, **how):
    return importlib.import_module(f"standins.{STANDIN[kind]}").answering(engine, tokenizer, **how)


def standing(kind, engine, known, **how):
    """`serving` of a stand-in of a kind around `engine`, which is asked one thing at a time."""
    answer, lock = answering(kind, engine, known, **how), threading.Lock()

    def one_by_one(request, handler):
        with lock:  # the engine behind it has one cache
            return answer(request, handler)

    return serving(one_by_one)


@contextlib.contextmanager
def behind(kind, engine, known, how=None, **options):
    """The adapter of a kind before a stand-in around `engine`, whose tokenizer is `known`; `.seen` are the requests."""
    if kind == "sglang+http":
        options.setdefault("vocab", engine.vocab)
    elif kind not in IDS_IN:
        options.setdefault("tokenizer", known)
    if kind == "openai+http":
        options.setdefault("route", "completions")
    with standing(kind, engine, known, **(how or {})) as (url, seen), adapter(kind).open(url, **options) as opened:
        opened.seen = seen
        yield opened
