"""A report as HTML: a page of its own, or a display in a notebook.  No script, no network; pictures are inline SVG."""

from html import escape

from qwenref.compare import html_tables, plot, plots, text
from qwenref.compare.heatmap import heatmap
from qwenref.compare.html_tables import wide
from qwenref.compare.wording import CONFIDENCES, verdict
from qwenref.html import Raw, block, styled, table
from qwenref.text_display import harmless

_SIGNS = {"green": "●", "amber": "◆", "red": "▲", "skipped": "–"}  # a shape for each verdict

RULES = (
    ".qr-report{max-width:70em;margin:0 auto;padding:.5em 1em;overflow-wrap:break-word}"
    ".qr-report h1,.qr-report h2,.qr-report h3{line-height:1.25;margin:1em 0 .3em}"
    ".qr-report h1{font-size:1.5em}.qr-report h2{font-size:1.2em}.qr-report h3{font-size:1em}"
    ".qr-report a{color:var(--qr-link);margin-right:.8em}"
    ".qr-report :focus-visible{outline:2px solid var(--qr-link);outline-offset:2px}"
    ".qr-report figcaption{color:var(--qr-quiet)}"
    ".qr-report th,.qr-report td{vertical-align:top;white-space:nowrap}"
    ".qr-report td:last-child{white-space:normal;min-width:12em}"
    ".qr-red{color:var(--qr-vision);font-weight:bold}.qr-amber{color:var(--qr-attention)}.qr-green{color:var(--qr-delta)}"
    f"{plot.STYLE}{html_tables.STYLE}"
)
_PAGE = "body{margin:0;background:#fff}@media(prefers-color-scheme:dark){body{background:#111}}"
_MOST_DISPLAYED = 200  # positions in a plot of a notebook's display


def page(report):
    """The text of a file that stands for itself."""
    sections = list(_sections(report, 1000))
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>\n' for title, _ in sections)
    body = f"<main>{_card(report, 'h1')}<nav aria-label='Sections'>{links}</nav>{_joined(sections, True)}</main>"
    title = escape(harmless(f"{report.engine['name']}: {report.status}"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title>{styled(RULES + _PAGE)}</head>"
        f'<body><div class="qr qr-report">{body}</div></body></html>\n'
    )


def display(report):
    """What a notebook shows: the verdict, and the rest folded."""
    folded = "".join(
        f"<details><summary>{escape(title)}</summary>{inner}</details>\n"
        for title, inner in _sections(report, _MOST_DISPLAYED, small=True)
    )
    return block(_card(report, "h3") + folded, "qr-report", RULES)


def _anchor(title):
    return "qr-" + "-".join(title.lower().split())


def _joined(sections, linked):
    return "".join(
        f'<section aria-labelledby="{_anchor(title)}"><h2 id="{_anchor(title)}">{escape(title)}</h2>{inner}</section>\n'
        for title, inner in sections
    )


def _card(report, heading):
    """(1) the verdict, and the path of the decision."""
    document = report.document
    summary = document["summary"] if document["summary"] != verdict(document) else ""
    said = [text.cause_line(document), CONFIDENCES.get(document["confidence"], ""), summary]
    paragraphs = "".join(f"<p>{escape(harmless(line))}</p>" for line in said if line)
    steps = "".join(f"<li>{escape(harmless(step))}</li>" for step in document["decision_path"])
    path = f"<details open><summary>how it was decided</summary><ol>{steps}</ol></details>" if steps else ""
    return f"<{heading}>{escape(harmless(verdict(document)))}</{heading}>{paragraphs}{path}"


def _sections(report, most, small=False):
    """(title, HTML) of every part there is something for."""
    document = report.document
    for title, inner in (
        ("Compared", _compared(document)),
        ("Engines", _engines(report, most, small)),
        ("Checks", _checks(document)),
        (
            "First divergence",
            _pairs(text.divergence_rows(document["first_divergence"] or {}), document["first_divergence"]),
        ),
        ("Texts", html_tables.strips(document, *((1, 100) if small else ()))),
        ("Margins", plots.margin(report, most)),
        ("Divergence", plots.divergence(report, most)),
        ("Error by prompt", plots.ratios(report)),
        ("Hypotheses", _hypotheses(report)),
        ("Layers", _layers(report, small)),
        ("Error by position", "".join(filter(None, (plots.period(report, n) for n in (64, 128))))),
        ("Distribution of errors", plots.quantiles(report)),
        ("Sampling", plots.transform(report)),
        ("Settings", html_tables.config_differences(document)),
        ("Prompts and tokens", html_tables.text_differences(document, *((2,) if small else ()))),
        ("Findings", _findings(document)),
        ("Tokens that differ", html_tables.flips(document, *((20,) if small else ()))),
        ("All figures", _figures(document)),
        ("Again", _again(document)),
    ):
        if inner:
            yield title, inner


def _pairs(rows, wanted=True):
    return table((), [(name, html_tables.samp(value)) for name, value in rows]) if wanted else ""


def _compared(document):
    return _pairs(line.split(None, 1) for line in text.header(document))


def _engines(report, most, small):
    if report.arbiter is None:
        return ""
    return "".join(_side(side, most, small) for side in report.sides)


def _side(side, most, small):
    """One of two engines: its cause, its checks, and on a page its pictures."""
    first = side.first_divergence
    parts = [
        f"<h3>{escape(harmless(side.engine['name']))}</h3><p>{escape(text.cause_line(side.document))}</p>",
        f"<p>{escape(harmless(side.summary))}</p>{_checks(side.document)}",
        _pairs(text.divergence_rows(first or {}), first),
        _findings({**side.document, "blind_spots": []}),  # those of both stand together
    ]
    if not small:
        parts += [plots.margin(side, most), plots.divergence(side, most), plots.ratios(side)]
    return "".join(filter(None, parts))


def _checks(document):
    rows = []
    for check, value, gate, found, detail in text.check_rows(document):
        rows.append(
            (check, value, gate, Raw(f'<span class="qr-{found}">{_SIGNS[found]} {found}</span>'), harmless(detail))
        )
    return wide(table(text.CHECKS, rows), "checks") if rows else ""


def _hypotheses(report):
    rows = list(text.hypothesis_rows(report.document))
    family = [f"family {row['family']}" if row.get("family") else None for row in report.hypotheses]
    what = [
        " · ".join(filter(None, (row.get("what"), kin))) for row, kin in zip(report.hypotheses, family, strict=True)
    ]
    listed = [(*row, words) for row, words in zip(rows, what, strict=True)]
    said = [("runner-up", report.runner_up), ("detection limit", report.detection_limit)]
    parts = [
        plots.hypotheses(report) or "",
        _pairs([(name, value) for name, value in said if value], any(v for _, v in said)),
    ]
    if listed:
        parts.append(wide(table((*text.HYPOTHESES, "what"), listed), "hypotheses"))
    return "".join(parts)


def _layers(report, small):
    found = report.localisation
    if found is None:
        return ""
    parts = [f"<p>{escape(text.located_line(found))}</p>", heatmap(report, 128 if small else 256) or ""]
    if found.get("conclusion"):
        parts.append(f"<p>{escape(found['conclusion'])}</p>")
    keys = ("site", "layer", "ratio", "bad_share")
    if not small:
        rows = [[row["site"], *(text.number(row.get(key)) for key in keys[1:])] for row in found["sites"]]
        inner = wide(table(("site", "layer", "error to a variant's", "share outside"), rows), "sites")
        parts.append(f"<details><summary>{len(rows):,} sites</summary>{inner}</details>")
    if found.get("splice"):
        rows = [
            [str(row["layer"]), text.number(row.get("to_truth")), text.number(row.get("to_engine"))]
            for row in found["splice"]
        ]
        parts.append(
            wide(table(("spliced before layer", "logits to the truth", "logits to the engine"), rows), "splice")
        )
    return "".join(parts)


def _findings(document):
    parts = []
    for found in document["findings"]:
        words = escape(harmless(f"{found['severity']} {found['code']}: {found['message']}"))
        evidence = html_tables.everything(found.get("evidence"), found["code"]) if found.get("evidence") else ""
        parts.append(f"<li>{words}{evidence}</li>")
    blind = "".join(f"<li>{escape(harmless(spot))}</li>" for spot in document["blind_spots"])
    found = f"<ul>{''.join(parts)}</ul>" if parts else ""
    return found + (f"<h3>Not decided by this comparison</h3><ul>{blind}</ul>" if blind else "")


def _figures(document):
    shown = ("created", "tool_version", "status", "exit_code", "mode", "reference", "engine", "suite", "envelope")
    told = {name: document[name] for name in (*shown, "stats", "localisation", "per_position_file")}
    told["localisation"] = {key: (document["localisation"] or {}).get(key) for key in ("gate", "matrix_file")}
    return html_tables.everything(told, "all figures")


def _again(document):
    line = text.command(document)
    return f"<pre><code>{escape(harmless(line))}</code></pre>" if line else ""
