"""The JSON of SGLang's own route around any engine."""

from standins.engine import Behind, pairs
from standins.serving import Refused


def answering(engine, tokenizer, knows_seed=True, info="/get_server_info"):
    behind = Behind(engine, tokenizer)

    def answer(request, handler):
        if request.path == "/v1/models":
            return {"data": [{"id": behind.name}]}
        if request.path == info:
            return {
                "model_path": behind.name, "dtype": "bfloat16", "kv_cache_dtype": "auto", "tp_size": 1,
                "attention_backend": "torch_native", "disable_radix_cache": True, "version": "0.5.23",
            }  # fmt: skip
        if request.path == "/tokenize":
            return {"tokens": behind.ids(request.body["prompt"]), "count": 0, "max_model_len": 4096}
        if request.path != "/generate":
            raise Refused(404, {"detail": "Not Found"})
        if not knows_seed and "sampling_seed" in request.body["sampling_params"]:
            raise Refused(400, {"error": {"message": "Unexpected keyword argument 'sampling_seed'"}})
        return _generated(behind, request.body)

    return answer


def _generated(behind, body):
    ids = behind.ids(body.get("input_ids") or body["text"])
    asked = body["sampling_params"]
    k = body.get("top_logprobs_num", 0)
    done = behind.generate(ids, asked["max_new_tokens"], k, {**asked, "seed": asked.get("sampling_seed")})
    reason = {"type": "stop", "matched": done.stop_id} if done.finish == "stop" else {"type": "length", "length": 1}
    told = {"id": "1", "finish_reason": reason, "prompt_tokens": len(done.prompt_ids), "cached_tokens": 0}
    told["completion_tokens"] = len(done.output_ids)
    if body.get("return_logprob"):
        told["output_token_logprobs"] = [[row.chosen_logprob, row.chosen, None] for row in done.rows]
        told["output_top_logprobs"] = [_triples(row) for row in done.rows]
        if body["logprob_start_len"] == 0:
            scores = behind.score(ids, k)
            rows = scores.rows[:-1]
            values = [None] + [row.chosen_logprob for row in rows]
            told["input_token_logprobs"] = [[v, id, None] for v, id in zip(values, scores.ids, strict=True)]
            told["input_top_logprobs"] = [None] + [_triples(row) for row in rows]
    text = behind.tokenizer.decode(done.output_ids)
    return {"text": text, "output_ids": done.output_ids, "meta_info": told}


def _triples(row):
    return [[value, id, None] for id, value in pairs(row)]
