"""What real engines answered on known checkpoints (`standins/runs.py` wrote it down), against the reference."""

from typing import NamedTuple

import numpy as np
import pytest
from standins.runs import DATA, asked, checkpoint

import qwenref
from qwenref import engines
from qwenref.compare.faults import find
from qwenref.engines import run_file
from qwenref.logprobs import log_softmax


class Run(NamedTuple):
    """A file, and the range its error has to be in: root mean square of the log-probabilities listed."""

    file: str
    checkpoint: str
    least: float
    most: float
    version: str
    dtype: str


RUNS = [
    # Sums in another order.
    Run("llama_cpp.jsonl", "tiny", 0, 1e-5, "llama-cpp-python 0.3.36", "float32"),
    # Its norm weights are 1 + w rounded to bf16, whatever type is asked for.
    Run("mlx.jsonl", "tiny", 1e-2, 5e-2, "0.32.2", "float32"),
    # The same, and all else that is not bf16 in the checkpoint rounded to it before the export.
    Run("ortgenai.jsonl", "tiny", 1e-2, 5e-2, "0.18.0", "float32"),
    # With as many ids as rows of q_proj its head reads another norm.
    Run("ortgenai_square.jsonl", "square", 1, 3, "0.18.0", "float32"),
    # bf16, step by step.
    Run("vllm.jsonl", "wide", 2e-2, 1e-1, "0.32.0", "bfloat16"),
    Run("mistralrs.jsonl", "tiny", 0, 1e-5, "0.9.5", "float32"),
    # Keys and values in float16.
    Run("ik_llama.jsonl", "wide", 1e-5, 5e-4, "ik-llama-cpp-python 0.1.5", "float32"),
    # Wrong from the first token, with heads of DeltaNet that are 32 wide in place of 128.
    Run("ik_llama_narrow.jsonl", "tiny", 1, 9, "ik-llama-cpp-python 0.1.5", "float32"),
    Run("openvino.jsonl", "tiny", 0, 3e-5, "2026.4.1", "float32"),
]


@pytest.fixture(params=RUNS, ids=lambda run: run.file)
def run(request):
    return request.param


def errors(file, logits):
    """float64 of every number listed, less that of what `logits(ids)` gives."""
    found = []
    for record in run_file.read(DATA / file).records:
        with qwenref.numerics("fp64"):
            expected = log_softmax(np.asarray(logits(record.ids), np.float64))
        for place, row in enumerate(record.rows, record.first):
            found.append(row.logprobs - expected[place - 1][row.ids])
            if row.chosen is not None:
                found.append([row.chosen_logprob - expected[place - 1][row.chosen]])
    return np.concatenate(found)


def of(model):
    return lambda ids: model(np.array([ids])).logits[0]


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


def test_its_numbers_are_as_far_from_the_reference_as_is_known(run):
    assert run.least <= rms(errors(run.file, of(checkpoint(run.checkpoint)))) < run.most


@pytest.mark.parametrize("file, fault", [("mlx.jsonl", "norm-1+w-bf16"), ("ortgenai.jsonl", "loaded-in-bf16")])
def test_what_is_rounded_before_it_is_float32_is_all_that_is_wrong(file, fault):
    """An engine that says float32 and is a thousand times as far off as others: beside that fault it is as they are."""
    assert rms(errors(file, of(find(fault).open(checkpoint("tiny"))))) < 3e-5


def test_the_head_reads_the_last_norm_but_one_where_a_projection_is_as_wide_as_the_vocabulary():
    model = find("loaded-in-bf16").open(checkpoint("square"))
    head = np.asarray(model.lm_head.weight, np.float64)

    def logits(ids):
        with qwenref.capture(model, "layers.3.post_attention_layernorm") as captured:
            model(np.array([ids]))
        [name] = captured.names()
        return captured[name][0] @ head.T

    assert rms(errors("ortgenai_square.jsonl", logits)) < 3e-5


def test_it_was_asked_what_would_be_asked_today(run):
    """The suite of then is that of now; the engine answers every prompt of it, by its own ids."""
    suite, recorded = asked(run.checkpoint), engines.open(str(DATA / run.file))
    assert recorded.run.header["suite"]["sha256"] == suite.sha256
    for item in suite.prompts:
        done = recorded.generate(item.ids, item.new, 3)
        assert done.prompt_ids == item.ids and 0 < len(done.output_ids) <= item.new
        assert [row.chosen for row in done.rows] == done.output_ids == [int(row.ids[0]) for row in done.rows]
        assert recorded.capabilities().prompt_logprobs in (0, 8)


def test_it_says_which_engine_it_was(run):
    said = engines.open(str(DATA / run.file)).config()
    assert (said["version"], said["dtype"]) == (run.version, run.dtype)
    assert said["vocab_size"] == checkpoint(run.checkpoint).config.text_config.vocab_size


def test_files_are_small_and_all_of_them_are_tested():
    assert {path.name for path in DATA.iterdir()} == {run.file for run in RUNS}
    assert all(path.stat().st_size < 200_000 for path in DATA.iterdir())
