"""Faults of what is carried from token to token: states, windows, keys and values."""

import functools

import ml_dtypes
import numpy as np

from qwenref.cache import Cache, DeltaNetLayerCache
from qwenref.compare.faults_base import add, through
from qwenref.compare.faults_model import Calls, Ops
from qwenref.compare.faults_ops import attending, each, has_attention, has_delta

_CHUNK = 64  # tokens of the chunked kernels, which go over a prompt a block at a time

# ---- inside a call -------------------------------------------------------------------------------------------------


def _no_window(here, was, x, w, window=None, step=None, **outputs):
    """Zeros in the place of the inputs before this call, in the first call that goes on from a prompt."""
    return was(x, w, None if here.phase.handoff else window, step, **outputs)


def _current_tap(here, was, x, w, *others, **outputs):
    """Every token for itself: what a convolution sees whose window is never kept."""
    w = np.array(w)
    w[..., :-1] = 0
    return was(x, w, *others, **outputs)


def _reset(here, was, q, k, v, g, beta, state=None, step=None, scale=1, **outputs):
    """The state of each block of a prompt begins at zero: code 2 forgets what was before a token."""
    codes = np.ones(v.shape[:2], np.int64) if step is None else np.array(step)
    number = np.cumsum(codes > 0, axis=1) - 1
    codes[(codes > 0) & (number > 0) & (number % _CHUNK == 0)] = 2
    return was(q, k, v, g, beta, state, codes, scale, **outputs)


def _kept_in(rounder):
    """The state rounded after every token of decode, and once behind a prompt."""

    def rule(here, was, q, k, v, g, beta, state=None, step=None, scale=1, final=None, **outputs):
        to, T = here.op(rounder), v.shape[1]
        size = 1 if here.phase.decoding else T
        pieces = []
        for begin in range(0, T, size):
            part = slice(begin, begin + size)
            tokens = (np.ascontiguousarray(a[:, part]) for a in (q, k, v, g, beta))
            codes = None if step is None else np.ascontiguousarray(step[:, part])
            o, state, *more = was(*tokens, state, codes, scale, final=True, **outputs)
            state = to(state)
            pieces.append((o, *more))
        o, *more = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
        return (o, state, *more) if final is not None and final is not False else (o, *more) if more else o

    return rule


def _cached_in(dtype):
    def change(here, heads, k, v, begin, end, scale):
        return *each(through(dtype), k, v), begin, end, scale

    return attending(change)


_state = functools.partial(add, kind="state", applies=has_delta)
# fmt: off
_state("conv-zero-handoff", what="the window of the convolution is zero in the first step behind a prompt",
       mechanism=Ops("Conv1d", causal_conv1d=_no_window), number=19, on="decode", family="window-lost")
_state("conv-no-history", what="the window of the convolution is never kept in decode",
       mechanism=Ops("Conv1d", causal_conv1d=_current_tap), number=20, on="decode", family="window-lost")
_state("state-reset-64", what="the state of DeltaNet begins at zero every 64 tokens of a prompt",
       mechanism=Ops("GatedDeltaNet", gated_delta_rule=_reset), number=22, on="prefill")
_state("state-bf16", what="the state of DeltaNet is kept in bf16", says={"state_dtype": "bfloat16"},
       mechanism=Ops("GatedDeltaNet", gated_delta_rule=_kept_in("round_bf16")), number=23, family="state-kept")
_state("state-fp16", what="the state of DeltaNet is kept in fp16", says={"state_dtype": "float16"},
       mechanism=Ops("GatedDeltaNet", gated_delta_rule=_kept_in("round_f16")), family="state-kept")
add("kv-fp8", "state", "keys and values of a cache are kept in fp8 (e4m3)", _cached_in(ml_dtypes.float8_e4m3fn),
    number=31, on="decode", applies=has_attention, family="kv-kept")
add("kv-fp16", "state", "keys and values are kept in fp16, those of a prompt as well", _cached_in(np.float16),
    says={"kv_dtype": "float16"}, applies=has_attention, family="kv-kept")
add("kv-bf16", "state", "keys and values are kept in bf16, those of a prompt as well", _cached_in(ml_dtypes.bfloat16),
    says={"kv_dtype": "bfloat16"}, applies=has_attention, family="kv-kept")
# fmt: on


# ---- between calls -------------------------------------------------------------------------------------------------


def _stale(index):
    """States of an earlier token of the prompt, `index(tokens)`, where decode begins; keys and values are right."""

    def change(model, cache, phase, tokens):
        if not phase.decoding:
            wanted = [n for n in map(index, tokens.tolist()) if n > 0]
            cache.snapshot_at(sorted({*cache._snapshot_at, *wanted}))
        elif phase.handoff:
            marks = [own.get(index(n)) for own, n in zip(cache._marks, phase.before.tolist(), strict=True)]
            _put(cache, lambda i, row: marks[row].layers[i] if marks[row] is not None else None)

    return Calls(change)


def _padded(model, cache, phase, tokens):
    """States of the pads in front of a prompt that make it a whole number of blocks."""
    if phase.decoding:
        return
    pads = (-tokens % _CHUNK).tolist()
    scratch = {n: Cache(model) for n in pads if n}
    for n, filled in scratch.items():
        model.text_model(np.full((1, n), pad_id(model)), cache=filled)
    _put(cache, lambda i, row: [a[0] for a in scratch[pads[row]].layers[i].arrays().values()] if pads[row] else None)


def _put(cache, of):
    """Give each row of the DeltaNet layers the (window, state) `of(layer, row)`, zeros where that is None."""
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, DeltaNetLayerCache):
            continue
        for at, name in enumerate(("conv_state", "recurrent_state")):
            array = np.zeros_like(getattr(layer, name))
            for row in range(cache.batch):
                held = of(i, row)
                if held is not None:
                    array[row] = held[at]
            setattr(layer, name, array)


def pad_id(model):
    """The id a prompt is padded with."""
    text = model.config.text_config
    for name in ("pad_token_id", "eos_token_id"):
        id = text.get(name)
        if isinstance(id, int):
            return id
    return 0


# fmt: off
_state("state-stale-half", what="a cache hit goes on from the state of half of the prompt",
       mechanism=_stale(lambda n: n // 2), number=21, on="decode", family="stale")
for _back in (64, 128):
    _state(f"state-stale-{_back}", what=f"a cache hit goes on from the state {_back} tokens before",
           mechanism=_stale(lambda n, back=_back: n - back), on="decode", family="stale")
_state("state-padded", what="pads that fill a prompt up to blocks of 64 enter the state", mechanism=Calls(_padded),
       family="padded")
# fmt: on
