"""The cache: what it holds, how it is copied, and that pads, splits and packing leave in it what they should."""

import copy
from functools import partial

import numpy as np
import pytest
from cache_arrays import cache_bits, row_of, run
from text_configs import CONFIGS, text_config

import qwenref
from qwenref.errors import InputError, ShapeError

CONFIG = CONFIGS["values 3 x keys, GQA 4"]
PADS = (0, 1, 3, 4, 70)


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=11)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(2).integers(0, CONFIG["vocab_size"], (2, 600))


def fed(model, ids, lengths=None, batch=None, **options):
    """(logits, bits of the cache) of a prompt in pieces."""
    cache = qwenref.Cache(model, batch=batch or len(ids))
    logits = run(model, ids, lengths or [ids.shape[1]], cache, **options)
    return logits.tobytes(), cache_bits(cache)


# ---------------------------------------------------------------------------------------------- holding and copying


def test_lengths_shapes_and_bytes(model, ids):
    cache = qwenref.Cache(model, batch=2)
    c = model.config
    assert (
        cache.length.tolist() == [0, 0]
        and cache.nbytes == qwenref.cache_size(model, tokens=0, batch=2, kv_dtype="float32").total
    )
    for n in (1, 4, 70, 3):
        model(ids[:, :n], cache=cache)
        total = int(cache.length[0])
        assert cache.length.tolist() == [total, total] and cache.mask.shape == (2, total)
        size = qwenref.cache_size(model, tokens=total, batch=2, kv_dtype="float32")
        assert cache.nbytes == size.total == sum(a.nbytes for layer in cache.layers for a in layer.arrays().values())
        for kind, layer in zip(c.layer_types, cache.layers, strict=True):
            shapes = {name: array.shape for name, array in layer.arrays().items()}
            if kind == "full_attention":
                assert shapes == dict.fromkeys(("keys", "values"), (2, c.num_key_value_heads, total, c.head_dim))
            else:
                state = (2, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
                assert shapes == {"conv_state": (2, c.conv_dim, 3), "recurrent_state": state}
    assert repr(cache).startswith("Cache · 2 rows, 78 tokens · ")


@pytest.mark.parametrize("source", [CONFIG, "tiny", qwenref.from_config(CONFIG)], ids=["dict", "name", "model"])
def test_a_cache_of_anything_that_has_a_config(source):
    assert qwenref.Cache(source, batch=3).batch == 3


def test_snapshot_and_restore_are_exact(model, ids):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :9], cache=cache)
    before, saved = cache_bits(cache), cache.snapshot()
    ahead = model(ids[:, 9:30], cache=cache).logits
    for _ in range(2):  # a snapshot stays usable
        cache.restore(saved)
        assert cache_bits(cache) == before
        assert model(ids[:, 9:30], cache=cache).logits.tobytes() == ahead.tobytes()
    other = qwenref.Cache(model, batch=2)
    other.restore(saved)
    assert model(ids[:, 9:30], cache=other).logits.tobytes() == ahead.tobytes()
    assert cache_bits(other) == cache_bits(cache)


def test_restore_brings_back_rows_and_dtype(model, ids):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :9], cache=cache)
    saved, before = cache.snapshot(), cache_bits(cache)
    expected = model(ids[:, 9:100], cache=cache).logits
    cache.reorder([1])
    cache.restore(saved)
    assert cache.batch == 2 and cache_bits(cache) == before
    assert model(ids[:, 9:100], cache=cache).logits.tobytes() == expected.tobytes()
    with qwenref.numerics("fp64"):
        cache.reset()
        model(ids[:, :3], cache=cache)
    cache.restore(saved)
    assert cache.dtype == np.float32
    assert model(ids[:, 9:100], cache=cache).logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("other", ["GQA 6", "values 2 x keys, GQA 2", "one attention layer", "conv width 2"])
def test_a_snapshot_of_another_model_is_refused(model, ids, other):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :5], cache=cache)
    before = cache_bits(cache)
    with pytest.raises(InputError, match="Cache.restore: a snapshot of another model\n    found .*\n    expected .*"):
        cache.restore(qwenref.Cache(CONFIGS[other], batch=2).snapshot())
    assert cache_bits(cache) == before


@pytest.mark.parametrize("rows", [[1, 0], [0, 0, 1, 1, 0], [1], [0, 1]], ids=str)
def test_reorder(model, ids, rows):
    cache = qwenref.Cache(model, batch=2)
    mask = np.ones((2, 20), int)
    mask[0, :13] = 0  # rows of different lengths
    model(ids[:, :20], attention_mask=mask, cache=cache)
    held = [row_of(cache, row) for row in range(2)]
    lengths = cache.length.tolist()
    cache.reorder(rows)
    assert [row_of(cache, row) for row in range(len(rows))] == [held[row] for row in rows]
    assert cache.length.tolist() == [lengths[row] for row in rows]
    size = qwenref.cache_size(model, tokens=max(cache.length), batch=len(rows), kv_dtype="float32")
    assert cache.nbytes == size.total
    logits = model(ids[rows, 20:90], cache=cache).logits
    for i, row in enumerate(rows):
        alone = model(np.concatenate([ids[row, :20][mask[row] == 1], ids[row, 20:90]])).logits[:, -70:]
        assert alone.tobytes() == logits[i : i + 1].tobytes()


@pytest.mark.parametrize("rows", [[], [2], [-1], [0.0], [[0]], [True, False], 0, "01"], ids=repr)
def test_reorder_refuses_what_is_no_list_of_rows(model, ids, rows):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :5], cache=cache)
    before = cache_bits(cache)
    with pytest.raises(InputError, match="Cache.reorder: rows "):
        cache.reorder(rows)
    assert cache_bits(cache) == before


def test_a_deep_copy_is_independent(model, ids):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :5], cache=cache)
    twin = copy.deepcopy(cache)
    before = cache_bits(cache)
    assert cache_bits(twin) == before
    expected = model(ids[:, 5:9], cache=twin).logits
    assert cache_bits(cache) == before
    assert model(ids[:, 5:9], cache=cache).logits.tobytes() == expected.tobytes()


def test_two_caches_in_turn_are_as_two_alone(model, ids):
    caches = [qwenref.Cache(model), qwenref.Cache(model)]
    parts = [[], []]
    for n in (3, 1, 8, 1, 2):
        for row, cache in enumerate(caches):
            at = int(cache.length[0])
            parts[row].append(model(ids[row, at : at + n], cache=cache).logits)
    for row in range(2):
        assert np.concatenate(parts[row], 1).tobytes() == model(ids[row, :15]).logits.tobytes()


# ---------------------------------------------------------------------------------------------- splits (T2)

SPLITS = ((1, 129), (2, 128), (3, 127), (63, 67), (64, 66), (65, 65), (1,) * 130)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}-{split[1]}")
def test_T2_B1_splits_give_the_logits_and_states_of_one_call(model, ids, split):
    assert fed(model, ids[:, :130], split) == fed(model, ids[:, :130])


@pytest.mark.parametrize("window", [3, 64])
def test_B2_prefill_in_windows(model, ids, window):
    lengths = [window] * (200 // window) + [200 % window]
    assert fed(model, ids[:, :200], lengths) == fed(model, ids[:, :200])


def test_T2_splits_in_fp64(model, ids):
    with qwenref.numerics("fp64"):
        whole = qwenref.Cache(model)
        expected = model(ids[:1, :40], cache=whole).logits
        for split in ((1, 39), (3, 37), (20, 20), (1,) * 40):
            cache = qwenref.Cache(model)
            logits = run(model, ids[:1, :40], split, cache)
            assert logits.dtype == np.float64 and np.abs(logits - expected).max() <= 1e-12 * np.abs(expected).max()
            for ours, one in zip(cache.layers, whole.layers, strict=True):
                for name, array in ours.arrays().items():
                    assert array.dtype == np.float64
                    assert np.abs(array - one.arrays()[name]).max() <= 1e-12 * np.abs(one.arrays()[name]).max()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_A11_short_prompts_then_decode(model, ids, prompt):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :prompt], cache=cache)
    window = next(layer for layer in cache.layers if hasattr(layer, "conv_state")).conv_state
    assert window.shape[2] == 3
    assert (window[:, :, : max(0, 3 - prompt)] == 0).all() and (window[:, :, max(0, 3 - prompt) :] != 0).any(1).all()
    rest = run(model, ids[:, prompt:12], [1] * (12 - prompt), cache)
    assert rest.tobytes() == np.ascontiguousarray(model(ids[:, :12]).logits[:, prompt:]).tobytes()


@pytest.mark.parametrize("steps", [1, 2, 8, 64, 512])
def test_A3_A4_decode_against_one_forward(model, ids, steps):
    cache, got = qwenref.Cache(model), []
    for t in range(steps):
        got.append(model(ids[0, t : t + 1], cache=cache).logits)
        assert {array.dtype for layer in cache.layers for array in layer.arrays().values()} == {np.dtype("float32")}
    whole = qwenref.Cache(model)
    assert model(ids[0, :steps], cache=whole).logits.tobytes() == np.concatenate(got, 1).tobytes()
    assert cache_bits(whole) == cache_bits(cache)


def test_A12_an_impulse_meets_the_taps_in_the_same_order_in_prefill_and_decode():
    conv = qwenref.from_config(text_config("l"), seed=0).model.layers[0].linear_attn.conv1d
    taps = np.asarray(conv.weight, np.float32)[:, 0]  # [C, 4], tap 3 is the newest
    x = np.zeros((1, 6, conv.channels), np.float32)
    x[:, 1] = 1
    expected = np.zeros_like(x)
    expected[0, 1:5] = taps.T[::-1]
    assert np.array_equal(conv(x), expected)  # one product that is not 0 per output: exact
    window, steps = None, []
    for t in range(6):
        y, window = conv(x[:, t : t + 1], window, next_window=True)
        steps.append(y)
    assert np.concatenate(steps, 1).tobytes() == conv(x).tobytes()


def test_B13_the_length_moves_once_after_the_last_layer(model, ids):
    cache, lengths = qwenref.Cache(model, batch=2), []
    model(ids[:, :5], cache=cache)
    hooks = [
        layer.register_forward_hook(lambda *_: lengths.append(cache.length.tolist())) for layer in model.model.layers
    ]
    model(ids[:, 5:8], cache=cache)
    for hook in hooks:
        hook.remove()
    assert lengths == [[5, 5]] * len(model.model.layers) and cache.length.tolist() == [8, 8]


# ---------------------------------------------------------------------------------------------- rope_deltas


def positions_seen(model, call):
    """What `call` gives the rotary embedding: [B, T] of the time axis."""
    seen = []
    with model.model.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(np.array(args[1]))):
        call()
    assert len(seen) == 1 and (seen[0] == seen[0][:1]).all()
    return seen[0][0].tolist()


def test_rope_deltas_live_in_the_cache_row_by_row(model, ids, tmp_path):
    cache = qwenref.Cache(model, batch=2, snapshot_every=4)
    model(ids[:, :9], cache=cache)
    cache.rope_deltas[:] = -3, 5
    saved = cache.snapshot()
    expected = model(ids[:, 9:12], cache=cache, position_ids=[[6, 7, 8], [14, 15, 16]]).logits.tobytes()
    plain = qwenref.Cache(model, batch=2)
    model(ids[:, :9], cache=plain)
    assert model(ids[:, 9:12], cache=plain).logits.tobytes() != expected
    cache.restore(saved)
    cache.save(tmp_path / "cache")
    for source in (cache, copy.deepcopy(cache), qwenref.Cache.load(tmp_path / "cache")):
        assert source.rope_deltas.tolist() == [-3, 5]
        assert positions_seen(model, partial(model, ids[:, 9:12], cache=source)) == [[6, 7, 8], [14, 15, 16]]
        source.restore(saved)
        out = model(ids[:, 9:12], cache=source)
        assert out.logits.tobytes() == expected and out.rope_deltas.tolist() == [-3, 5]
    assert positions_seen(model, lambda: model(ids[:, :2], cache=cache)) == [[9, 10], [17, 18]]
    cache.reorder([1, 1, 0])
    assert cache.rope_deltas.tolist() == [5, 5, -3]
    assert positions_seen(model, lambda: model(ids[[0, 0, 0], :1], cache=cache)) == [[19], [19], [11]]
    cache.crop(12)  # kept with the state of that token
    assert cache.rope_deltas.tolist() == [5, 5, -3]
    with model.model.norm.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(ids[[0, 0, 0], :1], cache=cache)
    assert cache.rope_deltas.tolist() == [5, 5, -3]
    cache.reset()
    assert cache.rope_deltas.tolist() == [0, 0, 0]
    # nothing of it stays in the model
    assert positions_seen(model, lambda: model(ids[:, :2])) == [[0, 1], [0, 1]]


# ---------------------------------------------------------------------------------------------- pads (T3, A13, B3 - B6)


def padded(ids, places):
    """(ids, mask) with pads of arbitrary ids where `places` is 0."""
    mask = np.asarray(places)
    filled = np.full((len(ids), mask.shape[-1]), 7)
    mask = np.broadcast_to(mask, filled.shape)
    for row, line in enumerate(mask):
        filled[row, line == 1] = ids[row, : line.sum()]
    return filled, mask


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_T3_B3_B4_pads_are_skipped(model, ids, side, rows, pads):
    real = 9
    places = {
        "left": [0] * pads + [1] * real,
        "right": [1] * real + [0] * pads,
        "middle": [1] * 4 + [0] * pads + [1] * 5,
    }
    filled, mask = padded(ids[:rows], places[side])
    with_pads, without = qwenref.Cache(model, batch=rows), qwenref.Cache(model, batch=rows)
    logits = model(filled, attention_mask=mask, cache=with_pads).logits
    expected = model(ids[:rows, :real], cache=without).logits
    assert logits[mask == 1].tobytes() == expected.reshape(-1, expected.shape[-1]).tobytes()
    assert np.isfinite(logits).all()
    held = {name: bits for name, bits in cache_bits(with_pads).items() if name != "mask"}
    assert held == {name: bits for name, bits in cache_bits(without).items() if name != "mask"}
    assert with_pads.mask.tolist() == (mask == 1).tolist()
    # the second turn, padded on a warm cache, with a mask of its own or of everything
    filled, turn = padded(ids[:rows, real:], [0] * pads + [1] * 3)
    expected = model(ids[:rows, real : real + 3], cache=without).logits
    saved = with_pads.snapshot()
    for given in (turn, np.concatenate([mask, turn], 1)):
        with_pads.restore(saved)
        logits = model(filled, attention_mask=given, cache=with_pads).logits
        assert logits[turn == 1].tobytes() == expected.reshape(-1, expected.shape[-1]).tobytes()
        assert with_pads.length.tolist() == [real + 3] * rows


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_A13_state_after_right_pads_is_the_state_before_them(model, ids, n):
    cache = qwenref.Cache(model)
    model(ids[:1, :6], cache=cache)
    before = {name: bits for name, bits in cache_bits(cache).items() if name != "mask"}
    model(np.zeros((1, n), int), attention_mask=np.zeros((1, n)), cache=cache)
    assert {name: bits for name, bits in cache_bits(cache).items() if name != "mask"} == before
    assert cache.mask.shape == (1, 6 + n)


def test_B5_a_row_does_not_know_its_neighbours_length(model, ids):
    for other in (1, 5, 30):
        T = max(9, other)
        mask = np.array([[0] * (T - 9) + [1] * 9, [0] * (T - other) + [1] * other])
        cache = qwenref.Cache(model, batch=2)
        filled = np.zeros((2, T), int)
        filled[0, -9:], filled[1, -other:] = ids[0, :9], ids[1, :other]
        logits = model(filled, attention_mask=mask, cache=cache).logits
        assert logits[:1, -9:].tobytes() == model(ids[0, :9]).logits.tobytes()


def test_B6_a_fully_masked_row_is_zero_in_attention_and_never_nan(model, ids):
    contexts = []
    layer = next(layer for layer in model.model.layers if layer.block_type == "full_attention")
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: contexts.append(args[0].copy()))
    mask = np.array([[0] * 6, [1] * 6])
    cache = qwenref.Cache(model, batch=2)
    for _ in range(2):
        out = model(ids[:, :6], attention_mask=mask, cache=cache, output_attentions=True, output_hidden_states=True)
    hook.remove()
    assert all(np.isfinite(a).all() for a in (out.logits, *out.hidden_states, *out.attentions))
    assert not any(context[0].any() for context in contexts) and all(context[1].any() for context in contexts)
    assert not any(weights[0].any() for weights in out.attentions)
    assert cache.length.tolist() == [0, 12]
    nobody = model(ids[:, :6], attention_mask=np.zeros((2, 6)))
    assert np.isfinite(nobody.logits).all()
    later = model(ids[:1, :4].repeat(2, 0), cache=cache).logits  # the row begins now, as if nothing had been
    assert later[:1].tobytes() == model(ids[:1, :4]).logits.tobytes()


@pytest.mark.parametrize("places", [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]], ids=str)
def test_attention_weights_stand_in_the_columns_that_were_fed(model, ids, places):
    """Also in a second call; a pad attends to nothing and nothing attends to it."""
    filled, mask = padded(ids, places)
    padded_cache, plain = qwenref.Cache(model, batch=2), qwenref.Cache(model, batch=2)
    for turn in range(2):
        got = model(filled, attention_mask=mask, cache=padded_cache, output_attentions=True).attentions
        want = model(ids[:, :4], cache=plain, output_attentions=True).attentions
        columns = np.tile(places, turn + 1) == 1
        for ours, own in zip(got, want, strict=True):
            assert ours.shape == (*own.shape[:2], 6, 6 * (turn + 1))
            assert np.array_equal(ours[:, :, mask[0] == 1][..., columns], own)
            assert not ours[:, :, mask[0] == 0].any() and not ours[..., ~columns].any()


def test_positions_count_tokens_and_pads_stand_at_zero(model, ids):
    seen = []
    hook = model.model.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(np.array(args[1])))
    cache = qwenref.Cache(model, batch=2)
    mask = np.array([[0, 0, 1, 1], [1, 0, 1, 1]])
    model(ids[:, :4], attention_mask=mask, cache=cache)
    model(ids[:, :2], cache=cache)
    model(ids[:, :2], cache=cache, position_ids=[[7, 9], [7, 9]])
    hook.remove()
    assert [positions.shape for positions in seen] == [(3, 2, 4), (3, 2, 2), (3, 2, 2)]
    assert all((positions == positions[:1]).all() for positions in seen)
    assert [positions[0].tolist() for positions in seen] == [
        [[0, 0, 0, 1], [0, 0, 1, 2]], [[2, 3], [3, 4]], [[7, 9], [7, 9]],
    ]  # fmt: skip


def test_own_positions_given_by_hand_change_nothing(model, ids):
    expected = model(ids[:, :9]).logits.tobytes()
    positions = np.arange(9)
    for given in (
        positions[None],
        np.tile(positions, (2, 1)),
        np.tile(positions, (3, 2, 1)),
        np.tile(positions, (4, 2, 1)),
    ):
        assert model(ids[:, :9], position_ids=given).logits.tobytes() == expected
    assert model(ids[:, :9], position_ids=positions[None] + 5).logits.tobytes() != expected


# ---------------------------------------------------------------------------------------------- packing (T4, B7, B8)


def test_T4_B7_packed_sequences_are_as_separate_rows(model, ids):
    a, b, c = ids[0, :5], ids[1, :7], ids[0, 20:22]
    packed, sequence = np.concatenate([a, b, c])[None], np.repeat([0, 1, 5], [5, 7, 2])[None]
    seen = []
    hook = model.model.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(np.array(args[1])))
    cache = qwenref.Cache(model)
    logits = model(packed, sequence_ids=sequence, cache=cache, output_attentions=True)
    hook.remove()
    assert seen[0][0, 0].tolist() == [*range(5), *range(7), *range(2)]
    for part, begin in ((a, 0), (b, 5), (c, 12)):
        alone = model(part, output_attentions=True)
        here = slice(begin, begin + len(part))
        assert logits.logits[:, here].tobytes() == alone.logits.tobytes()
        for weights, own in zip(logits.attentions, alone.attentions, strict=True):
            assert np.array_equal(weights[:, :, here, here], own)
            outside = weights[:, :, here].copy()
            outside[..., here] = 0
            assert not outside.any()
    # the last sequence goes on, with its number or without any
    last = qwenref.Cache(model)
    model(c, cache=last)
    expected = model(ids[0, 22:25], cache=last).logits
    saved = cache.snapshot()
    for more in ({}, {"sequence_ids": [[5, 5, 5]]}):
        cache.restore(saved)
        assert model(ids[0, 22:25], cache=cache, **more).logits.tobytes() == expected.tobytes()
    # in pieces, at every place, also beside another row and with pads in between
    for cut in range(1, 14):
        pieces = qwenref.Cache(model)
        parts = [
            model(packed[:, s], sequence_ids=sequence[:, s], cache=pieces).logits for s in (slice(cut), slice(cut, 14))
        ]
        assert np.concatenate(parts, 1).tobytes() == logits.logits.tobytes()
    both, mask = padded(packed.repeat(2, 0), np.array([[1] * 3 + [0] + [1] * 11] * 2))
    numbers = np.zeros((2, 15), int)
    numbers[:, mask[0] == 1] = sequence
    beside = model(both, attention_mask=mask, sequence_ids=numbers).logits
    assert beside[:1, mask[0] == 1].tobytes() == logits.logits.tobytes()


def test_packed_sequences_may_be_longer_together_than_one_may_be():
    model = qwenref.from_config(text_config("lf", max_position_embeddings=8), seed=0)
    ids = np.arange(24)[None]
    logits = model(ids, sequence_ids=np.repeat([0, 1, 2], 8)[None]).logits
    assert logits[:, 8:16].tobytes() == model(ids[:, 8:16]).logits.tobytes()
    with pytest.raises(InputError, match="9 tokens are more than the model takes"):
        model(ids, sequence_ids=np.repeat([0, 1, 2], [8, 9, 7])[None])


def test_a_sequence_may_have_any_number(model, ids):
    """Also the numbers a program could mistake for "none": the first sequence after a masked row is a new one."""
    cache = qwenref.Cache(model)
    model(ids[:1, :4], cache=cache)
    model(ids[:1, :2], cache=cache, attention_mask=[[0, 0]], sequence_ids=[[-1, -1]])
    logits = model(ids[:1, 4:9], cache=cache, sequence_ids=[[-1] * 5]).logits
    assert logits.tobytes() == model(ids[:1, 4:9]).logits.tobytes()


def test_B8_positions_that_go_back_are_no_boundary(model, ids):
    positions = [[0, 1, 2, 3, 0, 1, 2]] * 2
    with pytest.raises(
        InputError, match=r"position_ids\[0, 4\] goes back from 3 to 0\n.*\n    do       pass sequence_ids"
    ):
        model(ids[:, :7], position_ids=positions)
    sequence = [[0] * 4 + [1] * 3] * 2
    both = model(ids[:, :7], position_ids=positions, sequence_ids=sequence).logits
    assert both.tobytes() == model(ids[:, :7], sequence_ids=sequence).logits.tobytes()
    mask = np.array([[1, 1, 0, 1]] * 2)  # a pad stands at 0 and goes back nowhere
    given = model(ids[:, :4], position_ids=[[0, 1, 0, 2]] * 2, attention_mask=mask).logits
    assert given.tobytes() == model(ids[:, :4], attention_mask=mask).logits.tobytes()


# ---------------------------------------------------------------------------------------------- profiles


def test_a_cache_takes_the_dtype_of_its_first_call(model, ids):
    cache = qwenref.Cache(model)
    with qwenref.numerics("fp64"):
        with pytest.raises(InputError):
            model(ids[:1, :3], cache=cache, position_ids=[[2, 1, 0]])
        assert cache.dtype == np.float32  # nothing came through
        model(ids[:1, :3], cache=cache)
    assert cache.dtype == np.float64
    assert {array.dtype for layer in cache.layers for array in layer.arrays().values()} == {np.dtype("float64")}
    before = cache_bits(cache)
    with pytest.raises(InputError, match="cache: filled under another numerics profile\n    found    float64 arrays"):
        model(ids[:1, :3], cache=cache)
    assert cache_bits(cache) == before
    cache.reset()
    assert model(ids[:1, :3], cache=cache).logits.dtype == np.float32 and cache.dtype == np.float32


def test_a_cache_of_an_fp64_model_is_float64_from_the_start(model):
    arbiter = qwenref.from_config(CONFIG, numerics="fp64")
    assert qwenref.Cache(arbiter).dtype == np.float64 and qwenref.Cache(model).dtype == np.float32


def test_prefill_against_decode_in_fp64(model, ids):
    with qwenref.numerics("fp64"):
        expected = model(ids[:1, :30]).logits
        logits = run(model, ids[:1, :30], [20] + [1] * 10, qwenref.Cache(model))
    assert np.abs(logits - expected).max() <= 1e-12


# ---------------------------------------------------------------------------------------------- other caches


def test_a_cache_of_an_equal_config_is_taken(model, ids):
    twin = qwenref.from_config(CONFIG, seed=12)
    cache = qwenref.Cache(twin)
    assert model(ids[:1, :5], cache=cache).logits.tobytes() == model(ids[:1, :5]).logits.tobytes()


def test_another_number_of_rows(model, ids):
    with pytest.raises(
        ShapeError, match="cache: another number of rows\n    found    2 rows of tokens\n    expected 1"
    ):
        model(ids[:, :5], cache=qwenref.Cache(model))
