"""What a planted fault changes first, value by value, and the formula it computes there."""

import ml_dtypes
import numpy as np
import pytest
from text_configs import text_config

import qwenref
from qwenref import naive
from qwenref.compare.faults import LIBRARY, MODEL_KINDS, find
from qwenref.compare.faults_weights import fp8_blocks, integers, q4_0, q8_0

MODEL = text_config("llff", heads=(4, 2), delta=(2, 4), head_dim=32, hidden_size=64, max_position_embeddings=8192)
T = 70
IDS = np.random.default_rng(3).integers(0, 200, T)

# Values of a layer in the order they are made.
DELTA = (
    "input_layernorm", "linear_attn.mixed_qkv", "linear_attn.z", "linear_attn.b", "linear_attn.a",
    "linear_attn.conv_out", "linear_attn.q", "linear_attn.k", "linear_attn.v", "linear_attn.beta", "linear_attn.g",
    "linear_attn.read", "linear_attn.normed", "resid_mid", "post_attention_layernorm", "mlp.hidden", "mlp",
    "resid_post",
)  # fmt: skip
ATTENTION = (
    "input_layernorm", "self_attn.q", "self_attn.gate", "self_attn.k", "self_attn.v", "self_attn.q_rot",
    "self_attn.k_rot", "self_attn.scores", "self_attn.attn_weights", "self_attn.context", "self_attn.gated",
    "resid_mid", "resid_post",
)  # fmt: skip
VALUES = [f"layers.{i}.{name}" for i, names in enumerate((DELTA, DELTA, ATTENTION, ATTENTION)) for name in names]

FIRST = {  # fault -> the first value of VALUES it changes in a prompt; None: none in a prompt
    "rope-q+1": "layers.2.self_attn.q_rot",
    "rope-q+1/decode": None,
    "rope-q-1": "layers.2.self_attn.q_rot",
    "rope-qk+1": "layers.2.self_attn.q_rot",
    "rope-theta-1e4": "layers.2.self_attn.q_rot",
    "rope-theta-1e5": "layers.2.self_attn.q_rot",
    "rope-theta-1e6": "layers.2.self_attn.q_rot",
    "rotary-whole-head": "layers.2.self_attn.q_rot",
    "rope-interleaved": "layers.2.self_attn.q_rot",
    "rope-sections": None,
    "norm-w": "layers.0.input_layernorm",
    "norm-2+w": "layers.0.input_layernorm",
    "norm-1+w-bf16": "layers.0.input_layernorm",
    "loaded-in-bf16": "layers.0.input_layernorm",
    "rms-eps-1e-5": "layers.0.input_layernorm",
    "q-gate-flat": "layers.2.self_attn.q",
    "gate-off": "layers.2.self_attn.gated",
    "gate-silu": "layers.2.self_attn.gated",
    "gqa-tile": "layers.2.self_attn.scores",
    "mask-sees-next": "layers.2.self_attn.scores",
    "mask-misses-itself": "layers.2.self_attn.scores",
    "window-64": "layers.2.self_attn.scores",
    "window-128": None,
    "window-4096": None,
    "head-dim-scale": "layers.2.self_attn.scores",
    "delta-tile": "layers.0.linear_attn.read",
    "delta-q-unscaled": "layers.0.linear_attn.read",
    "l2norm-off": "layers.0.linear_attn.q",
    "l2norm-eps-1e-5": "layers.0.linear_attn.q",
    "l2norm-sum": "layers.0.linear_attn.q",
    "l2norm-max": "layers.0.linear_attn.q",
    "l2norm-mean": "layers.0.linear_attn.q",
    "dt-bias-off": "layers.0.linear_attn.g",
    "A-log-sign": "layers.0.linear_attn.g",
    "beta-raw": "layers.0.linear_attn.beta",
    "conv-no-silu": "layers.0.linear_attn.conv_out",
    "conv-reversed": "layers.0.linear_attn.conv_out",
    "conv-late": "layers.0.linear_attn.conv_out",
    "gate-before-norm": "layers.0.linear_attn.normed",
    "norm-gate-sigmoid": "layers.0.linear_attn.normed",
    "logits-bf16": None,
    "conv-zero-handoff": None,
    "conv-no-history": None,
    "state-reset-64": "layers.0.linear_attn.read",
    "state-bf16": None,
    "state-fp16": None,
    "kv-fp8": None,
    "kv-fp16": "layers.2.self_attn.scores",
    "kv-bf16": "layers.2.self_attn.scores",
    "state-stale-half": None,
    "state-stale-64": None,
    "state-stale-128": None,
    "state-padded": "layers.0.linear_attn.conv_out",
    "head-tied": None,
    "layers-swapped@2,3": "layers.2.input_layernorm",
    "mlp-borrowed@1,2": "layers.1.mlp.hidden",
    "shard-zero@1": "layers.1.mlp.hidden",
    "half-zero@1": "layers.1.mlp",
    "shards-swapped@1": "layers.1.mlp",
    "transposed@1": "layers.1.resid_mid",
    "head-early": "layers.3.resid_post",
    "keys-small": "layers.0.linear_attn.conv_out",
    "int8-g32": "layers.0.linear_attn.mixed_qkv",
    "int8-g128": "layers.2.resid_mid",  # no matrix before o_proj has 128 columns
    "int4-g32": "layers.0.linear_attn.mixed_qkv",
    "int4-g128": "layers.2.resid_mid",
    "q8_0": "layers.0.input_layernorm",  # of the embedding
    "q4_0": "layers.0.input_layernorm",
    "fp8-weights": "layers.0.linear_attn.mixed_qkv",
    "head-bf16": None,
    "delta-as-torch": "layers.0.linear_attn.conv_out",
    "delta-as-fla": "layers.0.linear_attn.conv_out",
}
OF_OTHER_MODELS = {"rope-theta-1e7", "head-untied"}  # what this one has already


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(MODEL, seed=5, dtype="float32")


def captured(model, names=VALUES, ids=IDS):
    with qwenref.capture(model, *names) as values:
        model([ids])
    return {name: np.array(values[name]) for name in names}


@pytest.fixture(scope="module")
def sound(model):
    return captured(model)


def test_every_fault_of_a_model_is_in_the_table():
    named = {name.partition("@")[0] for name in FIRST} | OF_OTHER_MODELS
    assert named == {name for name, fault in LIBRARY.items() if fault.kind in MODEL_KINDS}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_value_a_fault_changes(name, model, sound):
    found = captured(find(name).open(model))
    assert next((v for v in VALUES if found[v].tobytes() != sound[v].tobytes()), None) == FIRST[name]


def value(model, fault, name, ids=IDS):
    return captured(find(fault).open(model), [name], ids)[name].astype(np.float64)


def close(found, expected, scale=2e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=scale * np.abs(expected).max())


# ---- attention -----------------------------------------------------------------------------------------------------


def rotated(x, positions, width=8, theta=1e7, channels=32):
    f = naive.rope_frequencies(np.arange(width // 2), theta, width)
    cos, sin = naive.rope_table(np.array([positions]), np.zeros(width // 2, np.int64), f)
    return naive.rope(x.astype(np.float64), cos[None], sin[None])


def test_rotations_are_those_of_other_positions_tables_and_pairs(model, sound):
    q, k = (sound[f"layers.2.self_attn.{name}"] for name in "qk")
    at, here = "layers.2.self_attn.q_rot", np.arange(T)
    close(value(model, "rope-q+1", at), rotated(q, here + 1))
    close(value(model, "rope-q-1", at), rotated(q, here - 1))
    close(value(model, "rope-q+1", "layers.2.self_attn.k_rot"), rotated(k, here))
    close(value(model, "rope-qk+1", "layers.2.self_attn.k_rot"), rotated(k, here + 1))
    close(value(model, "rope-theta-1e4", at), rotated(q, here, theta=1e4))
    close(value(model, "rotary-whole-head", at), rotated(q, here, width=32))
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 32)]
    close(value(model, "rope-interleaved", at)[..., order], rotated(q[..., order], here))


def test_queries_and_gates_split_flat(model, sound):
    attn = model.model.layers[2].self_attn
    both = naive.linear(sound["layers.2.input_layernorm"].astype(np.float64), np.asarray(attn.q_proj.weight))
    q, gate = np.split(both.reshape(1, T, 8, 32), 2, axis=2)
    close(value(model, "q-gate-flat", "layers.2.self_attn.gate"), gate)
    close(value(model, "q-gate-flat", "layers.2.self_attn.q"), naive.rms_norm(q, np.asarray(attn.q_norm.weight), 1e-6))


def test_gates(model, sound):
    context, gate = (sound[f"layers.2.self_attn.{name}"].astype(np.float64) for name in ("context", "gate"))
    close(value(model, "gate-off", "layers.2.self_attn.gated"), context)
    close(value(model, "gate-silu", "layers.2.self_attn.gated"), context * naive.silu(gate))


def test_scores_of_tiled_heads_and_of_another_scale(model, sound):
    q, k = (sound[f"layers.2.self_attn.{name}_rot"][0].astype(np.float64) for name in "qk")
    seen = np.tril(np.ones((T, T), bool))
    found = value(model, "gqa-tile", "layers.2.self_attn.scores")[0]
    for head in range(4):
        close(found[head][seen], (q[:, head] @ k[:, head % 2].T * 32**-0.5)[seen])
    found, own = value(model, "head-dim-scale", "layers.2.self_attn.scores"), sound["layers.2.self_attn.scores"]
    close(found[0][:, seen], own[0][:, seen] * (16**-0.5 / 32**-0.5))


def test_masks_see_one_more_one_less_and_a_window(model):
    weights = "layers.2.self_attn.attn_weights"
    row, column = np.ogrid[:T, :T]
    for name, seen in (
        ("mask-sees-next", column <= row + 1),
        ("mask-misses-itself", (column < row) | ((row == 0) & (column == 0))),
        ("window-64", (column <= row) & (column > row - 64)),
    ):
        assert ((value(model, name, weights)[0] > 0) == seen).all(), name


# ---- norms ---------------------------------------------------------------------------------------------------------


def test_norms(model, sound):
    x = captured(model, ["layers.0.resid_pre"])["layers.0.resid_pre"].astype(np.float64)
    w = np.asarray(model.model.layers[0].input_layernorm.weight).astype(np.float64)
    at = "layers.0.input_layernorm"
    close(value(model, "norm-w", at), naive.rms_norm(x, w - 1, 1e-6))
    close(value(model, "norm-2+w", at), naive.rms_norm(x, w + 1, 1e-6))
    rounded = in_bf16(1 + w) - 1
    for name in ("norm-1+w-bf16", "loaded-in-bf16"):
        close(value(model, name, at), naive.rms_norm(x, rounded, 1e-6))
    close(value(model, "rms-eps-1e-5", at), naive.rms_norm(x, w, 1e-5), 1e-7)


def test_weights_that_are_float32_in_a_checkpoint_are_rounded_where_all_are_loaded_in_bf16(model):
    base = "layers.0.linear_attn."
    seen = captured(find("loaded-in-bf16").open(model), [base + name for name in ("a", "g", "read", "z", "normed")])
    a, g, core, z, normed = (value.astype(np.float64) for value in seen.values())
    mixer = model.model.layers[0].linear_attn
    A_log, dt_bias, w = (np.asarray(p).astype(np.float64) for p in (mixer.A_log, mixer.dt_bias, mixer.norm.weight))
    rounded = np.log(in_bf16(np.exp(in_bf16(A_log))))
    close(g, naive.delta_decay(a, rounded, dt_bias))
    close(normed, naive.rms_norm_gated(core, z, in_bf16(w), 1e-6).reshape(normed.shape))


def in_bf16(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_gated_norms(model, sound):
    core, z = (sound[f"layers.0.linear_attn.{name}"].astype(np.float64) for name in ("read", "z"))
    w = np.asarray(model.model.layers[0].linear_attn.norm.weight).astype(np.float64)
    at, shape = "layers.0.linear_attn.normed", (1, T, 64)
    close(value(model, "gate-before-norm", at), naive.rms_norm(core * naive.silu(z), w - 1, 1e-6).reshape(shape))
    close(value(model, "norm-gate-sigmoid", at), (naive.rms_norm(core, w - 1, 1e-6) * naive.sigmoid(z)).reshape(shape))


# ---- Gated DeltaNet ------------------------------------------------------------------------------------------------


def delta(sound, name):
    return sound[f"layers.0.linear_attn.{name}"].astype(np.float64)


def test_norms_of_q_and_k(model, sound):
    q = delta(sound, "conv_out")[..., :32].reshape(1, T, 2, 16)
    length = np.sqrt(np.sum(q * q, -1, keepdims=True))
    at = "layers.0.linear_attn.q"
    close(value(model, "l2norm-off", at), q)
    close(value(model, "l2norm-eps-1e-5", at), q / np.sqrt(length**2 + 1e-5), 1e-7)
    close(value(model, "l2norm-sum", at), q / (length + 1e-6), 1e-7)
    close(value(model, "l2norm-max", at), q / np.maximum(length, 1e-6), 1e-7)
    close(value(model, "l2norm-mean", at), q / np.sqrt(length**2 + 16e-6), 1e-7)


def test_eps_counts_where_keys_are_small(model):
    probe = find("keys-small").open(model)
    own, k = (captured(m, ["layers.0.linear_attn.k"])["layers.0.linear_attn.k"] for m in (probe, model))
    small = find("l2norm-eps-1e-5").open(probe)
    moved = [np.abs(captured(m, ["layers.0.linear_attn.k"])["layers.0.linear_attn.k"] - sound) for m, sound in (
        (small, own), (find("l2norm-eps-1e-5").open(model), k),
    )]  # fmt: skip
    assert moved[0].max() > 0.1 > 1e-3 > moved[1].max()
    q = "layers.0.linear_attn.q"
    assert np.array_equal(captured(probe, [q])[q], captured(model, [q])[q])


def test_decay_and_beta(model, sound):
    layer, a = model.model.layers[0].linear_attn, delta(sound, "a")
    A_log, dt_bias = (np.asarray(p).astype(np.float64) for p in (layer.A_log, layer.dt_bias))
    close(value(model, "dt-bias-off", "layers.0.linear_attn.g"), naive.delta_decay(a, A_log, 0 * dt_bias))
    close(value(model, "A-log-sign", "layers.0.linear_attn.g"), naive.delta_decay(a, -A_log, dt_bias))
    close(value(model, "beta-raw", "layers.0.linear_attn.beta"), delta(sound, "b"))


def test_convolutions(model, sound):
    x, w = delta(sound, "mixed_qkv"), np.asarray(model.model.layers[0].linear_attn.conv1d.weight).astype(np.float64)
    at = "layers.0.linear_attn.conv_out"
    close(value(model, "conv-no-silu", at), naive.causal_conv1d(x, w))
    padded = np.concatenate([np.zeros((1, 4, x.shape[2])), x], axis=1)
    reversed_ = sum(padded[:, 4 - back : 4 - back + T] * w[:, 0, back] for back in range(4))
    close(value(model, "conv-reversed", at), naive.silu(reversed_))
    late = sum(padded[:, 4 - back : 4 - back + T] * w[:, 0, 4 - back] for back in range(1, 4))
    close(value(model, "conv-late", at), naive.silu(late))


def read(sound, q=None, k=None, scale=16**-0.5, cut=None):
    """What DeltaNet reads: from the definition, over the sound inputs."""
    q, k = (delta(sound, n) if x is None else x for n, x in (("q", q), ("k", k)))
    steps = np.ones((1, T), np.int64)
    steps[:, cut or T :: cut or T] = 2
    v, g, beta = (delta(sound, name) for name in ("v", "g", "beta"))
    return naive.gated_delta_rule(q, k, v, g, beta, None, steps, scale)


def test_the_recurrence(model, sound):
    at = "layers.0.linear_attn.read"
    tile = np.arange(4) % 2
    close(delta(sound, "read"), read(sound), 1e-5)
    tiled = read(sound, delta(sound, "q")[:, :, tile], delta(sound, "k")[:, :, tile])
    close(value(model, "delta-tile", at), tiled, 1e-5)
    close(value(model, "delta-q-unscaled", at), read(sound, scale=1), 1e-5)
    close(value(model, "state-reset-64", at), read(sound, cut=64), 1e-5)


def test_arithmetics_of_delta_round_where_they_say(model):
    for name, rounded, free in (("delta-as-torch", "beta conv_out read", "q"), ("delta-as-fla", "beta q k read", "g")):
        for at in (rounded + " " + free).split():
            found = value(model, name, f"layers.0.linear_attn.{at}")
            as_bf16 = found.astype(ml_dtypes.bfloat16).astype(np.float64)
            assert np.array_equal(found, as_bf16) == (at != free), (name, at)


# ---- states --------------------------------------------------------------------------------------------------------


def decoded(model, prompt, following):
    """The cache behind a prompt and the ids that follow it one by one."""
    cache = qwenref.Cache(model)
    model([prompt], cache=cache)
    for id in following:
        model([[int(id)]], cache=cache)
    return cache


def states(cache, layer=0):
    return cache.layers[layer].conv_state, cache.layers[layer].recurrent_state


@pytest.mark.parametrize(("name", "earlier"), [("state-stale-half", 35), ("state-stale-64", 6), ("state-stale-128", 0)])
def test_stale_states_are_those_of_an_earlier_token(name, earlier, model):
    faulty, next_id = find(name).open(model), [7]
    found, expected = decoded(faulty, IDS, next_id), qwenref.Cache(model)
    if earlier:
        model([IDS[:earlier]], cache=expected)
    model([next_id], cache=expected)
    for a, b in zip(states(found), states(expected), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(found.layers[2].keys[:, :, :T], decoded(model, IDS, []).layers[2].keys)
    assert found.length[0] == T + 1


def test_pads_enter_state_and_window_but_no_key(model):
    cache, faulty = qwenref.Cache(model), find("state-padded").open(model)
    model([np.zeros(128 - T, int)], cache=cache)
    model([IDS], cache=cache)
    found = decoded(faulty, IDS, [])
    assert found.length[0] == T and found.layers[2].keys.shape[2] == T
    for a, b in zip(states(found), states(cache), strict=True):
        assert np.array_equal(a, b)  # of the first layer, whose input is the embedding alone
    assert np.array_equal(states(decoded(faulty, IDS[:64], []))[1], states(decoded(model, IDS[:64], []))[1])


def test_a_lost_window_is_zero_once_or_always(model):
    sound, once, always = (decoded(m, IDS, [7, 8, 9]) for m in (
        model, find("conv-zero-handoff").open(model), find("conv-no-history").open(model),
    ))  # fmt: skip
    assert np.array_equal(states(once)[0], states(sound)[0])  # of the inputs, which the first layer has right
    assert not np.array_equal(states(once)[1], states(sound)[1])
    assert not np.array_equal(states(always)[1], states(once)[1])
    one = [decoded(find(name).open(model), IDS, [7]) for name in ("conv-zero-handoff", "conv-no-history")]
    assert np.array_equal(states(one[0])[1], states(one[1])[1])


def test_states_are_kept_in_few_bits_from_the_first_step_on(model):
    for name, dtype in (("state-bf16", ml_dtypes.bfloat16), ("state-fp16", np.float16)):
        state = states(decoded(find(name).open(model), IDS, [7, 8]))[1]
        assert np.array_equal(state, state.astype(dtype).astype(np.float32)) and state.any()
    state = states(decoded(model, IDS, [7, 8]))[1]
    assert not np.array_equal(state, state.astype(np.float16).astype(np.float32))


# ---- weights -------------------------------------------------------------------------------------------------------


def test_weights_are_where_the_fault_puts_them(model):
    layers, of = (
        model.model.layers,
        {name: dict(find(name).open(model).named_parameters()) for name in FIRST if "@" in name},
    )
    own = dict(model.named_parameters())
    down = "model.layers.1.mlp.down_proj.weight"
    a, b = np.split(np.asarray(own[down]), 2, axis=1)
    assert np.array_equal(of["half-zero@1"][down], np.hstack([a, 0 * b]))
    assert np.array_equal(of["shards-swapped@1"][down], np.hstack([b, a]))
    assert not of["shard-zero@1"][down].any()
    assert of["mlp-borrowed@1,2"][down] is layers[2].mlp.down_proj.weight
    swapped = of["layers-swapped@2,3"]
    assert swapped["model.layers.3.self_attn.k_norm.weight"] is layers[2].self_attn.k_norm.weight
    changed = [name for name in own if of["transposed@1"][name] is not own[name]]
    assert len(changed) == 1 and np.array_equal(of["transposed@1"][changed[0]], np.asarray(own[changed[0]]).T)
    tied = qwenref.from_config(MODEL | {"tie_word_embeddings": True}, seed=5)
    untied = find("head-untied").open(tied)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight is tied.model.embed_tokens.weight


def test_a_head_that_reads_too_early_sees_the_last_mlp_s_input(model):
    with qwenref.capture(model, "layers.3.post_attention_layernorm") as c:
        model([IDS])
    hidden = c["layers.3.post_attention_layernorm"][0].astype(np.float64)
    close(find("head-early").open(model)([IDS]).logits[0], naive.linear(hidden, np.asarray(model.lm_head.weight)))


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 128), (4, 32), (4, 128)])
def test_weights_of_few_bits_are_whole_numbers_of_a_scale_and_near(bits, group):
    w = np.random.default_rng(bits + group).standard_normal((5, 256), np.float32)
    w[0, :group] = 0
    made, most = integers(bits, group)(w).reshape(5, -1, group), 2 ** (bits - 1) - 1
    groups = w.reshape(made.shape)
    scale = np.abs(groups).max(-1, keepdims=True) / most
    steps = made / np.where(scale == 0, 1, scale)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert np.abs(steps).max() <= most + 1e-4 and (np.abs(made - groups) <= scale * 0.5001).all()
    assert len(np.unique(np.rint(steps))) > most  # many of the levels are used
    odd = np.ones((2, 40), np.float32)
    assert integers(4, 32)(odd) is odd


def test_gguf_types_are_levels_of_a_float16_for_each_32(model):
    w = np.random.default_rng(2).standard_normal((5, 96), np.float32)
    w[0, :32] = 0
    for made, least, most in ((q8_0(w), -127, 127), (q4_0(w), -8, 7)):
        assert not made[0, :32].any() and not np.array_equal(made, w)
        blocks, given = made.reshape(5, 3, 32)[1:], w.reshape(5, 3, 32)[1:]
        at = np.abs(given).argmax(axis=-1)[..., None]
        scale = np.take_along_axis(given, at, axis=-1) / (-8 if least == -8 else 127)
        scale = (scale if least == -8 else np.abs(scale)).astype(np.float16).astype(np.float32)
        steps = blocks / scale
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
        assert steps.min() >= least - 1e-4 and steps.max() <= most + 1e-4
        inside = steps < most - 0.5 if least == -8 else steps > least  # the largest level of Q4_0 cuts
        assert (np.abs(blocks - given) <= np.abs(scale) * 0.51 + 1e-3 * np.abs(given))[inside].all()
    odd = np.ones((2, 40), np.float32)
    assert q8_0(odd) is odd and q4_0(odd) is odd


def test_fp8_blocks_have_three_bits_behind_the_leading_one_and_a_scale_of_their_own():
    w = np.random.default_rng(1).standard_normal((130, 200), np.float32)
    w[:128, :128] *= 100
    made = fp8_blocks(w)
    assert made.shape == w.shape and not np.array_equal(made, w)
    large = np.abs(w) > np.where(np.arange(200) < 128, 1, 0.1)  # beneath lie numbers of fewer bits
    assert (np.abs(made - w) <= np.abs(w) * 2**-4 * 1.001)[large].all()


def test_the_logits_of_a_rounded_head_are_rounded_and_no_hidden_state(model):
    logits = find("logits-bf16").open(model)([IDS]).logits
    assert np.array_equal(logits, logits.astype(ml_dtypes.bfloat16).astype(np.float32))
    own = model([IDS]).logits.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(logits, own)
    tied = find("head-tied").open(model)([IDS], output_hidden_states=True)
    hidden = model([IDS], output_hidden_states=True).hidden_states[-1]
    assert np.array_equal(tied.hidden_states[-1], hidden)
    close(tied.logits, naive.linear(hidden.astype(np.float64), np.asarray(model.model.embed_tokens.weight)))


def test_keys_and_values_of_a_cache_are_read_in_fp8(model):
    cache, faulty = qwenref.Cache(model), find("kv-fp8").open(model)
    faulty([IDS], cache=cache)
    with qwenref.capture(faulty, "layers.2.self_attn.q_rot", "layers.2.self_attn.context") as c:
        faulty([[7]], cache=cache)
    keys, values = (
        a.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for a in (cache.layers[2].keys, cache.layers[2].values)
    )
    q, ends = c["layers.2.self_attn.q_rot"].astype(np.float64), np.array([[T + 1]])
    close(c["layers.2.self_attn.context"], naive.attention(q, keys, values, 0 * ends, ends, 32**-0.5))
