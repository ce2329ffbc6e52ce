"""The text model: gated attention, Gated DeltaNet, the block around them, and the stack.

Letters: B batch, T new tokens, S keys seen, H hidden; attention has Q query heads and K key heads of D channels,
DeltaNet G key heads of K channels and V value heads of D channels.  Every forward reads like the formula it computes.
"""

import numpy as np

from qwenref import absent, ops
from qwenref.inputs import checked_layers, hidden_or_ids
from qwenref.layers import MLP, Conv1d, Embedding, Linear, RMSNorm, RMSNormGated, RotaryEmbedding
from qwenref.module import Module, ModuleList
from qwenref.numerics import active
from qwenref.outputs import ModelOutput
from qwenref.parameter import Parameter
from qwenref.sites import chain
from qwenref.step import OpensSteps, Step

# Sites of a DeltaNet layer that the op computes on the side -> the output of the op that holds them.
_BY_PRODUCTS = {"delta_read": "recalled", "delta_write": "written"}


class Attention(Module):
    """Grouped-query attention with a sigmoid gate per output channel and rotary over the first channels of a head.

    [B, T, H] -> ([B, T, H], attention weights [B, Q, T, S]: None inside a model that was not asked for them).
    `q_proj` holds query and gate of each head side by side: rows of a head are D of query, then D of gate.
    Called alone it starts at position 0, or behind the tokens of the `cache` it is given, which it does not change.
    """

    SITES = {
        "q": "B, T, Q-head, D",
        "gate": "B, T, Q-head, D",
        "k": "B, T, K-head, D",
        "v": "B, T, K-head, D",
        "q_rot": "B, T, Q-head, D",
        "k_rot": "B, T, K-head, D",
        "scores": "B, Q-head, T, S",
        "attn_weights": "B, Q-head, T, S",
        "context": "B, T, Q-head, D",
        "gated": "B, T, Q-head, D",
    }
    output_dims = "B, T, H"

    def __init__(self, config, layer_idx, dtype="bfloat16"):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.heads, self.kv_heads = (
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.scaling = self.head_dim**-0.5
        H, Q, K, D, bias = config.hidden_size, self.heads, self.kv_heads, self.head_dim, config.attention_bias
        self.sizes = {"H": H, "Q-head": Q, "K-head": K, "D": D}
        self.q_proj = Linear(H, Q * D * 2, bias=bias, dtype=dtype)
        self.k_proj = Linear(H, K * D, bias=bias, dtype=dtype)
        self.v_proj = Linear(H, K * D, bias=bias, dtype=dtype)
        self.o_proj = Linear(Q * D, H, bias=bias, dtype=dtype)
        self.q_norm = RMSNorm(D, config.rms_norm_eps, dtype, ("Q-head", Q))
        self.k_norm = RMSNorm(D, config.rms_norm_eps, dtype, ("K-head", K))

    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        use_cache=False,
    ):
        """hidden_states [B, T, H] · position_embeddings (cos, sin) [B, T, F], made from the positions when None ·
        attention_mask [B, T], 1 keep, 0 pad · position_ids [B, T] or [3, B, T] · use_cache is taken for the sake of
        ported calls: inside a model the cache is always extended, alone it never is."""
        step = Step.of(cache, self.config, hidden_states, attention_mask, position_ids)
        B, T = step.shape
        Q, K, D = self.heads, self.kv_heads, self.head_dim
        if position_embeddings is None:
            position_embeddings = RotaryEmbedding(self.config)(hidden_states, step.positions)
        cos, sin = position_embeddings

        query_and_gate = self.q_proj(hidden_states).reshape(B, T, Q, 2, D)
        q = self.site("q", self.q_norm(query_and_gate[:, :, :, 0]))
        gate = self.site("gate", query_and_gate[:, :, :, 1])
        k = self.site("k", self.k_norm(self.k_proj(hidden_states).reshape(B, T, K, D)))
        v = self.site("v", self.v_proj(hidden_states).reshape(B, T, K, D))

        q_rot = self.site("q_rot", ops.rope(q, cos, sin))
        k_rot = self.site("k_rot", ops.rope(k, cos, sin))
        keys, values = step.append(self.layer_idx, k_rot, v)
        attended = self._attend(q_rot, keys, values, step)
        context, weights = step.with_attentions(self.layer_idx, attended)
        gated = self.site("gated", ops.sigmoid_mul(self.site("context", context), gate))
        return self.o_proj(gated.reshape(B, T, Q * D)), weights

    def _attend(self, q, k, v, step):
        """Context [B, T, Q, D], with the weights behind it where somebody keeps them.

        Scores and weights are separate values only when they are watched; the parts have the bits of the whole.
        """
        if not (self.wants("scores") or self.wants("attn_weights")):
            return ops.attention(q, k, v, step.begin, step.end, self.scaling, p=step.keeps_attentions)
        scores = self.site("scores", ops.attention_scores(q, k, step.begin, step.end, self.scaling))
        weights = self.site("attn_weights", ops.attention_softmax(scores, step.begin, step.end))
        context = ops.attention_mix(weights, v, step.begin, step.end)
        return (context, weights) if step.keeps_attentions else context

    # Weights by head, as views: q_proj holds the query and the gate of each head side by side.

    @property
    def W_Q(self):
        """Query weights [Q-head, D, H]; a view."""
        return self._by_head(self.q_proj, self.heads, 2)[:, 0]

    @property
    def W_gate(self):
        """Gate weights [Q-head, D, H]; a view."""
        return self._by_head(self.q_proj, self.heads, 2)[:, 1]

    @property
    def W_K(self):
        """Key weights [K-head, D, H]; a view."""
        return self._by_head(self.k_proj, self.kv_heads, 1)[:, 0]

    @property
    def W_V(self):
        """Value weights [K-head, D, H]; a view."""
        return self._by_head(self.v_proj, self.kv_heads, 1)[:, 0]

    @property
    def W_O(self):
        """Output weights [Q-head, H, D]; a view: the layer adds W_O[h] @ gated[h] for every head."""
        weight = self.o_proj.weight.view(np.ndarray)
        return weight.reshape(-1, self.heads, self.head_dim).transpose(1, 0, 2)

    def _by_head(self, linear, heads, parts):
        return linear.weight.view(np.ndarray).reshape(heads, parts, self.head_dim, -1)


class GatedDeltaNet(Module):
    """Linear attention with a decaying, error-correcting state per value head.  [B, T, H] -> [B, T, H].

    Called alone it starts from zeros, or from the state of the `cache` it is given, which it does not change.
    Per token and head: S *= exp(g); u = (v - k^T S) beta; S += k u^T; o = q^T S.  The state S [V, K, D] is float32.
    `state` is S after the last token, `state@t` after the token in column t; `read` is o, `delta_read` is k^T S before
    the write and `delta_write` is u.
    """

    SITES = {
        "mixed_qkv": "B, T, C",
        "z": "B, T, V-head, D",
        "b": "B, T, V-head",
        "a": "B, T, V-head",
        "conv_out": "B, T, C",
        "q": "B, T, K-head, K",
        "k": "B, T, K-head, K",
        "v": "B, T, V-head, D",
        "beta": "B, T, V-head",
        "g": "B, T, V-head",
        "delta_read": "B, T, V-head, D",
        "delta_write": "B, T, V-head, D",
        "state": "B, V-head, K, D",
        "read": "B, T, V-head, D",
        "core": "B, T, V",
        "normed": "B, T, V",
    }
    # By-products of the recurrence, which has gone on by the time they are seen.
    READ_ONLY = frozenset({"delta_read", "delta_write"})
    output_dims = "B, T, H"

    def __init__(self, config, layer_idx, dtype="bfloat16"):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim, self.value_dim, self.conv_dim = config.key_dim, config.value_dim, config.conv_dim
        self.scaling = self.head_k_dim**-0.5
        H, V = config.hidden_size, self.num_v_heads
        self.sizes = {
            "H": H, "C": self.conv_dim, "V": self.value_dim,
            "K-head": self.num_k_heads, "V-head": V, "K": self.head_k_dim, "D": self.head_v_dim,
        }  # fmt: skip
        self.dt_bias = Parameter.meta((V,), dtype)
        self.A_log = Parameter.meta((V,), dtype)
        self.act = config.hidden_act
        self.conv1d = Conv1d(self.conv_dim, config.linear_conv_kernel_dim, dtype)
        self.norm = RMSNormGated(self.head_v_dim, config.rms_norm_eps, dtype, V)
        self.out_proj = Linear(self.value_dim, H, dtype=dtype)
        self.in_proj_qkv = Linear(H, self.conv_dim, dtype=dtype)
        self.in_proj_z = Linear(H, self.value_dim, dtype=dtype)
        self.in_proj_b = Linear(H, V, dtype=dtype)
        self.in_proj_a = Linear(H, V, dtype=dtype)

    def forward(self, hidden_states, cache=None, attention_mask=None, use_cache=False):
        """hidden_states [B, T, H] · attention_mask [B, T], 1 keep, 0 pad: a pad leaves state and window as they are ·
        use_cache as in `Attention.forward`."""
        step = Step.of(cache, self.config, hidden_states, attention_mask)
        B, T = step.shape
        G, K, V, D = self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim
        window, state = step.recall(self.layer_idx)

        mixed_qkv = self.site("mixed_qkv", self.in_proj_qkv(hidden_states))
        z = self.site("z", self.in_proj_z(hidden_states).reshape(B, T, V, D))
        b = self.site("b", self.in_proj_b(hidden_states))
        a = self.site("a", self.in_proj_a(hidden_states))

        convolved, window = self.conv1d(mixed_qkv, window, step.advance, next_window=step.cuts or True)
        *windows, window = window if step.cuts else (window,)
        del mixed_qkv  # a long prompt's largest arrays go as soon as they have been used
        conv_out = self.site("conv_out", ops.silu(convolved))
        del convolved
        q, k, v = conv_out[..., : G * K], conv_out[..., G * K : 2 * G * K], conv_out[..., 2 * G * K :]
        q = self.site("q", ops.l2_norm(q.reshape(B, T, G, K)))
        k = self.site("k", ops.l2_norm(k.reshape(B, T, G, K)))
        v = self.site("v", v.reshape(B, T, V, D))
        del conv_out
        beta = self.site("beta", ops.sigmoid(b))
        g = self.site("g", ops.delta_decay(a, self.A_log, self.dt_bias))

        read, states = self._recur(q, k, v, g, beta, state, step)
        del q, k, v
        if step.stored is not None:
            states = [step.stored("state", state) for state in states]
        *states, state = states
        step.remember(self.layer_idx, window, self.site("state", state), windows, states)
        core = self.site("core", self.site("read", read).reshape(B, T, V * D))
        normed = self.norm(core.reshape(B * T * V, D), z.reshape(B * T * V, D)).reshape(B, T, V * D)
        return self.out_proj(self.site("normed", normed))

    def _recur(self, q, k, v, g, beta, state, step):
        """(o [B, T, V, D], states after each of the step's cuts and after the last token).

        Computed in one go, or in pieces that end at a cut or a watched state.  A recurrence in pieces has the bits of
        the whole, so looking changes nothing.  Where a profile has another form, the tokens up to a watched state are
        run once more on the side, and only a state that was edited makes a cut.
        """
        watching = chain()
        if watching is None and not step.cuts:
            o, last = ops.gated_delta_rule(q, k, v, g, beta, state, step.advance, self.scaling, final=True)
            return o, [last]
        T, first = v.shape[1], step.cache.mask.shape[1]
        asked = [site for site in _BY_PRODUCTS if self.wants(site)]
        extra = {_BY_PRODUCTS[site]: True for site in asked}
        cut_freely = active().in_pieces
        watched = () if watching is None else watching.columns(self)
        ends = [t + 1 for t in range(T) if watched == "all" or first + t in watched]

        def run(begin, end, state, **extra):
            part = slice(begin, end)
            advance = None if step.advance is None else step.advance[:, part]
            tokens = (a[:, part] for a in (q, k, v, g, beta))
            return ops.gated_delta_rule(*tokens, state, advance, self.scaling, final=True, **extra)

        pieces, states, begin = [], [], 0
        for end in sorted({*ends, *step.cuts, T}):
            o, reached, *more = run(begin, end, state, **extra)
            seen = self.site(f"state@{first + end - 1}", reached) if end in ends else reached
            if cut_freely or seen is not reached or end == T:
                pieces.append((o, *more))
                begin, state = end, seen
            if end in step.cuts or end == T:
                states.append(seen)
        whole = pieces[0] if len(pieces) == 1 else [np.concatenate(p, axis=1) for p in zip(*pieces, strict=True)]
        for site, value in zip(asked, whole[1:], strict=True):
            self.site(site, value)
        return whole[0], states

    def token_map(self, ids_or_hidden):
        """M float64 [B, V-head, T, T]: what token i reads is the sum of M[i, j] v[j] over the tokens j up to it.

        Exact for a layer that starts from an empty state.  Takes hidden states [B, T, H] as the mixer gets them, or
        token ids, which are run through the model up to this layer.
        """
        from qwenref.deltanet import token_map

        return token_map(self, ids_or_hidden)

    # Weights by head, as views of in_proj_qkv, which is [q | k | v] over the heads, and of in_proj_z.

    @property
    def W_q(self):
        """Query weights [K-head, K, H]; a view."""
        return self._rows(self.in_proj_qkv, 0, self.key_dim, self.num_k_heads)

    @property
    def W_k(self):
        """Key weights [K-head, K, H]; a view."""
        return self._rows(self.in_proj_qkv, self.key_dim, 2 * self.key_dim, self.num_k_heads)

    @property
    def W_v(self):
        """Value weights [V-head, D, H]; a view."""
        return self._rows(self.in_proj_qkv, 2 * self.key_dim, self.conv_dim, self.num_v_heads)

    @property
    def W_z(self):
        """Gate weights [V-head, D, H]; a view."""
        return self._rows(self.in_proj_z, 0, self.value_dim, self.num_v_heads)

    @property
    def W_O(self):
        """Output weights [V-head, H, D]; a view."""
        weight = self.out_proj.weight.view(np.ndarray)
        return weight.reshape(-1, self.num_v_heads, self.head_v_dim).transpose(1, 0, 2)

    @staticmethod
    def _rows(linear, begin, end, heads):
        weight = linear.weight.view(np.ndarray)[begin:end]
        return weight.reshape(heads, (end - begin) // heads, -1)


class DecoderLayer(Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)).  [B, T, H] -> [B, T, H].

    Called alone it starts at position 0, or behind the tokens of the `cache` it is given, which it does not change.
    """

    SITES = {"resid_pre": "B, T, H", "resid_mid": "B, T, H", "resid_post": "B, T, H"}
    output_dims = "B, T, H"

    def __init__(self, config, layer_idx, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": config.hidden_size}
        self.config, self.layer_idx = config, layer_idx
        self.layer_type = self.block_type = config.layer_types[layer_idx]
        if self.layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, layer_idx, dtype)
        else:
            self.self_attn = Attention(config, layer_idx, dtype)
        self.mlp = MLP(config, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def _absent(self, name):
        return absent.from_layer(self, name)

    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        use_cache=False,
    ):
        """hidden_states [B, T, H]; the others as in `Attention.forward`, and none is needed when called alone."""
        residual = self.site("resid_pre", hidden_states)
        normed = self.input_layernorm(residual)
        if self.layer_type == "linear_attention":
            mixed = self.linear_attn(
                hidden_states=normed, cache=cache, attention_mask=attention_mask, use_cache=use_cache
            )
        else:
            mixed, _ = self.self_attn(
                hidden_states=normed,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=position_embeddings,
                use_cache=use_cache,
            )
        residual = self.site("resid_mid", ops.add(residual, mixed))
        return self.site("resid_post", ops.add(residual, self.mlp(self.post_attention_layernorm(residual))))


class TextModel(OpensSteps, Module):
    """Embedding, the layers, the final norm.  input_ids [B, T] -> last_hidden_state [B, T, H]."""

    output_dims = "B, T, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": config.hidden_size}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = ModuleList(DecoderLayer(config, i, dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary_emb = RotaryEmbedding(config)
        self.weight_pages = None  # WeightPages, where the weights are views of files

    def _absent(self, name):
        return absent.from_stack(self, "", name)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=False,
        output_hidden_states=False,
        output_attentions=False,
        sequence_ids=None,
    ):
        """ModelOutput with last_hidden_state [B, T, H] after the final norm; arguments as in `ForCausalLM.forward`."""
        input_ids, hidden = hidden_or_ids(self.config, input_ids, inputs_embeds)
        if hidden is None:
            hidden = self.embed_tokens(input_ids)
        B, T, _ = hidden.shape
        with Step.start(self, cache, self.config, B, T, attention_mask, position_ids, sequence_ids) as step:
            step.keep_attentions(output_attentions)
            residuals = [hidden] if output_hidden_states else None
            hidden = self.norm(self._through(hidden, self.layers, step, use_cache, residuals))
        return ModelOutput(
            last_hidden_state=hidden,
            cache=step.cache if use_cache or cache is not None else None,
            hidden_states=(*residuals[:-1], hidden) if output_hidden_states else None,
            residuals=tuple(residuals) if output_hidden_states else None,
            attentions=tuple(map(step.attentions.get, sorted(step.attentions))) if output_attentions else None,
        )

    def _through(self, hidden, layers, step, use_cache=False, residuals=None):
        """What the last of the layers makes of `hidden`; what each makes of it is put behind `residuals`, if any."""
        position_embeddings = self.rotary_emb(hidden, step.positions)
        pages = self.weight_pages
        for layer in layers:
            if pages is not None:
                pages.before(layer.layer_idx)
            hidden = layer(
                hidden,
                position_embeddings=position_embeddings,
                attention_mask=step.mask,
                position_ids=step.positions,
                cache=step.cache,
                use_cache=use_cache,
            )
            if pages is not None:
                pages.behind(layer.layer_idx)
            if residuals is not None:
                residuals.append(hidden)
        return hidden

    def run(
        self,
        input_ids=None,
        start=0,
        stop=None,
        hidden=None,
        cache=None,
        attention_mask=None,
        position_ids=None,
    ):
        """Hidden states [B, T, H] behind the layers start to stop - 1, before the final norm.

        From `hidden` [B, T, H], or from the embeddings of `input_ids`.  Runs in a row have the bits of the whole.  The
        tokens stand behind those of the `cache`, which a part of a model reads and does not change.
        """
        start, stop = checked_layers(start, stop, len(self.layers))
        input_ids, hidden = hidden_or_ids(self.config, input_ids, hidden, "run", "hidden")
        B, T = (hidden if input_ids is None else input_ids).shape[:2]
        with Step.start(self, cache, self.config, B, T, attention_mask, position_ids, final=False) as step:
            hidden = self.embed_tokens(input_ids) if hidden is None else hidden
            return self._through(hidden, self.layers[start:stop], step)
