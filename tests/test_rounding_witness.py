"""Profile `hf` against transformers in bf16: every step of the arithmetic, given what transformers gave to its own.

End to end two programs that round at the same places still part, because the sums before the rounding are added in
another order and one flip makes others.  So each step is fed with transformers' own inputs, and what is counted is the
share of elements that come out with the same bits.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from text_configs import CONFIGS
from witness import torch, transformers
from witness_bf16 import Steps, array, modelling

import qwenref
from qwenref import naive, ops

NAMES = ("values 2 x keys, GQA 2", "values 3 x keys, GQA 4", "attention bias", "27B proportions")
LENGTHS = (70, 1, 1)  # a prefill of more than one chunk, two decode steps

# Element by element nothing but the last bit of exp and the like can differ, which crosses a boundary of bf16 once in
# 2^16 / 2 times per ulp.  Sums differ by their order: some ulps, up to some hundred of 2^16.
ELEMENTWISE = ("norm", "gated_norm", "silu", "product", "residual", "beta", "rope", "rope_table", "gate", "embedding")
SUMS = ("linear", "conv", "read", "weights", "context")


class Shares(defaultdict):
    """step -> [elements with the same bits, elements]"""

    def __init__(self):
        super().__init__(lambda: [0, 0])

    def add(self, step, found, expected):
        expected = array(expected)
        found = np.asarray(found, np.float32).reshape(expected.shape)
        self[step][0] += int((found == expected).sum())
        self[step][1] += expected.size

    def of(self, step):
        equal, count = self[step]
        assert count, step
        return equal / count


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def shares(request, tmp_path_factory):
    model = qwenref.from_config(CONFIGS[request.param], seed=11)
    config = model.config.text_config
    rng = np.random.default_rng(4)
    for name, parameter in model.named_parameters():  # norms and decays that do something
        if "norm" in name:
            parameter[...] = parameter + rng.normal(0, 0.2, parameter.shape).astype(parameter.dtype)
    ids = rng.integers(0, config.vocab_size, (2, sum(LENGTHS)))
    steps = Steps(model, tmp_path_factory.mktemp("witness"), ids, LENGTHS)
    with qwenref.numerics("hf"):
        return compared(model, steps)


def compared(model, steps):
    """Shares of every step of a run, with the profile in force."""
    config, found = model.config.text_config, Shares()
    parts = dict(model.named_modules())
    for path, calls in steps.modules.items():
        for args, kwargs, output in calls:
            part, kind = parts.get(path), type(parts.get(path)).__name__
            if kind == "Linear":
                found.add("linear", part(array(args[0])), output)
            elif kind == "RMSNorm":
                found.add("norm", part(array(args[0])), output)
            elif kind == "RMSNormGated":
                found.add("gated_norm", part(array(args[0]), array(args[1])), output)
            elif kind == "SiLUActivation":
                found.add("silu", part(array(args[0])), output)
            elif kind == "Embedding":
                found.add("embedding", part(args[0].numpy()), output)
            elif kind == "RotaryEmbedding":
                position_ids = (args[1] if len(args) > 1 else kwargs["position_ids"]).numpy()
                tables = part(array(args[0]), np.broadcast_to(position_ids, (3, *position_ids.shape[-2:])))
                for table, expected in zip(tables, output, strict=True):
                    found.add("rope_table", table, expected[..., : table.shape[-1]])
    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}"
        if kind == "linear_attention":
            mixer = f"{layer}.linear_attn"
        else:
            mixer = f"{layer}.self_attn"
        for n, (args, _, output) in enumerate(steps.modules[layer]):
            mixed = steps.modules[mixer][n][2]
            mixed = mixed[0] if isinstance(mixed, tuple) else mixed
            middle = steps.modules[f"{layer}.post_attention_layernorm"][n][0][0]
            found.add("residual", ops.add(array(args[0]), array(mixed)), middle)
            found.add("residual", ops.add(array(middle), array(steps.modules[f"{layer}.mlp"][n][2])), output)
            mlp = f"{layer}.mlp"
            gate, up = (array(steps.modules[f"{mlp}.{name}"][n][2]) for name in ("act_fn", "up_proj"))
            found.add("product", ops.mul(gate, up), steps.modules[f"{mlp}.down_proj"][n][0][0])
    in_prefill_order(config, parts, steps, found)
    return found


def in_prefill_order(config, parts, steps, found):
    """Steps inside the mixers, which come layer by layer in every call."""
    delta = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    for n in range(len(LENGTHS)):
        for at, i in enumerate(delta):
            mixer, call = f"model.layers.{i}.linear_attn", n * len(delta) + at
            weight = parts[f"{mixer}.conv1d"].weight
            args, _, output = steps.functions["conv"][call]
            if n == 0:
                convolved = ops.causal_conv1d(array(args[0].transpose(1, 2)), weight)
            else:  # a step: the window, of which the oldest column is not used, then the token
                window = array(args[1])[..., -(weight.shape[2] - 1) :]
                convolved = ops.causal_conv1d(array(args[0].transpose(1, 2)), weight, window)
            expected = output.transpose(1, 2)
            found.add("conv", ops.silu(convolved)[:, -expected.shape[1] :], expected)
            args, kwargs, (output, state) = steps.functions["delta"][call]
            b, a = (array(steps.modules[f"{mixer}.in_proj_{name}"][n][2]) for name in "ba")
            found.add("beta", ops.sigmoid(b), kwargs["beta"])
            g = ops.delta_decay(a, parts[mixer].A_log, parts[mixer].dt_bias)
            assert np.allclose(g, array(kwargs["g"]), rtol=8 * 2**-24, atol=1e-38)  # float32 on both sides: some ulps
            q, k, v = map(array, args[:3])
            before = kwargs["initial_state"]
            read, after = ops.gated_delta_rule(
                ops.l2_norm(q), ops.l2_norm(k), v, array(kwargs["g"]), array(kwargs["beta"]),
                None if before is None else array(before), None, q.shape[-1] ** -0.5, final=True,
            )  # fmt: skip
            found.add("read", read, output)
            bound = 64 * 2**-24 * np.abs(array(state)).max()  # a chunk of 64 sums, each rounded once
            assert np.abs(after - array(state)).max() <= bound
        for at, i in enumerate(full):
            mixer, call = f"model.layers.{i}.self_attn", n * len(full) + at
            (q, k, cos, sin), _, turned = steps.functions["rope"][call]
            F = cos.shape[-1] // 2
            for x, expected in zip((q, k), turned, strict=True):
                y = ops.rope(array(x.transpose(1, 2)), array(cos)[..., :F], array(sin)[..., :F])
                found.add("rope", y, expected.transpose(1, 2))
            args, kwargs, (context, weights) = steps.functions["attention"][call]
            q, k, v = map(array, args[1:4])
            T, S = q.shape[2], k.shape[2]
            end = np.broadcast_to(np.arange(S - T, S) + 1, (len(q), T))
            scale = kwargs["scaling"] if "scaling" in kwargs else args[5]
            mixed, p = ops.attention(q.transpose(0, 2, 1, 3), k, v, np.zeros_like(end), end, scale, p=True)
            found.add("weights", p, weights)
            found.add("context", ops.attention_mix(array(weights), v, np.zeros_like(end), end), context)
            assert mixed.shape == tuple(context.shape)
            query_and_gate = array(steps.modules[f"{mixer}.q_proj"][n][2])
            gate = query_and_gate.reshape(*mixed.shape[:3], 2, -1)[..., 1, :]
            found.add("gate", ops.sigmoid_mul(array(context), gate), steps.modules[f"{mixer}.o_proj"][n][0][0])


@pytest.mark.parametrize("step", ELEMENTWISE)
def test_steps_of_single_elements_have_the_bits_of_transformers(shares, step):
    assert shares.of(step) >= 0.999


@pytest.mark.parametrize("step", SUMS)
def test_sums_have_the_bits_of_transformers_but_for_their_order(shares, step):
    assert shares.of(step) >= 0.99


@pytest.mark.parametrize("T, start", [(1, False), (64, True), (150, True)])
@pytest.mark.parametrize("g", [None, 0.0, -50.0])
def test_A8_A9_the_chunked_form_is_as_close_to_the_definition_as_that_of_torch(T, start, g):
    """Twice its distance leaves room for the scatter of a few thousand numbers."""
    rng = np.random.default_rng([T, start])
    B, G, H, K, V = 2, 2, 4, 32, 24
    q, k = (ops.l2_norm(rng.normal(size=(B, T, G, K)).astype(np.float32)) for _ in "qk")
    v = rng.normal(size=(B, T, H, V)).astype(np.float32)
    decay = -np.exp(rng.normal(size=(B, T, H))) if g is None else np.full((B, T, H), g)
    decay, beta = decay.astype(np.float32), rng.uniform(0, 1, (B, T, H)).astype(np.float32)
    state = rng.normal(size=(B, H, K, V)).astype(np.float32) if start else None
    exact = naive.gated_delta_rule(q, k, v, decay, beta, state, scale=K**-0.5, final=True)
    ours = ops.gated_delta_rule_chunked(q, k, v, decay, beta, state, scale=K**-0.5, final=True)
    given = [torch.tensor(x) for x in (q, k, v, decay, beta)]
    theirs = modelling.torch_chunk_gated_delta_rule(
        *given[:3], g=given[3], beta=given[4], initial_state=None if state is None else torch.tensor(state),
        output_final_state=True,
    )  # fmt: skip
    for found, witness, value in zip(ours, theirs, exact, strict=True):
        rms = [np.sqrt(np.mean((np.asarray(x, np.float64) - value) ** 2)) for x in (found, witness)]
        assert np.isfinite(found).all() and rms[0] <= 2 * rms[1] + 2**-26


# ---------------------------------------------------------------------------------------------- whole texts

RUNS = [json.loads(line) for line in (Path(__file__).parent / "data" / "tiny_examples.jsonl").read_text().splitlines()]
# Their pictures are left out on both sides: a placeholder is then a token like any other.
SHORT = sorted(RUNS, key=lambda run: len(run["prompt_ids"]) + 40 * len(run["output_ids"]))


@pytest.fixture(scope="module")
def tiny():
    """(our model under hf, transformers' in bf16) of the embedded checkpoint."""
    ours = qwenref.from_pretrained("tiny", numerics="hf")
    return ours, transformers.AutoModelForCausalLM.from_pretrained(
        ours.path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


def answers(logits):
    """(ids, margin in units of the last place of bf16) of logits [T, vocab] that are in bf16."""
    best = np.sort(logits, axis=-1)[:, -2:]
    return logits.argmax(axis=-1), (best[:, 1] - best[:, 0]) / 2.0 ** (np.floor(np.log2(np.abs(best[:, 1]))) - 7)


def compare(found, expected):
    """Number of answers that differ although transformers' margin is above two units, and of those compared."""
    ids, margins = answers(expected)
    clear = margins > 2
    return int((found.argmax(axis=-1) != ids)[clear].sum()), int(clear.sum())


def test_answers_along_the_examples_are_those_of_transformers(tiny):
    ours, theirs = tiny
    off = compared = 0
    for run in SHORT[:12]:
        ids, keep = run["prompt_ids"] + run["output_ids"], len(run["output_ids"]) + 1
        with torch.inference_mode():
            expected = array(theirs(torch.tensor([ids]), use_cache=False, logits_to_keep=keep).logits)[0]
        found = ours([ids], logits_to_keep=keep, mm_token_type_ids=np.zeros((1, len(ids)), np.int64)).logits[0]
        counts = compare(found, expected)
        off, compared = off + counts[0], compared + counts[1]
    assert off == 0 and compared > 30


@pytest.mark.parametrize("runs", [SHORT[:2], pytest.param(SHORT, marks=pytest.mark.slow)], ids=["few", "all"])
def test_greedy_text_is_that_of_transformers(tiny, runs):
    ours, theirs = tiny
    off = compared = 0
    for run in runs:
        ids, cache, witness_cache, rows = run["prompt_ids"], qwenref.Cache(ours), None, []
        for _ in run["output_ids"]:
            with torch.inference_mode():
                out = theirs(torch.tensor([ids]), cache=witness_cache, use_cache=True, logits_to_keep=1)
            witness_cache = out.cache
            all_text = np.zeros((1, len(ids)), np.int64)
            found = ours([ids], cache=cache, logits_to_keep=1, mm_token_type_ids=all_text).logits[0, 0]
            rows.append((found, array(out.logits)[0, 0]))
            ids = [int(rows[-1][1].argmax())]
        counts = compare(*map(np.stack, zip(*rows, strict=True)))
        off, compared = off + counts[0], compared + counts[1]
    assert off == 0 and compared >= 2 * len(runs)
