"""Module: the node of the tree. Hooks, walks, state dicts and displays as torch users know them; no arithmetic.

Storage, attribute lookup and the call without hooks are C (`_C.Module`); a module with hooks comes back to
`Module._call_hooked` here.
"""

import itertools
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from qwenref import _C, handles
from qwenref.errors import CapabilityMissing, QwenrefWarning, compose
from qwenref.handles import RemovableHandle, register_module_forward_hook, register_module_forward_pre_hook
from qwenref.parameter import Parameter, Tensor
from qwenref.state import FLOATS, Loading, convert, dtype_name

__all__ = [
    "Module",
    "ModuleList",
    "RemovableHandle",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
]

# Which tree a module was named in last; a fact about the process, so copies and pickles of a module do not carry it.
_roots = weakref.WeakKeyDictionary()

# Attributes that live in C beside __dict__. The registries come first; the others exist only when used.
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OPTIONAL_TABLES = (
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _indent(text):
    """`text` with every line but the first moved in by two; blank lines stay blank."""
    first, *rest = text.split("\n")
    return "\n".join([first, *("  " + line if line.strip() else "" for line in rest)])


def _type_name(value):
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _fits(result, answer):
    """Whether a hook may put `answer` in the place of `result` where it is known what the module returns."""
    if isinstance(result, tuple):
        return isinstance(answer, tuple) and len(answer) == len(result)
    return not isinstance(result, np.ndarray) or isinstance(answer, np.ndarray)


def _check_name(module, kind, name, registry):
    if not isinstance(name, str):
        raise TypeError(f"{kind} name should be a string. Got {_type_name(name)}")
    if hasattr(module, name) and name not in registry:
        raise KeyError(f"attribute '{name}' already exists")
    if "." in name:
        raise KeyError(f'{kind} name can\'t contain ".", got: {name}')
    if name == "":
        raise KeyError(f'{kind} name can\'t be empty string ""')


def _refused(what):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError(f"{what}: inference only, there are no gradients here")

    refuse.__doc__ = "NotImplementedError: inference only, there are no gradients here."
    return refuse


class Module(_C.Module):
    """A node of the model: parameters, buffers and child modules by name, hooks around its `forward`.

    Assigning a Parameter or a Module to an attribute registers it; call `super().__init__()` first.  Behaviour is that
    of torch's module of the same name as far as inference goes.  Calling the module runs `forward` and its hooks;
    calling `forward` runs no hook.  `copy.deepcopy` copies hooks and weights: it costs the memory of all of them.
    """

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"{self._get_name()} has no forward: it is called through its children")

    # ---- hooks

    def register_forward_pre_hook(self, hook, *, prepend=False, with_kwargs=False):
        """Call `hook(module, args)`, or `hook(module, args, kwargs)`, before forward.

        None keeps the arguments.  A tuple, or one value, replaces `args`; with kwargs it has to be `(args, kwargs)`.
        """
        return handles.register(
            hook,
            self._forward_pre_hooks,
            prepend=prepend,
            with_kwargs=(with_kwargs, self._forward_pre_hooks_with_kwargs),
        )

    def register_forward_hook(self, hook, *, prepend=False, with_kwargs=False, always_call=False):
        """Call `hook(module, args, output)`, or `hook(module, args, kwargs, output)`, after forward.

        Whatever it returns other than None replaces the output.  `always_call` runs it also when forward fails.
        """
        return handles.register(
            hook,
            self._forward_hooks,
            prepend=prepend,
            with_kwargs=(with_kwargs, self._forward_hooks_with_kwargs),
            always_call=(always_call, self._forward_hooks_always_called),
        )

    def _call_hooked(self, /, *args, **kwargs):
        """The call when this module or the process has hooks.

        Hooks and what was said of them are read first, in one go: hooks may change the tables, and so may another
        thread.  A hook that is taken away meanwhile still gets the arguments it was registered for.
        """
        result, started = None, set()
        try:
            with handles.exclusive:
                everywhere, own = _C.global_forward_pre_hooks.items(), self._forward_pre_hooks.items()
                hooks, full = (*everywhere, *own), {*self._forward_pre_hooks_with_kwargs}
            for key, hook in hooks:
                if key in full:
                    answer = hook(self, args, kwargs)
                    if answer is not None:
                        args, kwargs = handles.pair(self, hook, answer)
                else:
                    answer = hook(self, args)
                    if answer is not None:
                        args = answer if isinstance(answer, tuple) else (answer,)

            result = self.forward(*args, **kwargs)

            hooks, full = self._after_hooks()
            for key, hook in hooks:
                started.add(key)
                answer = hook(self, args, kwargs, result) if key in full else hook(self, args, result)
                if answer is not None:
                    if self.output_dims != "*" and not _fits(result, answer):
                        raise handles.wrong_answer(self, hook, result, answer)
                    result = answer
            return result
        except Exception:
            hooks, full = self._after_hooks()
            for key, hook in hooks:
                always = key in self._forward_hooks_always_called or key in handles.global_always_called
                if not always or key in started:
                    continue
                try:
                    answer = hook(self, args, kwargs, result) if key in full else hook(self, args, result)
                except Exception as error:
                    failed = f"forward hook {handles.hook_name(hook)} with always_call=True"
                    reason = f"{type(error).__name__}: {error}\n    dropped, because the call had failed already"
                    warnings.warn(f"{failed} raised {reason}", QwenrefWarning, stacklevel=2)
                    continue
                if answer is not None:  # seen by the hooks that follow, then gone with the exception
                    result = answer
            raise

    def _after_hooks(self):
        """(forward hooks that run here, ids of those that take kwargs), read without another thread in between."""
        with handles.exclusive:
            everywhere, own = _C.global_forward_hooks.items(), self._forward_hooks.items()
            return (*everywhere, *own), {*self._forward_hooks_with_kwargs, *handles.global_with_kwargs}

    # ---- registration

    def register_parameter(self, name, param):
        """Enter a Parameter, or None, under a name that is free."""
        parameters = self._parameters
        _check_name(self, "parameter", name, parameters)
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(
                f"cannot assign '{_type_name(param)}' object to parameter '{name}' (Parameter or None required)"
            )
        parameters[name] = param

    def register_buffer(self, name, tensor, persistent=True):
        """An array that is state but no weight.  One that is not persistent stays out of the state dict."""
        buffers = self._buffers
        _check_name(self, "buffer", name, buffers)
        if tensor is not None and not isinstance(tensor, np.ndarray):
            raise TypeError(f"cannot assign '{_type_name(tensor)}' object to buffer '{name}' (array or None required)")
        buffers[name] = tensor
        if persistent:
            self._non_persistent_buffers_set.discard(name)
        else:
            self._non_persistent_buffers_set.add(name)

    def add_module(self, name, module):
        """Enter a child under a name that is free; None keeps the place."""
        modules = self._modules
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"{_type_name(module)} is not a Module subclass")
        _check_name(self, "module", name, modules)
        modules[name] = module

    register_module = add_module

    # What a class says of its values, for captures and displays: dimensions of interior values by name, dimensions of
    # what it returns, and the sizes of the letters that belong to it.
    SITES = {}
    output_dims = "*"
    sizes = {}

    def wants(self, name):
        """Whether somebody watches the interior value `name`: one that costs extra is made only then."""
        chain = _C.sites_var.get()
        return chain is not None and chain.wants(self, name)

    def sites(self):
        """Every name below this module that can be captured or edited, with its symbolic shape."""
        from qwenref.sites import table

        return table(self)

    def name_tree(self):
        """Tell every module its path below this one, for messages; the first of several paths wins."""
        for name, module in self.named_modules():
            module._path = name
            _roots[module] = weakref.ref(self)
        return self

    @property
    def root(self):
        """The module whose tree this one was named in; None if it stands alone."""
        known = _roots.get(self)
        return None if known is None else known()

    # ---- walks

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """Every module once, parents first, children in the order of registration, with its path."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def modules(self, remove_duplicate=True):
        """This module and every one below it, parents first, each once."""
        for _, module in self.named_modules(remove_duplicate=remove_duplicate):
            yield module

    def named_children(self):
        """(name, module) of what is directly below, each once."""
        seen = set()
        for name, module in self._modules.items():
            if module is not None and module not in seen:
                seen.add(module)
                yield name, module

    def children(self):
        """What is directly below, each once."""
        for _, module in self.named_children():
            yield module

    def _named_arrays(self, registry, prefix, recurse, remove_duplicate):
        seen = {}  # by id, since arrays do not hash; the arrays are kept so that no id is given out twice
        owners = [(prefix, self)]
        if recurse:
            owners = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, module in owners:
            for name, array in getattr(module, registry).items():
                if array is None or id(array) in seen:
                    continue
                if remove_duplicate:
                    seen[id(array)] = array
                yield f"{path}.{name}" if path else name, array

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Every parameter with its path; a tied weight once, under its first name."""
        yield from self._named_arrays("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse=True):
        """Every Parameter, a tied one once; without `recurse` the module's own alone."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        """Every buffer with its path, those that are not persistent included."""
        yield from self._named_arrays("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse=True):
        """Every buffer; without `recurse` the module's own alone."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    def apply(self, fn):
        """Call fn on every module, children before their parent."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    def get_submodule(self, target):
        """The module at a path such as `layers.3.self_attn`; the empty path is this module."""
        module = self
        for atom in target.split(".") if target else ():
            if not hasattr(module, atom):
                raise AttributeError(f"{module._get_name()} has no attribute `{atom}`", name=atom, obj=module)
            module = getattr(module, atom)
            if not isinstance(module, Module):
                raise AttributeError(f"`{atom}` is not a Module")
        return module

    def _get_array(self, target, registry, kind):
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        if not hasattr(module, name):
            raise AttributeError(f"{module._get_name()} has no attribute `{name}`", name=name, obj=module)
        if name not in getattr(module, registry):
            raise AttributeError(f"`{name}` is not a {kind}")
        return getattr(module, name)

    def get_parameter(self, target):
        """The Parameter at a path such as `lm_head.weight`; AttributeError if there is another thing or none."""
        return self._get_array(target, "_parameters", "Parameter")

    def get_buffer(self, target):
        """The buffer at a path; AttributeError if there is another thing or none."""
        return self._get_array(target, "_buffers", "buffer")

    def set_submodule(self, target, module, strict=False):
        """Put `module` at a path whose parent exists; with strict, only where a module is already."""
        if target == "":
            raise ValueError("Cannot set the submodule without a target name!")
        if not isinstance(module, Module):
            raise ValueError(f"`module` is not a Module, found {type(module)}")
        path, _, name = target.rpartition(".")
        parent = self.get_submodule(path)
        if hasattr(parent, name):
            if not isinstance(getattr(parent, name), Module):
                raise AttributeError(f"`{name}` is not a Module")
        elif strict:
            raise AttributeError(f"{parent._get_name()} has no attribute `{name}`", name=name, obj=parent)
        setattr(parent, name, module)
        if parent._path is not None:
            for below, descendant in module.named_modules(prefix=f"{parent._path}.{name}" if parent._path else name):
                descendant._path = below

    # ---- state

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """Parameters and persistent buffers by path, tied ones under each of their names.  The arrays are the model's
        own memory: writing into one edits the model.  Copy the result to keep a state."""
        destination = OrderedDict() if destination is None else destination
        kept_out = self._non_persistent_buffers_set
        buffers = ((name, array) for name, array in self._buffers.items() if name not in kept_out)
        for name, array in itertools.chain(self._parameters.items(), buffers):
            if array is not None:
                destination[prefix + name] = array if keep_vars else array.view(np.ndarray).view(Tensor)
        for name, module in self._modules.items():
            if module is not None:
                module.state_dict(destination=destination, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Copy arrays into the parameters and persistent buffers of the same names; `assign` puts the arrays themselves
        in their place.  One RuntimeError lists everything that does not fit, and then nothing has been changed."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
        loading = Loading(self, state_dict, assign)
        complaint = loading.complaint(strict)
        if complaint:
            raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {self._get_name()}:", *complaint]))
        loading.carry_out()
        return loading.keys

    def __getstate__(self):
        state = {**self.__dict__, "_path": self._path}
        state.update((name, getattr(self, name)) for name in _REGISTRIES)
        state.update((name, table) for name in _OPTIONAL_TABLES if (table := getattr(self, name)))
        return state

    def __setstate__(self, state):
        for name, value in state.items():
            if name in _REGISTRIES or name in _OPTIONAL_TABLES or name == "_path":
                setattr(self, name, value)
            else:
                self.__dict__[name] = value

    # ---- dtype, device, mode

    def to(self, *targets, device=None, dtype=None, non_blocking=False):
        """Convert floating parameters and buffers to a dtype, in place; ties stay ties.  The one device is "cpu"."""
        for target in targets:
            if dtype_name(target) is None:
                device = target
            else:
                dtype = target
        if device is not None and str(device) != "cpu":
            raise CapabilityMissing(compose(f"{self._get_name()}.to: no device {str(device)!r}", expected="cpu"))
        if dtype is not None:
            wanted = FLOATS.get(dtype_name(dtype))
            if wanted is None:
                raise TypeError(f"{self._get_name()}.to only takes floating dtypes ({', '.join(FLOATS)}), got {dtype}")
            convert(self, wanted)
        return self

    def type(self, dtype):
        """See `to`."""
        return self.to(dtype)

    def float(self):
        """Parameters and buffers as float32, in place."""
        return self.to(np.float32)

    def double(self):
        """Parameters and buffers as float64, in place."""
        return self.to(np.float64)

    def half(self):
        """Parameters and buffers as float16, in place."""
        return self.to(np.float16)

    def bfloat16(self):
        """Parameters and buffers as bfloat16, in place."""
        return self.to(ml_dtypes.bfloat16)

    def cpu(self):
        """The module itself: everything is there already."""
        return self

    def cuda(self, device=None):
        """CapabilityMissing: there is no such device here."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    @property
    def training(self):
        """Always False: there is no dropout and nothing to learn."""
        return False

    @training.setter
    def training(self, mode):
        self.train(mode)

    def train(self, mode=True):
        """The module itself, with a warning where training is asked for: nothing behaves differently in it."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        if mode:
            warnings.warn("train(True) changes nothing: inference only", QwenrefWarning, stacklevel=2)
        return self

    def eval(self):
        """The module itself: it is always ready for inference."""
        return self

    requires_grad_ = _refused("requires_grad_")
    zero_grad = _refused("zero_grad")
    register_backward_hook = _refused("register_backward_hook")
    register_full_backward_hook = _refused("register_full_backward_hook")
    register_full_backward_pre_hook = _refused("register_full_backward_pre_hook")

    # ---- display

    def _get_name(self):
        return type(self).__name__

    def extra_repr(self):
        """What the parentheses of the repr hold besides the children: one line, or several."""
        return ""

    def _child_lines(self):
        return [f"({name}): {_indent(repr(module))}" for name, module in self._modules.items()]

    def tree(self, depth=None, only=None):
        """The readable tree: layers grouped by kind, parameters, bytes.

        depth: levels below the first line, all when None.  only: a pattern over paths as those of captures, such as
        `layers.*.self_attn` or `**.mlp`; what it names is shown with what leads there.
        """
        from qwenref.tree import tree

        return tree(self, depth, only)

    def _repr_html_(self):
        return self.tree()._repr_html_()

    def __rich_repr__(self):
        from qwenref.viewers import rich

        return rich(self)

    def __treescope_repr__(self, path, subtree_renderer):
        from qwenref.viewers import treescope

        return treescope(self, path, subtree_renderer)

    def __repr__(self):
        extra = self.extra_repr()
        own, children = extra.split("\n") if extra else [], self._child_lines()
        if len(own) <= 1 and not children:
            return f"{self._get_name()}({extra})"
        return "\n  ".join([f"{self._get_name()}(", *own, *children]) + "\n)"

    def __dir__(self):
        names = {*dir(type(self)), *self.__dict__, *self._parameters, *self._buffers, *self._modules}
        return sorted(name for name in names if not name[:1].isdigit())


class ModuleList(Module):
    """Modules by position.  They are registered under their numbers as names, so paths read `layers.3.mlp`."""

    def __init__(self, modules=None):
        super().__init__()
        if modules is not None:
            self.extend(modules)

    def _name_of(self, index):
        index, count = operator.index(index), len(self._modules)
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of range")
        return str(index % count)

    def _renumber(self, modules):
        self._modules = {str(i): module for i, module in enumerate(modules)}

    def __getitem__(self, index):
        """One module, or for a slice a new list of the same modules, numbered from 0."""
        if isinstance(index, slice):
            return type(self)(list(self._modules.values())[index])
        return self._modules[self._name_of(index)]

    def __setitem__(self, index, module):
        setattr(self, self._name_of(index), module)

    def __delitem__(self, index):
        modules = list(self._modules.values())
        del modules[index if isinstance(index, slice) else int(self._name_of(index))]
        self._renumber(modules)

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules.values())

    def __iadd__(self, modules):
        return self.extend(modules)

    def __add__(self, other):
        return ModuleList([*self, *other])

    def append(self, module):
        """Put a module behind the last one; the list."""
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules):
        """Put modules behind the last one; the list."""
        if not isinstance(modules, Iterable):
            raise TypeError(f"ModuleList.extend should be called with an iterable, but got {type(modules).__name__}")
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index, module):
        """Put a module before the one at `index`; those behind it count on."""
        if not isinstance(module, Module):
            raise TypeError(f"{_type_name(module)} is not a Module subclass")
        modules = list(self._modules.values())
        modules.insert(index, module)
        self._renumber(modules)

    def pop(self, index=-1):
        """Take a module out and return it; those behind it move up."""
        module = self[index]
        del self[index]
        return module

    def _child_lines(self):
        """Runs of neighbours that print alike take one line."""
        lines, start = [], 0
        for text, run in itertools.groupby(map(repr, self)):
            count = len(list(run))
            head = f"({start}): " if count == 1 else f"({start}-{start + count - 1}): {count} x "
            lines.append(_indent(head + text))
            start += count
        return lines

    def __dir__(self):
        return [name for name in super().__dir__() if not name.isdigit()]
