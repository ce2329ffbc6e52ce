"""Threads beside ours: those of Python, of torch, of a process that forks, and signals that come meanwhile."""

import itertools
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fresh
import numpy as np
import pytest

import qwenref
from qwenref import ops


class Scale(qwenref.Module):
    """x times a buffer, which others exchange while it runs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", np.float32(1) * np.ones(1, np.float32))

    def forward(self, x):
        return ops.mul(x, np.full(8, self.factor[0], np.float32))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def work():
    """Bytes that several kernels made, each large enough to be shared out and to let go of the GIL."""
    x, w = numbers(24, 512), numbers(1024, 512, seed=1)
    y = ops.linear(x, w)
    return (y + ops.silu(y)).tobytes() + ops.linear(x[:1], w).tobytes()


@pytest.fixture
def three_threads():
    before = qwenref.get_num_threads()
    qwenref.set_num_threads(3)
    yield
    qwenref.set_num_threads(before)


def test_ops_called_from_eight_threads_at_once_have_the_bits_of_one(three_threads):
    expected = work()
    start = threading.Barrier(8)

    def many(_):
        start.wait()
        return [work() for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        found = list(itertools.chain(*pool.map(many, range(8))))
    assert found == [expected] * 80


def test_signals_that_come_every_millisecond_change_nothing_and_reach_the_main_thread(three_threads):
    expected, seen = work(), []
    before = signal.signal(
        signal.SIGALRM, lambda *_: seen.append(threading.current_thread() is threading.main_thread())
    )
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        found = [work() for _ in range(30)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == [expected] * 30
    assert len(seen) > 1 and all(seen)


def test_our_threads_block_every_signal():
    """The host program's handlers must run where it expects them."""
    program = """
import re
from pathlib import Path
import qwenref, test_threads

def blocked():
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        found[status.parent.name] = int(re.search("SigBlk:\\t(.*)", status.read_text())[1], 16)
    return found

qwenref.set_num_threads(4)
before = blocked()
test_threads.work()
ours = {name: mask for name, mask in blocked().items() if name not in before}
print(*ours.values())
"""
    done = fresh.python(program, check=False)
    # All 64 but what no thread can block (SIGKILL, SIGSTOP) and the two that the C library keeps for itself.
    rest = sum(1 << number - 1 for number in (signal.SIGKILL, signal.SIGSTOP, 32, 33))
    assert [int(mask) | rest for mask in done.stdout.split()] == [2**64 - 1] * 3, (done.stdout, done.stderr)


@pytest.mark.parametrize("first", ["torch", "qwenref"])
def test_torch_and_qwenref_leave_each_other_their_threads(first):
    """In either order of import; both at work at the same time, each in a thread of its own."""
    program = f"""
import {first}
import threading
import torch, qwenref, test_threads
counts = torch.get_num_threads(), qwenref.get_num_threads()
torch.set_num_threads(2)
qwenref.set_num_threads(3)
expected = test_threads.work()
a = torch.ones(300, 300)
product = a @ a

found = []
other = threading.Thread(target=lambda: found.extend(test_threads.work() for _ in range(20)))
other.start()
while other.is_alive():
    assert torch.equal(a @ a, product)
other.join()
assert found == [expected] * 20
assert (torch.get_num_threads(), qwenref.get_num_threads()) == (2, 3)
print(*counts)
"""
    alone = "import torch; print(torch.get_num_threads(), end=' '); import qwenref; print(qwenref.get_num_threads())"
    done = fresh.python(program, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == fresh.python(alone).stdout


def test_children_forked_while_other_threads_compute_compute_the_same():
    program = """
import os, threading
import qwenref, test_threads
qwenref.set_num_threads(3)
expected = test_threads.work()
go_on = True

def busy():
    while go_on:
        assert test_threads.work() == expected

threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if test_threads.work() == expected else 9)
    children.append(child)
ended = [os.waitpid(child, 0)[1] for child in children]
go_on = False
for thread in threads:
    thread.join()
print(*ended)
"""
    try:
        done = fresh.python(
            "import warnings; warnings.simplefilter('ignore', DeprecationWarning)" + program, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail("a forked child hangs")
    assert done.stdout == " ".join("0" * 10) + "\n", done.stderr


def test_a_module_may_change_while_other_threads_call_it():
    """A call sees one state or the other, and nothing it holds is freed: attributes, buffers, their table, hooks, the
    dict of the instance, its name in the tree."""
    module, ones, faults = Scale(), np.ones(8, np.float32), []
    ends = time.monotonic() + 1.5

    def call():
        y = module(ones)
        assert set(y.tolist()) <= {1.0, 2.0}
        assert module.factor[0] in (1, 2)

    def buffer():
        for value in (1, 2):
            module.factor = np.full(1, value, np.float32)

    def table():
        module._buffers = {"factor": np.ones(1, np.float32)}

    def hooks():
        module.register_forward_hook(lambda m, inputs, output: None).remove()

    def attributes():
        module.__dict__ = {"note": object()}
        module._path = f"at.{time.monotonic()}"

    def failing():
        with pytest.raises(qwenref.ShapeError) as caught:
            module(ones[:3])
        assert "in module " in caught.value.__notes__[0]

    def repeat(f):
        try:
            while time.monotonic() < ends:
                for _ in range(50):
                    f()
        except BaseException as error:  # the main thread tells
            faults.append(error)

    threads = [
        threading.Thread(target=repeat, args=(f,)) for f in (call, call, buffer, table, hooks, attributes, failing)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
