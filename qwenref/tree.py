"""The readable tree of a model: layers grouped by kind over the whole stack, with parameters and bytes.

Reads shapes only: no forward, no weight page.
"""

from collections import Counter
from math import log10, prod

# How the kinds of layer_types are called in words.
MIXER_NAMES = {"linear_attention": "Gated DeltaNet", "full_attention": "attention"}

_DETAIL, _NUMBERS = 41, 81  # columns where the detail begins and where parameters end


def tree(module, depth=None):
    """Text of the tree below `module`, to `depth` levels.

    Right columns: parameters and bytes as stored.  A line for a group of layers gives the total of the group, the lines
    inside it give one layer and say so.  A tied weight counts once, where it comes first.
    """
    return "\n".join(_lines(type(module).__name__, [module], ("", ""), depth, set(), False, None))


def _lines(label, members, indent, depth, seen, each, config):
    """Lines of one node, which stands for all its `members` alike, and of what is below it."""
    first, many = members[0], len(members) > 1
    config = getattr(first, "config", config)  # of the module itself, or of the one it belongs to
    describe = _DETAILS.get(type(first).__name__, lambda module, config: "")
    detail = (f"x {len(members)} · " if many else "") + describe(first, config)
    yield _line(indent[0] + label, detail, members, seen, each)
    if depth is None or depth > 0:
        groups = _groups(first)
        for name, group in groups:
            last = group is groups[-1][1]
            yield from _lines(
                f"{name}: {type(group[0]).__name__}",
                group,
                (indent[1] + ("└ " if last else "├ "), indent[1] + ("  " if last else "│ ")),
                None if depth is None else depth - 1,
                seen,
                each or many,
                config,
            )
    seen.update(id(parameter) for member in members for parameter in member.parameters())


def _line(label, detail, members, seen, each):
    own = {id(parameter): parameter for member in members for parameter in member.parameters()}
    fresh = [parameter for key, parameter in own.items() if key not in seen]
    count = sum(prod(parameter.shape) for parameter in fresh)
    nbytes = sum(prod(parameter.shape) * parameter.dtype.itemsize for parameter in fresh)
    if own and not fresh:
        numbers = f"{'= tied':>8}"
    else:
        numbers = f"{_short(count):>8}{_bytes(nbytes):>11}" + (" each" if each and count else "")
    return f"{label:<{_DETAIL - 1}} {detail}".ljust(_NUMBERS - 8) + numbers


def _groups(module):
    """[(name or index ranges, modules)]: layers of one kind and shape together, everything else alone."""
    if type(module).__name__ != "ModuleList":
        return [(name, [child]) for name, child in module.named_children()]
    kinds = {}
    for index, child in enumerate(module):
        shapes = tuple((name, p.shape, p.dtype.name) for name, p in child.named_parameters())
        kinds.setdefault((type(child), shapes), []).append((index, child))
    return [
        (index_ranges([index for index, _ in members]), [child for _, child in members]) for members in kinds.values()
    ]


def index_ranges(indices, limit=3):
    """Sorted indices as text: runs joined, the middle left out: "0-2, 4-6, … 60-62"."""
    runs = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(words) if len(words) <= limit else f"{', '.join(words[: limit - 1])}, … {words[-1]}"


def _stack(layers, config):
    kinds = Counter(layer.layer_type for layer in layers)
    return " + ".join(f"{n} {MIXER_NAMES[kind].removeprefix('Gated ')}" for kind, n in kinds.items())


def _linear(linear, config):
    outputs, inputs = linear.weight.shape
    return f"{inputs:,} -> {outputs:,}" + (" + bias" if "bias" in dict(linear.named_parameters()) else "")


def _delta(module, c):
    return f"{c.linear_num_key_heads} key / {c.linear_num_value_heads} value heads x {c.linear_value_head_dim}"


def _attention(module, c):
    return f"{c.num_attention_heads} query / {c.num_key_value_heads} kv heads x {c.head_dim}"


def _mlp(module, config):
    inner, width = module.gate_proj.weight.shape
    return f"{width:,} -> {inner:,} -> {width:,}"


def _rotary(module, c):
    power = round(log10(c.rope_theta))
    theta = f"1e{power}" if c.rope_theta == 10.0**power else f"{c.rope_theta:g}"
    return f"theta {theta}, sections " + "/".join(str(n) for _, n in sorted(Counter(c.mrope_axes).items()))


_DETAILS = {
    "TextModel": lambda m, c: f"{len(m.layers)} layers, width {c.hidden_size:,}",
    "Embedding": lambda m, c: "{:,} x {:,}".format(*m.weight.shape),
    "ModuleList": _stack,
    "DecoderLayer": lambda m, c: MIXER_NAMES[m.layer_type],
    "GatedDeltaNet": _delta,
    "Attention": _attention,
    "MLP": _mlp,
    "Linear": _linear,
    "Conv1d": lambda m, c: f"{m.weight.shape[0]:,} channels, width {m.weight.shape[-1]}",
    "RMSNorm": lambda m, c: f"{m.weight.shape[0]:,}, 1 + w",
    "RMSNormGated": lambda m, c: f"{m.weight.shape[0]:,}, w, gated",
    "RotaryEmbedding": _rotary,
}


def _short(n):
    if not n:
        return "–"
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if n >= size:
            return f"{n / size:.2f}{unit}"
    return str(n)


def _bytes(n):
    if not n:
        return "–"
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"
