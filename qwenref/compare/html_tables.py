"""Parts of a report's page that are words: both texts beside each other, differences, and every figure by its name."""

import difflib
from html import escape

from qwenref.compare.text import number
from qwenref.compare.wording import CLASSES
from qwenref.html import Raw, table
from qwenref.rendering import visible
from qwenref.text_display import harmless

STYLE = (
    ".qr-cell{display:inline-flex;flex-direction:column;vertical-align:top;margin:0 1px 3px 0}"
    ".qr-cell>samp{padding:0 2px}"
    ".qr-flip{outline:1px solid var(--qr-quiet)}"
    ".qr-flip>samp+samp{border-top:2px solid var(--qr-delta)}"
    ".qr-ambiguous>samp+samp{border-top:4px double var(--qr-attention)}"
    ".qr-non-benign>samp+samp{border-top:4px dotted var(--qr-vision)}"
    ".qr-wide{overflow-x:auto}"
)


def wide(inner, name):
    """What may be wider than the page scrolls by itself, also from the keyboard."""
    return f'<div class="qr-wide" tabindex="0" role="group" aria-label="{escape(name)}">{inner}</div>'


def samp(text):
    return Raw(f"<samp>{escape(harmless(str(text)))}</samp>")


def strips(document, most=8, tokens=600):
    """(2) the texts, token by token; where the choices differ the reference's above, the engine's below."""
    parts = []
    for strip in document["strips"][:most]:
        pairs = list(zip(strip["reference"], strip["engine"], strip["classes"], strict=False))
        changed = sum(bool(kind) for _, _, kind in pairs)
        head = (
            f"prompt {strip['prompt']}, from position {strip['start']:,}: {changed:,} of {len(pairs):,} tokens differ"
        )
        before = f"<p><em>{escape(visible(strip['context_text'][-200:]))}</em></p>" if strip.get("context_text") else ""
        more = f"<p>… {len(pairs) - tokens:,} more tokens: report.strips</p>" if len(pairs) > tokens else ""
        cells = "\n".join(_cell(*pair) for pair in pairs[:tokens])
        parts.append(f"<h3>{escape(head)}</h3>{before}<div>{cells}</div>{more}")
    left = len(document["strips"]) - most
    return "".join(parts) + (f"<p>… {left:,} more prompts: report.strips</p>" if left > 0 else "")


def _cell(ours, theirs, kind):
    if not kind:
        return f'<span class="qr-cell">{samp(visible(ours))}</span>'
    title = escape(f"{kind}: {CLASSES[kind]}", quote=True)
    return (
        f'<span class="qr-cell qr-flip qr-{kind}" title="{title}">{samp(visible(ours))}<samp>'
        f"{escape(harmless(visible(theirs)))}</samp></span>"
    )


def flips(document, most=100):
    """Every token where the choices differ, as a table."""
    keys = ("prompt", "pos", "class", "ref_id", "ref_text", "eng_id", "eng_text", "margin", "sigma", "u")
    rows = [
        [samp(visible(row[key])) if key.endswith("text") and row.get(key) is not None else
         row[key] if key in ("prompt", "class") else number(row.get(key)) for key in keys]
        for row in document["flips"][:most]
    ]  # fmt: skip
    if not rows:
        return ""
    left = len(document["flips"]) - most
    head = [key.replace("ref_", "reference ").replace("eng_", "engine ") for key in keys]
    return wide(table(head, rows), "tokens that differ") + (f"<p>… {left:,} more: report.flips</p>" if left > 0 else "")


def config_differences(document):
    """(11) settings that differ, blanks and controls visible."""
    rows = [[samp(visible(str(row[key]))) for key in ("key", "ref", "engine")] for row in document["config_diff"]]
    return wide(table(("setting", "reference", "engine"), rows), "settings that differ") if rows else ""


def text_differences(document, most=24):
    """Prompts and tokenizations that differ, line by line, blanks visible."""
    parts = []
    for found in document["text_diffs"][:most]:
        lines = [found[side].splitlines(keepends=True) for side in ("ref", "engine")]
        changed = difflib.unified_diff(
            *([visible(line) for line in side] for side in lines), "reference", "engine", "", "", 2, ""
        )
        head = " · ".join(filter(None, [found["what"], found.get("id"), found.get("note")]))
        parts.append(f"<h3>{escape(head)}</h3><pre>{escape(harmless(chr(10).join(changed)))}</pre>")
    left = len(document["text_diffs"]) - most
    return "".join(parts) + (f"<p>… {left:,} more: report.text_diffs</p>" if left > 0 else "")


def leaves(value, path=""):
    """(dotted name, value) of everything in nested objects and lists of objects; lists of plain values stay whole."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    elif value not in (None, [], {}, ""):
        yield path, ", ".join(map(_exact, value)) if isinstance(value, list) else _exact(value)


def _exact(value):
    return str(value) if not isinstance(value, float) else f"{value:.9g}"


def everything(value, what):
    """A table of all values by name."""
    rows = [(name, samp(shown)) for name, shown in leaves(value)]
    return wide(table(("name", "value"), rows), what) if rows else ""
