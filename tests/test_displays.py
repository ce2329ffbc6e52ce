"""What a person sees: text and HTML of trees, arrays, captures and caches, at several widths and without Unicode."""

import copy
import re
import sys
import time
import types
from html.parser import HTMLParser

import numpy as np
import pytest
from test_sizes import ROOT_27B
from text_configs import CONFIGS

import qwenref
from qwenref import html

WIDTHS = (60, 100, 200)


@pytest.fixture(scope="module")
def large():
    return qwenref.from_config(ROOT_27B, device="meta")


@pytest.fixture(scope="module")
def aperiodic():
    return qwenref.from_config(CONFIGS["aperiodic layers"], seed=0)


class Page(HTMLParser):
    """Text of an HTML display without style and paths, its tags, and whether they nest."""

    VOID = {"img", "br", "path", "polyline", "use"}

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self.open and "code" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def numbers(text):
    return sorted(re.findall(r"\d[\d,.]*", text))


def checked_page(shown, limit):
    """The page of a display, which is well-formed, loads nothing, runs nothing and is small."""
    text = shown._repr_html_()
    page = Page(text)
    assert not re.search(r"<script|https?:|@import|url\(", text)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")
                if not str(dict(page.attributes)[name]).startswith("data:image/png;base64,")]  # fmt: skip
    assert text.count("<style>") == 1 and len(text.encode()) <= limit
    selectors = re.findall(r"([^{}]+)\{", text.split("</style>")[0].replace("<style>", ""))
    assert all("qr" in selector or selector.startswith("@media") for selector in selectors)
    return page


# ---- the tree -----------------------------------------------------------------------------------------------------


TINY = """
ForConditionalGeneration                                                   2.63 M    5.25 MB
├ model: Model                                                             2.46 M    4.93 MB
│ ├ visual: VisionModel                  2 blocks, width 64              297.02 k  594.05 kB
│ └ language_model: TextModel            8 layers, width 128               2.17 M    4.33 MB
│   ├ embed_tokens: Embedding            1,280 x 128                     163.84 k  327.68 kB
│   ├ layers: ModuleList                 6 DeltaNet + 2 attention          2.00 M    4.00 MB
│   │ ├ 0-2, 4-6: DecoderLayer           x 6 · Gated DeltaNet              1.44 M    2.89 MB
│   │ │ ├ linear_attn: GatedDeltaNet     2 key / 6 value heads x 32       92.97 k  186.02 kB each
│   │ │ ├ mlp: MLP                       128 -> 384 -> 128               147.46 k  294.91 kB each
│   │ │ ├ input_layernorm: RMSNorm       128, 1 + w                           128      256 B each
│   │ │ └ post_attention_layernorm: RMSNorm 128, 1 + w                        128      256 B each
│   │ └ 3, 7: DecoderLayer               x 2 · attention                 557.82 k    1.12 MB
│   │   ├ self_attn: Attention           4 query / 2 kv heads x 64       131.20 k  262.40 kB each
│   │   ├ mlp: MLP                       128 -> 384 -> 128               147.46 k  294.91 kB each
│   │   ├ input_layernorm: RMSNorm       128, 1 + w                           128      256 B each
│   │   └ post_attention_layernorm: RMSNorm 128, 1 + w                        128      256 B each
│   ├ norm: RMSNorm                      128, 1 + w                           128      256 B
│   └ rotary_emb: RotaryEmbedding        theta 1e4, sections 3/3/2              –          –
└ lm_head: Linear                        128 -> 1,280                    163.84 k  327.68 kB"""


def test_the_tree_of_the_tiny_model(tiny):
    lines = tiny.tree(5).text().splitlines()
    assert lines[:3] == [
        "ForConditionalGeneration · Qwen3.5                       2,626,760 parameters · 5.25 MB bf16 + fp32",
        "mixers   6 Gated DeltaNet + 2 attention (3 + 1, repeated 2 times)",
        "cache    155.2 KiB fixed + 1 KiB per token  (4,096 tokens 4.152 MiB)",
    ]
    assert re.fullmatch(r"now      numerics fp32 · .* of 5\.25 MB resident · no hooks · no edits", lines[3])
    assert lines[4:] == TINY.split("\n")


def test_the_tree_of_the_27b_is_one_page(large):
    lines = str(large.tree()).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    assert lines[:5] == [
        "ForConditionalGeneration · Qwen3.5                       27,356,728,560 parameters · 54.71 GB bf16",
        "mixers   48 Gated DeltaNet + 16 attention (3 + 1, repeated 16 times)",
        "cache    146.8 MiB fixed + 64 KiB per token  (4,096 tokens 402.8 MiB · 32,768 tokens 2.143 GiB)",
        "now      numerics fp32 · no data (meta) · no hooks · no edits",
        "",
    ]


def test_a_tower_is_one_line_of_a_whole_model_and_says_what_is_hooked_inside(tiny):
    assert not [line for line in tiny.tree().text().splitlines() if "blocks:" in line or "merger" in line]
    inside = tiny.model.visual.tree().text()
    for line in (
        "├ patch_embed: PatchEmbed                3 channels x 2 x 16 x 16",
        "├ pos_embed: PositionTable               16 x 16 x 64",
        "│ └ 0-1: VisionBlock                     x 2 · both ways in a frame",
        "│   ├ attn: VisionAttention              4 heads x 16",
        "└ merger: PatchMerger                    2 x 2 -> 1, 128 wide",
    ):
        assert line in inside, line
    assert "merger: PatchMerger" in tiny.tree(only="visual.merger").text()
    with tiny.model.visual.blocks[1].attn.register_forward_hook(lambda *_: None):
        assert "visual: VisionModel                  2 blocks, width 64, hooked" in tiny.tree().text()


def test_layers_in_no_order_show_their_true_numbers(aperiodic):
    lines = aperiodic.tree(3).text().splitlines()
    assert lines[1] == "mixers   5 Gated DeltaNet + 3 attention (attention: 0, 3-4)"
    kinds = [line.strip("│├└ ") for line in lines if "DecoderLayer" in line]
    assert [kind.split("  ")[0] for kind in kinds] == ["0, 3-4: DecoderLayer", "1-2, 5-7: DecoderLayer"]
    assert "x 3 · attention" in kinds[0] and "x 5 · Gated DeltaNet" in kinds[1]


@pytest.mark.parametrize("model", ["tiny", "large", "aperiodic"])
@pytest.mark.parametrize("ascii", [False, True])
def test_narrow_trees_lose_columns_from_the_right_and_wrap_nothing(model, ascii, request):
    tree = request.getfixturevalue(model).tree()
    shown = {width: tree.text(width, ascii).splitlines() for width in WIDTHS}
    assert shown[100] == shown[200] and len(shown[60]) == len(shown[100])
    for width, lines in shown.items():
        assert max(map(len, lines)) <= width
    for narrow, wide in zip(shown[60], shown[100], strict=True):
        more = "..." if ascii else "…"
        assert wide.startswith(narrow.removesuffix(more).rstrip())
    assert "\n".join(shown[100]).isascii() is ascii
    if ascii:
        assert [len(line) for line in shown[100][5:]] == [len(line) for line in tree.text().splitlines()[5:]]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}])
def test_a_poor_terminal_gets_no_frames(environment):
    import fresh

    code = """
        import qwenref
        model = qwenref.from_pretrained("tiny")
        model.lm_head.register_forward_hook(print)
        print(model.tree(1))
    """
    import textwrap

    shown = fresh.python(textwrap.dedent(code), **environment).stdout
    assert shown.isascii() and "`-lm_head: Linear [1 hook]" in shown


def test_a_layer_that_differs_stands_alone_with_the_reason():
    model = qwenref.from_pretrained("tiny")
    layers = model.model.language_model.layers
    handles = [layers[1].mlp.register_forward_hook(print), layers[7].register_forward_pre_hook(print)]
    handles.append(layers[7].register_forward_hook(print))
    layers[4].float()
    text = model.tree().text()
    assert "· 3 hooks ·" in text
    names = [line.strip("│├└ ").split(":")[0] for line in text.splitlines() if "DecoderLayer" in line]
    assert names == ["0, 2, 5-6", "1", "3", "4", "7"]
    assert re.search(r" 1: DecoderLayer +Gated DeltaNet · hooked ", text)
    assert re.search(r" 7: DecoderLayer ⚓2 +attention · hooked ", text)
    assert re.search(r" 4: DecoderLayer +Gated DeltaNet · edited, fp32 ", text)
    assert re.search(r" mlp: MLP ⚓1 ", model.tree(5).text())
    for handle in handles:
        handle.remove()
    assert "no hooks" in str(model.tree()) and "⚓" not in str(model.tree())


def test_a_tied_weight_says_whose_it_is():
    model = qwenref.from_config(CONFIGS["tied embedding"], device="meta")
    assert str(model.tree()).splitlines()[-1].endswith(" = embed_tokens.weight")
    assert "= embed_tokens.weight" in Page(model._repr_html_()).text


def test_only_keeps_what_is_named_and_what_leads_there(tiny):
    lines = tiny.tree(only="layers.*.self_attn").text().splitlines()[5:]
    assert [line.strip("│├└ ").split(":")[0] for line in lines][:6] == [
        "ForConditionalGeneration                                                   2.63 M    5.25 MB",
        "model", "language_model", "layers", "3, 7", "self_attn",
    ]  # fmt: skip
    assert not any("mlp" in line or "lm_head" in line for line in lines)


def test_only_reads_patterns_as_captures_do_and_says_when_nothing_is_named(tiny):
    """One star is one part of a path; two are any number of them."""
    mlps = tiny.tree(only="**.mlp").text()
    assert "mlp: MLP" in mlps and "self_attn" not in mlps
    for only, words in (("*.mlp", r"^'\*.mlp' matches nothing"), ("layers.*.self_atn", "Near: layers.\\*.self_attn ")):
        with pytest.raises(qwenref.UnknownName, match=words):
            tiny.tree(only=only)
    for options in ({"only": 3}, {"depth": -1}, {"depth": "all"}, {"depth": True}):
        with pytest.raises(qwenref.InputError, match="^tree: "):
            tiny.tree(**options)


def test_edits_that_only_a_comparison_finds_are_not_denied():
    """A copied or drawn weight can be written to unseen, so its tree says how to find out instead of "no edits"."""
    tiny = qwenref.from_pretrained("tiny")
    drawn = qwenref.from_config(CONFIGS["tied embedding"], seed=0)
    for model in (copy.deepcopy(tiny), drawn):
        model.text_model.norm.weight[0] = 3
        assert model.edits() and model.tree().header[-1].endswith(" · edits: model.edits() compares")
        model.lm_head.weight = qwenref.Parameter(model.lm_head.weight + np.float32(1))
        assert model.tree().header[-1].endswith(" · 1 or more edits")
    assert tiny.tree().header[-1].endswith(" · no edits")


def test_rich_and_treescope_are_given_shapes_and_children(large, monkeypatch):
    """The 27B has no data here: what is shown was read from shapes.  Both viewers are played by stand-ins."""
    layer = large.text_model.layers[3]
    (_, weight), *rest = layer.self_attn.q_proj.__rich_repr__()
    assert repr(weight) == "bf16 [12288, 5120]" and not rest
    assert list(layer.__rich_repr__()) == list(layer.named_children())
    assert list(large.text_model.layers.__rich_repr__()) == list(large.text_model.layers)

    called = []
    stand_in = types.SimpleNamespace(
        render_object_constructor=lambda **given: called.append(given["attributes"]),
        render_dictionary_wrapper=lambda **given: called.append(given["wrapped_dict"]),
    )
    monkeypatch.setitem(sys.modules, "treescope", types.SimpleNamespace(repr_lib=stand_in))
    for module in (layer, large.text_model.layers, layer.self_attn.q_proj):
        module.__treescope_repr__("path", None)
    assert called[0] == dict(layer.named_children()) and called[1][63] is large.text_model.layers[63]
    assert repr(called[2]) == "{'weight': bf16 [12288, 5120]}"


def test_a_leaf_says_what_its_weight_is(large):
    model = qwenref.from_pretrained("tiny")
    layer = model.model.language_model.layers[0].linear_attn
    text = " ".join(layer.in_proj_qkv.tree().text().split())
    assert text.startswith("Linear(128 -> 320, bias=False) · weight bf16 [320, 128] model-0000")
    model([1, 2, 3])
    assert " ".join(model.lm_head.tree().text().split()).endswith("of-00002.safetensors · resident")
    assert (
        str(large.lm_head.tree())
        == "Linear(5,120 -> 248,320, bias=False) · weight bf16 [248320, 5120] · no data (meta)"
    )
    sites = "sites: mixed_qkv z b a conv_out q k v beta g delta_read delta_write state read core normed"
    assert str(layer.tree()).splitlines()[0] == sites


@pytest.mark.parametrize("model", ["tiny", "large", "aperiodic"])
def test_the_html_of_a_model_says_what_the_text_says(model, request):
    model = request.getfixturevalue(model)
    page = checked_page(model, 16_000)
    text = model.tree().text()
    assert numbers(page.text) == numbers(text)
    words = [word.replace("–", "") for word in re.split(r"\s+|·", page.text) if word]
    for word in re.split(r"[\s│├└·]+", text):
        assert word.replace("–", "") in words or word in "│├└", word  # no two cells run together
    assert page.tags.count("details") == page.tags.count("summary") > 8


def test_each_name_gives_its_full_path(tiny):
    text = tiny._repr_html_()
    for path in ("model.language_model.layers.3.self_attn", "model.language_model.layers.0.linear_attn.conv1d"):
        assert f'title="{path}"' in text and f"<code>{path}</code>" in text
    assert "user-select:all" in text


@pytest.mark.measured
def test_displays_of_the_27b_are_quick_and_read_no_weight(large):
    for show in (lambda: str(large.tree()), large._repr_html_):
        best = min(seconds_of(show) for _ in range(5))
        print(f"{best * 1e3:.1f} ms")
        assert best < 0.05


def seconds_of(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def test_looking_runs_nothing_and_a_broken_part_shows_in_its_place():
    model = qwenref.from_config(CONFIGS["aperiodic layers"], seed=0)
    model.register_forward_pre_hook(lambda *a: pytest.fail("a display ran the model"))
    model.model.norm.register_parameter("weight", None)
    del model.model.layers[1].mlp.gate_proj
    text, page = str(model.tree()), model._repr_html_()
    assert "<error: AttributeError: " in text and "&lt;error: AttributeError: " in page


# ---- colours ------------------------------------------------------------------------------------------------------


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot((0.2126, 0.7152, 0.0722), linear)


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_contrast(theme):
    """4.5 for text, 3 for bars, by the formula of WCAG."""
    colours = getattr(html, theme)
    for name, colour in colours.items():
        if name == "ground":
            continue
        bright, dark = sorted((_luminance(colour), _luminance(colours["ground"])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= (4.5 if name in ("ink", "quiet", "link") else 3), name
        assert colour in html.STYLE


def test_kinds_differ_by_line_as_well_as_colour():
    styles = re.findall(r"\.qr-(?:delta|attention|vision)\{border-top:6px (\w+)", html.STYLE)
    assert sorted(styles) == ["dotted", "double", "solid"]
