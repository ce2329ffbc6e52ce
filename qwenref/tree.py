"""The readable tree of a model: layers grouped by kind over the whole stack, with parameters and bytes.

Reads shapes only: no forward, no weight page.  `Tree` is a header and a root `Node`; text and HTML are made of the
same nodes.
"""

import re
from collections import Counter
from html import escape
from math import log10, prod
from textwrap import wrap

from qwenref.errors import InputError, UnknownName, a_kind, compose
from qwenref.html import block
from qwenref.parameter import Parameter
from qwenref.plain import ascii_form, broken, plain
from qwenref.residency import resident, where
from qwenref.sites import matches, nothing_named

# How the kinds of layer_types are called in words.
MIXER_NAMES = {"linear_attention": "Gated DeltaNet", "full_attention": "attention"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
CONTEXTS = (4096, 32768)  # tokens whose cache is sized unless others are asked for

_DETAIL, _NUMBERS, _BYTES = 41, 81, 92  # columns where the detail begins and where parameters and bytes end
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


def mixer_names(config):
    """The mixer of every layer of a text config in one word: "DeltaNet" or "attention"."""
    return [MIXER_NAMES[kind].removeprefix("Gated ") for kind in config.layer_types]


def tree(module, depth=None, only=None):
    """Tree of `module` to `depth` levels; `only` is a pattern as captures take it (`layers.*.self_attn`, `**.mlp`):
    what it names, and what leads there.  In a whole model the vision tower is one line, unless `only` looks into it:
    `model.model.visual.tree()` shows what is inside.

    Right columns: parameters and bytes as stored.  A line for a group of layers gives the total of the group, the lines
    inside it give one layer and say so.  A tied weight counts once, where it comes first.
    """
    return Tree(module, depth, only)


class Tree:
    """`str()` is the text at 100 columns, `.text(width, ascii)` at others; Jupyter shows the HTML."""

    def __init__(self, module, depth=None, only=None):
        _check_options(module, depth, only)
        facts = _Facts(module)
        facts.folded = only is None and hasattr(module, "text_model")
        self.footer = facts.footer()
        self.root = _node(facts, type(module).__name__, [("", module)], 0, depth, None, "", False)
        self.header = header(module, facts)
        self.branching = bool(self.root.children) or not self.header or hasattr(module, "text_model")
        if only is not None:
            self.root.keep(only)

    def text(self, width=100, ascii=False):
        form, more = (ascii_form, "...") if ascii else (str, "…")
        parts = [[form(line) for line in self.header]]
        if self.branching:
            parts.append([line.rstrip() for line in self.root.lines(form, width)])
        else:  # a leaf is all words, which may go on in a second line
            parts = [[row for line in parts[0] for row in wrap(line, width, subsequent_indent="    ")]]
        if self.footer:
            parts.append([form(self.footer)])
        rows = "\n\n".join("\n".join(lines) for lines in parts if lines).split("\n")
        return "\n".join(row if len(row) <= width else row[: width - len(more)] + more for row in rows)

    def __str__(self):
        text = self.text()
        return text if plain("·") == "·" else self.text(ascii=True)

    __repr__ = __str__

    def splitlines(self):
        return str(self).splitlines()

    def _repr_html_(self):
        head = "\n".join(self.header)
        body = self.root.html() if self.branching else ""
        foot = f"<p>{escape(self.footer)}</p>" if self.footer else ""
        return block(f"<pre>{escape(head)}</pre>\n{body}{foot}", "qr-tree")


class Node:
    """One line: a module, or a group of layers that are alike."""

    def __init__(self, label, detail, paths, count, nbytes, kind, grouped):
        self.label, self.detail, self.paths, self.kind, self.grouped = label, detail, paths, kind, grouped
        self.count, self.nbytes = count, nbytes
        self.each, self.tied, self.edited, self.total = False, None, False, 0
        self.children = []

    @property
    def numbers(self):
        """(parameters, bytes) as words."""
        if self.tied and not self.count:
            return f"= {self.tied}", ""
        star = "*" if self.edited else ""
        each = " each" if self.each and self.count else ""
        return _short(self.count) + star, _bytes(self.nbytes) + each

    def lines(self, form=str, width=100, first="", rest=""):
        """Rows of the text, in columns; on a narrow terminal the last columns are left out."""
        label, (count, size) = form(first + self.label), map(form, self.numbers)
        line = f"{label:<{_DETAIL - 1}} {form(self.detail)}"
        if self.tied and not self.count:
            line = line.ljust(_NUMBERS - 8) + count
        elif width >= _NUMBERS:
            column = max(_NUMBERS - len(line), len(count) + 1)
            line += f"{count:>{column}}"
            if width >= 100 or width >= _BYTES and not self.each:
                number, each = size.removesuffix(" each"), " each" * size.endswith(" each")
                line += f"{number:>{max(_BYTES - len(line), len(number) + 1)}}{each}"
        yield line
        for child in self.children:
            last = child is self.children[-1]
            yield from child.lines(form, width, rest + ("└ " if last else "├ "), rest + ("  " if last else "│ "))

    def html(self, level=0):
        count, size = self.numbers
        path = self.paths[0]
        share = 100 * self.nbytes / self.total if self.total else 0
        name, _, cls = self.label.rpartition(": ")
        cells = f"<b>{f'{escape(name)}: ' if name else ''}{escape(cls)} <em>{escape(self.detail)}</em></b>"
        cells += f"<i> · </i><span>{escape(count)}</span>" + (f"<i> · </i><span>{size}</span>" if size else "")
        if share >= 1:
            bar = f"qr-{self.kind}" if self.kind else "qr-bar"
            cells += f'<span class="qr-bar {bar}" style="width:{share:.0f}%"></span>'
        title = f' title="{path}"' if path else ""
        below = (f"<code>{path}</code>\n" if path else "") + "".join(c.html(level + 1) for c in self.children)
        opened = " open" if level < 3 and not self.grouped else ""
        return f"<details{opened}><summary{title}>{cells}</summary>\n{below}</details>"

    def keep(self, pattern):
        """Drop the branches in which nothing is named by the glob."""
        named = any(path and matches(pattern, path) for path in self.paths)
        if not named:
            self.children = [child for child in self.children if child.keep(pattern)]
        return named or bool(self.children)


def _check_options(module, depth, only):
    whole = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0
    if depth is not None and not whole:
        raise InputError(compose(f"tree: depth {depth!r}", expected="a number of levels, 0 the first line alone"))
    if only is None:
        return
    if not isinstance(only, str):
        raise InputError(compose(f"tree: only is {a_kind(only)}", expected="a pattern over paths, as text"))
    paths = [path for path, _ in module.named_modules() if path]
    if not any(matches(only, path) for path in paths):
        raise UnknownName(nothing_named(only, paths))


# ---- facts, gathered in one walk ----------------------------------------------------------------------------------


class _Facts:
    """What a walk over every module once has found: sizes, ties, hooks, edits, signatures, by module."""

    def __init__(self, module):
        self.module, self.edited = module, edited_parameters(module)
        self.own, self.tied, self.hooked, self.arrays = {}, {}, {}, []
        self.totals, self.signatures, self.folded = {}, {}, False
        first = {}
        for path, part in module.named_modules():
            count = nbytes = 0
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{name}" if path else name
                if id(parameter) in first:
                    self.tied[part] = ".".join(first[id(parameter)].split(".")[-2:])
                    continue
                first[id(parameter)] = full
                self.arrays.append(parameter)
                n = prod(parameter.shape)
                count, nbytes = count + n, nbytes + n * parameter.dtype.itemsize
            self.own[part] = (count, nbytes)
            self.hooked[part] = sum(len(getattr(part, table)) for table in _HOOKS)
        self.dtypes = Counter(DTYPES.get(a.dtype.name, a.dtype.name) for a in self.arrays)

    def total(self, part):
        """(parameters, bytes) of a module and all below it."""
        if part not in self.totals:
            below = [self.total(child) for child in part.children()]
            self.totals[part] = tuple(map(sum, zip(self.own.get(part, (0, 0)), *below, strict=True)))
        return self.totals[part]

    def signature(self, part):
        """What two layers have in common when they may share a line."""
        if part not in self.signatures:
            own = tuple(
                (name, p.shape, p.dtype.name, id(p) in self.edited)
                for name, p in part._parameters.items()
                if p is not None
            )
            below = tuple((name, self.signature(child)) for name, child in part.named_children())
            self.signatures[part] = (type(part), self.hooked.get(part, 0), own, below)
        return self.signatures[part]

    def inside(self, part, what):
        """Whether anything in `part` is hooked or edited."""
        if what == "hooked":
            return any(self.hooked.get(m, 0) for m in part.modules())
        return any(id(p) in self.edited for p in part.parameters())

    def footer(self):
        n = sum(id(p) in self.edited for p in self.arrays)
        return f"* {n} tensor{'s' * (n != 1)} edited in memory, file unchanged" if n else ""


def edited_parameters(module):
    """Ids of the parameters of `module` whose numbers are no longer those of the file."""
    root = module.root if module.root is not None else module
    listed = getattr(root, "edited", None)
    if listed is None:
        return set()
    by_name = dict(root.named_parameters())
    return {id(by_name[name]) for name in listed() if name in by_name}


def _node(facts, label, members, level, depth, config, kind, each):
    """Node that stands for all its `members` (path, module) alike, with what is below it."""
    path, first = members[0]
    modules, many = [module for _, module in members], len(members) > 1
    config = getattr(first, "config", config)  # of the module itself, or of the one it belongs to
    kind = _KINDS.get(getattr(first, "layer_type", None), "vision" if path.endswith("visual") else kind)
    describe = _DETAILS.get(type(first).__name__, lambda module, config: "")
    try:
        detail = (f"x {len(members)} · " if many else "") + describe(first, config)
    except Exception as error:
        detail = broken(error)
        detail = detail if len(detail) <= 32 else f"{detail[:30]}…>"
    sums = [facts.total(module) for module in modules]
    count, nbytes = (sum(values) for values in zip(*sums, strict=True))
    if facts.hooked.get(first):
        label += f" ⚓{facts.hooked[first]}"
    node = Node(label, detail, [path for path, _ in members], count, nbytes, kind, many)
    node.total = facts.total(facts.module)[1]
    node.each, node.tied = each, facts.tied.get(first)
    node.edited = any(id(p) in facts.edited for p in first._parameters.values())
    if facts.folded and type(first).__name__ == "VisionModel":
        node.detail += "".join(f", {what}" for what in ("hooked", "edited") if facts.inside(first, what))
    elif depth is None or depth > level:
        for name, group, reason in _groups(facts, first):
            below = [(f"{path}.{key}" if path else key, module) for key, module in group]
            child = f"{name}: {type(group[0][1]).__name__}"
            node.children.append(_node(facts, child, below, level + 1, depth, config, kind, each or many))
            if reason:
                node.children[-1].detail += f" · {reason}"
    return node


def _groups(facts, module):
    """[(name or index ranges, [(key, module)], why apart)]: layers alike together, everything else alone."""
    if type(module).__name__ != "ModuleList":
        return [(name, [(name, child)], "") for name, child in module.named_children()]
    groups = {}
    for key, child in module.named_children():
        groups.setdefault(facts.signature(child), []).append((key, child))
    largest = {}
    for members in groups.values():
        kind = getattr(members[0][1], "layer_type", type(members[0][1]))
        plain_first = [largest[kind], members] if kind in largest else [members]
        largest[kind] = max(plain_first, key=lambda group: (len(group), not facts.inside(group[0][1], "hooked")))
    shown = []
    for members in groups.values():
        first = members[0][1]
        usual = largest[getattr(first, "layer_type", type(first))]
        reason = "" if members is usual else _why_apart(facts, first, usual[0][1])
        shown.append((index_ranges([int(key) for key, _ in members]), members, reason))
    return shown


def _why_apart(facts, layer, usual):
    reasons = [what for what in ("hooked", "edited") if facts.inside(layer, what)]
    dtypes, usually = ({p.dtype.name for p in m.parameters()} for m in (layer, usual))
    if dtypes != usually:
        reasons.append("+".join(sorted(DTYPES.get(d, d) for d in dtypes)))
    return ", ".join(reasons) or "other shapes"


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


# ---- header -------------------------------------------------------------------------------------------------------


def header(module, facts=None):
    """Four lines on a whole model; one or two on a leaf; two on what has values to watch; a part that fails says so."""
    facts = _Facts(module) if facts is None else facts
    lines = []
    if hasattr(module, "text_model"):
        makers = (_name_line, _mixer_line, _cache_line, _now_line)
    else:
        makers = (_leaf_line, _sites_line) if module._parameters and not module._modules else (_sites_line,)
    for maker in makers:
        try:
            line = maker(module, facts)
        except Exception as error:
            line = broken(error)
        if line:
            lines.append(line)
    return lines


def _name_line(model, facts):
    kind = model.config.get("model_type") or ""
    family = kind.removesuffix("_text").replace("_", ".").replace("qwen", "Qwen", 1)
    count, nbytes = facts.total(model)
    dtypes = " + ".join(name for name, _ in facts.dtypes.most_common())
    left, right = f"{type(model).__name__} · {family}", f"{count:,} parameters · {_bytes(nbytes)} {dtypes}"
    return left.ljust(max(57, len(left) + 4)) + right


def mixer_words(layer_types):
    """ "48 Gated DeltaNet + 16 attention (3 + 1, repeated 16 times)", or where the attention layers are."""
    kinds = list(layer_types)
    counts = Counter(kinds)
    text = " + ".join(f"{counts[kind]} {MIXER_NAMES[kind]}" for kind in MIXER_NAMES if counts[kind])
    if len(counts) < 2:
        return text
    period = next(p for p in range(1, len(kinds) + 1) if len(kinds) % p == 0 and kinds[:p] * (len(kinds) // p) == kinds)
    delta = kinds[:period].index("full_attention")
    if (
        delta
        and period < len(kinds)
        and kinds[:period] == ["linear_attention"] * delta + ["full_attention"] * (period - delta)
    ):
        return f"{text} ({delta} + {period - delta}, repeated {len(kinds) // period} times)"
    attention = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return f"{text} (attention: {index_ranges(attention, 8)})"


def _mixer_line(model, facts):
    return f"mixers   {mixer_words(layer.layer_type for layer in model.text_model.layers)}"


def _cache_line(model, facts):
    from qwenref.sizes import cache_size, memory

    fixed = cache_size(model, 0)
    contexts = [n for n in CONTEXTS if n <= model.config.text_config.max_position_embeddings]
    sizes = " · ".join(f"{n:,} tokens {memory(cache_size(model, n).total)}" for n in contexts)
    text = f"cache    {memory(fixed.fixed)} fixed + {memory(fixed.kv_per_token)} per token"
    return f"{text}  ({sizes})" if sizes else text


def _now_line(model, facts):
    if any(p.is_meta for p in facts.arrays):
        bytes_now = "no data (meta)"
    else:
        n = resident(facts.arrays)
        whole = _bytes(facts.total(model)[1])
        bytes_now = f"{_bytes(n) if n else '0 B'} of {whole} resident" if n is not None else "residency unknown"
    hooks, edits = sum(facts.hooked.values()), sum(id(p) in facts.edited for p in facts.arrays)
    words = f"{edits or 'no'} edit{'s' * (edits != 1)}"
    if model.origin is not None and not model.origin.tells_writes:  # what was written in place is found by comparing
        words = f"{edits} or more edits" if edits else "edits: model.edits() compares"
    return f"now      numerics {model.numerics} · {bytes_now} · {hooks or 'no'} hook{'s' * (hooks != 1)} · {words}"


def _leaf_line(module, facts):
    words = [
        f"{type(module).__name__}({re.sub(r'(?<![.])[0-9]{4,}', lambda n: f'{int(n[0]):,}', _leaf_words(module))})"
    ]
    for name, p in module._parameters.items():
        if not isinstance(p, Parameter):
            continue
        text = f"{name} {DTYPES.get(p.dtype.name, p.dtype.name)} {list(p.shape)}"
        if p.is_meta:
            text += " · no data (meta)"
        else:
            file, present = where(p)
            text += f" {file}" if file else ""
            if present is not None:
                text += " · resident" if present >= p.nbytes else f" · {_bytes(present)} resident" if present else ""
                text += " · not resident" if not present else ""
        words.append(text)
    return " · ".join(words)


def _leaf_words(module):
    if type(module).__name__ == "Linear":
        return f"{module.in_features:,} -> {module.out_features:,}, bias={module.bias is not None}"
    return module.extra_repr()


def _sites_line(module, facts):
    return f"sites: {' '.join(module.SITES)}" if module.SITES else ""


# ---- details ------------------------------------------------------------------------------------------------------


def _stack(layers, config):
    if not all(hasattr(layer, "layer_type") for layer in layers):
        return f"{len(layers)} blocks"
    kinds = Counter(layer.layer_type for layer in layers)
    return " + ".join(f"{n} {MIXER_NAMES[kind].removeprefix('Gated ')}" for kind, n in kinds.items())


def _linear(linear, config):
    outputs, inputs = linear.weight.shape
    return f"{inputs:,} -> {outputs:,}" + (" + bias" if linear.bias is not None else "")


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
    "VisionModel": lambda m, c: f"{len(m.blocks)} blocks, width {c.hidden_size:,}",
    "PatchEmbed": lambda m, c: f"{c.in_channels} channels x {c.temporal_patch_size} x {c.patch_size} x {c.patch_size}",
    "Conv3d": lambda m, c: f"{m.weight[0].size:,} -> {len(m.weight):,} + bias",
    "PositionTable": lambda m, c: f"{m.side} x {m.side} x {m.weight.shape[1]:,}",
    "VisionRotaryEmbedding": lambda m, c: f"theta {m.theta:g}, rows {m.width // 2}, columns {m.width // 2}",
    "VisionBlock": lambda m, c: "both ways in a frame",
    "VisionAttention": lambda m, c: f"{m.num_heads} heads x {m.head_dim}",
    "VisionMLP": lambda m, c: "{1:,} -> {0:,} -> {1:,}".format(*m.linear_fc1.weight.shape),
    "PatchMerger": lambda m, c: f"{c.spatial_merge_size} x {c.spatial_merge_size} -> 1, {c.out_hidden_size:,} wide",
    "LayerNorm": lambda m, c: f"{m.weight.shape[0]:,}, w + b",
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
