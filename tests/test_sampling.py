"""Sampling: every engine's order against definitions of its own and by hand, transformers live, draws, refusals."""

import functools
import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

import qwenref
from qwenref import Sampler, errors, sampling
from qwenref.logprobs import log_softmax, top
from qwenref.sampling import generator, pick

ORDERS = ("hf", "vllm", "llama.cpp", "sglang")


def probs_of(values):
    values = {id: math.exp(value) for id, value in values.items()}
    total = math.fsum(values.values())
    return {id: value / total for id, value in values.items()}


# Definitions written once more, with dicts, sets and sums over sets instead of masks and sorted arrays


def scaled(values, seen, penalty):
    return {id: v if id not in seen else v / penalty if v > 0 else v * penalty for id, v in values.items()}


def lowered(values, seen, s):
    return {
        id: v - s.frequency_penalty * seen.count(id) - (s.presence_penalty if id in seen else 0)
        for id, v in values.items()
    }


def ties_kept(values, k):
    return {id: v for id, v in values.items() if k < 1 or sum(other > v for other in values.values()) < k}


def nucleus(values, p, before):
    """Ids whose better ones, by `before(a, b)`, have less than p in sum."""
    probs = probs_of(values)
    mass = {id: math.fsum(probs[other] for other in values if before(other, id)) for id in values}
    return {id: v for id, v in values.items() if p == 1 or mass[id] < p}


def likely(values, min_p):
    probs = probs_of(values)
    return {id: v for id, v in values.items() if probs[id] >= min_p * max(probs.values())}


def defined(s, logits, context, prompt_length):
    """{id: probability} by the prose of each engine."""
    v = dict(enumerate(map(float, logits)))
    context, new = list(context), list(context)[prompt_length:]
    higher_id = lambda a, b: (v[a], a) > (v[b], b)  # noqa: E731 - what hf and vllm rank first in a tie
    lower_id = lambda a, b: (v[a], -a) > (v[b], -b)  # noqa: E731
    apart = lambda a, b: v[a] > v[b]  # noqa: E731
    if s.order == "hf":
        v = scaled(v, context, s.repetition_penalty)
    elif s.order == "vllm":
        v = lowered(scaled(v, context, s.repetition_penalty), new, s)
    elif s.order == "llama.cpp":
        last = context[-s.penalty_last_n :] if s.penalty_last_n > 0 else context if s.penalty_last_n else []
        v = lowered(scaled(v, last, s.repetition_penalty), last, s)
    else:
        v = scaled(lowered(v, new, s), new, s.repetition_penalty)
    if s.temperature == 0 or (s.order == "sglang" and s.top_k == 1):
        return {min(id for id in v if v[id] == max(v.values())): 1.0}
    if s.order != "llama.cpp":
        v = {id: value / s.temperature for id, value in v.items()}
    if s.order == "hf":
        v = ties_kept(v, s.top_k)
        v = nucleus(v, s.top_p, higher_id)
        v = likely(v, s.min_p)
    elif s.order == "vllm":
        v = likely(v, s.min_p)
        v = ties_kept(v, s.top_k)
        v = nucleus(v, s.top_p, higher_id)
    elif s.order == "llama.cpp":
        best = sorted(v, key=lambda id: (-v[id], id))
        v = {id: v[id] for id in best[: s.top_k if s.top_k > 0 else None]}
        v = nucleus(v, s.top_p, lower_id)
        v = likely(v, s.min_p)
        v = {id: value / s.temperature for id, value in v.items()}
    elif s.min_p:
        v = likely(nucleus(ties_kept(v, s.top_k), s.top_p, apart), s.min_p)
    else:
        k, p = ties_kept(v, s.top_k), nucleus(v, s.top_p, apart)
        v = {id: k[id] for id in k if id in p}
    return probs_of(v)


def case(order, number):
    """A sampler and what it is asked, different for each number; logits in quarters, so that many are equal."""
    rng = np.random.default_rng([number, ORDERS.index(order)])
    logits = rng.integers(-20, 21, 40) / 4 if number % 3 else rng.normal(size=40) * 3
    options = {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.9]),
        "top_k": int(rng.choice([-1, 0, 1, 3, 8, 20, 100])),
        "top_p": rng.choice([1.0, 0.97, 0.813, 0.5311, 0.0371]),
        "min_p": rng.choice([0.0, 0.0, 0.0171, 0.113, 0.47]),
        "repetition_penalty": rng.choice([1.0, 1.1, 1.7, 0.8]),
    }
    if order != "hf":
        options |= {"presence_penalty": rng.choice([0.0, 1.5, -0.6]), "frequency_penalty": rng.choice([0, 0.4, -0.3])}
    if order == "llama.cpp":
        options["penalty_last_n"] = int(rng.choice([-1, 0, 4, 64]))
    context = rng.integers(0, 40, 12)
    return Sampler(order=order, **options), logits.astype(np.float32), context, 7


def test_each_order_is_its_definition_on_200_cases_with_everything_varied():
    for order in ORDERS:
        sizes = set()
        for number in range(200):
            sampler, logits, context, prompt_length = case(order, number)
            found = sampler.distribution(logits, context, prompt_length)
            expected = defined(sampler, logits, context, prompt_length)
            assert found.support.tolist() == sorted(expected), (sampler, number)
            assert found.probs.dtype == np.float64 and found.probs.shape == (40,)
            np.testing.assert_allclose(found.probs[found.support], [expected[id] for id in found.support], rtol=1e-12)
            assert not np.delete(found.probs, found.support).any()
            sizes.add(len(found.support))
        assert len(sizes) > 10  # the cases do cut, and differently


# transformers, live


@pytest.fixture(scope="module")
def host():
    """A model of transformers small enough to ask it which processors it would apply, in which order."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    )


def processed(host, sampler, logits, context):
    config = transformers.GenerationConfig(
        do_sample=sampler.temperature > 0,
        temperature=sampler.temperature or None,
        top_k=max(sampler.top_k, 0),
        top_p=sampler.top_p,
        min_p=sampler.min_p or None,
        repetition_penalty=sampler.repetition_penalty,
        pad_token_id=0,
    )
    processors = host._get_logits_processor(config, input_ids_seq_length=len(context), device="cpu")
    return processors(torch.tensor(context)[None], torch.tensor(logits, dtype=torch.float64)[None])[0]


def test_order_hf_is_what_the_processors_of_transformers_leave(host, monkeypatch):
    """float64 there too: a cut in the wrong place would be a whole id, and rounding is far below 1e-12.

    torch.sort leaves the order of equal values open, so a tie that top-p parts may be parted otherwise; made stable,
    every id is the same.
    """
    parted = 0
    for number in range(200):
        sampler, logits, context, _ = case("hf", number)
        found = sampler.distribution(logits, context)
        free = processed(host, sampler, logits, context)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
            stable = processed(host, sampler, logits, context)
        if sampler.temperature == 0:
            assert found.support.tolist() == [int(free.argmax())]
            continue
        assert found.support.tolist() == torch.isfinite(stable).nonzero()[:, 0].tolist(), (sampler, number)
        np.testing.assert_allclose(found.probs, stable.softmax(-1).numpy(), rtol=1e-12)
        np.testing.assert_allclose(np.sort(found.probs), np.sort(free.softmax(-1).numpy()), rtol=1e-12)
        parted += not torch.equal(free, stable)
    assert parted < 100  # with distinct logits, two cases in three have some equal ones, there is nothing to part


def test_the_order_of_the_processors_of_transformers_is_the_one_stated(host):
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.2
    )
    names = [type(one).__name__ for one in host._get_logits_processor(config, input_ids_seq_length=1, device="cpu")]
    assert [name.replace("LogitsWarper", "").replace("LogitsProcessor", "") for name in names] == [
        "RepetitionPenalty",
        "Temperature",
        "TopK",
        "TopP",
        "MinP",
    ]


# By hand


def shares(*probs):
    """Logits whose softmax is `probs`."""
    return np.log(np.array(probs))


@pytest.mark.parametrize(
    ("order", "options", "logits", "expected"),
    [
        # Temperature 0.5 squares: 16/30, 9/30, 4/30, 1/30.  First, 0.8 needs two ids; last, three (0.4 + 0.3 = 0.7).
        ("hf", {"temperature": 0.5, "top_p": 0.8}, shares(0.4, 0.3, 0.2, 0.1), [16 / 25, 9 / 25, 0, 0]),
        ("vllm", {"temperature": 0.5, "top_p": 0.8}, shares(0.4, 0.3, 0.2, 0.1), [16 / 25, 9 / 25, 0, 0]),
        ("sglang", {"temperature": 0.5, "top_p": 0.8}, shares(0.4, 0.3, 0.2, 0.1), [16 / 25, 9 / 25, 0, 0]),
        ("llama.cpp", {"temperature": 0.5, "top_p": 0.8}, shares(0.4, 0.3, 0.2, 0.1), [16 / 29, 9 / 29, 4 / 29, 0]),
        # top-k 2 leaves 4/7 and 3/7, of which 0.5 is one id; looked at together, 0.4 alone is not 0.5.
        ("hf", {"top_k": 2, "top_p": 0.5}, shares(0.4, 0.3, 0.2, 0.1), [1, 0, 0, 0]),
        ("vllm", {"top_k": 2, "top_p": 0.5}, shares(0.4, 0.3, 0.2, 0.1), [1, 0, 0, 0]),
        ("llama.cpp", {"top_k": 2, "top_p": 0.5}, shares(0.4, 0.3, 0.2, 0.1), [1, 0, 0, 0]),
        ("sglang", {"top_k": 2, "top_p": 0.5}, shares(0.4, 0.3, 0.2, 0.1), [4 / 7, 3 / 7, 0, 0]),
        # With min-p, sglang renormalises in between.
        ("sglang", {"top_k": 2, "top_p": 0.5, "min_p": 0.01}, shares(0.4, 0.3, 0.2, 0.1), [1, 0, 0, 0]),
        # min-p 0.3 before top-p leaves 0.6 and 0.3 (2/3, 1/3), of which 0.65 is one; after it, of 0.6 + 0.3 both.
        ("vllm", {"min_p": 0.3, "top_p": 0.65}, shares(0.6, 0.3, 0.06, 0.04), [1, 0, 0, 0]),
        ("hf", {"min_p": 0.3, "top_p": 0.65}, shares(0.6, 0.3, 0.06, 0.04), [2 / 3, 1 / 3, 0, 0]),
        ("llama.cpp", {"min_p": 0.3, "top_p": 0.65}, shares(0.6, 0.3, 0.06, 0.04), [2 / 3, 1 / 3, 0, 0]),
        ("sglang", {"min_p": 0.3, "top_p": 0.65}, shares(0.6, 0.3, 0.06, 0.04), [2 / 3, 1 / 3, 0, 0]),
        # Three tie for the second place.
        ("hf", {"top_k": 2}, [2.0, 1.0, 1.0, 1.0], None),
        ("vllm", {"top_k": 2}, [2.0, 1.0, 1.0, 1.0], None),
        ("sglang", {"top_k": 2}, [2.0, 1.0, 1.0, 1.0], None),
        ("llama.cpp", {"top_k": 2}, [2.0, 1.0, 1.0, 1.0], [math.e / (1 + math.e), 1 / (1 + math.e), 0, 0]),
        # Four equal ids, three quarters wanted.
        ("hf", {"top_p": 0.75}, [0.0] * 4, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("vllm", {"top_p": 0.75}, [0.0] * 4, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("llama.cpp", {"top_p": 0.75}, [0.0] * 4, [1 / 3, 1 / 3, 1 / 3, 0]),
        ("sglang", {"top_p": 0.75}, [0.0] * 4, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        # vLLM raises a temperature of 0.001 to 0.01.
        ("vllm", {"temperature": 0.001}, [0.0, -0.01], [math.e / (1 + math.e), 1 / (1 + math.e)]),
        ("hf", {"temperature": 0.001}, [0.0, -0.001], [math.e / (1 + math.e), 1 / (1 + math.e)]),
        ("sglang", {"temperature": 1e-7}, [0.0, 0.0], [1, 0]),
        # SGLang calls a request for one id greedy.
        ("sglang", {"top_k": 1}, [1.0, 2.0, 2.0], [0, 1, 0]),
        ("vllm", {"top_k": 1}, [2.0, 2.0], [0.5, 0.5]),
    ],
)
def test_F11_T14_the_orders_by_hand(order, options, logits, expected):
    found = Sampler(order=order, **options).distribution(logits if expected is None else np.array(logits))
    expected = np.exp(logits) / np.exp(logits).sum() if expected is None else expected
    np.testing.assert_allclose(found.probs, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # ids 0, 1 and 2 in the prompt, 2, 2 and 3 new; logits 2, -2, 2, 2, 0.  Repetition 2 halves what is positive.
        ("hf", [1, -4, 1, 1, 0]),
        ("vllm", [1, -4, 1 - 0.5 - 2 * 0.25, 1 - 0.5 - 0.25, 0]),
        ("llama.cpp", [2, -4 - 0.75, 1 - 0.5 - 3 * 0.25, 1 - 0.75, 0]),  # the last five ids: 1, 2, 2, 2 and 3
        ("sglang", [2, -2, (2 - 0.5 - 2 * 0.25) / 2, (2 - 0.75) / 2, 0]),
    ],
)
def test_F10_what_a_penalty_counts(order, expected):
    options = {} if order == "hf" else {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    options |= {"penalty_last_n": 5} if order == "llama.cpp" else {}
    sampler = Sampler(order=order, repetition_penalty=2.0, **options)
    found = sampler.distribution(np.array([2.0, -2.0, 2.0, 2.0, 0.0]), [0, 1, 2, 2, 2, 3], prompt_length=3)
    np.testing.assert_allclose(found.probs, np.exp(expected) / np.exp(expected).sum(), rtol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_temperature_0_is_the_largest_after_penalties_and_the_lowest_id_of_a_tie(order):
    sampler = Sampler(temperature=0, top_k=5, top_p=0.1, order=order)
    found = sampler.distribution(np.float32([1, 3, 0, 3]))
    assert found.support.tolist() == [1] and found.probs.tolist() == [0, 1, 0, 0]
    penal = Sampler(temperature=0, repetition_penalty=2.0, order=order)
    assert penal.distribution(np.float32([1, 3, 0, 2]), [0, 1], prompt_length=0).support.tolist() == [3]
    assert pick(found, 0.0) == pick(found, 1 - 2.0**-53) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_top_k_0_and_minus_1_and_more_than_there_are_keep_everything(order):
    logits = np.random.default_rng(0).normal(size=50)
    expected = np.exp(log_softmax(logits))
    for k in (0, -1, 50, 1000):
        np.testing.assert_allclose(Sampler(top_k=k, order=order).distribution(logits).probs, expected, rtol=1e-12)


def test_logits_of_any_floating_type_are_taken_exactly_and_left_alone():
    values = np.float32([0.5, -1.25, 3.0])
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        logits = values.astype(dtype)
        found = Sampler(temperature=0.5, repetition_penalty=1.5).distribution(logits, [2])
        np.testing.assert_allclose(found.probs, np.exp(log_softmax([1.0, -2.5, 4.0])), rtol=1e-14)
        np.testing.assert_array_equal(logits, values.astype(dtype))


def test_a_temperature_near_nothing_is_the_limit_and_no_warning(recwarn):
    logits = np.float32([1, 1 + 2**-20, -3])
    assert Sampler(temperature=5e-324).distribution(logits).probs.tolist() == [0, 1, 0]
    assert Sampler(temperature=5e-324, top_p=0.5, min_p=0.2).distribution(logits).probs.tolist() == [0, 1, 0]
    np.testing.assert_allclose(Sampler(temperature=1e300).distribution(logits).probs, [1 / 3] * 3)
    assert not recwarn.list


@pytest.mark.parametrize("order", ORDERS)
def test_numbers_at_the_ends_of_float64_are_sampled_right_whatever_numpy_is_told_to_raise(order):
    settings = {"order": order, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    for temperature in (1e-310, 1.0, 1e300) if order in ("hf", "llama.cpp") else (1.0, 1e300):
        sampler = Sampler(temperature=temperature, **settings)
        with np.errstate(all="raise"):
            far = sampler.distribution(np.array([1.7e308, -1.7e308, 0.0, 1.0]), [3], 0)
            near = Sampler(order=order).distribution(np.linspace(-900, 500, 9))
        if temperature <= 1 or order == "llama.cpp":  # which cuts before it heats
            assert far.probs.tolist() == [1, 0, 0, 0]
        assert near.probs[-1] == 1 and near.probs[0] == 0 and 0 < near.probs[5] < 1e-200
    for k in (1, 10**30):  # one logit, and more wanted than any array has
        assert Sampler(top_k=k, top_p=0.1, min_p=1.0, order=order).distribution(np.zeros(1)).probs.tolist() == [1]


def test_logits_of_torch_are_taken_as_those_of_numpy():
    values = torch.tensor([0.5, -1.25, 3.0])
    expected = Sampler().distribution(values.numpy()).probs
    for logits in (values.bfloat16(), values.double(), values.clone().requires_grad_()):
        np.testing.assert_array_equal(Sampler().distribution(logits).probs, expected)


# Masked rows


@pytest.mark.parametrize("order", ORDERS)
def test_a_masked_row_is_as_if_it_were_not_there(order):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=30)
    logits[[25, 29]] = 9.0  # they would be drawn almost always
    sampler = Sampler(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, order=order)
    found = sampler.distribution(logits, mask=[29, 25, 29])
    without = sampler.distribution(np.delete(logits, [25, 29]))
    np.testing.assert_allclose(np.delete(found.probs, [25, 29]), without.probs, rtol=1e-12)
    assert found.masked.tolist() == [25, 29] and not found.probs[[25, 29]].any()
    mass = np.exp(log_softmax(logits))[[25, 29]].sum()
    assert mass > 0.9 and found.masked_mass == pytest.approx(mass, rel=1e-12)
    own = Sampler(mask={0}).distribution(logits, mask=[1])
    assert own.masked.tolist() == [0] and Sampler(mask=()).distribution(logits, mask=[1]).masked.size == 0


# Draws


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_draws_follow_the_distribution(count):
    """Pearson's chi-square with seed 20260101, chosen once: a right sampler fails for one seed in a thousand."""
    logits = np.random.default_rng(3).normal(size=300) * 2
    found = Sampler(temperature=0.9, top_k=60, top_p=0.95).distribution(logits)
    draws = np.array([pick(found, generator(20260101, 0, position).random()) for position in range(count)])
    assert set(draws.tolist()) <= set(found.support.tolist())
    observed, expected = np.bincount(draws, minlength=300)[found.support], count * found.probs[found.support]
    assert expected.min() > 50  # so that the statistic is chi-square distributed
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(found.support) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
    assert p_value > 1e-3, (statistic, len(found.support))
    shifted = ((observed - np.roll(expected, 1)) ** 2 / np.roll(expected, 1)).sum()
    assert shifted > 10 * statistic  # and the test would see another distribution


def test_draws_depend_on_seed_row_key_and_position_and_on_nothing_else():
    names = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 2**64 - 1, 2**64 - 1)]
    values = {name: generator(*name).random() for name in names}
    assert len(set(values.values())) == len(names)
    assert values == {name: generator(*name).random() for name in reversed(names)}
    own = np.random.Philox(key=np.array([7, 3], np.uint64), counter=np.array([0, 0, 0, 11], np.uint64))
    assert generator(7, 3, 11).random() == np.random.Generator(own).random()


def test_a_draw_is_the_first_word_of_philox_4x64_with_ten_rounds():
    """The generator of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), in whole numbers."""
    word = 2**64 - 1
    for seed, row_key, position in ((0, 0, 0), (7, 3, 11), (word, 2**63 + 1, word)):
        a, b, c, d = 1, 0, 0, position
        key = [seed, row_key]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = second >> 64 ^ b ^ key[0], second & word, first >> 64 ^ d ^ key[1], first & word
            key = [key[0] + 0x9E3779B97F4A7C15 & word, key[1] + 0xBB67AE8584CAA73B & word]
        assert generator(seed, row_key, position).random() == (a >> 11) / 2**53


def test_pick_walks_the_cumulative_distribution_in_order_of_ids():
    found = sampling.Distribution(np.array([0.25, 0.0, 0.5, 0.25]), np.array([0, 2, 3]), np.array([], int), 0.0)
    assert [pick(found, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53)] == [0, 0, 2, 2, 3, 3]
    empty_end = sampling.Distribution(np.array([1.0, 0.0]), np.array([0, 1]), np.array([], int), 0.0)
    assert pick(empty_end, 1 - 2.0**-53) == 0  # what has underflowed to 0 is never drawn


def test_log_softmax_and_top():
    logits = np.random.default_rng(4).normal(size=(3, 20)).astype(np.float32) * 100
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).numpy()
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-13)
    with np.errstate(all="raise"):
        assert log_softmax(np.array([0.0, -np.inf, -800.0])).tolist() == [0.0, -np.inf, -800.0]
        assert log_softmax(np.array([1.7e308, -1.7e308])).tolist() == [0.0, -np.inf]
    for k, expected in ((0, []), (1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (4, [1, 3, 2, 0])):
        ids, values = top(np.array([0.0, 2.0, 1.0, 2.0]), k)
        assert ids.tolist() == expected and values.tolist() == [[0.0, 2.0, 1.0, 2.0][id] for id in expected]


# A checkpoint's own settings


@pytest.fixture
def folder(tmp_path):
    """Write a generation_config.json and give what from_generation_config looks at."""

    def write(**fields):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
        return type("Opened", (), {"path": tmp_path})

    return write


def test_the_defaults_of_the_embedded_model_are_those_of_its_file():
    tiny = qwenref.from_pretrained("tiny")
    for order in ORDERS:
        sampler = Sampler.from_generation_config(tiny, order)
        assert (sampler.temperature, sampler.top_k, sampler.top_p) == (0.6, 20, 0.95)
        assert sampler.min_p == (0.05 if order == "llama.cpp" else 0) and not sampler.penalises
    changed = Sampler.from_generation_config(tiny, "vllm", top_k=5, presence_penalty=1.5)
    assert repr(changed) == "Sampler(temperature=0.6, top_k=5, top_p=0.95, presence_penalty=1.5, order='vllm')"


def test_what_the_file_leaves_out_is_the_engines_default(folder):
    model = folder(do_sample=True, repetition_penalty=1.1, temperature=None, presence_penalty=1.5)
    read = {order: Sampler.from_generation_config(model, order) for order in ORDERS}
    settings = {order: (s.temperature, s.top_k, s.top_p, s.min_p) for order, s in read.items()}
    assert settings["hf"] == (1.0, 50, 1.0, 0.0) and settings["vllm"] == settings["sglang"] == (1.0, 0, 1.0, 0.0)
    assert settings["llama.cpp"] == (0.8, 40, 0.95, 0.05)
    assert all(s.repetition_penalty == 1.1 for s in read.values())
    assert [order for order in ORDERS if read[order].presence_penalty == 1.5] == ["vllm"]  # the others do not read it


def test_F10_a_penalty_that_only_the_model_card_gives_is_warned_of(folder, tmp_path, recwarn):
    model = folder(do_sample=True, temperature=0.6)
    assert Sampler.from_generation_config(model, "vllm").presence_penalty == 0 and not recwarn.list  # no card
    card = "- `temperature=1.0, presence_penalty=1.5, repetition_penalty=1.0`\n- code: presence_penalty=0.0\n"
    (tmp_path / "README.md").write_text(card + 'extra_body={"presence_penalty": 2.0}', encoding="utf-8")
    for order in ORDERS:
        with pytest.warns(errors.QwenrefWarning, match="the model card asks for presence_penalty 1.5 or 2") as caught:
            sampler = Sampler.from_generation_config(model, order, top_k=5)
        assert sampler.presence_penalty == 0 and sampler.repetition_penalty == 1  # the file alone decides
        assert len(caught) == 1 and caught[0].filename == __file__ and "repetition" not in str(caught[0].message)
        assert ("with order='vllm'" in str(caught[0].message)) == (order == "hf")
    for order, penalty in (("vllm", 1.5), ("sglang", 0), ("hf", 0)):
        assert Sampler.from_generation_config(model, order, presence_penalty=penalty).presence_penalty == penalty
    (tmp_path / "generation_config.json").write_text('{"presence_penalty": 1.5, "do_sample": true}', encoding="utf-8")
    assert Sampler.from_generation_config(model, "vllm").presence_penalty == 1.5
    assert not recwarn.list


def test_without_do_sample_transformers_is_greedy_and_vllm_does_not_ask(folder):
    model = folder(temperature=0.7, top_p=0.9, repetition_penalty=1.05)
    assert repr(Sampler.from_generation_config(model)) == "Sampler(temperature=0, repetition_penalty=1.05, order='hf')"
    assert Sampler.from_generation_config(model, "vllm").temperature == 0.7


def test_a_file_that_asks_for_more_or_is_not_there_is_refused(folder, tmp_path):
    model = folder(do_sample=True, typical_p=0.9, num_beams=4, no_repeat_ngram_size=0)
    with pytest.raises(errors.CapabilityMissing, match="num_beams 4, typical_p 0.9"):
        Sampler.from_generation_config(model)
    assert Sampler.from_generation_config(model, "sglang").temperature == 1.0  # sglang reads neither
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(errors.CheckpointError, match="not JSON"):
        Sampler.from_generation_config(model)
    (tmp_path / "generation_config.json").unlink()
    for without in (model, type("Bare", (), {"path": None})):
        with pytest.raises(errors.CapabilityMissing, match=r"no generation_config\.json"):
            Sampler.from_generation_config(without)


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "exllama"}, "'hf', 'vllm', 'llama.cpp', 'sglang'"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": "0.6"}, "temperature '0.6'"),
        ({"temperature": True}, "temperature True"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_k": 2.5}, "top_k 2.5"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"min_p": -0.01}, "min_p -0.01"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty 0"),
        ({"presence_penalty": math.inf, "order": "vllm"}, "presence_penalty inf"),
        ({"presence_penalty": 1.5}, "'hf' has no presence or frequency penalty"),
        ({"frequency_penalty": 0.1, "order": "hf"}, "'hf' has no presence or frequency penalty"),
        ({"penalty_last_n": 64, "order": "vllm"}, "only llama.cpp"),
        ({"mask": [1.5]}, "mask"),
        ({"mask": 5}, "mask"),
        ({"mask": [[1], [2, 3]]}, "mask"),
        ({"mask": "12"}, "mask"),
        ({"mask": [True, False]}, "mask"),
        ({"temperature": 10**400}, "temperature 1000"),
        ({"temperature": np.True_}, "temperature"),
        ({"temperature": b"1"}, "temperature"),
        ({"order": ["hf"]}, "order"),
    ],
)
def test_parameters_that_mean_nothing_or_contradict_are_refused(options, words):
    with pytest.raises(errors.InputError, match=words):
        Sampler(**options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_token_is_drawn_from_logits_that_are_not_finite(value):
    logits = np.zeros(100, np.float32)
    logits[[31, 77]] = value
    for sampler in (Sampler(), Sampler(temperature=0), Sampler(mask=[31, 77])):
        with pytest.raises(errors.NonFiniteError, match="2 of 100") as at:
            sampler.distribution(logits)
        assert "for id 31" in str(at.value)


@pytest.mark.parametrize(
    ("sampler", "arguments", "kind", "words"),
    [
        (Sampler(), ([[1.0]],), errors.ShapeError, "one row"),
        (Sampler(), ([],), errors.ShapeError, "one row"),
        (Sampler(), ([1, 2],), errors.DTypeError, "int64"),
        (Sampler(), (None,), errors.ShapeError, "one row"),
        (Sampler(), ([1j, 2],), errors.DTypeError, "complex"),
        (Sampler(), (np.zeros(2, "V2"),), errors.DTypeError, "void16"),
        (Sampler(), (np.zeros(2, [("a", "f4")]),), errors.DTypeError, "void32"),
        (Sampler(), (np.zeros(2, ml_dtypes.int4),), errors.DTypeError, "int4"),
        (Sampler(repetition_penalty=2), ([1.0, 2.0], None), errors.InputError, "context_ids"),
        (Sampler(repetition_penalty=2), ([1.0, 2.0], [2**64]), errors.InputError, "context_ids"),
        (Sampler(mask=np.array([2**63], np.uint64)), ([1.0, 2.0],), errors.InputError, "0 to 1"),
        (Sampler(repetition_penalty=2), ([1.0, 2.0], [0, 5]), errors.InputError, r"context_ids\[1\] is 5"),
        (Sampler(repetition_penalty=2), ([1.0, 2.0], [0.5]), errors.InputError, "context_ids"),
        (Sampler(repetition_penalty=2, order="vllm"), ([1.0, 2.0], [0]), errors.InputError, "need prompt_length"),
        (Sampler(presence_penalty=2, order="sglang"), ([1.0, 2.0], [0]), errors.InputError, "need prompt_length"),
        (Sampler(presence_penalty=2, order="vllm"), ([1.0, 2.0], [0], 2), errors.InputError, "1 context_ids"),
        (Sampler(mask=[2]), ([1.0, 2.0],), errors.InputError, "0 to 1"),
        (Sampler(mask=[0, 1]), ([1.0, 2.0],), errors.InputError, "every id"),
        (Sampler(repetition_penalty=1e-308), ([5.0, 2.0], [0]), errors.InputError, "beyond float64"),
    ],
)
def test_a_question_without_an_answer_is_refused(sampler, arguments, kind, words):
    with pytest.raises(kind, match=words):
        sampler.distribution(*(np.array(arguments[0]), *arguments[1:]))


@pytest.mark.parametrize("name", [(-1, 0, 0), (0, 2**64, 0), (0, 0, 1.5)])
def test_a_seed_is_a_whole_number_of_64_bits(name):
    with pytest.raises(errors.InputError, match="64"):
        generator(*name)
