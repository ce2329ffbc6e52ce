"""The report of a comparison: its document, what it refuses, what it never shows, as text, as JUnit and in tests."""

import json
import pickle
import re
import xml.etree.ElementTree as xml

import compare_documents
import jsonschema
import numpy as np
import pytest

from qwenref.compare import document as documents
from qwenref.compare.errors import Disagreement, OutputExists, ReportError
from qwenref.compare.report import ARRAYS, Report
from qwenref.compare.wording import CAUSES, CLASSES, CONFIDENCES, TIERS, verdict
from qwenref.plain import ascii_form

SCHEMA = jsonschema.Draft202012Validator(documents.schema())


def blank(**fields):
    return Report({"engine": {"name": "e"}, "reference": {"model": "m"}, **fields})


@pytest.mark.parametrize("made", [compare_documents.document, compare_documents.clean, lambda: blank().to_dict()])
def test_documents_keep_to_the_schema(made):
    SCHEMA.validate(Report(made()).to_dict())


def test_the_schema_is_one_and_knows_every_field():
    jsonschema.Draft202012Validator.check_schema(documents.schema())
    rules = documents.schema()["properties"]
    assert tuple(rules) == documents.FIELDS
    assert set(rules["cause"]["enum"]) == set(CAUSES) and set(rules["tier"]["enum"]) == {*TIERS, None}
    assert set(rules["confidence"]["enum"]) == {*CONFIDENCES, None}
    assert set(rules["flips"]["items"]["properties"]["class"]["enum"]) == set(CLASSES)


def test_the_document_of_these_tests_fills_every_field():
    def missing(rule, value, path):
        rule = rule.get("anyOf", [rule])[0]
        if rule.get("type") == "array":
            for item in value if isinstance(rule["items"], dict) else ():
                yield from missing(rule["items"], item, path)
        for name, inner in rule.get("properties", {}).items():
            if name not in value:
                yield f"{path}.{name}"
            elif value[name] is not None:
                yield from missing(inner, value[name], f"{path}.{name}")

    filled = compare_documents.document()
    assert not list(missing(documents.schema(), filled, ""))
    assert [name for name, value in filled.items() if value in (None, [], {})] == ["arbiter"]
    assert set(compare_documents.arrays()) == set(ARRAYS)


def test_fields_are_attributes_and_nothing_else_is():
    report = compare_documents.report()
    assert (report.status, report.cause, report.tier) == ("DIVERGED", "kernels", "A") and not report.agrees
    assert set(documents.FIELDS) < set(dir(report))
    with pytest.raises(AttributeError, match="'Report' object has no attribute 'statuss'"):
        report.statuss  # noqa: B018
    again = pickle.loads(pickle.dumps(report))
    assert again.document == report.document and set(again.arrays) == set(report.arrays)


BAD = [
    ({"status": "WRONG"}, "status", "report: status\n    found    WRONG\n    expected AGREE, "),
    ({"stages": {}}, "stages", "expected a list"),
    ({"stages": [{"id": "S1", "name": "n"}]}, "stages[0].verdict", "found    nothing"),
    ({"flips": [{"prompt": 1, "pos": 2, "class": "bad"}]}, "flips[0].class", "tie, benign, ambiguous, non-benign"),
    ({"engine": {}}, "engine.name", "expected the field"),
    ({"suite": []}, "suite", "found    a list\n    expected an object"),
    ({"localisation": {"sites": []}}, "localisation.first_bad", "found    nothing"),
    ({"arbiter": {"outside": [], "reports": [{"schema": 1}]}}, "schema", "expected qwenref.compare/1"),
]


@pytest.mark.parametrize("change,path,message", BAD, ids=[path for _, path, _ in BAD])
def test_a_document_that_displays_cannot_rely_on_is_refused(change, path, message):
    with pytest.raises(ReportError) as caught:
        Report(compare_documents.document(**change))
    assert caught.value.path == path and message in str(caught.value)
    assert not SCHEMA.is_valid({**compare_documents.document(), **change})


def test_unknown_fields_and_arrays_are_refused():
    with pytest.raises(ReportError, match="no field 'verdikt'"):
        blank(verdikt=1)
    with pytest.raises(ReportError, match="no array 'kld'"):
        Report(compare_documents.document(), {"kld": [1.0]})
    with pytest.raises(ReportError, match="no array '1.kl'"):  # there is one engine
        Report(compare_documents.document(), {"1.kl": [1.0]})


def test_arrays_of_two_engines_come_back_from_their_file(tmp_path):
    sides = [compare_documents.clean(), compare_documents.document()]
    arrays = {"1.kl": np.arange(3.0), "2.kl": np.arange(4.0), "2.flip": np.arange(4)}
    report = Report(compare_documents.document(arbiter={"outside": [], "reports": sides}), arrays)
    report.to_json(tmp_path / "two.json")
    left, right = Report.load(tmp_path / "two.json").sides
    assert set(left.arrays) == {"kl"} and set(right.arrays) == {"kl", "flip"} and len(right.arrays["kl"]) == 4
    assert right.status == "DIVERGED" and report.sides[0].sides[0].arrays["kl"].tolist() == [0, 1, 2]


def test_numbers_of_numpy_become_plain_and_what_is_not_finite_null():
    stats = {"R": {"value": np.float32(1.5), "ci": (np.nan, np.inf)}, "x": {"n": np.arange(3), "flag": np.bool_(True)}}
    found = blank(stats=stats).to_dict()["stats"]
    assert found == {"R": {"value": 1.5, "ci": [None, None]}, "x": {"n": [0, 1, 2], "flag": True}}
    assert type(found["x"]["n"][0]) is int and type(found["x"]["flag"]) is bool


def test_a_report_comes_back_from_its_file(tmp_path):
    report = compare_documents.report()
    report.to_json(tmp_path / "run.json")
    again = Report.load(tmp_path / "run.json")
    assert again.document == report.document  # the document of these tests names the file that is written
    assert all(np.array_equal(again.arrays[name], array) for name, array in report.arrays.items())
    with pytest.raises(OutputExists, match="run.json|run.positions.npz"):
        report.to_json(tmp_path / "run.json")
    report.to_json(tmp_path / "run.json", force=True)
    (tmp_path / "run.positions.npz").unlink()
    assert Report.load(tmp_path / "run.json").arrays == {}
    with pytest.raises(FileNotFoundError, match="no folder"):
        report.to_junit(tmp_path / "no" / "run.html")


def test_a_file_that_is_no_report_is_refused(tmp_path):
    for text, message in [
        ("{", "no report"),
        ("[]", "report: a list"),
        ('{"schema": "qwenref.compare/2"}', "compare/1"),
    ]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ReportError, match=message):
            Report.load(tmp_path / "bad.json")


def test_the_same_report_is_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        compare_documents.report().to_json(tmp_path / name / "run.json")
        compare_documents.report().to_html(tmp_path / name / "run.html")
    for name in ("run.json", "run.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# ---- in an engine's tests ------------------------------------------------------------------------------------------


def test_assert_agrees_raises_unless_the_engine_is_inside_and_R_small_enough():
    inside = Report(compare_documents.clean())
    inside.assert_agrees()
    with pytest.raises(
        Disagreement, match=r"inside the reference's envelope\n    found    R 1.07\n    expected at most 1.05"
    ):
        inside.assert_agrees(max_R=1.05)
    outside = compare_documents.report()
    with pytest.raises(AssertionError, match="outside the reference's envelope") as caught:
        outside.assert_agrees(max_R=100)  # no looser than the verdict
    assert caught.value.report is outside and caught.value.exit_code == 1
    with pytest.raises(Disagreement, match="undecided") as caught:
        blank().assert_agrees()
    assert caught.value.exit_code == 2


# ---- words ---------------------------------------------------------------------------------------------------------


def test_an_engine_is_inside_or_outside_and_never_called_wrong():
    for status in documents.schema()["properties"]["status"]["enum"]:
        said = verdict(compare_documents.document(status=status))
        assert "engine vllm+http://host:8000" in said and not re.search("wrong|incorrect|buggy", said)
    assert verdict(compare_documents.document()) == "engine vllm+http://host:8000 is outside the reference's envelope"


@pytest.mark.parametrize(
    "outside,near,words",
    [
        (["b"], None, "engine b is outside the reference's envelope"),
        (["a", "b"], None, "both: engines a and b are outside the reference's envelope"),
        ([], {"prompt": "p1", "pos": 1017}, "neither; near-tie at position 1,017 of prompt p1"),
        ([], None, "neither: both engines are inside the reference's envelope"),
    ],
)
def test_of_two_engines_the_one_outside_is_named(outside, near, words):
    found = [{"code": "config-unknown", "severity": "info", "message": "nothing is said"}]
    sides = [compare_documents.clean(engine={"name": name}, findings=found) for name in "ab"]
    report = Report(compare_documents.clean(arbiter={"outside": outside, "near_tie": near, "reports": sides}))
    assert str(report).count("info config-unknown: nothing is said") == 2  # of each
    SCHEMA.validate(report.to_dict())
    assert report.verdict == words and str(report).startswith(words)
    sides[0]["status"] = "INCONCLUSIVE"
    undecided = compare_documents.clean(arbiter={"outside": [], "near_tie": None, "reports": sides})
    assert verdict(undecided).startswith("undecided")


# ---- secrets -------------------------------------------------------------------------------------------------------

SECRET = "hunter2"  # in each of the places where it might come in
LEAKS = {
    "engine": {
        "name": f"openai+http://me:{SECRET}@host:1/v1",
        "api_key": SECRET,
        "flags": {"Authorization": f"Bearer {SECRET}"},
    },
    "repro": {
        "argv": [
            "qwenref",
            "compare",
            "m",
            "--engine",
            f"vllm+http://{SECRET}@h",
            "--api-key",
            SECRET,
            f"--key={SECRET}",
            f"http://h/?token={SECRET}&a=1",
        ],
        "env": {"QWENREF_API_KEY": SECRET, "HF_TOKEN": SECRET, "QWENREF_NUM_THREADS": "2"},
    },
    "summary": f"at https://u:{SECRET}@host it said 'Authorization: Bearer {SECRET}'",
    "findings": [
        {"code": "c", "severity": "info", "message": f"sent api_key={SECRET}", "evidence": {"password": SECRET}}
    ],
    "stages": [
        {"id": "S0", "name": "identify", "verdict": "green", "value": None, "gate": None, "detail": f"secret: {SECRET}"}
    ],
    "config_diff": [{"key": "url", "ref": None, "engine": f"http://a:{SECRET}@b/"}],
}


def test_no_secret_is_in_any_form_of_a_report(tmp_path):
    report = Report(compare_documents.document(**LEAKS))
    forms = [report.text(500), repr(report), json.dumps(report.to_dict()), str(report), report._repr_html_()]
    for name in ("json", "html", "junit"):
        getattr(report, f"to_{name}")(tmp_path / name)
        forms.append((tmp_path / name).read_text())
    assert not [form for form in forms if SECRET in form]
    assert report.repro["env"]["QWENREF_NUM_THREADS"] == "2" and "http://h/?token=***&a=1" in report.repro["argv"]
    kept = compare_documents.document(
        engine={"name": "e", "eos_token": "<|im_end|>", "max_tokens": 5, "tokenizer": "a: b"}
    )
    assert Report(kept).engine == kept["engine"]


# ---- text ----------------------------------------------------------------------------------------------------------


def test_the_text_answers_first_and_says_how_to_do_it_again():
    lines = str(compare_documents.report()).split("\n")
    assert lines[0] == "engine vllm+http://host:8000 is outside the reference's envelope"
    assert lines[-1] == (
        "again: QWENREF_NUM_THREADS=2 qwenref compare models/tiny --engine vllm+http://host:8000 --jitter 8"
    )
    text = "\n".join(lines)
    assert re.search(r"S5 prefill +6\.71 +1\.5 +red +R far above the gate", text)
    assert "first divergence\n  where        prompt code-2, position 41" in text
    assert re.search(r"reference +␣return \(1101\)\n  engine +⏎ \(1102\)", text)
    assert "non-benign · margin 0.8125 · sigma 0.0625 · u 13.03" in text
    assert "DIVERGED · cause kernels: an operation computes something else · named\n  the same fault planted" in text
    assert "runner-up        rope-theta" in text and "detection limit  faults with an effect" in text
    assert "first outside at layers.3.self_attn.gate, position 9: 41.77 times" in text
    assert re.search("chat.default_system +You␣are⏎ +You␣are␣⇥", text)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_no_line_is_wider_than_asked(width):
    lines = compare_documents.report().text(width).split("\n")
    assert max(len(line) for line in lines if not line.startswith("again")) <= width
    assert ascii_form("\n".join(lines)).isascii()


def test_a_clean_report_is_short_and_has_no_empty_part():
    text = str(Report(compare_documents.clean()))
    assert "inside the reference's envelope" in text and "first divergence" not in text and "\n\n\n" not in text
    assert len(text.split("\n")) < 15


def test_controls_in_an_engines_words_are_not_obeyed():
    nasty = "a\x1b[2Jb\u202ec"
    text = str(Report(compare_documents.document(
        summary=nasty, findings=[{"code": "c", "severity": "info", "message": nasty}], engine={"name": nasty}
    )))  # fmt: skip
    assert "\x1b" not in text and "\u202e" not in text


# ---- JUnit ---------------------------------------------------------------------------------------------------------


def cases(report, tmp_path):
    report.to_junit(tmp_path / "junit.xml", force=True)
    suite = xml.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    found = {case.get("name"): [child.tag for child in case] for case in suite}
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.get(count) == str(sum(tag in tags for tags in found.values()))
    assert suite.get("tests") == str(len(found))
    return found


def test_stages_are_test_cases(tmp_path):
    assert cases(compare_documents.report(), tmp_path) == {
        "S1 repeatability": ["system-out"], "S2 tokenizer": ["system-out"], "S5 prefill": ["failure"],
        "S4 sampling": ["skipped"], "verdict": ["failure"],
    }  # fmt: skip
    assert cases(Report(compare_documents.clean()), tmp_path) == {"verdict": ["system-out"]}
    assert cases(blank(summary='<&"\x00\ud800>'), tmp_path) == {"verdict": ["error"]}


def test_two_engines_are_two_suites(tmp_path):
    sides = [compare_documents.clean(engine={"name": name}) for name in "ab"]
    Report(compare_documents.clean(arbiter={"outside": [], "reports": sides})).to_junit(tmp_path / "junit.xml")
    assert [suite.get("name") for suite in xml.parse(tmp_path / "junit.xml").getroot()] == ["a", "b"]
