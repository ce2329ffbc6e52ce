"""What engines have in common that run a folder in which the checkpoint's own files lie, or what was made of them."""

from pathlib import Path

from qwenref.engines.hf_tokenizer import open_tokenizer
from qwenref.engines.model_files import model_facts, sampling_defaults
from qwenref.engines.stepping import Stepping
from qwenref.errors import CapabilityMissing, CheckpointError, compose
from qwenref.hub import read_json
from qwenref.tokenizer import find_stop_ids


class OfFolder(Stepping):
    """`Stepping` over a folder; `exported` says that its config files are no longer those of the checkpoint."""

    exported = False

    def __init__(self, folder, name, sizes=None, stop_ids=None):
        self.folder, self.name = Path(folder), name
        self.vocab, self.limit = text_sizes(folder) if sizes is None else sizes
        self.stop_ids = tuple(find_stop_ids(folder).ids if stop_ids is None else stop_ids)

    def described(self, name, **facts):
        """`config()` of these: the facts given, and those of the files."""
        model = model_facts(self.folder)
        if self.exported:
            model |= {"config_sha256": None, "generation_config_sha256": None}
        return {
            "name": name,
            "quant": None,
            "tp": 1,
            **facts,
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "defaults": sampling_defaults(self.folder),
            "model": model,
        }


def text_sizes(folder):
    """(rows of logits, positions or None) by the config.json of a folder."""
    config = read_json(Path(folder) / "config.json")
    config = config.get("text_config", config)
    if "vocab_size" not in config:
        raise CheckpointError(compose(f"{folder}: no config.json with a vocab_size", expected="a model's folder"))
    return config["vocab_size"], config.get("max_position_embeddings")


def with_file(rest, name, **parts):
    """The path of a folder that has a file of this name; CheckpointError with `parts`, as of `compose`, where not."""
    folder = Path(rest).expanduser()
    if not (folder / name).is_file():
        raise CheckpointError(compose(f"{rest}: no {name}", **parts))
    return folder


def tokenizer_if_any(folder):
    """transformers' tokenizer of a folder; None without one, or without that package."""
    try:
        return open_tokenizer(folder)
    except CapabilityMissing:
        return None
