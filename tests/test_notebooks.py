"""The notebooks run from top to bottom, are stored without outputs, and use only what is public."""

import ast
import json
import os
import re
import time
from pathlib import Path

import fresh
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = [
    "01_look_inside",
    "02_hooks_and_edits",
    "03_attention_by_hand",
    "04_delta_rule",
    "05_text_in_text_out",
    "06_what_it_sees",
    "07_which_engine_is_wrong",
]

# What a notebook does, without one: cells share their names, and the last value of a cell is shown by its HTML.
RUNNER = """
import ast, json, sys
names, pages = {"__name__": "__main__"}, 0
for i, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]), f"cell {i}")
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {i}", "exec"), names)
    value = eval(compile(last, f"cell {i}", "eval"), names) if last else None
    if value is not None:
        repr(value)
        pages += len(value._repr_html_()) if hasattr(value, "_repr_html_") else len(repr(value))
print(json.dumps(pages), file=sys.stderr)
"""


def cells(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def code(name):
    return ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name):
    began = time.perf_counter()
    done = fresh.python(RUNNER, os.fspath(FOLDER / f"{name}.ipynb"))
    seconds = time.perf_counter() - began
    shown = json.loads(done.stderr.splitlines()[-1])
    print(f"{name}: {seconds:.1f} s, {shown / 1e3:.0f} kB of displays")
    assert seconds < 60 and shown < 1e6
    assert re.search(r"^\w*Error: \w|^UnknownName: ", done.stdout, re.M), "shows no mistake with its message"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped(name):
    for cell in cells(name):
        assert cell["metadata"] == {} and cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    assert len({cell["id"] for cell in cells(name)}) == len(cells(name))


@pytest.mark.parametrize("name", NAMES)
def test_only_public_names_are_used(name):
    for source in code(name):
        for node in ast.walk(ast.parse(source)):
            names = [getattr(node, field, "") for field in ("attr", "id", "module")]
            names += [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            for used in filter(None, names):
                assert not any(re.match(r"_(?!_name__$)", part) for part in used.split(".")), used
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert {used.split(".")[0] for used in filter(None, names)} <= {"qwenref", "numpy"}


def test_links_between_notebooks_lead_somewhere():
    for name in NAMES:
        for cell in cells(name):
            for target in re.findall(r"\]\(([^)]+\.ipynb)\)", "".join(cell["source"])):
                assert (FOLDER / target).is_file()
