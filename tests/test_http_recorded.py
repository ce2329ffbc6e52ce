"""The adapters against what real servers answered, word for word (`standins/recording.py` took it down)."""

from pathlib import Path

import numpy as np
import pytest
from standins.recording import MESSAGES, NEW, K, replaying, talk

import qwenref
from qwenref.engines import adapter
from qwenref.logprobs import log_softmax

DATA = Path(__file__).parent / "data" / "http"


def said(kind, name, **options):
    with replaying(DATA / name) as (url, _), adapter(kind).open(url, **options) as engine:
        return talk(engine)


@pytest.fixture(scope="module")
def llama():
    return said("llama+http", "llama_server.json")


@pytest.fixture(scope="module")
def vllm():
    return said("vllm+http", "vllm.json")


def test_what_llama_server_says_of_itself(llama):
    found = llama["capabilities"]
    assert (found.output_logprobs, found.prompt_logprobs, found.kind, found.tier) == ("all", "all", "raw", "A")
    config = llama["config"]
    assert config["quant"] == "all F32" and config["vocab_size"] == 1280 and config["flags"]["n_ctx"] == 1024
    assert config["defaults"]["temperature"] == pytest.approx(0.8) and config["refused_fields"] == []


def test_llama_server_on_the_embedded_model_reads_and_renders_as_the_reference(llama, tiny):
    text = "How much is 31 plus 23?"
    assert llama["tokens"] == tiny.tokenizer.encode(text)
    own = qwenref.render(tiny.tokenizer, [{"role": "user", "content": text}], enable_thinking=False)
    assert (llama["prompt"].text, llama["prompt"].ids) == (own.text, list(own.ids))


def test_llama_server_on_the_embedded_model_gives_the_references_log_probabilities(llama, tiny):
    """Its attention keeps keys and values in 16 bits, hence 0.01; a row off by one is off by more than 1."""
    scores, greedy = llama["scores"], llama["greedy"]
    ids = [*greedy.prompt_ids, *greedy.output_ids]
    given = [(scores.rows, scores.ids, 0), (greedy.rows, ids, len(greedy.prompt_ids) - 1)]
    for rows, ids, first in given:
        expected = log_softmax(tiny(np.array([ids])).logits[0][first:])
        for t, row in enumerate(rows):
            assert len(row.ids) == K and np.abs(row.logprobs - expected[t][row.ids]).max() < 0.01
            if first + t + 1 < len(ids):
                assert row.chosen == ids[first + t + 1]
                assert abs(row.chosen_logprob - expected[t][row.chosen]) < 0.01
    assert [row.chosen for row in greedy.rows] == greedy.output_ids == [int(row.ids[0]) for row in greedy.rows]


def test_what_vllm_says_of_itself(vllm):
    found = vllm["capabilities"]
    assert (found.output_logprobs, found.prompt_logprobs, found.tier) == (20, 20, "A")
    assert vllm["config"]["flags"]["logprobs_follow_temperature"] is False  # --logprobs-mode raw_logprobs
    assert vllm["config"]["version"] == "0.32.0" and vllm["config"]["flags"]["max_model_len"] == 1024
    assert vllm["prompt"].text is None and vllm["prompt"].ids[: len(vllm["tokens"])] != vllm["tokens"]


def test_rows_of_vllm_hold_the_likeliest_and_the_id_that_follows(vllm):
    scores, greedy = vllm["scores"], vllm["greedy"]
    assert [row.chosen for row in scores.rows] == [*scores.ids[1:], None]
    assert [row.chosen for row in greedy.rows] == greedy.output_ids == [int(row.ids[0]) for row in greedy.rows]
    for row in [*scores.rows, *greedy.rows]:
        assert len(row.ids) == K and (np.diff(row.logprobs) <= 0).all()
    assert any(row.chosen not in row.ids for row in scores.rows[:-1])  # values outside of the K are kept
    assert all(row.chosen_logprob < row.logprobs[-1] for row in scores.rows[:-1] if row.chosen not in row.ids)
    assert greedy.finish == "length" and len(greedy.output_ids) == NEW


@pytest.mark.parametrize("kind, name", [("llama+http", "llama_server.json"), ("vllm+http", "vllm.json")])
def test_a_smaller_vocabulary_than_the_servers_is_a_breach_of_contract(kind, name):
    from qwenref.compare.errors import EngineContractViolation

    with pytest.raises(EngineContractViolation, match="0 to 99"):
        said(kind, name, vocab=100)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_openais_routes_of_llama_server_are_read_back_into_the_references_ids_and_log_probabilities(route, tiny):
    found = said("openai+http", f"llama_server_{route}.json", tokenizer=tiny.tokenizer, route=route)
    assert found["capabilities"].tier == "C" and found["capabilities"].kind == "raw"
    prompt = qwenref.render(tiny.tokenizer, MESSAGES)
    greedy = found["greedy"]
    own = tiny.generate(prompt.ids, max_new_tokens=60)
    assert greedy.output_ids == list(own.new_ids)[:-1] and greedy.finish == "stop"  # the end token has no text
    ids = [*prompt.ids, *greedy.output_ids]
    expected = log_softmax(tiny(np.array([ids])).logits[0][len(prompt.ids) - 1 :])
    for t, row in enumerate(greedy.rows):
        assert K - 1 <= len(row.ids) <= K  # a special token has no text on these routes
        assert row.chosen == row.ids[0] and np.abs(row.logprobs - expected[t][row.ids]).max() < 0.01
