"""ONNX Runtime GenAI in process, on a folder that `onnxruntime_genai.models.builder` exported.

Ids that come in one call are a prompt to it, in which it masks the pad id; a single one is always looked at.
"""

import json

import numpy as np

from qwenref.engines.base import Prompt
from qwenref.engines.folders import OfFolder, with_file
from qwenref.engines.packages import counts, imported, opening, running, version
from qwenref.engines.stepping import MORE, lacks
from qwenref.errors import CheckpointError, compose
from qwenref.hub import read_json

CONFIG = "genai_config.json"
CONTEXT = 4096  # tokens, where the model has more and nobody asks for them: keys and values of all are allocated


def open(rest, *, context=None, name=None):
    """An exported folder; `context` tokens there is room for, None: those of the model, at most 4,096."""
    counts("ortgenai", context=context)
    og = imported("onnxruntime_genai", install="onnxruntime-genai")
    do = "python -m onnxruntime_genai.models.builder -m DIR -o OUT -p fp32 -e cpu"
    folder = with_file(rest, CONFIG, expected="a folder that its model builder exported", do=do)
    og.disable_telemetry_events()
    with opening(rest, "ONNX Runtime GenAI"):
        return OrtGenAi(og, og.Model(str(folder)), folder, context, name)


class OrtGenAi(OfFolder):
    """A model of ONNX Runtime GenAI as an engine."""

    exported = True
    more = MORE

    def __init__(self, library, model, folder, context=None, name=None):
        said = read_json(folder / CONFIG).get("model", {})
        if not {"vocab_size", "context_length", "eos_token_id"} <= set(said):
            expected = "model.vocab_size, model.context_length and model.eos_token_id"
            raise CheckpointError(compose(f"{folder / CONFIG}: sizes", expected=expected))
        stops, limit = said["eos_token_id"], min(context or CONTEXT, said["context_length"])
        stops = stops if isinstance(stops, list) else [stops]
        super().__init__(folder, name or "onnxruntime-genai", (said["vocab_size"], limit), stops)
        self._og, self._model, self._generator, self._tokenizer = library, model, None, None
        try:
            self._tokenizer = library.Tokenizer(model)
        except Exception as error:  # it knows some classes alone
            self._why = str(error)
        self.fresh()
        self.feed([0])
        self._dtype = str(self._generator.get_output("logits").dtype)

    def capabilities(self):
        """Text where its own tokenizer opens the folder's."""
        text = self._tokenizer is not None
        return super().capabilities()._replace(tokenize=text, render=text)

    def fresh(self):
        options = self._og.GeneratorParams(self._model)
        options.set_search_options(max_length=self.limit, do_sample=False)
        self._generator = self._og.Generator(self._model, options)

    def feed(self, ids):
        self._generator.append_tokens(np.array(ids, np.int32))
        return np.array(self._generator.get_output("logits")[0], np.float32)

    def tokenize(self, text):
        self._needs("tokenize")
        with running(f"{self.name}: tokenize"):
            return [int(id) for id in self._tokenizer.encode(text)]

    def render(self, messages, *, add_generation_prompt=True, tools=None, **options):
        self._needs("render")
        if options:
            raise lacks(self.name, f"template option {', '.join(options)}")
        with running(f"{self.name}: render"):
            given = {} if tools is None else {"tools": json.dumps(tools)}
            said = json.dumps(messages)
            text = self._tokenizer.apply_chat_template(said, add_generation_prompt=add_generation_prompt, **given)
        return Prompt(text, self.tokenize(text))

    def config(self):
        return self.described(
            "onnxruntime-genai",
            version=version("onnxruntime-genai"),
            backend=f"onnxruntime {version('onnxruntime')}, {self._model.device_type}",
            dtype=self._dtype,
            kv_dtype=self._dtype,
            state_dtype=self._dtype,
            flags={},
        )

    def close(self):
        self._generator = self._model = self._tokenizer = None

    def _needs(self, what):
        if self._tokenizer is None:
            raise lacks(self.name, what, f"its tokenizer does not open the folder's: {self._why}")
