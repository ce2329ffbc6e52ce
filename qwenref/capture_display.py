"""What a Capture shows: its calls, its names grouped by pattern over the layers, ranges and small pictures.

Of large values a sample is looked at, so that looking stays quick; the display says so.  A Trace shows its rows.
"""

import math
import re
from html import escape

import numpy as np

from qwenref.arrays import extent, finite_text, picture, range_text, shape_text
from qwenref.handles import short_name
from qwenref.html import Raw, block, table
from qwenref.plain import aligned, broken, plain
from qwenref.sizes import memory

_STEPS, _LINES = 8, 40  # calls and lines of a repr
_LOOKED_AT = 1 << 21  # elements per display; shared by its lines
_PICTURES = 6
_DRAWN = 1 << 20  # entries of a picture that are looked at


class Group:
    """Names that differ only in their layer and hold arrays of one shape."""

    def __init__(self, pattern, site):
        self.pattern, self.site, self.members = pattern, site, []  # members (name, {step: array})
        self._found = None

    @property
    def first(self):
        """(name, array) of the first name in its first step."""
        name, kept = self.members[0]
        return name, kept[min(kept)]

    def by_layer(self, elements):
        """Statistics of each name over its steps, looking at no more than about `elements` entries of the group."""
        if self._found is None:
            each = max(1 << 14, elements // sum(len(kept) for _, kept in self.members))
            self._found = [_joined([extent(a, each) for a in kept.values()]) for _, kept in self.members]
        return self._found

    def line(self, elements):
        """(shape, range, finding) in words."""
        array = self.first[1]
        try:
            found = _joined(self.by_layer(elements))
        except Exception as error:
            return shape_text(array, self.site.dims), broken(error), ""
        finding = finite_text(found) if found.nan or found.inf or found.masked else ""
        mark = "~" if found.stride > 1 else ""
        words = mark + range_text(found) if found.min == found.min else ""
        return shape_text(array, self.site.dims), words, re.sub(r" first at .*", "", finding)


def _joined(found):
    """Range and counts of several statistics together."""
    lows, highs = [f.min for f in found if f.min == f.min], [f.max for f in found if f.max == f.max]
    return found[0]._replace(
        min=min(lows, default=float("nan")),
        max=max(highs, default=float("nan")),
        nan=sum(f.nan for f in found),
        inf=sum(f.inf for f in found),
        masked=sum(f.masked for f in found),
        first_bad=next((f.first_bad for f in found if f.first_bad is not None), ()),
        stride=max(f.stride for f in found),
    )


def groups_of(values, targets):
    """[Group] of {name: {step: array}}, in the order of the tree."""
    found = {}
    for name, kept in values.items():
        if not kept:
            continue
        first, short = kept[min(kept)], re.sub(r"^model\.(language_model\.)?", "", name)
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", short)
        group = found.setdefault((pattern, first.shape, first.dtype), Group(pattern, targets[name]))
        group.members.append((name, kept))
    for group in found.values():
        if len(group.members) == 1:
            group.pattern = re.sub(r"^model\.(language_model\.)?", "", group.members[0][0])
    return list(found.values())


class CaptureView:
    """Text and HTML of a capture; `limit` lines, or all there is."""

    def __init__(self, calls, values, targets, nbytes, max_bytes, limit=_LINES, pictures=_PICTURES):
        self.calls, self.values, self.nbytes, self.max_bytes = calls, values, nbytes, max_bytes
        self.groups = groups_of(values, targets)
        self.limit, self.pictures = limit, pictures

    @property
    def headline(self):
        n = len(self.calls)
        tokens = [f"{call['T']:,}" if call else "?" for call in self.calls]
        shown = " + ".join(tokens if n <= 4 else [*tokens[:3], "…", tokens[-1]])
        fed = f" ({shown} token{'s' * (tokens != ['1'])})" if n else ""
        names = len(self.values)
        return (
            f"Capture · {n:,} call{'s' * (n != 1)}{fed} · {names:,} name{'s' * (names != 1)} · "
            f"{memory(self.nbytes)} of {memory(self.max_bytes)} budget"
        )

    def steps(self):
        """(step, tokens, names, bytes, phase) of each step that was kept."""
        kept = {}
        for arrays in self.values.values():
            for step, array in arrays.items():
                names, nbytes = kept.get(step, (0, 0))
                kept[step] = names + 1, nbytes + array.nbytes
        for step in sorted(kept):
            call = self.calls[step] if step < len(self.calls) else {}
            yield step, call.get("T"), *kept[step], _phase(call)

    def _step_rows(self):
        rows = [
            (f"{step:,}", "?" if tokens is None else f"{tokens:,}", f"{names:,}", memory(nbytes), phase)
            for step, tokens, names, nbytes, phase in self.steps()
        ]
        if self.limit and len(rows) > _STEPS:
            return rows[: _STEPS - 1], f"… {len(rows) - _STEPS + 1:,} more steps: c.steps(name), c.tree()"
        return rows, ""

    def _pattern_rows(self, used):
        room = len(self.groups) if not self.limit else self.limit - used
        shown = self.groups if len(self.groups) <= room else self.groups[: room - 1]
        left = len(self.groups) - len(shown)
        looked_at = _LOOKED_AT // max(1, len(shown))
        rows = [(g.pattern, f"x {len(g.members)}", *g.line(looked_at)) for g in shown]
        notes = [f"… {left:,} more pattern{'s' * (left != 1)}: c.names(), c.tree()"] if left else []
        if any(row[3].startswith("~") for row in rows):
            notes.insert(0, "~ of a sample")
        return shown, rows, " · ".join(notes)

    def text(self):
        steps, more = self._step_rows()
        lines = [self.headline]
        if steps:
            lines.append("  step  tokens  names       bytes")
            lines += [f"  {a:>4}  {b:>6}  {c:>5}  {d:>10}   {e}".rstrip() for a, b, c, d, e in steps]
        if more:
            lines.append(f"  {more}")
        _, rows, notes = self._pattern_rows(len(lines) + 1)
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        for row in rows:
            columns = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append("  ".join(["", columns, *filter(None, row[3:])]).rstrip())
        if notes:
            lines.append(f"  {notes}")
        return "\n".join(lines)

    def html(self):
        steps, more = self._step_rows()
        shown, rows, notes = self._pattern_rows(len(steps) + 4)
        body = f"<p><b>{escape(self.headline)}</b></p>\n"
        body += table(("step", "tokens", "names", "bytes", "phase"), steps) if steps else ""
        body += f"<p>{escape(more)}</p>" if more else ""
        cells = [
            (*row[:4], " ".join(filter(None, row[4:])), Raw(_sparkline(group)))
            for group, row in zip(shown, rows, strict=True)
        ]
        body += table(("names", "layers", "array", "range", "finding", "by layer"), cells) if cells else ""
        body += f"<p>{escape(notes)}</p>" if notes else ""
        flat = [group for group in shown if _is_flat(group.first[1])]
        body += "\n".join(map(_thumbnail, flat[: self.pictures]))
        if len(flat) > self.pictures:
            body += f"<p>more pictures: {len(flat) - self.pictures:,}, c.save_html(path)</p>"
        return body

    def __str__(self):
        return plain(self.text())

    __repr__ = __str__

    def _repr_html_(self):
        return block(self.html())


def _phase(call):
    if not call:
        return "part"
    return "prefill" if call["S"] == call["T"] else "decode" if call["T"] == 1 else "continued"


def _sparkline(group):
    """Range of the values over the layers: the largest above, the smallest below."""
    if len(group.members) < 2:
        return ""
    values = np.array([(f.min, f.max) for f in group.by_layer(_LOOKED_AT)], float)
    if not np.isfinite(values).all():
        return ""
    low, high = values.min(), values.max()
    x = np.linspace(1, 95, len(values))
    y = 19 - 18 * (values - low) / (high - low if high > low else 1)
    step = -(-len(x) // 64)  # a deep stack is thinned, so that the picture stays small
    lines = "".join(
        f'<polyline points="{" ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x[::step], row[::step], strict=True))}"/>'
        for row in y.T
    )
    name = escape(f"smallest and largest value of {group.pattern}, layer by layer", quote=True)
    return f'<svg width="96" height="20" role="img" aria-label="{name}">{lines}</svg>'


def _is_flat(array):
    """Whether the last two dimensions of an array make a picture."""
    return array.ndim > 1 and min(array.shape[-2:]) > 1 and (array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def _thumbnail(group):
    """Picture of the last two dimensions of the first array."""
    name, array = group.first
    try:
        matrix = array[(0,) * (array.ndim - 2)]
        thin = max(1, math.ceil(math.sqrt(matrix.size / _DRAWN)))
        uri, low, high, blocks = picture(matrix[::thin, ::thin])
        dims = group.site.dims if len(group.site.dims) == array.ndim else ("",) * array.ndim
        others = [f"{d} 0" for d, size in zip(dims[:-2], array.shape, strict=False) if d and size > 1]
        words = ", ".join([re.sub(r"^model\.(language_model\.)?", "", name), *others])
        words += f": {' x '.join(f'{d} {n:,}'.strip() for d, n in zip(dims[-2:], matrix.shape, strict=True))}"
        words += f", scale {low:.4g} … {high:.4g}" + (", largest of each block" if blocks else "")
        words += f", one in {thin} rows and columns" if thin > 1 else ""
        at = np.unravel_index(int(matrix[::thin, ::thin].argmax()), matrix[::thin, ::thin].shape)
        alt = f"{words}; largest (or first NaN) at [{at[0] * thin}, {at[1] * thin}]"
    except Exception as error:
        return f"<p>{escape(broken(error))}</p>"
    size = max(96 // max(matrix.shape), 1)
    width, height = (min(96, n * size) for n in (matrix.shape[1], matrix.shape[0]))
    image = f'<img src="{uri}" width="{width}" height="{height}" alt="{escape(alt, quote=True)}">'
    return f'<figure title="{escape(alt, quote=True)}">{image}<figcaption>{escape(words)}</figcaption></figure>'


# ---- trace ---------------------------------------------------------------------------------------------------------

_ROWS = 37  # of a trace


def _trace_headline(trace):
    rows, calls = len(trace.rows), len(trace.calls)
    return f"Trace · {rows:,} value{'s' * (rows != 1)} in {calls:,} call{'s' * (calls != 1)}"


def _trace_rows(trace):
    """(step, name, array, range, rms, finding, time) in words, of the rows that are shown."""
    for row, labels in zip(trace.rows[:_ROWS], trace.labels, strict=False):
        labels = labels if len(labels) == len(row.shape) else ("",) * len(row.shape)
        sizes = ", ".join(f"{label} {size:,}".strip() for label, size in zip(labels, row.shape, strict=True))
        some = row.min == row.min
        yield (
            "–" if row.step is None else f"{row.step:,}",
            short_name(row.name),
            f"{row.dtype} [{sizes}]",
            f"{row.min:.4g} … {row.max:.4g}" if some else "",
            f"rms {row.rms:.4g}" if some else "",
            f"{row.nonfinite:,} not finite" if row.nonfinite else "",
            f"{row.ms:.3g} ms",
        )


def trace_text(trace):
    """At most 40 lines: one per value, in the order they went by."""
    rows = [*_trace_rows(trace)]
    more = [f"  … {len(trace.rows) - _ROWS:,} more: .rows"] if len(trace.rows) > _ROWS else []
    return plain("\n".join([_trace_headline(trace), *("  " + line for line in aligned(rows)), *more]))


def trace_html(trace):
    more = f"<p>… {len(trace.rows) - _ROWS:,} more: .rows</p>" if len(trace.rows) > _ROWS else ""
    rows = [(name, *rest) for name, *rest in ((row[1], row[0], *row[2:]) for row in _trace_rows(trace))]
    body = table(("name", "step", "array", "range", "rms", "finding", "time"), rows) if rows else ""
    return block(f"<p><b>{escape(_trace_headline(trace))}</b></p>\n{body}{more}")


def save_html(view, path):
    """One file that shows the view by itself."""
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{escape(view.headline)}</title></head><body>{view._repr_html_()}</body></html>\n"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
