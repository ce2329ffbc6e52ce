"""The vision tower: patches of images and videos to rows of the text model's width.

Letters: N patches, H hidden, I inner width, D head dim, F rotary pairs, M merged rows (N / merge^2), C = H merge^2.
Patches come image after image and frame after frame, and in a frame by merge blocks: block row, block column, row and
column in the block.  A frame is a segment: its patches see each other, in both directions, and nothing else.
"""

import numpy as np

from qwenref import ops
from qwenref.inputs import checked_grids, checked_patches
from qwenref.layers import Linear
from qwenref.module import Module, ModuleList
from qwenref.numerics import active, stored
from qwenref.parameter import Parameter


def patch_places(grids, merge):
    """(rows, columns) int64 [N] of the patches of grids [n, 3] (frames, height, width), in their order."""
    places = []
    for t, h, w in np.asarray(grids).tolist():
        blocks = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
        places.append(np.tile(blocks.transpose(0, 1, 3, 2, 4).reshape(2, h * w), t))
    return np.concatenate(places, axis=1) if places else np.zeros((2, 0), np.int64)


def table_places(grids, merge, side):
    """(rows, columns) float64 [N] of the patches in a table of side x side entries whose corners are the corners of
    every picture: patch i of n lies at i (side - 1) / (n - 1)."""
    places = patch_places(grids, merge).astype(np.float64)
    each = np.repeat(grids, np.prod(grids, axis=1), axis=0)[:, 1:].T
    return places * (side - 1) / np.maximum(each - 1, 1)


class LayerNorm(Module):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight is centred on one."""

    output_dims = "N, H"

    def __init__(self, dim, eps=1e-6, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": dim}
        self.eps = eps
        self.weight = Parameter.meta((dim,), dtype)
        self.bias = Parameter.meta((dim,), dtype)

    def extra_repr(self):
        """Sizes, as a display shows them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, elementwise_affine=True, bias=True"

    def forward(self, input):
        return ops.layer_norm(input, self.weight, self.bias, self.eps)


class GELU(Module):
    """y = x/2 (1 + erf(x / sqrt(2))), element by element."""

    output_dims = "M, C"

    def extra_repr(self):
        """The form, as torch says it."""
        return "approximate='none'"

    def forward(self, input):
        return ops.gelu(input)


class GELUTanh(Module):
    """y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), element by element."""

    output_dims = "N, I"

    def forward(self, input):
        return ops.gelu_tanh(input)


class Conv3d(Module):
    """A convolution whose kernel is as large as its stride: a linear map of every patch, [N, in] -> [N, out].

    weight [out, channels, frames, height, width]; a patch holds its values in the same order.
    """

    output_dims = "N, H"

    def __init__(self, channels, width, kernel_size, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": width}
        self.weight = Parameter.meta((width, channels, *kernel_size), dtype)
        self.bias = Parameter.meta((width,), dtype)

    def extra_repr(self):
        """Sizes, as a display shows them."""
        width, channels, *kernel = self.weight.shape
        return f"{channels}, {width}, kernel_size={tuple(kernel)}, stride={tuple(kernel)}"

    def forward(self, input):
        return ops.linear(input, self.weight.reshape(self.weight.shape[0], -1), self.bias)


class PatchEmbed(Module):
    """Every patch by one linear map.  Pixels [N, channels * frames * side * side] -> [N, H]."""

    output_dims = "N, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        side, frames = config.patch_size, config.temporal_patch_size
        self.sizes = {"H": config.hidden_size}
        self.proj = Conv3d(config.in_channels, config.hidden_size, (frames, side, side), dtype)

    def forward(self, hidden_states):
        return self.proj(stored("pixels", hidden_states))


class PositionTable(Module):
    """A learned square of positions, sampled bilinearly where the patches lie.  Places [N], [N] -> [N, H].

    weight [side * side, H], row after row; places are rows and columns of the table, whole or between.
    """

    output_dims = "N, H"

    def __init__(self, count, width, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": width}
        self.side = int(count**0.5)
        self.weight = Parameter.meta((count, width), dtype)

    def extra_repr(self):
        """Sizes, as a display shows them."""
        return "{}, {}".format(*self.weight.shape)

    def forward(self, rows, columns):
        return ops.sample_table(self.weight.reshape(self.side, self.side, -1), rows, columns)


class VisionRotaryEmbedding(Module):
    """Cosines and sines of the angles row * f and column * f.  position_ids int64 [2, N] -> cos, sin [N, F].

    The frequencies of the row are the first half of the F, those of the column the second; all of a head is turned.
    """

    output_dims = "N, F"

    def __init__(self, config):
        super().__init__()
        self.sizes = {"F": config.head_dim // 2}
        self.theta, self.width = config.rope_theta, config.head_dim // 2
        self.formed = self.frequencies()
        self.register_buffer("inv_freq", self.formed.copy(), persistent=False)

    def frequencies(self):
        """theta^(-2i / width) for every i below width / 2, by the profile in force."""
        return ops.rope_frequencies(np.arange(self.width // 2, dtype=np.int64), self.theta, self.width)

    def forward(self, x, position_ids):
        frequencies = self.inv_freq
        if "rope_frequencies" in active() and np.array_equal(frequencies, self.formed):  # else the user's own
            frequencies = self.frequencies()
        cos, sin = ops.grid_table(position_ids, frequencies)
        N, F = cos.shape[0], 2 * len(frequencies)
        return cos.reshape(N, F), sin.reshape(N, F)


class VisionAttention(Module):
    """Attention among all patches of a segment, rotary over the whole head.  [N, H] -> [N, H].

    `qkv` holds queries, keys and values one behind the other, each head after head.  Scores and weights exist only
    where they are watched, [head, N, N] with nothing between segments.
    """

    SITES = {
        "q": "N, head, D",
        "k": "N, head, D",
        "v": "N, head, D",
        "q_rot": "N, head, D",
        "k_rot": "N, head, D",
        "scores": "head, N, N",
        "attn_weights": "head, N, N",
        "context": "N, head, D",
    }
    output_dims = "N, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        H = config.hidden_size
        self.config, self.num_heads, self.head_dim = config, config.num_heads, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.sizes = {"H": H, "head": self.num_heads, "D": self.head_dim}
        self.qkv = _linear(H, 3 * H, dtype, "N, out")
        self.proj = _linear(H, H, dtype, "N, out")

    def forward(self, hidden_states, cu_seqlens, position_embeddings):
        """hidden_states [N, H] · cu_seqlens int64 [segments + 1], where segments begin and the last one ends ·
        position_embeddings (cos, sin) [N, F]."""
        N, (cos, sin), lengths = len(hidden_states), position_embeddings, np.diff(cu_seqlens)
        qkv = self.qkv(hidden_states).reshape(N, 3, self.num_heads, self.head_dim)
        q, k, v = (self.site(name, qkv[:, i]) for i, name in enumerate("qkv"))
        q_rot = self.site("q_rot", ops.rope_whole(q, cos, sin))
        k_rot = self.site("k_rot", ops.rope_whole(k, cos, sin))
        context = self.site("context", self._attend(q_rot, k_rot, v, lengths))
        return self.proj(context.reshape(N, self.num_heads * self.head_dim))

    def _attend(self, q, k, v, lengths):
        if not (self.wants("scores") or self.wants("attn_weights")):
            return ops.segment_attention(q, k, v, lengths, self.scaling)
        scores = self.site("scores", ops.segment_scores(q, k, lengths, self.scaling))
        weights = self.site("attn_weights", ops.segment_softmax(scores, lengths))
        return ops.segment_mix(weights, v, lengths)


class VisionMLP(Module):
    """fc2(gelu(fc1(x))) with biases and the tanh form of GELU.  [N, H] -> [N, H]; `hidden` is what fc2 gets."""

    SITES = {"hidden": "N, I"}
    output_dims = "N, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.sizes = {"H": H, "I": inner}
        self.linear_fc1 = _linear(H, inner, dtype, "N, out")
        self.linear_fc2 = _linear(inner, H, dtype, "N, out")
        self.act_fn = GELUTanh()
        self.act_fn.sizes = {"I": inner}

    def forward(self, hidden_state):
        return self.linear_fc2(self.site("hidden", self.act_fn(self.linear_fc1(hidden_state))))


class VisionBlock(Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)).  [N, H] -> [N, H]."""

    SITES = {"resid_pre": "N, H", "resid_mid": "N, H", "resid_post": "N, H"}
    output_dims = "N, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": config.hidden_size}
        self.norm1 = LayerNorm(config.hidden_size, dtype=dtype)
        self.norm2 = LayerNorm(config.hidden_size, dtype=dtype)
        self.attn = VisionAttention(config, dtype)
        self.mlp = VisionMLP(config, dtype)

    def forward(self, hidden_states, cu_seqlens, position_embeddings):
        """Arguments as in `VisionAttention.forward`."""
        residual = self.site("resid_pre", hidden_states)
        mixed = self.attn(self.norm1(residual), cu_seqlens=cu_seqlens, position_embeddings=position_embeddings)
        residual = self.site("resid_mid", ops.add(residual, mixed))
        return self.site("resid_post", ops.add(residual, self.mlp(self.norm2(residual))))


class PatchMerger(Module):
    """The patches of a merge block side by side, then fc2(gelu(fc1(x))) with the exact GELU.  [N, H] -> [M, out].

    Every patch is normed by itself; `grouped` are the blocks, `hidden` is what fc2 gets.
    """

    SITES = {"grouped": "M, C", "hidden": "M, C"}
    output_dims = "M, out"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.sizes = {"C": self.width, "out": config.out_hidden_size}
        self.norm = LayerNorm(config.hidden_size, dtype=dtype)
        self.linear_fc1 = _linear(self.width, self.width, dtype, "M, out")
        self.act_fn = GELU()
        self.act_fn.sizes = {"C": self.width}
        self.linear_fc2 = _linear(self.width, config.out_hidden_size, dtype, "M, out")

    def forward(self, x):
        grouped = self.site("grouped", self.norm(x).reshape(-1, self.width))
        return self.linear_fc2(self.site("hidden", self.act_fn(self.linear_fc1(grouped))))


class VisionModel(Module):
    """Patches to rows of the text model's width.  pixel_values [N, patch width], grid_thw [n, 3] -> [M, out].

    A picture among others has the bits of the picture alone.
    """

    output_dims = "M, out"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.config, self.spatial_merge_size = config, config.spatial_merge_size
        self.sizes = {"out": config.out_hidden_size}
        self.patch_embed = PatchEmbed(config, dtype)
        self.pos_embed = PositionTable(config.num_position_embeddings, config.hidden_size, dtype)
        self.rotary_pos_emb = VisionRotaryEmbedding(config)
        self.blocks = ModuleList(VisionBlock(config, dtype) for _ in range(config.depth))
        self.merger = PatchMerger(config, dtype)

    def forward(self, hidden_states, grid_thw):
        """hidden_states pixels [N, channels * frames * side * side], images and videos one behind the other ·
        grid_thw int [n, 3] (frame groups, height, width in patches), sides multiples of the merge.

        float32 (float64 under fp64) [M, out], M = N / merge^2, block after block.  ShapeError, InputError and
        DTypeError say what does not fit, before anything is computed.
        """
        merge, width = self.spatial_merge_size, self.patch_embed.proj.weight[0].size
        grids = checked_grids(grid_thw, "visual: grid_thw", merge)
        pixels = checked_patches(hidden_states, "visual: pixel_values", width, grids, "grid_thw")
        hidden = self.patch_embed(pixels)
        hidden = ops.add(hidden, self.pos_embed(*table_places(grids, merge, self.pos_embed.side)))
        position_embeddings = self.rotary_pos_emb(hidden, patch_places(grids, merge))
        cu_seqlens = np.concatenate([[0], np.cumsum(np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0]))])
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings)
        return self.merger(hidden)


def _linear(inputs, outputs, dtype, dims):
    linear = Linear(inputs, outputs, bias=True, dtype=dtype)
    linear.output_dims = dims
    return linear
