"""A call that does not come through leaves every object as it was, whatever stopped it and wherever."""

import sys
import threading

import numpy as np
import pytest
from cache_arrays import cache_bits, run
from text_configs import CONFIGS

import qwenref
from qwenref.errors import InputError, ShapeError
from qwenref.sites import Watcher

CONFIG = CONFIGS["aperiodic layers"]
# One row ends early, so that the failing call has slots to write that can be seen.
MASK = np.array([[1] * 9, [1] * 4 + [0] * 5])


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=21)


@pytest.fixture
def ids():
    return np.random.default_rng(4).integers(0, CONFIG["vocab_size"], (2, 200))


@pytest.fixture
def cache(model, ids):
    """A cache with rows of 9 and 4 tokens."""
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :9], attention_mask=MASK, cache=cache)
    return cache


def second_turn(model, ids, cache, **options):
    return model(ids[:, 9:14], cache=cache, **options).logits


class Stop(Exception):
    pass


def names(config):
    return [
        name for name, module in qwenref.from_config(config).named_modules() if type(module).__name__ != "ModuleList"
    ]


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_in_a_hook_of_any_module(model, ids, cache, kind, when):
    before = cache_bits(cache)
    saved = cache.snapshot()
    expected = second_turn(model, ids, cache).tobytes()
    after = cache_bits(cache)
    cache.restore(saved)

    def fail(*_):
        raise kind

    for name in names(CONFIG):
        module = model.get_submodule(name)
        register = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
        with register(fail), pytest.raises(kind):
            second_turn(model, ids, cache)
        assert cache_bits(cache) == before, name
        assert cache.step is None
    assert second_turn(model, ids, cache).tobytes() == expected
    assert cache_bits(cache) == after


class Failing(Watcher):
    """Raises where the first of its names goes by."""

    def on_value(self, site, value):
        raise Stop(site.name)

    def on_state(self, site, column, value):
        raise Stop(site.name)


@pytest.mark.parametrize("config", ["aperiodic layers", "values 3 x keys, GQA 4", "one DeltaNet layer", "GQA 6"])
@pytest.mark.parametrize("phase", ["prefill", "prefill on a warm cache", "decode"])
def test_an_exception_at_every_site_and_module_in_turn(ids, config, phase):
    """The call made again has the bits it would have had; so has the cache, with the states it keeps on the way."""
    model = qwenref.from_config(CONFIGS[config], seed=5)
    cache = qwenref.Cache(model, batch=2, snapshot_every=4)
    if phase != "prefill":
        model(ids[:, :9], attention_mask=MASK, cache=cache)
    tokens = ids[:, 9:10] if phase == "decode" else ids[:, 9:19]
    saved, before, kept = cache.snapshot(), cache_bits(cache), cache.snapshots
    expected = model(tokens, cache=cache).logits.tobytes()
    after, kept_after = cache_bits(cache), cache.snapshots
    cache.restore(saved)
    names = [*model.sites()]
    if any("linear_attn" in name for name in names):
        names.append(f"**.state@{cache.mask.shape[1]}")
    assert len(names) > 25
    for name in names:
        with Failing(model, [name]), pytest.raises(Stop):
            model(tokens, cache=cache)
        assert cache.step is None and cache_bits(cache) == before and cache.snapshots == kept, name
        assert model(tokens, cache=cache).logits.tobytes() == expected, name
        assert cache_bits(cache) == after and cache.snapshots == kept_after, name
        cache.restore(saved)


def test_crop_and_reorder_are_all_or_nothing(model, ids, cache, monkeypatch):
    """Memory that runs out while the last layer is made anew: the cache is what it was, and does it the next time."""
    keeps = qwenref.Cache(model, batch=2, snapshot_every=4)
    model(ids[:, :9], cache=keeps)

    def no_memory(*_):
        raise MemoryError

    saved = keeps.snapshot()
    last = type(keeps.layers[-1])
    for act in (lambda c: c.crop(5), lambda c: c.reorder([1, 0]), lambda c: c.restore(saved)):
        before = cache_bits(keeps)
        for name in ("cropped", "taken", "holding"):
            monkeypatch.setattr(last, name, no_memory)
        with pytest.raises(MemoryError):
            act(keeps)
        monkeypatch.undo()
        assert cache_bits(keeps) == before and keeps.snapshots == [[4, 8], [4, 8]]
        twin = qwenref.Cache(model, batch=2)
        twin.restore(saved)
        act(keeps)
        act(twin)
        assert cache_bits(keeps) == cache_bits(twin)
        keeps.restore(saved)


def test_a_failed_call_with_more_tokens_than_the_one_that_follows(model, ids, cache):
    """What it wrote is nowhere afterwards, also not in slots that come to light only later."""
    saved = cache.snapshot()
    turn = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    expected = second_turn(model, ids, cache, attention_mask=turn).tobytes()
    after = cache_bits(cache)
    cache.restore(saved)
    with model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(ids[:, 9:140], cache=cache)  # the arrays have to grow
    assert second_turn(model, ids, cache, attention_mask=turn).tobytes() == expected
    assert cache_bits(cache) == after


def lines_of(call, stop_at=None):
    """Number of lines of the package that `call` runs; with `stop_at`, Ctrl-C comes before that one."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "qwenref" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return count


def test_ctrl_c_at_any_line(ids):
    """Before the last lines nothing has changed, after them everything; never a half, and never a blocked cache."""
    model = qwenref.from_config(CONFIGS["GQA 6"], seed=1)
    start = qwenref.Cache(model, batch=2, snapshot_every=3)
    model(ids[:, :9], attention_mask=MASK, cache=start)
    saved, before = start.snapshot(), states(start)
    retry = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])  # leaves slots alone that the interrupted call had filled
    expected = second_turn(model, ids, start, attention_mask=retry).tobytes()
    retried = cache_bits(start)
    start.restore(saved)
    second_turn(model, ids, start)
    after = states(start)
    start.restore(saved)
    total = lines_of(lambda: second_turn(model, ids, start))
    assert total > 300
    for line in range(1, total + 1):
        cache = qwenref.Cache(model, batch=2, snapshot_every=3)
        cache.restore(saved)
        with pytest.raises(KeyboardInterrupt):
            lines_of(lambda cache=cache: second_turn(model, ids, cache), stop_at=line)
        assert cache.step is None, line
        assert states(cache) in (before, after), line
        if states(cache) == before:
            assert second_turn(model, ids, cache, attention_mask=retry).tobytes() == expected, line
            assert cache_bits(cache) == retried, line


def test_ctrl_c_at_any_line_of_going_back(model, ids):
    cache = qwenref.Cache(model, batch=2, snapshot_every=3)
    model(ids[:, :9], attention_mask=MASK, cache=cache)
    saved, before = cache.snapshot(), states(cache)
    early = qwenref.Cache(model, batch=2).snapshot()
    for act in (
        lambda: cache.crop([7, 4]),
        lambda: cache.crop(0),
        lambda: cache.reorder([1, 0, 1]),
        lambda: cache.restore(early),
        cache.reset,
    ):
        total = lines_of(act)
        after = states(cache)
        assert after != before
        for line in range(1, total + 1):
            cache.restore(saved)
            with pytest.raises(KeyboardInterrupt):
                lines_of(act, stop_at=line)
            assert states(cache) in (before, after), line
        cache.restore(saved)


def states(cache):
    """What a cache remembers: everything but the slots behind the last token of a row, which hold nothing."""
    held = cache_bits(cache) | {"snapshots": cache.snapshots}
    for i, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            if name in layer.arrays():
                rows = zip(layer.arrays()[name], cache.length, strict=True)
                held[f"layers.{i}.{name}"] = [row[:, :n].tobytes() for row, n in rows]
    return held


# ---------------------------------------------------------------------------------------------- one call at a time


def test_a_hook_may_not_start_another_call_on_the_same_cache(model, ids, cache):
    before, found = cache_bits(cache), []

    def again(module, args):
        for attempt in (
            lambda: model(ids[:, :5], cache=cache),
            lambda: model.model(ids[:, :5], cache=cache),
            cache.reset,
            lambda: cache.restore(cache.snapshot()),
            lambda: cache.reorder([0]),
        ):
            with pytest.raises(InputError) as caught:
                attempt()
            found.append(str(caught.value).split("\n")[0])

    saved = cache.snapshot()
    expected = second_turn(model, ids, cache).tobytes()
    cache.restore(saved)
    assert cache_bits(cache) == before
    for module in (model.model.layers[2].mlp, model.lm_head):
        with module.register_forward_pre_hook(again):
            assert second_turn(model, ids, cache).tobytes() == expected
        cache.restore(saved)
    busy = "cache: another call is being made on it"
    mine = [f"Cache.{what}: a call is being made on this cache" for what in ("reset", "restore", "reorder")]
    assert found == [busy, busy, *mine] * 2


def test_a_hook_may_run_the_model_on_a_cache_of_its_own(model, ids, cache):
    saved, other = cache.snapshot(), []
    expected = second_turn(model, ids, cache).tobytes()
    cache.restore(saved)
    with model.model.layers[2].mlp.register_forward_pre_hook(
        lambda *_: None if len(other) else other.append(0) or other.append(model(ids[:, :7]).logits)
    ):
        assert second_turn(model, ids, cache).tobytes() == expected
    assert other[1].tobytes() == model(ids[:, :7]).logits.tobytes()


def test_a_second_thread_may_not_use_the_same_cache_meanwhile(model, ids, cache):
    found, mine = [], threading.get_ident()

    def elsewhere(*_):
        if threading.get_ident() != mine:
            return

        def work():
            for call in (lambda: second_turn(model, ids, cache), lambda: model.model(ids[:, :5], cache=cache)):
                try:
                    call()
                except InputError as error:
                    found.append(str(error).split("\n")[0])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    saved = cache.snapshot()
    expected = second_turn(model, ids, cache).tobytes()
    cache.restore(saved)
    with model.model.register_forward_pre_hook(elsewhere):
        assert second_turn(model, ids, cache).tobytes() == expected
    assert found == ["cache: another call is being made on it"] * 2


def test_a_hook_that_changes_the_number_of_tokens(model, ids, cache):
    before = cache_bits(cache)

    def shorter(module, args):
        return (args[0][:, :2], *args[1:])

    refused = pytest.raises(ShapeError, match="hidden_states: other rows or tokens than the call has\n.*T 2")
    with model.model.layers[1].register_forward_pre_hook(shorter), refused:
        second_turn(model, ids, cache)
    assert cache_bits(cache) == before


def test_a_mixer_run_twice_counts_once(model, ids, cache):
    """A hook that runs the module again for comparison: the step is the same, and so are the bits."""
    twice = []

    def again(module, args, kwargs, output):
        twice.append(np.array_equal(module.forward(*args, **kwargs)[0], output[0]))

    saved = cache.snapshot()
    expected = model(ids[:, 9:14], cache=cache, output_attentions=True)
    after = cache_bits(cache)
    cache.restore(saved)
    handles = [
        (layer.self_attn if layer.block_type == "full_attention" else layer.linear_attn).register_forward_hook(
            again, with_kwargs=True
        )
        for layer in model.model.layers
    ]
    out = model(ids[:, 9:14], cache=cache, output_attentions=True)
    for handle in handles:
        handle.remove()
    assert twice == [True] * len(model.model.layers)
    assert out.logits.tobytes() == expected.logits.tobytes() and cache_bits(cache) == after
    assert len(out.attentions) == len(expected.attentions)


def test_a_run_on_a_fresh_cache_that_fails_leaves_it_fresh(model, ids):
    cache = qwenref.Cache(model, batch=2)
    fresh = cache_bits(cache)
    with model.model.norm.register_forward_hook(lambda *_: 1 / 0):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(ids[:, :9], cache=cache)
            assert cache_bits(cache) == fresh
    assert run(model, ids, [9], cache).tobytes() == model(ids[:, :9]).logits.tobytes()
