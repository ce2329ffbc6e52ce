"""The JSON of LM Studio's responses route around any engine."""

from standins.engine import Behind


def answering(engine, tokenizer, logprobs=True):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        body = request.body or {}
        if request.path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if request.path == "/api/v0/models":
            card = {"id": "tiny", "arch": "qwen35", "compatibility_type": "gguf", "quantization": "F32"}
            return {"data": [{**card, "state": "loaded", "max_context_length": 4096, "loaded_context_length": 1024}]}
        assert request.path == "/v1/responses"
        k = body.get("top_logprobs", 0)
        done = behind.generate(engine.render(body["input"]).text, body["max_output_tokens"], k, body)
        text, ids, rows = behind.texts(done)
        part = {"type": "output_text", "text": text, "logprobs": behind.entries(ids, rows, k) if k and logprobs else []}
        found = {"output": [{"type": "reasoning", "summary": []}, {"type": "message", "content": [part]}]}
        found["status"] = "completed" if done.finish == "stop" else "incomplete"
        found["incomplete_details"] = None if done.finish == "stop" else {"reason": "max_output_tokens"}
        return found | {"usage": {"input_tokens": len(done.prompt_ids)}}

    return answer
