"""What a checkpoint's files are, by content: the part of `config()` that two engines on one model have in common."""

import hashlib
from pathlib import Path

from qwenref.hub import read_json
from qwenref.template import find_templates

_WEIGHTS = ("*.safetensors", "*.gguf", "openvino_model.bin", "*.onnx.data")
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "eos_token_id")


def model_facts(folder):
    """{"id", "config_sha256", "tokenizer_sha256", "template_sha256", "generation_config_sha256", "shards"} of a folder.

    None for a file that is not there; shards are {name: bytes}, their content is not read.
    """
    folder = Path(folder)
    template = find_templates(folder).get("default")
    shards = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    return {
        "id": folder.name,
        "config_sha256": _sha256(folder / "config.json"),
        "tokenizer_sha256": _sha256(folder / "tokenizer.json"),
        "template_sha256": None if template is None else sha256(template[0]),
        "generation_config_sha256": _sha256(folder / "generation_config.json"),
        "shards": {path.name: path.stat().st_size for path in shards},
    }


def sampling_defaults(folder):
    """What generation_config.json has an engine do unless a request says otherwise."""
    said = read_json(Path(folder) / "generation_config.json")
    return {name: said[name] for name in _DEFAULTS if name in said}


def gguf_facts(path, template=None):
    """The same of a GGUF file, with the chat template that lies in it."""
    path = Path(path)
    return {"id": path.name, "template_sha256": sha256(template), "shards": {path.name: path.stat().st_size}}


def sha256(text):
    """Of a text in UTF-8, as of the file that holds it; None of None."""
    return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else None


def _sha256(path):
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
