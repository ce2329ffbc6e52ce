"""Text Generation Inference: text in, ids out with log-probabilities of what is generated.

Forms of text-generation-inference 3.3, router/src/lib.rs and router/src/validation.rs:

POST /generate     inputs, parameters: the fields of `NEUTRAL` (null where this engine means off), max_new_tokens,
                   details, decoder_input_details, return_full_text, top_n_tokens: K (5 at most unless the server was
                   started with --max-top-n-tokens)
  answer           generated_text, details
  .details         finish_reason ("length", "eos_token", "stop_sequence"), prefill [{id, text, logprob}],
                   tokens [{id, text, logprob, special}], top_tokens [[{id, text, logprob, special}]]
POST /tokenize     inputs -> [{id, text, start, stop}]
GET /info          model_id, model_sha, model_dtype, version, max_total_tokens

`prefill` has the value of each id of the prompt and no list of others, so it serves to check what was read.
"""

from qwenref.compare.errors import EngineRejected
from qwenref.engines.base import ALL, Capabilities, Completion
from qwenref.engines.served import Served, most_allowed, row_with
from qwenref.engines.spelled import as_text

TOO_MANY = 10**8
FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def open(rest, **options):
    """The server at an address; options of `Served`."""
    return TGI(rest, **options)


class TGI(Served):
    kind = "tgi+http"
    PROBE = "Hello, how are you?"
    NEUTRAL = {
        "do_sample": False, "best_of": 1, "temperature": None, "top_k": None, "top_p": None, "typical_p": None,
        "repetition_penalty": 1.0, "frequency_penalty": None, "seed": 0, "stop": [], "truncate": None,
        "watermark": False,
    }  # fmt: skip
    SPELLED = {
        name: name for name in ("temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed")
    }

    def probed(self):
        """Ids out, as many log-probabilities as the server says it gives."""
        try:
            self._ask(self.PROBE, 1, TOO_MANY, None)
            most = ALL
        except EngineRejected as error:
            if error.status not in (400, 422):
                raise
            most = most_allowed(error) or 0
        return Capabilities(False, True, most, 0, tokenize=True, config=True)

    def generate(self, prompt, n, k, sampling=None):
        k = self.count(k, self.capabilities().output_logprobs, "generate") if k else 0
        ids, text = as_text(self, prompt, "generate")
        answer = self._ask(text, n, k, sampling)
        details = answer["details"]
        read = [item["id"].id(self.vocab) for item in details["prefill"].items()] if "prefill" in details else []
        tokens = details["tokens"].items()
        output = self.new_ids([token["id"].id(self.vocab) for token in tokens], n)
        finish = details["finish_reason"].text()
        return Completion(
            read or ids,
            output,
            answer["generated_text"].text(),
            FINISH.get(finish, "unknown"),
            self._rows(details, tokens, k) if k else [],
            output[-1] if output and finish == "eos_token" else None,
            {"cached_tokens": None, "batch": None},
        )

    def tokenize(self, text):
        answer = self.client.post("/tokenize", {"inputs": text}, limit=self.room(len(text), 0))
        return [item["id"].id(self.vocab) for item in answer.items()]

    @property
    def model(self):
        return self._model or self.client.get("/info")["model_id"].text()

    def config(self):
        info = self.client.get("/info")
        found = super().config()
        found["version"] = info["version"].text()
        found["dtype"] = info.get("model_dtype").value
        found["backend"] = info.get("model_device_type").value
        found["flags"] = {
            "max_total_tokens": info.get("max_total_tokens").value,
            "most_logprobs": self.capabilities().output_logprobs,
        }
        found["model"]["revision"] = info.get("model_sha").value
        return found

    def _ask(self, text, n, k, sampling):
        fields = self.sampling(sampling)
        fields["do_sample"] = bool(sampling and sampling.get("temperature"))
        fields["temperature"] = fields["temperature"] or None  # 0 is refused
        fields |= {"max_new_tokens": n, "details": True, "decoder_input_details": True, "return_full_text": False}
        if k:
            fields["top_n_tokens"] = k
        limit = self.room(n + len(text), min(k, 1 << 18))
        return self.client.post("/generate", {"inputs": text, "parameters": fields}, limit=limit)

    def _rows(self, details, tokens, k):
        tops = details["top_tokens"].items()
        if len(tops) != len(tokens):
            raise details["top_tokens"].wrong(f"{len(tops)} lists", f"{len(tokens)}, one per token")
        rows = []
        for token, top in zip(tokens, tops, strict=True):
            id = token["id"].id(self.vocab)
            pairs = [(item["id"].id(self.vocab), item["logprob"].logprob()) for item in top.items()]
            rows.append(row_with(pairs, token["logprob"], k, self.vocab, top.place, id))
        return rows
