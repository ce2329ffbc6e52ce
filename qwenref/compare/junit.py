"""A report as JUnit XML: a test case for each stage, for systems that show test results."""

import re
from xml.sax.saxutils import escape, quoteattr

from qwenref.compare.text import command, number
from qwenref.compare.wording import verdict

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(document):
    """The text of the file.  Red stages fail, amber ones pass and say so; an undecided comparison is an error."""
    reports = (document["arbiter"] or {}).get("reports") or [document]
    suites = [_suite(report) for report in reports]
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="qwenref compare">\n'
    return head + "".join(suites) + "</testsuites>\n"


def _suite(document):
    cases = [_stage(document, stage) for stage in document["stages"]] + [_verdict(document)]
    failed, errors, skipped = (sum(f"<{tag}" in case for case in cases) for tag in ("failure", "error", "skipped"))
    counts = f'tests="{len(cases)}" failures="{failed}" errors="{errors}" skipped="{skipped}"'
    return f"<testsuite name={_quoted(document['engine']['name'])} {counts}>\n{''.join(cases)}</testsuite>\n"


def _stage(document, stage):
    inside, figures = "", f"value {number(stage.get('value'))}, gate {number(stage.get('gate'))}"
    detail = stage.get("detail") or ""
    if stage["verdict"] == "red":
        inside = f"<failure message={_quoted(figures)}>{_text(detail)}</failure>"
    elif stage["verdict"] == "skipped":
        inside = f"<skipped message={_quoted(detail)}/>"
    else:
        said = f"{stage['verdict']}: {figures} {detail}".rstrip()
        inside = f"<system-out>{_text(said)}</system-out>"
    return _case(document, f"{stage['id']} {stage['name']}", inside)


def _verdict(document):
    words = "\n".join([document["summary"], *(f"{f['code']}: {f['message']}" for f in document["findings"])])
    again = command(document)
    body = _text(f"{words}\nagain: {again}" if again else words)
    tag = {0: "system-out", 1: "failure"}.get(document["exit_code"], "error")
    kind = "" if tag == "system-out" else f" message={_quoted(verdict(document))} type={_quoted(document['cause'])}"
    return _case(document, "verdict", f"<{tag}{kind}>{body}</{tag}>")


def _case(document, name, inside):
    return f"<testcase classname={_quoted(document['reference']['model'])} name={_quoted(name)}>{inside}</testcase>\n"


def _text(text):
    return escape(_NO_XML.sub("�", text))


def _quoted(text):
    return quoteattr(_NO_XML.sub("�", text))
