"""The small modules every block is made of: linears, norms, embedding, convolution, activation, rotary table, MLP.

Letters: B batch, T new tokens, H hidden, I inner width, D head dim, C channels, W conv width, F rotary frequencies.
A weight is what the file stores: nothing is folded, renamed or transposed.
"""

import numpy as np

from qwenref import ops
from qwenref.errors import ShapeError, compose
from qwenref.handles import place
from qwenref.module import Module
from qwenref.numerics import active, stored
from qwenref.parameter import Parameter


def _misfit(module, input, error):
    """The error of an op, or one that says that it is the input that has another width than the module."""
    shape, width = np.shape(input), module.weight.shape[-1]
    if not shape or shape[-1] == width or "w has the wrong shape" not in str(error):
        return error
    sizes = [f"{n:,}" for n in shape]
    sizes = [f"B {sizes[0]}", f"T {sizes[1]}", sizes[2]] if len(sizes) == 3 else sizes
    return ShapeError(
        compose(
            f"{place(module)}: input width {shape[-1]:,}, expected {width:,}",
            found=f"{getattr(input, 'dtype', type(input).__name__)} [{', '.join(sizes)}]",
            expected=f"[*, {width:,}]   ({type(module).__name__.lower()} weight {list(module.weight.shape)})",
        )
    )


class Linear(Module):
    """y = x W^T + b.  x [*, in_features] float32 -> [*, out_features] float32; weight [out_features, in_features].

    `point` names the rounding point its output belongs to, where it has one besides that of every linear.
    """

    output_dims = "B, T, out"

    def __init__(self, in_features, out_features, bias=False, dtype="bfloat16", point=None):
        super().__init__()
        self.point = point
        self.sizes = {"out": out_features}
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter.meta((out_features, in_features), dtype)
        self.register_parameter("bias", Parameter.meta((out_features,), dtype) if bias else None)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, input):
        try:
            output = ops.linear(input, self.weight, self.bias)
        except ShapeError as error:
            raise _misfit(self, input, error) from None
        return output if self.point is None else stored(self.point, output)


class Embedding(Module):
    """Rows of a table.  ids [*] int64 -> [*, embedding_dim] float32; weight [num_embeddings, embedding_dim]."""

    output_dims = "B, T, H"

    def __init__(self, num_embeddings, embedding_dim, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": embedding_dim}
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter.meta((num_embeddings, embedding_dim), dtype)

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def forward(self, input):
        return ops.embedding(input, self.weight)


class RMSNorm(Module):
    """y = x / rms(x) * (1 + weight), over the last dimension.  weight [dim] is centred on zero and stays so.

    `heads` is the (letter, number) of heads that are normed side by side, for displays.
    """

    def __init__(self, dim, eps=1e-6, dtype="bfloat16", heads=None):
        super().__init__()
        self.output_dims = f"B, T, {heads[0]}, D" if heads else "B, T, H"
        self.sizes = {heads[0]: heads[1], "D": dim} if heads else {"H": dim}
        self.eps = eps
        self.weight = Parameter.meta((dim,), dtype)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.eps}"

    def forward(self, x):
        try:
            return ops.rms_norm(x, self.weight, self.eps)
        except ShapeError as error:
            raise _misfit(self, x, error) from None


class RMSNormGated(Module):
    """y = weight * (x / rms(x)) * silu(gate): norm first, then gate.  weight [dim] is centred on one.

    It is called with the tokens and heads of a layer flattened: [B*T*heads, dim].
    """

    output_dims = "B*T*V-head, D"

    def __init__(self, dim, eps=1e-6, dtype="bfloat16", heads=1):
        super().__init__()
        self.sizes = {"V-head": heads, "D": dim}
        self.variance_epsilon = eps
        self.weight = Parameter.meta((dim,), dtype)

    def forward(self, hidden_states, gate):
        return ops.rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon)


class Conv1d(Module):
    """Causal depthwise convolution over time, no bias.  x [B, T, C] -> [B, T, C]; weight [C, 1, W].

    Tap W-1 meets the current token, tap 0 the one W-1 back.  `window` [B, C, W-1] holds the inputs before the first
    token (zeros when None), `step` [B, T] the codes of `Step.advance`.  With `next_window=True` the result is a pair:
    the output and the window after the last token.  With numbers of tokens, `next_window=(3, 64)`, the second is a
    list: the windows after so many tokens, then that after the last.
    """

    output_dims = "B, T, C"

    def __init__(self, channels, width, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"C": channels}
        self.channels, self.width = channels, width
        self.weight = Parameter.meta((channels, 1, width), dtype)

    def extra_repr(self):
        return (
            f"{self.channels}, {self.channels}, kernel_size=({self.width},), stride=(1,), "
            f"padding=({self.width - 1},), groups={self.channels}, bias=False"
        )

    def forward(self, input, window=None, step=None, next_window=False):
        if isinstance(next_window, bool):
            return ops.causal_conv1d(input, self.weight, window, step, next=next_window)
        outputs, windows, begin = [], [], 0
        for end in (*next_window, input.shape[1]):  # a convolution in pieces has the bits of the whole
            part = slice(begin, end)
            codes = None if step is None else step[:, part]
            y, window = ops.causal_conv1d(input[:, part], self.weight, window, codes, next=True)
            outputs.append(y)
            windows.append(window)
            begin = end
        return np.concatenate(outputs, axis=1), windows


class SiLUActivation(Module):
    """y = x * sigmoid(x), element by element."""

    output_dims = "B, T, I"

    def __init__(self, width=None):
        super().__init__()
        self.sizes = {} if width is None else {"I": width}

    def forward(self, input):
        return ops.silu(input)


class RotaryEmbedding(Module):
    """Cosines and sines of the rotary angles.  position_ids [3, B, T] -> cos, sin [B, T, F], F = rotary width / 2.

    Frequency f takes its position from axis `mrope_axes[f]` of time, height, width; positions [B, T] stand for all
    three, which are equal in text.  Angles
    are formed in float64 and their cosines rounded once, so position 262,143 is as exact as position 1.
    """

    output_dims = "B, T, F"

    def __init__(self, config):
        super().__init__()
        self.sizes = {"F": len(config.mrope_axes)}
        self.axes = np.array(config.mrope_axes, dtype=np.int64)
        self.theta, self.width = config.rope_theta, config.rotary_dim
        self.formed = self.frequencies()
        self.register_buffer("inv_freq", self.formed.copy(), persistent=False)

    def frequencies(self):
        """theta^(-2i / width) for every pair i, by the profile in force."""
        return ops.rope_frequencies(np.arange(len(self.axes), dtype=np.int64), self.theta, self.width)

    def forward(self, x, position_ids):
        frequencies = self.inv_freq
        if "rope_frequencies" in active() and np.array_equal(frequencies, self.formed):  # else the user's own
            frequencies = self.frequencies()
        if np.ndim(position_ids) == 2:
            position_ids = np.broadcast_to(position_ids, (3, *np.shape(position_ids)))
        return ops.rope_table(position_ids, self.axes, frequencies)


class MLP(Module):
    """down(silu(gate(x)) * up(x)), no bias.  [*, H] -> [*, H], inner width I."""

    SITES = {"gate": "B, T, I", "up": "B, T, I", "hidden": "B, T, I"}
    output_dims = "B, T, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.sizes = {"H": H, "I": inner}
        self.gate_proj = Linear(H, inner, dtype=dtype)
        self.up_proj = Linear(H, inner, dtype=dtype)
        self.down_proj = Linear(inner, H, dtype=dtype)
        self.act_fn = SiLUActivation(inner)

    def forward(self, x):
        # Each value is handed on, not named: at I four times as wide as H, one more alive is felt in a long prompt.
        hidden = ops.mul(self.act_fn(self.site("gate", self.gate_proj(x))), self.site("up", self.up_proj(x)))
        return self.down_proj(self.site("hidden", hidden))
