"""How far a profile comes out from the definition on given input: the floor below which a difference says nothing."""

from html import escape

import numpy as np

from qwenref.errors import InputError, compose
from qwenref.html import block, table
from qwenref.inputs import checked_ids, checked_mask
from qwenref.numerics import numerics, profile
from qwenref.plain import aligned, plain
from qwenref.tree import mixer_names

_ROWS = 36  # of a repr
_TIES = 8


class NoiseFloor:
    """Differences of one run under `.profile` and one under `.against`, on the same ids.

    `.layers` ("embed", 0, 1, ...) and, per layer, of the residual stream behind it: `.relative` float64 root mean
    square of the difference over that of the values, `.largest` largest absolute difference.  `.logits_relative`,
    `.logits_largest` the same for logits · `.margins` float64 [B, T] distance of the two largest logits under `against`
    · `.errors` float64 [B, T] largest difference of their logits · `.answers` int64 [2, B, T] the largest logit's id
    under `against`, then under the profile · `.changes` [(row, token)] where these differ · `.near_ties` [(row, token)]
    whose margin is below twice the error, closest first: rounding decides there.  Pads are left out: margin infinity,
    error 0.
    """

    def __init__(self, model, ids, name, against, layers, logits, kept):
        self.model, self.input_ids = model, ids
        self.profile, self.against = name, against
        self.layers = ("embed", *range(len(layers) - 1))
        self.kinds = ("", *mixer_names(model.text_model.config))
        self.relative = np.array([_relative(found[kept], exact[kept]) for found, exact in layers])
        self.largest = np.array([_largest(found[kept], exact[kept]) for found, exact in layers])
        found, exact = logits
        self.logits_relative = _relative(found[kept], exact[kept])
        self.logits_largest = _largest(found[kept], exact[kept])
        two = np.partition(exact, -2, axis=-1)[..., -2:]
        self.margins = np.where(kept, two[..., 1] - two[..., 0], np.inf)
        self.errors = np.where(kept, np.abs(found - exact).max(axis=-1), 0)
        self.answers = np.stack([exact.argmax(axis=-1), np.where(kept[..., None], found, exact).argmax(axis=-1)])
        self.changes = [tuple(map(int, place)) for place in np.argwhere(self.answers[0] != self.answers[1])]
        near = np.argwhere(self.margins < 2 * self.errors)
        self.near_ties = sorted((tuple(map(int, place)) for place in near), key=lambda place: self.margins[place])

    def _headline(self):
        B, T = self.margins.shape
        return f"{self.profile} against {self.against} · {B} row{'s' * (B != 1)} · {T} token{'s' * (T != 1)}"

    def _table(self):
        for layer, kind, relative, largest in zip(self.layers, self.kinds, self.relative, self.largest, strict=True):
            yield f"{layer} {kind}".rstrip(), f"{relative:.2e}", f"{largest:.2e}"
        yield "logits", f"{self.logits_relative:.2e}", f"{self.logits_largest:.2e}"

    def _tie_lines(self):
        B, T = self.margins.shape
        counts = f"{len(self.near_ties):,} near ties · {len(self.changes):,} other answers"
        yield f"{counts} · smallest margin {self.margins.min():.3g}"
        for row, token in self.near_ties[:_TIES]:
            best, found = self.answers[:, row, token]
            also = "" if best == found else f", {self.profile} answers {found:,}"
            yield (
                f"  row {row}, token {token}: margin {self.margins[row, token]:.3g}, "
                f"difference {self.errors[row, token]:.3g}, answer {best:,}{also}"
            )
        if len(self.near_ties) > _TIES:
            yield f"  … {len(self.near_ties) - _TIES:,} more: .near_ties"

    def text(self, rows=None):
        """A line per layer, then the near ties; at most `rows` layers, evenly spaced."""
        body = list(self._table())
        if rows is not None and len(body) > rows:
            every = -(-(len(body) - 1) // (rows - 1))
            body = [*body[:-1:every], body[-1]]
        lines = [("behind", "relative", "largest"), *body]
        return "\n".join([self._headline(), *aligned(lines), *self._tie_lines()])

    def __repr__(self):
        return plain(self.text(rows=_ROWS))

    def _repr_html_(self):
        ties = "<br>".join(escape(line.strip()) for line in self._tie_lines())
        rows = table(("behind", "relative", "largest"), self._table())
        return block(f"<p>{escape(self._headline())}</p>{rows}<p>{ties}</p>")


def _largest(found, exact):
    return float(np.abs(found - exact).max())


def _relative(found, exact):
    scale = np.sqrt(np.mean(np.square(exact)))
    off = np.sqrt(np.mean(np.square(found - exact)))
    return float(off / scale) if scale > 0 else float(off)


def bound(model, input_ids, name, against, options):
    """See `numerics.bound`; options {name: value} of the call."""
    name, against = profile(name).name, profile(against).name
    if name == against:
        raise InputError(compose("bound: a profile against itself", found=name, expected="two profiles"))
    ids = checked_ids(input_ids, model.text_model.config.vocab_size)
    kept = checked_mask(options["attention_mask"], *ids.shape, np.zeros((len(ids), 0), bool))
    kept = np.ones(ids.shape, bool) if kept is None else kept
    if not kept.any():
        raise InputError(compose("bound: attention_mask", found="pads only", expected="a token"))
    runs = []
    for chosen in (name, against):
        with numerics(chosen):
            out = model(ids, output_hidden_states=True, **options)
            runs.append(([x.astype(np.float64, copy=False) for x in out.residuals], out.logits.astype(np.float64)))
    (found, found_logits), (exact, exact_logits) = runs
    pairs = list(zip(found, exact, strict=True))
    return NoiseFloor(model, ids, name, against, pairs, (found_logits, exact_logits), kept)
