"""What can be wrong about text, ids, conversations and sampling: what, where, found, expected, do of each message."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import qwenref
from qwenref import Sampler, errors
from qwenref.generate import generate, render
from qwenref.template import ChatTemplate
from qwenref.tokenizer import Tokenizer

TINY = Path(qwenref.__file__).with_name("tiny")
HI = [{"role": "user", "content": "Hi"}]
VOCAB = 1280


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer whose folder has no template, and whose model has fewer ids."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(TINY / name, folder)
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text.replace(f'"vocab_size": {VOCAB}', '"vocab_size": 1255'), encoding="utf-8")
    return Tokenizer(folder)


def fields(error):
    """{"": the first line, "found": ..., "expected": ..., "do": ...} of a message."""
    first, *lines = str(error).split("\n")
    found = {"": first}
    for line in lines:
        label, text = re.fullmatch(r"    (found|expected|do|) +(.*)", line).groups()
        assert label not in found or not label
        found[label or next(reversed(found))] = text
    return found


def nan_at(model, step):
    """Generate where the head gives NaN for id 77 at the given step."""
    calls = []

    def damage(module, args, logits):
        calls.append(None)
        logits = logits.copy()
        logits[..., 77] = np.nan if len(calls) == step else logits[..., 77]
        return logits

    with model.lm_head.register_forward_hook(damage):
        return generate(model, [5, 6, 7], stop=[], sampler=Sampler(0.8), max_new_tokens=9)


def sure(words):
    return re.escape(words)


# name: (what is done with (model, bare), exception, first line, found, expected, do)
CASES = {
    "unknown role": (
        lambda model, bare: render(model, [*HI, {"role": "wizard", "content": "b"}]),
        errors.TemplateError,
        sure("chat template, messages[1]: unknown role: wizard"),
        "role 'wizard', keys content, role",
        "what this template takes",
        "change the conversation, or read .*chat_template.jinja",
    ),
    "unknown role in chat": (
        lambda model, bare: model.chat([*HI, {"role": "wizard", "content": "b"}]),
        errors.TemplateError,
        sure("chat template, messages[1]: unknown role: wizard"),
        "role 'wizard', keys content, role",
        "what this template takes",
        "change the conversation, or read .*chat_template.jinja",
    ),
    "role that is no text": (
        lambda model, bare: render(model, [*HI, {"role": 5, "content": "b"}]),
        errors.InputError,
        sure("messages[1] is not a message"),
        ".*'role': 5.*",
        'a dict with "role" and "content", the role a text',
        None,
    ),
    "tool that is no object": (
        lambda model, bare: render(model, HI, tools=[{"name": "a"}, "weather"]),
        errors.InputError,
        sure("tools[1] is not a JSON schema"),
        "'weather'",
        sure("an object (dict)"),
        'pass {"type": "function", .*',
    ),
    "template missing": (
        lambda model, bare: bare.render(HI),
        errors.TemplateError,
        ".*: no chat template",
        sure("config.json, generation_config.json, tokenizer.json, tokenizer_config.json"),
        "chat_template.jinja, or chat_template in tokenizer_config.json",
        "pass plain text or token ids.*",
    ),
    "template that raises": (
        lambda model, bare: ChatTemplate(
            "{% for m in messages %}{{ raise_exception('no ' + m.content) if loop.index > 2 }}{% endfor %}", "a.jinja"
        ).render(HI * 2 + [{"role": "user", "content": "third"}]),
        errors.TemplateError,
        sure("chat template, messages[2]: no third"),
        "role 'user', keys content, role",
        "what this template takes",
        "change the conversation, or read a.jinja",
    ),
    "template that stumbles": (
        lambda model, bare: ChatTemplate("{% for m in messages %}{{ m.content / 2 }}{% endfor %}").render(HI),
        errors.TemplateError,
        sure("chat template, messages[0]: unsupported operand type(s) for /: 'str' and 'int'"),
        "role 'user', keys content, role",
        "what this template takes",
        "change the conversation, .*",
    ),
    "id beyond the vocabulary, from text": (
        lambda model, bare: bare.encode("Hi<|im_start|>"),
        errors.InputError,
        sure("token 2 of the text is 1,255; the vocabulary has 1,255"),
        r"'<\|im_start\|>' in .*tokenizer.json",
        r"ids 0 to 1,254 .*",
        "use the tokenizer.json that belongs to this model",
    ),
    "id beyond the vocabulary, to the model": (
        lambda model, bare: generate(model, [[1, 2], [3, 1280]]),
        errors.InputError,
        sure("input_ids[1, 1] is 1,280; the vocabulary has 1,280"),
        "1 of 4 ids outside of it",
        "0 to 1,279",
        "use the tokenizer that belongs to this model.*",
    ),
    "id that no vocabulary has, to text": (
        lambda model, bare: bare.decode([5, -1]),
        errors.InputError,
        sure("decode: ids[1]: not a token id"),
        "-1",
        sure("a whole number from 0 to 2**32 - 1"),
        "pass what encode or generate gave, one row of it",
    ),
    "NaN among the logits of a sampler": (
        lambda model, bare: Sampler().distribution(np.float32([1, np.nan, np.nan])),
        errors.NonFiniteError,
        "Sampler: 2 of 3 logits are not finite",
        "nan for id 1",
        "numbers: no token is chosen from NaN or infinity",
        "look for the first module .*",
    ),
    "NaN among the logits of a model": (
        lambda model, bare: nan_at(model, 3),
        errors.NonFiniteError,
        "generate: step 3, row 0: 1 of 1,280 logits are not finite",
        "nan for id 77, after 5 tokens",
        "numbers: no token is chosen from NaN or infinity",
        sure("qwenref.check_finite(model) names ") + ".*",
    ),
    "a penalty that transformers does not have": (
        lambda model, bare: Sampler(presence_penalty=1.5),
        errors.InputError,
        "Sampler: order 'hf' has no presence or frequency penalty",
        "presence_penalty 1.5, frequency_penalty 0.0",
        "0 for both, as in transformers",
        "order='vllm', .*",
    ),
    "a window that only llama.cpp has": (
        lambda model, bare: Sampler(penalty_last_n=64, order="vllm"),
        errors.InputError,
        "Sampler: penalty_last_n with order 'vllm'",
        "penalty_last_n 64",
        "None: only llama.cpp looks back so far",
        "leave it out, or order='llama.cpp'",
    ),
    "a lone surrogate in a text": (
        lambda model, bare: bare.encode("ab\ud800c"),
        errors.InputError,
        sure("encode: character 2 is a lone surrogate, U+D800"),
        r"'ab\\ud800c'",
        "text that UTF-8 can hold",
        ".* loses it on purpose",
    ),
    "a lone surrogate deep in a conversation": (
        lambda model, bare: render(model, [*HI, {"role": "user", "content": [{"type": "text", "text": "\udc80"}]}]),
        errors.InputError,
        sure("messages[1].content[0].text: character 0 is a lone surrogate, U+DC80"),
        r"'\\udc80'",
        "text that UTF-8 can hold",
        ".* loses it on purpose",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_says_what_where_found_expected_and_do(model, bare, name):
    call, kind, *expected = CASES[name]
    with pytest.raises(kind) as caught:
        call(model, bare)
    found = fields(caught.value)
    for label, pattern in zip(("", "found", "expected", "do"), expected, strict=True):
        assert (found.get(label) is None) == (pattern is None), (label, found)
        assert pattern is None or re.fullmatch(pattern, found[label]), (label, found)


def test_after_every_refusal_the_model_and_its_tokenizer_go_on(model, bare):
    before = generate(model, [1, 2], max_new_tokens=3).new_ids
    for call, kind, *_ in CASES.values():
        with pytest.raises(kind):
            call(model, bare)
    assert generate(model, [1, 2], max_new_tokens=3).new_ids == before
    assert bare.decode(bare.encode("a fox")) == "a fox"


# Values of odd types

NO_IDS = {
    "true": True,
    "true in a row": [True],
    "true of NumPy": [np.True_],
    "true of torch": torch.tensor(True),
    "a fraction": 1.0,
    "fractions": np.array([1.0]),
    "none": None,
    "a row of rows": [[1]],
    "a matrix": np.array([[1, 2]]),
    "70 bits": [2**70],
    "33 bits": [2**32],
    "negative": np.array([-1]),
    "64 unsigned bits": np.array([2**64 - 1], np.uint64),
    "text": "1",
    "bytes": b"ab",
    "a set": {1, 2},
    "a dict": {1: 2},
    "an object": object(),
}


@pytest.mark.parametrize("name", NO_IDS)
def test_what_is_no_row_of_ids_is_not_decoded(model, name):
    for decode in (model.tokenizer.decode, model.tokenizer.decode_bytes):
        with pytest.raises(errors.InputError, match="decode: .*not a token id"):
            decode(NO_IDS[name])


@pytest.mark.parametrize("id", [True, np.True_, 1.0, None, -1, 2**32, 2**70, "1", [1], np.array([1, 2])], ids=repr)
def test_what_is_no_id_has_no_token(model, id):
    tokenizer = model.tokenizer
    for call in (tokenizer.token_text, tokenizer.token_bytes, tokenizer.stream().put, tokenizer.ids_without_token):
        with pytest.raises(errors.InputError, match="not a token id|not a number of rows"):
            call(id)


def test_one_id_in_an_array_of_no_dimension_is_an_id(model):
    tokenizer = model.tokenizer
    for id in (5, np.int32(5), np.array(5), torch.tensor(5)):
        assert tokenizer.decode(id) == tokenizer.token_text(id) == tokenizer.stream().put(id) == tokenizer.decode([5])
    assert tokenizer.decode(np.arange(40)[30::-7]) == tokenizer.decode([30, 23, 16, 9, 2])
    assert tokenizer.decode(np.array([5, 6], ">i2")) == tokenizer.decode(iter([5, 6])) == tokenizer.decode([5, 6])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda tokenizer: tokenizer.token_id(5), "token_id: not text"),
        (lambda tokenizer: tokenizer.token_id("\ud800"), "token_id: character 0 is a lone surrogate"),
        (lambda tokenizer: tokenizer.encode("a", special_tokens=["ids"]), "encode: special_tokens"),
        (lambda tokenizer: tokenizer.encode("a", special_tokens=np.array(["ids", "a"])), "encode: special_tokens"),
        (lambda tokenizer: tokenizer.encode("a", add_special_tokens=None), "encode: add_special_tokens"),
        (lambda tokenizer: tokenizer.encode("a", add_special_tokens="no"), "encode: add_special_tokens"),
        (lambda tokenizer: tokenizer.encode(np.array(["a"])), "encode: not text"),
        (lambda tokenizer: tokenizer.render([{"role": "user", "content": "a"}], tools=["\ud800"]), "tools"),
        (lambda tokenizer: tokenizer.render(HI, tools=[{"name": "\ud800"}]), r"tools\[0\]\.name: character 0"),
        (lambda tokenizer: tokenizer.render([{"role": "user", "content": "a\udfff"}]), r"messages\[0\]\.content: char"),
    ],
)
def test_a_tokenizer_refuses_what_is_no_text(model, call, words):
    with pytest.raises(errors.InputError, match=words):
        call(model.tokenizer)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"seed": True}, errors.InputError, "seed True"),
        ({"seed": 2**64}, errors.InputError, "seed 18446744073709551616"),
        ({"seed": 1.0}, errors.InputError, "seed 1.0"),
        ({"row_keys": [[1], [2, 3]]}, errors.ShapeError, "2 keys"),
        ({"row_keys": {3}}, errors.InputError, r"row key \{3\}"),
        ({"row_keys": [True]}, errors.InputError, "row key True"),
        ({"max_new_tokens": True}, errors.InputError, "max_new_tokens True"),
        ({"max_new_tokens": "3"}, errors.InputError, "max_new_tokens '3'"),
        ({"stop": -1}, errors.InputError, r"token ids \(0 to 1,279\)"),
        ({"stop": VOCAB}, errors.InputError, r"token ids \(0 to 1,279\)"),
        ({"stop": [2**70]}, errors.InputError, r"token ids \(0 to 1,279\)"),
        ({"stop": True}, errors.InputError, "found    True"),
        ({"stop": b"ab"}, errors.InputError, "found    b'ab'"),
        ({"stop": {"a": 1}}, errors.InputError, "found    {'a': 1}"),
        ({"stop": np.array([[5]])}, errors.InputError, "generate: stop"),
        ({"stop": "a\ud800"}, errors.InputError, "generate: stop: character 1 is a lone surrogate"),
        ({"streamer": 5}, errors.InputError, "put"),
        ({"streamer": object()}, errors.InputError, "put"),
        ({"streamer": list}, errors.InputError, "<class 'list'>"),
        ({"cache": 5}, errors.InputError, "cache: a int"),
        ({"sampler": Sampler}, errors.InputError, "sampler is the class Sampler"),
        ({"sampler": "hf"}, errors.InputError, "sampler is str"),
    ],
)
def test_generate_refuses_values_of_odd_types_before_it_runs(model, options, kind, words):
    cache = qwenref.Cache(model)
    with pytest.raises(kind, match=words):
        generate(model, [1, 2], **{"cache": cache, "max_new_tokens": 2, **options})
    assert cache.length[0] == 0


def test_generate_takes_ids_however_they_lie_in_memory(model):
    expected = generate(model, [19, 12, 5], max_new_tokens=4).new_ids
    every = np.arange(20)
    for ids in (every[19:4:-7], every[19:4:-7].astype(">i8"), torch.tensor([19, 12, 5]), (19, 12, 5)):
        assert generate(model, ids, max_new_tokens=4, seed=np.array(3), row_keys=np.array(2)).new_ids == expected
    rows = np.asfortranarray([[19, 12, 5]] * 2)
    assert generate(model, rows, max_new_tokens=4, row_keys=iter([4, 2**64 - 1])).new_ids == [expected] * 2
    with pytest.raises(errors.ShapeError, match="rows of different lengths"):
        generate(model, [[1, 2], [3]])


# Conversations of odd forms


@dataclasses.dataclass
class SimpleMessage:
    role: str
    content: object


def holding_itself():
    inner = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (5, "content is an int"),
        (True, "content is a bool"),
        (float("nan"), "content is a float"),
        (b"Hi", "content is bytes|content is a bytes"),
        (np.array(["Hi"]), "content is a ndarray"),
        ({"Hi"}, "content is a set"),
        (object(), "content is an object"),
        (holding_itself(), r"messages\[1\] nests too deep, or holds itself"),
        ("\udfff", r"messages\[1\]\.content: character 0"),
    ],
    ids=range(9),
)
def test_content_that_a_template_would_leave_out_is_refused(model, content, words):
    for answer in ({"role": "user", "content": content}, SimpleMessage("user", content)):
        with pytest.raises(errors.InputError, match=words):
            render(model, [*HI, answer])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_thinking": "no"}, "render: enable_thinking"),
        ({"enable_thinking": 0}, "render: enable_thinking"),
        ({"add_generation_prompt": "no"}, "render: add_generation_prompt"),
        ({"continue_final_message": 1}, "render: continue_final_message"),
        ({"tools": [{"a": holding_itself()}]}, "tools nests too deep, or holds itself"),
        ({"tools": [{"\ud800": 1}]}, r"a key of tools\[0\]: character 0"),
        ({"mood": holding_itself()}, "render nests too deep"),
    ],
)
def test_switches_are_true_or_false_and_nothing_holds_itself(model, options, words):
    with pytest.raises(errors.InputError, match=words):
        render(model, HI, **options)
    assert render(model, HI, enable_thinking=np.False_).enable_thinking is False


def test_a_variable_that_the_template_reads_nowhere_is_warned_of(model, recwarn):
    reads = ChatTemplate("{{ mood }}{{ messages[0].content if enable_thinking }}")
    assert reads.render(HI, mood="good", enable_thinking=True) == "goodHi" and not recwarn.list
    with pytest.warns(errors.QwenrefWarning, match="does not read enable_thinkng\n.*\n.*did you mean enable_thinking"):
        reads.render(HI, enable_thinkng=False)
    with pytest.warns(errors.QwenrefWarning, match="does not read documents, mood") as caught:
        assert render(model, HI, documents=["a"], mood="good") == render(model, HI)
    assert [warning.filename for warning in caught] == [__file__]


def test_texts_to_compare_and_ids_to_send_back_are_texts_and_ids(model):
    for texts, words in (("abc", "texts"), ([5], r"texts\[0\]: not text"), ({"x": "\ud800"}, "x: character 0")):
        with pytest.raises(errors.InputError, match=f"compare_tokenizers: {words}"):
            qwenref.compare_tokenizers(model, model, texts=texts)
    for ids in ("a", None, [1.5], [True], [2**40]):
        with pytest.raises(errors.InputError, match="round_trip: new_ids.*: not a token id"):
            qwenref.round_trip(model, HI, ids)


# Long and broken texts


LONG = {"x": "x" * 2**20, "emoji": "👩‍👩‍👧‍👦" * 10_000, "blanks": " \n" * 2**16, "nul": "a\0" * 1000}


@pytest.mark.parametrize("name", LONG)
def test_a_long_text_goes_in_and_out(model, name):
    text = LONG[name]
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    assert len(text) > 2**18 or model.tokenizer.encode_offsets(text)[1][-1, 1] == len(text)


def test_a_long_message_is_rendered_as_it_stands(model):
    text = "狐狸 <|im_start|> \0 " * 5000
    rendered = render(model, [{"role": "user", "content": text}])
    assert text.strip() in rendered.text and model.tokenizer.decode(rendered.ids) == rendered.text
    assert rendered.ids_of(0, "content") == model.tokenizer.encode(text.strip())
