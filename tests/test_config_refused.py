"""config.json: everything that is refused, by the first line of its message."""

import pytest
from config_cases import FULL, SMALL, composite, read, rope, small

from qwenref import _C, errors

WIDTH = "rope_parameters.partial_rotary_factor: found {}, expected head_dim 32 times it to be an even width from 2 to "
WIDTH += "head_dim"
BAD_TEXT = [
    # numbers
    ({"num_hidden_layers": 3.5}, "num_hidden_layers: found 3.5, expected a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: found 0, expected a positive integer"),
    ({"num_hidden_layers": 100000}, "num_hidden_layers: found 100000, expected at most 65536"),
    ({"hidden_size": -64}, "hidden_size: found -64, expected a positive integer"),
    ({"hidden_size": "64"}, 'hidden_size: found "64", expected a positive integer'),
    ({"hidden_size": True}, "hidden_size: found true, expected a positive integer"),
    ({"hidden_size": None}, "hidden_size: found null, expected a positive integer"),
    ({"hidden_size": [64]}, "hidden_size: found [64], expected a positive integer"),
    ({"hidden_size": {}}, "hidden_size: found an object, expected a positive integer"),
    ({"vocab_size": 2**53}, "vocab_size: found 9007199254740992, expected a positive integer"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: found 0, expected a positive finite number"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps: found -1e-06, expected a positive finite number"),
    ({"initializer_range": -0.1}, "initializer_range: found -0.1, expected a finite number of 0 or more"),
    ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers: found -1, expected an integer of 0 or more"),
    ({"eos_token_id": [1, 2.5]}, "eos_token_id: found 2.5, expected an integer of 0 or more"),
    # words and flags
    ({"hidden_act": "gelu"}, 'hidden_act: found "gelu", expected silu or swish'),
    ({"hidden_act": "sil"}, 'hidden_act: found "sil", expected silu or swish'),
    ({"hidden_act": "silu|swish"}, 'hidden_act: found "silu|swish", expected silu or swish'),
    ({"output_gate_type": "sigmoid"}, 'output_gate_type: found "sigmoid", expected silu or swish'),
    ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype: found "bfloat16", expected float32'),
    ({"attn_output_gate": False}, "attn_output_gate: found false, expected true: the other form is not supported"),
    ({"attention_bias": 1}, "attention_bias: found 1, expected true or false"),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings: found "yes", expected true or false'),
    (
        {"mtp_use_dedicated_embeddings": True},
        "mtp_use_dedicated_embeddings: found true, expected false: the other form is not supported",
    ),
    ({"mlp_only_layers": [1]}, "mlp_only_layers: found [1], expected an empty list: such layers are not supported"),
    # layer kinds
    ({"layer_types": [FULL] * 3}, "layer_types: found a list of 3, expected a list of num_hidden_layers = 4"),
    ({"layer_types": FULL}, 'layer_types: found "full_attention", expected a list of num_hidden_layers = 4'),
    (
        {"layer_types": [FULL, "sliding_attention", FULL, FULL]},
        'layer_types[1]: found "sliding_attention", expected linear_attention or full_attention',
    ),
    ({"full_attention_interval": 0}, "full_attention_interval: found 0, expected a positive integer"),
    # relations
    ({"num_key_value_heads": 3}, "num_attention_heads: found 4, expected a multiple of num_key_value_heads = 3"),
    ({"linear_num_value_heads": 5}, "linear_num_value_heads: found 5, expected a multiple of linear_num_key_heads = 2"),
    (
        {"vocab_size": 2**40, "hidden_size": 2**40},
        "vocab_size * hidden_size: found a product beyond 63 bits, expected sizes of a model",
    ),
    # rope
    ({"rope_parameters": rope(rope_type="yarn")}, 'rope_parameters.rope_type: found "yarn", expected default or mrope'),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        'rope_scaling.type: found "linear", expected default or mrope',
    ),
    ({"rope_parameters": [1]}, "rope_parameters: found [1], expected an object"),
    ({"rope_parameters": rope(rope_theta=0)}, "rope_parameters.rope_theta: found 0, expected a positive finite number"),
    ({"rope_theta": "1e4"}, 'rope_theta: found "1e4", expected a positive finite number'),
    (
        {"rope_parameters": {"full_attention": rope()}},
        "rope_parameters.full_attention: found an object, expected one set of rope parameters for all layers",
    ),
    (
        {"rope_parameters": rope(mrope_interleaved=False)},
        "rope_parameters.mrope_interleaved: found false, expected true: sections in blocks are not supported",
    ),
    (
        {"rope_parameters": rope(mrope_section=[3, 3, 3])},
        "rope_parameters.mrope_section: found [3, 3, 3], expected counts that add up to 8",
    ),
    (
        {"rope_parameters": rope(mrope_section=[2**52, 2**52, 2**52])},
        "rope_parameters.mrope_section: found [4503599627370496, 4503599627370496, 4503599627370496], "
        "expected counts that add up to 8",
    ),
    (
        {"rope_parameters": rope(mrope_section=[4, 4, 0])},
        "rope_parameters.mrope_section: found [4, 4, 0], expected counts the interleaving can give: it gives [5, 3, 0]",
    ),
    (
        {"rope_parameters": rope(mrope_section=[4, 4])},
        "rope_parameters.mrope_section: found [4, 4], expected a list of 3 counts",
    ),
    (
        {"rope_parameters": rope(mrope_section=[4, 5, -1])},
        "rope_parameters.mrope_section: found -1, expected an integer of 0 or more",
    ),
    ({"mrope_section": [4, 2, 2]}, "mrope_section: found [4, 2, 2], expected it inside rope_parameters"),
    ({"rope_parameters": rope(partial_rotary_factor=0.1)}, WIDTH.format(0.1)),  # 3
    ({"rope_parameters": rope(partial_rotary_factor=0.03)}, WIDTH.format(0.03)),  # 0
    ({"rope_parameters": rope(partial_rotary_factor=1.5)}, WIDTH.format(1.5)),
    ({"rope_parameters": rope(partial_rotary_factor=1e300)}, WIDTH.format("1e+300")),
    # what kind of model
    (
        {"model_type": "qwen3_5_moe_text"},
        'model_type: found "qwen3_5_moe_text", expected qwen3_5 or qwen3_5_text',
    ),
    ({"model_type": "qwen3_next"}, 'model_type: found "qwen3_next", expected qwen3_5 or qwen3_5_text'),
    ({"model_type": ...}, "model_type: found nothing, expected qwen3_5 or qwen3_5_text"),
    ({"model_type": 5}, "model_type: found no string, expected qwen3_5 or qwen3_5_text"),
    (
        {"architectures": ["LlamaForCausalLM"]},
        'architectures: found "LlamaForCausalLM", expected Qwen3_5ForConditionalGeneration or Qwen3_5ForCausalLM',
    ),
    (
        {"architectures": ["Qwen3_5ForConditionalGeneration"]},
        'architectures: found "Qwen3_5ForConditionalGeneration", expected Qwen3_5ForCausalLM for model_type '
        "qwen3_5_text",
    ),
    (
        {"architectures": "Qwen3_5ForCausalLM"},
        'architectures: found "Qwen3_5ForCausalLM", expected a list of class names',
    ),
]
BAD_COMPOSITE = [
    (composite({"num_hidden_layers": 3.5}), "text_config.num_hidden_layers: found 3.5, expected a positive integer"),
    (
        composite(text_config=...),
        "text_config: found nothing, expected an object (a text-only file has model_type qwen3_5_text)",
    ),
    (composite(vision_config=3), "vision_config: found 3, expected an object"),
    (composite({"model_type": "qwen3"}), 'text_config.model_type: found "qwen3", expected qwen3_5_text'),
    (composite(vision={"model_type": "siglip"}), 'vision_config.model_type: found "siglip", expected qwen3_5_vision'),
    (composite(hidden_size=4096), "hidden_size: found at the root, expected it inside text_config"),
    (composite(rope_theta=1e6), "rope_theta: found at the root, expected it inside text_config"),
    (composite(image_token_id=248320), "image_token_id: found 248320, expected an id below vocab_size = 248320"),
    (composite(video_token_id=248056), "video_token_id: found 248056, expected another id than image_token_id"),
    (
        composite(language_model_only=True),
        "language_model_only: found true, expected false: the other form is not supported",
    ),
    (
        composite(vision={"out_hidden_size": ...}),
        "vision_config.out_hidden_size: found 3584, expected text_config.hidden_size = 5120",
    ),
    (
        composite(vision={"num_heads": 7}),
        "vision_config.hidden_size: found 1152, expected a multiple of num_heads = 7",
    ),
    (
        composite(vision={"num_heads": 64}),
        "vision_config.hidden_size: found head width 18, expected a multiple of 4",
    ),
    (
        composite(vision={"num_position_embeddings": 2305}),
        "vision_config.num_position_embeddings: found 2305, expected a square",
    ),
    (composite(vision={"hidden_act": "gelu"}), 'vision_config.hidden_act: found "gelu", expected gelu_pytorch_tanh'),
    (
        composite(vision={"deepstack_visual_indexes": [8, 16]}),
        "vision_config.deepstack_visual_indexes: found [8, 16], expected an empty list: such layers are not supported",
    ),
    (
        composite(vision={"patch_size": [16, 16]}),
        "vision_config.patch_size: found [16, 16], expected a positive integer",
    ),
    (
        composite(vision={"rope_parameters": {"rope_type": "yarn"}}),
        'vision_config.rope_parameters.rope_type: found "yarn", expected axial or default',
    ),
]


@pytest.mark.parametrize(
    ("config", "line"),
    [*((small(**changes), line) for changes, line in BAD_TEXT), *BAD_COMPOSITE],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_refused_by_name_in_one_line(config, line):
    with pytest.raises(errors.ConfigError) as caught:
        read(config)
    assert str(caught.value).splitlines()[0] == f"config.json: {line}"


@pytest.mark.parametrize("place", ["root", "text_config", "vision_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_checkpoints_are_beyond_us(place, key):
    config = composite()
    (config if place == "root" else config[place])[key] = {"quant_method": "fp8"}
    where = key if place == "root" else f"{place}.{key}"
    with pytest.raises(errors.CapabilityMissing) as caught:
        read(config, source="q/config.json")
    line = f'q/config.json: {where}: found quant_method "fp8", expected an unquantised checkpoint'
    assert str(caught.value).splitlines()[0] == line


def test_several_faults_come_at_once():
    with pytest.raises(errors.ConfigError) as caught:
        read(composite({"hidden_size": 0, "hidden_act": "relu"}, {"depth": -1}))
    assert str(caught.value).splitlines() == [
        "config.json: 3 faults",
        "    text_config.hidden_size: found 0, expected a positive integer",
        '    text_config.hidden_act: found "relu", expected silu or swish',
        "    vision_config.depth: found -1, expected a positive integer",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "line 1, column 1: found the end of the text, expected well-formed JSON"),
        (b"\xff\xfe", "found bytes that are not UTF-8, expected JSON in UTF-8"),
        ('"\udc80"', "found bytes that are not UTF-8, expected JSON in UTF-8"),
        ("\ufeff{}", "found a byte order mark, expected plain UTF-8"),
        ("[]", "found JSON that is no object, expected an object of keys"),
        ('{"rms_norm_eps": NaN}', "line 1, column 18: found NaN}, expected a JSON value"),
        ('{"a": 1, "a": 2}', 'top level: found the key "a" twice, expected it once'),
        ('{"a": 1%s}' % ("0" * 512), f"line 1, column 7: found 1{'0' * 22}, expected a number of fewer digits"),
        ('{"a": 1} junk', "line 1, column 10: found junk, expected a JSON value"),
        ('{"a": 1', "line 1, column 8: found the end of the text, expected well-formed JSON"),
        ("[" * 100000, "line 1, column 65: found [[[[[[[[[[[[[[[[[[[[[[[, expected less nesting"),
        ('{"model_type": "qwen3_5_text", "hidden_size": 1e999}', None),
        ('{"model_type": "qwen3_5_text", "hidden_size": ' + "9" * 400 + "}", None),
        ('{"model_type": "qwen3_5_text", "x": "\\ud800"}', None),
    ],
)
def test_text_that_is_no_config(text, line):
    with pytest.raises(errors.ConfigError) as caught:
        _C.Config.from_json(text)
    assert str(caught.value).startswith("config.json: ")
    assert line is None or str(caught.value) == f"config.json: {line}"


def test_from_json_takes_text_only():
    for wrong in (None, 3, {"model_type": "qwen3_5_text"}, bytearray(b"{}")):
        with pytest.raises(TypeError, match="expected the text of a config.json"):
            _C.Config.from_json(wrong)
    with pytest.raises(TypeError):
        _C.Config()
    assert read(SMALL, source="x" * 5000).source == "config.json"
