"""Prompts with their spans, tail and thinking switch; continued messages; the first place where two prompts part."""

import json
import pickle

import pytest
from conversations import CONVERSATIONS, WEATHER, assistant, call, user

import qwenref
from qwenref import hub
from qwenref.errors import InputError, TemplateError
from qwenref.rendering import Rendered, visible
from qwenref.template import ChatTemplate
from qwenref.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(hub.resolve("tiny"))


def parts(rendered, message):
    """{part: text} of one message."""
    return {
        span.part: rendered.text[span.start : span.stop]
        for span in rendered.spans
        if span.message == message and span.part != "frame"
    }


def said(message):
    """Every text that a message of the test holds, {part: text}."""
    content = message.get("content")
    found = {"content": content} if isinstance(content, str) else {}
    if isinstance(content, list):
        found = {f"content[{i}].text": part["text"] for i, part in enumerate(content) if "text" in part}
    for i, entry in enumerate(message.get("tool_calls", ())):
        function = entry.get("function", entry)
        found[f"tool_calls[{i}].name"] = function["name"]
        found |= {f"tool_calls[{i}].{key}": text for key, text in function["arguments"].items() if type(text) is str}
    return {part: text.strip() for part, text in found.items() if text.strip()}


# Spans


@pytest.mark.filterwarnings("ignore:render. the chat template does not read")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_character_and_every_id_belongs_to_exactly_one_span(tiny, name):
    messages, options = CONVERSATIONS[name]
    rendered = qwenref.render(tiny, messages, **options)
    position = first = 0
    for span in rendered.spans:
        assert (span.start, span.first) == (position, first)
        assert span.start < span.stop and span.first <= span.last
        position, first = span.stop, span.last
    assert (position, first) == (len(rendered.text), len(rendered.ids))
    assert rendered.text == tiny.render(messages, **options)
    assert rendered.ids == tiny.encode(rendered.text, add_special_tokens=False)


@pytest.mark.filterwarnings("ignore:render. the chat template does not read")
@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "dataclass message"])
def test_the_texts_of_a_message_are_found_where_they_stand(tiny, name):
    messages, options = CONVERSATIONS[name]
    rendered = qwenref.render(tiny, messages, **options)
    for at, message in enumerate(messages):
        found = parts(rendered, at)
        for part, text in said(message).items():
            if part == "content" and "</think>" in text and message["role"] == "assistant":
                text = text.split("</think>")[-1].strip()
                assert found[part].endswith(text)
            elif part == "content[0].text" and part in found:
                assert found[part].strip() == text
            else:
                assert found[part] == text


def test_spans_say_which_ids_came_from_which_message_and_part(tiny):
    messages = [
        {"role": "system", "content": "Be brief."},
        user(" user "),
        assistant("See.", reasoning_content="look", tool_calls=[call("weather", city="Quill", days=2)]),
        {"role": "tool", "content": "sun"},
    ]
    rendered = qwenref.render(tiny, messages, tools=[WEATHER])
    assert parts(rendered, 0) == {"content": "Be brief."}
    assert parts(rendered, 1) == {"content": "user"}  # not the role before it
    assert parts(rendered, 2) == {
        "reasoning_content": "look",
        "content": "See.",
        "tool_calls[0].name": "weather",
        "tool_calls[0].city": "Quill",
    }
    assert parts(rendered, 3) == {"content": "sun"}
    assert "tools[0]" in {span.part for span in rendered.spans if span.message is None}
    assert tiny.decode(rendered.ids_of(1)) == "<|im_start|>user\nuser<|im_end|>\n"
    assert tiny.decode(rendered.ids_of(3, "content")) == "sun"
    assert "messages[2]  tool_calls[0].city  Quill" in str(rendered)


def test_a_text_that_marks_would_change_costs_only_its_own_parts():
    source = "{% for m in messages %}[{{ m.content | length }}|{{ m.content }}]{% endfor %}"
    run = ChatTemplate(source).run([user("a"), user("b")])
    tiny = Tokenizer(hub.resolve("tiny"))
    rendered = Rendered(run.text, tiny.encode(run.text), run, tiny)
    assert [(span.message, span.part) for span in rendered.spans] == [(0, "frame"), (1, "frame")]
    picky = "{% for m in messages %}{{ 'x' if m.content | length > 3 else 'y' }}{{ m.content }};{% endfor %}"
    run = ChatTemplate(picky).run([user("abc"), user("abcdef")])
    rendered = Rendered(run.text, tiny.encode(run.text), run, tiny)
    assert [(span.message, span.part) for span in rendered.spans] == [
        (0, "frame"),
        (1, "frame"),
        (1, "content"),
        (1, "frame"),
    ]


def test_a_prompt_unpacks_compares_and_pickles_as_text_and_ids(tiny):
    rendered = qwenref.render(tiny, [user("Hi")])
    text, ids = rendered
    assert rendered == (text, ids) and tiny.decode(ids) == text
    copy = pickle.loads(pickle.dumps(rendered))
    assert copy == rendered and copy.spans == [] and copy.enable_thinking is None


# Tail and thinking


@pytest.mark.parametrize(
    ("choice", "thinks", "tail"),
    [
        (None, True, "<|im_start|>assistant\n<think>\n"),
        (True, True, "<|im_start|>assistant\n<think>\n"),
        (False, False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_F7_the_tail_and_the_thinking_switch_are_told_as_they_came_out(tiny, choice, thinks, tail):
    rendered = qwenref.render(tiny, [user("Hi /no_think")], enable_thinking=choice)
    assert rendered.enable_thinking is thinks and rendered.tail == tail
    assert ("thinking on" if thinks else "thinking off") in repr(rendered)


def test_F7_a_switch_that_changes_nothing_is_told_as_none(tiny):
    rendered = qwenref.render(tiny, [user("Hi")], add_generation_prompt=False, enable_thinking=True)
    assert rendered.enable_thinking is None and rendered.tail == ""
    off = "{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}"
    assert ChatTemplate(off).run([user("a")]).effective_thinking() is False  # of a checkpoint whose default is off
    assert ChatTemplate("{{ messages[0].content }}").run([user("a")]).effective_thinking() is None


# Continued messages


def test_a_begun_answer_is_where_the_prompt_ends(tiny):
    rendered = qwenref.render(tiny, [user("Hi"), assistant("Well, ")], continue_final_message=True)
    assert rendered.text.endswith("</think>\n\nWell,") and rendered.tail == ""
    assert parts(rendered, 1) == {"content": "Well,"}
    assert qwenref.render(tiny, [user("Hi")]).text in rendered.text


def test_what_cannot_be_continued_says_why(tiny):
    with pytest.raises(InputError, match="continue_final_message and add_generation_prompt"):
        tiny.render([user("a")], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(TemplateError, match="messages\\[1\\]: cannot be continued: no text 'content'") as caught:
        tiny.render([user("a"), assistant(None)], continue_final_message=True)
    assert caught.value.message_index == 1
    with pytest.raises(TemplateError, match="no text 'mood' that the template reads"):
        tiny.render([user("a"), assistant("b", mood="good")], continue_final_message="mood")
    with pytest.raises(TemplateError, match="messages\\[0\\]: cannot be continued: the template leaves its end out"):
        ChatTemplate("{{ messages[0].content[:3] }}").render([user("abcdef")], continue_final_message=True)


# Differences


def test_equal_prompts_have_no_difference(tiny):
    rendered = qwenref.render(tiny, [user("Hi")])
    assert qwenref.first_difference(rendered, qwenref.render(tiny, [user(" Hi ")])) is None
    assert qwenref.first_difference("a", "a", tiny) is None


def test_a_difference_names_character_token_blank_and_message(tiny):
    a = qwenref.render(tiny, [user("one two"), assistant("x"), user("y")])
    b = qwenref.render(tiny, [user("one\ttwo"), assistant("x"), user("y")])
    found = qwenref.first_difference(a, b)
    assert a.text[: found.char] == b.text[: found.char] and a.text[found.char] == " " and b.text[found.char] == "\t"
    assert (found.line, found.column) == (2, 4)
    assert a.ids[: found.token] == b.ids[: found.token] and a.ids[found.token] != b.ids[found.token]
    assert (found.a_span.message, found.a_span.part) == (0, "content")
    assert "parts at character 20, line 2, column 4; token" in str(found)
    assert "a     ␣two<|im_end|>⏎" in str(found) and "b     ⇥two<|im_end|>⏎" in str(found)
    assert "messages[0] content" in str(found)


def test_F5_history_that_changes_between_turns_is_shown_where_it_parts(tiny):
    first = [user("a"), assistant("b", reasoning_content="because")]
    before = qwenref.render(tiny, first, add_generation_prompt=False)
    after = qwenref.render(tiny, [*first, user("c")], add_generation_prompt=False)
    found = qwenref.first_difference(before, after)
    assert before.text[found.char :].startswith("<think>") and after.text[found.char :].startswith("b<|im_end|>")
    assert found.a_span.message == found.b_span.message == 1 and found.a_token[1] == "<think>"


def test_a_prompt_that_ends_early_parts_at_its_end(tiny):
    rendered = qwenref.render(tiny, [user("Hi")])
    longer = qwenref.render(tiny, [user("Hi")], enable_thinking=False)
    found = qwenref.first_difference(rendered, longer)
    assert (found.char, found.a, found.a_span) == (len(rendered.text), "", None)
    assert "a     ⟨end⟩" in str(found) and found.b_span.part == "tail"


def test_texts_differ_by_characters_and_by_ids_with_a_tokenizer(tiny):
    found = qwenref.first_difference("a\u00a0b", "a b")
    assert found.token is None and found.char == 1 and "a     ⟨U+00A0⟩b" in str(found)
    found = qwenref.first_difference("a b", "a  b", tiny)
    assert found.token is not None and found.char == 2
    same_text = Rendered("ab", [1, 2]), Rendered("ab", [3])
    assert "the texts are equal, the ids are not" in str(qwenref.first_difference(*same_text))
    with pytest.raises(InputError, match="first_difference: not a prompt"):
        qwenref.first_difference(b"a", "a")
    assert visible("a\u200d\n\x00é") == "a⟨U+200D⟩⏎⟨00⟩é"


def test_rendering_leaves_the_messages_alone(tiny):
    messages = [user([{"type": "text", "text": "a"}]), assistant([{"type": "text", "text": "b"}])]
    before = json.dumps(messages)
    assert qwenref.render(tiny, messages, continue_final_message=True).spans
    assert json.dumps(messages) == before
