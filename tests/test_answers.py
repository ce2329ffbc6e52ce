"""Answers taken apart: a table of texts, types by schema, what is malformed, and the way back through the template."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import qwenref
from qwenref import Answer, errors, parse, round_trip
from qwenref.answers import ToolCall, opens_thinking
from qwenref.tokenizer import Tokenizer

TINY = Path(qwenref.__file__).with_name("tiny")
RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
CHATS = [line for line in EXAMPLES if line["messages"] is not None and not {"images", "video_frames"} & set(line)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "plan",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "sure": {"type": "boolean"},
                    "nothing": {"type": "null"},
                    "list": {"type": "array", "items": {"type": "integer"}},
                    "map": {"type": "object"},
                    "maybe": {"type": ["string", "null"]},
                    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                    "size": {"enum": ["small", "large"]},
                    "level": {"enum": [1, 2, 3]},
                    "place": {"$ref": "#/$defs/place"},
                    "loop": {"$ref": "#/properties/loop"},
                    "any": {},
                },
                "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}},
            },
        },
    },
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": "open", "parameters": {"additionalProperties": {"type": "integer"}}},
]


def call(name, **arguments):
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


DOVA = call("weather", city="Dova")
SEEN = (ToolCall("weather", {"city": "Dova"}),)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Hello.", False, (None, "Hello.", ())),
        ("Hello.", None, (None, "Hello.", ())),
        ("", False, (None, "", ())),
        ("a sum\n</think>\n\n54", True, ("a sum", "54", ())),
        ("a sum\n</think>\n\n54", None, ("a sum", "54", ())),
        ("<think>\na sum\n</think>\n\n54", None, ("a sum", "54", ())),
        ("<think>\na sum\n</think>\n\n54", True, ("a sum", "54", ())),
        ("<think>\na sum\n</think>\n\n54", False, ("a sum", "54", ())),  # it thinks, whatever the prompt said
        ("\n</think>\n\n54", True, ("", "54", ())),
        ("a\n</think>\n\nb</think>c", True, ("a", "b</think>c", ())),
        ("  a  \n</think>\n\n  b  ", True, ("  a  ", "  b  ", ())),  # only newlines belong to the form
        ("the tag <think> and </think> in words", False, (None, "the tag <think> and </think> in words", ())),
        (DOVA, False, (None, "", SEEN)),
        (f"a look\n</think>\n\n{DOVA}", True, ("a look", "", SEEN)),
        (f"I look.\n\n{DOVA}", False, (None, "I look.", SEEN)),
        (f"{DOVA}\n{DOVA}\n\n{DOVA}", False, (None, "", SEEN * 3)),
        (f"not yet {DOVA}\n</think>\n\nno", True, (f"not yet {DOVA}", "no", ())),  # thought about, not made
        (call("weather"), False, (None, "", (ToolCall("weather", {}),))),
        (DOVA.replace("\n", ""), False, (None, "", SEEN)),
        (DOVA.replace("\n", "\n\n").replace("\n\nDova\n\n", "\nDova\n"), False, (None, "", SEEN)),
        (call("weather", city="\n a\nb \n"), False, (None, "", (ToolCall("weather", {"city": "\n a\nb \n"}),))),
        (call("weather", city=""), False, (None, "", (ToolCall("weather", {"city": ""}),))),
    ],
)  # fmt: skip
def test_an_answer_by_its_parts(text, thinking, expected):
    assert parse(text, None, thinking) == Answer(*expected, ())


def test_a_value_may_hold_the_tags_of_the_form():
    code = "</parameter>\n<tool_call>\n<function=x>\n</function>\n</tool_call>\n<parameter=y> </parameter>"
    for inner in ("a</parameter>b", "</function></tool_call>", code):
        found = parse(f"before\n{call('weather', city=inner)}", TOOLS, False)
        assert found == Answer(None, "before", (ToolCall("weather", {"city": inner}),), ())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", ' {"a": 1} ', ' {"a": 1} '),
        ("count", "5", 5),
        ("count", "-12345678901234567890", -12345678901234567890),
        ("count", "5.0", 5),
        ("ratio", "2.5e-3", 0.0025),
        ("ratio", "2", 2),
        ("sure", "true", True),
        ("sure", "False", False),
        ("nothing", "null", None),
        ("nothing", "None", None),
        ("list", "[1, 2]", [1, 2]),
        ("map", '{"a": {"b": [null]}}', {"a": {"b": [None]}}),
        ("maybe", "None", None),
        ("maybe", "nobody", "nobody"),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("size", "small", "small"),
        ("level", "2", 2),
        ("place", '{"city": "Dova"}', {"city": "Dova"}),
        ("loop", "1", "1"),
        ("any", "[1]", "[1]"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(key, text, value):
    found = parse(call("plan", **{key: text}), TOOLS, False)
    assert found.problems == () and found.tool_calls == (ToolCall("plan", {key: value}),)
    assert type(found.tool_calls[0].arguments[key]) is type(value)
    assert parse(call("plan", **{key: text})).tool_calls[0].arguments == {key: text}  # without tools, text


@pytest.mark.parametrize(
    ("key", "text", "kind"),
    [
        ("count", "five", "integer"),
        ("count", "5.5", "integer"),
        ("count", "true", "integer"),
        ("ratio", "NaN", "number"),
        ("ratio", "9" * 5000, "number"),
        ("ratio", "1e999", "number"),
        ("list", "[-1e999]", "array"),
        ("sure", "yes", "boolean"),
        ("sure", "1", "boolean"),
        ("list", "[1, 2", "array"),
        ("list", "[" * 100_000, "array"),
        ("list", '{"a": 1}', "array"),
        ("map", "{'a': 1}", "object"),
        ("level", "high", "integer"),
    ],
)
def test_what_is_not_of_its_type_stays_text_and_is_told(key, text, kind):
    found = parse(call("plan", **{key: text}), TOOLS, False)
    assert found.tool_calls == (ToolCall("plan", {key: text}),)
    assert found.problems == (f"tool call 0: {key!r} is not {kind}: {text[:40]!r}",)


@pytest.mark.parametrize(
    ("text", "content", "calls", "problems"),
    [
        ("first a", "", (), ["the thinking part is not closed"]),
        ("</think>" + DOVA[:-12], DOVA[:-12], (), ["tool call at character 0: not closed"]),
        ("</think>x" + DOVA[:-40], "x" + DOVA[:-40], (), ["tool call at character 1: not closed"]),
        ("</think><tool_call>", "<tool_call>", (), ["tool call at character 0: no <function=NAME>"]),
        (
            '</think>a <tool_call>{"name": "weather"}</tool_call> b',
            'a <tool_call>{"name": "weather"}</tool_call> b',
            (),
            ["tool call at character 2: JSON inside, the form of older models"],
        ),
        (
            f"</think>a\n<tool_call>oh</tool_call>{DOVA}",
            "a<tool_call>oh</tool_call>",
            SEEN,
            ["tool call at character 2: no <function=NAME>"],
        ),
        (
            f"</think>{DOVA.replace('<parameter', 'so <parameter')}",
            DOVA.replace("<parameter", "so <parameter"),
            (),
            ["tool call at character 0: neither a parameter nor the end"],
        ),
        (f"</think>{DOVA} done", " done", SEEN, ["there is text after a tool call"]),
        (
            f"</think>{DOVA[12:-13]}",
            DOVA[12:-13],
            (),
            ["there is a <function=...> outside of <tool_call>"],
        ),
        (
            f"</think>{call('rain', city='Dova')}",
            "",
            (ToolCall("rain", {"city": "Dova"}),),
            ["tool call 0: no tool is called 'rain'"],
        ),
        (
            f"</think>{DOVA}{call('weather', town='Lume')}",
            "",
            (*SEEN, ToolCall("weather", {"town": "Lume"})),
            ["tool call 1: 'town' is no parameter of this tool", "tool call 1: no parameter 'city'"],
        ),
        (
            "</think>" + DOVA.replace("</function>", "<parameter=city>\nLume\n</parameter>\n</function>"),
            "",
            (ToolCall("weather", {"city": "Lume"}),),
            ["tool call 0: parameter 'city' is given twice; the later one is kept"],
        ),
        (f"</think>{call('open', a='1', b='2')}", "", (ToolCall("open", {"a": 1, "b": 2}),), []),
    ],
)
def test_malformed_answers_lose_no_text_and_say_what_is_wrong(text, content, calls, problems):
    found = parse(text, TOOLS, True)
    assert (found.content, found.tool_calls, list(found.problems)) == (content, calls, problems)
    assert found.thinking == ("first a" if "</think>" not in text else "")


@pytest.mark.parametrize(
    "wrong",
    [{"type": None}, {"type": 5}, {"type": [{}]}, {"enum": 5}, {"enum": None}, {"anyOf": [5, None]}, 5],
)
def test_a_schema_that_is_wrong_itself_leaves_the_text_as_it_is(wrong):
    for required in (True, None, "abc", [5], ["a"]):
        tool = {"name": "plan", "parameters": {"properties": {"a": wrong}, "required": required}}
        assert parse(call("plan", a="1"), [tool], False).tool_calls == (ToolCall("plan", {"a": "1"}),)
    tool["parameters"]["required"] = ["b", 7]
    assert "tool call 0: no parameter 'b'" in parse(call("plan", a="1"), [tool], False).problems


@pytest.mark.parametrize(
    ("text", "tools", "words"),
    [
        (b"bytes", None, "parse: not text"),
        ("", {"name": "weather"}, "tools is not a list"),
        ("", ["weather"], r"tools\[0\] has no name"),
        ("", [TOOLS[1], {"type": "function"}], r"tools\[1\] has no name"),
    ],
)
def test_what_is_no_text_or_no_tool_is_refused(text, tools, words):
    with pytest.raises(errors.InputError, match=words):
        parse(text, tools)


def test_a_prompt_tells_whether_it_opened_the_thinking_part():
    start = "<|im_start|>assistant\n"
    assert opens_thinking(start + "<think>\n") and not opens_thinking(start + "<think>\n\n</think>\n\n")
    assert not opens_thinking(start) and not opens_thinking("") and opens_thinking("<think>\n")
    assert not opens_thinking("<|im_start|>user\nWhat is <think>?<|im_end|>\n" + start)


# The embedded model


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


def test_a_generation_parses_its_own_text(model):
    line = next(line for line in CHATS if line["tools"] and "tool_call" in line["output_text"])
    out = model.chat(line["messages"], tools=line["tools"], enable_thinking=line["enable_thinking"])
    assert out.parse(line["tools"]) == Answer(
        "I need get_weather.", "", (ToolCall("get_weather", {"city": "Dova"}),), ()
    )
    with pytest.warns(errors.QwenrefWarning, match="rendered as history"):
        cut = model.chat(line["messages"], tools=line["tools"], stop=["need"])
    assert cut.parse() == Answer("I ", "", (), ("the thinking part is not closed",))
    both = model.generate([line["prompt_ids"]] * 2, max_new_tokens=3)
    assert len(both.parse()) == 2
    with pytest.raises(errors.CapabilityMissing, match="tokenizer"):
        qwenref.from_config(model.config, seed=0).generate([1], max_new_tokens=1).parse()


@pytest.mark.parametrize("line", CHATS, ids=lambda line: f"{line['id']}-{line['task']}")
def test_what_the_embedded_model_writes_survives_the_way_back(model, line):
    """Unless it spelled a word by other tokens than its tokenizer would: the text is the same, the ids are not."""
    text = model.tokenizer.decode(line["output_ids"])
    usual = model.tokenizer.encode(line["prompt"] + text) == line["prompt_ids"] + line["output_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = round_trip(model, line["messages"], line["output_ids"], line["tools"], line["enable_thinking"])
    assert found.same == usual == (not caught) and (found.at is None) == usual and found.answer.problems == ()
    assert found.went == line["prompt_ids"] + line["output_ids"]
    assert model.tokenizer.decode(found.comes) == model.tokenizer.decode(found.went) + "\n"
    if usual:
        assert found.comes[: len(found.went)] == found.went


def test_of_the_embedded_models_answers_some_are_spelled_otherwise_and_most_are_not(model):
    usual = [model.tokenizer.encode(model.tokenizer.decode(line["output_ids"])) == line["output_ids"] for line in CHATS]
    assert 0 < usual.count(False) < 5 < usual.count(True)


ASK = [{"role": "user", "content": "What is the weather in Dova?"}]


@pytest.mark.parametrize(
    ("text", "enable_thinking", "where"),
    [
        ("a thought\n</think>\n\nyes ", True, "in the answer"),  # the template trims content
        ("a thought</think>yes", True, "in the answer"),
        ("\n</think>\n\na thought\n</think>\n\nyes", False, "in the answer"),  # content that holds the tag
        (call("weather", city="Dova").replace("\n", ""), False, "in the answer"),
        (call("plan", count="5.0"), False, "in the answer"),
    ],
)
def test_F6_a_changed_id_on_the_way_back_is_shown(model, text, enable_thinking, where):
    ids = model.tokenizer.encode(text + "<|im_end|>")
    with pytest.warns(errors.QwenrefWarning, match=where) as caught:
        found = round_trip(model, ASK, ids, TOOLS, enable_thinking)
    assert not found.same and found.went[: found.at] == found.comes[: found.at]
    assert found.comes[found.at : found.at + 1] != found.went[found.at : found.at + 1]
    shown = f"{found.went[found.at]}:{model.tokenizer.token_text(found.went[found.at])}"
    assert shown in str(caught[0].message) and caught[0].filename == __file__


def test_an_answer_that_was_cut_off_goes_on_by_its_ids(model, recwarn):
    found = round_trip(model, ASK, model.tokenizer.encode("a thought"), TOOLS, True)
    assert found.same and found.answer.problems == ("the thinking part is not closed",) and not recwarn.list
    assert model.tokenizer.decode(found.comes[len(found.went) :]) == "\n</think>\n\n<|im_end|>\n"


def test_ids_that_no_text_encodes_to_change_on_the_way_back(model):
    whole = model.tokenizer.encode("yes<|im_end|>")
    letters = [model.tokenizer.token_id(letter) for letter in "yes"] + whole[-1:]
    assert model.tokenizer.decode(letters) == model.tokenizer.decode(whole) and letters != whole
    assert round_trip(model, ASK, whole, enable_thinking=False).same
    with pytest.warns(errors.QwenrefWarning, match="in the answer"):
        assert not round_trip(model, ASK, letters, enable_thinking=False).same


def test_a_template_that_writes_values_as_python_does_is_read_back(tmp_path):
    """Published templates of the family render True and None, which a parser of JSON alone takes for text."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(TINY / name, tmp_path)
    source = (TINY / "chat_template.jinja").read_text(encoding="utf-8")
    old = "value if value is string else value | tojson"
    assert old in source
    new = "value | tojson if value is mapping or value is iterable and value is not string else value | string"
    (tmp_path / "chat_template.jinja").write_text(source.replace(old, new), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    arguments = {
        "sure": True,
        "nothing": None,
        "count": 5,
        "ratio": 0.5,
        "list": [1, 2],
        "map": {"a": None},
        "text": "5",
    }
    made = Answer(None, "so", (ToolCall("plan", arguments),), ())
    prompt = tokenizer.render(ASK, TOOLS, True, False)
    text = tokenizer.render([*ASK, made.message], TOOLS, False, False).removeprefix(prompt)
    assert "\nTrue\n" in text and "\nNone\n" in text
    found = round_trip(tokenizer, ASK, tokenizer.encode(text.removesuffix("\n")), TOOLS, False)
    assert found.same and found.answer == made
