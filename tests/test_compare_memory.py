"""What a comparison needs in memory is known before it begins, and what there is not is an error by name."""

import sys

import fresh
import pytest

import qwenref
from qwenref import cli
from qwenref.compare import FaultyReference, compare, pasted
from qwenref.compare.errors import MemoryBudget
from qwenref.compare.memory import check_memory, needed

MIB = 2**20


MEASURED = r"""
import re
import sys
from pathlib import Path
import qwenref
from qwenref.compare.scoring import Task, perform

def most():  # of this program; getrusage counts the one that started it as well
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

vocab, tokens, *how = sys.argv[1:]
model = qwenref.from_pretrained("tiny")
if int(vocab):
    config = model.config.to_dict()
    config["text_config"]["vocab_size"] = int(vocab)
    model = qwenref.from_config(config, seed=0)
how = (how[0], int(how[1]), how[2]) if how[0] == "jitter" else tuple(how)
perform(model, Task((1, 2, 3), 1, how))
before = most()
perform(model, Task(tuple(range(100)) * (int(tokens) // 100), 1, how))
print(most() - before)
"""


def measured(vocab, tokens, *how):
    return int(fresh.python(MEASURED, vocab, tokens, *how).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the most a process ever held is read from /proc")
def test_the_estimate_is_what_a_pass_takes(tiny):
    taken = measured(0, 1600, "truth", "fp64")
    assert taken > 200 * MIB and 0.7 * taken < needed(tiny, 1600) < 1.5 * taken
    taken = measured(
        0, 1600, "jitter", 2, "bfloat16"
    )  # has scores of its own, and needs most where the truth is float32
    assert taken > 50 * MIB and 0.7 * taken < needed(tiny, 1600, "fp32") < 1.5 * taken


@pytest.mark.skipif(sys.platform != "linux", reason="the most a process ever held is read from /proc")
@pytest.mark.parametrize("truth", ["fp64", "fp32"])
def test_logits_of_a_large_vocabulary_are_held_once(tiny, truth):
    config = tiny.config.to_dict()
    config["text_config"]["vocab_size"] = vocab = 40960
    taken, need = measured(vocab, 500, "truth", truth), needed(qwenref.from_config(config, seed=0), 500, truth)
    assert 0.7 * taken < need < 1.5 * taken
    assert taken < 500 * vocab * {"fp64": 16, "fp32": 12}[truth]


def test_rows_asked_for_under_a_fault_count_whatever_a_call_takes(tiny):
    vocab = tiny.config.text_config.vocab_size
    more = needed(tiny, 60, new=60 + 1000) - needed(tiny, 60, new=60)
    assert more == 1000 * vocab * 8


def test_too_little_memory_is_an_error_that_says_what_would_do(tiny, one):
    tokens = len(one.prompts[0].ids) + 40
    need, half = needed(tiny, tokens), needed(tiny, tokens, "fp32")
    check_memory(tiny, one, limit=need)
    with pytest.raises(MemoryBudget, match=rf"(?s)for {tokens} tokens in fp64\n.*--truth fp32, which needs"):
        check_memory(tiny, one, limit=need - 1)
    check_memory(tiny, one, "fp32", limit=half)
    with pytest.raises(MemoryBudget, match="a suite of shorter prompts, or fewer workers"):
        check_memory(tiny, one, workers=2, limit=half)


def test_the_verb_refuses_before_an_engine_is_opened(capsys, monkeypatch, one, tmp_path):
    one.save(tmp_path / "one.jsonl")
    monkeypatch.setattr("qwenref.compare.memory.memory_left", lambda: MIB)
    engine = "vllm+http://127.0.0.1:9?model=x"  # nobody answers there
    code = cli.main(["compare", "tiny", "--engine", engine, "--suite", str(tmp_path / "one.jsonl")])
    out, err = capsys.readouterr()
    assert (code, out) == (3, "") and err.startswith("MemoryBudget: compare: not enough memory\n")


def test_two_pasted_texts_need_memory_as_well(tiny, monkeypatch):
    monkeypatch.setattr("qwenref.compare.memory.memory_left", lambda: MIB)
    with pytest.raises(MemoryBudget, match="not enough memory"):
        pasted(tiny, range(300), "one answer", "another")


def test_a_truth_in_float32_gives_the_same_verdicts(tiny, one):
    for faults, status in (((), "AGREE_WITHIN_NOISE"), (("gate-silu",), "DIVERGED")):
        engine = FaultyReference(tiny, *faults, jitter=1)
        report = compare(tiny, engine, one, truth="fp32", explain="never")
        assert (report.status, report.envelope["truth"]) == (status, "fp32")
