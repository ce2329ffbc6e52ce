"""Generation: the golden runs of the embedded model, stop rules, streams, caches, batches and refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import qwenref
from qwenref import errors
from qwenref import generate as generate_module
from qwenref.generate import Rendered, render
from qwenref.sampling import generator, pick

RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
TEXT_ONLY = [line for line in EXAMPLES if not {"images", "video_frames"} & set(line)]
STORY = next(line for line in TEXT_ONLY if line["messages"] is None)
SUM = TEXT_ONLY[1]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


class Collect:
    """A streamer that remembers."""

    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, text):
        self.pieces.append(text)

    def end(self):
        self.ended += 1


# Golden runs


@pytest.mark.parametrize("line", TEXT_ONLY, ids=lambda line: f"{line['id']}-{line['task']}")
def test_the_golden_runs_come_out_token_for_token(model, line):
    if line["messages"] is not None:
        prompt = render(model, line["messages"], tools=line["tools"], enable_thinking=line["enable_thinking"])
        assert prompt == (line["prompt"], line["prompt_ids"])
    stream = Collect()
    out = model.generate(
        line["prompt_ids"], max_new_tokens=len(line["output_ids"]) + 8, streamer=stream, return_logits=True
    )
    top = [out.logits[0, id] for id, _ in line["first_top5"]]
    np.testing.assert_allclose(top, [logit for _, logit in line["first_top5"]], rtol=0, atol=1e-3)
    assert stream.ended == 1 and "".join(stream.pieces) == out.text
    assert out.text == model.tokenizer.decode(out.new_ids, skip_special_tokens=True)
    if out.new_ids == line["output_ids"]:
        assert out.finish.startswith("stop token") and out.ids == line["prompt_ids"] + line["output_ids"]
        assert out.steps == len(out.new_ids) == len(out.logits)
        return
    at = next(i for i, (a, b) in enumerate(zip(out.new_ids, line["output_ids"], strict=False)) if a != b)
    best = np.sort(out.logits[at])[-2:]
    assert line["min_margin"] < 0.02 and best[1] - best[0] < 0.02, f"parted at {at}, margin {best[1] - best[0]}"


def test_chat_is_render_and_generate(model):
    out = model.chat(SUM["messages"], enable_thinking=True)
    assert out.new_ids == SUM["output_ids"]
    assert out.text == "1+3=4, 3+2=5\n</think>\n\n54"
    assert out.finish == "stop token <|im_end|> 1256"
    prompt = qwenref.render(model, SUM["messages"])
    assert isinstance(prompt, Rendered) and prompt.ids == SUM["prompt_ids"] and prompt.text == SUM["prompt"]
    text, ids = render(model.tokenizer, SUM["messages"])
    assert (text, ids) == prompt
    off = model.chat(SUM["messages"], enable_thinking=False, max_new_tokens=1)
    assert off.ids[:-1] == model.tokenizer.encode(SUM["prompt"] + "\n</think>\n\n")


def test_a_conversation_with_a_place_for_a_picture_and_none_is_refused_before_it_runs(model):
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(errors.InputError, match="a place for images and no image"):
        model.chat([{"role": "user", "content": content}])


# Ending


def test_F4_any_stop_id_of_the_checkpoint_ends_the_text(model):
    assert model.generate(STORY["prompt_ids"]).finish == "stop token <|endoftext|> 1254"
    assert model.generate(SUM["prompt_ids"]).finish == "stop token <|im_end|> 1256"


def test_max_new_tokens_ends_the_text(model):
    out = model.generate(STORY["prompt_ids"], max_new_tokens=7)
    assert out.new_ids == STORY["output_ids"][:7] and out.finish == "max_new_tokens" and out.steps == 7
    cache = qwenref.Cache(model)
    none = model.generate(STORY["prompt_ids"], max_new_tokens=0, cache=cache, return_logits=True)
    assert (none.new_ids, none.text, none.finish, none.steps) == ([], "", "max_new_tokens", 0)
    assert none.logits.shape == (0, 1280) and cache.length[0] == 0


def test_given_ids_replace_the_checkpoints(model):
    wanted = STORY["output_ids"][5]
    at = STORY["output_ids"].index(wanted)
    out = model.generate(STORY["prompt_ids"], stop=wanted)
    assert out.new_ids == STORY["output_ids"][: at + 1]
    assert out.finish == f"stop token {model.tokenizer.token_text(wanted)} {wanted}"
    past_the_end = model.generate(STORY["prompt_ids"], stop=[], max_new_tokens=len(STORY["output_ids"]) + 3)
    assert len(past_the_end.new_ids) == len(STORY["output_ids"]) + 3
    assert past_the_end.new_ids[: len(STORY["output_ids"])] == STORY["output_ids"]
    special = model.generate(SUM["prompt_ids"], stop=["<|im_end|>"])
    assert special.finish == "stop token <|im_end|> 1256"


@pytest.mark.parametrize("string", ["named Lily", "amed Li", ".", " the hill. L", '"Can I', "ed"])
def test_a_stop_string_is_found_across_tokens_and_never_shown(model, string):
    whole = model.generate(STORY["prompt_ids"]).text
    stream = Collect()
    out = model.generate(STORY["prompt_ids"], stop=[string, "never said"], streamer=stream)
    assert out.text == whole[: whole.index(string)] == "".join(stream.pieces)
    assert out.finish == f"stop string {string!r}"
    assert string in model.tokenizer.decode(out.new_ids)
    assert string not in model.tokenizer.decode(out.new_ids[:-1])


def test_text_held_for_a_stop_string_comes_out_in_the_end(model):
    whole = model.generate(STORY["prompt_ids"]).text
    stream = Collect()
    out = model.generate(STORY["prompt_ids"], stop=["friends. And then", whole[-4:] + "!"], streamer=stream)
    assert out.text == whole == "".join(stream.pieces)
    assert out.finish == "stop token <|endoftext|> 1254"  # strings come on top of the checkpoint's ids
    assert len(stream.pieces) < out.steps


# Streams


def test_a_stream_shows_whole_characters_only(model):
    line = next(line for line in TEXT_ONLY if any(ord(c) > 0x3000 for c in line["output_text"]))
    pieces = []
    out = model.generate(line["prompt_ids"], streamer=pieces.append)
    assert "".join(pieces) == out.text and all(pieces)
    assert "\ufffd" not in out.text and not any("\ufffd" in piece for piece in pieces)


def test_a_stream_ends_also_after_an_error(model):
    class Broken(Collect):
        def put(self, text):
            raise OSError("pipe closed")

    stream = Broken()
    with pytest.raises(OSError, match="pipe closed"):
        model.generate(STORY["prompt_ids"], streamer=stream)
    assert stream.ended == 1


# Caches


def test_a_cache_goes_on_where_it_was(model):
    cache = qwenref.Cache(model)
    straight = model.generate(STORY["prompt_ids"], max_new_tokens=20, return_logits=True)
    first = model.generate(STORY["prompt_ids"], max_new_tokens=8, cache=cache)
    assert cache.length[0] == len(STORY["prompt_ids"]) + 7  # everything but the newest id
    second = model.generate(first.new_ids[-1:], max_new_tokens=12, cache=cache, return_logits=True)
    assert first.new_ids + second.new_ids == straight.new_ids
    np.testing.assert_array_equal(second.logits, straight.logits[8:])


@pytest.mark.parametrize("calls", [1, 4])
def test_an_interrupt_inside_a_call_leaves_the_cache_as_before_that_call(model, calls):
    cache = qwenref.Cache(model)
    count = 0

    def interrupt(module, args, output):
        nonlocal count
        count += 1
        if count == calls:
            raise KeyboardInterrupt

    handle = model.get_submodule("model.language_model.layers.5").register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(STORY["prompt_ids"], cache=cache)
    finally:
        handle.remove()
    expected = 0 if calls == 1 else len(STORY["prompt_ids"]) + calls - 2
    assert cache.length[0] == expected
    ids = (STORY["prompt_ids"] + STORY["output_ids"])[expected:]
    out = model.generate(ids[: max(1, len(STORY["prompt_ids"]) - expected)], max_new_tokens=6, cache=cache)
    assert out.new_ids == ids[len(out.ids) - 6 :][:6]


def test_an_interrupt_between_calls_leaves_the_cache_whole(model):
    cache, pieces = qwenref.Cache(model), []

    def interrupt(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(STORY["prompt_ids"], cache=cache, streamer=interrupt)
    fed = int(cache.length[0])
    ids = STORY["prompt_ids"] + STORY["output_ids"]
    out = model.generate(ids[fed : fed + 1], max_new_tokens=5, cache=cache)
    assert out.new_ids == ids[fed + 1 : fed + 6]


# Batches


def test_a_row_in_a_batch_is_the_row_alone_to_the_bit(model):
    lines = [SUM, STORY, TEXT_ONLY[0]]
    longest = max(len(line["prompt_ids"]) for line in lines)
    pads = [longest - len(line["prompt_ids"]) for line in lines]
    assert len(set(pads)) == 3
    ids = [[7] * pad + line["prompt_ids"] for pad, line in zip(pads, lines, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    out = model.generate(ids, attention_mask=mask, return_logits=True)
    alone = [model.generate(line["prompt_ids"], return_logits=True) for line in lines]
    assert out.new_ids == [one.new_ids for one in alone] and out.ids == [one.ids for one in alone]
    assert out.text == [one.text for one in alone] and out.finish == [one.finish for one in alone]
    assert out.steps == max(one.steps for one in alone)
    for row, one in zip(out.logits, alone, strict=True):
        np.testing.assert_array_equal(row, one.logits)


def test_rows_that_have_ended_do_not_grow_in_the_cache(model):
    cache = qwenref.Cache(model, batch=2)
    ids = SUM["prompt_ids"]
    out = model.generate([ids, ids[:-1] + [10]], cache=cache, max_new_tokens=40)
    assert cache.length.tolist() == [len(row.ids) - 1 for row in out.rows]


def test_the_form_of_the_input_is_the_form_of_the_answer(model):
    flat = model.generate(SUM["prompt_ids"], max_new_tokens=2)
    nested = model.generate([SUM["prompt_ids"]], max_new_tokens=2)
    array = model.generate(np.array(SUM["prompt_ids"], np.int32), max_new_tokens=2)
    assert nested.new_ids == [flat.new_ids] == [array.new_ids] and nested.text == [flat.text]


# Choosing


def with_logits(model, change):
    """Let the head return what `change(logits)` makes of its answer."""
    return model.lm_head.register_forward_hook(lambda module, args, logits: change(logits.copy()))


def test_the_lowest_of_equal_logits_wins(model):
    def tie(logits):
        logits[..., [9, 700, 8]] = 1e6
        return logits

    with with_logits(model, tie):
        assert model.generate([1, 2], max_new_tokens=3).new_ids == [8, 8, 8]


def test_generation_runs_by_the_models_numerics_or_the_chosen_one(model):
    expected = STORY["output_ids"][:3]
    with qwenref.numerics("fp64"):
        chosen = model.generate(STORY["prompt_ids"], max_new_tokens=3, return_logits=True)
    model.numerics = "fp64"
    try:
        own = model.generate(STORY["prompt_ids"], max_new_tokens=3, return_logits=True)
    finally:
        model.numerics = "fp32"
    assert own.logits.dtype == np.float64 and own.new_ids == chosen.new_ids == expected
    np.testing.assert_array_equal(own.logits, chosen.logits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_A15_no_token_is_chosen_from_logits_that_are_not_finite(model, value):
    calls = 0

    def break_third(logits):
        nonlocal calls
        calls += 1
        if calls == 3:
            logits[..., 77] = value
        return logits

    with with_logits(model, break_third), pytest.raises(errors.NonFiniteError, match="step 3, row 0: 1 of 1,280") as at:
        model.generate(STORY["prompt_ids"])
    assert "id 77" in str(at.value)
    assert model.generate(STORY["prompt_ids"], max_new_tokens=4).new_ids == STORY["output_ids"][:4]


def test_a_sampler_of_ones_own_sees_logits_context_and_its_own_draws(model):
    seen = []

    class Second:
        def sample(self, logits, context_ids, rng):
            seen.append((list(context_ids), rng.random()))
            return np.argsort(logits)[-2]

    options = {"max_new_tokens": 3, "sampler": Second(), "stop": []}
    out = model.generate(SUM["prompt_ids"], seed=5, return_logits=True, **options)
    assert out.new_ids == [int(np.argsort(row)[-2]) for row in out.logits]
    assert [context for context, _ in seen] == [out.ids[: len(SUM["prompt_ids"]) + n] for n in range(3)]
    assert [draw for _, draw in seen] == [generator(5, 0, len(context)).random() for context, _ in seen]
    with pytest.raises(errors.InputError, match="tells its distribution"):
        model.generate([1], return_logprobs="processed", **options)
    with pytest.raises(errors.InputError, match="sampler is int"):
        model.generate([1], sampler=3)


@pytest.mark.parametrize("given", [-1, 1280, 1.0, None, "7"])
def test_what_a_sampler_of_ones_own_gives_is_an_id(model, given):
    class Wrong:
        def sample(self, logits, context_ids, rng):
            return given

    with pytest.raises(errors.InputError, match=f"sample of Wrong gave {given!r}"):
        model.generate([1], max_new_tokens=1, sampler=Wrong())


# Sampling

WARM = qwenref.Sampler(temperature=1.3, top_p=0.98, repetition_penalty=1.1, presence_penalty=0.3, order="vllm")


def test_a_row_draws_the_same_alone_in_a_batch_and_through_a_cache(model):
    lines = [SUM, STORY, TEXT_ONLY[0]]
    longest = max(len(line["prompt_ids"]) for line in lines)
    pads = [longest - len(line["prompt_ids"]) for line in lines]
    ids = [[7] * pad + line["prompt_ids"] for pad, line in zip(pads, lines, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    options = {"sampler": WARM, "seed": 11, "max_new_tokens": 24, "return_logprobs": "processed", "top_logprobs": 3}
    out = model.generate(ids, attention_mask=mask, prompt_logprobs=True, **options)
    for b, line in enumerate(lines):
        alone = model.generate(line["prompt_ids"], row_keys=b, prompt_logprobs=True, **options)
        assert alone.new_ids == out.new_ids[b] and alone.finish == out.finish[b]
        for one, other in zip(alone.logprobs, out.logprobs[b], strict=True):
            np.testing.assert_array_equal(one, other)
    assert out.new_ids[1] != model.generate(STORY["prompt_ids"], row_keys=0, **options).new_ids
    assert out.new_ids[1] != model.generate(STORY["prompt_ids"], row_keys=1, **{**options, "seed": 12}).new_ids
    straight = model.generate(STORY["prompt_ids"], sampler=qwenref.Sampler(1.5), max_new_tokens=16, seed=3, stop=[])
    cache = qwenref.Cache(model)
    options = {"sampler": qwenref.Sampler(1.5), "cache": cache, "seed": 3, "stop": []}
    first = model.generate(STORY["prompt_ids"], max_new_tokens=7, **options)
    second = model.generate(first.new_ids[-1:], max_new_tokens=9, **options)
    assert first.new_ids + second.new_ids == straight.new_ids


def test_what_is_drawn_is_the_samplers_distribution_of_the_models_logits(model):
    for order in ("vllm", "sglang", "llama.cpp"):
        sampler = qwenref.Sampler(temperature=1.2, top_k=50, top_p=0.9, presence_penalty=0.8, order=order)
        out = model.generate(
            STORY["prompt_ids"], sampler=sampler, seed=9, max_new_tokens=12, return_logits=True,
            return_logprobs="processed", top_logprobs=60,
        )  # fmt: skip
        prompt = len(STORY["prompt_ids"])
        for n, id in enumerate(out.new_ids):
            context = out.ids[: prompt + n]
            found = sampler.distribution(out.logits[n], context, prompt)
            assert id == pick(found, generator(9, 0, prompt + n).random())
            np.testing.assert_array_equal(out.logprobs.chosen[n], np.log(found.probs[id]))
            kept = np.isfinite(out.logprobs.top[n])
            assert sorted(out.logprobs.top_ids[n][kept]) == found.support.tolist()


def test_temperature_0_is_greedy(model):
    out = model.generate(STORY["prompt_ids"], sampler=qwenref.Sampler(temperature=0), seed=4, max_new_tokens=20)
    assert out.new_ids == STORY["output_ids"][:20]


def test_F3_logit_rows_without_a_token_are_never_drawn_and_reported(tmp_path):
    """The embedded model without some tokens it never says, so that their rows are as the padding of larger ones."""
    rows = list(range(1275, 1280))
    for file in Path(qwenref.__file__).with_name("tiny").iterdir():
        shutil.copy(file, tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens["added_tokens"] = [token for token in tokens["added_tokens"] if token["id"] not in rows]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    for row in rows:
        del config["added_tokens_decoder"][str(row)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = qwenref.from_pretrained(tmp_path)
    assert model.tokenizer.vocab_size == 1275 and model.tokenizer.ids_without_token(1280).tolist() == rows

    def favour(logits):
        logits[..., rows] = logits.max() + 3
        return logits

    options = {"max_new_tokens": 8, "seed": 2, "stop": []}
    plain = model.generate(STORY["prompt_ids"], sampler=qwenref.Sampler(0.7), **options)
    assert 0 < plain.masked_mass < 1e-3 and plain.masked.tolist() == rows
    with with_logits(model, favour):
        out = model.generate(STORY["prompt_ids"], sampler=qwenref.Sampler(0.7), **options)
        free = model.generate(STORY["prompt_ids"], sampler=qwenref.Sampler(0.7, mask=()), **options)
    assert out.new_ids == plain.new_ids  # the mask leaves the rest as it was
    assert out.masked_mass > 0.9 and "5 logit rows without a token masked" in repr(out)
    assert set(free.new_ids) & set(rows) and free.masked.size == 0 and "masked" not in repr(free)
    assert model.tokenizer.decode([1275]) == "⟨id 1275⟩"


def test_penalties_beside_a_filled_cache_warn_that_they_see_little(model):
    cache = qwenref.Cache(model)
    first = model.generate(SUM["prompt_ids"], max_new_tokens=2, cache=cache)
    held = int(cache.length[0])
    with pytest.warns(errors.QwenrefWarning, match=f"{held} tokens in the cache"):
        model.generate(first.new_ids[-1:], max_new_tokens=1, cache=cache, sampler=WARM)


# Log-probabilities


def reference(logits):
    z = np.asarray(logits, np.float64)
    return z - np.log(np.exp(z - z.max()).sum()) - z.max()


def test_raw_log_probabilities_are_those_of_the_logits_chosen_top_and_prompt(model):
    ids = STORY["prompt_ids"]
    whole = model(ids + STORY["output_ids"][:5]).logits[0]
    out = model.generate(ids, max_new_tokens=6, return_logprobs="raw", top_logprobs=4, prompt_logprobs=True)
    found = out.logprobs
    assert found.kind == "raw" and found.chosen.shape == (6,) and found.top.shape == found.top_ids.shape == (6, 4)
    assert np.isnan(found.prompt[0]) and np.isnan(found.prompt_top[0]).all() and (found.prompt_top_ids[0] == -1).all()
    chosen, top = np.append(found.prompt, found.chosen)[1:], np.concatenate([found.prompt_top, found.top])[1:]
    top_ids = np.concatenate([found.prompt_top_ids, found.top_ids])[1:]
    for at, following in enumerate((ids + out.new_ids)[1:]):
        expected = reference(whole[at])
        # Logits below 100 are rounded to 2**-47 at most by each of three subtractions and a logarithm.
        np.testing.assert_allclose(chosen[at], expected[following], rtol=0, atol=4 * 2.0**-47)
        assert top_ids[at].tolist() == np.argsort(-expected, kind="stable")[:4].tolist()
        np.testing.assert_allclose(top[at], expected[top_ids[at]], rtol=0, atol=4 * 2.0**-47)
    np.testing.assert_array_equal(found.top[:, 0], found.chosen)  # greedy


def test_a_prompt_alone_can_be_scored_in_pieces_of_any_size(model, monkeypatch):
    ids, options = [SUM["prompt_ids"], [5] * len(SUM["prompt_ids"])], {"max_new_tokens": 0, "prompt_logprobs": True}
    mask = [[1] * len(ids[0]), [0] * 9 + [1] * (len(ids[0]) - 9)]
    out = model.generate(ids, attention_mask=mask, return_logprobs="raw", top_logprobs=2, **options)
    assert out.new_ids == [[], []] and out.steps == 1 and out.logprobs[0].chosen.shape == (0,)
    assert len(out.logprobs[0].prompt) == len(ids[0]) and len(out.logprobs[1].prompt) == len(ids[0]) - 9
    monkeypatch.setattr(generate_module, "PROMPT_LOGITS", 4 * 2 * 1280)
    pieces = model.generate(ids, attention_mask=mask, return_logprobs="raw", top_logprobs=2, **options)
    assert pieces.steps == -(-len(ids[0]) // 4) > 3
    for one, other in zip(out.logprobs, pieces.logprobs, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_processed_log_probabilities_of_greedy_are_certain(model):
    found = model.generate(SUM["prompt_ids"], max_new_tokens=3, return_logprobs="processed", top_logprobs=2).logprobs
    assert found.kind == "processed" and found.chosen.tolist() == [0, 0, 0] and found.prompt is None
    assert np.isneginf(found.top[:, 1]).all()
    assert model.generate(SUM["prompt_ids"], max_new_tokens=1).logprobs is None


# Without a tokenizer, and refusals


def test_a_model_without_files_takes_ids_and_gives_ids(model):
    bare = qwenref.from_config(model.config, seed=0)
    out = bare.generate([1, 2, 3], max_new_tokens=4)
    assert len(out.new_ids) == 4 and out.text is None and out.finish == "max_new_tokens"
    assert bare.generate([1, 2, 3], max_new_tokens=4, stop=out.new_ids[1]).finish == f"stop token {out.new_ids[1]}"
    assert str(out.new_ids) in repr(out)
    for options in ({"stop": "word"}, {"streamer": print}):
        with pytest.raises(errors.CapabilityMissing, match="tokenizer"):
            bare.generate([1, 2, 3], **options)


@pytest.mark.parametrize(
    ("ids", "options", "kind", "words"),
    [
        ([], {}, errors.InputError, "empty prompt"),
        ([[]], {}, errors.InputError, "empty prompt"),
        ([1280], {}, errors.InputError, "the vocabulary has 1,280"),
        ([-1], {}, errors.InputError, "the vocabulary has 1,280"),
        ([1.5], {}, errors.DTypeError, "expected integers"),
        ([[[1]]], {}, errors.ShapeError, "3-D"),
        ([1] * 4097, {}, errors.InputError, "the prompt is 4,097 tokens; the model takes 4,096"),
        ([1], {"max_new_tokens": -1}, errors.InputError, "max_new_tokens -1"),
        ([1], {"max_new_tokens": 2.5}, errors.InputError, "max_new_tokens 2.5"),
        ([1], {"stop": [None]}, errors.InputError, "stop"),
        ([1], {"stop": ""}, errors.InputError, "stop"),
        ([[1, 2]], {"attention_mask": [[1, 0]]}, errors.InputError, "row 0 ends in a pad"),
        ([[1, 2]], {"attention_mask": [[1, 1, 1]]}, errors.ShapeError, "attention_mask"),
        ([[1, 2], [1, 2]], {"streamer": print}, errors.InputError, "one row"),
        ([1], {"max_tokens": 3}, TypeError, "max_tokens"),
        ([1], {"return_logprobs": True}, errors.InputError, "'raw' or 'processed'"),
        ([1], {"top_logprobs": 2}, errors.InputError, "need return_logprobs"),
        ([1], {"return_logprobs": "raw", "top_logprobs": 1281}, errors.InputError, "top_logprobs 1281"),
        ([1], {"seed": -1}, errors.InputError, "seed -1"),
        ([[1], [2]], {"row_keys": [1]}, errors.ShapeError, "1 keys"),
        ([1], {"row_keys": [0.5]}, errors.InputError, "row key 0.5"),
    ],
)
def test_what_cannot_be_continued_is_refused_and_the_model_goes_on(model, ids, options, kind, words):
    with pytest.raises(kind, match=words):
        model.generate(ids, **options)
    assert model.generate(SUM["prompt_ids"], max_new_tokens=2).new_ids == SUM["output_ids"][:2]


def test_a_cache_for_other_rows_or_already_full_is_refused(model):
    with pytest.raises(errors.ShapeError, match="2 in the cache, 1 prompts"):
        model.generate([1, 2], cache=qwenref.Cache(model, batch=2))
    cache = qwenref.Cache(model)
    model(np.ones((1, 4000), int), cache=cache, logits_to_keep=1)
    with pytest.raises(errors.InputError, match="4,000 in the cache, 97 new"):
        model.generate([1] * 97, cache=cache)
    assert cache.length[0] == 4000
    out = model.generate([1] * 94, cache=cache, stop=[])
    assert out.finish == "context full (4,096 tokens, max_position_embeddings)"
    assert out.steps == 3 and cache.length[0] == 4096


def test_a_generation_shows_its_text_and_why_it_ended(model):
    out = model.generate(SUM["prompt_ids"])
    assert repr(out).splitlines()[:2] == [
        f"Generation · {out.steps} steps",
        f"{len(out.new_ids)} new tokens after {len(SUM['prompt_ids'])} · ended by stop token <|im_end|> 1256",
    ]
    assert "▏54" in repr(out).splitlines() and "<b>1+3=4, 3+2=5\n&lt;/think&gt;\n\n54</b>" in out._repr_html_()
    long = model.generate([STORY["prompt_ids"]] * 12, max_new_tokens=5, stop=[])
    assert len(repr(long).splitlines()) <= 40 and "4 more rows" in repr(long)
