"""How an engine is written down: what opens it, and what is said of what does not."""

import pytest

from qwenref import engines
from qwenref.engines.specs import parse
from qwenref.errors import InputError, UnknownName


@pytest.mark.parametrize(
    "spec, kind, rest, options",
    [
        ("reference:tiny", "reference", "tiny", {}),
        ("reference:tiny?numerics=hf", "reference", "tiny", {"numerics": "hf"}),
        ("transformers:/a/b c:d", "transformers", "/a/b c:d", {}),
        ("vllm+http://127.0.0.1:8000", "vllm+http", "http://127.0.0.1:8000", {}),
        (
            "openai+https://host/v?model=a/b&deadline=600",
            "openai+http",
            "https://host/v",
            {"model": "a/b", "deadline": 600},
        ),
        (
            "vllm:DIR?dtype=bfloat16&eager=true&share=0.5",
            "vllm",
            "DIR",
            {"dtype": "bfloat16", "eager": True, "share": 0.5},
        ),
        ("runs/vllm.jsonl", "recorded", "runs/vllm.jsonl", {}),
        ("recorded:runs/x", "recorded", "runs/x", {}),
        ("c:/runs/x.jsonl", "recorded", "c:/runs/x.jsonl", {}),
    ],
)
def test_a_spec_says_kind_place_and_options(spec, kind, rest, options):
    assert parse(spec, engines.ADAPTERS) == (kind, rest, options)


@pytest.mark.parametrize("spec", ["", None, 3, "tiny", "/a/folder", "vllm+http:8000", "reference:tiny?x", "x?a=1"])
def test_what_is_no_spec_gives_the_three_forms(spec):
    with pytest.raises(InputError, match="KIND:REST, KIND\\+http://HOST:PORT, or a recorded run"):
        engines.open(spec)


def test_another_kind_gives_those_there_are_and_the_near_ones():
    with pytest.raises(UnknownName, match="no kind vlm\\+http(.|\n)*did you mean vllm\\+http"):
        engines.open("vlm+http://localhost:1")
    with pytest.raises(UnknownName, match="no kind sglang\n(.|\n)*did you mean sglang\\+http"):
        engines.open("sglang:x")


def test_a_key_is_not_taken_from_a_spec_and_a_password_not_shown():
    with pytest.raises(InputError, match="would be shown") as caught:
        engines.open("openai+http://localhost:1?key=sk-secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        engines.open("x//me:secret@host")
    assert "secret" not in str(caught.value)


def test_options_go_to_the_adapter_and_unknown_ones_are_named():
    assert engines.open("reference:tiny?numerics=fp64").profile.name == "fp64"
    assert engines.open("reference:tiny?numerics=fp64", numerics="hf").profile.name == "hf"
    for spec in ("reference:tiny?colour=1", "vllm+http://localhost:1?colour=1"):
        with pytest.raises(InputError, match="has not\n    found    'colour'"):
            engines.open(spec)
    with pytest.raises(InputError, match="option model twice"):
        engines.open("vllm+http://localhost:1?model=a&model=b")
