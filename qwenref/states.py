"""States of a conversation at chosen tokens: taken in one run, written to a file, and continued from.

Serving engines keep such states as checkpoints; these are the exact ones to hold theirs against.
"""

import numpy as np

from qwenref.cache import NO_SEQUENCE, AttentionLayerCache, Cache, _text_config
from qwenref.errors import InputError, compose
from qwenref.inputs import hidden_or_ids, refuse_unknown
from qwenref.numerics import unless_chosen

_ORDERS = ("hf", "gguf")
_OPTIONS = ("attention_mask", "position_ids", "sequence_ids", "inputs_embeds")


class States(dict):
    """{name: array} of a run at N of its tokens; at token n means: when the first n tokens of each row have been read.

        tokens                               int64 [N], ascending
        rope_deltas, sequence_begin          int64 [B, N]
        sequence                             int64 [B, N], only for packed rows
        layers.I.recurrent_state             [B, N, V-head, K, D]
        layers.I.conv_state                  [B, N, C, W-1], oldest first; C is [q | k | v] over the heads
        layers.I.keys, layers.I.values       [B, K-head, S, D] up to the last token; at token n they are [:, :, :n]

    The same names stand in the file `save` writes (format "qwenref.states", version 1).  `.order` says in which order
    the value heads stand, "hf" as in a checkpoint or "gguf" as in GGUF files: in `recurrent_state`, and in the last,
    `v`, part of the channels of `conv_state`.  `.cache(n)` is a Cache to continue from.
    """

    def __init__(self, arrays, config, dtype, order="hf"):
        super().__init__(arrays)
        self.config, self.dtype, self.order = config, np.dtype(dtype), _checked_order(order)

    def __repr__(self):
        tokens, rows = self["tokens"], self["rope_deltas"].shape[0]
        nbytes = sum(array.nbytes for array in self.values())
        shown = ", ".join(f"{n:,}" for n in tokens[:8].tolist()) + (f" … {len(tokens)}" if len(tokens) > 8 else "")
        return f"<States of {rows} row(s) after {shown} tokens: {nbytes:,} B, {self.order} order>"

    def in_order(self, order):
        """The same states with the value heads in another order."""
        _checked_order(order)
        if order == self.order:
            return self
        return States({name: self._moved(name, array) for name, array in self.items()}, self.config, self.dtype, order)

    def _moved(self, name, array):
        from qwenref.deltanet import from_gguf_order, to_gguf_order

        G, V = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        move = to_gguf_order if self.order == "hf" else from_gguf_order
        if name.endswith(".recurrent_state"):
            return move(array, G, V, axis=2)
        if name.endswith(".conv_state"):
            first = self.config.conv_dim - self.config.value_dim
            return np.concatenate([array[:, :, :first], move(array[:, :, first:], G, V, axis=2)], axis=2)
        return array

    def cache(self, tokens):
        """A Cache after so many tokens; what is fed to it has the bits of the run going on."""
        at = np.flatnonzero(self["tokens"] == tokens)
        if not len(at):
            raise InputError(
                compose(f"States.cache: no states after {tokens} tokens", expected=self["tokens"].tolist())
            )
        if self.order != "hf":
            return self.in_order("hf").cache(tokens)
        at, rows = int(at[0]), self["rope_deltas"].shape[0]
        cache = Cache(self.config, rows)
        cache._build(self.dtype)
        layers = []
        for i, layer in enumerate(cache.layers):
            grown = isinstance(layer, AttentionLayerCache)
            arrays = {name: self[f"layers.{i}.{name}"] for name in layer.arrays()}
            arrays = {n: (a[:, :, : int(tokens)] if grown else a[:, at]).copy(order="C") for n, a in arrays.items()}
            layers.append(layer.holding(arrays))
        cache._become(
            layers=layers,
            length=np.full(rows, int(tokens), np.int64),
            mask=np.ones((rows, int(tokens)), bool),
            sequence=self["sequence"][:, at].copy() if "sequence" in self else None,
            **{name: self[name][:, at].copy() for name in ("rope_deltas", "sequence_begin")},
        )
        return cache

    def save(self, path, order=None):
        """Write one safetensors file, complete or not there, in the order asked for (that of these states if None)."""
        from qwenref.cache_file import write

        states = self.in_order(order or self.order)
        write(path, "qwenref.states", self.config, self.dtype, states, {"order": states.order})

    @classmethod
    def load(cls, path, model_or_config=None):
        """What was saved, in the order it was saved in; a model or config of another geometry is refused."""
        from qwenref.cache_file import read

        expected = None if model_or_config is None else _text_config(model_or_config)
        tensors, metadata, config = read(path, "qwenref.states", expected)
        states = cls(tensors, config, metadata["dtype"], metadata["order"])
        states._check(path)
        return states

    def _check(self, path):
        from qwenref.cache_file import check

        tokens = self.get("tokens", np.zeros(0, np.int64))
        rows, N = self["rope_deltas"].shape if "rope_deltas" in self else (1, len(tokens))
        integers = ("rope_deltas", "sequence_begin", *(("sequence",) if "sequence" in self else ()))
        expected = {name: (np.dtype(np.int64), (rows, N)) for name in integers}
        expected["tokens"] = np.dtype(np.int64), (N,)
        fresh = Cache(self.config, rows)
        for i, layer in enumerate(fresh.layers):
            for name, array in layer.arrays().items():
                if isinstance(layer, AttentionLayerCache):
                    shape = (*array.shape[:2], int(tokens.max(initial=0)), array.shape[3])
                else:
                    shape = (rows, N, *array.shape[1:])
                expected[f"layers.{i}.{name}"] = self.dtype, shape
        check(path, self, expected)


def export_states(model, input_ids, tokens, path=None, order="hf", **options):
    """States of every layer after chosen numbers of tokens, from one run: a `States`, also written to `path` if given.

    `tokens` is a number or a list; 64 means that 64 tokens of each row have been read: the state that
    `capture(model, "layers.0.linear_attn.state@63")` sees.  Pads do not count.  `options` go to the model:
    attention_mask, position_ids, sequence_ids, inputs_embeds.  Nothing depends on which tokens are chosen.
    """
    _checked_order(order)
    refuse_unknown([name for name in options if name not in _OPTIONS], _OPTIONS)
    with unless_chosen(model.numerics):
        ids, embeds = hidden_or_ids(
            model.config.text_config, input_ids, options.pop("inputs_embeds", None), "export_states"
        )
    rows = len(embeds if ids is None else ids)
    numbers = np.unique(np.atleast_1d(np.asarray(tokens)))
    if numbers.dtype.kind not in "iu" or numbers.size == 0 or numbers[0] < 1:
        raise InputError(compose(f"export_states: tokens {tokens!r}", expected="numbers of tokens, at least 1"))
    cache = Cache(model, rows)
    cache.snapshot_at(numbers)
    model(ids, inputs_embeds=embeds, cache=cache, logits_to_keep=1, **options)
    if numbers[-1] > cache.length.min():
        raise InputError(
            compose(
                f"export_states: no row may end before token {numbers[-1]:,}",
                found=f"{int(cache.length.min()):,} tokens in row {int(cache.length.argmin())}",
                expected=f"tokens up to {int(cache.length.min()):,}",
            )
        )
    states = States(_arrays(cache, numbers.astype(np.int64)), cache.config, cache.dtype).in_order(order)
    if path is not None:
        states.save(path)
    return states


def _arrays(cache, numbers):
    marks = [[own[n] for n in numbers.tolist()] for own in cache._marks]

    def stacked(value, dtype=None):
        return np.array([[value(mark) for mark in own] for own in marks], dtype)

    arrays = {
        "tokens": numbers,
        "rope_deltas": stacked(lambda mark: mark.rope_delta, np.int64),
        "sequence_begin": stacked(lambda mark: mark.sequence_begin, np.int64),
    }
    sequence = stacked(lambda mark: mark.sequence, np.int64)
    if (sequence != NO_SEQUENCE).any():
        arrays["sequence"] = sequence
    for i, layer in enumerate(cache.layers):
        for name, array in layer.arrays().items():
            if isinstance(layer, AttentionLayerCache):
                arrays[f"layers.{i}.{name}"] = array[:, :, : int(numbers[-1])].copy()
            else:
                arrays[f"layers.{i}.{name}"] = stacked(lambda mark, i=i, name=name: getattr(mark.layers[i], name))
    return arrays


def _checked_order(order):
    if order not in _ORDERS:
        raise InputError(compose(f"states: order {order!r}", expected=" or ".join(map(repr, _ORDERS))))
    return order
