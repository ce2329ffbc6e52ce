"""Recorded runs: what an engine answered comes back from the file, and every fault of a file is named with its line."""

import copy
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import qwenref
from qwenref import engines
from qwenref.compare.errors import (
    BadLogprobs,
    BadTokenIds,
    EngineContractViolation,
    NotRecorded,
    OutputExists,
    RecordAlignment,
    RecordError,
)
from qwenref.compare.gather import gather
from qwenref.engines import run_file, run_imports
from qwenref.engines.record import record
from qwenref.engines.recorded import Recorded
from qwenref.errors import InputError, QwenrefWarning


def item(name, ids, new, text=None):
    return SimpleNamespace(id=name, ids=ids, new=new, text=text)


SUITE = SimpleNamespace(name="two", sha256="ab", prompts=(item("p0", [300, 301, 302], 6), item("p1", [7, 8], 4)))


@pytest.fixture(scope="module")
def reference():
    return engines.open("reference:tiny")


@pytest.fixture(scope="module")
def written(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    assert record(reference, SUITE, path, k=5, continuations=lambda ids, n: [9] * n) == 6
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


# There and back


def test_a_recorded_engine_answers_as_the_engine_did(reference, written):
    run = engines.open(str(written))
    assert run.capabilities().tier == "A" and run.capabilities().prompt_logprobs == 5
    for prompt in SUITE.prompts:
        there, back = (engine.generate(prompt.ids, prompt.new, 5) for engine in (reference, run))
        assert back[:2] == there[:2] and (back.finish, back.stop_id) == (there.finish, there.stop_id)
        same_rows(there.rows, back.rows)
        for output in (there.output_ids, [9] * prompt.new):
            there_scores, back_scores = (engine.score(prompt.ids + output, 5) for engine in (reference, run))
            same_rows(there_scores.rows, back_scores.rows)
    assert run.config()["model"] == reference.config()["model"]


def same_rows(there, back):
    assert len(there) == len(back)
    for a, b in zip(there, back, strict=True):
        assert np.array_equal(a.ids, b.ids) and a.chosen == b.chosen
        np.testing.assert_allclose(b.logprobs, a.logprobs, rtol=1e-8)
        assert (a.chosen_logprob is None) == (b.chosen_logprob is None)


def test_a_shorter_answer_is_cut_from_a_longer_one_and_a_longer_one_is_no_fault(written):
    run, prompt = engines.open(str(written)), SUITE.prompts[0].ids
    whole, cut = run.generate(prompt, 6, 3), run.generate(prompt, 2, 3)
    assert cut.output_ids == whole.output_ids[:2] and cut.finish == "length" and len(cut.rows) == 2
    assert run.generate(prompt, 50, 3).finish == "cancelled"
    assert [len(row.ids) for row in whole.rows] == [3] * 6


def test_what_was_not_asked_then_is_not_answered_now(written):
    run = engines.open(str(written))
    for ask in (
        lambda: run.generate([1], 1, 1),
        lambda: run.generate("text", 1, 1),
        lambda: run.score([7, 8, 1], 1),
        lambda: run.generate([7, 8], 1, 1, {"temperature": 1}),
        lambda: run.tokenize("a"),
        lambda: run.activations([1], ["norm"]),
    ):
        with pytest.raises(NotRecorded):
            ask()
    assert run.generate([7, 8], 1, 1, {"temperature": 0, "top_p": 1}).output_ids


def test_a_comparison_asks_a_run_what_it_has_and_says_what_it_lacks(reference, written):
    model = reference.model
    prompts = (*SUITE.prompts, item("p2", [5, 6], 3))
    suite = SimpleNamespace(name="three", prompts=prompts, texts=["a"], conversations=())
    seen = gather(model, engines.open(str(written)), suite)
    assert set(seen.completions) == {0, 1} and not seen.differences and "repeats" not in seen.asked
    assert {found["code"] for found in seen.findings} == {"not-recorded"}
    own = [way for way in seen.trajectories if way.origin == "engine"]
    assert len(own) == 2 and all(way.prefill is not None and way.decode is not None for way in own)


def test_a_run_in_bfloat16_keeps_its_resolution(reference, tmp_path):
    class Coarse:
        name = "coarse"

        def capabilities(self):
            return reference.capabilities()._replace(config=False, prompt_logprobs=0, output_logprobs=20)

        def generate(self, prompt, n, k, sampling=None):
            done = reference.generate(prompt, n, k)
            return done._replace(rows=[row._replace(logprobs=coarse(row.logprobs)) for row in done.rows])

    def coarse(values):
        return (np.float32(values).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)

    path = tmp_path / "run.jsonl"
    record(Coarse(), SUITE, path)
    header = run_file.read(path).header
    assert header["logprobs"]["dtype"] == "bf16" and header["engine"]["name"] == "coarse"
    assert engines.open(str(path)).capabilities().tier == "B"


def test_an_engine_of_text_is_recorded_as_text(tmp_path, reference):
    class Text:
        name = "text"

        def capabilities(self):
            return engines.Capabilities()

        def generate(self, prompt, n, k, sampling=None):
            return engines.Completion(None, None, prompt.upper(), "stop")

    path = tmp_path / "run.jsonl"
    suite = SimpleNamespace(prompts=(item("a", [1, 2], 3, "hi\u2028"), item("b", [3], 3)))
    assert record(Text(), suite, path) == 1
    run = engines.open(str(path))
    assert run.capabilities().tier == "D" and run.generate("hi\u2028", 3, 0).text == "HI\u2028"


# Writing


def test_a_file_is_not_written_over_unless_asked(reference, written):
    before = written.read_bytes()
    with pytest.raises(OutputExists, match="resume=True(.|\n)*force=True"):
        record(reference, SUITE, written)
    assert written.read_bytes() == before


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 5, 6])
def test_an_interrupted_recording_goes_on_where_it_was(reference, written, tmp_path, kept):
    """Cut inside of the line that was being written: the file that results is the whole one."""
    path, whole = tmp_path / "run.jsonl", written.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[: kept + 1]) + "".join(lines[kept + 1 : kept + 2])[:40], encoding="utf-8")
    asked = []

    class Counting(type(reference)):
        def generate(self, prompt, *rest):
            asked.append(prompt)
            return super().generate(prompt, *rest)

    engine = Counting(reference.model)
    assert record(engine, SUITE, path, k=5, continuations=lambda ids, n: [9] * n, resume=True) == 6
    assert sorted(path.read_text(encoding="utf-8").splitlines()) == sorted(whole.splitlines())
    assert len(asked) == {0: 2, 1: 1, 2: 1, 3: 1, 5: 0, 6: 0}[kept]


def test_the_run_of_another_engine_suite_or_width_is_not_gone_on_with(reference, written, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(written.read_bytes())
    other = SimpleNamespace(name="other", sha256="cd", prompts=SUITE.prompts)
    for arguments in (
        (reference, other, 5),
        (engines.open("reference:tiny?numerics=hf"), SUITE, 5),
        (reference, SUITE, 6),
    ):
        with pytest.raises(OutputExists, match="the run of another"):
            record(arguments[0], arguments[1], path, k=arguments[2], resume=True)
    assert path.read_bytes() == written.read_bytes()


def test_every_answer_is_on_disk_before_the_next_question(reference, tmp_path):
    path, seen = tmp_path / "run.jsonl", []

    class Ending(type(reference)):
        def generate(self, prompt, *rest):
            seen.append(len(run_file.read(path).records) if path.exists() else 0)
            if len(seen) == 2:
                raise EngineContractViolation("ends here")
            return super().generate(prompt, *rest)

    with pytest.raises(EngineContractViolation):
        record(Ending(reference.model), SUITE, path, k=5)
    assert seen == [0, 2] and len(run_file.read(path).records) == 2


# Faults of files.  Line 1 is the header, line 2 the answer to p0 (3 + 6 ids), line 3 its score.


def change(line, *keys):
    """An edit: the value at some keys of a line becomes the last of them."""

    def edit(lines):
        *path, last, value = keys
        target = lines[line - 1]
        for key in path:
            target = target[key]
        target[last] = value

    return edit


def drop(line, *keys):
    def edit(lines):
        *path, last = keys
        target = lines[line - 1]
        for key in path:
            target = target[key]
        del target[last]

    return edit


def many(*edits):
    return lambda lines: [edit(lines) for edit in edits]


NAN, INF = float("nan"), float("inf")
FAULTS = {
    "another schema": (change(1, "schema", "qwenref.run/2"), RecordError, "line 1: no header.*qwenref.run/2"),
    "no schema": (drop(1, "schema"), RecordError, "line 1.*no schema"),
    "an engine that is a text": (change(1, "engine", "vllm"), RecordError, "line 1: engine"),
    "an id twice": (change(5, "id", "p0"), RecordError, "line 5: id 'p0' a second time"),
    "no id": (drop(2, "id"), RecordError, "line 2: no id"),
    "an id that is no text": (change(2, "id", 3), RecordError, "line 2: id"),
    "another path": (change(2, "path", "decoded"), RecordError, "line 2: path.*decoded"),
    "another finish": (change(2, "finish", "eos"), RecordError, "line 2: finish.*eos"),
    "neither ids nor text": (many(drop(2, "prompt_ids"), drop(2, "top")), RecordError, "line 2: neither"),
    "no ids": (change(2, "prompt_ids", []), BadTokenIds, "line 2: prompt_ids: no ids"),
    "a boolean id": (change(2, "output_ids", 1, True), BadTokenIds, "line 2: output_ids: id 1 is no whole number"),
    "a float id": (change(2, "output_ids", 1, 5.0), BadTokenIds, "line 2: output_ids: id 1 is no whole number"),
    "a negative id": (change(2, "prompt_ids", 2, -1), BadTokenIds, "line 2: prompt_ids: id 2 is outside"),
    "an id beyond the vocabulary": (change(2, "top", 3, "ids", 4, 1280), BadTokenIds, "line 2, position 6.*id 4"),
    "a stop id beyond it": (change(2, "stop_id", 9999), BadTokenIds, "line 2: stop_id"),
    "top that is no list": (change(2, "top", {}), RecordError, "line 2: top"),
    "places that are no numbers": (change(2, "top", 0, "pos", "3"), RecordError, "line 2: pos"),
    "an entry less": (drop(2, "top", 5), RecordAlignment, "line 2: places.*5 entries, 3 to 7.*3 to 8"),
    "an entry less in front": (drop(3, "top", 0), RecordAlignment, "line 3: places.*2 to 9.*1 to 8"),
    "a gap": (drop(2, "top", 2), RecordAlignment, "line 2: places"),
    "places out of order": (lambda lines: lines[1]["top"].reverse(), RecordAlignment, "line 2: places.*8 to 3"),
    "a place twice": (change(2, "top", 1, "pos", 3), RecordAlignment, "line 2: places"),
    "another chosen id": (change(2, "top", 1, "chosen", 1), RecordAlignment, "line 2, position 4: chosen"),
    "entries without ids": (change(2, "output_ids", None), RecordAlignment, "line 2: log-probabilities without ids"),
    "ids and values of two lengths": (drop(2, "top", 1, "logprobs", 4), BadLogprobs, "line 2, position 4.*5 and 4"),
    "values that are texts": (change(2, "top", 1, "logprobs", 0, "-1"), BadLogprobs, "line 2, position 4"),
    "NaN": (change(2, "top", 1, "logprobs", 0, NAN), BadLogprobs, "line 2, position 4.*nan"),
    "plus infinity": (change(2, "top", 1, "logprobs", 0, INF), BadLogprobs, "line 2, position 4.*inf"),
    "above 0": (change(2, "top", 1, "logprobs", 0, 0.5), BadLogprobs, "line 2, position 4: a log-probability above 0"),
    "chosen above 0": (change(2, "top", 1, "chosen_logprob", 0.5), BadLogprobs, "line 2, position 4: of the chosen"),
    "a sum above 1": (change(2, "top", 1, "logprobs", [-0.1] * 5), BadLogprobs, "line 2, position 4.*sum above 1"),
    "probabilities": (change(2, "top", 1, "logprobs", [0.5, 0.2, 0.1, 0, 0]), BadLogprobs, "position 4: probabilities"),
    "out of order": (change(2, "top", 1, "logprobs", [-1, -2, -5, -4, -9]), BadLogprobs, "position 4.*then -4 at"),
    "an id of a list twice": (change(2, "top", 1, "ids", [1, 2, 3, 4, 1]), BadLogprobs, "position 4: an id twice"),
}  # fmt: skip


@pytest.mark.parametrize("edit, error, message", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_file_is_named_with_its_line(written, tmp_path, edit, error, message):
    lines = copy.deepcopy(lines_of(written))
    edit(lines)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(error, match=f"(?s){message}") as caught:
        engines.open(str(path))
    if error in (RecordError, RecordAlignment):
        assert caught.value.line == int(str(caught.value).partition("line ")[2].partition(":")[0].partition(",")[0])
    if error is BadLogprobs:
        assert caught.value.position == 4
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no lines"),
        ("\n\n", "no lines"),
        ("{", "line 1: the last line is cut off"),
        ("[1]\n", "line 1: no header"),
        ('{"schema": "qwenref.run/1"}\nnonsense\n', "line 2: not JSON"),
        ('{"schema": "qwenref.run/1"}\n\n{"id": "a", "pa', "line 3: the last line is cut off(.|\n)*resume=True"),
        ('{"schema": "qwenref.run/1"}\n{"id": "a", "id": "b"}\n', "line 2: the name 'id' twice"),
        ('{"schema": "qwenref.run/1"}\n[]\n', "line 2: a list"),
        ('{"schema": "qwenref.run/1"}\n' + "[" * 100_000 + "\n", "line 2: not JSON"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_no_run_says_at_which_line(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError, match=message):
        engines.open(str(path))


def test_a_file_that_is_not_there_is_a_record_error(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        engines.open(str(tmp_path / "none.jsonl"))


def test_unknown_keys_are_warned_of_and_a_good_file_is_not(written, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines.open(str(written))
    for place in ((1,), (2,), (2, "top", 0)):
        lines = lines_of(written)
        change(*place, "colour", 1)(lines)
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        with pytest.warns(QwenrefWarning, match=f"line {place[0]}(.|\n)*'colour'"):
            engines.open(str(path))


def test_positions_without_log_probabilities_are_none_and_minus_infinity_is_kept(written, tmp_path):
    lines = lines_of(written)
    lines[1]["top"][1] |= {"ids": [], "logprobs": [], "chosen_logprob": None}
    lines[1]["top"][2]["logprobs"][2:] = [None] * 3
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = engines.open(str(path)).generate(SUITE.prompts[0].ids, 6, 5).rows
    assert rows[1] is None and np.isneginf(rows[2].logprobs[2:]).all() and rows[0] is not None


# Outputs that other programs saved

VLLM = {
    "request_id": "7", "prompt": "ab", "prompt_token_ids": [5, 6, 7],
    "prompt_logprobs": [None, {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}, "9": {"logprob": -1.5}},
                        {"1": -0.7, "7": -3.0}],
    "outputs": [{"index": 0, "text": "x", "token_ids": [8, 2], "finish_reason": "stop", "stop_reason": None,
                 "logprobs": [{"8": {"logprob": -0.25}, "4": {"logprob": -2.0}}, {"2": -0.1, "3": -3}]}],
    "finished": True, "num_cached_tokens": 0, "lora_request": None,
}  # fmt: skip
DIFR = {
    "config": {"model": "a/b", "temperature": 0.0},
    "samples": [{"prompt_token_ids": [1, 2], "outputs": [{"token_ids": [4, 5]}]}],
}


@pytest.mark.parametrize(
    "text", [json.dumps([VLLM]), json.dumps(VLLM), json.dumps(VLLM) + "\n" + json.dumps(VLLM | {"request_id": "8"})]
)
def test_saved_outputs_of_vllm_are_a_run(tmp_path, text):
    path = tmp_path / "outputs.json"
    path.write_text(text)
    run = engines.open(f"recorded:{path}")
    assert run.capabilities().tier == "A" and run.capabilities().output_logprobs == 2
    done = run.generate([5, 6, 7], 2, 2)
    assert (
        done.output_ids == [8, 2] and done.text == "x" and done.finish == "stop" and done.meta == {"cached_tokens": 0}
    )
    assert done.rows[0].ids.tolist() == [8, 4] and done.rows[0].chosen_logprob == -0.25
    scored = run.score([5, 6, 7], 2).rows
    assert (
        scored[1].ids.tolist() == [1, 7]
        and scored[1].chosen == 7
        and scored[1].chosen_logprob == -3
        and scored[2] is None
    )


def test_samples_of_difr_are_a_run(tmp_path):
    path = tmp_path / "samples.json"
    path.write_text(json.dumps(DIFR, indent=1))
    run = engines.open(f"recorded:{path}")
    assert run.generate([1, 2], 2, 0).output_ids == [4, 5] and run.generate([1, 2], 2, 0).rows == []
    assert run.run.header["sampling"] == {"temperature": 0.0} and run.config()["model"] == {"id": "a/b"}
    assert Recorded(run_imports.imported(DIFR)).capabilities().tier == "D"


@pytest.mark.parametrize(
    "keys, error, message",
    [
        (("prompt_token_ids", [1, True]), BadTokenIds, "output 0: prompt_token_ids: id 1"),
        (("outputs", 3), RecordError, "output 0: outputs"),
        (("outputs", [{}]), RecordError, "outputs.0.(.|\n)*token_ids"),
        (("prompt_logprobs", [None, {}]), RecordError, "prompt_logprobs(.|\n)*2, one for each"),
        (("prompt_logprobs", [None, {"a": 1}, {}]), RecordError, "prompt_logprobs.0."),
        (("prompt_logprobs", [None, {"6": {"rank": 1}}, {}]), RecordError, "prompt_logprobs.0."),
        (("prompt_logprobs", [None, {"6": 12.5, "7": 3.0}, {}]), BadLogprobs, "above 0(.|\n)*normalised"),
    ],
)
def test_a_fault_of_saved_outputs_is_named(keys, error, message):
    with pytest.raises(error, match=message):
        run_imports.imported([{**VLLM, keys[0]: keys[1]}])


def test_other_json_is_no_saved_output(tmp_path):
    for document in ([1], "a", {"samples": 3}, [{"prompt": "x"}]):
        with pytest.raises(RecordError, match="no saved outputs"):
            run_imports.imported(document)
    with pytest.raises(InputError, match="k\n"):
        Recorded(run_imports.imported(DIFR)).generate([1, 2], 1, -1)
    assert qwenref.errors.InputError in RecordError.__mro__
