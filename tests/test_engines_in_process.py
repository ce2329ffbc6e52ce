"""Engines of other packages: the reference behind a stand-in of each package's calls, read back to the bit."""

import sys

import pytest
from standins.packages import PACKAGE, STANDIN
from standins.rows import same_rows

import qwenref
from qwenref import engines
from qwenref.compare.errors import BadTokenIds, EngineContractViolation, EngineRejected, NonFinite, VocabMismatch
from qwenref.compare.evidence import Evidence
from qwenref.compare.gather import identify
from qwenref.engines import ALL, reference
from qwenref.engines.vllm import ENVIRONMENT
from qwenref.errors import CapabilityMissing, CheckpointError, ModelNotFound

PROMPT = list(range(300, 390))
TEXT = "naïve ภาษาไทย 🦀 <|im_end|> x = [1, 2]"
KINDS = sorted(STANDIN)

# Kind -> what `config()` says of the stand-in, in part
SAID = {
    "llama-cpp": {"name": "llama.cpp", "dtype": "float32", "quant": None, "kv_dtype": "float32"},
    "mistralrs": {"name": "mistral.rs", "dtype": "float32", "kv_dtype": "float32"},
    "openvino": {"name": "openvino", "dtype": "float32", "kv_dtype": "float32", "backend": "CPU"},
    "ik-llama": {"name": "ik_llama.cpp", "dtype": "float32", "quant": None, "kv_dtype": "float16"},
    "mlx": {"name": "mlx-lm", "dtype": "bfloat16", "kv_dtype": "bfloat16", "quant": None},
    "ortgenai": {"name": "onnxruntime-genai", "dtype": "float32", "kv_dtype": "float32"},
    "vllm": {"name": "vllm", "dtype": "bfloat16", "kv_dtype": "bfloat16", "state_dtype": "float32", "tp": 1},
}


@pytest.fixture(scope="module")
def own():
    return reference.open("tiny")


@pytest.fixture(scope="module")
def behind():
    """The engine that answers, not the one it is held against: both remember what they were fed."""
    return reference.open("tiny")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What vLLM's adapter sets in it is gone behind a test."""
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def spec(kind, monkeypatch, tmp_path, behind):
    return STANDIN[kind](monkeypatch, tmp_path, behind, behind.model.tokenizer)[0]


@pytest.fixture
def engine(spec):
    with engines.open(spec) as opened:
        yield opened


@pytest.fixture
def prompt(engine, own):
    """Ids that it takes: those of a text, where it takes text alone."""
    return PROMPT if engine.capabilities().ids_in else own.tokenize(TEXT)


def calls(engine):
    """What it does with ids, as functions of them."""
    found = [lambda ids: engine.generate(ids, 1, 1)]
    return [*found, lambda ids: engine.score(ids, 1)] if engine.capabilities().prompt_logprobs else found


def test_scores_are_those_of_the_engine_to_the_bit(engine, own):
    if not engine.capabilities().prompt_logprobs:
        with pytest.raises(CapabilityMissing, match="no score"):
            engine.score(PROMPT, 1)
        return
    for ids in (PROMPT, [7], PROMPT[:3]):  # the second and third after another prompt
        found, expected = engine.score(ids, 5), own.score(ids, 5)
        same_rows(found.rows, expected.rows)
        assert found.dense is None or (found.dense == expected.dense).all()
    same_rows(engine.score(PROMPT[:2], ALL).rows, own.score(PROMPT[:2], ALL).rows)


@pytest.mark.parametrize("sampling", [None, {"ignore_eos": True}, {"temperature": 0.8, "top_k": 9, "seed": 3}])
def test_what_it_generates_is_what_the_engine_does(engine, own, sampling):
    prompt = own.render([{"role": "user", "content": "How much is 31 plus 23?"}]).ids
    if sampling is not None and "temperature" in sampling and not engine.capabilities().ids_in:
        with pytest.raises(CapabilityMissing, match="sampling with temperature, top_k, seed"):
            engine.generate(prompt, 40, 3, sampling)
        return
    found, expected = engine.generate(prompt, 40, 3, sampling), own.generate(prompt, 40, 3, sampling)
    assert (found.prompt_ids, found.output_ids) == (expected.prompt_ids, expected.output_ids)
    assert (found.finish, found.stop_id) == (expected.finish, expected.stop_id)
    same_rows(found.rows, expected.rows)
    assert found.finish == "stop" or sampling is not None


def test_text_is_tokenized_by_the_engine(engine, own):
    if engine.capabilities().tokenize:
        assert engine.tokenize(TEXT) == own.tokenize(TEXT)
        assert engine.generate("Once upon", 2, 0).prompt_ids == own.tokenize("Once upon")


def test_conversations_are_rendered_by_the_engine(engine, own):
    if engine.capabilities().render:
        messages = [{"role": "user", "content": TEXT}]
        for options in ({}, {"add_generation_prompt": False}):
            assert engine.render(messages, **options) == own.render(messages, **options)


def test_it_says_what_it_is(kind, engine):
    found = engine.config()
    assert {name: found[name] for name in SAID[kind]} == SAID[kind]
    assert found["vocab_size"] == 1280 and set(found["stop_ids"]) == {1254, 1256} and "version" in found
    assert found["model"]["id"] and found["model"]["shards"]


def test_it_writes_nothing_on_the_terminal(spec, capfd):
    with engines.open(spec) as engine:
        engine.generate(TEXT, 2, 2)
    assert capfd.readouterr() == ("", "")


def test_a_package_that_is_missing_is_named_with_how_to_install_it(kind, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE[kind], None)
    with pytest.raises(CapabilityMissing, match=f"needs the package {PACKAGE[kind]}(.|\n)*do +pip install"):
        engines.open(spec)


def test_a_model_that_is_not_there_is_named(kind, spec, tmp_path):
    with pytest.raises((CheckpointError, ModelNotFound), match="nowhere"):
        engines.open(f"{kind}:{tmp_path / 'nowhere'}")


def test_more_ids_than_there_is_room_for_are_refused(engine, prompt):
    engine.limit = 10
    for call in calls(engine):
        with pytest.raises(BadTokenIds, match=f"found +{len(prompt)}\n +expected at most (9|10)"):
            call(prompt)


def test_what_fails_inside_is_one_error_and_the_next_answer_is_whole(engine, prompt, own, behind, monkeypatch):
    def fails(ids):
        raise RuntimeError("\x1b[31mno kernel\nfor this")

    with monkeypatch.context() as patch:
        patch.setattr(behind, "feed", fails)
        for call in calls(engine):
            with pytest.raises(EngineRejected, match="RuntimeError: .*no kernel for this|no kernel for this") as caught:
                call(prompt)
            assert "\x1b" not in str(caught.value)
    same_rows(engine.generate(prompt, 3, 2).rows, own.generate(prompt, 3, 2).rows)


def test_logits_of_another_shape_are_a_breach_of_contract(engine, prompt, behind, monkeypatch):
    """Where numbers lie behind a pointer nobody knows their shape: what is read there is NaN."""
    if not engine.capabilities().prompt_logprobs:
        pytest.skip("it gives lists, not logits")
    whole = behind.feed
    for cut in (lambda ids: whole(ids)[:-1], lambda ids: whole(ids)[:, :-1]):
        with monkeypatch.context() as patch, pytest.raises((EngineContractViolation, EngineRejected, NonFinite)):
            patch.setattr(behind, "feed", cut)
            calls(engine)[-1](prompt)


def test_another_vocabulary_ends_a_comparison_at_once(engine):
    other = qwenref.from_config({**own_config(), "vocab_size": 1300}, seed=0)
    with pytest.raises(VocabMismatch, match="1,280(.|\n)*1,300"):
        identify(other, engine, Evidence(engine.name, engine.capabilities()))


def own_config():
    return qwenref.from_pretrained("tiny").config.text_config.to_dict()
