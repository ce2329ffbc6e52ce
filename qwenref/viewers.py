"""What other viewers show of a module: adapters for rich and treescope.  They read shapes, never a weight."""

from qwenref.tree import DTYPES


class Words(str):
    """Text whose repr is the text."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def parts(module):
    """{name: words or module} of what a module holds: parameters as dtype and shape, then its children."""
    held = {
        name: Words(f"{DTYPES.get(p.dtype.name, p.dtype.name)} {list(p.shape)}")
        for name, p in module._parameters.items()
        if p is not None
    }
    return held | dict(module.named_children())


def rich(module):
    """What rich shows between the parentheses: (name, value), and of a list of modules the modules alone."""
    for name, value in parts(module).items():
        yield value if name.isdigit() else (name, value)


def treescope(module, path, subtree_renderer):
    """The rendering of a module, with children to unfold."""
    from treescope import repr_lib

    held = parts(module)
    if held and all(name.isdigit() for name in held):
        wrapped = {int(name): child for name, child in held.items()}
        return repr_lib.render_dictionary_wrapper(
            object_type=type(module), wrapped_dict=wrapped, path=path, subtree_renderer=subtree_renderer
        )
    return repr_lib.render_object_constructor(
        object_type=type(module), attributes=held, path=path, subtree_renderer=subtree_renderer
    )
