"""What a forward returns can be asked by attribute, key and position, and says what is not there."""

import pickle

import numpy as np
import pytest
from text_configs import text_config

import qwenref
from qwenref.outputs import ModelOutput


@pytest.fixture(scope="module")
def out():
    model = qwenref.from_config(text_config("lf"), seed=0)
    return model([1, 2, 3], use_cache=True, output_hidden_states=True)


def test_attribute_key_and_position_are_the_same(out):
    assert out.logits is out["logits"] is out[0]
    assert list(out) == list(out.keys()) and len(out) == len(out.keys()) == len(out.values()) == len(out.to_tuple())
    for i, (name, value) in enumerate(out.items()):
        assert value is out[name] is out[i] is getattr(out, name)
    assert out[:2] == out.values()[:2] and out[-1] is out.values()[-1]


def test_the_older_name_of_the_cache(out):
    assert out.past_key_values is out["past_key_values"] is out["cache"] is out.cache
    assert "past_key_values" in out and "past_key_values" not in list(out)


def test_what_was_not_asked_for_is_none_and_absent(out):
    assert out.attentions is None and "attentions" not in out
    with pytest.raises(KeyError, match="'attentions' is not among logits, cache"):
        out["attentions"]
    bare = ModelOutput(logits=np.zeros(1), cache=None)
    assert bare.past_key_values is None and "past_key_values" not in bare and list(bare) == ["logits"]


@pytest.mark.parametrize("name", ["keys", "items", "__class__", "loss"])
def test_a_key_names_a_value_and_nothing_else(out, name):
    assert name not in out
    with pytest.raises(KeyError):
        out[name]


def test_repr_has_one_line_for_each_value(out):
    lines = repr(out).splitlines()
    assert lines[0] == "ModelOutput" and [line.split()[0] for line in lines[1:]] == list(out)
    assert lines[1].split(maxsplit=1)[1] == "float32 [1, 3, 211]"


def test_an_output_can_be_pickled(out):
    again = pickle.loads(pickle.dumps(ModelOutput(logits=out.logits)))
    assert np.array_equal(again.logits, out.logits) and list(again) == ["logits"]
