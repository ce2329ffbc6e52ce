"""The benchmark without its times: every line there, work counted right, ratios by turn, nothing left behind."""

import io
import json
import math
import struct
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import qwenref
from qwenref import _C
from qwenref.bench import GOALS, KEYS, SHAPES, measure, shapes
from qwenref.bench.extrapolate import whole_27b
from qwenref.bench.gguf import write_gguf
from qwenref.bench.goals import Row
from qwenref.bench.measure import bench
from qwenref.bench.report import Report
from qwenref.bench.svg import points
from qwenref.bench.timing import fastest, ratio, turns
from qwenref.cli import main
from qwenref.cli_base import BAD_INPUT, FINE
from qwenref.errors import CapabilityMissing, InputError
from qwenref.progress import Status
from qwenref.rates import Rates

QUICK = {"rounds": 1, "prefill": 16, "tokens": 2}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """What the command prints as JSON for the embedded model, and the picture it writes."""
    svg, out, before = tmp_path_factory.mktemp("bench") / "r.svg", io.StringIO(), sys.stdout
    words = [f"--{name}={value}" for name, value in QUICK.items()]
    sys.stdout = out
    try:
        code = main(["bench", "tiny", "--json", f"--svg={svg}", *words])
    finally:
        sys.stdout = before
    assert code == FINE
    return json.loads(out.getvalue()) | {"svg": svg.read_text()}


def test_the_document_has_a_schema_and_every_goal(document):
    assert document["schema"] == "qwenref.bench/1" and document["version"] == qwenref.__version__
    assert [row["key"] for row in document["rows"]] == [goal.key for goal in GOALS]
    for row in document["rows"]:
        assert set(row) == {
            "key", "what", "unit", "better", "goal", "stretch",
            "figure", "low", "high", "met", "verdict", "note", "reason",
        }  # fmt: skip
        if row["figure"] is None:
            assert row["met"] is None and row["verdict"] == "not run" and row["reason"]
        else:
            assert row["low"] <= row["figure"] <= row["high"] and row["figure"] > 0 and row["note"]
    assert set(document["rates"]) == {"read", "fma", "bf16", "threads", "level"}
    assert set(document["times"]) == {"plain read", "arithmetic", "qwenref prefill", "qwenref decode"}
    assert all(len(taken) == QUICK["rounds"] for taken in document["times"].values())


def test_everything_that_needs_no_rival_is_measured(document):
    missing = {row["key"] for row in document["rows"] if row["figure"] is None}
    rivals = {key for key in KEYS if key.endswith((".torch", ".llama.cpp"))}
    memory = {"open.memory", "open.seconds", "forward.memory"}  # need /proc
    assert missing >= rivals and missing <= rivals | (memory if sys.platform != "linux" else set())
    assert all(row["reason"].startswith("--against") for row in document["rows"] if row["key"] in rivals)


def test_the_roofline_counts_what_the_model_does(document):
    model = qwenref.from_pretrained("tiny")
    text, T = model.config.text_config, QUICK["prefill"]
    linears = sum(p.size for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name)
    head = text.hidden_size * text.vocab_size
    ops = {phase: document["roofline"][phase]["ops"] for phase in ("prefill", "decode")}
    assert ops["prefill"]["linear"]["flops"] == 2 * (linears * T + head)
    assert ops["decode"]["linear"]["flops"] == 2 * (linears + head)
    heads, K, V = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    layers = qwenref.mixers(model)["linear_attention"]
    assert ops["prefill"]["gated_delta_rule"]["flops"] == layers * T * heads * (7 * K * V + 3 * V + 1)
    seen = T * (T + 1) // 2
    per_pair = text.num_attention_heads * (4 * text.head_dim + 1 + 4)
    assert ops["prefill"]["attention"]["flops"] == qwenref.mixers(model)["full_attention"] * seen * per_pair
    for phase in ops:
        assert sum(work["seconds"] for work in ops[phase].values()) <= document["roofline"][phase]["seconds"]


def test_the_bytes_of_a_step_are_the_weights_it_reads(document):
    model = qwenref.from_pretrained("tiny")
    counts = qwenref.parameters(model)
    weights = sum(p.nbytes for name, p in model.named_parameters())
    table = model.text_model.embed_tokens.weight.nbytes
    assert counts.nbytes == weights
    assert document["weights"] == weights - (0 if counts.tied else table)


def test_the_picture_stands_alone_and_shows_every_op_that_counts(document):
    tree = ElementTree.fromstring(document["svg"])
    text = document["svg"]
    assert tree.tag == "{http://www.w3.org/2000/svg}svg" and tree.attrib["role"] == "img"
    assert "<script" not in text and "href" not in text and len(text) < 40_000
    marks = list(points(document["roofline"]))
    assert {(phase, name) for phase, name, *_ in marks} >= {("prefill", "linear"), ("decode", "linear")}
    for phase, name, *_ in marks:
        assert f"<title>{phase}: {name}, " in text


def test_the_text_has_a_line_per_goal():
    goals = [Row(GOALS[0], 0.8, 0.7, 0.9, note="here"), *(Row(goal, reason="why") for goal in GOALS[1:])]
    found = Report(FACTS, goals, {}, {})
    lines = found.text().splitlines()
    for row in goals:
        assert sum(row.goal.what in line for line in lines) == 1
    assert any("0.8" in line and "0.7 to 0.9" in line and ">= 0.75, 0.85" in line and "met" in line for line in lines)
    assert repr(found) == f"Report · 0.8b · 1 of 1 goals met · {len(GOALS) - 1} not run"


RATES = Rates(10e9, 100e9, 0.0, 2, "avx2")
FACTS = {
    "version": "0", "model": "0.8b", "layers": 24, "hidden_size": 1024, "weights": 10, "cpu": "any",
    "machine": "x86_64", "python": "3", "numpy": "2", "rounds": 1, "prefill": 16, "tokens": 2, "rates": RATES._asdict(),
    "settings": {"qwenref": "fp32"}, "warnings": ["busy"],
}  # fmt: skip


@pytest.mark.parametrize(
    "key, figure, met, verdict",
    [
        ("decode.read", 0.75, True, "met"),
        ("decode.read", 0.85, True, "stretch"),
        ("decode.read", 0.7, False, "missed"),
        ("op.smallest", 0.3, True, "met"),
        ("op.smallest", 0.31, False, "missed"),
        ("delta.torch", None, None, "not run"),
    ],
)
def test_a_goal_is_met_or_missed(key, figure, met, verdict):
    row = Row(next(goal for goal in GOALS if goal.key == key), figure)
    assert (row.met, row.verdict) == (met, verdict)


def test_contenders_take_turns_and_ratios_are_those_of_a_turn():
    order = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b") or 2.5}
    taken = turns(runs, 3)
    assert order == ["a", "b"] * 3 and taken["b"] == [2.5] * 3 and all(0 <= t < 1 for t in taken["a"])
    assert ratio([1, 4, 9], [1, 2, 3]) == (2, 1, 3)
    assert ratio([10, 1], [10, 1]) == (1, 1, 1)  # a slow turn is slow for both
    assert 0 < fastest(lambda: None, seconds_each=1e-4) < 1e-4


def test_the_whole_model_is_the_repeat_sixteen_times_and_a_head():
    """The head is read at the rate at which the repeat was."""
    head = np.zeros((1024, 5120), np.float16)
    run = SimpleNamespace(
        times={"qwenref decode": [2.0], "qwenref prefill": [3.0]},
        weight_bytes=lambda: 10**10,
        model=SimpleNamespace(lm_head=SimpleNamespace(weight=head)),
        length=512,
    )
    found = whole_27b(run)
    own, whole = (2 * rows * 5120 * 2.0 / 10**10 for rows in (1024, 248_320))
    assert found["decode_seconds"] == pytest.approx(16 * (2 - own) + whole)
    assert found["prefill_seconds"] == pytest.approx(16 * 3 + whole)
    assert found["weights"] == 2 * 26_895_998_464
    assert found["memory"]["4096"] == found["weights"] + qwenref.cache_size(shapes.WHOLE_27B, 4096).total
    assert "27B" in Report(FACTS, [], {}, {}, found).text()


@pytest.mark.parametrize(
    "shape, billions", [("0.8b", 0.75), ("2b", 1.88), ("4b", 4.2), ("9b", 8.95), ("27b-layer", 1.53)]
)
def test_shapes_have_the_size_they_are_called_by(shape, billions):
    assert qwenref.parameters(SHAPES[shape]).total / 1e9 == pytest.approx(billions, rel=0.01)
    assert qwenref.parameters(shapes.WHOLE_27B).total == 26_895_998_464


def test_random_folders_are_made_once_and_hold_what_they_say(tmp_path, monkeypatch):
    small = shapes.text_config(32, 48, 4, (2, 1), (1, 2), tied=True, vocabulary=64)
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    folder = shapes.random_folder("small", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert shapes.random_folder("small", tmp_path) == folder and sorted(p.name for p in tmp_path.iterdir()) == [
        folder.name
    ]
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model, drawn = qwenref.from_pretrained(folder), qwenref.from_config(small, seed=0)
    assert (model([1, 2, 3]).logits == drawn([1, 2, 3]).logits).all()
    monkeypatch.setitem(shapes.SHAPES, "small", small | {"hidden_size": 64})
    with pytest.raises(InputError, match="another model"):
        shapes.random_folder("small", tmp_path)


def test_a_sparse_folder_is_a_whole_checkpoint_without_data(tmp_path):
    small = shapes.text_config(32, 48, 4, (2, 1), (1, 2), tied=False, vocabulary=64)
    nbytes = shapes.sparse_folder(small, tmp_path)
    model = qwenref.from_pretrained(tmp_path)
    assert nbytes == qwenref.parameters(small).nbytes == qwenref.parameters(model).nbytes
    assert not np.asarray(model.lm_head.weight).astype(np.float32).any()


def test_goals_may_be_chosen_and_threads_come_back():
    before = _C.get_num_threads()
    found = bench("tiny", only=["op.*"], threads=before + 1, **QUICK)
    assert [row.goal.key for row in found.rows if row.figure] == ["op.smallest"]
    assert {row.reason for row in found.rows if not row.figure} == {"left out by --only"}
    assert _C.get_num_threads() == before and found.times == {}


def test_torch_takes_part_when_asked():
    found = bench("tiny", against=["torch"], only=["*.torch"], **QUICK)
    figures = {row.goal.key: row for row in found.rows if row.figure}
    assert set(figures) == {"decode.torch", "prefill.torch", "delta.torch"}
    assert {"torch bf16 decode", "torch fp32 prefill"} <= set(found.times)
    assert figures["decode.torch"].note.startswith("torch ")
    assert "eager attention" in found.facts["settings"]["torch bf16"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"against": ["vllm"]}, "no contender 'vllm'"),
        ({"only": ["speed"]}, "no goal 'speed'"),
        ({"shape": "70b"}, "no shape '70b'"),
        ({"rounds": 0}, "rounds 0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options, message):
    model = None if "shape" in options else "tiny"
    with pytest.raises(InputError, match=message):
        bench(model, **options)
    with pytest.raises(InputError, match="a model and a shape"):
        bench("tiny", shape="0.8b")


@pytest.mark.parametrize("rival, module", [("torch", "torch"), ("llama.cpp", "llama_cpp")])
def test_a_rival_that_is_not_installed_is_named(monkeypatch, capsys, rival, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CapabilityMissing, match=f"{rival} cannot take part"):
        bench("tiny", against=[rival], **QUICK)
    assert main(["bench", "tiny", f"--against={rival}"]) == BAD_INPUT
    assert "pip install" in capsys.readouterr().err


def test_variables_that_slow_blas_are_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.delenv("OPENBLAS_L2_SIZE", raising=False)
    assert sum("OPENBLAS" in warning for warning in measure.warnings()) == 1
    assert main(["bench", "tiny", "--only=op.*", "--rounds=1", "--prefill=4", "--tokens=1"]) == FINE
    assert "OPENBLAS_CORETYPE=Haswell" in capsys.readouterr().err


def test_progress_is_for_terminals_and_leaves_no_trace(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("QWENREF_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for stream, written in ((io.StringIO(), False), (Terminal(), True)):
        with Status(stream) as tell:
            tell("measuring")
            tell("at most five times a second")
        assert bool(stream.getvalue()) == written
    assert stream.getvalue().startswith("\rmeasuring") and stream.getvalue().endswith(" \r")
    monkeypatch.setenv("QWENREF_PROGRESS", "0")
    with Status(quiet := Terminal()) as tell:
        tell("measuring")
    assert quiet.getvalue() == ""


def test_a_gguf_file_has_every_tensor_in_its_form_and_heads_in_its_order(tmp_path):
    """Read back by the format's own rules; value head j of key head k stands at place j G + k."""
    config = shapes.text_config(32, 48, 4, (2, 1), (2, 6), tied=True, vocabulary=64)
    model = qwenref.from_config(config, seed=0)
    write_gguf(model, tmp_path / "m.gguf")
    pairs, tensors = read_gguf((tmp_path / "m.gguf").read_bytes())
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert pairs["general.architecture"] == "qwen35" and pairs["qwen35.block_count"] == 4
    assert pairs["qwen35.rope.dimension_sections"] == [11, 11, 10, 0]
    assert pairs["qwen35.attention.recurrent_layers"] == [True, True, True, False]
    assert len(tensors) == sum(1 for _ in model.named_parameters()) and "output.weight" not in tensors
    layer = model.text_model.layers[0]
    assert (tensors["blk.0.attn_norm.weight"] == np.asarray(layer.input_layernorm.weight, np.float32) + 1).all()
    assert (tensors["blk.0.ssm_norm.weight"] == np.asarray(layer.linear_attn.norm.weight, np.float32)).all()
    assert (tensors["blk.0.ffn_up.weight"] == np.asarray(layer.mlp.up_proj.weight)).all()
    places = [j * 2 + k for k in range(2) for j in range(3)]  # of the heads as the checkpoint has them
    decay = -np.exp(np.asarray(layer.linear_attn.A_log, np.float32))
    assert (tensors["blk.0.ssm_a"][places] == decay).all()
    gate = np.asarray(layer.linear_attn.in_proj_z.weight).reshape(6, 128, 32)
    assert (tensors["blk.0.attn_gate.weight"].reshape(6, 128, 32)[places] == gate).all()
    mixed, taps = tensors["blk.0.attn_qkv.weight"], tensors["blk.0.ssm_conv1d.weight"]
    stored = np.asarray(layer.linear_attn.in_proj_qkv.weight)
    assert (mixed[:512] == stored[:512]).all() and taps.shape == (512 + 768, 4)
    assert (mixed[512:].reshape(6, 128, 32)[places] == stored[512:].reshape(6, 128, 32)).all()
    out = np.asarray(layer.linear_attn.out_proj.weight).reshape(32, 6, 128)
    assert (tensors["blk.0.ssm_out.weight"].reshape(32, 6, 128)[:, places] == out).all()
    with pytest.raises(CapabilityMissing, match="no place"):
        write_gguf(qwenref.from_config(config | {"attention_bias": True}, seed=0), tmp_path / "n.gguf")


def read_gguf(raw):
    """({key: value}, {name: array}) of a GGUF file."""
    at = 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return values if len(values) > 1 else values[0]

    def text():
        return bytes(take(f"{take('Q')}s")).decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inside, n = take("IQ")
            return [value(inside) for _ in range(n)]
        return take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    assert take("4s") == b"GGUF" and take("I") == 3
    count, n = take("QQ")
    pairs = {text(): value(take("I")) for _ in range(n)}
    infos = []
    for _ in range(count):
        name = text()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        infos.append((name, shape, *take("IQ")))
    data = at + -at % 32
    tensors = {}
    for name, shape, kind, offset in infos:
        dtype = np.dtype({0: np.float32, 30: ml_dtypes.bfloat16}[kind])
        assert offset % 32 == 0
        tensors[name] = np.frombuffer(raw, dtype, math.prod(shape), data + offset).reshape(shape)
    return pairs, tensors
