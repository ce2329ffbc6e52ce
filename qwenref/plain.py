"""Displays as text: columns, and the plain form for a terminal or pipe that takes only ASCII."""

import os
import re
import sys

ASCII = {
    "├ ": "|-", "└ ": "`-", "│ ": "| ", "·": "-", "…": "...", "–": "-", "▏": "|", "⟨": "<", "⟩": ">", "␣": "_",
    "⏎": "\\n", "⇥": "\\t", "→": "->", "×": "x",
}  # fmt: skip


def plain(text, stream=None):
    """`text` as the stream (standard output) can show it."""
    stream = sys.stdout if stream is None else stream
    if (getattr(stream, "encoding", None) or "").lower().startswith("utf") and os.environ.get("TERM") != "dumb":
        return text
    return ascii_form(text)


def ascii_form(text):
    for character, substitute in ASCII.items():
        text = text.replace(character, substitute)
    return re.sub(r"⚓(\d+)", lambda n: f"[{n[1]} hook{'s' * (n[1] != '1')}]", text)


def aligned(rows):
    """A line per row of cells, columns two blanks apart; a column that is empty throughout is left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(n) for c, n in zip(row, widths, strict=True) if n).rstrip() for row in rows]


def broken(error):
    """What stands in the place of a part of a display that could not be made."""
    return f"<error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}>".replace(": >", ">")
