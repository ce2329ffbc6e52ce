"""OpenVINO around an engine: an infer request with a state, which goes by the attention mask and the positions."""

import types

import numpy as np

INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")


class Type:
    def __init__(self, name):
        self.name = name

    def get_type_name(self):
        return self.name


class Request:
    """Its answers lie in one memory, which the next call writes over."""

    def __init__(self, engine, inputs):
        self.engine, self.inputs, self.fed, self.memory = engine, inputs, None, None

    def reset_state(self):
        self.engine.fresh()
        self.fed = 0

    def infer(self, given):
        if set(given) != set(self.inputs):
            raise RuntimeError(f"Port for tensor name {set(given) ^ set(self.inputs)} was not found")
        ids, mask = given["input_ids"], given["attention_mask"]
        assert ids.dtype == mask.dtype == np.int64 and ids.shape[0] == mask.shape[0] == 1
        begin, self.fed = self.fed, self.fed + ids.shape[1]
        assert mask.shape == (1, self.fed) and mask.all()
        assert given["beam_idx"].tolist() == [0] and given["beam_idx"].dtype == np.int32
        if "position_ids" in given:
            assert given["position_ids"].tolist() == [list(range(begin, self.fed))]
        logits = self.engine.feed(ids[0].tolist())
        if self.memory is None or self.memory.shape != logits.shape:
            self.memory = np.empty_like(logits)
        self.memory[:] = logits
        return {"logits": self.memory[None]}


def module(engine, inputs=INPUTS, prefers="bf16"):
    """The package `openvino`; `.options` are those of the last model compiled."""
    ov = types.ModuleType("openvino")

    def get_property(name):
        if name == "EXECUTION_DEVICES":
            return ["CPU"]
        if name == "INFERENCE_NUM_THREADS":
            return ov.options.get(name, 0)
        default = {"INFERENCE_PRECISION_HINT": prefers, "KV_CACHE_PRECISION": "u8"}
        return Type(ov.options.get(name, default[name]))

    def compile_model(path, device, options):
        if not path.with_suffix(".bin").is_file():
            raise RuntimeError("Check failed at core.cpp:132:\nEmpty weights data in bin file")
        ov.options = options
        return types.SimpleNamespace(
            inputs=[types.SimpleNamespace(names={name}) for name in inputs],
            get_property=get_property,
            create_infer_request=lambda: Request(engine, inputs),
        )

    ov.Core = lambda: types.SimpleNamespace(compile_model=compile_model)
    return ov
