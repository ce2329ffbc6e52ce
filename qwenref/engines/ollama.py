"""Ollama: text in, text out with log-probabilities of what is generated, tokens as text and bytes.

Forms of Ollama 0.13, api/types.go and docs/api.md:

POST /api/generate  model, prompt, raw: true, stream: false, logprobs: true, top_logprobs: K (20 at most),
                    truncate: false, shift: false, options: the fields of `NEUTRAL`, num_predict, num_ctx
  answer            response, done_reason ("stop", "length"), prompt_eval_count, eval_count
  .logprobs         [{token, bytes, logprob, top_logprobs: [{token, bytes, logprob}]}]
POST /api/chat      messages, _debug_render_only: true -> _debug_info.rendered_template
POST /api/show      model -> details {format, family, parameter_size, quantization_level}, template, parameters,
                    model_info;  GET /api/version  version;  GET /v1/models  data[0].id

Where `bytes` is left out and the text is cut inside of a character, the token has no id here, and no row.
"""

from qwenref.engines.base import Prompt
from qwenref.engines.model_files import sha256
from qwenref.engines.texts import Said, TextServed, text_of


def open(rest, **options):
    """The server at an address; options of `Served`, and `context`: ids the engine is to have room for."""
    return Ollama(rest, **options)


class Ollama(TextServed):
    kind = "ollama+http"
    NEUTRAL = {
        "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "repeat_penalty": 1, "repeat_last_n": 0,
        "presence_penalty": 0, "frequency_penalty": 0, "seed": 0, "stop": [], "num_keep": 0,
    }  # fmt: skip
    SPELLED = {
        "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
        "repetition_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
    }  # fmt: skip

    def __init__(self, address, *, context=8192, **options):
        super().__init__(address, **options)
        self._context = context

    def probed(self):
        return super().probed()._replace(render=True)

    def say(self, prompt, n, k, sampling):
        body = {"model": self.model, "prompt": text_of(prompt, self.name), "raw": True, "stream": False}
        body |= {"truncate": False, "shift": False}
        body["options"] = {**self.sampling(sampling), "num_predict": n, "num_ctx": self._context}
        if k:
            body |= {"logprobs": True, "top_logprobs": k}
        answer = self.client.post("/api/generate", body, limit=self.room(n, k))
        finish = answer.get("done_reason").value
        count = answer.get("prompt_eval_count")
        return Said(
            answer["response"].text(),
            answer["logprobs"].items() if "logprobs" in answer else None,
            finish if finish in ("stop", "length") else "unknown",
            None if count.value is None else count.whole(),
        )

    def render(self, messages, **options):
        """`Prompt` of the text alone, by Ollama's own template; `enable_thinking` is its `think`."""
        body = {"model": self.model, "messages": messages, "stream": False, "_debug_render_only": True}
        if "enable_thinking" in options:
            body["think"] = options["enable_thinking"]
        if "tools" in options:
            body["tools"] = options["tools"]
        return Prompt(self.client.post("/api/chat", body)["_debug_info"]["rendered_template"].text(), None)

    def config(self):
        shown = self.client.post("/api/show", {"model": self.model}, limit=1 << 26)
        details = shown.get("details")
        found = super().config()
        found.update(
            version=self.client.get("/api/version")["version"].text(),
            backend=details.get("format").value,
            quant=details.get("quantization_level").value,
            defaults={"parameters": shown.get("parameters").value},
            flags={"num_ctx": self._context, "logprobs_follow_temperature": self.follows_temperature},
        )
        found["model"] |= {
            "family": details.get("family").value,
            "template_sha256": sha256(shown.get("template").value),
        }
        return found
