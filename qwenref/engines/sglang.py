"""SGLang's own route: ids in, ids out, log-probabilities of the prompt and of what is generated.

Forms of sglang 0.5, python/sglang/srt/managers/io_struct.py and docs/basic_usage/{sampling_params,native_api}:

POST /generate      input_ids: [id] or text; sampling_params: the fields of `NEUTRAL` and max_new_tokens;
                    return_logprob; logprob_start_len: 0 (the prompt as well) or -1; top_logprobs_num: K;
                    return_text_in_logprobs: false
  answer            text, output_ids, meta_info
  .meta_info        finish_reason {type: "stop", matched: id or word} or {type: "length"} or {type: "abort"},
                    prompt_tokens, completion_tokens, cached_tokens,
                    input_token_logprobs, output_token_logprobs  [[value, id, text or null]],
                    input_top_logprobs, output_top_logprobs      [null or [[value, id, text or null]]]
POST /tokenize      {prompt, add_special_tokens} -> tokens
GET /get_server_info  (later /server_info) the server's arguments and version;  GET /v1/models  data[0].id

Values are of the distribution after the temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set; a temperature of 0
is read as 1 with the likeliest id taken, so those of greedy requests are of softmax(logits).
"""

from qwenref.compare.errors import EngineRejected
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Completion, Scores
from qwenref.engines.served import SAME_NAMES, UNBOUNDED, Served, dense_rows, row_with

FINISH = {"stop": "stop", "length": "length", "abort": "cancelled"}
TOLD = {  # of /get_server_info: our name -> its names, the first that is there
    "dtype": ("dtype",), "quant": ("quantization",), "kv_dtype": ("kv_cache_dtype",),
    "state_dtype": ("mamba_ssm_dtype",), "tp": ("tp_size",), "backend": ("attention_backend", "device"),
    "version": ("version",),
}  # fmt: skip
FLAGS = (
    "attention_backend", "sampling_backend", "linear_attn_backend", "disable_radix_cache", "chunked_prefill_size",
    "speculative_algorithm", "enable_deterministic_inference", "disable_cuda_graph", "random_seed", "context_length",
    "skip_tokenizer_init",
)  # fmt: skip


def open(rest, **options):
    """The server at an address; options of `Served`."""
    return SGLang(rest, **options)


class SGLang(Served):
    kind = "sglang+http"
    NEUTRAL = {
        "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "sampling_seed": 0, "stop": [], "stop_token_ids": [], "ignore_eos": False,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    SPELLED = {**SAME_NAMES, "seed": "sampling_seed"}
    OPTIONAL = ("sampling_seed", "no_stop_trim", "spaces_between_special_tokens")

    def probed(self):
        most = ALL if self.vocab else UNBOUNDED
        return Capabilities(True, True, most, most, tokenize=True, config=True)

    def score(self, ids, k):
        where = f"{self.name}: score"
        ids = checked.ids(ids, self.vocab, where=where)
        k = self.count(k, self.capabilities().prompt_logprobs, "score")
        told = self._ask(ids, 1, k, None, start=0)["meta_info"]
        self.same_prompt(told["prompt_tokens"].whole(), ids)
        read, rows = self._rows(told, "input", k, len(ids))
        self.same_prompt(read, ids)
        last = self._rows(told, "output", k, 1)[1]
        rows = rows[1:] + [row._replace(chosen=None, chosen_logprob=None) for row in last]
        return Scores(ids, rows, dense_rows(rows, self.vocab) if k == ALL else None)

    def generate(self, prompt, n, k, sampling=None):
        """`Completion`; without ids in the prompt `prompt_ids` is None, since this route does not tell them."""
        k = self.count(k, self.capabilities().output_logprobs, "generate")
        ids = self.ids_of(prompt, "generate")
        answer = self._ask(prompt if ids is None else ids, n, k, sampling, start=-1)
        told = answer["meta_info"]
        if ids is not None:
            self.same_prompt(told["prompt_tokens"].whole(), ids)
        output = self.new_ids(answer["output_ids"].ids(self.vocab), n)
        rows = []
        if k:
            named, rows = self._rows(told, "output", k, len(output))
            if named != output:
                raise told["output_token_logprobs"].wrong("other ids", "those of output_ids")
        finish = told["finish_reason"]
        kind = FINISH.get(finish["type"].text(), "unknown")
        stop = finish.get("matched").value
        return Completion(
            ids,
            output,
            answer["text"].text(),
            kind,
            rows,
            stop if kind == "stop" and isinstance(stop, int) else None,
            {"cached_tokens": told["cached_tokens"].whole() if "cached_tokens" in told else None, "batch": None},
        )

    def tokenize(self, text):
        body = {"prompt": text, "add_special_tokens": False}
        return self.client.post("/tokenize", body, limit=self.room(len(text), 0))["tokens"].ids(self.vocab)

    def config(self):
        info = self._info().object()
        found = super().config()
        for name, theirs in TOLD.items():
            found[name] = next((info[each] for each in theirs if info.get(each) is not None), None)
        found["flags"] = {name: info[name] for name in FLAGS if name in info}
        found["flags"]["logprobs_follow_temperature"] = self.follows_temperature
        found["model"] = {"id": self.model, "root": info.get("model_path"), "revision": info.get("revision")}
        found["defaults"] = info.get("preferred_sampling_params") or {}
        return found

    def _info(self):
        try:
            return self.client.get("/get_server_info")
        except EngineRejected as error:
            if error.status != 404:
                raise
        return self.client.get("/server_info")  # its later name

    def _ask(self, prompt, n, k, sampling, start):
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "stream": False}
        body["sampling_params"] = {**self.sampling(sampling), "max_new_tokens": n}
        if k:
            most = self.vocab if k == ALL else k
            body |= {"return_logprob": True, "top_logprobs_num": most, "return_text_in_logprobs": False}
            body["logprob_start_len"] = start
        limit = self.room(n + (len(prompt) if start == 0 else 0), k) + 16 * len(prompt)
        return self.client.post("/generate", body, limit=limit, optional=self.OPTIONAL)

    def _rows(self, told, side, k, count):
        """(ids, rows) of the "input" or the "output"; the first row of an input is None."""
        own, tops = told[f"{side}_token_logprobs"].items(), told[f"{side}_top_logprobs"].items()
        if len(own) != count or len(tops) != count:
            raise told[f"{side}_token_logprobs"].wrong(
                f"{len(own)} values and {len(tops)} lists", f"{count} of both, one per id"
            )
        ids = [entry[1].whole(0) for entry in own]
        rows = []
        for t, (id, entry, top) in enumerate(zip(ids, own, tops, strict=True)):
            if t == 0 and side == "input" and top.value is None:
                rows.append(None)
                continue
            pairs = [(pair[1].whole(0), pair[0].logprob()) for pair in top.items()]
            rows.append(row_with(pairs, entry[0], k, self.vocab, top.place, id))
        return ids, rows
