"""Suites: ids fixed by texts and tokenizer, lengths as promised, files that come back, borders of rounding."""

import json

import numpy as np
import pytest
from text_configs import text_config

import qwenref
from qwenref.compare import suites
from qwenref.compare.borders import LEAST, MOST, SHORTEST, borders, ratios
from qwenref.compare.errors import OutputExists, RecordError
from qwenref.compare.suites import Suite, suite
from qwenref.errors import UnknownName


@pytest.fixture(scope="module")
def quick(tiny):
    return suite("quick", tiny)


@pytest.fixture(scope="module")
def standard(tiny):
    return suite("standard", tiny)


def test_quick_is_4_prompts_of_64_tokens_and_standard_16_of_256(quick, standard):
    assert [item.new for item in quick.prompts] == [64] * 4 and quick.positions == 256
    assert [item.new for item in standard.prompts] == [256] * 16 and standard.positions == 4096
    assert quick.notes == standard.notes == ()


def test_standard_has_the_lengths_at_edges_of_windows_and_blocks_and_every_kind(standard):
    assert set(suites.LENGTHS) - {1, 3, 4, 5} <= {len(item.ids) for item in standard.prompts}
    assert [len(item.ids) for item in standard.prompts[:4]] == [1, 3, 4, 5]
    assert {item.kind for item in standard.prompts} == set(suites.KINDS)
    assert len({item.id for item in standard.prompts}) == 16


def test_deep_is_64_prompts_and_two_long_ones_cut_to_what_the_model_takes(tiny, monkeypatch):
    monkeypatch.setattr(suites, "borders", lambda model, texts, count: [texts[0][:20]] * count)
    deep = suite("deep", tiny)
    assert len(deep.prompts) == 66 and {item.new for item in deep.prompts} == {512}
    assert sorted(len(item.ids) for item in deep.prompts)[-2:] == [4096 - 512] * 2
    assert any("3,584" in note for note in deep.notes)
    assert {len(item.ids) for item in deep.prompts} >= set(suites.LENGTHS)
    pairs = [tuple(item.ids) for item in deep.prompts if item.kind != "border"]
    assert len(set(pairs)) == len(pairs)


def test_texts_of_prompts_are_those_of_their_ids(tiny, standard):
    with_text = [item for item in standard.prompts if item.text is not None]
    assert len(with_text) > 12
    assert all(tiny.tokenizer.encode(item.text) == item.ids for item in with_text)


def test_a_suite_is_the_same_every_time_and_another_for_another_model(quick, tiny):
    again = suite("quick", tiny)
    assert again == quick and again.sha256 == quick.sha256
    assert quick.sha256 != suite("quick", qwenref.from_config(text_config("lf"), seed=0)).sha256


def test_300_strings_and_24_conversations_are_shipped(quick):
    assert len(quick.texts) == len(set(quick.texts)) == 300
    assert len(quick.conversations) == len({one.id for one in quick.conversations}) == 24
    assert any(one.options.get("enable_thinking") is False for one in quick.conversations)
    assert any("tools" in one.options for one in quick.conversations)


def test_a_model_without_a_tokenizer_is_asked_bytes_and_told_so():
    found = suite("quick", qwenref.from_config(text_config("lf", max_position_embeddings=48), seed=0))
    assert found.texts == found.conversations == () and any("no tokenizer" in note for note in found.notes)
    assert all(item.new == 24 and 0 < len(item.ids) <= 24 and item.text is None for item in found.prompts)
    assert all(0 <= id < 211 for item in found.prompts for id in item.ids)
    assert any("24 new tokens in place of 64" in note for note in found.notes)


def test_a_saved_suite_comes_back_and_no_file_is_written_over(quick, tiny, tmp_path):
    path = tmp_path / "quick.jsonl"
    quick.save(path)
    assert Suite.load(path) == quick == suite(path, tiny)
    with pytest.raises(OutputExists):
        quick.save(path)
    quick.save(path, force=True)


BAD = {
    "no header": (0, {"text": "x"}),
    "another schema": (0, {"schema": "qwenref.suite/2", "name": "quick"}),
    "an unknown record": (1, {"note": "x"}),
    "a text that is none": (1, {"text": 5}),
    "a field too few": (1, {"prompt": {"id": "a", "ids": [1], "new": 1, "kind": "code"}}),
    "an id below zero": (1, {"prompt": {"id": "a", "ids": [-1], "new": 1, "kind": "code", "text": None}}),
    "no ids": (1, {"prompt": {"id": "a", "ids": [], "new": 1, "kind": "code", "text": None}}),
    "ids that are no numbers": (1, {"prompt": {"id": "a", "ids": [True], "new": 1, "kind": "code", "text": None}}),
    "nothing to follow": (1, {"prompt": {"id": "a", "ids": [1], "new": 0, "kind": "code", "text": None}}),
    "an unknown kind": (1, {"prompt": {"id": "a", "ids": [1], "new": 1, "kind": "x", "text": None}}),
    "an id twice": (2, {"prompt": {"id": "a", "ids": [1], "new": 1, "kind": "code", "text": None}}),
    "not a conversation": (1, {"conversation": {"id": "a"}}),
    "not JSON": (1, "{"),
    "not an object": (1, "[]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_line_that_is_none_of_a_suite_is_named(name, tmp_path):
    at, bad = BAD[name]
    good = [{"schema": suites.SCHEMA, "name": "own"}, {"prompt": BAD["an id twice"][1]["prompt"]}]
    lines = [json.dumps(line) for line in good[:at]] + [bad if isinstance(bad, str) else json.dumps(bad)]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError) as raised:
        Suite.load(path)
    assert raised.value.line == at + 1 and f"line {at + 1}" in str(raised.value)


def test_files_that_are_not_there_or_empty_and_unknown_names_say_so(tiny, tmp_path):
    with pytest.raises(RecordError, match=r"nothing\.jsonl"):
        suite(tmp_path / "nothing.jsonl", tiny)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(RecordError, match="header"):
        suite(tmp_path / "empty.jsonl", tiny)
    with pytest.raises(UnknownName, match="standard"):
        suite("quik", tiny)


def test_border_prompts_end_where_rounding_nearly_decides(tiny):
    ids = tiny.tokenizer.encode("The mill at Quill stands where the river turns. In spring the water is high. " * 3)
    margins = ratios(tiny, ids)
    found = borders(tiny, [ids], 3)
    assert found == borders(tiny, [ids], 3) and len(found) == 3
    for prompt in found:
        assert prompt == ids[: len(prompt)] and len(prompt) >= SHORTEST
        assert LEAST <= margins[len(prompt) - 1] <= MOST
    assert len({len(prompt) for prompt in found}) == 3
    assert borders(tiny, [ids[:8]], 2) == [] and borders(tiny, [], 2) == [] and borders(tiny, [ids], 0) == []


def test_the_margin_of_a_place_is_counted_in_what_jitters_move_it(tiny):
    ids = tiny.tokenizer.encode("How much is 31 plus 23? ")
    logits = tiny([ids]).logits[0].astype(np.float64)
    gaps = np.diff(np.sort(logits, axis=1)[:, -2:], axis=1)[:, 0]
    sigma = gaps / ratios(tiny, ids)
    assert (sigma > 0).all() and sigma.max() < 1  # bf16 moves logits of this size by hundredths
    pairs = np.argsort(logits, axis=1)[:, ::-1][:, :2]
    moved = []
    for seed in range(4):
        with qwenref.numerics.jitter(seed):
            other = tiny([ids]).logits[0].astype(np.float64)
        moved.append(np.take_along_axis(other, pairs, 1) @ [1, -1] - gaps)
    own, pooled = np.square(moved).sum(axis=0), np.square(moved).mean()
    np.testing.assert_allclose(sigma, np.sqrt((own + 4 * pooled) / 8), rtol=1e-6)
