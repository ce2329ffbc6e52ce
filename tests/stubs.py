"""Makes qwenref/ops.pyi from the signatures of the ops: `python tests/stubs.py --write` after one has changed."""

import ast
import re
import sys
import textwrap
from pathlib import Path

from qwenref import ops

WIDTH = 120
HEADER = '''"""Types of the ops, made from their signatures by tests/stubs.py: change those, not this file."""

from typing import Any, Literal, overload

from numpy import ndarray
from numpy.typing import ArrayLike

_Array = ndarray[Any, Any]

def names() -> tuple[str, ...]:
    """Names of all ops, in the order of the registry."""
'''


def text():
    """The whole file."""
    return HEADER + "".join(op_text(getattr(ops, name)) for name in ops.names())


def op_text(op):
    """One op: a function, or two where an optional output makes one array into several."""
    inputs, outputs = (re.findall(r"(\w+)(\[)?[^],]*(?:,[^]]*)?\]?(?::\w)?(\??)", side) for side in _sides(op))
    required = [name for name, _, optional in outputs if not optional and not name.startswith("_")]
    optional = [name for name, _, optional in outputs if optional]
    arrays = {name for name, bracket, _ in inputs if bracket}
    if not optional:
        return _function(op, arrays, {}, _returned(len(required)))
    if len(optional) > 1:  # one overload per combination would say little more than this
        none = dict.fromkeys(optional, "Literal[False] | None = False")
        some = dict.fromkeys(optional, "bool | _Array | None = False")
        ways = ((none, _returned(len(required))), (some, "Any"))
        return "".join("\n@overload" + _function(op, arrays, asked, way) for asked, way in ways)
    (name,) = optional
    ways = {
        "Literal[False] | None = False": _returned(len(required)),
        "Literal[True] | _Array": _returned(len(required) + 1),
        "bool": "Any",  # known only when it runs
    }
    return "".join("\n@overload" + _function(op, arrays, {name: kind}, way) for kind, way in ways.items())


def _returned(arrays):
    return "_Array" if arrays == 1 else f"tuple[{', '.join(['_Array'] * arrays)}]"


def _sides(op):
    """What is between the parentheses of a signature, and what is behind its arrow."""
    return re.fullmatch(r"\w+\((.*)\) -> (.*)", op.signature).groups()


def _function(op, arrays, asked, returned):
    """`asked` gives the annotation of an optional output."""
    parsed = ast.parse(f"def {op.__name__}{op.__text_signature__}: ...").body[0].args
    defaults = [None] * (len(parsed.args) - len(parsed.defaults)) + parsed.defaults
    words = []
    for parameter, default in zip(parsed.args, defaults, strict=True):
        kind = "ArrayLike" if parameter.arg in arrays else "float"
        optional = kind == "ArrayLike" and default is not None
        words.append(f"{parameter.arg}: {kind}" + (" | None = None" if optional else _default(default)))
    words.append("*")
    words += [f"{parameter.arg}: {asked.get(parameter.arg, '_Array | None = None')}" for parameter in parsed.kwonlyargs]
    line = f"def {op.__name__}({', '.join(words)}) -> {returned}:"
    if len(line) > WIDTH:
        line = f"def {op.__name__}(\n    {', '.join(words)}\n) -> {returned}:"
    if max(map(len, line.splitlines())) > WIDTH:
        line = f"def {op.__name__}(\n    " + ",\n    ".join(words) + f",\n) -> {returned}:"
    return f'\n{line}\n    """{_doc(op)}\n    """\n'


def _default(node):
    return "" if node is None else f" = {ast.unparse(node)}"


def _doc(op):
    """The docstring, without the scratch arrays of the signature; its lines below the first are indented."""
    signature, *rest = re.sub(r", _\w+\[[^]]*\]:\w", "", op.__doc__).splitlines()
    lines = textwrap.wrap(signature, WIDTH - 7, subsequent_indent="    ")
    for line in rest:
        lines += textwrap.wrap(line, WIDTH - 7) or [""]
    return "\n".join(f"    {line}" if line else "" for line in lines).strip()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        (Path(__file__).resolve().parent.parent / "qwenref" / "ops.pyi").write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
