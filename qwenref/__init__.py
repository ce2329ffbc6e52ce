"""qwenref: the reference runtime for the Qwen3.5 family of language models.

>>> model = qwenref.from_pretrained("tiny")
>>> print(model)
>>> model.chat([{"role": "user", "content": "How much is 31 plus 23?"}]).text
"""

import importlib
from typing import TYPE_CHECKING

try:
    from qwenref import ops
except ImportError as error:
    import importlib.util

    if importlib.util.find_spec("qwenref._C") is not None:
        raise
    from qwenref.errors import compose

    where = "Python elsewhere than in the checkout, whose sources hide the installed package; or pip install -e ."
    raise ImportError(compose("qwenref: no compiled part", found=f"sources alone, {__path__[0]}", do=where)) from error

from qwenref._C import get_num_threads, set_num_threads
from qwenref._version import __version__
from qwenref.cache import Cache
from qwenref.capture import capture
from qwenref.editing import edit
from qwenref.errors import (
    BudgetExceeded,
    CapabilityMissing,
    CheckpointError,
    ConfigError,
    DTypeError,
    HookError,
    InputError,
    ModelNotFound,
    NonFiniteError,
    QwenrefError,
    QwenrefWarning,
    ShapeError,
    TemplateError,
    UnknownName,
    Unreachable,
)
from qwenref.hooklist import clear_hooks, hooks
from qwenref.layers import MLP, Conv1d, Embedding, Linear, RMSNorm, RMSNormGated, RotaryEmbedding, SiLUActivation
from qwenref.loading import from_config, from_pretrained
from qwenref.model import ForCausalLM, ForConditionalGeneration, Model
from qwenref.module import Module, ModuleList
from qwenref.numerics import numerics
from qwenref.parameter import Parameter
from qwenref.positions import rope_index
from qwenref.sizes import cache_size, mixers, parameters
from qwenref.text import Attention, DecoderLayer, GatedDeltaNet, TextModel
from qwenref.trace import trace
from qwenref.vision import (
    GELU,
    Conv3d,
    GELUTanh,
    LayerNorm,
    PatchEmbed,
    PatchMerger,
    PositionTable,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    VisionModel,
    VisionRotaryEmbedding,
)
from qwenref.weights import to_torch_state_dict

if TYPE_CHECKING:
    from qwenref.answers import Answer, parse, round_trip
    from qwenref.chat import Reply
    from qwenref.experiments import ablate, patch
    from qwenref.guard import check_finite
    from qwenref.lens import Lens, logit_lens
    from qwenref.profiling import ModelProfile, profile
    from qwenref.rendering import first_difference
    from qwenref.sampling import Sampler
    from qwenref.states import States, export_states
    from qwenref.tokenizer_facts import compare_tokenizers

# What not every session needs is imported when it is first asked for.
_LATER = {
    "Answer": "answers",
    "Lens": "lens",
    "ModelProfile": "profiling",
    "Reply": "chat",
    "Sampler": "sampling",
    "States": "states",
    "ablate": "experiments",
    "check_finite": "guard",
    "compare_tokenizers": "tokenizer_facts",
    "export_states": "states",
    "first_difference": "rendering",
    "logit_lens": "lens",
    "parse": "answers",
    "patch": "experiments",
    "profile": "profiling",
    "round_trip": "answers",
}


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module 'qwenref' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"qwenref.{_LATER[name]}"), name)
    return value


def __dir__():
    return sorted({*globals(), *_LATER})


def show_config():
    """Print version, instruction level, threads and the libraries in use."""
    import platform

    import ml_dtypes
    import numpy

    from qwenref._C import cpu_level, kept_buffers

    print(f"qwenref    {__version__}")
    print(f"python     {platform.python_version()} · numpy {numpy.__version__} · ml_dtypes {ml_dtypes.__version__}")
    print(f"cpu        {platform.machine()} · instruction level {cpu_level()}   (QWENREF_CPU)")
    print(f"threads    {get_num_threads()}   (QWENREF_NUM_THREADS)")
    print(f"buffers    {kept_buffers() / 2**20:,.0f} MiB of freed results kept for the next ones")


def render(model, messages, **options):
    """The exact prompt of a conversation, as text and ids; see `qwenref.generate.render`."""
    from qwenref.generate import render

    return render(model, messages, **options)


__all__ = [
    "GELU",
    "MLP",
    "Answer",
    "Attention",
    "BudgetExceeded",
    "Cache",
    "CapabilityMissing",
    "CheckpointError",
    "ConfigError",
    "Conv1d",
    "Conv3d",
    "DTypeError",
    "DecoderLayer",
    "Embedding",
    "ForCausalLM",
    "ForConditionalGeneration",
    "GELUTanh",
    "GatedDeltaNet",
    "HookError",
    "InputError",
    "LayerNorm",
    "Lens",
    "Linear",
    "Model",
    "ModelNotFound",
    "ModelProfile",
    "Module",
    "ModuleList",
    "NonFiniteError",
    "Parameter",
    "PatchEmbed",
    "PatchMerger",
    "PositionTable",
    "QwenrefError",
    "QwenrefWarning",
    "RMSNorm",
    "RMSNormGated",
    "Reply",
    "RotaryEmbedding",
    "Sampler",
    "ShapeError",
    "SiLUActivation",
    "States",
    "TemplateError",
    "TextModel",
    "UnknownName",
    "Unreachable",
    "VisionAttention",
    "VisionBlock",
    "VisionMLP",
    "VisionModel",
    "VisionRotaryEmbedding",
    "__version__",
    "ablate",
    "cache_size",
    "capture",
    "check_finite",
    "clear_hooks",
    "compare_tokenizers",
    "edit",
    "export_states",
    "first_difference",
    "from_config",
    "from_pretrained",
    "get_num_threads",
    "hooks",
    "logit_lens",
    "mixers",
    "numerics",
    "ops",
    "parameters",
    "parse",
    "patch",
    "profile",
    "render",
    "rope_index",
    "round_trip",
    "set_num_threads",
    "show_config",
    "to_torch_state_dict",
    "trace",
]
