"""Runs everything the command reports: the machine, the contenders in turns, each goal's figure, work by op."""

import os
import platform
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from qwenref import _C, ops
from qwenref._version import __version__
from qwenref.bench import alone
from qwenref.bench.contenders import Ours, rivals
from qwenref.bench.goals import GOALS, KEYS, Row
from qwenref.bench.report import Report
from qwenref.bench.shapes import random_folder
from qwenref.bench.timing import fastest, ratio, seconds, turns
from qwenref.errors import CapabilityMissing, InputError, compose
from qwenref.progress import Status
from qwenref.rates import rates

SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
CAPTURED, DOUBLE_PREFILL = 64, 64  # tokens of the prompt that is captured, and of that in float64


def bench(
    model=None, *, shape=None, against=(), folder=None, only=None, rounds=5, tokens=16, prefill=512, threads=None
):
    """Measure this machine, this package and the rivals asked for: a Report.

    model: what `from_pretrained` takes; or shape: "0.8b" (default), "2b", "4b", "9b" or "27b-layer", random weights
    made once in `folder`, or in a temporary one.  against: "torch", "llama.cpp".  only: patterns of goals, "decode.*".
    Contenders take turns for `rounds` rounds: a prompt of `prefill` tokens, then `tokens` more.  Takes minutes.
    """
    _check(model, shape, rounds, tokens, prefill, only)
    before = _C.get_num_threads()
    if threads is not None:
        _C.set_num_threads(threads)
    try:
        with Status() as tell, tempfile.TemporaryDirectory() as spare:
            return _Bench(model, shape, against, folder or spare, only, rounds, tokens, prefill, tell).run()
    finally:
        _C.set_num_threads(before)


def _check(model, shape, rounds, tokens, prefill, only):
    from fnmatch import fnmatch

    from qwenref.bench.shapes import SHAPES

    if model is not None and shape is not None:
        raise InputError(compose("bench: a model and a shape", do="name one of them"))
    if shape is not None and shape not in SHAPES:
        raise InputError(compose(f"bench: no shape {shape!r}", expected=", ".join(SHAPES)))
    for name, value in (("rounds", rounds), ("tokens", tokens), ("prefill", prefill)):
        if value < 1:
            raise InputError(compose(f"bench: {name} {value}", expected="1 or more"))
    for pattern in only or ():
        if not any(fnmatch(key, pattern) for key in KEYS):
            raise InputError(compose(f"bench: no goal {pattern!r}", expected=", ".join(KEYS)))


class _Bench:
    def __init__(self, model, shape, against, root, only, rounds, tokens, prefill, tell):
        import qwenref

        self.threads, self.rounds, self.tokens, self.length = _C.get_num_threads(), rounds, tokens, prefill
        self.only, self.against, self.tell = only, tuple(against), tell
        self.shape = None if model is not None else shape or "0.8b"
        if self.shape is not None:
            tell(f"random weights of shape {self.shape}")
            model = str(random_folder(self.shape, root))
        self.name = self.shape or str(model)
        self.model = qwenref.from_pretrained(model)
        self.folder = Path(self.model.path)
        self.limits = rates(again=True)
        vocabulary = self.model.config.text_config.vocab_size
        self.ids = np.random.default_rng(0).integers(0, vocabulary, prefill).tolist()
        self.rows, self.times = {}, {}

    def wanted(self, *keys):
        from fnmatch import fnmatch

        return [key for key in keys if self.only is None or any(fnmatch(key, pattern) for pattern in self.only)]

    def set(self, key, figure, low=None, high=None, note=""):
        self.rows[key] = Row(next(goal for goal in GOALS if goal.key == key), figure, low, high, note)

    def run(self):
        self.sides = {"qwenref": Ours(self.model, self.threads)}
        self.sides |= rivals(self.against, self.folder, self.threads)
        self.model_turns()
        self.delta_rule()
        self.small_things()
        self.capture()
        self.double()
        self.other_processes()
        roofline = self.roofline()
        return Report(self.facts(), [self.row(goal) for goal in GOALS], self.times, roofline, self.extrapolated())

    def row(self, goal):
        if goal.key in self.rows and self.wanted(goal.key):
            return self.rows[goal.key]
        if not self.wanted(goal.key):
            return Row(goal, reason="left out by --only")
        rival = next((name for name in ("torch", "llama.cpp") if goal.key.endswith(f".{name}")), None)
        why = f"--against {rival}" if rival and rival not in self.against else "not possible here"
        return Row(goal, reason=why)

    def facts(self):
        text = self.model.config.text_config
        return {
            "version": __version__,
            "model": self.name,
            "layers": text.num_hidden_layers,
            "hidden_size": text.hidden_size,
            "weights": self.weight_bytes(),
            "cpu": cpu_name(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "rounds": self.rounds,
            "prefill": self.length,
            "tokens": self.tokens,
            "rates": self.limits._asdict(),
            "settings": {name: side.settings for name, side in self.sides.items()},
            "warnings": warnings(),
        }

    # ---- the model, in turns

    def weight_bytes(self):
        """Bytes of weights that one decode step reads: all but an embedding that is no head as well."""
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        table = self.model.text_model.embed_tokens.weight
        return total - (0 if self.model.config.tie_word_embeddings else table.nbytes)

    def model_turns(self):
        if not self.wanted(*(key for key in KEYS if key.startswith(("decode.", "prefill.")))):
            return
        pieces = [
            np.asarray(parameter).reshape(-1).view(np.uint8)
            for name, parameter in self.model.named_parameters()
            if not name.endswith("embed_tokens.weight") or self.model.config.tie_word_embeddings
        ]
        for name, side in self.sides.items():  # pages, caches and threads are there when the turns begin
            self.tell(f"warming up {name}")
            side.prefill(self.ids[:8])
            side.decode(1)
        kinds = {"fma", self.dot()}

        def read():
            return min(sum(_C.read_seconds(piece) for piece in pieces) for _ in range(2))

        def arithmetic():
            return 1 / max(_C.arithmetic_rate(kind, 1_000_000) for kind in kinds for _ in range(3))

        # Limits before and after each of our runs: they take so little time that one alone may meet a bad moment.
        runs = {"plain read": read, "arithmetic": arithmetic}
        for name, side in self.sides.items():
            runs[f"{name} prefill"] = lambda side=side: side.prefill(self.ids)
            runs |= {"arithmetic again": arithmetic, "plain read again": read} if name == "qwenref" else {}
            runs[f"{name} decode"] = lambda side=side: side.decode(self.tokens) / self.tokens
            runs |= {"plain read at last": read} if name == "qwenref" else {}
        taken = turns(runs, self.rounds, self.tell)
        for limit in ("plain read", "arithmetic"):
            own = [taken.pop(name) for name in list(taken) if name.startswith(limit)]
            self.times[limit] = [min(turn) for turn in zip(*own, strict=True)]
        self.times |= taken
        self.model_rows()

    def dot(self):
        """The peak that is usable: that of the bf16 dot where activations are exact in bf16."""
        from qwenref.numerics import profile

        return "bf16" if profile(self.model.numerics).choices["linear"] == "bf16" else "fma"

    def model_rows(self):
        times = self.times
        decode, prefill = times["qwenref decode"], times["qwenref prefill"]
        note = f"{1 / median(decode):.4g} tokens/s over {self.weight_bytes():,} B of weights"
        self.set("decode.read", *ratio(times["plain read"], decode), note=note)
        dense = self.dense_flops()
        least = [dense * one for one in times["arithmetic"]]
        note = f"{self.length / median(prefill):.4g} tokens/s, prompt of {self.length}; peak {self.dot()}"
        self.set("prefill.peak", *ratio(least, prefill), note=note)
        for phase, own in (("decode", decode), ("prefill", prefill)):
            for rival in self.against:
                theirs = {name: taken for name, taken in times.items() if name.startswith(rival) and phase in name}
                name, *others = theirs  # torch in bf16 is what the goal is about; in float32 it is told as well
                speed = (self.length if phase == "prefill" else 1) / median(theirs[name])
                note = f"{name.removesuffix(' ' + phase)}: {speed:.4g} tokens/s"
                for other in others:
                    note += f"; against {other.removesuffix(' ' + phase)} {ratio(theirs[other], own).median:.3g} x"
                self.set(f"{phase}.{rival}", *ratio(theirs[name], own), note=note)

    def dense_flops(self):
        """Operations of the linears over the prompt, the head on its last token alone."""
        head = self.model.lm_head.weight.size
        inside = sum(p.size for name, p in self.model.named_parameters() if p.ndim == 2 and "layers." in name)
        return 2 * (inside * self.length + head)

    # ---- single goals

    def delta_rule(self):
        if not self.wanted("delta.torch") or "torch" not in self.against:
            return
        import torch
        from transformers.models.qwen3_5 import modeling_qwen3_5

        text, random = self.model.config.text_config, np.random.default_rng(0)
        T, G, V = self.length, text.linear_num_key_heads, text.linear_num_value_heads
        K, D = text.linear_key_head_dim, text.linear_value_head_dim
        q, k, v = (random.standard_normal((1, T, *s), np.float32) for s in ((G, K), (G, K), (V, D)))
        q, k = ops.l2_norm(q), ops.l2_norm(k)
        g, beta = -random.random((1, T, V), np.float32) / 10, random.random((1, T, V), np.float32)
        wide = [torch.from_numpy(a).repeat_interleave(V // G, 2) for a in (q, k)]
        rest = [torch.from_numpy(a) for a in (v, g, beta)]

        def theirs():
            with torch.inference_mode():
                modeling_qwen3_5.torch_chunk_gated_delta_rule(*wide, *rest)

        runs = {"ours": lambda: ops.gated_delta_rule(q, k, v, g, beta, None, None, K**-0.5), "theirs": theirs}
        turns(runs, 1)
        taken = turns(runs, max(3, self.rounds), self.tell)
        note = f"{T} tokens, {V} heads of {K} x {D}: {median(taken['ours']) / T / V * 1e6:.3g} µs per token and head"
        self.set("delta.torch", *ratio(taken["theirs"], taken["ours"]), note=note)

    def small_things(self):
        if self.wanted("op.smallest"):
            self.tell("the smallest op")
            x, add, many = np.ones(1, np.float32), ops.add, range(1000)

            def thousand():
                for _ in many:
                    add(x, x)

            self.set("op.smallest", fastest(thousand) * 1e3, note="ops.add of one element, in a loop")

    def capture(self):
        if not self.wanted("capture.all"):
            return
        import qwenref

        ids = np.array([self.ids[:CAPTURED]])

        def captured():
            with qwenref.capture(self.model, "**", max_bytes=2**34) as c:
                self.model(ids)
            return c

        self.model(ids)
        found = []
        for _ in range(self.rounds):
            self.tell("capture of everything")
            before, whole = seconds(self.model, ids), seconds(captured)
            c = captured()
            copies = seconds(lambda c=c: [np.array(array) for name in c.names() for array in [c[name]]])
            found.append(whole / ((before + seconds(self.model, ids)) / 2 + copies))
            nbytes, names = c.nbytes, len(c)
            del c
        note = f"{names:,} values, {nbytes / 1e6:,.4g} MB, prompt of {ids.shape[1]}"
        self.set("capture.all", median(found), min(found), max(found), note)

    def double(self):
        if not self.wanted("fp64.decode", "fp64.prefill"):
            return
        single, double = self.sides["qwenref"], Ours(self.model, self.threads, "fp64")
        ids, rounds = self.ids[:DOUBLE_PREFILL], min(self.rounds, 3)
        steps = min(4, self.tokens)
        runs = {
            "fp32 prefill": lambda: single.prefill(ids),
            "fp32 decode": lambda: single.decode(steps),
            "fp64 prefill": lambda: double.prefill(ids),
            "fp64 decode": lambda: double.decode(steps),
        }
        single.prefill(ids[:8])
        taken = turns(runs, rounds, self.tell)
        for phase, note in (("decode", f"{steps} tokens"), ("prefill", f"prompt of {len(ids)}")):
            self.set(f"fp64.{phase}", *ratio(taken[f"fp64 {phase}"], taken[f"fp32 {phase}"]), note=note)

    def other_processes(self):
        if self.wanted("import.seconds"):
            self.tell("import in a fresh process")
            taken, own, optional = alone.import_seconds(max(3, self.rounds))
            note = f"{own:.3f} s of it beyond numpy and ml_dtypes; optional packages: {', '.join(optional) or 'none'}"
            self.set("import.seconds", median(taken), min(taken), max(taken), note)
        if self.wanted("open.seconds", "open.memory"):
            self.tell("a sparse 27B checkpoint")
            self._try(("open.seconds", "open.memory"), self._open)
        if self.wanted("forward.memory"):
            self.tell("memory of a forward")
            self._try(("forward.memory",), self._forward)

    def _try(self, keys, run):
        """A row that this system cannot fill says why; it does not cost the others."""
        try:
            run()
        except CapabilityMissing as error:
            for key in keys:
                goal = next(goal for goal in GOALS if goal.key == key)
                self.rows[key] = Row(goal, reason=str(error).splitlines()[-1].strip())

    def _open(self):
        taken, resident, lines = alone.open_27b()
        self.set("open.seconds", taken, note=f"{lines} lines printed, one file of 53.79 GB that is a hole")
        self.set("open.memory", resident / 1e6, note="resident, interpreter and NumPy included")

    def _forward(self):
        used, cache = alone.forward_memory(self.folder, self.length, self.threads)
        activations = alone.largest_activations(self.model, self.length)
        note = f"{used / 2**20:.4g} MiB against {activations / 2**20:.4g} + {cache / 2**20:.4g} MiB of cache"
        self.set("forward.memory", used / (activations + cache), note=f"{note}, prompt of {self.length}")

    # ---- work by op, and what follows for a larger model

    def roofline(self):
        """{phase: ModelProfile as a dict} of the prompt and of a step behind it."""
        import qwenref

        self.limits = rates(again=True)
        found, cache = {}, qwenref.Cache(self.model)
        for phase, ids in (("prefill", self.ids), ("decode", self.ids[:1])):
            self.tell(f"work by op: {phase}")
            with qwenref.profile(self.model) as p:
                self.model([ids], cache=cache, logits_to_keep=1)
            found[phase] = {"seconds": p.seconds, "ops": {name: work.to_dict() for name, work in p.ops.items()}}
        return found

    def extrapolated(self):
        """Of one repeat of the 27B model, the time and memory of all of it."""
        if self.shape != "27b-layer" or not self.times:
            return None
        from qwenref.bench.extrapolate import whole_27b

        return whole_27b(self)


def cpu_name():
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def warnings():
    """What would spoil the figures."""
    found = [
        f"{name}={os.environ[name]} is set: NumPy and OpenBLAS run slower and with other bits; unset it"
        for name in SLOWING
        if os.environ.get(name)
    ]
    try:
        load = os.getloadavg()[0]
    except OSError:
        return found
    if load > 1:
        found.append(f"the machine is busy (load {load:.1f}): trust ratios, not figures")
    return found
