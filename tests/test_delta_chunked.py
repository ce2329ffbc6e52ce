"""The chunked form of the delta rule: against the recurrence, against transformers' own, and what may not matter."""

import numpy as np
import pytest
from op_bounds import SECOND_ORDER, U, bound_gated_delta_rule_chunked, lanes, normal, unit

import qwenref
from qwenref import naive, ops

CHUNK = 64


def inputs(T, B=2, G=2, H=4, K=32, V=24, decay=1.0, seed=0):
    return {
        "q": unit(B, T, G, K, seed=seed), "k": unit(B, T, G, K, seed=seed + 1), "v": normal(B, T, H, V, seed=seed + 2),
        "g": (-decay * np.exp(normal(B, T, H, seed=seed + 3))).astype(np.float32),
        "beta": (1 / (1 + np.exp(normal(B, T, H, seed=seed + 4)))).astype(np.float32),
        "state": normal(B, H, K, V, seed=seed + 5), "scale": K**-0.5,
    }  # fmt: skip


def repeated_keys(call):
    return call | {"k": np.repeat(call["k"][:, :1], call["k"].shape[1], 1)}


def one_hard_reset(call):
    """A decay of e^-50 in every second chunk, beside tokens that forget almost nothing."""
    g = np.full_like(call["g"], -1e-4)
    g[:, 10 :: 2 * CHUNK] = -50
    return call | {"g": g}


HARD = {
    "plain": inputs(200),
    "no decay": inputs(200, decay=0),
    "hardly any decay": inputs(200, decay=1e-6),
    "g = -50": inputs(200) | {"g": np.full((2, 200, 4), -50, np.float32)},
    "g = -50 now and then": one_hard_reset(inputs(200)),
    "g = -10000": inputs(130) | {"g": np.full((2, 130, 4), -1e4, np.float32)},
    "one key, beta near 1, no decay": repeated_keys(inputs(200, decay=0))
    | {"beta": np.full((2, 200, 4), 1 - 2.0**-24, np.float32)},
    "one key, beta 1, some decay": repeated_keys(inputs(200, decay=0.01)) | {"beta": np.ones((2, 200, 4), np.float32)},
    "a large state": inputs(130) | {"state": normal(2, 4, 32, 24, scale=1e4)},
}


# What a relative error of the decays makes of a result, by order of magnitude: running sums of g reach 50 within the 64
# tokens of a chunk (beyond, their exponential is nothing), so that a difference of two is off by up to 65 U 50.
MOST = 65 * U * 50


@pytest.mark.parametrize("case", HARD)
def test_it_is_the_recurrence(case):
    """Several chunks, the last one short, a state to begin with. The bound of the arithmetic holds for sure but takes
    every sum at its worst; beside it the error is held against the largest value."""
    call = HARD[case]
    found = ops.gated_delta_rule_chunked(**call, final=True)
    expected = naive.gated_delta_rule(**call, final=True)
    allowed = bound_gated_delta_rule_chunked(*expected, **call)
    for got, want, most in zip(found, expected, allowed, strict=True):
        assert np.all(abs(got - want) <= SECOND_ORDER * most)
        assert np.max(abs(got - want)) <= MOST * np.max(abs(want))


@pytest.mark.parametrize("wrong", ["outputs", "updates"])
def test_a_mask_without_decay_would_show(wrong):
    """The mistakes there are: the output's mask, or the one between updates, plainly causal. With decay near 1 neither
    is seen, so here it is not."""
    call = inputs(CHUNK, B=1, G=1, H=1)
    q, k, v, g, beta = (call[n][0, :, 0].astype(np.float64) for n in ("q", "k", "v", "g", "beta"))
    S = call["state"][0, 0].astype(np.float64)
    kept, causal = np.exp(np.cumsum(g))[:, None], np.tri(CHUNK)
    right = np.exp(np.where(causal > 0, np.cumsum(g)[:, None] - np.cumsum(g), -np.inf))
    o = {}
    for mistake in ("none", wrong):
        of_outputs, of_updates = (causal if mistake == place else right for place in ("outputs", "updates"))
        A = np.tril(beta[:, None] * (k @ k.T) * of_updates, -1)
        u = np.linalg.solve(np.eye(CHUNK) + A, beta[:, None] * (v - kept * (k @ S)))
        o[mistake] = (kept * (q @ S) + (q @ k.T * of_outputs) @ u) * call["scale"]
    found = ops.gated_delta_rule_chunked(**call)[0, :, 0]
    most = MOST * np.max(abs(found))
    assert np.max(abs(found - o["none"])) <= most < np.max(abs(found - o[wrong])) / 50


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_it_is_what_transformers_computes(T, state):
    """The same products with sums in other orders: each side within its bound, a sum over K in any order being K
    roundings in place of those of lanes."""
    torch = pytest.importorskip("torch", reason="the witness needs PyTorch (extra 'test')")
    witness = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="the witness is transformers")
    call = inputs(T, decay=0.3, seed=T)
    if not state:
        del call["state"]
    arrays = {n: torch.tensor(call[n]) for n in ("q", "k", "v", "g", "beta")}
    with torch.inference_mode():
        theirs = witness.torch_chunk_gated_delta_rule(
            *arrays.values(), CHUNK, torch.tensor(call["state"]) if state else None, output_final_state=True
        )
    ours = ops.gated_delta_rule_chunked(**call, final=True)
    expected = naive.gated_delta_rule(**call, final=True)
    allowed = bound_gated_delta_rule_chunked(*expected, **call)
    any_order = (32 + 2) / (lanes(32) + 2)
    for got, other, most in zip(ours, theirs, allowed, strict=True):
        assert np.all(abs(got - other.numpy()) <= SECOND_ORDER * (1 + any_order) * most)


def test_it_rounds_elsewhere_than_the_recurrence():
    call = inputs(130)
    chunked, recurrent = ops.gated_delta_rule_chunked(**call), ops.gated_delta_rule(**call)
    assert chunked.tobytes() != recurrent.tobytes()
    np.testing.assert_allclose(chunked, recurrent, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------- the same bits


def part(call, tokens, state):
    return {n: a[:, tokens] for n, a in call.items() if n not in ("state", "scale")} | {
        "state": state, "scale": call["scale"],
    }  # fmt: skip


def test_calls_of_whole_chunks_are_one_call():
    call = inputs(200)
    whole, final = ops.gated_delta_rule_chunked(**call, final=True)
    pieces, state = [], call["state"]
    for tokens in (slice(0, 64), slice(64, 192), slice(192, 200)):
        o, state = ops.gated_delta_rule_chunked(**part(call, tokens, state), final=True)
        pieces.append(o)
    assert np.concatenate(pieces, 1).tobytes() == whole.tobytes() and state.tobytes() == final.tobytes()


def test_skipped_tokens_are_not_there():
    call, step = inputs(200), np.random.default_rng(1).choice([0, 1, 1], 200)
    padded, final = ops.gated_delta_rule_chunked(**call, step=np.tile(step, (2, 1)), final=True)
    alone, last = ops.gated_delta_rule_chunked(**part(call, step == 1, call["state"]), final=True)
    assert padded[:, step == 1].tobytes() == alone.tobytes() and final.tobytes() == last.tobytes()
    assert not padded[:, step == 0].any()


def test_a_restart_begins_a_chunk_from_nothing():
    call, step = inputs(200), np.ones((2, 200), np.int64)
    step[:, 70] = 2
    packed, final = ops.gated_delta_rule_chunked(**call, step=step, final=True)
    first = ops.gated_delta_rule_chunked(**part(call, slice(0, 70), call["state"]))
    second, last = ops.gated_delta_rule_chunked(**part(call, slice(70, 200), None), final=True)
    assert packed.tobytes() == np.concatenate([first, second], 1).tobytes() and final.tobytes() == last.tobytes()


def test_rows_threads_and_levels_do_not_matter():
    call, threads, level = inputs(130), qwenref.get_num_threads(), qwenref._C.cpu_level()
    expected = [a.tobytes() for a in ops.gated_delta_rule_chunked(**call, final=True)]
    try:
        for other in ("scalar", "avx2", "avx512", "avx512bf16"):
            try:
                qwenref._C.set_cpu_level(other)
            except qwenref.CapabilityMissing:
                continue
            for n in (1, 2, 5):
                qwenref.set_num_threads(n)
                assert [a.tobytes() for a in ops.gated_delta_rule_chunked(**call, final=True)] == expected, other
    finally:
        qwenref.set_num_threads(threads)
        qwenref._C.set_cpu_level(level)
    alone = {n: a[1:] if isinstance(a, np.ndarray) else a for n, a in call.items()}
    assert ops.gated_delta_rule_chunked(**alone).tobytes() == ops.gated_delta_rule_chunked(**call)[1:].tobytes()
