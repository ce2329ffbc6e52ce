"""ik-llama-cpp-python around an engine: llama.cpp's calls, rows of logits by their place in the batch."""

import ctypes
import types

import numpy as np


def modules(engine, tokenizer, kind="all F32"):
    """{name: module} of what the adapter imports; the first has `.opened`, and `.failing`: what decode returns."""
    main, api, internals = (types.ModuleType(name) for name in ("llama", "_ctypes_api", "_internals"))
    main.opened, main.failing = [], 0

    class Owned:
        def __init__(self):
            main.opened.append(self)

        def close(self):
            main.opened.remove(self)

    class IkModel(Owned):
        n_vocab, desc, model = engine.vocab, f"qwen35 ?B {kind}", "pointer"

        def tokenize(self, text, *, add_bos, special):
            return tokenizer.encode(text) if add_bos and special else [0]

    class IkContext(Owned):
        def __init__(self, room, ubatch=512):
            super().__init__()
            self.room, self.ubatch, self.used, self.ctx = room, ubatch, None, self

        def kv_cache_clear(self):
            engine.fresh()
            self.used = 0

        def decode(self, batch):
            n = len(batch.token)
            if main.failing or self.used + n > self.room:
                return main.failing or 1
            assert batch.pos == list(range(self.used, self.used + n)) and n <= self.ubatch
            self.used += n
            behind = np.full((1, engine.vocab), np.nan)
            self.rows = np.concatenate([engine.feed(list(batch.token)), behind]).astype(np.float32)
            self.kept = [bool(wanted) for wanted in batch.logits]
            return 0

    class IkLlama:
        def __init__(self, path, *, n_ctx=4096, n_threads=0, flash_attn=True, verbose=True):
            print("llama_model_loader: loaded meta data")
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise RuntimeError(f"Failed to load model: {path}")
            main.threads = n_threads
            self._model, self._context = IkModel(), IkContext(n_ctx)

        def close(self):
            if self._context is not None:
                self._context.close()
                self._model.close()
                self._context = self._model = None

        def __del__(self):
            if hasattr(self, "_context"):
                self.close()

    def make_batch_range(tokens, *, pos_start=0, logits_last=True):
        pos = list(range(pos_start, pos_start + len(tokens)))
        return types.SimpleNamespace(token=list(tokens), pos=pos, logits=[0] * (len(tokens) - 1) + [int(logits_last)])

    def logits_ith(context, i):
        return ctypes.cast(context.rows[i].ctypes.data, ctypes.c_void_p) if context.kept[i] else None

    main.IkLlama, internals.make_batch_range = IkLlama, make_batch_range
    api.llama_token_is_eog = lambda model, id: id in engine.stop_ids
    api.llama_get_logits_ith, api.llama_batch_free = logits_ith, lambda batch: None
    return {"ik_llama_cpp.llama": main, "ik_llama_cpp._ctypes_api": api, "ik_llama_cpp._internals": internals}
