"""Small text models that differ in every way the family allows, for tests that run whole models."""

KINDS = {"l": "linear_attention", "f": "full_attention"}


def text_config(layers="lllf", *, rotary=0.25, section=None, heads=(4, 2), delta=(2, 4), head_dim=32, **changes):
    """A qwen3_5_text config as a dict.  `layers` letters, `heads` query and key heads, `delta` key and value heads."""
    frequencies = int(head_dim * rotary) // 2
    section = section or [frequencies - 2 * (frequencies // 3), frequencies // 3, frequencies // 3]
    if section[0] < section[1] or frequencies % 3 == 2:  # the interleaving gives what is over to T, then H
        section = [frequencies // 3 + (frequencies % 3 > 0), frequencies // 3 + (frequencies % 3 > 1), frequencies // 3]
    config = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "layer_types": [KINDS[letter] for letter in layers],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "linear_num_key_heads": delta[0],
        "linear_num_value_heads": delta[1],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": rotary,
            "mrope_section": section,
            "mrope_interleaved": True,
        },
    }
    return config | changes


# Every row is there for the ways in its name; the test ids of whole-model tests are these names.
CONFIGS = {
    "values 1 x keys, GQA 1": text_config("llf", heads=(2, 2), delta=(2, 2)),
    "values 2 x keys, GQA 2": text_config("lllf", heads=(4, 2), delta=(2, 4)),
    "values 3 x keys, GQA 4": text_config("lflf", heads=(4, 1), delta=(2, 6)),
    "GQA 6": text_config("lf", heads=(6, 1), delta=(1, 3)),
    "aperiodic layers": text_config("fllfflll", delta=(2, 4)),
    "tied embedding": text_config("lllf", tie_word_embeddings=True),
    "rotary half of the head": text_config("lllf", rotary=0.5),
    "conv width 2": text_config("llf", linear_conv_kernel_dim=2),
    "one attention layer": text_config("f"),
    "one DeltaNet layer": text_config("l", delta=(2, 6)),
    "only DeltaNet": text_config("lll"),
    "head dim unrelated to hidden": text_config("lllf", head_dim=64, hidden_size=40, heads=(3, 1)),
    "DeltaNet widths differ": text_config("lllf", linear_key_head_dim=8, linear_value_head_dim=24),
    "attention bias": text_config("lf", attention_bias=True),
    "27B proportions": text_config(
        "lllflllf", heads=(6, 1), delta=(2, 6), head_dim=64, hidden_size=128, linear_key_head_dim=32,
        linear_value_head_dim=32, intermediate_size=352,
    ),
}  # fmt: skip
