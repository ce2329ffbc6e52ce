"""llama.cpp's server: ids in, ids out, log-probabilities of what is generated; those of a prompt by one-token requests.

Forms of tools/server/README.md and live answers of a build of October 2026:

POST /completion     prompt: [id]; n_predict; n_probs: K; return_tokens; cache_prompt; post_sampling_probs; logit_bias
                     [[id, value]]; the sampling fields of `NEUTRAL`
  answer             content, tokens [id], tokens_evaluated, truncated, stop_type ("eos", "limit", "word", "none"),
                     timings.cache_n
  .completion_probabilities  [{id, token, bytes, logprob, top_logprobs: [{id, token, bytes, logprob}]}]
POST /tokenize       {content, add_special, parse_special} -> tokens;  POST /apply-template  {messages, ...} -> prompt
GET /props           default_generation_settings {params, n_ctx}, model_path, model_ftype, build_info, chat_template,
                     eos_token, total_slots;  GET /v1/models  data[0].meta.n_vocab

Values are of softmax(logits) whatever is drawn, so a bias that forces the next id of a prompt has the server name that
id's own value.  A token that ends inside a character has no entry: entries are aligned by id, never by index, and such
a position is asked for once more with a plain letter forced.
"""

import functools

from qwenref.compare.errors import EngineContractViolation
from qwenref.engines import checked
from qwenref.engines.base import ALL, Capabilities, Completion, Prompt, Scores
from qwenref.engines.model_files import sha256
from qwenref.engines.served import SAME_NAMES, UNBOUNDED, Served, dense_rows, row_with
from qwenref.engines.stepping import lacks

FORCED = 1000.0  # added to the logit of the id that is to come next
FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


def open(rest, **options):
    """The server at an address; options of `Served`."""
    return LlamaServer(rest, **options)


class LlamaServer(Served):
    kind = "llama+http"
    NEUTRAL = {
        "temperature": 0, "dynatemp_range": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "top_n_sigma": -1,
        "repeat_penalty": 1, "repeat_last_n": 0, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0,
        "xtc_probability": 0, "mirostat": 0, "adaptive_target": -1, "seed": 0, "stop": [], "ignore_eos": False,
        "n_keep": -1,
    }  # fmt: skip
    SPELLED = {**SAME_NAMES, "repetition_penalty": "repeat_penalty"}

    def probed(self):
        """Every log-probability, of a prompt too; the vocabulary is asked for."""
        meta = self.client.get("/v1/models")["data"][0].get("meta")
        if self.vocab is None and "n_vocab" in meta:
            self.vocab = meta["n_vocab"].whole(1)
        most = ALL if self.vocab else UNBOUNDED
        return Capabilities(True, True, most, most, tokenize=True, render=True, config=True)

    def score(self, ids, k):
        """`Scores` by a request for each id: its cost grows with the square of the length."""
        k = self.count(k, self.capabilities().prompt_logprobs, "score")
        ids = checked.ids(ids, self.vocab, where=f"{self.name}: score")
        rows = [self._row_behind(ids[: t + 1], k, following) for t, following in enumerate([*ids[1:], None])]
        return Scores(ids, rows, dense_rows(rows, self.vocab) if k == ALL else None)

    def generate(self, prompt, n, k, sampling=None):
        """`Completion`; a row is None where the server gives none, inside of a character."""
        k = self.count(k, self.capabilities().output_logprobs, "generate")
        ids = self.tokenize(prompt) if isinstance(prompt, str) else self.ids_of(prompt, "generate")
        answer = self._ask(ids, n, k, self.sampling(sampling))
        output = self.new_ids(answer["tokens"].ids(self.vocab), n)
        finish = FINISH.get(answer["stop_type"].text(), "unknown")
        cached = answer.get("timings").get("cache_n")
        return Completion(
            ids,
            output,
            answer["content"].text(),
            finish,
            self._rows(answer, output, k) if k else [],
            output[-1] if output and answer["stop_type"].value == "eos" else None,
            {"cached_tokens": None if cached.value is None else cached.whole(), "batch": None},
        )

    def tokenize(self, text):
        body = {"content": text, "add_special": False, "parse_special": True, "with_pieces": False}
        return self.client.post("/tokenize", body, limit=self.room(len(text), 0))["tokens"].ids(self.vocab)

    def render(self, messages, **options):
        """`Prompt` by the server's template; `tools` go to it, all else as variables of the template.

        The server goes on with a conversation that ends with the assistant's words, whatever it is told: without
        continue_final_message=True that is refused here.
        """
        continued = options.pop("continue_final_message", False)
        if messages and messages[-1].get("role") == "assistant" and not continued:
            raise lacks(self.name, "rendering of a conversation that ends with the assistant's message")
        body = {"messages": messages, "add_generation_prompt": options.pop("add_generation_prompt", not continued)}
        if continued:
            body["continue_final_message"] = True
        if "tools" in options:
            body["tools"] = options.pop("tools")
        text = self.client.post("/apply-template", body | {"chat_template_kwargs": options})["prompt"].text()
        return Prompt(text, self.tokenize(text))

    def config(self):
        props = self.client.get("/props")
        defaults = props["default_generation_settings"]
        found = super().config()
        found.update(
            version=props.get("build_info").value,
            backend="llama.cpp",
            quant=props.get("model_ftype").value,
            defaults=defaults.get("params").value or {},
            flags={"n_ctx": defaults.get("n_ctx").value, "slots": props.get("total_slots").value},
            vocab_size=self.vocab if self.capabilities() else None,
        )
        found["model"] = {
            "id": self.model,
            "template_sha256": sha256(props.get("chat_template").value),
            "eos_token": props.get("eos_token").value,
        }
        return found

    def _ask(self, ids, n, k, fields):
        body = {"prompt": ids, "n_predict": n, "stream": False, "cache_prompt": False, "return_tokens": True, **fields}
        # Only these steps run, in this order: a server may be started with others.
        body["samplers"] = ["penalties", "top_k", "top_p", "min_p", "temperature"]
        if k:
            body |= {"n_probs": self.vocab if k == ALL else k, "post_sampling_probs": False}
        answer = self.client.post("/completion", body, limit=self.room(n, k) + 16 * len(ids))
        if answer.get("truncated").value:
            raise EngineContractViolation(f"{self.name}: cut the prompt to its context")
        if "tokens_evaluated" in answer:
            self.same_prompt(answer["tokens_evaluated"].whole(), ids)
        return answer

    def _row_behind(self, ids, k, following):
        row = self._forced(ids, k, following) if following is not None else None
        if row is None:
            row = self._forced(ids, k, self._letter)
        if row is None:
            return None
        value = row.chosen_logprob if row.chosen == following else None
        if value is None and following in row.ids:
            value = float(row.logprobs[row.ids == following][0])
        return row._replace(chosen=following, chosen_logprob=value)

    def _forced(self, ids, k, id):
        """The row behind `ids`, `id` being drawn; None where the server gives none."""
        answer = self._ask(ids, 1, k, self.NEUTRAL | {"logit_bias": [[id, FORCED]]})
        output = self.new_ids(answer["tokens"].ids(self.vocab), 1)
        return self._rows(answer, output, k)[0] if output else None

    @functools.cached_property
    def _letter(self):
        """An id that is a character of its own."""
        return self.tokenize("a")[0]

    def _rows(self, answer, output, k):
        """A row for each id, None where no entry has that id in its turn."""
        entries = answer["completion_probabilities"].items() if "completion_probabilities" in answer else []
        rows, at = [], 0
        for id in output:
            if at < len(entries) and entries[at]["id"].whole() == id:
                rows.append(self._row(entries[at], k, id))
                at += 1
            else:
                rows.append(None)
        if at < len(entries):
            raise answer["completion_probabilities"].wrong(
                f"an entry of id {entries[at]['id'].whole():,}", "entries in the order of the tokens"
            )
        return rows

    def _row(self, entry, k, id):
        top = entry["top_logprobs"]
        pairs = [(item["id"].whole(), item["logprob"].logprob()) for item in top.items()]
        return row_with(pairs, entry["logprob"], k, self.vocab, top.place, id)
