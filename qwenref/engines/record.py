"""Writing a recorded run: an engine is asked a suite, every answer is on disk before the next question."""

import json
import os
from pathlib import Path

from qwenref.compare.errors import OutputExists
from qwenref.engines import checked, run_file
from qwenref.engines.base import ALL
from qwenref.engines.run_file import Record
from qwenref.errors import compose
from qwenref.progress import Progress

K = 20  # log-probabilities a position, unless more or fewer are asked for
GREEDY = {
    "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip


def record(engine, suite, path, *, k=K, continuations=None, force=False, resume=False, progress=None):
    """Write what `engine` answers to the prompts of `suite` into a file of qwenref.run/1; the number of records.

    k              log-probabilities a position, or "all"; fewer where the engine gives fewer
    continuations  function (ids, n) -> ids: a second continuation of each prompt to be scored, such as the reference's
                   own; without it that of the engine alone
    force          write over a file; OutputExists without it
    resume         go on with a file of the same engine and suite that was interrupted
    progress       as of `generate`
    """
    path, gives = Path(path), engine.capabilities()
    header = _header(engine, suite, gives, k)
    known = _begun(path, header, force, resume)
    tell = Progress(progress, unit="prompts")
    written = _Writer(path, header, known)
    try:
        for number, item in enumerate(suite.prompts):
            tell.at(number, len(suite.prompts), "recording")
            for found in _answers(engine, item, gives, k, continuations, known):
                written.add(found)
    finally:
        tell.end()
        written.close()
    return len(known)


def _answers(engine, item, gives, k, continuations, known):
    """The Records of a prompt that there are not yet, one by one."""
    request = list(item.ids) if gives.ids_in else getattr(item, "text", None)
    if request is None:
        return  # no text has these ids, and the engine takes no others
    answer = known.get((item.id, "decode"))
    if answer is None:
        answer = _decoded(item, engine.generate(request, item.new, _most(k, gives.output_logprobs)), gives)
        yield answer
    if not gives.prompt_logprobs or not gives.ids_in:
        return
    ways = {item.id: answer.output_ids or []}
    if continuations is not None:
        other = list(map(int, continuations(list(item.ids), item.new)))
        if other != answer.output_ids:
            ways[f"{item.id}/other"] = other
    for name, output in ways.items():
        if (name, "prefill") not in known:
            scores = engine.score(list(item.ids) + output, _most(k, gives.prompt_logprobs))
            rows = scores.rows[:-1] if scores.rows[-1] is None else scores.rows
            yield Record(name, "prefill", list(item.ids), output, rows=list(rows), first=1)


def _decoded(item, done, gives):
    """The Record of a Completion: ids as the engine gave them, the prompt's where it takes them."""
    prompt = done.prompt_ids if done.prompt_ids is not None else list(item.ids) if gives.ids_in else None
    rows = None
    if prompt is not None and done.output_ids is not None and any(row is not None for row in done.rows or ()):
        rows = (list(done.rows) + [None] * len(done.output_ids))[: len(done.output_ids)]
    return Record(
        item.id, "decode", prompt, done.output_ids, getattr(item, "text", None), done.text, done.finish, done.stop_id,
        rows, None if rows is None else len(prompt), done.meta,
    )  # fmt: skip


def _most(k, limit):
    if k == ALL or limit == ALL:
        return limit if k == ALL else k
    return min(k, limit)


def _header(engine, suite, gives, k):
    checked.count(k, "record")
    said = dict(engine.config()) if gives.config else {}
    model = said.pop("model", None) or {}
    header = {
        "engine": {**said, "name": said.get("name") or engine.name},
        "model": model,
        "suite": {"name": getattr(suite, "name", None), "sha256": getattr(suite, "sha256", None)},
        "sampling": GREEDY,
        "logprobs": {"kind": gives.kind, "k": _most(k, gives.output_logprobs or gives.prompt_logprobs)},
    }
    return json.loads(json.dumps(header))  # as it will be read


def _begun(path, header, force, resume):
    """{(id, path): Record} of a file to go on with, empty for a new one; a line that was cut off is taken away."""
    if force or not path.exists():
        return {}
    if not resume:
        do = "choose another path, go on with it by resume=True, or write over it by force=True"
        raise OutputExists(compose(f"{path}: there is such a file", do=do))
    run = run_file.read(path, cut_off=True)
    for name in ("engine", "suite", "logprobs"):
        ours, theirs = header[name], {key: run.header[name][key] for key in run.header[name] if key in header[name]}
        if ours != theirs:
            raise OutputExists(
                compose(f"{path}: the run of another {name}", found=theirs, expected=ours, do="choose another path")
            )
    return {(record.id, record.path): record for record in run.records}


class _Writer:
    """The file, opened with the first answer: its header says in how many bits numbers came."""

    def __init__(self, path, header, known):
        self._path, self._header, self._known, self._file = path, header, known, None

    def add(self, record):
        if self._file is None:
            self._open(record)
        self._file.write(run_file.record_line(record))
        self._file.flush()
        self._known[record.id, record.path] = record

    def _open(self, record):
        values = [number for row in record.rows or [] if row is not None for number in row.logprobs]
        dtype = checked.resolution(values) if values else "unknown"
        header = {**self._header, "logprobs": {**self._header["logprobs"], "dtype": dtype}}
        beside = self._path.with_name(self._path.name + ".new")
        self._file = beside.open("w", encoding="utf-8", newline="\n")
        self._file.write(run_file.head_line(header))
        for earlier in self._known.values():
            self._file.write(run_file.record_line(earlier))
        self._file.flush()
        os.replace(beside, self._path)  # the file that was there is whole until then

    def close(self):
        if self._file is not None:
            self._file.close()
