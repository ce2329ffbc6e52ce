"""llama.cpp in process, through the C API that llama-cpp-python binds: its own decode calls, full logits of each.

`Llama(logits_all=True)` of that package would hold logits of the whole context; here the rows of each call are copied.
Every prompt begins on an empty memory: the recurrent half of it cannot let go of a part.
"""

import collections
import ctypes
from pathlib import Path

import numpy as np

from qwenref._C import get_num_threads
from qwenref.compare.errors import EngineRejected
from qwenref.engines.model_files import gguf_facts
from qwenref.engines.packages import counts, imported, version
from qwenref.engines.stepping import MORE, Stepping
from qwenref.errors import CapabilityMissing, CheckpointError, InputError, compose

CONTEXT = 4096  # tokens, where the model has more and nobody asks for them: keys and values of all are allocated
TEMPLATE = "tokenizer.chat_template"
_said = collections.deque(maxlen=8)  # the last lines of llama.cpp's own log
_callbacks = {}  # of the module's log, which C holds
_WORTH = (3, 4)  # levels of its log: warnings and errors


def open(rest, *, kv="f32", flash=False, context=None, batch=512, threads=None, name=None):
    """A GGUF file.

    kv       type of keys and values, "f32" or "f16" (llama.cpp's default); flash attention makes it f16 anyway
    context  tokens there is room for; None: those of the model, at most 4,096
    batch    tokens of one call
    threads  None: as many as the reference uses
    """
    lc = imported("llama_cpp", install="llama-cpp-python")
    _be_quiet(lc)
    types = {"f32": lc.GGML_TYPE_F32, "f16": lc.GGML_TYPE_F16}
    if kv not in types:
        raise InputError(compose(f"llama.cpp: kv {kv!r}", expected=" or ".join(types)))
    counts("llama.cpp", context=context, batch=batch, threads=threads)
    path = gguf(rest, "llama.cpp")
    model = _opened(lc.llama_model_load_from_file, str(path).encode(), lc.llama_model_default_params(), path=path)
    params = lc.llama_context_default_params()
    params.n_ctx = context or min(CONTEXT, lc.llama_model_n_ctx_train(model))
    params.n_batch = params.n_ubatch = min(batch, params.n_ctx)
    params.type_k = params.type_v = types[kv]
    params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_threads = params.n_threads_batch = threads or get_num_threads()
    try:
        state = _opened(lc.llama_init_from_model, model, params, path=path)
    except CheckpointError:
        lc.llama_model_free(model)
        raise
    return LlamaCpp(lc, model, state, params, path, name or f"llama.cpp {path.name} {kv} cache")


class LlamaCpp(Stepping):
    """A model and a context of llama.cpp as an engine."""

    order = "llama.cpp"
    more = MORE

    def __init__(self, library, model, state, params, path, name):
        self._lc, self._model, self._state, self._params = library, model, state, params
        self.path, self.name = path, name
        self._vocabulary = library.llama_model_get_vocab(model)
        self.vocab = library.llama_vocab_n_tokens(self._vocabulary)
        self.limit = library.llama_n_ctx(state)
        self.stop_ids = tuple(id for id in range(self.vocab) if library.llama_vocab_is_eog(self._vocabulary, id))
        self._fed = 0

    def capabilities(self):
        """Text as ids, but no template: these calls have none."""
        return super().capabilities()._replace(tokenize=True)

    def fresh(self):
        if self._state is None:
            raise CapabilityMissing(compose(f"{self.name}: it was closed"))
        self._lc.llama_memory_clear(self._lc.llama_get_memory(self._state), True)
        self._fed = 0

    def feed(self, ids):
        size = self._params.n_batch
        return np.concatenate([self._decode(ids[at : at + size]) for at in range(0, len(ids), size)])

    def tokenize(self, text):
        """As a server tokenises a prompt: special tokens are read, and put in front where the file says so."""
        if self._model is None:
            raise CapabilityMissing(compose(f"{self.name}: it was closed"))
        raw = text.encode()
        room = len(raw) + 8  # a token is a byte at least
        found = (self._lc.llama_token * room)()
        n = self._lc.llama_tokenize(self._vocabulary, raw, len(raw), found, room, True, True)
        if n < 0:
            raise EngineRejected(compose(f"{self.name}: llama_tokenize", found=f"asks for room for {-n:,} ids"))
        return found[:n]

    def config(self):
        lc, said = self._lc, self._metadata()
        dtype, quant = weights_kind(_text(lc.llama_model_desc, self._model))
        return {
            "name": "llama.cpp",
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "backend": lc.llama_print_system_info().decode().strip(),
            "dtype": dtype,
            "quant": quant,
            "kv_dtype": {lc.GGML_TYPE_F32: "float32", lc.GGML_TYPE_F16: "float16"}[self._params.type_k],
            "state_dtype": "float32",
            "tp": 1,
            "flags": {
                "flash_attention": self._params.flash_attn_type == lc.LLAMA_FLASH_ATTN_TYPE_ENABLED,
                "n_ctx": self.limit,
                "n_batch": self._params.n_batch,
                "threads": self._params.n_threads,
            },
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "model": gguf_facts(self.path, said.pop(TEMPLATE, None)),
            "metadata": said,
        }

    def close(self):
        if self._state is not None:
            self._lc.llama_free(self._state)
            self._lc.llama_model_free(self._model)
            self._state = self._model = self._vocabulary = None

    def _decode(self, ids):
        """Logits [len(ids), vocab] of one call."""
        batch = self._lc.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, id in enumerate(ids):
                batch.token[i], batch.pos[i] = id, self._fed + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            _said.clear()
            if code := self._lc.llama_decode(self._state, batch):
                raise EngineRejected(compose(f"{self.name}: llama_decode returned {code}", found=_last_words()))
            self._fed += len(ids)
            return np.ctypeslib.as_array(self._lc.llama_get_logits(self._state), (len(ids), self.vocab)).copy()
        finally:
            self._lc.llama_batch_free(batch)

    def _metadata(self):
        """{key: text} of the file's metadata, its vocabulary left out."""
        lc, found = self._lc, {}
        kept = ("tokenizer.ggml.pre", "tokenizer.ggml.model")
        for i in range(lc.llama_model_meta_count(self._model)):
            key = _text(lc.llama_model_meta_key_by_index, self._model, i)
            if key in kept or not key.startswith("tokenizer.ggml."):
                found[key] = _text(lc.llama_model_meta_val_str_by_index, self._model, i)
        return dict(sorted(found.items()))


def gguf(rest, engine):
    """The path of a GGUF file; CheckpointError where there is none."""
    path = Path(rest).expanduser()
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise CheckpointError(compose(f"{rest}: {engine} opens a file", found=found, expected="a GGUF file"))
    return path


def weights_kind(description):
    """(dtype, quantisation or None) of a file, from llama.cpp's own words: "qwen35 ?B Q4_K - Medium".

    With weights of 16 bits llama.cpp also rounds what it multiplies them by.
    """
    plain = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    kind = description.split(" ", 2)[-1].removeprefix("all ")
    return (plain[kind], None) if kind in plain else ("float32", kind)


def _text(function, *arguments):
    """What a function of C writes, which answers with how long it is."""
    length = function(*arguments, None, 0)
    room = ctypes.create_string_buffer(max(length, 0) + 1)
    function(*arguments, room, len(room))
    return room.value.decode("utf-8", "replace")


def _opened(function, *arguments, path):
    _said.clear()
    found = function(*arguments)
    if not found:
        expected = "a GGUF file of an architecture that this llama.cpp knows, and memory for its context"
        raise CheckpointError(compose(f"{path}: llama.cpp does not open it", found=_last_words(), expected=expected))
    return found


def _last_words():
    return "\n".join(line for line in "".join(_said).split("\n") if line) or None


def _be_quiet(lc):
    """Its log goes into error messages, not to the terminal."""
    if lc not in _callbacks:
        _callbacks[lc] = lc.llama_log_callback(_hear)
        lc.llama_log_set(_callbacks[lc], None)
        lc.llama_backend_init()


def _hear(level, text, data):
    if level in _WORTH:
        _said.append(text.decode("utf-8", "replace"))
