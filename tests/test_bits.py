"""The same bits, however a result is asked for: threads, instruction level, process, batch, split, hooks, optional
outputs, packing, and whatever a cache went through before."""

import copy
import hashlib
import threading

import fresh
import ml_dtypes
import numpy as np
import pytest
from cache_arrays import cache_bits, row_of, run
from text_configs import CONFIGS, text_config

import qwenref

NAMES = ("values 2 x keys, GQA 2", "aperiodic layers", "DeltaNet widths differ", "27B proportions")
LEVELS = ("scalar", "avx2", "avx512", "avx512bf16")
WIDE = text_config(  # one layer of each kind, as wide as those of the 0.8B: reaches the kernels of whole panels
    "lf", hidden_size=1024, intermediate_size=3584, heads=(8, 2), head_dim=256, delta=(16, 16), linear_key_head_dim=128,
    linear_value_head_dim=128, vocab_size=1031,
)  # fmt: skip
T = 21


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return qwenref.from_config(CONFIGS[request.param], seed=3)


@pytest.fixture(scope="module")
def wide():
    return qwenref.from_config(WIDE, seed=5)


# As small as the family allows, for tests of very many calls.
SMALL = {
    name: text_config(
        layers, heads=heads, delta=delta, head_dim=16, rotary=0.5, hidden_size=16, intermediate_size=24, vocab_size=31,
        linear_key_head_dim=4, linear_value_head_dim=width,
    )
    for name, layers, heads, delta, width in (
        ("hybrid", "llf", (2, 1), (1, 2), 4), ("aperiodic", "flfl", (2, 2), (2, 2), 4),
        ("widths differ", "lf", (3, 1), (1, 3), 6), ("only DeltaNet", "ll", (1, 1), (2, 4), 4),
    )
}  # fmt: skip


def ids_for(model, batch=2, tokens=T, seed=0):
    return np.random.default_rng(seed).integers(0, model.config.text_config.vocab_size, (batch, tokens))


def bits(model, ids, lengths=None, **options):
    """Logits of a prompt and everything its cache holds, as bytes."""
    cache = qwenref.Cache(model, batch=len(ids))
    logits = run(model, ids, lengths or [ids.shape[1]], cache, **options)
    return {"logits": logits.tobytes(), **cache_bits(cache)}


@pytest.fixture
def settings():
    """Puts threads and instruction level back."""
    threads, level = qwenref.get_num_threads(), qwenref._C.cpu_level()
    yield
    qwenref.set_num_threads(threads)
    qwenref._C.set_cpu_level(level)


def choose(level):
    """Use an instruction level, or skip with the reason this machine gives."""
    try:
        qwenref._C.set_cpu_level(level)
    except qwenref.CapabilityMissing as error:
        assert "this machine cannot run" in str(error)
        pytest.skip(str(error).split("\n")[0])
    assert qwenref._C.cpu_level() == level


# ---------------------------------------------------------------------------------------------- machine


def test_B12_threads(model, settings):
    ids, found = ids_for(model), []
    for n in (1, 2, 5, 8):
        qwenref.set_num_threads(n)
        assert qwenref.get_num_threads() == n
        found.append(bits(model, ids, [T - 1, 1]))
    assert all(result == found[0] for result in found)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_instruction_levels(model, level, settings):
    ids = ids_for(model)
    choose("scalar")
    expected = bits(model, ids, [T - 2, 1, 1])
    choose(level)
    assert bits(model, ids, [T - 2, 1, 1]) == expected


@pytest.mark.parametrize("tokens, threads", [(1, (1, 2, 5)), (17, (2,)), (65, (2,))])
def test_wide_kernels_on_every_level(wide, tokens, threads, settings):
    compare_levels(wide, ids_for(wide, 1, tokens), threads)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [17, 65])
def test_wide_kernels_on_every_level_and_thread_count(wide, tokens, settings):
    compare_levels(wide, ids_for(wide, 2, tokens), (1, 2, 5))


def test_wide_kernels_on_every_thread_count(wide, settings):
    ids, found = ids_for(wide, 1, 65), []
    for n in (1, 2, 5):
        qwenref.set_num_threads(n)
        found.append(bits(wide, ids))
    assert found[0] == found[1] == found[2]


def compare_levels(model, ids, threads):
    levels = [level for level in LEVELS if runs_here(level)]
    assert levels[0] == "scalar"
    found = []
    for level in levels:
        for n in threads:
            choose(level)
            qwenref.set_num_threads(n)
            found.append(bits(model, ids))
    assert all(result == found[0] for result in found)


def test_wide_rows_splits_and_positions(wide):
    ids = ids_for(wide, 2, 65)
    whole = bits(wide, ids)
    assert bits(wide, ids, [1, 17, 47]) == whole and bits(wide, ids, [64, 1]) == whole
    alone = wide(ids[1]).logits
    assert alone.tobytes() == wide(ids).logits[1:].tobytes()
    assert wide(ids, logits_to_keep=1).logits.tobytes() == wide(ids).logits[:, -1:].tobytes()


def runs_here(level):
    before = qwenref._C.cpu_level()
    try:
        qwenref._C.set_cpu_level(level)
    except qwenref.CapabilityMissing:
        return False
    qwenref._C.set_cpu_level(before)
    return True


PROGRAM = """
import test_bits
import qwenref
print(qwenref._C.cpu_level(), qwenref.get_num_threads(), test_bits.digest())
"""


def digest():
    """SHA-256 of the logits of all four models and the embedded one, prefill and decode."""
    models = [qwenref.from_config(CONFIGS[name], seed=3) for name in NAMES] + [qwenref.from_pretrained("tiny")]
    sha = hashlib.sha256()
    for model in models:
        sha.update(run(model, ids_for(model), [T - 2, 1, 1], qwenref.Cache(model, batch=2)).tobytes())
    return sha.hexdigest()


def in_a_process(level, threads="2"):
    return fresh.python(PROGRAM, check=False, QWENREF_CPU=level, QWENREF_NUM_THREADS=threads)


def test_the_environment_chooses_the_number_of_threads_and_no_bit():
    expected = digest()  # of this process
    for n in ("1", "2", "5"):
        done = in_a_process("scalar", n)
        assert done.stdout.split() == ["scalar", n, expected], done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_chooses_the_level(level):
    done = in_a_process(level)
    if not runs_here(level):
        assert done.returncode != 0 and "CapabilityMissing: QWENREF_CPU=" + level in done.stderr
        pytest.skip(f"this machine cannot run {level}; the refusal was checked")
    assert done.stdout.split() == [level, "2", digest()], done.stderr


def test_an_unknown_level_lists_those_there_are(settings):
    available = ", ".join(level for level in LEVELS if runs_here(level))
    level = qwenref._C.cpu_level()
    with pytest.raises(qwenref.CapabilityMissing, match=f"no instruction level is called 'sse9'\n.*{available}"):
        qwenref._C.set_cpu_level("sse9")
    assert qwenref._C.cpu_level() == level
    done = in_a_process("sse9")
    assert done.returncode != 0 and "CapabilityMissing" in done.stderr and available in done.stderr


def test_a_forked_child():
    """In a process of its own: torch, which other tests have imported here, does not survive a fork with threads."""
    program = """
import os
import qwenref, test_bits
qwenref.set_num_threads(3)
before = test_bits.digest()
child = os.fork()
if child == 0:
    os._exit(0 if test_bits.digest() == before and qwenref.get_num_threads() == 3 else 9)
assert os.waitpid(child, 0)[1] == 0
assert test_bits.digest() == before
print("same")
"""
    done = fresh.python(program, check=False)
    assert done.stdout == "same\n", done.stderr


def test_a_second_thread_and_two_at_once(model):
    prompts = [ids_for(model, seed=seed) for seed in (0, 1)]
    expected = [bits(model, ids, [5, T - 5]) for ids in prompts]
    found, start = {}, threading.Barrier(2)

    def work(which):
        start.wait()
        found[which] = [bits(model, prompts[which], [5, T - 5]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {which: [expected[which]] * 5 for which in (0, 1)}


# ---------------------------------------------------------------------------------------------- batch and split


def test_a_row_alone(model):
    ids = ids_for(model, batch=3)
    cache = qwenref.Cache(model, batch=3)
    together = run(model, ids, [T - 1, 1], cache)
    for row in range(3):
        single = qwenref.Cache(model)
        assert run(model, ids[row : row + 1], [T - 1, 1], single).tobytes() == together[row : row + 1].tobytes()
        assert row_of(single, 0) == row_of(cache, row)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_ragged_batch(model, side):
    ids, lengths = ids_for(model, batch=4), (T, 1, 7, 20)
    mask = np.zeros((4, T), int)
    for row, n in enumerate(lengths):
        mask[row, slice(T - n, None) if side == "left" else slice(0, n)] = 1
    cache = qwenref.Cache(model, batch=4)
    together = model(ids, attention_mask=mask, cache=cache).logits
    after = model(ids[:, :3], cache=cache).logits
    assert cache.length.tolist() == [n + 3 for n in lengths]
    for row in range(4):
        single = qwenref.Cache(model)
        own = ids[row : row + 1, mask[row] == 1]
        assert model(own, cache=single).logits.tobytes() == together[row : row + 1, mask[row] == 1].tobytes()
        assert model(ids[row, :3], cache=single).logits.tobytes() == after[row : row + 1].tobytes()
        assert row_of(single, 0) == row_of(cache, row)


@pytest.mark.parametrize("lengths", [(1, 20), (2, 19), (3, 18), (10, 11), (20, 1), (7, 7, 7), (1,) * T], ids=str)
def test_any_split_of_a_prompt(model, lengths):
    ids = ids_for(model)
    assert bits(model, ids, lengths) == bits(model, ids)


@pytest.mark.parametrize("name", SMALL)
def test_B1_300_tokens_split_at_every_place(name):
    model = qwenref.from_config(SMALL[name], seed=4)
    ids = ids_for(model, batch=1, tokens=300)
    whole = bits(model, ids)
    for k in range(1, 300):
        assert bits(model, ids, [k, 300 - k]) == whole, k


def test_A7_decode_against_prefill(model):
    """Every prefix decoded token by token, against one call: logits, windows, states, keys and values."""
    ids = ids_for(model, tokens=40)
    assert bits(model, ids, [1] * 40) == bits(model, ids, [30] + [1] * 10) == bits(model, ids)


def test_packed_rows_against_separate_ones(model):
    ids, ends = ids_for(model, batch=1), (0, 5, 6, T)
    numbers = np.repeat([7, 3, 8], np.diff(ends))[None]
    for lengths in ([T], [4, 3, T - 7], [1] * T):
        cache, at, parts = qwenref.Cache(model), 0, []
        for n in lengths:
            here = slice(at, at + n)
            parts.append(model(ids[:, here], sequence_ids=numbers[:, here], cache=cache).logits)
            at += n
        packed = np.concatenate(parts, 1)
        for begin, end in zip(ends, ends[1:], strict=False):
            alone = qwenref.Cache(model)
            expected = model(ids[:, begin:end], cache=alone).logits
            assert expected.tobytes() == np.ascontiguousarray(packed[:, begin:end]).tobytes()
        for ours, own in zip(cache.layers, alone.layers, strict=True):  # the last one is what goes on
            for name, array in own.arrays().items():
                held = ours.arrays()[name]
                assert np.array_equal(held[:, :, ends[2] :] if name in ("keys", "values") else held, array)


# ---------------------------------------------------------------------------------------------- what else is asked for


def test_hooks_that_only_look(model):
    ids = ids_for(model)
    expected, seen = bits(model, ids, [T - 1, 1]), []
    hooks = [
        register(lambda module, *rest: seen.append(module))
        for module in model.modules()
        for register in (module.register_forward_pre_hook, module.register_forward_hook)
    ]
    found = bits(model, ids, [T - 1, 1])
    for hook in hooks:
        hook.remove()
    assert found == expected == bits(model, ids, [T - 1, 1])
    assert len(seen) >= 2 * 2 * (len(list(model.modules())) - 2)  # in both calls, before and after; ModuleLists rest


@pytest.mark.parametrize(
    "options",
    [{"output_hidden_states": True}, {"output_attentions": True}, {"use_cache": True}]
    + [{"output_hidden_states": True, "output_attentions": True, "use_cache": True}],
    ids=lambda options: "+".join(options),
)
def test_optional_outputs(model, options):
    ids = ids_for(model)
    assert bits(model, ids, [T - 1, 1], **options) == bits(model, ids, [T - 1, 1])
    assert model(ids, **options).logits.tobytes() == model(ids).logits.tobytes()
    kept = np.stack([np.arange(T) > row for row in range(2)])  # attention weights of pads are laid out by hand
    plain = model(ids, attention_mask=kept).logits
    assert model(ids, attention_mask=kept, **options).logits.tobytes() == plain.tobytes()


def test_logits_to_keep(model):
    ids = ids_for(model)
    expected = bits(model, ids)
    logits = model(ids).logits
    for keep, rows in ((1, [-1]), (5, slice(-5, None)), (T, slice(None)), (99, slice(None)), ([3, 0, -1], [3, 0, -1])):
        found = bits(model, ids, logits_to_keep=keep)
        assert found.pop("logits") == np.ascontiguousarray(logits[:, rows]).tobytes()
        assert found == {name: value for name, value in expected.items() if name != "logits"}


def test_a_cache_changes_no_logit(model):
    ids = ids_for(model)
    out = model(ids, use_cache=True)
    assert out.logits.tobytes() == model(ids).logits.tobytes() and out.cache is out.past_key_values
    assert model(ids).cache is None
    again = model(ids[:, :4], past_key_values=out.cache)
    assert again.cache is out.cache and out.cache.length.tolist() == [T + 4] * 2


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda dtype: np.dtype(dtype).name)
def test_weights_of_every_dtype(model, dtype, settings):
    """Rounded to the dtype, the weights give on every level and thread count the bits of the same weights in float32:
    a stored weight is widened exactly."""
    ids = ids_for(model)
    other = qwenref.from_config(model.config, seed=3).to(dtype)
    levels = [level for level in LEVELS if runs_here(level)]
    found = []
    for level, n in [(level, 1 + i) for i, level in enumerate(levels)]:
        qwenref._C.set_cpu_level(level)
        qwenref.set_num_threads(n)
        found.append(bits(other, ids))
    assert {p.dtype for p in other.parameters()} == {np.dtype(dtype)}
    widened = bits(other.float(), ids)
    assert all(result == widened for result in found)


# ---------------------------------------------------------------------------------------------- caches used before


def test_A5_a_reset_cache_is_a_new_one(model):
    ids = ids_for(model)
    cache = qwenref.Cache(model, batch=2)
    fresh = cache_bits(cache)
    model(ids_for(model, seed=9), cache=cache)
    for layer in cache.layers:
        for array in layer.arrays().values():
            array[...] = np.nan
    assert np.isnan(model(ids[:, :1], cache=cache).logits).any()  # the poison is where a stale cache would be read
    cache.reset()
    assert cache_bits(cache) == fresh
    logits = run(model, ids, [T - 1, 1], cache)
    assert {"logits": logits.tobytes(), **cache_bits(cache)} == bits(model, ids, [T - 1, 1])


def test_A5_unused_memory_may_hold_anything(model):
    """Slots behind the last token of each row, full of NaN: nobody reads them, and later tokens take their place."""
    ids, mask = ids_for(model), np.ones((2, T), int)
    mask[0, T - 4 :] = 0
    expected, cache = qwenref.Cache(model, batch=2), qwenref.Cache(model, batch=2)
    for c in (expected, cache):
        model(ids, attention_mask=mask, cache=c)
    for layer in cache.layers:
        if "keys" in layer.arrays():
            assert layer._keys.shape[2] > T  # there is unused memory
            for row, n in enumerate(cache.length):
                layer._keys[row, :, n:] = layer._values[row, :, n:] = np.nan
    for n in (1, 5, 1):
        assert model(ids[:, :n], cache=cache).logits.tobytes() == model(ids[:, :n], cache=expected).logits.tobytes()
    for row in range(2):
        assert row_of(cache, row) == row_of(expected, row)


def spoilt(model):
    """A cache that was used for something else and then filled with NaN."""
    cache = qwenref.Cache(model, batch=2)
    model(ids_for(model, seed=9), cache=cache)
    for layer in cache.layers:
        for array in layer.arrays().values():
            array[...] = np.nan
        if "keys" in layer.arrays():
            layer._keys[...] = layer._values[...] = np.nan
    return cache


def test_what_a_cache_went_through_changes_no_bit(model, tmp_path):
    """Restored over a spoilt one, reordered and back, copied, saved and loaded, cropped and fed again."""
    ids = ids_for(model, tokens=30)
    expected = bits(model, ids)

    def go_on(cache, at):
        found = {"logits": model(ids[:, at:], cache=cache).logits.tobytes(), **cache_bits(cache)}
        logits = np.frombuffer(expected["logits"], np.float32).reshape(2, 30, -1)
        assert found == expected | {"logits": np.ascontiguousarray(logits[:, at:]).tobytes()}

    base = qwenref.Cache(model, batch=2)
    model(ids[:, :T], cache=base)
    saved = base.snapshot()
    go_on(base, T)
    for make in (lambda: qwenref.Cache(model, batch=2), lambda: qwenref.Cache(model), lambda: spoilt(model)):
        cache = make()
        cache.restore(saved)
        go_on(cache, T)
    cache.restore(saved)
    cache.reorder([1, 0, 1])
    cache.reorder([1, 2])
    go_on(cache, T)
    cache.restore(saved)
    go_on(copy.deepcopy(cache), T)
    cache.save(tmp_path / "cache")
    go_on(qwenref.Cache.load(tmp_path / "cache", model), T)
    cropped = qwenref.Cache(model, batch=2, snapshot_every=4)
    model(np.concatenate([ids[:, :13], ids[:, ::-1]], 1), cache=cropped)  # went astray after 13 tokens
    assert cropped.crop(13).tolist() == [1, 1]
    go_on(cropped, 12)
    go_on(qwenref.export_states(model, ids, [3, 17]).cache(17), 17)
