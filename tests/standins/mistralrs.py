"""mistral.rs in process around an engine: chat requests through a template, answers with tokens in text and by id."""

import types
from pathlib import Path

from qwenref.engines import ALL
from standins.engine import Behind


def module(engine, tokenizer):
    """The package `mistralrs`; `.asked` are the requests, `.extra` what its prompts have more than was sent."""
    rs = types.ModuleType("mistralrs")
    rs.asked, rs.extra, rs.refuses, rs.room = [], 0, None, 4096
    rs.ModelDType = types.SimpleNamespace(F32="f32", BF16="bf16", F16="f16")
    rs.Which = types.SimpleNamespace(Plain=lambda model_id, dtype: types.SimpleNamespace(folder=model_id, dtype=dtype))
    rs.ChatCompletionRequest = lambda **fields: types.SimpleNamespace(**fields)

    class Runner:
        def __init__(self, *, which, max_seqs, prefix_cache_n, jinja_explicit):
            print("INFO mistral.rs version: 0.9.5")
            if rs.refuses is not None:
                raise ValueError(rs.refuses)
            assert prefix_cache_n == 0 and Path(jinja_explicit).read_text() == "{{ messages[0]['content'] }}"
            rs.dtype = which.dtype

        def max_sequence_length(self):
            return rs.room

        def tokenize_text(self, text, add_special_tokens, enable_thinking):
            return tokenizer.encode(text)

        def detokenize_text(self, ids, skip_special_tokens):
            return tokenizer.decode(ids) if not skip_special_tokens else ""

        def send_chat_completion_request(self, request):
            rs.asked.append(vars(request))
            [message] = request.messages
            ids = tokenizer.encode(message["content"])
            if len(ids) >= rs.room:
                raise ValueError(f"Prompt sequence length is greater than {rs.room}")
            fields = {"temperature": request.temperature, "ignore_eos": request.ignore_eos}
            done = Behind(engine, tokenizer).generate(ids, request.max_tokens, ALL, fields)
            steps = [_step(tokenizer, row, request.top_logprobs) for row in done.rows]
            choice = types.SimpleNamespace(
                finish_reason=done.finish, logprobs=types.SimpleNamespace(content=steps),
                message=types.SimpleNamespace(content=tokenizer.decode(done.output_ids)),
            )  # fmt: skip
            usage = types.SimpleNamespace(prompt_tokens=len(ids) + rs.extra, completion_tokens=len(steps))
            return types.SimpleNamespace(choices=[choice], usage=usage)

    rs.Runner = Runner
    return rs


def _step(tokenizer, row, k):
    likeliest = list(zip(row.ids[:k].tolist(), row.logprobs[:k].tolist(), strict=True))
    top = [types.SimpleNamespace(token=id, logprob=value, bytes=None) for id, value in likeliest]
    return types.SimpleNamespace(token=tokenizer.decode([row.chosen]), logprob=row.chosen_logprob, top_logprobs=top)
