"""Capture and trace: what is kept, of which steps, tokens and heads, within which budget, and by whom."""

import contextlib
import gc
import re
import sys
import threading

import numpy as np
import pytest
from cache_arrays import cache_bits
from safetensors.numpy import load_file
from text_configs import CONFIGS

import qwenref
from qwenref.sites import chain

LENGTHS = (6, 1, 1, 1)
STATE = "layers.0.linear_attn.state"


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=2)


def ids_of(rows=2, tokens=9, seed=4):
    return np.random.default_rng(seed).integers(0, 211, (rows, tokens))


def run(model, lengths=LENGTHS, cache=None, **options):
    """Logits of each call on one cache."""
    ids, at, logits = ids_of(), 0, []
    cache = qwenref.Cache(model, batch=2) if cache is None else cache
    for n in lengths:
        logits.append(model(ids[:, at : at + n], cache=cache, **options).logits)
        at += n
    return logits


def hooks_of(model):
    """How many hooks there are in all tables of a model."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
              "_forward_pre_hooks_with_kwargs")  # fmt: skip
    return sum(len(getattr(m, table)) for m in model.modules() for table in tables)


def nothing_left(model):
    return hooks_of(model) == 0 and chain() is None


# Reading


def test_the_ways_to_read(model):
    with qwenref.capture(model, "layers.0.resid_pre", "lm_head") as c:
        logits = run(model)
    name = "model.layers.0.resid_pre"
    assert c.names() == [name, "lm_head"] == list(c) == c._ipython_key_completions_()
    assert 3 not in c and None not in c
    assert len(c) == 2 and name in c and "layers.0.resid_pre" in c and "layers.1.resid_pre" not in c
    assert c.steps("lm_head") == [0, 1, 2, 3]
    assert [c["lm_head", k].tobytes() for k in range(4)] == [a.tobytes() for a in logits]
    assert c["lm_head", -1] is c["lm_head", 3] and c["layers.0.resid_pre", 0] is c[name, 0]
    assert c.cat("lm_head").tobytes() == np.concatenate(logits, 1).tobytes()
    assert list(c.to_dict()) == c.names() and c.to_dict()["lm_head"][2] is c["lm_head", 2]
    with qwenref.capture(model, "lm_head") as one:
        out = model(ids_of())
    assert one["lm_head"].tobytes() == out.logits.tobytes() == one.to_dict()["lm_head"].tobytes()


def test_arrays_belong_to_the_caller(model):
    cache = qwenref.Cache(model, batch=2)
    with qwenref.capture(model, "**") as c:
        run(model, (6,), cache)
    before = cache_bits(cache)
    arrays = [c[name] for name in c.names()]
    for array in arrays:
        array[...] = 7
    assert cache_bits(cache) == before
    assert all(not np.shares_memory(a, p) for a in arrays for p in model.parameters())


def test_attention_of_all_steps_is_that_of_one_call(model):
    """Weights of later steps see more keys; what an earlier one could not see has weight 0 and score minus infinity."""
    with qwenref.capture(model, "layers.1.self_attn.*") as parts:
        run(model)
    with qwenref.capture(model, "layers.1.self_attn.*") as whole:
        run(model, (sum(LENGTHS),))
    for name in parts.names():
        assert parts.cat(name).tobytes() == whole[name].tobytes(), name


def test_save_reads_back(model, tmp_path):
    with qwenref.capture(model, "layers.0.resid_mid", f"{STATE}@2") as c:
        run(model)
    c.save(tmp_path / "run.safetensors")
    found = load_file(tmp_path / "run.safetensors")
    name = "model.layers.0.resid_mid"
    assert set(found) == {f"{name}#{k}" for k in range(4)} | {f"model.{STATE}@2"}
    assert all(found[f"{name}#{k}"].tobytes() == c[name, k].tobytes() for k in range(4))
    assert found[f"model.{STATE}@2"].shape == c[f"{STATE}@2"].shape


# Choosing


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (None, [0, 1, 2, 3]),
        (0, [0]),
        (2, [2]),
        (np.int64(2), [2]),
        ([1, 3], [1, 3]),
        (range(2), [0, 1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ("last", [3]),
        (9, []),
    ],
)
def test_steps(model, steps, kept):
    with qwenref.capture(model, "lm_head", "**.state@all", steps=steps) as c:
        logits = run(model)
    if not kept:
        assert not len(c) and c.nbytes == 0
        return
    assert c.steps("lm_head") == c.steps(f"{STATE}@all") == kept
    assert all(c["lm_head", k].tobytes() == logits[k].tobytes() for k in kept)
    assert c.nbytes == sum(c[name, k].nbytes for name in c.names() for k in kept)


def test_the_last_step_keeps_the_states_of_all_its_tokens(model):
    with qwenref.capture(model, f"{STATE}@all", steps="last") as c:
        run(model, (2, 7))
    with qwenref.capture(model, f"{STATE}@all") as every:
        run(model, (2, 7))
    assert c.steps(f"{STATE}@all") == [1] and c[f"{STATE}@all"].tobytes() == every[f"{STATE}@all", 1].tobytes()
    assert c.nbytes == c[f"{STATE}@all"].nbytes


def test_tokens_and_heads(model):
    def captured(**options):
        with qwenref.capture(model, "**", "**.state@all", **options) as c:
            model(ids_of())
        return c

    everything = captured()
    for label, chosen, index in (("tokens", [-1], [-1]), ("tokens", slice(2, 4), slice(2, 4)), ("tokens", 3, [3]),
                                 ("heads", 0, [0]), ("heads", slice(0, 1), slice(0, 1))):  # fmt: skip
        c = captured(**{label: chosen})
        for name, site in c.targets.items():
            axis = site.axis("T" if label == "tokens" else "head")
            if axis is None or (label == "tokens" and site.tokens):
                assert c[name].tobytes() == everything[name].tobytes()
            else:
                assert c[name].tobytes() == everything[name][(slice(None),) * axis + (index,)].tobytes(), name


def test_reduce(model):
    with qwenref.capture(model, "**.resid_post", "**.state@all", reduce=lambda x: np.abs(x).max()) as c:
        run(model)
    with qwenref.capture(model, "**.resid_post", "**.state@all") as whole:
        run(model)
    assert c["layers.2.resid_post", 0] == np.abs(whole["layers.2.resid_post", 0]).max()
    states = whole[f"{STATE}@all", 0]
    assert c[f"{STATE}@all", 0].tolist() == [np.abs(states[:, t]).max() for t in range(LENGTHS[0])]
    assert c.nbytes == sum(c[name, k].nbytes for name in c.names() for k in range(4))


# Stopping early


@pytest.mark.parametrize(
    "stop", ["layers.1.input_layernorm", "layers.1.self_attn.scores", f"{STATE}@2", f"{STATE}@all"]
)
def test_stop_at(model, stop):
    cache, seen = qwenref.Cache(model, batch=2), []
    run(model, (3,), cache)
    before = cache_bits(cache)
    stop = stop.replace("@2", "@4")
    handle = model.model.layers[3].register_forward_pre_hook(lambda m, args: seen.append(1))
    with handle, qwenref.capture(model, stop, stop_at=stop) as c:
        model(ids_of()[:, 3:6], cache=cache)
        raise AssertionError("the block ends with the forward")
    assert not seen and c.steps(stop) == [0]
    assert cache_bits(cache) == before and nothing_left(model)
    with qwenref.capture(model, stop) as whole:
        model(ids_of()[:, 3:6], cache=cache)
    assert c[stop].tobytes() == whole[stop].tobytes()


def test_stop_at_waits_for_the_last_name_and_for_a_step_that_is_kept(model):
    with qwenref.capture(model, "**.resid_mid", steps=[1], stop_at="layers.[02].resid_mid") as c:
        run(model)
    assert c.names() == [f"model.layers.{i}.resid_mid" for i in range(3)] and len(c.calls) == 2


def test_stop_at_a_state_that_does_not_come_lets_the_call_be(model):
    name, reached = f"{STATE}@7", []
    with qwenref.capture(model, name, stop_at=name) as c:
        cache = qwenref.Cache(model, batch=2)
        for begin, end in ((0, 6), (6, 9)):
            model(ids_of()[:, begin:end], cache=cache)
            reached.append(end)
    assert reached == [6] and c.steps(name) == [1] and cache.length.tolist() == [6, 6]


def test_stopping_passes_through_blocks_opened_inside(model):
    with qwenref.capture(model, "layers.0", stop_at="layers.0") as outer:
        with qwenref.capture(model, "layers.*") as inner:
            model([1, 2])
        raise AssertionError("not reached")
    assert outer.names() == ["model.layers.0"] and not len(inner)  # the outer one saw the value first
    assert nothing_left(model)


# Budget


@pytest.mark.parametrize("numerics", ["fp32", "fp64"])
@pytest.mark.parametrize("options", [{}, {"tokens": [0]}, {"heads": slice(0, 1)}], ids=str)
def test_predicted_bytes_are_the_recorded_ones(model, numerics, options):
    model.numerics = numerics
    try:
        with qwenref.capture(model, "**", "**.state@all", "**.state@1,6,7,40", **options) as c:
            run(model)
        predicted = [c._predicted(shape) for shape in c.calls]
    finally:
        model.numerics = "fp32"
    for step in range(len(LENGTHS)):
        recorded = {name: c[name, step].nbytes if step in c.steps(name) else 0 for name in c.targets}
        assert recorded == predicted[step]
    assert c.nbytes == sum(c[name, step].nbytes for name in c.names() for step in c.steps(name))


def test_a_call_that_would_not_fit_is_refused_before_it_begins(model):
    began, cache = [], qwenref.Cache(model, batch=2)
    with qwenref.capture(model, "**", "**.state@all") as c:
        run(model, (6,))
    total, largest = c.nbytes, max(c.names(), key=lambda name: c[name].nbytes)
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda m, args: began.append(1))
    with (
        handle,
        pytest.raises(qwenref.BudgetExceeded) as caught,
        qwenref.capture(model, "layers.0", "**", "**.state@all", max_bytes=total - 1) as c,
    ):
        run(model, (6,), cache)
    first, found, *more = str(caught.value).split("\n")
    assert first == f"capture: this call would hold {total:,} B in {len(c.targets):,} names"
    assert re.fullmatch(rf"    found +{c._predicted(c.calls[0])[largest]:,} B  {re.escape(largest)}", found)
    assert more[-2] == f"    expected at most {total - 1:,} B, 0 B of them held already"
    assert more[-1] == "    do       raise max_bytes, or capture 'layers.0', which fits"
    assert not began and cache.length.tolist() == [0, 0] and c.nbytes == 0 and nothing_left(model)
    with qwenref.capture(model, "**", "**.state@all", max_bytes=total) as c:
        run(model, (6,))
    assert c.nbytes == total


def test_the_budget_counts_what_earlier_steps_hold_and_last_lets_go_of(model):
    with qwenref.capture(model, "lm_head") as c:
        run(model, (2, 2, 2))
    each = c.nbytes // 3
    with pytest.raises(qwenref.BudgetExceeded), qwenref.capture(model, "lm_head", max_bytes=2 * each) as c:
        run(model, (2, 2, 2))
    assert c.steps("lm_head") == [0, 1] and c.nbytes == 2 * each
    with qwenref.capture(model, "lm_head", max_bytes=each, steps="last") as c:
        run(model, (2, 2, 2))
    assert c.steps("lm_head") == [2] and c.nbytes == each


def test_reduced_values_are_held_to_the_budget_as_they_come(model):
    with (
        pytest.raises(qwenref.BudgetExceeded, match=r"^capture: model.layers.1.resid_post does not fit\n"),
        qwenref.capture(model, "**.resid_post", reduce=lambda x: x.copy(), max_bytes=2 * 6 * 64 * 4),
    ):
        run(model, (6,))
    assert nothing_left(model)


# Several at once


def test_nested_watchers_see_a_value_in_the_order_they_were_opened(model):
    order = []

    def say(word, result=None):
        return lambda x: order.append(word) or result

    name = "layers.0.resid_mid"
    with (
        qwenref.capture(model, name) as before,
        qwenref.edit(model, {name: lambda x: order.append("double") or x * 2}),
        qwenref.capture(model, name) as between,
        qwenref.edit(model, {name: lambda x: order.append("one more") or x + 1}),
        qwenref.capture(model, name) as after,
    ):
        model([1, 2, 3])
    assert order == ["double", "one more"]
    assert np.array_equal(between[name], before[name] * 2) and np.array_equal(after[name], between[name] + 1)


def test_modules_too_are_seen_in_the_order_of_opening(model):
    name = "layers.0.mlp"
    with qwenref.edit(model, {name: lambda x: x * 0}), qwenref.capture(model, name) as after:
        model([1, 2, 3])
    with qwenref.capture(model, name) as before, qwenref.edit(model, {name: lambda x: x * 0}):
        model([1, 2, 3])
    assert not after[name].any() and before[name].any()


def test_blocks_may_be_left_in_any_order(model):
    a, b = qwenref.capture(model, "lm_head"), qwenref.capture(model, "lm_head")
    a.__enter__(), b.__enter__()
    a.__exit__(None, None, None)
    model([1])
    b.__exit__(None, None, None)
    model([1])
    assert not len(a) and b.steps("lm_head") == [0] and nothing_left(model)


def test_a_block_closed_by_another_thread_sees_nothing_more(model):
    """As when a generator that holds a capture is thrown away elsewhere: what is open here still names the watcher."""
    c = qwenref.capture(model, "lm_head", "layers.0.resid_mid", STATE + "@all")
    c.__enter__()
    closer = threading.Thread(target=c.__exit__, args=(None, None, None))
    closer.start()
    closer.join()
    model([1, 2])
    assert len(c) == 0 and hooks_of(model) == 0
    c._close()
    assert nothing_left(model)


def test_a_watcher_says_in_one_line_what_it_is(model):
    change = qwenref.edit(model, {"layers.*.mlp": 0})
    assert repr(change) == "Edit · 4 names · closed"
    with change:
        assert repr(change) == "Edit · 4 names · open"
    assert repr(qwenref.ablate(model, "layers.0.mlp")) == "Edit · 1 name · closed"


def test_a_capture_opened_again_starts_over(model):
    c = qwenref.capture(model, "lm_head")
    for tokens in (3, 1):
        with c:
            model(ids_of(1, tokens))
        assert c.steps("lm_head") == [0] and c["lm_head"].shape[1] == tokens and c.nbytes == c["lm_head"].nbytes


def test_two_threads_on_one_model_see_only_their_own_calls(model):
    names, wanted, found, ready = ("**.resid_post", "**.state@all", "lm_head"), {}, {}, threading.Barrier(3)
    for seed in (1, 2):
        with qwenref.capture(model, *names) as c:
            for step in range(8):
                model(ids_of(2, 3 + seed, seed=10 * seed + step))
        wanted[seed] = c

    def work(seed):
        with qwenref.capture(model, *names) as c:
            ready.wait()
            for step in range(8):
                model(ids_of(2, 3 + seed, seed=10 * seed + step))
        found[seed] = c

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        for _ in range(8):
            model(ids_of(1, 2))  # watched by nobody
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for seed in (1, 2):
        assert found[seed].calls == wanted[seed].calls and found[seed].nbytes == wanted[seed].nbytes
        for name in wanted[seed]:
            assert found[seed].steps(name) == wanted[seed].steps(name)
            for step in wanted[seed].steps(name):
                assert found[seed][name, step].tobytes() == wanted[seed][name, step].tobytes()
    assert nothing_left(model)


@pytest.mark.parametrize("place", ["embed_tokens", "layers.2", "lm_head", ""])
def test_a_call_of_another_thread_in_the_middle_of_one_is_not_seen(model, place):
    ids, main = ids_of(), threading.get_ident()
    with qwenref.capture(model, "**", "**.state@all") as wanted, qwenref.trace(model) as rows:
        model(ids)

    def interrupt(module, args, output):
        if threading.get_ident() == main:
            other = threading.Thread(target=model, args=(ids_of(1, 3, seed=9),))
            other.start()
            other.join()

    module = model.get_submodule(f"model.{place}" if place[:2] in ("em", "la") else place)
    with (
        qwenref.capture(model, "**", "**.state@all") as c,
        qwenref.trace(model) as t,
        module.register_forward_hook(interrupt),
    ):
        model(ids)
    assert c.calls == wanted.calls and c.names() == wanted.names() and c.nbytes == wanted.nbytes
    assert all(c[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert [row[:9] for row in t.rows] == [row[:9] for row in rows.rows]


def test_across_generate():
    tiny = qwenref.from_pretrained("tiny")
    ids = tiny.tokenizer.encode("The sun")
    plain = tiny.generate(ids, max_new_tokens=6)
    with qwenref.capture(tiny, "lm_head", "**.linear_attn.state") as c:
        generation = tiny.generate(ids, max_new_tokens=6)
    assert list(generation.new_ids) == list(plain.new_ids)
    steps = c.steps("lm_head")
    assert [shape["T"] for shape in c.calls] == [len(ids)] + [1] * (len(steps) - 1)
    assert [shape["S"] for shape in c.calls] == list(range(len(ids), len(ids) + len(steps)))
    assert [int(c["lm_head", k][0, -1].argmax()) for k in steps][: len(plain.new_ids)] == list(plain.new_ids)


def test_a_call_made_by_a_hook_is_a_step_of_its_own_and_the_outer_one_goes_on(model):
    """The outer call has begun first and is step 0 to its end, states and what it waits for included."""
    inner, nested = ids_of(1, 3, seed=9), []

    def call_again(module, args, output):
        if not nested:
            nested.append(True)
            model(inner)

    names = ("layers.0", "layers.3", STATE + "@all", "layers.2.linear_attn.state@1,2")
    with model.model.layers[1].register_forward_hook(call_again), qwenref.capture(model, *names) as c:
        model(ids_of(1, 6))
    for step, ids in enumerate((ids_of(1, 6), inner)):
        with qwenref.capture(model, *names) as alone:
            model(ids)
        assert all(c[name, step].tobytes() == alone[name].tobytes() for name in alone.names()), step
    assert all(c.steps(name) == [0, 1] for name in c.names())
    nested.clear()
    with (
        model.model.layers[1].register_forward_hook(call_again),
        qwenref.capture(model, *names, stop_at="layers.3") as c,
    ):
        model(ids_of(1, 6))
    assert c.steps("layers.3") == [1]  # the block ends with the first call that has all it was opened for


def test_a_part_called_by_itself_counts_as_calls_of_its_own(model):
    hidden = np.asarray(model.model.embed_tokens(ids_of()))
    mixer = model.model.layers[0].linear_attn
    with qwenref.capture(model, "layers.0.linear_attn.q", f"{STATE}@all") as c:
        mixer(hidden)
        mixer(hidden[:, :4])
    assert [c["layers.0.linear_attn.q", k].shape[1] for k in (0, 1)] == [9, 4]
    assert [c[f"{STATE}@all", k].shape[1] for k in (0, 1)] == [9, 4]
    assert c[f"{STATE}@all", 1].tobytes() == c[f"{STATE}@all", 0][:, :4].tobytes()


# Trace


def test_trace_lists_values_with_statistics(model):
    with qwenref.trace(model) as t:
        run(model, (6, 1))
    with qwenref.capture(model, "**") as c:
        run(model, (6, 1))
    assert [row.name for row in t.rows if row.step == 1] == [row.name for row in t.rows if row.step == 0]
    for row in t.rows:
        value = c[row.name, row.step]
        assert (row.shape, row.dtype) == (value.shape, str(value.dtype))
        finite = value[np.isfinite(value)]
        masked = np.count_nonzero(np.isneginf(value)) if row.name.endswith(".scores") else 0
        bad = value.size - finite.size - masked
        assert (row.min, row.max, row.nonfinite) == (finite.min(), finite.max(), bad)
        assert row.rms == pytest.approx(np.sqrt(np.mean(finite.astype(np.float64) ** 2)), rel=1e-12)
        assert row.kind == ("site" if c.targets[row.name].site else "module") and row.ms >= 0
    assert repr(t).startswith(f"Trace · {len(t.rows):,} values in 2 calls\n")
    with qwenref.trace(model, "**.state@2,4") as t:
        run(model)
    assert [row.name for row in t.rows] == [f"model.layers.{i}.linear_attn.state@{t}" for i in (0, 2) for t in (2, 4)]


def test_trace_tells_values_that_are_not_finite(model):
    with (
        qwenref.edit(model, {"layers.0.mlp.up": lambda x: np.where(np.arange(96) == 3, np.inf, x)}),
        qwenref.trace(model, "layers.0.mlp.up") as t,
    ):
        model([1, 2])
    assert t.rows[0].nonfinite == 2 and np.isfinite(t.rows[0].max)
    line = repr(t).splitlines()[1]
    assert "layers.0.mlp.up  float32 [B 1, T 2, I 96]  " in line and "2 not finite" in line


def test_a_mask_is_no_finding_of_a_trace_and_nan_is(model):
    """Masked scores are minus infinity by design; one NaN among them is told."""
    scores = "layers.1.self_attn.scores"
    with qwenref.trace(model, scores) as clean:
        model([1, 2, 3])
    assert clean.rows[0].nonfinite == 0 and "not finite" not in repr(clean)
    with (
        qwenref.edit(model, {scores: lambda x: np.where(x == x[0, 0, 2, 1], np.nan, x)}),
        qwenref.trace(model, scores) as t,
    ):
        model([1, 2, 3])
    assert t.rows[0].nonfinite == 1 and "1 not finite" in repr(t)


def test_a_trace_shows_dimensions_range_and_time_as_text_and_as_html(model):
    with qwenref.trace(model, "layers.0.linear_attn.state@1", "layers.*.mlp") as t:
        model([1, 2, 3])
    first, *lines = repr(t).splitlines()
    assert first == "Trace · 5 values in 1 call"
    assert re.fullmatch(
        r"  0  layers.0.linear_attn.state@1  float32 \[B 1, V-head 6, K 16, D 16\]  -?\S+ … \S+ +rms \S+ +\S+ ms",
        lines[0],
    )
    html = t._repr_html_()
    for number in re.findall(r"(?<= rms )\S+", repr(t)):
        assert number in html
    with qwenref.trace(model) as everything:
        model([1, 2, 3])
    assert len(repr(everything).splitlines()) <= 40 and len(everything._repr_html_()) < 100_000
    assert repr(everything).splitlines()[-1] == f"  … {len(everything.rows) - 37:,} more: .rows"
    assert repr(qwenref.trace(model)) == "Trace · 0 values in 0 calls"


# No leak


def cycle(model, ids, mixer):
    """Everything that opens, once, and a call that fails in each way."""
    with (
        qwenref.capture(model, "**.resid_mid", "**.state@all"),
        qwenref.edit(model, {"**.v": lambda x: x * 1}),
        qwenref.trace(model, "layers.*"),
    ):
        model(ids)
    with qwenref.capture(model, "layers.0", stop_at="layers.0"):
        model(ids)
    handle = mixer.register_forward_hook(lambda m, args, out: 1 / 0)
    for watcher in (qwenref.capture(model, "**.q"), qwenref.capture(model, "**", max_bytes=1)):
        with contextlib.suppress(ZeroDivisionError, qwenref.BudgetExceeded), watcher:
            model(ids)
    handle.remove()
    for bad in (("nothing.here",), (), ("**.state@-1",)):
        with contextlib.suppress(qwenref.QwenrefError):
            qwenref.capture(model, *bad)


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def flat_over(cycles):
    """Growth of memory in bytes over `cycles`; objects and references may not grow at all."""
    model = qwenref.from_config(CONFIGS["one DeltaNet layer"], seed=0)
    ids, mixer = ids_of(1, 2), model.model.layers[0].linear_attn

    def counts():
        gc.collect()
        return [sys.getrefcount(m) for m in model.modules()] + [len(gc.get_objects())]

    for _ in range(max(200, cycles // 10)):  # fills the caches of re and difflib
        cycle(model, ids, mixer)
    memory, first = resident(), counts()
    for _ in range(cycles):
        cycle(model, ids, mixer)
    assert nothing_left(model)
    last = counts()
    assert last[:-1] == first[:-1]
    assert abs(last[-1] - first[-1]) < cycles / 10  # one leaked object per cycle would be ten times that
    return resident() - memory


def test_500_cycles_leave_nothing_behind():
    flat_over(500)


@pytest.mark.slow
@pytest.mark.measured
def test_10000_cycles_leave_nothing_behind():
    assert flat_over(10_000) < 2**20  # 100 bytes per cycle


# Failures on the way


class Refused(Exception):
    pass


def refuse(*args):
    raise Refused


@pytest.mark.parametrize("stage", ["pre-hook", "hook", "site", "state", "reduce", "first module", "head", "root"])
def test_a_failure_at_any_stage_leaves_cache_and_tables_as_they_were(model, stage):
    cache = qwenref.Cache(model, batch=2)
    run(model, (6,), cache)
    before = cache_bits(cache)
    layer, handle = model.model.layers[2], None
    watcher = {
        "site": lambda: qwenref.edit(model, {"layers.2.mlp.up": refuse}),
        "state": lambda: qwenref.edit(model, {"layers.2.linear_attn.state@7": refuse}),
        "first module": lambda: qwenref.edit(model, {"embed_tokens": refuse}),
        "head": lambda: qwenref.edit(model, {"lm_head": refuse}),
        "reduce": lambda: qwenref.capture(model, "layers.3.resid_mid", reduce=refuse),
    }.get(stage, lambda: qwenref.capture(model, "**"))()
    if stage == "pre-hook":
        handle = layer.register_forward_pre_hook(refuse)
    elif stage == "hook":
        handle = layer.register_forward_hook(refuse)
    elif stage == "root":
        handle = model.register_forward_hook(refuse)
    with pytest.raises(Refused), watcher:
        model(ids_of()[:, 6:9], cache=cache)
    if handle is not None:
        handle.remove()
    assert nothing_left(model) and cache_bits(cache) == before
    logits = model(ids_of()[:, 6:9], cache=cache).logits
    assert logits.tobytes() == model(ids_of()).logits[:, 6:].tobytes()


def test_a_block_that_cannot_be_opened_leaves_nothing(model, monkeypatch):
    c = qwenref.capture(model, "**")
    monkeypatch.setattr(c, "opened", refuse)
    with pytest.raises(Refused), c:
        raise AssertionError("not reached")
    assert nothing_left(model)


# Bad input


def captured(model, *patterns, **options):
    with qwenref.capture(model, *patterns, **options) as c:
        run(model)
    return c


BAD = {
    "a list of names": (lambda m: qwenref.capture(m, ["lm_head"]), "a pattern that is a list"),
    "bytes as text": (lambda m: qwenref.capture(m, "lm_head", max_bytes="1 GiB"), "capture: max_bytes='1 GiB'"),
    "bytes below 0": (lambda m: qwenref.capture(m, "lm_head", max_bytes=-1), "capture: max_bytes=-1"),
    "reduce by no function": (lambda m: qwenref.capture(m, "lm_head", reduce=3), "capture: reduce=3"),
    "reduce to nothing": (
        lambda m: captured(m, "lm_head", reduce=lambda x: None),
        "capture: lm_head: reduce returned a NoneType",
    ),
    "tokens: word": (lambda m: qwenref.capture(m, "lm_head", tokens="last"), "capture: tokens='last'"),
    "tokens: mask": (lambda m: qwenref.capture(m, "lm_head", tokens=[True, False]), "capture: tokens=[True, False]"),
    "heads of what has none": (
        lambda m: qwenref.capture(m, "lm_head", "layers.0", heads=[0]),
        "capture: heads=[0], but nothing that is named has heads",
    ),
    "tokens of what has none": (
        lambda m: qwenref.capture(m, STATE, tokens=[0]),
        "capture: tokens=[0], but nothing that is named has tokens",
    ),
    "a name that is none": (lambda m: captured(m, "lm_head")[1.5], "c[...]: a float"),
    "a step that is none": (lambda m: captured(m, "lm_head")["lm_head", "last"], "c[name, 'last']"),
    "a slice of steps": (lambda m: captured(m, "lm_head")["lm_head", :2], "c[name, slice(None, 2, None)]"),
    "no pattern": (lambda m: qwenref.capture(m), "capture: no pattern"),
    "not a name": (lambda m: qwenref.capture(m, 3), "a pattern that is an int"),
    "near": (
        lambda m: qwenref.capture(m, "layers.*.self_atn"),
        "'layers.*.self_atn' matches nothing. Near: layers.*.self_attn (2 names)",
    ),
    "near site": (
        lambda m: qwenref.capture(m, "layers.0.linear_attn.betta"),
        "'layers.0.linear_attn.betta' matches nothing. Near: layers.*.linear_attn.beta (2 names), "
        "layers.*.linear_attn.b (2 names), layers.*.linear_attn.a (2 names)",
    ),
    "other libraries: attention": (
        lambda m: qwenref.capture(m, "layers.1.attn.hook_pattern"),
        "'layers.1.attn.hook_pattern' matches nothing. Near: layers.*.self_attn.attn_weights (2 names)",
    ),
    "other libraries: residual": (
        lambda m: qwenref.capture(m, "blocks.1.hook_resid_pre"),
        "'blocks.1.hook_resid_pre' matches nothing. Near: layers.*.resid_pre (4 names)",
    ),
    "nothing near": (lambda m: qwenref.capture(m, "qqqqqqqqqqqqqqqq"), "'qqqqqqqqqqqqqqqq' matches nothing"),
    "attention of a DeltaNet": (
        lambda m: qwenref.capture(m, "layers.0.linear_attn.attn_weights"),
        "layers.0.linear_attn has no attn_weights; its exact token-to-token matrix is "
        "layers[0].linear_attn.token_map(...)",
    ),
    "layer out of range": (
        lambda m: qwenref.capture(m, "layers.9.resid_mid"),
        "'layers.9.resid_mid' matches nothing. Near: layers.*.resid_mid (4 names)",
    ),
    "columns: word": (lambda m: qwenref.capture(m, "**.state@end"), "state@end: not a list of columns"),
    "columns: negative": (lambda m: qwenref.capture(m, "**.state@-1"), "state@-1: not a list of columns"),
    "columns: none": (lambda m: qwenref.capture(m, "**.state@"), "state@: not a list of columns"),
    "columns: half": (lambda m: qwenref.capture(m, "**.state@1,"), "state@1,: not a list of columns"),
    "columns of no state": (
        lambda m: qwenref.capture(m, "layers.0.linear_attn.q@3"),
        "layers.0.linear_attn.q@3: only a state can be had after a token",
    ),
    "stop not captured": (
        lambda m: qwenref.capture(m, "layers.0", stop_at="layers.1"),
        "capture: stop_at names model.layers.1, which is not captured",
    ),
    "steps from the end": (lambda m: qwenref.capture(m, "lm_head", steps=-1), "capture: steps=-1"),
    "steps: word": (lambda m: qwenref.capture(m, "lm_head", steps="first"), "capture: steps='first'"),
    "steps: fraction": (lambda m: qwenref.capture(m, "lm_head", steps=[0.5]), "capture: steps=[0.5]"),
    "token out of range": (
        lambda m: captured(m, "layers.0", tokens=[6]),
        "capture: model.layers.0 has no token [6]",
    ),
    "head out of range": (
        lambda m: captured(m, "layers.1.self_attn.q", heads=4),
        "capture: model.layers.1.self_attn.q has no head 4",
    ),
    "several steps": (lambda m: captured(m, "lm_head")["lm_head"], "lm_head was captured in 4 steps"),
    "no such step": (lambda m: captured(m, "lm_head")["lm_head", 4], "lm_head was not captured in step 4"),
    "too far back": (lambda m: captured(m, "lm_head")["lm_head", -5], "lm_head was not captured in step -5"),
    "never passed": (
        lambda m: captured(m, "lm_head", f"{STATE}@99")[f"{STATE}@99"],
        f"{STATE}@99 was asked for, but no call has passed it yet",
    ),
    "not captured": (lambda m: captured(m, "lm_head")["lm_hed"], "'lm_hed' was not captured. Near: lm_head"),
    "cat without tokens": (
        lambda m: captured(m, STATE).cat(STATE),
        f"cat: model.{STATE} has no token axis",
    ),
    "cat of reduced": (
        lambda m: captured(m, "lm_head", reduce=np.max).cat("lm_head"),
        "cat: lm_head has no token axis",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_input(model, row):
    wrong, first = BAD[row]
    with pytest.raises(qwenref.QwenrefError) as caught:
        wrong(model)
    found = str(caught.value).split("\n")
    assert found[0] == first
    assert all(line.startswith("    ") for line in found[1:])
    assert nothing_left(model)


def test_an_open_watcher_cannot_be_entered_again(model):
    with qwenref.capture(model, "lm_head") as c:
        with pytest.raises(RuntimeError, match="^Capture: already open"), c:
            raise AssertionError("not reached")
        model([1])
    assert c.steps("lm_head") == [0] and nothing_left(model)


def test_a_removed_handle_may_be_removed_and_left_again(model):
    seen = []
    handle = model.register_forward_hook(lambda m, args, out: seen.append(1))
    handle.remove()
    handle.remove()
    with handle:
        model([1])
    assert not seen and nothing_left(model)
