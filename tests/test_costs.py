"""The work of an op by formula: against counts by hand, and that there is a formula for every op."""

import ml_dtypes
import numpy as np
import pytest
from op_rows import ROWS

from qwenref import ops
from qwenref.costs import cost


def spent(name, *args, **kwargs):
    return cost(name, args, kwargs, getattr(ops, name)(*args, **kwargs))


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_linear_is_two_operations_per_weight_and_token_and_reads_the_weights_as_stored():
    flops, nbytes, double = spent("linear", ones(3, 64), ones(10, 64, dtype=ml_dtypes.bfloat16))
    assert (flops, nbytes, double) == (2 * 3 * 64 * 10, 3 * 64 * 4 + 10 * 64 * 2 + 3 * 10 * 4, False)
    assert spent("linear", x=ones(3, 64), w=ones(10, 64), b=ones(10)).bytes == (3 * 64 + 10 * 64 + 10 + 3 * 10) * 4
    assert spent("linear_f64", ones(3, 64, dtype=np.float64), ones(10, 64)) == (3840, 3 * 64 * 8 + 2560 + 240, True)


def test_an_embedding_reads_the_rows_asked_for():
    ids = np.array([[5, 5, 7]])
    assert spent("embedding", ids, ones(1000, 8, dtype=ml_dtypes.bfloat16)).bytes == 3 * 8 + 3 * 8 * 2 + 3 * 8 * 4


def test_attention_counts_the_pairs_that_are_looked_at_and_its_parts_add_up_to_it():
    q, k = ones(1, 4, 2, 8), ones(1, 1, 4, 8)
    begin, end = np.zeros((1, 4), np.int64), np.arange(1, 5)[None]
    whole = spent("attention", q, k, k, begin, end, 1.0)
    assert whole.flops == (1 + 2 + 3 + 4) * 2 * (4 * 8 + 1 + 4)
    scores = ops.attention_scores(q, k, begin, end, 1.0)
    weights = ops.attention_softmax(scores, begin, end)
    parts = [
        spent("attention_scores", q, k, begin, end, 1.0),
        spent("attention_softmax", scores, begin, end),
        spent("attention_mix", weights, k, begin, end),
    ]
    assert sum(part.flops for part in parts) == whole.flops


def test_the_delta_rule_by_hand():
    """Per token and value head: decay K V, read 2 K V, correct 2 V, write 2 K V, read 2 K V, scale V, one exp."""
    q, v, gates = ones(1, 3, 1, 4), ones(1, 3, 2, 8), ones(1, 3, 2)
    done = spent("gated_delta_rule", q, q, v, gates, gates, None, None, 0.5, final=True)
    assert done.flops == 3 * 2 * (4 * 8 + 2 * 4 * 8 + 2 * 8 + 2 * 4 * 8 + 2 * 4 * 8 + 8 + 1)
    assert done.bytes == 4 * (2 * 12 + 48 + 2 * 6 + 48 + 2 * 4 * 8)  # q and k, v, g and beta, o, the final state
    assert spent("gated_delta_rule_chunked", q, q, v, gates, gates, None, None, 0.5).flops == done.flops


def test_convolution_rotation_and_elements():
    assert spent("causal_conv1d", ones(1, 5, 6), ones(6, 1, 4)).flops == 2 * 5 * 6 * 4
    assert spent("rope", ones(1, 5, 3, 16), ones(1, 5, 4), ones(1, 5, 4)).flops == 5 * 3 * 4 * 6
    assert spent("add", ones(7), ones(7)) == (7, 3 * 7 * 4, False)
    assert spent("silu_mul", ones(7), ones(7)).flops == 4 * 7
    assert spent("round_bf16", ones(7)).flops == 0


@pytest.mark.parametrize("name", ops.names())
def test_every_op_has_a_cost(name):
    flops, nbytes, _ = spent(name, **ROWS[name].calls[0])
    assert flops >= 0 and nbytes > 0
    assert flops > 0 or name in ("embedding", "argmax", "round_bf16", "round_f16")
