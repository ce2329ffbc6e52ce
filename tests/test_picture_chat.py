"""Conversations with pictures, answered: golden runs, turns behind one another, caches, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_picture_prompts import DATA, RUNS, placed

import qwenref
from qwenref.errors import CapabilityMissing
from qwenref.processing.prompt import PicturePrompt

BLUE, PURPLE = (DATA / "images" / name for name in ("30-0.png", "31-0.png"))
WHAT = {"role": "user", "content": "What do you see?"}
COLOUR = {"role": "user", "content": "What colour is the shape?"}


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['id']}-{run['task'].replace(' ', '-')}")
def test_chat_gives_the_golden_answers_about_pictures(model, run):
    options = {"enable_thinking": run["enable_thinking"], "processing": {"native_fps": run.get("video_fps")}}
    out = model.chat(placed(run), **options)
    assert out.prompt_ids == run["prompt_ids"] and out.new_ids == run["output_ids"]
    assert isinstance(out.prompt, PicturePrompt) and out.text == run["output_text"].removesuffix("<|im_end|>")


def test_pictures_may_be_handed_over_beside_the_question(model):
    out = model.chat([WHAT], images=BLUE, enable_thinking=False)
    assert out.text == "A blue square on gray."
    assert out.to_dict()["items"][0]["name"] == "30-0.png"
    assert json.loads(json.dumps(out.to_dict()))["items"][0]["tokens"] == 4


def test_a_conversation_goes_on_with_the_messages_of_the_answer(model):
    first = model.chat([WHAT], images=BLUE, enable_thinking=False)
    assert first.round_trip.same or first.round_trip.at is not None  # rendered with the pictures it holds
    second = model.chat([*first.messages, COLOUR], enable_thinking=False)
    assert second.prompt.prepared.items == first.prompt.prepared.items
    third = model.chat([*second.messages, COLOUR], enable_thinking=False, max_new_tokens=1)
    assert len(third.prompt.prepared.items) == 1


def test_going_on_by_ids_hands_over_only_what_the_cache_has_not_met(model):
    def turns(cache):
        kept = {} if cache is None else {"cache": cache}
        first = model.chat([WHAT], images=BLUE, enable_thinking=False, return_logits=True, **kept)
        second = model.chat([COLOUR], after=first, images=PURPLE, return_logits=True, **kept)
        third = model.chat([WHAT], after=second, return_logits=True, **kept)
        return first, second, third

    cold, warm = turns(None), turns(qwenref.Cache(model))
    for a, b in zip(cold, warm, strict=True):
        assert a.ids == b.ids and a.logits.tobytes() == b.logits.tobytes()
    assert [len(out.prompt.prepared.items) for out in warm] == [1, 2, 2]
    first, second = warm[:2]
    assert second.prompt_ids[: len(first.ids)] == first.ids
    out = model.generate(second.prompt_ids, return_logits=True, **second.prompt.inputs)
    assert out.new_ids == second.new_ids and out.logits.tobytes() == second.logits.tobytes()


def test_D12_windows_of_a_prompt_that_end_inside_of_pictures_change_no_bit(model):
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    pictures = {"images": [noise, noise[:, :64]], "videos": np.stack([noise] * 4), "processing": {"native_fps": 2}}
    prompt = qwenref.render(model, [WHAT], **pictures)
    options = {"max_new_tokens": 3, "stop": [], "return_logits": True} | prompt.inputs
    expected = model.generate(prompt.ids, **options).logits.tobytes()
    assert len(prompt.prepared.items) == 3 and len(prompt.ids) > 50
    for window in range(1, len(prompt.ids)):
        assert model.generate(prompt.ids, prefill_window=window, **options).logits.tobytes() == expected, window


def test_two_pictures_in_one_prompt_or_one_each_in_two_batch_rows(model):
    both = model.chat([WHAT], images=[BLUE, PURPLE], enable_thinking=False, max_new_tokens=2)
    assert both.prompt.prepared.image_grid_thw.tolist() == [[1, 4, 4], [1, 6, 6]]
    alone = [qwenref.render(model, [WHAT], images=one, enable_thinking=False) for one in (BLUE, PURPLE)]
    length = max(len(prompt.ids) for prompt in alone)
    ids = np.array([[0] * (length - len(prompt.ids)) + prompt.ids for prompt in alone])
    mask = np.array([[0] * (length - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in alone])
    inputs = (alone[0].prepared + alone[1].prepared).inputs
    out = model.generate(ids, attention_mask=mask, **inputs)
    expected = [model.generate(prompt.ids, **prompt.inputs).new_ids for prompt in alone]
    assert [row.new_ids for row in out.rows] == expected


def test_a_text_model_says_that_it_cannot_see(tmp_path):
    from folders import TEXT, folder, named, weights

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((qwenref.hub.resolve("tiny") / name).read_bytes())
    blind = qwenref.from_pretrained(
        folder(tmp_path, TEXT | {"vocab_size": 1280}, named(weights(TEXT | {"vocab_size": 1280}), "model."))
    )
    with pytest.raises(CapabilityMissing, match="a model without vision"):
        blind.chat([WHAT], images=BLUE)


def test_the_example_of_the_readme_says_what_it_says(capsys):
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    part = readme.split("## Pictures and videos\n")[1].split("\n## ")[0]
    names = {}
    exec(part.split("```python\n")[1].split("```")[0], names)
    said = part.split("print(out.text)")[1].split("# ")[1].split("\n")[0]
    assert names["out"].text == said == capsys.readouterr().out.splitlines()[0]
    assert names["c"]["model.visual.blocks.1.attn.attn_weights"].shape == (4, 16, 16)


# Command line


def command(*words):
    place = str(Path(qwenref.__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "qwenref", *map(str, words)], capture_output=True, text=True, timeout=300,
        cwd=DATA, env=os.environ | {"PYTHONPATH": place},
    )  # fmt: skip


def test_generate_shows_the_model_pictures(tmp_path):
    said = command("generate", "tiny", "What do you see?", "--image", BLUE, "--no-thinking", "--stats")
    assert said.returncode == 0 and said.stdout == "A blue square on gray.\n"
    assert "image 0  64 x 64 (30-0.png)  as it is  -> grid 1 x 4 x 4  -> 4 tokens" in said.stderr
    facts = json.loads(command("generate", "tiny", "Same?", "--image", BLUE, "--image", PURPLE, "--json").stdout)
    assert [item["grid"] for item in facts["items"]] == [[1, 4, 4], [1, 6, 6]]
    raw = "<|vision_start|><|image_pad|><|vision_end|>What"
    facts = json.loads(
        command("generate", "tiny", raw, "--raw", "--image", BLUE, "--max-new-tokens", 1, "--json").stdout
    )
    assert facts["prompt_ids"][:6] == [1263, *[1266] * 4, 1264]
    said = command("generate", "tiny", "What?", "--image", "nowhere.png")
    assert said.returncode == 3 and "image 0: cannot be read" in said.stderr and not said.stdout


def test_generate_shows_the_model_a_film(tmp_path):
    av = pytest.importorskip("av", reason="writing a film needs PyAV (extra 'test')")
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=2)
        stream.height, stream.width, stream.pix_fmt = 64, 64, "bgr0"
        for shade in (10, 80, 160, 240):
            picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    facts = json.loads(command("generate", "tiny", "What changes?", "--video", tmp_path / "a.mkv", "--json").stdout)
    assert facts["items"][0]["times"] == [0.25, 1.25] and facts["items"][0]["frames"] == [0, 1, 2, 3]
    assert "<0.2 seconds><|vision_start|>" in facts["prompt"]
