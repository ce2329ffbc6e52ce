"""What a comparison says of real engines, by the answers of theirs that are kept: nobody tells it what is wrong."""

import jsonschema
import pytest
from standins.runs import DATA, asked, checkpoint

from qwenref import engines
from qwenref.compare import compare
from qwenref.compare.document import schema


def told(file, name, **options):
    report = compare(checkpoint(name), engines.open(str(DATA / file)), asked(name), **options)
    jsonschema.validate(report.to_dict(), schema())
    return report


@pytest.mark.parametrize(
    "file, name, explain",
    [
        ("llama_cpp.jsonl", "tiny", "auto"),
        ("mistralrs.jsonl", "tiny", "never"),
        ("openvino.jsonl", "tiny", "never"),
        ("vllm.jsonl", "wide", "auto"),
    ],
)
def test_engines_that_are_right_are_inside(file, name, explain):
    report = told(file, name, explain=explain)
    assert (report.status, report.exit_code) == ("AGREE_WITHIN_NOISE", 0), report.summary
    assert not [row["id"] for row in report.hypotheses if row["accepted"]]


@pytest.mark.parametrize(
    "file, name, fault, cause",
    [
        ("mlx.jsonl", "tiny", "norm-1+w-bf16", "weights"),
        ("ortgenai.jsonl", "tiny", "loaded-in-bf16", "weights"),
        ("ortgenai_square.jsonl", "square", "head-early", "weights"),
        ("ik_llama.jsonl", "wide", "kv-fp16", "state_or_cache"),
    ],
)
def test_real_faults_of_engines_that_say_float32_are_named(file, name, fault, cause):
    report = told(file, name)
    assert report.status == "DIVERGED" and report.cause == cause
    assert fault in {row["id"].partition("/")[0] for row in report.hypotheses if row["accepted"]}
    assert report.confidence == "named"


def test_a_fault_that_the_library_does_not_have_is_found_and_not_named():
    """ik_llama.cpp with heads of DeltaNet that are 32 wide."""
    report = told("ik_llama_narrow.jsonl", "tiny")
    assert report.status == "DIVERGED" and report.confidence == "statistical"
    assert not [row["id"] for row in report.hypotheses if row["accepted"]]
