"""The reference behind each engine's form of JSON, read back over HTTP: to the bit what it is in process."""

import contextlib
import json

import numpy as np
import pytest
from standins.opening import CHAT, IDS_IN, STANDIN, TEXT_IN, behind
from standins.rows import half, same_rows

from qwenref.compare.errors import EngineContractViolation, EngineRejected
from qwenref.engines import ADAPTERS, reference
from qwenref.errors import CapabilityMissing, InputError

TEXT = "How much is 31 plus 23? 日本 🍎"
MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def tiny():
    return reference.open("tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.model.tokenizer


@pytest.fixture(scope="module")
def prompt(tiny):
    return tiny.render(MESSAGES)


@pytest.fixture
def served(tiny, tokenizer):
    """served(kind, how, around, **options): the adapter of a kind before a stand-in around the reference."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, how=None, around=None, **options: stack.enter_context(
            behind(kind, around or tiny, tokenizer, how, **options)
        )


def test_every_http_adapter_of_the_table_has_a_stand_in():
    assert set(STANDIN) == {kind for kind in ADAPTERS if kind.endswith("+http")}


@pytest.mark.parametrize("kind", IDS_IN)
def test_scores_over_http_are_the_references_to_the_bit(kind, served, tiny, tokenizer):
    ids = tokenizer.encode(TEXT)[:9]
    same_rows(served(kind).score(ids, 6).rows, tiny.score(ids, 6).rows)


@pytest.mark.parametrize("kind", IDS_IN)
def test_a_greedy_answer_over_http_is_the_references_to_the_bit(kind, served, tiny, prompt):
    found, own = served(kind).generate(prompt.ids, 40, 5), tiny.generate(prompt.ids, 40, 5)
    assert (found.prompt_ids, found.output_ids) == (own.prompt_ids, own.output_ids)
    assert (found.finish, found.stop_id) == (own.finish, own.stop_id) == ("stop", 1256)
    same_rows(found.rows, own.rows)


@pytest.mark.parametrize("kind", IDS_IN)
def test_every_log_probability_comes_as_a_dense_array(kind, served, tiny):
    how = {"most": "all"} if kind == "vllm+http" else {}
    found, own = served(kind, how).score([5, 6, 7], "all"), tiny.score([5, 6, 7], "all")
    assert found.dense.dtype == np.float32 and found.dense.shape == (3, 1280)
    same_rows(found.rows, own.rows)


@pytest.mark.parametrize("kind", IDS_IN)
def test_ids_in_servers_are_tier_a_and_tokenise(kind, served, tiny):
    engine = served(kind)
    found = engine.capabilities()
    assert found.tier == "A" and found.tokenize and engine.tokenize(TEXT) == tiny.tokenize(TEXT)
    if found.render:
        assert engine.render(MESSAGES, enable_thinking=False).ids == tiny.render(MESSAGES, enable_thinking=False).ids
    else:
        with pytest.raises(CapabilityMissing, match="no rendering of a conversation"):
            engine.render(MESSAGES)


def test_llama_server_is_not_asked_for_what_it_renders_otherwise(served, tiny):
    """It goes on with the assistant's words at the end of a conversation, whatever it is told."""
    engine = served("llama+http")
    begun = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    with pytest.raises(CapabilityMissing, match="ends with the assistant's message"):
        engine.render(begun)
    assert engine.render(begun, continue_final_message=True) == tiny.render(
        begun, add_generation_prompt=False, continue_final_message=True
    )


@pytest.mark.parametrize("kind", IDS_IN)
def test_a_text_prompt_is_tokenised_by_the_server(kind, served, tiny):
    found, own = served(kind).generate(TEXT, 3, 2), tiny.generate(TEXT, 3, 2)
    assert found.output_ids == own.output_ids and found.prompt_ids in (own.prompt_ids, None)


@pytest.mark.parametrize("kind", TEXT_IN)
def test_tokens_in_text_and_bytes_are_read_back_into_ids(kind, served, tiny, prompt):
    engine = served(kind)
    k = engine.capabilities().output_logprobs
    found, own = engine.generate(prompt.text, 40, k), tiny.generate(prompt.ids, 40, k)
    end = 0 if kind == "tgi+http" else 1  # the end token is not among the tokens of the others
    assert found.output_ids == own.output_ids[: len(own.output_ids) - end] and found.finish == "stop"
    if kind != "openai+http":  # its older route has text alone: halves of characters have no name
        same_rows(found.rows, own.rows[: len(own.rows) - end])
    assert found.text == engine.tokenizer.decode(own.output_ids[:-1])


@pytest.mark.parametrize("kind", TEXT_IN)
def test_ids_go_to_a_text_server_as_the_text_that_gives_them_back(kind, served, tiny, prompt):
    engine = served(kind)
    assert engine.generate(prompt.ids, 4, 1).output_ids == tiny.generate(prompt.ids, 4, 1).output_ids
    with pytest.raises(CapabilityMissing, match="tokenises to"):
        engine.generate([*map(engine.tokenizer.token_id, "user")], 4, 1)  # one token in the vocabulary
    engine = served(kind, tokenizer=None)
    with pytest.raises(CapabilityMissing, match="a tokenizer turns ids into it"):
        engine.generate(prompt.ids, 4, 0)


@pytest.mark.parametrize("kind", CHAT)
def test_a_chat_server_takes_messages(kind, served, tiny, prompt):
    engine = served(kind, **({"route": "chat"} if kind == "openai+http" else {}))
    own = tiny.generate(prompt.ids, 40, 5)
    for asked in (MESSAGES, MESSAGES[0]["content"]):
        found = engine.generate(asked, 40, 5)
        assert found.output_ids == own.output_ids[:-1] and found.finish == "stop"
        same_rows(found.rows, own.rows[:-1])
    assert engine.generate(MESSAGES, 2, 0).finish == "length"


@pytest.mark.parametrize("kind", ["ollama+http", "lmstudio+http", "openai+http"])
def test_text_servers_are_tier_c_with_log_probabilities_and_d_without(kind, served):
    assert served(kind).capabilities().tier == "C"
    assert served(kind, tokenizer=None).capabilities().tier == "D"
    if kind != "ollama+http":
        assert served(kind, {"logprobs": False}).capabilities().tier == "D"


def test_the_most_log_probabilities_are_what_the_server_says(served):
    assert served("tgi+http").capabilities().output_logprobs == 5
    assert served("vllm+http", {"most": 7}).capabilities().prompt_logprobs == 7
    assert served("vllm+http", {"most": "all"}).capabilities().prompt_logprobs == "all"
    with pytest.raises(CapabilityMissing, match="20 at most"):
        served("vllm+http").score([1, 2], 21)
    with pytest.raises(CapabilityMissing, match="5 at most"):
        served("tgi+http").generate("a", 1, "all")


def test_a_token_of_half_a_character_without_bytes_has_no_row(served, tiny, tokenizer, prompt):
    engine = served("ollama+http", {"with_bytes": False})
    asked = tiny.render([{"role": "user", "content": "Write a Japanese greeting 日本語."}])
    found, own = engine.generate(asked.text, 40, 3), tiny.generate(asked.ids, 40, 3)
    unread = [t for t, row in enumerate(found.rows) if row is None]
    cut = [
        t
        for t, id in enumerate(own.output_ids[:-1])
        if "\ufffd" in tokenizer.token_bytes(id).decode("utf-8", "replace")
    ]
    assert unread == cut and found.meta["unread_tokens"] == len(cut)
    assert (found.output_ids is None) == bool(cut)


def test_llama_servers_missing_entries_are_found_by_id_and_scores_have_none(served, tiny, tokenizer):
    cut = [id for id in range(256) if half(tokenizer, id)]
    ids = [*tokenizer.encode("a"), cut[0], cut[1], *tokenizer.encode("b")]
    found, own = served("llama+http").score(ids, 4), tiny.score(ids, 4)
    for t, (row, expected) in enumerate(zip(found.rows, own.rows, strict=True)):
        assert row.ids.tolist() == expected.ids.tolist() and row.chosen == expected.chosen
        assert row.chosen_logprob == expected.chosen_logprob or ids[t + 1] in cut


@pytest.mark.parametrize("kind", STANDIN)
def test_every_request_spells_greedy_decoding_out(kind, served):
    engine = served(kind)
    engine.generate("a", 1, 1)
    body = engine.seen[-1].body
    sent = {**body, **body.get("options", {}), **body.get("sampling_params", {}), **body.get("parameters", {})}
    assert set(engine.NEUTRAL) - engine.client.dropped <= set(sent)
    assert sent["temperature"] in (0, None) and body.get("stream") in (False, None)


@pytest.mark.parametrize("kind", STANDIN)
def test_what_a_server_says_of_itself_goes_into_the_header_of_a_run(kind, served):
    found = served(kind).config()
    keys = {"name", "version", "backend", "dtype", "quant", "kv_dtype", "state_dtype", "tp", "flags", "model"}
    assert keys <= set(found) and found["model"]["id"] and found["name"] == kind.partition("+")[0]
    json.dumps(found)


def test_refused_fields_are_named_in_the_header(served):
    engine = served("openai+http")
    engine.generate("a", 1, 1)
    assert engine.config()["refused_fields"] == ["min_p", "repetition_penalty", "top_k"]


def test_a_field_inside_of_another_that_is_refused_is_left_out_and_named(served, tiny):
    engine = served("sglang+http", {"knows_seed": False, "info": "/server_info"})
    assert engine.generate([5, 6], 2, 1).output_ids == tiny.generate([5, 6], 2, 1).output_ids
    assert engine.config()["refused_fields"] == ["sampling_seed"] and engine.config()["version"] == "0.5.23"


def test_a_value_that_openais_form_does_not_tell_is_not_taken_for_a_number(served, tiny):
    class Untold:
        """Gives -9999.0 for a token outside of the list, as the API reference says."""

        def __getattr__(self, name):
            return getattr(tiny, name)

        def generate(self, *asked):
            done = tiny.generate(*asked)
            rows = [
                row._replace(ids=row.ids[1:], logprobs=row.logprobs[1:], chosen_logprob=-9999.0) for row in done.rows
            ]
            return done._replace(rows=rows)

    found = served("openai+http", around=Untold(), route="chat").generate("Hi", 3, 3)
    own = tiny.generate(tiny.render([{"role": "user", "content": "Hi"}]).ids, 3, 3)
    assert [row.chosen for row in found.rows] == own.output_ids
    assert all(row.chosen_logprob is None and row.chosen not in row.ids for row in found.rows)


@pytest.mark.parametrize("kind", [kind for kind in STANDIN if kind != "lmstudio+http"])  # which takes no raw text
def test_sampling_is_sent_under_the_engines_names(kind, served, tiny, tokenizer):
    engine = served(kind)
    found = engine.generate("Hello", 6, 1, {"temperature": 1.5, "top_p": 0.9, "seed": 7})
    own = tiny.generate(tokenizer.encode("Hello"), 6, 1, {"temperature": 1.5, "top_p": 0.9, "seed": 7})
    assert found.text.startswith(tokenizer.decode(own.output_ids[:3]))
    with pytest.raises(InputError, match="'temprature'"):
        engine.generate("a", 1, 0, {"temprature": 1})


class _Changed:
    """The reference with one answer changed: a server that lies."""

    def __init__(self, engine, **changes):
        self._engine, self._changes = engine, changes

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **options):
        return self._engine.generate(*args, **options)._replace(**self._changes)


@pytest.mark.parametrize("kind", ["vllm+http", "sglang+http", "llama+http"])
def test_ids_outside_of_the_vocabulary_are_a_breach_of_contract(kind, served, tiny):
    engine = served(kind, around=_Changed(tiny, output_ids=[5000]), vocab=1280)
    with pytest.raises((EngineContractViolation, EngineRejected)):
        engine.generate([1, 2], 1, 0)


@pytest.mark.parametrize("kind", ["vllm+http", "sglang+http", "llama+http"])
def test_more_tokens_than_asked_for_are_a_breach_of_contract(kind, served, tiny):
    engine = served(kind, around=_Changed(tiny, output_ids=[5, 6, 7]))
    with pytest.raises(EngineContractViolation, match="more tokens than were asked for"):
        engine.generate([1, 2], 1, 0)


@pytest.mark.parametrize("kind", STANDIN)
def test_what_an_engine_does_not_give_is_said_so(kind, served):
    engine = served(kind)
    with pytest.raises(CapabilityMissing, match="no activations"):
        engine.activations([1], ["embed"])
    if not engine.capabilities().prompt_logprobs:
        with pytest.raises(CapabilityMissing, match="no log-probabilities of a prompt"):
            engine.score([1], 1)
    assert repr(engine).startswith(f"<engine {kind} http")
