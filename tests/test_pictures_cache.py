"""What a cache keeps of pictures: saved, reordered, cropped and left as it was by a call that fails."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
from cache_arrays import cache_bits
from picture_kits import EVERYTHING, LAYERS, TWO_IMAGES, opened, prompt
from vision_configs import VIDEO, WIDTH, joined

import qwenref


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return opened(LAYERS[request.param])


@pytest.fixture(scope="module")
def hybrid():
    return opened("llf")


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


def test_a_video_of_1200_frame_groups_goes_on_from_a_cache_that_was_saved_copied_or_cropped(hybrid, tmp_path):
    groups = 1200  # more than Python allows calls inside of calls
    ids = [VIDEO, 7] * groups
    pixels = np.random.default_rng(0).standard_normal((4 * groups, WIDTH), np.float32)
    film = {"pixel_values_videos": pixels, "video_grid_thw": [[groups, 2, 2]]}
    whole = qwenref.Cache(hybrid, snapshot_every=500)
    expected = hybrid(ids, cache=whole, **film).logits[0]
    cache = qwenref.Cache(hybrid)
    hybrid(ids[:501], cache=cache, **film)
    cache.save(tmp_path / "cache")
    assert whole.crop(502) == [2]
    kept = {501: [copy.deepcopy(cache), qwenref.Cache.load(tmp_path / "cache", hybrid), cache], 500: [whole]}
    for start, caches in kept.items():
        for one in caches:
            assert one.length == [start] and len(one.waiting[0].pictures) == groups - (start + 1) // 2
            logits = hybrid([ids[start:]], cache=one).logits[0]
            assert logits.tobytes() == np.ascontiguousarray(expected[start:]).tobytes()


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
