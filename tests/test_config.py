"""config.json: what is read from which place, and how a Config behaves as an object."""

import copy
import gc
import itertools
import json
import pickle
import sys
from pathlib import Path

import pytest
from config_cases import CONFIG_27B, FULL, LINEAR, ROPE_27B, SMALL, TEXT_27B, composite, read, rope, small

from qwenref import _C, errors

TINY = (Path(_C.__file__).parent / "tiny" / "config.json").read_text()


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_published_27b_geometry():
    config = read(CONFIG_27B)
    text, vision = config.text_config, config.vision_config
    assert config.defaults == ["vision_config.rope_parameters.rope_theta"]
    assert config.unknown == []
    assert (text.vocab_size, text.hidden_size, text.intermediate_size) == (248320, 5120, 17408)
    assert text.layer_types.count(LINEAR) == 48 and text.layer_types.count(FULL) == 16
    assert isinstance(text.layer_types, tuple) and text.layer_types[:4] == (LINEAR, LINEAR, LINEAR, FULL)
    assert (text.rotary_dim, text.rope_theta, text.mrope_section) == (64, 1e7, (11, 11, 10))
    assert isinstance(text.rope_theta, float)
    assert [text.mrope_axes.count(axis) for axis in range(3)] == [11, 11, 10] and text.mrope_axes[-1] == 1
    assert (text.key_dim, text.value_dim, text.conv_dim) == (2048, 6144, 10240)
    assert (vision.depth, vision.head_dim, vision.grid_side, vision.rope_theta) == (27, 72, 48, 1e4)
    assert config.image_token_id == 248056 and config.tie_word_embeddings is False
    assert text.rms_norm_eps == 1e-6 and text.attention_bias is False and text.hidden_act == "silu"
    assert text.eos_token_id == 248044 and text.pad_token_id is None


def test_embedded_model():
    config = _C.Config.from_json(TINY)
    assert (config.defaults, config.unknown) == ([], [])
    assert config.text_config.mrope_axes == (0, 1, 2, 0, 1, 2, 0, 1)
    assert config.to_dict() == json.loads(TINY) and config.to_json() == TINY


def test_every_absent_key_takes_its_class_default_and_is_listed():
    config = read({"model_type": "qwen3_5_text"})
    expected = {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    in_rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": (11, 11, 10)}
    assert {key: getattr(config, key) for key in in_rope} == in_rope
    assert sorted(config.defaults) == sorted([*expected, *(f"rope_parameters.{key}" for key in in_rope)])
    # Keys the classes do not write are no news when absent.
    assert (config.attn_output_gate, config.output_gate_type, config.mamba_ssm_dtype) == (True, "silu", "float32")
    assert (config.mtp_num_hidden_layers, config.mtp_use_dedicated_embeddings) == (0, False)


def test_class_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")  # the witness is an extra; the table above holds without it
    witness = transformers.Qwen3_5Config()
    config = read(
        {"model_type": "qwen3_5", "text_config": {"hidden_size": 3584}, "vision_config": {}},
    )
    for ours, theirs in ((config.text_config, witness.text_config), (config.vision_config, witness.vision_config)):
        shared = [key for key in dir(ours) if key in theirs.to_dict() and key not in ("hidden_size", "rope_parameters")]
        assert len(shared) > 10
        for key in shared:
            found, expected = getattr(ours, key), getattr(theirs, key)
            assert found == (tuple(expected) if isinstance(expected, list) else expected), key
    assert config.vision_config.hidden_size == witness.vision_config.hidden_size
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert getattr(config, key) == getattr(witness, key)


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        ({"layer_types": ..., "full_attention_interval": 2}, [LINEAR, FULL] * 2),
        ({"layer_types": ..., "full_attention_interval": 1}, [FULL] * 4),
        ({"layer_types": None, "full_attention_interval": 3}, [LINEAR, LINEAR, FULL, LINEAR]),
        ({"layer_types": ..., "full_attention_interval": ...}, [LINEAR] * 3 + [FULL]),
        ({"layer_types": [FULL, FULL, LINEAR, FULL], "full_attention_interval": 4}, [FULL, FULL, LINEAR, FULL]),
        ({"layer_types": [LINEAR] * 4, "full_attention_interval": ...}, [LINEAR] * 4),
    ],
)
def test_explicit_layer_types_beat_the_interval(changes, types):
    config = read(small(**changes))
    assert config.layer_types == tuple(types)
    interval = changes["full_attention_interval"]
    absent = None if changes["layer_types"] is not ... else 4
    assert config.full_attention_interval == (absent if interval is ... else interval)


THETA, FACTOR, SECTION = "rope_theta", "partial_rotary_factor", "mrope_section"


@pytest.mark.parametrize(
    ("changes", "theta", "width", "section", "defaults"),
    [
        ({}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(rope_theta=5e5)}, 5e5, 16, (3, 3, 2), []),
        # older spellings of the same kind
        ({"rope_parameters": rope(rope_type=..., type="default")}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(rope_type=..., type="mrope")}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(rope_type="default", type="mrope")}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(rope_type=..., mrope_interleaved=...)}, 1e4, 16, (3, 3, 2), []),
        # rope_scaling replaces rope_parameters whole
        ({"rope_scaling": rope(rope_theta=7.0), "rope_parameters": ...}, 7.0, 16, (3, 3, 2), []),
        ({"rope_scaling": rope(rope_theta=7.0, mrope_section=[4, 2, 2])}, 7.0, 16, (4, 2, 2), []),
        ({"rope_scaling": {"rope_theta": 7.0}}, 7.0, 8, (4, 0, 0), [FACTOR, SECTION]),
        ({"rope_scaling": None}, 1e4, 16, (3, 3, 2), []),
        ({"rope_scaling": {}}, 1e4, 16, (3, 3, 2), []),
        # keys beside it fill only what it lacks
        ({"rope_theta": 9.0, "partial_rotary_factor": 0.25}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(rope_theta=...), "rope_theta": 9.0}, 9.0, 16, (3, 3, 2), []),
        ({"rope_parameters": rope(partial_rotary_factor=...), FACTOR: 0.5}, 1e4, 16, (3, 3, 2), []),
        ({"rope_parameters": ..., "rope_theta": 9, FACTOR: 1.0}, 9.0, 32, (16, 0, 0), [SECTION]),
        ({"rope_parameters": None}, 1e4, 8, (4, 0, 0), [THETA, FACTOR, SECTION]),
        ({"mrope_section": [3, 3, 2], "mrope_interleaved": True}, 1e4, 16, (3, 3, 2), []),
        # without a section: 11, 11, 10 for a width of 64, else one axis
        ({"rope_parameters": {}, "head_dim": 256}, 1e4, 64, (11, 11, 10), [THETA, FACTOR, SECTION]),
        ({"rope_parameters": rope(mrope_section=...)}, 1e4, 16, (8, 0, 0), [SECTION]),
        ({"rope_parameters": rope(mrope_section=[1, 0, 0], partial_rotary_factor=0.0625)}, 1e4, 2, (1, 0, 0), []),
        # the width is cut as Python's int() does: 32 * 0.27 = 8.64
        ({"rope_parameters": rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.27)}, 1e4, 8, (2, 1, 1), []),
    ],
)
def test_rope_in_all_its_places(changes, theta, width, section, defaults):
    config = read(small(**changes))
    assert (config.rope_theta, config.rotary_dim, config.mrope_section) == (theta, width, section)
    place = "rope_scaling" if changes.get("rope_scaling") else "rope_parameters"
    assert config.defaults == [f"{place}.{key}" for key in defaults]
    f = range(width // 2)
    wanted = tuple(i % 3 if i % 3 and i < 3 * section[i % 3] else 0 for i in f)
    assert config.mrope_axes == wanted
    assert tuple(wanted.count(axis) for axis in range(3)) == section


def test_the_interleaving_rule_accepts_exactly_the_sections_it_can_give():
    accepted = set()
    for section in itertools.product(range(9), repeat=3):
        try:
            read(small(rope_parameters=rope(mrope_section=list(section))))
        except errors.ConfigError:
            continue
        accepted.add(section)
    given = set()
    for h, w in itertools.product(range(9), repeat=2):
        axes = [i % 3 if i % 3 and i < 3 * (0, h, w)[i % 3] else 0 for i in range(8)]
        if axes.count(1) == h and axes.count(2) == w:
            given.add((axes.count(0), h, w))
    assert accepted == given and (3, 3, 2) in given and (4, 4, 0) not in given


@pytest.mark.parametrize(
    ("root", "text", "tied", "own", "conflict"),
    [
        (True, ..., True, True, False),
        (False, ..., False, False, False),
        (..., True, True, True, False),
        (..., False, False, False, False),
        (..., ..., False, False, False),
        (True, True, True, True, False),
        (True, False, True, False, True),
        (False, True, False, True, True),
    ],
)
def test_tied_embeddings_root_first_and_conflict_told(root, text, tied, own, conflict):
    config = read(composite({"tie_word_embeddings": text}, tie_word_embeddings=root))
    assert config.tie_word_embeddings is tied
    assert config.text_config.tie_word_embeddings is own
    assert config.tie_conflict is conflict
    assert ("tie_word_embeddings" in config.defaults) == (root is ... and text is ...)


@pytest.mark.parametrize(
    "config",
    [
        small(hidden_act="swish", output_gate_type="swish"),
        small(attention_bias=True),
        small(architectures=["Qwen3_5ForCausalLM"]),
        small(architectures=None),
        small(quantization_config=None, eos_token_id=[1, 2], pad_token_id=-1),
        small(initializer_range=0, rms_norm_eps=1),
        composite(architectures=["Qwen3_5ForCausalLM"]),
        composite(architectures=...),
        composite(vision_config=None),
        composite(vision_config=...),
        composite(vision={"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}),
        composite(hidden_size=5120, language_model_only=False, layer_types=TEXT_27B["layer_types"]),
        composite(vision={"model_type": "qwen3_5_vision"}),
    ],
)
def test_other_forms_that_occur(config):
    found = read(config)
    assert found.unknown == []
    assert (found.vision_config is None) == (not config.get("vision_config"))


def test_unknown_keys_are_listed_with_their_place():
    config = composite({"num_experts": 4, "rope_parameters": ROPE_27B | {"factor": 4}}, {"new": []}, unsloth=True)
    assert read(config).unknown == [
        "unsloth",
        "text_config.rope_parameters.factor",
        "text_config.num_experts",
        "vision_config.new",
    ]
    assert read(small(image_token_id=3)).unknown == ["image_token_id"]  # a text-only model has no such thing
    assert read(small(image_token_id=3)).image_token_id == 3


# ---- the object -----------------------------------------------------------------------------------------------------


def test_mapping_is_what_the_file_holds():
    config, text = read(CONFIG_27B), read(CONFIG_27B).text_config
    assert list(config) == list(config.keys()) == list(CONFIG_27B) and len(config) == len(CONFIG_27B)
    assert dict(config) == dict(config.items()) == config.to_dict() == CONFIG_27B
    assert list(config.values()) == list(CONFIG_27B.values())
    assert text["hidden_size"] == 5120 and "hidden_size" in text and "hidden_size" not in config
    assert text.get("no_such") is None and text.get("no_such", 3) == 3 and text.get("head_dim") == 256
    assert type(text["rope_parameters"]["rope_theta"]) is int and type(text.rope_theta) is float
    assert config["text_config"] == TEXT_27B
    assert json.loads(text.to_json()) == TEXT_27B
    with pytest.raises(KeyError, match=r"config.json: no 'hiden_size' in text_config. Near: hidden_size"):
        text["hiden_size"]
    with pytest.raises(KeyError):
        text[3]


def test_nothing_handed_out_reaches_the_config():
    config = read(CONFIG_27B)
    config.to_dict()["text_config"]["hidden_size"] = 1
    config["text_config"]["layer_types"][0] = FULL
    config.text_config["layer_types"].clear()
    config.text_config.rope_parameters.clear()
    config.get("text_config").clear()
    next(iter(config.values())).clear()
    dict(config.items())["vision_config"].clear()
    config.defaults.clear()
    assert config == read(CONFIG_27B) and config.defaults


def test_read_only():
    config = read(CONFIG_27B)
    for thing, name in ((config, "image_token_id"), (config.text_config, "hidden_size"), (config, "anything")):
        with pytest.raises(AttributeError, match=f"read-only: cannot change '{name}'\n    do       build a new one"):
            setattr(thing, name, 1)
        with pytest.raises(AttributeError, match="read-only"):
            delattr(thing, name)
    with pytest.raises(TypeError):
        config["image_token_id"] = 1
    with pytest.raises(TypeError):
        _C.Config.hidden_size = 1
    with pytest.raises(TypeError):
        hash(config)
    changed = _C.Config.from_json(json.dumps(config.to_dict() | {"image_token_id": 7}))  # as the message advises
    assert changed.image_token_id == 7 and changed != config


def test_names_that_are_not_there():
    config, text = read(CONFIG_27B), read(SMALL)
    with pytest.raises(AttributeError, match=r"^config.json: no 'hidden_size' in the root, but config.text_config has"):
        _ = config.hidden_size
    with pytest.raises(AttributeError, match=r"^config.json: no 'hiden_size' in text_config. Near: hidden_size$"):
        _ = config.text_config.hiden_size
    with pytest.raises(AttributeError, match=r"^config.json: no 'hiden_size' in the root. Near: hidden_size$"):
        _ = text.hiden_size
    with pytest.raises(AttributeError, match=r"^config.json: no 'image_token_id' in the root$"):
        _ = text.image_token_id
    with pytest.raises(AttributeError, match="no 'zzz' in vision_config$"):
        _ = config.vision_config.zzz
    assert not hasattr(config, "_repr_html_") and not hasattr(config, "__array__")
    assert config.text_config.attention_dropout == 0.0  # known to the file only


def test_text_only_root_answers_for_its_text_section():
    config = read(SMALL)
    assert config.vision_config is None
    assert config.text_config == config
    for name in dir(config.text_config):
        if not name.startswith("__") and not callable(getattr(config, name)):
            assert getattr(config, name) == getattr(config.text_config, name), name
    assert config.layer_types == config.text_config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.tie_word_embeddings is True


def test_dir_holds_exactly_what_answers():
    for thing in (read(CONFIG_27B), read(CONFIG_27B).text_config, read(CONFIG_27B).vision_config, read(SMALL)):
        names = dir(thing)
        assert len(names) == len(set(names))
        for name in names:
            if name not in ("__abstractmethods__",):
                getattr(thing, name)
        assert set(thing.keys()) <= set(names)
    assert "hidden_size" in dir(read(SMALL)) and "image_token_id" not in dir(read(SMALL))


def test_equality_is_that_of_the_stored_values():
    config = read(CONFIG_27B)
    assert config == read(CONFIG_27B, source="elsewhere") and config == read(CONFIG_27B)
    assert config == _C.Config.from_json(json.dumps(CONFIG_27B, indent=4, sort_keys=True).encode())
    assert config != read(composite(vision={"depth": 26})) and config != CONFIG_27B and config != 3
    assert config.text_config == read(TEXT_27B)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy_give_equals(protocol):
    config = read(CONFIG_27B, source="dir/config.json")
    for thing in (config, config.text_config, config.vision_config):
        for other in (pickle.loads(pickle.dumps(thing, protocol)), copy.copy(thing), copy.deepcopy(thing)):
            assert type(other) is type(thing) and other == thing and other.source == "dir/config.json"
    assert pickle.loads(pickle.dumps(config, protocol)).to_json() == config.to_json()


def test_repr_is_a_short_summary():
    lines = repr(read(CONFIG_27B)).splitlines()
    assert lines == [
        "Config of config.json: qwen3_5, Qwen3_5ForConditionalGeneration",
        "  text      vocabulary 248320, hidden 5120, inner 17408, 64 layers",
        "  layers    48 linear_attention + 16 full_attention",
        "  attention 24 query / 4 kv heads x 256",
        "  delta     16 key heads x 128, 48 value heads x 128, convolution over 4",
        "  rotary    64 of 256, theta 10000000, sections 11/11/10",
        "  vision    27 blocks, width 1152, 16 heads, patch 16, merge 2, out 5120",
        "  tokens    image 248056, video 248057, vision start 248053, end 248054",
        "  embedding separate from lm_head",
        "  defaults  1: vision_config.rope_parameters.rope_theta",
    ]
    assert len(repr(read(SMALL | {f"extra_{i}": i for i in range(500)})).splitlines()) <= 40
    assert repr(read(SMALL, source="\u00e9" * 250)).startswith("Config of \u00e9")


def test_reading_and_refusing_leak_nothing():
    good, bad = json.dumps(CONFIG_27B), json.dumps(composite({"hidden_size": 0}))

    def work():
        config = _C.Config.from_json(good)
        pickle.loads(pickle.dumps(config.text_config))
        repr(config), dir(config), config.text_config.layer_types, list(config.items())
        for wrong in (lambda: config.no_such_name, lambda: config["no_such"], lambda: _C.Config.from_json(bad)):
            try:
                wrong()
            except (AttributeError, KeyError, errors.ConfigError):
                continue
            raise AssertionError("that should have failed")

    def growth(rounds):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(rounds):
            work()
        gc.collect()
        return sys.getallocatedblocks() - before

    growth(300)  # the interpreter's own caches fill first
    # One object lost in each round would be 2,000; the caches still move, by a few hundred whatever the rounds.
    assert growth(2000) < 1000


def test_replaced_types_and_a_replaced_json_do_no_harm(monkeypatch):
    kind = _C.TextConfig
    monkeypatch.setattr(_C, "TextConfig", int)
    assert type(read(CONFIG_27B).text_config) is kind
    for loads in (lambda text: [], lambda text: {"text_config": None}, lambda text: {}):
        monkeypatch.setattr(json, "loads", loads)
        with pytest.raises(TypeError, match="config.json: json.loads did not give the dict"):
            _C.Config.from_json(TINY)


def test_a_text_that_is_a_subclass_of_str_is_kept_as_plain_text():
    """Its attributes could lead back to the config, in a circle the collector does not see"""

    class Text(str):
        pass

    text, source = Text(TINY), Text("mine.json")
    config = _C.Config.from_json(text, source)
    assert type(config.to_json()) is str and type(config.source) is str and config.source == "mine.json"


def test_a_key_that_is_a_tuple_is_named_whole():
    with pytest.raises(KeyError) as caught:
        read(CONFIG_27B)[1, 2]
    assert caught.value.args == ((1, 2),)
