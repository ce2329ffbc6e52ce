"""Scores computed elsewhere: in processes of this machine, on a Dask cluster, by any `concurrent.futures.Executor`.

A task goes out with the name of the model's files; a worker opens them itself, mapped, so that processes of one machine
share the memory of the weights.  Whoever computes, and in whatever order, the bits are the same: a worker with other
files or another arithmetic is an error.
"""

import contextlib
import multiprocessing
import os
import platform
import secrets
import signal
import threading
import warnings
import weakref
from collections import Counter, deque
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from typing import NamedTuple

from qwenref import _C
from qwenref.checks import is_whole
from qwenref.compare.errors import WorkerMismatch, WorkersLost
from qwenref.compare.identity import Files, arithmetic, digest, files_of, kind
from qwenref.compare.scoring import lightened, lightly, perform, restored
from qwenref.compare.store import open_store
from qwenref.errors import InputError, QwenrefWarning, compose, frames_of_the_package
from qwenref.loading import from_pretrained

TRIES = 3  # times a task is given out, if the worker that has it ends
_ROOM = 256  # tasks given out at a time to an executor of unknown size
_LOOK = 5.0  # seconds between looks at workers that say nothing
_OPEN = 2  # models a worker keeps open: the checkpoint, and an engine's own weights


@contextlib.contextmanager
def open_executor(model, workers=None, dask=None, executor=None):
    """What `score(..., executor=)` runs tasks on; one of

    workers    processes, so many; each has its part of the threads of this one
    dask       the address of a cluster, "tcp://host:port", whose workers have qwenref and the model's folder
    executor   a `concurrent.futures.Executor`, which stays open

    `model` is what will be scored, so that what stands in its way is said now.  A worker that ends is replaced, what it
    was at is done again; WorkersLost if that happens again and again.
    """
    if sum(given is not None for given in (workers, dask, executor)) != 1:
        raise InputError(compose("open_executor", expected="one of workers, dask and executor"))
    if executor is not None:
        if not isinstance(executor, Executor):
            found = type(executor).__name__
            raise InputError(compose("executor", found=found, expected="a concurrent.futures.Executor"))
        running = Running(executor)
    elif dask is not None:
        from qwenref.compare.cluster import connected

        running = connected(dask)
    else:
        if not is_whole(workers) or workers < 1:
            raise InputError(compose(f"workers: {workers!r}", expected="a number from 1"))
        running = Processes(int(workers))
    try:
        running.name(model)
        yield running
    except BaseException:
        running.end(now=True)
        raise
    running.end()


class Name(NamedTuple):
    """What a model is called where it has to be opened: in this process by a token, elsewhere by its files."""

    token: str
    files: Files | None

    def opened(self):
        model = _live.get(self.token)
        if model is not None:
            return model
        if self.files is None:
            do = "an executor of threads, or a model as it is in its folder"
            raise InputError(compose("the model is in the memory of another process", do=do))
        with _opening:
            return self._from_files()

    def _from_files(self):
        if self.files not in _opened:
            folder = self.files.found(open_store())
            if folder is None:
                raise lacks(_here(), self.files)
            _opened[self.files] = from_pretrained(folder)
        _opened[self.files] = model = _opened.pop(self.files)  # the last one is the one used last
        while len(_opened) > _OPEN:
            del _opened[next(iter(_opened))]
        return model


_live = weakref.WeakValueDictionary()  # {token: model of this process}
_opened, _opening = {}, threading.Lock()  # {Files: model} that were opened for others


def performed(name, expected, task):
    """The arrays of a lightened task; what runs in a worker.  `expected` is the `kind` of arithmetic, None: any."""
    if expected is not None and kind(arithmetic()) != expected:
        do = "the same version of qwenref and NumPy everywhere, on CPUs with the same instructions"
        raise WorkerMismatch(compose(f"{_here()}: other arithmetic than where the work was begun", do=do))
    model = name.opened()
    return lightly(task, model.config.text_config.vocab_size, perform(model, task))


def lacks(worker, files):
    """The error for a worker that does not have these files."""
    return WorkerMismatch(
        compose(
            f"{worker}: no folder with the files of {files.path}",
            expected=f"{', '.join(name for name, *_ in files.stats[:3])}, … with the same content, under that path",
            do="copy the folder, or share it",
        )
    )


def _here():
    return f"worker {platform.node()}, process {os.getpid()}"


class Running:
    """Tasks on an executor.  `.arithmetic` is what computes, in one word, for the keys of a store."""

    def __init__(self, executor, room=_ROOM):
        self._executor, self._room = executor, room
        self.arithmetic, self._kind = digest(arithmetic()), kind(arithmetic())
        self._names = weakref.WeakKeyDictionary()

    def end(self, now=False):
        """Nothing is at work any more; `now`: whatever still is is not wanted."""

    def name(self, model):
        """The Name of a model, which is looked at once."""
        if model not in self._names:
            self._names[model] = made = Name(secrets.token_hex(16), self._files(model))
            _live[made.token] = model
        return self._names[model]

    def run(self, model, tasks):
        """(index, Scored) of the tasks, in the order they are done."""
        name, vocab = self.name(model), model.config.text_config.vocab_size
        light = [lightened(task, vocab) for task in tasks]
        waiting, pending, tries = deque(range(len(light))), {}, Counter()
        try:
            while waiting or pending:
                lost, broken = [], self._hand_out(waiting, pending, name, light)
                done = wait(pending, None if broken else _LOOK, FIRST_COMPLETED).done
                self._look(done)
                for at, arrays in self._taken(done, pending, lost):
                    yield at, restored(light[at], vocab, arrays)
                if lost or broken:
                    for at, arrays in self._taken(wait(pending).done, pending, lost):
                        yield at, restored(light[at], vocab, arrays)
                    tries.update(lost)
                    self._mend(max(tries.values(), default=0))
                    waiting.extendleft(lost)
        finally:
            for future in pending:
                future.cancel()

    def _hand_out(self, waiting, pending, name, light):
        """Whether the executor turned out to be broken."""
        try:
            while waiting and len(pending) < self._room:
                future = self._submit(performed, name, self._kind, light[waiting[0]])
                pending[future] = waiting.popleft()
        except BrokenExecutor:
            return True
        return False

    def _taken(self, done, pending, lost):
        for future in done:
            at = pending.pop(future)
            try:
                arrays = self._result(future)
            except BrokenExecutor:
                lost.append(at)
                continue
            yield at, arrays

    def _files(self, model):
        if isinstance(self._executor, ThreadPoolExecutor):
            return None
        try:
            return files_of(model, open_store())
        except InputError:
            return None  # an executor of threads of another kind may not need any

    def _submit(self, *work):
        return self._executor.submit(*work)

    def _result(self, future):
        return future.result()

    def _look(self, done):
        """After some were done, or none for a while."""

    def _mend(self, tries):
        raise WorkersLost(compose("the executor is broken", do="workers=N, whose processes are started again"))


class Processes(Running):
    """A pool of processes of this machine, made anew when one of them ends."""

    def __init__(self, count):
        self._context = multiprocessing.get_context("spawn")
        # Nobody writes: a worker ends at once when the other side is closed, by us or because this process is gone.
        self._until, self._alive = self._context.Pipe(duplex=False)
        self._count, self._threads = count, max(1, _C.get_num_threads() // count)
        super().__init__(self._pool(), 2 * count + 1)
        self._kind = None  # the same files on the same machine

    def end(self, now=False):
        if now:
            self._alive.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._alive.close()
        self._until.close()

    def _pool(self):
        begin = (self._threads, self._until)
        return ProcessPoolExecutor(self._count, mp_context=self._context, initializer=_begin, initargs=begin)

    def _files(self, model):
        return files_of(model, content=False)

    def _submit(self, *work):
        # A process that this starts is born with SIGINT held back: a Ctrl-C is for the one that waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super()._submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _mend(self, tries):
        self._executor.shutdown(wait=True)
        if tries >= TRIES:
            raise WorkersLost(
                compose(
                    f"worker processes ended {tries} times over the same work",
                    expected='memory for each of them; in a script, `if __name__ == "__main__":` around what it does',
                    do="fewer workers, or none",
                )
            )
        words = "a worker process ended; what it was at is done again"
        warnings.warn(words, QwenrefWarning, stacklevel=frames_of_the_package())
        self._executor = self._pool()


def _begin(threads, until):
    """What a worker process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _C.set_num_threads(threads)

    def watch():
        until.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
