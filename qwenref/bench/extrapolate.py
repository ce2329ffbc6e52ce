"""From one repeat of the 27B model (three DeltaNet layers, one of attention) to the whole of it, on paper."""

from statistics import median

from qwenref.bench.shapes import REPEATS_27B, WHOLE_27B

CONTEXTS = (4096, 32_768)


def whole_27b(run):
    """What the whole model would take: layers by the repeat, the head by its bytes at the rate decoding reached."""
    import qwenref

    decode, prefill = (median(run.times[f"qwenref {phase}"]) for phase in ("decode", "prefill"))
    per_byte = decode / run.weight_bytes()
    counts = qwenref.parameters(WHOLE_27B)
    own_head, head = run.model.lm_head.weight.nbytes * per_byte, 2 * counts.lm_head * per_byte
    step = REPEATS_27B * (decode - own_head) + head
    prompt = REPEATS_27B * prefill + head
    sizes = {tokens: qwenref.cache_size(WHOLE_27B, tokens).total for tokens in CONTEXTS}
    return {
        "repeats": REPEATS_27B,
        "decode_seconds": step,
        "decode_tokens_per_second": 1 / step,
        "prefill_tokens": run.length,
        "prefill_seconds": prompt,
        "prefill_tokens_per_second": run.length / prompt,
        "weights": counts.nbytes,
        "cache": {str(tokens): size for tokens, size in sizes.items()},
        "memory": {str(tokens): counts.nbytes + size for tokens, size in sizes.items()},
    }
