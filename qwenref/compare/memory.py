"""What the reference's own passes of a comparison need in memory, said before anything is scored."""

from qwenref.compare.errors import MemoryBudget
from qwenref.compare.scoring import tokens_at_once
from qwenref.errors import compose
from qwenref.pages import memory_limit
from qwenref.sizes import cache_size, memory

_WIDTH = {"fp64": 8, "fp32": 4}  # bytes of a value; with a truth in float32 the rounding variants need most
_HELD = 3  # arrays of a kind at once: what goes in, what comes out, and one between


def needed(model, tokens, truth="fp64"):
    """Bytes, about, of a pass over so many tokens beside the weights, which are read from their files."""
    config, width = model.config.text_config, _WIDTH[truth]
    dtype = f"float{8 * width}"
    fed = min(tokens, tokens_at_once(config.vocab_size))
    row = config.num_attention_heads * tokens + config.intermediate_size + config.vocab_size
    return cache_size(model, tokens, kv_dtype=dtype, state_dtype=dtype).total + _HELD * fed * row * width


def check_memory(model, suite, truth="fp64", workers=None, limit=None):
    """MemoryBudget where the longest prompt of a Suite needs more than `limit` bytes, None: what there is."""
    limit = memory_limit() if limit is None else limit
    tokens = max((len(item.ids) + item.new for item in suite.prompts), default=1)
    sizes = {each: needed(model, tokens, each) * (workers or 1) for each in _WIDTH}
    if sizes[truth] <= limit:
        return
    found = f"{memory(sizes[truth])} for {tokens:,} tokens in {truth}" + (f", {workers} workers" if workers else "")
    helps = truth != "fp32" and sizes["fp32"] <= limit
    do = f"--truth fp32, which needs {memory(sizes['fp32'])}" if helps else "a suite of shorter prompts"
    do += ", or fewer workers" if (workers or 1) > 1 else ""
    raise MemoryBudget(compose("compare: not enough memory", found=found, expected=f"at most {memory(limit)}", do=do))
