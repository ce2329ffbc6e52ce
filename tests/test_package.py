"""The package as it is imported: light, silent, documented, and with every name it promises."""

import inspect
import json
import shutil
import warnings
from pathlib import Path

import fresh
import pytest

import qwenref

HEAVY = (
    "torch",
    "transformers",
    "PIL",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "matplotlib",
    "httpx",
    "IPython",
    "distributed",
)
LOADED = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
RESIDENT = """
def resident():
    import resource
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
"""


@pytest.mark.parametrize(
    "script",
    [
        "import qwenref",
        "import qwenref\nqwenref.from_config(qwenref.from_pretrained('tiny').config, device='meta')",
        "import qwenref\nqwenref.from_pretrained('tiny')([1, 2, 3])\nrepr(qwenref.mixers('tiny'))",
    ],
    ids=["import", "open", "run"],
)
def test_nothing_heavy_is_loaded(script):
    done = fresh.python(f"{script}\n{LOADED}")
    loaded = set(json.loads(done.stdout))  # and so nothing else was printed
    assert "qwenref" in loaded and "numpy" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert done.stderr == ""


def test_importing_loads_what_a_model_is_made_of_and_the_rest_when_asked():
    code = """
import json, sys, time
began = time.perf_counter()
import numpy, ml_dtypes
between = time.perf_counter()
import qwenref
print(json.dumps([time.perf_counter() - began, time.perf_counter() - between, list(sys.modules)]))
later = sorted(qwenref._LATER)
assert {getattr(qwenref, name).__module__ for name in later} == {f"qwenref.{qwenref._LATER[name]}" for name in later}
assert set(later) <= set(dir(qwenref)) & set(qwenref.__all__)
"""
    clock, own, loaded = json.loads(fresh.python(code).stdout)
    print(f"import qwenref: {clock:.3f} s by the clock (goal 0.15 s), {own:.3f} s of it ours")
    late = {f"qwenref.{name}" for name in ("naive", "cli", "template", "tokenizer", *qwenref._LATER.values())}
    assert late.isdisjoint(loaded)
    with pytest.raises(AttributeError, match="'qwenref' has no attribute 'logit_lense'"):
        qwenref.logit_lense  # noqa: B018


@pytest.mark.measured
def test_the_embedded_model_is_small_in_memory():
    code = RESIDENT + "import qwenref\nmodel = qwenref.from_pretrained('tiny')\nprint(resident())"
    nbytes = int(fresh.python(code).stdout)
    print(f"import and open tiny: {nbytes / 1e6:.1f} MB resident")
    assert nbytes < 80e6


def test_every_promised_name_is_there_and_documented():
    assert sorted(qwenref.__all__) == sorted(set(qwenref.__all__))
    for name in qwenref.__all__:
        value = getattr(qwenref, name)
        if inspect.isclass(value) or callable(value) or inspect.ismodule(value):
            inherited = inspect.isclass(value) and "__doc__" not in vars(value)
            assert value.__doc__ and value.__doc__.strip() and not inherited, name
        else:
            assert name == "__version__" and isinstance(value, str)


def test_a_star_import_gives_the_promised_names():
    code = "from qwenref import *\nimport json\nprint(json.dumps([n for n in dir() if n != 'json' and n[:2] != '__']))"
    assert set(json.loads(fresh.python(code).stdout)) == set(qwenref.__all__) - {"__version__"}


def test_public_methods_are_documented():
    """Of the classes a user holds in the hand; a property says what it is, a method what it does."""
    for cls in (qwenref.Cache, qwenref.ForConditionalGeneration, qwenref.sizes.CacheSize, qwenref.sizes.CountReport):
        assert cls.__doc__
        for name in ("forward", "generate", "chat", "tie_weights", "save_pretrained", "snapshot", "restore", "rows"):
            if hasattr(cls, name):
                assert inspect.getdoc(getattr(cls, name)), (cls.__name__, name)


def test_no_warning_at_import():
    done = fresh.python("import qwenref", PYTHONWARNINGS="error")
    assert done.returncode == 0 and done.stderr == ""


def test_sources_without_their_compiled_part_say_so(tmp_path):
    package = Path(qwenref.__file__).parent
    (tmp_path / "qwenref").mkdir()
    for path in package.glob("*.py"):
        shutil.copy(path, tmp_path / "qwenref")
    done = fresh.python("import qwenref", check=False, PYTHONPATH=str(tmp_path))
    assert f"ImportError: qwenref: no compiled part\n    found    sources alone, {tmp_path}" in done.stderr
    assert "elsewhere than in the checkout" in done.stderr


def test_show_config_says_what_is_in_use(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qwenref.show_config()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["qwenref"] == qwenref.__version__
    assert lines["threads"].split()[0] == str(qwenref.get_num_threads())
    assert f"instruction level {qwenref._C.cpu_level()} " in lines["cpu"]


@pytest.mark.parametrize("words", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_none_is_an_error_at_import(words):
    done = fresh.python("import qwenref", check=False, QWENREF_NUM_THREADS=words)
    assert done.returncode != 0 and f"QWENREF_NUM_THREADS: '{words}'" in done.stderr
    done = fresh.python("import qwenref", check=False, QWENREF_CPU="abacus")
    assert done.returncode != 0 and "abacus" in done.stderr


SMALL = ("qwenref.layers", "qwenref.module", "qwenref.vision")


def test_everything_public_says_what_it_does():
    """What `?` shows in a notebook.  The forward and extra_repr of the small layers are described by their class."""
    silent = [name for name in qwenref.__all__ if callable(part := getattr(qwenref, name)) and not part.__doc__]
    described = ("forward", "extra_repr")
    for name in qwenref.__all__:
        kind = getattr(qwenref, name)
        if not inspect.isclass(kind) or not issubclass(kind, qwenref.Module):
            continue
        for member in (m for m in dir(kind) if not m.startswith("_")):
            function = inspect.getattr_static(kind, member)
            function = function.fget if isinstance(function, property) else function
            by_class = member in described and function.__module__ in SMALL
            if inspect.isfunction(function) and not function.__doc__ and not by_class:
                silent.append(f"{name}.{member}")
    assert silent == []
