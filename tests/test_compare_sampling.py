"""What is done to logits before they are reported, found again from log-probabilities that are drawn here."""

import ml_dtypes
import numpy as np
import pytest

from qwenref.compare.sampling import as_reported, beside, fit, undo
from qwenref.compare.statistics import measure
from qwenref.compare.table import Table
from qwenref.sampling import Sampler

N, V, J, NOISE, PROMPT = 200, 60, 8, 0.02, 20


def normal(values):
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


class Drawn:
    """Logits of a text in which ids come again, some of them below 0, and an engine that draws with a `Sampler`."""

    def __init__(self, seed=0, level=4.0, noise=NOISE):
        self.random, self.noise = np.random.default_rng(seed), noise
        self.logits = self.random.normal(level, 3, (N, V))
        ids = self.random.integers(0, V // 2, PROMPT + N)
        self.contexts = [ids[: PROMPT + n] if n < 60 else ids[n : PROMPT + n] for n in range(N)]
        self.lengths = np.array([PROMPT if n < 60 else PROMPT // 2 for n in range(N)])
        self.logz = np.log(np.exp(self.logits).sum(axis=-1))

    def moved(self, *shape):
        return self.logits + self.random.normal(0, self.noise, (*shape, N, V))

    def table(self, times=1.0, **options):
        engine = normal(times * self.moved())
        if options:
            sampler = Sampler(**{"order": "vllm", "mask": (), **options})
            with np.errstate(divide="ignore"):
                engine = np.log(
                    [
                        sampler.distribution(row, context, length).probs
                        for row, context, length in zip(self.moved(), self.contexts, self.lengths, strict=True)
                    ]
                )
        return self.held(engine)

    def held(self, engine):
        truth = normal(self.logits)
        order, at = np.argsort(-truth, axis=-1), np.arange(N)
        return Table(
            at % 4, at % 4, at // 4, np.broadcast_to(np.arange(V), (N, V)), truth, normal(self.moved(J)), engine,
            order[:, 0], order[:, 1], engine.argmax(axis=-1), True,
        )  # fmt: skip

    def asked(self, known):
        return {"contexts": self.contexts, "lengths": self.lengths, "logz": self.logz if known else None}


@pytest.fixture(scope="module")
def drawn():
    return Drawn()


@pytest.mark.parametrize("seed", range(10))
def test_an_engine_like_a_variant_is_neutral(seed):
    drawn = Drawn(seed)
    for known in (True, False):
        found = fit(drawn.table(), **drawn.asked(known))
        assert found.neutral and found.slope == pytest.approx(1, abs=0.005) and found.findings == []
        assert (found.temperature, found.truncated, found.presence, found.frequency, found.repetition) == (None,) * 5


@pytest.mark.parametrize("times", [0.5, 0.9, 1 / 0.8, 2.0])
def test_logits_times_c_have_slope_c(drawn, times):
    table = drawn.table(times)
    found = fit(table, drawn.contexts)
    assert found.slope == pytest.approx(times, abs=0.01) and found.temperature == pytest.approx(1 / times, abs=0.01)
    assert [each["code"] for each in found.findings] == ["temperature"]
    assert measure(undo(table, found, drawn.contexts)).ratio < 1.5 < measure(table).ratio


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({"presence_penalty": 1.5}, "new"),
        ({"presence_penalty": 1.0, "temperature": 0.7}, "new"),
        ({"frequency_penalty": 0.5}, "new"),
        ({"repetition_penalty": 1.05}, "all"),
        ({"repetition_penalty": 1.1, "temperature": 0.8}, "all"),
    ],
)
def test_a_penalty_is_found_with_its_value_and_taken_back(options, scope, known):
    drawn = Drawn(level=10.0 if not known else 4.0)  # logits of unknown height are taken for positive
    table = drawn.table(**{"temperature": 1.0, **options})
    found = fit(table, **drawn.asked(known))
    for kind in ("presence", "frequency", "repetition"):
        value = options.get(f"{kind}_penalty")
        assert getattr(found, kind) == (value if value is None else pytest.approx(value, rel=0.02))
    assert found.scopes == {next(kind.partition("_")[0] for kind in options if "penalty" in kind): scope}
    temperature = options.get("temperature")
    assert found.temperature == (temperature if temperature is None else pytest.approx(temperature, abs=0.01))
    restored = measure(undo(table, found, **drawn.asked(known)))
    assert restored.ratio < 1.5 < measure(table).ratio and not restored.gates("red")


def test_two_penalties_at_once_are_told_apart(drawn):
    found = fit(drawn.table(presence_penalty=1.5, repetition_penalty=1.1, temperature=1.0), **drawn.asked(True))
    assert found.repetition == pytest.approx(1.1, abs=0.01) and found.presence == pytest.approx(1.5, abs=0.02)
    assert found.scopes == {"presence": "new", "repetition": "all"} and found.frequency is found.temperature is None


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"top_k": 20}, "top_k", 20),
        ({"top_p": 0.95}, "top_p", 0.95),
        ({"min_p": 0.05}, "min_p", 0.05),
        ({"top_p": 0.9, "temperature": 0.6}, "top_p", 0.9),
    ],
)
def test_what_is_cut_away_says_by_what(drawn, options, kind, value):
    table = drawn.table(**{"temperature": 1.0, **options})
    found = fit(table, **drawn.asked(True))
    assert found.truncated == (kind, pytest.approx(value, rel=0.05))
    assert (found.temperature is None) == (options.get("temperature") is None)
    assert found.findings[-1]["code"] == "truncated-support" and found.presence is found.repetition is None
    told = np.where(np.isinf(table.engine), np.nan, table.engine)  # an engine that leaves them out of its list
    assert fit(table.with_engine(told), **drawn.asked(True)).truncated == (kind, pytest.approx(value, rel=0.05))


def test_a_top_k_is_told_also_where_others_are_as_likely_as_its_last():
    drawn = Drawn()
    drawn.logits = np.round(drawn.logits)  # as bf16 has them: many are equal
    drawn.noise = 0
    kept = np.where(drawn.logits >= np.sort(drawn.logits, axis=-1)[:, [-20]], drawn.logits, -np.inf)
    assert np.mean(np.isfinite(kept).sum(axis=-1) > 20) > 0.5
    assert fit(drawn.held(normal(kept)), **drawn.asked(True)).truncated == ("top_k", 20)


def test_lists_with_room_for_all_but_a_few_positions_show_no_cut():
    drawn = Drawn()
    drawn.logits *= np.where(np.arange(N) < 5, 1, 10)[:, None]  # a few flat positions; elsewhere 20 ids hold all
    engine = drawn.logits * np.where(np.arange(N) < 5, 5, 1)[:, None]  # which a fault makes steep
    listed = np.where(np.argsort(np.argsort(-engine, axis=-1), axis=-1) < 20, normal(engine), np.nan)
    assert fit(drawn.held(listed), **drawn.asked(True)).truncated is None


def test_a_top_k_is_told_where_float32_has_no_probability_for_the_last_ones():
    drawn = Drawn(noise=1e-4)
    drawn.logits *= np.where(np.arange(N) < N // 2, 1, 40)[:, None]
    table = drawn.table(temperature=1.0, top_k=20)
    assert ((kept := np.isfinite(table.engine).sum(axis=-1)) == 20).sum() >= N // 2
    table.engine[table.engine < -87] = -np.inf
    assert (kept > np.isfinite(table.engine).sum(axis=-1)).sum() > N // 4
    assert fit(table, **drawn.asked(True)).truncated == ("top_k", 20)


def test_one_id_that_is_left_is_no_top_k():
    drawn = Drawn()
    drawn.logits[np.arange(N), drawn.random.integers(0, V, N)] += 18
    table = drawn.table(temperature=1.0, top_p=0.95)
    alone = np.isfinite(table.engine).sum(axis=-1) == 1
    assert 0.9 < alone.mean() < 1 and fit(table, **drawn.asked(True)).truncated == (
        "top_p",
        pytest.approx(0.95, abs=0.05),
    )


@pytest.mark.parametrize("by", [-1.0, -60.0])
def test_what_is_no_setting_of_any_engine_is_not_fitted(drawn, by):
    seen = np.array([np.isin(np.arange(V), context[length:]) for context, length in
                     zip(drawn.contexts, drawn.lengths, strict=True)])  # fmt: skip
    found = fit(drawn.held(normal(drawn.moved() - by * seen)), **drawn.asked(True))
    assert found.presence is found.frequency is found.repetition is None


def test_of_two_penalties_that_fit_alike_the_better_one_is_told_where_logits_are_known():
    drawn = Drawn(level=30, noise=0.5)  # logits far above 0: dividing them is nearly taking a constant away
    drawn.logits = 30 + (drawn.logits - 30) / 3
    drawn.logz = np.log(np.exp(drawn.logits).sum(axis=-1))
    found = fit(drawn.table(repetition_penalty=1.1), **drawn.asked(True))
    assert found.presence is None and found.repetition == pytest.approx(1.1, abs=0.01)


def test_a_list_of_the_likeliest_is_no_cut(drawn):
    table = drawn.table()
    listed = np.where(np.argsort(np.argsort(-table.engine, axis=-1), axis=-1) < 20, table.engine, np.nan)
    assert fit(table.with_engine(listed), **drawn.asked(True)).neutral


def test_noise_that_hides_the_truth_is_no_temperature(drawn):
    for engine in (drawn.random.normal(0, 3, (N, V)), drawn.logits + drawn.random.normal(0, 1, (N, V))):
        assert fit(drawn.held(normal(engine)), **drawn.asked(True)).temperature is None


def test_temperature_shows_beside_an_error_of_another_kind(drawn):
    wrong = drawn.logits * 0.9 + drawn.random.normal(0, 2, (N, V))
    prefill, decode = drawn.held(normal(wrong + drawn.moved() - drawn.logits)), drawn.held(normal(wrong / 0.8))
    assert fit(decode, **drawn.asked(True)).temperature is None  # the truth is too far away
    order = drawn.random.permutation(N)
    table = beside(decode, prefill.select(order))
    asked = {"contexts": [drawn.contexts[n] for n in order], "lengths": drawn.lengths[order]}
    assert (table.position == prefill.position[order]).all()
    assert fit(table, **asked).temperature == pytest.approx(0.8, abs=0.005)
    assert fit(beside(prefill, prefill), drawn.contexts).neutral


def test_choices_are_those_of_what_is_restored(drawn):
    table = drawn.table(presence_penalty=1.5, temperature=1.0)
    assert (table.emitted != table.best).mean() > 0.1
    restored = undo(table, fit(table, **drawn.asked(True)), **drawn.asked(True))
    assert (restored.emitted == restored.engine.argmax(axis=-1)).all()
    assert (restored.emitted != table.best).mean() < 0.02


def test_a_neutral_fit_changes_no_gap(drawn):
    table = drawn.table()
    same = undo(table, fit(table, **drawn.asked(True)), **drawn.asked(True))
    assert np.allclose(same.engine, table.engine, atol=1e-12) and (same.emitted == table.emitted).all()


def test_where_an_engine_reports_bf16_the_variants_are_rounded_alike(drawn):
    table = drawn.table()
    assert as_reported(table) is table
    rounded = table.engine.astype(ml_dtypes.bfloat16).astype(np.float64)
    coarse = drawn.held(rounded)
    found = as_reported(coarse)
    assert np.array_equal(found.jitters, coarse.jitters.astype(ml_dtypes.bfloat16).astype(np.float64))
    assert measure(coarse).gates("amber") == ["KL"] and not measure(found).gates("amber")
    nothing = drawn.held(np.full_like(rounded, np.nan))
    assert as_reported(nothing) is nothing


def test_too_few_numbers_are_neutral(drawn):
    table = drawn.table().select(slice(0, 0))
    assert fit(table, []).neutral
    some = drawn.table().select(slice(0, 3))
    nothing = some.with_engine(np.full_like(some.engine, np.nan))
    assert fit(nothing, drawn.contexts[:3]).neutral
