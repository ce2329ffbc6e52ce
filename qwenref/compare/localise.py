"""Where activations of an engine leave the envelope: the first layer and site, and a splice that asks the logits.

Every site's error is taken position by position, against the truth in float64, in units of what rounding variants of
the reference do at the same place.  A splice puts the engine's residual stream into the reference and goes on from
there: logits like the engine's mean that the fault is before the place, like the truth's that it is behind.
"""

import re
from typing import NamedTuple

import numpy as np

from qwenref.compare import layouts
from qwenref.compare.differences import TOP, centred
from qwenref.compare.errors import BadTokenIds
from qwenref.compare.report import Report
from qwenref.errors import compose
from qwenref.logprobs import log_softmax
from qwenref.numerics import active, jitter, numerics
from qwenref.sites import ROOTS, Watcher

GATE = 3.0  # times a rounding variant's error
SHARE = 0.05  # of the positions that have to be above it
VARIANTS = 8
_UNIT = {"bfloat16": 2.0**-9, "float32": 2.0**-24}  # the relative error of one rounding, below which none is counted
_BLOCK = 64  # positions of which all logits are held at once

# Parts of a layer in the order of the data; those in one row do not depend on each other.
_FLOW = """
resid_pre
input_layernorm
linear_attn.in_proj_qkv linear_attn.mixed_qkv linear_attn.in_proj_a linear_attn.a linear_attn.in_proj_b linear_attn.b
self_attn.q_proj self_attn.k_proj
linear_attn.conv1d self_attn.q_norm self_attn.k_norm
linear_attn.conv_out self_attn.q self_attn.k
linear_attn.q linear_attn.k linear_attn.v linear_attn.beta linear_attn.g self_attn.q_rot self_attn.k_rot
linear_attn.delta_read linear_attn.delta_write self_attn.scores
self_attn.attn_weights self_attn.v_proj self_attn.v
linear_attn.read self_attn.context self_attn.gate
linear_attn.core linear_attn.in_proj_z linear_attn.z
linear_attn.norm linear_attn.normed self_attn.gated
linear_attn.out_proj self_attn.o_proj
linear_attn self_attn
resid_mid
post_attention_layernorm
mlp.gate_proj mlp.gate mlp.up_proj mlp.up
mlp.act_fn
mlp.hidden
mlp.down_proj
mlp
resid_post
"""
_RANK = {name: rank for rank, row in enumerate(_FLOW.split("\n")) for name in row.split()} | {"": 99}
_LAYER = re.compile(r"layers\.(\d+)(?:\.(.+))?")
_OUTER = {"embed_tokens": -1, "norm": 1, "lm_head": 3}

# What is asked of an engine that gives activations by name.
ASKED = (
    "embed_tokens", "layers.*.resid_pre", "layers.*.resid_mid", "layers.*.resid_post", "layers.*.linear_attn.conv_out",
    "layers.*.linear_attn.[qkvg]", "layers.*.linear_attn.beta", "layers.*.linear_attn.read",
    "layers.*.linear_attn.normed", "layers.*.linear_attn", "layers.*.self_attn.[qk]_rot", "layers.*.self_attn.gate",
    "layers.*.self_attn.gated", "layers.*.self_attn", "layers.*.mlp", "norm",
)  # fmt: skip


class Localisation(NamedTuple):
    """`document`: the field `localisation` of a report · `matrix` float64 [S, T]: error of each site and position to a
    rounding variant's, the report's array `layer_error`."""

    document: dict
    matrix: np.ndarray

    @property
    def first_bad(self):
        """{layer, site, pos, ratio} of the first site outside, or None."""
        return self.document["first_bad"]


def localise(model, ids, activations, logits=None, *, order="hf", variants=VARIANTS, dtype="bfloat16", progress=None):
    """The Localisation of activations {name: array} that an engine had on these ids, from an empty cache.

    activations  by our site names, in any layout of `layouts.aligned`; any part of the sites will do
    logits       float [T, V] of the engine, for a splice; else those of the site `lm_head`, where given
    order        "gguf" where value heads stand as in GGUF files
    variants     how many rounding variants of `dtype` the unit is made of
    progress     called as (done, total) behind each run of the model
    """
    ids = _checked(ids)
    given = layouts.aligned(model, activations, len(ids), order)
    if not given:
        return Localisation({"first_bad": None, "sites": [], "gate": GATE, "splice": []}, np.zeros((0, len(ids))))
    place = {name: _place(short) for name in given if (short := _short(name)) is not None}
    given = {name: given[name] for name in sorted(place, key=place.get)}
    if logits is None and "lm_head" in given:
        logits = given["lm_head"][0]
    runs = _Runs(model, ids, given, variants, dtype, progress)
    matrix = runs.ratios()
    sites = [_row(name, ratios) for name, ratios in zip(given, matrix, strict=True)]
    first = _first_bad(sites, matrix, [place[name] for name in given])
    splice, conclusion = runs.splices(logits) if logits is not None else ([], None)
    document = {"first_bad": first, "sites": sites, "gate": GATE, "splice": splice, "conclusion": conclusion}
    return Localisation({**document, "matrix_file": None}, matrix)


def localised(report, found):
    """A Report with a Localisation in it: an error without a name gets a place, sites outside alone are a finding."""
    document, first = report.to_dict(), found.first_bad
    document["localisation"] = found.document
    if first is not None and document["cause"] == "kernels" and document["confidence"] != "named":
        document["confidence"] = "localised"
        document["summary"] = (
            f"{document['summary']} First outside: {first['site']}, position {first['pos']:,}.".strip()
        )
    elif first is not None and report.agrees:
        said = f"activations are outside from {first['site']} on, log-probabilities are not"
        finding = {"code": "activations-outside", "severity": "warning", "message": said, "evidence": first}
        document["findings"].append(finding)
    return Report(document, {**report.arrays, "layer_error": found.matrix} if found.matrix.size else report.arrays)


def _checked(ids):
    row = np.asarray(ids)
    if row.ndim != 1 or row.dtype.kind not in "iu" or not row.size:
        raise BadTokenIds(
            compose("localise: ids", found=f"{row.dtype} {list(row.shape)}", expected="a list of token ids")
        )
    return row.astype(np.int64)


def _short(name):
    root = next((root for root in sorted(ROOTS, key=len, reverse=True) if root and name.startswith(root)), "")
    short = name[len(root) :]
    return short if _LAYER.fullmatch(short) or short in _OUTER else None


def _place(short):
    """(layer, rank) of a site in the order of the data: embeddings before, norm and head behind all layers."""
    found = _LAYER.fullmatch(short)
    if found is None:
        return (-1 if _OUTER[short] < 0 else 1 << 30, _OUTER[short])
    return int(found[1]), _RANK.get(found[2] or "", 98)


def _layer(short):
    found = _LAYER.fullmatch(short)
    return int(found[1]) if found else None


def _row(name, ratios):
    short = _short(name)
    bad = float((ratios > GATE).mean())
    return {"site": short, "layer": _layer(short), "ratio": float(np.median(ratios)), "bad_share": bad}


def _first_bad(sites, matrix, places):
    """The first site outside whose successor is, too; of those that do not depend on each other the farthest."""
    bad = [row["bad_share"] >= SHARE for row in sites]
    steps = sorted(set(places))
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        here = [i for i, place in enumerate(places) if place == step and bad[i]]
        if here and (behind is None or any(bad[i] for i, place in enumerate(places) if place == behind)):
            worst = max(here, key=lambda i: sites[i]["ratio"])
            pos = int(np.argmax(matrix[worst] > GATE))
            ratio = float(matrix[worst, pos])
            return {"layer": sites[worst]["layer"], "site": sites[worst]["site"], "pos": pos, "ratio": ratio}
    return None


class _Watch(Watcher):
    """Hands every value of its sites on, as [T, rest] in float64."""

    def __init__(self, model, names, tokens, see):
        super().__init__(model, names)
        self._tokens, self._see = tokens, see

    def on_value(self, site, value):
        self._see(site, layouts.by_token(site, value, self._tokens))
        return value


class _Runs:
    """The truth, the variants, and what is asked of them."""

    def __init__(self, model, ids, given, variants, dtype, progress):
        self.model, self.ids, self.given, self.dtype = model, ids, given, dtype
        self._seeds, self._progress, self._done = range(variants), progress or (lambda done, total: None), 0
        self._norm = next(iter(_Watch(model, ["norm"], 0, None).targets))
        self.values, self.sites, self.units = {}, {}, {name: [] for name in given}
        with numerics("fp64"):
            self.truth = self._run(self._keep)
            self.support, self.logprobs = self._likeliest(self.truth)
        self.spreads = []
        for seed in self._seeds:
            with jitter(seed, dtype):
                hidden = self._run(self._measure)
                self.spreads.append(self._error(self._at(hidden)))

    def _run(self, see):
        """One pass, every value of the sites shown to `see`; the output of the final norm."""
        kept = []
        names = list(self.given)

        def both(site, rows):
            if site.name == self._norm:
                kept[:] = [rows]
            if site.name in self.given:
                see(site, rows)

        keep = 0 if "lm_head" in self.given else 1
        with _Watch(self.model, [*names, *({self._norm} - set(names))], len(self.ids), both):
            self.model(self.ids[None], logits_to_keep=keep)
        self._done += 1
        self._progress(self._done, 1 + len(self._seeds))
        return kept[0]

    def _keep(self, site, rows):
        self.values[site.name], self.sites[site.name] = rows.copy(), site

    def _measure(self, site, rows):
        self.units[site.name].append(self._distance(site.name, rows))

    def _distance(self, name, rows):
        """Error of each position, relative to the truth's size there."""
        truth = self.values[name]
        size = np.linalg.norm(truth, axis=1)
        return np.linalg.norm(rows - truth, axis=1) / np.maximum(size, np.finfo(np.float64).tiny)

    def ratios(self):
        """float64 [S, T]"""
        rows = []
        for name, array in self.given.items():
            unit = np.maximum(np.median(self.units[name], axis=0), _UNIT[self.dtype])
            rows.append(self._distance(name, layouts.by_token(self.sites[name], array, len(self.ids))) / unit)
        return np.stack(rows)

    # Logits, at the ids the truth has as its likeliest; never all of them of all positions at once.

    def _blocks(self, hidden):
        for begin in range(0, len(hidden), _BLOCK):
            here = slice(begin, begin + _BLOCK)
            yield here, np.asarray(self.model.lm_head(hidden[None, here])[0], np.float64)

    def _likeliest(self, hidden):
        found = [(np.argsort(-rows, axis=-1, kind="stable")[:, :TOP], rows) for _, rows in self._blocks(hidden)]
        support = np.concatenate([ids for ids, _ in found])
        shifted = [np.take_along_axis(log_softmax(rows), ids, axis=-1) for ids, rows in found]
        return support, np.concatenate(shifted)

    def _at(self, hidden):
        hidden = hidden.astype(active().dtype)
        return np.concatenate(
            [np.take_along_axis(rows, self.support[here], axis=-1) for here, rows in self._blocks(hidden)]
        )

    def _error(self, logits, other=None):
        """Root mean square of the difference to the truth, or to other logits, a shift of all left aside."""
        other = self.logprobs if other is None else other
        there = np.ones(self.support.shape, bool)
        return float(np.sqrt(np.mean(np.square(centred(logits - other, self.logprobs, there)))))

    def splices(self, logits):
        """(rows of the report's `splice`, conclusion): the engine's residual stream put in, by bisection."""
        engine = np.take_along_axis(np.asarray(logits, np.float64), self.support, axis=-1)
        unit = float(np.median(self.spreads))
        places = self._places()
        asked = {}

        def like_the_engine(i):
            if i not in asked:
                logits = self._continued(*places[i])
                asked[i] = {"layer": places[i][0], "to_truth": self._error(logits) / unit,
                            "to_engine": self._error(logits, engine) / unit}  # fmt: skip
            return asked[i]["to_engine"] < asked[i]["to_truth"]

        if not places:
            return [], None
        if self._error(engine) / unit <= GATE:
            return [], "The logits are inside: there is nothing to look for by splicing."
        low, high = 0, len(places)  # the first place that is like the engine lies in [low, high]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if like_the_engine(middle) else (middle + 1, high)
        rows = sorted(asked.values(), key=lambda row: row["layer"])
        return rows, _conclusion(places, low, len(self.model.text_model.layers))

    def _places(self):
        """(layer that is run next, residual stream before it) of every residual stream there is."""
        found = {}
        for name, array in self.given.items():
            layer, _, part = _short(name).removeprefix("layers.").partition(".")
            if _short(name) == "embed_tokens":
                found[0] = array
            elif part in ("resid_post", "") and layer.isdigit():
                found[int(layer) + 1] = array
            elif part == "resid_pre":
                found.setdefault(int(layer), array)
            elif _short(name) == "norm":
                found[len(self.model.text_model.layers) + 1] = array
        return sorted(found.items())

    def _continued(self, layer, hidden):
        text = self.model.text_model
        with numerics("fp64"):
            hidden = hidden.astype(np.float64)
            if layer <= len(text.layers):
                hidden = (
                    text.norm(text.run(hidden=hidden, start=layer)) if layer < len(text.layers) else text.norm(hidden)
                )
            return self._at(hidden[0])


def _conclusion(places, first, layers):
    """In words: between the last place whose logits are the truth's and the first whose are the engine's."""
    if first == len(places):
        behind = _behind(places[-1][0], layers)
        return f"The engine's values {behind} lead the reference to its own logits: the fault is behind it."
    after = _behind(places[first][0], layers)
    if first == 0:
        return f"The engine's values {after} lead the reference to the engine's logits: the fault is before it."
    before = _behind(places[first - 1][0], layers)
    return f"Spliced {before} the logits are the reference's, {after} the engine's: the fault is between the two."


def _behind(layer, layers):
    if layer == 0:
        return "behind the embeddings"
    return "behind the final norm" if layer > layers else f"behind layer {layer - 1}"
