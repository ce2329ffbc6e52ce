"""What prompts, answers, tokens and probabilities look like: the same facts as text and as HTML, small, escaped."""

import json
import math
import pickle
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from test_displays import checked_page, numbers

import qwenref
from qwenref.plain import ascii_form
from qwenref.sampling import Distribution

TINY = Path(qwenref.__file__).with_name("tiny")
RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
SUM = EXAMPLES[1]
HOSTILE = "<script>alert(1)</script> & \"quoted\" 'so' </pre></samp></table> \x1b[31m \x00 ⟨U+202E⟩ \u202e <!--"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 plus 1?\n\tNow."},
    {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    {"role": "user", "content": "And 3 plus 4?"},
]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A tokenizer that differs from the embedded one in regex, an added token and the normaliser."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["normalizer"] = None
    data["added_tokens"][-1]["normalized"] = not data["added_tokens"][-1]["normalized"]
    for stage in data["pre_tokenizer"]["pretokenizers"]:
        if "Regex" in (stage.get("pattern") or {}):
            stage["pattern"]["Regex"] = stage["pattern"]["Regex"].replace(r"\p{M}", "")
    path.write_text(json.dumps(data), encoding="utf-8")
    return qwenref.from_pretrained(folder)


def same_facts(shown, limit=100_000):
    """The page of a display, whose numbers are those of its text; both have an ASCII form."""
    page, text = checked_page(shown, limit), str(shown)
    assert numbers(page.text) == numbers(text), (page.text, text)
    assert ascii_form(text).count("\n") == text.count("\n")
    return page


def test_a_prompt_is_shown_by_its_spans(model):
    rendered = qwenref.render(model, TALK, enable_thinking=False)
    page = same_facts(rendered)
    lines = str(rendered).splitlines()
    assert len(lines) == 1 + len(rendered.spans) and lines[0] == repr(rendered)
    for line, span in zip(lines[1:], rendered.spans, strict=True):
        assert line.startswith(f"{span.first:,}:{span.last:,} ") and f" {span.part} " in line
    assert "messages[1]" in page.text and "1␣plus␣1?⏎⇥Now." in page.text and "1␣plus␣1?⏎⇥Now." in str(rendered)
    html = rendered._repr_html_()
    for kind, text in (("said", "Be␣brief."), ("tail", "&lt;think&gt;⏎⏎&lt;/think&gt;⏎⏎")):
        assert re.search(f'<samp class="qr-{kind}">[^<]*{re.escape(text)}</samp>', html), kind
    assert "thinking off" in page.text and '<th scope="col">' in html


def test_a_long_prompt_says_what_was_left_out(model):
    rendered = qwenref.render(model, TALK[1:3] * 60 + TALK[1:2])
    count = len(rendered.spans) - 100
    assert count > 0 and f"… {count:,} more spans: .spans" in str(rendered)
    assert f"… {count:,} more spans: .spans" in same_facts(rendered).text
    long = qwenref.render(model, [{"role": "user", "content": "<&'\"\x00" * 20_000}])
    assert " … " in str(long) and len(str(long)) < 2000
    same_facts(long, 8_000)


def test_where_two_prompts_part(model):
    a, b = (qwenref.render(model, [{"role": "user", "content": text}]) for text in ("one <b>two", "one\t<b>two"))
    found = qwenref.first_difference(a, b)
    page = same_facts(found, 6_000)
    for words in ("parts at character", "messages[0] content", "⇥", "␣", "token"):
        assert words in page.text and words in repr(found)
    letters = a.ids[:-1] + [model.tokenizer.token_id(letter) for letter in model.tokenizer.decode(a.ids[-1:])]
    equal = qwenref.first_difference(a, type(a)(a.text, letters, a._run, a.tokenizer))
    if letters != a.ids:
        assert "the texts are equal, the ids are not" in same_facts(equal).text


def test_a_tokenizer_report_and_a_comparison_are_tables(model, other):
    report = other.tokenizer.report()
    page = same_facts(report, 10_000)
    assert report.findings and all(finding in page.text and finding in str(report) for finding in report.findings)
    for name, value in report.facts():
        assert name in page.text and value in page.text and value in str(report)
    compared = qwenref.compare_tokenizers(model, other, [f"naïve{'e' * n}\u0301" for n in range(9)])
    page = same_facts(compared, 30_000)
    assert {"normaliser", "regex", "added tokens"} <= compared.differences.keys()
    assert len(compared.texts) > 5 and f"… {len(compared.texts) - 5:,} more texts: .texts" in page.text
    assert page.tags.count("details") == 5
    same_facts(compared.texts[0], 6_000)
    assert "the same rules and vocabulary" in same_facts(qwenref.compare_tokenizers(model, model)).text


def test_a_generation_sets_prompt_and_new_text_apart_with_ids_under_tokens(model):
    out = model.generate(SUM["prompt_ids"])
    page, html, text = checked_page(out, 20_000), out._repr_html_(), repr(out)
    assert "<b>1+3=4, 3+2=5\n&lt;/think&gt;\n\n54</b></pre>" in html and "▏1+3=4, 3+2=5" in text
    assert out.finish in page.text and out.finish in text and f"{out.steps} steps" in page.text
    tokens = out.tokens()
    assert [int(id) for id in re.findall(r"<rt>(\d+)</rt>", html)] == out.ids
    assert [int(id) for id in re.findall(r"<rt>(\d+)</rt>", tokens._repr_html_())] == out.ids
    lines = repr(tokens).splitlines()
    assert [int(id) for line in lines[1::2] for id in line.split()] == out.ids
    assert "".join(lines[::2]).count("▏") == 1 and max(map(len, lines)) <= 100
    for id in out.ids:
        assert model.tokenizer.token_text(id) in repr(tokens)
    above, below = next(pair for pair in zip(lines[::2], lines[1::2], strict=True) if "▏" in pair[0])
    assert below[above.index("▏") + 1 :].startswith(str(out.new_ids[0]))
    stripped = checked_page(tokens, 20_000).text  # ids stay apart from tokens
    assert stripped.split()[:2] == [model.tokenizer.token_text(out.ids[0]), f"({out.ids[0]})"]


def test_a_batch_and_a_long_generation_stay_small_and_say_what_is_missing(model):
    batch = model.generate([SUM["prompt_ids"]] * 12, max_new_tokens=40, stop=[])
    page, text = checked_page(batch, 100_000).text, repr(batch)
    assert len(text.splitlines()) <= 40 and "… 4 more rows" in text and "… 4 more rows: .rows" in page
    long = model.generate(np.resize(SUM["prompt_ids"], 1500), max_new_tokens=200, stop=[])
    page, text = checked_page(long, 100_000).text, repr(long)
    assert "characters before: .ids" in page and "before: .ids" in repr(long.tokens())
    assert f"… {len(long.new_ids) - 160:,} more new: .new_ids" in page and len(text.splitlines()) <= 40
    several = model.generate([SUM["prompt_ids"], SUM["prompt_ids"]], max_new_tokens=2)
    assert repr(several.tokens()).count("▏") == 2 and checked_page(several.tokens(), 20_000)


def test_a_generation_without_a_tokenizer_shows_ids(model):
    out = qwenref.from_config(model.config, seed=0).generate([5, 6, 7], max_new_tokens=3)
    page = checked_page(out, 20_000)
    assert all(str(id) in page.text for id in out.ids) and str(out.new_ids) in repr(out)
    assert [int(id) for id in re.findall(r"\d+", repr(out.tokens()))] == out.ids


def test_a_distribution_shows_the_likeliest_ids_and_the_rest(model):
    logits = model(SUM["prompt_ids"]).logits[0, -1]
    for sampler in (qwenref.Sampler(top_k=25), qwenref.Sampler(), qwenref.Sampler(temperature=0)):
        found = sampler.distribution(logits, SUM["prompt_ids"], mask=[7, 8])
        page = same_facts(found, 6_000)
        best = int(found.probs.argmax())
        assert f"id {best:,}" in page.text and f"{found.probs[best]:.4g}" in repr(found)
        assert f"{len(found.support):,} of {len(logits):,} ids in play · 2 rows masked" in repr(found)
        assert (f"… {len(found.support) - 10:,} more with" in repr(found)) == (len(found.support) > 10)
        assert len(repr(found).splitlines()) <= 40
    assert "3 of 3 ids" in repr(Distribution(np.full(3, 1 / 3), np.arange(3), np.array([], int), 0.0))


def test_log_probabilities_are_a_table_of_tokens(model):
    out = model.generate(SUM["prompt_ids"], return_logprobs="raw", top_logprobs=5, prompt_logprobs=True)
    found = out.logprobs
    assert found.ids.tolist() == out.new_ids and found.prompt_ids.tolist() == SUM["prompt_ids"]
    page, text = same_facts(found, 40_000), repr(found)
    assert len(text.splitlines()) <= 40 and "… 2 more likeliest of each: .top_ids, .top" in page.text
    assert f"sum {found.chosen.sum():.5g}" in text and math.isfinite(found.chosen.sum())
    for id, value in list(zip(found.ids, found.chosen, strict=True))[:20]:
        assert re.search(rf"  {id} +{re.escape(model.tokenizer.token_text(id))} +{re.escape(f'{value:.4g}')}\b", text)
    first = len(found.prompt_ids) - 10
    assert first > 0 and f"… {first:,} more before these in the prompt: .prompt" in text
    short = model.generate(SUM["prompt_ids"][:3], max_new_tokens=1, return_logprobs="raw", prompt_logprobs=True)
    assert "–" in repr(short.logprobs) and same_facts(short.logprobs)  # nothing came before the first id
    copy = pickle.loads(pickle.dumps(found))
    assert copy.kind == "raw" and (copy.chosen == found.chosen).all() and copy.tokenizer is None and repr(copy)
    nothing = model.generate(SUM["prompt_ids"], max_new_tokens=0, return_logprobs="processed").logprobs
    assert "0 new ids" in repr(nothing) and same_facts(nothing)
    cut = model.generate(
        SUM["prompt_ids"], max_new_tokens=2, sampler=qwenref.Sampler(temperature=0), return_logprobs="processed"
    )
    assert cut.logprobs.chosen.tolist() == [0, 0] and same_facts(cut.logprobs)


def hostile_displays(model, other):
    tool = {"type": "function", "function": {"name": "<b>", "parameters": {"properties": {HOSTILE: {}}}}}
    call = {"type": "function", "function": {"name": "<b>", "arguments": {HOSTILE: HOSTILE}}}
    messages = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "content": HOSTILE},
    ]
    rendered = qwenref.render(model, messages, tools=[tool])
    again = qwenref.render(model, [{"role": "user", "content": HOSTILE + "x"}, *messages[1:]], tools=[tool])
    out = model.generate(model.tokenizer.encode(HOSTILE), max_new_tokens=8, return_logprobs="raw", prompt_logprobs=True)
    written = model.generate([5], sampler=Written(model.tokenizer.encode(HOSTILE)), max_new_tokens=40, stop=[HOSTILE])
    compared = qwenref.compare_tokenizers(model, other, {HOSTILE: HOSTILE + "e\u0301"})
    yield from (rendered, qwenref.first_difference(rendered, again), out, out.tokens(), out.logprobs)
    yield from (written, written.tokens(), compared, *compared.texts)


class Written:
    def __init__(self, ids):
        self.ids = iter(ids + [0] * 100)

    def sample(self, logits, context_ids, rng):
        return next(self.ids)


def test_hostile_texts_are_shown_and_do_nothing(model, other):
    seen = 0
    for shown in hostile_displays(model, other):
        page = checked_page(shown, 100_000)  # well-formed: no tag of the text has become one
        assert set(page.tags) <= {
            *("style", "div", "p", "b", "table", "tr", "th", "td", "samp", "details", "summary", "pre"),
            *("ruby", "rp", "rt", "em", "br"),
        }
        assert "\x00" not in page.text and "\x1b" not in page.text, type(shown)
        seen += "<script>alert(1)</script>" in page.text
    assert seen >= 4  # tokens and tables of them show it in pieces


def test_looking_is_quick_and_a_broken_part_shows_in_its_place(model):
    rendered = qwenref.render(model, TALK)
    out = model.generate(np.resize(SUM["prompt_ids"], 2000), max_new_tokens=3)
    for shown in (rendered, out, out.tokens()):
        for look in (lambda shown=shown: str(shown), shown._repr_html_):
            look()
            best = min(seconds(look) for _ in range(3))
            assert best < 0.05, type(shown)
    rendered = qwenref.render(model, TALK)
    rendered.__dict__["spans"] = None
    assert "Rendered · <error: TypeError" in str(rendered) and "&lt;error: TypeError" in rendered._repr_html_()
    out.rows[0].tokenizer = out
    assert "&lt;error: AttributeError" in out._repr_html_()


def seconds(look):
    began = time.perf_counter()
    look()
    return time.perf_counter() - began
