"""Messages people meet first: the first line stands alone, details follow in order, near names are given."""

import re
import warnings

import numpy as np
import pytest
from test_sizes import ROOT_27B

import qwenref


@pytest.fixture(scope="module")
def large():
    """A model whose numbers are never looked at, for messages that come before any."""
    return qwenref.from_config(ROOT_27B, device="meta")


def first_line(error, function):
    with pytest.raises(error) as caught:
        function()
    lines = str(caught.value).splitlines()
    assert len(lines) <= 12 and all(
        re.match(r"    (found   |expected|do      ) |             ", line) for line in lines[1:]
    )
    return lines[0]


def test_a_hook_that_returns_something_odd(tiny):
    layer = tiny.model.language_model.layers[0]
    with layer.register_forward_hook(lambda module, args, output: (output, 1)):
        said = first_line(qwenref.HookError, lambda: tiny([1, 2]))
    assert re.fullmatch(
        r"layers\.0: forward hook .*<lambda> \(.*test_errors\.py, line \d+\) returned a tuple of 2; "
        r"the layer returns an array\. Return None to leave the output alone",
        said,
    )


@pytest.mark.parametrize("answer, words", [(0, "an int"), ([1.0], "a list"), ("x", "a str")])
def test_a_hook_that_returns_no_array(tiny, answer, words):
    with tiny.lm_head.register_forward_hook(lambda *seen: answer):
        assert f"returned {words}; the module returns an array." in first_line(qwenref.HookError, lambda: tiny([1, 2]))


def test_attention_returns_two_values_and_so_must_its_hook(tiny):
    attention = tiny.model.language_model.layers[3].self_attn
    with attention.register_forward_hook(lambda module, args, output: output[0]):
        said = first_line(qwenref.HookError, lambda: tiny([1, 2]))
    assert "returned an array; the module returns a tuple of 2." in said
    with attention.register_forward_hook(lambda module, args, output: (output[0] * 0, None)):
        tiny([1, 2])


def test_a_notebook_cell_is_called_by_its_number(monkeypatch):
    """By what IPython offers for it, which is faked here; without a notebook the file is named."""
    import sys
    import types

    from qwenref.handles import hook_name

    code = compile("hook = lambda m, a, o: None", "/somewhere/3141.py", "exec")
    names = {}
    exec(code, names)
    assert hook_name(names["hook"]) == "<lambda> (/somewhere/3141.py, line 1)"
    compiler = types.SimpleNamespace(format_code_name=lambda name: ("Cell", "In[7]") if "3141" in name else None)
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert hook_name(names["hook"]) == "<lambda> (notebook cell 7, line 1)"
    assert "test_errors.py, line" in hook_name(lambda: None)


def test_the_mixer_of_the_other_kind(large):
    layers = large.model.language_model.layers
    assert first_line(AttributeError, lambda: layers[3].linear_attn) == (
        "layer 3 is full attention and has no linear_attn; its mixer is self_attn (DeltaNet layers: 0, 1, 2, 4, …)"
    )
    assert first_line(AttributeError, lambda: layers[0].self_attn) == (
        "layer 0 is Gated DeltaNet and has no self_attn; its mixer is linear_attn (attention layers: 3, 7, 11, 15, …)"
    )


@pytest.mark.parametrize(
    "path, said",
    [
        ("model.language_model.layers.0.attn", "layer 0 is Gated DeltaNet and has no attn; its mixer is linear_attn"),
        ("model.language_model.layers.3.ln2", "a DecoderLayer has no ln2; here it is post_attention_layernorm"),
        ("layers", "ForConditionalGeneration has no layers; here it is model.language_model.layers"),
        ("model.layers", "Model has no layers; here it is language_model.layers"),
        ("model.language_model.blocks", "TextModel has no blocks; here it is layers"),
        ("unembed", "ForConditionalGeneration has no unembed; here it is lm_head"),
        ("model.language_model.layers.0.nothing", "'DecoderLayer' object has no attribute 'nothing'"),
        ("lm_head.wieght", "'Linear' object has no attribute 'wieght'"),
    ],
)
def test_names_from_elsewhere_are_mapped_in_the_message_only(large, path, said):
    *before, last = path.split(".")
    module = large.get_submodule(".".join(before))
    assert not hasattr(module, last)
    with pytest.raises(AttributeError) as caught:
        getattr(module, last)
    assert str(caught.value) == said and caught.value.name == last and caught.value.obj is module


def test_a_class_whose_message_fails_is_still_an_attribute_error():
    layer = qwenref.DecoderLayer.__new__(qwenref.DecoderLayer)
    with pytest.raises(AttributeError, match="has no attribute 'layer_type'"):
        layer.linear_attn  # noqa: B018
    odd = type("Odd", (qwenref.Module,), {"_absent": lambda self, name: 5})()
    with pytest.raises(AttributeError, match="'Odd' object has no attribute 'x'"):
        odd.x  # noqa: B018


@pytest.mark.parametrize("pattern", ["layers.0.linear_attn.attn_weights", "layers.0.self_attn.attn_probs"])
def test_attention_weights_of_a_deltanet_layer(tiny, pattern):
    assert first_line(KeyError, lambda: qwenref.capture(tiny, pattern)) == (
        "layers.0.linear_attn has no attn_weights; "
        "its exact token-to-token matrix is layers[0].linear_attn.token_map(...)"
    )


def test_a_pattern_without_a_match(large):
    said = first_line(KeyError, lambda: qwenref.capture(large, "layers.*.self_atn"))
    assert said.startswith("'layers.*.self_atn' matches nothing. Near: layers.*.self_attn (16 names)")
    said = first_line(KeyError, lambda: qwenref.capture(large, "blocks.3"))
    assert said == "'blocks.3' matches nothing. Near: layers.* (64 names)"


def test_a_token_out_of_range(large):
    ids = np.zeros((1, 20), int)
    ids[0, 12] = 248_400
    assert first_line(ValueError, lambda: large(ids)).startswith(
        "input_ids[0, 12] is 248,400; the vocabulary has 248,320"
    )


def test_an_unknown_keyword(tiny):
    said = first_line(TypeError, lambda: tiny([1], atention_mask=[1]))
    assert said == "unexpected 'atention_mask'; did you mean attention_mask?"


def test_nan_in_the_input_is_computed(tiny):
    embeds = np.zeros((1, 3, 128), np.float32)
    embeds[0, 1, 5] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qwenref.QwenrefWarning)
        logits = tiny(inputs_embeds=embeds).logits
    assert np.isfinite(logits[0, 0]).all() and np.isnan(logits[0, 1:]).all()


def test_every_error_has_a_code_for_programs():
    kinds = [value for value in vars(qwenref).values() if isinstance(value, type)]
    codes = [kind.code for kind in kinds if issubclass(kind, qwenref.QwenrefError)]
    assert len(codes) > 10 and len(set(codes)) == len(codes)


def test_a_wrong_width_is_told_of_the_input_and_a_wrong_bias_of_the_bias(tiny):
    """Whoever hands over 127 channels is not told that the weight has the wrong shape."""
    q_proj = tiny.get_submodule("model.language_model.layers.3.self_attn.q_proj")
    with pytest.raises(qwenref.ShapeError) as caught:
        q_proj(np.zeros((1, 4, 127), np.float32))
    assert str(caught.value).splitlines() == [
        "layers.3.self_attn.q_proj: input width 127, expected 128",
        "    found    float32 [B 1, T 4, 127]",
        "    expected [*, 128]   (linear weight [512, 128])",
    ]
    model = qwenref.from_pretrained("tiny")
    model.lm_head.weight = qwenref.Parameter(np.zeros((3, 128), np.float32))
    model.lm_head.bias = qwenref.Parameter(np.zeros(4, np.float32))
    with pytest.raises(qwenref.ShapeError, match="^linear: b"):
        model.lm_head(np.zeros((1, 128), np.float32))
