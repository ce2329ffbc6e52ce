"""The reference with faults in it, as an engine: tiers, prefill and decode, jitter, what stays the reference's own."""

import numpy as np
import pytest

import qwenref
from qwenref.compare.errors import BadLogprobs
from qwenref.compare.faults import LIBRARY, find
from qwenref.compare.faulty import FaultyReference
from qwenref.compare.planted import ROWS
from qwenref.compare.scoring import Task, score
from qwenref.engines import ALL, checked
from qwenref.errors import CapabilityMissing, InputError, UnknownName
from qwenref.logprobs import log_softmax

QUESTION = [{"role": "user", "content": "How much is 31 plus 23?"}]


@pytest.fixture(scope="module")
def ids(tiny):
    return list(qwenref.render(tiny, QUESTION).ids)


def values(rows):
    """float64 [n, K] of rows that hold the whole vocabulary, by id."""
    return np.array([row.logprobs[np.argsort(row.ids)] for row in rows])


def test_a_clean_one_scores_and_decodes_as_the_reference(tiny, ids):
    engine = FaultyReference(tiny)
    scores = engine.score(ids, ALL)
    assert np.array_equal(scores.dense, tiny([ids]).logits[0])
    assert np.array_equal(values(scores.rows), log_softmax(tiny([ids]).logits[0]))
    done, own = (
        engine.generate(ids, 12, ALL),
        tiny.generate(ids, max_new_tokens=12, return_logprobs="raw", top_logprobs=3),
    )
    assert done.output_ids == list(own.new_ids) and done.prompt_ids == ids
    assert [row.chosen_logprob for row in done.rows] == own.logprobs.chosen.tolist()
    assert engine.tokenize("a <|im_end|>") == tiny.tokenizer.encode("a <|im_end|>")
    assert engine.render(QUESTION).ids == ids


def test_a_fault_of_decode_shows_in_decode_alone(tiny, ids):
    clean, faulty = FaultyReference(tiny), FaultyReference(tiny, "rope-q+1/decode")
    assert np.array_equal(clean.score(ids, ALL).dense, faulty.score(ids, ALL).dense)
    a, b = clean.generate(ids, 8, ALL), faulty.generate(ids, 8, ALL)
    first, *behind = np.abs(np.exp(values(a.rows)) - np.exp(values(b.rows))).max(axis=1)
    assert first == 0 and max(behind) > 1e-6


def test_faults_may_be_objects_or_names_and_several(tiny, ids):
    both = FaultyReference(tiny, "gate-off", find("temperature-0.8"))
    off = find("gate-off").open(tiny)
    expected = log_softmax(off([ids]).logits[0])
    assert np.array_equal(values(both.score(ids, ALL).rows), expected)
    [row] = both.generate(ids, 1, ALL).rows
    np.testing.assert_allclose(values([row])[0], log_softmax(off([ids]).logits[0, -1] / 0.8), atol=1e-9)
    assert both.capabilities().kind == "processed" and FaultyReference(tiny, "gate-off").capabilities().kind == "raw"


def test_each_tier_gives_its_part_and_refuses_the_rest(tiny, ids):
    text = tiny.tokenizer.decode(ids)
    engines = {tier: FaultyReference(tiny, tier=tier) for tier in "ABCD"}
    for tier, engine in engines.items():
        assert engine.capabilities().tier == tier
    for tier in "BCD":
        with pytest.raises(CapabilityMissing):
            engines[tier].score(ids, 5)
    b = engines["B"].generate(ids, 4, ALL)
    assert b.output_ids and all(len(row.ids) == 20 for row in b.rows)
    for tier in "CD":
        with pytest.raises(CapabilityMissing):
            engines[tier].generate(ids, 4, 5)
        with pytest.raises(CapabilityMissing):
            engines[tier].render(QUESTION)
        with pytest.raises(CapabilityMissing):
            engines[tier].tokenize("a")
    c, d = engines["C"].generate(text, 4, 5), engines["D"].generate(text, 4, 5)
    assert c.output_ids is d.output_ids is c.prompt_ids is d.prompt_ids is None
    assert c.text == d.text == tiny.tokenizer.decode(b.output_ids)
    assert [len(row.ids) for row in c.rows] == [5] * 4 and d.rows == ()
    with pytest.raises(CapabilityMissing):
        engines["D"].config()
    with pytest.raises(InputError, match="tier"):
        FaultyReference(tiny, tier="E")
    with pytest.raises(UnknownName):
        FaultyReference(tiny, "no-such-fault")


def test_a_jitter_is_a_variant_of_roundings_and_repeats(tiny, ids):
    clean, one, other = (FaultyReference(tiny, jitter=seed).score(ids, 5).dense for seed in (None, 3, 4))
    assert np.array_equal(one, FaultyReference(tiny, jitter=3).score(ids, 5).dense)
    assert 0 < np.abs(one - clean).max() < 1 and not np.array_equal(one, other)
    with qwenref.numerics.jitter(3):
        assert np.array_equal(one, tiny([ids]).logits[0])


def test_an_engine_that_does_not_repeat_differs_from_call_to_call(tiny, ids):
    engine = FaultyReference(tiny, repeatable=False)
    assert not np.array_equal(engine.score(ids, 5).dense, engine.score(ids, 5).dense)


def test_prompt_faults_meet_texts_and_conversations_and_leave_ids_alone(tiny, ids):
    text = tiny.tokenizer.decode(ids)
    begun = FaultyReference(tiny, "bos-added")
    assert begun.tokenize("ab") == [1254, *tiny.tokenizer.encode("ab")]
    assert begun.render(QUESTION).ids == [1254, *ids] and begun.render(QUESTION).text == text
    assert begun.generate(text, 1, 5).prompt_ids == [1254, *ids] and begun.generate(ids, 1, 5).prompt_ids == ids
    empty = FaultyReference(tiny, "think-empty")
    assert empty.render(QUESTION).text == text.removesuffix("<think>\n") + "<think>\n\n</think>\n\n"
    assert empty.tokenize(text) == ids and empty.generate(text, 1, 5).prompt_ids != ids


def test_a_truncated_prompt_is_shown_as_it_was_read(tiny, ids):
    engine = FaultyReference(tiny, "context-half")
    assert engine.generate(ids, 1, 5).prompt_ids == ids[len(ids) // 2 + len(ids) % 2 :]
    assert len(engine.score(ids, 5).rows) == len(ids) // 2


def test_a_stop_fault_ends_elsewhere(tiny, ids):
    clean = FaultyReference(tiny).generate(ids, 300, 1)
    assert (
        clean.finish == "stop" and clean.stop_id == 1256 and clean.text == tiny.tokenizer.decode(clean.output_ids[:-1])
    )
    past = FaultyReference(tiny, "eos-ignored").generate(ids, len(clean.output_ids) + 3, 1)
    assert past.finish == "length" and past.output_ids[: len(clean.output_ids)] == clean.output_ids


def test_a_temperature_draws_and_a_penalty_does_not(tiny, ids):
    open_ended = tiny.tokenizer.encode("The mill at Quill")
    drawn = [FaultyReference(tiny, *name).generate(open_ended, 40, 1).output_ids for name in ((), ["temperature-1.0"])]
    assert drawn[0] != drawn[1]
    penalised = FaultyReference(tiny, "presence-1.5").generate(ids, 40, ALL)
    assert penalised.output_ids == FaultyReference(tiny, "presence-1.5").generate(ids, 40, 1).output_ids
    assert all(row.chosen == row.ids[0] for row in penalised.rows)


def test_what_sampling_cuts_away_is_reported_as_impossible(tiny, ids):
    done = FaultyReference(tiny, "top-k-20", "temperature-0.8").generate(ids, 3, ALL)
    for row in done.rows:
        assert np.isfinite(row.logprobs).sum() == 20 and np.isneginf(row.logprobs[20:]).all()


def test_reported_logprobs_are_rounded_cut_or_probabilities(tiny, ids):
    clean = FaultyReference(tiny).score(ids, 20).rows
    few = FaultyReference(tiny, "logprobs-top5").score(ids, 20)
    assert few.dense is None and all(len(row.ids) == len(row.logprobs) == 5 for row in few.rows)
    rounded = FaultyReference(tiny, "logprobs-bf16").score(ids, 20).rows
    assert all(np.allclose(a.logprobs, b.logprobs, rtol=2**-8) for a, b in zip(rounded, clean, strict=True))
    assert checked.resolution(np.concatenate([row.logprobs for row in rounded])) == "bf16"
    halves = find("logprobs-bf16").logprobs(np.log([0.5, 0.5]))
    assert np.exp(halves).sum() > 1.001 and checked.row([1, 2], halves).logprobs.tolist() == halves.tolist()
    with pytest.raises(BadLogprobs, match="above 1"):
        checked.row([1, 2], halves + 1e-5)
    with pytest.raises(BadLogprobs, match="probabilities in place"):
        FaultyReference(tiny, "logprobs-probabilities").score(ids, 20)


def test_an_engine_may_write_what_stands_for_a_picture(tiny, ids):
    written = [*ids, 1263, 1267, 1267, 5]  # vision_start, video_pad
    engine, embedded = FaultyReference(tiny), tiny.model.language_model.embed_tokens(np.array([written]))
    expected = tiny(inputs_embeds=embedded).logits[0]
    np.testing.assert_allclose(engine.score(written, 5).dense, expected, atol=1e-4)
    assert np.isfinite(FaultyReference(tiny, "head-tied").generate(ids, 40, 5).rows[-1].logprobs).all()
    [scored] = score(tiny, [Task(tuple(written), len(ids), ("truth", "fp32"))])
    np.testing.assert_allclose(scored.logprobs[1], np.sort(log_softmax(expected[len(ids)]))[::-1][:20], atol=1e-4)


def test_a_cache_hit_is_repaired_without_the_cache(tiny, ids):
    clean, engine = FaultyReference(tiny).generate(ids, 6, ALL), FaultyReference(tiny, "state-stale-half")
    hit = engine.generate(ids, 6, ALL)
    assert hit.meta["cached_tokens"] == len(ids) and not np.array_equal(values(hit.rows[1:2]), values(clean.rows[1:2]))
    engine.prefix_cache = False
    cold = engine.generate(ids, 6, ALL)
    assert cold.meta["cached_tokens"] == 0 and np.array_equal(values(cold.rows), values(clean.rows))


def test_its_config_says_what_such_an_engine_would_and_no_more(tiny):
    clean, kept = FaultyReference(tiny).config(), FaultyReference(tiny, "state-bf16").config()
    assert kept.pop("state_dtype") == "bfloat16" and clean.pop("state_dtype") == "float32" and kept == clean
    assert FaultyReference(tiny, "int8-g32", "gate-off").config() == FaultyReference(tiny).config()


def test_activations_are_those_of_the_faulty_model(tiny, ids):
    sites = ["model.language_model.layers.3.self_attn.gated"]
    engine, clean = FaultyReference(tiny, "gate-off"), FaultyReference(tiny)
    a, b = (one.activations(ids, sites)[sites[0]] for one in (engine, clean))
    with qwenref.capture(tiny, "layers.3.self_attn.context") as captured:
        tiny([ids])
    assert np.array_equal(a, captured["layers.3.self_attn.context"]) and not np.array_equal(a, b)


def test_every_row_of_the_self_test_has_its_fault():
    numbers = {fault.number for fault in LIBRARY.values()} - {None}
    elsewhere = {28, 30, 35, 37}  # experts; weights of the engine; no repetition; two faults at once
    assert numbers == set(range(1, 40)) - elsewhere


def test_every_row_of_the_self_test_is_planted(tiny):
    assert {row.number for row in ROWS} == set(range(1, 40)) - {28}
    assert len({row.id + row.suite for row in ROWS}) == len(ROWS)
    left = {row.id for row in ROWS if not row.fits(tiny)}
    assert left == {"04 rope-theta-1e4", "09 head-untied", "17 regex-qwen2"}  # what makes no difference to this one


def test_the_sides_of_a_row_are_a_sound_model_and_an_engine_with_its_fault(tiny, ids):
    for row in ROWS:
        if row.number in (24, 26, 30) and row.fits(tiny):
            model, engine = row.sides(tiny)
            same = np.array_equal(engine.score(ids, 1).dense, model([ids]).logits[0])
            assert same == row.weights and (model is tiny) == (row.probe is None and not row.weights), row.id
