"""One run of transformers in bf16, taken apart: what went into every step of the arithmetic, and what came out.

Modules are seen through hooks; the steps inside a mixer, which are functions of the modelling file, by standing in
front of them while the run lasts.
"""

import contextlib
from collections import defaultdict

from transformers.models.qwen3_5 import modeling_qwen3_5 as modelling
from witness import open_witness, torch

_GROUPS = {  # function of the modelling file -> the step it takes
    "causal_conv1d_fn": "conv",
    "causal_conv1d_update": "conv",
    "torch_chunk_gated_delta_rule": "delta",
    "torch_recurrent_gated_delta_rule": "delta",
    "apply_rotary_pos_emb": "rope",
    "eager_attention_forward": "attention",
}


def array(tensor):
    """float32 copy of a tensor, which holds what is in bf16 exactly."""
    return tensor.detach().float().numpy().copy()


def _kept(value):
    """Windows and states are written to later on."""
    return value.detach().clone() if torch.is_tensor(value) else value


class Steps:
    """`.modules[path]` and `.functions[step]`: lists of (args, kwargs, output), in the order they were called."""

    def __init__(self, model, folder, ids, lengths):
        self.witness = open_witness(model, folder, "bfloat16")
        self.modules, self.functions = defaultdict(list), defaultdict(list)
        for name, module in self.witness.named_modules():
            module.register_forward_hook(self._hook(name), with_kwargs=True)
        cache, at, self.logits = None, 0, []
        with self._in_front(), torch.inference_mode():
            for n in lengths:
                out = self.witness(torch.tensor(ids[:, at : at + n]), cache=cache, use_cache=True)
                cache, at = out.cache, at + n
                self.logits.append(array(out.logits))

    def _hook(self, name):
        def hook(module, args, kwargs, output):
            self.modules[name].append((args, kwargs, output))

        return hook

    @contextlib.contextmanager
    def _in_front(self):
        before = {name: getattr(modelling, name) for name in _GROUPS}

        def stand(name):
            def call(*args, **kwargs):
                given = list(map(_kept, args)), {key: _kept(value) for key, value in kwargs.items()}
                output = before[name](*args, **kwargs)
                self.functions[_GROUPS[name]].append(
                    (*given, tuple(map(_kept, output)) if isinstance(output, tuple) else _kept(output))
                )
                return output

            return call

        for name in _GROUPS:
            setattr(modelling, name, stand(name))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(modelling, name, function)
