"""The parts laid open: states after any token, the token map, recalled and written values, weights by head."""

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS

import qwenref
from qwenref import naive, ops
from qwenref.deltanet import from_gguf_order, to_gguf_order

NAMES = ("values 1 x keys, GQA 1", "values 3 x keys, GQA 4", "DeltaNet widths differ", "27B proportions")
T = 12


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return qwenref.from_config(CONFIGS[request.param], seed=6)


IDS = np.random.default_rng(8).integers(0, 211, (2, T))


def mixers(model):
    return {
        i: layer.linear_attn for i, layer in enumerate(model.model.layers) if layer.layer_type == "linear_attention"
    }


def attentions(model):
    return {i: layer.self_attn for i, layer in enumerate(model.model.layers) if layer.layer_type == "full_attention"}


def in_calls(model, lengths, ids=IDS, mask=None):
    """(logits, cache) of a prompt handed over in pieces."""
    cache, at, parts = qwenref.Cache(model, batch=len(ids)), 0, []
    for n in lengths:
        part = None if mask is None else mask[:, at : at + n]
        parts.append(model(ids[:, at : at + n], attention_mask=part, cache=cache).logits)
        at += n
    return np.concatenate(parts, 1), cache


# States after any token


@pytest.mark.parametrize("lengths", [(T,), (5, 7), (1,) * T, (3, 1, 6, 2)], ids=str)
def test_a_watched_state_is_that_of_a_run_that_ends_there(model, lengths):
    plain, cache = in_calls(model, lengths)
    before = cache_bits(cache)
    with qwenref.capture(model, "**.state@all") as c:
        logits, cache = in_calls(model, lengths)
    assert logits.tobytes() == plain.tobytes() and cache_bits(cache) == before
    with qwenref.capture(model, "**.state@10,0,3") as few:
        assert in_calls(model, lengths)[0].tobytes() == plain.tobytes()
    ends = [in_calls(model, (t + 1,), IDS[:, : t + 1])[1] for t in range(T)]
    for i in mixers(model):
        name = f"layers.{i}.linear_attn.state"
        states = c.cat(f"{name}@all")
        assert states.shape[1] == T
        for t in range(T):
            assert states[:, t].tobytes() == ends[t].layers[i].recurrent_state.tobytes(), t
        assert few.cat(f"{name}@10,0,3").tobytes() == states[:, [0, 3, 10]].tobytes()
        begins = np.cumsum((0, *lengths))
        holding = [k for k in range(len(lengths)) if any(begins[k] <= t < begins[k + 1] for t in (0, 3, 10))]
        assert few.steps(f"{name}@10,0,3") == holding


def test_columns_count_pads(model):
    """A pad leaves the state alone; columns are those that were fed, so that both rows have the same ones."""
    pads, mask = 4, np.ones((2, T), int)
    mask[1, :pads] = 0
    plain, cache = in_calls(model, (6, 6), mask=mask)
    before = cache_bits(cache)
    with qwenref.capture(model, "**.state@all") as c:
        logits, cache = in_calls(model, (6, 6), mask=mask)
    assert logits.tobytes() == plain.tobytes() and cache_bits(cache) == before
    with qwenref.capture(model, "**.state@3,7") as few:
        in_calls(model, (6, 6), mask=mask)
    with qwenref.capture(model, "**.state@all") as alone:
        model(IDS[1:, pads:])
    for i in mixers(model):
        name = f"layers.{i}.linear_attn.state"
        states = c.cat(f"{name}@all")[1]
        assert not states[:pads].any()
        assert states[pads:].tobytes() == alone[f"{name}@all"][0].tobytes()
        assert few.cat(f"{name}@3,7")[1].tobytes() == states[[3, 7]].tobytes()


# The recurrence by its parts


def test_recalled_and_written_values_are_those_of_the_rule(model):
    """S_t = exp(g) S_t-1 + k u^T with u = (v - recalled) beta, recalled = k^T exp(g) S_t-1, o = (q scale)^T S_t.

    Each line is a handful of roundings of captured float32 numbers: a sum of K products errs by at most (K + 1) 2^-24
    of the sum of their sizes, and the rest is two roundings more.
    """
    names = ("q", "k", "v", "g", "beta", "delta_read", "delta_write", "read")
    for i, mixer in mixers(model).items():
        path = f"layers.{i}.linear_attn"
        with qwenref.capture(model, f"{path}.*", f"{path}.state@all") as c:
            model(IDS)
        q, k, v, g, beta, recalled, written, read = (c[f"{path}.{name}"].astype(np.float64) for name in names)
        states = c[f"{path}.state@all"].astype(np.float64)
        ratio = mixer.num_v_heads // mixer.num_k_heads
        q, k = (np.repeat(a, ratio, axis=2) for a in (q * mixer.scaling, k))
        eps = (mixer.head_k_dim + 3) * 2.0**-24
        for t in range(T):
            kept = np.exp(g[:, t])[..., None, None] * (states[:, t - 1] if t else np.zeros_like(states[:, 0]))
            size = np.einsum("bhk,bhkv->bhv", abs(k[:, t]), abs(kept))
            assert (abs(np.einsum("bhk,bhkv->bhv", k[:, t], kept) - recalled[:, t]) <= eps * size).all()
            difference = v[:, t] - recalled[:, t]
            assert np.allclose(difference * beta[:, t][..., None], written[:, t], rtol=2**-22, atol=0)
            new = kept + k[:, t][..., None] * written[:, t][..., None, :]
            size = abs(kept) + abs(k[:, t][..., None] * written[:, t][..., None, :])
            assert (abs(new - states[:, t]) <= 4 * 2.0**-24 * size).all()
            size = np.einsum("bhk,bhkv->bhv", abs(q[:, t]), abs(states[:, t]))
            answer = np.einsum("bhk,bhkv->bhv", q[:, t], states[:, t])
            assert (abs(answer - read[:, t]) <= eps * size).all()


def test_under_fp64_they_are_the_definition_to_the_bit(model):
    i, mixer = next(iter(mixers(model).items()))
    path = f"layers.{i}.linear_attn"
    with qwenref.numerics("fp64"), qwenref.capture(model, f"{path}.*") as c:
        model(IDS)
    q, k, v, g, beta = (c[f"{path}.{name}"] for name in ("q", "k", "v", "g", "beta"))
    found = naive.gated_delta_rule(q, k, v, g, beta, scale=mixer.scaling, final=True, recalled=True, written=True)
    for name, value in zip(("read", "state", "delta_read", "delta_write"), found, strict=True):
        assert c[f"{path}.{name}"].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("numerics", "bound"), [("fp32", 1e-5), ("fp64", 1e-12)])
def test_the_token_map_gives_what_is_read(model, numerics, bound):
    for i, mixer in list(mixers(model).items())[:2]:
        path = f"layers.{i}.linear_attn"
        with qwenref.numerics(numerics):
            with qwenref.capture(model, f"{path}.v", f"{path}.read", f"layers.{i}.input_layernorm") as c:
                model(IDS)
            M = mixer.token_map(IDS)
            assert M.tobytes() == mixer.token_map(c[f"layers.{i}.input_layernorm"]).tobytes()
        assert M.shape == (2, mixer.num_v_heads, T, T) and M.dtype == np.float64
        assert not np.triu(M, 1).any()  # no token reads a later one
        read = np.einsum("bhij,bjhd->bihd", M, c[f"{path}.v"].astype(np.float64))
        error = np.linalg.norm(read - c[f"{path}.read"]) / np.linalg.norm(c[f"{path}.read"])
        assert error <= bound


def test_the_token_map_follows_the_models_own_profile_and_takes_one_row(model):
    i, mixer = next(iter(mixers(model).items()))
    with qwenref.numerics("fp64"):
        wanted = mixer.token_map(IDS[:1])
    model.numerics = "fp64"
    try:
        assert mixer.token_map(IDS[0]).tobytes() == mixer.token_map(IDS[0].tolist()).tobytes() == wanted.tobytes()
    finally:
        model.numerics = "fp32"


def test_the_token_map_sees_no_later_token(model):
    i, mixer = next(iter(mixers(model).items()))
    assert np.allclose(mixer.token_map(IDS)[..., :5, :5], mixer.token_map(IDS[:, :5]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "error", "first"),
    [
        (np.zeros((2, 3, 7), np.float32), qwenref.ShapeError, "token_map: neither ids nor hidden states"),
        (np.zeros((3, 7), np.float32), qwenref.ShapeError, "token_map: neither ids nor hidden states"),
        ([[211]], qwenref.InputError, "input_ids[0, 0] is 211; the vocabulary has 211"),
    ],
)
def test_the_token_map_refuses(model, given, error, first):
    with pytest.raises(error) as caught:
        next(iter(mixers(model).values())).token_map(given)
    assert str(caught.value).split("\n")[0] == first


def test_a_layer_outside_of_a_model_takes_no_ids(model):
    mixer = qwenref.GatedDeltaNet(model.config.text_config, 0)
    with pytest.raises(
        qwenref.InputError, match="^token_map: a layer outside of a model takes hidden states, not ids$"
    ):
        mixer.token_map([1, 2])


# One key head serves a run of value heads


def test_one_live_key_head_lights_the_value_heads_next_to_each_other():
    """Queries and keys of all key heads but the first are zero: the value heads that read anything are 0 .. r - 1."""
    model = qwenref.from_config(CONFIGS["27B proportions"], seed=6)
    mixer = model.model.layers[0].linear_attn
    mixer.W_q[1:] = 0
    mixer.W_k[1:] = 0
    with qwenref.capture(model, "layers.0.linear_attn.read") as c:
        model(IDS)
    alive = np.abs(c["layers.0.linear_attn.read"]).max(axis=(0, 1, 3)) > 0
    assert np.flatnonzero(alive).tolist() == list(range(mixer.num_v_heads // mixer.num_k_heads)) == [0, 1, 2]


# The order of value heads in GGUF files


@pytest.mark.parametrize(("key_heads", "value_heads"), [(16, 48), (2, 6), (4, 4), (1, 3), (16, 16), (5, 10)])
def test_gguf_order(key_heads, value_heads):
    """Head h of a GGUF file reads key head h % n_k, where one of a checkpoint reads h // r."""
    ratio = value_heads // key_heads
    heads = np.arange(value_heads)
    moved = to_gguf_order(heads, key_heads, value_heads)
    assert sorted(moved) == heads.tolist()
    assert (moved // ratio == np.arange(value_heads) % key_heads).all()
    assert (np.diff(moved.reshape(ratio, key_heads), axis=0) == 1).all()  # the heads of one key head keep their order
    assert from_gguf_order(moved, key_heads, value_heads).tolist() == heads.tolist()
    for shape, axis in (((value_heads * 5, 3), 0), ((3, value_heads * 5), 1), ((2, value_heads, 4), -2)):
        array = np.arange(np.prod(shape)).reshape(shape)
        there = to_gguf_order(array, key_heads, value_heads, axis)
        assert there.shape == shape
        assert np.array_equal(from_gguf_order(there, key_heads, value_heads, axis), array)
        width = shape[axis] // value_heads
        whole = (heads[:, None] * width + np.arange(width))[moved].ravel()
        assert np.array_equal(there, np.take(array, whole, axis))


def test_weights_in_gguf_order_compute_the_same_by_the_other_rule():
    """The rule of GGUF files on permuted values, decays and shares gives the permuted reads."""
    draw = np.random.default_rng(0).standard_normal
    G, V, K, D = 2, 6, 4, 5
    q, k, v, beta, g = (
        draw((1, 7, G, K)),
        draw((1, 7, G, K)),
        draw((1, 7, V, D)),
        draw((1, 7, V)),
        -abs(draw((1, 7, V))),
    )
    read = naive.gated_delta_rule(q, k, v, g, beta)
    tiled = [np.tile(a, (1, 1, V // G, 1)) for a in (q, k)]
    moved = [to_gguf_order(a, G, V, axis=2) for a in (v, g, beta)]
    assert np.array_equal(to_gguf_order(read, G, V, axis=2), naive.gated_delta_rule(*tiled, *moved))


@pytest.mark.parametrize(("shape", "key_heads", "value_heads"), [((7,), 2, 6), ((6,), 4, 6), ((6,), 0, 6)])
def test_heads_that_do_not_fit_are_refused(shape, key_heads, value_heads):
    with pytest.raises(
        qwenref.ShapeError, match=rf"^axis 0 of {shape[0]} entries does not hold {value_heads} value heads"
    ):
        to_gguf_order(np.zeros(shape), key_heads, value_heads)


# Attention weights


@pytest.mark.parametrize("lengths", [(T,), (7, 1, 4)], ids=str)
def test_captured_attention_is_what_the_forward_used(model, lengths):
    """Softmax of the captured scores and the mix of the captured weights give what came next, to the bit."""
    cache, at, seen = qwenref.Cache(model, batch=2), 0, {}
    with qwenref.capture(model, "**.self_attn.*") as c:
        for step, n in enumerate(lengths):
            out = model(IDS[:, at : at + n], cache=cache, output_attentions=True)
            at += n
            seen[step] = out.attentions, {i: cache.layers[i].values.copy() for i in attentions(model)}
    for order, (i, layer) in enumerate(attentions(model).items()):
        path, end = f"layers.{i}.self_attn", 0
        for step, n in enumerate(lengths):
            begin = np.zeros((2, n), np.int64)
            ends = begin + end + 1 + np.arange(n)
            end += n
            weights = c[f"{path}.attn_weights", step]
            assert weights.shape == (2, layer.heads, n, end)
            assert ops.attention_softmax(c[f"{path}.scores", step], begin, ends).tobytes() == weights.tobytes()
            mixed = ops.attention_mix(weights, seen[step][1][i], begin, ends)
            assert mixed.tobytes() == c[f"{path}.context", step].tobytes()
            assert seen[step][0][order].tobytes() == weights.tobytes()
            assert np.allclose(weights.sum(-1), 1, rtol=0, atol=end * 2**-24)
            context = np.ascontiguousarray(c[f"{path}.context", step])
            gated = ops.sigmoid_mul(context, np.ascontiguousarray(c[f"{path}.gate", step]))
            assert gated.tobytes() == c[f"{path}.gated", step].tobytes()


def test_queries_share_value_heads_in_runs(model):
    """Query head h reads value head h // (Q / K)."""
    for i, layer in attentions(model).items():
        path = f"layers.{i}.self_attn"
        with qwenref.capture(model, f"{path}.*") as c:
            model(IDS)
        ratio = layer.heads // layer.kv_heads
        values = c[f"{path}.v"].astype(np.float64)
        for h in range(layer.heads):
            weights = c[f"{path}.attn_weights"][:, h].astype(np.float64)
            wanted = weights @ values[:, :, h // ratio]
            size = weights @ abs(values[:, :, h // ratio])
            assert (abs(c[f"{path}.context"][:, :, h] - wanted) <= (T + 1) * 2**-24 * size).all()


# Weights by head


def applied(x, weight):
    """(each head's weight [D, H] to x [B, T, H], float64; the bound of float32's error in any order of the sum)."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    bound = (x.shape[-1] + 1) * 2.0**-24 * np.einsum("bti,hdi->bthd", abs(x), abs(weight))
    return np.einsum("bti,hdi->bthd", x, weight), bound


def close(found, wanted):
    exact, bound = wanted
    return found.shape == exact.shape and (abs(found - exact) <= bound).all()


def normed(y, norm):
    return ops.rms_norm(np.ascontiguousarray(y, np.float32), norm.weight, norm.eps)


def test_C2_views_of_attention_reproduce_query_gate_key_and_value(model):
    for i, layer in attentions(model).items():
        path = f"layers.{i}.self_attn"
        names = [f"layers.{i}.input_layernorm", path, f"{path}.*"]
        with qwenref.capture(model, *names) as c:
            model(IDS)
        x = c[names[0]]
        Q, K, D, H = layer.heads, layer.kv_heads, layer.head_dim, model.config.text_config.hidden_size
        assert [w.shape for w in (layer.W_Q, layer.W_gate, layer.W_K, layer.W_V)] == [(Q, D, H)] * 2 + [(K, D, H)] * 2
        raw = c[f"{path}.q_proj"].reshape(2, T, Q, 2, D)
        assert close(raw[:, :, :, 0], applied(x, layer.W_Q)) and close(c[f"{path}.gate"], applied(x, layer.W_gate))
        assert normed(raw[:, :, :, 0], layer.q_norm).tobytes() == c[f"{path}.q"].tobytes()
        raw = c[f"{path}.k_proj"].reshape(2, T, K, D)
        assert close(raw, applied(x, layer.W_K)) and close(c[f"{path}.v"], applied(x, layer.W_V))
        assert normed(raw, layer.k_norm).tobytes() == c[f"{path}.k"].tobytes()
        assert close_to_sum(c[path], c[f"{path}.gated"], layer.W_O)


def close_to_sum(found, inputs, weight):
    """found [B, T, H] is the sum over heads of weight[h] @ inputs[:, :, h], within float32's error in any order."""
    inputs, weight = inputs.astype(np.float64), weight.astype(np.float64)
    exact = np.einsum("bthd,hod->bto", inputs, weight)
    size = np.einsum("bthd,hod->bto", abs(inputs), abs(weight))
    return (abs(found - exact) <= (inputs.shape[2] * inputs.shape[3] + 1) * 2.0**-24 * size).all()


def test_views_of_the_mixer_reproduce_what_goes_into_the_convolution(model):
    for i, mixer in mixers(model).items():
        path = f"layers.{i}.linear_attn"
        with qwenref.capture(model, f"layers.{i}.input_layernorm", path, f"{path}.*") as c:
            model(IDS)
        x, mixed = c[f"layers.{i}.input_layernorm"], c[f"{path}.mixed_qkv"]
        G, K, V, D = mixer.num_k_heads, mixer.head_k_dim, mixer.num_v_heads, mixer.head_v_dim
        H = x.shape[-1]
        views = (mixer.W_q, mixer.W_k, mixer.W_v, mixer.W_z)
        assert [w.shape for w in views] == [(G, K, H)] * 2 + [(V, D, H)] * 2
        parts = mixed[..., : G * K], mixed[..., G * K : 2 * G * K], mixed[..., 2 * G * K :]
        for part, weight in zip(parts, views[:3], strict=True):
            assert close(part.reshape(2, T, weight.shape[0], -1), applied(x, weight))
        assert close(c[f"{path}.z"], applied(x, mixer.W_z))
        assert close_to_sum(c[path], c[f"{path}.normed"].reshape(2, T, V, D), mixer.W_O)


def test_views_are_the_weights_themselves(model):
    attention, mixer = next(iter(attentions(model).values())), next(iter(mixers(model).values()))
    owners = [
        (attention, {"W_Q": "q_proj", "W_gate": "q_proj", "W_K": "k_proj", "W_V": "v_proj", "W_O": "o_proj"}),
        (
            mixer,
            {"W_q": "in_proj_qkv", "W_k": "in_proj_qkv", "W_v": "in_proj_qkv", "W_z": "in_proj_z", "W_O": "out_proj"},
        ),
    ]
    for module, views in owners:
        sizes = {}
        for view, linear in views.items():
            array, weight = getattr(module, view), getattr(module, linear).weight
            assert np.shares_memory(array, weight) and array.dtype == weight.dtype
            sizes[linear] = sizes.get(linear, 0) + array.size
        assert all(sizes[linear] == getattr(module, linear).weight.size for linear in views.values())


# The gate: rows of a head of q_proj are its query, then its gate


def test_gates_by_head():
    """All of q_proj zero: every key weighs the same, every gate is one half.  Then the gate of head 0 is wide open."""
    model = qwenref.from_config(CONFIGS["27B proportions"], seed=6)
    layer = next(iter(attentions(model).values()))
    hidden = np.abs(np.random.default_rng(0).standard_normal((1, T, 128))).astype(np.float32)
    layer.q_proj.weight[...] = 0
    with qwenref.capture(layer, "v", "gated") as c:
        layer(hidden)
    ratio = layer.heads // layer.kv_heads
    mean = np.cumsum(np.repeat(c["v"], ratio, axis=2).astype(np.float64), axis=1) / np.arange(1, T + 1)[:, None, None]
    size = np.abs(c["v"]).max()
    assert np.abs(c["gated"] - 0.5 * mean).max() <= (T + 4) * 2**-24 * size
    layer.W_gate[0] = 100
    with qwenref.capture(layer, "gated") as opened:
        layer(hidden)
    assert np.abs(opened["gated"][:, :, 0] - mean[:, :, 0]).max() <= (T + 4) * 2**-24 * size
    assert opened["gated"][:, :, 1:].tobytes() == c["gated"][:, :, 1:].tobytes()
