"""The hook algorithm, row by row: each script has one right transcript, and torch gives it too."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from module_kits import KITS, transcript

import qwenref

ROWS = {}


def row(*expected):
    def add(script):
        ROWS[script.__name__] = script, list(expected)
        return script

    return add


def scaler(kit, log, fail=False):
    """x -> [x * scale], which is a list so that a hook can edit it in place."""

    class Scaler(kit.Module):
        def forward(self, x, scale=1):
            log(("forward", x, scale))
            if fail:
                raise ValueError("forward failed")
            return [x * scale]

    return Scaler()


def saying(log, name, answer=None):
    """A hook that logs what it was given after the module, and returns `answer`."""

    def hook(module, *given):
        log((name, *given))
        return answer

    return hook


def raising(log, name):
    def hook(module, *given):
        log((name, *given))
        raise KeyError(name)

    return hook


@row(("forward", 3, 2), [6])
def without_hooks_forward_is_called_directly(kit, log):
    log(scaler(kit, log)(3, scale=2))


@row(("pre", (3,)), ("forward", 3, 1), ("post", (3,), [3]), [3])
def none_keeps_arguments_and_output(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(saying(log, "pre"))
    m.register_forward_hook(saying(log, "post"))
    log(m(3))


@row(("a", (3,)), ("b", (5, 7)), ("forward", 5, 7), [35])
def a_tuple_from_a_pre_hook_replaces_the_arguments(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(saying(log, "a", (5, 7)))
    m.register_forward_pre_hook(saying(log, "b"))
    log(m(3))


@row(("forward", 0, 1), [0], ("forward", [1], 1), [[1]], ("forward", False, 1), [0])
def any_other_value_from_a_pre_hook_is_the_one_argument(kit, log):
    for answer in (0, [1], False):
        m = scaler(kit, log)
        m.register_forward_pre_hook(lambda module, args, answer=answer: answer)
        log(m(3))


@row(("raised", "TypeError"))
def an_empty_tuple_from_a_pre_hook_leaves_no_arguments(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(lambda module, args: ())
    m(3)


@row(("pre", (), {"x": 3}), ("forward", 4, 2), ("plain", (4,), [8]), ("kw", (4,), {"scale": 2}, [8]), [8])
def with_kwargs_replaces_both_and_later_hooks_see_it(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(saying(log, "pre", ((4,), {"scale": 2})), with_kwargs=True)
    m.register_forward_hook(saying(log, "plain"))
    m.register_forward_hook(saying(log, "kw"), with_kwargs=True)
    log(m(x=3))


@row(("pre", ()), ("forward", 3, 2), ("post", (), [6]), [6])
def keyword_arguments_are_invisible_without_with_kwargs(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(saying(log, "pre"))
    m.register_forward_hook(saying(log, "post"))
    log(m(x=3, scale=2))


@row(*[("raised", "RuntimeError")] * 6, ("forward", 8, 3), [24])
def a_with_kwargs_pre_hook_has_to_return_a_pair(kit, log):
    for answer in ((1,), (1, {}, 2), [(1,), {}], 0, {}, ()):
        m = scaler(kit, log)
        m.register_forward_pre_hook(lambda module, args, kwargs, answer=answer: answer, with_kwargs=True)
        log_of_one = transcript(lambda kit, log, m=m: log(m(3)), kit)
        log(log_of_one[-1])
    m = scaler(kit, log)
    m.register_forward_pre_hook(lambda module, args, kwargs: ([8], {"scale": 3}), with_kwargs=True)
    log(m(3))


@row(("forward", 3, 1), ("a", (3,), [3]), ("b", (3,), "new"), ("c", (3,), "new"), "new")
def the_next_hook_sees_the_replacement(kit, log):
    m = scaler(kit, log)
    m.register_forward_hook(saying(log, "a", "new"))
    m.register_forward_hook(saying(log, "b"))
    m.register_forward_hook(saying(log, "c"))
    log(m(3))


@row(0, [], False, "", ())
def falsy_replacements_replace(kit, log):
    for answer in (0, [], False, "", ()):
        m = scaler(kit, lambda event: None)
        m.register_forward_hook(lambda module, args, out, answer=answer: answer)
        log(m(3))


@row(("forward", 3, 1), [3, "edited"])
def in_place_edits_take_effect(kit, log):
    m = scaler(kit, log)
    m.register_forward_hook(lambda module, args, out: out.append("edited"))
    log(m(3))


@row("p3", "p1", "p2", ("forward", 1, 1), "h3", "h1", "h2")
def prepend_goes_to_the_front(kit, log):
    m = scaler(kit, log)
    for name, options in (("1", {}), ("2", {}), ("3", {"prepend": True})):
        m.register_forward_pre_hook(lambda module, args, name=name: log("p" + name), **options)
        m.register_forward_hook(lambda module, args, out, name=name: log("h" + name), **options)
    m(1)


@row("gp", "p", ("forward", 1, 1), "g", "gk {'scale': 1}", "h", ("forward", 1, 1))
def global_hooks_run_before_the_modules_own_even_prepended_ones(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(lambda module, args: log("p"), prepend=True)
    h = m.register_forward_hook(lambda module, args, out: log("h"), prepend=True)
    with (
        kit.global_pre_hook(lambda module, args: log("gp")),
        kit.global_hook(lambda module, args, out: log("g")),
        kit.global_hook(lambda module, args, kwargs, out: log(f"gk {kwargs}"), with_kwargs=True),
    ):
        m(1, scale=1)
    h.remove()
    m._forward_pre_hooks.clear()
    m(1)


@row("outer in", "inner in", "inner out", "outer out")
def global_hooks_see_every_module(kit, log):
    class Outer(kit.Module):
        def __init__(self):
            super().__init__()
            self.inner = scaler(kit, lambda event: None)

        def forward(self, x):
            return self.inner(x)

    m = Outer()
    name = {m: "outer", m.inner: "inner"}
    with (
        kit.global_pre_hook(lambda module, args: log(name[module] + " in")),
        kit.global_hook(lambda module, args, out: log(name[module] + " out")),
    ):
        m(1)


@row(("global pre", (3,)), ("forward", 6, 1), ("post", (6,), [6]))
def a_global_pre_hook_replaces_arguments_too(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(lambda module, args: args[0] + 1)
    m.register_forward_hook(saying(log, "post"))
    with kit.global_pre_hook(saying(log, "global pre", (5,))):
        m(3)


# ---- exceptions: at every stage, which hooks run and what they are given


@row(("forward", 3, 1), ("always", (3,), None), ("kw", (3,), {}, None), ("raised", "ValueError"))
def always_call_runs_when_forward_fails(kit, log):
    m = scaler(kit, log, fail=True)
    m.register_forward_hook(saying(log, "never"))
    m.register_forward_hook(saying(log, "always"), always_call=True)
    m.register_forward_hook(saying(log, "kw"), always_call=True, with_kwargs=True)
    m(3)


@row(("pre", (3,)), ("always", (3,), None), ("raised", "KeyError"))
def always_call_runs_when_a_pre_hook_fails(kit, log):
    m = scaler(kit, log)
    m.register_forward_pre_hook(raising(log, "pre"))
    m.register_forward_hook(saying(log, "always"), always_call=True)
    m(3)


@row(("always", (9,), None), ("raised", "TypeError"))
def always_call_sees_the_arguments_as_the_pre_hooks_left_them(kit, log):
    class Strict(kit.Module):
        def forward(self, x):
            raise TypeError

    m = Strict()
    m.register_forward_pre_hook(lambda module, args: 9)
    m.register_forward_hook(saying(log, "always"), always_call=True)
    m(3)


@row(
    ("forward", 3, 1),
    ("first", (3,), [3]),
    ("fails", (3,), "replaced"),
    ("last", (3,), "replaced"),
    ("raised", "KeyError"),
)
def a_hook_that_has_started_does_not_run_again(kit, log):
    m = scaler(kit, log)
    m.register_forward_hook(saying(log, "first", "replaced"), always_call=True)
    m.register_forward_hook(raising(log, "fails"), always_call=True)
    m.register_forward_hook(saying(log, "skipped"))
    m.register_forward_hook(saying(log, "last"), always_call=True)
    m(3)


@row(("forward", 3, 1), ("bad", (3,), None), ("good", (3,), None), ("raised", "ValueError"), ("warnings", 1))
def an_always_call_hook_that_fails_becomes_a_warning(kit, log):
    m = scaler(kit, log, fail=True)
    m.register_forward_hook(raising(log, "bad"), always_call=True)
    m.register_forward_hook(saying(log, "good"), always_call=True)
    m(3)


@row(("forward", 3, 1), ("a", (3,), None), ("b", (3,), "from a"), ("raised", "ValueError"))
def an_always_call_replacement_reaches_the_next_hook_only(kit, log):
    m = scaler(kit, log, fail=True)
    m.register_forward_hook(saying(log, "a", "from a"), always_call=True)
    m.register_forward_hook(saying(log, "b"), always_call=True)
    m(3)


@row(("forward", 3, 1), ("global", (3,), None), ("own", (3,), None), ("raised", "ValueError"))
def always_call_holds_for_global_hooks(kit, log):
    m = scaler(kit, log, fail=True)
    m.register_forward_hook(saying(log, "own"), always_call=True)
    with kit.global_hook(saying(log, "global"), always_call=True), kit.global_hook(saying(log, "never")):
        m(3)


@row(("forward", 3, 1), ("always", (3,), [3]), [3])
def always_call_runs_once_when_nothing_fails(kit, log):
    m = scaler(kit, log)
    m.register_forward_hook(saying(log, "always"), always_call=True)
    log(m(3))


@row("interrupted")
def an_interrupt_runs_no_hook(kit, log):
    class Interrupted(kit.Module):
        def forward(self):
            raise KeyboardInterrupt

    m = Interrupted()
    m.register_forward_hook(saying(log, "always"), always_call=True)
    try:
        m()
    except KeyboardInterrupt:
        log("interrupted")


# ---- tables changed while they run


@row("a", ("forward", 1, 1), "a", "late", ("forward", 1, 1))
def a_pre_hook_added_by_a_pre_hook_runs_from_the_next_call(kit, log):
    m = scaler(kit, log)
    added = []

    def adds(module, args):
        log("a")
        if not added:
            added.append(module.register_forward_pre_hook(lambda module, args: log("late")))

    m.register_forward_pre_hook(adds)
    m(1)
    m(1)


@row(("forward", 1, 1), "once", "other", ("forward", 1, 1), "other")
def a_hook_may_remove_itself(kit, log):
    m = scaler(kit, log)

    def once(module, args, out):
        log("once")
        handle.remove()

    handle = m.register_forward_hook(once)
    m.register_forward_hook(lambda module, args, out: log("other"))
    m(1)
    m(1)


@row(("forward", 1, 1), "remover", "victim", ("forward", 1, 1), "remover")
def a_hook_removed_by_another_still_runs_in_this_call(kit, log):
    m = scaler(kit, log)

    def remover(module, args, out):
        log("remover")
        victim.remove()

    m.register_forward_hook(remover)
    victim = m.register_forward_hook(lambda module, args, out: log("victim"))
    m(1)
    m(1)


@row("pre", ("forward", 1, 1), "added")
def a_forward_hook_added_by_a_pre_hook_runs_in_this_call(kit, log):
    m = scaler(kit, log)

    def pre(module, args):
        log("pre")
        module.register_forward_hook(lambda module, args, out: log("added"))

    m.register_forward_pre_hook(pre)
    m(1)


@row(("forward", 1, 1), ("forward", 1, 1), "added")
def a_hook_added_by_forward_runs_from_the_next_call(kit, log):
    m = scaler(kit, log)
    plain = m.forward

    def forward(x):
        if not m._forward_hooks:
            m.register_forward_hook(lambda module, args, out: log("added"))
        return plain(x)

    m.forward = forward  # also: an instance's own forward is the one that is called
    m(1)
    m(1)


@row(("hooked", (0,), 0), ("hooked", (1,), 1), ("hooked", (2,), 2))
def a_module_may_call_itself(kit, log):
    class Countdown(kit.Module):
        def forward(self, n):
            if n:
                self(n - 1)
            return n

    m = Countdown()
    m.register_forward_hook(saying(log, "hooked"))
    m(2)


# ---- handles


@row(1, 0, 0, ("forward", 1, 1))
def remove_may_be_called_again(kit, log):
    m = scaler(kit, log)
    handle = m.register_forward_hook(saying(log, "never"), with_kwargs=True, always_call=True)
    log(len(m._forward_hooks))
    handle.remove()
    log(len(m._forward_hooks) + len(m._forward_hooks_with_kwargs) + len(m._forward_hooks_always_called))
    handle.remove()
    log(len(m._forward_hooks))
    m(1)


@row(("forward", 1, 1), "in", ("forward", 1, 1))
def a_handle_is_a_context_manager(kit, log):
    m = scaler(kit, log)
    with m.register_forward_hook(lambda module, args, out: log("in")) as handle:
        assert handle.id in m._forward_hooks
        m(1)
    m(1)


@row(("raised", "ValueError"), 0)
def leaving_the_block_by_an_exception_removes_the_hook(kit, log):
    m = scaler(kit, lambda event: None, fail=True)

    def block(kit, log):
        with m.register_forward_hook(saying(log, "never")):
            m(1)

    log(transcript(block, kit)[-1])
    log(len(m._forward_hooks))


@row(True, True)
def ids_grow_and_are_unique_over_all_modules(kit, log):
    a, b = scaler(kit, log), scaler(kit, log)
    ids = [
        a.register_forward_hook(print).id,
        b.register_forward_pre_hook(print).id,
        a.register_forward_pre_hook(print).id,
    ]
    log(ids == sorted(ids))
    log(len(set(ids)) == 3)


@row(True, "removed")
def a_handle_keeps_no_module_alive(kit, log):
    m = scaler(kit, log)
    handle, ref = m.register_forward_hook(print), weakref.ref(m)
    del m
    gc.collect()
    log(ref() is None)
    handle.remove()
    log("removed")


@row("original", "copy", "original")
def deepcopy_copies_hooks_and_handles_belong_to_their_copy(kit, log):
    class Named(kit.Module):
        def forward(self):
            pass

    m = Named()
    m.tag = "original"
    handle = m.register_forward_hook(lambda module, args, out: log(module.tag))
    twin, twin_handle = copy.deepcopy((m, handle))
    twin.tag = "copy"
    m()
    twin()
    twin_handle.remove()
    twin()
    m()
    handle.remove()
    m()


@row(1, 0, 1, True)
def pickled_together_module_and_handle_still_belong_together(kit, log):
    m = kit.Module()
    handle = m.register_forward_hook(print)
    twin, twin_handle = pickle.loads(pickle.dumps((m, handle)))
    log(len(twin._forward_hooks))
    twin_handle.remove()
    log(len(twin._forward_hooks))
    log(len(m._forward_hooks))
    log(twin.register_forward_hook(print).id > twin_handle.id)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("name", ROWS)
def test_row(name, kit):
    script, expected = ROWS[name]
    assert transcript(script, KITS[kit]()) == expected


# ---- what is ours alone


def test_global_always_call_with_kwargs_gets_its_kwargs():
    """Torch calls this hook without kwargs, so that it always fails; here it is called as it was registered."""
    kit, log = KITS["qwenref"](), []
    m = scaler(kit, log.append, fail=True)
    with (
        kit.global_hook(saying(log.append, "g"), always_call=True, with_kwargs=True),
        pytest.raises(ValueError, match="forward failed"),
    ):
        m(3, scale=2)
    assert log == [("forward", 3, 2), ("g", (3,), {"scale": 2}, None)]


def test_a_pickled_handle_whose_module_is_gone_is_dead_but_usable():
    """Torch cannot unpickle this one."""
    kit = KITS["qwenref"]()
    m = kit.Module()
    handle = m.register_forward_hook(print)
    del m
    gc.collect()
    other = pickle.loads(pickle.dumps(handle))
    assert other.id == handle.id
    other.remove()
    assert kit.Module().register_forward_hook(print).id > other.id


def test_the_message_about_a_wrong_pair_names_module_hook_and_remedy():
    from qwenref.errors import HookError

    kit = KITS["qwenref"]()
    tree = kit.Module()
    tree.layers = kit.ModuleList([scaler(kit, print)])
    tree.name_tree()
    tree.layers[0].register_forward_pre_hook(lambda module, args, kwargs: (1, 2, 3), with_kwargs=True)
    with pytest.raises(HookError) as caught:
        tree.layers[0](1)
    first, do = str(caught.value).split("\n")
    assert first.startswith("layers.0: forward pre-hook ")
    assert "<lambda>" in first and "test_hooks.py, line " in first and "returned a tuple of 3" in first
    assert do.startswith("    do       return None")


def test_the_warning_about_a_dropped_exception_names_hook_and_exception():
    from qwenref.errors import QwenrefWarning

    kit = KITS["qwenref"]()
    m = scaler(kit, lambda event: None, fail=True)
    m.register_forward_hook(raising(lambda event: None, "boom"), always_call=True)
    with (
        pytest.warns(QwenrefWarning, match=r"raising.*always_call=True raised KeyError: 'boom'"),
        pytest.raises(ValueError, match="forward failed"),
    ):
        m(3)


@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_a_hook_taken_away_during_the_call_still_gets_its_kwargs(kind):
    """What another thread may do at any time, done by the hook before it: tables and options are read as one."""
    module, seen = qwenref.SiLUActivation(), []
    register = getattr(module, f"register_forward_{kind}")
    register(lambda *args: second.remove())
    second = register(lambda module, args, kwargs, *output: seen.append(kwargs), with_kwargs=True)
    for _ in range(2):
        module(input=np.ones((1, 2), np.float32))
    assert [list(kwargs) for kwargs in seen] == [["input"]]


def test_every_global_hook_is_gone_after_these_tests():
    from qwenref import _C

    assert not _C.global_forward_hooks and not _C.global_forward_pre_hooks
