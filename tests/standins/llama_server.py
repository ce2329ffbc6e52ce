"""The JSON of llama.cpp's server around any engine: no log-probabilities of a prompt, none inside of a character."""

from qwenref.engines import ALL
from standins.engine import Behind, pairs
from standins.serving import Refused

STOPS = {"stop": "eos", "length": "limit"}


def answering(engine, tokenizer):
    behind = Behind(engine, tokenizer)
    vocab = engine.vocab

    def answer(request, handler):
        body = request.body or {}
        if request.path == "/v1/models":
            return {"data": [{"id": "tiny.gguf", "meta": {"n_vocab": vocab, "n_ctx": 1024}}]}
        if request.path == "/props":
            settings = {"params": {"temperature": 0.8, "top_k": 40}, "n_ctx": 1024}
            return {
                "default_generation_settings": settings, "total_slots": 1, "model_ftype": "all F32", "build_info": "b1",
                "chat_template": "{{ messages }}", "eos_token": "<|im_end|>",
            }  # fmt: skip
        if request.path == "/tokenize":
            return {"tokens": behind.ids(body["content"])}
        if request.path == "/apply-template":
            options = {**body["chat_template_kwargs"], "add_generation_prompt": body["add_generation_prompt"]}
            options |= {name: body[name] for name in ("continue_final_message", "tools") if name in body}
            return {"prompt": engine.render(body["messages"], **options).text}
        assert request.path == "/completion"
        if any(id >= vocab for id in body["prompt"]):
            raise Refused(400, {"error": {"code": 400, "message": "Prompt contains invalid tokens"}})
        return _completed(behind, body)

    return answer


def _completed(behind, body):
    k = body.get("n_probs", 0)
    forced = [id for id, bias in body.get("logit_bias", []) if bias > 100]  # what comes out is known
    fields = {**body, "repetition_penalty": body["repeat_penalty"]}
    done = behind.generate(body["prompt"], body["n_predict"], ALL if forced else k, fields)
    output, rows, stop = done.output_ids, done.rows, STOPS[done.finish]
    if forced:
        output, rows, stop = forced, [_drawn(done.rows[0], forced[0], k)], "limit"
    found = {
        "content": behind.tokenizer.decode(output),
        "tokens": output,
        "stop_type": stop,
        "tokens_evaluated": len(done.prompt_ids),
        "truncated": False,
        "timings": {"cache_n": 0},
    }
    if k:
        found["completion_probabilities"] = _entries(behind, output, rows)
    return found


def _drawn(row, id, k):
    """The k likeliest of a whole row, with another id drawn."""
    value = dict(pairs(row)).get(id, float("-inf"))
    return row._replace(ids=row.ids[:k], logprobs=row.logprobs[:k], chosen=id, chosen_logprob=value)


def _entries(behind, ids, rows):
    """One for each token at whose end the text is whole characters."""
    found, open_bytes = [], b""
    for id, row in zip(ids, rows, strict=True):
        open_bytes += behind.tokenizer.token_bytes(id)
        if not _whole(open_bytes):
            continue
        open_bytes = b""
        tops = [{"id": other, **behind.entry(other, value)} for other, value in pairs(row)]
        found.append({"id": id, **behind.entry(id, row.chosen_logprob), "top_logprobs": tops})
    return found


def _whole(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
