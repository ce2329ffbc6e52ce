"""Pictures in prompts: placeholders filled, spans that know them, conversations that hold them or get them."""

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from folders import TEXT, folder, named, weights
from PIL import Image

import qwenref
from qwenref.errors import CapabilityMissing, InputError
from qwenref.processing import conversation
from qwenref.processing.prompt import PicturePrompt

DATA = Path(__file__).parent / "data"
RUNS = [json.loads(line) for line in (DATA / "tiny_examples.jsonl").read_text().splitlines()]
RUNS = [run for run in RUNS if run.get("images") or run.get("video_frames")]
IMAGE, VIDEO, OPEN, CLOSE = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


def picture(seed=0, height=64, width=64):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def user(*content):
    return {"role": "user", "content": list(content)}


def text(words):
    return {"type": "text", "text": words}


def placed(run):
    """The messages of a golden run with its pictures where they are."""
    place = {name: str(DATA / name) for name in run.get("images", run.get("video_frames"))}

    def found(part):
        kind = part["type"]
        if kind == "text":
            return part
        source = part[kind]
        return {**part, kind: place[source] if isinstance(source, str) else [place[name] for name in source]}

    return [{**message, "content": [found(part) for part in message["content"]]} for message in run["messages"]]


def parts(prompt):
    """{part: (text, ids)} of the spans of pictures."""
    return {
        span.part: (prompt.text[span.start : span.stop], prompt.ids[span.first : span.last])
        for span in prompt.spans
        if span.part.startswith(("image", "video"))
    }


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['id']}-{run['task'].replace(' ', '-')}")
def test_the_prompts_of_the_golden_runs_come_out_id_for_id(model, run):
    options = {"enable_thinking": run["enable_thinking"], "processing": {"native_fps": run.get("video_fps")}}
    prompt = qwenref.render(model, placed(run), **options)
    assert prompt.ids == run["prompt_ids"]
    for name in ("image_grid_thw", "video_grid_thw"):
        assert (name in prompt.inputs) == (name in run)
        assert name not in run or prompt.inputs[name].tolist() == run[name]
    unfilled = qwenref.render(model.tokenizer, placed(run), enable_thinking=run["enable_thinking"])
    assert unfilled.text == run["prompt"] and not isinstance(unfilled, PicturePrompt)


# D10: the ids another engine has to have, and where each comes from


def test_D10_every_frame_group_stands_in_its_own_marks_behind_its_time(model):
    film = np.stack([picture(at, 64, 96) for at in range(5)])
    prompt = qwenref.render(model, [user({"type": "video", "video": film})], processing={"native_fps": 2})
    groups = [f"<{time} seconds>{OPEN}{VIDEO * 6}{CLOSE}" for time in ("0.2", "1.2", "2.0")]
    assert f"user\n{''.join(groups)}<|im_end|>" in prompt.text
    nested = qwenref.render(
        model, [user({"type": "video", "video": film})], processing={"native_fps": 2, "video_marks": "nested"}
    )
    assert f"user\n{OPEN}{''.join(groups)}{CLOSE}<|im_end|>" in nested.text
    difference = qwenref.first_difference(prompt, nested)
    assert difference.a_span.part == "video[0].time[0]" and difference.b_token == (1263, OPEN)
    with pytest.raises(InputError, match=r"video_marks: 'twice'"):
        model.processor(VIDEO, videos=film, native_fps=2, video_marks="twice")


def test_D10_spans_say_which_ids_are_which_image_and_frame_group(model):
    film = np.stack([picture(at, 64, 96) for at in range(4)])
    content = [
        text("First "), {"type": "image", "image": picture()}, text(" and "), {"type": "video", "video": film},
        {"type": "image", "image": picture(1, 64, 128)}, text(" end"),
    ]  # fmt: skip
    messages = [{"role": "system", "content": "See."}, user(*content)]
    prompt = qwenref.render(model, messages, processing={"native_fps": 2})
    assert parts(prompt) == {
        "image[0]": (IMAGE * 4, [1266] * 4),
        "video[0].time[0]": ("<0.2 seconds>", model.tokenizer.encode("<0.2 seconds>")),
        "video[0][0]": (VIDEO * 6, [1267] * 6),
        "video[0].time[1]": ("<1.2 seconds>", model.tokenizer.encode("<1.2 seconds>")),
        "video[0][1]": (VIDEO * 6, [1267] * 6),
        "image[1]": (IMAGE * 8, [1266] * 8),
    }
    assert prompt.ids_of(1, "video[0][1]") == [1267] * 6
    said = {span.part: prompt.text[span.start : span.stop] for span in prompt.spans if span.part.startswith("content")}
    assert said == {"content": "See.", "content[0].text": "First", "content[2].text": "and", "content[5].text": "end"}
    position = first = 0
    for span in prompt.spans:
        assert (span.start, span.first) == (position, first) and span.start < span.stop
        position, first = span.stop, span.last
    assert (position, first) == (len(prompt.text), len(prompt.ids))
    assert prompt.tail.startswith("<|im_start|>assistant")
    assert prompt.ids == model.tokenizer.encode(prompt.text, add_special_tokens=False)


def test_a_prompt_with_pictures_is_told_as_text_json_and_pickles(model):
    prompt = qwenref.render(model, [user({"type": "image", "image": picture()}, text("?"))])
    assert "image 0  64 x 64 (array uint8)  as it is  -> grid 1 x 4 x 4  -> 4 tokens" in prompt.describe()
    facts = json.loads(json.dumps(prompt.to_dict()))
    assert facts["items"][0]["grid"] == [1, 4, 4] and "image[0]" in [span["part"] for span in facts["spans"]]
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt and (again.inputs["pixel_values"] == prompt.inputs["pixel_values"]).all()
    assert "image[0]" in str(prompt)


# Pictures handed over beside the conversation


def test_pictures_go_to_the_parts_in_order_or_in_front_of_the_last_question(model):
    one, two = picture(0), picture(1, 64, 96)
    inside = [user({"type": "image", "image": one}, {"type": "image", "image": two}, text("Same?"))]
    expected = qwenref.render(model, inside)
    empty = [user({"type": "image"}, {"type": "image_url", "image_url": {"url": "a.png"}}, text("Same?"))]
    for messages in (empty, [{"role": "user", "content": "Same?"}], [user(text("Same?"))]):
        kept = repr(messages)
        prompt = qwenref.render(model, messages, images=[one, two])
        assert prompt == expected and repr(messages) == kept
        assert (prompt.inputs["pixel_values"] == expected.inputs["pixel_values"]).all()
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    prompt = qwenref.render(model, [*history, {"role": "user", "content": "What?"}], images=one)
    assert [span.message for span in prompt.spans if span.part == "image[0]"] == [2]


def test_a_part_without_a_picture_stays_as_the_template_writes_it(model):
    messages = [user({"type": "image"}, text("?"))]
    prompt = qwenref.render(model, messages)
    assert prompt == qwenref.render(model.tokenizer, messages) and prompt.ids.count(1266) == 1
    with pytest.raises(InputError, match=r"chat: a place for images and no image\n.*1 x <\|image_pad\|>"):
        model.chat(messages)


REFUSED = {
    "more pictures than parts": (
        [user({"type": "image"}, text("?"))], {"images": [picture(), picture()]},
        r"2 images for 1 part of the messages",
    ),
    "fewer pictures than parts": (
        [user({"type": "image"}, {"type": "image"})], {"images": [picture()]}, r"1 image for 2 parts of the messages",
    ),
    "another kind": ([user({"type": "image"})], {"videos": [[picture()] * 4]}, r"1 video for 0 parts of the messages"),
    "one part of two says what it shows": (
        [user({"type": "image", "image": picture()}, {"type": "image"})], {}, r"messages: image 1 of 2 says not what",
    ),
    "no question": ([{"role": "system", "content": "x"}], {"images": picture()}, r"no message of a user"),
    "a place written in a text": (
        [user({"type": "image", "image": picture()}, text(f"What is {IMAGE}?"))], {},
        r"1 image for 2 places in the prompt\n.*2 x <\|image_pad\|>\n(.|\n)*is a place, too",
    ),
    "options that are none": (
        [user({"type": "image", "image": picture()})], {"processing": 2}, r"processing: an int\n.*2\n.*native_fps",
    ),
    "no file": ([user({"type": "image", "image": "a.png"})], {}, r"image 0: cannot be read\n.*a.png: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_pictures_that_do_not_fit_the_conversation_are_one_error(model, case):
    messages, options, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        qwenref.render(model, messages, **options)


def test_a_processor_fills_a_raw_prompt(model):
    prepared = model.processor(
        f"Look: {OPEN}{IMAGE}{CLOSE} and {VIDEO}.", images=picture(), videos=[[picture()] * 4], native_fps=2
    )
    assert prepared.text.startswith(f"Look: {OPEN}{IMAGE * 4}{CLOSE} and <0.2 seconds>{OPEN}{VIDEO * 4}{CLOSE}<1.2")
    assert prepared.ids == model.tokenizer.encode(prepared.text)
    with pytest.raises(InputError, match=r"1 image for 0 places in the prompt"):
        model.processor("Look", images=picture())


def test_conversations_of_other_kinds_hold_no_pictures():
    for messages in ("text", None, 5, [None], [{"role": "user", "content": None}], [user("a", 5)]):
        assert conversation.sources(messages) == {"image": [], "video": []}


def test_prepared_pictures_can_be_joined_and_those_in_a_cache_left_out(model):
    films = [np.stack([picture(at, 64, 96) for at in range(4)]), np.stack([picture(9)] * 6)]
    first = model.processor(images=[picture(), picture(1, 64, 96)], videos=films[0], native_fps=2)
    second = model.processor(images=picture(2, 64, 128), videos=[films[1]], native_fps=2)
    both = first + second
    expected = model.processor(images=[picture(), picture(1, 64, 96), picture(2, 64, 128)], videos=films, native_fps=2)
    assert both.items == expected.items and repr(both) == repr(expected)
    for name, array in expected.inputs.items():
        assert (both.inputs[name] == array).all()
    rest = both.behind({"image": 4 + 6, "video": 12})
    assert [item._replace(name="") for item in rest.items] == [item._replace(name="") for item in second.items]
    for name, array in second.inputs.items():
        assert (rest.inputs[name] == array).all()
    inside = both.behind({"image": 5})  # the second image is begun: the cache has it
    assert inside.image_grid_thw.tolist() == [[1, 4, 8]] and len(inside.of("video")) == 2


def test_a_model_of_text_alone_says_so(tmp_path):
    alone = qwenref.from_pretrained(folder(tmp_path, TEXT, named(weights(), "model.")))
    with pytest.raises(CapabilityMissing, match="a model without vision"):
        alone.processor  # noqa: B018


def test_bytes_paths_and_data_survive_the_template(model):
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, "PNG")
    expected = qwenref.render(model, [user({"type": "image", "image": picture()}, text("?"))])
    for source in (file.getvalue(), Image.fromarray(picture())):
        assert qwenref.render(model, [user({"type": "image", "image": source}, text("?"))]) == expected
