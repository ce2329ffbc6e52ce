"""Sampling against the engines themselves: distributions recorded from them by record_samplers.py."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from qwenref import Sampler

RECORDED = Path(__file__).with_name("data") / "engine_samplers.json"
ORDERS = ("vllm", "llama.cpp", "sglang")
TIED = 6  # from this row of logits on, some are equal


@functools.cache
def recorded():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def distributions(engine, order):
    """(case, probabilities of the engine, ours by `order`) of every case that has an answer in both."""
    part = recorded()[engine]
    for case in part["cases"]:
        logits = np.array(recorded()["logits"][case["row"]])
        options = {name: value for name, value in case["options"].items() if order == engine or name[:7] != "penalty"}
        ours = Sampler(order=order, **options).distribution(logits, case["context"], part["prompt_length"])
        theirs = np.zeros(len(logits))
        theirs[[int(id) for id in case["probs"]]] = list(case["probs"].values())
        yield case, theirs, ours.probs


def slack(case):
    """Relative error of a float32 engine: a logit is rounded at most six times, each by 2**-24 of at most 16, before it
    is divided by the temperature (1 / t more roundings of the same size in the exponent); a sum over 24 adds 24 more.
    """
    temperature = max(case["options"]["temperature"], 0.01)
    return 2.0**-24 * (2 * 6 * 16 / temperature + 2 * 24)


def agree(theirs, ours, case, tied):
    theirs, ours = (np.where(probs < 1e-30, 0, probs) for probs in (theirs, ours))  # float32 ends not far below
    if tied:  # which id of a tie stays is open in the engines
        theirs, ours = np.sort(theirs), np.sort(ours)
    return np.array_equal(theirs > 0, ours > 0) and np.allclose(theirs, ours, rtol=slack(case), atol=0)


def comparable(engine, case):
    """Whether the backend of SGLang that runs without a GPU means the same as the one the order describes.

    It cuts through ties, and does not renormalise between top-k and top-p where min-p is on as well.
    """
    o = case["options"]
    greedy = o["temperature"] < 1e-6 or o["top_k"] == 1
    all_three = 0 < o["top_k"] < 24 and o["top_p"] < 1 and o["min_p"] > 0
    return engine != "sglang" or greedy or not (all_three or case["row"] >= TIED)


@pytest.mark.parametrize("engine", ORDERS)
def test_an_order_gives_the_distributions_recorded_from_the_engine(engine):
    compared, sizes = 0, set()
    for case, theirs, ours in distributions(engine, engine):
        if comparable(engine, case):
            assert agree(theirs, ours, case, case["row"] >= TIED and engine != "sglang"), case
            compared += 1
            sizes.add(int((theirs > 0).sum()))
    assert compared > 40 and len(sizes) > 8  # the cases do cut, and differently


@pytest.mark.parametrize("engine", ORDERS)
def test_the_recorded_cases_would_show_the_order_of_another_engine(engine):
    for other in ORDERS:
        if other != engine:
            answers = [agree(*pair, case, True) for case, *pair in distributions(engine, other)]
            assert answers.count(False) > 10, other


def test_the_server_of_llama_cpp_samples_by_the_default_chain_and_counts_the_last_64_of_the_prompt():
    """What a request leaves out is 0.8, 40, 0.95 and 0.05; the logits are the engine's own but for a shift.

    Its two calls for the same ids may differ in the last bits of the logits: 1e-4 of a probability, far below a cut.
    """
    part = recorded()["llama.cpp server"]
    steps = [name for name in part["samplers"] if name not in ("dry", "top_n_sigma", "typ_p", "xtc")]  # off by default
    assert steps == ["penalties", "top_k", "top_p", "min_p", "temperature"]
    assert len(part["context"]) > 64 and set(part["context"][:-64]) - set(part["context"][-64:])
    for case in part["cases"]:
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, **case["options"]}
        options["penalty_last_n"] = options.pop("repeat_last_n", 64)
        found = Sampler(order="llama.cpp", **options).distribution(np.array(part["logits"]), part["context"])
        theirs = {int(id): p for id, p in case["probs"].items()}
        assert found.support.tolist() == sorted(theirs), options
        np.testing.assert_allclose(found.probs[found.support], [theirs[id] for id in found.support], rtol=1e-4)
