"""Types of the compiled half.  Ops are in ops.pyi by name; here they are one dict."""

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from os import PathLike
from typing import Any, Final, TypeVar, final

from numpy import ndarray

from qwenref.parameter import Parameter

_Array = ndarray[Any, Any]
_Path = str | bytes | PathLike[str] | PathLike[bytes]
_T = TypeVar("_T")

ops: dict[str, Op]
numerics_var: ContextVar[Any]
sites_var: ContextVar[Any]
global_forward_hooks: OrderedDict[int, Any]
global_forward_pre_hooks: OrderedDict[int, Any]

def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def set_cpu_level(name: str, /) -> None: ...
def cpu_level() -> str: ...
def kept_buffers() -> int: ...
def drop_buffers() -> None: ...
def read_seconds(buffer: Any, /) -> float: ...
def arithmetic_rate(kind: str, steps: int = 200_000, /) -> float: ...
def save_safetensors(path: _Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None: ...

@final
class Op:
    """An op as a callable.  Not a name of this module: the values of `ops` are of this type."""

    __name__: Final[str]
    __qualname__: Final[str]
    __text_signature__: Final[str]
    signature: Final[str]
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The op as compiled, whatever numerics are in force."""

class Module:
    """Storage, attributes and the call of a node of the tree."""

    _path: str | None
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, _Array | None]
    _modules: dict[str, Any]
    _non_persistent_buffers_set: set[str]
    _forward_hooks: OrderedDict[int, Any]
    _forward_hooks_with_kwargs: OrderedDict[int, bool]
    _forward_hooks_always_called: OrderedDict[int, bool]
    _forward_pre_hooks: OrderedDict[int, Any]
    _forward_pre_hooks_with_kwargs: OrderedDict[int, bool]
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattribute__(self, name: str, /) -> Any: ...
    def __setattr__(self, name: str, value: Any, /) -> None: ...
    def __delattr__(self, name: str, /) -> None: ...
    def site(self, name: str, x: _T, /) -> _T: ...

@final
class TensorInfo(tuple[str, tuple[int, ...], str, int, int]):
    """What a checkpoint file says about one tensor."""

    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    file: Final[str]
    offset: Final[int]
    nbytes: Final[int]

@final
class Checkpoint(Mapping[str, _Array]):
    """A safetensors checkpoint as a mapping from tensor names to arrays over the mapped files."""

    files: Final[list[str]]
    nbytes: Final[int]
    metadata: Final[dict[str, str]]
    dtypes: Final[dict[str, int]]
    def __new__(cls, path: _Path) -> Checkpoint: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: str, /) -> _Array: ...
    def __contains__(self, key: object, /) -> bool: ...
    def keys(self) -> KeysView[str]: ...
    def items(self) -> ItemsView[str, _Array]: ...
    def values(self) -> ValuesView[_Array]: ...
    def get(self, name: str, default: Any = None, /) -> Any: ...
    def info(self, name: str, /) -> TensorInfo: ...
    def resident(self) -> int: ...
    def advise(self, name: str, advice: str, /) -> None: ...
    def touched(self, name: str, /) -> list[tuple[int, int]] | None: ...
    def revert(self, name: str, /) -> int: ...

class _Stored:
    """What the three configs share: read-only attributes, and the mapping that is in the file."""

    source: Final[str]
    __hash__: None  # type: ignore[assignment]
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: str, /) -> Any: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __getattr__(self, name: str, /) -> Any: ...
    def keys(self) -> Any: ...
    def values(self) -> Any: ...
    def items(self) -> Any: ...
    def get(self, key: str, default: Any = None, /) -> Any: ...
    def to_dict(self) -> dict[str, Any]: ...
    def to_json(self) -> str: ...

@final
class Config(_Stored):
    """A model's config.json."""

    composite: Final[bool]
    text_config: Final[TextConfig]
    vision_config: Final[VisionConfig | None]
    tie_word_embeddings: Final[bool]
    tie_conflict: Final[bool]
    defaults: Final[list[str]]
    unknown: Final[list[str]]
    image_token_id: Final[int]
    video_token_id: Final[int]
    vision_start_token_id: Final[int]
    vision_end_token_id: Final[int]
    language_model_only: Final[bool]
    @classmethod
    def from_json(cls, text: str | bytes, source: str = "config.json") -> Config: ...

@final
class TextConfig(_Stored):
    """The text section of a config; of a text-only file, all of it."""

    text_config: Final[TextConfig]
    tie_word_embeddings: Final[bool]
    layer_types: Final[tuple[str, ...]]
    full_attention_interval: Final[int | None]
    rope_theta: Final[float]
    partial_rotary_factor: Final[float]
    rotary_dim: Final[int]
    mrope_section: Final[tuple[int, int, int]]
    mrope_interleaved: Final[bool]
    mrope_axes: Final[tuple[int, ...]]
    key_dim: Final[int]
    value_dim: Final[int]
    conv_dim: Final[int]
    vocab_size: Final[int]
    hidden_size: Final[int]
    intermediate_size: Final[int]
    num_hidden_layers: Final[int]
    num_attention_heads: Final[int]
    num_key_value_heads: Final[int]
    head_dim: Final[int]
    hidden_act: Final[str]
    max_position_embeddings: Final[int]
    rms_norm_eps: Final[float]
    initializer_range: Final[float]
    attention_bias: Final[bool]
    linear_conv_kernel_dim: Final[int]
    linear_key_head_dim: Final[int]
    linear_value_head_dim: Final[int]
    linear_num_key_heads: Final[int]
    linear_num_value_heads: Final[int]
    attn_output_gate: Final[bool]
    output_gate_type: Final[str]
    mamba_ssm_dtype: Final[str]
    mtp_num_hidden_layers: Final[int]
    mtp_use_dedicated_embeddings: Final[bool]

@final
class VisionConfig(_Stored):
    """The vision section of a config."""

    rope_theta: Final[float]
    head_dim: Final[int]
    grid_side: Final[int]
    depth: Final[int]
    hidden_size: Final[int]
    hidden_act: Final[str]
    intermediate_size: Final[int]
    num_heads: Final[int]
    in_channels: Final[int]
    patch_size: Final[int]
    spatial_merge_size: Final[int]
    temporal_patch_size: Final[int]
    out_hidden_size: Final[int]
    num_position_embeddings: Final[int]
    initializer_range: Final[float]
