"""Who takes part: each opens the same folder, runs a prompt, and goes on token by token.

Rivals are imported when asked for.  Settings are the fair ones of each side, and are part of the report.
"""

import time

import numpy as np

from qwenref.errors import CapabilityMissing, InputError, compose

RIVALS = ("torch", "llama.cpp")


class Ours:
    """qwenref: the given numerics, weights as stored, logits of the last token."""

    def __init__(self, model, threads, numerics=None):
        import qwenref

        self.model, self.numerics = model, qwenref.numerics(numerics or model.numerics)
        self.settings = f"numerics {self.numerics.name}, {threads} threads, logits_to_keep=1"
        self._cache = qwenref.Cache(model)
        self._next = 0

    def prefill(self, ids):
        """Seconds of the prompt, from an empty cache."""
        self._cache.reset()
        with self.numerics:
            began = time.perf_counter()
            logits = self.model([ids], cache=self._cache, logits_to_keep=1).logits
            taken = time.perf_counter() - began
        self._next = int(logits[0, -1].argmax())
        return taken

    def decode(self, tokens):
        """Seconds of so many further tokens, greedily, behind what is in the cache."""
        with self.numerics:
            began = time.perf_counter()
            for _ in range(tokens):
                logits = self.model([[self._next]], cache=self._cache, logits_to_keep=1).logits
                self._next = int(logits[0, -1].argmax())
            return time.perf_counter() - began


class Torch:
    """Eager transformers on PyTorch in one dtype."""

    def __init__(self, folder, threads, dtype):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise _missing("torch", error.name, "qwenref[test]") from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.settings = f"{versions}, {dtype}, {threads} threads, eager attention, inference mode, logits_to_keep=1"
        self._out = None

    def prefill(self, ids):
        with self.torch.inference_mode():
            began = time.perf_counter()
            self._out = self.model(self.torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began

    def decode(self, tokens):
        with self.torch.inference_mode():
            began = time.perf_counter()
            for _ in range(tokens):
                ids = self._out.logits[:, -1:].argmax(-1)
                self._out = self.model(ids, cache=self._out.cache, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began


class LlamaCpp:
    """llama.cpp in process through llama-cpp-python, on the same weights in bf16 as a GGUF file."""

    def __init__(self, folder, threads):
        try:
            import llama_cpp
        except ImportError:
            raise _missing("llama.cpp", "llama_cpp", "llama-cpp-python") from None
        from qwenref.bench.gguf import write_gguf

        file = folder / "model-bf16.gguf"
        if not file.exists():
            import qwenref

            write_gguf(qwenref.from_pretrained(folder), file)
        self.lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise CapabilityMissing(compose(f"llama.cpp cannot open {file}", found=_version(llama_cpp)))
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = 4096, 512, 512
        asked.n_threads = asked.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, asked)
        if not self.context:
            raise CapabilityMissing(compose(f"llama.cpp makes no context for {file}", found=_version(llama_cpp)))
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.settings = f"{_version(llama_cpp)}, bf16 GGUF, {threads} threads, batch 512, its default cache"
        self._at = self._next = 0

    def _run(self, ids):
        """One llama_decode, logits of the last token."""
        lib = self.lib
        batch = lib.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), self._at + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
            code = lib.llama_decode(self.context, batch)
        finally:
            lib.llama_batch_free(batch)
        if code:
            raise CapabilityMissing(compose(f"llama.cpp: llama_decode returned {code}", found=f"{len(ids)} tokens"))
        self._at += len(ids)
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        self._next = int(row.argmax())

    def prefill(self, ids):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self._at = 0
        began = time.perf_counter()
        for i in range(0, len(ids), 512):
            self._run(ids[i : i + 512])
        return time.perf_counter() - began

    def decode(self, tokens):
        began = time.perf_counter()
        for _ in range(tokens):
            self._run([self._next])
        return time.perf_counter() - began


def rivals(names, folder, threads):
    """{name: contender} of the rivals asked for; torch takes part in bfloat16 and in float32."""
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise InputError(compose(f"bench: no contender {unknown[0]!r}", expected=" or ".join(RIVALS)))
    found = {}
    if "torch" in names:
        found |= {f"torch {short}": Torch(folder, threads, dtype) for short, dtype in _DTYPES.items()}
    if "llama.cpp" in names:
        found["llama.cpp"] = LlamaCpp(folder, threads)
    return found


_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def _missing(name, module, package):
    first = f"bench: {name} cannot take part: no module {module}"
    return CapabilityMissing(compose(first, do=f'pip install "{package}", or leave {name} out of --against'))


def _version(module):
    return f"llama-cpp-python {getattr(module, '__version__', '?')}"
