"""Text to ids and back, stop ids, and chat templates against transformers."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from conversations import CONVERSATIONS, WEATHER, assistant, user

from qwenref import hub
from qwenref.errors import (
    CapabilityMissing,
    CheckpointError,
    InputError,
    TemplateError,
)
from qwenref.template import ChatTemplate
from qwenref.tokenizer import Tokenizer

RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
CHATS = [line for line in EXAMPLES if line["messages"] is not None]
TEXT_ONLY = [line for line in EXAMPLES if not {"images", "video_frames"} & set(line)]  # pictures expand placeholders

TEXTS = [
    "",
    " ",
    "\n\n \t\r\n",
    "What is 47 + 38?",
    "def f(x):\n\treturn x**2  # no\n",
    "naïve café, cafe\u0301 (NFC and NFD)",
    "नमस्ते ภาษาไทย Tiếng Việt",
    "你好，世界。狐狸在哪里？",
    "مرحبا שלום",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 é",
    "<|im_start|>user <|im_end|><think></think><|not_a_token|>",
    "0123456789 1,000,000.00 3.14e-5",
    "\x00\x01\x7f\ufffd\ufeff",
    "don't I'll we'RE",
]


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(hub.resolve("tiny"))


@pytest.fixture(scope="module")
def witness():
    transformers = pytest.importorskip("transformers", reason="the witness needs transformers (extra 'test')")
    return transformers.AutoTokenizer.from_pretrained(hub.resolve("tiny"))


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model's text files, to be damaged."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(hub.resolve("tiny") / name, tmp_path / name)
    shutil.copy(hub.resolve("tiny") / "chat_template.jinja", tmp_path / "chat_template.jinja")
    return tmp_path


def edit_json(path, **changes):
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    path.write_text(json.dumps(value), encoding="utf-8")


# Ids and bytes


@pytest.mark.parametrize("line", TEXT_ONLY, ids=lambda line: f"{line['id']}-{line['task']}")
def test_the_golden_prompts_and_answers_are_the_same_ids(tiny, line):
    assert tiny.encode(line["prompt"]) == line["prompt_ids"]
    assert tiny.decode(line["output_ids"]) == line["output_text"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_becomes_the_ids_transformers_gives(tiny, witness, text):
    ids = tiny.encode(text)
    assert ids == witness(text)["input_ids"]
    assert tiny.decode(ids) == witness.decode(ids, clean_up_tokenization_spaces=False)
    assert tiny.decode(ids, skip_special_tokens=True) == witness.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_any_order_of_ids_decodes_as_the_library_does_and_streams_to_the_same_text(tiny, witness):
    draw = random.Random(1)
    broken = 0
    for _ in range(300):
        ids = [draw.randrange(tiny.vocab_size) for _ in range(draw.randrange(1, 24))]
        text = tiny.decode(ids)
        assert text == witness.decode(ids, clean_up_tokenization_spaces=False)
        stream = tiny.stream()
        assert "".join([stream.put(id) for id in ids]) + stream.flush() == text
        assert tiny.decode_bytes(ids).decode("utf-8", "replace") == text
        broken += "\ufffd" in text
    assert broken > 100  # the draw does reach incomplete characters


def test_a_stream_never_shows_half_a_character(tiny):
    text = "狐狸 👩‍👩‍👧 é"
    ids = tiny.encode(text)
    stream, shown, held = tiny.stream(), "", 0
    for at, id in enumerate(ids, 1):
        shown += stream.put(id)
        assert text.startswith(shown)
        assert shown.encode() + stream.pending == tiny.decode_bytes(ids[:at])
        held += bool(stream.pending)
    assert held > 0 and shown == text and stream.flush() == ""


def test_what_a_stream_holds_at_the_end_is_not_lost(tiny):
    first = next(id for id in range(tiny.vocab_size) if tiny.token_bytes(id) == b"\xe7")
    stream = tiny.stream()
    assert stream.put(first) == "" and stream.pending == b"\xe7"
    assert stream.flush() == "\ufffd" and stream.pending == b""
    assert tiny.decode_bytes([first]) == b"\xe7"
    assert tiny.token_text(first) == "⟨e7⟩"


def test_ids_without_a_token_have_a_visible_form(tiny):
    assert tiny.decode([tiny.vocab_size, 5000]) == "⟨id 1280⟩⟨id 5000⟩"
    assert tiny.token_text(5000) == "⟨id 5000⟩"
    stream = tiny.stream()
    assert stream.put(5000) == "⟨id 5000⟩"


def test_tokens_are_shown_with_visible_blanks(tiny):
    shown = {" ": "␣", "\n\n": "⏎⏎", "<think>": "<think>", "\t": "⇥", "\x00": "⟨00⟩"}
    assert {text: tiny.token_text(tiny.encode(text)[0]) for text in shown} == shown
    assert tiny.token_id("<|im_end|>") == 1256 and tiny.token_id("no such token") is None
    assert tiny.encode(" ") == [tiny.token_id(" ")]


def test_special_tokens_are_skipped_only_when_asked(tiny):
    ids = tiny.encode("<think>\nx</think><|im_end|>")
    assert tiny.decode(ids) == "<think>\nx</think><|im_end|>"
    assert tiny.decode(ids, skip_special_tokens=True) == "<think>\nx</think>"  # <think> is added, not special


def test_ids_come_in_any_integer_sequence_and_nothing_else(tiny):
    ids = tiny.encode("a fox")
    assert tiny.decode(np.array(ids)) == tiny.decode(tuple(ids)) == tiny.decode(iter(ids)) == "a fox"
    assert tiny.decode(np.int64(ids[0])) == tiny.decode(ids[:1])
    for bad in ([-1], [1.5], [[1, 2]], [2**32], "text"):
        with pytest.raises(InputError):
            tiny.decode(bad)


def test_text_that_utf8_cannot_hold_is_refused_at_its_place(tiny):
    with pytest.raises(InputError, match="character 1 is a lone surrogate, U\\+D800"):
        tiny.encode("a\ud800b")
    with pytest.raises(InputError, match="not text"):
        tiny.encode(b"bytes")


def test_a_token_beyond_the_models_vocabulary_is_refused_by_encode(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 1255
    (folder / "config.json").write_text(json.dumps(config))
    short = Tokenizer(folder)
    assert short.encode("Hello") == Tokenizer(hub.resolve("tiny")).encode("Hello")
    with pytest.raises(InputError, match="token 0 of the text is 1,255; the vocabulary has 1,255"):
        short.encode("<|im_start|>")


def test_cutting_and_padding_left_in_the_file_do_nothing(folder):
    edit_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "!"},
    )
    text = "one two three four"
    assert Tokenizer(folder).encode(text) == Tokenizer(hub.resolve("tiny")).encode(text)


# Stop ids


def test_F4_stop_ids_come_from_three_files_and_their_disagreement_is_recorded(tiny, folder):
    assert tiny.stop.ids == (1256, 1254)
    assert tiny.stop.sources == {"generation_config": (1256, 1254), "config": (1254,), "tokenizer_config": (1256,)}
    assert not tiny.stop.agree
    edit_json(folder / "generation_config.json", eos_token_id=1256)
    assert Tokenizer(folder).stop.ids == (1256,)
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).stop.ids == (1256, 1254)  # the other two files together
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    stop = Tokenizer(folder).stop
    assert stop.ids == (1254,) and stop.agree


def test_stop_ids_that_are_no_ids_are_refused(folder):
    edit_json(folder / "generation_config.json", eos_token_id="<|im_end|>")
    with pytest.raises(CheckpointError, match="eos_token_id is not an id"):
        Tokenizer(folder)


def test_two_files_that_name_one_id_differently_are_refused(folder):
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    added["1256"]["content"] = "<|eot|>"
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match="disagree on 1 tokens"):
        Tokenizer(folder)


@pytest.mark.parametrize("damage", ["missing", "not json", "other decoder"])
def test_a_tokenizer_that_cannot_be_used_says_why(folder, damage):
    path = folder / "tokenizer.json"
    if damage == "missing":
        path.unlink()
        expected, words = CapabilityMissing, "no tokenizer.json"
    elif damage == "not json":
        path.write_text("{")
        expected, words = CheckpointError, "not a tokenizer"
    else:
        edit_json(path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
        expected, words = CapabilityMissing, "not byte-level"
    with pytest.raises(expected, match=words):
        Tokenizer(folder)


# Templates


@pytest.mark.filterwarnings("ignore:render. the chat template does not read")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_rendered_as_transformers_renders_it(tiny, witness, name):
    messages, options = CONVERSATIONS[name]
    before = json.dumps(messages, default=repr)
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    expected = witness.apply_chat_template(messages, tokenize=False, **options)
    assert tiny.render(messages, **options) == expected
    assert json.dumps(messages, default=repr) == before  # the caller's messages are left alone


@pytest.mark.parametrize("line", CHATS, ids=lambda line: f"{line['id']}-{line['task']}")
def test_the_golden_prompts_are_rendered_equal(tiny, line):
    assert tiny.render(line["messages"], tools=line["tools"], enable_thinking=line["enable_thinking"]) == line["prompt"]


TEMPLATES = {
    "blocks and loop controls": (
        "{% for m in messages %}\n    {% if m.role == 'tool' %}\n{% continue %}\n    {% endif %}\n{{ m.content }}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}\n{% endfor %}\n"
    ),
    "tojson with options": (
        "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': [2, 3]} | tojson(separators=[',', ':'], sort_keys=true) }}"
    ),
    "tojson keeps letters": "{{ {'ü': '<b>&\\'\"', 'n': none} | tojson }}{{ 'ü' | tojson(ensure_ascii=true) }}",
    "named tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}{{ image_token }}",
    "own variables": "{{ mood | default('none') }}{{ documents is none }}",
    "generation mark": "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}!",
    "namespace and dict": "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ dict(a=1) | tojson }}",
    "undefined is empty": "{{ nothing }}{{ messages[0].nothing }}|",
    "year": "{{ strftime_now('%Y')[:2] }}",
}


@pytest.mark.filterwarnings("ignore:render. the chat template does not read")
@pytest.mark.parametrize("variables", [{}, {"mood": "good", "eos_token": "<end>"}], ids=["plain", "variables"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_functions_of_templates_do_what_transformers_gives(folder, witness, name, variables):
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    messages = [user("one <&>"), {"role": "tool", "content": "two"}, user("three"), user("four")]
    expected = witness.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **variables)
    assert Tokenizer(folder).render(messages, add_generation_prompt=False, **variables) == expected


def test_F9_a_refusal_of_the_template_names_the_message(tiny):
    messages = [user("a"), assistant("b"), {"role": "system", "content": "late"}, user("c")]
    with pytest.raises(TemplateError, match="messages\\[2\\]: a system message can only come first") as caught:
        tiny.render(messages)
    assert caught.value.message_index == 2
    with pytest.raises(TemplateError, match="messages\\[1\\]: unknown role: wizard"):
        tiny.render([user("a"), {"role": "wizard", "content": "b"}])
    with pytest.raises(TemplateError, match="messages\\[1\\].*no attribute 'items'"):
        tiny.render([user("a"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])])


def test_a_refusal_that_is_about_no_message_names_none():
    template = ChatTemplate("{{ raise_exception('nobody asked anything') }}")
    with pytest.raises(TemplateError, match="^chat template: nobody asked anything") as caught:
        template.render([user("a")])
    assert caught.value.message_index is None


def test_a_template_cannot_reach_outside():
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render([user("a")])


def test_a_template_with_a_syntax_error_names_the_line():
    with pytest.raises(TemplateError, match="x.jinja: line 2"):
        ChatTemplate("ok\n{% if %}", where="folder/x.jinja")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("Hello", "messages is not a list"),
        (user("Hello"), "messages is not a list"),
        ([user("a"), "b"], "messages\\[1\\] is not a message"),
        ([{"content": "a"}], "messages\\[0\\] is not a message"),
        (None, "messages is not a list"),
    ],
)
def test_what_is_no_conversation_is_refused(tiny, messages, words):
    with pytest.raises(InputError, match=words):
        tiny.render(messages)


def test_tools_are_schemas(tiny):
    for tools in (WEATHER, [print], "weather"):
        with pytest.raises(InputError, match="tools"):
            tiny.render([user("a")], tools=tools)


def test_a_template_is_found_in_every_place_it_may_stand(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(folder).render([user("a")])
    assert not Tokenizer(folder).has_chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer(folder).render([user("a")]) == "from json"
    edit_json(folder / "tokenizer_config.json", chat_template="from config")
    assert Tokenizer(folder).render([user("a")]) == "from config"
    named = [{"name": "default", "template": "from list"}, {"name": "tool_use", "template": "with tools"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer(folder).render([user("a")]) == "from list"
    assert Tokenizer(folder).render([user("a")], tools=[WEATHER]) == "with tools"
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer(folder).render([user("a")]) == "from file"
    edit_json(folder / "tokenizer_config.json", chat_template=5)
    with pytest.raises(CheckpointError, match="no known form"):
        Tokenizer(folder).render([user("a")])
