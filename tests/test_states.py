"""States at chosen tokens: those of runs that end there, in a documented layout, and continued from to the bit."""

import fresh
import numpy as np
import pytest
from cache_arrays import cache_bits
from safetensors import safe_open
from safetensors.numpy import load_file
from text_configs import CONFIGS

import qwenref
from qwenref import naive
from qwenref.deltanet import from_gguf_order
from qwenref.errors import CheckpointError, InputError, QwenrefError

NAMES = ("values 3 x keys, GQA 4", "aperiodic layers", "DeltaNet widths differ", "one attention layer")
TOKENS = [1, 2, 3, 4, 63, 64, 65]


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return qwenref.from_config(CONFIGS[request.param], seed=14)


@pytest.fixture(scope="module")
def one():
    return qwenref.from_config(CONFIGS[NAMES[0]], seed=14)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(6).integers(0, 211, (2, 70))


def test_B11_states_are_those_of_runs_that_end_there_and_go_on_to_the_bit(model, ids, tmp_path):
    states = qwenref.export_states(model, ids, TOKENS, path=tmp_path / "s")
    assert states["tokens"].tolist() == TOKENS and states.order == "hf"
    whole = model(ids).logits
    for source in (states, qwenref.States.load(tmp_path / "s"), qwenref.States.load(tmp_path / "s", model)):
        for n in TOKENS:
            expected = qwenref.Cache(model, batch=2)
            model(ids[:, :n], cache=expected)
            cache = source.cache(n)
            assert cache_bits(cache) == cache_bits(expected), n
            logits = model(ids[:, n:], cache=cache).logits
            assert logits.tobytes() == np.ascontiguousarray(whole[:, n:]).tobytes()
        cache.layers[0].arrays()  # and what a cache does to its arrays does not reach the states
        assert cache_bits(source.cache(n)) == cache_bits(expected)


def test_they_are_what_a_capture_of_the_state_sees(one, ids):
    states = qwenref.export_states(one, ids, [4, 65])
    with qwenref.capture(one, "layers.*.linear_attn.state@3,64") as c:
        one(ids)
    for i in (0, 2):
        assert states[f"layers.{i}.recurrent_state"].tobytes() == c[f"layers.{i}.linear_attn.state@3,64"].tobytes()


def test_the_layout(one, ids, tmp_path):
    states = qwenref.export_states(one, ids, [5, 2, 5], path=tmp_path / "s")
    c = one.config
    shapes = {"tokens": (2,), "rope_deltas": (2, 2), "sequence_begin": (2, 2)}
    for i, kind in enumerate(c.layer_types):
        if kind == "full_attention":
            shapes |= dict.fromkeys(
                (f"layers.{i}.keys", f"layers.{i}.values"), (2, c.num_key_value_heads, 5, c.head_dim)
            )
        else:
            heads = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
            shapes |= {f"layers.{i}.recurrent_state": (2, 2, *heads), f"layers.{i}.conv_state": (2, 2, c.conv_dim, 3)}
    assert {name: array.shape for name, array in states.items()} == shapes
    stored = load_file(tmp_path / "s")
    assert {name: (a.dtype, a.tobytes()) for name, a in stored.items()} == {
        name: (a.dtype, np.ascontiguousarray(a).tobytes()) for name, a in states.items()
    }
    with safe_open(tmp_path / "s", "numpy") as file:
        metadata = file.metadata()
    assert sorted(metadata) == ["config", "digest", "dtype", "format", "order", "version"]
    assert (metadata["format"], metadata["version"], metadata["order"]) == ("qwenref.states", "1", "hf")
    assert repr(states).startswith("<States of 2 row(s) after 2, 5 tokens: ") and "hf order" in repr(states)


def test_gguf_order_moves_value_heads_in_states_and_windows_alone(one, ids, tmp_path):
    hf = qwenref.export_states(one, ids, [3, 40])
    gguf = qwenref.export_states(one, ids, [3, 40], path=tmp_path / "s", order="gguf")
    G, V, D, key = 2, 6, 16, 64  # 2 key heads of 16 channels, twice (q and k), then 6 value heads of 16
    ratio = V // G
    for name in hf:
        if name.endswith("recurrent_state"):
            for h in range(V):  # head h of a GGUF file reads key head h % G: it is this one of a checkpoint
                assert np.array_equal(gguf[name][:, :, h], hf[name][:, :, h % G * ratio + h // G])
        elif name.endswith("conv_state"):
            assert np.array_equal(gguf[name][:, :, :key], hf[name][:, :, :key])
            for h in range(V):
                there, here = (key + x * D for x in (h, h % G * ratio + h // G))
                assert np.array_equal(gguf[name][:, :, there : there + D], hf[name][:, :, here : here + D])
        else:
            assert np.array_equal(gguf[name], hf[name])
    loaded = qwenref.States.load(tmp_path / "s", one)
    assert loaded.order == "gguf" and cache_bits(loaded.cache(40)) == cache_bits(hf.cache(40))
    back = loaded.in_order("hf")
    assert {name: a.tobytes() for name, a in back.items()} == {name: a.tobytes() for name, a in hf.items()}
    loaded.save(tmp_path / "t", order="hf")
    assert load_file(tmp_path / "t").keys() == hf.keys()
    assert qwenref.States.load(tmp_path / "t")["layers.0.conv_state"].tobytes() == hf["layers.0.conv_state"].tobytes()


def test_a_state_in_gguf_order_is_read_by_the_rule_of_gguf_files(one, ids):
    """The next token by the tiled rule, from the exported state, reads what the model reads."""
    states = qwenref.export_states(one, ids, 20, order="gguf")
    with qwenref.capture(one, "layers.0.linear_attn.*") as c:
        one(ids[:, :21])
    q, k, v, beta, g, read = (
        c[f"layers.0.linear_attn.{name}"][:, 20:] for name in ("q", "k", "v", "beta", "g", "read")
    )
    tiled = [np.tile(a, (1, 1, 3, 1)) for a in (q, k)]  # value head h reads key head h % 2
    from qwenref.deltanet import to_gguf_order

    moved = [to_gguf_order(a, 2, 6, axis=2) for a in (v, g, beta)]
    scale = one.model.layers[0].linear_attn.scaling
    found = naive.gated_delta_rule(*tiled, *moved, states["layers.0.recurrent_state"][:, 0], scale=scale)
    # one step of 16 products and sums in float32 against float64
    assert np.abs(from_gguf_order(found, 2, 6, axis=2) - read).max() <= 40 * 2**-24 * max(1, np.abs(read).max())


def test_pads_and_packed_rows(one, ids):
    mask = np.ones((2, 70), int)
    mask[0, 5:15], mask[1, :10] = 0, 0
    filled = ids.copy()
    for row in range(2):
        filled[row, mask[row] == 1] = ids[row, :60]
    states = qwenref.export_states(one, filled, [7, 60], attention_mask=mask)
    plain = qwenref.export_states(one, ids, [7, 60])
    assert {n: a.tobytes() for n, a in states.items()} == {n: a.tobytes() for n, a in plain.items()}
    numbers = np.repeat([4, 9], [30, 40])[None].repeat(2, 0)
    packed = qwenref.export_states(one, ids, [29, 31, 50], sequence_ids=numbers)
    assert packed["sequence"].tolist() == [[4, 9, 9]] * 2 and packed["sequence_begin"].tolist() == [[0, 30, 30]] * 2
    expected = one(ids, sequence_ids=numbers).logits
    for n in (29, 31, 50):
        logits = one(ids[:, n:], sequence_ids=numbers[:, n:], cache=packed.cache(n)).logits
        assert logits.tobytes() == np.ascontiguousarray(expected[:, n:]).tobytes()


def test_the_models_own_profile_and_one_row(one, ids):
    with qwenref.numerics("fp64"):
        wanted = qwenref.export_states(one, ids[:1], [3, 9])
    one.numerics = "fp64"
    try:
        states = qwenref.export_states(one, ids[0].tolist(), (9, 3))
        assert {n: a.tobytes() for n, a in states.items()} == {n: a.tobytes() for n, a in wanted.items()}
        assert states.dtype == np.float64 == states["layers.0.recurrent_state"].dtype
        assert one(ids[:1, 9:12], cache=states.cache(9)).logits.dtype == np.float64
        embeds = one.model.embed_tokens.weight[ids[:1]].astype(np.float64)
        states = qwenref.export_states(one, None, (9, 3), inputs_embeds=embeds)
        assert {n: a.tobytes() for n, a in states.items()} == {n: a.tobytes() for n, a in wanted.items()}
    finally:
        one.numerics = "fp32"


def test_another_process_goes_on_from_the_file(ids, tmp_path):
    tiny, tokens = qwenref.from_pretrained("tiny"), np.arange(40) * 7 % 900
    qwenref.export_states(tiny, tokens, [16, 33], path=tmp_path / "s", order="gguf")
    program = """
import sys
import numpy as np, qwenref
tiny, tokens = qwenref.from_pretrained("tiny"), np.arange(40) * 7 % 900
states = qwenref.States.load(sys.argv[1], tiny)
expected = tiny(tokens).logits
for n in (16, 33):
    logits = tiny(tokens[n:], cache=states.cache(n)).logits
    print(logits.tobytes() == np.ascontiguousarray(expected[:, n:]).tobytes())
"""
    assert fresh.python(program, tmp_path / "s").stdout.split() == ["True", "True"]


@pytest.mark.parametrize("tokens", [0, -1, [], [3, 0], 1.5, "3", [True]], ids=repr)
def test_tokens_that_are_no_numbers_of_tokens(one, ids, tokens):
    with pytest.raises(InputError, match="^export_states: tokens "):
        qwenref.export_states(one, ids, tokens)


def test_refused(one, ids, tmp_path):
    with pytest.raises(InputError, match="no row may end before token 71\n    found    70 tokens in row 0"):
        qwenref.export_states(one, ids, [3, 71])
    mask = np.ones((2, 70), int)
    mask[1, :20] = 0
    with pytest.raises(InputError, match="found    50 tokens in row 1"):
        qwenref.export_states(one, ids, 60, path=tmp_path / "s", attention_mask=mask)
    with pytest.raises(InputError, match="states: order 'tiled'\n    expected 'hf' or 'gguf'"):
        qwenref.export_states(one, ids, 3, path=tmp_path / "s", order="tiled")
    assert not any(tmp_path.iterdir())
    with pytest.raises(TypeError, match="^unexpected 'cache'"):
        qwenref.export_states(one, ids, 3, cache=qwenref.Cache(one, batch=2))
    states = qwenref.export_states(one, ids, [3, 5], path=tmp_path / "s")
    with pytest.raises(InputError, match=r"no states after 4 tokens\n    expected \[3, 5\]"):
        states.cache(4)
    with pytest.raises(CheckpointError, match="made with another model"):
        qwenref.States.load(tmp_path / "s", CONFIGS["GQA 6"])
    with pytest.raises(CheckpointError, match="not a file of this kind\n    found    qwenref.states"):
        qwenref.Cache.load(tmp_path / "s", one)
    good = (tmp_path / "s").read_bytes()
    for at in np.random.default_rng(0).integers(8, len(good), 40).tolist():
        (tmp_path / "s").write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(QwenrefError):
            qwenref.States.load(tmp_path / "s", one)
