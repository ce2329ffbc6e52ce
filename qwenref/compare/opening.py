"""What a comparison starts from: the reference's model, and ids from a file; checked before any work."""

import json
import os

import numpy as np

from qwenref.compare.errors import BadTokenIds, ModelFilesError, UnsupportedModel
from qwenref.errors import CheckpointError, ConfigError, InputError, ModelNotFound, compose


def reference(name):
    """The model of a folder, "tiny" or a hub name: ModelFilesError where files lack, UnsupportedModel for another."""
    import qwenref

    try:
        model = qwenref.from_pretrained(name)
    except ConfigError as error:
        kind = ModelFilesError if "no such file" in str(error) else UnsupportedModel
        raise kind(str(error)) from error
    except CheckpointError as error:
        raise ModelFilesError(str(error)) from error
    except ModelNotFound as error:
        if not os.path.isdir(name):
            raise
        raise ModelFilesError(str(error)) from error
    if not os.path.exists(os.path.join(model.path, "tokenizer.json")):
        raise ModelFilesError(
            compose(
                f"{model.path}: no tokenizer.json",
                do="copy it from the published model; ids of a suite are made with it",
            )
        )
    return model


def ids_of(path, model=None):
    """Token ids of a file: a JSON list, or numbers apart; of the model's vocabulary, and no more than its positions."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            words = file.read()
    except ValueError as error:
        raise InputError(compose(f"{path}: no token ids", found=error)) from error
    try:
        found = json.loads(words) if words.lstrip().startswith("[") else words.replace(",", " ").split()
    except (ValueError, RecursionError) as error:
        raise InputError(compose(f"{path}: no token ids", found=error, expected="a JSON list, or numbers")) from error
    if not found:
        raise BadTokenIds(compose(f"{path}: no token ids", expected="at least one"))
    return checked_ids([_whole(word) for word in found], path, model)


def checked_ids(ids, where, model=None):
    """The ids, all of them whole numbers of the vocabulary; the error has the `index` of the first that is not."""
    text = None if model is None else model.config.text_config
    vocab = np.iinfo(np.int64).max if text is None else text.vocab_size
    for index, id in enumerate(ids):
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab:
            expected = "whole numbers from 0" if text is None else f"whole numbers from 0 to {vocab - 1:,}"
            error = BadTokenIds(compose(f"{where}: token id {index}", found=repr(id), expected=expected))
            error.index = index
            raise error
    if text is not None and len(ids) > text.max_position_embeddings:
        raise BadTokenIds(
            compose(f"{where}: {len(ids):,} token ids", expected=f"at most {text.max_position_embeddings:,} positions")
        )
    return ids


def _whole(word):
    try:
        return int(word) if isinstance(word, str) else word
    except ValueError:
        return word
