"""A report as HTML: whole, well-formed, of one file, without script, for any width, theme, eye and keyboard."""

import re

import compare_documents
import numpy as np
import pytest
from test_displays import Page, checked_page

from qwenref.compare import plots, text
from qwenref.compare.heatmap import heatmap
from qwenref.compare.html import RULES, page
from qwenref.compare.html_tables import leaves
from qwenref.compare.report import ARRAYS, Report
from qwenref.html import DARK, LIGHT


class Whole(Page):
    VOID = Page.VOID | {"meta"}

    def handle_decl(self, decl):
        assert decl == "doctype html"

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def report():
    return compare_documents.report()


@pytest.fixture(scope="module")
def source(report):
    return page(report)


@pytest.fixture(scope="module")
def whole(source):
    return Whole(source)


def test_the_page_is_one_file_that_loads_and_runs_nothing(source, whole):
    assert not re.search(r"<script|<link|<iframe|<object|@import|@font-face|url\(|srcset", source)
    for name, value in whole.attributes:
        assert not name.startswith("on") and name != "src"
        if name.endswith("href"):
            assert value.startswith(("#", "data:image/png;base64,"))
    words = " ".join(value or "" for name, value in whole.attributes if name != "title")
    assert "http" not in words.replace("vllm+http://host:8000", "")
    assert source.count("<style>") == 1 and len(source.encode()) < 2e6


def test_the_page_has_one_heading_that_answers_and_one_for_each_part(source, whole):
    assert whole.tags.count("h1") == 1 and "<h1>engine vllm+http://host:8000 is outside the" in source
    titles = re.findall(r"<h2 id=\"([\w-]+)\">", source)
    assert len(titles) == len(set(titles)) >= 16
    assert re.findall(r'<a href="#([\w-]+)">', source) == titles == re.findall(r'aria-labelledby="([\w-]+)"', source)
    assert '<html lang="en">' in source and whole.tags.count("main") == whole.tags.count("nav") == 1


def test_every_picture_says_what_it_shows_and_every_table_what_its_columns_are(source):
    pictures = re.findall(r"<svg[^>]*>(?:<title>([^<]*)</title>)?", source)
    assert len(pictures) == 9 == source.count('role="img"') and all(pictures)
    assert source.count("<figcaption>") == 9
    assert all('<th scope="row">' in found for found in re.findall(r"<table>.*?</table>", source, re.S))
    assert all(
        'aria-label="' in found and 'tabindex="0"' in found
        for found in re.findall(r'<div class="qr-wide"[^>]*', source)
    )


def test_nothing_is_of_a_fixed_width(source):
    assert 'name="viewport" content="width=device-width,initial-scale=1"' in source
    assert not re.search(r"<svg[^>]* (?:width|height)=", source)
    own = re.sub("(?:max|min)-width", "", RULES)
    assert re.findall(r"width:([^;}]+)", own) == ["100%", "1.2", "1.5", "2"]  # of pictures; the others are strokes


def test_classes_and_verdicts_are_told_apart_by_more_than_colour(source):
    shown = re.findall(r'<span class="qr-(green|amber|red|skipped)">(.) (\w+)</span>', source)
    assert len({sign for _, sign, _ in shown}) == 4 and all(kind == word for kind, _, word in shown)
    marks = {kind: plots_mark(kind) for kind in ("tie", "benign", "ambiguous", "non-benign")}
    assert len({(tag, kind == "tie") for kind, tag in marks.items()}) == 4
    for kind in ("ambiguous", "non-benign"):
        assert re.search(rf"\.qr-{kind}>samp\+samp{{border-top:4px (double|dotted)", RULES)


def plots_mark(kind):
    from qwenref.compare.plot import marked

    return re.match(r"<(\w+)", marked(0, 0, kind, kind))[1]


def test_colours_come_from_the_theme_alone():
    assert not re.search(r"#[0-9a-f]{3,6}\b", RULES)
    assert set(re.findall(r"--qr-([\w-]+)", RULES)) <= set(LIGHT) == set(DARK)
    assert "focus-visible" in RULES


# ---- every field ---------------------------------------------------------------------------------------------------


def as_number(word):
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def test_every_value_of_the_document_is_on_the_page(report, whole):
    shown = re.sub(r"\s+", " ", whole.text)

    def there(value):
        from qwenref.rendering import visible

        if isinstance(value, (int, float)):
            return any(form in shown for form in (text.number(value), f"{value:.9g}", str(value)))
        lines = [visible(line) for line in value.splitlines(keepends=True)]  # as differences have them
        return re.sub(r"\s+", " ", value) in shown or visible(value) in shown or all(line in shown for line in lines)

    hidden = {"schema", "confidence"}
    for name, value in report.document.items():
        for path, leaf in leaves({name: value}):
            raw = as_number(leaf)
            if name not in hidden and not path.endswith((".accepted", ".detectable", ".D")) and not there(raw):
                assert all(there(part) for part in str(raw).split(", ")), f"{path}: {raw!r} is nowhere"


@pytest.mark.parametrize("name", [name for name in ARRAYS if name not in ("prompt", "pos")])
def test_every_array_changes_the_page(name, report, source):
    given = dict(report.arrays)
    changed = given[name].astype(float)
    given[name] = changed * 0.5 + 0.01 if name != "flip" else np.where(given[name] == 4, 3, given[name])
    assert page(Report(report.document, given)) != source


# ---- pictures ------------------------------------------------------------------------------------------------------


def test_a_report_without_arrays_or_findings_has_no_empty_part():
    clean = Report(compare_documents.clean())
    source = page(clean)
    assert (
        "<svg" not in source
        and "<h2" in source
        and not re.search(r"<section[^>]*><h2[^>]*>[^<]*</h2></section>", source)
    )
    assert "First divergence" not in source


def test_pictures_say_what_is_to_be_seen(report):
    n = 12
    arrays = {
        "margin": np.full(n, 2.0), "sigma": np.full(n, 0.1), "flip": np.zeros(n, int), "kl": np.full(n, 1e-3),
        "kl_jitter_min": np.zeros(n), "kl_jitter_max": np.full(n, 2e-3), "R_prompt": [1.0, 2.5],
        "error_mod64": np.ones(64), "qq": np.linspace(-2, 7, n), "pit": np.full(400, 0.01),
        "layer_error": np.ones((2, n)),
    }  # fmt: skip
    arrays["margin"][3], arrays["flip"][3], arrays["kl"][5], arrays["error_mod64"][7] = 0.05, 4, 0.5, 9.0
    made = Report(report.document, arrays)
    assert "<title>11 of 12 positions have a margin above 4 sigma; other choices: 1 non-benign</title>" in plots.margin(
        made
    )
    assert "0.5 nats at position 5; 1 of 12 above every rounding variant" in plots.divergence(made)
    assert "largest R 2.5, prompt 1; 1 of 2 prompts above 2" in plots.ratios(made)
    assert "largest at 7 of 64: 9 times the median" in plots.period(made, 64)
    assert "largest error 7 sigmas" in plots.quantiles(made)
    assert "20 of 20 bars outside" in plots.transform(made)
    assert "first outside: layers.3.self_attn.gate at position 9" in heatmap(made)
    assert 'class="x"' in heatmap(made)
    assert "gate-silu explains 98.2 % of the error; accepted" in plots.hypotheses(made)


def test_odd_numbers_break_no_picture(report):
    odd = np.array([np.nan, np.inf, 0.0, 1e-300, -1.0, 1.0])
    given = {name: np.stack([odd, odd]) if name == "layer_error" else odd for name in ARRAYS if name != "flip"}
    given["flip"] = np.array([0, 1, 2, 3, 4, 0])
    source = page(Report(report.document, given))
    assert not re.search(r'="[^"]*\b(?:nan|inf)\b', source)
    none = page(Report(report.document, {name: np.zeros((0, 0) if name == "layer_error" else 0) for name in ARRAYS}))
    assert none.count("<svg") == 1  # hypotheses need no array


def test_many_positions_are_drawn_as_few_and_the_caption_says_so(report):
    made = Report(report.document, compare_documents.arrays(n=32768))
    source = page(made)
    assert len(source.encode()) < 2e6 and "Each point stands for 33 positions" in source
    assert source.count('class="non-benign"') < 900


# ---- in a notebook -------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_verdict_with_the_rest_folded(report):
    class Shown:
        def _repr_html_(self):
            return report._repr_html_().replace("http://", "")  # the engine's own address is no link

    shown = checked_page(Shown(), 100_000)
    assert "is outside the reference's envelope" in shown.text and shown.tags.count("details") > 10
    assert shown.tags.count("h1") == 0


def test_words_of_an_engine_are_never_markup():
    nasty = '<img src=x onerror=alert(1)>"&'
    made = compare_documents.document(
        summary=nasty, blind_spots=[nasty], decision_path=[nasty], detection_limit=nasty, runner_up=nasty,
        engine={"name": nasty, "version": nasty},
        findings=[{"code": nasty, "severity": "info", "message": nasty, "evidence": {nasty: nasty}}],
        config_diff=[{"key": nasty, "ref": nasty, "engine": nasty}],
        text_diffs=[{"what": "tokenizer", "id": nasty, "ref": nasty, "engine": nasty + "x", "note": nasty}],
        repro={"argv": [nasty], "env": {nasty: nasty}},
    )  # fmt: skip
    made["strips"][0].update(prompt=nasty, engine=[nasty] * 3, reference=[nasty] * 3, context_text=nasty)
    made["hypotheses"][0].update(id=nasty, what=nasty)
    made["localisation"]["sites"][0]["site"] = made["localisation"]["conclusion"] = nasty
    made["stages"][0].update(name=nasty, detail=nasty, value=nasty)
    made["first_divergence"]["context_text"] = nasty
    source = page(Report(made, compare_documents.arrays()))
    assert "<img" not in source and Whole(source).tags.count("h1") == 1


def test_two_engines_are_on_one_page_each_with_its_checks():
    sides = [compare_documents.clean(engine={"name": "left"}), compare_documents.document(engine={"name": "right"})]
    arrays = {f"2.{name}": array for name, array in compare_documents.arrays().items()}
    made = Report(compare_documents.document(arbiter={"outside": ["right"], "reports": sides}), arrays)
    source = page(made)
    left, right = source.split("<h3>right</h3>")
    assert "<svg" not in left and right.partition("<h2")[0].count("<svg") == 3
    assert Whole(source).tags.count("h1") == 1 and "<h1>engine right is outside the reference" in source
    assert (
        "<h3>left</h3>" in source and "<h3>right</h3>" in source and source.count("▲ red") == 2
    )  # one of them its own


# ---- the real thing ------------------------------------------------------------------------------------------------


def test_figures_of_a_comparison_fit_the_document_and_the_page():
    import jsonschema

    import qwenref
    from qwenref.compare.document import schema
    from qwenref.compare.faulty import FaultyReference
    from qwenref.compare.gather import gather
    from qwenref.compare.numbers import Numbers
    from qwenref.compare.statistics import measure
    from qwenref.compare.suites import Suite, suite

    model = qwenref.from_pretrained("tiny")
    asked = [item._replace(new=16) for item in suite("quick", model).prompts if item.kind == "code"]
    seen = gather(model, FaultyReference(model, "gate-off", jitter=3), Suite("one", tuple(asked)))
    found = measure(Numbers(model, seen.trajectories, [(seed,) for seed in range(4)]).table("prefill"), path="P")
    fields = {
        "engine": {"name": seen.name}, "reference": {"model": "tiny"}, "stages": found.stages, "stats": found.stats,
        "flips": found.flips, "findings": seen.findings, "config_diff": seen.differing_config,
    }  # fmt: skip
    made = Report(fields, found.arrays)
    jsonschema.validate(made.to_dict(), schema())
    source = page(made)
    Whole(source)
    for title in ("Margins", "Divergence", "Error by prompt", "Distribution of errors", "Tokens that differ"):
        assert f">{title}</h2>" in source
    told = re.search(r"PR error against rounding +([\d.]+) +([\d.]+) +red", made.text(200))
    assert told and float(told[1]) > float(told[2]) >= 1.5  # no gate is narrower, whatever the variants are
