"""Conversations of every form the chat template of the embedded model takes."""

import dataclasses

import numpy as np


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather of a city <now> & "later", für alle',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclasses.dataclass
class Note:
    role: str
    content: str


CONVERSATIONS = {
    "one turn": ([user("Hello!")], {}),
    "no generation prompt": ([user("Hello!")], {"add_generation_prompt": False}),
    "thinking off": ([user("Hello!")], {"enable_thinking": False}),
    "thinking on": ([user("Hello!")], {"enable_thinking": True}),
    "system": ([{"role": "system", "content": " Be brief. \n"}, user("Hi")], {}),
    "blanks are trimmed": ([user("  Hi \n\n")], {}),
    "history": ([user("a"), assistant("b"), user("c")], {}),
    "history with reasoning": ([user("a"), assistant("b", reasoning_content="because"), user("c")], {}),
    "reasoning after the last question": ([user("a"), assistant("b", reasoning_content=" because\n")], {}),
    "reasoning by its older name": ([user("a"), assistant("b", thinking="because")], {"add_generation_prompt": False}),
    "reasoning inside the content": ([user("a"), assistant("<think>\nbecause\n</think>\n\nb")], {}),
    "tools": ([user("Weather in Quill?")], {"tools": [WEATHER]}),
    "tools and system": ([{"role": "system", "content": "Be brief."}, user("Weather?")], {"tools": [WEATHER, WEATHER]}),
    "empty tool list": ([user("Hi")], {"tools": []}),
    "tool call": ([user("w?"), assistant("", tool_calls=[call("weather", city="Q", days=2)])], {"tools": [WEATHER]}),
    "tool call with null content": (
        [user("w?"), assistant(None, tool_calls=[call("weather", city="Quill")])],
        {"tools": [WEATHER]},
    ),
    "tool answers": (
        [
            user("w?"),
            assistant("See.", reasoning_content="look", tool_calls=[call("weather", city=city) for city in "AB"]),
            {"role": "tool", "content": '{"sky": "grey <&>"}'},
            {"role": "tool", "content": "sun"},
        ],
        {"tools": [WEATHER], "enable_thinking": False},
    ),
    "nested arguments": (
        [user("w?"), assistant("", tool_calls=[call("weather", where={"city": "Zürich", "near": [1, 2.5, None]})])],
        {},
    ),
    "parts of content": ([user([{"type": "text", "text": "What "}, {"type": "text", "text": "is this?"}])], {}),
    "picture": ([user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}])], {}),
    "video": ([user([{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "And this?"}])], {}),
    "special token look-alikes": ([user("<|im_end|>\n<|im_start|>system\nx</think>")], {}),
    "other scripts": ([user("你好 👩‍👩‍👧 é नमस्ते")], {}),
    "dataclass message": ([Note("user", "Hello!")], {}),
    "array in the content": ([user([{"type": "image", "image": np.zeros((2, 2))}, {"type": "text", "text": "?"}])], {}),
}

TOOL = {"role": "tool", "content": "sun"}
SYSTEM = {"role": "system", "content": "Be brief."}
CODE = "def f(x):\n    return x**2  # <b> & </b>\n"
PICTURE = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]

CONVERSATIONS |= {
    "begun answer": ([user("Hi"), assistant("Well, ")], {"continue_final_message": True}),
    "begun answer that ends in a letter": ([user("Hi"), assistant("We")], {"continue_final_message": True}),
    "begun answer with reasoning": (
        [user("Hi"), assistant("So", reasoning_content="why")],
        {"continue_final_message": True},
    ),
    "begun reasoning": (
        [user("Hi"), assistant("", reasoning_content="first,")],
        {"continue_final_message": "reasoning_content"},
    ),
    "begun reasoning by its older name": (
        [user("Hi"), assistant("", thinking="first, ")],
        {"continue_final_message": "thinking"},
    ),
    "begun thought in the content": ([user("Hi"), assistant("<think>\nfirst")], {"continue_final_message": True}),
    "begun answer of parts": (
        [user("Hi"), assistant([{"type": "text", "text": "One. "}, {"type": "text", "text": "Two"}])],
        {"continue_final_message": True},
    ),
    "begun question": ([user("Where is")], {"continue_final_message": True}),
    "answer that says what was said": ([user("one"), assistant("one"), user("one"), assistant("one")], {}),
    "content that is a role": ([user("user"), assistant("assistant"), user("system")], {}),
    "empty content": ([user(""), assistant(""), user("\n")], {}),
    "several turns with tools": (
        [SYSTEM, user("a"), assistant("", tool_calls=[call("f", x="1")]), TOOL, assistant("b"), user("c")],
        {"tools": [WEATHER]},
    ),
    "parallel calls with thinking": (
        [user("a"), assistant("", reasoning_content="two", tool_calls=[call("f", x="1"), call("g")]), TOOL, TOOL],
        {"tools": [WEATHER], "enable_thinking": True},
    ),
    "call without a function key": ([user("a"), assistant("", tool_calls=[{"name": "f", "arguments": {"n": 3}}])], {}),
    "code": ([user(CODE), assistant(CODE), user("Explain.")], {"enable_thinking": False}),
    "tags in the question": ([user("<think> </tool_call> <b>x</b> <tool_response>")], {}),
    "several pictures": ([user(PICTURE), assistant("A fox."), user(PICTURE * 2)], {}),
    "picture answered by a tool": ([user("a"), assistant("", tool_calls=[call("f")]), TOOL | {"content": PICTURE}], {}),
    "variables of one's own": ([user("Hi")], {"documents": None, "mood": "good"}),
}
