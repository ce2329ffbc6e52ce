"""Names of everything that can be captured or edited, and the mechanism that hands a value to whoever asked for it.

A module declares its interior values once, in the class attribute SITES: name -> dimensions, "B, T, Q-head, D".  What a
module returns has the module's own path as its name and the dimensions of `output_dims`.  Letters whose size belongs to
the module come from its attribute `sizes`; B (rows), T (new tokens) and S (tokens seen) from the call.
"""

import difflib
import re
from collections import namedtuple

from qwenref import _C
from qwenref.errors import InputError, UnknownName, a_kind, compose
from qwenref.outputs import ModelOutput

ROOTS = ("", "model.language_model.", "model.")  # what may be left out in front of a name

# How others call what we have; only ever suggested, never taken for it.
_ALIASES = {
    "hook_pattern": "attn_weights",
    "attn_probs": "attn_weights",
    "attention_weights": "attn_weights",
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "blocks": "layers",
    "attn": "self_attn",
    "lm_head_out": "lm_head",
    "unembed": "lm_head",
    "embed": "embed_tokens",
    "ln_final": "norm",
}


class Site(namedtuple("Site", "name module site dims tokens", defaults=(None,))):
    """One name: `.name` full path · `.module` · `.site`, None for what the module returns · `.dims` labels ·
    `.tokens` what stands behind an @: "all" or the columns as a tuple, else None."""

    __slots__ = ()

    @property
    def shape(self):
        """Symbolic shape: a size where the module fixes it, else the letter."""
        sizes = self.module.sizes
        return tuple(int(label) if label.isdigit() else sizes.get(label, label) for label in self.dims)

    def columns(self, T, S):
        """Of the T columns of a call that ends with column S - 1, those whose state is meant."""
        return range(S - T, S) if self.tokens == "all" else [t for t in self.tokens if S - T <= t < S]

    def elements(self, **call):
        """How many numbers there are in a call with the given B, T, S."""
        n, sizes = 1, {**self.module.sizes, **call}
        for axis, label in enumerate(self.dims):
            if self.tokens is not None and axis == 1:
                n *= len(self.columns(call["T"], call["S"]))
            else:
                for factor in label.split("*"):
                    n *= sizes.get(factor, 1)
        return n

    def labelled(self, shape):
        """ "B 1, T 64, V-head 6" of an array of that shape."""
        labels = self.dims if len(self.dims) == len(shape) else ("",) * len(shape)
        return ", ".join(f"{label} {size}".strip() for label, size in zip(labels, shape, strict=True))

    def axis(self, ending):
        """Axis whose label is or ends with `ending`; None if there is none."""
        if ending == "T" and self.tokens is not None:
            return 1
        fits = (label == ending or re.fullmatch(r"[^*]*-" + ending, label) for label in self.dims)
        return next((axis for axis, fit in enumerate(fits) if fit), None)


def declared(text):
    """("B", "T", "H") from "B, T, H"."""
    return tuple(part.strip() for part in text.split(","))


class SiteTable(dict):
    """Every name of a model, in the order of the tree: name -> Site."""

    def __repr__(self):
        groups = {}
        for site in self.values():
            groups.setdefault((re.sub(r"\.\d+(?=\.|$)", ".*", site.name), site.shape), []).append(site)
        lines = [f"{len(self):,} names"]
        for (pattern, _), members in groups.items():
            shape = ", ".join(
                label if isinstance(size, str) else f"{label} {size:,}"
                for label, size in zip(members[0].dims, members[0].shape, strict=True)
            )
            lines.append(f"  {pattern:<58} x {len(members):<4} [{shape}]")
        return "\n".join(lines)


def table(model):
    """SiteTable of a module and everything below it."""
    found = SiteTable()
    for path, module in model.named_modules():
        if path and type(module).__name__ != "ModuleList":
            found[path] = Site(path, module, None, declared(module.output_dims))
        for name, dims in module.SITES.items():
            full = f"{path}.{name}" if path else name
            found[full] = Site(full, module, name, declared(dims))
    return found


def resolve(model, patterns):
    """{name: Site} of everything the patterns name; UnknownName if one of them names nothing.

    `*` stands for one part of a path, `**` for any number, `[...]` as in a shell; a leading `model.language_model.` may
    be left out.  `state@3,64` is the state after the tokens in columns 3 and 64, `state@all` after every token.
    """
    names = table(model)
    found = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            spread = "pass the names one by one: *names" if isinstance(pattern, (list, tuple, set)) else None
            raise InputError(compose(f"a pattern that is {a_kind(pattern)}", expected="names as text", do=spread))
        base, at, tokens = pattern.partition("@")
        expression = _regex(base)
        matched = [site for name, site in names.items() if _named(expression, name)]
        if not matched:
            raise UnknownName(nothing_named(base, names))
        if at:
            columns = _columns(tokens)
            states = [site for site in matched if site.site == "state"]
            if not states:
                raise UnknownName(
                    compose(f"{pattern}: only a state can be had after a token", do="name linear_attn.state@...")
                )
            matched = [
                site._replace(name=f"{site.name}@{tokens}", dims=_with_token(site.dims, columns), tokens=columns)
                for site in states
            ]
        found.update((site.name, site) for site in matched)
    return found


def matches(pattern, name):
    """Whether a pattern names `name`, with or without the leading part every name of a model shares."""
    return _named(_regex(pattern), name)


def _named(expression, name):
    return any(name.startswith(root) and expression.fullmatch(name, len(root)) for root in ROOTS)


def _regex(pattern):
    """`fnmatch` where `*` stops at a dot and `**` does not.  More stars are no more than two, also for the time it
    takes to find that nothing matches."""
    special = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    parts = []
    for i, part in enumerate(re.split(r"(\*\*|\*|\?|\[!?[^\]]+\])", re.sub(r"\*{2,}", "**", pattern))):
        if i % 2 == 0:
            parts.append(re.escape(part))
        else:
            parts.append(special.get(part) or part.replace("[!", "[^", 1))
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise UnknownName(f"{pattern!r} is no pattern: {error}") from None


def _columns(tokens):
    """Columns behind an @, in order; states come in that order however they were asked for."""
    if tokens == "all":
        return "all"
    if not re.fullmatch(r" *[0-9]+ *(, *[0-9]+ *)*", tokens):
        raise UnknownName(
            compose(
                f"state@{tokens}: not a list of columns",
                expected="'all', or columns such as state@3,64",
                do="count from the first token the cache was fed, pads included",
            )
        )
    return tuple(sorted({int(token) for token in tokens.split(",")}))


def _with_token(dims, columns):
    """State after each of several tokens has the tokens as its second dimension."""
    return dims[:1] + ("T" if columns == "all" else str(len(columns)),) + dims[1:]


def _near(wrong, names):
    """Up to three of `names` that `wrong` may stand for: those it is the end of; else close ones, of as many parts if
    any are, none far behind the first."""
    last = wrong.rpartition(".")[2]
    ends = [name for name in names if name.endswith("." + wrong)] or [n for n in names if n.rpartition(".")[2] == last]
    if ends and wrong:
        return ends[:3]
    alike = [name for name in names if name.count(".") == wrong.count(".")]
    close = difflib.get_close_matches(wrong, alike, n=3, cutoff=0.5) or difflib.get_close_matches(wrong, names, n=3)
    ratios = [difflib.SequenceMatcher(None, wrong, name).ratio() for name in close]
    return [name for name, ratio in zip(close, ratios, strict=True) if ratio > ratios[0] - 0.1]


def nothing_named(pattern, names):
    """The message for a pattern that names nothing: near names, grouped over the layers."""
    groups = {}
    for name in names:
        short = re.sub(r"^model\.(language_model\.)?", "", name)
        groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", short), []).append(name)
    renamed = ".".join(_ALIASES.get(part, part) for part in pattern.split("."))
    layer = re.fullmatch(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(?:linear|self)_attn\.attn_weights", renamed)
    if layer and any(matches(f"layers.{layer[1]}.linear_attn", name) for name in names):
        i = layer[1]
        return (
            f"layers.{i}.linear_attn has no attn_weights; "
            f"its exact token-to-token matrix is layers[{i}].linear_attn.token_map(...)"
        )
    general = re.sub(r"\.\d+(?=\.|$)", ".*", re.sub(r"^model\.(language_model\.)?", "", renamed))
    near = [general] if general in groups else _near(general, groups)
    shown = ", ".join(f"{name} ({len(groups[name])} name{'s' * (len(groups[name]) > 1)})" for name in near)
    text = f"'{pattern}' matches nothing"
    if shown:
        text += f". Near: {shown}"
    if general.endswith("linear_attn.attn_weights"):
        text += (
            "\n    do       a DeltaNet layer has no attention weights; its exact token-to-token matrix is "
            "layers[i].linear_attn.token_map(...)"
        )
    return text + "\n    do       model.sites() lists every name"


# ---- who is watching -----------------------------------------------------------------------------------------------


class Chain:
    """What the context variable holds: the watchers that are open here, the first opened first."""

    def __init__(self, watchers):
        self.watchers = watchers

    def __call__(self, module, name, value):
        for watcher in self.watchers:
            value = watcher.on_site(module, name, value)
        return value

    def wants(self, module, name):
        return any(watcher.wants(module, name) for watcher in self.watchers)

    def columns(self, module):
        """Columns after whose token somebody wants the state of a DeltaNet module: "all" or a set."""
        wanted = set()
        for watcher in self.watchers:
            asked = watcher.columns(module)
            if asked == "all":
                return "all"
            wanted |= set(asked)
        return wanted


def chain():
    """The Chain in force here, or None."""
    return _C.sites_var.get()


class Watcher:
    """Base of capture, edit and the like: targets of one model, open between `with` and its end.

    A watcher sees the calls made in the thread (or task) that opened it, no others.  Several see a value one after the
    other, the first opened first.
    """

    def __init__(self, model, patterns):
        if not hasattr(model, "named_modules"):
            what = type(self).__name__.lower()
            raise InputError(
                compose(f"{what}: {a_kind(model)} in place of a model", expected="a model or a part of one")
            )
        self.model = model
        self.targets = resolve(model, patterns)
        self._by_site, self._outputs, self._columns = {}, {}, {}
        for site in self.targets.values():
            if site.site is None:
                self._outputs[site.module] = site
            elif site.tokens is None:
                self._by_site[site.module, site.site] = site
            else:
                self._columns.setdefault(site.module, []).append(site)
        self._handles, self._open = [], False

    # What subclasses say.

    def on_value(self, site, value):
        """See one value; return it or what takes its place."""
        raise NotImplementedError

    def on_state(self, site, column, value):
        """See the state after the token in `column`; return it or what takes its place."""
        return value

    def opened(self):
        """Called when the block begins."""

    def closed(self):
        """Called when the block has ended, however."""

    def __repr__(self):
        n, state = len(self.targets), "open" if self._open else "closed"
        return f"{type(self).__name__} · {n:,} name{'s' * (n != 1)} · {state}"

    # What the chain asks.  A block that was closed elsewhere (a generator ended by another thread) sees nothing more.

    def on_site(self, module, name, value):
        if not self._open:
            return value
        base, at, column = name.partition("@")
        if at:
            for site in self._columns.get(module, ()):
                if site.tokens == "all" or int(column) in site.tokens:
                    value = self.on_state(site, int(column), value)
            return value
        site = self._by_site.get((module, base))
        return value if site is None else self.on_value(site, value)

    def wants(self, module, name):
        return self._open and (module, name) in self._by_site

    def columns(self, module):
        wanted = set()
        for site in self._columns.get(module, ()) if self._open else ():
            if site.tokens == "all":
                return "all"
            wanted |= set(site.tokens)
        return wanted

    # The block.

    def __enter__(self):
        if self._open:
            raise RuntimeError(f"{type(self).__name__}: already open; a watcher is entered once at a time")
        before = chain()
        self._open = True
        _C.sites_var.set(Chain((*(before.watchers if before else ()), self)))
        try:
            for module, site in self._outputs.items():
                self._handles.append(module.register_forward_hook(self._output_hook(site)))
            self.opened()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind, error, traceback):
        self._close()

    def _close(self):
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open = False
        active = chain()
        others = tuple(w for w in active.watchers if w is not self) if active else ()  # closed in any order
        _C.sites_var.set(Chain(others) if others else None)
        self.closed()

    def is_open_here(self):
        active = chain()
        return self._open and active is not None and self in active.watchers

    def _output_hook(self, site):
        """A layer's output is what people mean; where forward returns a tuple (attention) that is its first entry."""

        def hook(module, args, output):
            if not self.is_open_here():
                return None
            first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            value = self.on_value(site, first)
            if value is first:
                return None
            if isinstance(output, tuple):
                return (value, *output[1:])
            if isinstance(output, ModelOutput):
                return type(output)(**{**vars(output), "last_hidden_state": value})
            return value

        return hook
