"""Any server with OpenAI's routes: text in, text out, log-probabilities where it honours the question.

Forms of the OpenAI API reference, chat completions and legacy completions (platform.openai.com/docs/api-reference):

POST /v1/chat/completions  messages, max_tokens, temperature, top_p, presence_penalty, frequency_penalty, seed, stop,
                           logprobs: true, top_logprobs: K (20 at most)
  choices[0]               message.content, finish_reason ("stop", "length", ...)
    .logprobs.content      [{token, bytes, logprob, top_logprobs: [{token, bytes, logprob}]}]
POST /v1/completions       prompt, the same fields; logprobs: K (5 at most in OpenAI's own)
  choices[0].logprobs      tokens, token_logprobs, top_logprobs [{token: value}]; or content, as in chat
  usage                    prompt_tokens, prompt_tokens_details.cached_tokens

route="chat" sends a text as what a user says, so the server's template goes around it; route="completions" sends it as
it is.  Fields beyond OpenAI's (top_k, min_p, repetition_penalty) are sent, and left out where they are refused.
"""

from qwenref.engines.fields import Field
from qwenref.engines.texts import Said, TextServed, messages_of, text_of
from qwenref.errors import InputError, compose

ROUTES = ("chat", "completions")


def open(rest, **options):
    """The server at an address; options of `Served`, and `route`: "chat" or "completions"."""
    return OpenAI(rest, **options)


class OpenAI(TextServed):
    kind = "openai+http"
    NEUTRAL = {
        "temperature": 0, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "seed": 0, "top_k": -1, "min_p": 0,
        "repetition_penalty": 1,
    }  # fmt: skip
    SPELLED = {name: name for name in NEUTRAL}
    OPTIONAL = ("top_k", "min_p", "repetition_penalty", "seed")

    def __init__(self, address, *, route="chat", **options):
        if route not in ROUTES:
            raise InputError(compose("openai+http: route", found=repr(route), expected=" or ".join(ROUTES)))
        super().__init__(address, **options)
        self.route, self.messages = route, route == "chat"

    def say(self, prompt, n, k, sampling):
        fields = {"model": self.model, "max_tokens": n, "stream": False, **self.sampling(sampling)}
        if self.route == "chat":
            fields["messages"] = messages_of(prompt)
            fields |= {"logprobs": True, "top_logprobs": k} if k else {}
            answer = self._post("/v1/chat/completions", fields, n, k)
            choice = answer["choices"][0]
            text = choice["message"].get("content")
            entries = _entries(choice.get("logprobs"))
        else:
            fields["prompt"] = text_of(prompt, self.name)
            fields |= {"logprobs": k} if k else {}
            answer = self._post("/v1/completions", fields, n, k)
            choice = answer["choices"][0]
            text, entries = choice["text"], _entries(choice.get("logprobs"))
        finish = choice["finish_reason"].text()
        usage = answer.get("usage")
        cached = usage.get("prompt_tokens_details").get("cached_tokens")
        return Said(
            "" if text.value is None else text.text(),
            entries,
            finish if finish in ("stop", "length") else "unknown",
            usage["prompt_tokens"].whole() if self.route == "completions" and "prompt_tokens" in usage else None,
            None if cached.value is None else cached.whole(),
        )

    def config(self):
        card = next((i for i in self.client.get("/v1/models")["data"].items() if i.get("id").value == self.model), None)
        found = super().config()
        found["flags"] = {"route": self.route, "logprobs_follow_temperature": self.follows_temperature}
        if card is not None:
            found["backend"] = card.get("owned_by").value
        return found

    def _post(self, path, fields, n, k):
        return self.client.post(path, fields, limit=self.room(n, k), optional=self.OPTIONAL)


def _entries(given):
    """Entries as chat has them; None where there are none.  llama.cpp's server has them on both routes."""
    if "content" in given:
        return given["content"].items()
    return _legacy(given) if "tokens" in given and "token_logprobs" in given else None


def _legacy(given):
    """Entries as chat has them, of the older form's three lists."""
    tokens, values = given["tokens"].items(), given["token_logprobs"].items()
    tops = (
        given["top_logprobs"].items()
        if "top_logprobs" in given
        else [Field({}, given.where, given.asked)] * len(tokens)
    )
    if not len(tokens) == len(values) == len(tops):
        raise given.wrong(f"{len(tokens)} tokens, {len(values)} values, {len(tops)} lists", "as many of each")
    return [
        Field(
            {
                "token": token.text(),
                "logprob": value.value,
                "top_logprobs": [{"token": name, "logprob": top[name].value} for name in top.object()],
            },
            token.where,
            given.asked,
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]
