"""The JSON of OpenAI's chat and legacy routes around any engine; strict about fields it does not know."""

from standins.engine import Behind, pairs
from standins.serving import Refused

KNOWN = {
    "model", "messages", "prompt", "max_tokens", "stream", "temperature", "top_p", "presence_penalty",
    "frequency_penalty", "seed", "logprobs", "top_logprobs",
}  # fmt: skip


def answering(engine, tokenizer, logprobs=True):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        body = request.body or {}
        if request.path == "/v1/models":
            return {"data": [{"id": "tiny", "owned_by": "someone"}]}
        unknown = sorted(set(body) - KNOWN)
        if unknown:
            error = {"message": f"Unrecognized request argument supplied: {unknown[0]}", "param": unknown[0]}
            raise Refused(400, {"error": error})
        chat = request.path == "/v1/chat/completions"
        assert chat or request.path == "/v1/completions"
        prompt = engine.render(body["messages"]).text if chat else body["prompt"]
        k = (body.get("top_logprobs", 0) if chat else body.get("logprobs", 0)) if logprobs else 0
        done = behind.generate(prompt, body["max_tokens"], k, body)
        return _chat(behind, done, k) if chat else _legacy(behind, done, k)

    return answer


def _chat(behind, done, k):
    text, ids, rows = behind.texts(done)
    given = {"content": behind.entries(ids, rows, k)} if k else None
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": done.finish, "logprobs": given}
    return {"choices": [choice], "usage": {"prompt_tokens": len(done.prompt_ids)}}


def _legacy(behind, done, k):
    text, ids, rows = behind.texts(done)
    given = {
        "tokens": [behind.spelled(id) for id in ids],
        "token_logprobs": [row.chosen_logprob for row in rows],
        "top_logprobs": [{behind.spelled(id): value for id, value in pairs(row)} for row in rows],
    }
    choice = {"text": text, "finish_reason": done.finish, "logprobs": given if k else None}
    return {"choices": [choice], "usage": {"prompt_tokens": len(done.prompt_ids)}}
