"""What a caller can get wrong: for each the exception and its exact first line, and nothing has changed afterwards."""

import numpy as np
import pytest
from cache_arrays import cache_bits
from text_configs import CONFIGS, text_config

import qwenref
from qwenref.errors import CapabilityMissing, DTypeError, InputError, ShapeError

CONFIG = text_config("lllf", max_position_embeddings=64)
VOCAB, H = CONFIG["vocab_size"], CONFIG["hidden_size"]
IDS = np.random.default_rng(8).integers(0, VOCAB, (2, 5))
X = np.random.default_rng(9).standard_normal((2, 5, H)).astype(np.float32)
OTHER = qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"])
PAST = 7


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIG, seed=41)


@pytest.fixture(scope="module")
def expected(model):
    """Bits the model gives before anything was done wrong."""
    return model(IDS).logits.tobytes()


@pytest.fixture
def cache(model):
    """Two rows of PAST tokens, one of them a pad in the second row."""
    cache = qwenref.Cache(model, batch=2)
    mask = np.ones((2, PAST), int)
    mask[1, 2] = 0
    model(np.arange(2 * PAST).reshape(2, PAST), attention_mask=mask, cache=cache)
    return cache


def ones(*shape):
    return np.ones(shape, int)


def given(**arguments):
    return arguments


def on(**arguments):
    """Good ids, and something else"""
    return {"input_ids": IDS, **arguments}


# name: (keyword arguments of a call on a cache of PAST tokens, exception, first line of the message)
CALLS = {
    # ids
    "negative id": (
        given(input_ids=[[1, -1], [2, 3]]),
        InputError,
        f"input_ids[0, 1] is -1; the vocabulary has {VOCAB}",
    ),
    "id of the vocabulary's size": (
        given(input_ids=[[1, 2], [VOCAB, VOCAB + 1000]]),
        InputError,
        f"input_ids[1, 0] is {VOCAB}; the vocabulary has {VOCAB}",
    ),
    "id of 64 unsigned bits": (
        given(input_ids=np.array([[2**63]] * 2, np.uint64)),
        InputError,
        "input_ids: 9,223,372,036,854,775,808 is more than 64 bits hold",
    ),
    "id of 70 bits": (given(input_ids=[[2**70], [1]]), DTypeError, "input_ids: object values"),
    "float ids": (given(input_ids=[[1.0], [2.0]]), DTypeError, "input_ids: float64 values"),
    "bool ids": (given(input_ids=[[True], [False]]), DTypeError, "input_ids: bool values"),
    "text": (given(input_ids="hello"), DTypeError, "input_ids: <U5 values"),
    "ragged list": (given(input_ids=[[1, 2], [3]]), ShapeError, "input_ids: rows of different lengths"),
    "None in a list": (given(input_ids=[[1], [None]]), DTypeError, "input_ids: object values"),
    "empty list": (given(input_ids=[]), InputError, "input_ids: an empty prompt"),
    "empty rows": (given(input_ids=np.zeros((2, 0), int)), InputError, "input_ids: an empty prompt"),
    "one number": (given(input_ids=5), ShapeError, "input_ids: 0-D"),
    "3-D ids": (given(input_ids=ones(2, 1, 1)), ShapeError, "input_ids: 3-D"),
    "neither ids nor embeddings": ({}, InputError, "forward: input_ids or inputs_embeds"),
    "ids and embeddings": (on(inputs_embeds=X), InputError, "forward: input_ids or inputs_embeds"),
    # embeddings
    "embeddings too narrow": (given(inputs_embeds=X[..., :5]), ShapeError, "inputs_embeds: wrong shape"),
    "embeddings of one row": (given(inputs_embeds=X[0]), ShapeError, "inputs_embeds: wrong shape"),
    "embeddings of no token": (given(inputs_embeds=X[:, :0]), ShapeError, "inputs_embeds: wrong shape"),
    "embeddings of no row": (given(inputs_embeds=X[:0]), ShapeError, "inputs_embeds: wrong shape"),
    "ragged embeddings": (
        given(inputs_embeds=[[[1.0]], [[1.0, 2]]]),
        ShapeError,
        "inputs_embeds: rows of different lengths",
    ),
    "float64 embeddings": (given(inputs_embeds=X.astype(float)), DTypeError, "inputs_embeds: float64 values"),
    "integer embeddings": (given(inputs_embeds=ones(2, 5, H)), DTypeError, "inputs_embeds: int64 values"),
    "complex embeddings": (given(inputs_embeds=X.astype("c8")), DTypeError, "inputs_embeds: complex64 values"),
    # mask
    "mask too short": (on(attention_mask=ones(2, 4)), ShapeError, "attention_mask: wrong shape"),
    "mask of the past alone": (on(attention_mask=ones(2, PAST)), ShapeError, "attention_mask: wrong shape"),
    "mask of one row": (on(attention_mask=ones(5)), ShapeError, "attention_mask: wrong shape"),
    "4-D mask": (on(attention_mask=ones(2, 1, 5, 12)), ShapeError, "attention_mask: wrong shape"),
    "ragged mask": (on(attention_mask=[[1], [1, 1]]), ShapeError, "attention_mask: rows of different lengths"),
    "mask of words": (on(attention_mask=[["a"] * 5] * 2), DTypeError, "attention_mask: <U1"),
    "mask of twos": (on(attention_mask=2 * ones(2, 5)), InputError, "attention_mask: values other than 0 and 1"),
    "additive mask": (
        on(attention_mask=np.full((2, 5), -np.inf)),
        InputError,
        "attention_mask: values other than 0 and 1",
    ),
    "NaN in the mask": (
        on(attention_mask=np.full((2, 5), np.nan)),
        InputError,
        "attention_mask: values other than 0 and 1",
    ),
    "mask that contradicts the past": (
        on(attention_mask=ones(2, PAST + 5)),
        InputError,
        "attention_mask[1, 2] differs from what was fed before",
    ),
    # positions
    "positions too short": (on(position_ids=ones(2, 4)), ShapeError, "position_ids: wrong shape"),
    "two axes of positions": (on(position_ids=ones(2, 2, 5)), ShapeError, "position_ids: wrong shape"),
    "1-D positions": (on(position_ids=ones(5)), ShapeError, "position_ids: 1-D"),
    "float positions": (on(position_ids=np.ones((2, 5))), DTypeError, "position_ids: float64 values"),
    "negative positions": (on(position_ids=-ones(2, 5)), InputError, "position_ids: negative positions"),
    "positions that go back": (
        on(position_ids=[[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]]),
        InputError,
        "position_ids[1, 2] goes back from 8 to 0",
    ),
    # sequences
    "1-D sequence numbers": (on(sequence_ids=ones(5)), ShapeError, "sequence_ids: 1-D"),
    "too few sequence numbers": (on(sequence_ids=ones(2, 4)), ShapeError, "sequence_ids: wrong shape"),
    "float sequence numbers": (on(sequence_ids=np.ones((2, 5))), DTypeError, "sequence_ids: float64 values"),
    # length
    "too long": (
        given(input_ids=ones(2, 65)),
        InputError,
        f"{PAST + 65} tokens are more than the model takes",
    ),
    "too long with what is in the cache": (
        given(input_ids=ones(2, 58)),
        InputError,
        "65 tokens are more than the model takes",
    ),
    # options
    "near keyword": (
        on(atention_mask=None),
        TypeError,
        "unexpected 'atention_mask'; did you mean attention_mask?",
    ),
    "unknown keyword": (on(zzz=1), TypeError, "unexpected 'zzz'"),
    "pictures": (
        on(pixel_values=X),
        CapabilityMissing,
        "forward: pixel_values for a model of text alone",
    ),
    "negative logits_to_keep": (on(logits_to_keep=-1), InputError, "logits_to_keep: -1"),
    "logits_to_keep outside": (on(logits_to_keep=[0, 5]), InputError, "logits_to_keep: [0, 5]"),
    "logits_to_keep before": (on(logits_to_keep=[-6]), InputError, "logits_to_keep: [-6]"),
    "bool logits_to_keep": (on(logits_to_keep=True), InputError, "logits_to_keep: True"),
    "logits_to_keep as a mask": (
        on(logits_to_keep=[True] * 5),
        InputError,
        "logits_to_keep: [True, True, True, True, True]",
    ),
    "float logits_to_keep": (on(logits_to_keep=1.5), InputError, "logits_to_keep: 1.5"),
    "2-D logits_to_keep": (on(logits_to_keep=[[0]]), InputError, "logits_to_keep: [[0]]"),
    "logits_to_keep None": (on(logits_to_keep=None), InputError, "logits_to_keep: None"),
    # caches
    "no cache at all": (on(cache={}), InputError, "cache: a dict"),
    "cache of another batch": (given(input_ids=IDS[:1]), ShapeError, "cache: another number of rows"),
    "cache of another model": (
        on(cache=qwenref.Cache(OTHER, batch=2)),
        InputError,
        "cache: made for another model",
    ),
    "two caches": (
        on(past_key_values=qwenref.Cache(OTHER, batch=2)),
        InputError,
        "forward: cache and past_key_values",
    ),
}


@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.replace(" ", "-"))
def test_a_call_of_the_model(model, expected, cache, name):
    arguments, kind, line = CALLS[name]
    before = cache_bits(cache)
    with pytest.raises(kind) as caught:
        model(**{"cache": cache, **arguments})
    assert type(caught.value) is kind and str(caught.value).split("\n")[0] == line
    assert well_formed(caught.value)
    assert cache_bits(cache) == before and cache.step is None
    assert model(IDS).logits.tobytes() == expected


def well_formed(error):
    """Details are indented under their labels, and the message is short."""
    details = str(error).split("\n")[1:]
    return len(details) <= 11 and all(
        line.startswith(("    found    ", "    expected ", "    do       ", " " * 13)) for line in details
    )


def test_the_length_limit_of_one_call(model, expected):
    with pytest.raises(
        InputError, match=r"^65 tokens are more than the model takes\n.*0 in the cache, 65 new\n.*at most 64 "
    ):
        model(ones(1, 65))
    assert np.isfinite(model(ones(1, 64)).logits).all()
    assert model(IDS).logits.tobytes() == expected


def test_what_is_odd_but_right(model, expected):
    """Other ways of saying the same are taken."""
    same = [
        model(IDS.tolist()), model(IDS.astype(np.uint8)), model(np.asfortranarray(IDS)), model(IDS[::-1][::-1]),
        model(IDS, attention_mask=np.ones((2, 5))), model(IDS, attention_mask=[[True] * 5] * 2),
        model(IDS, position_ids=np.arange(5)[None]), model(IDS, past_key_values=None),
        model(IDS, logits_to_keep=range(5)),
        model(inputs_embeds=model.model.embed_tokens(IDS)),
        model(inputs_embeds=np.asfortranarray(model.model.embed_tokens(IDS))),
    ]  # fmt: skip
    assert {out.logits.tobytes() for out in same} == {expected}
    assert model(IDS, logits_to_keep=[]).logits.shape == (2, 0, VOCAB)
    cache = qwenref.Cache(model, batch=2)
    model(IDS, cache=cache, past_key_values=None)
    model(IDS, cache=cache, past_key_values=cache)
    assert cache.length.tolist() == [10, 10]


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_computed(model, expected, odd):
    x = X.copy()
    x[0, 2, 3] = odd
    logits = model(inputs_embeds=x).logits
    assert np.isfinite(logits[0, :2]).all() and np.isnan(logits[0, 2:]).all() and np.isfinite(logits[1]).all()
    assert model(IDS).logits.tobytes() == expected


# name: (module, its arguments, exception, words of the message in this order, note)
ALONE = {
    "layer": (
        "model.layers.3",
        X[..., :5],
        ShapeError,
        ("layers.3.input_layernorm: input width 5, expected 64", "found    float32 [B 2, T 5, 5]", "expected [*, 64]"),
        "input_layernorm (RMSNorm)",
    ),
    "attention": (
        "model.layers.3.self_attn",
        X[..., :5],
        ShapeError,
        ("layers.3.self_attn.q_proj: input width 5, expected 64", "found", "expected [*, 64]"),
        "q_proj (Linear)",
    ),
    "DeltaNet": (
        "model.layers.0.linear_attn",
        X[..., :5],
        ShapeError,
        ("layers.0.linear_attn.in_proj_qkv: input width 5, expected 64", "found", "expected [*, 64]"),
        "in_proj_qkv (Linear)",
    ),
    "linear": (
        "model.layers.3.self_attn.q_proj",
        X[..., :5],
        ShapeError,
        ("layers.3.self_attn.q_proj: input width 5, expected 64", "found", "expected [*, 64]"),
        " (Linear)",
    ),
    "head": ("lm_head", X[..., :5], ShapeError, ("lm_head: input width 5, expected 64", "found"), "lm_head (Linear)"),
    "mlp": (
        "model.layers.3.mlp",
        X[..., :5],
        ShapeError,
        ("layers.3.mlp.gate_proj: input width 5",),
        "gate_proj (Linear)",
    ),
    "norm": (
        "model.norm",
        X[..., :5],
        ShapeError,
        ("norm: input width 5, expected 64", "found"),
        "model.norm (RMSNorm)",
    ),
    "conv": (
        "model.layers.0.linear_attn.conv1d",
        X[..., :5],
        ShapeError,
        ("causal_conv1d: ", "found", "expected"),
        " (Conv1d)",
    ),
    "layer without rows": (
        "model.layers.3",
        X[0],
        ShapeError,
        ("hidden_states: 2-D ndarray", "expected [B, T, H 64]"),
        "(Attention)",
    ),
    "attention without rows": (
        "model.layers.3.self_attn",
        X[0],
        ShapeError,
        ("hidden_states: 2-D ndarray", "expected"),
        "(Attention)",
    ),
    "DeltaNet of a list": (
        "model.layers.0.linear_attn",
        X.tolist(),
        ShapeError,
        ("hidden_states: 3-D list", "expected"),
        "(GatedDeltaNet)",
    ),
    "float64 into a linear": (
        "lm_head",
        X.astype(float),
        DTypeError,
        ("linear: x", "found    float64", "expected float32"),
        "(Linear)",
    ),
    "ids outside": (
        "model.embed_tokens",
        np.array([VOCAB]),
        InputError,
        ("embedding: ids[0] is 211; the vocabulary has 211",),
        "(Embedding)",
    ),
    "float ids": (
        "model.embed_tokens",
        np.array([1.0]),
        DTypeError,
        ("embedding: ids", "found    float64", "expected"),
        "(Embedding)",
    ),
}


@pytest.mark.parametrize("name", ALONE, ids=lambda name: name.replace(" ", "-"))
def test_a_part_alone(model, expected, name):
    path, x, kind, words, note = ALONE[name]
    with pytest.raises(kind) as caught:
        model.get_submodule(path)(x)
    at = 0
    for word in words:
        at = str(caught.value).index(word, at) + len(word)
    assert len(caught.value.__notes__) == 1
    said = caught.value.__notes__[0]
    assert said.startswith(f"in module {path}") and said.endswith(note)
    assert model(IDS).logits.tobytes() == expected


SETTINGS = {
    "unknown numerics": (lambda: qwenref.numerics("fp8"), InputError, "numerics: no profile 'fp8'"),
    "numerics None": (lambda: qwenref.numerics(None), InputError, "numerics: no profile None"),
    "numerics of a list": (lambda: qwenref.numerics([]), InputError, "numerics: no profile []"),
    "no threads": (lambda: qwenref.set_num_threads(0), InputError, "set_num_threads: 0 threads"),
    "negative threads": (lambda: qwenref.set_num_threads(-3), InputError, "set_num_threads: -3 threads"),
    "threads without end": (lambda: qwenref.set_num_threads(10**6), InputError, "set_num_threads: 1000000 threads"),
    "threads and a half": (lambda: qwenref.set_num_threads(1.5), TypeError, None),
    "threads in words": (lambda: qwenref.set_num_threads("2"), TypeError, None),
    "cache of no rows": (lambda: qwenref.Cache(CONFIG, batch=0), InputError, "Cache: batch 0"),
    "cache of half a row": (lambda: qwenref.Cache(CONFIG, batch=0.5), InputError, "Cache: batch 0.5"),
    "cache of True rows": (lambda: qwenref.Cache(CONFIG, batch=True), InputError, "Cache: batch True"),
    "cache of a number": (lambda: qwenref.Cache(7), qwenref.ConfigError, "config: int"),
}


@pytest.mark.parametrize("name", SETTINGS, ids=lambda name: name.replace(" ", "-"))
def test_a_setting(model, expected, name):
    call, kind, line = SETTINGS[name]
    threads, level = qwenref.get_num_threads(), qwenref._C.cpu_level()
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert line is None or str(caught.value).split("\n")[0] == line
    assert well_formed(caught.value)
    assert (qwenref.get_num_threads(), qwenref._C.cpu_level()) == (threads, level)
    assert model(IDS).logits.tobytes() == expected


def test_an_unknown_profile_lists_those_there_are():
    with pytest.raises(InputError, match="\n    expected " + ", ".join(qwenref.numerics.profiles())):
        qwenref.numerics("bf16")


def test_float64_embeddings_under_fp64_are_what_they_are(model):
    with qwenref.numerics("fp64"):
        exact, rounded = (model(inputs_embeds=x).logits for x in (X.astype(float) + 1e-12, X))
        with pytest.raises(DTypeError, match="inputs_embeds: int64 values"):
            model(inputs_embeds=ones(1, 2, H))
    assert exact.dtype == np.float64 and 0 < np.abs(exact - rounded).max() < 1e-8
