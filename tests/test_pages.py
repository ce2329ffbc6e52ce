"""Weights are read a layer ahead, and given up behind it where memory is too small for them; no bit depends on it."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import qwenref
from qwenref import pages
from qwenref.errors import InputError, QwenrefWarning
from qwenref.pages import WeightPages

IDS = np.arange(3, 40)


class Files:
    """A checkpoint that remembers what it was told."""

    def __init__(self, sizes):
        self.sizes, self.told = sizes, []

    def info(self, name):
        return SimpleNamespace(nbytes=self.sizes[name])

    def advise(self, name, advice):
        self.told.append((name, advice))


def walk(weight_pages, files, layers):
    files.told.clear()
    for index in range(layers):
        weight_pages.before(index)
        weight_pages.behind(index)
    return list(files.told)


def made(limit):
    files = Files({"l0": 100, "l1": 100, "l2": 100, "l3": 100, "head": 50, "table": 50})
    return files, WeightPages(files, [["l0"], ["l1"], ["l2"], ["l3"]], ["head"], ["table"], limit=limit)


def test_where_all_fits_each_layer_is_read_ahead_once_and_nothing_is_given_up():
    files, weight_pages = made(1000)
    assert not weight_pages.streams
    assert walk(weight_pages, files, 4) == [(name, "willneed") for name in ("l1", "l2", "l3", "head")]
    assert walk(weight_pages, files, 4) == []


def test_in_too_small_a_memory_the_first_layers_stay_and_the_others_pass_through():
    files, weight_pages = made(500)  # 60 % of it holds table, head and two layers
    with pytest.warns(QwenrefWarning, match=r"weights of 0.0 GB in 0.0 GB of memory"):
        assert weight_pages.streams
    assert weight_pages.stay == 2
    first = walk(weight_pages, files, 4)
    assert first == [
        ("l1", "willneed"),
        ("l2", "willneed"),
        ("l3", "willneed"),
        ("l2", "dontneed"),
        ("head", "willneed"),
        ("l3", "dontneed"),
    ]
    assert walk(weight_pages, files, 4) == [
        ("l2", "willneed"),
        ("l3", "willneed"),
        ("l2", "dontneed"),
        ("l3", "dontneed"),
    ]


def test_the_variable_decides_where_it_is_set(monkeypatch):
    monkeypatch.setenv("QWENREF_STREAM_WEIGHTS", "0")
    assert not made(1)[1].streams
    monkeypatch.setenv("QWENREF_STREAM_WEIGHTS", "1")
    assert not made(1000)[1].streams  # all of them may stay
    with pytest.warns(QwenrefWarning):
        assert made(600)[1].stay == 2
    monkeypatch.setenv("QWENREF_STREAM_WEIGHTS", "yes")
    with pytest.raises(InputError, match="^QWENREF_STREAM_WEIGHTS: 'yes'"):
        made(1000)[1].behind(0)


def test_streaming_changes_no_bit():
    kept, streamed = qwenref.from_pretrained("tiny"), qwenref.from_pretrained("tiny")
    table = streamed.text_model.weight_pages
    assert table.nbytes == sum(p.nbytes for n, p in streamed.named_parameters() if "visual" not in n)
    table._limit = 1  # as if the machine had no memory at all
    caches = qwenref.Cache(kept), qwenref.Cache(streamed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QwenrefWarning)
        for ids in (IDS, IDS[:1], IDS[5:6]):
            want, got = (m(ids, cache=c).logits for m, c in zip((kept, streamed), caches, strict=True))
            assert np.array_equal(want.view(np.uint32), got.view(np.uint32))
    assert table.stay == 0


def test_an_edit_survives_being_given_up():
    model = qwenref.from_pretrained("tiny")
    model.text_model.weight_pages._limit = 1
    weight = model.text_model.layers[2].mlp.up_proj.weight
    weight[:] = weight[::-1].copy()
    edited = weight.copy()
    with pytest.warns(QwenrefWarning, match="read from disk in every pass"):
        model(IDS)
    assert np.array_equal(weight.view(np.uint16), edited.view(np.uint16))
    assert list(model.edited()) == ["model.language_model.layers.2.mlp.up_proj.weight"]


def test_a_copy_and_a_pickle_are_without_advice_and_work():
    model = qwenref.from_pretrained("tiny")
    want = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.text_model.weight_pages is None
        assert np.array_equal(twin(IDS).logits, want)


def test_the_limit_is_that_of_the_tightest_group_around_this_process(tmp_path, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("5000\n")
    (inner / "memory.max").write_text("max\n")
    around = pages._around(str(tmp_path), "/a/b")
    assert around[:3] == [inner, tmp_path / "a", tmp_path]
    monkeypatch.setattr(pages, "_groups", lambda: [(folder, pages._V2) for folder in around[:3]])
    assert pages.memory_limit() == 5000
    monkeypatch.undo()
    assert 0 < pages.memory_limit() <= 2**60


@pytest.mark.parametrize(("names", "prefix"), [(pages._V2, ""), (pages._V1, "total_")])
def test_what_is_left_is_the_limit_less_what_is_in_use_and_no_cached_file(tmp_path, monkeypatch, names, prefix):
    limit, used, _ = names
    monkeypatch.setattr(pages, "_groups", lambda: [(tmp_path, names)])
    (tmp_path / limit).write_text("9000\n")
    (tmp_path / used).write_text("5000\n")
    assert pages.memory_left() == 4000
    (tmp_path / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file 300\n{prefix}active_file 200\n")
    assert pages.memory_left() == 4500
    (tmp_path / used).write_text("12000\n")
    assert pages.memory_left() == 0
    (tmp_path / limit).write_text("max\n")
    assert 0 < pages.memory_left() <= pages.memory_limit()
