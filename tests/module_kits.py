"""The same script on a torch tree and on ours: what each side calls its parts, and what a script saw."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest


def _ours():
    from qwenref import module
    from qwenref.parameter import Parameter

    return SimpleNamespace(
        Module=module.Module,
        ModuleList=module.ModuleList,
        Parameter=Parameter,
        RemovableHandle=module.RemovableHandle,
        array=lambda values: np.array(values, np.float32),
        global_hook=module.register_module_forward_hook,
        global_pre_hook=module.register_module_forward_pre_hook,
    )


def _torch():
    torch = pytest.importorskip("torch", reason="torch is the witness here: pip install 'qwenref[test]'")
    modules = torch.nn.modules.module
    return SimpleNamespace(
        Module=torch.nn.Module,
        ModuleList=torch.nn.ModuleList,
        Parameter=lambda values: torch.nn.Parameter(values, requires_grad=False),
        RemovableHandle=torch.utils.hooks.RemovableHandle,
        array=lambda values: torch.tensor(values, dtype=torch.float32),
        global_hook=modules.register_module_forward_hook,
        global_pre_hook=modules.register_module_forward_pre_hook,
    )


KITS = {"qwenref": _ours, "torch": _torch}


def builtin_name(error):
    """The built-in class an exception can be caught as: ours are children of those torch raises."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")


def transcript(script, kit):
    """Everything `script(kit, log)` logged, an exception it let out, and how many warnings it gave."""
    log = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            script(kit, log.append)
        except Exception as error:
            log.append(("raised", builtin_name(error)))
    if caught:
        log.append(("warnings", len(caught)))
    return log


def tree(kit):
    """Two blocks, a tied head, a shared module, a None child, a None parameter, both kinds of buffer."""

    class Linear(kit.Module):
        def __init__(self, n, m, bias=False):
            super().__init__()
            self.n, self.m = n, m
            self.weight = kit.Parameter(kit.array([[0.0] * n] * m))
            self.register_parameter("bias", kit.Parameter(kit.array([0.0] * m)) if bias else None)

        def extra_repr(self):
            return f"in={self.n}, out={self.m}"

    class Block(kit.Module):
        def __init__(self, width, act):
            super().__init__()
            self.norm = Norm(width)
            self.up, self.down, self.act = Linear(width, 4, bias=True), Linear(4, width), act

    class Norm(kit.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = kit.Parameter(kit.array([1.0] * width))

        def extra_repr(self):
            return "one line\nand another"

    class Root(kit.Module):
        def __init__(self):
            super().__init__()
            act = kit.Module()
            self.embed = Linear(3, 8)
            self.layers = kit.ModuleList([Block(3, act), Block(3, act), Block(5, act), Norm(2)])
            self.nothing = kit.Module()
            self.nothing = None
            self.register_buffer("inv_freq", kit.array([1.0, 2.0]), persistent=False)
            self.register_buffer("steps", kit.array([7.0]))
            self.register_buffer("absent", None)
            self.head = Linear(3, 8)
            self.head.weight = self.embed.weight

    return Root()
