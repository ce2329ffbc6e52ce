"""Every op of the extension against its float64 definition: values within derived bounds, shapes, edges, mistakes."""

import inspect
import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from op_bounds import SECOND_ORDER, normal
from op_rows import ROWS

from qwenref import naive, ops
from qwenref.errors import DTypeError, InputError, ShapeError

STORED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def test_every_op_has_a_row_and_a_definition():
    assert sorted(ROWS) == sorted(ops.names())
    assert [name for name in ops.names() if not callable(getattr(naive, name, None))] == []


# ---------------------------------------------------------------------------------------------- signatures


@dataclass
class Param:
    name: str
    dims: list[str]
    kind: str
    optional: bool


def signature(name):
    """Arrays in, arrays out, as the op's signature lists them"""
    sides = getattr(ops, name).signature.split("->")
    found = [
        [Param(n, d.split(","), k, bool(o)) for n, d, k, o in re.findall(r"(\w+)\[([^]]*)\]:(\w)(\??)", side)]
        for side in sides
    ]
    return found[0], [p for p in found[1] if not p.name.startswith("_")]


def parameters(name, required=False):
    """Names of everything an op takes, in order; or of what it cannot do without"""
    text = re.search(r"\((.*)\)", re.sub(r"\[[^]]*\]:\w", "", getattr(ops, name).signature.split("->")[0]))[1]
    return [p.rstrip("?").split("=")[0] for p in text.split(", ") if not (required and re.search("[?=]", p))]


def all_outputs(name):
    return {p.name: True for p in signature(name)[1] if p.optional}


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def same_bits(a, b):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_definition_has_the_signature_of_the_op(name):
    """Names, order, defaults, dimensions and what is optional; kinds differ, float64 being the only one there"""
    text = re.sub(r"(\]):[fsvd]", r"\1", getattr(ops, name).signature)
    text = re.sub(r", _\w+\[[^]]*\](:\w)?\??", "", text)
    plain = lambda s: re.sub(r"\s|=[-\w.]+|:\w", "", s)  # noqa: E731
    assert plain(text) == plain(getattr(naive, name).signature)
    defaults = {n: float(v) for n, v in re.findall(r"(\w+)=([-\w.]+)", getattr(ops, name).signature)}
    formula = inspect.signature(getattr(naive, name)).parameters
    assert {n: formula[n].default for n in defaults} == defaults


# ---------------------------------------------------------------------------------------------- values


def compare(name, call, bound):
    y = as_tuple(getattr(ops, name)(**call, **all_outputs(name)))
    expected = as_tuple(getattr(naive, name)(**call, **all_outputs(name)))
    with np.errstate(invalid="ignore"):
        allowed = as_tuple(bound(*expected, **call))
    for out, got, want, most in zip(signature(name)[1], y, expected, allowed, strict=True):
        assert got.dtype == {"f": np.float32, "i": np.int64, "d": np.float64}[out.kind]
        assert got.shape == want.shape
        with np.errstate(over="ignore"):
            nearest = want.astype(got.dtype)
        finite = np.isfinite(nearest)
        np.testing.assert_array_equal(got[~finite], nearest[~finite], err_msg=f"{name}: {out.name}")
        error = abs(got[finite].astype(np.float64) - want[finite])
        most = SECOND_ORDER * np.broadcast_to(most, want.shape)[finite]
        worst = np.argmax(error - most) if error.size else 0
        assert np.all(error <= most), (
            f"{name}: {out.name} is {error[worst]:.3g} off at its worst element, {most[worst]:.3g} allowed; "
            f"{np.count_nonzero(~(error <= most))} of {error.size} are outside"
        )


CALLS = [pytest.param(n, c, id=f"{n}-{i}") for n, row in ROWS.items() for i, c in enumerate(row.calls + row.extremes)]


@pytest.mark.parametrize("name, call", CALLS)
def test_the_value_is_the_definition_within_its_bound(name, call):
    compare(name, call, ROWS[name].bound)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", ROWS)
def test_stored_weights_are_widened_exactly(name, dtype):
    weights = [p.name for p in signature(name)[0] if p.kind in "wv"]
    for call in ROWS[name].calls:
        call = call | {n: call[n].astype(STORED[dtype]) for n in weights if n in call}
        compare(name, call, ROWS[name].bound)
        # nothing but the format of the file differs from the same numbers in float32
        wide = call | {n: call[n].astype(np.float32) for n in weights if n in call}
        assert same_bits(as_tuple(getattr(ops, name)(**call)), as_tuple(getattr(ops, name)(**wide)))


def test_a_large_angle_is_reduced_in_float64():
    """cos(2^30 / 3): a float32 angle would be off by several turns; beyond 2^31 float64 is not trusted either"""
    cos, sin = ops.rope_table(np.array([[2**30]]), np.array([0]), np.array([1 / 3]))
    assert cos[0, 0] == np.float32(math.cos(2**30 / 3)) and sin[0, 0] == np.float32(math.sin(2**30 / 3))
    with pytest.raises(InputError, match="rope_table: .*\n    found .*\n    expected "):
        ops.rope_table(np.array([[2**40]]), np.array([0]), np.array([1.0]))


# ---------------------------------------------------------------------------------------------- forms of a call


def spread(a):
    """The same numbers with a gap behind every element and every row, in steps NumPy calls non-contiguous"""
    if a.ndim == 0 or a.size == 0:
        return a
    wide = np.zeros([2 * n for n in a.shape], a.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in a.shape)]
    view[...] = a
    return view


def reversed_copy(a):
    """The same numbers behind negative strides"""
    return a[(slice(None, None, -1),) * a.ndim].copy()[(slice(None, None, -1),) * a.ndim]


FORMS = {"spread": spread, "reversed": reversed_copy, "column-major": np.asfortranarray}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROWS)
def test_the_layout_of_an_input_does_not_matter(name, form):
    call, op = ROWS[name].calls[0], getattr(ops, name)
    plain = as_tuple(op(**call, **all_outputs(name)))
    for p in signature(name)[0]:
        other = call | {p.name: FORMS[form](call[p.name])}
        assert same_bits(as_tuple(op(**other, **all_outputs(name))), plain), p.name


@pytest.mark.parametrize("name", ROWS)
def test_caches_are_read_where_they_lie(name):
    """Kind s: the first part of a longer, preallocated array"""
    call, op = ROWS[name].calls[0], getattr(ops, name)
    strided = [p.name for p in signature(name)[0] if p.kind == "s"]
    for n in strided:
        room = np.full([size + 3 for size in call[n].shape], np.nan, np.float32)
        view = room[tuple(slice(size) for size in call[n].shape)]
        view[...] = call[n]
        assert same_bits(as_tuple(op(**call | {n: view})), as_tuple(op(**call))), n
    assert strided or not name.endswith(("attention", "attention_scores", "segment_scores", "_mix", "rope_whole"))


@pytest.mark.parametrize("name", ROWS)
def test_position_keyword_and_list_are_the_same_call(name):
    call, op = ROWS[name].calls[0], getattr(ops, name)
    order = [n for n in parameters(name) if n in call]
    plain = as_tuple(op(**call))
    assert len(order) == len(call)
    assert same_bits(as_tuple(op(*[call[n] for n in order])), plain)
    listed = {n: a.tolist() if isinstance(a, np.ndarray) else a for n, a in call.items() if n not in weights_of(name)}
    assert same_bits(as_tuple(op(**call | listed)), plain)


def weights_of(name):
    return [p.name for p in signature(name)[0] if p.kind == "w"]


OPTIONAL_INPUTS = [
    (n, p) for n in ROWS for p in re.findall(r"(\w+)\[[^]]*\]:\w\?", getattr(ops, n).signature.split("->")[0])
]
OUTPUTS = [pytest.param(n, p, id=f"{n}-{p.name}") for n in ROWS for p in signature(n)[1]]


@pytest.mark.parametrize("name, param", OPTIONAL_INPUTS)
def test_an_optional_input_may_be_none(name, param):
    call = {n: a for n, a in ROWS[name].calls[0].items() if n != param}
    op = getattr(ops, name)
    assert same_bits(as_tuple(op(**call)), as_tuple(op(**call, **{param: None})))
    assert not same_bits(as_tuple(op(**call)), as_tuple(op(**ROWS[name].calls[0])))


@pytest.mark.parametrize("name, out", OUTPUTS)
def test_a_given_array_is_filled_and_returned(name, out):
    call, op = ROWS[name].calls[0], getattr(ops, name)
    asked = as_tuple(op(**call, **all_outputs(name)))
    at = [p.name for p in signature(name)[1]].index(out.name)
    buffer = np.full_like(asked[at], -7)
    results = as_tuple(op(**call, **(all_outputs(name) | {out.name: buffer})))
    assert results[at] is buffer and same_bits(results, asked)
    without = as_tuple(op(**call))  # asking for more changes no bit of the rest
    assert same_bits(without, [a for p, a in zip(signature(name)[1], asked, strict=True) if not p.optional])


@pytest.mark.parametrize("name, out", OUTPUTS)
def test_an_array_that_cannot_take_the_result_is_refused_untouched(name, out):
    call, op = ROWS[name].calls[0], getattr(ops, name)
    at = [p.name for p in signature(name)[1]].index(out.name)
    good = as_tuple(op(**call, **all_outputs(name)))[at]
    locked = good.copy()
    locked.flags.writeable = False
    bad = [(np.full([*good.shape[:-1], good.shape[-1] + 1], -7, good.dtype), ShapeError), (locked, InputError)]
    bad += [
        (np.full(good.shape, -7, np.float16), (ShapeError, DTypeError)),
        (np.repeat(good, 2, -1)[..., ::2], InputError),
    ]
    for buffer, error in bad:
        before = buffer.copy()
        with pytest.raises(error, match=f"^{name}: .*{out.name}"):
            op(**call, **{out.name: buffer})
        assert np.array_equal(buffer, before, equal_nan=True)


def test_an_output_may_not_lie_over_an_input():
    x = normal(4, 8)
    before = x.copy()
    with pytest.raises(InputError, match="silu: .*y.*overlaps"):
        ops.silu(x, y=x)
    assert np.array_equal(x, before)


def test_inputs_are_never_written():
    for name, row in ROWS.items():
        copies = {n: a.copy() for n, a in row.calls[0].items() if isinstance(a, np.ndarray)}
        getattr(ops, name)(**row.calls[0], **all_outputs(name))
        assert all(np.array_equal(copies[n], row.calls[0][n]) for n in copies), name


# ---------------------------------------------------------------------------------------------- mistakes


INPUTS = [pytest.param(n, p, id=f"{n}-{p.name}") for n in ROWS for p in signature(n)[0]]


def refused(name, call, error, *mentions):
    with pytest.raises(error) as caught:
        getattr(ops, name)(**call)
    text = str(caught.value)
    assert text.startswith(f"{name}: "), text
    for mention in mentions:
        assert re.search(mention, text), f"{mention!r} is not in {text!r}"
    compare(name, ROWS[name].calls[0], ROWS[name].bound)  # and the next call is none the worse


@pytest.mark.parametrize("name, param", INPUTS)
def test_a_wrong_number_of_dimensions_is_a_shape_error(name, param):
    call, starred = ROWS[name].calls[0], "*" in param.dims
    found = [r"\n    found    \w+ \[", r"\n    expected \[", rf"\b{param.name}\b"]
    if not starred:
        refused(name, call | {param.name: call[param.name][None]}, ShapeError, *found)
    if len(param.dims) > 1 or not starred:  # a lone * takes any number
        refused(name, call | {param.name: call[param.name].ravel()[0]}, ShapeError, *found)


@pytest.mark.parametrize("name, param", INPUTS)
def test_a_dimension_that_contradicts_the_others_is_a_shape_error(name, param):
    call, inputs = ROWS[name].calls[0], signature(name)[0]
    others = {d[0] for p in inputs if p.name != param.name for d in p.dims}
    tried = 0
    for axis, dim in enumerate(param.dims):
        if dim[0] in others or dim[0].isdigit():
            at = axis if "*" not in param.dims[:axis] else axis - len(param.dims)
            wrong = np.concatenate([call[param.name], np.take(call[param.name], [0], at)], at)
            refused(name, call | {param.name: wrong}, ShapeError, r"\n    found ", r"\n    expected ")
            tried += 1
    free = {("rope_table", "positions"), ("sample_table", "w"), ("grid_table", "positions"), ("grid_table", "f")}
    free |= {("segment_softmax", "s")}  # both of its sizes are twice its own
    assert tried or len(inputs) == 1 or name == "embedding" or param.name == "lengths" or (name, param.name) in free


@pytest.mark.parametrize("name, param", INPUTS)
def test_a_dtype_that_would_lose_or_guess_is_a_dtype_error(name, param):
    call = ROWS[name].calls[0]
    wrong = {"i": [np.float32, np.float64, bool, complex], "d": [np.int64, complex], "w": [np.float64, np.int32, bool]}
    for dtype in wrong.get(param.kind, [np.float64, np.int64, np.int8, bool, complex]):
        bad = call | {param.name: call[param.name].astype(dtype)}
        refused(name, bad, DTypeError, rf"\b{param.name}\b", rf"\n    found    {np.dtype(dtype)}", r"\n    expected ")


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_unknown_or_doubled_argument_is_a_type_error(name):
    call, op = ROWS[name].calls[0], getattr(ops, name)
    for param in parameters(name, required=True):
        refused(name, {n: a for n, a in call.items() if n != param}, TypeError, f"'{param}'", r"\n    expected ")
    refused(name, call | {"nonsense": 1}, TypeError, "'nonsense'", r"\n    expected ")
    first = signature(name)[0][0].name
    with pytest.raises(TypeError, match=f"{name}: .*'{first}'.*twice"):
        op(call[first], **call)
    with pytest.raises(TypeError, match=name):
        op(*[call[first]] * 20)


@pytest.mark.parametrize("bad", [-1, 11, 2**40, -(2**40)])
def test_an_id_out_of_range_is_named(bad):
    call = ROWS["embedding"].calls[0]
    ids = call["ids"].copy()
    ids[1, 2] = bad
    refused("embedding", call | {"ids": ids}, InputError, f"{bad:,}|{bad}", "11")


@pytest.mark.parametrize("name", ["attention", "attention_scores", "attention_mix", "gated_delta_rule"])
def test_heads_that_do_not_divide_are_a_shape_error(name):
    grouped = {"attention": "q", "attention_scores": "q", "attention_mix": "p", "gated_delta_rule": "v"}[name]
    axis = 1 if name == "attention_mix" else 2
    call = ROWS[name].calls[0]
    fewer = {grouped: 5} if name != "gated_delta_rule" else {"v": 5, "g": 5, "beta": 5}
    bad = {n: np.ascontiguousarray(np.take(call[n], range(size), axis)) for n, size in fewer.items()}
    bad |= {"state": call["state"][:, :5].copy()} if "state" in call else {}
    refused(name, call | bad, ShapeError, "5", "2")


def test_a_rotation_wider_than_the_head_is_a_shape_error():
    call = ROWS["rope"].calls[0]
    refused("rope", call | {"x": call["x"][..., :7].copy()}, ShapeError, "F=4", "3")


def test_an_axis_out_of_range_is_an_input_error():
    call = ROWS["rope_table"].calls[0]
    for axis in (3, -1):
        refused("rope_table", call | {"axis": np.full(5, axis)}, InputError, "axis", str(axis))


@pytest.mark.parametrize("name", ["attention", "attention_scores", "attention_softmax", "attention_mix"])
@pytest.mark.parametrize("begin, end", [(-1, 3), (4, 3), (0, 10)])
def test_a_range_outside_the_keys_is_an_input_error(name, begin, end):
    call = ROWS[name].calls[0]
    bad = {"begin": call["begin"].copy(), "end": call["end"].copy()}
    bad["begin"][1, 2], bad["end"][1, 2] = begin, end
    refused(name, call | bad, InputError, "token 2 of row 1", f"begin={begin}, end={end}", "S=9")


@pytest.mark.parametrize("name", ["segment_attention", "segment_scores", "segment_softmax", "segment_mix"])
@pytest.mark.parametrize("lengths", [[5, 1, 29], [5, 1, 31], [6, -1, 31], [36, 2**62, 2**62], []])
def test_segments_that_are_not_the_tokens_are_an_input_error(name, lengths):
    refused(name, ROWS[name].calls[0] | {"lengths": np.array(lengths, np.int64)}, InputError, "segment", "N=36")
    with pytest.raises(InputError, match="segment_.*: .*\n    found .*\n    expected .*N=36"):
        getattr(naive, name)(**ROWS[name].calls[0] | {"lengths": np.array(lengths, np.int64)})


@pytest.mark.parametrize("where, bad", [("row", 3 + 1e-9), ("column", -1e-9), ("column", np.nan), ("row", np.inf)])
def test_a_place_outside_the_table_is_an_input_error(where, bad):
    call = dict(ROWS["sample_table"].calls[0])
    call[where] = np.append(call[where][:-1], bad)
    refused("sample_table", call, InputError, "outside the table", rf"{where} {bad:.17g}\b", r"\n    expected 0 to 3")
    with pytest.raises(InputError, match="sample_table: .* is outside the table"):
        naive.sample_table(**call)


def test_a_head_of_other_than_two_times_the_frequencies_is_a_shape_error():
    call = ROWS["rope_whole"].calls[0]
    refused("rope_whole", call | {"x": call["x"][..., :6].copy()}, ShapeError, "F=4", "D=6")


def test_an_unknown_step_is_an_input_error():
    for name in ("causal_conv1d", "gated_delta_rule"):
        call = ROWS[name].calls[0]
        refused(name, call | {"step": np.full_like(call["step"], 3)}, InputError, "step", "3")


# ---------------------------------------------------------------------------------------------- what nobody may see


@pytest.mark.parametrize("name", ["attention", "attention_scores", "attention_softmax", "attention_mix"])
def test_keys_outside_the_range_may_hold_anything(name):
    call = dict(ROWS[name].calls[0])
    call["begin"], call["end"] = np.full_like(call["begin"], 2), np.full_like(call["end"], 5)
    spoilt = {n: call[n].copy() for n in ("k", "v", "s", "p") if n in call}
    for n, a in spoilt.items():
        keys = np.moveaxis(a, 2 if n in "kv" else 3, 0)
        keys[:2] = keys[5:] = np.nan
    op = getattr(ops, name)
    assert same_bits(as_tuple(op(**call)), as_tuple(op(**call | spoilt)))


def test_other_segments_may_hold_anything():
    call = dict(ROWS["segment_attention"].calls[0])
    spoilt = {n: call[n].copy() for n in "qkv"}
    for n in "qkv":
        spoilt[n][:5] = spoilt[n][6:] = np.nan
    assert same_bits([ops.segment_attention(**call)[5]], [ops.segment_attention(**call | spoilt)[5]])


@pytest.mark.parametrize("name, memory", [("causal_conv1d", "window"), ("gated_delta_rule", "state")])
def test_skipped_tokens_and_a_forgotten_past_may_hold_anything(name, memory):
    """A step of 0 leaves the memory as it was, to the bit, and gives zeros; a step of 2 looks at nothing before it."""
    call, op = dict(ROWS[name].calls[0]), getattr(ops, name)
    B, T = call["step"].shape
    call["step"] = np.zeros((B, T), np.int64)
    extra = all_outputs(name)
    spoilt = {n: np.full_like(a, np.nan) for n, a in call.items() if n in ("x", "q", "k", "v", "g", "beta")}
    y, after, *more = op(**call | spoilt, **extra)
    assert all(np.all(result == 0) for result in (y, *more)) and np.array_equal(after, call[memory])
    call["step"] = np.tile([2] + [1] * (T - 1), (B, 1))
    fresh = {n: a for n, a in call.items() if n not in (memory, "step")}
    assert same_bits(op(**call | {memory: np.full_like(call[memory], np.nan)}, **extra), op(**fresh, **extra))
