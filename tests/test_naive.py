"""The float64 definition against facts it does not contain: known values, other forms of the same rule, torch."""

import ml_dtypes
import numpy as np
import pytest

from qwenref import naive
from qwenref.errors import DTypeError, InputError, ShapeError

# float64 rounds by 2^-53 = 1.1e-16. The longest chains below are sums of some hundred terms of size one, repeated over
# some hundred tokens whose errors the decays and the delta rule (a contraction for |k| <= 1) do not amplify:
# 128 * 130 * 2^-53 = 1.9e-12 if all errors agreed in sign, about its square root over independent ones.
CLOSE = 1e-12


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def delta_inputs(B=2, T=130, G=2, H=6, K=16, V=8, seed=0, g=None):
    """Keys of length one, decays from nearly none to nearly total, differing by head and token."""
    rng = np.random.default_rng(seed)
    q, k = (naive.l2_norm(rng.standard_normal((B, T, G, K))) for _ in range(2))
    v = rng.standard_normal((B, T, H, V))
    g = -np.exp(rng.uniform(-6, 2, (B, T, H))) if g is None else np.full((B, T, H), float(g))
    return q, k, v, g, rng.uniform(0, 1, (B, T, H)), rng.standard_normal((B, H, K, V))


# ---------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("a, expected", [(1e-4, 0.0662266), (1e-3, 0.0880451), (1e-2, 0.0883849)])
def test_l2_norm_has_its_eps_on_the_sum_inside_the_root(a, expected):
    assert naive.l2_norm(np.full(128, a)) == pytest.approx(np.full(128, expected), abs=5e-8)


def test_rms_norm_adds_one_to_a_small_weight_after_widening():
    x, w = normal(3, 64), np.full(64, 0.0012, ml_dtypes.bfloat16)
    plain = naive.rms_norm(x, np.zeros(64))
    assert naive.rms_norm(x, w) == pytest.approx(plain * (1 + float(w[0])), rel=1e-15)
    assert 1.0011 < float(w[0]) + 1 < 1.0013 and ml_dtypes.bfloat16(1.0012) == 1  # what adding it in bfloat16 would do
    assert plain == pytest.approx(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), rel=1e-15)


def test_gated_norm_normalises_before_it_gates():
    x, z, w = normal(5, 32), normal(5, 32, seed=1), normal(32, seed=2)
    assert np.all(naive.rms_norm_gated(x, np.zeros_like(x), w) == 0)
    large = naive.rms_norm_gated(x, np.full_like(x, 50.0), np.ones(32))  # silu(50) = 50 to the last bit
    assert large == pytest.approx(50 * naive.rms_norm(x, np.zeros(32)), rel=1e-14)
    after = naive.rms_norm(x * naive.silu(z), w - 1)
    assert not np.allclose(naive.rms_norm_gated(x, z, w), after, rtol=0.01)


# ---------------------------------------------------------------------------------------------- rotary positions


def test_frequencies_count_over_the_rotary_width_not_the_head():
    f = naive.rope_frequencies(np.arange(32), 1e7, 64)
    assert f[0] == 1 and f[1] == pytest.approx(0.604296, abs=5e-7)
    assert f == pytest.approx([10.0 ** (-7 * i / 32) for i in range(32)], rel=1e-14)


def rotate(x, position, F=32):
    """x[D] at one position"""
    f = naive.rope_frequencies(np.arange(F), 1e7, 2 * F)
    cos, sin = naive.rope_table([[[position]]], np.zeros(F, int), f)
    return naive.rope(x[None, None, None], cos, sin)[0, 0, 0]


@pytest.mark.parametrize("position", [0, 1, 700, 2355])
@pytest.mark.parametrize("i", [0, 1, 31, 32, 63, 64, 255])
def test_rotation_turns_pairs_i_and_i_plus_32_and_passes_the_rest(position, i):
    e = np.eye(256)[i]
    y = rotate(e, position)
    if i >= 64:
        assert np.array_equal(y, e)
        return
    angle = position * 1e7 ** (-2 * (i % 32) / 64)
    expected = np.zeros(256)
    expected[i % 32], expected[i % 32 + 32] = (
        (np.cos(angle), np.sin(angle)) if i < 32 else (-np.sin(angle), np.cos(angle))
    )
    assert y == pytest.approx(expected, abs=CLOSE)


def test_rotated_products_depend_only_on_the_distance():
    q, k = normal(256), normal(256, seed=1)
    near, far = rotate(q, 700) @ rotate(k, 693), rotate(q, 2355) @ rotate(k, 2348)
    # 64 products of size one, each angle off by at most 2355 * 2^-53
    assert near == pytest.approx(far, abs=64 * 4 * 2355 * 2**-53)
    assert abs(near - rotate(q, 700) @ rotate(k, 694)) > 1e-3


def test_every_frequency_reads_the_axis_it_is_given():
    cos, sin = naive.rope_table([[[3]], [[5]], [[7]]], [0, 1, 2, 0], [1.0, 0.5, 0.25, 0.125])
    assert np.array_equal(cos[0, 0], np.cos([3.0, 2.5, 1.75, 0.375])) and np.array_equal(sin.shape, (1, 1, 4))


def test_the_rope_table_keeps_float64_at_large_positions():
    cos, _ = naive.rope_table([[262143]], [0], [0.3])
    assert cos[0, 0] == np.cos(262143 * 0.3) and cos.dtype == np.float64
    assert abs(cos[0, 0] - np.cos(np.float32(262143 * np.float32(0.3)))) > 1e-4


# ---------------------------------------------------------------------------------------------- attention


def test_a_query_that_sees_nothing_gives_zeros_and_no_key_outside_its_range_is_touched():
    q, k, v = normal(1, 3, 4, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8)
    begin, end = np.array([[0, 2, 1]]), np.array([[0, 2, 3]])
    k[:, :, [0, 3, 4]] = v[:, :, [0, 3, 4]] = np.nan  # an unused part of a cache may hold anything
    o, p = naive.attention(q, k, v, begin, end, 0.3, p=True)
    assert np.all(o[0, :2] == 0) and np.all(p[0, :, :2] == 0)
    assert np.all(np.isfinite(o)) and p[0, :, 2].sum(-1) == pytest.approx(np.ones(4), abs=1e-15)
    assert np.all(p[0, :, 2, [0, 3, 4]] == 0)


def test_zero_queries_attend_evenly():
    v = normal(2, 1, 6, 8)
    end = np.array([[3, 6], [1, 2]])
    o = naive.attention(np.zeros((2, 2, 4, 8)), normal(2, 1, 6, 8, seed=1), v, np.zeros((2, 2), int), end, 1.0)
    for b, t in np.ndindex(2, 2):
        assert o[b, t] == pytest.approx(np.tile(v[b, 0, : end[b, t]].mean(0), (4, 1)), abs=1e-15)


# ---------------------------------------------------------------------------------------------- convolution


def test_an_impulse_meets_the_last_tap_first_in_prefill_and_in_decode():
    w = np.array([[[0.1, 0.2, 0.3, 0.4]]])
    x = np.zeros((1, 6, 1))
    x[0, 1] = 1
    expected = [0, 0.4, 0.3, 0.2, 0.1, 0]
    assert naive.causal_conv1d(x, w)[0, :, 0].tolist() == expected
    window, steps = None, []
    for t in range(6):
        y, window = naive.causal_conv1d(x[:, t : t + 1], w, window, next=True)
        steps.append(y.item())
    assert steps == expected


@pytest.mark.parametrize("T", [1, 2, 3])
def test_the_window_of_a_short_prompt_is_zero_on_the_left(T):
    x = normal(1, T, 2)
    _, window = naive.causal_conv1d(x, normal(2, 1, 4), next=True)
    assert np.array_equal(window[0], np.concatenate([np.zeros((2, 3 - T)), x[0].T], 1))


# ---------------------------------------------------------------------------------------------- delta rule


def test_value_heads_read_key_heads_in_groups():
    q, k = np.zeros((1, 3, 16, 8)), np.zeros((1, 3, 16, 8))
    q[:, :, 0] = k[:, :, 0] = 1
    constant = np.ones((1, 3, 48))
    o = naive.gated_delta_rule(q, k, np.ones((1, 3, 48, 8)), -0.1 * constant, 0.5 * constant)
    assert np.flatnonzero(np.abs(o).sum((0, 1, 3))).tolist() == [0, 1, 2]


def test_the_recurrence_by_hand():
    """K = V = 1: S1 = 2*.5 = 1, o = 3;  then decayed to .5, u = (4 - 2*.5)*.25 = .75, S = .5 + 2*.75 = 2, o = 10*2"""
    one = np.ones((1, 2, 1, 1))
    q, k, v = one * [[[[3]], [[10]]]], one * [[[[1]], [[2]]]], one * [[[[2]], [[4]]]]
    g, beta = np.log([[[0.25], [0.5]]]), np.array([[[0.5], [0.25]]])
    o, S = naive.gated_delta_rule(q, k, v, g, beta, final=True)
    assert o.ravel() == pytest.approx([3, 20], abs=1e-14) and S.item() == pytest.approx(2, abs=1e-15)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("g", [None, 0.0, -1e-9, -50.0])
@pytest.mark.parametrize("start", [False, True])
def test_A9_chunks_equal_the_recurrence(T, g, start):
    *inputs, state = delta_inputs(T=T, g=g)
    state = state if start else None
    o, S = naive.gated_delta_rule(*inputs, state, scale=0.25, final=True)
    chunked, final = naive.gated_delta_rule_chunked(*inputs, state, scale=0.25, final=True)
    assert np.all(np.isfinite(chunked))
    np.testing.assert_allclose(chunked, o, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(final, S, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("g", [0.0, -0.01, -50.0])
def test_A8_repeated_keys_neither_explode_nor_part(g, beta):
    """One key over and over with beta 1 makes I + A as badly conditioned as it gets."""
    q, k, v, g, _, state = delta_inputs(g=g)
    k[:] = k[:, :1]
    b = np.full(g.shape, beta)
    o, S = naive.gated_delta_rule(q, k, v, g, b, state, final=True)
    chunked, final = naive.gated_delta_rule_chunked(q, k, v, g, b, state, final=True)
    np.testing.assert_allclose(chunked, o, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(final, S, rtol=0, atol=CLOSE)
    read = naive.token_map(q, k, g, b) @ np.moveaxis(v, 1, 2)
    np.testing.assert_allclose(np.moveaxis(read, 2, 1), naive.gated_delta_rule(q, k, v, g, b), rtol=0, atol=CLOSE)
    if beta == 1:  # the last write replaced what the key answered before: k^T S = v
        answer = np.einsum("bgk,bhkv->bhv", k[:, -1, :1], S[:, :3])
        assert answer == pytest.approx(v[:, -1, :3], abs=2e-6)  # |k|^2 is 1 - 1e-6 / sum: l2_norm's eps


@pytest.mark.parametrize("g", [None, 0.0, -50.0])
def test_the_token_map_times_the_values_is_the_output(g):
    q, k, v, g, beta, _ = delta_inputs(g=g)
    M = naive.token_map(q, k, g, beta, scale=0.25)
    o = naive.gated_delta_rule(q, k, v, g, beta, scale=0.25)
    np.testing.assert_allclose(M @ np.moveaxis(v, 1, 2), np.moveaxis(o, 1, 2), rtol=0, atol=CLOSE)
    assert np.all(np.triu(M, 1) == 0)


def test_a_total_decay_forgets_and_none_keeps():
    q, k, v, _, _, state = delta_inputs(T=1)
    zero = np.zeros((2, 1, 6))
    assert np.array_equal(naive.gated_delta_rule(q, k, v, zero, zero, state, final=True)[1], state)
    assert np.all(naive.gated_delta_rule(q, k, v, zero - np.inf, zero, state, final=True)[1] == 0)


@pytest.mark.parametrize("split", [1, 2, 63, 64, 129])
def test_a_split_call_equals_one_call(split):
    q, k, v, g, beta, state = delta_inputs()
    whole, S = naive.gated_delta_rule(q, k, v, g, beta, state, final=True)
    parts, at = [], state
    for part in (slice(0, split), slice(split, None)):
        o, at = naive.gated_delta_rule(*(a[:, part] for a in (q, k, v, g, beta)), at, final=True)
        parts.append(o)
    assert np.array_equal(np.concatenate(parts, 1), whole) and np.array_equal(at, S)


# ---------------------------------------------------------------------------------------------- steps


def test_skipped_tokens_leave_no_trace_wherever_they_stand():
    step = np.array([[0, 1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
    x, w, window = normal(2, 7, 3), normal(3, 1, 4), normal(2, 3, 3)
    x[step == 0] = np.nan
    y, after = naive.causal_conv1d(x, w, window, step, next=True)
    q, k, v, g, beta, state = delta_inputs(T=7)
    for a in (q, k, v, g, beta):
        a[step == 0] = np.nan
    o, S = naive.gated_delta_rule(q, k, v, g, beta, state, step, final=True)
    for b in range(2):
        row, real = slice(b, b + 1), step[b] == 1
        alone, window_alone = naive.causal_conv1d(x[row, real], w, window[row], next=True)
        assert np.array_equal(y[row, real], alone) and np.array_equal(after[row], window_alone)
        alone, S_alone = naive.gated_delta_rule(*(a[row, real] for a in (q, k, v, g, beta)), state[row], final=True)
        assert np.array_equal(o[row, real], alone) and np.array_equal(S[row], S_alone)
    assert np.all(y[step == 0] == 0) and np.all(o[step == 0] == 0)


def test_a_restart_forgets_even_a_spoilt_past():
    step = np.array([[1, 1, 2, 1]])
    x, w = normal(1, 4, 3), normal(3, 1, 4)
    y, after = naive.causal_conv1d(x, w, np.full((1, 3, 3), np.nan), step, next=True)
    alone, window = naive.causal_conv1d(x[:, 2:], w, next=True)
    assert np.array_equal(y[:, 2:], alone) and np.array_equal(after, window)
    *inputs, state = delta_inputs(B=1, T=4)
    o, S = naive.gated_delta_rule(*inputs, np.full_like(state, np.nan), step, final=True)
    alone, final = naive.gated_delta_rule(*(a[:, 2:] for a in inputs), final=True)
    assert np.array_equal(o[:, 2:], alone) and np.array_equal(S, final)


# ---------------------------------------------------------------------------------------------- the contract of an op


def test_optional_outputs_come_when_asked_for_and_fill_a_given_array():
    *inputs, state = delta_inputs(T=5)
    before = state.copy()
    o, expected = naive.gated_delta_rule(*inputs, state, final=True)
    buffer = np.empty(state.shape, np.float32)
    again, returned = naive.gated_delta_rule(*inputs, state, final=buffer)
    assert returned is buffer and np.array_equal(buffer, expected.astype(np.float32)) and np.array_equal(o, again)
    for nothing in (False, None):
        assert np.array_equal(naive.gated_delta_rule(*inputs, state, final=nothing), o)
    with pytest.raises(ShapeError, match="gated_delta_rule: final: the array given does not fit"):
        naive.gated_delta_rule(*inputs, state, final=buffer[:1])
    assert np.array_equal(state, before)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_every_float_dtype_is_widened_exactly(dtype):
    x, w = normal(3, 8).astype(dtype), normal(5, 8, seed=1).astype(dtype)
    y = naive.linear(x, w)
    assert y.dtype == np.float64 and np.array_equal(y, x.astype(float) @ w.astype(float).T)


def test_a_matrix_is_widened_block_by_block(monkeypatch):
    x, w, b = normal(3, 8), normal(13, 8, seed=1), normal(13)
    monkeypatch.setattr(naive, "_WIDENED_AT_ONCE", 32)  # four rows at a time
    assert naive.linear(x, w, b) == pytest.approx(x @ w.T + b, abs=8 * 2**-50)


def test_mistakes_name_op_parameter_found_and_expected():
    with pytest.raises(ShapeError, match=r"rms_norm: w has D=4, expected 8\n    found    \[4\]\n    expected \[D\]"):
        naive.rms_norm(np.ones((2, 8)), np.ones(4))
    with pytest.raises(ShapeError, match=r"causal_conv1d: window has W-1=4, expected 3"):
        naive.causal_conv1d(np.ones((1, 2, 3)), np.ones((3, 1, 4)), np.ones((1, 3, 4)))
    with pytest.raises(ShapeError, match=r"add: b has \*=\(3,\), expected \(2, 3\)"):
        naive.add(np.ones((2, 3)), np.ones(3))
    with pytest.raises(ShapeError, match="gated_delta_rule: 3 heads cannot share 2 evenly"):
        naive.gated_delta_rule(*delta_inputs(G=2, H=3, T=1)[:5])
    with pytest.raises(DTypeError, match="embedding: ids has the wrong dtype\n    found    float64"):
        naive.embedding([0.0], np.ones((4, 2)))
    with pytest.raises(InputError, match=r"embedding: ids\[0, 1\] is 4; w has 4 rows"):
        naive.embedding([[0, 4]], np.ones((4, 2)))
    with pytest.raises(InputError, match="-1"):
        naive.embedding(-1, np.ones((4, 2)))
    with pytest.raises(InputError, match="attention_mix: token 1 of row 0 attends outside the keys"):
        naive.attention_mix(np.ones((1, 1, 2, 3)), np.ones((1, 1, 3, 2)), [[0, 1]], [[3, 4]])
    with pytest.raises(InputError, match="causal_conv1d: step of token 0 of row 0 is not a step code\n    found    3"):
        naive.causal_conv1d(np.ones((1, 1, 3)), np.ones((3, 1, 4)), step=[[3]])
    with pytest.raises(TypeError, match="'w'"):
        naive.rms_norm(np.ones(3))


# ---------------------------------------------------------------------------------------------- torch in float64


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="the torch witness is not installed")


def causal(B, T):
    """begin and end of plain causal attention"""
    return np.zeros((B, T), int), np.tile(1 + np.arange(T), (B, 1))


WITNESSED = {  # op -> (arguments, torch's form of it)
    "embedding": ((np.array([[1, 0, 4]]), normal(5, 3)), lambda F, ids, w: F.embedding(ids, w)),
    "linear": ((normal(2, 3, 8), normal(5, 8), normal(5)), lambda F, x, w, b: F.linear(x, w, b)),
    "rms_norm": ((normal(2, 3, 8), normal(8)), lambda F, x, w: F.rms_norm(x, (8,), 1 + w, 1e-6)),
    "rms_norm_gated": (
        (normal(3, 8), normal(3, 8, seed=1), normal(8)),
        lambda F, x, z, w: F.rms_norm(x, (8,), w, 1e-6) * F.silu(z),
    ),
    "silu": ((10 * normal(100),), lambda F, x: F.silu(x)),
    "sigmoid": ((10 * normal(100),), lambda F, x: x.sigmoid()),
    "exp": ((10 * normal(100),), lambda F, x: x.exp()),
    "softplus": ((10 * normal(100),), lambda F, x: F.softplus(x, threshold=700)),
    "softmax": ((10 * normal(4, 33),), lambda F, x: x.softmax(-1)),
    "log_softmax": ((10 * normal(4, 33),), lambda F, x: x.log_softmax(-1)),
    "argmax": ((np.array([[1.0, 3, 3], [2, 2, 2]]),), lambda F, x: (x == x.amax(-1, True)).double().argmax(-1)),
    "causal_conv1d": (
        (normal(2, 9, 3), normal(3, 1, 4)),
        lambda F, x, w: F.conv1d(F.pad(x.mT, (3, 0)), w, groups=3).mT,
    ),
    "attention": (
        (normal(2, 5, 6, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8, seed=1), *causal(2, 5), 0.3),
        lambda F, q, k, v, begin, end, scale: F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2),
    ),
}


@pytest.mark.parametrize("name", WITNESSED)
def test_torch_in_float64_agrees(torch, name):
    arguments, witness = WITNESSED[name]
    tensors = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    expected = witness(torch.nn.functional, *tensors).numpy()
    y = getattr(naive, name)(*arguments)
    assert y.dtype == (np.int64 if name == "argmax" else np.float64)
    # at most 40 roundings of terms no larger than the operands' sum of magnitudes, relative to results of size 1 to 30
    np.testing.assert_allclose(y, expected, rtol=64 * 2**-53, atol=64 * 2**-53)
