"""ik_llama.cpp in process, a fork of llama.cpp with kernels of its own, through the package ik-llama-cpp-python."""

import ctypes

import numpy as np

from qwenref._C import get_num_threads
from qwenref.compare.errors import EngineRejected
from qwenref.engines.llama_cpp import gguf, weights_kind
from qwenref.engines.model_files import gguf_facts
from qwenref.engines.packages import counts, imported, opening, running, silenced, version
from qwenref.engines.stepping import MORE, Stepping
from qwenref.errors import compose

BATCH = 512  # the library's micro-batch: rows of logits are kept for no more


def open(rest, *, flash=False, context=4096, threads=None, name=None):
    """A GGUF file; its keys and values are f16.  The options are those of `llama_cpp.open`."""
    package = imported("ik_llama_cpp.llama", install="ik-llama-cpp-python")
    counts("ik_llama.cpp", context=context, threads=threads)
    path, threads = gguf(rest, "ik_llama.cpp"), threads or get_num_threads()
    expected = "a GGUF file of an architecture that this ik_llama.cpp knows, and memory for its context"
    with silenced(), opening(rest, "ik_llama.cpp", expected=expected):
        model = package.IkLlama(str(path), n_ctx=context, n_threads=threads, flash_attn=flash, verbose=False)
    return IkLlama(model, path, {"flash_attention": flash, "n_ctx": context, "threads": threads}, name)


class IkLlama(Stepping):
    """A model of ik_llama.cpp as an engine."""

    order = "llama.cpp"
    more = MORE

    def __init__(self, llama, path, flags, name=None):
        self._api, self._internals = (imported(f"ik_llama_cpp.{part}") for part in ("_ctypes_api", "_internals"))
        self._llama, self._model, self._context = llama, llama._model, llama._context
        self.path, self._flags, self.name = path, flags, name or f"ik_llama.cpp {path.name}"
        self.vocab, self.limit = self._model.n_vocab, flags["n_ctx"]
        self.stop_ids = tuple(id for id in range(self.vocab) if self._api.llama_token_is_eog(self._model.model, id))
        self._fed = 0

    def capabilities(self):
        """Text as ids, but no template: these calls have none."""
        return super().capabilities()._replace(tokenize=True)

    def fresh(self):
        self._context.kv_cache_clear()
        self._fed = 0

    def feed(self, ids):
        return np.concatenate([self._decode(ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)])

    def tokenize(self, text):
        with running(f"{self.name}: tokenize"):
            return list(self._model.tokenize(text, add_bos=True, special=True))

    def config(self):
        return {
            "name": "ik_llama.cpp",
            "version": f"ik-llama-cpp-python {version('ik-llama-cpp-python')}",
            "backend": "cpu",
            "dtype": "float32",  # weights of 16 bits are widened, unlike in llama.cpp
            "quant": weights_kind(self._model.desc)[1],
            "kv_dtype": "float16",
            "state_dtype": "float32",
            "tp": 1,
            "flags": self._flags,
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "model": gguf_facts(self.path),
        }

    def close(self):
        if self._llama is not None:
            self._llama.close()
            self._llama = self._model = self._context = None

    def _decode(self, ids):
        """Logits [len(ids), vocab] of one call."""
        batch = self._internals.make_batch_range(ids, pos_start=self._fed, logits_last=True)
        try:
            for i in range(len(ids)):
                batch.logits[i] = 1
            if code := self._context.decode(batch):
                raise EngineRejected(compose(f"{self.name}: llama_decode returned {code}"))
            self._fed += len(ids)
            rows = [self._api.llama_get_logits_ith(self._context.ctx, i) for i in range(len(ids))]
            numbers = ctypes.POINTER(ctypes.c_float)
            return np.stack([np.ctypeslib.as_array(ctypes.cast(row, numbers), (self.vocab,)) for row in rows])
        finally:
            self._api.llama_batch_free(batch)
