"""The reference with faults in it, as an engine: what a comparison is tested against."""

import numpy as np

import qwenref
from qwenref.compare.faults import MODEL_KINDS, find
from qwenref.compare.faults_drawing import NEVER
from qwenref.compare.faults_model import opened
from qwenref.compare.faults_prompt import tokenizer_of
from qwenref.engines import checked
from qwenref.engines.base import ALL, Prompt
from qwenref.engines.reference import Reference
from qwenref.engines.stepping import lacks
from qwenref.errors import InputError, compose
from qwenref.numerics import jitter as variant

_LISTED = 20  # log-probabilities of an engine that gives some


class FaultyReference(Reference):
    """An engine of a model with faults, by name or as `Fault`; with none, the reference itself.

    jitter       the seed of a rounding variant it computes by, or None
    tier         "A", "B", "C" or "D": what it gives; see `Capabilities.tier`
    numerics     the profile, or what a variant starts from
    repeatable   False: another rounding variant in each request
    `.prefix_cache = False` turns off what faults of a cache hit need.

    Prefill is one call of all ids, decode a cache and one id at a time.  Faults of prompts meet texts and
    conversations, and ids where only their number matters; faults of sampling meet what is generated.
    """

    def __init__(self, model, *faults, jitter=None, tier="A", numerics="fp32", repeatable=True):
        if tier not in ("A", "B", "C", "D"):
            raise InputError(compose(f"FaultyReference: tier {tier!r}", expected="A, B, C or D"))
        self.faults = tuple(find(fault) if isinstance(fault, str) else fault for fault in faults)
        self.sound, self.tier, self.prefix_cache = model, tier, True
        self._numerics, self._jitter, self._repeatable = numerics, jitter, repeatable
        self._requests, self._opened, self._context, self._prompt_length = 0, {}, [], None
        super().__init__(model, numerics, name="faulty reference")
        self._vary(jitter)
        for fault in self._of("stop"):
            self.stop_ids = tuple(sorted(fault.stops(model)))

    @property
    def model(self):
        """The model that answers: with its faults, but for those of a cache hit where there is no cache."""
        faults = tuple(f for f in self._of(*MODEL_KINDS) if self.prefix_cache or f.family != "stale")
        names = tuple(fault.name for fault in faults)
        if names not in self._opened:
            self._opened[names] = opened(self.sound, faults) if faults else self.sound
        return self._opened[names]

    @model.setter
    def model(self, model):
        """`Reference` names its model; here it is `sound`."""

    def capabilities(self):
        """Those of its tier."""
        full = super().capabilities()
        kind = "processed" if self._of("sampling") else "raw"
        if self.tier == "A":
            return full._replace(kind=kind)
        if self.tier == "B":
            return full._replace(prompt_logprobs=0, output_logprobs=_LISTED, activations=False, kind=kind)
        text = {"ids_in": False, "ids_out": False, "prompt_logprobs": 0, "tokenize": False, "render": False}
        output = _LISTED if self.tier == "C" else 0
        return full._replace(**text, output_logprobs=output, activations=False, config=self.tier == "C", kind=kind)

    def fresh(self):
        self._requests += 1
        if not self._repeatable:
            self._vary(self._requests)
        self._context = []
        super().fresh()

    def feed(self, ids):
        logits = super().feed(ids)
        self._context += ids
        if self._prompt_length is None or not self._of("sampling"):
            return logits
        last = logits[-1].astype(np.float64)  # the one row of a call that a token is drawn from
        for fault in self._of("sampling"):
            last = fault.logits(last, self._context, self._prompt_length)
        return np.maximum(last, NEVER)[None]

    def score(self, ids, k):
        if self.tier != "A":
            raise lacks(self.name, "score", f"tier {self.tier} gives no log-probabilities of a prompt")
        scores = super().score(self._changed(ids, "context"), k)
        if not self._of("logprobs"):
            return scores
        return scores._replace(rows=[self._reported(row) for row in scores.rows], dense=None)

    def generate(self, prompt, n, k, sampling=None):
        text = isinstance(prompt, str)
        if self.tier in ("C", "D") and not text:
            raise lacks(self.name, "generate from ids", f"tier {self.tier} takes text")
        ids = super().tokenize(prompt) if text else prompt
        ids = self._changed(ids, *(("tokenizer", "template", "context") if text else ("context",)))
        if any(fault.mechanism.draws for fault in self._of("sampling")):
            sampling = {"seed": self._requests, **(sampling or {}), "temperature": 1.0}
        self._prompt_length = len(ids)
        try:
            done = super().generate(ids, n, self._most(k), sampling)
        finally:
            self._prompt_length = None
        return self._given(done)

    def tokenize(self, text):
        self._gives("tokenize")
        return self._changed(super().tokenize(text), "tokenizer")

    def render(self, messages, **options):
        self._gives("render")
        rendered = super().render(messages, **options)
        ids = self._changed(rendered.ids, "template", "tokenizer")
        template = self._changed(rendered.ids, "template")
        text = rendered.text if template == rendered.ids else self.sound.tokenizer.decode(template)
        return Prompt(text, ids)

    def config(self):
        self._gives("config")
        said = super().config()
        for fault in self.faults:
            said |= fault.says
        return said

    def activations(self, ids, sites):
        self._gives("activations")
        return super().activations(ids, sites)

    # What is done to what the reference gives.

    def _of(self, *kinds):
        return [fault for fault in self.faults if fault.kind in kinds]

    def _vary(self, seed):
        self.profile = qwenref.numerics(self._numerics).profile
        if seed is not None:
            self.profile = variant(seed, base=self._numerics).profile
        # To a fault, a prompt in several calls would be decode.
        self.in_pieces = self.profile.splits_freely and not self._of(*MODEL_KINDS)

    def _changed(self, ids, *families):
        for fault in self._of("prompt"):
            if fault.family in families:
                ids = fault.prompt(ids, self.sound)
        return ids

    def _most(self, k):
        limit = self.capabilities().output_logprobs
        return k if limit == ALL else limit if k == ALL else min(k, limit)

    def _reported(self, row):
        if row is None:
            return None
        values, chosen = np.where(row.logprobs > NEVER / 2, row.logprobs, -np.inf), row.chosen_logprob
        for fault in self._of("logprobs"):
            values = fault.logprobs(values)
            chosen = None if chosen is None else float(fault.logprobs(np.array([chosen]))[0])
        ids = row.ids[: len(values)]
        if self._of("logprobs"):  # as an adapter looks at what it is given
            return checked.row(ids, values, self.vocab, self.name, row.chosen, chosen)
        return row._replace(ids=ids, logprobs=values, chosen_logprob=chosen)

    def _given(self, done):
        """A Completion of which the tier's part is left."""
        tokenizer = tokenizer_of(self.sound)
        shown = done.output_ids[:-1] if done.finish == "stop" else done.output_ids
        text = None if tokenizer is None else tokenizer.decode(shown)
        hit = self.prefix_cache and any(fault.family == "stale" for fault in self.faults)
        meta = {**done.meta, "cached_tokens": len(done.prompt_ids) if hit else 0}
        done = done._replace(text=text, rows=[self._reported(row) for row in done.rows], meta=meta)
        if self.tier in ("A", "B"):
            return done
        return done._replace(prompt_ids=None, output_ids=None, stop_id=None, rows=done.rows if self.tier == "C" else ())

    def _gives(self, what):
        if not getattr(self.capabilities(), what):
            raise lacks(self.name, what, f"not in tier {self.tier}")
