"""Activations of a Qwen3.5 model that runs on PyTorch, under the site names of qwenref, written to a file.

Needs torch and NumPy only and imports nothing of this package: the file can be copied to where an engine runs.  In any
program, around one forward of one prompt:

    from dump_activations import Recorder
    with Recorder(model, "layers.*.resid_post") as recorder:      # any torch Module that holds the decoder
        model(input_ids)                                          # one prompt, one row
    recorder.save("activations.npz")                              # or .safetensors

transformers: the model itself.  vLLM (enforce_eager=True, one process): `llm.apply_model(lambda model: ...)` gives the
module; the weights must not be split over devices.  SGLang: `model_runner.model`, with --disable-cuda-graph.

Names are those of `model.sites()` without the part in front of `layers`; values are float32 with a leading 1.  What
happens inside of a fused kernel (the convolution, the recurrence, scores) cannot be seen from hooks and is left out.
"""

import fnmatch
import re

import numpy as np

_LAYER = re.compile(r"(?:^|\.)(layers\.\d+(?:\..+)?)$")
_ELSEWHERE = re.compile(r"(?:^|\.)(visual|vision_tower|mtp)(?:\.|$)")
_OUTER = re.compile(r"(?:^|(?:^|\.)(?:model|language_model)\.)(embed_tokens|norm|lm_head)$")

# What the call of a child shows of its parent: site, whether its "input" or "output", heads and width of a head.
_SHOWN = {
    "self_attn.q_norm": (("q", "output", "query"),),
    "self_attn.k_norm": (("k", "output", "key"),),
    "self_attn.v_proj": (("v", "output", "key"),),
    "self_attn.o_proj": (("gated", "input", "query"),),
    "linear_attn.in_proj_qkv": (("mixed_qkv", "output", None),),
    "linear_attn.in_proj_z": (("z", "output", "value"),),
    "linear_attn.in_proj_b": (("b", "output", None),),
    "linear_attn.in_proj_a": (("a", "output", None),),
    "linear_attn.norm": (("read", "input", "value"), ("core", "input", "flat")),
    "linear_attn.out_proj": (("normed", "input", "flat"),),
    "mlp.gate_proj": (("gate", "output", None),),
    "mlp.up_proj": (("up", "output", None),),
    "mlp.down_proj": (("hidden", "input", None),),
}


class Recorder:
    """Hooks on the modules of a decoder; `values` {name: float32 array}, calls joined along the tokens.

    patterns   shell patterns over names such as "layers.3.self_attn.gated"; none: everything
    config     the text config, where the module has no `config` of its own
    """

    def __init__(self, model, *patterns, config=None):
        self._patterns = patterns or ("*",)
        config = config if config is not None else model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._heads = {
            "query": (config.num_attention_heads, config.head_dim),
            "key": (config.num_key_value_heads, config.head_dim),
            "value": (config.linear_num_value_heads, config.linear_value_head_dim),
            "flat": (config.linear_num_value_heads * config.linear_value_head_dim,),
        }
        self._modules = [(short, module) for name, module in model.named_modules() if (short := short_name(name))]
        if not any(short.startswith("layers.") for short, _ in self._modules):
            kind = type(model).__name__
            raise ValueError(f"{kind}: no module named layers.0; pass the module that holds the decoder")
        self._kept, self._handles = {}, []

    @property
    def values(self):
        """{name: float32 [1, tokens, ...]} of everything seen so far."""
        return {name: _joined(name, parts) for name, parts in self._kept.items()}

    def matching(self, pattern):
        """Those of `values` that a pattern names."""
        return {name: _joined(name, self._kept[name]) for name in fnmatch.filter(self._kept, pattern)}

    def save(self, path):
        """Write `values` to a .npz or .safetensors file."""
        if str(path).endswith(".safetensors"):
            from safetensors.numpy import save_file

            save_file({name: np.ascontiguousarray(value) for name, value in self.values.items()}, path)
        else:
            np.savez(path, **self.values)

    def __enter__(self):
        for short, module in self._modules:
            self._handles.append(module.register_forward_hook(self._hook(short), with_kwargs=True))
        return self

    def __exit__(self, *raised):
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, short):
        def hook(module, args, kwargs, output):
            given = _tensors([*args, *kwargs.values()])
            returned = _tensors(output if isinstance(output, (tuple, list)) else [output])
            if returned:
                self._see(short, given, returned)

        return hook

    def _see(self, short, given, returned):
        """Keep what one call shows: its own output, and values of the module around it."""
        layer, _, inside = short.partition(".")[2].partition(".") if short.startswith("layers.") else ("", "", "")
        head = f"layers.{layer}"
        if short == head:
            self._keep(f"{head}.resid_pre", _sum(given))
            self._keep(f"{head}.resid_post", _sum(returned))
            self._keep(head, _sum(returned))
            return
        if inside == "mlp.act_fn" and given[0].shape[-1] != returned[0].shape[-1]:
            return  # joined with the product behind it
        if inside == "post_attention_layernorm":  # alone, or joined with the addition before it
            self._keep(f"{head}.resid_mid", returned[1] if len(returned) > 1 else given[0])
        if inside == "self_attn" and len(returned) > 1 and returned[1].ndim == 4:
            self._keep(f"{short}.attn_weights", returned[1], whole=True)
        if inside == "self_attn.q_proj":
            heads, width = self._heads["query"]
            pairs = returned[0].reshape(1, -1, heads, 2, width)
            self._keep(f"{head}.self_attn.gate", pairs[..., 1, :])
        for site, side, kind in _SHOWN.get(inside, ()):
            value = given[0] if side == "input" else returned[0]
            self._keep(f"{short.rpartition('.')[0]}.{site}", value, kind)
        self._keep(short, returned[0], {"self_attn.q_norm": "query", "self_attn.k_norm": "key"}.get(inside))

    def _keep(self, name, value, kind=None, whole=False):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            return
        if kind is not None:
            value = value.reshape(1, -1, *self._heads[kind])
        elif not whole and name.endswith("linear_attn.norm"):
            value = value.reshape(-1, value.shape[-1])
        elif value.ndim == 2:
            value = value[None]
        if not name.endswith("linear_attn.norm") and value.shape[0] != 1:
            raise ValueError(f"{name}: {value.shape[0]} rows; record one prompt at a time")
        self._kept.setdefault(name, []).append(value.detach().float().cpu().numpy().copy())


def short_name(name):
    """Our name of a module of a decoder, without the part in front: "layers.3.mlp", "norm", "lm_head"; else None."""
    if _ELSEWHERE.search(name):
        return None
    found = _LAYER.search(name) or _OUTER.search(name)
    return found[1] if found else None


def _joined(name, parts):
    """Calls one after the other, along the tokens; weights over a growing past cannot be joined: the last call's."""
    if len(parts) == 1 or name.endswith("attn_weights"):
        return parts[-1]
    return np.concatenate(parts, 0 if name.endswith("linear_attn.norm") else 1)


def _tensors(values):
    """Tensors of numbers among some values: no masks, no positions, nothing of one dimension."""
    return [v for v in values if hasattr(v, "is_floating_point") and v.is_floating_point() and v.ndim > 1]


def _sum(tensors):
    """The residual stream: some engines hand on its last addend and the rest of it apart."""
    return tensors[0] + tensors[1] if len(tensors) > 1 and tensors[0].shape == tensors[1].shape else tensors[0]
