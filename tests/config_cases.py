"""Configs that tests of config.json start from, and small ways to change one key of them."""

import json

from qwenref import _C

LINEAR, FULL = "linear_attention", "full_attention"
ROPE_27B = {
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
TEXT_27B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": [FULL if i % 4 == 3 else LINEAR for i in range(64)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "use_cache": True,
    "rope_parameters": ROPE_27B,
}
VISION_27B = {
    "model_type": "qwen3_5",
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
CONFIG_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT_27B,
    "vision_config": VISION_27B,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
}
# Small, every key of the text section given, rotary width 16.
SMALL = TEXT_27B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}


def read(config, **more):
    return _C.Config.from_json(json.dumps(config), **more)


def small(**changes):
    """SMALL with keys changed; ... removes one."""
    return {key: value for key, value in (SMALL | changes).items() if value is not ...}


def composite(text=None, vision=None, **root):
    """CONFIG_27B with keys of its sections and root changed; ... removes one."""
    config = CONFIG_27B | {"text_config": TEXT_27B | (text or {}), "vision_config": VISION_27B | (vision or {})} | root
    for section in (config, config["text_config"], config["vision_config"]):
        if isinstance(section, dict):
            for key in [key for key, value in section.items() if value is ...]:
                del section[key]
    return config


def rope(**changes):
    return {key: value for key, value in (SMALL["rope_parameters"] | changes).items() if value is not ...}
