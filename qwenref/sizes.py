"""How large a model is, counted from its shapes: mixers, parameters by part, bytes of cache."""

from collections import Counter
from math import prod

import numpy as np

from qwenref import _C
from qwenref.errors import InputError, compose
from qwenref.loading import as_config, split_name

_KINDS = {"linear_attention": "Gated DeltaNet", "full_attention": "attention"}
_CACHE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def _text_config(source):
    """Text section of a model, module, config, dict or path."""
    config = getattr(source, "config", source)
    return (config if isinstance(config, (_C.Config, _C.TextConfig)) else as_config(source)).text_config


def mixers(source):
    """Counter of mixer kinds: {"linear_attention": n, "full_attention": n}.  `source`: model, config, dict or path."""
    kinds = Counter()
    for layer in getattr(getattr(source, "text_model", None), "layers", ()):
        kinds[layer.layer_type] += 1
    return kinds or Counter(_text_config(source).layer_types)


class LayerSize:
    """Cache bytes of one layer: `.index`, `.kind`, `.kv`, `.recurrent`, `.conv`, `.total`."""

    def __init__(self, index, kind, kv=0, recurrent=0, conv=0):
        self.index, self.kind = index, kind
        self.kv, self.recurrent, self.conv = kv, recurrent, conv

    @property
    def total(self):
        return self.kv + self.recurrent + self.conv

    def __repr__(self):
        return f"layer {self.index} · {_KINDS[self.kind]} · {memory(self.total)}"


class CacheSize:
    """Bytes of a cache: `.kv`, `.recurrent`, `.conv`, `.total`, `.fixed`, `.kv_per_token` (one row), `.per_layer`."""

    def __init__(self, tokens, batch, kv_dtype, state_dtype, per_layer, kv_per_token):
        self.tokens, self.batch, self.kv_dtype, self.state_dtype = tokens, batch, kv_dtype, state_dtype
        self.per_layer, self.kv_per_token = per_layer, kv_per_token
        self.kv = sum(layer.kv for layer in per_layer)
        self.recurrent = sum(layer.recurrent for layer in per_layer)
        self.conv = sum(layer.conv for layer in per_layer)
        self.fixed = self.recurrent + self.conv
        self.total = self.kv + self.fixed

    def rows(self):
        """(part, layers, bytes, how) of each part."""
        attention = sum(layer.kind == "full_attention" for layer in self.per_layer)
        delta = len(self.per_layer) - attention
        return [
            ("keys and values", attention, self.kv, f"{self.kv_dtype}, {memory(self.kv_per_token)} per token and row"),
            ("recurrent state", delta, self.recurrent, f"{self.state_dtype}, whatever the length"),
            ("conv window", delta, self.conv, f"{self.kv_dtype}, whatever the length"),
        ]

    def __repr__(self):
        rows = "1 row" if self.batch == 1 else f"{self.batch:,} rows"
        lines = [f"CacheSize · {rows} of {self.tokens:,} tokens · {memory(self.total)}"]
        for part, layers, size, how in self.rows():
            lines.append(f"  {part:<16} {layers:>3} layers  {size:>17,} B  {memory(size):>11}  {how}")
        return "\n".join(lines)

    def _repr_html_(self):
        head = f"<b>CacheSize</b> · {self.batch:,} row(s) of {self.tokens:,} tokens · {memory(self.total)}"
        cells = "".join(
            f'<tr><th scope="row">{part}</th><td>{layers:,} layers</td><td>{size:,} B</td><td>{memory(size)}</td>'
            f"<td>{how}</td></tr>"
            for part, layers, size, how in self.rows()
        )
        return f"<div>{head}<table>{cells}</table></div>"


def cache_size(source, tokens=4096, batch=1, kv_dtype="bfloat16", state_dtype="float32"):
    """Bytes a cache of `batch` rows of `tokens` tokens takes; `source` is a model, config, dict or path.

    Keys, values and the conv window are `kv_dtype`, the recurrent state `state_dtype`.  Equal to `Cache.nbytes` of a
    cache with those dtypes that was fed that many tokens.
    """
    for name, value in (("tokens", tokens), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < (name == "batch"):
            least = int(name == "batch")
            raise InputError(compose(f"cache_size: {name} {value!r}", expected=f"an integer, {least} or more"))
    widths = {}
    for name, dtype in (("kv_dtype", kv_dtype), ("state_dtype", state_dtype)):
        try:
            widths[name] = _CACHE_DTYPES[np.dtype(dtype).name if not isinstance(dtype, str) else dtype]
        except (KeyError, TypeError):
            raise InputError(compose(f"cache_size: {name} {dtype!r}", expected=", ".join(_CACHE_DTYPES))) from None
    c = _text_config(source)
    per_token = 2 * c.num_key_value_heads * c.head_dim * widths["kv_dtype"]
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * widths["state_dtype"]
    window = c.conv_dim * (c.linear_conv_kernel_dim - 1) * widths["kv_dtype"]
    layers = [
        LayerSize(i, kind, kv=batch * tokens * per_token)
        if kind == "full_attention"
        else LayerSize(i, kind, recurrent=batch * state, conv=batch * window)
        for i, kind in enumerate(c.layer_types)
    ]
    attention = sum(kind == "full_attention" for kind in c.layer_types)
    return CacheSize(int(tokens), int(batch), str(kv_dtype), str(state_dtype), layers, attention * per_token)


class CountReport:
    """Parameters and bytes by part.

    `.embed`, `.mixers` {kind: n}, `.mlp`, `.norms`, `.lm_head` (0 when tied), `.text` (all of these), `.visual`,
    `.mtp`, `.total`, `.nbytes`.  Parts that are on disk but not part of the tree (`.visual`, `.mtp`) are counted apart
    and not in `.total` unless they were loaded.
    """

    def __init__(self, counts, mixer_counts, nbytes, on_disk):
        self.embed, self.mlp, self.norms, self.lm_head = (counts[k] for k in ("embed", "mlp", "norms", "lm_head"))
        self.mixers = dict(mixer_counts)
        self.text = self.embed + sum(self.mixers.values()) + self.mlp + self.norms + self.lm_head
        self.visual, self.mtp = on_disk.get("visual", 0), on_disk.get("mtp", 0)
        self.total, self.nbytes = self.text, nbytes

    def rows(self):
        """(part, parameters) of every part of the tree."""
        rows = [("embedding", self.embed)]
        rows += [(_KINDS[kind], n) for kind, n in self.mixers.items()]
        return [*rows, ("mlp", self.mlp), ("norms", self.norms), ("lm_head", self.lm_head)]

    def __repr__(self):
        lines = [f"CountReport · {self.total:,} parameters · {self.nbytes:,} B"]
        lines += [f"  {part:<16} {n:>18,}" for part, n in self.rows()]
        lines[-1] += "" if self.lm_head else "  (tied to the embedding)"
        apart = ((self.visual, "vision"), (self.mtp, "mtp"))
        lines += [f"  {part:<16} {n:>18,}  on disk, not part of this tree" for n, part in apart if n]
        return "\n".join(lines)

    def _repr_html_(self):
        cells = "".join(f'<tr><th scope="row">{part}</th><td>{n:,}</td></tr>' for part, n in self.rows())
        return f"<div><b>CountReport</b> · {self.total:,} parameters · {self.nbytes:,} B<table>{cells}</table></div>"


def parameters(model):
    """CountReport of a model: what each part holds.  A tied head counts once, under the embedding."""
    counts, kinds, nbytes = Counter(), Counter(), 0
    for name, parameter in model.named_parameters():
        n = prod(parameter.shape)
        nbytes += n * parameter.dtype.itemsize
        parts = split_name(name)[1].split(".")
        if parts[0] == "embed_tokens":
            counts["embed"] += n
        elif parts[0] == "lm_head":
            counts["lm_head"] += n
        elif "linear_attn" in parts:
            kinds["linear_attention"] += n
        elif "self_attn" in parts:
            kinds["full_attention"] += n
        elif "mlp" in parts:
            counts["mlp"] += n
        else:
            counts["norms"] += n
    leftovers = getattr(getattr(model, "report", None), "leftovers", {})
    on_disk = {part: sum(prod(shape) for shape in names.values()) for part, names in leftovers.items()}
    return CountReport(counts, kinds, nbytes, on_disk)


def memory(n):
    """Bytes in memory as text: 65,536 -> "64 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
