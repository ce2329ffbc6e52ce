"""vLLM in process around an engine: requests of ids, answers with tables of log-probabilities by id."""

import types
from typing import NamedTuple

from qwenref.engines import ALL
from standins.engine import Behind, Tokenizer, with_chosen

KNOWN = {
    "dtype", "max_model_len", "enforce_eager", "enable_prefix_caching", "generation_config", "max_logprobs",
    "logprobs_mode", "max_num_seqs", "limit_mm_per_prompt", "disable_log_stats", "tensor_parallel_size",
}  # fmt: skip
REQUEST = {
    "temperature", "ignore_eos", "detokenize", "max_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "top_k",
    "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
}  # fmt: skip


class Logprob(NamedTuple):
    logprob: float
    rank: int
    decoded_token: str | None = None


def module(engine, tokenizer, decoder=None):
    """The package `vllm`; `.asked` are the requests so far, `decoder` a torch Module that runs in each of them."""
    vllm = types.ModuleType("vllm")
    vllm.asked = []

    class SamplingParams(types.SimpleNamespace):
        def __init__(self, **fields):
            assert set(fields) <= REQUEST, fields
            super().__init__(**fields)

    class LLM:
        def __init__(self, model, **options):
            if unknown := set(options) - KNOWN:
                raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {unknown.pop()!r}")
            print("INFO loading")
            if options["dtype"] == "float32":
                raise ValueError("CPU GDN attention requires BF16")
            model_config = types.SimpleNamespace(
                dtype="torch.bfloat16", max_model_len=options["max_model_len"], quantization=None,
                logprobs_mode=options["logprobs_mode"], enforce_eager=options["enforce_eager"],
                get_vocab_size=lambda: engine.vocab, hf_text_config=engine.model.config.text_config,
            )  # fmt: skip
            self.llm_engine = types.SimpleNamespace(
                model_config=model_config,
                vllm_config=types.SimpleNamespace(
                    device_config=types.SimpleNamespace(device_type="cpu"),
                    cache_config=types.SimpleNamespace(
                        cache_dtype="auto", mamba_ssm_cache_dtype="float32", block_size=256,
                        enable_prefix_caching=options["enable_prefix_caching"],
                    ),
                    parallel_config=types.SimpleNamespace(tensor_parallel_size=options.get("tensor_parallel_size", 1)),
                    scheduler_config=types.SimpleNamespace(enable_chunked_prefill=True),
                ),
            )  # fmt: skip

        def apply_model(self, function):
            return [function(decoder)]

        def get_tokenizer(self):
            return Tokenizer(engine, tokenizer)

        def generate(self, prompts, params, use_tqdm=True):
            if use_tqdm:
                print("Processed prompts: 100%")
            [prompt] = prompts
            vllm.asked.append(vars(params))
            if decoder is not None:
                decoder(prompt["prompt_token_ids"])
            return [_answer(Behind(engine, tokenizer), prompt["prompt_token_ids"], params)]

    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    return vllm


def _answer(behind, ids, params):
    """Its own stop ids end nothing: `ignore_eos` is asked for, and others are named."""
    fields = {**vars(params), "ignore_eos": True}
    assert params.ignore_eos is True and params.detokenize is False
    done = behind.generate(ids, params.max_tokens, ALL, fields)
    stops = getattr(params, "stop_token_ids", [])
    ends = [t for t, id in enumerate(done.output_ids) if id in stops]
    length = ends[0] + 1 if ends else len(done.output_ids)
    asked, of_prompt = (getattr(params, name, None) for name in ("logprobs", "prompt_logprobs"))
    prompt = None
    if of_prompt is not None:
        prompt = [None, *(_table(row, of_prompt) for row in behind.score(ids, ALL).rows[:-1])]
    output = types.SimpleNamespace(
        token_ids=done.output_ids[:length],
        logprobs=None if asked is None else [_table(row, asked) for row in done.rows[:length]],
        finish_reason="stop" if ends else "length",
    )
    return types.SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=prompt, outputs=[output], num_cached_tokens=None)


def _table(row, k):
    """The chosen id first, then the k likeliest: all of them where k is -1."""
    ranked = row.ids.tolist()
    kept = row if k == -1 else row._replace(ids=row.ids[:k], logprobs=row.logprobs[:k])
    found = {id: Logprob(value, ranked.index(id) + 1) for id, value in with_chosen(kept).items()}
    return found if row.chosen is None else {row.chosen: found[row.chosen], **found}
