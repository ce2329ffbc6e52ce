"""Going back: states kept after every n tokens, what crop restores, and what it says has to be run again."""

import numpy as np
import pytest
from cache_arrays import cache_bits, row_of, run
from text_configs import CONFIGS

import qwenref
from qwenref.errors import CapabilityMissing, InputError

CONFIG = CONFIGS["values 3 x keys, GQA 4"]
EVERY, T = 8, 45


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=31)


@pytest.fixture(scope="module")
def attention_only():
    return qwenref.from_config(CONFIGS["one attention layer"], seed=31)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(7).integers(0, CONFIG["vocab_size"], (2, 80))


def after(model, ids, n):
    """The cache of a run that ends after n tokens."""
    cache = qwenref.Cache(model, batch=len(ids))
    if n:
        model(ids[:, :n], cache=cache)
    return cache


def rows_of(cache):
    return [row_of(cache, row) for row in range(cache.batch)]


# ---------------------------------------------------------------------------------------------- exact states


@pytest.mark.parametrize("lengths", [(T,), (8, 8, 29), (7, 1, 1, 36), (1,) * T, (20, 25)], ids=str)
def test_B10_crop_restores_the_state_of_a_run_that_ends_there(model, ids, lengths):
    whole = after(model, ids, T)
    for n in range(T + 1):
        cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
        if n == 0:
            expected = run(model, ids, lengths, cache)
            assert cache_bits(cache) == cache_bits(whole)  # keeping states changes no bit
            assert expected.tobytes() == model(ids[:, :T]).logits.tobytes()
            assert cache.snapshots == [[8, 16, 24, 32, 40]] * 2
            saved = cache.snapshot()
        cache.restore(saved)
        again = cache.crop(n)
        assert again.dtype == np.int64 and again.tolist() == [n % EVERY if n < T else 0] * 2
        reached = n - again[0]
        assert cache_bits(cache) == cache_bits(after(model, ids, reached))
        assert cache.snapshots == [list(range(EVERY, reached + 1, EVERY))] * 2
        if n < T:  # what was to be run again, and the rest
            logits = run(model, ids[:, reached:], [*again[:1], T - n] if again[0] else [T - n], cache)
            assert logits.tobytes() == np.ascontiguousarray(expected[:, reached:]).tobytes()
            assert cache_bits(cache) == cache_bits(whole) and cache.snapshots == [[8, 16, 24, 32, 40]] * 2


@pytest.mark.parametrize("every", [1, 2, 3, 44, 45, 46])
def test_any_distance_between_snapshots(model, ids, every):
    cache = qwenref.Cache(model, batch=2, snapshot_every=every)
    model(ids[:, :T], cache=cache)
    assert cache.snapshots == [list(range(every, T + 1, every))] * 2
    assert cache.crop(T - 1)[0] == (T - 1) % every
    assert cache_bits(cache) == cache_bits(after(model, ids, (T - 1) // every * every))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_rows_of_different_lengths_go_back_each_by_itself(model, ids, side):
    pads = {"left": slice(0, 11), "right": slice(T - 11, None), "middle": slice(5, 16)}[side]
    mask = np.ones((2, T), int)
    mask[0, pads] = 0
    filled = ids[:, :T].copy()
    filled[0, mask[0] == 1] = ids[0, : T - 11]
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(filled, attention_mask=mask, cache=cache)
    assert cache.snapshots == [[8, 16, 24, 32], [8, 16, 24, 32, 40]]
    saved = cache.snapshot()
    for wanted, reached, again in (
        (35, (34, 32), (0, 3)),
        ([20, 45], (16, 45), (4, 0)),
        ([100, 17], (34, 16), (0, 1)),
        ([-1, -6], (32, 32), (1, 7)),
        (-100, (0, 0), (0, 0)),
    ):
        cache.restore(saved)
        assert cache.crop(wanted).tolist() == list(again)
        assert cache.length.tolist() == list(reached) == cache.mask.sum(1).tolist()
        assert rows_of(cache) == [row_of(after(model, ids[b : b + 1], n), 0) for b, n in enumerate(reached)]
        logits = model(ids[:, 60:65], cache=cache).logits  # and both go on as they would have alone
        for b, n in enumerate(reached):
            alone = model(ids[b : b + 1, 60:65], cache=after(model, ids[b : b + 1], n)).logits
            assert alone.tobytes() == logits[b : b + 1].tobytes()


def test_snapshots_after_edits_are_those_of_the_edited_run(model, ids):
    edits = {"layers.0.linear_attn.state@7": lambda s: s * 2, "layers.2.linear_attn.mixed_qkv": lambda x: x + 1}
    with qwenref.edit(model, edits):
        expected = after(model, ids, 8)
        cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
        model(ids[:, :20], cache=cache)
    assert cache.crop(8).tolist() == [0, 0] and cache_bits(cache) == cache_bits(expected)


@pytest.mark.parametrize("profile", qwenref.numerics.profiles())
def test_under_every_profile_a_cropped_cache_is_that_of_a_run_that_ends_there(model, profile):
    ids = np.random.default_rng(7).integers(0, CONFIG["vocab_size"], (2, 150))
    with qwenref.numerics(profile):
        cache = qwenref.Cache(model, batch=2, snapshot_every=70)
        model(ids, cache=cache)
        states = qwenref.export_states(model, ids, [3, 70, 140])
        assert cache.crop(149).tolist() == [9, 9]
        for n, found in ((140, cache), (140, states.cache(140)), (70, states.cache(70)), (3, states.cache(3))):
            expected = after(model, ids, n)
            for ours, wanted in zip(found.layers, expected.layers, strict=True):
                for name, array in wanted.arrays().items():
                    assert ours.arrays()[name].dtype == array.dtype
                    # fp64 uses NumPy's products, whose order may follow the number of tokens.
                    allowed = 1e-12 if profile == "fp64" else 0
                    assert np.abs(ours.arrays()[name] - array).max() <= allowed * max(1, np.abs(array).max())


def test_packed_rows_go_back_into_an_earlier_sequence(model, ids):
    numbers = np.repeat([3, 5, 9], [11, 9, 10])[None].repeat(2, 0)
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    expected = model(ids[:, :30], sequence_ids=numbers, cache=cache).logits
    assert cache.crop(17).tolist() == [1, 1]
    assert cache.sequence.tolist() == [5, 5] and cache.sequence_begin.tolist() == [11, 11]
    logits = model(ids[:, 16:30], sequence_ids=numbers[:, 16:], cache=cache).logits
    assert logits.tobytes() == np.ascontiguousarray(expected[:, 16:]).tobytes()
    cache.crop(9)
    assert cache.sequence.tolist() == [3, 3] and cache.sequence_begin.tolist() == [0, 0]
    logits = model(ids[:, 8:30], sequence_ids=numbers[:, 8:], cache=cache).logits
    assert logits.tobytes() == np.ascontiguousarray(expected[:, 8:]).tobytes()


def test_back_to_before_any_packing(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :12], cache=cache)
    model(ids[:, 12:20], sequence_ids=np.repeat([1, 2], 4)[None].repeat(2, 0), cache=cache)
    cache.crop(9)
    assert cache_bits(cache) == cache_bits(after(model, ids, 8))


def test_rope_deltas_go_back_to_what_they_were_at_that_token(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :12], cache=cache)
    cache.rope_deltas = np.array([-3, 5])  # as a picture among the tokens leaves it
    model(ids[:, 12:20], cache=cache)
    assert cache.crop(17).tolist() == [1, 1] and cache.rope_deltas.tolist() == [-3, 5]
    assert cache.crop([8, 16]).tolist() == [0, 0] and cache.rope_deltas.tolist() == [0, 5]
    assert cache.crop(0).tolist() == [0, 0] and cache.rope_deltas.tolist() == [0, 0]


# ---------------------------------------------------------------------------------------------- attention only


def test_without_deltanet_layers_crop_is_exact_at_every_token(attention_only, ids):
    model = attention_only
    for n in range(T + 1):
        cache = after(model, ids, T)
        assert cache.crop(n).tolist() == [0, 0]
        assert cache_bits(cache) == cache_bits(after(model, ids, n))
    cache.crop([12, 40])
    assert cache.length.tolist() == [12, 40]
    assert not cache.layers[0].keys[0, :, 12:].any()
    logits = model(ids[:, 60:70], cache=cache).logits
    for b, n in enumerate((12, 40)):
        alone = model(ids[b : b + 1, 60:70], cache=after(model, ids[b : b + 1], n)).logits
        assert alone.tobytes() == logits[b : b + 1].tobytes()


def test_a_packed_row_without_snapshots_is_not_cut_where_another_sequence_ends(attention_only, ids):
    numbers = np.repeat([0, 1], [11, 9])[None]
    cache = qwenref.Cache(attention_only)
    expected = attention_only(ids[:1, :20], sequence_ids=numbers, cache=cache).logits
    before = cache_bits(cache)
    with pytest.raises(CapabilityMissing, match="^row 0 cannot be cropped to 11 tokens, where another packed sequence"):
        cache.crop(11)
    assert cache_bits(cache) == before
    assert cache.crop(12).tolist() == [0]
    logits = attention_only(ids[:1, 12:20], sequence_ids=numbers[:, 12:], cache=cache).logits
    assert logits.tobytes() == np.ascontiguousarray(expected[:, 12:]).tobytes()


# ---------------------------------------------------------------------------------------------- refused, and cost


def test_B10_without_a_snapshot_crop_says_what_to_do_and_changes_nothing(model, ids):
    cache = after(model, ids, T)
    before = cache_bits(cache)
    with pytest.raises(CapabilityMissing) as caught:
        cache.crop([T, 40])
    assert str(caught.value).split("\n")[:2] == [
        "2 DeltaNet layers cannot be cropped to 40 tokens; no snapshot at or before 40. "
        "Use Cache(..., snapshot_every=64)",
        "    found    row 1: 45 tokens, snapshots at none",
    ]
    assert cache_bits(cache) == before
    for n in (T, T + 1, 999):  # nothing to forget
        assert cache.crop(n).tolist() == [0, 0] and cache_bits(cache) == before
    assert cache.crop(0).tolist() == [0, 0]
    assert cache_bits(cache) == cache_bits(qwenref.Cache(model, batch=2))


@pytest.mark.parametrize("tokens", [1.5, "3", None, True, [1, 2, 3], [[1, 2]], [1.0, 2.0]], ids=repr)
def test_a_crop_to_no_number_of_tokens(model, ids, tokens):
    cache = after(model, ids, 5)
    before = cache_bits(cache)
    with pytest.raises(InputError, match="^Cache.crop: "):
        cache.crop(tokens)
    assert cache_bits(cache) == before


@pytest.mark.parametrize("every", [0, -1, 1.0, "64", True])
def test_a_distance_that_is_no_number_of_tokens(model, every):
    with pytest.raises(InputError, match="^Cache: snapshot_every "):
        qwenref.Cache(model, snapshot_every=every)


def test_a_snapshot_costs_windows_and_states_and_nothing_for_keys_and_values(model, ids):
    fixed = qwenref.cache_size(model, tokens=0, batch=1, kv_dtype="float32").total
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :T], cache=cache)
    assert cache.snapshot_nbytes == 2 * 5 * fixed
    assert cache.nbytes == qwenref.cache_size(model, tokens=T, batch=2, kv_dtype="float32").total
    held = [array for own in cache._marks for mark in own.values() for pair in mark.layers.values() for array in pair]
    assert sum(array.nbytes for array in held) == cache.snapshot_nbytes
    assert all(array.base is None for array in held)  # a row does not keep the memory of the others alive
    cache.reorder([1, 1, 0])
    assert cache.snapshots == [[8, 16, 24, 32, 40]] * 3 and cache.snapshot_nbytes == 2 * 5 * fixed
    assert repr(cache).split("\n")[-1] == "  snapshots  every 8 tokens  10 held, 157.5 KiB"
    cache.crop([20, 45, 9])
    assert cache.snapshots == [[8, 16], [8, 16, 24, 32, 40], [8]]
    cache.reset()
    assert cache.snapshots == [[], [], []] and cache.snapshot_nbytes == 0
    assert qwenref.Cache(model).snapshot_nbytes == 0


def test_writing_into_a_layer_does_not_reach_a_state_that_was_kept(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :20], cache=cache)
    for _ in range(2):
        cache.crop(16)
        assert cache_bits(cache) == cache_bits(after(model, ids, 16))
        for i in (0, 2):
            for array in cache.layers[i].arrays().values():
                array[...] = np.nan
        assert np.isnan(model(ids[:, 16:20], cache=cache).logits).any()


# ---------------------------------------------------------------------------------------------- never by halves


def test_a_failed_call_keeps_no_state(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :9], cache=cache)
    for module in (model.lm_head, model.model.layers[2].linear_attn):
        with module.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            model(ids[:, 9:40], cache=cache)
        assert cache.snapshots == [[8], [8]]
    with model.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):  # after all was final
        model(ids[:, 9:40], cache=cache)
    assert cache.snapshots == [[8], [8]]
    assert cache_bits(cache) == cache_bits(after(model, ids, 9))


def test_snapshots_go_with_the_snapshot_of_everything(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :20], cache=cache)
    saved = cache.snapshot()
    model(ids[:, 20:50], cache=cache)
    cache.restore(saved)
    assert cache.snapshots == [[8, 16]] * 2
    other = qwenref.Cache(model, batch=2)
    other.restore(saved)
    assert other.crop(17).tolist() == [1, 1] and cache_bits(other) == cache_bits(after(model, ids, 16))
    model(ids[:, 16:50], cache=other)
    assert other.snapshots == [[8, 16]] * 2  # it keeps no further ones
    assert cache.snapshots == [[8, 16]] * 2 and cache.length.tolist() == [20, 20]


def test_a_part_run_alone_keeps_nothing(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :9], cache=cache)
    model.run(ids[:, 9:30], stop=3, cache=cache)
    model.model.layers[0](np.zeros((2, 20, 64), np.float32), cache=cache)
    assert cache.snapshots == [[8], [8]] and cache.length.tolist() == [9, 9]


def test_crop_waits_for_the_call_to_return(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=EVERY)
    model(ids[:, :20], cache=cache)

    def inside(*_):
        with pytest.raises(InputError, match="Cache.crop: a call is being made on this cache"):
            cache.crop(8)

    with model.model.norm.register_forward_pre_hook(inside):
        model(ids[:, 20:25], cache=cache)
    assert cache.length.tolist() == [25, 25]


def test_states_are_kept_at_chosen_tokens_and_let_go_of(model, ids):
    cache = qwenref.Cache(model)
    cache.snapshot_at([3, 7])
    model(ids[0, :6], cache=cache)
    assert cache.snapshots == [[3]]
    cache.snapshot_at(8)
    model(ids[0, 6:9], cache=cache)
    assert cache.snapshots == [[3, 8]]
    before = cache_bits(cache)
    cache.forget_snapshots(before=8)
    assert cache.snapshots == [[8]] and cache_bits(cache) == before
    assert cache.crop(8).tolist() == [0]
    whole = model(ids[0, :12]).logits
    assert model(ids[0, 8:12], cache=cache).logits.tobytes() == whole[:, 8:].tobytes()
    with pytest.raises(CapabilityMissing):
        cache.crop(3)
    cache.snapshot_at([])
    model(ids[0, 12:20], cache=cache)
    assert cache.snapshots == [[8]]


@pytest.mark.parametrize("tokens", [0, [-1], 1.5, True, "8", [[1]]], ids=repr)
def test_chosen_tokens_are_numbers_of_tokens(model, tokens):
    cache = qwenref.Cache(model)
    with pytest.raises(InputError, match="snapshot_at"):
        cache.snapshot_at(tokens)
    for before in (1.5, True, None):
        with pytest.raises(InputError, match="forget_snapshots"):
            cache.forget_snapshots(before)
