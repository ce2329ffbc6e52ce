"""What the message says when somebody asks a module for a part that is elsewhere, or that others call differently.

Only messages: a name from another library is never taken for ours.  Called when a lookup has failed, so it costs the
lookups that succeed nothing.
"""

_MIXERS = ("attn", "attention", "mixer", "self_attention", "temporal_block")
_IN_LAYER = {
    "feed_forward": "mlp",
    "ffn": "mlp",
    "ln_1": "input_layernorm",
    "ln1": "input_layernorm",
    "attention_norm": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "ln2": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_IN_STACK = {
    "layers": "layers",
    "blocks": "layers",
    "h": "layers",
    "embed_tokens": "embed_tokens",
    "embed": "embed_tokens",
    "wte": "embed_tokens",
    "tok_embeddings": "embed_tokens",
    "norm": "norm",
    "ln_f": "norm",
    "ln_final": "norm",
    "rotary_emb": "rotary_emb",
}
_IN_HEAD = ("unembed", "output_layer", "embed_out")


def from_layer(layer, name):
    """Message for an attribute a DecoderLayer does not have, or None for the usual one."""
    if name not in ("linear_attn", "self_attn", *_MIXERS, *_IN_LAYER):
        return None
    own, kind, others = "self_attn", "full attention", "DeltaNet"
    if layer.layer_type == "linear_attention":
        own, kind, others = "linear_attn", "Gated DeltaNet", "attention"
    if name in _IN_LAYER:
        return f"a DecoderLayer has no {name}; here it is {_IN_LAYER[name]}"
    text = f"layer {layer.layer_idx} is {kind} and has no {name}; its mixer is {own}"
    if name in _MIXERS or name == own:
        return text
    there = [str(i) for i, of in enumerate(layer.config.layer_types) if of != layer.layer_type]
    return f"{text} ({others} layers: {', '.join(there[:4]) or 'none'}{', …' if len(there) > 4 else ''})"


def from_stack(module, prefix, name):
    """Message for a part of the text model that `module` has under `prefix`, or None for the usual one."""
    if name in _IN_HEAD and prefix.startswith("model."):
        return f"{type(module).__name__} has no {name}; here it is lm_head"
    if name not in _IN_STACK or not prefix and name == _IN_STACK[name]:
        return None
    return f"{type(module).__name__} has no {name}; here it is {prefix}{_IN_STACK[name]}"
