"""Images and videos inside the text model: each picture as alone, same bits however they are fed."""

import numpy as np
import pytest
from cache_arrays import cache_bits, row_of
from picture_kits import EVERYTHING, LAYERS, TWO_IMAGES, opened, positions_seen, prompt
from vision_configs import IMAGE, WIDTH, joined, left_padded

import qwenref


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return opened(LAYERS[request.param])


@pytest.fixture(scope="module")
def hybrid():
    return opened("llf")


def run(model, prompts, lengths, cache, early=False):
    """Logits of rows of one length, fed in calls; all pictures come with the first call, or each with its own."""
    ids, logits, at = np.array([p.ids for p in prompts]), [], 0
    for n in lengths:
        pictures = joined(prompts, at, at + n) if not early else joined(prompts) if at == 0 else {}
        logits.append(model(ids[:, at : at + n], cache=cache, **pictures).logits)
        at += n
    return np.concatenate(logits, 1)


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
