"""vLLM in process: ids in, its own scheduler and decoding, log-probabilities of softmax(logits)."""

import os

import qwenref
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Closing, Completion, Prompt, Scores
from qwenref.engines.dump_activations import Recorder
from qwenref.engines.model_files import model_facts, sampling_defaults
from qwenref.engines.packages import counts, imported, opening, running, silenced, version
from qwenref.engines.served import dense_rows, row_of
from qwenref.engines.site_names import short_site, under_names
from qwenref.engines.stepping import MORE, named
from qwenref.hub import read_json, resolve
from qwenref.tokenizer import find_stop_ids

# Read when vLLM is imported; what the user has set stays.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in this process, where hooks reach it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
# Nothing beyond the model: no graphs, no cache across requests, no sampling that a checkpoint's files ask for.
PLAIN = {
    "enforce_eager": True, "enable_prefix_caching": False, "generation_config": "vllm", "max_logprobs": -1,
    "logprobs_mode": "raw_logprobs", "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 0, "video": 0},
    "disable_log_stats": True,
}  # fmt: skip


def open(rest, *, dtype="auto", context=4096, name=None, **options):
    """A folder, "tiny" or a hub name; further options are those of `vllm.LLM`, such as tensor_parallel_size."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    counts("vllm", context=context)
    folder = resolve(rest)
    with silenced():
        package = imported("vllm", install="vllm (vllm-cpu for a CPU)")
        with opening(rest, "vLLM"):
            llm = package.LLM(str(folder), **{"dtype": dtype, "max_model_len": context, **PLAIN, **options})
    return Vllm(package, llm, folder, name)


class Vllm(Closing):
    """An LLM of vLLM as an engine."""

    def __init__(self, package, llm, folder, name=None):
        self._package, self._llm, self.folder = package, llm, folder
        self._model = llm.llm_engine.model_config
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.name = name or f"vllm {self.dtype}"
        self.vocab, self.limit = self._model.get_vocab_size(), self._model.max_model_len
        self.stop_ids = find_stop_ids(folder).ids

    def capabilities(self):
        return Capabilities(True, True, ALL, ALL, tokenize=True, render=True, config=True, activations=True)

    def score(self, ids, k):
        """Rows of the prompt from its prefill, the last one from the step behind it."""
        where = f"{self.name}: score"
        ids, k = self._ids(ids, where), checked.count(k, where)
        out = self._ask(ids, where, max_tokens=1, prompt_logprobs=_at_least_one(k), logprobs=_at_least_one(k))
        tables = [*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]]
        following = [*ids[1:], None]
        rows = [
            self._row(table, k, f"{where}, behind id {t}", id)
            for t, (table, id) in enumerate(zip(tables, following, strict=True))
        ]
        return Scores(ids, rows, dense_rows(rows, self.vocab))

    def generate(self, prompt, n, k, sampling=None):
        """Its own decoding, greedy unless `sampling` says otherwise; the stop ids are the checkpoint's."""
        where = f"{self.name}: generate"
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        ids, k = self._ids(ids, where), checked.count(k, where)
        request = {field: value for field, value in named(sampling, where).items() if value is not None}
        stops = () if request.pop("ignore_eos", False) else self.stop_ids
        n = min(n, self.limit - len(ids))
        out = self._ask(ids, where, max_tokens=n, logprobs=_at_least_one(k), stop_token_ids=list(stops), **request)
        [done] = out.outputs
        output = checked.ids(done.token_ids, self.vocab, where=f"{where}: what it wrote", some=False)
        rows = [
            self._row(table, k, f"{where}, step {t}", id)
            for t, (table, id) in enumerate(zip(done.logprobs, output, strict=True))
        ]
        finish = done.finish_reason if done.finish_reason in ("stop", "length") else "unknown"
        stop_id = output[-1] if finish == "stop" and output and output[-1] in self.stop_ids else None
        meta = {"cached_tokens": out.num_cached_tokens or 0}
        return Completion(list(out.prompt_token_ids), output, None, finish, rows, stop_id, meta)

    def tokenize(self, text):
        return list(self._llm.get_tokenizer()(text)["input_ids"])

    def render(self, messages, **options):
        tokenizer = self._llm.get_tokenizer()
        with running(f"{self.name}: render"):
            options = {"add_generation_prompt": True, **options}
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return Prompt(text, list(tokenizer(text, add_special_tokens=False)["input_ids"]))

    def activations(self, ids, sites):
        """Of one prefill, those of `sites` that hooks can see, with the model in this process on one device."""
        where = f"{self.name}: activations"
        ids, config = self._ids(ids, where), self._model.hf_text_config
        with running(where):
            [recorder] = self._llm.apply_model(lambda model: Recorder(model, *map(short_site, sites), config=config))
        with recorder:
            self._ask(ids, where, max_tokens=1)
        return under_names(self.name, recorder, sites, self._sites())

    def config(self):
        said = self._llm.llm_engine.vllm_config
        kv = said.cache_config.cache_dtype
        return {
            "name": "vllm",
            "version": version("vllm") or version("vllm-cpu"),
            "backend": said.device_config.device_type,
            "dtype": self.dtype,
            "quant": self._model.quantization,
            "kv_dtype": self.dtype if kv == "auto" else kv,
            "state_dtype": getattr(said.cache_config, "mamba_ssm_cache_dtype", None),
            "tp": said.parallel_config.tensor_parallel_size,
            "flags": {
                "logprobs_mode": self._model.logprobs_mode,
                "enforce_eager": self._model.enforce_eager,
                "prefix_caching": said.cache_config.enable_prefix_caching,
                "block_size": said.cache_config.block_size,
                "chunked_prefill": said.scheduler_config.enable_chunked_prefill,
                "max_model_len": self.limit,
            },
            "vocab_size": self.vocab,
            "stop_ids": list(self.stop_ids),
            "defaults": sampling_defaults(self.folder),
            "model": model_facts(self.folder),
        }

    def close(self):
        self._llm = None

    def _sites(self):
        """The names a model of this config has: vLLM joins modules under names of its own."""
        model = qwenref.from_config(read_json(self.folder / "config.json"), device="meta")
        return set(map(short_site, model.sites()))

    def _ids(self, values, where):
        """One position fewer than there are: every request writes an id."""
        return checked.ids(values, self.vocab, self.limit - 1, where, more=MORE)

    def _ask(self, ids, where, **request):
        """The one RequestOutput of a request: greedy unless it says otherwise, ended by no id but those it names."""
        with running(where):
            ask = self._package.SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False, **request})
            [out] = self._llm.generate([{"prompt_token_ids": ids}], ask, use_tqdm=False)
        return out

    def _row(self, table, k, where, chosen):
        return row_of({id: entry.logprob for id, entry in table.items()}, k, self.vocab, where, chosen)


def _at_least_one(k):
    """vLLM's number of log-probabilities: -1 is all, and 0 the chosen one's alone."""
    return -1 if k == ALL else max(k, 1)
