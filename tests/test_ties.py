"""Equal and nearly equal logits: which id is taken, and at which steps a program with fewer bits may take another."""

import json
from pathlib import Path

import numpy as np
import pytest

import qwenref
from qwenref.errors import InputError
from qwenref.ties import undecided

RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
TEXT_ONLY = [line for line in EXAMPLES if not {"images", "video_frames"} & set(line)]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


def with_logits(model, change):
    """Let the head return what `change(logits)` makes of its answer."""
    return model.lm_head.register_forward_hook(lambda module, args, logits: change(logits.copy()))


def test_F12_the_lowest_of_equal_logits_wins_and_the_tie_is_told(model):
    def tie(logits):
        logits[..., [9, 700, 8]] = 1e6
        return logits

    for sampler in (None, qwenref.Sampler(temperature=0)):
        with with_logits(model, tie):
            out = model.generate([1, 2], max_new_tokens=7, sampler=sampler)
        assert out.new_ids == [8] * 7 and out.margins.tolist() == [0] * 7
        assert out.undecided("float64").tolist() == list(range(7))
        assert "the two largest logits are equal at new token 0, 1, 2, 3, 4, … 2 more" in repr(out)


def test_F12_steps_that_rounding_decides_are_undecided_in_that_type(model):
    """Logits of 20 and less: neighbours are 2**-3 apart in bfloat16, 2**-6 in float16, 2**-19 in float32."""
    gaps = [0.0, 2.0**-19, 2.0**-7, 2.0**-6, 2.0**-4, 2.0**-3, 3.0]
    steps = iter(gaps)

    def near(logits):
        logits[:] = 0
        logits[..., 30], logits[..., 4] = 20.0, 20.0 - next(steps)
        return logits

    with with_logits(model, near):
        out = model.generate([1, 2], max_new_tokens=len(gaps), stop=[])
    assert out.margins.dtype == np.float64 and out.margins.tolist() == gaps
    for dtype, count in (("float64", 1), (np.float32, 1), ("float16", 3), ("bfloat16", 5)):
        assert out.undecided(dtype).tolist() == list(range(count))
    assert out.undecided().tolist() == list(range(5)) and out.new_ids == [4] + [30] * 6
    assert undecided([(20, 20 - 2.0**-20), (-16, -16 - 2.0**-19), (2.0**-9, 0)], "float32").tolist() == [0]
    assert undecided([(0, 0), (3, -np.inf), (1e-30, 0)], "bfloat16").tolist() == [0]  # nothing beside, nothing near
    for dtype in ("int8", "bf16", None, 5):
        with pytest.raises(InputError, match="undecided: dtype"):
            out.undecided(dtype)


def test_F12_margins_are_those_of_the_golden_runs(model):
    """Written down to four places by the program that made them, whose logits are within 1e-3 of ours."""
    tried = 0
    for line in TEXT_ONLY[:12]:
        out = model.generate(line["prompt_ids"], return_logits=True)
        two = np.sort(out.logits.astype(np.float64), axis=1)[:, -2:]
        np.testing.assert_array_equal(out.margins, two[:, 1] - two[:, 0])
        if out.new_ids == line["output_ids"]:
            assert out.margins.min() == pytest.approx(line["min_margin"], abs=2e-3 + 5e-5)
            tried += 1
    assert tried > 8
    rows = model.generate([TEXT_ONLY[1]["prompt_ids"]] * 2, max_new_tokens=3)
    assert [row.tolist() for row in rows.margins] == [rows.rows[0].margins.tolist()] * 2
    assert len(rows.undecided()) == 2 and model.generate([1], max_new_tokens=0).margins.shape == (0,)
