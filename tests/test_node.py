"""What the node does in C: the call, the note on an exception, site(), attributes, and its memory."""

import contextlib
import copy
import gc
import sys
import textwrap
import threading
import tracemalloc
import weakref

import fresh
import numpy as np
import pytest
from module_kits import KITS, tree

from qwenref import _C
from qwenref.module import Module, ModuleList
from qwenref.parameter import Parameter

# ---- the call


class Echo(Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


@pytest.mark.parametrize("hooked", [False, True])
def test_arguments_reach_forward_as_given(hooked):
    m = Echo()
    if hooked:
        m.register_forward_hook(lambda module, args, out: None)
    many = tuple(range(40))
    keywords = {f"k{i}": i for i in range(40)}
    assert m() == ((), {})
    assert m(1) == ((1,), {})
    assert m(1, a=3) == ((1,), {"a": 3})
    assert m(*many, **keywords) == (many, keywords)
    assert m(**keywords) == ((), keywords)
    assert list(map(m, [1, 2])) == [((1,), {}), ((2,), {})]
    assert m.__call__(7, b=8) == ((7,), {"b": 8})


def test_forward_is_found_where_python_would_find_it():
    m = Echo()
    m.forward = lambda x: ("own", x)
    assert m(1) == ("own", 1)
    del m.forward
    assert m(1) == ((1,), {})

    class Static(Module):
        @staticmethod
        def forward(x):
            return ("static", x)

    class ByClass(Module):
        @classmethod
        def forward(cls, x):
            return (cls, x)

    class Callable(Module):
        forward = Echo()

    assert Static()(1) == ("static", 1)
    assert ByClass()(1) == (ByClass, 1)
    assert Callable()(1) == ((1,), {})


def test_a_class_may_have_its_own_call():
    class Own(Echo):
        def __call__(self, x):
            return "before", super().__call__(x)

    assert Own()(1) == ("before", ((1,), {}))


def test_wrong_arguments_are_pythons_own_error():
    class One(Module):
        def forward(self, x):
            return x

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        One()()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        One()(1, y=2)


def test_endless_recursion_is_an_error_not_a_crash():
    class Loop(Module):
        def forward(self):
            return self()

    with pytest.raises(RecursionError):
        Loop()()


class Fails(Module):
    def forward(self, error):
        raise error


def failing_tree():
    root = Module()
    root.layers = ModuleList([Fails()])

    def forward(self, error):
        return self.layers[0](error)

    type_ = type("Root", (Module,), {"forward": forward})
    root.__class__ = type_
    return root


@pytest.mark.parametrize("hooked", [False, True])
def test_the_innermost_module_leaves_one_note(hooked):
    root = failing_tree()
    if hooked:
        for module in root.modules():
            module.register_forward_hook(lambda module, args, out: None)
    with pytest.raises(ValueError) as caught:
        root(ValueError("boom"))
    assert caught.value.__notes__ == ["in module Fails"]
    assert str(caught.value) == "boom"

    root.name_tree()
    error = ValueError("boom")
    error.__notes__ = ["an older note"]
    for _ in range(2):
        with pytest.raises(ValueError):
            root(error)
    assert error.__notes__ == ["an older note", "in module layers.0 (Fails)"]


def test_notes_never_hide_the_exception():
    class Sealed(Exception):
        def __setattr__(self, name, value):
            raise RuntimeError("sealed")

    with pytest.raises(Sealed):
        Fails()(Sealed())
    odd = ValueError()
    odd.__notes__ = "no list"
    with pytest.raises(ValueError):
        Fails()(odd)
    assert odd.__notes__ == "no list"


def test_paths_follow_a_spliced_module():
    root = failing_tree().name_tree()
    new = Module()
    new.inner = Fails()
    root.set_submodule("layers.0.mlp", new)
    with pytest.raises(ValueError) as caught:
        root.layers[0].mlp.inner(ValueError())
    assert caught.value.__notes__ == ["in module layers.0.mlp.inner (Fails)"]


# ---- sites


class Doubles(Module):
    def forward(self, x):
        return self.site("doubled", x * 2)


def test_a_site_gives_its_value_back_untouched():
    x, m = object(), Module()
    before = sys.getrefcount(x)
    assert m.site("name", x) is x
    assert sys.getrefcount(x) == before


def test_a_site_handler_sees_and_replaces():
    seen, m = [], Doubles()

    def handler(module, name, x):
        seen.append((module, name, x))
        return x + 1

    token = _C.sites_var.set(handler)
    try:
        assert m(3) == 7
    finally:
        _C.sites_var.reset(token)
    assert m(3) == 6
    assert seen == [(m, "doubled", 6)]


def test_a_site_handler_belongs_to_its_thread():
    results, m = [], Doubles()
    token = _C.sites_var.set(lambda module, name, x: -x)
    try:
        other = threading.Thread(target=lambda: results.append(m(3)))
        other.start()
        other.join()
        assert m(3) == -6
    finally:
        _C.sites_var.reset(token)
    assert results == [6]


def test_a_failing_site_handler_is_reported_with_the_module():
    def handler(module, name, x):
        raise KeyError(name)

    token = _C.sites_var.set(handler)
    try:
        with pytest.raises(KeyError) as caught:
            Doubles()(3)
    finally:
        _C.sites_var.reset(token)
    assert caught.value.__notes__ == ["in module Doubles"]


def test_a_site_takes_a_name_and_a_value():
    with pytest.raises(TypeError, match=r"\(1 given\)"):
        Module().site("name")


# ---- attributes


def test_a_missing_attribute_carries_what_a_hint_needs():
    m = Module()
    m.q_proj = Module()
    with pytest.raises(AttributeError) as caught:
        m.q_porj  # noqa: B018
    assert str(caught.value) == "'Module' object has no attribute 'q_porj'"
    assert caught.value.name == "q_porj" and caught.value.obj is m


def test_the_interpreter_suggests_the_near_name():
    script = """
        from qwenref.module import Module
        m = Module()
        m.q_proj = Module()
        m.q_porj
    """
    done = fresh.python(textwrap.dedent(script), check=False)
    assert "Did you mean: 'q_proj'?" in done.stderr


def test_a_class_may_have_the_last_word_on_missing_names():
    class Layer(Module):
        def __getattr__(self, name):
            raise AttributeError(f"this layer has no {name}")

    m = Layer()
    m.child, m.weight = Echo(), Parameter(np.zeros(1))
    assert type(m.child) is Echo and type(m.weight) is Parameter and not hasattr(m, "nope")
    with pytest.raises(AttributeError, match="this layer has no linear_attn"):
        m.linear_attn  # noqa: B018


def test_a_property_that_fails_says_so_itself():
    class Odd(Module):
        @property
        def derived(self):
            raise AttributeError("the real reason")

    with pytest.raises(AttributeError, match="the real reason"):
        Odd().derived  # noqa: B018


def test_assigning_before_init_says_what_to_do():
    class Late(Module):
        def __init__(self):
            self.child = Echo()

    with pytest.raises(AttributeError, match=r"before Module.__init__\(\) call\n    do       call super"):
        Late()


def test_assigning_an_array_over_a_parameter_says_what_to_do():
    m = Module()
    m.weight = Parameter(np.zeros(2))
    with pytest.raises(TypeError, match=r"'numpy.ndarray' as parameter 'weight'.*\n    do       assign to \[...\]"):
        m.weight = np.ones(2)
    m.weight[...] = np.ones(2)
    assert m.weight.tolist() == [1, 1]
    m.weight += 1
    assert type(m.weight) is Parameter and m.weight.tolist() == [2, 2]


def test_tables_accept_only_their_own_kind():
    m = Module()
    for name in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_non_persistent_buffers_set"):
        with pytest.raises(TypeError, match="has to be a"):
            setattr(m, name, [])
        with pytest.raises(TypeError):
            delattr(m, name)
    with pytest.raises(TypeError):
        m._forward_hooks = {}  # handles could not hold it weakly


# ---- memory


def test_modules_are_collected_and_may_be_held_weakly():
    gc.collect()
    m = tree(KITS["qwenref"]())
    m.parent = [m]  # a cycle through the instance
    m.layers[0].register_forward_hook(lambda module, args, out, m=m: None)  # and one through a hook table
    m.layers.append(m)  # and one through the registry
    refs = [weakref.ref(module) for module in m.modules()]
    del m
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_reference_counts_stay_flat():
    class Half(Module):
        def forward(self, x):
            return self.site("x", x)

    m, x = Half(), object()
    m.child = child = Half()
    weight = m.weight = Parameter(np.zeros(3))
    error = ValueError()
    fails = Fails()
    watched = [m, x, child, weight, error, fails, Half, Half.forward, m._modules]

    def everything():
        m(x)
        m(x=x)
        m.child(x)
        list(map(m, [x]))
        with m.register_forward_pre_hook(lambda module, args: None):
            m(x)
        hasattr(m, "no_such_name")
        m.other = child
        m.other = None
        del m.other
        m.weight = weight
        try:
            fails(error)
        except ValueError:
            error.__traceback__ = None
            del error.__notes__
        with contextlib.suppress(TypeError):
            m.weight = 3
        m.__dict__  # noqa: B018

    for _ in range(10):
        everything()
    counts = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        everything()
    grown = [after - before for after, before in zip([sys.getrefcount(t) for t in watched], counts, strict=True)]
    assert grown == [0] * len(watched)


def test_making_and_dropping_trees_leaks_nothing():
    class Block(Module):
        def __init__(self):
            super().__init__()
            self.up = Fails()
            self.up.weight = Parameter(np.zeros(3))
            self.register_buffer("table", np.zeros(2), persistent=False)

    def cycle():
        m = ModuleList([Block() for _ in range(4)])
        m[0].register_forward_hook(lambda module, args, out: None).remove()
        m[1].register_forward_pre_hook(lambda module, args, m=m: None)
        copy.deepcopy(m)
        with contextlib.suppress(ValueError):
            m[2].up(ValueError())

    def measured(cycles):
        for _ in range(cycles):
            cycle()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = measured(300)  # fills the free lists of the interpreter
        after = measured(556)  # 18 modules each: 10,008
    finally:
        tracemalloc.stop()
    assert after - before < 10_008 * 2, "less than a quarter of a pointer for each module"


# ---- what only a contrived caller does


def test_a_name_that_is_no_string_is_refused():
    m = Echo()
    for call in (
        lambda: _C.Module.__getattribute__(m, 5),
        lambda: _C.Module.__setattr__(m, 5, Echo()),
        lambda: _C.Module.__setattr__(m, 5, 1),
        lambda: _C.Module.__delattr__(m, 5),
    ):
        with pytest.raises(TypeError, match="attribute name must be string, not 'int'"):
            call()
    assert not m._modules


@pytest.mark.parametrize("kind", [_C.Module, Echo])
def test_a_module_that_is_its_own_forward_ends_in_a_recursion_error(kind):
    m = kind()
    m.__dict__["forward"] = m
    with pytest.raises(RecursionError):
        m()
    m.__dict__["forward"] = lambda x: x
    assert m(3) == 3


def test_a_dict_may_be_replaced_while_it_is_searched():
    """A key that is no string, of the same hash, is compared by its own code"""

    class Key:
        def __init__(self, name, m):
            self.hash, self.module = hash(name), m

        def __hash__(self):
            return self.hash

        def __eq__(self, other):
            self.module.__dict__ = {}
            return False

    for name, use in (("forward", lambda m: m(1)), ("missing", lambda m: getattr(m, "missing", None))):
        m = Echo()
        m.__dict__ = {Key(name, m): 1}
        use(m)
        assert m.__dict__ == {}


def test_a_note_with_a_lone_surrogate_does_no_harm():
    class Broken(Module):
        def forward(self):
            error = ValueError("mine")
            error.__notes__ = ["\ud800"]
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        Broken()()
    assert caught.value.__notes__[0] == "\ud800" and caught.value.__notes__[1].startswith("in module Broken")
