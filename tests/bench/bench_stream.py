"""Weights larger than the memory there is: bytes read from disk and time of a pass, with and without giving layers up.

    python tests/bench/bench_stream.py [--shape 0.8b] [--folder DIR] [--share 0.6] [--steps 4]

Random weights are made once in DIR, where `qwenref bench` finds them too.  The model is opened by a process of its own
in a control group whose memory is `share` of the weights, so it needs root and the memory controller of version 1 or 2
under /sys/fs/cgroup.  Pages that the system holds of the files are dropped first, or the group would use those for
nothing; pages that another process has mapped stay, so let none have the files open.  A pass has to read at least what
does not fit; a plain map reads the whole.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qwenref.bench.shapes import random_folder

PLAIN, STREAMED = "0", "1"  # QWENREF_STREAM_WEIGHTS
SIDES = {PLAIN: "as the system pages", STREAMED: "layers given up"}


@contextlib.contextmanager
def group(limit):
    """The file that takes the ids of processes into a control group with so many bytes of memory."""
    old = Path("/sys/fs/cgroup/memory")
    root, name = (old, "memory.limit_in_bytes") if old.is_dir() else (old.parent, "memory.max")
    folder = root / f"qwenref-bench-{os.getpid()}"
    try:
        folder.mkdir()
        folder.joinpath(name).write_text(str(limit))
    except OSError as error:
        raise SystemExit(f"bench_stream: no control group for memory: {error}") from error
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def dropped(folder):
    """Have the system give up what it holds of the files in this folder."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def passes(folder, steps):
    """Run a prompt of 64 tokens and then single tokens: [{"seconds", "read", "faults"}, ...] and the weights' bytes."""
    import numpy as np

    import qwenref

    model = qwenref.from_pretrained(folder)
    cache, found = qwenref.Cache(model), []
    for ids in (np.arange(1, 65), *[[1]] * steps):
        before, start = _counters(), time.perf_counter()
        model(ids, cache=cache, logits_to_keep=1)
        seconds, after = time.perf_counter() - start, _counters()
        found.append({"seconds": seconds, "read": after[0] - before[0], "faults": after[1] - before[1]})
    pages = model.text_model.weight_pages
    return {"passes": found, "weights": pages.nbytes, "stay": pages.stay, "layers": len(pages.bytes)}


def _counters():
    """Bytes read from disk, and faults that waited for it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    read = next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return read, int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[9])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.8b")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--share", type=float, default=0.6, help="memory, as a share of the weights")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(passes(options.inside, options.steps)))
        return
    folder = random_folder(options.shape, options.folder)
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    limit = int(options.share * size)
    print(f"{size / 1e9:.2f} GB of weights, {limit / 1e9:.2f} GB of memory; medians of {options.steps} tokens")
    for word, side in SIDES.items():
        dropped(folder)
        command = [sys.executable, __file__, "--inside", str(folder), "--steps", str(options.steps)]
        with group(limit) as procs:
            done = subprocess.run(
                command,
                env={**os.environ, "QWENREF_STREAM_WEIGHTS": word},
                preexec_fn=lambda procs=procs: procs.write_text(str(os.getpid())),
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
        said = json.loads(done.stdout)
        prompt, *steps = said["passes"]
        seconds, read, faults = (statistics.median(each[key] for each in steps) for key in prompt)
        print(
            f"{side:20} {said['stay']:2} of {said['layers']} layers stay · "
            f"prompt {prompt['seconds']:.2f} s, {prompt['read'] / 1e9:.2f} GB read · "
            f"token {seconds:.2f} s, {read / 1e9:.2f} GB read, {faults:,.0f} waits"
        )


if __name__ == "__main__":
    main()
