"""The gates of errors and choices as a family: together they are red at a clean engine at the rate ALPHA at most.

Each gate has a chance, that of a clean engine to be as far out.  Holm's procedure says which of them count; a gate that
does not is amber.  Prefill and decode are told of their own, before they are held against each other, so the rate is
shared out among the three.  Profiles are never red, and drawn tokens have a family of their own.
"""

import numpy as np

from qwenref.compare.distributions import holm, largest, student_tail
from qwenref.compare.stages import AMBER, RED, SKIPPED

ALPHA = 0.01  # chance of an alarm in a whole run
OF_A_PATH, OF_BOTH = 0.4 * ALPHA, 0.2 * ALPHA  # of the gates of one path; of decode against prefill


def held(stages, alpha=OF_A_PATH):
    """Take the `chance` out of rows of a table; those that are red and that Holm's procedure does not reject: amber."""
    rows = [row for row in stages if row.get("chance") is not None and row["verdict"] != SKIPPED]
    rejected = holm([row["chance"] for row in rows], alpha)
    for row, one in zip(rows, rejected, strict=True):
        if row["verdict"] == RED and not one:
            said = f"a clean engine is as far out with probability {row['chance']:.2g}"
            row["verdict"], row["detail"] = AMBER, f"{row['detail']}; {said}" if row["detail"] else said
    for row in stages:
        row.pop("chance", None)


def of_any(sigmas, positions, freedom):
    """The chance that any of so many positions is so many sigmas out, by Student's t: Bonferroni's bound."""
    return min(1.0, 2 * max(1, positions) * student_tail(sigmas, freedom))


def of_largest(sizes, value):
    """The chance that the largest size of one row more than `sizes` [J, N] is `value` or larger, as `largest` has it.

    1 where it is above a hundredth: no gate is as near as that.
    """
    near, far = largest(sizes, 1e-2), largest(sizes, 1e-4)
    if not far > near > 0 or value <= near:
        return 0.0 if value > near else 1.0
    return float(1e-2 * (value / near) ** (np.log(1e-2) / np.log(far / near)))
