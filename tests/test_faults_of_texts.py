"""Planted faults of prompts, of sampling, of the end and of what is reported: what each makes of ids and logits."""

import json

import numpy as np
import pytest
from text_configs import text_config

import qwenref
from qwenref.compare.faults import LIBRARY, find, hypotheses
from qwenref.compare.suites import conversations, texts
from qwenref.errors import InputError
from qwenref.logprobs import log_softmax

IM_START, IM_END, END = 1255, 1256, 1254
QUESTION = [{"role": "user", "content": " How much is 31 plus 23? "}]
HISTORY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *QUESTION]


def rendered(model, messages=QUESTION, **options):
    return list(qwenref.render(model, messages, **options).ids)


def said(model, name, ids):
    return model.tokenizer.decode(find(name).prompt(ids, model))


# ---- prompts -------------------------------------------------------------------------------------------------------


def test_faults_of_the_tokenizer_add_cut_and_take_apart(tiny):
    ids = rendered(tiny)
    assert find("bos-added").prompt(ids, tiny) == [END, *ids]
    assert find("eos-added").prompt(ids, tiny) == [*ids, IM_END]
    apart = find("specials-as-text").prompt(ids, tiny)
    assert tiny.tokenizer.decode(apart) == tiny.tokenizer.decode(ids)
    assert not {IM_START, IM_END} & set(apart) and len(apart) > len(ids)
    plain = tiny.tokenizer.encode("  a b\n")
    assert find("stripped").prompt(plain, tiny) == tiny.tokenizer.encode("a b")


def test_an_older_regex_cuts_some_texts_in_another_way_and_most_in_the_same(tiny):
    known = [text for text in texts() if text]
    for name, least in (("regex-gpt2", 5), ("regex-qwen2", 0)):  # the embedded vocabulary merges few combining marks
        differ = [t for t in known if find(name).prompt(ids := tiny.tokenizer.encode(t), tiny) != ids]
        assert least <= len(differ) < len(known) / 2
        assert all(
            said(tiny, name, tiny.tokenizer.encode(t)) == tiny.tokenizer.decode(tiny.tokenizer.encode(t))
            for t in differ
        )


def test_faults_of_the_template_change_what_they_say(tiny):
    text = tiny.tokenizer.decode(rendered(tiny))
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    head = text.removesuffix("<think>\n")
    expected = {
        "newline-added": text + "\n",
        "newline-dropped": text[:-1],
        "system-added": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + text,
        "think-open": text,
        "think-empty": head + "<think>\n\n</think>\n\n",
        "think-absent": head,
        "history-thoughts-cut": text,
    }
    for name, changed in expected.items():
        assert said(tiny, name, rendered(tiny)) == changed, name
    twice = said(tiny, "template-twice", rendered(tiny))
    assert (
        text.strip() in twice
        and twice.startswith("<|im_start|>user\n<|im_start|>user\n")
        and twice.endswith("<think>\n")
    )


def test_a_fault_that_changes_nothing_keeps_the_ids_also_of_what_no_text_has(tiny):
    odd = tiny.tokenizer.encode("ab")[:1] + tiny.tokenizer.encode("b") + [IM_START]
    for name in ("think-empty", "think-absent", "history-thoughts-cut", "newline-dropped"):
        assert find(name).prompt(odd, tiny) == odd
    system = rendered(tiny, [{"role": "system", "content": "Be brief."}, *QUESTION])
    assert find("system-added").prompt(system, tiny) == system


def test_thoughts_of_the_history_go_and_those_of_the_answer_stay(tiny):
    text = "<|im_start|>assistant\n<think>\nso\n</think>\n\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"
    cut = said(tiny, "history-thoughts-cut", tiny.tokenizer.encode(text))
    assert cut == "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_faults_of_the_context_keep_the_end_of_a_prompt(tiny):
    ids = list(range(700))
    assert find("context-512").prompt(ids, tiny) == ids[-512:] and find("context-2048").prompt(ids, tiny) == ids
    assert find("context-half").prompt(ids, tiny) == ids[350:] and find("context-half").prompt([5], tiny) == [5]


def test_prompt_faults_take_every_shipped_conversation(tiny):
    names = [name for name, fault in LIBRARY.items() if fault.kind == "prompt"]
    for one in conversations():
        ids = rendered(tiny, one.messages, **one.options)
        for name in names:
            found = find(name).prompt(ids, tiny)
            assert found and all(0 <= id < 1280 for id in found), (one.id, name)
    assert json.dumps(found)  # plain ints


# ---- sampling ------------------------------------------------------------------------------------------------------


LOGITS = np.random.default_rng(2).standard_normal(50) * 3
CONTEXT = [3, 7, 7, 9]  # two of a prompt, two new


def processed(name, logits=LOGITS):
    return log_softmax(find(name).logits(logits, CONTEXT, 2))


def test_a_temperature_divides_every_difference():
    for value in (0.6, 0.7, 0.8, 1.0):
        np.testing.assert_allclose(processed(f"temperature-{value}"), log_softmax(LOGITS / value), rtol=1e-12)


def test_penalties_meet_the_ids_before_and_no_other():
    repeated = LOGITS.copy()
    for id in (3, 7, 9):
        repeated[id] *= 1.05 if LOGITS[id] < 0 else 1 / 1.05
    np.testing.assert_allclose(processed("repetition-1.05"), log_softmax(repeated), rtol=1e-12)
    present = LOGITS - 1.5 * np.isin(np.arange(50), (7, 9))
    np.testing.assert_allclose(processed("presence-1.5"), log_softmax(present), rtol=1e-12)
    counted = LOGITS - 0.5 * np.bincount([7, 9], minlength=50)
    np.testing.assert_allclose(processed("frequency-0.5"), log_softmax(counted), rtol=1e-12)


def test_cuts_leave_the_likeliest_and_add_up():
    order = np.argsort(-LOGITS)
    for name in ("top-k-20", "top-p-0.95", "min-p-0.05", "defaults-checkpoint", "defaults-llama.cpp"):
        values = processed(name)
        kept = np.flatnonzero(np.isfinite(values))
        assert set(kept) == set(order[: len(kept)]) and 0 < len(kept) < 50
        np.testing.assert_allclose(np.exp(values[kept]).sum(), 1, rtol=1e-12)
    assert np.isfinite(processed("top-k-20")).sum() == 20
    assert np.isfinite(processed("top-k-40", processed("top-k-20"))).sum() == 20  # one fault behind another


# ---- the end, and what is reported ---------------------------------------------------------------------------------


def test_stops_are_the_other_ids_or_none(tiny):
    assert find("eos-other").stops(tiny) == {END} and find("eos-ignored").stops(tiny) == set()
    bare = qwenref.from_config(text_config("lf"), seed=0)
    assert not {"eos-other", "eos-ignored", "bos-added", "stripped", "think-open"} & {f.name for f in hypotheses(bare)}


def test_what_is_reported_is_rounded_cut_or_exponentiated():
    values = np.array([-0.1, -2.345678, -3.0, -4.0, -5.0, -6.0])
    assert find("logprobs-bf16").logprobs(values).tolist() == [-0.10009765625, -2.34375, -3.0, -4.0, -5.0, -6.0]
    assert find("logprobs-top5").logprobs(values).tolist() == values[:5].tolist()
    np.testing.assert_array_equal(find("logprobs-probabilities").logprobs(values), np.exp(values))


def test_a_fault_is_asked_for_what_its_kind_can(tiny):
    with pytest.raises(InputError, match="kind sampling"):
        find("top-k-20").prompt([1], tiny)
    with pytest.raises(InputError, match="kind prompt"):
        find("bos-added").open(tiny)
    with pytest.raises(InputError, match="kind stop"):
        find("eos-other").logprobs([0.0])
