"""What is one engine's alone, as in `test_engines_alone.py`: ONNX Runtime GenAI, ik_llama.cpp, mistral.rs."""

import os
from types import SimpleNamespace

import pytest
from standins.packages import STANDIN
from standins.rows import same_rows

from qwenref import engines
from qwenref.compare.errors import BadTokenIds, EngineContractViolation, EngineRejected
from qwenref.engines import reference
from qwenref.errors import CapabilityMissing, CheckpointError, InputError

PROMPT = list(range(300, 390))


@pytest.fixture(scope="module")
def own():
    return reference.open("tiny")


@pytest.fixture(scope="module")
def behind():
    """The engine that answers, not the one it is held against: both remember what they were fed."""
    return reference.open("tiny")


# ONNX Runtime GenAI alone


@pytest.fixture
def ortgenai(monkeypatch, tmp_path, behind):
    def opening(**how):
        return STANDIN["ortgenai"](monkeypatch, tmp_path, behind, behind.model.tokenizer, **how)

    return opening


def test_ortgenai_has_room_for_what_is_asked_and_reports_to_nobody(ortgenai):
    spec, module = ortgenai()
    for context, room in ((None, 4096), (9000, 9000), (2**20, 2**18)):
        with engines.open(spec, context=context) as engine:
            engine.fresh()
            assert engine.limit == room == module.options["max_length"] and module.options["do_sample"] is False
    assert module.telemetry is False
    with pytest.raises(BadTokenIds, match="do +open it with room for more: context=N"):
        engines.open(spec, context=16).score([1] * 17, 1)
    with pytest.raises(InputError, match="context"):
        engines.open(spec, context=0)


def test_a_tokenizer_that_ortgenai_does_not_open_leaves_it_without_text(ortgenai):
    with engines.open(ortgenai(tokenizer_class="Qwen3_5Tokenizer")[0]) as engine:
        assert not engine.capabilities().tokenize and not engine.capabilities().render
        for call in (engine.tokenize, engine.render):
            with pytest.raises(CapabilityMissing, match="Unsupported tokenizer class: Qwen3_5Tokenizer"):
                call("x")


def test_ortgenai_renders_tools_but_no_options_of_a_template(ortgenai, own):
    messages, tools = [{"role": "user", "content": "ünder"}], [{"type": "function", "function": {"name": "f"}}]
    with engines.open(ortgenai()[0]) as engine:
        assert engine.render(messages, tools=tools) == own.render(messages, tools=tools)
        with pytest.raises(CapabilityMissing, match="no template option enable_thinking"):
            engine.render(messages, enable_thinking=False)


def test_a_folder_of_ortgenai_that_lacks_something_says_what(ortgenai, tmp_path):
    spec, _ = ortgenai()
    config = tmp_path / "genai_config.json"
    config.write_text('{"model": {"vocab_size": 5}}')
    with pytest.raises(CheckpointError, match="genai_config.json: sizes(.|\n)*model.context_length"):
        engines.open(spec)
    config.unlink()
    with pytest.raises(CheckpointError, match="no genai_config.json(.|\n)*do +python -m onnxruntime_genai"):
        engines.open(spec)


def test_an_export_that_ortgenai_does_not_open_is_named_with_its_words(ortgenai):
    spec, module = ortgenai()
    module.refuses = "GetMemoryInfo for CPU should not be used."
    with pytest.raises(
        CheckpointError, match="ONNX Runtime GenAI does not open it\n +found +RuntimeError: GetMemoryInfo"
    ):
        engines.open(spec)


# ik_llama.cpp alone


@pytest.fixture
def ik_llama(monkeypatch, tmp_path, behind):
    def opening(**how):
        return STANDIN["ik-llama"](monkeypatch, tmp_path, behind, behind.model.tokenizer, **how)

    return opening


def test_a_prompt_of_ik_llama_goes_in_its_own_batches_and_all_is_closed(ik_llama, own):
    spec, module = ik_llama(kind="Q4_K - Medium")
    ids = [id % 1000 for id in range(600)]
    with engines.open(spec, threads=3, context=700) as engine:
        same_rows(engine.score(ids, 2).rows, own.score(ids, 2).rows)
        assert engine.config()["quant"] == "Q4_K - Medium" and module.threads == 3 and len(module.opened) == 2
        with pytest.raises(BadTokenIds, match="do +open it with room for more: context=N"):
            engine.score([1] * 701, 1)
        module.failing = -3
        with pytest.raises(EngineRejected, match="llama_decode returned -3"):
            engine.score([1], 1)
    engine.close()
    assert module.opened == []


def test_what_ik_llama_does_not_open_is_named_and_nothing_is_written(ik_llama, tmp_path, capfd):
    spec, _ = ik_llama()
    (tmp_path / "tiny.gguf").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="ik_llama.cpp does not open it\n +found +RuntimeError: Failed to load"):
        engines.open(spec)
    for option in ({"context": 0}, {"threads": -1}):
        with pytest.raises(InputError, match=next(iter(option))):
            engines.open(spec, **option)
    assert capfd.readouterr() == ("", "")


# mistral.rs alone


@pytest.fixture
def mistralrs(monkeypatch, tmp_path, behind):
    return STANDIN["mistralrs"](monkeypatch, tmp_path, behind, behind.model.tokenizer)


def test_mistralrs_gives_all_log_probabilities_of_what_it_writes_and_no_prompt_of_ids_alone(mistralrs, own):
    spec, module = mistralrs
    with engines.open(spec, kv="f16", dtype="BF16") as engine:
        same_rows(engine.generate("Once upon", 3, "all").rows, own.generate("Once upon", 3, "all").rows)
        assert module.asked[-1]["top_logprobs"] == 1280 and module.dtype == "bf16"
        assert engine.capabilities().tier == "C" and engine.config()["kv_dtype"] == "float16"
        assert os.environ["MISTRALRS_CPU_KV_F32"] == "0"
        with pytest.raises(CapabilityMissing, match="theirs has other ids"):
            engine.generate(PROMPT, 1, 1)
        for call in (engine.render, lambda ids: engine.activations(ids, [])):
            with pytest.raises(CapabilityMissing):
                call([])


def test_another_prompt_than_was_sent_to_mistralrs_is_a_breach_of_contract(mistralrs):
    spec, module = mistralrs
    with engines.open(spec) as engine:
        module.extra = 1
        with pytest.raises(EngineContractViolation, match="another prompt\n +found +2 tokens\n +expected 1"):
            engine.generate("ab", 1, 1)


def test_of_tokens_of_mistralrs_that_are_alike_the_one_with_the_text_was_chosen(mistralrs):
    """It names ids in its list and a text for the chosen one: the value tells which, and the text where two have it."""
    with engines.open(mistralrs[0]) as engine:
        top = [SimpleNamespace(token=id, logprob=value) for id, value in ((70, -1.0), (65, -1.0), (66, -2.0))]
        for id in (65, 70):
            text = engine._runner.detokenize_text([id], False)
            row = engine._row(SimpleNamespace(token=text, logprob=-1.0, top_logprobs=top), 2, "here")
            assert (row.chosen, row.chosen_logprob, row.ids.tolist()) == (id, -1.0, [65, 70])
        with pytest.raises(EngineContractViolation, match="here: the chosen token is not in the list"):
            engine._row(SimpleNamespace(token="x", logprob=-0.5, top_logprobs=top), 2, "here")


def test_what_mistralrs_refuses_is_said_in_its_words(mistralrs):
    spec, module = mistralrs
    for option in ({"dtype": "F64"}, {"kv": "q8"}):
        with pytest.raises(InputError, match=next(iter(option.values()))):
            engines.open(spec, **option)
    module.room = 3
    with engines.open(spec) as engine, pytest.raises(BadTokenIds, match="at most 2"):
        engine.generate("Once upon a time", 1, 1)
    module.refuses = "no tokenizer.json"
    with pytest.raises(CheckpointError, match="mistral.rs does not open it\n +found +ValueError: no tokenizer.json"):
        engines.open(spec)
