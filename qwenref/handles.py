"""Hook tables: entering a hook, the handle that takes it out again, and the hooks of the whole process."""

import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict

import numpy as np

from qwenref import _C
from qwenref.errors import HookError, a_kind, compose

# Options of the hooks of the whole process; the hooks themselves lie in _C, where every call looks for them.
global_with_kwargs = OrderedDict()
global_always_called = OrderedDict()

# Held where a table is read or changed: an OrderedDict bears no change while it is read, and without the GIL another
# thread may be about it. A child must not find it held by a thread that the fork left behind.
exclusive = threading.RLock()
os.register_at_fork(before=exclusive.acquire, after_in_parent=exclusive.release, after_in_child=exclusive.release)


class RemovableHandle:
    """Takes one hook away again: by `remove()`, any number of times, or at the end of a `with` block.

    Tables are held weakly, so a handle keeps no model alive.  Copied or pickled together with its module, it belongs to
    the copy.
    """

    _ids = itertools.count()

    def __init__(self, *tables):
        self.id = next(RemovableHandle._ids)
        self._tables = tuple(map(weakref.ref, tables))

    def remove(self):
        with exclusive:
            for table in self._tables:
                hooks = table()
                if hooks is not None:
                    hooks.pop(self.id, None)
                    getattr(hooks, "since", {}).pop(self.id, None)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.remove()

    def __getstate__(self):
        return self.id, tuple(table() for table in self._tables)

    def __setstate__(self, state):
        self.id, tables = state
        self._tables = tuple(weakref.ref(OrderedDict() if table is None else table) for table in tables)
        # A handle from another process must not share its number with a later one of this.
        RemovableHandle._ids = itertools.count(max(self.id + 1, next(RemovableHandle._ids)))


def register(hook, hooks, *, prepend=False, **options):
    """Enter `hook` into `hooks`; each option is a pair (wanted, table of the ids that have it)."""
    handle = RemovableHandle(hooks, *(table for _, table in options.values()))
    with exclusive:
        for wanted, table in options.values():
            if wanted:
                table[handle.id] = True
        hooks[handle.id] = hook
        _note_time(hooks, handle.id)
        if prepend:
            hooks.move_to_end(handle.id, last=False)
    return handle


def _note_time(hooks, id):
    """When a hook was entered is kept on its table, where it goes with the table and can be listed."""
    since = hooks.__dict__.setdefault("since", {})
    if len(since) > 2 * len(hooks):  # hooks that left without their handle
        hooks.since = since = {key: value for key, value in since.items() if key in hooks}
    since[id] = time.time()


def register_module_forward_pre_hook(hook):
    """Call `hook(module, args)` before the own hooks of every module of the process."""
    return register(hook, _C.global_forward_pre_hooks)


def register_module_forward_hook(hook, *, with_kwargs=False, always_call=False):
    """Call `hook(module, args, output)` after every module of the process, before the module's own hooks."""
    return register(
        hook,
        _C.global_forward_hooks,
        with_kwargs=(with_kwargs, global_with_kwargs),
        always_call=(always_call, global_always_called),
    )


def hook_name(hook):
    """What a message calls a hook: its name and where it was written."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    return name if code is None else f"{name} ({_source(code.co_filename)}, line {code.co_firstlineno})"


def _source(file):
    """A file name; of code typed into a notebook, the number of its cell."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    try:
        words = shell.compile.format_code_name(file)  # ("Cell", "In[7]")
        return f"notebook cell {words[1].strip('In[] ')}" if words else file
    except Exception:  # no notebook, or one that counts its cells in another way
        return file


def place(module):
    """What a message calls a module: its path, less what all names of a model share."""
    return short_name(module._path or type(module).__name__)


def short_name(path):
    """A path less what all names of a model share."""
    return re.sub(r"^model\.(language_model\.)?(?=.)", "", path)


def wrong_answer(module, hook, result, answer):
    """The error for a hook that put something else in place of an array, or of a tuple of some length."""

    def words(value):
        return "an array" if isinstance(value, np.ndarray) else f"a tuple of {len(value)}"

    found = words(answer) if isinstance(answer, (np.ndarray, tuple)) else a_kind(answer)
    what = "layer" if type(module).__name__ == "DecoderLayer" else "module"
    return HookError(
        f"{place(module)}: forward hook {hook_name(hook)} returned {found}; the {what} returns {words(result)}. "
        "Return None to leave the output alone"
    )


def pair(module, hook, answer):
    """What a pre-hook with kwargs returned, if that is the pair it has to be."""
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    found = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else a_kind(answer)
    what = f"{place(module)}: forward pre-hook {hook_name(hook)}"
    raise HookError(
        compose(
            f"{what} returned {found}; with_kwargs=True takes (args, kwargs)",
            do="return None to leave the arguments alone, or both of them: a tuple and a dict",
        )
    )
