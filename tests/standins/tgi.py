"""The JSON of Text Generation Inference around any engine."""

from standins.engine import Behind, pairs
from standins.serving import Refused


def answering(engine, tokenizer, most=5):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        if request.path == "/info":
            return {"model_id": "tiny", "model_dtype": "bfloat16", "version": "3.3.6", "max_total_tokens": 1024}
        if request.path == "/tokenize":
            ids = behind.ids(request.body["inputs"])
            return [{"id": id, "text": behind.spelled(id), "start": 0, "stop": 0} for id in ids]
        assert request.path == "/generate"
        asked = request.body["parameters"]
        k = asked.get("top_n_tokens", 0)
        if k > most:
            said = f"Input validation error: `top_n_tokens` must be >= 0 and <= {most}. Given: {k}"
            raise Refused(422, {"error": said, "error_type": "validation"})
        if asked["temperature"] is not None and asked["temperature"] <= 0:
            raise Refused(422, {"error": "Input validation error: `temperature` must be strictly positive"})
        done = behind.generate(request.body["inputs"], asked["max_new_tokens"], max(k, 1), asked)
        return _generated(behind, done, k)

    return answer


def _generated(behind, done, k):
    def token(id, value):
        special = id in behind.engine.stop_ids
        return {"id": id, "text": behind.spelled(id), "logprob": value, "special": special}

    details = {
        "finish_reason": "eos_token" if done.finish == "stop" else "length",
        "generated_tokens": len(done.output_ids),
        "prefill": [{"id": id, "text": behind.spelled(id), "logprob": None} for id in done.prompt_ids],
        "tokens": [token(row.chosen, row.chosen_logprob) for row in done.rows],
        "top_tokens": [[token(*pair) for pair in pairs(row, k)] for row in done.rows],
    }
    return {"generated_text": behind.texts(done)[0], "details": details}
