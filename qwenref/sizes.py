"""How large a model is, counted from its shapes: mixers, parameters by part, bytes of cache."""

from collections import Counter
from math import prod

from qwenref import _C
from qwenref.checks import is_whole
from qwenref.errors import InputError, compose
from qwenref.loading import as_config, from_config, split_name
from qwenref.state import dtype_name

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

    @property
    def headline(self):
        rows = "1 row" if self.batch == 1 else f"{self.batch:,} rows"
        return f"CacheSize · {rows} of {self.tokens:,} tokens · {memory(self.total)}"

    def __repr__(self):
        lines = [self.headline]
        for part, layers, size, how in self.rows():
            lines.append(f"  {part:<16} {layers:>3,} layers  {size:>17,} B  {memory(size):>11}  {how}")
        return "\n".join(lines)

    def _repr_html_(self):
        rows = ((part, f"{n:,} layers", f"{size:,} B", memory(size), how) for part, n, size, how in self.rows())
        return _html(self.headline, rows)


def cache_size(source, tokens=4096, batch=1, kv_dtype="bfloat16", state_dtype="float32"):
    """Bytes a cache of `batch` rows of `tokens` tokens takes; `source` is a model, config, dict or path.

    Keys, values and the conv window are `kv_dtype`, the recurrent state `state_dtype`.  Equal to `Cache.nbytes` of a
    cache with those dtypes that was fed that many tokens.
    """
    for name, value in (("tokens", tokens), ("batch", batch)):
        if not is_whole(value) or value < (name == "batch"):
            least = int(name == "batch")
            raise InputError(compose(f"cache_size: {name} {value!r}", expected=f"an integer, {least} or more"))
    names = {"kv_dtype": dtype_name(kv_dtype), "state_dtype": dtype_name(state_dtype)}
    for (name, dtype), given in zip(names.items(), (kv_dtype, state_dtype), strict=True):
        if given is None or dtype not in _CACHE_DTYPES:  # None is float64 to NumPy
            raise InputError(compose(f"cache_size: {name} {given!r}", expected=", ".join(_CACHE_DTYPES)))
    widths = {name: _CACHE_DTYPES[dtype] for name, dtype in names.items()}
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
    return CacheSize(int(tokens), int(batch), *names.values(), layers, attention * per_token)


class CountReport:
    """Parameters and bytes by part.

    `.embed`, `.mixers` {kind: n}, `.mlp`, `.norms`, `.lm_head` (0 when `.tied`), `.text` (all of these), `.visual`,
    `.mtp`, `.total`, `.nbytes`.  What is on disk but not part of the tree (`.mtp`, `.visual` of a text-only model) is
    counted apart and not in `.total`.
    """

    def __init__(self, counts, mixer_counts, nbytes, on_disk, tied):
        self.embed, self.mlp, self.norms, self.lm_head = (counts[k] for k in ("embed", "mlp", "norms", "lm_head"))
        self.mixers = dict(mixer_counts)
        self.text = self.embed + sum(self.mixers.values()) + self.mlp + self.norms + self.lm_head
        self.visual, self.mtp = counts["visual"] or on_disk.get("visual", 0), on_disk.get("mtp", 0)
        self._sees = counts["visual"] > 0
        self.total, self.nbytes, self.tied = self.text + counts["visual"], nbytes, tied

    def rows(self):
        """(part, parameters, remark) of every part: of the tree first, then what is on disk only."""
        tied, apart = "tied to the embedding" if self.tied else "", "on disk, not part of this tree"
        rows = [("embedding", self.embed, "")]
        rows += [(_KINDS[kind], n, "") for kind, n in self.mixers.items()]
        rows += [("mlp", self.mlp, ""), ("norms", self.norms, ""), ("lm_head", self.lm_head, tied)]
        rows += [("vision", self.visual, "" if self._sees else apart), ("mtp", self.mtp, apart)]
        return [row for row in rows if row[1] or row[0] not in ("vision", "mtp")]

    @property
    def headline(self):
        return f"CountReport · {self.total:,} parameters · {self.nbytes:,} B"

    def __repr__(self):
        lines = [f"  {part:<16} {n:>18,}" + (f"  {remark}" if remark else "") for part, n, remark in self.rows()]
        return "\n".join([self.headline, *lines])

    def _repr_html_(self):
        return _html(self.headline, ((part, f"{n:,}", remark) for part, n, remark in self.rows()))


def _html(headline, rows):
    """A headline and a table whose first column names the rows; cells stay apart where a viewer strips the table."""
    name, _, rest = headline.partition(" · ")
    body = "".join(
        f'<tr><th scope="row">{part}</th>' + "".join(f"<td> · {cell}</td>" for cell in cells if cell) + "</tr>"
        for part, *cells in rows
    )
    return f"<div><b>{name}</b> · {rest}<table>{body}</table></div>"


def parameters(source):
    """CountReport of a model, module, config, dict or path.  A tied head counts once, under the embedding.

    Of a config only the tree is known: `.mtp` is then 0, and every parameter counts as bfloat16.
    """
    model = source if hasattr(source, "named_parameters") else from_config(source, device="meta")
    counts, kinds, nbytes = Counter(), Counter(), 0
    for name, parameter in model.named_parameters():
        n = prod(parameter.shape)
        nbytes += n * parameter.dtype.itemsize
        parts = split_name(name)[1].split(".")
        if parts[0] == "embed_tokens":
            counts["embed"] += n
        elif parts[0] == "visual":
            counts["visual"] += n
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
    tied = hasattr(model, "lm_head") and not counts["lm_head"]
    leftovers = getattr(getattr(model, "report", None), "leftovers", {})
    on_disk = {part: sum(prod(shape) for shape in names.values()) for part, names in leftovers.items()}
    return CountReport(counts, kinds, nbytes, on_disk, tied)


def memory(n):
    """Bytes in memory as text: 65,536 -> "64 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
