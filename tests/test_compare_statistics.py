"""Figures of a comparison, of arrays that are drawn here: no model, no engine."""

import numpy as np
import pytest

from qwenref.compare import differences, distributions
from qwenref.compare.likelihoods import kendall, ranks
from qwenref.compare.profiles import profiles
from qwenref.compare.statistics import CLASSES, critical, divergence, limits, measure, prefill_against_decode
from qwenref.compare.table import Table


def normal(values):
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def drawn(seed=0, N=300, K=40, J=8, engine=0.1):
    """A Table whose variants are 0.1 apart from the truth, and whose engine is `engine` apart."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (N, K))
    truth = normal(logits)
    jitters = normal(logits + random.normal(0, 0.1, (J, N, K)))
    theirs = normal(logits + engine * random.normal(0, 1, (N, K)))
    order = np.argsort(-truth, axis=-1)
    at = np.arange(N)
    ids = np.broadcast_to(np.arange(K), (N, K))
    return Table(
        at % 4, at % 4, at // 4, ids, truth, jitters, theirs, order[:, 0], order[:, 1], theirs.argmax(axis=-1), True
    )


def test_quantiles_and_tails_are_those_of_the_tables():
    # Abramowitz and Stegun, tables 26.8, 26.10
    assert distributions.student_quantile(0.975, 20) == pytest.approx(2.086, abs=5e-4)
    assert distributions.student_quantile(0.995, 5) == pytest.approx(4.032, abs=5e-4)
    assert distributions.chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-5)
    assert distributions.chi_square_tail(2.5582, 10) == pytest.approx(0.99, abs=1e-4)
    assert distributions.normal_tail(1.959964) == pytest.approx(0.025, abs=1e-7)
    assert distributions.holm([0.001, 0.2, 0.004], 0.01) == [True, False, True]


def test_uniform_values_pass_and_others_do_not():
    values = np.random.default_rng(0).random(2000)
    assert distributions.anderson_darling(values)[1] > 0.05 > distributions.anderson_darling(values**1.2)[1]


@pytest.mark.parametrize("seed", range(10))
def test_an_engine_that_is_like_a_variant_is_inside(seed):
    found = measure(drawn(seed))
    assert not found.gates("red") and 0.8 < found.ratio < 1.25
    assert all(flip["class"] in CLASSES[:3] for flip in found.flips)


def test_of_a_hundred_engines_like_variants_none_is_red_and_one_amber_at_the_most():
    found = [measure(drawn(seed, N=120, J=8 if seed % 2 else 16)) for seed in range(100, 200)]
    assert not any(each.gates("red") for each in found)
    assert sum(bool(each.gates("amber")) for each in found) <= 1


def test_gates_are_as_wide_as_variants_are_apart_and_no_narrower_than_their_least():
    assert limits(np.full(8, 0.3), (1.5, 2)) == (1.5, 2) == limits([0.0, 1.0], (1.5, 2))
    # t of 7 degrees of freedom is 2.998 at 0.99, 4.207 at 0.998; two halves are a factor of 2 apart.
    step = np.log(2) / 2 * np.sqrt(8 / 7 * 9 / 8)
    expected = np.exp(np.array([2.998, 4.207]) * step)
    assert limits([1.0] * 4 + [2.0] * 4, (1.5, 2)) == pytest.approx(expected * np.sqrt(2) / 1.5, rel=1e-3)


def test_one_size_more_is_where_student_says():
    # Logarithms 0 and 2: mean 1, deviation sqrt(2), t of one degree of freedom at 0.75 is 1.
    low, high = distributions.one_more([1.0, np.exp(2), np.nan, 0.0], 0.25)
    assert np.log([low, high]) == pytest.approx([1 - np.sqrt(3), 1 + np.sqrt(3)])
    assert distributions.one_more([2.0, -1.0], 0.25) == (np.inf, 0)


def test_largest_values_are_beyond_their_gate_as_rarely_as_it_was_said():
    # Eight of 2 above the ninth, which is 1: the index is log 2, and one in two rows is (8 / (2 * 0.5)) ** index.
    assert distributions.largest(np.array([[2.0] * 4 + [1.0] * 16] * 2), 0.5) == pytest.approx(8 ** np.log(2))
    random, over = np.random.default_rng(0), 0
    for _ in range(1000):
        sizes = np.abs(random.standard_t(4, (9, 500)))
        over += sizes[8].max() > distributions.largest(sizes[:8], 0.01)
    assert 1 <= over <= 20
    assert distributions.largest(np.zeros((8, 40)), 0.01) == 0


def test_one_variant_more_is_red_as_rarely_as_it_was_said():
    random = np.random.default_rng(0)
    sizes = np.exp(random.normal(0, 0.4, (4000, 9)))
    over = [[last / np.median(rest) > gate for gate in limits(rest, (1, 1))] for *rest, last in sizes]
    amber, red = np.mean(over, axis=0)
    assert 0.005 < amber < 0.016 and red < 0.005


def test_fewer_variants_have_wider_limits():
    # Student's t of 20 and of 12 degrees of freedom at 0.01 / 512.
    assert critical(256, 16) == pytest.approx(5.25, abs=0.01) and critical(256, 8) == pytest.approx(6.31, abs=0.01)


def test_with_engine_and_reference_changed_round_benign_flips_stay_benign():
    table = drawn(engine=0.1, N=2000)
    order, truth = np.argsort(-table.engine, axis=-1), table.engine
    other = table._replace(
        truth=truth, engine=table.truth, jitters=normal(truth + table.jitters - table.truth), best=order[:, 0],
        second=order[:, 1], emitted=table.best,
    )  # fmt: skip
    one, two = ({(f["prompt"], f["pos"]): f["class"] for f in measure(t).flips} for t in (table, other))
    assert len(one) > 5 and one == two and set(one.values()) == {"benign"}


def test_an_identical_engine_has_no_error():
    table = drawn(engine=0)
    found = measure(table.with_engine(table.truth))
    assert found.ratio == 0 and found.stats["kl"]["mean"] == 0 and not found.flips and not found.gates("red")


def test_an_engine_three_times_as_far_is_outside():
    found = measure(drawn(engine=0.3))
    assert "R" in found.gates("red") and found.ratio == pytest.approx(3, rel=0.15)
    low, high = found.stats["R"]["ci"]
    assert low < found.ratio < high


def test_orders_are_compared_by_pairs_and_the_emitted_token_by_its_rank():
    # Of six pairs five run alike, one the other way; with a tie four alike, one not, of 6 and of 5 untied pairs.
    four = np.ones(4, bool)
    assert kendall(np.array([4.0, 3, 2, 1]), np.array([4.0, 3, 1, 2]), four) == pytest.approx(4 / 6)
    assert kendall(np.array([4.0, 3, 2, 1]), np.array([3.0, 3, 1, 2]), four) == pytest.approx(3 / np.sqrt(30))
    assert kendall(np.ones(4), np.array([4.0, 3, 1, 2]), four) is None
    table = drawn()
    found = ranks(table.with_engine(table.truth)._replace(emitted=table.second))
    assert found["kendall"] == pytest.approx(1) and found["emitted"] == {"mean": 2.0, "max": 2}
    assert ranks(table)["kendall"] < 1 and "emitted" not in ranks(table._replace(emitted=np.full(300, -1)))


def test_one_wrong_position_is_a_hot_spot():
    table = drawn()
    engine = table.engine.copy()
    engine[17, table.best[17]] -= 8
    found = measure(table.with_engine(normal(engine)))
    assert "Zmax" in found.gates("red")
    assert (found.stats["zmax"]["prompt"], found.stats["zmax"]["pos"]) == (17 % 4, 17 // 4)


def test_a_gate_alone_has_to_be_as_far_out_as_five_gates_ask_for():
    def moved(by):
        engine = table.truth.copy()
        engine[17, table.best[17]] -= by
        found = measure(table.with_engine(normal(engine))._replace(emitted=np.full(300, -1)))
        return found.stats["zmax"], next(row for row in found.stages if row["id"] == "Zmax")

    table = drawn()
    zmax, _ = moved(1.0)
    one = zmax["crit"] / zmax["value"]  # the error that is at the gate
    near, far = moved(1.001 * one)[1], moved(1.6 * one)[1]
    assert (near["verdict"], far["verdict"]) == ("amber", "red") and moved(0.999 * one)[1]["verdict"] == "green"
    assert near["detail"].startswith("prompt 1, position 4; a clean engine is as far out with probability 0.0")


def periodic(period, factor, N=2048):
    """Stats of errors that are `factor` times as large at one position in `period`, and the stage's verdict."""
    random = np.random.default_rng(0)
    errors = random.normal(size=N) * np.where(np.arange(N) % period == 3, factor, 1)
    table = drawn(N=N)._replace(prompt=np.zeros(N, np.int64), position=np.arange(N))
    stats, stages = {}, []
    profiles(table, errors, random.normal(size=(8, N)), np.random.default_rng(5), stats, stages, {})
    return errors, stats["period"], stages[-1]["verdict"]


def test_errors_at_one_position_in_64_are_a_period_and_others_are_none():
    assert periodic(64, 4.0)[1:] == ({"64": 1 / 2001, "128": 1 / 2001}, "amber")
    errors, found, verdict = periodic(64, 1.0)
    assert verdict == "green"

    def peak(values):
        values = np.log1p(values)
        return (values.reshape(32, 64).mean(axis=0) - values.mean()).max() * np.sqrt(32) / values.std()

    sizes, random = np.abs(errors), np.random.default_rng(5)
    over = sum(peak(random.permutation(sizes)) >= peak(sizes) for _ in range(2000))
    assert found["64"] == pytest.approx((1 + over) / 2001, abs=1e-12)


def test_orders_of_ids_and_of_prompts_do_not_matter():
    table, random = drawn(), np.random.default_rng(1)
    columns, rows = random.permutation(40), random.permutation(300)
    place = np.argsort(columns)
    other = table._replace(
        support=table.support[:, columns], truth=table.truth[:, columns], engine=table.engine[:, columns],
        jitters=table.jitters[..., columns], best=place[table.best], second=place[table.second],
        emitted=place[table.emitted],
    ).select(rows)  # fmt: skip
    one, two = measure(table), measure(other)
    assert two.ratio == pytest.approx(one.ratio, rel=1e-12)
    assert two.stats["kl"]["mean"] == pytest.approx(one.stats["kl"]["mean"], rel=1e-9)
    key = lambda flip: (flip["prompt"], flip["pos"], flip["class"])  # noqa: E731
    assert sorted(map(key, one.flips)) == sorted(map(key, two.flips))


def test_a_divergence_of_some_ids_is_a_lower_bound():
    table = drawn(engine=0.5)
    whole = divergence(table.truth, table.engine, True)
    some = np.where(np.arange(40) < 20, table.engine, np.nan)
    assert (divergence(table.truth, some, False) <= whole + 1e-12).all() and (whole > 0).all()


def test_decode_is_held_against_prefill_trajectory_by_trajectory():
    table = drawn()
    assert prefill_against_decode(table, table)[0] == 0
    moved = prefill_against_decode(table, table.with_engine(drawn(seed=0, engine=1.0).engine))
    assert moved[0] > 2 and moved[1]["verdict"] == "red"


def wild(seed=0, engine=0.1):
    """A Table whose variants and engine part by 10 nats at one position of fifty."""
    table, random = drawn(seed, engine=engine), np.random.default_rng(seed + 1000)
    here = np.arange(0, table.positions, 50)
    apart = table.truth[here] + random.normal(0, 10, (len(table.jitters) + 1, len(here), table.truth.shape[1]))
    jitters, theirs = table.jitters.copy(), table.engine.copy()
    jitters[:, here], theirs[here] = normal(apart[1:]), normal(apart[0])
    return table._replace(jitters=jitters, engine=theirs)


def test_a_few_wild_positions_do_not_hide_an_error_at_all_others():
    calm = [measure(wild(seed)) for seed in range(20)]
    assert not any("R" in each.gates("red") for each in calm) and 0.8 < np.median([each.ratio for each in calm]) < 1.25
    assert all("R" in measure(wild(seed, engine=0.4)).gates("red") for seed in range(20))


def test_a_variant_alone_at_a_wild_position_widens_the_gate():
    table = drawn()
    jitters = table.jitters.copy()
    jitters[3, 7] = normal(table.truth[7] + np.random.default_rng(1).normal(0, 20, table.truth.shape[1]))
    assert measure(table._replace(engine=jitters[3])).ratio > 5
    sizes = differences.Differences(table._replace(jitters=jitters)).sizes
    assert max(sizes) > 5 * np.median(sizes)
