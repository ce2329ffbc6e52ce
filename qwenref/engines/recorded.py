"""A recorded run as an engine: it answers what it was asked when it was recorded, and nothing else."""

from pathlib import Path

from qwenref.checks import is_whole
from qwenref.compare.errors import NotRecorded
from qwenref.engines import checked, run_file, run_imports
from qwenref.engines.base import ALL, Capabilities, Closing, Completion, Scores
from qwenref.errors import compose

KINDS = ("raw", "processed", "unknown")


def open(rest, *, name=None):
    """The run of a file: qwenref.run/1, or saved outputs of vLLM or DiFR (`run_imports`)."""
    first = _first_line(rest)
    run = run_imports.load(rest) if '"prompt_token_ids"' in first and '"schema"' not in first else run_file.read(rest)
    return Recorded(run, name or f"{run.header.get('engine', {}).get('name') or 'run'} ({Path(rest).name})")


class Recorded(Closing):
    """A `run_file.Run` as an engine."""

    asks_again = False  # a second answer would be the first one again

    def __init__(self, run, name="recorded run"):
        self.run, self.name = run, name
        self._scored = {tuple(r.ids): r for r in reversed(run.records) if r.path == "prefill" and r.rows is not None}
        self._decoded = {}
        for record in reversed(run.records):
            if record.path == "decode":
                for key in (record.prompt_ids and tuple(record.prompt_ids), record.prompt_text):
                    self._decoded[key] = record
        self._decoded.pop(None, None)

    def capabilities(self):
        decoded = [record for record in self.run.records if record.path == "decode"]
        ids_in = any(record.prompt_ids is not None for record in self.run.records)
        return Capabilities(
            ids_in=ids_in,
            ids_out=any(record.output_ids is not None for record in decoded),
            output_logprobs=self._width(decoded),
            prompt_logprobs=self._width(self._scored.values()),
            config=bool(self.run.header.get("engine")),
            kind=self._kind(),
        )

    def score(self, ids, k):
        """`Scores` of ids that were scored when the run was recorded; NotRecorded for others."""
        ids, k = checked.ids(ids, where=f"{self.name}: score"), checked.count(k, f"{self.name}: score")
        record = self._scored.get(tuple(ids))
        if record is None:
            raise self._not_recorded(f"a score of these {len(ids):,} ids", self._scored)
        rows = [None] * (record.first - 1) + [_likeliest(row, k) for row in record.rows]
        return Scores(ids, (rows + [None])[: len(ids)])

    def generate(self, prompt, n, k, sampling=None):
        """`Completion` of a prompt (ids or text) of the run, cut to `n` ids; NotRecorded for others."""
        where = f"{self.name}: generate"
        key = prompt if isinstance(prompt, str) else tuple(checked.ids(prompt, where=where))
        record = self._decoded.get(key)
        if record is None:
            raise self._not_recorded(f"an answer to this prompt of {len(prompt):,}", self._decoded)
        self._same_sampling(sampling)
        k = checked.count(k, where)
        rows = [_likeliest(row, k) for row in record.rows or []]
        output, finish = record.output_ids, record.finish
        if output is not None and len(output) > n:
            return Completion(record.prompt_ids, output[:n], None, "length", rows[:n], None, record.meta)
        if output is not None and len(output) < n and finish == "length":
            finish = "cancelled"  # more is asked for than was then: no fault of the engine's
        text = record.output_text
        return Completion(record.prompt_ids, output, text, finish, rows, record.stop_id, record.meta)

    def config(self):
        """What the header says of the engine and its model."""
        header = self.run.header
        return {**header.get("engine", {}), "model": header.get("model", {}), "recorded": True}

    def tokenize(self, text):
        raise self._not_recorded("ids of a text", ())

    def render(self, messages, **options):
        raise self._not_recorded("a rendered conversation", ())

    def activations(self, ids, sites):
        raise self._not_recorded("activations", ())

    def __repr__(self):
        return f"<engine {self.name}: {len(self.run.records)} records>"

    def _width(self, records):
        """The most log-probabilities that every position of the records has."""
        rows = [row for record in records for row in record.rows or [] if row is not None]
        if not rows:
            return 0
        vocab, least = run_file.vocab(self.run.header), min(len(row.ids) for row in rows)
        said = self.run.header.get("logprobs", {}).get("k")
        least = min(least, said) if is_whole(said) and said > 0 else least
        return ALL if vocab is not None and least == vocab else least

    def _kind(self):
        kind = self.run.header.get("logprobs", {}).get("kind")
        return kind if kind in KINDS else "unknown"

    def _same_sampling(self, sampling):
        """What a request asks for beyond greedy has to be what was recorded."""
        said = self.run.header.get("sampling", {})
        for field, value in (sampling or {}).items():
            if said.get(field) != value:
                raise NotRecorded(
                    compose(
                        f"{self.name}: an answer with {field} {value!r}", found=f"recorded with {said.get(field)!r}"
                    )
                )

    def _not_recorded(self, what, known):
        do = "record the suite that is asked: qwenref.engines.record" if known else None
        return NotRecorded(compose(f"{self.name}: {what} is not in the run", found=f"{len(known)} of them", do=do))


def _likeliest(row, k):
    return row if row is None or k == ALL else row._replace(ids=row.ids[:k], logprobs=row.logprobs[:k])


def _first_line(path):
    try:
        with Path(path).open("rb") as file:
            return file.read(4096).decode("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return ""  # reading it says what is wrong
