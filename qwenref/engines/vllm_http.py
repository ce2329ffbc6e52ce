"""vLLM's own server: ids in, ids out, log-probabilities of the prompt and of what is generated.

Forms of vLLM 0.32, vllm/entrypoints/openai/completion/protocol.py and live answers of that version:

POST /v1/completions  prompt: [id]; max_tokens; logprobs: K; prompt_logprobs: K (-1: all, with `--max-logprobs -1`);
                      return_token_ids; return_tokens_as_token_ids; the sampling fields of `NEUTRAL`
  choices[0]          token_ids, prompt_token_ids, text, finish_reason, stop_reason (a stop id or word, else null)
    .logprobs         tokens ["token_id:N"], token_logprobs, top_logprobs [{"token_id:N": value}]
    .prompt_logprobs  [null, {"N": {logprob, rank, decoded_token}}, ...]: entry t is of id t, which may come on top of K
  usage               prompt_tokens, prompt_tokens_details.cached_tokens
POST /tokenize        {prompt, add_special_tokens} or {messages, add_generation_prompt, chat_template_kwargs} -> tokens
GET /version          version;  GET /v1/models  data[0]: id, root, max_model_len

`--logprobs-mode` decides whether values follow the temperature and penalties; those of greedy requests are of
softmax(logits) in any case.  On a CPU, version 0.32 ends at a prompt of one id ("expect x to be transposed").
"""

from qwenref.compare.errors import EngineRejected
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Completion, Prompt, Scores
from qwenref.engines.served import SAME_NAMES, Served, dense_rows, most_allowed, row_of, table, with_own

TOO_MANY = 10**8  # log-probabilities that no server gives: it says how many it does
MARK = "token_id:"
OF_REQUEST = ("add_generation_prompt", "continue_final_message", "tools")  # all else is the template's


def open(rest, **options):
    """The server at an address; options of `Served`."""
    return VLLM(rest, **options)


class VLLM(Served):
    kind = "vllm+http"
    NEUTRAL = {
        "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "seed": 0, "stop": [], "stop_token_ids": [], "ignore_eos": False,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "add_special_tokens": False,
    }  # fmt: skip
    SPELLED = SAME_NAMES
    OPTIONAL = ("spaces_between_special_tokens",)

    def probed(self):
        """A server that gives all says how many that are; another one the most it gives."""
        most = self._most()
        return Capabilities(True, True, most, most, tokenize=True, render=True, config=True)

    def _most(self):
        refused = self._refusal(TOO_MANY)
        if refused is None:
            return ALL
        most = most_allowed(refused) or 0
        if most and self._refusal(-1) is None:
            self.vocab, most = self.vocab or most, ALL
        return most

    def _refusal(self, k):
        """What the server says against k log-probabilities; None where it gives them."""
        try:
            self._ask(self.PROBE, 1, k, None)
        except EngineRejected as error:
            if error.status not in (400, 422):
                raise
            return error
        return None

    def score(self, ids, k):
        where = f"{self.name}: score"
        ids = checked.ids(ids, self.vocab, where=where)
        k = self.count(k, self.capabilities().prompt_logprobs, "score")
        choice = self._ask(ids, 1, k, None, prompt_logprobs=_spelled(k))["choices"][0]
        self.same_prompt(choice["prompt_token_ids"].ids(), ids)
        given = choice["prompt_logprobs"].items()
        if len(given) != len(ids):
            raise choice["prompt_logprobs"].wrong(f"{len(given)} entries", f"{len(ids)}, one per id of the prompt")
        rows = [self._prompt_row(field, k, id) for field, id in zip(given[1:], ids[1:], strict=True)]
        rows += self._rows_of(choice, k, 1, chosen=False)
        return Scores(ids, rows, dense_rows(rows, self.vocab) if k == ALL and self.vocab else None)

    def generate(self, prompt, n, k, sampling=None):
        ids = self.ids_of(prompt, "generate")
        k = self.count(k, self.capabilities().output_logprobs, "generate")
        answer = self._ask(prompt if ids is None else ids, n, k, sampling)
        choice = answer["choices"][0]
        read = choice["prompt_token_ids"].ids()  # as they are told: whether they are those sent is the caller's to see
        output, rows = self._output_rows(answer, k)
        finish, stopped = choice["finish_reason"].text(), choice.get("stop_reason").value
        stop_id = stopped if isinstance(stopped, int) else output[-1] if output and stopped is None else None
        details = answer["usage"].get("prompt_tokens_details")
        cached = details["cached_tokens"].whole() if "cached_tokens" in details else None
        return Completion(
            read,
            self.new_ids(output, n),
            choice["text"].text(),
            finish if finish in ("stop", "length") else "unknown",
            rows,
            stop_id if finish == "stop" else None,
            {"cached_tokens": cached, "batch": None},
        )

    def tokenize(self, text):
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._tokens(body, len(text))

    def render(self, messages, **options):
        """`Prompt` of the template's ids; the text behind them is not given."""
        body = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        body |= {name: options.pop(name) for name in OF_REQUEST if name in options}
        body["chat_template_kwargs"] = options
        return Prompt(None, self._tokens(body, 1 << 16))

    def config(self):
        card = self.client.get("/v1/models")["data"]
        card = next((item for item in card.items() if item.get("id").value == self.model), card[0])
        found = super().config()
        found["version"] = self.client.get("/version")["version"].text()
        found["model"] = {"id": self.model, "root": card.get("root").value}
        found["flags"] = {
            "max_model_len": card.get("max_model_len").value,
            "most_logprobs": self.capabilities().output_logprobs,
            "logprobs_follow_temperature": self.follows_temperature,
        }
        return found

    def _ask(self, prompt, n, k, sampling, **more):
        body = {"model": self.model, "prompt": prompt, "max_tokens": n, "n": 1, "stream": False, "echo": False}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **self.sampling(sampling), **more}
        if k:
            body["logprobs"] = _spelled(k)
        positions = n + (len(prompt) if "prompt_logprobs" in more else 0)
        limit = self.room(positions, ALL if k == -1 else min(k, 1 << 18) if k != ALL else k)
        return self.client.post("/v1/completions", body, limit=limit + 16 * len(prompt), optional=self.OPTIONAL)

    def _tokens(self, body, length):
        """What /tokenize makes of something of about so many characters."""
        return self.client.post("/tokenize", body, limit=self.room(length, 0))["tokens"].ids(self.vocab)

    def _prompt_row(self, field, k, id):
        values = []
        for name in field.object():
            if not name.isdecimal() or len(name) > 12:
                raise field.wrong(f"a name {name[:30]!r}", "token ids as names")
            values.append((int(name), field[name]["logprob"].logprob()))
        return row_of(table(values, field.place), k, self.vocab, field.place, id)

    def _output_rows(self, answer, k):
        choice = answer["choices"][0]
        output = choice["token_ids"].ids(self.vocab)
        return output, self._rows_of(choice, k, len(output)) if k else []

    def _rows_of(self, choice, k, count, chosen=True):
        """Rows of what was generated, the chosen id among them."""
        given = choice["logprobs"]
        tokens, tops, owns = (given[name].items() for name in ("tokens", "top_logprobs", "token_logprobs"))
        if not len(tokens) == len(tops) == len(owns) == count:
            raise given.wrong(f"{len(tokens)}, {len(tops)} and {len(owns)}", f"{count} of each, as many as ids")
        ids = [_id(token, token.text()) for token in tokens]
        if chosen and ids != choice["token_ids"].value:
            raise given["tokens"].wrong("other ids", "those of token_ids")
        rows = []
        for id, top, own in zip(ids, tops, owns, strict=True):
            values = table([(_id(top, name), top[name].logprob()) for name in top.object()], top.place)
            row = row_of(with_own(values, id, own), k, self.vocab, top.place, id)
            rows.append(row if chosen else row._replace(chosen=None, chosen_logprob=None))
        return rows


def _spelled(k):
    return -1 if k == ALL else k


def _id(field, name):
    number = name.removeprefix(MARK)
    if not name.startswith(MARK) or not number.isdecimal() or len(number) > 12:
        raise field.wrong(f"{name[:30]!r}", f"a token as {MARK}N")
    return int(number)
