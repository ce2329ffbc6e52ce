"""The layers of the source keep apart: includes and imports point one way, every file says what it is for."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "qwenref"
SHARED = {CSRC / "qr.h", CSRC / "half.h"}

STANDARD = """
    assert.h ctype.h errno.h fcntl.h fenv.h float.h inttypes.h limits.h math.h sched.h signal.h stdalign.h stdarg.h
    stdatomic.h stdbool.h stddef.h stdint.h stdio.h stdlib.h string.h sys/mman.h sys/stat.h sys/types.h time.h
    unistd.h
"""
LIBC = set(STANDARD.split())
# What a folder may include besides libc, its own files and the shared headers.
ALLOWED = {
    "kernels": {"arm_neon.h", "cblas.h", "immintrin.h", "simde/x86/avx512.h", "simde/x86/f16c.h", "simde/x86/fma.h"},
    "core": {"cjson/cJSON.h", "pthread.h", "cpuid.h", "immintrin.h", "xmmintrin.h", "sys/auxv.h"},
}
# A kernel is loops: what would make it more than that.
NO_KERNEL = re.compile(r"\b(malloc|calloc|realloc|free|printf|fprintf|exit|abort|getenv|fopen|pthread_\w+)\s*\(")
# Packages that importing qwenref must not import; they are imported where they are used.
HEAVY = {
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "torch",
    "transformers",
    "PIL",
    "av",
    "matplotlib",
    "httpx",
    "safetensors",
    "distributed",
}


def c_files(*folders):
    return [path for folder in folders for path in sorted((CSRC / folder).glob("*.[ch]"))]


def includes(path):
    """(name, whether in angle brackets) of every include line."""
    found = re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.M)
    return [(name, bracket == "<") for bracket, name in found]


def python_files():
    found = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *(ROOT / "tests").rglob("*.py")]
    return [ROOT / "setup.py", *sorted(found)]


def modules():
    return {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.glob("*.py"))}


def imports(nodes, package_only=True):
    """Modules that import statements name: of qwenref, by their name inside it, or else by their top package."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "qwenref" + (f".{node.module}" if node.module else "") if node.level else node.module
            names = [f"qwenref.{alias.name}" for alias in node.names] if base == "qwenref" else [base]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if package_only and top == "qwenref":
                found.add(rest.split(".")[0])
            elif not package_only:
                found.add(top)
    return found


def at_import(tree):
    """Statements that run when a module is imported: not those inside functions."""
    waiting, found = list(tree.body), []
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def test_there_is_something_to_check():
    assert len(c_files("kernels", "core", "python")) > 50 and len(modules()) > 20
    assert len(python_files()) > 40 and PACKAGE / "model.py" in python_files()
    assert any(name == "cblas.h" for path in c_files("kernels") for name, _ in includes(path))


@pytest.mark.parametrize("path", c_files("kernels", "core"), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kernels_and_core_include_only_what_is_theirs(path):
    for name, system in includes(path):
        if system:
            assert name in LIBC | ALLOWED[path.parent.name], name
        else:
            target = (path.parent / name).resolve()
            assert target.exists(), name
            assert target.parent == path.parent or target in SHARED, name


def test_the_shared_headers_include_nothing_else_of_the_project():
    assert all(system and name in LIBC for name, system in includes(CSRC / "qr.h"))
    assert all((name in LIBC) if system else (name == "qr.h") for name, system in includes(CSRC / "half.h"))


def test_one_folder_sees_python():
    """And there one header, so that the two big ones are included in the right way."""
    seen = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.[ch]") if "Python.h" in dict(includes(path))}
    assert seen == {"python/py.h"}
    numpy = {path.parent.name for path in CSRC.rglob("*.[ch]") if any("numpy/" in name for name, _ in includes(path))}
    assert numpy == {"python"}


def test_the_binding_reaches_kernels_through_the_registry_only():
    for path in c_files("python"):
        for name, system in includes(path):
            assert system or "kernels" not in name, (path.name, name)


def test_a_kernel_is_loops():
    for path in c_files("kernels"):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.S)
        assert not NO_KERNEL.search(code), (path.name, NO_KERNEL.search(code).group())


def test_only_the_entry_point_imports_the_command_line():
    importers = {name for name, tree in modules().items() if "cli" in imports(ast.walk(tree))}
    assert importers == {"__main__"}


def test_imports_form_no_circle():
    """At import, that is; inside a function a module may ask for one above it."""
    known = modules()
    graph = {name: imports(at_import(tree)) & known.keys() for name, tree in known.items() if name != "__init__"}
    while True:
        leaves = {name for name, wanted in graph.items() if not wanted & graph.keys()}
        if not leaves:
            break
        graph = {name: wanted for name, wanted in graph.items() if name not in leaves}
    assert not graph, {name: wanted & graph.keys() for name, wanted in graph.items()}


def test_the_definition_knows_no_other_arithmetic():
    """naive.py is what the kernels are compared with, so it cannot use them."""
    assert imports(ast.walk(modules()["naive"])) <= {"errors", "naive_op"}
    assert imports(ast.walk(modules()["naive_op"])) <= {"errors"}


def test_optional_and_slow_packages_are_imported_where_they_are_used():
    for name, tree in modules().items():
        assert not imports(at_import(tree), package_only=False) & HEAVY, name


TALKING = ("cli", "cli_base", "terminal_chat")  # what runs only as a command


def test_the_library_prints_nothing():
    for name, tree in modules().items():
        allowed = [node for node in ast.walk(tree) if getattr(node, "name", None) == "show_config"]
        inside = {id(node) for function in allowed for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert name in TALKING or (name == "__init__" and id(node) in inside), f"{name}.py:{node.lineno}"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_python_file_says_what_it_is_for(path):
    first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip().split("\n\n")[0]
    assert len(first.split()) > 2, "no docstring"


@pytest.mark.parametrize(
    "path",
    sorted([*CSRC.rglob("*.[ch]"), *(ROOT / "tests").rglob("*.[ch]")]),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_a_c_file_says_what_it_is_for(path):
    first = re.match(r"/\*(.*?)\*/|//([^\n]*)", path.read_text(encoding="utf-8"), re.S)
    assert first and len(first.group().split()) > 3, "no comment at the top"
