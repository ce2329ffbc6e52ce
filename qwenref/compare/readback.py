"""Step 12 of a comparison: what an engine says of itself, against the checkpoint."""

import re

from qwenref.compare.options import PRECISIONS, is_quantised

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "bf16": 16, "f16": 16, "f32": 32, "float64": 64}


def read_back(judge):
    """Findings, in a Judge, for settings that an engine says are others, or coarser, than the checkpoint's."""
    seen = judge.seen
    seen.differing_config += list(_coarser(judge)) + list(_others(judge))
    for differing in seen.differing_config:
        words = f"{differing['key']}: {differing['engine']} where the reference has {differing['ref']}"
        seen.find("config_mismatch", "warning", words, differing)
        judge.path.append(f"step 12: {words}")
    quant = quantised(judge)
    if quant:
        seen.find("weights-differ", "warning", f"the engine's weights are {quant}, the reference's not")


def quantised(judge):
    """The type of few bits that the engine's weights are said to have and the reference's have not, or None."""
    if judge.own_weights:
        return None
    quant = judge.seen.config.get("quant")
    if quant and str(quant).lower().removeprefix("all ") not in ("none", *BITS):  # "all F32" says llama.cpp's server
        return quant
    return judge.options.precision if is_quantised(judge.options.precision) else None


def _coarser(judge):
    claimed = judge.options.precision
    for key, ref in (("state_dtype", "float32"), ("kv_dtype", claimed)):
        value = judge.seen.config.get(key)
        bits = _bits(value)
        if bits is not None and bits < (_bits(ref) or 16):
            yield {"key": key, "ref": ref, "engine": value}


def _bits(name):
    """Of a type by its name: "fp8_e4m3", "q8_0"; None of words that name none, such as "auto"."""
    word = str(name).lower()
    word = PRECISIONS.get(word, word)
    digits = re.search(r"\d+", word)
    return BITS.get(word) or (int(digits[0]) if digits else None)


def _others(judge):
    said, text = judge.seen.config, judge.model.config.text_config
    known = {"rms_norm_eps": text.rms_norm_eps, "rope_theta": text.rope_parameters["rope_theta"]}
    for key, ref in known.items():
        value = (said.get("flags") or {}).get(key, said.get(key))
        if value is not None and value != ref:
            yield {"key": key, "ref": ref, "engine": value}
    stops = said.get("stop_ids")
    if stops is not None and judge.stops and set(stops) != set(judge.stops):
        yield {"key": "stop_ids", "ref": sorted(judge.stops), "engine": sorted(stops)}
