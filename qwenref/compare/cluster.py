"""A Dask cluster that scores; it needs the package `distributed`, in the extra `cluster`."""

import asyncio
import time
import warnings
from concurrent.futures import CancelledError

from qwenref.compare.errors import ClusterUnreachable, WorkerMismatch, WorkersLost
from qwenref.compare.identity import arithmetic, digest, files_of, kind
from qwenref.compare.store import open_store
from qwenref.compare.workers import Running, lacks
from qwenref.errors import CapabilityMissing, InputError, QwenrefWarning, compose, frames_of_the_package

CONNECT = 10.0  # seconds to find the cluster and a worker in it
GONE = 60.0  # seconds it may be without one
LOOK = 5.0  # seconds between looks at what workers there are
_SOON = 0.05  # seconds between looks at what they answered
_NETWORK = (OSError, asyncio.TimeoutError)  # what waiting for a network ends with


def connected(address):
    """A Cluster; ClusterUnreachable where nobody answers, or no worker is there."""
    try:
        import distributed
    except ImportError as error:
        do = "pip install 'qwenref[cluster]'"
        raise CapabilityMissing(compose("a Dask cluster needs the package distributed", found=error, do=do)) from error
    if not isinstance(address, str):
        raise InputError(compose(f"dask: {address!r}", expected="an address, tcp://host:port"))
    try:
        client = distributed.Client(address, timeout=CONNECT, set_as_default=False)
    except (*_NETWORK, ValueError) as error:
        expected = "the address that the scheduler gives, tcp://host:port"
        raise ClusterUnreachable(compose(f"{address}: no Dask scheduler", found=error, expected=expected)) from error
    try:
        client.wait_for_workers(1, timeout=CONNECT)
    except _NETWORK as error:
        client.close()
        do = f"dask worker {address}"
        raise ClusterUnreachable(compose(f"{address}: a Dask cluster without workers", found=error, do=do)) from error
    return Cluster(client, address)


class Cluster(Running):
    """What a worker that ended was at is given to others by the cluster itself, up to its `allowed-failures` times."""

    def __init__(self, client, address):
        super().__init__(client.get_executor(pure=False))
        self._client, self._address = client, address
        self._looked = self._there = time.monotonic()

    def end(self, now=False):
        self._executor.shutdown(wait=not now)
        self._client.close()

    def _files(self, model):
        files = files_of(model, open_store())
        parts = _agreed(self._answers(files), files)
        self.arithmetic, self._kind = digest(parts), kind(parts)
        return files

    def _answers(self, files):
        """{worker: what it says, or an exception} of those that are there, each asked by a task of its own."""
        asked, slots = {}, self._slots()
        for worker in slots:
            asked[worker] = self._client.submit(_asked, files, workers=[worker], pure=False)
        while any(not future.done() for worker, future in asked.items() if worker in slots):
            time.sleep(_SOON)
            slots = self._slots()
        self._room = 2 * sum(slots.values())
        answers = {worker: future.exception() or future.result() for worker, future in asked.items() if future.done()}
        if not answers:
            raise ClusterUnreachable(compose(f"{self._address}: workers went away when they were asked"))
        return answers

    def _slots(self):
        """{worker: tasks it takes at once}, empty where the scheduler is gone."""
        try:
            return self._client.nthreads()
        except _NETWORK:
            return {}

    def _result(self, future):
        import distributed

        try:
            return future.result()
        except distributed.KilledWorker as error:
            do = "memory for each worker, or fewer threads in one"
            message = compose(f"{self._address}: workers end over the same work", found=error, do=do)
            raise WorkersLost(message) from error
        except CancelledError as error:
            raise WorkersLost(compose(f"{self._address}: the cluster has gone", do="start it again")) from error

    def _look(self, done):
        now = time.monotonic()
        if done:
            self._there = now
        if now - self._looked < LOOK:
            return
        self._looked = now
        slots = sum(self._slots().values())
        if slots:
            self._there, self._room = now, 2 * slots
        elif now - self._there > GONE:
            words = f"{self._address}: a cluster without workers for {GONE:.0f} s"
            raise WorkersLost(compose(words, do=f"dask worker {self._address}"))


_DO = "install the same qwenref there"


def _asked(files):
    """Of a worker: (parts of its arithmetic, whether it has the files)."""
    return arithmetic(), files.found(open_store()) is not None


def _agreed(answers, files):
    """The parts of the arithmetic that all workers share; WorkerMismatch where they do not, or one lacks the files."""
    here, first = arithmetic(), None
    for worker, answer in sorted(answers.items()):
        if isinstance(answer, BaseException):
            raise WorkerMismatch(compose(f"worker {worker}: it cannot be asked", found=answer, do=_DO)) from answer
        parts, has_files = answer
        for part in ("qwenref", "sources"):
            if parts[part] != here[part]:
                what = f"worker {worker}: another version of qwenref ({part})"
                raise WorkerMismatch(compose(what, found=parts[part][:12], expected=here[part][:12], do=_DO))
        if not has_files:
            raise lacks(f"worker {worker}", files)
        first = (worker, parts) if first is None else first
        if kind(parts) != kind(first[1]):
            what = f"workers {worker} and {first[0]}: not the same arithmetic, so scores would depend on who made them"
            do = "workers of one kind: the same NumPy, CPUs with the same instructions"
            raise WorkerMismatch(compose(what, found=_differing(parts, first[1]), do=do))
    parts = first[1]
    if kind(parts) != kind(here):
        words = compose("last bits in float64 may be others on this cluster than here", found=_differing(parts, here))
        warnings.warn(words, QwenrefWarning, stacklevel=frames_of_the_package())
    built = sorted({answer[0]["extension"] for answer in answers.values()})
    return {**parts, "extension": " ".join(built)}


def _differing(parts, others):
    return "\n".join(f"{name}: {what}, not {others[name]}" for name, what in parts.items() if what != others[name])
