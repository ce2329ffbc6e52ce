"""Which known faults explain an engine's error: each is planted in the reference and its effect held against the error.

e is the engine's error, d the effect of a fault on the same ids; both are differences from the truth, centred at every
position over its likeliest ids.  beta is the multiple of d that comes nearest to e, r2 the share of e that it explains,
rho what is left of e without d, in units of a rounding variant's error.
"""

from typing import NamedTuple

import numpy as np

from qwenref.compare.differences import Differences, at_columns, centred, likeliest_columns

BETA = (0.5, 1.6)  # a fault is there once, not a tenth of it
SIGMAS = 5.0  # of beta, beyond the betas of the variants
SHARE = 0.1  # of the error that is explained
RESIDUAL = (2.0, 4.0)  # rho without the fault: inside of the envelope, or a quarter of what it was
DETECTABLE = 0.5  # effect in units of a variant's error: in simulation no fault below 0.42 was named, all above 0.55
ALIKE = 1.25  # faults whose residuals are no further apart cannot be told apart
MOST = 3  # faults at once


class Explanation(NamedTuple):
    """What replays say of an engine's error.

    rows          dicts of id, class, family, beta, z, r2, rho, D, accepted, detectable; the best first
    accepted      names; `how` they are meant: "one", "alike" (one of them, the likeliest first), "together", or None
    runner_up     the best name that is not accepted, None where no other points the error's way
    residual      rho without what is accepted, else without the best row; None without rows
    undetectable  names whose effect is lost in rounding here
    """

    rows: list
    accepted: tuple
    how: str | None
    runner_up: str | None
    residual: float | None
    undetectable: tuple


def explain(table, replays, classes=None, families=None):
    """Explanation of the error in a Table.

    replays    {name: float64 [N, K]}, log-probabilities of the reference with this fault at the table's ids
    classes    {name: kind}, families {name: family or None}: put into the rows
    """
    error = _Error(table)
    rows = [_row(name, error, replays[name], classes or {}, families or {}) for name in replays]
    rows.sort(key=_rank)
    accepted, how, residual = _one(rows, error)
    if how is None:
        accepted, how, residual = _together(rows, error, replays, residual)
    for row in rows:
        row["accepted"] = row["id"] in accepted
    others = [row["id"] for row in rows if not row["accepted"] and row["detectable"] and _signed(row) > 0]
    lost = tuple(row["id"] for row in rows if not row["detectable"])
    return Explanation(rows, accepted, how, others[0] if others else None, residual, lost)


class _Error:
    """The engine's error and the variants', [N x K] flat, and their sizes."""

    def __init__(self, table):
        self.columns = likeliest_columns(table)
        narrow = table._replace(
            **{name: at_columns(getattr(table, name), self.columns) for name in ("truth", "engine", "jitters")}
        )
        found = Differences(narrow)
        self.truth, self.there, self.weights = narrow.truth, found.there, found.weights
        self.engine = found.engine.ravel()
        self.jitters = found.jitters.reshape(len(found.jitters), -1)
        self.unit = float(np.median(np.linalg.norm(self.jitters, axis=-1))) if len(self.jitters) else 0.0
        self.allowed = max(RESIDUAL[0], self.in_units(self.engine) / RESIDUAL[1])

    def effect(self, values):
        """d of a fault, flat."""
        difference = at_columns(values, self.columns) - self.truth
        effect = centred(np.where(np.isfinite(difference), difference, 0), self.truth, self.there)
        return (self.weights * effect).ravel()

    def in_units(self, difference):
        size = float(np.linalg.norm(difference))
        return size / self.unit if self.unit > 0 else np.inf if size > 0 else 0.0

    def fit(self, effects):
        """(beta [n], z [n]) of effects [n, M] together."""
        solve = np.linalg.pinv(effects @ effects.T) @ effects
        beta, clean = solve @ self.engine, solve @ self.jitters.T
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (beta - clean.mean(axis=-1)) / clean.std(axis=-1, ddof=1)
        return beta, np.nan_to_num(z, nan=0.0, posinf=np.inf, neginf=-np.inf)


def _row(name, error, values, classes, families):
    effect = error.effect(values)
    size, whole = np.linalg.norm(effect), np.linalg.norm(error.engine)
    beta = z = share = 0.0
    if size > 0:
        (beta,), (z,) = error.fit(effect[None])
        share = float(np.square(effect @ error.engine / (size * whole))) if whole > 0 else 0.0
    strength = error.in_units(effect)
    return {
        "id": name, "class": classes.get(name), "family": families.get(name), "beta": float(beta), "z": float(z),
        "r2": share, "rho": error.in_units(error.engine - effect), "D": strength, "accepted": False,
        "detectable": strength >= DETECTABLE,
    }  # fmt: skip


def _signed(row):
    return np.copysign(row["r2"], row["beta"])


def _rank(row):
    return not row["detectable"], -_signed(row), row["rho"]


def points_there(row):
    """Whether the error has the direction and the size of the fault's effect."""
    return bool(
        row["detectable"] and BETA[0] <= row["beta"] <= BETA[1] and row["z"] > SIGMAS and row["r2"] >= SHARE
    )  # fmt: skip


def _one(rows, error):
    """(names, "one" or "alike", rho) of the first row that explains the error and of those that do as well."""
    explaining = [row for row in rows if points_there(row) and row["rho"] <= error.allowed]
    if not explaining:
        return (), None, rows[0]["rho"] if rows else None
    first = explaining[0]
    kin = [row["id"] for row in explaining[1:] if _alike(first, row)]
    return (first["id"], *kin), "alike" if kin else "one", first["rho"]


def _alike(first, row):
    """Whether two explanations cannot be told apart; within a family both being inside the envelope is enough."""
    same = row["family"] is not None and row["family"] == first["family"]
    return row["rho"] <= max(ALIKE * first["rho"], RESIDUAL[0] if same else 0.0)


def _together(rows, error, replays, nearest):
    """(names, "together", rho) of up to MOST faults whose effects add up to the error, chosen one by one."""
    effects = {row["id"]: error.effect(replays[row["id"]]) for row in rows if row["detectable"]}
    chosen, left = [], error.engine
    while len(chosen) < MOST:
        gains = {name: _cosine(effect, left) for name, effect in effects.items() if name not in chosen}
        if not gains or max(gains.values()) <= 0:
            break
        chosen.append(max(gains, key=gains.get))
        planted = np.stack([effects[name] for name in chosen])
        beta, z = error.fit(planted)
        left = error.engine - beta @ planted
        rest = error.in_units(error.engine - planted.sum(axis=0))
        fits = ((beta >= BETA[0]) & (beta <= BETA[1]) & (z > SIGMAS)).all()
        if len(chosen) > 1 and fits and rest <= error.allowed:
            return tuple(chosen), "together", rest
    return (), None, nearest


def _cosine(a, b):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size > 0 else 0.0
