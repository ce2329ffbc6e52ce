"""Engines of other packages: the reference behind a stand-in of each package's calls, read back to the bit."""

import sys

import pytest
from standins.packages import PACKAGE, STANDIN
from standins.rows import same_rows

import qwenref
from qwenref import engines
from qwenref.compare.errors import BadTokenIds, EngineContractViolation, EngineRejected, VocabMismatch
from qwenref.compare.evidence import Evidence
from qwenref.compare.gather import identify
from qwenref.engines import ALL, reference
from qwenref.errors import CapabilityMissing, CheckpointError, InputError

PROMPT = list(range(300, 390))
TEXT = "naïve ภาษาไทย 🦀 <|im_end|> x = [1, 2]"
KINDS = sorted(STANDIN)

# Kind -> what `config()` says of the stand-in, in part
SAID = {
    "llama-cpp": {"name": "llama.cpp", "dtype": "float32", "quant": None, "kv_dtype": "float32"},
    "openvino": {"name": "openvino", "dtype": "float32", "kv_dtype": "float32", "backend": "CPU"},
}


@pytest.fixture(scope="module")
def own():
    return reference.open("tiny")


@pytest.fixture(scope="module")
def behind():
    """The engine that answers, not the one it is held against: both remember what they were fed."""
    return reference.open("tiny")


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


def test_scores_are_those_of_the_engine_to_the_bit(engine, own):
    for ids in (PROMPT, [7], PROMPT[:3]):  # the second and third after another prompt
        found, expected = engine.score(ids, 5), own.score(ids, 5)
        same_rows(found.rows, expected.rows)
        assert found.dense is None or (found.dense == expected.dense).all()
    same_rows(engine.score(PROMPT[:2], ALL).rows, own.score(PROMPT[:2], ALL).rows)


@pytest.mark.parametrize("sampling", [None, {"ignore_eos": True}, {"temperature": 0.8, "top_k": 9, "seed": 3}])
def test_what_it_generates_is_what_the_engine_does(engine, own, sampling):
    prompt = own.render([{"role": "user", "content": "How much is 31 plus 23?"}]).ids
    found, expected = engine.generate(prompt, 40, 3, sampling), own.generate(prompt, 40, 3, sampling)
    assert found[:4] == expected[:4] and found.stop_id == expected.stop_id
    same_rows(found.rows, expected.rows)
    assert found.finish == "stop" or sampling is not None


def test_text_is_tokenized_by_the_engine(engine, own):
    if engine.capabilities().tokenize:
        assert engine.tokenize(TEXT) == own.tokenize(TEXT)
        assert engine.generate("Once upon", 2, 0).prompt_ids == own.tokenize("Once upon")


def test_conversations_are_rendered_by_the_engine(engine, own):
    if engine.capabilities().render:
        messages = [{"role": "user", "content": TEXT}]
        for options in ({}, {"enable_thinking": False}):
            assert engine.render(messages, **options) == own.render(messages, **options)


def test_it_says_what_it_is(kind, engine):
    found = engine.config()
    assert {name: found[name] for name in SAID[kind]} == SAID[kind]
    assert found["vocab_size"] == 1280 and set(found["stop_ids"]) == {1254, 1256} and "version" in found
    assert found["model"]["id"] and found["model"]["shards"]


def test_it_writes_nothing_on_the_terminal(spec, capfd):
    with engines.open(spec) as engine:
        engine.generate(PROMPT, 2, 2)
    assert capfd.readouterr() == ("", "")


def test_a_package_that_is_missing_is_named_with_how_to_install_it(kind, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE[kind], None)
    with pytest.raises(CapabilityMissing, match=f"needs the package {PACKAGE[kind]}(.|\n)*do +pip install"):
        engines.open(spec)


def test_a_model_that_is_not_there_is_named(kind, spec, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        engines.open(f"{kind}:{tmp_path / 'nowhere'}")


def test_more_ids_than_there_is_room_for_are_refused(engine):
    engine.limit = 10
    for call in (engine.score, lambda ids, k: engine.generate(ids, 1, k)):
        with pytest.raises(BadTokenIds, match="found +90\n +expected at most 10"):
            call(PROMPT, 1)


def test_what_fails_inside_is_one_error_and_the_next_answer_is_whole(engine, own, behind, monkeypatch):
    def fails(ids):
        raise RuntimeError("\x1b[31mno kernel\nfor this")

    with monkeypatch.context() as patch:
        patch.setattr(behind, "feed", fails)
        for call in (engine.score, lambda ids, k: engine.generate(ids, 1, k)):
            with pytest.raises(EngineRejected, match="RuntimeError: .*no kernel for this") as caught:
                call(PROMPT, 1)
            assert "\x1b" not in str(caught.value)
    same_rows(engine.score(PROMPT, 2).rows, own.score(PROMPT, 2).rows)


def test_logits_of_another_shape_are_a_breach_of_contract(engine, behind, monkeypatch):
    whole = behind.feed
    for cut in (lambda ids: whole(ids)[:-1], lambda ids: whole(ids)[:, :-1]):
        with monkeypatch.context() as patch, pytest.raises((EngineContractViolation, EngineRejected)):
            patch.setattr(behind, "feed", cut)
            engine.score(PROMPT, 1)


def test_another_vocabulary_ends_a_comparison_at_once(engine):
    other = qwenref.from_config({**own_config(), "vocab_size": 1300}, seed=0)
    with pytest.raises(VocabMismatch, match="1,280(.|\n)*1,300"):
        identify(other, engine, Evidence(engine.name, engine.capabilities()))


def own_config():
    return qwenref.from_pretrained("tiny").config.text_config.to_dict()


# llama.cpp alone


@pytest.fixture
def llama(monkeypatch, tmp_path, behind):
    def opening(**how):
        return STANDIN["llama-cpp"](monkeypatch, tmp_path, behind, behind.model.tokenizer, **how)

    return opening


def test_a_prompt_of_llama_cpp_goes_in_batches(llama, own):
    spec, module = llama()
    with engines.open(spec, batch=32, kv="f16", threads=1) as engine:
        same_rows(engine.score(PROMPT, 2).rows, own.score(PROMPT, 2).rows)
        assert engine.config()["kv_dtype"] == "float16" and engine.config()["flags"]["n_batch"] == 32
        assert module.params.type_k == module.params.type_v == module.GGML_TYPE_F16
        assert module.params.n_threads == module.params.n_threads_batch == 1 and module.opened == ["model", "state"]
    engine.close()
    assert module.opened == []
    for call in (engine.score, engine.tokenize):
        with pytest.raises(CapabilityMissing, match="it was closed"):
            call([1], 1) if call == engine.score else call("x")


def test_llama_cpp_has_room_for_what_is_asked_or_for_what_the_model_has_up_to_a_bound(llama):
    for trained, context, room in ((1024, None, 1024), (2**18, None, 4096), (2**18, 9000, 9216)):
        spec, _ = llama(trained=trained)
        with engines.open(spec, context=context) as engine:
            assert engine.limit == room
    with pytest.raises(BadTokenIds, match="do +open it with room for more: context=N"):
        engines.open(spec, context=16).score([1] * 300, 1)


@pytest.mark.parametrize(
    "kind, dtype, quant",
    [
        ("all F32", "float32", None),
        ("BF16", "bfloat16", None),
        ("F16", "float16", None),
        ("Q4_K - Medium", "float32", "Q4_K - Medium"),
    ],
)
def test_llama_cpp_says_what_weights_it_has(llama, kind, dtype, quant):
    with engines.open(llama(kind=kind)[0]) as engine:
        found = engine.config()
    assert (found["dtype"], found["quant"]) == (dtype, quant)
    assert found["metadata"] == {
        "general.architecture": "qwen35", "general.file_type": "0", "tokenizer.ggml.pre": "qwen35",
    }  # fmt: skip
    assert len(found["model"]["template_sha256"]) == 64  # of a template that is longer than one reads at a time


def test_what_llama_cpp_said_last_stands_in_the_error(llama, tmp_path):
    spec, module = llama()
    with engines.open(spec) as engine:
        module.failing = 1
        with pytest.raises(EngineRejected, match="llama_decode returned 1\n +found +decode: no free slot$"):
            engine.score([1], 1)
    with pytest.raises(CheckpointError, match="failed to allocate buffer"):
        engines.open(spec, context=2**21)
    assert module.opened == []
    (tmp_path / "tiny.gguf").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="does not open it\n +found +gguf_init: invalid magic characters\n"):
        engines.open(spec)


@pytest.mark.parametrize("option", [{"kv": "q4"}, {"context": 0}, {"batch": -1}, {"threads": 1.5}, {"colour": 1}])
def test_an_option_that_is_none_of_llama_cpp_is_refused(llama, option):
    with pytest.raises(InputError, match=next(iter(option))):
        engines.open(llama()[0], **option)


# OpenVINO alone


@pytest.fixture
def openvino(monkeypatch, tmp_path, behind):
    def opening(**how):
        return STANDIN["openvino"](monkeypatch, tmp_path, behind, None, **how)

    return opening


def test_a_model_of_openvino_without_positions_is_given_none(openvino, own):
    with engines.open(openvino(inputs=("input_ids", "attention_mask", "beam_idx"))[0]) as engine:
        same_rows(engine.score(PROMPT, 2).rows, own.score(PROMPT, 2).rows)


def test_openvino_says_in_which_type_it_computes(openvino):
    """Left to itself it takes bf16 where the CPU has it, from files of float32 as well."""
    for precision, dtype, kv in (
        ("f32", "float32", "float32"),
        ("f16", "float16", "float16"),
        (None, "bfloat16", "u8"),
    ):
        spec, module = openvino()
        with engines.open(spec, precision=precision, threads=1) as engine:
            said = engine.config()
        assert (said["dtype"], said["kv_dtype"], engine.name) == (dtype, kv, f"openvino {dtype}")
        assert module.options["INFERENCE_NUM_THREADS"] == 1
    assert said["model"]["config_sha256"] is None  # the exporter wrote another
    assert said["model"]["tokenizer_sha256"] == engines.open("reference:tiny").config()["model"]["tokenizer_sha256"]
    with pytest.raises(InputError, match="precision 'int8'(.|\n)*expected f32, bf16, f16, none"):
        engines.open(openvino()[0], precision="int8")


def test_a_folder_of_openvino_that_lacks_something_says_what(openvino, tmp_path):
    spec, _ = openvino()
    (tmp_path / "openvino_model.bin").unlink()
    with pytest.raises(CheckpointError, match="OpenVINO does not open it(.|\n)*Empty weights data"):
        engines.open(spec)
    (tmp_path / "openvino_model.xml").unlink()
    with pytest.raises(CheckpointError, match="no openvino_model.xml(.|\n)*do +optimum-cli export openvino"):
        engines.open(spec)


def test_a_folder_without_a_template_renders_nothing(openvino, tmp_path):
    spec, _ = openvino()
    (tmp_path / "chat_template.jinja").unlink()
    with engines.open(spec) as engine:
        assert engine.capabilities().tokenize and not engine.capabilities().render
        with pytest.raises(EngineRejected, match="render: the engine failed(.|\n)*chat_template"):
            engine.render([{"role": "user", "content": "x"}])


def test_without_transformers_openvino_has_no_text(openvino, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with engines.open(openvino()[0]) as engine:
        assert not engine.capabilities().tokenize
        with pytest.raises(CapabilityMissing, match="no tokenize"):
            engine.generate("x", 1, 1)
