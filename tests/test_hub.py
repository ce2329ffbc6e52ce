"""Where a model's files are looked for: the package, folders, the Hugging Face cache, the network last."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwenref import hub
from qwenref.errors import ModelNotFound, Unreachable


@pytest.fixture
def folder(tmp_path):
    shutil.copy(hub.resolve("tiny") / "config.json", tmp_path / "config.json")
    return tmp_path


def fake_snapshot(cache, name="acme/small", commit="a" * 40, shards=("model.safetensors",), index=None):
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    for shard in shards:
        (snapshot / shard).touch()
    if index:
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_tiny_is_inside_the_package_whatever_lies_around(cache, tmp_path):
    (tmp_path / "tiny").mkdir()
    assert hub.resolve("tiny") == Path(hub.__file__).parent / "tiny"
    with pytest.raises(ModelNotFound, match="without config.json"):
        hub.resolve("./tiny")


def test_a_folder_is_taken_as_it_is(cache, folder):
    assert hub.resolve(folder) == folder == hub.resolve(str(folder))
    with pytest.raises(ModelNotFound, match="a file, not a model folder"):
        hub.resolve(folder / "config.json")


def test_a_cached_snapshot_needs_no_network(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    snapshot = fake_snapshot(cache)
    assert hub.resolve("acme/small") == snapshot
    assert hub.resolve("acme/small", revision="a" * 40) == snapshot
    with pytest.raises(Unreachable, match="no v2"):
        hub.resolve("acme/small", revision="v2", local_files_only=True)


def test_an_interrupted_download_is_not_a_model(cache):
    fake_snapshot(cache, shards=("m-1.safetensors",), index={"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(Unreachable, match="incomplete or absent"):
        hub.resolve("acme/small", local_files_only=True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hub_library_puts_it(variables, expected):
    expected = os.path.expanduser(expected)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "XDG_CACHE"))}
    theirs = subprocess.run(
        [sys.executable, "-c", "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"],
        env=clean | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert theirs == expected
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        assert hub.cache_folder() == Path(expected)


def test_a_download_asks_for_the_files_this_package_reads(cache, monkeypatch):
    asked = {}

    class Fake:
        @staticmethod
        def snapshot_download(name, **options):
            asked.update(options, name=name)
            return str(cache / "somewhere")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Fake)
    assert hub.resolve("acme/small", revision="v1") == cache / "somewhere"
    assert asked["name"] == "acme/small" and asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"] and "*" not in asked["allow_patterns"]


def test_a_missing_model_says_where_it_looked_in_order(cache, monkeypatch):
    with pytest.raises(ModelNotFound, match="'nothing': no such model") as caught:
        hub.resolve("nothing")
    assert str(caught.value).index("1. embedded models: tiny") < str(caught.value).index("2. folder")
    with pytest.raises(Unreachable) as caught:
        hub.resolve("acme/none", local_files_only=True)
    places = ["embedded models", "folder", f"cache {cache}", "download: not tried (local_files_only)"]
    at = [str(caught.value).index(place) for place in places]
    assert at == sorted(at)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unreachable, match="HF_HUB_OFFLINE"):
        hub.resolve("acme/none")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unreachable, match="qwenref\\[hub\\]"):
        hub.resolve("acme/none")
