"""Gates as a family: the chances by hand, and Holm's procedure over them."""

import math

import numpy as np
import pytest

from qwenref.compare.distributions import chance_of_one_more, largest, one_more, student_quantile
from qwenref.compare.family import ALPHA, OF_A_PATH, OF_BOTH, held, of_any, of_largest
from qwenref.compare.stages import stage


def test_the_rates_of_both_paths_and_of_what_is_between_them_are_that_of_the_run():
    assert abs(2 * OF_A_PATH + OF_BOTH - ALPHA) < 1e-15 and ALPHA == 0.01


def rows(*given):
    """Rows of a table from (verdict, chance)."""
    return [stage(str(n), "a gate", *each[:1]) | {"chance": each[1]} for n, each in enumerate(given)]


@pytest.mark.parametrize(
    ("given", "verdicts"),
    [
        ([("red", 0.0024), ("green", 0.5), ("green", 0.9)], "amber green green"),  # 0.004 / 3 is 0.00133
        ([("red", 0.0013), ("green", 0.5), ("green", 0.9)], "red green green"),
        ([("red", 0.0019), ("red", 0.0013), ("green", 0.9)], "red red green"),  # then 0.004 / 2
        ([("red", 0.0021), ("red", 0.0013), ("green", 0.9)], "amber red green"),
        ([("red", 0.0019), ("red", 0.0014), ("green", 0.9)], "amber amber green"),  # none behind one that stays
        ([("red", 0.0024), ("skipped", 0.9), ("skipped", None)], "red skipped skipped"),  # is no gate of the family
        ([("amber", 1e-9), ("green", 1e-9)], "amber green"),  # a gate is raised by its own limits alone
        ([], ""),
    ],
)
def test_red_gates_stay_red_where_holms_procedure_rejects_them(given, verdicts):
    made = rows(*given)
    held(made)
    assert [row["verdict"] for row in made] == verdicts.split()
    assert all("chance" not in row for row in made)


def test_a_gate_that_does_not_count_says_why():
    made = rows(("red", 0.0024), ("green", 0.5))
    made[0]["detail"] = "prompt 1"
    held(made)
    assert made[0]["detail"] == "prompt 1; a clean engine is as far out with probability 0.0024"
    assert made[1]["detail"] is None


def test_the_chance_of_one_size_more_is_that_of_the_logarithms():
    sizes = [math.exp(-1), math.exp(0), math.exp(1)]  # mean 0, spread 1: t is log(value) / sqrt(4 / 3)
    t = math.sqrt(3 / 4)
    tail = 0.5 - t / (2 * math.sqrt(2 + t * t))  # of Student's t with two degrees of freedom
    assert chance_of_one_more(sizes, math.e) == pytest.approx(tail, rel=1e-12)
    assert chance_of_one_more(sizes, 1 / math.e) == pytest.approx(1 - tail, rel=1e-12)
    for chance in (0.01, 0.002):  # as the limits have it
        assert chance_of_one_more(sizes, one_more(sizes, chance)[1]) == pytest.approx(chance, rel=1e-9)
    assert chance_of_one_more([2.0, 2.0], 2.1) == 0 and chance_of_one_more([2.0, 2.0], 2.0) == 1
    assert chance_of_one_more([], 3.0) == 0 and chance_of_one_more(sizes, 0.0) == 1 == chance_of_one_more(
        sizes, float("nan")
    )


def test_the_chance_of_any_position_is_the_bound_of_the_critical_value():
    assert of_any(student_quantile(1 - 0.003 / 512, 12), 256, 12) == pytest.approx(0.003, rel=1e-9)
    assert of_any(0.1, 256, 12) == 1


def test_the_chance_of_the_largest_is_the_one_it_is_exceeded_with():
    sizes = np.abs(np.random.default_rng(0).standard_t(4, (8, 200)))
    for chance in (0.005, 0.002, 1e-3, 1e-5):
        assert of_largest(sizes, largest(sizes, chance)) == pytest.approx(chance, rel=1e-9)
    assert of_largest(sizes, largest(sizes, 0.02)) == 1
    assert of_largest(np.zeros((8, 3)), 1.0) == 0 and of_largest(np.zeros((8, 3)), 0.0) == 1
