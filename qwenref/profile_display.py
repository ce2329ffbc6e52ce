"""A profile as tables: ops by time, modules in the order of the tree, as text and as HTML."""

from html import escape

from qwenref.html import block, table
from qwenref.plain import plain
from qwenref.rates import duration, quantity

OP_HEAD = ("share", "time", "calls", "of limit", "bytes", "flops", "op")
MODULE_HEAD = ("share", "own time", "all inside", "calls", "of limit", "bytes", "flops", "module")
NOTE = (
    "share: of the whole time, modules inside left out · of limit: least time by a plain read and by multiply-adds, "
    "whichever is longer, to the time taken; above 100 % the bytes were in a cache"
)


def _percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def headline(profile):
    calls = max((work.calls for work in profile.modules.values()), default=0)
    if not calls:
        return "Profile · no call yet"
    outer = next(iter(profile.groups().values())).calls
    many = f"{outer:,} call{'s' * (outer != 1)}"
    return f"Profile · {many} · {duration(profile.seconds)} · numerics {profile.numerics}"


def op_rows(profile):
    """Rows of the ops by time, and of what is between them; their shares add up to the whole."""
    total, rows = profile.seconds, []
    inside = sum(work.seconds for work in profile.ops.values())
    for name, work in sorted(profile.ops.items(), key=lambda item: -item[1].seconds):
        share = work.seconds / total if total else 0.0
        figures = (f"{work.calls:,}", _percent(work.of_limit), quantity(work.bytes, "B"), quantity(work.flops, "FLOP"))
        rows.append((_percent(share), duration(work.seconds), *figures, name))
    if total:
        between = max(0.0, total - inside)
        rows.append((_percent(between / total), duration(between), "", "-", "", "", "(between ops: Python and NumPy)"))
    return rows


def module_rows(profile):
    """Rows of the modules in the order of the tree, layers of one kind in one; their shares add up to the whole."""
    total, rows = profile.seconds, []
    for name, work in profile.groups().items():
        share = work.own_seconds / total if total else 0.0
        times = (duration(work.own_seconds), duration(work.seconds), f"{work.calls:,}", _percent(work.of_limit))
        name = name.removeprefix("model.").removeprefix("language_model.")
        rows.append((_percent(share), *times, quantity(work.bytes, "B"), quantity(work.flops, "FLOP"), name))
    return rows


def columns(head, rows):
    """Lines of a table: figures to the right, names to the left."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  " + "  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    ]


def _cut(rows, seconds, limit):
    """(rows, what was left out): those that took longest, in their order."""
    if limit is None or len(rows) <= limit:
        return rows, ""
    kept = sorted(range(len(rows)), key=lambda i: -seconds[i])[:limit]
    return [rows[i] for i in sorted(kept)], f"… {len(rows) - limit:,} more that took less"


def _tables(profile, limit):
    """(title, head, rows, what was left out) of both tables."""
    ops = op_rows(profile)
    seconds = sorted((work.seconds for work in profile.ops.values()), reverse=True)
    modules = [work.own_seconds for work in profile.groups().values()]
    yield "Ops", OP_HEAD, *_cut(ops, [*seconds, 0.0], limit)
    yield "Modules", MODULE_HEAD, *_cut(module_rows(profile), modules, limit)


def text(profile, limit=None):
    lines = [headline(profile)]
    if profile.rates is not None:
        lines.append(f"limits: {profile.rates}")
    for _, head, rows, more in _tables(profile, limit):
        if rows:
            lines += columns(head, rows)
            lines += [f"  {more}, text() has all"] if more else []
    return plain("\n".join(lines))


def html(profile, limit=None):
    parts = [f"<p><b>{escape(headline(profile))}</b></p>"]
    if profile.rates is not None:
        parts.append(f"<p><em>{escape(str(profile.rates))}</em></p>")
    for title, head, rows, more in _tables(profile, limit):
        turned = [(row[-1], *row[:-1]) for row in rows]
        if rows:
            parts.append(
                f"<h4>{title}</h4>" + table((head[-1], *head[:-1]), turned) + (f"<p>{more}</p>" if more else "")
            )
    return block("\n".join(parts) + f"<p><em>{escape(NOTE)}</em></p>", "qr-profile")


def save_html(profile, path):
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>qwenref profile</title>{html(profile)}</html>\n'
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
