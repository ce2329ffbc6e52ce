"""Progress of work that takes seconds: one line that goes away, on a terminal or in a notebook and nowhere else."""

import os
import sys
import time

from qwenref.errors import InputError, compose

SHORTEST, AFTER, EVERY = 2.0, 0.5, 0.2  # seconds: work shorter than that shows nothing, nor do its first moments


class Progress:
    """Tells how far a piece of work is.  `wanted` None: where somebody can see it; False: nowhere; or a callable, which
    gets (done, total, what) at every step.  QWENREF_PROGRESS=0 turns off what None would show.

    What it says is an estimate from the time gone by.
    """

    def __init__(self, wanted=None, unit="tokens", clock=time.monotonic):
        if wanted is not None and wanted is not False and not callable(wanted):
            raise InputError(
                compose("progress", found=repr(wanted), expected="None, False, or a function of (done, total, what)")
            )
        self._tell = wanted if callable(wanted) else None
        self._line = _line() if wanted is None else None
        self._unit, self._clock, self._what = unit, clock, None
        self._shown = float("-inf")

    def end(self):
        """Clear the line; to be called whatever happened."""
        if self._line is not None:
            self._line.clear()

    def at(self, done, total, what):
        """`done` of `total` in the part of the work called `what`; a new name starts the clock again."""
        if self._tell is not None:
            self._tell(done, total, what)
        if self._line is None:
            return
        now = self._clock()
        if what != self._what:
            self._what, self._start, self._first = what, now, done
        gone, made = now - self._start, done - self._first
        if made <= 0 or gone < AFTER or now - self._shown < EVERY:
            return
        left = gone / made * (total - done)
        if gone + left >= SHORTEST:
            self._shown = now
            rate = made / gone
            speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            self._line.show(f"{what} {done:,}/{total:,} {self._unit} · {speed} {self._unit[:3]}/s · {left:,.0f} s left")


class Status:
    """The same line, saying what is going on where no length is known.  A context manager: its end clears the line."""

    def __init__(self, stream=None):
        self._line, self._shown = _line(stream), float("-inf")

    def __call__(self, what):
        now = time.monotonic()
        if self._line is not None and now - self._shown >= EVERY:
            self._shown = now
            self._line.show(what[:99])

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self._line is not None:
            self._line.clear()


def _line(stream=None):
    """Where a line can be shown, or None."""
    if os.environ.get("QWENREF_PROGRESS") == "0":
        return None
    if stream is None and "ipykernel" in sys.modules:
        return _Cell()
    stream = sys.stderr if stream is None else stream
    try:
        return _Terminal(stream) if stream.isatty() and os.environ.get("TERM") != "dumb" else None
    except (AttributeError, ValueError):  # no stream, or one that is closed
        return None


class _Terminal:
    def __init__(self, stream):
        self._stream, self._width = stream, 0

    def show(self, text):
        text = text if "utf" in (getattr(self._stream, "encoding", "") or "").lower() else text.replace("·", "|")
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def clear(self):
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


class _Cell:
    """One display handle of a notebook, updated in place."""

    def __init__(self):
        self._handle = None

    def show(self, text):
        from IPython.display import display

        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def clear(self):
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
            self._handle = None
