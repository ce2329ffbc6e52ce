"""What a model remembers between calls.

Attention layers keep keys and values [B, K, S, D]; DeltaNet layers keep the conv window [B, C, W-1] and the recurrent
state [B, V, K, D].  A masked token leaves no trace in any of them, so row b holds exactly `length[b]` tokens.
A call (`step.Step`) builds on copies and unseen slots; the cache changes in one go when it has come through.

Keys and values can be cut off behind any token, a state cannot: `Cache.crop` goes back to a state that was kept.
"""

import copy
from collections import namedtuple

import numpy as np

from qwenref import _C
from qwenref.checks import is_whole
from qwenref.errors import CapabilityMissing, InputError, compose
from qwenref.numerics import active, unless_chosen
from qwenref.pictures import met_before, waiting_arrays
from qwenref.positions import NOTHING

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

    def taken(self, rows, tokens):
        """A layer whose row i is row rows[i] of this one; the longest of them has `tokens`."""
        return self.holding({"keys": self._keys[rows, :, :tokens], "values": self._values[rows, :, :tokens]})

    def cropped(self, index, tokens, marks):
        """A layer that shares the slots of this one and uses as many as the longest row of `tokens`."""
        layer = copy.copy(self)
        layer.used = int(tokens.max())
        return layer

    def holding(self, arrays):
        """A layer like this one that holds other arrays, which become its own."""
        layer = copy.copy(self)
        layer._keys, layer._values = arrays["keys"], arrays["values"]
        (rows, heads, layer.used, width), layer.dtype = layer._keys.shape, layer._keys.dtype
        layer.shape = (rows, heads, 0, width)
        return layer

    def arrays(self):
        return {"keys": self.keys, "values": self.values}


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

    def taken(self, rows, tokens):
        return self.holding({name: array[rows] for name, array in self.arrays().items()})

    def cropped(self, index, tokens, marks):
        """A layer with the rows of this one; where there is a mark, what the mark kept (zeros for the empty start)."""
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        for row, mark in marks.items():
            for name, array in arrays.items():
                array[row] = getattr(mark.layers[index], name) if mark.layers else 0
        return self.holding(arrays)

    def holding(self, arrays):
        layer = copy.copy(self)
        layer.conv_state, layer.recurrent_state = arrays["conv_state"], arrays["recurrent_state"]
        layer.dtype = layer.recurrent_state.dtype
        return layer

    def arrays(self):
        return {"conv_state": self.conv_state, "recurrent_state": self.recurrent_state}


_KINDS = {"linear_attention": DeltaNetLayerCache, "full_attention": AttentionLayerCache}


def fresh_layers(config, batch, dtype):
    return [_KINDS[kind](config, batch, dtype) for kind in config.layer_types]


# A row after exactly so many of its tokens: `layers` {index: Recurrent} of the DeltaNet layers, and what it is waiting
# for of a picture it is in.  Keys and values need nothing but that number.
Mark = namedtuple("Mark", "rope_delta sequence sequence_begin layers waiting")
Recurrent = namedtuple("Recurrent", "conv_state recurrent_state")
NO_SEQUENCE = np.iinfo(np.int64).min  # of a row that was in none so far
_START = Mark(0, NO_SEQUENCE, 0, {}, NOTHING)
_GEOMETRY = (  # what shapes and meaning of the arrays of a cache follow from
    "layer_types", "num_key_value_heads", "head_dim", "linear_conv_kernel_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "rope_theta", "mrope_axes",
)  # fmt: skip
ROWS = ("length", "mask", "rope_deltas", "sequence_begin")  # arrays with one entry per row, besides the layers


class Cache:
    """Memory of `batch` conversations with one model.

    `.length` int64 [B] tokens remembered per row, pads not counted · `.mask` bool [B, columns] what was fed ·
    `.layers[i]` the arrays of layer i · `.rope_deltas` int64 [B]: next position of a row minus its tokens ·
    `.waiting` what each row was given of pictures and has not met yet · `.nbytes` bytes of all arrays in use: those of
    the layers, and the embeddings of the pictures in `.waiting`, H values for each placeholder of one, until it ends.
    Its arrays have the dtype of the numerics profile of the first call, and a later call under a profile of another
    dtype is refused.  One of the same dtype goes on from what is there, rounded as the earlier one rounded it.  One
    call at a time is made on a cache.

    With `snapshot_every=n` the states of every row are kept after each n of its tokens, wherever in a call they come,
    so that `crop` can go back.  One snapshot of one row costs the windows and states of the DeltaNet layers,
    `cache_size(model, tokens=0, kv_dtype="float32").total` bytes (150 MiB at 27B), and nothing for keys and values; all
    are kept until the row is cropped to before them, `forget_snapshots` is called or the cache is reset.  `.snapshots`
    lists their tokens, `.snapshot_nbytes` is what they take, besides `.nbytes`.
    """

    def __init__(self, model_or_config, batch=1, snapshot_every=None):
        self.config = _text_config(model_or_config)
        if not is_whole(batch) or batch < 1:
            raise InputError(compose(f"Cache: batch {batch!r}", expected="an integer of at least 1"))
        if snapshot_every is not None and (not is_whole(snapshot_every) or snapshot_every < 1):
            raise InputError(
                compose(f"Cache: snapshot_every {snapshot_every!r}", expected="a number of tokens, at least 1, or None")
            )
        self.batch = int(batch)
        self.snapshot_every = None if snapshot_every is None else int(snapshot_every)
        self._snapshot_at = ()  # further numbers of tokens after which the states are kept
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

    def _become(self, **values):
        """Set attributes in one go: an interrupt comes before all of them or after."""
        self.__dict__.update(values)

    def _build(self, dtype):
        B = self.batch
        self._become(
            dtype=np.dtype(dtype),
            length=np.zeros(B, np.int64),
            mask=np.zeros((B, 0), bool),
            rope_deltas=np.zeros(B, np.int64),
            sequence=None,  # id and first token of the sequence each row is in, once packed rows were fed
            sequence_begin=np.zeros(B, np.int64),
            waiting=[NOTHING] * B,  # positions.Waiting of each row
            met=[()] * B,  # pictures.Met of each row
            layers=fresh_layers(self.config, B, np.dtype(dtype)),
            _marks=[{} for _ in range(B)],  # of each row: {tokens: Mark}; a step puts new dicts in their place
        )

    def __repr__(self):
        from qwenref.cache_display import cache_text
        from qwenref.plain import plain

        return plain("\n".join(cache_text(self)))

    def _repr_html_(self):
        from qwenref.cache_display import cache_html

        return cache_html(self)

    @property
    def nbytes(self):
        pictures = waiting_arrays(self.waiting).values()
        return sum(layer.nbytes for layer in self.layers) + sum(array.nbytes for array in pictures)

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
        longest = int(self.length[rows].max())
        self._become(
            layers=[layer.taken(rows, longest) for layer in self.layers],
            sequence=None if self.sequence is None else self.sequence[rows],
            batch=len(rows),
            waiting=[self.waiting[row] for row in rows],
            met=[self.met[row] for row in rows],
            _marks=[dict(self._marks[row]) for row in rows],
            **{name: getattr(self, name)[rows] for name in ROWS},
        )

    def snapshot(self):
        """Everything, copied; give it to `restore` of a cache of the same model."""
        saved = {name: getattr(self, name).copy() for name in ROWS}
        saved["dtype"] = self.dtype
        saved["sequence"] = None if self.sequence is None else self.sequence.copy()
        saved["layers"] = [{name: array.copy() for name, array in layer.arrays().items()} for layer in self.layers]
        saved["marks"] = [dict(marks) for marks in self._marks]
        saved["waiting"], saved["met"] = list(self.waiting), list(self.met)
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
        pairs = zip(self.layers, saved["layers"], strict=True)
        self._become(
            layers=[layer.holding({name: array.copy() for name, array in arrays.items()}) for layer, arrays in pairs],
            sequence=None if saved["sequence"] is None else saved["sequence"].copy(),
            batch=len(saved["length"]),
            dtype=saved["dtype"],
            _marks=[dict(marks) for marks in saved["marks"]],
            waiting=list(saved["waiting"]),
            met=list(saved["met"]),
            **{name: saved[name].copy() for name in ROWS},
        )

    # Going back.

    @property
    def snapshots(self):
        """Of each row, the numbers of tokens after which its states are kept."""
        return [sorted(marks) for marks in self._marks]

    @property
    def snapshot_nbytes(self):
        """Bytes of the states kept for `crop`; rows that were copied by `reorder` share theirs."""
        kept = {id(mark): mark for marks in self._marks for mark in marks.values()}
        states = sum(array.nbytes for mark in kept.values() for pair in mark.layers.values() for array in pair)
        pictures = waiting_arrays(mark.waiting for mark in kept.values())
        return states + sum(array.nbytes for array in pictures.values())

    def snapshot_at(self, tokens):
        """Keep the states after these numbers of tokens as well, whenever a call gets there.

        A list, or one number; it takes the place of what was asked for before, and [] of nothing.
        """
        asked = np.atleast_1d(np.asarray(tokens))
        if asked.size and (asked.dtype.kind not in "iu" or asked.ndim != 1 or asked.min() < 1):
            raise InputError(compose(f"Cache.snapshot_at: {tokens!r}", expected="numbers of tokens, at least 1"))
        self._snapshot_at = tuple(asked.tolist())

    def forget_snapshots(self, before):
        """Let go of the snapshots of fewer than `before` tokens; everything else stays as it is."""
        self._between_calls("Cache.forget_snapshots")
        if not is_whole(before):
            raise InputError(compose(f"Cache.forget_snapshots: before {before!r}", expected="a number of tokens"))
        self._become(_marks=[{n: mark for n, mark in own.items() if n >= before} for own in self._marks])

    def keeps(self, lengths):
        """Where, in an array of numbers of tokens, the states are kept."""
        every = self.snapshot_every
        kept = np.zeros(lengths.shape, bool) if every is None else lengths % every == 0
        return kept | np.isin(lengths, self._snapshot_at) if self._snapshot_at else kept

    def crop(self, tokens):
        """Forget what stands behind the first `tokens` tokens of each row; int64 [B], tokens to be run again.

        `tokens` is one number for all rows or one per row; a negative one is that many fewer than there are.  Without
        DeltaNet layers a row is cut exactly.  With them it goes back to the nearest snapshot at or before `tokens` (see
        `snapshot_every`, with which the empty start is one as well) and the tokens between that and `tokens`, whose
        number is returned, have to be fed again.  A row that is no longer than asked stays what it is.  `.mask` then
        ends with the last column that a row still remembers.  A cache that cannot go back says so and stays what it is.

        Pictures that begin behind the place a row goes back to are forgotten: they are handed over again with the call
        of their first placeholder.  One that it goes back into is kept.  A row cut inside of an image or video without
        a snapshot there goes back to where that begins.
        """
        self._between_calls("Cache.crop")
        wanted = np.minimum(self._checked_crop(tokens), self.length)
        kept, marks = wanted.copy(), {}
        for row in np.flatnonzero(wanted < self.length):
            kept[row], mark = self._back(int(row), int(wanted[row]))
            if mark is not None:
                marks[int(row)] = mark
        shorter = np.flatnonzero(kept < self.length)
        if not len(shorter):
            return wanted - kept
        mask, before = self.mask.copy(), self.length
        for row in shorter:
            mask[row, np.flatnonzero(mask[row])[kept[row] :]] = False
        columns = np.flatnonzero(mask.any(axis=0))
        values = {name: getattr(self, name).copy() for name in ("rope_deltas", "sequence_begin")}
        sequence = None if self.sequence is None else self.sequence.copy()
        waiting, met = list(self.waiting), list(self.met)
        for row in shorter:
            met[row], _ = met_before(met[row], kept[row])
            waiting[row] = marks[row].waiting if row in marks else NOTHING
            values["rope_deltas"][row] -= self._delta_behind(row, kept[row])
        for row, mark in marks.items():
            values["rope_deltas"][row], values["sequence_begin"][row] = mark.rope_delta, mark.sequence_begin
            if sequence is not None:
                sequence[row] = mark.sequence
        if sequence is not None and (sequence == NO_SEQUENCE).all():
            sequence = None
        self._become(
            layers=[layer.cropped(i, kept, marks) for i, layer in enumerate(self.layers)],
            length=kept,
            mask=np.ascontiguousarray(mask[:, : columns[-1] + 1 if len(columns) else 0]),
            sequence=sequence,
            waiting=waiting,
            met=met,
            _marks=[{n: mark for n, mark in own.items() if n <= kept[b]} for b, own in enumerate(self._marks)],
            **values,
        )
        for layer in self.layers:
            if isinstance(layer, AttentionLayerCache):
                for row in shorter:
                    layer.put(row, slice(kept[row], before[row]), 0, 0)
        return wanted - kept

    def _checked_crop(self, tokens):
        """int64 [B] of what `crop` was asked for."""
        asked = np.asarray(tokens)
        if asked.dtype.kind not in "iu" or asked.shape not in ((), (self.batch,)):
            raise InputError(
                compose(
                    f"Cache.crop: {tokens!r}", expected=f"a number of tokens, or one for each of {self.batch} row(s)"
                )
            )
        asked = np.broadcast_to(asked.astype(np.int64), self.length.shape)
        return np.maximum(np.where(asked < 0, self.length + asked, asked), 0)

    def _back(self, row, tokens):
        """(tokens, Mark or None) of the nearest place at or before `tokens` the row can go back to exactly."""
        if tokens == 0:
            return 0, _START
        stateful = sum(isinstance(layer, DeltaNetLayerCache) for layer in self.layers)
        _, whole = met_before(self.met[row], tokens)
        before = [n for n in self._marks[row] if n <= tokens]
        if not stateful and whole > self.sequence_begin[row] and whole >= max(before, default=0):
            return whole, None
        if before:
            return max(before), self._marks[row][max(before)]
        if not stateful and whole == 0:
            return 0, _START
        if self.snapshot_every is not None:
            return 0, _START
        what = f"{stateful} DeltaNet layer{'s' * (stateful > 1)} cannot be cropped to {tokens} tokens"
        if not stateful:
            what = f"row {row} cannot be cropped to {tokens} tokens, where another packed sequence ends"
        raise CapabilityMissing(
            compose(
                f"{what}; no snapshot at or before {tokens}. Use Cache(..., snapshot_every=64)",
                found=f"row {row}: {self.length[row]:,} tokens, snapshots at {sorted(self._marks[row]) or 'none'}",
                do="crop(0) starts over; snapshot() and restore() go back to any point between calls",
            )
        )

    def _delta_behind(self, row, tokens):
        """What the pictures that begin behind the first `tokens` of a row add to its rope_delta."""
        begun = self.waiting[row].begun
        behind = [one.reach - one.tokens for one in self.met[row] if one.begin >= tokens]
        if begun and behind:
            behind[-1] = int(begun.picture.reach(begun.met)) - begun.met
        return sum(behind)

    # Files.

    def save(self, path):
        """Write one safetensors file that `Cache.load` reads; see `qwenref.cache_file` for what is in it.

        It is complete or not there.  The snapshots kept for `crop` are not part of it.
        """
        from qwenref.cache_file import save

        self._between_calls("Cache.save")
        save(self, path)

    @classmethod
    def load(cls, path, model_or_config=None):
        """The cache that was saved, to the bit.  With a model or config, one of another geometry is refused."""
        from qwenref.cache_file import load

        return load(cls, path, None if model_or_config is None else _text_config(model_or_config))


def _geometry(arrays):
    """Names of a layer's arrays with the dimensions that belong to the model: all but rows and, of keys, tokens."""
    dims = {"keys": (1, 3), "values": (1, 3), "conv_state": (1, 2), "recurrent_state": (1, 2, 3)}
    return {name: tuple(array.shape[d] for d in dims[name]) for name, array in arrays.items()}


def same_geometry(found, expected, what, error, do):
    """`error` unless what a cache holds means the same by two text configs."""
    other = [name for name in _GEOMETRY if getattr(found, name) != getattr(expected, name)]
    if other:
        shown = [", ".join(f"{name} {getattr(config, name)}" for name in other) for config in (found, expected)]
        raise error(
            compose(what, found=shown[0], expected=shown[1], do=do),
        )


def _text_config(source):
    """Text section of a model, module, config, dict or path."""
    config = getattr(source, "config", source)
    if not isinstance(config, (_C.Config, _C.TextConfig)):
        from qwenref.loading import as_config

        config = as_config(config)
    return config.text_config
