"""The promises of CONTRIBUTING.md and the codes of tests/README.md stand for tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROMISES, CODES = TESTS.parent / "CONTRIBUTING.md", TESTS / "README.md"
CODE = re.compile(r"[ABCDFT][0-9]+")


def names_in(path):
    """Names of the test functions of a file."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def rows(path, heading=None):
    """Cells of the table rows of a Markdown file, or of one section of it, without the header."""
    text = path.read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.split("\n") if line.startswith("| ") and not re.match(r"\| (code|promise) \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.fixture(scope="module")
def named():
    """{file name: its tests}."""
    return {path.name: names_in(path) for path in TESTS.glob("test_*.py")}


def test_every_promise_names_tests_that_exist(named):
    promises = rows(PROMISES, "Promises and what keeps them")
    assert len(promises) >= 20
    for promise, held in promises:
        references = re.findall(r"`([^`]+)`", held)
        assert references, promise
        for reference in references:
            file, _, name = reference.partition("::")
            if name:
                assert name in named.get(file, ()), f"{promise}: {reference}"
            else:
                assert (TESTS.parent / reference).is_file(), f"{promise}: {reference}"


def codes_of(name):
    """["T5", "A1"] of test_T5_A1_..."""
    found = []
    for part in name.split("_")[1:]:
        if not CODE.fullmatch(part):
            break
        found.append(part)
    return found


def test_every_code_has_a_test_and_every_test_a_code_of_the_list(named):
    listed = [code for code, _ in rows(CODES)]
    expected = {f"A{n}" for n in range(1, 16)} | {f"B{n}" for n in range(1, 14)} | {f"C{n}" for n in range(1, 11)}
    expected |= {f"D{n}" for n in range(1, 14)} | {f"T{n}" for n in range(1, 12)}
    expected |= {f"F{n}" for n in range(1, 13)} | {"T13", "T14"}
    assert set(listed) == expected and len(listed) == len(set(listed))
    used = {code for names in named.values() for name in names for code in codes_of(name)}
    assert sorted(set(listed) - used) == [] and sorted(used - set(listed)) == []


def test_no_test_hides_behind_another_of_its_name(named):
    for file, names in named.items():
        assert len(names) == len(set(names)), file
