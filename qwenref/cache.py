"""What a model remembers between calls, and one call in the making.

Attention layers keep keys and values [B, K, S, D]; DeltaNet layers keep the conv window [B, C, W-1] and the recurrent
state [B, V, K, D].  A masked token leaves no trace in any of them, so row b holds exactly `length[b]` tokens.
A call builds on copies and unseen slots; the cache changes in one go when the outermost call has come through.
"""

import numpy as np

from qwenref.errors import InputError, ShapeError, compose
from qwenref.inputs import checked_mask, checked_positions, checked_sequences
from qwenref.numerics import active

_ROOM = 64  # an attention layer grows by at least this many tokens, and by half


class AttentionLayerCache:
    """Keys and values of one attention layer: `.keys`, `.values` [B, K, S, D], S the longest row."""

    def __init__(self, config, batch, dtype):
        self.shape = (batch, config.num_key_value_heads, 0, config.head_dim)
        self.dtype, self.used = dtype, 0
        self._keys = np.zeros(self.shape, dtype)
        self._values = np.zeros(self.shape, dtype)

    @property
    def keys(self):
        return self._keys[:, :, : self.used]

    @property
    def values(self):
        return self._values[:, :, : self.used]

    @property
    def nbytes(self):
        return self.keys.nbytes + self.values.nbytes

    def room_for(self, tokens):
        """Make slots up to `tokens` exist; what is stored stays where it is."""
        capacity = self._keys.shape[2]
        if tokens <= capacity:
            return
        B, K, _, D = self.shape
        wider = (B, K, max(tokens, capacity + capacity // 2, _ROOM), D)
        for name in ("_keys", "_values"):
            array = np.zeros(wider, self.dtype)
            array[:, :, : self.used] = getattr(self, name)[:, :, : self.used]
            setattr(self, name, array)

    def take(self, rows):
        self._keys, self._values = self._keys[rows], self._values[rows]
        self.shape = self._keys.shape[:2] + (0, self.shape[3])

    def snapshot(self):
        return {"keys": self.keys.copy(), "values": self.values.copy()}

    def restore(self, saved):
        self._keys, self._values = saved["keys"].copy(), saved["values"].copy()
        self.used = self._keys.shape[2]


class DeltaNetLayerCache:
    """Window and state of one DeltaNet layer: `.conv_state` [B, C, W-1], oldest first; `.recurrent_state` [B, V, K, D].

    Neither array is ever written after it was put here: a step brings new ones.
    """

    def __init__(self, config, batch, dtype):
        self.dtype = dtype
        self.conv_state = np.zeros((batch, config.conv_dim, config.linear_conv_kernel_dim - 1), dtype)
        V, K, D = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        self.recurrent_state = np.zeros((batch, V, K, D), dtype)

    @property
    def nbytes(self):
        return self.conv_state.nbytes + self.recurrent_state.nbytes

    def take(self, rows):
        self.conv_state, self.recurrent_state = self.conv_state[rows], self.recurrent_state[rows]

    def snapshot(self):
        return {"conv_state": self.conv_state.copy(), "recurrent_state": self.recurrent_state.copy()}

    def restore(self, saved):
        self.conv_state, self.recurrent_state = saved["conv_state"].copy(), saved["recurrent_state"].copy()


class Cache:
    """Memory of `batch` conversations with one model.

    `.length` int64 [B] tokens remembered per row, pads not counted · `.mask` bool [B, columns] what was fed ·
    `.layers[i]` the arrays of layer i · `.rope_deltas` int64 [B] · `.nbytes` bytes of all arrays in use.
    """

    def __init__(self, model_or_config, batch=1):
        config = getattr(model_or_config, "config", model_or_config)
        self.config = config.text_config
        if not isinstance(batch, (int, np.integer)) or batch < 1:
            raise InputError(compose(f"Cache: batch {batch!r}", expected="an integer of at least 1"))
        self.batch = int(batch)
        self.step = None  # the call that is being made on this cache, if any
        self._build(active().dtype)

    def _build(self, dtype):
        B = self.batch
        self.dtype = np.dtype(dtype)
        self.length = np.zeros(B, np.int64)
        self.mask = np.zeros((B, 0), bool)
        self.rope_deltas = np.zeros(B, np.int64)
        self.sequence = None  # id and first token of the sequence each row is in, once packed rows were fed
        self.sequence_begin = np.zeros(B, np.int64)
        kinds = {"linear_attention": DeltaNetLayerCache, "full_attention": AttentionLayerCache}
        self.layers = [kinds[kind](self.config, B, self.dtype) for kind in self.config.layer_types]

    def __repr__(self):
        lengths = self.length.tolist()
        tokens = f"{lengths[0]:,}" if len(set(lengths)) == 1 else ", ".join(f"{n:,}" for n in lengths)
        rows = "1 row" if self.batch == 1 else f"{self.batch} rows"
        parts = []
        for kind, words in ((AttentionLayerCache, "keys/values"), (DeltaNetLayerCache, "conv and state")):
            layers = [layer for layer in self.layers if isinstance(layer, kind)]
            if layers:
                parts.append(f"{len(layers)} x {words} {_mebibytes(sum(layer.nbytes for layer in layers))}")
        return f"Cache · {rows}, {tokens} tokens · {self.dtype} · {_mebibytes(self.nbytes)} = {' + '.join(parts)}"

    @property
    def nbytes(self):
        return sum(layer.nbytes for layer in self.layers)

    def reset(self):
        """Forget everything; the next call starts a conversation."""
        self._build(self.dtype)

    def reorder(self, rows):
        """Row i becomes what row rows[i] was; rows may repeat, and there may be more or fewer than before."""
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.size == 0:
            raise InputError(compose(f"Cache.reorder: rows {rows!r}", expected="a list of row numbers"))
        if rows.min() < 0 or rows.max() >= self.batch:
            raise InputError(compose(f"Cache.reorder: rows {rows.tolist()}", expected=f"numbers 0 to {self.batch - 1}"))
        for layer in self.layers:
            layer.take(rows)
        for name in ("length", "mask", "rope_deltas", "sequence_begin"):
            setattr(self, name, getattr(self, name)[rows])
        self.sequence = None if self.sequence is None else self.sequence[rows]
        self.batch = len(rows)

    def snapshot(self):
        """Everything, copied; give it to `restore` of a cache of the same model."""
        names = ("length", "mask", "rope_deltas", "sequence_begin")
        saved = {name: getattr(self, name).copy() for name in names}
        saved["sequence"] = None if self.sequence is None else self.sequence.copy()
        saved["layers"] = [layer.snapshot() for layer in self.layers]
        return saved

    def restore(self, saved):
        """Be what `saved` was, to the bit.  The snapshot stays usable."""
        if len(saved["layers"]) != len(self.layers):
            raise InputError(
                compose(
                    "Cache.restore: a snapshot of another model",
                    found=f"{len(saved['layers'])} layers",
                    expected=f"{len(self.layers)} layers",
                )
            )
        for layer, arrays in zip(self.layers, saved["layers"], strict=True):
            layer.restore(arrays)
        for name in ("length", "mask", "rope_deltas", "sequence_begin"):
            setattr(self, name, saved[name].copy())
        self.sequence = None if saved["sequence"] is None else saved["sequence"].copy()
        self.batch = len(self.length)


class Step:
    """One call in the making on a cache: where each token stands, what it sees, and what the layers hand in.

    `.mask` bool [B, T] or None (nothing masked) · `.advance` int64 [B, T] or None: 0 skip, 1 advance, 2 forget first ·
    `.begin`, `.end` int64 [B, T]: keys a token sees · `.positions` int64 [3, B, T] · `.attentions` list or None.
    A model opens one with `Step.start`; nested models share it, and only the outermost makes it final.
    """

    def __init__(self, cache, batch, tokens, attention_mask=None, position_ids=None, sequence_ids=None):
        if batch != cache.batch:
            raise ShapeError(
                compose(
                    "cache: another number of rows",
                    found=f"{batch} rows of tokens",
                    expected=f"{cache.batch}",
                    do="make one with Cache(model, batch=...)",
                )
            )
        dtype = active().dtype
        if cache.dtype != dtype:
            if cache.length.any():
                raise InputError(
                    compose(
                        "cache: filled under another numerics profile",
                        found=f"{cache.dtype} arrays",
                        expected=f"{dtype}",
                        do="start a new Cache for this profile",
                    )
                )
            cache._build(dtype)
        self.cache, self.attentions = cache, None
        self._staged, self._depth = {}, 0
        kept = checked_mask(attention_mask, batch, tokens, cache.mask)
        ids = checked_sequences(sequence_ids, batch, tokens)
        self._place(kept, ids, batch, tokens)
        self.positions = checked_positions(position_ids, batch, tokens)
        if self.positions is None:
            own = self.end - 1 - self.begin + (cache.rope_deltas[:, None] if ids is None else 0)
            own = own if self.mask is None else np.where(self.mask, own, 0)
            self.positions = np.broadcast_to(own, (3, batch, tokens))

    def _place(self, kept, ids, batch, tokens):
        """Fill mask, advance, begin, end, and the lengths and sequences there will be afterwards."""
        cache = self.cache
        self._kept = np.ones((batch, tokens), bool) if kept is None else kept
        self.mask = None if self._kept.all() else self._kept
        self.end = cache.length[:, None] + np.cumsum(self._kept, axis=1)
        self._length = self.end[:, -1] if tokens else cache.length
        self.begin = np.broadcast_to(cache.sequence_begin[:, None], (batch, tokens))
        self.advance = None if self.mask is None else self._kept.astype(np.int64)
        self._sequence, self._sequence_begin = cache.sequence, cache.sequence_begin
        if ids is not None:
            self._pack(ids)
        if self.mask is not None:
            self.end = np.where(self._kept, self.end, self.begin)
        limit = cache.config.max_position_embeddings
        if self._length.size and self._length.max() > limit:
            raise InputError(
                compose(
                    f"{int(self._length.max()):,} tokens are more than the model takes",
                    found=f"{int(cache.length.max()):,} in the cache, {tokens:,} new",
                    expected=f"at most {limit:,}   (config.max_position_embeddings)",
                )
            )

    def _pack(self, ids):
        """A token whose id differs from the one before it starts a sequence: nothing older is seen or remembered."""
        self.begin = self.begin.copy()
        self.advance = self._kept.astype(np.int64)
        self._sequence = np.zeros(len(ids), np.int64)
        self._sequence_begin = self._sequence_begin.copy()
        for row, kept in enumerate(self._kept):
            known = self.cache.sequence is not None
            last = self.cache.sequence[row] if known else None
            fresh = self.cache.length[row] == 0
            for t in np.flatnonzero(kept):
                if last is None or ids[row, t] != last:
                    if not fresh:
                        self.advance[row, t] = 2
                        self._sequence_begin[row] = self.end[row, t] - 1
                    last = ids[row, t]
                fresh = False
                self.begin[row, t:] = self._sequence_begin[row]
            self._sequence[row] = -1 if last is None else last

    @classmethod
    def start(cls, cache, config, batch, tokens, attention_mask=None, position_ids=None, sequence_ids=None):
        """The step an enclosing model has opened on this cache, or a new one; no cache means one for this call."""
        if cache is not None and cache.step is not None:
            return cache.step
        cache = Cache(config, batch) if cache is None else cache
        return cls(cache, batch, tokens, attention_mask, position_ids, sequence_ids)

    @classmethod
    def of(cls, cache, config, hidden, attention_mask=None, position_ids=None):
        """The step a layer works in.  A layer called alone gets one of its own, which changes no cache."""
        if cache is not None and cache.step is not None:
            return cache.step
        step = cls.start(cache, config, *hidden.shape[:2], attention_mask, position_ids)
        step.attentions = []
        return step

    def __enter__(self):
        if self._depth == 0:
            self.cache.step = self
        self._depth += 1
        return self

    def __exit__(self, kind, error, traceback):
        self._depth -= 1
        if self._depth == 0:
            self.cache.step = None
            if kind is None:
                self._commit()

    def _commit(self):
        cache = self.cache
        for index, arrays in self._staged.items():
            layer = cache.layers[index]
            if arrays is None:
                layer.used = int(self._length.max())
            else:
                layer.conv_state, layer.recurrent_state = arrays
        cache.mask = np.concatenate([cache.mask, self._kept], axis=1)
        cache.length = np.array(self._length)
        cache.sequence, cache.sequence_begin = self._sequence, self._sequence_begin

    # What layers ask for.

    def recall(self, index):
        """(conv window, recurrent state) of layer `index` before this step."""
        layer = self.cache.layers[index]
        return layer.conv_state, layer.recurrent_state

    def remember(self, index, window, state):
        """Window and state of layer `index` after this step."""
        self._staged[index] = (window, state)

    def append(self, index, k, v):
        """Put k, v [B, T, K, D] behind what layer `index` holds; all keys and values so far [B, K, S, D]."""
        layer = self.cache.layers[index]
        size = int(self._length.max()) if len(self._length) else 0
        layer.room_for(size)
        for array, new in ((layer._keys, k), (layer._values, v)):
            if self.mask is None and (self.cache.length == self.cache.length[0]).all():
                past = int(self.cache.length[0])
                array[:, :, past:size] = new.transpose(0, 2, 1, 3)
                continue
            for row, kept in enumerate(self._kept):
                past, after = int(self.cache.length[row]), int(self._length[row])
                array[row, :, past:after] = new[row, kept].transpose(1, 0, 2)
        self._staged[index] = None
        return layer._keys[:, :, :size], layer._values[:, :, :size]

    # Attention probabilities, kept only when somebody asked.

    def keep_attentions(self, wanted):
        self.attentions = [] if wanted else None

    @property
    def keeps_attentions(self):
        return self.attentions is not None

    def with_attentions(self, attended):
        """(context, weights by column or None) from what the op returned."""
        if self.attentions is None:
            return attended, None
        context, weights = attended
        self.attentions.append(self._by_column(weights))
        return context, self.attentions[-1]

    def _by_column(self, weights):
        """Weights [B, Q, T, S] over remembered tokens, spread to the columns that were fed: pads get 0."""
        fed = np.concatenate([self.cache.mask, self._kept], axis=1)
        if fed.all():
            return weights
        B, Q, T, _ = weights.shape
        spread = np.zeros((B, Q, T, fed.shape[1]), weights.dtype)
        for row, kept in enumerate(fed):
            columns = np.flatnonzero(kept)
            spread[row][:, :, columns] = weights[row][:, :, : len(columns)]
        return spread


def _mebibytes(n):
    return f"{n / 2**20:.4g} MiB"
