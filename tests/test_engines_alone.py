"""What is one engine's alone: its options, its files, its words for what it does not do."""

import json
import os
import sys

import pytest
from standins.packages import STANDIN
from standins.rows import same_rows

from qwenref import engines
from qwenref.compare.errors import BadTokenIds, EngineRejected
from qwenref.engines import reference
from qwenref.engines.vllm import ENVIRONMENT
from qwenref.errors import CapabilityMissing, CheckpointError, InputError

PROMPT = list(range(300, 390))


@pytest.fixture(scope="module")
def own():
    return reference.open("tiny")


@pytest.fixture(scope="module")
def behind():
    """The engine that answers, not the one it is held against: both remember what they were fed."""
    return reference.open("tiny")


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


# vLLM alone


@pytest.fixture
def vllm(monkeypatch, tmp_path, behind):
    return STANDIN["vllm"](monkeypatch, tmp_path, behind, behind.model.tokenizer)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What vLLM's adapter sets in it is gone behind a test."""
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def test_vllm_is_opened_without_what_changes_its_numbers_and_asked_for_greedy_decoding(vllm, monkeypatch):
    spec, module = vllm
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    with engines.open(spec, context=100, tensor_parallel_size=2) as engine:
        flags = engine.config()["flags"]
        engine.generate([1, 2, 3], 200, 0)
        assert engine.config()["tp"] == 2
    assert not flags["prefix_caching"] and flags["enforce_eager"] and flags["logprobs_mode"] == "raw_logprobs"
    assert flags["max_model_len"] == 100
    assert module.asked[-1] == {
        "temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 97, "logprobs": 1,
        "stop_token_ids": [1256, 1254],
    }  # fmt: skip
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_what_vllm_refuses_is_said_in_its_words(vllm):
    with pytest.raises(CheckpointError, match="vLLM does not open it\n +found +ValueError: CPU GDN attention"):
        engines.open(vllm[0], dtype="float32")
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'colour'"):
        engines.open(vllm[0], colour=1)
    with pytest.raises(InputError, match="context"):
        engines.open(vllm[0], context=0)
    with engines.open(vllm[0]) as engine, pytest.raises(InputError, match="'top_q'"):
        engine.generate([1], 1, 1, {"top_q": 1})


def test_activations_of_vllm_are_those_that_are_sites(monkeypatch, tmp_path, behind):
    """Its decoder has rows of tokens and no batch, joins projections, and the activation with the product behind it."""
    torch = pytest.importorskip("torch")

    class Joined(torch.nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            attention = {"qkv_proj": torch.nn.Linear(8, 256), "k_norm": torch.nn.Identity()}
            mlp = {"gate_up_proj": torch.nn.Linear(8, 16), "act_fn": Joined(), "down_proj": torch.nn.Linear(8, 8)}
            layers = [{}, {}, {}, {"self_attn": torch.nn.ModuleDict(attention), "mlp": torch.nn.ModuleDict(mlp)}]
            self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(map(torch.nn.ModuleDict, layers))})

        @torch.inference_mode()
        def forward(self, ids):
            layer, x = self.model.layers[3], torch.arange(8.0 * len(ids)).view(-1, 8) / 100
            self.keys = layer["self_attn"]["k_norm"](layer["self_attn"]["qkv_proj"](x)[:, -128:].view(-1, 2, 64))
            self.hidden = layer["mlp"]["act_fn"](layer["mlp"]["gate_up_proj"](x))
            return layer["mlp"]["down_proj"](self.hidden)

    decoder = Decoder()
    spec, _ = STANDIN["vllm"](monkeypatch, tmp_path, behind, behind.model.tokenizer, decoder=decoder)
    with engines.open(spec) as engine:
        found = engine.activations([5, 6, 7], ["layers.*"])
        layer = "layers.3."
        assert set(found) == {
            layer + "self_attn.k",
            layer + "self_attn.k_norm",
            layer + "mlp.hidden",
            layer + "mlp.down_proj",
        }
        assert (found[layer + "self_attn.k"] == decoder.keys.numpy()[None]).all()
        assert (found[layer + "mlp.hidden"] == decoder.hidden.numpy()[None]).all()
        with pytest.raises(CapabilityMissing, match="hooks on modules do not see them"):
            engine.activations([5], ["layers.3.mlp.act_fn"])


# mlx-lm alone


@pytest.fixture
def mlx(monkeypatch, tmp_path, behind):
    return STANDIN["mlx"](monkeypatch, tmp_path, behind, behind.model.tokenizer)


def test_parameters_of_mlx_are_brought_to_a_type_and_packed_ones_left(mlx):
    spec, modules = mlx
    with engines.open(spec, dtype="float32", device="cpu") as engine:
        kinds = {name: leaf.dtype for name, leaf in engine._model.parameters().items()}
        said = engine.config()
    assert kinds == dict.fromkeys(("embed", "norm", "A_log"), "mlx.core.float32") | {"packed": "mlx.core.uint32"}
    assert (said["dtype"], said["kv_dtype"], engine.name) == ("float32", "float32", "mlx float32")
    assert said["backend"].endswith("Device(cpu, 0)") and modules["mlx.core"].device == "Device(cpu, 0)"


def test_a_quantised_folder_of_mlx_says_so(mlx, tmp_path):
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with engines.open(mlx[0]) as engine:
        assert engine.config()["quant"] == "4 bits"


def test_what_mlx_refuses_is_said_in_its_words(mlx):
    spec, modules = mlx
    modules["mlx_lm"].refuses = "Model type qwen3_5_text not supported."
    with pytest.raises(CheckpointError, match="mlx-lm does not open it\n +found +ValueError: Model type qwen3_5_text"):
        engines.open(spec)
    for option in ({"dtype": "float64"}, {"device": "npu"}):
        with pytest.raises(InputError, match=next(iter(option.values()))):
            engines.open(spec, **option)
