"""Makes checkpoint files for tests byte by byte, so that they owe nothing to the code under test."""

import json
import math
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
}
NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
NAMES = {np.dtype(dtype): name for name, dtype in NUMPY.items()}


def entry(dtype, shape, begin, end):
    """One row of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def nbytes(dtype, shape):
    bits = BITS[dtype] * math.prod(shape)
    assert bits % 8 == 0
    return bits // 8


def layout(tensors):
    """{name: (dtype, shape)} -> the header that puts them one after the other, and the size of the data."""
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        header[name] = entry(dtype, shape, position, position + nbytes(dtype, shape))
        position = header[name]["data_offsets"][1]
    return header, position


def raw(path, header, data=b"", length=None, pad=8):
    """Any header (object, text or bytes), any data, any claimed length; with pad=0 the data begins where it falls."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    if pad:
        header += b" " * (-len(header) % pad)
    Path(path).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return Path(path)


def shard(path, arrays, metadata=None, pad=8):
    """A good file of {name: array}, in the order given."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    header, _ = layout({name: (NAMES[array.dtype], array.shape) for name, array in arrays.items()})
    if metadata is not None:
        header = {"__metadata__": metadata, **header}
    return raw(path, header, b"".join(array.tobytes() for array in arrays.values()), pad=pad)


def index(folder, weight_map, **metadata):
    """A folder's index; `weight_map` may be text for what json.dumps cannot say."""
    path = Path(folder) / "model.safetensors.index.json"
    text = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": metadata, "weight_map": weight_map})
    path.write_text(text)
    return path


def sharded(folder, shards):
    """A good folder from a list of {name: array}; returns the names of the files."""
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, arrays in zip(files, shards, strict=True):
        shard(Path(folder) / file, arrays)
    index(folder, {name: file for file, arrays in zip(files, shards, strict=True) for name in arrays})
    return files


def sparse(path, tensors):
    """A file of {name: (dtype, shape)} whose data is one hole: full size, no blocks on disk."""
    header, size = layout(tensors)
    raw(path, header)
    with open(path, "r+b") as file:
        file.truncate(Path(path).stat().st_size + size)
    return Path(path)


def sparse_sharded(folder, tensors, shards):
    """The same over several shards, in order, of about equal size."""
    share = sum(nbytes(*spec) for spec in tensors.values()) / shards
    parts, filled = [{} for _ in range(shards)], 0
    for name, spec in tensors.items():
        parts[min(int(filled / share), shards - 1)][name] = spec
        filled += nbytes(*spec)
    files = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    for file, part in zip(files, parts, strict=True):
        sparse(Path(folder) / file, part)
    index(folder, {name: file for file, part in zip(files, parts, strict=True) for name in part})
    return files


def text_27b(prefix="model.language_model."):
    """{name: (dtype, shape)} of the text part of Qwen3.5-27B: 851 tensors, untied, A_log and the gated norm in F32."""
    H, inner, vocab, layers = 5120, 17408, 248320, 64
    key, value, heads = 16 * 128, 48 * 128, 48
    out = {prefix + "embed_tokens.weight": ("BF16", (vocab, H))}
    for i in range(layers):
        rows = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
        if (i + 1) % 4 == 0:
            rows |= {"self_attn.q_proj.weight": (24 * 256 * 2, H), "self_attn.k_proj.weight": (4 * 256, H)}
            rows |= {"self_attn.v_proj.weight": (4 * 256, H), "self_attn.o_proj.weight": (H, 24 * 256)}
            rows |= {"self_attn.q_norm.weight": (256,), "self_attn.k_norm.weight": (256,)}
        else:
            rows |= {"linear_attn.in_proj_qkv.weight": (2 * key + value, H), "linear_attn.in_proj_z.weight": (value, H)}
            rows |= {"linear_attn.in_proj_a.weight": (heads, H), "linear_attn.in_proj_b.weight": (heads, H)}
            rows |= {"linear_attn.conv1d.weight": (2 * key + value, 1, 4), "linear_attn.out_proj.weight": (H, value)}
            rows |= {"linear_attn.dt_bias": (heads,), "linear_attn.A_log": (heads,), "linear_attn.norm.weight": (128,)}
        rows |= {
            "mlp.gate_proj.weight": (inner, H),
            "mlp.up_proj.weight": (inner, H),
            "mlp.down_proj.weight": (H, inner),
        }
        for name, shape in rows.items():
            kept = name in ("linear_attn.A_log", "linear_attn.norm.weight")
            out[f"{prefix}layers.{i}.{name}"] = ("F32" if kept else "BF16", shape)
    out[prefix + "norm.weight"] = ("BF16", (H,))
    out["lm_head.weight"] = ("BF16", (vocab, H))
    return out


def arrays():
    """One array of every dtype NumPy has, a scalar and an empty one among them."""
    rng = np.random.default_rng(7)
    out = {f"t.{name}": rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in NUMPY.items()}
    return out | {"scalar": np.float32(2.5), "empty": np.zeros((0, 4), np.int16), "ünï": np.arange(3, dtype=np.uint8)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def maps_of(folder):
    with open("/proc/self/maps") as lines:
        return [line for line in lines if str(folder) in line]


def descriptors():
    return len(os.listdir("/proc/self/fd"))
