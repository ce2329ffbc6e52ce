"""ONNX Runtime GenAI around an engine: a generator is fed ids, and keeps the outputs of its last run."""

import json
import types

import numpy as np


def module(engine, tokenizer, tokenizer_class="Qwen2Tokenizer"):
    """The package `onnxruntime_genai`; `.options` are those of the last generator, `.telemetry` whether it is on."""
    og = types.ModuleType("onnxruntime_genai")
    og.telemetry, og.refuses, og.options = True, None, {}

    class Model:
        device_type = "CPU"

        def __init__(self, folder):
            if og.refuses is not None:
                raise RuntimeError(og.refuses)

    class Tokenizer:
        def __init__(self, model):
            if tokenizer_class != "Qwen2Tokenizer":
                raise RuntimeError(f"Unsupported tokenizer class: {tokenizer_class}")

        def encode(self, text):
            return np.array(tokenizer.encode(text), np.int32)

        def apply_chat_template(self, messages, *, template_str=None, tools=None, add_generation_prompt=True):
            given = {} if tools is None else {"tools": json.loads(tools)}
            return engine.render(json.loads(messages), add_generation_prompt=add_generation_prompt, **given).text

    class GeneratorParams:
        def __init__(self, model):
            self.options = {"max_length": 2**18, "do_sample": True}

        def set_search_options(self, **options):
            self.options |= options

    class Generator:
        def __init__(self, model, params):
            og.options = params.options
            self.count, self.last = 0, None
            engine.fresh()

        def append_tokens(self, ids):
            if ids.dtype != np.int32 or ids.ndim != 1:
                raise TypeError("append_tokens(): incompatible function arguments")
            if self.count + len(ids) > og.options["max_length"]:
                raise RuntimeError(f"input_ids size ({len(ids)}) exceeds max length")
            self.last = engine.feed(ids.tolist())[None]
            self.count += len(ids)

        def get_logits(self):
            return self.last[:, -1:]

        def get_output(self, name):
            return {"logits": self.last}[name]

    og.Model, og.Tokenizer, og.GeneratorParams, og.Generator = Model, Tokenizer, GeneratorParams, Generator
    og.disable_telemetry_events = lambda: setattr(og, "telemetry", False)
    return og
