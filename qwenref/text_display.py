"""What prompts, answers, tokens and probabilities look like: rows of words, shown as text or as HTML.

Both forms are made of the same rows, with the same limits, so that neither says more than the other.
"""

import re
import unicodedata
from html import escape

from qwenref.html import Raw, block, table
from qwenref.plain import aligned, broken, plain

SPANS, TOKENS, STEPS, IDS = 100, 160, 20, 10  # that are shown
_PROMPT, _NEW = 1000, 4000  # characters of a generation that are shown, less where there are several rows
_WIDTH = 100


def shown_as_text(make, view, failing):
    """`make(view)`, or where that is not possible a line that says why; as the terminal can show it."""
    try:
        return plain(make(view))
    except Exception as error:
        return plain(f"{failing} · {broken(error)}")


def shown_as_html(make, view, failing):
    try:
        return block(make(view))
    except Exception as error:
        return block(f"<p>{escape(failing)} · {escape(broken(error))}</p>")


def shortened(text, front=40, back=16):
    """A text made visible, its middle left out where it is long."""
    from qwenref.rendering import visible

    if len(text) <= front + back + 4:
        return visible(text)
    return f"{visible(text[:front])} … {visible(text[len(text) - back :])}"


# Controls but newline and tab, and what turns the direction of a line: a display must not obey them.
_COMMANDS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text):
    """Text as it is, save that controls of terminals and of writing direction are named."""
    return _COMMANDS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def _headline(text):
    first, *notes = text.split("\n")
    return f"<p><b>{escape(first)}</b></p>\n" + "".join(f"<p>{escape(note)}</p>\n" for note in notes)


def _more(count, what, where):
    return f"… {count:,} more {what}: {where}" if count > 0 else ""


def _samp(text, kind=""):
    style = f' class="qr-{kind}"' if kind else ""
    return Raw(f"<samp{style}>{escape(text)}</samp>")


# ---- prompts ---------------------------------------------------------------------------------------------------------


def rendered_headline(rendered):
    thinking = {True: "thinking on", False: "thinking off", None: "no thinking switch"}[rendered.enable_thinking]
    head = f"Rendered · {len(rendered.text):,} characters · {len(rendered.ids):,} ids · {thinking}"
    return f"{head} · ends in {shortened(rendered.text[-40:])}"


def _span_rows(rendered):
    """(ids, message, part, text) of the spans that are shown."""
    for span in rendered.spans[:SPANS]:
        where = "" if span.message is None else f"messages[{span.message}]"
        text = shortened(rendered.text[span.start : span.stop])
        yield f"{span.first:,}:{span.last:,}", where, shortened(span.part, 60), text


def rendered_text(rendered):
    rows = [*_span_rows(rendered)]
    more = _more(len(rendered.spans) - SPANS, "spans", ".spans")
    return "\n".join(filter(None, [rendered_headline(rendered), *(aligned(rows) if rows else []), more]))


def rendered_html(rendered):
    kinds = {"frame": "frame", "template": "frame", "tail": "tail"}
    rows = [(*row[:3], _samp(row[3], kinds.get(row[2], "said"))) for row in _span_rows(rendered)]
    more = _more(len(rendered.spans) - SPANS, "spans", ".spans")
    spans = table(("ids", "message", "part", "text"), rows) if rows else ""
    return _headline(rendered_headline(rendered)) + spans + (f"<p>{more}</p>" if more else "")


def _difference_rows(found):
    """(which, text, token, span) of the two sides."""
    for label, text, token, span in (
        ("a", found.a, found.a_token, found.a_span),
        ("b", found.b, found.b_token, found.b_span),
    ):
        where = "" if span is None or span.message is None else f"messages[{span.message}] "
        yield (
            label,
            "" if found.char is None else text or "⟨end⟩",
            "" if token is None else f"token {token[0]} {shortened(token[1])}",
            "" if span is None else where + shortened(span.part, 60),
        )


def _difference_headline(found):
    if found.char is None:
        return f"the texts are equal, the ids are not, from token {found.token:,} on"
    head = f"parts at character {found.char:,}, line {found.line:,}, column {found.column:,}"
    return head if found.token is None else f"{head}; token {found.token:,}"


def _common(found):
    return f"…{found.common}" if found.char > len(found.common) else found.common


def difference_text(found):
    lines = [_difference_headline(found)]
    if found.char is not None:
        lines.append(f"  both  {_common(found)}".rstrip())
    for label, *said in _difference_rows(found):
        lines.append(f"  {label}     " + "   ".join(filter(None, said)))
    return "\n".join(lines)


def difference_html(found):
    rows = [] if found.char is None else [("both", _samp(_common(found)), "", "")]
    rows += [(label, _samp(text, "said"), token, span) for label, text, token, span in _difference_rows(found)]
    return _headline(_difference_headline(found)) + table(("", "text", "token", "from"), rows)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def report_text(report):
    path, *rows = report.facts()
    lines = [f"{path[0]}  {path[1]}", *(f"{name:<12}{value}" for name, value in rows)]
    return "\n".join(lines + [f"! {finding}" for finding in report.findings])


def report_html(report):
    (name, path), *rows = report.facts()
    found = "".join(f"<p><b>!</b> {escape(finding)}</p>" for finding in report.findings)
    return _headline(f"{name}  {path}") + table((), rows) + found


_TEXTS = 5  # of a comparison


def _comparison_end(compared):
    if compared.same:
        return f"the same rules and vocabulary; {compared.tried} texts give the same ids"
    return f"{len(compared.texts)} of {compared.tried} texts tried get other ids"


def comparison_text(compared):
    lines = [f"a  {compared.a}", f"b  {compared.b}"]
    width = max(map(len, compared.differences), default=0)
    lines += [
        f"{what:<{width}}  " + text.replace("\n", "\n  " + " " * width) for what, text in compared.differences.items()
    ]
    more = _more(len(compared.texts) - _TEXTS, "texts", ".texts")
    return "\n".join(
        filter(None, [*lines, _comparison_end(compared), *map(parting_text, compared.texts[:_TEXTS]), more])
    )


def comparison_html(compared):
    body = table((), [("a", compared.a), ("b", compared.b)])
    rows = [(what, _samp(text)) for what, text in compared.differences.items()]
    body += (table((), rows) if rows else "") + f"<p><b>{escape(_comparison_end(compared))}</b></p>\n"
    for parting in compared.texts[:_TEXTS]:
        sides = _sides_table(parting)
        body += f"<details><summary>{escape(_parting_headline(parting))}</summary>{sides}</details>\n"
    more = _more(len(compared.texts) - _TEXTS, "texts", ".texts")
    return body + (f"<p>{more}</p>" if more else "")


def _parting_headline(parting):
    return f"{shortened(parting.name)}: parts at token {parting.at:,}, {len(parting.a):,} and {len(parting.b):,} ids"


def _sides(parting):
    begin = max(0, parting.at - 2)
    for label, tokens, ids in (("a", parting.a_tokens, parting.a), ("b", parting.b_tokens, parting.b)):
        shown = "·".join(token if len(token) <= 40 else f"{token[:40]}…" for token in tokens[begin : parting.at + 6])
        yield label, "… " * (begin > 0) + shown, ids[parting.at : parting.at + 6]


def parting_text(parting):
    return "\n".join(
        [_parting_headline(parting), *(f"  {label}  {tokens}   {ids}" for label, tokens, ids in _sides(parting))]
    )


def parting_html(parting):
    return _headline(_parting_headline(parting)) + _sides_table(parting)


def _sides_table(parting):
    return table((), [(label, _samp(tokens, "said"), str(ids)) for label, tokens, ids in _sides(parting)])


# ---- generations -----------------------------------------------------------------------------------------------------


class Tokens:
    """The tokens of a generation with their ids under them; `▏` stands before the first new one."""

    def __init__(self, rows):
        self._rows = rows

    def __repr__(self):
        return shown_as_text(lambda rows: "\n\n".join(map(_tokens_text, rows)), self._rows, "Tokens")

    def _repr_html_(self):
        return shown_as_html(
            lambda rows: "".join(f"<p>{_tokens_html(row)}</p>\n" for row in rows), self._rows, "Tokens"
        )


def _token_cells(row, limit=TOKENS):
    """(what was left out, [(token, id, whether it is new)]): the last of the prompt and the first of the new ones."""
    new = row.new_ids[:limit]
    prompt = row.prompt_ids[len(row.prompt_ids) - min(len(row.prompt_ids), max(limit - len(new), limit // 4)) :]
    cells = [(_token(row.tokenizer, id), id, False) for id in prompt] + [
        (_token(row.tokenizer, id), id, True) for id in new
    ]
    before, after = len(row.prompt_ids) - len(prompt), len(row.new_ids) - len(new)
    return f"… {before:,} before: .ids" if before else "", cells, _more(after, "new", ".new_ids")


def _token(tokenizer, id):
    if tokenizer is None:
        return ""
    text = tokenizer.token_text(int(id))
    return text if len(text) <= 24 else f"{text[:23]}…"


def _tokens_text(row):
    before, cells, after = _token_cells(row)
    lines, above, below, begun = [before] if before else [], "", "", False
    for token, id, new in cells:
        first, begun = new and not begun, begun or new
        token, number = "▏" * first + token, " " * first + str(id)
        width = max(_columns(token), len(number))
        if above and _columns(above) + width + 1 > _WIDTH:
            lines += [above.rstrip(), below.rstrip()]
            above = below = ""
        above += token + " " * (width - _columns(token) + 1)
        below += number.ljust(width + 1)
    return "\n".join(filter(None, [*lines, above.rstrip(), below.rstrip(), after]))


def _columns(text):
    """How many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def _tokens_html(row):
    before, cells, after = _token_cells(row)
    shown = [
        f"<ruby>{'<b>' * new}{escape(token)}{'</b>' * new}<rp> (</rp><rt>{id}</rt><rp>) </rp></ruby>"
        for token, id, new in cells
    ]
    first = next((at for at, cell in enumerate(cells) if cell[2]), len(shown))
    shown[first:first] = ["▏"] * (first < len(shown))
    return "\n".join(filter(None, [escape(before), *shown, escape(after)]))


def generation_html(generation, single):
    rows = generation.rows[:8]
    head = "" if single else f"{len(generation.rows):,} rows · "
    body = _headline(f"Generation · {head}{generation.steps:,} step{'s' * (generation.steps != 1)}")
    body += "\n".join(row_html(row, len(rows)) for row in rows)
    more = _more(len(generation.rows) - len(rows), "rows", ".rows")
    return body + (f"<p>{more}</p>" if more else "")


def row_html(row, several=1):
    """Prompt and new text, and the tokens folded."""
    head, tokens = escape(harmless(row.headline())).replace("\n", "<br>"), _tokens_html_folded(row, several)
    if row.text is None:
        return f"<p>{head}</p>\n{tokens}"
    prompt, cut = row.tokenizer.decode(row.prompt_ids), _PROMPT // several
    before = f"<em>… {len(prompt) - cut:,} characters before: .ids</em>\n" if len(prompt) > cut else ""
    limit = _NEW // several
    after = f"\n<em>{_more(len(row.text) - limit, 'characters', '.text')}</em>" if len(row.text) > limit else ""
    new = escape(harmless(row.text[:limit]))
    return f"<p>{head}</p>\n<pre>{before}{escape(harmless(prompt[-cut:]))}<b>{new}</b>{after}</pre>\n{tokens}"


def _tokens_html_folded(row, several):
    if several > 1:
        return ""
    return f"<details><summary>ids under tokens</summary><p>{_tokens_html(row)}</p></details>\n"


# ---- probabilities ---------------------------------------------------------------------------------------------------


def _distribution_parts(found):
    """(headline, rows, what was left out) of a distribution: the likeliest ids."""
    from qwenref.logprobs import top

    ids, values = top(found.probs, min(IDS, len(found.support)))
    head = f"Distribution · {len(found.support):,} of {len(found.probs):,} ids in play"
    if len(found.masked):
        head += f" · {len(found.masked):,} rows masked, {found.masked_mass:.2g} of the probability"
    rows = [(f"id {id:,}", f"{value:.4g}") for id, value in zip(ids, values, strict=True)]
    rest = len(found.support) - len(ids)
    left = 1 - values.sum()
    return head, rows, f"… {rest:,} more with {max(left, 0):.2g} together: .support, .probs" if rest else ""


def distribution_text(found):
    head, rows, more = _distribution_parts(found)
    return "\n".join(filter(None, [head, *("  " + line for line in aligned(rows)), more]))


def distribution_html(found):
    head, rows, more = _distribution_parts(found)
    return _headline(head) + table((), rows) + (f"<p>{more}</p>" if more else "")


def _logprob_parts(found):
    """(headline, heads, rows, notes): the last of the prompt and the first new ids."""
    k = found.top_ids.shape[1]
    head = f"Logprobs · {found.kind} · {len(found.chosen):,} new ids, sum {found.chosen.sum():.5g}"
    head += f" · the {k:,} likeliest of each" if k else ""
    rows, notes = [], []
    if found.prompt is not None:
        scored = found.prompt[1:]
        head += f" · prompt of {len(found.prompt):,} ids, sum {scored.sum():.5g}"
        first = max(0, len(found.prompt) - STEPS // 2)
        for at in range(first, len(found.prompt)):
            rows.append(
                _logprob_row(
                    found, "prompt", at, found.prompt_ids, found.prompt, found.prompt_top_ids, found.prompt_top
                )
            )
        notes += [f"… {first:,} more before these in the prompt: .prompt"] if first else []
    for at in range(min(STEPS, len(found.chosen))):
        rows.append(_logprob_row(found, "new", at, found.ids, found.chosen, found.top_ids, found.top))
    notes += filter(None, [_more(len(found.chosen) - STEPS, "new", ".chosen")])
    notes += filter(None, [_more(k - 3, "likeliest of each", ".top_ids, .top")])
    return head, ("", "at", "id", "token", "log p", "likeliest"), rows, notes


def _logprob_row(found, what, at, ids, values, top_ids, top):
    def named(id):
        return f"{id}{found.tokenizer and ' ' + _token(found.tokenizer, id) or ''}"

    best = [f"{named(id)} {value:.4g}" for id, value in zip(top_ids[at][:3], top[at][:3], strict=True) if id >= 0]
    value = "–" if values[at] != values[at] else f"{values[at]:.4g}"
    return what, f"{at:,}", str(ids[at]), _token(found.tokenizer, ids[at]), value, " · ".join(best)


def logprobs_text(found):
    head, heads, rows, notes = _logprob_parts(found)
    lines = aligned([heads, *rows]) if rows else []
    return "\n".join([head, *("  " + line for line in lines), *notes])


def logprobs_html(found):
    head, heads, rows, notes = _logprob_parts(found)
    body = table(heads, rows) if rows else ""
    return _headline(head) + body + "".join(f"<p>{escape(note)}</p>" for note in notes)
