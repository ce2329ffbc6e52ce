"""Tokens drawn here, from the distribution that is declared and from others."""

import numpy as np
import pytest

from qwenref.compare.drawn import Drawn
from qwenref.compare.sampled import EProcess, binomial_bound, poisson_binomial, sample_tests
from qwenref.compare.table import Table
from qwenref.sampling import Sampler

N, V = 3000, 80


def normal(values):
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def declared():
    return normal(np.random.default_rng(0).normal(0, 2, (N, V)))


def drawn(logprobs, seed):
    """Ids by the Gumbel trick."""
    noise = np.random.default_rng(seed).gumbel(size=logprobs.shape)
    return (logprobs + noise).argmax(axis=-1)


def sampled(declared, **options):
    sampler = Sampler(**{"order": "vllm", "mask": (), **options})
    with np.errstate(divide="ignore"):
        return np.log([sampler.distribution(row, (), 0).probs for row in declared])


def listed(declared, count=20):
    ids = np.argsort(-declared, axis=-1)[:, :count]
    return np.take_along_axis(declared, ids, axis=-1), ids


def test_what_is_drawn_as_declared_is_within_also_where_only_the_likeliest_are_known(declared):
    values, ids = listed(declared)
    for seed in range(20):
        chosen = drawn(declared, seed)
        for facts in (sample_tests(declared, chosen), sample_tests(values, chosen, support=ids)):
            assert facts["decision"] == "within" and facts["forbidden"] == 0 and facts["kl_low"] == 0
            assert facts["detectable_kl"] == pytest.approx(13 / N)


def test_tests_of_what_is_as_declared_fire_as_often_as_they_may():
    declared = normal(np.random.default_rng(1).normal(0, 2, (200, 30)))
    found = [sample_tests(declared, drawn(declared, seed), seed=seed) for seed in range(300)]
    for name in ("pit", "surprisal"):
        p = np.sort([facts[name]["p"] for facts in found])
        assert abs(p - np.arange(1, 301) / 301).max() < 1.95 / np.sqrt(300)  # Kolmogorov and Smirnov at 0.001


@pytest.mark.parametrize("known", ["all", "likeliest"])
@pytest.mark.parametrize(
    ("options", "test"),
    [
        ({"temperature": 0.7}, "surprisal"),
        ({"temperature": 1.3}, "surprisal"),
        ({"temperature": 1.0, "top_p": 0.9}, "nucleus"),
        ({"temperature": 1.0, "top_k": 20}, "ranks"),
    ],
)
def test_temperatures_and_cuts_that_nobody_declared_show_and_prove_no_more_than_there_is(
    declared, options, test, known
):
    engine = sampled(declared, **options)
    values, ids = listed(declared) if known == "likeliest" else (declared, None)
    facts = sample_tests(values, drawn(engine, 3), jitter_kl=1e-4, support=ids)
    found = facts["tail"][test] if test in facts["tail"] else facts[test]
    assert found["p"] < 1e-3 and facts["decision"] == "differs"
    there = np.isfinite(engine)
    true = np.where(there, np.exp(engine) * (np.where(there, engine, 0) - declared), 0).sum(axis=-1).mean()
    assert 0.2 * true < facts["kl_low"] < true


def test_a_difference_no_larger_than_roundings_is_within(declared):
    chosen = drawn(sampled(declared, temperature=0.9), 3)
    assert sample_tests(declared, chosen)["decision"] == "differs"
    assert sample_tests(declared, chosen, jitter_kl=0.01)["decision"] == "within"


def test_what_is_never_drawn_may_not_come(declared):
    cut = sampled(declared, temperature=1.0, top_k=40)
    chosen = drawn(cut, 0)
    assert sample_tests(cut, chosen)["decision"] == "within"
    chosen[7] = cut[7].argmin()
    facts = sample_tests(cut, chosen)
    assert facts["forbidden"] == 1 and facts["decision"] == "differs"
    assert sample_tests(cut, chosen, below=np.zeros(N))["decision"] == "within"  # at the edge of the cut, by rounding
    assert sample_tests(cut, chosen, below=np.where(np.arange(N) == 7, 5.0, 0))["decision"] == "differs"


def test_many_draws_of_few_prompts_are_held_against_their_distributions(declared):
    prefix = np.arange(N) % 3
    rows = declared[:3][prefix]
    facts = sample_tests(rows, drawn(rows, 0), prefix=prefix)
    assert facts["g"]["p"] > 0.01 and facts["g"]["n"] == N and facts["decision"] == "within"
    other = normal(rows + 0.4 * np.random.default_rng(2).normal(0, 1, (3, V))[prefix])
    facts = sample_tests(rows, drawn(other, 0), prefix=prefix)
    true = (np.exp(other) * (other - rows)).sum(axis=-1).mean()
    assert facts["g"]["p"] < 1e-6 and facts["decision"] == "differs" and 0.2 * true < facts["kl_low"] < 1.2 * true


def test_no_tokens_decide_nothing(declared):
    facts = sample_tests(declared[:0], [])
    assert facts["n"] == 0 and facts["decision"] == "within" and facts["detectable_kl"] is None


@pytest.mark.filterwarnings("error")
def test_answers_without_a_token_are_passed_over():
    empty = Table.concatenate([], 8)
    for table in (empty, _table(np.zeros((3, 4)), emitted=[-1, -1, -1])):
        found = Drawn(table, [None], weights=True)
        assert [row["verdict"] for row in found.stages] == ["skipped"] and not found.differs and found.stats == {}


def _table(logits, emitted, J=8):
    """A Table whose engine and variants are the truth itself."""
    truth, rows = normal(logits), np.arange(len(logits))
    ids = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    variants, none = np.broadcast_to(truth, (J, *truth.shape)), np.zeros_like(rows)
    return Table(none, none, rows, ids, truth, variants, truth, none, none + 1, np.array(emitted), True)


def test_counts_of_unequal_events_have_the_probability_of_the_sum_over_all_outcomes():
    p = np.array([0.1, 0.5, 0.3, 0.9])
    outcomes = (np.arange(16)[:, None] >> np.arange(4)) & 1
    weights = np.where(outcomes, p, 1 - p).prod(axis=-1)
    for seen in range(5):
        whole = weights[outcomes.sum(axis=-1) <= seen].sum()
        assert poisson_binomial(p, seen) == pytest.approx(whole, abs=1e-12)


def test_bounds_of_rates():
    assert binomial_bound(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-9)  # close to 3 / 300
    assert binomial_bound(0, 10, 0.025) == pytest.approx(0.3085, abs=1e-4)  # the two-sided 95 % interval of 0 of 10
    assert binomial_bound(3, 3) == 1


def test_evidence_decides_where_events_are_frequent_and_seldom_where_they_are_not():
    random = np.random.default_rng(0)
    often = [EProcess() for _ in range(100)]
    assert all(each.add(random.random(4000) < 0.02) for each in often)
    seldom = [EProcess() for _ in range(300)]
    assert sum(each.add(random.random(4000) < 1e-3) for each in seldom) <= 3
    assert sum(each.bound >= 1e-3 for each in seldom) >= 0.92 * 300 and all(e.bound > e.events / e.n for e in seldom)
    one = EProcess()
    assert not one.add(np.zeros(300, bool)) and one.value < 1 and one.bound == pytest.approx(3 / 300, rel=0.02)
    assert one.add(np.ones(5, bool)) and one.decided and one.events == 5
    assert one.add(np.zeros(3000, bool))  # what was decided stays
