"""One call in the making: where its tokens stand, what they see, and what its layers leave in the cache.

Nothing of it reaches the cache before the call has come through; a call that fails leaves no trace.
"""

import functools
import threading
import weakref
from contextvars import ContextVar

import numpy as np

from qwenref.cache import NO_SEQUENCE, Cache, DeltaNetLayerCache, Mark, Recurrent, fresh_layers, same_geometry
from qwenref.errors import InputError, ShapeError, compose
from qwenref.inputs import checked_mask, checked_positions, checked_sequences
from qwenref.numerics import active
from qwenref.pictures import Placing

_final = ContextVar("qwenref_final_steps", default=None)  # steps made final inside the hooked call of a model


_CHANGING = (
    "layers", "dtype", "mask", "length", "sequence", "sequence_begin", "rope_deltas", "waiting", "met", "_marks",
)  # fmt: skip


class OpensSteps:
    """What a model that opens steps adds to a module: a hook of its own that fails undoes a step already final."""

    __slots__ = ()

    def _call_hooked(self, /, *args, **kwargs):
        steps = []
        token = _final.set(steps)
        try:
            return super()._call_hooked(*args, **kwargs)
        except BaseException:
            undo_finished(self)
            raise
        finally:
            _final.reset(token)


def undo_finished(owner):
    """Undo what the hooked call of `owner` that is going on has made final."""
    for step in _final.get() or ():
        if step.owner is owner:
            step.undo()


class Step:
    """One call in the making on a cache: where each token stands, what it sees, and what the layers hand in.

    `.mask` bool [B, T] or None (nothing masked) · `.advance` int64 [B, T] or None: 0 skip, 1 advance, 2 forget first ·
    `.begin`, `.end` int64 [B, T]: keys a token sees · `.positions` int64 [3, B, T] ·
    `.placing` which tokens are pictures ·
    `.keeps` whether the cache outlives the call · `.attentions` {layer: weights}, or None when nobody asked ·
    `.stored` how the profile rounds what a cache keeps, or None ·
    `.cuts` numbers of tokens of this call, fewer than T, after which the cache keeps the states of a row.
    A model opens one with `Step.start`; the model inside it shares it, and only the outermost makes it final.
    """

    def __init__(self, cache, batch, tokens, attention_mask=None, position_ids=None, sequence_ids=None):
        self.cache, self.shape = cache, (batch, tokens)
        self._staged, self._depth, self._encloses, self.owner = {}, 0, 0, None
        self.keeps, self.features = True, {}
        self.cuts, self._between = (), {}
        self.final = True  # whether the cache changes when the call has come through
        self._thread = threading.get_ident()
        self.attentions = None
        if batch != cache.batch:
            raise ShapeError(
                compose(
                    "cache: another number of rows",
                    found=f"{batch} rows of tokens",
                    expected=f"{cache.batch}",
                    do="make one with Cache(model, batch=...)",
                )
            )
        profile = active()
        self.dtype, self.layers = profile.dtype, cache.layers
        self.stored = profile.stored if profile.rounds_stored else None
        if cache.dtype != self.dtype:
            if cache.mask.shape[1]:
                raise InputError(
                    compose(
                        "cache: filled under another numerics profile",
                        found=f"{cache.dtype} arrays",
                        expected=f"{self.dtype}",
                        do="start a new Cache for this profile",
                    )
                )
            self.layers = fresh_layers(cache.config, batch, self.dtype)
        kept = checked_mask(attention_mask, batch, tokens, cache.mask)
        ids = checked_sequences(sequence_ids, batch, tokens)
        self._place(kept, ids, batch, tokens)
        self._mask = np.concatenate([cache.mask, self._kept], axis=1)
        self._before = {name: getattr(cache, name) for name in _CHANGING}, [layer.held() for layer in cache.layers]
        self._positions = checked_positions(position_ids, batch, tokens, self._kept, ids)

    def place(self, handed):
        """Say which tokens are pictures: `handed` is what the call brings, None for text alone."""
        self.__dict__.pop("positions", None)
        self.placing = Placing(self.cache, handed, self._kept, self.begin, self.end)

    @functools.cached_property
    def placing(self):
        return Placing(self.cache, None, self._kept, self.begin, self.end)

    @functools.cached_property  # every layer asks
    def positions(self):
        return self.placing.positions if self._positions is None else self._positions

    def _place(self, kept, ids, batch, tokens):
        """Fill mask, advance, begin, end, and the lengths and sequences there will be afterwards."""
        cache = self.cache
        self._kept = np.ones((batch, tokens), bool) if kept is None else kept
        self.mask = None if self._kept.all() else self._kept
        self.end = cache.length[:, None] + np.cumsum(self._kept, axis=1)
        self._length = self.end[:, -1].copy()
        self.begin = np.broadcast_to(cache.sequence_begin[:, None], (batch, tokens))
        self.advance = None if self.mask is None else self._kept.astype(np.int64)
        self._sequence, self._sequence_begin = cache.sequence, cache.sequence_begin
        self._ids, self._kept_after = ids, self._kept & cache.keeps(self.end)
        if ids is not None:
            self._pack(ids)
        if self.mask is not None:
            self.end = np.where(self._kept, self.end, self.begin)
        limit, longest = cache.config.max_position_embeddings, int((self.end - self.begin).max())
        if longest > limit:
            raise InputError(
                compose(
                    f"{longest:,} tokens are more than the model takes",
                    found=f"{int(cache.length.max()):,} in the cache, {tokens:,} new",
                    expected=f"at most {limit:,}   (config.max_position_embeddings)",
                )
            )

    def _pack(self, ids):
        """A token whose id differs from the one before it starts a sequence: nothing older is seen or remembered."""
        self.begin = self.begin.copy()
        self.advance = self._kept.astype(np.int64)
        self._sequence = np.empty(len(ids), np.int64)
        self._sequence_begin = self._sequence_begin.copy()
        for row, kept in enumerate(self._kept):
            last = NO_SEQUENCE if self.cache.sequence is None else self.cache.sequence[row]
            fresh = self.cache.length[row] == 0
            for t in np.flatnonzero(kept):
                if ids[row, t] != last:
                    if not fresh:
                        self.advance[row, t] = 2
                        self._sequence_begin[row] = self.end[row, t] - 1
                    last = ids[row, t]
                fresh = False
                self.begin[row, t:] = self._sequence_begin[row]
            self._sequence[row] = last

    @classmethod
    def start(
        cls,
        owner,
        cache,
        config,
        batch,
        tokens,
        mask=None,
        positions=None,
        sequences=None,
        encloses=0,
        final=True,
        keeps=True,
    ):
        """A new step of the model `owner`; no cache means one for this call.

        `encloses` is the rank of the model: 2 with a head, 1 a composite, 0 a text model.  The first one of lower rank
        inside gets the step that is there.  One that is not `final` leaves the cache as it is.  No picture may be left
        for a later call where nobody `keeps` the cache.
        """
        if cache is not None:
            check_cache(cache, config)
            step = cache.step
            if step is not None:
                if encloses >= step._encloses or not final or step._thread != threading.get_ident():
                    raise InputError(
                        compose(
                            "cache: another call is being made on it",
                            do="give each thread, and each call inside a hook, a cache of its own",
                        )
                    )
                step._encloses = encloses
                return step.sharing(batch, tokens)
        cache = Cache(config, batch) if cache is None else cache
        step = cls(cache, batch, tokens, mask, positions, sequences)
        step._encloses, step.owner, step.final, step.keeps = encloses, owner, final, keeps
        if final:
            step.cuts = tuple(
                end for end in (np.flatnonzero(step._kept_after.any(axis=0)) + 1).tolist() if end < tokens
            )
        return step

    @classmethod
    def of(cls, cache, config, hidden, attention_mask=None, position_ids=None):
        """The step a layer works in.  A layer called alone gets one of its own, which changes no cache."""
        if np.ndim(hidden) != 3 or not isinstance(hidden, np.ndarray):
            raise ShapeError(
                compose(
                    f"hidden_states: {np.ndim(hidden)}-D {type(hidden).__name__}",
                    expected=f"[B, T, H {config.hidden_size:,}]",
                )
            )
        if cache is not None:
            check_cache(cache, config)
            if cache.step is not None and cache.step._thread == threading.get_ident():
                return cache.step.sharing(*hidden.shape[:2])
        cache = Cache(config, hidden.shape[0]) if cache is None else cache
        step = cls(cache, *hidden.shape[:2], attention_mask, position_ids)
        step.keep_attentions(True)
        return step

    def sharing(self, batch, tokens):
        """This step, for a module inside the call; hooks may have changed what it is given."""
        if (batch, tokens) != self.shape:
            raise ShapeError(
                compose(
                    "hidden_states: other rows or tokens than the call has",
                    found=f"[B {batch}, T {tokens}]",
                    expected="[B {}, T {}]".format(*self.shape),
                )
            )
        return self

    def __enter__(self):
        if self._depth == 0:
            self.cache._step = weakref.ref(self)
        self._depth += 1
        return self

    def __exit__(self, kind, error, traceback):
        self._depth -= 1
        if self._depth:
            return
        try:
            if kind is None and self.final:
                self._commit()
            else:
                self.undo()
        except BaseException:  # Ctrl-C in between: the call has failed, and never by halves
            self.undo()
            raise
        finally:
            self.cache._step = None
        if kind is None and self.final and _final.get() is not None:
            _final.get().append(self)

    def _commit(self):
        marks, placing = self._marked(), self.placing
        placing.own(self.features, [mark.waiting for own in marks for mark in own.values()])
        for index, arrays in self._staged.items():
            layer = self.layers[index]
            if arrays is None:
                layer.used = int(self._length.max())
                for row in np.flatnonzero(self._length < layer.used):  # what a call interrupted in its last line left
                    layer.put(row, slice(self._length[row], layer.used), 0, 0)
            else:
                layer.conv_state, layer.recurrent_state = arrays
        cache = self.cache
        cache.layers, cache.dtype = self.layers, self.dtype
        cache.mask, cache.length = self._mask, self._length
        cache.sequence, cache.sequence_begin = self._sequence, self._sequence_begin
        cache.rope_deltas, cache.waiting, cache.met = placing.rope_deltas, placing.waiting, placing.met
        cache._marks = marks

    def _marked(self):
        """What the cache kept of each row for `crop`, with what this call adds."""
        cache, T = self.cache, self.shape[1]
        if not self._kept_after.any():
            return cache._marks
        marks = [dict(own) for own in cache._marks]
        stateful = [i for i, layer in enumerate(self.layers) if isinstance(layer, DeltaNetLayerCache)]
        for row, t in np.argwhere(self._kept_after).tolist():
            held = {}
            for i in stateful:
                reached = self._staged.get(i) if t + 1 == T else self._between.get((i, t + 1))
                # One row of several is copied, so that it does not keep the others.
                rows = (array[row] for array in reached or self.recall(i))
                held[i] = Recurrent(*(array if self.shape[0] == 1 else array.copy() for array in rows))
            number = self._ids if self._ids is not None else cache.sequence
            number = NO_SEQUENCE if number is None else number[row, t] if number.ndim == 2 else number[row]
            delta, waiting = int(self.placing.deltas[row, t]), self.placing.waiting_after(row, t)
            mark = Mark(delta, int(number), int(self.begin[row, t]), held, waiting)
            marks[row][int(self.end[row, t])] = mark
        return marks

    def undo(self):
        """Let the cache be what it was when this step began."""
        values, layers = self._before
        for layer, held in zip(values["layers"], layers, strict=True):
            layer.hold(held, values["length"])
        for name, value in values.items():
            setattr(self.cache, name, value)

    # What layers ask for.

    def recall(self, index):
        """(conv window, recurrent state) of layer `index` before this step."""
        layer = self.layers[index]
        return layer.conv_state, layer.recurrent_state

    def remember(self, index, window, state, windows=(), states=()):
        """Window and state of layer `index` after this step, and those after each of the `cuts`."""
        self._staged[index] = (window, state)
        for end, *reached in zip(self.cuts, windows, states, strict=True):
            self._between[index, end] = reached

    def handed_in(self, index):
        """(window, state) after this step that layer `index` has handed in, or None."""
        return self._staged.get(index)

    def append(self, index, k, v):
        """Put k, v [B, T, K, D] behind what layer `index` holds; all keys and values so far [B, K, S, D]."""
        if self.stored is not None:
            k, v = self.stored("kv", k), self.stored("kv", v)
        layer, size = self.layers[index], int(self._length.max())
        if self._depth:
            self._staged[index] = None
        else:  # a layer called alone: what it adds is gone with the call
            layer = layer.holding({name: array.copy() for name, array in layer.arrays().items()})
        layer.room_for(size)
        for row, kept in enumerate(self._kept):
            new = slice(int(self.cache.length[row]), int(self._length[row]))
            layer.put(row, new, k[row, kept].transpose(1, 0, 2), v[row, kept].transpose(1, 0, 2))
        return layer._keys[:, :, :size], layer._values[:, :, :size]

    # Attention probabilities, kept only when somebody asked.

    def keep_attentions(self, wanted):
        self.attentions = {} if wanted else None

    @property
    def keeps_attentions(self):
        return self.attentions is not None

    def with_attentions(self, index, attended):
        """(context, weights by column or None) from what the op returned."""
        if self.attentions is None:
            return attended, None
        context, weights = attended
        self.attentions[index] = self._by_column(weights)
        return context, self.attentions[index]

    def _by_column(self, weights):
        """Weights [B, Q, T, S] over remembered tokens, spread to the columns that were fed: pads get 0."""
        fed = self._mask
        if fed.all():
            return weights
        B, Q, T, _ = weights.shape
        spread = np.zeros((B, Q, T, fed.shape[1]), weights.dtype)
        for row, kept in enumerate(fed):
            columns = np.flatnonzero(kept)
            spread[row][:, :, columns] = weights[row][:, :, : len(columns)]
        return spread


def check_cache(cache, config):
    """A Cache, and one whose arrays have the shapes of this model."""
    if not isinstance(cache, Cache):
        kind = type(cache).__name__
        raise InputError(compose(f"cache: a {kind}", expected="a Cache", do="make one with qwenref.Cache(model)"))
    if cache.config is config:
        return
    same_geometry(
        cache.config, config, "cache: made for another model", InputError, "make one with qwenref.Cache(model)"
    )
