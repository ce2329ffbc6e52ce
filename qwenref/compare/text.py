"""A report as text: what was compared, a row per check, the first divergence, the cause, and how to do it again."""

import shlex

from qwenref.compare.wording import CAUSES, CONFIDENCES, TIERS, verdict
from qwenref.plain import aligned
from qwenref.text_display import harmless, shortened

MOST = 12  # findings, blind spots and differences shown
CHECKS = ("check", "value", "gate", "verdict", "")


def number(value):
    """A figure as displays have it."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def text(document, width=100):
    """The whole report, a paragraph for each part that there is; lines are cut at `width`."""
    parts = [[verdict(document), *_said(document["summary"], verdict(document))], header(document)]
    for report in (document["arbiter"] or {}).get("reports", ()):
        parts.append(["", f"engine {report['engine']['name']}", *_checks(report)[1:]])
        parts += [divergence(report["first_divergence"]), conclusion(report), _findings(report)]
    if document["arbiter"] is None:
        parts += [_checks(document), divergence(document["first_divergence"]), conclusion(document)]
    parts += [_located(document["localisation"]), _findings(document), _blind(document), differences(document)]
    parts.append(_again(document))
    lines = harmless("\n".join("\n".join(part) for part in parts if part)).split("\n")
    return "\n".join(
        line if len(line) <= width or line.startswith("again") else line[: width - 1] + "…" for line in lines
    )


def _said(summary, already):
    return summary.splitlines() if summary and summary != already else []


def header(document):
    """What was compared with what, on how much."""
    reference, engine, suite, tier = (document[name] for name in ("reference", "engine", "suite", "tier"))
    dtype = f" · {reference['dtype']}" if reference.get("dtype") else ""
    own = [str(engine[key]) for key in ("version", "dtype", "quant") if engine.get(key)]
    rows = [
        ("model", reference["model"] + dtype),
        ("engine", " · ".join([engine["name"], *own])),
        ("tier", f"{tier}: {TIERS[tier]}" if tier else "–"),
        ("suite", f"{suite['name']} · {suite['prompts']:,} prompts · {suite['positions']:,} positions · "
                  f"mode {document['mode']} · {document['envelope']['J']} rounding variants"),
    ]  # fmt: skip
    return aligned(rows)


def check_rows(document):
    """(check, value, gate, verdict, detail) of every stage."""
    for stage in document["stages"]:
        figures = number(stage.get("value")), number(stage.get("gate"))
        yield (f"{stage['id']} {stage['name']}", *figures, stage["verdict"], stage.get("detail") or "")


def _checks(document):
    rows = list(check_rows(document))
    return ["", *aligned([CHECKS, *rows])] if rows else []


def divergence_rows(first):
    """(what, value) of a token where both part."""
    yield "where", f"prompt {first['prompt']}, position {first['pos']:,}"
    if first.get("context_text"):
        yield "context", shortened(first["context_text"], 0, 60)
    if first.get("context_ids"):
        yield "context ids", " ".join(map(str, first["context_ids"][-16:]))
    yield "reference", _token(first.get("ref_text"), first.get("ref_id"))
    yield "engine", _token(first.get("eng_text"), first.get("eng_id"))
    figures = f"margin {number(first.get('margin'))} · sigma {number(first.get('sigma'))} · u {number(first.get('u'))}"
    yield "class", f"{first['class']} · {figures}"


def _token(text, id):
    words = [shortened(text)] if text is not None else []
    return " ".join([*words, f"({id})" if words else str(id)] if id is not None else words) or "–"


def divergence(first):
    if first is None:
        return []
    return ["", "first divergence", *("  " + line for line in aligned(list(divergence_rows(first))))]


def cause_line(document):
    """Status, cause and confidence."""
    cause, confidence = document["cause"], document["confidence"]
    words = document["status"] if cause == "none" else f"{document['status']} · cause {cause}: {CAUSES[cause]}"
    return f"{words} · {confidence}" if confidence else words


def hypothesis_rows(document):
    """(hypothesis, class, beta, z, R2, rho, D, what was made of it), the best first."""
    for found in document["hypotheses"]:
        figures = [number(found.get(key)) for key in ("beta", "z", "r2", "rho", "D")]
        made = ["accepted"] if found["accepted"] else ["undetectable here"] if found.get("detectable") is False else []
        if found.get("lambda_nats") is not None:
            made.append(f"{found['lambda_nats']:.4g} nats gained")
        yield (found["id"], found.get("class") or "", *figures, " · ".join(made))


HYPOTHESES = ("hypothesis", "class", "beta", "z", "R2", "rho", "D", "")


def conclusion(document):
    lines = ["", cause_line(document)]
    lines += [f"  {CONFIDENCES[document['confidence']]}"] if document["confidence"] else []
    rows = list(hypothesis_rows(document))
    if rows:
        lines += ["  " + line for line in aligned([HYPOTHESES, *rows[:3]])]
        lines += [f"  … {len(rows) - 3:,} more: report.hypotheses"] if len(rows) > 3 else []
    extra = [("runner-up", document["runner_up"]), ("detection limit", document["detection_limit"])]
    return lines + [f"  {line}" for line in aligned([row for row in extra if row[1]] or [("", "")]) if line]


def located_line(found):
    """Where the activations leave the envelope."""
    first = found["first_bad"]
    if first is None:
        return "activations: every site is inside the envelope"
    where = first["site"] + (f", position {first['pos']:,}" if first.get("pos") is not None else "")
    return f"first outside at {where}: {number(first.get('ratio'))} times a rounding variant's error"


def _located(found):
    if found is None:
        return []
    return ["", located_line(found), *([found["conclusion"]] if found.get("conclusion") else [])]


def _first(items, what):
    more = len(items) - MOST
    return items[:MOST] + ([f"  … {more:,} more: report.{what}"] if more > 0 else [])


def _findings(document):
    found = [f"  {f['severity']} {f['code']}: {f['message']}" for f in document["findings"]]
    return ["", "findings", *_first(found, "findings")] if found else []


def _blind(document):
    blind = [f"  {spot}" for spot in document["blind_spots"]]
    return ["not decided by this comparison", *_first(blind, "blind_spots")] if blind else []


def differences(document):
    from qwenref.rendering import visible

    rows = [
        (visible(str(d["key"])), visible(str(d["ref"])), visible(str(d["engine"]))) for d in document["config_diff"]
    ]
    lines = ["", *_first(aligned([("setting", "reference", "engine"), *rows]), "config_diff")] if rows else []
    for diff in document["text_diffs"][:2]:
        head = f"{diff['what']} {diff.get('id') or ''}".rstrip()
        lines += ["", head, f"  reference {shortened(diff['ref'])}", f"  engine    {shortened(diff['engine'])}"]
    return lines


def command(document):
    """The command line that does it again."""
    repro = document["repro"]
    settings = [f"{name}={shlex.quote(value)}" for name, value in (repro.get("env") or {}).items()]
    return " ".join([*settings, shlex.join(repro["argv"])]) if repro["argv"] else ""


def _again(document):
    line = command(document)
    return ["", f"again: {line}"] if line else []
