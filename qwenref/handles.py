"""Hook tables: entering a hook, the handle that takes it out again, and the hooks of the whole process."""

import itertools
import weakref
from collections import OrderedDict

from qwenref import _C
from qwenref.errors import HookError, compose

# Options of the hooks of the whole process; the hooks themselves lie in _C, where every call looks for them.
global_with_kwargs = OrderedDict()
global_always_called = OrderedDict()


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
        for table in self._tables:
            hooks = table()
            if hooks is not None:
                hooks.pop(self.id, None)

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
    hooks[handle.id] = hook
    for wanted, table in options.values():
        if wanted:
            table[handle.id] = True
    if prepend:
        hooks.move_to_end(handle.id, last=False)
    return handle


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
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def pair(module, hook, answer):
    """What a pre-hook with kwargs returned, if that is the pair it has to be."""
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    found = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__qualname__
    where = module._path or type(module).__name__
    raise HookError(
        compose(
            f"{where}: forward pre-hook {hook_name(hook)} returned {found}; with_kwargs=True takes (args, kwargs)",
            do="return None to leave the arguments alone, or both of them: a tuple and a dict",
        )
    )
