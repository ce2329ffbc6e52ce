"""Type stubs say what is there: ops by their signatures, classes and functions by their names and arguments."""

import ast
import inspect
from pathlib import Path

import pytest
import stubs

import qwenref
from qwenref import _C, ops

FOLDER = Path(qwenref.__file__).parent
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple, "list": list, "dict": dict}
OP = type(_C.ops["add"])


def body(file):
    return ast.parse((FOLDER / file).read_text(encoding="utf-8")).body


def classes():
    return {node.name: node for node in body("_C.pyi") if isinstance(node, ast.ClassDef)}


def names(nodes):
    """What a list of statements defines, imports and private helpers left out."""
    found = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}
    return found


def members(name):
    """What a class of the stub defines, the shared part of the configs included."""
    found = names(classes()[name].body)
    for base in classes()[name].bases:
        if isinstance(base, ast.Name) and base.id in classes():
            found |= members(base.id)
    return found


def special(name):
    return name.startswith("__") and name.endswith("__")


def test_the_ops_are_those_of_the_signatures():
    """When this fails, run `python tests/stubs.py --write`."""
    assert (FOLDER / "ops.pyi").read_text(encoding="utf-8") == stubs.text()
    assert names(body("ops.pyi")) == {"names", *ops.names()}
    assert (FOLDER / "py.typed").exists()


def test_overloads_cover_what_an_op_returns():
    """An op with one optional output: one array more if it is asked for, and which of the two if that is a variable."""
    ways = {"attention": ["_Array", "tuple[_Array, _Array]", "Any"], "gated_delta_rule": ["_Array", "Any"]}
    ways["rope_table"] = ["tuple[_Array, _Array]"]
    for name, returned in ways.items():
        nodes = [node for node in body("ops.pyi") if isinstance(node, ast.FunctionDef) and node.name == name]
        assert [ast.unparse(node.returns) for node in nodes] == returned
        decorators = [ast.unparse(d) for node in nodes for d in node.decorator_list]
        assert decorators == ["overload"] * (len(nodes) if len(nodes) > 1 else 0)


def test_the_module_has_the_names_of_the_stub():
    real = {name for name in vars(_C) if not special(name)}
    assert {name for name in names(body("_C.pyi")) if not name.startswith("_")} == real | {"Op"}
    assert (OP.__name__, OP.__module__) == ("Op", "qwenref.ops")


@pytest.mark.parametrize("name", ["Module", "TensorInfo", "Checkpoint", "Config", "TextConfig", "VisionConfig", "Op"])
def test_a_class_has_the_names_of_the_stub(name):
    real = OP if name == "Op" else getattr(_C, name)
    stubbed = members(name)
    counts = {"n_fields", "n_sequence_fields", "n_unnamed_fields"}  # every struct sequence has them
    assert {n for n in vars(real) if not special(n)} - counts == {n for n in stubbed if not special(n)}
    for n in stubbed - {"__getattr__"}:  # tp_getattro serves both
        assert n in vars(real), n


def test_functions_take_the_arguments_of_the_stub():
    checked = 0
    for owner, nodes in ((_C, body("_C.pyi")), *((getattr(_C, n, None), node.body) for n, node in classes().items())):
        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or special(node.name) or not hasattr(owner, node.name):
                continue
            try:
                real = inspect.signature(getattr(owner, node.name))
            except ValueError:  # methods whose text signature has no self
                continue
            given = {p.name: p.kind for p in real.parameters.values() if p.name != "self"}
            only = inspect.Parameter.POSITIONAL_ONLY
            stub = {arg.arg: only for arg in node.args.posonlyargs}
            stub |= dict.fromkeys([arg.arg for arg in node.args.args], inspect.Parameter.POSITIONAL_OR_KEYWORD)
            stub = {arg: kind for arg, kind in stub.items() if arg not in ("self", "cls")}
            assert stub == given, node.name
            checked += 1
    assert checked >= 12


def test_attributes_have_the_types_of_the_stub():
    """Of the embedded model's config and files, value by value."""
    config = qwenref.from_pretrained("tiny").config
    files = _C.Checkpoint(qwenref.from_pretrained("tiny").path)
    samples = {
        "Config": config,
        "TextConfig": config.text_config,
        "VisionConfig": config.vision_config,
        "Checkpoint": files,
        "TensorInfo": files.info("lm_head.weight"),
        "_Stored": config.text_config,
        "Op": ops.add,
    }
    checked = 0
    for name, sample in samples.items():
        for node in classes()[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
                annotation = ast.unparse(node.annotation.slice).split(" | ")
                value = getattr(sample, node.target.id)
                allowed = [TYPES.get(part.split("[")[0], getattr(_C, part, None)) for part in annotation]
                assert type(value) in allowed or ("None" in annotation and value is None), (name, node.target.id)
                checked += 1
    assert checked > 70
