"""The tokenizer that transformers opens for a folder, which several engines use as theirs."""

from pathlib import Path

from qwenref.engines.packages import imported


def open_tokenizer(folder):
    """transformers' tokenizer of a folder, None where it has none."""
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    return imported("transformers", "test").AutoTokenizer.from_pretrained(folder)
