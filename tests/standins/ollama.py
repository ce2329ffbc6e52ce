"""The JSON of Ollama around any engine: tokens as text and bytes."""

from standins.engine import Behind
from standins.serving import Refused


def answering(engine, tokenizer, with_bytes=True):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        body = request.body or {}
        if request.path == "/v1/models":
            return {"data": [{"id": "tiny:latest"}]}
        if request.path == "/api/version":
            return {"version": "0.13.5"}
        if request.path == "/api/show":
            details = {"format": "gguf", "family": "qwen35", "quantization_level": "F32"}
            return {"details": details, "template": "{{ .Prompt }}", "parameters": "temperature 1"}
        if request.path == "/api/chat":
            options = {"enable_thinking": body["think"]} if "think" in body else {}
            return {"_debug_info": {"rendered_template": engine.render(body["messages"], **options).text}}
        assert request.path == "/api/generate" and body["raw"] and not body["stream"]
        if body.get("top_logprobs", 0) > 20:
            raise Refused(400, {"error": "top_logprobs must be between 0 and 20"})
        return _generated(behind, body, with_bytes)

    return answer


def _generated(behind, body, with_bytes):
    asked = body["options"]
    k = body.get("top_logprobs", 0)
    done = behind.generate(
        body["prompt"], asked["num_predict"], max(k, 1), {**asked, "repetition_penalty": asked["repeat_penalty"]}
    )
    text, ids, rows = behind.texts(done)
    found = {"model": body["model"], "response": text, "done": True, "done_reason": done.finish}
    found |= {"prompt_eval_count": len(done.prompt_ids), "eval_count": len(done.output_ids)}
    if body.get("logprobs"):
        found["logprobs"] = behind.entries(ids, rows, k)
        if not with_bytes:
            for entry in found["logprobs"]:
                for each in (entry, *entry["top_logprobs"]):
                    del each["bytes"]
    return found
