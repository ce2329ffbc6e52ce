"""The vision tower by itself: its bits, its values, where its patches lie, and what it refuses."""

import numpy as np
import pytest
from vision_configs import vision_config
from vision_kits import GRIDS, SHAPES, parts_of, pictures, vision_model

import qwenref
from qwenref import _C, naive, ops
from qwenref.vision import patch_places, table_places

LEVELS = ("scalar", "avx2", "avx512", "avx512bf16")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-").replace(",", ""))
def tower(request):
    model = vision_model(**SHAPES[request.param])
    yield model.model.visual


@pytest.fixture(scope="module")
def small():
    return vision_model().model.visual


@pytest.fixture
def settings():
    """Threads and instruction level are put back."""
    threads, level = qwenref.get_num_threads(), _C.cpu_level()
    yield
    qwenref.set_num_threads(threads)
    _C.set_cpu_level(level)


# ---------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("grids", GRIDS)
def test_a_picture_among_others_has_the_bits_of_the_picture_alone(tower, grids):
    pixels, grid = pictures(tower, GRIDS[grids])
    alone = [tower(*part) for part in parts_of(pixels, grid)]
    together = tower(pixels, grid_thw=grid)
    assert together.dtype == np.float32 and together.tobytes() == np.concatenate(alone).tobytes()
    assert together.shape == (len(pixels) // tower.spatial_merge_size**2, tower.config.out_hidden_size)


def test_a_frame_group_of_a_video_sees_no_other(small):
    """But for the time, which the text around it tells, a video is its frame groups."""
    pixels, grid = pictures(small, [(3, 2, 3)])
    frames = small(pixels, [[1, 4, 6]] * 3)
    assert small(pixels, grid).tobytes() == frames.tobytes()
    changed = pixels.copy()
    changed[-1] += 1
    assert (small(changed, grid)[:12] == frames[:12]).all() and (small(changed, grid)[12:] != frames[12:]).all()


def test_any_number_of_threads_gives_the_same_bits(tower, settings):
    pixels, grid = pictures(tower, [(1, 9, 8), (2, 3, 1)])
    found = []
    for n in (1, 2, 5, 8):
        qwenref.set_num_threads(n)
        found.append(tower(pixels, grid).tobytes())
    assert len(set(found)) == 1


def test_every_instruction_level_gives_the_same_bits(tower, settings):
    pixels, grid = pictures(tower, [(1, 5, 3), (2, 1, 2)])
    found, ran = set(), []
    for level in LEVELS:
        try:
            _C.set_cpu_level(level)
        except qwenref.QwenrefError:
            continue
        ran.append(level)
        found.add(tower(pixels, grid).tobytes())
    assert "scalar" in ran and len(found) == 1


# ---------------------------------------------------------------------------------------------- sites and hooks


def test_every_site_and_module_fires_once_in_a_call_and_looking_changes_no_bit(tower):
    pixels, grid = pictures(tower, GRIDS["videos"])
    names, expected, count = list(tower.sites()), tower(pixels, grid).tobytes(), {}
    for name, module in tower.named_modules():
        if name and type(module).__name__ != "ModuleList":
            module.register_forward_hook(lambda *_, name=name: count.__setitem__(name, count.get(name, 0) + 1))
    try:
        with qwenref.capture(tower, *names) as seen:
            assert tower(pixels, grid).tobytes() == expected
    finally:
        qwenref.clear_hooks(tower)
    assert set(count.values()) == {1} and len(count) == sum(
        bool(name) and type(module).__name__ != "ModuleList" for name, module in tower.named_modules()
    )
    assert sorted(seen.names()) == sorted(names) and len(names) > 12 * tower.config.depth
    for name in names:
        site = tower.sites()[name]
        assert len(seen[name].shape) == len(site.dims), name
        for size, label in zip(seen[name].shape, site.shape, strict=True):
            assert isinstance(label, str) or size == label, name


def test_weights_are_those_of_a_segment_and_everything_follows_from_them(small):
    pixels, grid = pictures(small, GRIDS["images of several sizes"])
    with qwenref.capture(small, "blocks.1.attn.**", "blocks.1.resid_*", "blocks.1.mlp.**") as seen:
        small(pixels, grid)
    at = {name.rpartition("blocks.1.")[2]: seen[name] for name in seen.names()}
    weights, begin = at["attn.attn_weights"], 0
    for n in grid.prod(axis=1):
        inside = weights[:, begin : begin + n]
        assert np.abs(inside.sum(-1) - 1).max() < 1e-6 and (inside[..., begin : begin + n] > 0).all()
        outside = np.delete(inside, np.s_[begin : begin + n], axis=-1)
        assert not outside.any() and np.isneginf(np.delete(at["attn.scores"][0, begin], np.s_[begin : begin + n])).all()
        begin += n
    N, scale = len(pixels), small.blocks[1].attn.scaling
    qkv = at["attn.qkv"].reshape(N, 3, 2, 16)
    assert all((at[f"attn.{name}"] == qkv[:, i]).all() for i, name in enumerate("qkv"))
    exact = naive.segment_attention(at["attn.q_rot"], at["attn.k_rot"], at["attn.v"], grid.prod(axis=1), scale)
    assert np.abs(at["attn.context"] - exact).max() < 1e-5
    assert (at["resid_mid"] == at["resid_pre"] + at["attn.proj"]).all()
    assert (at["resid_post"] == at["resid_mid"] + at["mlp.linear_fc2"]).all()


def test_a_site_can_be_edited_and_is_back_afterwards(small):
    pixels, grid = pictures(small, GRIDS["an image"])
    before = small(pixels, grid)
    with qwenref.edit(small, {"blocks.0.attn.attn_weights": lambda p: p * 0}):
        changed = small(pixels, grid)
    bias = np.broadcast_to(small.blocks[0].attn.proj.bias.astype(np.float32), (len(pixels), 32))
    with qwenref.edit(small, {"blocks.0.attn": lambda mixed: bias}):
        assert np.abs(small(pixels, grid) - changed).max() < 1e-5
    assert np.abs(changed - before).max() > 0.01 and small(pixels, grid).tobytes() == before.tobytes()


# ---------------------------------------------------------------------------------------------- where patches lie


def test_T11_D1_corners_of_the_table_are_corners_of_the_picture():
    """Patch i of n lies at i (side - 1) / (n - 1), not at the centres of a grid of another pitch."""

    def rows(n):
        places = table_places(np.array([[1, n, 2]]), 2, 48)[0].reshape(n // 2, 2, 2)
        return places[:, :, 0].ravel()

    assert rows(4) == pytest.approx([0, 15.6667, 31.3333, 47], abs=5e-5)
    assert (rows(48) == np.arange(48)).all()
    assert rows(90)[[0, 1, 2, -1]] == pytest.approx([0, 0.5281, 1.0562, 47], abs=5e-5)
    assert (table_places(np.array([[1, 1, 1]]), 1, 48) == 0).all()  # one patch: the first corner
    half_pixel = (np.arange(4) + 0.5) * 48 / 4 - 0.5  # the mistake
    assert np.abs(rows(4) - half_pixel).max() > 5


def test_T11_D1_a_grid_of_the_tables_size_has_the_table_itself():
    tower = vision_model().model.visual  # a table of 8 x 8
    found = tower.pos_embed(*table_places(np.array([[1, 8, 8]]), 2, 8))
    rows, columns = patch_places(np.array([[1, 8, 8]]), 2)
    assert (found == tower.pos_embed.weight.astype(np.float32)[rows * 8 + columns]).all()


def test_D2_weights_of_the_four_corners_add_to_one_whatever_the_dtype_of_the_table():
    grids = np.array([[1, 90, 54], [1, 6, 4]])
    places = table_places(grids, 2, 48)
    for dtype in ("float32", "bfloat16", "float16"):
        assert (ops.sample_table(np.ones((48, 48, 3)).astype(ops_dtype(dtype)), *places) == 1).all()
    ramp = np.broadcast_to(np.arange(48.0, dtype=np.float32)[:, None, None], (48, 48, 1))  # exact in bfloat16
    found = ops.sample_table(ramp.astype(ops_dtype("bfloat16")), *places)[:, 0]
    assert np.abs(found - places[0]).max() <= 47 * 2.0**-24  # weights in bfloat16 would be off by 0.1


def ops_dtype(name):
    return qwenref.from_config(vision_config("f"), dtype=name, device="meta").lm_head.weight.dtype


def test_T11_D3_patches_go_by_merge_blocks():
    rows, columns = patch_places(np.array([[1, 4, 4]]), 2)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0)]
    assert list(zip(rows.tolist(), columns.tolist(), strict=True))[:9] == order
    rows, columns = patch_places(np.array([[2, 2, 4], [1, 2, 2]]), 2)
    assert columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3] * 2 + [0, 1, 0, 1]
    assert rows.tolist() == [0, 0, 1, 1] * 5


def test_D3_a_patch_is_channels_then_frames_then_rows_then_columns():
    tower = vision_model().model.visual
    proj, at = tower.patch_embed.proj, (2, 1, 3, 0)
    patch = np.zeros((3, 2, 4, 4), np.float32)
    patch[at] = 1
    expected = proj.weight.astype(np.float32)[(slice(None), *at)] + proj.bias.astype(np.float32)
    assert np.abs(tower.patch_embed(patch.reshape(1, -1))[0] - expected).max() < 1e-6


def test_D3_angles_of_the_row_fill_the_first_half_and_those_of_the_column_the_second():
    tower = vision_model(**SHAPES["heads of 72"]).model.visual
    rotary = tower.rotary_pos_emb
    assert rotary.inv_freq == pytest.approx(10000 ** (-2 * np.arange(18) / 36), rel=1e-15)
    cos, sin = rotary(None, np.array([[3, 0], [0, 5]]))
    assert cos.shape == (2, 36) and (cos[0, 18:] == 1).all() and (cos[1, :18] == 1).all()
    assert np.abs(sin[0, :18] - np.sin(3 * rotary.inv_freq)).max() < 1e-7
    assert np.abs(sin[1, 18:] - np.sin(5 * rotary.inv_freq)).max() < 1e-7


def test_moving_a_whole_picture_changes_no_weight_but_where_it_is_in_the_table(small):
    """Rotary attention depends on differences of rows and columns alone."""
    q, k = (np.random.default_rng(i).standard_normal((12, 2, 16)).astype(np.float32) for i in range(2))
    places = patch_places(np.array([[1, 4, 6]]), 2)[:, :12]

    def scores(offset):
        table = small.rotary_pos_emb(None, places + np.array(offset)[:, None])
        return ops.segment_scores(ops.rope_whole(q, *table), ops.rope_whole(k, *table), [12], 1.0)

    assert np.abs(scores((0, 0)) - scores((40, 7))).max() < 1e-5
    assert np.abs(scores((0, 0)) - ops.segment_scores(q, k, [12], 1.0)).max() > 0.1


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": [[1, 4, 6, 1]]}, qwenref.ShapeError, r"grid_thw: wrong shape\n.*\n    expected \[n, 3\]"),
        ({"grid": [[1, 4, 5]]}, qwenref.InputError, r"grid_thw\[0\] is \[1, 4, 5\]\n    expected .* multiples of 2"),
        ({"grid": [[1, 4, 6], [0, 4, 6]]}, qwenref.InputError, r"grid_thw\[1\] is \[0, 4, 6\]"),
        ({"grid": [[1, -4, -6]]}, qwenref.InputError, r"grid_thw\[0\]"),
        ({"grid": [[1, 2**32, 2**32]]}, qwenref.InputError, r"grid_thw\[0\] .*18,446,744,073,709,551,616 patches"),
        ({"grid": [[1, 4, 6], [2**30, 2, 2]]}, qwenref.InputError, r"grid_thw\[1\] .*at most 16,777,216"),
        ({"grid": [[1.0, 4.0, 6.0]]}, qwenref.DTypeError, "grid_thw: float64 values"),
        (
            {"grid": [[1, 4, 8]]},
            qwenref.ShapeError,
            r"24 patches, grid_thw makes 32\n    found    float32 \[24, 96\]\n.*\[32, 96\]",
        ),
        ({"pixels": np.zeros((24, 95), np.float32)}, qwenref.ShapeError, r"expected \[24, 96\]"),
        ({"pixels": np.zeros((24, 96), np.uint8)}, qwenref.DTypeError, "uint8 values\n    expected float32"),
        ({"pixels": [[0.0], [0.0, 1.0]]}, qwenref.ShapeError, "rows of different lengths"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(small, change, error, message):
    ran = []
    with (
        small.patch_embed.register_forward_pre_hook(lambda *_: ran.append(1)),
        pytest.raises(error, match=f"(?s)^visual: .*{message}"),
    ):
        small(change.get("pixels", np.zeros((24, 96), np.float32)), change.get("grid", [[1, 4, 6]]))
    assert not ran


def test_one_grid_may_come_alone_and_none_gives_no_rows(small):
    pixels, grid = pictures(small, [(1, 2, 3)])
    assert small(pixels, grid[0]).tobytes() == small(pixels.astype(np.float64), grid.tolist()).tobytes()
    assert small(pixels[:0], np.zeros((0, 3), np.int64)).shape == (0, 64)


def test_a_tower_without_data_says_so():
    tower = qwenref.from_config(vision_config("f"), device="meta").model.visual
    with pytest.raises(qwenref.CapabilityMissing, match="without data"):
        tower(np.zeros((4, 96), np.float32), [[1, 2, 2]])


# ---------------------------------------------------------------------------------------------- files


def test_a_changed_tower_is_saved_and_opens_again_with_its_bits(tmp_path):
    model = vision_model()
    tower = model.model.visual
    pixels, grid = pictures(tower, GRIDS["videos"])
    before = tower(pixels, grid)
    tower.blocks[1].mlp.linear_fc1.bias[...] = 1
    tower.pos_embed.weight[3] += 1
    after = tower(pixels, grid)
    assert [name for name, *_ in model.edits()] == [
        "model.visual.pos_embed.weight", "model.visual.blocks.1.mlp.linear_fc1.bias",
    ]  # fmt: skip
    model.save_pretrained(tmp_path)
    opened = qwenref.from_pretrained(tmp_path)
    assert opened.model.visual(pixels, grid).tobytes() == after.tobytes() != before.tobytes()
    assert opened.report.leftovers == {} and opened.report.without == ()
    model.reset()
    assert tower(pixels, grid).tobytes() == before.tobytes()


def test_random_weights_of_a_tower_depend_on_the_seed_alone_and_tell_pictures_apart():
    first, again, other = (qwenref.from_config(vision_config("f"), seed=s).model.visual for s in (0, 0, 1))
    pixels, grid = pictures(first, [(1, 3, 3)])
    rows = first(pixels, grid)
    assert rows.tobytes() == again(pixels, grid).tobytes() != other(pixels, grid).tobytes()
    assert 0.05 < rows.std() < 20 and np.abs(rows[0] - rows[1]).max() > 0.05
    norms = [p for name, p in first.named_parameters() if "norm" in name and name.endswith("weight")]
    assert len(norms) == 5 and all(abs(float(np.mean(p.astype(np.float32))) - 1) < 0.3 for p in norms)
