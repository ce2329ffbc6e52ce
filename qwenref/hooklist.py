"""Which hooks a model has, where they came from and how old they are; and taking all of them away."""

import time

from qwenref import _C
from qwenref.handles import global_always_called, global_with_kwargs, hook_name

_TABLES = (("_forward_pre_hooks", "pre-hook"), ("_forward_hooks", "hook"))
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class HookEntry:
    """One hook: `.place` path of its module, `.kind` "hook" or "pre-hook", `.hook` the callable, `.age` in seconds."""

    def __init__(self, place, kind, hook, since):
        self.place, self.kind, self.hook = place, kind, hook
        self.age = None if since is None else max(0.0, time.time() - since)

    def row(self):
        age = "?" if self.age is None else _age(self.age)
        return self.place, self.kind, hook_name(self.hook), f"{age} old"

    def __repr__(self):
        return " · ".join(self.row())


class HookList(list):
    """Hooks in the order of the tree; those of the whole process, which every module runs, come first."""

    def __repr__(self):
        from qwenref.plain import plain

        head = f"{len(self):,} hook{'s' * (len(self) != 1)}"
        rows = [entry.row() for entry in self[:38]]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = [f"  … {len(self) - 38:,} more"] if len(self) > 38 else []
        return plain("\n".join([head, *lines, *more]))

    def _repr_html_(self):
        from qwenref.html import block, table

        rows = [entry.row() for entry in self[:38]]
        more = f"<p>… {len(self) - 38:,} more</p>" if len(self) > 38 else ""
        head = f"<p><b>{len(self):,} hook{'s' * (len(self) != 1)}</b></p>\n"
        return block(head + (table(("module", "kind", "hook", "age"), rows) if rows else "") + more)


def hooks(model):
    """Every hook that a call of `model` runs: module, kind, function with its place in the source, and age."""
    found = HookList()
    for table_, kind in ((_C.global_forward_pre_hooks, "pre-hook"), (_C.global_forward_hooks, "hook")):
        found += _entries("(every module)", kind, table_)
    for path, module in model.named_modules():
        for name, kind in _TABLES:
            found += _entries(path or "(the model itself)", kind, getattr(module, name))
    return found


def _entries(place, kind, table_):
    since = getattr(table_, "since", {})
    return [HookEntry(place, kind, hook, since.get(id)) for id, hook in table_.items()]


def clear_hooks(model):
    """Take every hook of `model` and of the whole process away, those of open captures too; the list of what went."""
    gone = hooks(model)
    for module in model.modules():
        for name in (*(name for name, _ in _TABLES), *_OPTIONS):
            getattr(module, name).clear()
    for table_ in (_C.global_forward_pre_hooks, _C.global_forward_hooks, global_with_kwargs, global_always_called):
        table_.clear()
    return gone


def _age(seconds):
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
