"""mlx-lm in process: its own model and cache."""

import collections

import numpy as np

from qwenref.engines.folders import OfFolder
from qwenref.engines.packages import imported, opening, version
from qwenref.errors import InputError, compose
from qwenref.hub import read_json, resolve

DTYPES = ("float32", "bfloat16", "float16")


def open(rest, *, dtype=None, device=None, name=None):
    """A folder, "tiny" or a hub name, of model type `qwen3_5`: mlx-lm knows no text-only checkpoint.

    dtype    "float32", "bfloat16" or "float16": parameters are brought to it after loading; None: as they are loaded
    device   "cpu" or "gpu"; None: MLX's default
    """
    mx, lm = imported("mlx.core", install="mlx mlx-lm"), imported("mlx_lm", install="mlx-lm")
    if dtype not in (None, *DTYPES):
        raise InputError(compose(f"mlx: dtype {dtype!r}", expected=", ".join(DTYPES)))
    if device not in (None, "cpu", "gpu"):
        raise InputError(compose(f"mlx: device {device!r}", expected="cpu or gpu"))
    folder = resolve(rest)
    with opening(rest, "mlx-lm"):
        if device is not None:
            mx.set_default_device(getattr(mx, device))
        model, tokenizer = lm.load(str(folder))
        if dtype is not None:
            model.update(_cast(mx, model.parameters(), getattr(mx, dtype)))
    return Mlx(mx, model, tokenizer, folder, name)


class Mlx(OfFolder):
    """A model of mlx-lm as an engine."""

    def __init__(self, library, model, tokenizer, folder, name=None):
        self._mx, self._model, self._cache = library, model, None
        self._dtype = _most_common(library, model.parameters())
        super().__init__(folder, name or f"mlx {self._dtype}", stop_ids=sorted(tokenizer.eos_token_ids))
        self.tokenizer = tokenizer._tokenizer  # the one of transformers inside of mlx-lm's

    def fresh(self):
        self._cache = imported("mlx_lm.models.cache").make_prompt_cache(self._model)

    def feed(self, ids):
        out = self._model(self._mx.array([ids]), cache=self._cache)[0].astype(self._mx.float32)
        return np.array(out)

    def config(self):
        quantised = read_json(self.folder / "config.json").get("quantization") or {}
        return self.described(
            "mlx-lm",
            version=version("mlx-lm"),
            backend=f"mlx {version('mlx')}, {self._mx.default_device()}",
            dtype=self._dtype,
            quant=f"{quantised['bits']} bits" if "bits" in quantised else None,
            kv_dtype=self._dtype,
            state_dtype=None,
            flags={},
        )

    def close(self):
        self._model = self._cache = None


def _cast(mx, parameters, kind):
    change = lambda p: p.astype(kind) if mx.issubdtype(p.dtype, mx.floating) else p  # noqa: E731
    return imported("mlx.utils").tree_map(change, parameters)


def _most_common(mx, parameters):
    """The type of most parameters: decays and gated norms are float32 in any checkpoint."""
    leaves = [p.dtype for _, p in imported("mlx.utils").tree_flatten(parameters)]
    [(kind, _)] = collections.Counter(str(k) for k in leaves if mx.issubdtype(k, mx.floating)).most_common(1)
    return kind.rpartition(".")[2]
