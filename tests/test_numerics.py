"""Profiles, the points they choose at, variants, and the noise floor."""

import asyncio
import contextvars
import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from text_configs import CONFIGS
from vision_configs import Prompt, vision_config

import qwenref
from qwenref import cli, cli_base, ops
from qwenref.numerics import active, profile

POINTS = qwenref.numerics.points()


WIDE = CONFIGS["values 2 x keys, GQA 2"] | {"hidden_size": 256, "intermediate_size": 288}  # K of 8 blocks and more


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(WIDE, seed=9)


@pytest.fixture(scope="module")
def ids(model):
    return np.random.default_rng(2).integers(0, model.config.text_config.vocab_size, (2, 75))


def logits(model, ids, *name, **choices):
    with qwenref.numerics(*name, **choices):
        return model(ids).logits


def in_bf16(array):
    return np.array_equal(array, array.astype(ml_dtypes.bfloat16).astype(array.dtype))


# ---------------------------------------------------------------------------------------------- names and choices


def test_the_named_profiles():
    names = qwenref.numerics.profiles()
    assert names == ("fp32", "fp64", "hf", "hf-5.12", "fla", "state-bf16", "kv-bf16", "chunk64")
    assert [profile(name).name for name in names] == list(names)
    assert {str(profile(name).dtype) for name in names if name != "fp64"} == {"float32"}
    assert profile("fp64").dtype == np.float64


def test_choices_combine_in_any_order_and_by_either_spelling(model, ids):
    made = qwenref.numerics("fp32", kv="bf16", state="bf16").profile
    assert made is qwenref.numerics("fp32+state=bf16+kv=bf16").profile is profile(made.name)
    assert made.name == "fp32+kv=bf16+state=bf16"
    assert made.choices["kv"] == made.choices["state"] == "bf16" and made.choices["norm"] == "float32"
    assert profile("hf+linear=float32").choices["linear"] == "float32"
    assert profile("fp32+kv=float32") is profile("fp32")
    assert profile("hf+norm=bf16") is profile("hf")
    assert qwenref.numerics(made, kv="fp16").name == "fp32+kv=fp16+state=bf16"
    for profiles in (made, qwenref.numerics(made)):
        assert profile(pickle.loads(pickle.dumps(profiles))) is made and profile(copy.deepcopy(profiles)) is made


def test_profiles_are_equal_only_to_themselves():
    assert len({profile(name) for name in qwenref.numerics.profiles()}) == len(qwenref.numerics.profiles())
    assert profile("fp32") != profile("kv-bf16") and profile("kv-bf16") == profile("kv-bf16")
    assert qwenref.numerics("fp64").name == "fp64" == repr(qwenref.numerics("fp64"))[len("numerics('") : -2]


def test_profiles_nest_and_end_with_their_block():
    one = qwenref.numerics("hf")
    with one as entered:
        assert entered is active() is profile("hf")
        with pytest.raises(ZeroDivisionError), qwenref.numerics("fp64"), one:
            assert active().name == "hf"
            with qwenref.numerics("fp32"):
                assert active().name == "fp32"
            1 / 0  # noqa: B018
        assert active().name == "hf"
    assert active().name == "fp32"


def test_a_profile_holds_in_its_thread_and_task_alone(model, ids):
    one, expected = qwenref.numerics("fp64"), logits(model, ids)

    async def chosen(start, name):
        with qwenref.numerics(name):
            start.set()
            await asyncio.sleep(0)
            return active().name

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(chosen(*pair)) for pair in ((first, "hf"), (second, "fla"))]
        await first.wait()
        await second.wait()
        return active().name, await asyncio.gather(*tasks)

    with ThreadPoolExecutor(2) as pool, one:
        assert pool.submit(active).result().name == "fp32"
        assert pool.submit(logits, model, ids, one).result().dtype == np.float64
        assert pool.submit(lambda: model(ids).logits.tobytes()).result() == expected.tobytes()
        assert pool.submit(contextvars.copy_context().run, active).result().name == "fp64"
        assert asyncio.run(both()) == ("fp64", ["hf", "fla"])

        def steps():
            with qwenref.numerics("hf"):
                yield

        left_open = contextvars.Context().run(lambda: (made := steps(), next(made)))[0]
        pool.submit(left_open.close).result()
        assert active().name == "fp64"
    assert active().name == "fp32"


def test_a_profile_shows_itself_as_its_table():
    chosen = qwenref.numerics("fp32", kv="bf16", state="bf16")
    assert repr(chosen.profile).endswith("the reference; changed: kv, state>")
    described = qwenref.numerics.describe(chosen)._repr_html_()
    assert "* kv" in described and chosen._repr_html_() == chosen.profile._repr_html_() == described


@pytest.mark.parametrize("name", [name for name in qwenref.numerics.profiles() if name != "fp32"])
def test_a_model_takes_a_profile_by_name(model, ids, name):
    mine = qwenref.from_config(WIDE, seed=9, numerics=name)
    assert mine.numerics == name
    assert mine(ids).logits.tobytes() == logits(model, ids, name).tobytes()
    mine.numerics = qwenref.numerics("fp32", kv="bf16")
    assert mine.numerics == "fp32+kv=bf16"


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("bf16", {}, "no profile 'bf16'"),
        (None, {}, "no profile None"),
        ("fp32+", {}, "no rounding point ''"),
        ("fp32+kv", {}, "kv: no choice ''"),
        ("fp32", {"cache": "bf16"}, "no rounding point 'cache'"),
        ("fp32", {"kv": "fp8"}, "kv: no choice 'fp8'"),
        ("fp32", {"kv": ["bf16"]}, "kv: no choice"),
        ("fp32", {"kv": "bf16+norm=bf16"}, "kv: no choice 'bf16.norm=bf16'"),
        ("fp32+kv=bf16+kv=fp16", {}, "a rounding point twice"),
        ("hf+norm=fp16+nrm=fp16", {}, "no rounding point 'nrm'"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, choices, message):
    with pytest.raises(qwenref.InputError, match=message) as caught:
        qwenref.numerics(name, **choices)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("name", qwenref.numerics.profiles())
def test_a_description_has_a_row_per_point_and_marks_what_is_chosen(name):
    described, chosen = qwenref.numerics.describe(name), profile(name)
    assert [row[0] for row in described.rows] == list(POINTS)
    assert all(row[2] == chosen.choices[row[0]] and row[3] == POINTS[row[0]][row[2]] for row in described.rows)
    marked = [line.split()[1] for line in str(described).splitlines() if line.startswith("* ")]
    assert marked == [p for p, choice in chosen.choices.items() if choice != next(iter(POINTS[p]))]
    assert chosen.summary in str(described).splitlines()[0] and chosen.summary.split("'")[0] in described._repr_html_()
    named = {op for row in described.rows for op in row[1].split() if op != "-"}
    assert named <= set(ops.names())


def test_the_readme_and_the_command_line_name_every_profile(capsys):
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    listed = readme.split("| profile |")[1].split("\n\n")[0].splitlines()[2:]
    names = qwenref.numerics.profiles()
    assert listed == [f"| `{name}` | {profile(name).summary} |" for name in names]
    assert cli.main(["generate", "--help"]) == 0
    written = "".join(capsys.readouterr().out.split())  # lines break at hyphens too
    assert f"fp32(default),{','.join(names[1:-1])}or{names[-1]};choicesfollow:fp32+kv=bf16" in written


def test_the_command_line_takes_choices(capsys):
    words = ["generate", "tiny", "Once", "--raw", "--max-new-tokens", "2", "--json", "--numerics"]
    assert cli.main([*words, "fp32+state=bf16+kv=bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["numerics"] == "fp32+kv=bf16+state=bf16"
    assert cli.main([*words, "fp32+kv=bf15"]) == cli_base.BAD_INPUT
    assert "kv: no choice 'bf15'" in capsys.readouterr().err


def test_a_cache_goes_on_under_another_profile_of_the_same_dtype_and_no_other(model, ids):
    cache = qwenref.Cache(model, batch=2)
    model(ids[:, :5], cache=cache)
    before = {n: x.copy() for n, x in cache.layers[-1].arrays().items()}
    with qwenref.numerics("fp64"), pytest.raises(qwenref.InputError, match="another numerics profile"):
        model(ids[:, 5:], cache=cache)
    with qwenref.numerics("kv-bf16"):
        model(ids[:, 5:], cache=cache)
    after = cache.layers[-1].arrays()
    for name in ("keys", "values"):
        assert after[name][:, :, :5].tobytes() == before[name].tobytes() and not in_bf16(after[name][:, :, :5])
        assert in_bf16(after[name][:, :, 5:])


# ---------------------------------------------------------------------------------------------- every choice


VISION = ("pixels", "positions", "layer_norm", "patch_table", "patch_rotation", "gelu")


@pytest.fixture(scope="module")
def seen():
    """A model that sees, and a prompt with two images."""
    prompt = Prompt(np.random.default_rng(0), [3, (1, 6, 10), 2, (1, 4, 4), 3])
    model = qwenref.from_config(vision_config("lf"), seed=2)
    return model, np.array([prompt.ids]), prompt.pictures()


@pytest.mark.parametrize("base", ["fp32", "fp64"])
@pytest.mark.parametrize("point, choice", [(p, c) for p in VISION for c in list(POINTS[p])[1:]])
def test_every_choice_of_the_tower_is_a_small_change_that_shows(seen, base, point, choice):
    model, ids, pictures = seen
    with qwenref.numerics(base):
        expected = model(ids, **pictures).logits
    with qwenref.numerics(base, **{point: choice}):
        changed = model(ids, **pictures).logits
    off = np.abs(changed - expected).max() / np.abs(expected).max()
    assert changed.dtype == expected.dtype and 0 < off < 0.1


@pytest.mark.parametrize("point, choice", [(p, c) for p in POINTS if p not in VISION for c in list(POINTS[p])[1:]])
@pytest.mark.parametrize("base", ["fp32", "fp64"])
def test_every_choice_is_a_small_change_that_shows(model, ids, base, point, choice):
    def run(*name, **choices):
        with qwenref.numerics(*name, **choices):
            cache = qwenref.Cache(model, batch=2)
            return np.concatenate([model(part, cache=cache).logits for part in (ids[:, :-1], ids[:, -1:])], axis=1)

    expected, changed = run(base), run(base, **{point: choice})
    assert changed.dtype == expected.dtype
    off = np.abs(changed - expected).max() / np.abs(expected).max()
    if point == "parameters":  # bf16 already
        assert off == 0
    elif base == "fp64" and (choice == "chunk64" or (point == "matmul" and "bf16" not in choice)):
        assert off < 1e-12  # the definition in another order
    else:
        assert 0 < off < 0.2  # a bf16 ulp is 0.4 %; a random model makes tens of that


@pytest.mark.parametrize("name", ["fp32+parameters=bf16", "hf", "hf-5.12", "fla"])
def test_parameters_in_bf16_round_what_the_file_holds_in_float32(ids, name):
    wide = qwenref.from_config(WIDE, seed=9, dtype="float32")
    rng = np.random.default_rng(5)
    for path, parameter in wide.named_parameters():  # norms that are not in bf16 by chance
        if "norm" in path:
            parameter += rng.normal(0, 0.1, parameter.shape).astype(np.float32)
    found = logits(wide, ids, name)
    for _, parameter in wide.named_parameters():
        parameter[...] = parameter.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert found.tobytes() == logits(wide, ids, name).tobytes()


def test_hf_keeps_every_value_in_bf16(model, ids):
    float32 = {"g", "beta", "q", "k", "state", "delta_read", "delta_write"}  # of a DeltaNet layer
    with qwenref.numerics("hf"), qwenref.capture(model, "**") as c:
        model(ids)
    checked = 0
    for name in c.names():
        mixer, _, site = name.rpartition(".")
        if "rotary" in name or (mixer.endswith("linear_attn") and site in float32 - {"beta"}):
            continue
        assert in_bf16(np.where(np.isfinite(c[name]), c[name], 0)), name
        checked += 1
    assert checked > 100


def test_stored_values_are_rounded_where_they_are_kept(model, ids):
    cache = qwenref.Cache(model, batch=2)
    with qwenref.numerics("fp32", kv="bf16", state="bf16"), qwenref.capture(model, "layers.0.linear_attn.state") as c:
        model(ids, cache=cache)
    for layer in cache.layers:
        arrays = layer.arrays()
        rounded = [arrays[name] for name in ("keys", "values", "recurrent_state") if name in arrays]
        assert all(map(in_bf16, rounded)) and all(array.any() for array in rounded)
    state = c[c.names()[0]]
    assert state.tobytes() == cache.layers[0].recurrent_state.tobytes()


def test_fused_ops_follow_their_parts():
    rng = np.random.default_rng(0)
    g, u = rng.normal(size=(2, 3, 40)).astype(np.float32)
    with qwenref.numerics("hf"):
        assert ops.silu_mul(g, u).tobytes() == ops.mul(ops.silu(g), u).tobytes()
        assert in_bf16(ops.silu_mul(g, u))
    q = rng.normal(size=(1, 3, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 2, 3, 8)).astype(np.float32)
    begin, end = np.zeros((1, 3), np.int64), np.array([[1, 2, 3]])
    with qwenref.numerics("fp32", scores="bf16"):
        scores = ops.attention_scores(q, k, begin, end, 0.3)
        weights = ops.attention_softmax(scores, begin, end)
        buffer = np.zeros_like(weights)
        mixed, p = ops.attention(q, k, v, begin, end, 0.3, p=buffer)
        assert p is buffer and buffer.tobytes() == weights.tobytes()
        assert mixed.tobytes() == ops.attention(q, k, v, begin, end, 0.3).tobytes()
        assert mixed.tobytes() == ops.attention_mix(weights, v, begin, end).tobytes()


# ---------------------------------------------------------------------------------------------- what profiles promise


@pytest.mark.parametrize("name", qwenref.numerics.profiles())
def test_looking_and_optional_outputs_change_no_bit_under_any_profile(model, ids, name):
    with qwenref.numerics(name):
        cache = qwenref.Cache(model, batch=2)
        expected = model(ids, cache=cache).logits
        seen = qwenref.Cache(model, batch=2)
        with qwenref.capture(model, "**", "layers.*.linear_attn.state@3,70") as c:
            found = model(ids, cache=seen, output_hidden_states=True, output_attentions=True).logits
    assert found.tobytes() == expected.tobytes()
    for a, b in zip(cache.layers, seen.layers, strict=True):
        assert all(x.tobytes() == b.arrays()[n].tobytes() for n, x in a.arrays().items())
    assert any("state@" in name for name in c.names())


@pytest.mark.parametrize("name", qwenref.numerics.profiles())
def test_rows_threads_and_edits_under_any_profile(model, ids, name):
    threads = qwenref.get_num_threads()
    with qwenref.numerics(name):
        expected = model(ids).logits
        assert model(ids[1:]).logits.tobytes() == expected[1:].tobytes()
        try:
            qwenref.set_num_threads(1 + threads % 2)
            assert model(ids).logits.tobytes() == expected.tobytes()
        finally:
            qwenref.set_num_threads(threads)
        with qwenref.edit(model, {"layers.0.linear_attn.state@10": lambda s: s * 0}):
            edited = model(ids).logits
    assert edited[:, :11].tobytes() == expected[:, :11].tobytes()
    assert (edited[:, 11:] != expected[:, 11:]).any(axis=-1).all()


@pytest.mark.parametrize("name", ["kv-bf16", "fp32+norm=bf16+linear=bf16"])
def test_splits_under_profiles_without_chunks_and_rounded_states(model, ids, name):
    with qwenref.numerics(name):
        expected = model(ids).logits
        cache = qwenref.Cache(model, batch=2)
        parts = [model(part, cache=cache).logits for part in np.split(ids, [1, 3, 40], axis=1)]
    assert np.concatenate(parts, axis=1).tobytes() == expected.tobytes()


# ---------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_variants_differ_and_come_again(model, ids, dtype):
    made = [qwenref.numerics.jitter(seed, dtype) for seed in range(8)]
    assert [m.name for m in made] == [qwenref.numerics.jitter(seed, dtype).name for seed in range(8)]
    assert len({m.name for m in made}) >= 6
    expected = logits(model, ids)
    scale = np.abs(expected).max()
    with made[0]:
        inside = model(ids).logits
    assert inside.tobytes() == logits(model, ids, made[0].name).tobytes()
    for variant in made:
        off = np.abs(logits(model, ids, variant) - expected).max() / scale
        assert 0 < off < (0.5 if dtype == "bfloat16" else 1e-4), variant.name


@pytest.mark.parametrize("options", [{"seed": 0.5}, {"seed": True}, {"seed": 0, "dtype": "int8"}], ids=str)
def test_bad_variants(options):
    with pytest.raises(qwenref.InputError, match="jitter"):
        qwenref.numerics.jitter(**options)


# ---------------------------------------------------------------------------------------------- noise floor


def test_the_noise_floor_is_the_difference_it_says(model, ids):
    floor = qwenref.numerics.bound(model, ids)
    with qwenref.numerics("fp64"):
        exact = model(ids, output_hidden_states=True)
    found = model(ids, output_hidden_states=True)
    assert len(floor.relative) == len(floor.largest) == len(floor.layers) == 1 + len(model.text_model.layers)
    assert floor.relative[0] == 0 and (floor.relative[1:] > 0).all() and floor.relative.max() < 1e-5
    for row, pair in enumerate(zip(found.residuals, exact.residuals, strict=True)):
        assert floor.largest[row] == np.abs(np.subtract(*pair)).max()
    assert floor.logits_largest == np.abs(found.logits - exact.logits).max()
    top = np.sort(exact.logits, axis=-1)
    assert np.array_equal(floor.margins, top[..., -1] - top[..., -2])
    assert "logits" in repr(floor) and repr(floor).count("\n") >= len(floor.layers) + 2
    assert "near ties" in floor._repr_html_()


def test_near_ties_are_listed_with_their_margins(model, ids):
    head = model.lm_head.weight
    before = head.copy()
    try:
        head[1] = head[0]  # two ids whose logits are always the same
        with qwenref.edit(model, {"lm_head": lambda x: np.where(np.arange(x.shape[-1]) < 2, x + 100, x)}):
            floor = qwenref.numerics.bound(model, ids)
    finally:
        head[...] = before
    assert len(floor.near_ties) == ids.size and floor.margins.max() == 0 and not floor.changes
    assert f"{ids.size} near ties" in repr(floor) and "more: .near_ties" in repr(floor)


def test_pads_are_left_out_of_the_noise_floor(model, ids):
    mask = np.ones(ids.shape, np.int64)
    mask[0, :40] = 0
    floor = qwenref.numerics.bound(model, ids, "hf", attention_mask=mask)
    other = np.where(mask, ids, (ids + 1) % 200)
    again = qwenref.numerics.bound(model, other, "hf", attention_mask=mask)
    assert repr(floor) == repr(again) and floor.relative.tobytes() == again.relative.tobytes()
    assert np.isinf(floor.margins[0, :40]).all() and not floor.errors[0, :40].any()
    assert np.isfinite(floor.margins[mask == 1]).all() and floor.near_ties
    assert all(mask[place] for place in floor.near_ties + floor.changes)


def test_a_floor_needs_two_profiles(model, ids):
    with pytest.raises(qwenref.InputError, match="against itself"):
        qwenref.numerics.bound(model, ids, "fp64")
    with pytest.raises(qwenref.InputError, match="pads only"):
        qwenref.numerics.bound(model, ids, attention_mask=np.zeros_like(ids))
    with pytest.raises(TypeError, match="cache"):
        qwenref.numerics.bound(model, ids, cache=qwenref.Cache(model, batch=2))
