"""Long work: a prompt in windows has the bits of one call, and a line tells how far it is where somebody can see it."""

import io
import itertools
import sys

import numpy as np
import pytest

import qwenref
from qwenref import generate as generation
from qwenref import progress
from qwenref.errors import InputError

PROMPT = np.arange(3, 3 + 70) % 1200


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def ticking(step):
    clock = itertools.count(0, step)
    return lambda: next(clock)


@pytest.mark.parametrize("window", [1, 7, 32, 69, 70, 1000, 0])
def test_a_prompt_in_windows_has_the_bits_of_one_call(tiny, window):
    options = {"max_new_tokens": 3, "stop": [], "return_logits": True}
    whole, caches = tiny.generate(PROMPT, prefill_window=0, **options), [qwenref.Cache(tiny), qwenref.Cache(tiny)]
    tiny.generate(PROMPT, prefill_window=0, cache=caches[0], **options)
    found = tiny.generate(PROMPT, prefill_window=window, cache=caches[1], **options)
    assert found.new_ids == whole.new_ids
    assert np.array_equal(found.logits.view(np.uint32), whole.logits.view(np.uint32))
    assert found.steps == -(-70 // (window or 70)) + 2
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        for name, array in a.arrays().items():
            assert np.array_equal(array, b.arrays()[name])


def test_padded_rows_in_windows_are_those_of_the_row_alone(tiny):
    mask = np.ones((2, 70), int)
    mask[0, :45] = 0  # the first windows hold nothing of this row
    options = {"max_new_tokens": 2, "stop": [], "return_logits": True, "prefill_window": 16}
    both = tiny.generate(np.stack([PROMPT, PROMPT]), attention_mask=mask, **options)
    for row, ids in enumerate((PROMPT[45:], PROMPT)):
        alone = tiny.generate(ids, **options)
        assert np.array_equal(both.logits[row].view(np.uint32), alone.logits.view(np.uint32))


def test_windows_come_unasked_only_where_they_change_no_bit(tiny, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_WINDOW", 32)
    steps = {}
    for name in ("fp32", "kv-bf16", "hf", "chunk64", "state-bf16", "fp64"):
        with qwenref.numerics(name):
            steps[name] = tiny.generate(PROMPT, max_new_tokens=1).steps
    assert steps == {"fp32": 3, "kv-bf16": 3, "hf": 1, "chunk64": 1, "state-bf16": 1, "fp64": 1}


def test_a_window_that_is_no_count_is_refused(tiny):
    for wrong in (-1, 2.5, "all", True):
        with pytest.raises(InputError, match="^generate: prefill_window"):
            tiny.generate(PROMPT, prefill_window=wrong)


def test_a_function_hears_of_every_step(tiny):
    heard = []
    tiny.generate(PROMPT, max_new_tokens=3, stop=[], prefill_window=32, progress=lambda *what: heard.append(what))
    prefill = [(0, 70, "prefill"), (32, 70, "prefill"), (64, 70, "prefill")]
    assert heard == [*prefill, (0, 3, "decode"), (1, 3, "decode"), (2, 3, "decode")]


def test_a_line_is_shown_on_a_terminal_and_cleared(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv("QWENREF_PROGRESS", raising=False)
    told = progress.Progress(clock=ticking(1.0))
    for done in range(0, 4096, 1024):
        told.at(done, 4096, "prefill")
    assert stream.getvalue().split("\r")[-1].strip() == "prefill 3,072/4,096 tokens · 1,024 tok/s · 1 s left"
    told.end()
    assert stream.getvalue().endswith("\r") and stream.getvalue().split("\r")[-2].strip() == ""


def test_short_work_shows_nothing(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    told = progress.Progress(clock=ticking(0.01))
    for done in range(100):
        told.at(done, 100, "decode")
    told.end()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("how", ["pipe", "variable", "asked"])
def test_nothing_is_shown_where_nobody_looks_or_wants_it(monkeypatch, how):
    stream = io.StringIO() if how == "pipe" else Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    if how == "variable":
        monkeypatch.setenv("QWENREF_PROGRESS", "0")
    told = progress.Progress(False if how == "asked" else None, clock=ticking(1.0))
    for done in range(10):
        told.at(done, 10, "decode")
    told.end()
    assert stream.getvalue() == ""


def test_a_wrong_kind_of_progress_is_refused(tiny):
    with pytest.raises(InputError, match="^progress"):
        tiny.generate(PROMPT, progress="yes")
