"""OpenVINO in process, on a folder that `optimum-cli export openvino --task text-generation-with-past` wrote."""

import numpy as np

from qwenref.engines.folders import OfFolder, tokenizer_if_any, with_file
from qwenref.engines.packages import counts, imported, opening, version
from qwenref.errors import InputError, compose

MODEL = "openvino_model.xml"
PRECISIONS = ("f32", "bf16", "f16", None)
_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def open(rest, *, precision="f32", device="CPU", threads=None, name=None):
    """An exported folder.

    precision   of the computation: "f32", "bf16", "f16", or None: what the device prefers, bf16 where the CPU has it
    threads     None: as many as OpenVINO takes
    """
    ov = imported("openvino", install="openvino")
    if precision not in PRECISIONS:
        expected = ", ".join(map(str, PRECISIONS)).lower()
        raise InputError(compose(f"openvino: precision {precision!r}", expected=expected))
    counts("openvino", threads=threads)
    do = "optimum-cli export openvino --model DIR --task text-generation-with-past --weight-format fp32 OUT"
    folder = with_file(rest, MODEL, expected="a folder that optimum-intel exported", do=do)
    options = {} if precision is None else {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads
    with opening(rest, "OpenVINO"):
        compiled = ov.Core().compile_model(folder / MODEL, device, options)
    return OpenVino(compiled, folder, name)


class OpenVino(OfFolder):
    """A compiled model with its state as an engine."""

    exported = True

    def __init__(self, compiled, folder, name=None):
        self._dtype = _type(compiled, "INFERENCE_PRECISION_HINT")
        super().__init__(folder, name or f"openvino {self._dtype}")
        self.tokenizer = tokenizer_if_any(folder)
        self._compiled, self._request = compiled, compiled.create_infer_request()
        self._names = {name for given in compiled.inputs for name in given.names}
        self._fed = 0

    def fresh(self):
        self._request.reset_state()
        self._fed = 0

    def feed(self, ids):
        begin, end = self._fed, self._fed + len(ids)
        inputs = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        out = self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        self._fed = end
        return np.array(out["logits"][0], np.float32)

    def config(self):
        said = self._compiled.get_property
        return self.described(
            "openvino",
            version=version("openvino"),
            backend=", ".join(said("EXECUTION_DEVICES")),
            dtype=self._dtype,
            kv_dtype=_type(self._compiled, "KV_CACHE_PRECISION"),
            state_dtype=None,
            flags={"threads": said("INFERENCE_NUM_THREADS")},
        )

    def close(self):
        self._request = self._compiled = None


def _type(compiled, what):
    name = str(compiled.get_property(what).get_type_name())
    return _NAMES.get(name, name)
