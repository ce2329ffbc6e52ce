"""Known faults held against an engine's error, on arrays drawn here: no model, no engine."""

import numpy as np
import pytest

from qwenref.compare.replay import DETECTABLE, explain
from qwenref.compare.table import Table

N, K, J, NOISE = 256, 40, 8, 0.05
NAMES = [f"fault-{n}" for n in range(12)]


def normal(values):
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


class Drawn:
    """A truth, its variants, and faults of which each moves the logits its own way, by `size` of a variant's error."""

    def __init__(self, seed=0, size=10.0):
        self.random = random = np.random.default_rng(seed)
        self.logits = random.normal(0, 3, (N, K))
        self.moves = {name: size * NOISE * random.normal(0, 1, (N, K)) for name in NAMES}
        self.truth = normal(self.logits)
        self.replays = {name: normal(self.logits + move) for name, move in self.moves.items()}

    def noise(self, *shape):
        return self.random.normal(0, NOISE, (*shape, N, K))

    def table(self, *planted, times=1.0):
        engine = normal(self.logits + self.noise() + times * sum((self.moves[name] for name in planted), np.zeros(K)))
        order, at = np.argsort(-self.truth, axis=-1), np.arange(N)
        return Table(
            at % 4, at % 4, at // 4, np.broadcast_to(np.arange(K), (N, K)), self.truth,
            normal(self.logits + self.noise(J)), engine, order[:, 0], order[:, 1], engine.argmax(axis=-1), True,
        )  # fmt: skip

    def without(self, *names):
        return {name: values for name, values in self.replays.items() if name not in names}


@pytest.mark.parametrize("size", [1.0, 10.0, 40.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_planted_fault_is_named_once_and_not_when_it_is_unknown(seed, size):
    drawn = Drawn(seed, size)
    table = drawn.table(NAMES[3])
    found = explain(table, drawn.replays, {NAMES[3]: "config"}, {NAMES[3]: "rope"})
    first = found.rows[0]
    assert (found.accepted, found.how) == ((NAMES[3],), "one") and first["id"] == NAMES[3] != found.runner_up
    assert first["beta"] == pytest.approx(1, abs=0.1) and first["rho"] == found.residual == pytest.approx(1, abs=0.15)
    assert (first["class"], first["family"], first["accepted"]) == ("config", "rope", True)
    other = explain(table, drawn.without(NAMES[3]))
    assert other.accepted == () and other.how is None and not any(row["accepted"] for row in other.rows)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_explains_an_engine_that_is_like_a_variant(seed):
    assert explain(Drawn(seed, 1.0).table(), Drawn(seed, 1.0).replays).accepted == ()


def test_an_engine_without_error_is_not_explained():
    drawn = Drawn()
    table = drawn.table()
    found = explain(table.with_engine(table.truth), drawn.replays)
    assert found.accepted == () and all(row["r2"] == 0 for row in found.rows) and found.runner_up is None


def test_a_fault_turned_round_or_a_tenth_of_it_is_no_explanation():
    drawn = Drawn()
    for times in (-1.0, 0.1):
        assert explain(drawn.table(NAMES[0], times=times), drawn.replays).accepted == ()
    turned = explain(drawn.table(NAMES[0], times=-1.0), drawn.replays)
    assert turned.rows[-1]["id"] == NAMES[0] and turned.rows[-1]["beta"] < -0.9


def test_a_fault_below_rounding_is_said_to_be_undetectable():
    drawn = Drawn(size=0.3)
    found = explain(drawn.table(NAMES[0]), drawn.replays)
    assert set(found.undetectable) == set(NAMES) and found.accepted == () and found.runner_up is None
    assert all(row["D"] == pytest.approx(0.3, abs=0.05) and row["D"] < DETECTABLE for row in found.rows)


def test_two_and_three_faults_are_found_together_and_an_unknown_one_beside_them_is_not_hidden():
    drawn = Drawn(size=4.0)
    for names in (NAMES[2:4], NAMES[5:8]):
        table = drawn.table(*names)
        found = explain(table, drawn.replays)
        assert found.how == "together" and set(found.accepted) == set(names)
        assert found.residual < 2 < min(row["rho"] for row in found.rows)
        assert explain(table, drawn.without(names[0])).accepted == ()


def test_faults_that_do_the_same_are_named_as_alike():
    drawn = Drawn()
    drawn.replays["twin"] = normal(drawn.logits + drawn.moves[NAMES[1]] + drawn.noise() / 20)
    found = explain(drawn.table(NAMES[1]), drawn.replays)
    assert found.how == "alike" and set(found.accepted) == {NAMES[1], "twin"}


def test_a_family_is_named_as_a_whole_where_both_are_inside_the_envelope_and_others_are_runners_up():
    drawn = Drawn(size=10.0)
    near = normal(drawn.logits + drawn.moves[NAMES[1]] + 1.2 * drawn.noise())  # rho about 1.6
    drawn.replays["near"] = near
    table = drawn.table(NAMES[1])
    assert explain(table, drawn.replays).accepted == (NAMES[1],)
    assert explain(table, drawn.replays).runner_up == "near"
    found = explain(table, drawn.replays, families={"near": "rope", NAMES[1]: "rope"})
    assert found.accepted == (NAMES[1], "near") and found.how == "alike"


def test_the_order_of_ids_of_positions_and_of_replays_does_not_matter():
    drawn = Drawn()
    table = drawn.table(NAMES[2], NAMES[4])
    columns, rows = drawn.random.permutation(K), drawn.random.permutation(N)
    moved = table._replace(
        truth=table.truth[:, columns], engine=table.engine[:, columns], jitters=table.jitters[..., columns]
    ).select(rows)
    one = explain(table, drawn.replays)
    two = explain(moved, {name: drawn.replays[name][rows][:, columns] for name in reversed(NAMES)})
    assert set(one.accepted) == set(two.accepted) and [r["id"] for r in one.rows] == [r["id"] for r in two.rows]
    for a, b in zip(one.rows, two.rows, strict=True):
        assert a["rho"] == pytest.approx(b["rho"], rel=1e-9) and a["beta"] == pytest.approx(b["beta"], rel=1e-9)


def test_ids_without_numbers_take_no_part():
    drawn = Drawn()
    table = drawn.table(NAMES[0])
    engine, truth = table.engine.copy(), table.truth.copy()
    engine[:, 5:9], engine[:, 9:12], truth[:, 12:14] = np.nan, -np.inf, np.nan
    found = explain(table._replace(engine=engine, truth=truth), drawn.replays)
    assert found.accepted == (NAMES[0],) and found.rows[0]["beta"] == pytest.approx(1, abs=0.1)


def test_no_replays_explain_nothing():
    found = explain(Drawn().table(), {})
    assert found == ([], (), None, None, None, ())
