"""Scores made on a Dask cluster of two processes: the same bits, also when one is lost, and errors that say why."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
import scores

import qwenref
from qwenref import cli
from qwenref.compare import Suite, cluster, scoring, suite, workers
from qwenref.compare.cluster import _agreed
from qwenref.compare.errors import ClusterUnreachable, WorkerMismatch, WorkersLost
from qwenref.compare.identity import arithmetic, digest, files_of
from qwenref.compare.scoring import perform, score
from qwenref.compare.workers import open_executor
from qwenref.errors import CapabilityMissing, InputError, QwenrefWarning
from qwenref.hub import EMBEDDED

distributed = pytest.importorskip("distributed", reason="a Dask cluster needs distributed (extra 'cluster')")


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def tasks(model):
    return [*scores.forms(model), *scores.many(model, 13)]


@pytest.fixture(autouse=True, scope="module")
def two():
    """A cluster on loopback."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as made:
        yield made


def pids(two):
    with distributed.Client(two.scheduler_address, set_as_default=False) as client:
        return set(client.run(os.getpid).values())


def test_a_worker_that_is_killed_costs_time_and_nothing_else(model, tasks, two):
    before, seen = pids(two), []

    def kill(done, total):
        seen.append((done, total))
        if done == 3:
            os.kill(min(before), signal.SIGKILL)

    with open_executor(model, dask=two.scheduler_address) as executor:
        assert executor.arithmetic == digest(arithmetic())
        found = score(model, tasks, executor, kill)
    assert scores.same(found, scores.done_here(model, tasks))
    assert seen == [(n, len(tasks)) for n in range(1, len(tasks) + 1)]
    assert min(before) not in pids(two)


def test_the_verb_compares_on_a_cluster_what_it_compares_here(two, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QWENREF_CACHE", "0")
    item = next(item for item in suite("quick", qwenref.from_pretrained("tiny")).prompts if item.kind == "cjk")
    Suite("one", (item._replace(new=16),)).save(tmp_path / "one.jsonl")
    words = ("compare", "tiny", "--engine", "reference:tiny?numerics=hf", "--suite", str(tmp_path / "one.jsonl"))
    words = (*words, "--jitter", "4", "--explain", "never", "--json")

    def document(*more):
        code, said = cli.main([*words, *more]), capsys.readouterr()
        assert (code, said.err) == (0, "")
        return {**json.loads(said.out), "created": None, "repro": None}

    here = document()
    monkeypatch.setattr(scoring, "_run", None)  # what scores in this process
    assert document("--dask", two.scheduler_address) == here


def test_two_models_on_one_cluster_and_one_without_files(model, two, tmp_path):
    other = qwenref.from_config(model.config, seed=0)
    other.save_pretrained(tmp_path)
    saved = qwenref.from_pretrained(tmp_path)
    with open_executor(model, dask=two.scheduler_address) as executor:
        for each in (saved, model):
            some = scores.forms(each)
            assert scores.same(score(each, some, executor), scores.done_here(each, some))
        with pytest.raises(InputError, match="weights in memory"):
            score(other, some, executor)


def test_a_worker_without_the_files_or_with_others_is_an_error(model, two, tmp_path, monkeypatch):
    folder = shutil.copytree(EMBEDDED["tiny"], tmp_path / "own")
    moved = []
    monkeypatch.setattr(cluster, "files_of", lambda *args: moved[-1])
    moved.append(files_of(qwenref.from_pretrained(folder))._replace(path=str(tmp_path / "elsewhere")))
    with pytest.raises(WorkerMismatch, match=r"worker tcp://\S+: no folder with the files of .*elsewhere"):
        open_executor(model, dask=two.scheduler_address).__enter__()
    shutil.copytree(folder, tmp_path / "elsewhere")
    with open_executor(model, dask=two.scheduler_address) as executor:
        some = scores.forms(model)[:2]
        assert scores.same(score(model, some, executor), scores.done_here(model, some))
    with open(tmp_path / "elsewhere" / "model-00001-of-00002.safetensors", "r+b") as shard:
        shard.seek(-1, os.SEEK_END)
        last = shard.read(1)
        shard.seek(-1, os.SEEK_END)
        shard.write(bytes([last[0] ^ 1]))
    with pytest.raises(WorkerMismatch, match="no folder with the files of"):
        open_executor(model, dask=two.scheduler_address).__enter__()


def test_workers_that_compute_otherwise_are_an_error(model):
    here, files = arithmetic(), files_of(model)
    assert _agreed({"a": (here, True), "b": ({**here, "extension": "z"}, True)}, files)["extension"].endswith(" z")
    for part in ("qwenref", "sources"):
        with pytest.raises(WorkerMismatch, match=f"worker b: another version of qwenref \\({part}\\)"):
            _agreed({"b": ({**here, part: "0"}, True), "a": (here, True)}, files)
    slow = {**here, "cpu": "x86_64", "bits": "0"}
    with pytest.raises(WorkerMismatch, match=r"workers b and a: not the same arithmetic.*\n.*cpu: x86_64, not "):
        _agreed({"a": (here, True), "b": (slow, True)}, files)
    with pytest.warns(QwenrefWarning, match="last bits in float64 may be others .*\n.*cpu: x86_64, not "):
        assert _agreed({"a": (slow, True), "b": (slow, True)}, files) == slow
    with pytest.raises(WorkerMismatch, match="worker a: it cannot be asked\n.*No module named 'qwenref'"):
        _agreed({"a": ModuleNotFoundError("No module named 'qwenref'"), "b": (here, True)}, files)


def test_no_cluster_at_an_address_is_an_error_soon(model, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT", 0.5)
    for address in ("tcp://127.0.0.1:9", "somewhere", "carrier-pigeon://127.0.0.1:9"):
        with pytest.raises(ClusterUnreachable, match=f"{address}: no Dask scheduler") as refused:
            open_executor(model, dask=address).__enter__()
        assert refused.value.exit_code == 4
    with pytest.raises(InputError, match="expected an address, tcp://host:port"):
        open_executor(model, dask=8786).__enter__()


def test_without_the_package_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(CapabilityMissing, match=r"(?s)needs the package distributed.*qwenref\[cluster\]"):
        open_executor(model, dask="tcp://127.0.0.1:9").__enter__()


def test_a_cluster_that_goes_away_is_an_error(model, tasks, monkeypatch):
    monkeypatch.setattr(cluster, "GONE", 1.0)
    monkeypatch.setattr(cluster, "LOOK", 0.2)
    monkeypatch.setattr(workers, "_LOOK", 0.2)
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0", "processes": False}
    with distributed.LocalCluster(**options) as made:
        with monkeypatch.context() as patch, open_executor(model, dask=made.scheduler_address) as executor:
            patch.setattr(workers, "perform", lambda *args: time.sleep(1.5) or perform(*args))  # longer than GONE
            assert scores.same(score(model, tasks[:1], executor), scores.done_here(model, tasks[:1]))
        with (
            pytest.raises(WorkersLost, match="a cluster without workers for 1 s"),
            open_executor(model, dask=made.scheduler_address) as executor,
        ):
            score(model, tasks * 9, executor, lambda done, total: made.scale(0) if done == 2 else None)
        with monkeypatch.context() as patch, pytest.raises(ClusterUnreachable, match="a Dask cluster without workers"):
            patch.setattr(cluster, "CONNECT", 1.0)
            open_executor(model, dask=made.scheduler_address).__enter__()
        made.scale(1)
        with (
            pytest.raises(WorkersLost) as lost,
            open_executor(model, dask=made.scheduler_address) as executor,
        ):
            score(model, tasks * 9, executor, lambda done, total: made.close() if done == 2 else None)
    assert lost.value.exit_code == 2
