"""What a comparison of this kind, and this one, could not have seen."""

_TIERS = {
    "B": "prefill apart from decode: the engine gives no log-probabilities of a prompt",
    "C": "other ids of the same text: the engine takes and gives text",
    "D": "whatever leaves the tokens as they are: the engine gives no log-probabilities",
}
_LONG = 4096  # positions from which on states and keys in few bits show
_ALWAYS = (
    "what changes no distribution: rotary positions of queries and keys shifted alike, the order of their sections in "
    "text",
)


def blind_spots(judge):
    """Sentences, of a Judge."""
    seen, found = judge.seen, []
    if seen.gives.tier in _TIERS:
        found.append(_TIERS[seen.gives.tier])
    longest = max((len(way.ids) for way in judge.numbers.ways), default=0)
    if longest < _LONG:
        found.append(f"recurrent states, keys and values in few bits: the longest text has {longest:,} tokens")
    if not seen.asked.get("strings"):
        found.append("the tokenizer: no strings were asked")
    if not seen.asked.get("conversations"):
        found.append("the chat template: no conversations were asked")
    if not seen.gives.config:
        found.append("settings: the engine says nothing of itself")
    if judge.undetectable:
        found.append(f"faults whose effect is lost in rounding here (undetectable): {', '.join(judge.undetectable)}")
    return [*found, *_ALWAYS]
