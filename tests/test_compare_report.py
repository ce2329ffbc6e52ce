"""The document of a comparison and the forms made of it."""

import json
from xml.etree import ElementTree

import pytest

from qwenref.compare.document import schema
from qwenref.compare.errors import Disagreement, OutputExists, ReportError
from qwenref.compare.report import Report

jsonschema = pytest.importorskip("jsonschema", reason="validating needs jsonschema")

FIELDS = {
    "status": "DIVERGED", "cause": "config", "confidence": "named", "exit_code": 1, "summary": "rope theta",
    "tier": "A", "reference": {"model": "tiny"}, "engine": {"name": "x+http://me:secret@host/v1"},
    "suite": {"name": "quick", "prompts": 4, "positions": 122}, "envelope": {"J": 8},
    "stages": [
        {"id": "PR", "name": "error against rounding", "verdict": "red", "value": 5.0, "gate": 1.5, "detail": None},
        {"id": "DR", "name": "error against rounding", "verdict": "green", "value": 1.0, "gate": 1.5, "detail": "<&>"},
    ],
    "repro": {"argv": ["qwenref", "compare", "--api-key", "abc123"], "env": {}},
}  # fmt: skip


def test_a_document_keeps_to_the_schema_and_holds_no_secret():
    report = Report(FIELDS)
    jsonschema.validate(report.document, schema())
    said = json.dumps(report.document) + str(report)
    assert "secret" not in said and "abc123" not in said
    assert "outside the reference's envelope" in str(report) and report.cause == "config"


def test_a_document_with_a_wrong_field_is_refused():
    for change in ({"status": "MAYBE"}, {"nothing": 1}, {"stages": [{"id": "x"}]}):
        with pytest.raises(ReportError):
            Report(FIELDS | change)


def test_disagreement_is_an_assertion_that_holds_the_report():
    with pytest.raises(Disagreement) as raised:
        Report(FIELDS).assert_agrees()
    assert raised.value.report.status == "DIVERGED" and isinstance(raised.value, AssertionError)


def test_files_are_written_once_and_read_again(tmp_path):
    report = Report(FIELDS)
    report.to_json(tmp_path / "a.json")
    assert Report.load(tmp_path / "a.json").document == report.document
    with pytest.raises(OutputExists):
        report.to_json(tmp_path / "a.json")
    report.to_junit(tmp_path / "a.xml")
    tree = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert len(tree.findall(".//failure")) >= 1 and "<&>" in "".join(tree.itertext())
