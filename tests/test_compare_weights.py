"""Engines of quantised weights: held against the checkpoint, and against their own weights, dequantised.

One prompt each, and few known faults are tried: what is looked at is the cause that is told.
"""

import numpy as np

import qwenref
from qwenref.compare import FaultyReference, compare
from qwenref.compare.faults import LIBRARY
from qwenref.compare.faults_weights import PROJECTIONS, q8_0

FEW = tuple(name for name in LIBRARY if name not in ("q8_0", "int4-g32", "rope-q+1"))  # all but these are not tried


class Quantised(FaultyReference):
    """An engine that says of its weights what llama.cpp says."""

    def config(self):
        return {**super().config(), "quant": "Q4_K - Medium"}


def codes(report):
    return {found["code"] for found in report.findings}


def test_quantised_weights_are_a_cause_until_they_are_the_references_own(tiny, one):
    engine = Quantised(tiny, "gate-off", jitter=1)
    report = compare(tiny, engine, one, explain="never")
    assert report.cause == "quantization" and "weights-differ" in codes(report)
    assert "weights are said to be Q4_K - Medium: consistent with quantization" in report.summary
    own = compare(tiny, engine, one, explain="never", engine_weights=tiny)
    assert own.status == "DIVERGED" and own.cause == "kernels" and own.summary.endswith("known faults were not tried")
    assert codes(own) & {"weights-differ", "quantization_loss"} == {"quantization_loss"}


def test_weights_that_llama_cpp_calls_all_f32_are_not_quantised(tiny, one):
    engine = FaultyReference(tiny, jitter=1)
    said = engine.config()
    engine.config = lambda: {**said, "quant": "all F32"}
    assert "weights-differ" not in codes(compare(tiny, engine, one, explain="never"))


def test_weights_of_few_bits_may_be_claimed_for_an_engine_that_does_not_say_so(tiny, one):
    report = compare(tiny, FaultyReference(tiny, "gate-off", jitter=1), one, explain="never", precision="Q8_0")
    assert report.cause == "quantization" and "said to be q8_0" in report.summary and "weights-differ" in codes(report)


def test_over_own_weights_a_multiplication_in_8_bits_is_one_of_kernels(tiny, one):
    weights = qwenref.from_pretrained("tiny")
    for path, module in weights.named_modules():
        if path.rpartition(".")[2] in (*PROJECTIONS, "embed_tokens", "lm_head"):
            rounded = q8_0(np.asarray(module.weight).astype(np.float32))
            module.weight = qwenref.Parameter(rounded)
    report = compare(tiny, FaultyReference(weights, "q8_0"), one, engine_weights=weights, without=FEW)
    assert report.status == "DIVERGED" and report.confidence == "named" and report.cause == "kernels"
    assert "multiplied as llama.cpp does; the weights of the reference are already" in report.summary


def test_weights_that_are_not_the_engines_own_are_weights_that_differ(tiny, one):
    report = compare(tiny, FaultyReference(tiny, "int4-g32", jitter=1), one, engine_weights=tiny, without=FEW)
    assert report.confidence == "named" and report.cause == "weights" and "weights of 4 bits" in report.summary
