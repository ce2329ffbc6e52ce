"""Generation behind pictures, and placeholders that are text."""

import numpy as np
import pytest
from cache_arrays import cache_bits
from picture_kits import EVERYTHING, LAYERS, TWO_IMAGES, opened, positions_seen, prompt
from vision_configs import IMAGE, VIDEO, joined, left_padded

import qwenref
from qwenref.errors import InputError


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return opened(LAYERS[request.param])


@pytest.fixture(scope="module")
def hybrid():
    return opened("llf")


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
