"""llama-cpp-python's binding around an engine: memory, batches and logits as C has them, and C's answers to mistakes.

Logits lie in one block, a row for each token of the batch that asked for one; behind them is NaN.
"""

import ctypes
import types
from pathlib import Path

import numpy as np

F32, F16 = 0, 1
METADATA = {
    "general.architecture": "qwen35", "general.file_type": "0", "tokenizer.ggml.pre": "qwen35",
    "tokenizer.ggml.tokens": "[...]", "tokenizer.chat_template": "{{ messages }}" * 500,
}  # fmt: skip


def module(engine, tokenizer, kind="all F32", trained=4096):
    """The package `llama_cpp`; `.opened` is what is open, `.failing` what the next call of decode returns."""
    lc = types.ModuleType("llama_cpp")
    lc.opened, lc.failing, lc.log = [], 0, None
    lc.GGML_TYPE_F32, lc.GGML_TYPE_F16 = F32, F16
    lc.LLAMA_FLASH_ATTN_TYPE_DISABLED, lc.LLAMA_FLASH_ATTN_TYPE_ENABLED = 0, 1
    lc.llama_token = ctypes.c_int32
    lc.llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    lc.llama_backend_init = lambda: None
    lc.llama_print_system_info = lambda: b"CPU : AVX2 = 1 | "

    def log_set(callback, data):
        lc.log = callback

    def say(level, text):
        if lc.log is None:
            print(text)
        else:
            lc.log(level, text.encode(), None)

    def load(path, params):
        say(2, "llama_model_loader: loaded meta data\n")
        if Path(path.decode()).read_bytes() != b"GGUF":
            say(4, "gguf_init: invalid magic characters\n")
            return None
        lc.opened.append("model")
        return "model"

    def context_params():
        return types.SimpleNamespace(
            n_ctx=512, n_batch=2048, n_ubatch=512, n_threads=4, n_threads_batch=4, type_k=F16, type_v=F16,
            flash_attn_type=-1,
        )  # fmt: skip

    def init(model, params):
        if params.n_ctx > 2**20:
            say(4, "failed to allocate buffer for kv cache\n")
            return None
        lc.opened.append("state")
        lc.params = params
        return types.SimpleNamespace(params=params, memory=None, room=-(-params.n_ctx // 256) * 256, used=0)

    def clear(memory, data):
        engine.fresh()
        memory.used = 0

    def decode(state, batch):
        if lc.failing:
            say(3, "decode: no free slot\n")
            return lc.failing
        n = batch.n_tokens
        if n > state.params.n_batch or state.used + n > state.room:
            return 1
        if [batch.pos[i] for i in range(n)] != list(range(state.used, state.used + n)):
            return -1
        if any(batch.n_seq_id[i] != 1 or batch.seq_id[i][0] != 0 for i in range(n)):
            return -1
        wanted = [i for i in range(n) if batch.logits[i]]
        logits = engine.feed([batch.token[i] for i in range(n)])[wanted]
        state.used += n
        state.rows = np.concatenate([logits, np.full((n, engine.vocab), np.nan)]).astype(np.float32)
        return 0

    def batch_init(n, embd, n_seq_max):
        batch = types.SimpleNamespace(n_tokens=0, size=n)
        batch.token, batch.pos, batch.n_seq_id = ((ctypes.c_int32 * n)() for _ in range(3))
        batch.seq_id, batch.logits = [(ctypes.c_int32 * n_seq_max)() for _ in range(n)], (ctypes.c_int8 * n)()
        return batch

    def tokenize(vocabulary, raw, length, found, room, add_special, parse_special):
        ids = tokenizer.encode(raw[:length].decode()) if parse_special else [0]
        if len(ids) > room:
            return -len(ids)
        for i, id in enumerate(ids):
            found[i] = id
        return len(ids)

    def written(text, room, size):
        raw = text.encode()
        if room is not None:
            room.value = raw[: size - 1]
        return len(raw)

    lc.llama_log_set = log_set
    lc.llama_model_default_params = lambda: types.SimpleNamespace()
    lc.llama_model_load_from_file = load
    lc.llama_context_default_params = context_params
    lc.llama_init_from_model = init
    lc.llama_model_n_ctx_train = lambda model: trained
    lc.llama_model_get_vocab = lambda model: "vocabulary"
    lc.llama_vocab_n_tokens = lambda vocabulary: engine.vocab
    lc.llama_vocab_is_eog = lambda vocabulary, id: id in engine.stop_ids
    lc.llama_n_ctx = lambda state: state.room
    lc.llama_get_memory = lambda state: state
    lc.llama_memory_clear = clear
    lc.llama_batch_init, lc.llama_batch_free = batch_init, lambda batch: None
    lc.llama_decode = decode
    lc.llama_get_logits = lambda state: state.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    lc.llama_tokenize = tokenize
    lc.llama_model_desc = lambda model, room, size: written(f"qwen35 ?B {kind}", room, size)
    lc.llama_model_meta_count = lambda model: len(METADATA)
    keys = list(METADATA)
    lc.llama_model_meta_key_by_index = lambda model, i, room, size: written(keys[i], room, size)
    lc.llama_model_meta_val_str_by_index = lambda model, i, room, size: written(METADATA[keys[i]], room, size)
    lc.llama_free = lambda state: lc.opened.remove("state")
    lc.llama_model_free = lambda model: lc.opened.remove("model")
    return lc
