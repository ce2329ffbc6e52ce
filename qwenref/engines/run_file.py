"""Recorded runs as files: JSON lines of schema qwenref.run/1, a header and then what an engine answered.

    {"schema": "qwenref.run/1", "engine": {...}, "model": {...}, "suite": {"name", "sha256"}, "sampling": {...},
     "logprobs": {"kind": "raw" | "processed" | "unknown", "dtype": "f32" | "bf16" | ..., "k": 20}}
    {"id": "p03", "path": "decode", "prompt_ids": [...], "output_ids": [...], "prompt_text": null, "output_text": null,
     "finish": "stop", "stop_id": 248046, "top": [{"pos": 17, "ids": [...], "logprobs": [...], "chosen": 123,
     "chosen_logprob": -0.1}, ...], "meta": {"cached_tokens": 0}}

`path` is "decode" for what was generated and "prefill" for ids that were scored.  `pos` counts in prompt and output
together: the entry is of the id at that place, which is `chosen`; behind the last id it is null.  Entries follow one
another without a gap; one whose `ids` are empty stands where the engine gave nothing; null among `logprobs` is minus
infinity.  `top` null: no log-probabilities.  Without ids a run is one of text alone.
"""

import json
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qwenref.checks import is_whole
from qwenref.compare.errors import BadLogprobs, BadTokenIds, RecordAlignment, RecordError
from qwenref.engines import checked
from qwenref.engines.fields import Twice, named_once
from qwenref.errors import QwenrefWarning, a_kind, compose, frames_of_the_package

SCHEMA = "qwenref.run/1"
PATHS = ("prefill", "decode")
FINISHES = ("stop", "length", "cancelled", "unknown")

_HEAD = ("schema", "engine", "model", "suite", "sampling", "logprobs")
_ENTRY = ("pos", "ids", "logprobs", "chosen", "chosen_logprob")


class Record(NamedTuple):
    """One answer; `rows[n]` is of the id at place `first + n` of prompt and output together."""

    id: str
    path: str
    prompt_ids: list | None
    output_ids: list | None
    prompt_text: str | None = None
    output_text: str | None = None
    finish: str = "unknown"
    stop_id: int | None = None
    rows: list | None = None  # of Row or None; None where there are no log-probabilities at all
    first: int | None = None
    meta: dict | None = None

    @property
    def ids(self):
        """Prompt and output together."""
        return (self.prompt_ids or []) + (self.output_ids or [])


class Run(NamedTuple):
    """A header as it stands in the file, and Records."""

    header: dict
    records: list


# ---- writing -------------------------------------------------------------------------------------------------------


def head_line(header):
    """The first line of a file."""
    return json.dumps({"schema": SCHEMA, **header}, ensure_ascii=False) + "\n"


def record_line(record):
    """The line of a Record."""
    fields = record._asdict()
    rows, first = fields.pop("rows"), fields.pop("first")
    fields["top"] = None if rows is None else [_entry(record, place, row) for place, row in enumerate(rows, first)]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _entry(record, place, row):
    ids = record.ids
    chosen = ids[place] if place < len(ids) else None
    if row is None:
        return {"pos": place, "ids": [], "logprobs": [], "chosen": chosen, "chosen_logprob": None}
    value = None if row.chosen_logprob is None else _short(row.chosen_logprob)
    return {
        "pos": place,
        "ids": row.ids.tolist(),
        "logprobs": [_short(number) for number in row.logprobs.tolist()],
        "chosen": chosen,
        "chosen_logprob": value,
    }


def _short(number):
    """What float32 holds as it is, so that its resolution can be seen; else nine digits; null for minus infinity."""
    if number == -np.inf:
        return None
    with np.errstate(over="ignore"):
        return number if float(np.float32(number)) == number else float(f"{number:.9g}")


# ---- reading -------------------------------------------------------------------------------------------------------


def read(path, cut_off=False):
    """The Run of a file; with `cut_off`, a last line that ends in the middle is left out.

    Raises RecordError, RecordAlignment (both with `line`), BadTokenIds and BadLogprobs; warns of unknown keys.
    """
    lines = _lines(path)
    if cut_off and _ends_early(lines[-1]):
        lines.pop()
    header, records, known = None, [], set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = _parsed(line, where, number, last=number == len(lines))
        if header is None:
            header = _header(fields, where, number)
            continue
        record = as_record(fields, where, number, vocab(header))
        if (record.id, record.path) in known:
            raise fault(f"{where}: id {record.id!r} a second time with path {record.path!r}", number)
        known.add((record.id, record.path))
        records.append(record)
    if header is None:
        raise fault(f"{path}: no lines", 1, expected=f"a header of {SCHEMA}")
    return Run(header, records)


def vocab(header):
    """How many ids the engine of a header has, None where it does not say."""
    found = header.get("engine", {}).get("vocab_size")
    return found if is_whole(found) and found > 0 else None


def as_record(fields, where, line=None, vocab=None):
    """The Record of the fields of a line, every one of them checked."""
    if not isinstance(fields, dict):
        raise fault(f"{where}: {a_kind(fields)}", line, expected="an object")
    fields = dict(fields)
    top = fields.pop("top", None)
    _warn_unknown(fields, [name for name in Record._fields if name not in ("rows", "first")], where)
    given = {name: fields[name] for name in Record._fields if name in fields and name not in ("rows", "first")}
    for name, kind in (("id", str), ("prompt_text", str), ("output_text", str), ("meta", dict)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise fault(f"{where}: {name}", line, found=repr(given[name])[:80], expected=a_kind(kind()))
    if given.get("id") is None:
        raise fault(f"{where}: no id", line)
    _one_of(given, "path", PATHS, where, line)
    given["finish"] = given.get("finish") or "unknown"
    _one_of(given, "finish", FINISHES, where, line)
    for name in ("prompt_ids", "output_ids"):
        values = given.setdefault(name, None)
        if values is not None:
            given[name] = checked.ids(values, vocab, where=f"{where}: {name}", some=name == "prompt_ids")
    if given["prompt_ids"] is None and given.get("prompt_text") is None:
        raise fault(f"{where}: neither prompt_ids nor prompt_text", line)
    if given.get("stop_id") is not None:
        [given["stop_id"]] = checked.ids([given["stop_id"]], vocab, where=f"{where}: stop_id")
    record = Record(**given)
    return record if top is None else _with_rows(record, top, where, line, vocab)


def _lines(path):
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(compose(f"{path}: cannot be read", found=error)) from error
    *whole, rest = text.split("\n")
    return [line + "\n" for line in whole] + [rest]


def _ends_early(line):
    try:
        json.loads(line)
    except ValueError:
        return not line.endswith("\n")
    return False


def _parsed(line, where, number, last):
    try:
        return json.loads(line, object_pairs_hook=named_once)
    except Twice as error:
        raise fault(f"{where}: the name {error.args[0]!r} twice in one object", number) from None
    except (ValueError, RecursionError) as error:
        if last and not line.endswith("\n"):
            do = "record the run again, or go on with it: record(..., resume=True)"
            raise fault(
                f"{where}: the last line is cut off", number, found=f"{len(line):,} characters", do=do
            ) from None
        raise fault(f"{where}: not JSON", number, found=error) from None


def _header(fields, where, number):
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if schema != SCHEMA:
        found = f"schema {schema!r}" if schema is not None else "no schema"
        raise fault(f"{where}: no header of a recorded run", number, found=found, expected=SCHEMA)
    _warn_unknown(fields, _HEAD, where)
    for name in _HEAD[1:]:
        if not isinstance(fields.setdefault(name, {}), dict):
            raise fault(f"{where}: {name}", number, found=a_kind(fields[name]), expected="an object")
    return fields


def _with_rows(record, top, where, line, vocab):
    """`record` with the rows of its entries, whose places have to be those of its ids."""
    if not isinstance(top, list) or not all(isinstance(entry, dict) for entry in top):
        raise fault(f"{where}: top", line, found=repr(top)[:80], expected="a list of objects")
    if record.prompt_ids is None or record.output_ids is None:
        raise _misaligned(f"{where}: log-probabilities without ids", line, expected="prompt_ids and output_ids")
    start, end = len(record.prompt_ids), len(record.ids)
    places = [entry.get("pos") for entry in top]
    if not all(map(is_whole, places)):
        raise fault(f"{where}: pos", line, found=repr(places)[:80], expected="a place in each entry of top")
    fits = [(start, end)] if record.path == "decode" else [(a, b) for a in (1, start) for b in (end, end + 1)]
    if places not in [list(range(a, b)) for a, b in fits]:
        found = f"{len(places)} entries, {_span(places)}"
        raise _misaligned(
            f"{where}: places of log-probabilities",
            line,
            found=found,
            expected=" or ".join(f"{a} to {b - 1}" for a, b in fits),
        )
    rows = [_row(record, entry, f"{where}, position {entry['pos']}", line, vocab) for entry in top]
    return record._replace(rows=rows, first=places[0] if places else start)


def _row(record, entry, where, line, vocab):
    _warn_unknown(entry, _ENTRY, where)
    chosen, place, ids = entry.get("chosen"), entry["pos"], record.ids
    expected = ids[place] if place < len(ids) else None
    if chosen is not None and chosen != expected:
        raise _misaligned(f"{where}: chosen", line, found=f"{chosen!r}", expected=f"{expected}, the id at this place")
    known, numbers = entry.get("ids"), entry.get("logprobs")
    if not isinstance(known, list) or not isinstance(numbers, list):
        raise fault(f"{where}: ids and logprobs", line, expected="two lists")
    numbers = [-np.inf if number is None else number for number in numbers]
    value = entry.get("chosen_logprob")
    try:
        found = checked.row(known, numbers, vocab, where, expected, value)
    except (BadLogprobs, BadTokenIds) as error:
        error.position = place
        raise
    if expected in known and value is None:
        found = found._replace(chosen_logprob=float(found.logprobs[known.index(expected)]))
    return found if known or value is not None else None


def _span(places):
    return f"{places[0]} to {places[-1]}" if places else "none"


def _one_of(given, name, known, where, line):
    if given.get(name) not in known:
        raise fault(f"{where}: {name}", line, found=repr(given.get(name)), expected=" or ".join(known))


def _warn_unknown(fields, known, where):
    unknown = [name for name in fields if name not in known]
    if unknown:
        text = compose(f"{where}: unknown keys, which are not read", found=", ".join(map(repr, unknown)))
        warnings.warn(text, QwenrefWarning, stacklevel=frames_of_the_package())


def fault(first, line=None, **parts):
    """A RecordError with its line."""
    error = RecordError(compose(first, **parts))
    error.line = line
    return error


def _misaligned(first, line, **parts):
    error = RecordAlignment(compose(first, **parts))
    error.line = line
    return error
