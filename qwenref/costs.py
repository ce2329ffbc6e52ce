"""What a call of an op has to do: floating point operations and bytes, by formula from the shapes.

A multiply-add counts two; every other addition, multiplication, division, root, exponential, logarithm, sine and cosine
counts one; comparisons, copies and rounding count nothing, nor does what is done once per row.  Bytes are those of the
arrays that are read and returned, each once: what memory has to deliver where nothing is in a cache.
"""

from collections import namedtuple

import numpy as np

from qwenref import ops

Cost = namedtuple("Cost", "flops bytes double")
Cost.__doc__ = "Work of one call: floating point operations, bytes, and whether the arithmetic is in float64."

# Operations per element of the result.
_PER_ELEMENT = {
    "embedding": 0, "argmax": 0, "round_bf16": 0, "round_f16": 0, "add": 1, "mul": 1, "exp": 1,
    "sigmoid": 3,  # exp, add, divide
    "silu": 3, "sigmoid_mul": 4, "silu_mul": 4,
    "softplus": 3,  # exp, add, log
    "gelu": 5,  # square, exp, the share below, its product
    "gelu_tanh": 8,  # the cubic argument, sigmoid, product
    "delta_decay": 5,  # bias, softplus, product
    "rms_norm": 4,  # square and sum, two products
    "l2_norm": 3, "rms_norm_gated": 8,
    "layer_norm": 7,  # mean, difference, square and sum, two products, bias
    "softmax": 4, "log_softmax": 4,
    "rope_frequencies": 3, "rope_table": 3, "grid_table": 3,
    "sample_table": 7,  # four weights, three sums
}  # fmt: skip
SOFTMAX = _PER_ELEMENT["softmax"]


def _linear(x, w, **_):
    return 2 * x.size * w.shape[0]


def _pairs(begin, end):
    """Query-key pairs that are looked at, over all rows and tokens."""
    return int((np.asarray(end) - np.asarray(begin)).sum())


def _scores(q, begin, end, **_):
    return _pairs(begin, end) * q.shape[2] * (2 * q.shape[3] + 1)


def _weights(s, begin, end, **_):
    return _pairs(begin, end) * s.shape[1] * SOFTMAX


def _mix(p, v, begin, end, **_):
    return _pairs(begin, end) * p.shape[1] * 2 * v.shape[3]


def _attention(q, begin, end, **_):
    return _pairs(begin, end) * q.shape[2] * (4 * q.shape[3] + 1 + SOFTMAX)


def _squares(lengths):
    """Query-key pairs of all segments."""
    return int((np.asarray(lengths) ** 2).sum())


def _segment_scores(q, lengths, **_):
    return _squares(lengths) * q.shape[1] * (2 * q.shape[2] + 1)


def _segment_weights(s, lengths, **_):
    return _squares(lengths) * s.shape[0] * SOFTMAX


def _segment_mix(p, v, lengths, **_):
    return _squares(lengths) * p.shape[0] * 2 * v.shape[2]


def _segment_attention(q, lengths, **_):
    return _squares(lengths) * q.shape[1] * (4 * q.shape[2] + 1 + SOFTMAX)


def _delta(k, v, **_):
    """Per token and head: decay S, read it, correct, write, read again."""
    K, V = k.shape[3], v.shape[3]
    return v.size // V * (7 * K * V + 3 * V + 1)


_FORMULAS = {
    **dict.fromkeys(("linear", "linear_parts", "linear_f64", "linear_blas"), _linear),
    "attention": _attention,
    "attention_scores": _scores,
    "attention_softmax": _weights,
    "attention_mix": _mix,
    "segment_attention": _segment_attention,
    "segment_scores": _segment_scores,
    "segment_softmax": _segment_weights,
    "segment_mix": _segment_mix,
    "causal_conv1d": lambda x, w, **_: 2 * x.size * w.shape[2],
    "rope": lambda x, cos, **_: 6 * x.shape[2] * cos.size,  # a pair: four products, two sums
    "rope_whole": lambda x, cos, **_: 6 * x.shape[1] * cos.size,
    "gated_delta_rule": _delta,
    "gated_delta_rule_chunked": _delta,  # the useful work; the chunked form does more
}


def _parameters(name):
    """Names of the inputs of an op, arrays and scalars, in order."""
    inside = ops.__dict__[name].__text_signature__.strip("()").partition("*")[0]
    return tuple(word.partition("=")[0].strip() for word in inside.split(",") if word.strip())


_PARAMETERS = {name: _parameters(name) for name in ops.names()}


def cost(name, args, kwargs, result):
    """Cost of the call `ops.name(*args, **kwargs)` that returned `result`, an array or a tuple of arrays."""
    wanted = _PARAMETERS[name]
    given = dict(zip(wanted, args, strict=False)) | {key: kwargs[key] for key in kwargs if key in wanted}
    given = {key: value for key, value in given.items() if value is not None and not isinstance(value, (int, float))}
    arrays = {key: value if isinstance(value, np.ndarray) else np.asarray(value) for key, value in given.items()}
    results = [array for array in (result if isinstance(result, tuple) else (result,)) if array is not None]
    read = sum(array.nbytes for array in arrays.values())
    if name == "embedding":  # rows that are not asked for are not read
        read = arrays["ids"].nbytes + arrays["ids"].size * arrays["w"].shape[1] * arrays["w"].itemsize
    formula = _FORMULAS.get(name)
    flops = formula(**arrays) if formula else _PER_ELEMENT[name] * results[0].size
    double = results[0].dtype == np.float64
    return Cost(int(flops), int(read + sum(array.nbytes for array in results)), bool(double))
