"""transformers in process: plain forward calls through its cache, never its generate()."""

import contextlib
import importlib
import inspect

from qwenref.engines.dump_activations import Recorder
from qwenref.engines.hf_tokenizer import open_tokenizer
from qwenref.engines.model_files import model_facts, sampling_defaults
from qwenref.engines.packages import imported, version
from qwenref.engines.site_names import short_site, under_names
from qwenref.engines.stepping import Stepping
from qwenref.hub import resolve
from qwenref.tokenizer import find_stop_ids


def open(rest, *, dtype="auto", attn_implementation=None, name=None):
    """The text model of a folder, "tiny" or a hub name.

    dtype                "auto" (as stored), "float32", "bfloat16", "float16" or "float64"
    attn_implementation  "eager", "sdpa", ...; None: what transformers chooses
    """
    torch, transformers = imported("torch", "test"), imported("transformers", "test")
    folder = resolve(rest)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **options
        )
    return Transformers(model.eval(), folder, name)


class Transformers(Stepping):
    """A model of transformers as an engine."""

    sites = True

    def __init__(self, model, folder, name=None):
        self.model, self.folder = model, folder
        self.tokenizer = open_tokenizer(folder)
        config = model.config.get_text_config()
        self.vocab, self.limit = config.vocab_size, config.max_position_embeddings
        self.stop_ids = find_stop_ids(folder).ids
        self._attention = model.config._attn_implementation
        self.name = name or f"transformers {_dtype(model)} {self._attention}"
        parameters = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"  # as it was called before 5.24
        self._past = None

    def fresh(self):
        self._past = None

    def feed(self, ids):
        import torch

        with torch.inference_mode(), _quiet():
            out = self.model(torch.tensor([ids]), use_cache=True, **{self._keyword: self._past})
            self._past = getattr(out, self._keyword)
            wide = out.logits[0] if out.logits.dtype == torch.float64 else out.logits[0].float()
            return wide.numpy()

    def activations(self, ids, sites):
        """Of one prefill, those of `sites` (names or patterns) that hooks can see; see `dump_activations`."""
        import torch

        ids = self.ids(ids, f"{self.name}: activations")
        recorder = Recorder(self.model, *map(short_site, sites))
        with recorder, torch.inference_mode(), _quiet():
            self.model(torch.tensor([ids]), use_cache=True)
        return under_names(self.name, recorder, sites)

    def config(self):
        import torch

        return {
            "name": "transformers",
            "version": version("transformers"),
            "backend": f"torch {torch.__version__}, {self.model.device.type}",
            "dtype": _dtype(self.model),
            "quant": None,
            "kv_dtype": _dtype(self.model),
            "state_dtype": "float32",
            "tp": 1,
            "flags": {
                "attn_implementation": self._attention,
                **delta_path(),
                "threads": torch.get_num_threads(),
            },
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "defaults": sampling_defaults(self.folder),
            "model": model_facts(self.folder),
        }

    def close(self):
        self.model = self._past = None


def delta_path():
    """Whose delta rule and convolution transformers runs: its own in torch, or those of a package, with its version."""
    found = {}
    for what, package, distribution in (
        ("delta_rule", "fla", "flash-linear-attention"),
        ("convolution", "causal_conv1d", "causal-conv1d"),
    ):
        try:
            importlib.import_module(package)
            found[what] = f"{distribution} {version(distribution)}"
        except Exception:  # whatever keeps it from being imported makes transformers use its own
            found[what] = "torch"
    return found


def _dtype(model):
    return str(model.dtype).removeprefix("torch.")


@contextlib.contextmanager
def _quiet():
    """No lines of a library on the terminal; what they say about kernels is in `config()`."""
    from transformers.utils import logging

    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
