"""The weights of a text model as a GGUF file in bf16, for llama.cpp (architecture qwen35) to run; without a vocabulary.

What differs from a checkpoint: value heads are tiled over the key heads, not grouped under them, norm weights have
their 1 added, the decay is stored as -exp(A_log), and everything that is no matrix is in float32.
"""

import os
import struct

import ml_dtypes
import numpy as np

from qwenref.errors import CapabilityMissing, compose

ALIGNMENT = 32
_F32, _BF16 = 0, 30  # tensor types
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of values
_PACKED = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}

_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}
_OUTER = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "weight": "output.weight"}


def gguf_name(path):
    """The name of a parameter there: "layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    _, layers, inside = path.rpartition("layers.")
    if layers:
        number, _, rest = inside.partition(".")
        return f"blk.{number}.{_BLOCK[rest]}"
    return _OUTER[path.removeprefix("model.").removeprefix("language_model.").removeprefix("lm_head.")]


def _tiled(text):
    """(places of the value heads, of their channels): head j of key head k goes from k n + j to j keys + k."""
    keys, heads, width = text.linear_num_key_heads, text.linear_num_value_heads, text.linear_value_head_dim
    order = np.arange(heads).reshape(keys, heads // keys).T.reshape(-1)
    return order, (order[:, None] * width + np.arange(width)).reshape(-1)


def converted(path, array, text):
    """The numbers of a parameter as the file has them: bfloat16 for matrices, float32 for the rest."""
    order, channels = _tiled(text)
    leaf = path.rpartition("linear_attn.")[2]
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = np.concatenate([np.arange(2 * text.key_dim), 2 * text.key_dim + channels])
        array = array.reshape(len(array), -1)[rows]
    elif leaf == "in_proj_z.weight":
        array = array[channels]
    elif leaf == "out_proj.weight":
        array = array[:, channels]
    elif leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        array = array[order]
    if array.ndim == 2 and leaf != "conv1d.weight":
        return np.ascontiguousarray(array, ml_dtypes.bfloat16)
    array = np.ascontiguousarray(array, np.float32)
    if leaf == "A_log":
        return -np.exp(array)
    return array + np.float32(1) if path.endswith("norm.weight") and leaf != "norm.weight" else array


def metadata(text):
    """[(key, type, value)] of what llama.cpp has to know of the model."""
    arch = "qwen35"
    numbers = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": text.intermediate_size,
        "vocab_size": text.vocab_size,
        "full_attention_interval": text.full_attention_interval or 4,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": text.num_key_value_heads,
        "attention.key_length": text.head_dim,
        "attention.value_length": text.head_dim,
        "rope.dimension_count": text.rotary_dim,
        "ssm.conv_kernel": text.linear_conv_kernel_dim,
        "ssm.state_size": text.linear_key_head_dim,
        "ssm.group_count": text.linear_num_key_heads,
        "ssm.time_step_rank": text.linear_num_value_heads,
        "ssm.inner_size": text.value_dim,
    }
    recurrent = [kind == "linear_attention" for kind in text.layer_types]
    return [
        ("general.architecture", _STRING, arch),
        ("general.file_type", _UINT32, 32),  # mostly bf16
        ("tokenizer.ggml.model", _STRING, "none"),
        *((f"{arch}.{key}", _UINT32, value) for key, value in numbers.items()),
        (f"{arch}.attention.layer_norm_rms_epsilon", _FLOAT32, text.rms_norm_eps),
        (f"{arch}.rope.freq_base", _FLOAT32, text.rope_theta),
        (f"{arch}.rope.dimension_sections", (_ARRAY, _INT32), [*text.mrope_section, 0]),
        (f"{arch}.attention.recurrent_layers", (_ARRAY, _BOOL), recurrent),
    ]


def _text(word):
    raw = word.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind, value):
    if kind == _STRING:
        return struct.pack("<I", kind) + _text(value)
    if isinstance(kind, tuple):
        head = struct.pack("<IIQ", *kind, len(value))
        return head + b"".join(struct.pack(_PACKED[kind[1]], item) for item in value)
    return struct.pack("<I", kind) + struct.pack(_PACKED[kind], value)


def write_gguf(model, path):
    """Write the text model as one file; CapabilityMissing where the format has no place for what it does."""
    text = model.config.text_config
    lacking = {
        "attention_bias": text.attention_bias,
        "key and value heads of different widths": text.linear_key_head_dim != text.linear_value_head_dim,
    }
    if any(lacking.values()):
        raise CapabilityMissing(
            compose("GGUF: no place for a part of this model", found=next(what for what, has in lacking.items() if has))
        )
    head = _OUTER["weight"]
    tied = model.config.tie_word_embeddings
    plan = [(n, gguf_name(n)) for n, _ in model.named_parameters() if not (tied and gguf_name(n) == head)]
    parameters, infos, end = dict(model.named_parameters()), [], 0
    for name, there in plan:
        parameter = parameters[name]
        small = parameter.ndim != 2  # conv1d, too
        shape = [n for i, n in enumerate(parameter.shape) if parameter.ndim < 3 or i != 1]
        nbytes = parameter.size * (4 if small else 2)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(there) + dims + struct.pack("<IQ", _F32 if small else _BF16, end))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    pairs = metadata(text)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(plan), len(pairs))
    header += b"".join(_text(key) + _value(kind, value) for key, kind, value in pairs) + b"".join(infos)
    part = f"{path}.part"  # so that what stands under the name is always whole
    with open(part, "wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for name, _ in plan:
            raw = converted(name, np.asarray(parameters[name]), text).tobytes()
            file.write(raw + bytes(-len(raw) % ALIGNMENT))
    os.replace(part, path)
