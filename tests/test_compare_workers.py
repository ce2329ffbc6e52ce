"""Scores made elsewhere: the same bits whoever makes them, nothing lost when a worker is, no process left behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import scores

import qwenref
from qwenref.compare import workers
from qwenref.compare.errors import WorkerMismatch, WorkersLost
from qwenref.compare.scoring import Task, perform, score
from qwenref.compare.workers import open_executor
from qwenref.errors import InputError, QwenrefWarning, UnknownName


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def in_memory(model):
    return qwenref.from_config(model.config, seed=0)


def pids():
    return {child.pid for child in multiprocessing.active_children()}


@contextlib.contextmanager
def six_threads():
    before = qwenref.get_num_threads()
    qwenref.set_num_threads(6)
    try:
        yield
    finally:
        qwenref.set_num_threads(before)


def test_a_worker_process_that_is_killed_costs_time_and_nothing_else(model):
    tasks = [*scores.forms(model), *scores.many(model, 8)]
    before, seen, killed = pids(), [], []

    def kill(done, total):
        seen.append((done, total))
        if done == 1:
            for pid in pids() - before:  # a Ctrl-C reaches them too, and is not for them
                os.kill(pid, signal.SIGINT)
        if done == 3:
            killed.extend(sorted(pids() - before)[:1])
            os.kill(killed[0], signal.SIGKILL)

    with six_threads(), open_executor(model, workers=2) as executor:
        with pytest.warns(QwenrefWarning, match="a worker process ended"):
            found = score(model, tasks, executor, kill)
        assert killed[0] not in pids()
        assert executor._executor.submit(qwenref.get_num_threads).result() == 3
        assert scores.same(found, scores.done_here(model, tasks))
        assert seen == [(n, len(tasks)) for n in range(1, len(tasks) + 1)]
        for pid in pids() - before:  # between two calls, when nobody waits for anything
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(QwenrefWarning, match="a worker process ended"):
            assert scores.same(score(model, tasks[:2], executor), found[:2])
    assert pids() == before


def test_workers_that_always_end_are_an_error(model):
    before, over = pids(), threading.Event()

    def kill():
        while not over.wait(0.02):
            for pid in pids() - before:
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with (
            pytest.raises(WorkersLost, match="worker processes ended 3 times over the same work"),
            pytest.warns(QwenrefWarning),
            open_executor(model, workers=1) as executor,
        ):
            score(model, scores.many(model, 2), executor)
    finally:
        over.set()
        thread.join()
    assert pids() == before


SCRIPT = """
import multiprocessing, sys
import qwenref, scores
from qwenref.compare.scoring import score
from qwenref.compare.store import Store
from qwenref.compare.workers import open_executor

def main():
    model = qwenref.from_pretrained("tiny")
    tasks = scores.many(model, 400)

    def tell(done, total):
        if done == 3:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)

    with open_executor(model, workers=2) as executor:
        score(model, tasks, executor, tell, Store(sys.argv[1]))

if __name__ == "__main__":
    main()
"""


def started(script, folder):
    """A Python that runs a script from a file, in a session of its own; that is what a terminal's Ctrl-C reaches."""
    (folder / "script.py").write_text(script)
    place = os.pathsep.join([str(Path(qwenref.__file__).resolve().parent.parent), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "script.py", "scores"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": place},
        start_new_session=True,
    )


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_it_works_for(sent, tmp_path):
    running = started(SCRIPT, tmp_path)
    try:
        workers = [int(pid) for pid in running.stdout.readline().split()]
        assert len(workers) == 2 and not any(map(gone, workers))
        if sent == signal.SIGINT:
            os.killpg(running.pid, sent)
        else:
            os.kill(running.pid, sent)
        _, told = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    ended = time.monotonic()
    while not all(map(gone, workers)) and time.monotonic() - ended < 20:
        time.sleep(0.02)
    assert all(map(gone, workers))
    if sent == signal.SIGINT:
        assert told.splitlines()[-1] == "KeyboardInterrupt" and told.count("Traceback") == 1
    assert 3 <= len(list((tmp_path / "scores").glob("??/*"))) < 400


def test_a_script_without_a_guard_is_told_so(tmp_path):
    unguarded = SCRIPT.replace('if __name__ == "__main__":\n    main()', "main()").replace("workers=2", "workers=1")
    running = started(unguarded, tmp_path)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 1 and "WorkersLost" in told and 'if __name__ == "__main__":' in told


def test_threads_of_this_process_take_the_model_as_it_is(model, in_memory):
    with ThreadPoolExecutor(2) as threads:
        for each in (model, in_memory):
            tasks = scores.forms(each)
            with open_executor(each, executor=threads) as executor:
                assert scores.same(score(each, tasks, executor), scores.done_here(each, tasks))
        assert threads.submit(int, "7").result() == 7  # it stays open


def test_an_interruption_takes_back_what_was_not_begun(model, monkeypatch):
    begun = []
    monkeypatch.setattr(workers, "perform", lambda model, task: begun.append(task) or perform(model, task))

    def interrupt(done, total):
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as threads, open_executor(model, executor=threads) as executor:
        with pytest.raises(KeyboardInterrupt) as held:  # and with it every frame there was
            score(model, scores.many(model, 40), executor, interrupt)
        threads.submit(int).result()
    assert held.traceback and 1 <= len(begun) < 20


def test_processes_of_the_callers_own_and_several_models_on_them(model, in_memory, tmp_path):
    in_memory.save_pretrained(tmp_path)
    saved = qwenref.from_pretrained(tmp_path)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as processes, open_executor(model, executor=processes) as executor:
        for each in (model, saved, model):
            tasks = scores.forms(each)
            assert scores.same(score(each, tasks, executor), scores.done_here(each, tasks))
        with pytest.raises(InputError, match="in the memory of another process"):
            score(in_memory, tasks, executor)
        with pytest.raises(UnknownName, match="no-such-fault"):
            score(model, [*tasks, Task((1, 2), 1, ("fault", "fp32", ("no-such-fault",))), *tasks], executor)
        assert scores.same(score(model, tasks[:1], executor), scores.done_here(model, tasks[:1]))
        executor._kind = "another"
        with pytest.raises(WorkerMismatch, match="other arithmetic than where the work was begun"):
            score(model, tasks[:1], executor)
        executor._kind = None
        processes.submit(os._exit, 1)
        with pytest.raises(WorkersLost, match="the executor is broken"):
            score(model, scores.many(model, 4), executor)


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, "expected one of workers, dask and executor"),
        ({"workers": 2, "dask": "tcp://127.0.0.1:1"}, "expected one of workers, dask and executor"),
        ({"workers": 0}, "workers: 0"),
        ({"workers": True}, "workers: True"),
        ({"workers": 1.5}, "workers: 1.5"),
        ({"executor": 2}, "expected a concurrent.futures.Executor"),
    ],
)
def test_what_is_no_place_to_work_is_refused(model, given, why):
    with pytest.raises(InputError, match=why):
        open_executor(model, **given).__enter__()


def test_a_model_in_memory_is_refused_before_any_process_is_started(in_memory):
    before = pids()
    with pytest.raises(InputError, match="weights in memory"):
        open_executor(in_memory, workers=2).__enter__()
    assert pids() == before
