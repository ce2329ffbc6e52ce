"""Runs of some layers, and every class of module called by itself."""

import threading

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS

import qwenref
from qwenref.errors import DTypeError, InputError, ShapeError

CONFIG = CONFIGS["values 3 x keys, GQA 4"]  # four layers: lflf
T = 9


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=12)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(2).integers(0, CONFIG["vocab_size"], (2, 2 * T))


# ---------------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("profile", ["fp32", "fp64"])
def test_runs_in_a_row_have_the_bits_of_the_whole(model, ids, profile):
    with qwenref.numerics(profile):
        out = model(ids, output_hidden_states=True)
        for n, residual in enumerate(out.residuals):
            assert model.run(ids, stop=n).tobytes() == residual.tobytes()
            assert model.run(hidden=residual, start=n).tobytes() == out.residuals[-1].tobytes()
        one_by_one = model.run(ids, stop=0)
        for n in range(4):
            one_by_one = model.run(hidden=one_by_one, start=n, stop=n + 1)
        assert model.lm_head(model.model.norm(one_by_one)).tobytes() == out.logits.tobytes()


def test_a_run_reads_a_cache_and_leaves_it(model, ids):
    cache = qwenref.Cache(model, batch=2)
    mask = np.array([[1] * T, [1] * (T - 4) + [0] * 4])
    model(ids[:, :T], attention_mask=mask, cache=cache)
    before, saved = cache_bits(cache), cache.snapshot()
    whole = model(ids[:, T:], cache=cache, output_hidden_states=True).residuals
    cache.restore(saved)
    middle = model.run(ids[:, T:], stop=2, cache=cache)
    assert middle.tobytes() == whole[2].tobytes() and cache_bits(cache) == before
    assert model.run(hidden=middle, start=2, cache=cache).tobytes() == whole[4].tobytes()
    assert cache_bits(cache) == before and cache.step is None
    assert model.run(ids[:, T:], stop=2).tobytes() != middle.tobytes()
    with pytest.raises(ZeroDivisionError), model.model.layers[1].register_forward_hook(lambda *_: 1 / 0):
        model.run(ids[:, T:], cache=cache)
    assert cache_bits(cache) == before and cache.step is None


def test_a_run_takes_masks_and_positions(model, ids):
    mask = np.ones((2, T), int)
    mask[0, :3] = 0
    own = np.broadcast_to(np.arange(T), (2, T)) * 2
    whole = model(ids[:, :T], attention_mask=mask, position_ids=own, output_hidden_states=True).residuals
    half = model.run(ids[:, :T], stop=2, attention_mask=mask, position_ids=own)
    rest = model.run(start=2, hidden=half, attention_mask=mask, position_ids=own)
    assert (half.tobytes(), rest.tobytes()) == (whole[2].tobytes(), whole[4].tobytes())


def test_a_run_obeys_the_models_own_numerics_edits_and_hooks(ids):
    model = qwenref.from_config(CONFIG, seed=12, numerics="fp64")
    assert model.run(ids).dtype == np.float64
    with qwenref.edit(model, {"layers.1": lambda x: x * 0}):
        assert not model.run(ids, stop=2).any()
    fired = []
    with model.model.layers[2].register_forward_hook(lambda *_: fired.append(2)):
        model.run(ids, start=1, stop=2)
        model.run(ids, start=1, stop=3)
    assert fired == [2]


def test_a_run_inside_a_call_needs_a_cache_of_its_own(model, ids):
    cache = qwenref.Cache(model, batch=2)
    before = cache_bits(cache)
    for place in (model.model, model.model.layers[1]):  # before the inner model has joined the call, and after
        hook = lambda *_: model.run(ids, stop=1, cache=cache)  # noqa: E731
        with place.register_forward_pre_hook(hook), pytest.raises(InputError, match="another call is being made on it"):
            model(ids, cache=cache)
        assert cache_bits(cache) == before


BAD = [
    ({"start": -1}, InputError, "run: no such layers"),
    ({"start": 3, "stop": 2}, InputError, "run: no such layers"),
    ({"stop": 5}, InputError, "run: no such layers"),
    ({"start": 1.0}, InputError, "run: no such layers"),
    ({"stop": True}, InputError, "run: no such layers"),
    ({"hidden": np.zeros((2, 3, 64), np.float32)}, InputError, "run: input_ids or hidden"),
    ({"input_ids": None}, InputError, "run: input_ids or hidden"),
    ({"input_ids": None, "hidden": np.zeros((2, 3, 63), np.float32)}, ShapeError, "hidden: wrong shape"),
    ({"input_ids": None, "hidden": np.zeros((3, 64), np.float32)}, ShapeError, "hidden: wrong shape"),
    ({"input_ids": None, "hidden": np.zeros((1, 3, 64))}, DTypeError, "hidden: float64 values"),
    ({"input_ids": [211]}, InputError, r"input_ids\[0, 0\] is 211"),
    ({"attention_mask": [[1]]}, ShapeError, "attention_mask: wrong shape"),
    ({"cache": 3}, InputError, "cache: a int"),
]


@pytest.mark.parametrize("options, kind, message", BAD)
def test_a_bad_run_names_what_is_wrong(model, options, kind, message):
    with pytest.raises(kind, match=message):
        model.run(**{"input_ids": [[1, 2]], **options})


# ---------------------------------------------------------------------------------------------- every class alone


def inputs_of(model, ids):
    """{path: (args, kwargs, output)} of the first call of every module."""
    seen = {}

    def look(module, args, kwargs, output):
        seen.setdefault(module._path, (args, kwargs, output))

    handles = [m.register_forward_hook(look, with_kwargs=True) for m in model.modules()]
    model(ids)
    visual = getattr(model.model, "visual", None)
    if visual is not None:
        width = visual.patch_embed.proj.weight[0].size
        visual(np.random.default_rng(3).standard_normal((8, width), dtype=np.float32), grid_thw=[[1, 2, 4]])
    for handle in handles:
        handle.remove()
    return seen


SIDE = {"cache", "position_embeddings", "attention_mask", "position_ids", "use_cache", "inputs_embeds"}
SIDE |= {"output_hidden_states", "output_attentions"}


def first(value):
    value = value[0] if isinstance(value, tuple) else value
    return getattr(value, "last_hidden_state", getattr(value, "logits", value))


@pytest.mark.parametrize("composite", [False, True])
def test_every_class_can_be_called_with_defaults_for_its_side_inputs(ids, composite):
    if composite:
        model = qwenref.from_pretrained("tiny")
    else:
        model = qwenref.from_config(CONFIG, seed=12)
    seen, tried = inputs_of(model, ids), set()
    for path, (args, kwargs, output) in seen.items():
        module = model.get_submodule(path)
        if type(module).__name__ == "Conv1d":
            args = args[:1]
            kwargs, output = {}, output[0]
        side = SIDE if "visual" not in path else set()  # a tower's part alone does not know where its patches lie
        main = {name: value for name, value in kwargs.items() if name not in side}
        assert first(module(*args, **main)).tobytes() == first(output).tobytes(), path
        tried.add(type(module).__name__)
    silent = {"ModuleList"}
    assert tried == {type(module).__name__ for module in model.modules()} - silent


def test_parts_alone_do_not_disturb_each_other_across_threads(model, ids):
    want = model.run(ids)
    results = []
    threads = [threading.Thread(target=lambda: results.append(model.run(ids).tobytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want.tobytes()] * 4
