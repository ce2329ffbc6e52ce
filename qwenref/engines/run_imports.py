"""Outputs that other programs saved, as recorded runs.

vLLM   `RequestOutput` as JSON, one or a list of them, or a line each: prompt_token_ids, prompt, prompt_logprobs,
       outputs[] with token_ids, text, logprobs, finish_reason, stop_reason, num_cached_tokens.  Log-probabilities are
       objects from id to a number or to {"logprob": number, ...} (vLLM 0.32, vllm/outputs.py, vllm/logprobs.py).
DiFR   {"config": {"model", "temperature"}, "samples": [{"prompt_token_ids", "outputs": [{"token_ids"}]}]}
       (https://github.com/adamkarvonen/difr, README).
"""

import json
from pathlib import Path

from qwenref.compare.errors import RecordError
from qwenref.engines import checked
from qwenref.engines.run_file import FINISHES, Record, Run, fault
from qwenref.errors import a_kind, compose


def load(path):
    """The Run of a file of vLLM's or DiFR's form; RecordError for another one."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(compose(f"{path}: cannot be read", found=error)) from error
    return imported(_documents(text, path), path)


def imported(document, where="outputs"):
    """The Run of a parsed document: a list of outputs, one of them, or a dict of config and samples."""
    config = {}
    if isinstance(document, dict) and "samples" in document:
        config, document = document.get("config") or {}, document["samples"]
    outputs = [document] if isinstance(document, dict) else document
    if not isinstance(outputs, list) or not all(
        isinstance(each, dict) and "prompt_token_ids" in each for each in outputs
    ):
        raise fault(
            f"{where}: no saved outputs", found=a_kind(document), expected="vLLM's RequestOutput, or DiFR's samples"
        )
    records = [record for number, each in enumerate(outputs) for record in _records(each, number, where)]
    return Run(_header(config, records), records)


def _documents(text, path):
    try:
        return json.loads(text)
    except ValueError as error:
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) < 2:
            raise fault(f"{path}: not JSON", 1, found=error) from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise fault(f"{path}, line {number}: not JSON", number, found=error) from None
    return found


def _header(config, records):
    widths = [len(row.ids) for record in records for row in record.rows or [] if row is not None]
    temperature = config.get("temperature")
    return {
        "engine": {"name": "saved outputs"},
        "model": {"id": config.get("model")},
        "sampling": {} if temperature is None else {"temperature": temperature},
        "logprobs": {"kind": "unknown" if temperature else "raw", "k": min(widths, default=0)},
    }


def _records(each, number, where):
    """What was scored of the prompt, where it was, and each of the outputs."""
    name = str(each.get("request_id", number))
    where = f"{where}, output {number}"
    prompt = checked.ids(each["prompt_token_ids"], where=f"{where}: prompt_token_ids")
    text, cached = each.get("prompt"), each.get("num_cached_tokens")
    common = {"prompt_ids": prompt, "prompt_text": text if isinstance(text, str) else None}
    scored = each.get("prompt_logprobs")
    if scored:
        rows = _rows(scored[1:], prompt[1:], f"{where}: prompt_logprobs")
        yield Record(name, "prefill", output_ids=[], rows=rows, first=1, **common)
    outputs = each.get("outputs")
    if not isinstance(outputs, list):
        raise fault(f"{where}: outputs", found=a_kind(outputs), expected="a list")
    for n, output in enumerate(outputs):
        if not isinstance(output, dict) or "token_ids" not in output:
            raise fault(f"{where}: outputs[{n}]", found=repr(output)[:80], expected="an object with token_ids")
        yield _decoded(output, name if n == 0 else f"{name}/{n}", common, cached, f"{where}, outputs[{n}]")


def _decoded(output, name, common, cached, where):
    ids = checked.ids(output["token_ids"], where=f"{where}: token_ids", some=False)
    given, stop, finish = output.get("logprobs"), output.get("stop_reason"), output.get("finish_reason")
    return Record(
        name,
        "decode",
        output_ids=ids,
        output_text=output.get("text"),
        finish=finish if finish in FINISHES else "unknown",
        stop_id=stop if type(stop) is int else None,
        rows=_rows(given, ids, f"{where}: logprobs") if given else None,
        first=len(common["prompt_ids"]),
        meta=None if cached is None else {"cached_tokens": cached},
        **common,
    )


def _rows(given, ids, where):
    if not isinstance(given, list) or len(given) != len(ids):
        count = len(given) if isinstance(given, list) else a_kind(given)
        raise fault(where, found=f"{count}", expected=f"{len(ids)}, one for each id")
    return [_row(table, id, f"{where}[{n}]") for n, (table, id) in enumerate(zip(given, ids, strict=True))]


def _row(table, id, where):
    if not table:
        return None
    if not isinstance(table, dict):
        raise fault(where, found=a_kind(table), expected="an object from id to log-probability")
    try:
        values = {int(key): value["logprob"] if isinstance(value, dict) else value for key, value in table.items()}
    except (KeyError, ValueError) as error:
        raise fault(where, found=repr(error), expected="ids, and a logprob of each") from None
    return checked.row_of(values, where=where, chosen=id)
