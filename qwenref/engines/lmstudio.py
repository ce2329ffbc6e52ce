"""LM Studio's server: text in, text out; log-probabilities of the responses route, which are often left out.

Forms of LM Studio's developer documentation (lmstudio.ai/docs/developer: OpenAI compatibility, REST API v0) and
https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1420:

POST /v1/responses   model, input, temperature, top_p, max_output_tokens, top_logprobs: K,
                     include: ["message.output_text.logprobs"]
  .output            [{type: "message", content: [{type: "output_text", text, logprobs: [{token, bytes, logprob,
                     top_logprobs: [{token, bytes, logprob}]}]}]}]
  .status            "completed", or "incomplete" with incomplete_details.reason "max_output_tokens"
  .usage             input_tokens, input_tokens_details.cached_tokens
GET /api/v0/models   data: id, arch, compatibility_type, quantization, state, max_context_length, loaded_context_length

What is sent goes through the model's chat template.
"""

from qwenref.engines.texts import Said, TextServed, messages_of


def open(rest, **options):
    """The server at an address; options of `Served`."""
    return LMStudio(rest, **options)


class LMStudio(TextServed):
    kind = "lmstudio+http"
    messages = True
    NEUTRAL = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repeat_penalty": 1, "seed": 0}
    SPELLED = {
        "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
        "repetition_penalty": "repeat_penalty",
    }  # fmt: skip
    OPTIONAL = ("top_k", "min_p", "repeat_penalty", "seed")

    def say(self, prompt, n, k, sampling):
        body = {"model": self.model, "input": messages_of(prompt), "stream": False, "max_output_tokens": n}
        body |= self.sampling(sampling)
        if k:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": k}
        answer = self.client.post("/v1/responses", body, limit=self.room(n, k), optional=self.OPTIONAL)
        parts = [
            part
            for item in answer["output"].items()
            if item["type"].text() == "message"
            for part in item["content"].items()
            if part["type"].text() == "output_text"
        ]
        entries = [entry for part in parts if "logprobs" in part for entry in part["logprobs"].items()]
        cut = answer.get("incomplete_details").get("reason").value == "max_output_tokens"
        status = answer["status"].text()
        cached = answer.get("usage").get("input_tokens_details").get("cached_tokens")
        return Said(
            "".join(part["text"].text() for part in parts),
            entries or None,
            "length" if cut else "stop" if status == "completed" else "unknown",
            cached=None if cached.value is None else cached.whole(),
        )

    def config(self):
        found = super().config()
        for card in self.client.get("/api/v0/models")["data"].items():
            if card.get("id").value == self.model:
                found["backend"] = card.get("compatibility_type").value
                found["quant"] = card.get("quantization").value
                lengths = ("max_context_length", "loaded_context_length")
                found["flags"] = {name: card.get(name).value for name in lengths}
                found["model"]["arch"] = card.get("arch").value
        return found
