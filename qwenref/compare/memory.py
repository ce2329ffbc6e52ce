"""What the reference's own passes of a comparison need in memory, said before anything is scored."""

from qwenref.compare.errors import MemoryBudget
from qwenref.compare.scoring import BLOCK, tokens_at_once
from qwenref.errors import compose
from qwenref.pages import memory_left
from qwenref.sizes import cache_size, memory

_WIDTH = {"fp64": 8, "fp32": 4}  # bytes of a value; with a truth in float32 the rounding variants need most
_HELD = 3  # arrays of a kind at once: what goes in, what comes out, and one between
_OF_A_LOGIT = 3 * 8  # bytes that log-probabilities of a few rows at a time take: themselves, negated, and their order


def needed(model, tokens, truth="fp64", new=0):
    """Bytes, about, of a pass over so many tokens, the last `new` of them asked for, beside the weights in their files.

    A call has the logits of all it takes; under a fault it takes everything, and has those that are asked for.
    """
    config, width = model.config.text_config, _WIDTH[truth]
    dtype = f"float{8 * width}"
    fed = min(tokens, tokens_at_once(config.vocab_size))
    inside = _HELD * fed * (config.num_attention_heads * tokens + config.intermediate_size) * width
    logits = config.vocab_size * (max(fed, new) * width + min(tokens, BLOCK) * _OF_A_LOGIT)
    return cache_size(model, tokens, kv_dtype=dtype, state_dtype=dtype).total + inside + logits


def check_memory(model, suite, truth="fp64", workers=None, limit=None):
    """MemoryBudget where a prompt of a Suite needs more than `limit` bytes, None: what is left."""
    limit = memory_left() if limit is None else limit
    asked = {(len(item.ids) + item.new, item.new) for item in suite.prompts} or {(1, 0)}
    at_once = workers or 1
    sizes = {each: max((needed(model, n, each, new), n) for n, new in asked) for each in _WIDTH}
    need, tokens = sizes[truth][0] * at_once, sizes[truth][1]
    if need <= limit:
        return
    less = sizes["fp32"][0] * at_once
    found = f"{memory(need)} for {tokens:,} tokens in {truth}" + (f", {workers} workers" if workers else "")
    helps = truth != "fp32" and less <= limit
    do = f"--truth fp32, which needs {memory(less)}" if helps else "a suite of shorter prompts"
    do += ", or fewer workers" if at_once > 1 else ""
    raise MemoryBudget(compose("compare: not enough memory", found=found, expected=f"at most {memory(limit)}", do=do))
