"""Whether two engines draw from one distribution: the discrepancy by hand, its chance, and what a report says of it."""

from types import SimpleNamespace

import numpy as np
import pytest

import qwenref
from qwenref.compare import FaultyReference, Suite, compare, suite
from qwenref.compare.arbiter import _drawn
from qwenref.compare.drawn_apart import alike, apart, discrepancy


def test_the_kernel_is_the_share_of_places_with_the_same_token():
    found = alike([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2], [7, 2]])
    want = [[1, 0.75, 0.5, 0.25], [0.75, 1, 0.5, 0.25], [0.5, 0.5, 1, 0.75], [0.25, 0.25, 0.75, 1]]
    assert found.tolist() == want


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        ([[1, 2], [1, 3]], [[4, 5], [4, 6]], 0.5 + 0.5 - 2 * 0),
        ([[1, 2], [1, 3]], [[1, 2], [1, 3]], 0.5 + 0.5 - 2 * 0.75),
        ([[1, 2], [1, 2]], [[1, 3], [1, 3], [1, 4]], 1 + (1 + 0.5 + 0.5) / 3 - 2 * 0.5),
    ],
)
def test_the_discrepancy_of_a_few_answers_by_hand(first, second, value):
    assert discrepancy(alike([*first, *second]), np.arange(len(first))) == pytest.approx(value, abs=1e-15)
    found = apart({"a": first, "b": [[1]]}, {"a": second, "b": [[1], [2]]})
    assert found["mmd"] == pytest.approx(value, abs=1e-15)
    assert (found["prompts"], found["answers"]) == (1, len(first) + len(second))


def test_chance_is_the_share_of_deals_that_come_out_as_large():
    one, other = [[1, 2], [1, 2]], [[3, 4], [3, 4]]
    assert apart({0: one}, {0: other})["p"] == pytest.approx(1 / 3, abs=0.05)  # 2 of 6 deals part them
    assert apart({0: one}, {0: one})["p"] == 1
    assert apart({0: [[1]]}, {0: other}) is None and apart({0: one}, {1: one}) is None


def test_alarms_are_as_rare_as_they_are_said_to_be_and_a_difference_shows():
    random = np.random.default_rng(0)

    def drawn(weights):
        return {n: random.choice(4, (8, 12), p=weights).tolist() for n in range(3)}

    even, tilted = [0.25] * 4, [0.55, 0.15, 0.15, 0.15]
    p = np.array([apart(drawn(even), drawn(even), seed)["p"] for seed in range(24)])
    assert np.count_nonzero(p <= 0.1) <= 7 and 0.3 < p.mean() < 0.7
    assert apart(drawn(even), drawn(tilted))["p"] <= 0.002


def sides(one, other, draws=100, ended=None):
    """What the arbiter looks at of two comparisons: their answers to prompt 0, behind two ids."""
    ways = [[SimpleNamespace(prompt=0, origin="engine", ids=(8, 9, *ids), start=2) for ids in each]
            for each in (one, other)]  # fmt: skip
    options, theirs = (
        SimpleNamespace(draws=draws),
        SimpleNamespace(prompt=0, origin="reference", ids=(8, 9, 1), start=2),
    )
    return [SimpleNamespace(options=options, ended=ended, seen=SimpleNamespace(trajectories=[*way, theirs]))
            for way in ways]  # fmt: skip


def test_what_two_engines_drew_is_told_where_both_came_to_an_end():
    one, other = [[1, 2, 3]] * 6, [[1, 2, 4]] * 6
    (found,) = _drawn(*sides(one, other))
    assert (found["severity"], found["evidence"]["answers"]) == ("warning", 12) and "draw differently" in found[
        "message"
    ]
    (found,) = _drawn(*sides(one, one))
    assert found["severity"] == "info" and found["message"].startswith("nothing shows that")
    assert _drawn(*sides(one, other, draws=None)) == _drawn(*sides(one, other, ended=(2, "cut"))) == []
    assert _drawn(*sides(one[:1], other)) == []


def test_the_report_of_two_that_draw_says_so():
    tiny = qwenref.from_pretrained("tiny")
    item = next(item for item in suite("quick", tiny).prompts if item.kind == "cjk")
    engines = [FaultyReference(tiny, jitter=1), FaultyReference(tiny, jitter=2)]
    few = Suite("quick", (item._replace(new=4),))
    report = compare(tiny, engines, few, mode="sample", draws=40, explain="never", jitter=4)
    (found,) = report.findings
    assert (found["code"], found["severity"], found["evidence"]["answers"]) == ("drawn-apart", "info", 20), found
    assert found["message"] in report.text(width=200)
