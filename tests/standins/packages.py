"""Engines of other packages with a stand-in in the package's place: specs that open them as a user would."""

import sys

from standins import llama_cpp


def llama(monkeypatch, folder, engine, tokenizer, **how):
    module = llama_cpp.module(engine, tokenizer, **how)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    path = folder / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return f"llama-cpp:{path}", module


# Kind -> function (monkeypatch, an empty folder, the engine behind, its tokenizer, **how) -> (spec, module)
STANDIN = {"llama-cpp": llama}
PACKAGE = {"llama-cpp": "llama_cpp"}  # what has to be installed
