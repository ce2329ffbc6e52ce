"""mlx-lm around an engine: lazy arrays of MLX, a tree of parameters, a cache that its model fills."""

import types

import numpy as np


class Array:
    """What is used of one: NumPy has no bfloat16, and refuses it."""

    def __init__(self, values, dtype):
        self.values, self.dtype = np.asarray(values), dtype

    def astype(self, dtype):
        return Array(self.values, dtype)

    def __getitem__(self, at):
        return Array(self.values[at], self.dtype)

    def __array__(self, dtype=None, copy=None):
        if self.dtype.endswith("bfloat16"):
            raise RuntimeError("Item size 2 for PEP 3118 buffer format string B does not match the dtype")
        return np.array(self.values, dtype)


class Model:
    def __init__(self, engine):
        self.engine = engine
        self.tree = {"embed": Array([1], "mlx.core.bfloat16"), "norm": Array([1], "mlx.core.bfloat16"),
                     "A_log": Array([1], "mlx.core.float32"), "packed": Array([1], "mlx.core.uint32")}  # fmt: skip

    def parameters(self):
        return self.tree

    def update(self, tree):
        self.tree = tree

    def __call__(self, ids, cache):
        if cache.fed == 0:
            self.engine.fresh()
        [ids] = np.asarray(ids).tolist()
        cache.fed += len(ids)
        return Array(self.engine.feed(ids)[None], self.tree["embed"].dtype)


class Tokenizer:
    """mlx-lm's, around that of transformers."""

    def __init__(self, inner, ends):
        self._tokenizer, self.eos_token_ids = inner, set(ends)


def modules(engine, inner):
    """{name: module} of what the adapter imports; `inner` stands for the tokenizer of transformers."""
    core, utils, lm, cache = (types.ModuleType(name) for name in ("core", "utils", "lm", "cache"))
    core.float32, core.bfloat16, core.float16 = (f"mlx.core.{name}" for name in ("float32", "bfloat16", "float16"))
    core.floating, core.cpu, core.gpu, core.device = "floating", "Device(cpu, 0)", "Device(gpu, 0)", "Device(gpu, 0)"
    core.issubdtype = lambda kind, of: "float" in kind
    core.array = lambda values: Array(values, "mlx.core.int32")
    core.default_device = lambda: core.device
    core.set_default_device = lambda device: setattr(core, "device", device)
    utils.tree_map = lambda function, tree: {name: function(leaf) for name, leaf in tree.items()}
    utils.tree_flatten = lambda tree: list(tree.items())
    cache.make_prompt_cache = lambda model: types.SimpleNamespace(fed=0)

    def load(folder):
        if lm.refuses is not None:
            raise ValueError(lm.refuses)
        return Model(engine), Tokenizer(inner, engine.stop_ids)

    lm.load, lm.refuses = load, None
    return {"mlx.core": core, "mlx.utils": utils, "mlx_lm": lm, "mlx_lm.models.cache": cache}
