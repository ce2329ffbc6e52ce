"""The JSON of vLLM 0.32 around any engine."""

from qwenref.engines import ALL
from standins.engine import Behind, with_chosen
from standins.serving import Refused


def answering(engine, tokenizer, most=20):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        body = request.body or {}
        if request.path == "/v1/models":
            return {"object": "list", "data": [{"id": behind.name, "root": behind.name, "max_model_len": 4096}]}
        if request.path == "/version":
            return {"version": "0.32.0"}
        if body.get("model") != behind.name:
            raise _refused(404, f"The model `{body.get('model')}` does not exist.", "model")
        if request.path == "/tokenize":
            return {"tokens": _tokens(behind, body), "max_model_len": 4096, "token_strs": None}
        assert request.path == "/v1/completions"
        return _completion(behind, body, most)

    return answer


def _tokens(behind, body):
    if "messages" not in body:
        return behind.ids(body["prompt"])
    options = {**body["chat_template_kwargs"], "add_generation_prompt": body["add_generation_prompt"]}
    options |= {name: body[name] for name in ("continue_final_message", "tools") if name in body}
    return behind.engine.render(body["messages"], **options).ids


def _completion(behind, body, most):
    ids = behind.ids(body["prompt"])
    k, prompt_k = (_count(body.get(name), name, most) for name in ("logprobs", "prompt_logprobs"))
    done = behind.generate(ids, body["max_tokens"], k or 0, body)
    choice = {
        "index": 0,
        "text": behind.tokenizer.decode(done.output_ids),
        "logprobs": _logprobs(done) if k else None,
        "finish_reason": done.finish,
        "stop_reason": None,
        "token_ids": done.output_ids,
        "prompt_logprobs": _prompt(behind, ids, prompt_k) if prompt_k else None,
        "prompt_token_ids": done.prompt_ids,
    }
    usage = {"prompt_tokens": len(done.prompt_ids), "prompt_tokens_details": None}
    return {"id": "cmpl-1", "object": "text_completion", "model": behind.name, "choices": [choice], "usage": usage}


def _count(asked, name, most):
    if asked is not None and (asked > most if most != ALL else asked > 10**6):
        bound = most if most != ALL else 1280
        what = "sample logprobs" if name == "logprobs" else "prompt logprobs"
        raise _refused(400, f"Requested {what} of {asked}, which is greater than max allowed: {bound}", name)
    if asked == -1:
        if most != ALL:
            raise _refused(400, f"Requested {name} of -1, which is greater than max allowed: {most}", name)
        return ALL
    return asked


def _logprobs(done):
    named = [{f"token_id:{id}": value for id, value in with_chosen(row).items()} for row in done.rows]
    return {
        "tokens": [f"token_id:{id}" for id in done.output_ids],
        "token_logprobs": [row.chosen_logprob for row in done.rows],
        "top_logprobs": named,
        "text_offset": [0] * len(done.output_ids),
    }


def _prompt(behind, ids, k):
    found = [None]
    for row in behind.score(ids, k).rows[:-1]:
        found.append({str(id): {"logprob": value, "rank": 1} for id, value in with_chosen(row).items()})
    return found


def _refused(status, message, field):
    return Refused(status, {"error": {"message": message, "type": "BadRequestError", "param": field, "code": status}})
