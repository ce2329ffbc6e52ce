"""The words of a verdict.  Nobody is called wrong: an engine is inside the reference's envelope, or outside of it."""

CAUSES = {
    "tokenizer": "the tokenizer gives other ids",
    "chat_template": "the chat template gives another prompt",
    "sampling_config": "sampling is not configured as declared",
    "stop_tokens": "other tokens end the answer",
    "weights": "the weights differ",
    "quantization": "the weights are quantised",
    "config": "a value of the configuration differs",
    "state_or_cache": "decoding from state and cache differs from one pass over all",
    "prefill_kernel": "one pass over all differs from decoding",
    "kernels": "an operation computes something else",
    "none": "none",
}
CONFIDENCES = {
    "proved": "ids, strings or settings differ",
    "named": "the same fault planted in the reference explains the error",
    "localised": "the first layer and site outside are known",
    "statistical": "by numbers alone",
}
TIERS = {
    "A": "ids in and out, log-probabilities of prompt and output",
    "B": "ids in and out, log-probabilities of the output only",
    "C": "text, with log-probabilities of the output",
    "D": "text only",
}
CLASSES = {
    "tie": "equal logits",
    "benign": "at most 4 sigma",
    "ambiguous": "above 4 sigma, below the critical value",
    "non-benign": "above the critical value",
}


def verdict(document):
    """The sentence a report begins with."""
    if document["arbiter"] is not None:
        return between(document["arbiter"])
    engine = f"engine {document['engine']['name']}"
    return {
        "AGREE": f"{engine} agrees with the reference, value by value",
        "AGREE_WITHIN_NOISE": f"{engine} is inside the reference's envelope",
        "DIVERGED": f"{engine} is outside the reference's envelope",
        "INCONCLUSIVE": f"undecided: not enough to tell whether {engine} is inside the reference's envelope",
        "INVALID": f"{engine} was not compared: the input is not valid",
    }[document["status"]]


def between(arbiter):
    """The same of two engines: the one outside is named."""
    outside, names = arbiter["outside"], [report["engine"]["name"] for report in arbiter["reports"]]
    if outside:
        if len(outside) == len(names):
            return f"both: engines {' and '.join(outside)} are outside the reference's envelope"
        return f"engine {outside[0]} is outside the reference's envelope"
    near = arbiter.get("near_tie")
    if near is not None:
        return f"neither; near-tie at position {near['pos']:,} of prompt {near['prompt']}"
    if any(report["status"] in ("INCONCLUSIVE", "INVALID") for report in arbiter["reports"]):
        return "undecided: not enough to tell which engine is inside the reference's envelope"
    return "neither: both engines are inside the reference's envelope"
