"""Conversations in Python: the answer in them, what becomes of it as history, and going on by ids."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

import qwenref
from qwenref import errors
from qwenref.answers import parse
from qwenref.generate import render

TINY = Path(qwenref.__file__).with_name("tiny")
RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
CHATS = [line for line in EXAMPLES if line["messages"] is not None and not {"images", "video_frames"} & set(line)]
SUM = EXAMPLES[1]
NEXT = [{"role": "user", "content": "How much is 12 plus 25?"}]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


class Written:
    """A sampler that writes given ids."""

    def __init__(self, ids):
        self.ids = iter(ids)

    def sample(self, logits, context_ids, rng):
        return next(self.ids)


def says(model, messages, ids, **options):
    return model.chat(messages, sampler=Written(ids), max_new_tokens=len(ids), **options)


def letters(model, text):
    """Ids of a text that its tokenizer would write with fewer."""
    return [model.tokenizer.token_id(letter) for letter in text] + [model.tokenizer.stop.ids[0]]


def test_a_reply_knows_its_prompt_its_parts_and_the_conversation_with_it(model):
    out = model.chat(SUM["messages"])
    assert isinstance(out, qwenref.Reply) and out.text is not None and out.prompt.text == SUM["prompt"]
    assert out.ids == SUM["prompt_ids"] + SUM["output_ids"]
    assert out.answer == parse("1+3=4, 3+2=5\n</think>\n\n54", thinking=True)
    assert out.messages == [*SUM["messages"], out.answer.message]
    assert out.to_dict()["content"] == "54" and json.loads(json.dumps(out.to_dict())) == out.to_dict()


@pytest.mark.parametrize("line", CHATS[::4], ids=lambda line: f"{line['id']}-{line['task']}")
def test_the_check_of_a_chat_is_that_of_round_trip(model, line):
    options = {"tools": line["tools"], "enable_thinking": line["enable_thinking"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = says(model, line["messages"], line["output_ids"], **options)
        told = len(caught)
        found = qwenref.round_trip(model, line["messages"], line["output_ids"], **options)
    assert out.round_trip == found and told == (not found.same)


def test_F6_a_chat_whose_answer_changes_as_history_warns_once_for_a_place_and_says_how_to_go_on(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", errors.QwenrefWarning)
        for text in ("yes", "the"):
            out = says(model, SUM["messages"], letters(model, text), enable_thinking=False)
    assert not out.round_trip.same and out.answer.content == "the"
    assert out.round_trip.at > len(out.prompt.ids) and "changes" in repr(out.round_trip)
    (warning,) = caught
    assert warning.category is errors.QwenrefWarning and warning.filename == __file__
    assert "after=out" in str(warning.message) and "round_trip" in str(warning.message)


def test_a_template_that_refuses_the_answer_costs_a_warning_and_no_answer(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    refuses = "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('none of those') }}{% endif %}"
    source = refuses + "{{ m.content }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.warns(errors.QwenrefWarning, match="cannot be rendered as history: .*none of those"):
        out = qwenref.from_pretrained(folder).chat(SUM["messages"], max_new_tokens=2)
    assert len(out.new_ids) == 2
    with pytest.raises(errors.TemplateError):
        out.round_trip  # noqa: B018 - the error is the answer


# By ids


@pytest.mark.parametrize("thinking", [True, False])
def test_F6_going_on_by_ids_appends_and_is_what_the_template_writes_behind_the_answer(model, thinking):
    first = model.chat(SUM["messages"], enable_thinking=thinking, max_new_tokens=60)
    second = model.chat(NEXT, after=first, max_new_tokens=40)
    assert second.ids[: len(first.ids)] == first.ids
    every = [*first.messages, *NEXT]
    rendered = render(model, every, enable_thinking=thinking).text
    behind = model.tokenizer.decode(second.prompt.ids[len(first.ids) :])
    assert rendered.endswith(behind) and behind.startswith("\n<|im_start|>user\nHow much is 12 plus 25?")
    assert second.enable_thinking is thinking and second.messages[:-1] == every
    third = model.chat(NEXT, after=second, max_new_tokens=1)
    assert third.ids[: len(second.ids)] == second.ids and third.prompt.text.count("How much is 12 plus 25?") == 2


def test_F6_by_ids_the_model_sees_the_very_ids_it_wrote(model):
    with pytest.warns(errors.QwenrefWarning):
        first = says(model, SUM["messages"], letters(model, "yes"), enable_thinking=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is rendered again, so nothing changes
        second = model.chat(NEXT, after=first, max_new_tokens=1)
    assert second.ids[: len(first.ids)] == first.ids
    again = render(model, [*first.messages, *NEXT], enable_thinking=False).ids
    assert again[: len(first.ids)] != first.ids


def test_going_on_by_ids_with_the_cache_has_the_bits_of_going_on_without(model):
    cache = qwenref.Cache(model)
    first = model.chat(SUM["messages"], cache=cache)
    held = int(cache.length[0])
    assert held == len(first.ids) - 1
    options = {"after": first, "max_new_tokens": 20, "return_logits": True}
    warm = model.chat(NEXT, cache=cache, **options)
    cold = model.chat(NEXT, **options)
    assert warm.ids == cold.ids and (warm.logits == cold.logits).all() and warm.prompt == cold.prompt
    assert int(cache.length[0]) == len(warm.ids) - 1
    with pytest.raises(errors.InputError, match="not the one this reply was made with"):
        model.chat(NEXT, after=first, cache=cache)


def test_the_results_of_a_tool_go_behind_the_call_and_its_stop_token(model):
    line = next(line for line in CHATS if line["tools"] and "tool_call" in line["output_text"])
    first = model.chat(line["messages"], tools=line["tools"], enable_thinking=line["enable_thinking"])
    second = model.chat([{"role": "tool", "content": "rain"}], after=first, max_new_tokens=1)
    behind = model.tokenizer.decode(second.prompt.ids[len(first.ids) :])
    assert behind.startswith("\n<|im_start|>user\n<tool_response>\nrain") and second.tools == line["tools"]


def test_an_answer_that_was_cut_off_is_closed_behind_its_last_id(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = model.chat(SUM["messages"], max_new_tokens=3)
    second = model.chat(NEXT, after=first, max_new_tokens=1)
    behind = model.tokenizer.decode(second.prompt.ids[len(first.ids) :])
    assert second.ids[: len(first.ids)] == first.ids and behind.startswith("<|im_end|>\n<|im_start|>user\n")


def test_what_cannot_go_on_by_ids_is_refused(model, tmp_path):
    first = model.chat(SUM["messages"])
    for messages, after, told in (
        (NEXT, first.ids, "chat: after"),
        ([], first, "no new messages"),
        ("And then?", first, "no new messages"),
    ):
        with pytest.raises(errors.InputError, match=told):
            model.chat(messages, after=after)
    with pytest.raises(errors.TemplateError, match=r"messages\[2\]"):
        model.chat([{"role": "nobody", "content": "x"}], after=first)
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    bare = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(bare, encoding="utf-8")
    other = qwenref.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = other.chat(SUM["messages"], max_new_tokens=2)
    with pytest.raises(errors.CapabilityMissing, match="does not show where an answer ends"):
        other.chat(NEXT, after=first)
