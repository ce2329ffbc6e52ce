"""Tool calls as prompts: the exact text of every form they come in, and the way back."""

import json

import pytest
from conversations import WEATHER, assistant, call, user

import qwenref
from qwenref import hub
from qwenref.answers import ToolCall
from qwenref.errors import TemplateError
from qwenref.template import ChatTemplate
from qwenref.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(hub.resolve("tiny"))


ASK = user("w?")
DOVA = "<tool_call>\n<function=weather>\n<parameter=city>\nDova\n</parameter>\n</function>\n</tool_call>"
LUME = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nLume\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    '<parameter=near>\n{"a": [1, null, "ü"]}\n</parameter>\n<parameter=sure>\ntrue\n</parameter>\n'
    "</function>\n</tool_call>"
)
CALLS = [call("weather", city="Dova"), call("weather", city="Lume", days=2, near={"a": [1, None, "ü"]}, sure=True)]
# name: (the answer, the text that stands for it between its first and its last marker)
FORMS = {
    "one call": (assistant("", tool_calls=CALLS[:1]), "<think>\n\n</think>\n\n" + DOVA),
    "null content": (assistant(None, tool_calls=CALLS[:1]), "<think>\n\n</think>\n\n" + DOVA),
    "no content": ({"role": "assistant", "tool_calls": CALLS[:1]}, "<think>\n\n</think>\n\n" + DOVA),
    "parallel calls": (assistant("", tool_calls=CALLS), f"<think>\n\n</think>\n\n{DOVA}\n{LUME}"),
    "content before": (assistant("See.", tool_calls=CALLS[:1]), "<think>\n\n</think>\n\nSee.\n" + DOVA),
    "reasoning": (
        assistant("", reasoning_content="look", tool_calls=CALLS[:1]),
        "<think>\nlook\n</think>\n\n" + DOVA,
    ),
    "reasoning, content, parallel calls": (
        assistant("See.", reasoning_content="look", tool_calls=CALLS),
        f"<think>\nlook\n</think>\n\nSee.\n{DOVA}\n{LUME}",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_F8_tool_calls_have_the_form_of_the_template_and_are_read_back(tiny, name):
    answer, text = FORMS[name]
    whole = tiny.render([ASK, answer], tools=[WEATHER], add_generation_prompt=False)
    assert whole.endswith(f"<|im_start|>assistant\n{text}<|im_end|>\n")
    found = qwenref.parse(text, thinking=False)
    assert (found.content, found.thinking or None) == (answer.get("content") or "", answer.get("reasoning_content"))
    assert [made.name for made in found.tool_calls] == ["weather"] * len(answer["tool_calls"]) and not found.problems


def test_F8_the_schema_of_a_tool_gives_arguments_their_types_back():
    kinds = {"city": "string", "days": "integer", "near": "object", "sure": "boolean"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}
    expected = tuple(ToolCall("weather", entry["function"]["arguments"]) for entry in CALLS)
    assert qwenref.parse(f"{DOVA}\n{LUME}", [tool], False).tool_calls == expected


def test_F8_answers_of_tools_go_back_in_order(tiny):
    answers = [{"role": "tool", "content": text} for text in ("sun", "rain")]
    text = tiny.render([ASK, FORMS["parallel calls"][0], *answers], tools=[WEATHER], enable_thinking=False)
    assert text.endswith(
        f"{LUME}<|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_F8_arguments_that_are_json_text_are_rendered_or_refused_by_the_template_and_never_changed(tiny):
    written = call("weather")
    written["function"]["arguments"] = json.dumps({"city": "Dova"})
    with pytest.raises(TemplateError, match=r"messages\[1\]") as caught:
        tiny.render([ASK, assistant("", tool_calls=[written])], tools=[WEATHER])
    assert "json.loads the arguments of its tool calls" in str(caught.value) and caught.value.message_index == 1
    takes_text = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{{ a if a is string else a | tojson }}{% endfor %}{% endfor %}"
    )
    both = [assistant("", tool_calls=[written, CALLS[0]])]
    assert takes_text.render(both) == '{"city": "Dova"}' * 2
