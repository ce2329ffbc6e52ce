"""Engines of other packages with a stand-in in the package's place: specs that open them as a user would."""

import json
import shutil
import sys

from qwenref.hub import EMBEDDED
from standins import ik_llama, llama_cpp, mistralrs, mlx, openvino, ortgenai, vllm_here
from standins.engine import Tokenizer

OF_CHECKPOINTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip


def llama(monkeypatch, folder, engine, tokenizer, **how):
    module = llama_cpp.module(engine, tokenizer, **how)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    path = folder / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return f"llama-cpp:{path}", module


def of_ik_llama(monkeypatch, folder, engine, tokenizer, **how):
    modules = ik_llama.modules(engine, tokenizer, **how)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    return f"ik-llama:{folder / 'tiny.gguf'}", modules["ik_llama_cpp.llama"]


def folder_of(folder, *empty):
    """A folder with the embedded model's own files but its weights, and files in whose place something else stands."""
    for name in OF_CHECKPOINTS:
        shutil.copy(EMBEDDED["tiny"] / name, folder)
    for name in empty:
        (folder / name).write_bytes(b"")
    return folder


def of_openvino(monkeypatch, folder, engine, tokenizer, **how):
    module = openvino.module(engine, **how)
    monkeypatch.setitem(sys.modules, "openvino", module)
    return f"openvino:{folder_of(folder, 'openvino_model.xml', 'openvino_model.bin')}", module


def of_vllm(monkeypatch, folder, engine, tokenizer, **how):
    module = vllm_here.module(engine, tokenizer, **how)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return f"vllm:{folder_of(folder, 'model.safetensors')}", module


def of_mlx(monkeypatch, folder, engine, tokenizer, **how):
    modules = mlx.modules(engine, Tokenizer(engine, tokenizer), **how)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return f"mlx:{folder_of(folder, 'model.safetensors')}", modules


def of_ortgenai(monkeypatch, folder, engine, tokenizer, **how):
    module = ortgenai.module(engine, tokenizer, **how)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", module)
    folder = folder_of(folder, "model.onnx.data")
    (folder / "config.json").unlink()
    said = {"vocab_size": 1280, "context_length": 2**18, "eos_token_id": list(engine.stop_ids), "pad_token_id": 1254}
    (folder / "genai_config.json").write_text(json.dumps({"model": said}), encoding="utf-8")
    return f"ortgenai:{folder}", module


def of_mistralrs(monkeypatch, folder, engine, tokenizer, **how):
    module = mistralrs.module(engine, tokenizer, **how)
    monkeypatch.setitem(sys.modules, "mistralrs", module)
    return f"mistralrs:{folder_of(folder, 'model.safetensors')}", module


# Kind -> function (monkeypatch, an empty folder, the engine behind, its tokenizer, **how) -> (spec, module)
STANDIN = {
    "llama-cpp": llama, "openvino": of_openvino, "vllm": of_vllm, "mlx": of_mlx, "ortgenai": of_ortgenai,
    "ik-llama": of_ik_llama, "mistralrs": of_mistralrs,
}  # fmt: skip
PACKAGE = {
    "llama-cpp": "llama_cpp", "openvino": "openvino", "vllm": "vllm", "mlx": "mlx.core",
    "ortgenai": "onnxruntime_genai", "ik-llama": "ik_llama_cpp.llama", "mistralrs": "mistralrs",
}  # fmt: skip  # what has to be installed
