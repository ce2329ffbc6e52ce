"""Images and videos inside the text model: what is refused, what a cache keeps, same bits however they are fed."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
from cache_arrays import cache_bits, row_of
from vision_configs import CLOSE, IMAGE, OPEN, VIDEO, WIDTH, Prompt, joined, left_padded, vision_config

import qwenref
from qwenref.errors import InputError, ShapeError

LAYERS = {"hybrid": "llf", "only attention": "ff", "only DeltaNet": "ll"}
TWO_IMAGES = [3, (1, 4, 6), 2, (1, 8, 2), 4]
EVERYTHING = [2, (1, 6, 4), 1, [3, 2, 4], 3, (1, 2, 6), [2, 4, 2], 2]


def opened(layers):
    return qwenref.from_config(vision_config(layers), seed=2)


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return opened(LAYERS[request.param])


@pytest.fixture(scope="module")
def hybrid():
    return opened("llf")


def prompt(parts, seed=5):
    return Prompt(np.random.default_rng(seed), parts)


def run(model, prompts, lengths, cache, early=False):
    """Logits of rows of one length, fed in calls; all pictures come with the first call, or each with its own."""
    ids, logits, at = np.array([p.ids for p in prompts]), [], 0
    for n in lengths:
        pictures = joined(prompts, at, at + n) if not early else joined(prompts) if at == 0 else {}
        logits.append(model(ids[:, at : at + n], cache=cache, **pictures).logits)
        at += n
    return np.concatenate(logits, 1)


def positions_seen(model, call):
    """What `call` gives the rotary embedding: int64 [3, B, T]."""
    seen = []
    with model.model.language_model.rotary_emb.register_forward_pre_hook(lambda _, args: seen.append(args[1])):
        call()
    assert len(seen) == 1
    return np.array(seen[0])


# ---------------------------------------------------------------------------------------------- one call


def test_the_rows_of_the_tower_take_the_places_of_the_placeholders(model):
    row = prompt(EVERYTHING)
    towers = []
    with model.model.visual.register_forward_hook(lambda *args: towers.append(args[-1])):
        out = model(row.ids, **row.pictures(), output_hidden_states=True)
    assert len(towers) == 1  # images and videos together: a module fires once in a call
    kinds, embeds = np.array(row.types), out.hidden_states[0][0]
    assert (embeds[np.r_[np.flatnonzero(kinds == 1), np.flatnonzero(kinds == 2)]] == towers[0]).all()
    text = model.model.language_model.embed_tokens(np.array(row.ids))
    assert (embeds[kinds == 0] == text[kinds == 0]).all()
    positions, deltas = qwenref.rope_index(model, row.ids, row.images, row.videos)
    assert (positions_seen(model, lambda: model(row.ids, **row.pictures())) == positions).all()
    assert out.rope_deltas.tolist() == deltas.tolist() and "cache" not in out


def test_D7_images_of_other_shapes_are_as_each_alone(hybrid):
    row = prompt([(1, 4, 6), 1, (1, 8, 2), (1, 6, 4)])
    whole = hybrid(row.ids, **row.pictures(), output_hidden_states=True).hidden_states[0][0]
    pixels, at = row.pictures()["pixel_values"], 0
    for grid, first in zip(row.images, row._first[1], strict=True):
        n = int(np.prod(grid))
        alone = hybrid.model.visual(pixels[at : at + n], grid_thw=np.array([grid]))
        assert whole[first : first + n // 4].tobytes() == alone.tobytes()
        at += n


def test_D9_two_videos_of_3_and_5_frame_groups_in_a_batch_are_as_each_alone(model):
    rows = [prompt([2, [3, 4, 6], 3]), prompt([1, [5, 2, 4], 4], seed=6)]
    ids, mask = left_padded(rows)
    cache = qwenref.Cache(model, batch=2)
    out = model(ids, attention_mask=mask, cache=cache, **joined(rows))
    for b, row in enumerate(rows):
        own = qwenref.Cache(model)
        alone = model(row.ids, cache=own, **row.pictures())
        assert out.logits[b, mask[b] == 1].tobytes() == alone.logits[0].tobytes()
        assert out.rope_deltas[b] == alone.rope_deltas[0] == qwenref.rope_index(model, row.ids, None, row.videos)[1]
        assert row_of(cache, b) == row_of(own, 0)
    ids = np.array([[7], [8]])
    decoded = model(ids, cache=cache).logits
    for b, row in enumerate(rows):
        own = qwenref.Cache(model)
        model(row.ids, cache=own, **row.pictures())
        assert decoded[b].tobytes() == model(ids[b : b + 1], cache=own).logits[0].tobytes()


def test_rows_with_different_items_and_left_pads_are_as_each_alone(model):
    rows = [prompt(EVERYTHING), prompt([9], 1), prompt([1, (1, 2, 2), 3], 2), prompt([[2, 2, 2], (1, 4, 4)], 3)]
    ids, mask = left_padded(rows)
    ids[mask == 0] = IMAGE  # what stands in a pad is nobody's placeholder
    out = model(ids, attention_mask=mask, **joined(rows))
    for b, row in enumerate(rows):
        assert out.logits[b, mask[b] == 1].tobytes() == model(row.ids, **row.pictures()).logits[0].tobytes()


def test_packed_rows_with_pictures_are_as_separate_ones(model):
    first, second = prompt([2, (1, 4, 6), 3]), prompt([[2, 4, 2], 1, (1, 2, 4), 2], 6)
    numbers = np.repeat([4, 7], [len(first), len(second)])[None]
    cache = qwenref.Cache(model)
    out = model([first.ids + second.ids], sequence_ids=numbers, cache=cache, **joined([first, second]))
    expected = [model(row.ids, **row.pictures()).logits[0] for row in (first, second)]
    assert out.logits[0].tobytes() == np.concatenate(expected).tobytes()
    assert out.rope_deltas.tolist() == qwenref.rope_index(model, second.ids, second.images, second.videos)[1].tolist()
    own = qwenref.Cache(model)
    model(second.ids, cache=own, **second.pictures())
    following = model([[3, 4]], sequence_ids=[[7, 7]], cache=cache).logits
    assert following.tobytes() == model([[3, 4]], cache=own).logits.tobytes()


def test_positions_may_be_given_and_embeddings_too(hybrid):
    row = prompt(EVERYTHING)
    expected = hybrid(row.ids, **row.pictures()).logits.tobytes()
    positions, _ = qwenref.rope_index(hybrid, row.ids, row.images, row.videos)
    assert hybrid(row.ids, position_ids=positions, **row.pictures()).logits.tobytes() == expected
    assert hybrid(row.ids, mm_token_type_ids=[row.types], **row.pictures()).logits.tobytes() == expected
    text = hybrid.model.language_model.embed_tokens(np.array([row.ids]))
    types = {"mm_token_type_ids": [row.types]}
    assert hybrid(inputs_embeds=text, **types, **row.pictures()).logits.tobytes() == expected
    merged = hybrid(row.ids, **row.pictures(), output_hidden_states=True).hidden_states[0]
    assert hybrid(inputs_embeds=merged, position_ids=positions).logits.tobytes() == expected
    assert hybrid.lm_head(hybrid.model(row.ids, **row.pictures()).last_hidden_state).tobytes() == expected


def test_hooks_edits_and_captures_of_the_tower(hybrid):
    row = prompt(TWO_IMAGES)
    expected = hybrid(row.ids, **row.pictures()).logits.tobytes()
    with qwenref.capture(hybrid, "model.visual", "layers.0.resid_pre") as seen:
        assert hybrid(row.ids, **row.pictures()).logits.tobytes() == expected
    kinds = np.array(row.types)
    assert (seen["model.language_model.layers.0.resid_pre"][0, kinds == 1] == seen["model.visual"]).all()
    with qwenref.edit(hybrid, {"model.visual": lambda rows: rows * 0}):
        out = hybrid(row.ids, **row.pictures(), output_hidden_states=True)
    assert not out.hidden_states[0][0, kinds == 1].any() and out.logits.tobytes() != expected
    assert hybrid(row.ids, **row.pictures()).logits.tobytes() == expected


# ---------------------------------------------------------------------------------------------- several calls


@pytest.mark.parametrize("early", (False, True), ids=("each with its call", "all with the first call"))
@pytest.mark.parametrize("parts", (TWO_IMAGES, EVERYTHING), ids=("two images", "images and videos"))
def test_D12_a_prompt_split_anywhere_has_the_bits_of_one_call(model, parts, early):
    row = prompt(parts)
    cache = qwenref.Cache(model)
    expected = run(model, [row], [len(row)], cache).tobytes()
    bits = cache_bits(cache)
    assert cache.waiting[0] == (None, ()) and "pictures" not in bits
    for k in range(1, len(row)):
        cache = qwenref.Cache(model)
        assert run(model, [row], [k, len(row) - k], cache, early).tobytes() == expected, k
        assert cache_bits(cache) == bits, k
    cache = qwenref.Cache(model)
    assert run(model, [row], [1] * len(row), cache, early).tobytes() == expected
    assert cache_bits(cache) == bits


def test_D12_a_batch_split_anywhere_has_the_bits_of_one_call(hybrid):
    rows = [prompt([3, (1, 4, 6), 2, (1, 8, 2), 4]), prompt([1, [2, 2, 4], 1], 6)]
    rows[1]._add(np.random.default_rng(1).integers(0, 200, len(rows[0]) - len(rows[1])).tolist(), 0)
    cache = qwenref.Cache(hybrid, batch=2)
    expected = run(hybrid, rows, [len(rows[0])], cache).tobytes()
    bits = cache_bits(cache)
    for k in range(1, len(rows[0])):
        cache = qwenref.Cache(hybrid, batch=2)
        assert run(hybrid, rows, [k, len(rows[0]) - k], cache).tobytes() == expected, k
        assert cache_bits(cache) == bits, k


def test_D11_two_caches_fed_in_turns_are_as_each_alone(model):
    rows = [prompt(EVERYTHING), prompt([len(prompt(EVERYTHING))], 1)]
    alone = [run(model, [row], [5] * 5, qwenref.Cache(model)) for row in rows]
    caches, parts = [qwenref.Cache(model) for _ in rows], ([], [])
    for at in range(0, 25, 5):
        for row, cache, part in zip(rows, caches, parts, strict=True):
            out = model([row.ids[at : at + 5]], cache=cache, **row.pictures(at, at + 5))
            part.append(out.logits)
    assert [np.concatenate(part, 1).tobytes() for part in parts] == [logits.tobytes() for logits in alone]
    assert caches[1].rope_deltas.tolist() == [0] and caches[0].rope_deltas.tolist() != [0]


def test_D11_deltas_live_in_the_cache_and_no_prompt_sees_those_of_another(model):
    row = prompt(TWO_IMAGES)
    text = [[5, 6, 7]]
    before = model(text).logits.tobytes()
    cache = qwenref.Cache(model)
    out = model(row.ids, cache=cache, **row.pictures())
    assert out.rope_deltas.tolist() == cache.rope_deltas.tolist() == [(3 + 4) - (6 + 4)]
    assert model(text).logits.tobytes() == before
    after = len(row) - 3
    assert positions_seen(model, lambda: model([[1]], cache=cache)).ravel().tolist() == [after] * 3
    assert positions_seen(model, lambda: model([[1, 2]], cache=cache))[:, 0].tolist() == [[after + 1, after + 2]] * 3


def test_T10_next_position_after_two_images(hybrid):
    ids = [5, 6, *[IMAGE] * 4, 7, *[IMAGE] * 4, 8]
    pictures = {"pixel_values": np.ones((32, WIDTH), np.float32), "image_grid_thw": [[1, 4, 4], [1, 2, 8]]}
    cache = qwenref.Cache(hybrid)
    seen = positions_seen(hybrid, lambda: hybrid(ids, cache=cache, **pictures))
    shown = ["".join(map(str, column)) for column in seen[:, 0].T.tolist()]
    assert shown == ["000", "111", "222", "223", "232", "233", "444", "555", "556", "557", "558", "999"]
    assert cache.rope_deltas.tolist() == [-2]
    assert positions_seen(hybrid, lambda: hybrid([[9]], cache=cache)).ravel().tolist() == [10, 10, 10]


def test_an_image_in_turn_1_text_in_turn_2_an_image_in_turn_3(model):
    turns = [prompt(TWO_IMAGES), prompt([6], 1), prompt([2, (1, 2, 6), [2, 2, 2], 3], 2)]
    whole = prompt([*TWO_IMAGES, 6, 2, (1, 2, 6), [2, 2, 2], 3])
    whole.ids = [id for turn in turns for id in turn.ids]
    cache = qwenref.Cache(model)
    out = [model(turn.ids, cache=cache, **turn.pictures()) for turn in turns]
    alone = qwenref.Cache(model)
    expected = model(whole.ids, cache=alone, **joined(turns))
    assert np.concatenate([one.logits for one in out], 1).tobytes() == expected.logits.tobytes()
    assert cache_bits(cache) == cache_bits(alone)
    assert out[-1].rope_deltas.tolist() == qwenref.rope_index(model, whole.ids, whole.images, whole.videos)[1].tolist()


# ---------------------------------------------------------------------------------------------- what a cache keeps


def test_a_cache_counts_the_embeddings_that_wait_and_nothing_else(model):
    config = model.config.text_config
    row = prompt(TWO_IMAGES)
    inside = row._first[1][0] + 2
    cache = qwenref.Cache(model)
    model(row.ids[:inside], cache=cache, **row.pictures())
    size = qwenref.cache_size(model, tokens=inside, kv_dtype="float32").total
    assert cache.nbytes == size + (6 + 4) * config.hidden_size * 4  # both images: one is begun, one has not come
    assert "2 x picture" in repr(cache) and "inside image 0 (2 of 6 tokens) · waits for image 1" in repr(cache)
    model([row.ids[inside:]], cache=cache)
    assert cache.nbytes == qwenref.cache_size(model, tokens=len(row), kv_dtype="float32").total
    assert "picture" not in repr(cache)


def test_a_cache_goes_on_inside_of_a_picture_after_whatever_it_went_through(model, tmp_path):
    row = prompt(EVERYTHING)
    expected = model(row.ids, **row.pictures()).logits[0]
    for k in range(1, len(row), 2):
        cache = qwenref.Cache(model)
        model(row.ids[:k], cache=cache, **row.pictures())
        cache.save(tmp_path / "cache")
        saved, bits = cache.snapshot(), cache_bits(cache)
        kept = [copy.deepcopy(cache), qwenref.Cache.load(tmp_path / "cache", model), qwenref.Cache(model)]
        kept[-1].restore(saved)
        assert all(cache_bits(one) == bits for one in kept)
        kept.append(cache)
        for one in kept:
            one.reorder([0, 0])
            logits = model([row.ids[k:]] * 2, cache=one).logits
            assert logits[0].tobytes() == logits[1].tobytes() == np.ascontiguousarray(expected[k:]).tobytes(), k


def test_rows_reordered_inside_of_their_pictures_keep_their_own(hybrid):
    rows = [prompt([1, (1, 4, 6), 5]), prompt([1, [3, 2, 4], 0], 6)]
    length = min(map(len, rows))
    cache = qwenref.Cache(hybrid, batch=2)
    ids = np.array([row.ids[:length] for row in rows])
    expected = hybrid(ids, cache=qwenref.Cache(hybrid, batch=2), **joined(rows)).logits
    for k in range(1, length):
        cache.reset()
        hybrid(ids[:, :k], cache=cache, **joined(rows, 0, k))
        cache.reorder([1, 0])
        logits = hybrid(ids[::-1, k:], cache=cache, **joined(rows[::-1], k, length)).logits
        assert logits.tobytes() == np.ascontiguousarray(expected[::-1, k:]).tobytes(), k


@pytest.mark.parametrize("every", (1, 4, None))
def test_crop_goes_back_into_between_and_before_pictures(model, every):
    attention_only = set(model.config.text_config.layer_types) == {"full_attention"}
    if every is None and not attention_only:
        every = 100  # the empty start is the only snapshot
    row = prompt(EVERYTHING)
    whole = qwenref.Cache(model, snapshot_every=every)
    expected = model(row.ids, cache=whole, **row.pictures()).logits[0]
    saved = whole.snapshot()
    for n in range(len(row)):
        whole.restore(saved)
        again = int(whole.crop(n)[0])
        start = n - again
        assert again == (n % every if every and not attention_only else again)
        assert whole.length[0] == start
        after = qwenref.Cache(model)
        begun = [first for first in (*row._first[1], *row._first[2]) if first < start]
        for at in (0, start):  # a run that ends there was handed the pictures that had begun
            if at < start:
                model(row.ids[at:start], cache=after, **row.pictures(0, start))
        found, wanted = cache_bits(whole), cache_bits(after)
        assert found == wanted, (n, start, begun)
        logits = model([row.ids[start:]], cache=whole, **row.pictures(start)).logits[0]
        assert logits.tobytes() == np.ascontiguousarray(expected[start:]).tobytes()


def test_crop_without_snapshots_goes_back_to_the_begin_of_a_picture_it_would_cut():
    model = opened("ff")
    row = prompt([3, (1, 4, 6), 2, [2, 2, 4], 2])
    image, video = row._first[1][0], row._first[2][0]
    for n in range(len(row)):
        cache = qwenref.Cache(model)
        model(row.ids, cache=cache, **row.pictures())
        back = image if image < n < image + 6 else video if video < n < len(row) - 3 else n
        assert cache.crop(n).tolist() == [n - back] and cache.length.tolist() == [back]


def test_a_failed_call_leaves_what_waits_as_it_was(model):
    row = prompt(EVERYTHING)
    cache = qwenref.Cache(model, snapshot_every=4)
    k = row._first[1][0] + 2
    model(row.ids[:k], cache=cache, **row.pictures())
    bits, held = cache_bits(cache), list(cache.waiting)

    @contextmanager
    def failing(module):
        with module.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            yield

    for module in (model.model.language_model.layers[1], model.model, model):
        with failing(module):
            model([row.ids[k:]], cache=cache)
        assert cache_bits(cache) == bits and cache.waiting == held
    fresh = qwenref.Cache(model)
    for module in (model.model.visual, model.model.language_model.norm, model.model, model):
        with failing(module):
            model(row.ids, cache=fresh, **row.pictures())
        assert cache_bits(fresh) == cache_bits(qwenref.Cache(model))
    expected = np.ascontiguousarray(model(row.ids, **row.pictures()).logits[:, k:])
    assert model([row.ids[k:]], cache=cache).logits.tobytes() == expected.tobytes()


# ---------------------------------------------------------------------------------------------- refused


PIXELS = np.ones((16, WIDTH), np.float32)
FOUR = {"pixel_values": PIXELS, "image_grid_thw": [[1, 4, 4]]}
TEXT_AND_FOUR = [5, OPEN, *[IMAGE] * 4, CLOSE, 6]
CALLS = {  # name: (arguments, error, first line)
    "fewer placeholders": (
        {"input_ids": [5, *[IMAGE] * 3, 6], **FOUR}, InputError, "image 0: 3 placeholders, its grid makes 4",
    ),
    "more placeholders": (
        {"input_ids": [5, *[IMAGE] * 5, 6], **FOUR}, InputError, "image 0: 5 placeholders, its grid makes 4",
    ),
    "swapped grids": (
        {
            "input_ids": [*[IMAGE] * 4, 6, *[IMAGE] * 2], "pixel_values": np.ones((24, WIDTH), np.float32),
            "image_grid_thw": [[1, 4, 2], [1, 4, 4]],
        },
        InputError, "image 0: 4 placeholders, its grid makes 2",
    ),
    "forgotten image": (
        {"input_ids": TEXT_AND_FOUR}, InputError,
        "row 0, column 2: 4 image placeholders and no image for them",
    ),
    "forgotten video": (
        {"input_ids": [OPEN, VIDEO, CLOSE]}, InputError, "row 0, column 1: 1 video placeholder and no video for it",
    ),
    "a video as an image": (
        {"input_ids": [OPEN, *[VIDEO] * 4, CLOSE], **FOUR}, InputError,
        "row 0, column 1: 4 video placeholders and no video for them",
    ),
    "no placeholder": ({"input_ids": [5, 6], **FOUR}, InputError, "image 0: 0 placeholders, its grid makes 4"),
    "grid without pixels": (
        {"input_ids": TEXT_AND_FOUR, "image_grid_thw": [[1, 4, 4]]}, InputError,
        "forward: image_grid_thw without pixel_values",
    ),
    "pixels without grid": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS}, InputError,
        "forward: pixel_values without image_grid_thw",
    ),
    "grid of other pixels": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS, "image_grid_thw": [[1, 4, 6]]}, ShapeError,
        "pixel_values: 16 patches, image_grid_thw makes 24",
    ),
    "pixels of another width": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": PIXELS[:, 1:], "image_grid_thw": [[1, 4, 4]]}, ShapeError,
        f"pixel_values: patches of {WIDTH - 1} values",
    ),
    "pixels as a picture": (
        {"input_ids": TEXT_AND_FOUR, "pixel_values": np.ones((1, 3, 16, 16)), "image_grid_thw": [[1, 4, 4]]},
        ShapeError, "pixel_values: 4-D",
    ),
    "bytes as pixels": (
        {"input_ids": TEXT_AND_FOUR, **FOUR, "pixel_values": PIXELS.astype(np.uint8)}, qwenref.DTypeError,
        "pixel_values: uint8 values",
    ),
    "float grid": ({"input_ids": TEXT_AND_FOUR, **FOUR, "image_grid_thw": [[1.0, 4, 4]]}, qwenref.DTypeError,
        "image_grid_thw: float64 values",
    ),
    "embeddings without types": (
        {"inputs_embeds": np.zeros((1, 4, 64), np.float32), **FOUR}, InputError, "forward: pictures with inputs_embeds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_D13_what_does_not_match_is_refused_before_anything_runs(hybrid, name):
    arguments, kind, line = CALLS[name]
    cache, ran = qwenref.Cache(hybrid), []
    with (
        hybrid.model.visual.register_forward_pre_hook(lambda *_: ran.append(1)),
        hybrid.model.language_model.layers[0].register_forward_pre_hook(lambda *_: ran.append(2)),
        pytest.raises(kind) as caught,
    ):
        hybrid(**arguments)
    assert str(caught.value).split("\n")[0] == line and not ran
    if name not in ("fewer placeholders", "no placeholder"):  # with a cache, more may come
        with pytest.raises(kind):
            hybrid(cache=cache, **arguments)
    assert cache_bits(cache) == cache_bits(qwenref.Cache(hybrid))


def test_D13_a_prompt_that_breaks_off_inside_of_a_picture_names_it(hybrid):
    row = prompt([2, (1, 4, 6), [2, 2, 4], 1])
    cache = qwenref.Cache(hybrid)
    hybrid(row.ids[: row._first[1][0] + 2], cache=cache, **row.pictures())
    bits = cache_bits(cache)
    with pytest.raises(InputError, match="image 0: 2 placeholders, its grid makes 6"):
        hybrid([[CLOSE, 5]], cache=cache)
    with pytest.raises(InputError, match="image 0: 7 placeholders, its grid makes 6"):
        hybrid([[IMAGE] * 5], cache=cache)
    assert cache_bits(cache) == bits
    hybrid([[IMAGE] * 4], cache=cache)
    with pytest.raises(InputError, match="row 0, column 0: one placeholder more than the image before has"):
        hybrid([[IMAGE]], cache=cache)


def test_a_batch_is_handed_each_picture_with_its_call(hybrid):
    rows = [prompt([3, (1, 2, 4), 2]), prompt([1, (1, 2, 2), 5], 6)]
    cache = qwenref.Cache(hybrid, batch=2)
    ids = np.array([row.ids[:3] for row in rows])
    with pytest.raises(InputError, match="image 1: no placeholder in this call, and more than one row to wait for it"):
        hybrid(ids, cache=cache, pixel_values=np.ones((12, WIDTH), np.float32), image_grid_thw=[[1, 2, 2], [1, 2, 4]])
    assert not cache.length.any() and cache.waiting == [(None, ())] * 2


# ---------------------------------------------------------------------------------------------- placeholders as text


def test_a_placeholder_the_model_wrote_is_text(hybrid):
    row = prompt(TWO_IMAGES)
    cache = qwenref.Cache(hybrid)
    hybrid(row.ids, cache=cache, **row.pictures())
    seen = positions_seen(hybrid, lambda: hybrid([[IMAGE]], cache=cache)).ravel().tolist()
    assert seen == [len(row) - 3] * 3
    assert hybrid([[VIDEO]], cache=cache, output_hidden_states=True).hidden_states[0].tobytes() == (
        hybrid.model.language_model.embed_tokens(np.array([[VIDEO]])).tobytes()
    )
    again = hybrid([row.ids + [IMAGE, VIDEO]], mm_token_type_ids=[row.types + [0, 0]], **row.pictures())
    fresh = qwenref.Cache(hybrid)
    hybrid(row.ids, cache=fresh, **row.pictures())
    hybrid([[IMAGE]], cache=fresh)
    assert hybrid([[VIDEO]], cache=fresh).logits.tobytes() == again.logits[:, -1:].tobytes()
    assert fresh.rope_deltas.tolist() == again.rope_deltas.tolist() == [-3]


def test_a_text_model_takes_no_pictures_and_any_id():
    from text_configs import text_config

    model = qwenref.from_config(text_config("lf"), seed=1)
    with pytest.raises(qwenref.CapabilityMissing, match="pixel_values for a model of text alone"):
        model([5, 6], pixel_values=PIXELS, image_grid_thw=[[1, 4, 4]])
    assert model([5, IMAGE, IMAGE, 6]).logits.shape == (1, 4, 211)


# ---------------------------------------------------------------------------------------------- generation


def test_generate_hands_pictures_over_and_goes_on_behind_them(model):
    rows = [prompt(EVERYTHING), prompt([2, (1, 2, 2), 9], 3)]
    out = [model.generate(row.ids, max_new_tokens=6, stop=[], return_logits=True, **row.pictures()) for row in rows]
    for row, one in zip(rows, out, strict=True):
        ids, cache = row.ids, qwenref.Cache(model)
        logits = model(ids, cache=cache, **row.pictures()).logits[0, -1]
        for step, id in enumerate(one.new_ids):
            assert logits.argmax() == id and one.logits[step].tobytes() == logits.tobytes()
            types = [row.types + [0] * (step + 1)]
            whole = model([row.ids + one.new_ids[: step + 1]], mm_token_type_ids=types, **row.pictures())
            logits = model([[id]], cache=cache).logits[0, -1]
            assert whole.logits[0, -1].tobytes() == logits.tobytes()
    ids, mask = left_padded(rows)
    both = model.generate(ids, max_new_tokens=6, stop=[], attention_mask=mask, **joined(rows))
    assert both.new_ids == [one.new_ids for one in out]


def test_a_scored_prompt_is_fed_in_pieces_with_its_pictures(hybrid, monkeypatch):
    rows = [prompt(EVERYTHING), prompt([2, (1, 2, 2), [2, 4, 2], 9], 3)]
    ids, mask = left_padded(rows)
    options = {
        "max_new_tokens": 3,
        "stop": [],
        "attention_mask": mask,
        "return_logprobs": "raw",
        "prompt_logprobs": True,
    }
    expected = hybrid.generate(ids, **options, **joined(rows))
    monkeypatch.setattr(qwenref.generate, "PROMPT_LOGITS", 2 * 211 * 7)
    pieces = hybrid.generate(ids, **options, **joined(rows))
    assert pieces.steps > expected.steps and pieces.new_ids == expected.new_ids
    for ours, whole in zip(pieces.logprobs, expected.logprobs, strict=True):
        assert ours.prompt.tobytes() == whole.prompt.tobytes()


def test_a_placeholder_that_is_generated_stays_text(hybrid):
    class Writes:
        def sample(self, logits, context_ids, rng):
            return (IMAGE, VIDEO, IMAGE, 7)[len(context_ids) % 4]

    row = prompt(TWO_IMAGES)
    out = hybrid.generate(row.ids, max_new_tokens=8, stop=[], sampler=Writes(), return_logits=True, **row.pictures())
    assert {IMAGE, VIDEO} <= set(out.new_ids)
    types = [row.types + [0] * 7]
    whole = hybrid([row.ids + out.new_ids[:7]], mm_token_type_ids=types, **row.pictures()).logits[0]
    assert out.logits.tobytes() == np.ascontiguousarray(whole[-8:]).tobytes()


def test_generate_refuses_what_a_prompt_does_not_meet_before_anything_runs(hybrid):
    row = prompt(TWO_IMAGES)
    cache = qwenref.Cache(hybrid)
    for ids, pictures, message in (
        (row.ids, {}, "row 0, column 4: 6 image placeholders and no image for them"),
        (row.ids[:12], row.pictures(), "image 1: 0 placeholders, its grid makes 4"),
        (row.ids[:6], row.pictures(0, 6), "image 0: 2 placeholders, its grid makes 6"),
    ):
        with pytest.raises(InputError, match=message):
            hybrid.generate(ids, max_new_tokens=2, cache=cache, **pictures)
        assert cache_bits(cache) == cache_bits(qwenref.Cache(hybrid))
    hybrid(row.ids[:6], cache=cache, **row.pictures())
    with pytest.raises(InputError, match="image 1: 0 placeholders, its grid makes 4"):
        hybrid.generate(row.ids[6:12], max_new_tokens=2, cache=cache)
    out = hybrid.generate(row.ids[6:], max_new_tokens=3, stop=[], cache=cache)
    assert out.new_ids == hybrid.generate(row.ids, max_new_tokens=3, stop=[], **row.pictures()).new_ids
