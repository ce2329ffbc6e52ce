"""The reference as an engine: any numerics profile, every log-probability, every site."""

import numpy as np

import qwenref
from qwenref.cache import Cache
from qwenref.engines.base import Prompt
from qwenref.engines.model_files import model_facts, sampling_defaults
from qwenref.engines.stepping import Stepping, lacks
from qwenref.numerics import profile
from qwenref.pictures import as_text
from qwenref.rounding import POINTS
from qwenref.tokenizer import stop_ids


def open(rest, *, numerics="fp32", name=None):
    """The reference over a folder, "tiny" or a hub name; `numerics` names a profile, such as "hf" or "fp64"."""
    return Reference(qwenref.from_pretrained(rest), numerics, name)


class Reference(Stepping):
    """An opened model as an engine.  Under fp64 `Scores.dense` is float64."""

    sites = True

    def __init__(self, model, numerics=None, name=None):
        self.model = model
        self.profile = profile(model.numerics if numerics is None else numerics)
        self.name = name or f"reference {self.profile.name}"
        text = model.config.text_config
        self.vocab, self.limit = text.vocab_size, text.max_position_embeddings
        self.in_pieces = self.profile.splits_freely
        self.stop_ids = stop_ids(model)
        self._cache = None

    def capabilities(self):
        """Text as well where the checkpoint has a tokenizer, and a template."""
        tokenizer = self._tokenizer()
        return (
            super()
            .capabilities()
            ._replace(tokenize=tokenizer is not None, render=tokenizer is not None and tokenizer.has_chat_template)
        )

    def fresh(self):
        with qwenref.numerics(self.profile.name):
            self._cache = Cache(self.model)

    def feed(self, ids):
        with qwenref.numerics(self.profile.name):
            return self.model(np.array([ids]), cache=self._cache, **as_text(self.model, [ids])).logits[0]

    def tokenize(self, text):
        if self._tokenizer() is None:
            raise lacks(self.name, "tokenize", "the model has no tokenizer")
        return self._tokenizer().encode(text)

    def render(self, messages, **options):
        if self._tokenizer() is None:
            raise lacks(self.name, "render", "the model has no tokenizer")
        rendered = qwenref.render(self._tokenizer(), messages, **{"add_generation_prompt": True, **options})
        return Prompt(rendered.text, list(rendered.ids))

    def activations(self, ids, sites):
        """{site: array} of one prefill, in the shapes of `model.sites()` with B = 1."""
        ids = self.ids(ids, f"{self.name}: activations")
        whatever = 2**62  # the caller named what is to be held
        with qwenref.numerics(self.profile.name), qwenref.capture(self.model, *sites, max_bytes=whatever) as captured:
            self.model(np.array([ids]))
        return {name: captured[name] for name in captured.names()}

    def config(self):
        from qwenref._C import cpu_level, get_num_threads

        folder = self.model.path
        return {
            "name": "qwenref",
            "version": qwenref.__version__,
            "backend": f"cpu {cpu_level()}",
            "dtype": self._dtype(),
            "quant": None,
            "kv_dtype": self._stored("kv"),
            "state_dtype": self._stored("state"),
            "tp": 1,
            "flags": {"numerics": self.profile.name, "threads": get_num_threads()},
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "defaults": {} if folder is None else sampling_defaults(folder),
            "model": {} if folder is None else model_facts(folder),
        }

    def close(self):
        self._cache = None

    def _dtype(self):
        """What activations are rounded to, as engines say it."""
        return "bfloat16" if self.profile.choices["linear"] == "bf16" else self.profile.dtype.name

    def _stored(self, what):
        choice = self.profile.choices[what]
        return choice if self.profile.rounds_stored and choice != POINTS[what].default else self.profile.dtype.name

    def _tokenizer(self):
        has = self.model.path is not None and (self.model.path / "tokenizer.json").is_file()
        return self.model.tokenizer if has else None
