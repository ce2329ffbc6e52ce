"""The logit lens: what a model would answer if it stopped after each layer."""

from html import escape

import numpy as np

from qwenref.checks import is_whole
from qwenref.errors import InputError, a_kind, compose
from qwenref.html import block, table
from qwenref.inputs import checked_ids, checked_keep, refuse_unknown
from qwenref.numerics import active, numerics, unless_chosen
from qwenref.plain import aligned, plain
from qwenref.tree import mixer_names

_HELD = 1 << 24  # logits held at a time, 64 MiB of float32
_WIDTH, _ROWS = 100, 36  # of a repr
_OPTIONS = ("attention_mask", "position_ids", "cache", "sequence_ids")


class Lens:
    """Answers after each layer: row 0 is the embedding, row n + 1 is behind layer n, the last one is the model's own.

    `.ids`, `.probabilities` [rows, B, P, top] most likely first, lowest id first among equals · `.rank` [rows, B, P] of
    the model's answer, 1 the best · `.answer` [B, P] · `.positions` the tokens P stands for · `.layers` names of the
    rows · `.logits(layer)` [B, P, vocab], made when asked.
    """

    def __init__(self, model, ids, residuals, positions, top):
        self.model, self.input_ids, self.positions = model, ids, positions
        self._residuals, self._numerics = residuals, active().name
        config = model.text_model.config
        self.layers = ("embed", *range(len(residuals) - 1))
        self.kinds = ("", *mixer_names(config))
        B, P = residuals[0].shape[:2]
        shape = len(residuals), B, P
        self.ids = np.zeros((*shape, top), np.int64)
        self.probabilities = np.zeros((*shape, top), np.float64)
        self.rank = np.zeros(shape, np.int64)
        self.answer = np.zeros((B, P), np.int64)
        for row in reversed(range(len(residuals))):  # the last row holds the answers the others are ranked by
            self._fill(row, top)

    def _fill(self, row, top):
        for b, part, logits in self._pieces(row):
            for p, values in zip(part, logits, strict=True):
                order = _best(values, top)
                self.ids[row, b, p] = order
                self.probabilities[row, b, p] = _probabilities(values, order)
                if row == len(self._residuals) - 1:
                    self.answer[b, p] = order[0]
                self.rank[row, b, p] = _rank(values, self.answer[b, p])

    def _pieces(self, row):
        """(b, positions, logits [positions, vocab]) of a row, a bounded number of logits at a time."""
        B, P = self._residuals[row].shape[:2]
        step = max(1, _HELD // self.model.lm_head.out_features)
        for b in range(B):
            for at in range(0, P, step):
                part = range(at, min(at + step, P))
                yield b, part, self._head(self._residuals[row][b : b + 1, part.start : part.stop])[0]

    def _head(self, residual):
        """Final norm and head of the model; any split of the tokens gives the same bits."""
        return self.model.lm_head(self.model.text_model.norm(np.ascontiguousarray(residual)))

    def logits(self, layer=-1):
        """Logits [B, P, vocab] behind a layer, or of "embed"; -1 is the last layer, whose logits are the model's."""
        with numerics(self._numerics):
            return self._head(self._residuals[self._row(layer)])

    def _row(self, layer):
        count = len(self.layers) - 1
        if is_whole(layer) and -count <= layer < count:
            return int(layer) % count + 1
        if isinstance(layer, str) and layer in self.layers:
            return 0
        raise InputError(compose(f"lens: no layer {layer!r}", expected=f'"embed", or a number from 0 to {count - 1}'))

    # ---- display

    def token(self, id):
        """A token made visible; without a tokenizer its number."""
        tokenizer = self._tokenizer()
        return str(int(id)) if tokenizer is None else tokenizer.token_text(int(id))

    def _tokenizer(self):
        try:
            return self.model.tokenizer
        except Exception:  # a display shows what there is
            return None

    def _cell(self, row, b, p):
        rank = self.rank[row, b, p]
        behind = "" if rank == 1 else f" #{rank:,}"
        return f"{self.token(self.ids[row, b, p, 0])} {self.probabilities[row, b, p, 0]:.2f}{behind}"

    def _rows(self, b, columns):
        for row in reversed(range(len(self.layers))):
            name = "embed" if row == 0 else f"{row - 1} {self.kinds[row]}"
            yield [name, *(self._cell(row, b, p) for p in columns)]

    def _headline(self):
        B, P = self.answer.shape
        return (
            f"Lens · {len(self.layers) - 1} layers · {B} row{'s' * (B != 1)} · {P} of {self.input_ids.shape[1]} tokens"
        )

    def text(self, width=_WIDTH, rows=None, row=0):
        """A table of one row of the batch: layers from the last one down, a column per token, as many as fit `width`.

        A cell is the likeliest next token, its probability, and the rank of the model's answer where it is not first.
        """
        heads = [self.token(self.input_ids[row, t]) for t in self.positions]
        columns, used = [], 14
        for p in reversed(range(len(heads))):  # the end of the prompt is what is looked at most
            size = 2 + max(len(heads[p]), *(len(self._cell(r, row, p)) for r in range(len(self.layers))))
            if columns and used + size > width:
                break
            columns.insert(0, p)
            used += size
        lines = [["after", *(heads[p] for p in columns)], *self._rows(row, columns)]
        left_out = []
        if rows is not None and len(lines) > rows + 1:
            every = -(-(len(lines) - 2) // (rows - 1))
            kept = [*range(1, len(lines) - 1, every), len(lines) - 1]
            left_out.append(f"{len(lines) - 1 - len(kept)} more layers")
            lines = [lines[0], *(lines[i] for i in kept)]
        if len(columns) < len(heads):
            left_out.append(f"{len(heads) - len(columns)} more tokens")
        if len(self.answer) > 1:
            left_out.append(f"{len(self.answer) - 1} more rows")
        end = [f"… {', '.join(left_out)}: text(width=..., row=...)"] if left_out else []
        return "\n".join([self._headline(), *aligned(lines), *end])

    def __repr__(self):
        return plain(self.text(rows=_ROWS))

    def _repr_html_(self):
        P = self.answer.shape[1]
        columns = range(max(0, P - 32), P)
        more = [f"{P - len(columns)} more tokens"] if len(columns) < P else []
        more += [f"{len(self.answer) - 1} more rows"] if len(self.answer) > 1 else []
        head = ["after", *(self.token(self.input_ids[0, self.positions[p]]) for p in columns)]
        note = f"<em>… {', '.join(more)}: positions=...</em>" if more else ""
        return block(f"<p>{escape(self._headline())}</p>{table(head, self._rows(0, columns))}{note}")


def _best(values, top):
    """Ids of the `top` largest values, largest first, lowest id first among equals; NaN counts as least."""
    values = np.where(np.isnan(values), -np.inf, values)
    least = np.partition(values, len(values) - top)[len(values) - top]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])[:top]


def _probabilities(values, ids):
    powers = np.exp(values - values.max())
    return powers[ids].astype(np.float64) / powers.sum(dtype=np.float64)


def _rank(values, id):
    return 1 + np.count_nonzero(values > values[id]) + np.count_nonzero(values[:id] == values[id])


def logit_lens(model, input_ids, top=5, positions=None, **options):
    """Lens of a prompt: the final norm and the head applied to the residual stream behind the embedding and each layer.

    top: how many answers are kept per place.  positions: the tokens to look at, a list (-1 the last) or how many at the
    end; all when None.  options: attention_mask, position_ids, cache, sequence_ids as for a call.  Hooks and edits in
    force hold.
    """
    if not hasattr(model, "text_model"):
        raise InputError(compose(f"logit_lens: {a_kind(model)} in place of a model", expected="a model with its head"))
    refuse_unknown(set(options) - set(_OPTIONS), _OPTIONS)
    text = model.text_model.config
    if not is_whole(top) or not 1 <= top <= text.vocab_size:
        raise InputError(compose(f"logit_lens: top {top!r}", expected=f"a number from 1 to {text.vocab_size:,}"))
    ids = checked_ids(input_ids, text.vocab_size)
    T = ids.shape[1]
    keep = checked_keep(0 if positions is None else positions, T, "positions")
    keep = np.arange(T) if keep is None else keep % T
    with unless_chosen(model.numerics):
        residuals = model.model(input_ids=ids, output_hidden_states=True, **options).residuals
        return Lens(model, ids, [residual[:, keep] for residual in residuals], tuple(map(int, keep)), int(top))
