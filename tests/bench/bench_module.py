"""What the node costs: calls, attributes and sites, in ns, beside plain Python (and torch, if installed) in one run.

python tests/bench/bench_module.py
"""

import numpy as np

from qwenref.bench.timing import fastest
from qwenref.module import Module, ModuleList
from qwenref.parameter import Parameter


def best(statement, **names):
    """ns of a statement, less those of an empty loop around it."""
    scope = {}
    exec(f"def run({', '.join(names)}):\n for _ in range(1000): {statement}\n", scope)
    exec(f"def empty({', '.join(names)}):\n for _ in range(1000): pass\n", scope)
    run, empty = scope["run"], scope["empty"]
    return (fastest(lambda: run(**names)) - fastest(lambda: empty(**names))) * 1e6


class Plain:
    def forward(self, x):
        return x


class Leaf(Module):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(np.zeros(4))
        self.layers = ModuleList([Module() for _ in range(4)])

    def forward(self, x):
        return x


def torch_leaf():
    try:
        import torch
    except ImportError:
        return None

    class TorchLeaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))
            self.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(4)])

        def forward(self, x):
            return x

    return TorchLeaf()


def main():
    plain, leaf, torch = Plain(), Leaf(), torch_leaf()
    floor = best("f(1)", f=plain.forward)
    rows = [("call, no hook", "m(1)"), ("call by keyword, no hook", "m(x=1)"), ("read a weight", "m.weight")]
    rows += [("read a child", "m.layers"), ("index a list", "m.layers[2]"), ("missing name", "hasattr(m, 'nope')")]
    print(f"{'ns':<28}{'qwenref':>9}{'torch':>9}")
    print(f"{'plain Python call':<28}{floor:>9.0f}")
    for name, statement in rows:
        theirs = f"{best(statement, m=torch):>9.0f}" if torch is not None else f"{'-':>9}"
        print(f"{name:<28}{best(statement, m=leaf):>9.0f}{theirs}")
    print(f"{'site, no handler':<28}{best('s(n, x)', s=leaf.site, n='name', x=1):>9.0f}")
    over = best("m(1)", m=leaf) - floor
    for module in filter(None, (leaf, torch)):
        module.register_forward_hook(lambda module, args, out: None)
    theirs = f"{best('m(1)', m=torch):>9.0f}" if torch is not None else f"{'-':>9}"
    print(f"{'call, one hook':<28}{best('m(1)', m=leaf):>9.0f}{theirs}")
    print(f"no-hook call over a plain one: {over:.0f} ns (goal 100)")


if __name__ == "__main__":
    main()
