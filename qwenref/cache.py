"""What a model remembers between calls.

Attention layers keep keys and values [B, K, S, D]; DeltaNet layers keep the conv window [B, C, W-1] and the recurrent
state [B, V, K, D].  A masked token leaves no trace in any of them, so row b holds exactly `length[b]` tokens.
A call (`step.Step`) builds on copies and unseen slots; the cache changes in one go when it has come through.
"""

import numpy as np

from qwenref import _C
from qwenref.errors import InputError, compose
from qwenref.numerics import active, unless_chosen

_ROOM = 64  # an attention layer grows by at least this many tokens, and by half


class AttentionLayerCache:
    """Keys and values of one attention layer: `.keys`, `.values` [B, K, S, D], S the longest row.

    Slots behind the last token of a row are 0.
    """

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
        keys, values = np.zeros(wider, self.dtype), np.zeros(wider, self.dtype)
        keys[:, :, : self.used], values[:, :, : self.used] = self.keys, self.values
        self._keys, self._values = keys, values

    def put(self, row, slots, k, v):
        """Keys and values [K, n, D] of one row into the given slots."""
        self._keys[row, :, slots], self._values[row, :, slots] = k, v

    def held(self):
        """What `hold` needs to go back to now."""
        return self.used

    def hold(self, held, lengths):
        """Forget what was added since `held()`, when the rows had `lengths`: the slots are 0 again."""
        for row, tokens in enumerate(lengths):
            self.put(row, slice(tokens, None), 0, 0)
        self.used = held

    def take(self, rows, tokens):
        """Row i becomes row rows[i]; the longest of them has `tokens`."""
        self._hold(self._keys[rows, :, :tokens], self._values[rows, :, :tokens])

    def _hold(self, keys, values):
        self._keys, self._values = keys, values
        self.used, self.shape = keys.shape[2], (*keys.shape[:2], 0, keys.shape[3])
        self.dtype = keys.dtype

    def arrays(self):
        return {"keys": self.keys, "values": self.values}

    def restore(self, saved):
        self._hold(saved["keys"].copy(), saved["values"].copy())


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

    def held(self):
        return self.conv_state, self.recurrent_state

    def hold(self, held, lengths):
        self.conv_state, self.recurrent_state = held

    def take(self, rows, tokens):
        self.conv_state, self.recurrent_state = self.conv_state[rows], self.recurrent_state[rows]

    def arrays(self):
        return {"conv_state": self.conv_state, "recurrent_state": self.recurrent_state}

    def restore(self, saved):
        self.conv_state, self.recurrent_state = saved["conv_state"].copy(), saved["recurrent_state"].copy()
        self.dtype = self.recurrent_state.dtype


_KINDS = {"linear_attention": DeltaNetLayerCache, "full_attention": AttentionLayerCache}


def fresh_layers(config, batch, dtype):
    return [_KINDS[kind](config, batch, dtype) for kind in config.layer_types]


class Cache:
    """Memory of `batch` conversations with one model.

    `.length` int64 [B] tokens remembered per row, pads not counted · `.mask` bool [B, columns] what was fed ·
    `.layers[i]` the arrays of layer i · `.rope_deltas` int64 [B] · `.nbytes` bytes of all arrays in use.
    Its arrays have the dtype of the numerics profile of the first call.  One call at a time is made on a cache.
    """

    def __init__(self, model_or_config, batch=1):
        self.config = _text_config(model_or_config)
        if not isinstance(batch, (int, np.integer)) or isinstance(batch, bool) or batch < 1:
            raise InputError(compose(f"Cache: batch {batch!r}", expected="an integer of at least 1"))
        self.batch = int(batch)
        self._step = None
        with unless_chosen(getattr(model_or_config, "numerics", "fp32")):
            self._build(active().dtype)

    @property
    def step(self):
        """The call that is being made on this cache, or None.  Held weakly: a call that is gone blocks nothing."""
        return None if self._step is None else self._step()

    def _between_calls(self, what):
        if self.step is not None:
            raise InputError(compose(f"{what}: a call is being made on this cache", do="wait until it has returned"))

    def _build(self, dtype):
        B = self.batch
        self.dtype = np.dtype(dtype)
        self.length = np.zeros(B, np.int64)
        self.mask = np.zeros((B, 0), bool)
        self.rope_deltas = np.zeros(B, np.int64)
        self.sequence = None  # id and first token of the sequence each row is in, once packed rows were fed
        self.sequence_begin = np.zeros(B, np.int64)
        self.layers = fresh_layers(self.config, B, self.dtype)

    def __repr__(self):
        from qwenref.cache_display import cache_text
        from qwenref.plain import plain

        return plain("\n".join(cache_text(self)))

    def _repr_html_(self):
        from qwenref.cache_display import cache_html

        return cache_html(self)

    @property
    def nbytes(self):
        return sum(layer.nbytes for layer in self.layers)

    def reset(self):
        """Forget everything; the next call starts a conversation."""
        self._between_calls("Cache.reset")
        self._build(self.dtype)

    def reorder(self, rows):
        """Row i becomes what row rows[i] was; rows may repeat, and there may be more or fewer than before."""
        self._between_calls("Cache.reorder")
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.size == 0:
            raise InputError(compose(f"Cache.reorder: rows {rows!r}", expected="a list of row numbers"))
        if rows.min() < 0 or rows.max() >= self.batch:
            raise InputError(compose(f"Cache.reorder: rows {rows.tolist()}", expected=f"numbers 0 to {self.batch - 1}"))
        for layer in self.layers:
            layer.take(rows, int(self.length[rows].max()))
        for name in ("length", "mask", "rope_deltas", "sequence_begin"):
            setattr(self, name, getattr(self, name)[rows])
        self.sequence = None if self.sequence is None else self.sequence[rows]
        self.batch = len(rows)

    def snapshot(self):
        """Everything, copied; give it to `restore` of a cache of the same model."""
        names = ("length", "mask", "rope_deltas", "sequence_begin")
        saved = {name: getattr(self, name).copy() for name in names}
        saved["dtype"] = self.dtype
        saved["sequence"] = None if self.sequence is None else self.sequence.copy()
        saved["layers"] = [{name: array.copy() for name, array in layer.arrays().items()} for layer in self.layers]
        return saved

    def restore(self, saved):
        """Be what `saved` was, to the bit.  The snapshot stays usable."""
        self._between_calls("Cache.restore")
        found = [_geometry(arrays) for arrays in saved["layers"]]
        expected = [_geometry(layer.arrays()) for layer in self.layers]
        if found != expected:
            index = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
            raise InputError(
                compose(
                    "Cache.restore: a snapshot of another model",
                    found=f"{len(found)} layers" if index is None else f"layer {index}: {found[index]}",
                    expected=f"{len(expected)} layers" if index is None else f"layer {index}: {expected[index]}",
                )
            )
        for layer, arrays in zip(self.layers, saved["layers"], strict=True):
            layer.restore(arrays)
        for name in ("length", "mask", "rope_deltas", "sequence_begin"):
            setattr(self, name, saved[name].copy())
        self.sequence = None if saved["sequence"] is None else saved["sequence"].copy()
        self.batch, self.dtype = len(self.length), saved["dtype"]


def _geometry(arrays):
    """Names of a layer's arrays with the dimensions that belong to the model: all but rows and, of keys, tokens."""
    dims = {"keys": (1, 3), "values": (1, 3), "conv_state": (1, 2), "recurrent_state": (1, 2, 3)}
    return {name: tuple(array.shape[d] for d in dims[name]) for name, array in arrays.items()}


def _text_config(source):
    """Text section of a model, module, config, dict or path."""
    config = getattr(source, "config", source)
    if not isinstance(config, (_C.Config, _C.TextConfig)):
        from qwenref.loading import as_config

        config = as_config(config)
    return config.text_config
