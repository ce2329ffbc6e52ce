"""mistral.rs in process: text in, and log-probabilities of greedy decoding by ids.

Only chat requests give log-probabilities, and every message goes through the chat template; so the engine is opened
with a template that prints the message alone.  Its own template is therefore not asked, nor can ids be sent.
"""

import os
import tempfile
from pathlib import Path

from qwenref.compare.errors import EngineContractViolation
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Closing, Completion
from qwenref.engines.folders import text_sizes
from qwenref.engines.model_files import model_facts, sampling_defaults
from qwenref.engines.packages import imported, opening, running, silenced, version
from qwenref.engines.served import row_of
from qwenref.engines.stepping import lacks, named
from qwenref.errors import InputError, compose
from qwenref.hub import resolve
from qwenref.tokenizer import find_stop_ids

BARE = "{{ messages[0]['content'] }}"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
KV = {"f32": "float32", "f16": "float16"}


def open(rest, *, dtype="F32", kv="f32", name=None):
    """A folder or hub name of a text-only checkpoint.

    dtype   "F32", "BF16" or "F16"
    kv      of keys and values on a CPU: "f32", or "f16" as mistral.rs itself has it
    """
    package = imported("mistralrs", install="mistralrs")
    if dtype not in DTYPES or kv not in KV:
        raise InputError(compose(f"mistralrs: dtype {dtype!r}, kv {kv!r}", expected="F32, BF16 or F16; f32 or f16"))
    folder = resolve(rest)
    os.environ["MISTRALRS_CPU_KV_F32"] = "1" if kv == "f32" else "0"
    with tempfile.TemporaryDirectory() as scratch, silenced(), opening(rest, "mistral.rs"):
        template = Path(scratch) / "bare.jinja"
        template.write_text(BARE, encoding="utf-8")
        which = package.Which.Plain(model_id=str(folder), dtype=getattr(package.ModelDType, dtype))
        runner = package.Runner(which=which, max_seqs=1, prefix_cache_n=0, jinja_explicit=str(template))
    return MistralRs(package, runner, folder, dtype, kv, name)


class MistralRs(Closing):
    """A runner of mistral.rs as an engine of tier C."""

    def __init__(self, package, runner, folder, dtype, kv, name=None):
        self._package, self._runner, self.folder = package, runner, folder
        self._dtype, self._kv = DTYPES[dtype], KV[kv]
        self.name = name or f"mistral.rs {self._dtype}"
        self.vocab, _ = text_sizes(folder)
        self.limit = runner.max_sequence_length()
        self.stop_ids = find_stop_ids(folder).ids

    def capabilities(self):
        return Capabilities(ids_out=True, output_logprobs=ALL, tokenize=True, config=True)

    def tokenize(self, text):
        with running(f"{self.name}: tokenize"):
            return list(self._runner.tokenize_text(text, True, None))

    def generate(self, prompt, n, k, sampling=None):
        """Greedy decoding of a text; of ids only where their text has them for its ids."""
        where = f"{self.name}: generate"
        ids, text = self._both(prompt, where)
        k, wanted = checked.count(k, where), named(sampling, where)
        ignore_eos = bool(wanted.pop("ignore_eos", False))
        drawn = {field: v for field, v in wanted.items() if v is not None and (field, v) != ("temperature", 0)}
        if drawn:
            raise lacks(self.name, f"sampling with {', '.join(drawn)}", "seeds are refused on a CPU")
        with running(where):
            ask = self._package.ChatCompletionRequest(
                messages=[{"role": "user", "content": text}], model="default", max_tokens=min(n, self.limit - len(ids)),
                temperature=0.0, logprobs=True, top_logprobs=self.vocab if k == ALL else max(k, 2),
                ignore_eos=ignore_eos,
            )  # fmt: skip
            answer = self._runner.send_chat_completion_request(ask)
        if answer.usage.prompt_tokens != len(ids):
            found, expected = f"{answer.usage.prompt_tokens:,} tokens", f"{len(ids):,}"
            raise EngineContractViolation(compose(f"{where}: another prompt", found=found, expected=expected))
        [choice] = answer.choices
        rows = [self._row(step, k, f"{where}, step {t}") for t, step in enumerate(choice.logprobs.content)]
        output = [row.chosen for row in rows]
        finish = choice.finish_reason if choice.finish_reason in ("stop", "length") else "unknown"
        stop_id = output[-1] if finish == "stop" and output and output[-1] in self.stop_ids else None
        return Completion(ids, output, choice.message.content, finish, rows, stop_id, {"cached_tokens": 0})

    def config(self):
        return {
            "name": "mistral.rs",
            "version": version("mistralrs"),
            "backend": "cpu",
            "dtype": self._dtype,
            "quant": None,
            "kv_dtype": self._kv,
            "state_dtype": None,
            "tp": 1,
            "flags": {},
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "defaults": sampling_defaults(self.folder),
            "model": model_facts(self.folder),
        }

    def score(self, ids, k):
        raise lacks(self.name, "score", "it gives no log-probabilities of a prompt")

    def render(self, messages, **options):
        raise lacks(self.name, "render", "it was opened without its template")

    def activations(self, ids, sites):
        raise lacks(self.name, "activations")

    def close(self):
        self._runner = None

    def _both(self, prompt, where):
        """(ids, text) of a prompt that is one of them."""
        if isinstance(prompt, str):
            ids, text = self.tokenize(prompt), prompt
        else:
            ids = checked.ids(prompt, self.vocab, where=where)
            with running(where):
                text = self._runner.detokenize_text(ids, False)
            if self.tokenize(text) != ids:
                raise lacks(self.name, "prompts of these ids", "it takes text, and theirs has other ids")
        return checked.ids(ids, self.vocab, self.limit - 1, where), text

    def _row(self, step, k, where):
        """The id that was chosen is not said: the likeliest, or of several alike the one with the token's text."""
        table = {each.token: each.logprob for each in step.top_logprobs}
        alike = sorted(id for id, value in table.items() if value == step.logprob)
        if len(alike) > 1:
            alike = [id for id in alike if self._runner.detokenize_text([id], False) == step.token] or alike
        if not alike:
            found = f"{step.logprob}, and the likeliest {max(table.values(), default=None)}"
            raise EngineContractViolation(compose(f"{where}: the chosen token is not in the list", found=found))
        return row_of(table, k, self.vocab, where, alike[0])
