"""The module tree: walks, registration, state dicts, displays, copies. Each script is answered by torch as well."""

import copy
import pickle
import warnings
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from module_kits import KITS, builtin_name, transcript, tree

from qwenref.errors import CapabilityMissing, QwenrefWarning
from qwenref.module import Module
from qwenref.parameter import Parameter


def errors(log, *calls):
    """Log for each call what it raised, as the built-in class it can be caught by."""
    for call in calls:
        try:
            call()
        except Exception as error:
            log(builtin_name(error))
        else:
            log("nothing raised")


# ---- scripts that torch has to answer in the same way


def walks(kit, log):
    m = tree(kit)
    names = {id(module): name for name, module in m.named_modules()}
    log(list(names.values()))
    log([names[id(module)] for module in m.modules()])
    log([names[id(module)] for module in m.modules(remove_duplicate=False)])
    log([name for name, _ in m.named_modules(prefix="p", remove_duplicate=False)])
    log([name for name, _ in m.layers[0].named_children()])
    log(len(list(m.children())))
    log([name for name, _ in m.named_parameters()])
    log([name for name, _ in m.named_parameters(remove_duplicate=False)])
    log([name for name, _ in m.named_parameters(prefix="p", recurse=False)])
    log([name for name, _ in m.head.named_parameters(recurse=False)])
    log([name for name, _ in m.named_buffers()])
    log([tuple(p.shape) for p in m.parameters()])
    log(len(list(m.buffers())))
    log(sum(p.numel() for p in m.parameters()))
    memo = set()
    list(m.layers[0].named_modules(memo))
    log([name for name, _ in m.named_modules(memo)])


def apply_is_post_order(kit, log):
    m = tree(kit)
    names = {id(module): name for name, module in m.named_modules()}
    seen = []
    log(m.apply(lambda module: seen.append(names[id(module)])) is m)
    log(seen)


def state_dicts(kit, log):
    m = tree(kit)
    state = m.state_dict()
    log(isinstance(state, OrderedDict))
    log(list(state))
    log(list(m.head.state_dict(prefix="h.")))
    state["embed.weight"][...] = 3.0
    log(float(m.head.weight[0, 0]))
    log(type(state["embed.weight"]) is type(m.embed.weight))
    log(m.state_dict(keep_vars=True)["head.weight"] is m.embed.weight)
    backup = copy.deepcopy(state)
    m.embed.weight[...] = 4.0
    log((float(backup["embed.weight"][0, 0]), float(state["head.weight"][0, 0])))


def loading(kit, log):
    m = tree(kit)
    log(repr(m.load_state_dict(m.state_dict())))
    state = m.state_dict()
    extra = {"surplus": state["steps"], "layers.9.x": state["steps"], "layers.0.up.more": state["steps"]}
    partial = {name: array for name, array in state.items() if name not in ("steps", "layers.1.up.bias")}
    keys = m.load_state_dict({**partial, **extra}, strict=False)
    log((keys.missing_keys, keys.unexpected_keys, tuple(keys)))
    log(repr(keys).split("(")[1])
    narrow = {**state, "layers.3.weight": kit.array([1.0, 2.0, 3.0])}
    for states, strict in (({**partial, **extra, "layers.3.weight": narrow["layers.3.weight"]}, True), (narrow, False)):
        try:
            m.load_state_dict(states, strict=strict)
        except RuntimeError as error:
            log(str(error).replace("torch.Size([3])", "(3,)").replace("torch.Size([2])", "(2,)"))
    errors(log, lambda: m.load_state_dict([]), lambda: m.load_state_dict({**state, "steps": 3.0}))

    weight = m.layers[3].weight
    m.load_state_dict({**state, "layers.3.weight": kit.array([5.0, 6.0])})
    log((m.layers[3].weight is weight, weight.tolist()))
    m.load_state_dict({**state, "layers.3.weight": kit.array([7.0, 8.0])}, assign=True)
    log((m.layers[3].weight is weight, weight.tolist(), m.layers[3].weight.tolist()))
    log("layers.3.weight" in dict(m.named_parameters()))


def lookups(kit, log):
    m = tree(kit)
    log(m.get_submodule("") is m)
    log(m.get_submodule("layers.2.up") is m.layers[2].up)
    log(m.get_parameter("layers.0.up.bias") is m.layers[0].up.bias)
    log(m.get_buffer("steps") is m.steps)
    for call in (
        lambda: m.get_submodule("layers.4"),
        lambda: m.get_submodule("layers.0.nope.up"),
        lambda: m.get_parameter("head.nope"),
    ):
        try:
            call()
        except AttributeError as error:
            log(str(error))
    errors(
        log,
        lambda: m.get_submodule("head.weight"),
        lambda: m.get_submodule("nothing"),
        lambda: m.get_parameter("layers"),
        lambda: m.get_parameter("steps"),
        lambda: m.get_buffer("head.weight"),
        lambda: m.get_buffer("missing.steps"),
    )


def splicing(kit, log):
    m, new = tree(kit), kit.Module()
    m.set_submodule("layers.1.up", new)
    log(m.layers[1].up is new)
    m.set_submodule("layers.1.brand_new", new)
    log(m.layers[1].brand_new is new)
    m.set_submodule("top", new, strict=False)
    log([name for name, _ in m.named_children()])
    errors(
        log,
        lambda: m.set_submodule("", new),
        lambda: m.set_submodule("a", 3),
        lambda: m.set_submodule("layers.9.up", new),
        lambda: m.set_submodule("strictly_new", new, strict=True),
        lambda: m.set_submodule("head.weight", new),
    )


def attributes(kit, log):
    m = kit.Module()
    p, q = kit.Parameter(kit.array([1.0])), kit.Parameter(kit.array([2.0]))
    m.x = 5
    m.x = p
    log((m.x is p, "x" in m.__dict__, list(m._parameters)))
    m.x = q
    log(m.x is q)
    errors(log, lambda: setattr(m, "x", kit.array([1.0])), lambda: setattr(m, "x", 3), lambda: setattr(m, "x", "a"))
    log(m.x is q)
    m.x = None
    log((m.x, list(m._parameters), list(m.state_dict())))
    errors(log, lambda: setattr(m, "x", kit.Module()))
    del m.x
    m.x = kit.Module()
    log((list(m._parameters), list(m._modules)))
    errors(log, lambda: setattr(m, "x", 3), lambda: setattr(m, "x", kit.array([1.0])))
    m.x = p
    log((list(m._parameters), list(m._modules)))
    m.register_buffer("b", kit.array([1.0]), persistent=False)
    errors(log, lambda: setattr(m, "b", 3))
    m.b = kit.array([4.0])
    log((m.b.tolist(), list(m.state_dict())))
    m.b = None
    log(m.b)
    m.b = q
    log((list(m._buffers), list(m._parameters), list(m.state_dict())))
    m.plain = kit.array([1.0])
    log(("plain" in m.__dict__, "plain" in m._buffers))
    m.slice = q[0:1]
    log((list(m._parameters), "slice" in m.__dict__))
    del m.x, m.plain
    log((hasattr(m, "x"), hasattr(m, "plain"), list(m._parameters)))
    errors(log, lambda: delattr(m, "x"), lambda: m.nope, lambda: kit.Module().weight)
    m.register_buffer("c", kit.array([1.0]), persistent=False)
    del m.c
    m.register_buffer("c", kit.array([1.0]))
    log(list(m.state_dict()))
    m.child = kit.Module()
    del m.child
    log(list(m._modules))


def missing_attribute_text(kit, log):
    class Attention(kit.Module):
        pass

    try:
        Attention().q_porj  # noqa: B018
    except AttributeError as error:
        log(str(error))


def registration(kit, log):
    m, array = kit.Module(), kit.array([1.0])
    p = kit.Parameter(array)
    m.add_module("a", kit.Module())
    m.register_module("b", None)
    m.add_module("a", None)
    m.register_parameter("p", p)
    m.register_parameter("p", None)
    m.register_buffer("u", array)
    m.register_buffer("u", array, persistent=False)
    log((list(m._modules), list(m._parameters), list(m._buffers), list(m.state_dict())))
    for register, value in ((m.add_module, kit.Module()), (m.register_parameter, p), (m.register_buffer, array)):
        errors(
            log,
            lambda register=register, value=value: register("a.b", value),
            lambda register=register, value=value: register("", value),
            lambda register=register, value=value: register(3, value),
            lambda register=register, value=value: register("forward", value),
            lambda register=register, value=value: register("new", 3),
        )
    errors(
        log,
        lambda: m.register_parameter("u", p),
        lambda: m.register_buffer("p", array),
        lambda: m.add_module("u", kit.Module()),
        lambda: m.register_parameter("new", array),
        lambda: setattr(m, "forward", p),
    )


def before_init(kit, log):
    class Late(kit.Module):
        def __init__(self, early):
            early(self)

    errors(
        log,
        lambda: Late(lambda m: setattr(m, "w", kit.Parameter(kit.array([1.0])))),
        lambda: Late(lambda m: setattr(m, "c", kit.Module())),
        lambda: Late(lambda m: m.register_buffer("b", kit.array([1.0]))),
        lambda: Late(lambda m: m.register_parameter("w", None)),
        lambda: Late(lambda m: m.add_module("c", None)),
        lambda: Late(lambda m: m.nope),
        lambda: Late(lambda m: delattr(m, "nope")),
        lambda: Late(lambda m: setattr(m, "number", 3)),
    )


def class_attributes_come_first(kit, log):
    class Shadowed(kit.Module):
        child = "of the class"

        @property
        def derived(self):
            return "derived"

    m = Shadowed()
    m.child = kit.Module()
    m.derived = kit.Module()
    log((m.child, m.derived, list(m._modules)))


def tab_completion(kit, log):
    m = tree(kit)
    names = dir(m)
    log(names == sorted(names))
    log([name for name in ("embed", "layers", "nothing", "inv_freq", "absent", "state_dict", "x") if name in names])
    log([name for name in dir(m.layers) if name[0].isdigit()])
    m.add_module("0", kit.Module())
    log("0" in dir(m))


def displays(kit, log):
    m = tree(kit)
    log(repr(m))
    log(repr(m.layers))
    log(repr(m.layers[3]))
    log(repr(m.embed))
    log(repr(kit.ModuleList()))
    log(repr(kit.Module()))
    log(repr(kit.ModuleList([m.layers[0], m.layers[0], kit.ModuleList([m.embed, m.embed]), m.embed])))

    class Multi(kit.Module):
        def extra_repr(self):
            return "a\nb"

    class Blank(kit.Module):
        def extra_repr(self):
            return "a\n\nb"

    both = Multi()
    both.child = Blank()
    log(repr(Multi()))
    log(repr(both))


def lists(kit, log):
    parts = [kit.Module() for _ in range(6)]
    number = {id(part): i for i, part in enumerate(parts)}
    m = kit.ModuleList(parts[:4])

    def content(modules):
        log([(name, number[id(part)]) for name, part in modules.named_children()])

    log((len(m), number[id(m[0])], number[id(m[-1])], number[id(m[-4])], parts[2] in m, parts[5] in m))
    log([number[id(part)] for part in m])
    log([number[id(part)] for part in reversed(m)])
    content(m[1:3])
    content(m[::-2])
    content(m[9:])
    log((type(m[1:3]) is kit.ModuleList, m[1:3][0] is parts[1]))
    log(m.append(parts[4]) is m)
    content(m)
    m.extend([parts[5]])
    m += [kit.Module()]
    log(len(m))
    log(m.pop(6) is not None)
    m.insert(1, parts[5])
    m[0] = parts[3]
    log([number[id(part)] for part in m])
    log(list(m._modules))
    del m[1]
    content(m)
    del m[1:4:2]
    content(m)
    log(len(m + parts[:2]))
    for index in (17, -17):
        try:
            m[index]
        except IndexError as error:
            log(str(error))
    errors(
        log,
        lambda: m["0"],
        lambda: m[1.0],
        lambda: m.append(3),
        lambda: m.extend(3),
        lambda: m[0](1),
        lambda: m(1),
        lambda: m.__delitem__(9),
        lambda: m.__setitem__(9, parts[0]),
    )


def modes(kit, log):
    m = tree(kit)
    log((m.eval() is m, m.training, m.layers[0].training))
    errors(log, lambda: m.train(1), lambda: m.train(None))
    log((m.train(False) is m, m.cpu() is m, m.to("cpu") is m))


def dtypes(kit, log):
    m = tree(kit)
    m.register_buffer("count", kit.array([3.0]).astype(int) if hasattr(m.steps, "astype") else kit.array([3.0]).long())
    m.head.weight[0, 0] = 0.1

    def kinds():
        short = {"float64": "double", "float32": "float"}
        names = [str(a.dtype).removeprefix("torch.") for a in (m.head.weight, m.steps, m.count)]
        log([short.get(name, name) for name in names])

    for name in ("double", "half", "bfloat16", "float"):
        log(getattr(m, name)() is m)
        kinds()
    log((m.head.weight is m.embed.weight, round(float(m.head.weight[0, 0]), 6)))
    log(len(list(m.parameters())))


def copies(kit, log):
    m = tree(kit)
    twin = copy.deepcopy(m)
    log([name for name, _ in twin.named_parameters()] == [name for name, _ in m.named_parameters()])
    log((twin.head.weight is twin.embed.weight, twin.head.weight is m.head.weight, twin.layers[0] is m.layers[0]))
    log((twin.layers[0].act is twin.layers[1].act, twin.nothing, list(twin.state_dict()) == list(m.state_dict())))
    twin.embed.weight[...] = 9.0
    log((float(m.embed.weight[0, 0]), float(twin.head.weight[0, 0])))
    shallow = copy.copy(m)
    log((shallow is m, shallow.embed is m.embed, repr(shallow) == repr(m)))
    m.extra = [1, 2]
    log(copy.deepcopy(m).extra == [1, 2])


def pickles(kit, log):
    m = kit.ModuleList([kit.Module(), kit.Module()])
    m[0].weight = kit.Parameter(kit.array([1.0, 2.0]))
    m[1].tied = m[0].weight
    m[1].register_buffer("b", kit.array([3.0]), persistent=False)
    m.note = "kept"
    for protocol in (2, 4, 5):
        twin = pickle.loads(pickle.dumps(m, protocol))
        log((twin.note, twin[0].weight.tolist(), twin[1].tied is twin[0].weight, twin[1].b.tolist()))
        log((list(twin.state_dict()), repr(twin) == repr(m), [name for name, _ in twin.named_parameters()]))


def constructor_arguments(kit, log):
    errors(log, lambda: kit.Module(3), lambda: kit.Module(a=3))


SCRIPTS = [
    walks, apply_is_post_order, state_dicts, loading, lookups, splicing, attributes, missing_attribute_text,
    registration, before_init, class_attributes_come_first, tab_completion, displays, lists, modes, dtypes, copies,
    pickles, constructor_arguments,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_same_transcript_as_torch(script):
    witness = transcript(script, KITS["torch"]())
    ours = transcript(script, KITS["qwenref"]())
    assert len(witness) > 0 and not str(witness[-1]).startswith("('raised'"), witness
    assert ours == witness


# ---- state


def test_a_refused_state_changes_nothing():
    m = tree(KITS["qwenref"]())
    before = copy.deepcopy(m.state_dict())
    state = {name: np.full(array.shape, 5.0, np.float32) for name, array in before.items()}
    for broken in (
        {**state, "surplus": state["steps"]},
        {**state, "layers.3.weight": np.zeros(3)},
        {**state, "layers.3.weight": np.array([None, None])},
        {**state, "layers.3.weight": np.array(["a", "b"])},
        {name: array for name, array in state.items() if name != "steps"},
    ):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="loading state_dict for Root"):
                m.load_state_dict(broken, assign=assign)
            assert all(np.array_equal(array, before[name]) for name, array in m.state_dict().items())
    m.load_state_dict(state)
    assert all((array == 5).all() for array in m.state_dict().values())


def test_loading_reports_all_faults_at_once():
    m = tree(KITS["qwenref"]())
    state = m.state_dict()
    del state["steps"]
    state.update({"x": np.zeros(1), "layers.3.weight": np.zeros(3), "head.weight": "text"})
    with pytest.raises(RuntimeError) as caught:
        m.load_state_dict(state)
    lines = str(caught.value).split("\n\t")
    assert [line.split(":")[0].split(" for ")[0] for line in lines] == [
        "Error(s) in loading state_dict",
        "Missing key(s) in state_dict",
        "Unexpected key(s) in state_dict",
        "size mismatch",
        "While copying the parameter named \"head.weight\", expected an array but received <class 'str'>",
    ]


def test_loading_converts_to_the_stored_dtype_and_takes_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch tensors are what is loaded here: pip install 'qwenref[test]'")
    m = Module()
    m.weight = Parameter(np.zeros(2, ml_dtypes.bfloat16))
    m.load_state_dict({"weight": torch.tensor([1.5, 2.0])})
    assert m.weight.dtype == ml_dtypes.bfloat16 and m.weight.tolist() == [1.5, 2.0]


def test_meta_parameters_are_filled_by_assignment_only():
    m = Module()
    m.weight = Parameter.meta((2,), np.float32)
    with pytest.raises(RuntimeError, match="assign=True"):
        m.load_state_dict({"weight": np.ones(2, np.float32)})
    m.load_state_dict({"weight": np.ones(2, np.float32)}, assign=True)
    assert not m.weight.is_meta and type(m.weight) is Parameter


def test_keys_below_a_child_that_is_none_are_unexpected():
    m = Module()
    m.add_module("child", None)
    assert m.load_state_dict({"child.weight": np.ones(1)}, strict=False).unexpected_keys == ["child.weight"]


# ---- dtype, device, mode


def test_to_understands_every_way_to_say_a_dtype():
    m = Module()
    m.weight = Parameter(np.zeros(2, np.float32))
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert m.float().to(dtype).weight.dtype == ml_dtypes.bfloat16
    assert m.to("cpu", np.float16).weight.dtype == np.float16
    assert m.to(dtype=np.float64, device="cpu").weight.dtype == np.float64
    assert type(m.weight) is Parameter
    torch = pytest.importorskip("torch", reason="torch dtypes are what is given here: pip install 'qwenref[test]'")
    assert m.to(torch.bfloat16).weight.dtype == ml_dtypes.bfloat16
    assert m.to(torch.device("cpu"), torch.float32).weight.dtype == np.float32


def test_other_devices_and_dtypes_are_refused():
    m = Module()
    for call in (m.cuda, lambda: m.cuda(1), lambda: m.to("cuda:0"), lambda: m.to(device="mps"), lambda: m.to(0)):
        with pytest.raises(CapabilityMissing, match="no device"):
            call()
    for dtype in (np.int64, "int8", bool):
        with pytest.raises(TypeError, match="only takes floating dtypes"):
            m.to(dtype)


def test_converting_keeps_meta_parameters_without_memory():
    m = Module()
    m.weight = Parameter.meta((1 << 20, 1 << 20), ml_dtypes.bfloat16)
    assert m.double().weight.is_meta and m.weight.nbytes == 8 << 40


def test_training_cannot_be_switched_on():
    m = Module()
    for switch in (lambda: m.train(), lambda: m.train(True), lambda: setattr(m, "training", True)):
        with pytest.warns(QwenrefWarning, match="inference only"):
            switch()
        assert m.training is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.training = False
        m.eval().train(False)


def test_gradients_are_not_here():
    m = Module()
    for call in (
        m.requires_grad_,
        m.zero_grad,
        lambda: m.register_backward_hook(print),
        lambda: m.register_full_backward_hook(print),
        lambda: m.register_full_backward_pre_hook(print),
    ):
        with pytest.raises(NotImplementedError, match="inference only"):
            call()
