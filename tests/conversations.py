"""Conversations of every form the chat template of the embedded model takes: those of a comparison, and odder ones."""

import dataclasses

import numpy as np

from qwenref.compare import suites


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


CONVERSATIONS = {one.id: (one.messages, one.options) for one in suites.conversations()} | {
    "reasoning by its older name": ([user("a"), assistant("b", thinking="because")], {"add_generation_prompt": False}),
    "empty tool list": ([user("Hi")], {"tools": []}),
    "tool call with null content": (
        [user("w?"), assistant(None, tool_calls=[call("weather", city="Quill")])],
        {"tools": [WEATHER]},
    ),
    "picture": ([user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}])], {}),
    "video": ([user([{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "And this?"}])], {}),
    "dataclass message": ([Note("user", "Hello!")], {}),
    "array in the content": ([user([{"type": "image", "image": np.zeros((2, 2))}, {"type": "text", "text": "?"}])], {}),
}

TOOL = {"role": "tool", "content": "sun"}
PICTURE = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]

CONVERSATIONS |= {
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
    "content that is a role": ([user("user"), assistant("assistant"), user("system")], {}),
    "call without a function key": ([user("a"), assistant("", tool_calls=[{"name": "f", "arguments": {"n": 3}}])], {}),
    "tags in the question": ([user("<think> </tool_call> <b>x</b> <tool_response>")], {}),
    "several pictures": ([user(PICTURE), assistant("A fox."), user(PICTURE * 2)], {}),
    "picture answered by a tool": ([user("a"), assistant("", tool_calls=[call("f")]), TOOL | {"content": PICTURE}], {}),
    "variables of one's own": ([user("Hi")], {"documents": None, "mood": "good"}),
}
