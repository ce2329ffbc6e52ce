"""Every captured value against transformers, where it shows that value, and against the float64 definition everywhere.

Yardstick as in test_witness.py: the run under numerics "fp64" is the definition.  transformers computes in float32 what
we compute in float32, so its distance from the definition says how far rounding takes a correct program.  Values of one
kind (a site or module over all layers) are taken together, since single layers of a few numbers scatter.
"""

import re

import numpy as np
import pytest
from text_configs import CONFIGS
from witness import open_witness, torch

import qwenref

NAMES = (
    "values 1 x keys, GQA 1", "values 3 x keys, GQA 4", "aperiodic layers", "rotary half of the head", "conv width 2",
    "DeltaNet widths differ",
)  # fmt: skip
LENGTHS = (11, 1, 1, 1)  # a prefill and three decode steps
ROUNDING = 2**-24  # of a value that transformers happens to get right to the last bit


def kind(name):
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def array(tensor):
    return tensor.detach().double().numpy().copy()


class Witness:
    """One run of transformers: {name, step: array}, under the names of `model.sites()`."""

    def __init__(self, model, folder, ids):
        self.model, self.values, self.states = open_witness(model, folder), {}, []
        self.config = model.config.text_config
        self.names, self.step = set(model.sites()), 0
        for name, module in self.model.named_modules():
            module.register_forward_hook(self.hook(name), with_kwargs=True)
        cache, at = None, 0
        with torch.inference_mode():
            for self.step, n in enumerate(LENGTHS):
                out = self.model(
                    torch.tensor(ids[:, at : at + n]),
                    cache=cache,
                    use_cache=True,
                    output_hidden_states=True,
                    output_attentions=True,
                )
                cache, at = out.cache, at + n
                self.keep_outputs(out)
                self.keep_cache(cache)

    def keep(self, name, tensor):
        if name in self.names:
            self.values[name, self.step] = array(tensor)

    def hook(self, name):
        """What a module returns, and what its arguments say of the values inside its parent."""

        def hook(module, args, kwargs, output):
            inputs = [*args, *(value for value in kwargs.values() if torch.is_tensor(value))]
            first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            if name.endswith("rotary_emb"):
                first = first[..., : first.shape[-1] // 2]  # theirs holds every angle twice
            self.keep(name, first)
            parent, _, child = name.rpartition(".")
            site, heads = self.inside(parent, child, inputs[0] if inputs else None, first)
            for site_name, tensor in site.items():
                self.keep(f"{parent}.{site_name}" if parent else site_name, self.by_head(tensor, heads))
            if child == "self_attn":
                self.keep(f"{name}.attn_weights", output[1])
            if re.fullmatch(r".*layers\.\d+", name):
                self.keep(f"{name}.resid_pre", inputs[0])
                self.keep(f"{name}.resid_post", output)

        return hook

    def by_head(self, tensor, heads):
        return tensor if heads is None else tensor.reshape(self.shape[0], self.shape[1], heads, -1)

    def inside(self, parent, child, x, y):
        """({site: value}, heads or None) that the call of `child` shows of its parent."""
        config = self.config
        Q, K = config.num_attention_heads, config.num_key_value_heads
        if child == "input_layernorm":
            self.shape = y.shape
        if parent.endswith("self_attn"):
            if child == "q_proj":
                return {"gate": y.reshape(*y.shape[:2], Q, 2, -1)[..., 1, :]}, Q
            return {
                "q_norm": ({"q": y}, Q), "k_norm": ({"k": y}, K), "v_proj": ({"v": y}, K), "o_proj": ({"gated": x}, Q)
            }.get(child, ({}, None))  # fmt: skip
        if parent.endswith("linear_attn"):
            V = config.linear_num_value_heads
            if child == "norm":
                self.keep(f"{parent}.read", self.by_head(x, V))
                return {"core": x.reshape(*self.shape[:2], -1)}, None
            return {
                "in_proj_qkv": ({"mixed_qkv": y}, None), "in_proj_z": ({"z": y}, V), "in_proj_b": ({"b": y}, None),
                "in_proj_a": ({"a": y}, None), "out_proj": ({"normed": x}, None),
            }.get(child, ({}, None))  # fmt: skip
        if child == "post_attention_layernorm":
            return {"resid_mid": x}, None
        return {"gate_proj": {"gate": y}, "up_proj": {"up": y}, "down_proj": {"hidden": x}}.get(child, {}), None

    def keep_outputs(self, out):
        """output_hidden_states and output_attentions are the values their hooks saw."""
        for i, hidden in enumerate(out.hidden_states[:-1]):
            assert np.array_equal(array(hidden), self.values[f"model.layers.{i}.resid_pre", self.step])
        assert np.array_equal(array(out.hidden_states[-1]), self.values["model.norm", self.step])
        attention = [i for i, kind in enumerate(self.config.layer_types) if kind == "full_attention"]
        for i, weights in zip(attention, out.attentions, strict=True):
            assert np.array_equal(array(weights), self.values[f"model.layers.{i}.self_attn.attn_weights", self.step])

    def keep_cache(self, cache):
        held = {}
        for i, layer in enumerate(cache.layers):
            if self.config.layer_types[i] == "full_attention":
                held[f"layers.{i}.keys"], held[f"layers.{i}.values"] = array(layer.keys), array(layer.values)
            else:
                window, state = layer.conv_states[0], layer.recurrent_states[0]
                held[f"layers.{i}.conv_state"] = array(window)[..., 1 - self.config.linear_conv_kernel_dim :]
                held[f"layers.{i}.recurrent_state"] = array(state)
                self.keep(f"model.layers.{i}.linear_attn.state", state)
        self.states.append(held)


def ours(model, ids):
    """(capture of everything, what the cache held after each call) of the same run."""
    cache, at, held = qwenref.Cache(model, batch=len(ids)), 0, []
    with qwenref.capture(model, "**") as c:
        for n in LENGTHS:
            model(ids[:, at : at + n], cache=cache)
            at += n
            held.append(
                {f"layers.{i}.{k}": a.copy() for i, layer in enumerate(cache.layers) for k, a in layer.arrays().items()}
            )
    return c, held


class Case:
    def __init__(self, name, folder):
        self.model = qwenref.from_config(CONFIGS[name], seed=list(CONFIGS).index(name))
        ids = np.random.default_rng(11).integers(0, CONFIGS[name]["vocab_size"], (2, sum(LENGTHS)))
        self.witness = Witness(self.model, folder, ids)
        self.ours, self.held = ours(self.model, ids)
        with qwenref.numerics("fp64"):
            self.truth, self.true_states = ours(self.model, ids)

    def kinds(self):
        """{kind: names}, every name of the model in one of them."""
        found = {}
        for name in self.model.sites():
            found.setdefault(kind(name), []).append(name)
        return found


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(" ", "-"))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("witness"))


def size(arrays):
    """Root mean square of all numbers of several arrays, those that are minus infinity on purpose left out."""
    flat = np.concatenate([np.ravel(a) for a in arrays])
    return np.sqrt(np.mean(flat[np.isfinite(flat)] ** 2))


def errors(found, truth):
    assert len(found) == len(truth)
    for a, b in zip(found, truth, strict=True):
        assert a.shape == b.shape and np.array_equal(np.isfinite(a), np.isfinite(b))
    with np.errstate(invalid="ignore"):
        return size([a - b for a, b in zip(found, truth, strict=True)])


# transformers shows everything but these.
HIDDEN = {
    "linear_attn": {"conv1d", "conv_out", "q", "k", "v", "beta", "g", "delta_read", "delta_write"},
    "self_attn": {"q_rot", "k_rot", "scores", "context"},
}
AROUND = {"linear_attn": ("mixed_qkv", "a", "b", "read"), "self_attn": ("q", "k", "attn_weights", "gated")}


def is_hidden(name):
    parent, _, last = name.rpartition(".")
    return last in HIDDEN.get(parent.rpartition(".")[2], ())


def hidden_keys(case, names):
    return [(name, step) for name in names if is_hidden(name) for step in range(len(LENGTHS))]


def relative_errors(values, truth, keys):
    true = [truth[key] for key in keys]
    return errors([values[key] for key in keys], true) / size(true)


def test_every_value_that_transformers_shows_is_as_close_to_the_definition(case):
    shown = {name for name, _ in case.witness.values}
    assert shown == {name for name in case.model.sites() if not is_hidden(name)}
    for label, names in case.kinds().items():
        keys = [(name, step) for name in names if name in shown for step in range(len(LENGTHS))]
        if keys:
            theirs = relative_errors(case.witness.values, case.truth, keys)
            assert theirs <= 1e-5, label  # the same quantity at all
            assert relative_errors(case.ours, case.truth, keys) <= theirs + ROUNDING, label


def test_every_value_that_it_hides_is_as_close_as_those_around_it(case):
    """What a hidden value is made of and what is made of it are shown; the worst of those is the measure."""
    checked = set()
    for label, names in case.kinds().items():
        keys = hidden_keys(case, names)
        if keys:
            checked.add(label)
            around = AROUND[label.split(".")[3]]
            near = [[(f"{name.rpartition('.')[0]}.{site}", step) for name, step in keys] for site in around]
            theirs = max(relative_errors(case.witness.values, case.truth, keys) for keys in near)
            assert relative_errors(case.ours, case.truth, keys) <= theirs + ROUNDING, label
    assert checked == {f"model.layers.*.{parent}.{site}" for parent, sites in HIDDEN.items() for site in sites}


def test_caches_hold_after_every_step_what_those_of_transformers_hold(case):
    for ours, theirs in zip(case.held, case.witness.states, strict=True):
        assert set(ours) == set(theirs)
    for part in ("keys", "values", "conv_state", "recurrent_state"):
        keys = [(step, name) for step, held in enumerate(case.held) for name in held if name.endswith("." + part)]
        ours, theirs, truth = (
            {key: states[key[0]][key[1]] for key in keys}
            for states in (case.held, case.witness.states, case.true_states)
        )
        assert relative_errors(ours, truth, keys) <= relative_errors(theirs, truth, keys) + ROUNDING, part
