"""What ports of this family get wrong while everything still reads well, each with the figures that tell.

Where nothing else is said the arithmetic that runs (`ops`) and the definition (`naive`) are both held to them.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from text_configs import CONFIGS, text_config

import qwenref
from qwenref import naive, ops
from qwenref.deltanet import to_gguf_order
from qwenref.errors import CheckpointError, ConfigError, ShapeError
from qwenref.layers import RMSNorm, RMSNormGated, RotaryEmbedding

# Layers with the head sizes of the published models, on a narrow stream.
ATTENTION = text_config("f", heads=(24, 4), head_dim=256, section=[11, 11, 10])
DELTANET = text_config("l", delta=(16, 48), linear_key_head_dim=128, linear_value_head_dim=128)
T = 7


@pytest.fixture(params=[ops, naive], ids=["ops", "naive"])
def arithmetic(request):
    return request.param


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def ulps(n, size=1.0):
    """n roundings to float32 of numbers up to `size`."""
    return n * 2**-24 * size


# ---------------------------------------------------------------------------------------------- Gated DeltaNet


@pytest.mark.parametrize(
    ("a", "right", "normalised", "mean"),
    [
        (1e-4, 0.0662266, 0.0883883, 0.0087950),
        (1e-3, 0.0880451, 0.0883883, 0.0625),
        (1e-2, 0.0883849, 0.0883883, 0.0879497),
    ],
)
def test_T5_A1_l2_norm_has_eps_on_the_sum_inside_the_root(arithmetic, a, right, normalised, mean):
    x = np.full((1, 128), a, np.float32)
    found = arithmetic.l2_norm(x)
    assert np.abs(found - right).max() <= 5e-8 + ulps(2, right)  # the figure has seven digits
    # what is told apart: x / max(|x|, eps), and eps on the mean
    x = x.astype(np.float64)
    wrong = x / np.maximum(np.sqrt((x**2).sum()), 1e-6), x / np.sqrt(128 * ((x**2).mean() + 1e-6))
    for other, figure in zip(wrong, (normalised, mean), strict=True):
        assert other == pytest.approx(figure, abs=5e-8) and np.abs(found - other).min() > 1e-6


@pytest.mark.parametrize(("a", "right"), [(1e-4, 0.0662266), (1e-3, 0.0880451), (1e-2, 0.0883849), (1, 0.0883883)])
def test_T5_A1_q_and_k_of_a_layer_are_normalised_that_way(a, right):
    model = qwenref.from_config(DELTANET, seed=0)
    path = "layers.0.linear_attn"
    constant = qwenref.edit(model, {f"{path}.conv_out": lambda x: np.full_like(x, a)})
    with constant, qwenref.capture(model, f"{path}.q", f"{path}.k") as c:
        model(np.arange(3))
    for name in ("q", "k"):
        assert np.abs(c[f"{path}.{name}"] - right).max() <= 5e-8 + ulps(2, right)


def is_bf16(array):
    return np.array_equal(array.astype(ml_dtypes.bfloat16).astype(array.dtype), array)


def test_A2_where_q_k_and_beta_are_rounded_is_what_the_profile_says():
    model, path = qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=1), "layers.0.linear_attn"
    rounded = {}
    for profile in ("fp32", "hf", "hf-5.12"):
        chosen = profile if profile == "fp32" else f"{profile}+delta=recurrent"  # its form plays no part here
        with qwenref.numerics(chosen), qwenref.capture(model, f"{path}.*") as c:
            cache = model(np.arange(40), use_cache=True).cache
        values = {name: c[f"{path}.{name}"] for name in ("k", "beta", "g", "mixed_qkv", "normed")}
        values["state"] = cache.layers[0].recurrent_state
        rounded[profile] = {name for name, value in values.items() if is_bf16(value)}
    assert rounded == {
        "fp32": set(),
        "hf": {"beta", "mixed_qkv", "normed"},
        "hf-5.12": {"beta", "mixed_qkv", "normed", "k", "state"},
    }


def test_A6_rounding_a_log_on_load_moves_the_decay_and_is_not_done():
    assert float(ml_dtypes.bfloat16(2.3)) == 2.296875
    one = np.ones((1, 1, 1), np.float32)
    kept, moved = (ops.delta_decay(one, np.array([a], np.float32), np.zeros(1, np.float32)) for a in (2.3, 2.296875))
    assert (1 - moved / kept).item() == pytest.approx(0.0031, abs=5e-5)
    config = text_config("lllf" * 6)  # as many layers as the 0.8B
    names = [name for name, _ in qwenref.from_config(config).named_parameters()]
    wide = [name for name in names if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))]
    assert len(wide) == 36
    model = qwenref.from_config(CONFIGS["one DeltaNet layer"], seed=0)
    layer = model.model.layers[0].linear_attn
    layer.A_log = qwenref.Parameter(np.full(layer.num_v_heads, 2.3, np.float32))
    with qwenref.capture(model, "layers.0.linear_attn.a", "layers.0.linear_attn.g") as c:
        model(np.arange(5))
    bias = np.asarray(layer.dt_bias, np.float64)
    expected = -np.exp(np.float64(np.float32(2.3))) * np.logaddexp(0, c["layers.0.linear_attn.a"].astype(float) + bias)
    assert np.abs(c["layers.0.linear_attn.g"] / expected - 1).max() <= ulps(8)  # far from the 0.0031 of a rounded A_log


def test_A10_every_value_of_layer_0_is_the_written_out_formula():
    """Step by step from the values captured before it, so that the first step that differs is the one that is wrong."""
    model = qwenref.from_config(CONFIGS["27B proportions"], seed=2)
    layer, ids = model.model.layers[0], np.random.default_rng(1).integers(0, 211, (1, 9))
    mixer, path = layer.linear_attn, "layers.0"
    with qwenref.capture(model, f"{path}.**", f"{path}", "embed_tokens") as c:
        model(ids)
    got = {name.removeprefix("model.layers.0."): c[name].astype(np.float64) for name in c.names()}

    def weight(module):
        return np.asarray(module.weight, np.float64)

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def silu(x):
        return x / (1 + np.exp(-x))

    x = got["resid_pre"]
    normed = got["input_layernorm"]
    G, V, K, D = mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    mixed = np.concatenate([np.zeros((1, 3, mixer.conv_dim)), got["linear_attn.mixed_qkv"]], 1)
    taps = weight(mixer.conv1d)[:, 0]
    convolved = sum(mixed[:, j : j + 9] * taps[:, j] for j in range(4))
    q, k, v = np.split(got["linear_attn.conv_out"], [G * K, 2 * G * K], axis=-1)
    unit = lambda a: a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    S, read = np.zeros((V, K, D)), np.zeros((1, 9, V, D))
    for t in range(9):
        key, query = (np.repeat(got[f"linear_attn.{n}"][0, t], V // G, axis=0) for n in ("k", "q"))
        S = S * np.exp(got["linear_attn.g"][0, t])[:, None, None]
        u = (got["linear_attn.v"][0, t] - np.einsum("vk,vkd->vd", key, S)) * got["linear_attn.beta"][0, t][:, None]
        S = S + key[:, :, None] * u[:, None]
        read[0, t] = np.einsum("vk,vkd->vd", query * K**-0.5, S)
    z = got["linear_attn.z"]
    gated = weight(mixer.norm) * rms(got["linear_attn.read"]) * silu(z)
    A, bias = (np.asarray(p, np.float64) for p in (mixer.A_log, mixer.dt_bias))
    post = got["post_attention_layernorm"]
    expected = {
        "input_layernorm": rms(x) * (1 + weight(layer.input_layernorm)),
        "linear_attn.mixed_qkv": normed @ weight(mixer.in_proj_qkv).T,
        "linear_attn.z": (normed @ weight(mixer.in_proj_z).T).reshape(1, 9, V, D),
        "linear_attn.b": normed @ weight(mixer.in_proj_b).T,
        "linear_attn.a": normed @ weight(mixer.in_proj_a).T,
        "linear_attn.conv_out": silu(convolved),
        "linear_attn.q": unit(q.reshape(1, 9, G, K)),
        "linear_attn.k": unit(k.reshape(1, 9, G, K)),
        "linear_attn.v": v.reshape(1, 9, V, D),
        "linear_attn.beta": 1 / (1 + np.exp(-got["linear_attn.b"])),
        "linear_attn.g": -np.exp(A) * np.logaddexp(0, got["linear_attn.a"] + bias),
        "linear_attn.read": read,
        "linear_attn.state": S[None],
        "linear_attn.normed": gated.reshape(1, 9, V * D),
        "linear_attn": got["linear_attn.normed"] @ weight(mixer.out_proj).T,
        "resid_mid": x + got["linear_attn"],
        "post_attention_layernorm": rms(got["resid_mid"]) * (1 + weight(layer.post_attention_layernorm)),
        "mlp.gate": post @ weight(layer.mlp.gate_proj).T,
        "mlp.up": post @ weight(layer.mlp.up_proj).T,
        "mlp.hidden": silu(got["mlp.gate"]) * got["mlp.up"],
        "mlp": got["mlp.hidden"] @ weight(layer.mlp.down_proj).T,
        "resid_post": got["resid_mid"] + got["mlp"],
    }
    for name, value in expected.items():
        # The longest sum has 352 products; a wrong scale, offset or order is off by parts of one.
        assert np.abs(got[name] - value).max() <= ulps(352, np.abs(value).max()), name
    # what a port loses: the scale of the query, and the offset of the norm
    assert np.abs(read).max() < 0.5 * np.abs(read * K**0.5).max()
    assert np.abs(rms(x) * weight(layer.input_layernorm) - normed).max() > 0.1


def test_T6_A14_one_live_key_head_lights_three_value_heads_in_a_row(arithmetic):
    """16 key and 48 value heads: by the tiled rule of GGUF files heads 0, 16 and 32 would live."""
    q, k = np.zeros((2, 1, 3, 16, 8), np.float32)
    q[:, :, 0] = k[:, :, 0] = 1
    v, half = np.ones((1, 3, 48, 8), np.float32), np.full((1, 3, 48), 0.5, np.float32)
    o = arithmetic.gated_delta_rule(q, k, v, -half, half)
    alive = np.abs(o).max(axis=(0, 1, 3)) > 0
    assert np.flatnonzero(alive).tolist() == [0, 1, 2]
    assert np.flatnonzero(to_gguf_order(alive, 16, 48)).tolist() == [0, 16, 32]


def test_T6_A14_in_a_layer(arithmetic):
    model, path = qwenref.from_config(DELTANET, seed=3), "layers.0.linear_attn"
    keep = np.arange(16)[:, None] == 0
    constant = {f"{path}.v": lambda x: np.ones_like(x), f"{path}.beta": lambda x: np.full_like(x, 0.5)}
    edits = {f"{path}.q": lambda x: x * keep, f"{path}.k": lambda x: x * keep, **constant}
    profile = qwenref.numerics("fp32" if arithmetic is ops else "fp64")
    with profile, qwenref.edit(model, edits), qwenref.capture(model, f"{path}.read") as c:
        model(np.arange(5))
    assert np.flatnonzero(np.abs(c[f"{path}.read"]).max(axis=(0, 1, 3))).tolist() == [0, 1, 2]


# ---------------------------------------------------------------------------------------------- positions and packing


def test_B9_three_axes_of_positions_are_no_packing():
    """Height and width go back inside an image; nothing is forgotten there, and the layout is checked, not guessed."""
    model = qwenref.from_config(CONFIGS["only DeltaNet"], seed=4)  # has no use for positions: any difference is a reset
    ids = np.random.default_rng(2).integers(0, 211, (2, T))
    time = np.broadcast_to([0, 1, 2, 2, 2, 2, 4], (2, T))
    image = np.stack([time, time + [0, 0, 0, 0, 1, 1, 0], time + [0, 0, 0, 1, 0, 1, 0]])
    assert (np.diff(image[2]) < 0).any()
    assert model(ids, position_ids=image).logits.tobytes() == model(ids).logits.tobytes()
    hybrid = qwenref.from_config(CONFIGS["aperiodic layers"], seed=4)
    cache = qwenref.Cache(hybrid, batch=2)
    hybrid(ids, position_ids=image, cache=cache)
    assert cache.sequence is None and cache.sequence_begin.tolist() == [0, 0]
    for shape in ((2, 2, T), (2, 3, T), (5, 2, T), (3, T), (3, 2, T + 1), (1, 3, 2, T)):
        with pytest.raises(ShapeError, match="^position_ids: "):
            hybrid(ids, position_ids=np.zeros(shape, int))


# ---------------------------------------------------------------------------------------------- attention and norms


def test_T7_C1_query_and_gate_of_a_head_are_side_by_side():
    """A q_proj of zeros: 0.5 x the plain mean of what is seen.  Rows 256-511 large: head 0 alone becomes 1.0 x it."""
    model = qwenref.from_config(ATTENTION, seed=5)
    attention = model.model.layers[0].self_attn
    x = normal(1, T, 64)
    x[..., 0] = 1
    attention.q_proj.weight[...] = 0
    with qwenref.capture(attention, "v", "gated") as c:
        attention(x)
        attention.q_proj.weight[256:512, 0] = 100  # a gate of 100 wherever channel 0 is 1
        attention(x)
    v = np.repeat(c["v", 0].astype(np.float64), 6, axis=2)  # query head h reads key head h // 6
    mean = np.cumsum(v, axis=1) / np.arange(1, T + 1)[:, None, None]
    close = ulps(T + 3, np.abs(v).max())
    assert np.abs(c["gated", 0] - 0.5 * mean).max() <= close
    factor = np.where(np.arange(24) == 0, 1.0, 0.5)[:, None]
    assert np.abs(c["gated", 1] - factor * mean).max() <= close
    assert np.abs(mean).max() > 0.1


def test_C3_a_converted_convolution_is_refused_and_no_norm_is_folded(tmp_path):
    model = qwenref.from_config(CONFIGS["values 2 x keys, GQA 2"], seed=6)
    model.save_pretrained(tmp_path)
    opened = qwenref.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert opened.get_parameter(name).tobytes() == parameter.tobytes()
    from qwenref import _C

    tensors = {name: np.array(array) for name, array in _C.Checkpoint(tmp_path).items()}
    name = "model.layers.0.linear_attn.conv1d.weight"
    tensors[name] = tensors[name].transpose(0, 2, 1)
    _C.save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="the layout of a converted file"):
        qwenref.from_pretrained(tmp_path)


def test_C4_there_are_two_norms_and_swapping_them_shows():
    model = qwenref.from_config(CONFIGS["aperiodic layers"], seed=7)
    kinds = {}
    for name, module in model.named_modules():
        if isinstance(module, (RMSNorm, RMSNormGated)):
            kinds.setdefault(type(module), set()).add(name.rpartition("model.")[2].split(".", 2)[-1])
    assert kinds == {
        RMSNormGated: {"linear_attn.norm"},
        RMSNorm: {"norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"},
    }
    x, z, w = normal(4, 32), normal(4, 32, seed=1), 0.1 * normal(32, seed=2)
    plain = ops.rms_norm(x, np.zeros(32, np.float32))
    assert np.abs(ops.rms_norm(x, w) - plain * (1 + w)).max() <= ulps(4, 4)
    assert np.abs(ops.rms_norm_gated(x, z, w) - plain * w * ops.silu(z)).max() <= ulps(16, 4)
    assert np.abs(ops.rms_norm(x, w) - plain * w).max() > 0.5
    assert np.abs(ops.rms_norm_gated(x, z, w) - plain * (1 + w) * ops.silu(z)).max() > 0.5


def test_T8_C3_C5_A10_a_norm_adds_one_to_its_weight_in_float32(arithmetic):
    x, w = normal(3, 64), np.full(64, 0.0012, ml_dtypes.bfloat16)  # as a bfloat16 file stores it
    plain = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(arithmetic.rms_norm(x, np.zeros(64, np.float32)) - plain).max() <= ulps(2, 4)
    found = arithmetic.rms_norm(x, w)
    assert np.abs(found - plain * (1 + float(w[0]))).max() <= ulps(3, 4)
    assert 1 + float(w[0]) == pytest.approx(1.0012, abs=0.0012 * 2**-8)
    assert ml_dtypes.bfloat16(1) + w[0] == 1  # what a weight stored as 1 + w has lost
    assert np.abs(found / plain - 1).min() > 0.0011


def test_T8_the_gated_norm_normalises_first_and_then_gates(arithmetic):
    x, one = 3 * normal(5, 32), np.ones(32, np.float32)
    assert not arithmetic.rms_norm_gated(x, np.zeros_like(x), one).any()
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    z = np.float32(50)  # silu(50) is 50 to the last bit
    assert np.abs(arithmetic.rms_norm_gated(x, np.full_like(x, z), one) - 50 * normed).max() <= ulps(4, 200)
    z = normal(5, 32, seed=1)
    gated = x * (z / (1 + np.exp(-z)))
    after = gated / np.sqrt((gated.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(arithmetic.rms_norm_gated(x, z, one) - after).max() > 0.5


# ---------------------------------------------------------------------------------------------- rotary positions

POSITIONS = (0, 1, 700, 2355)


def rotated(arithmetic, x, position):
    """x [256] at one position, with the rotary embedding of the published models."""
    rotary = RotaryEmbedding(qwenref.from_config(ATTENTION).config)
    cos, sin = arithmetic.rope_table(np.full((3, 1, 1), position), rotary.axes, rotary.inv_freq)
    return arithmetic.rope(np.float32(x)[None, None, None], cos, sin)[0, 0, 0]


@pytest.mark.parametrize("position", [*POSITIONS, 200_000])
def test_T9_C6_the_rotation_turns_pairs_i_and_i_plus_32_and_passes_64_to_255(arithmetic, position):
    for i in (0, 1, 31, 32, 33, 63, 64, 127, 128, 255):
        y, expected = rotated(arithmetic, np.eye(256)[i], position), np.zeros(256)
        if i < 64:
            angle = position * 1e7 ** (-2 * (i % 32) / 64)
            cos, sin = math.cos(angle), math.sin(angle)
            expected[i % 32], expected[i % 32 + 32] = (cos, sin) if i < 32 else (-sin, cos)
        else:
            expected[i] = 1
        # an angle is off by two roundings of float64, its cosine by that and one rounding of float32
        assert np.abs(y - expected).max() <= ulps(1) + 2 * position * 2**-52


def test_T9_C6_frequencies_count_over_the_rotary_width(arithmetic):
    f = arithmetic.rope_frequencies(np.arange(32), 1e7, 64)
    assert f.dtype == np.float64 and f[1] == pytest.approx(0.604296, abs=5e-7)
    assert arithmetic.rope_frequencies(np.arange(128), 1e7, 256)[1] == pytest.approx(0.881683, abs=5e-7)  # the mistake
    rotary = qwenref.from_config(ATTENTION).model.rotary_emb
    assert len(rotary.inv_freq) == 32 and rotary.inv_freq[1] == pytest.approx(0.604296, abs=5e-7)


def test_T9_products_depend_only_on_the_distance(arithmetic):
    q, k = normal(256), normal(256, seed=1)

    def product(at, before):
        turned = rotated(arithmetic, q, at), rotated(arithmetic, k, at - before)
        return float(np.dot(*(a.astype(np.float64) for a in turned)))

    bound = ulps(6, np.abs(q[:64]).astype(float) @ (np.abs(k[:64]) + np.abs(k[32:96]))) + 64 * 2355 * 2**-50
    for at in (701, 2355):
        assert abs(product(at, 1) - product(1, 1)) <= bound
    assert abs(product(700, 2) - product(700, 1)) > 100 * bound


def rope_of(**changes):
    return ATTENTION | {"rope_parameters": ATTENTION["rope_parameters"] | changes}


def test_C7_sections_add_up_to_half_the_rotary_width():
    assert 2 * sum(ATTENTION["rope_parameters"]["mrope_section"]) == 64
    assert qwenref.from_config(ATTENTION).config.rotary_dim == 64
    for section in ([44, 44, 40], [11, 11, 11], [11, 10, 10]):
        with pytest.raises(ConfigError, match="mrope_section: found .*, expected counts that add up to 32"):
            qwenref.from_config(rope_of(mrope_section=section))


def test_C8_axes_go_THW_ten_times_then_TH_and_text_is_plain_rotary():
    rotary = qwenref.from_config(ATTENTION).model.rotary_emb
    assert "".join("THW"[axis] for axis in rotary.axes) == "THW" * 10 + "TH"
    x, text = np.zeros((1, 9, 1), np.float32), np.arange(9)[None]
    table = rotary(x, np.stack([text] * 3))
    plain = ops.rope_table(np.stack([text] * 3), np.zeros(32, np.int64), rotary.inv_freq)  # one axis for all
    assert all(a.tobytes() == b.tobytes() for a, b in zip(table, plain, strict=True))
    sin = rotary(x, np.stack([text, 0 * text, 0 * text]))[1]
    assert np.array_equal(sin[0, 8] != 0, rotary.axes == 0)  # the time axis turns its own frequencies alone


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "longrope", "nonsense"])
def test_C9_a_rope_type_that_is_not_there_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f'rope_type: found "{kind}"'):
        qwenref.from_config(rope_of(rope_type=kind, factor=4.0))


def test_C10_positions_are_integers_and_angles_exact_to_the_last_position():
    """bfloat16 counts 256, 256, 258; float32 angles are off by 2e-3 at 262,143."""
    assert float(ml_dtypes.bfloat16(257)) == 256
    rotary = qwenref.from_config(ATTENTION).model.rotary_emb
    positions = np.array([255, 256, 257, 4095, 65_537, 200_000, 262_143])
    cos, sin = rotary(np.zeros((1, 7, 1), np.float32), np.broadcast_to(positions, (3, 1, 7)))
    angle = positions[:, None] * 1e7 ** (-np.arange(32) / 32)
    for found, exact in ((cos[0], np.cos(angle)), (sin[0], np.sin(angle))):
        assert found.dtype == np.float32
        assert np.abs(found - exact).max() <= ulps(1) + 2 * 262_143 * 2**-52
    rounded = np.float32(positions[:, None]) * (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    assert np.abs(np.cos(rounded.astype(np.float64)) - np.cos(angle)).max() > 1e-3
