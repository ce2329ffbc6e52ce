"""What an array, a capture, a cache and a list of hooks show, as text and as HTML."""

import re
import struct
import zlib
from base64 import b64decode

import numpy as np
import pytest
from test_displays import checked_page, numbers, seconds_of
from test_sizes import ROOT_27B

import qwenref
from qwenref import arrays
from qwenref.arrays import array_line, statistics
from qwenref.cache_display import headline

IDS = [1, 17, 400, 5, 9, 33, 8]


@pytest.fixture(scope="module")
def captured(tiny):
    with qwenref.capture(tiny, "**") as c:
        cache = qwenref.Cache(tiny)
        tiny(IDS, cache=cache)
        tiny([5], cache=cache)
    return c


# ---- arrays -------------------------------------------------------------------------------------------------------


def test_the_line_of_an_array():
    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(1, 4, 6)
    line = array_line(x, ("B", "T", "V-head"))
    assert line == "float32 [B 1, T 4, V-head 6] · mean 0.5 · std 0.301 · 0 … 1 · finite"
    assert array_line(np.zeros((2, 0))) == "float64 [2, 0] · empty"
    assert array_line(np.array([1, 2, 3])).startswith("int64 [3] · mean 2 · ")


def test_what_is_not_finite_is_counted_and_found():
    x = np.zeros((2, 20, 6), np.float32)
    x[0, 17, 5] = x[1, 3, 0] = x[1, 3, 1] = np.nan
    assert array_line(x).endswith(" · 3 NaN first at [0, 17, 5]")
    x[0, 2, 2] = np.inf
    assert array_line(x).endswith(" · 3 NaN and 1 inf first at [0, 2, 2]")
    assert array_line(np.full((2, 2), np.nan)) == "float64 [2, 2] · 4 NaN first at [0, 0]"


def test_a_mask_is_no_finding():
    x = np.where(np.tri(64) > 0, np.float32(0.5), np.float32(-np.inf))
    assert array_line(x).endswith("0.5 … 0.5 · masked 2,016")
    x[5, 5] = np.nan
    assert array_line(x).endswith("masked 2,016 · 1 NaN first at [5, 5]")


@pytest.mark.parametrize("layout", ["whole", "strided"])
def test_statistics_in_pieces_are_those_of_the_whole(layout):
    x = np.random.default_rng(0).standard_normal((7, 300, 130)).astype(np.float32) + 100
    x = x if layout == "whole" else x.transpose(2, 0, 1)
    found = statistics(x)
    wide = x.astype(np.float64)
    # Sums in float64 of 273,000 terms near 100: relative error below 2e5 x 1e-16.
    assert found.mean == pytest.approx(wide.mean(), rel=1e-10) and found.std == pytest.approx(wide.std(), rel=1e-10)
    assert (found.min, found.max, found.stride) == (x.min(), x.max(), 1)


def test_of_a_large_array_a_sample_is_taken_and_said():
    x = np.zeros((100, 64), np.float32)
    x[:, 63] = 1
    found = statistics(x, limit=3200)
    assert found.stride == 3 and found.max == 1  # an even stride would miss the last column for ever
    assert array_line(x, limit=3200).endswith(" · sample of 1 in 3")
    assert arrays.EXACT == 16 * 2**20


# ---- pictures -----------------------------------------------------------------------------------------------------


def decoded(data):
    """(indices, colours) of an 8-bit indexed PNG, every checksum checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (n,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + n]
        assert struct.unpack(">I", data[at + 8 + n : at + 12 + n])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + n
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 3, 0, 0, 0] and list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    return rows[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def test_a_picture_is_a_png_of_the_numbers():
    x = np.array([[0, 0.5], [1, np.nan]], np.float32)
    uri, low, high, blocks = arrays.picture(x)
    indices, colours = decoded(b64decode(uri.split(",")[1]))
    assert indices.tolist() == [[0, 127], [254, 255]] and (low, high, blocks) == (0, 1, False)
    assert colours[0].tolist() == [255, 255, 255] and colours[254].tolist() == [0, 0x1E, 0x3C]
    signed = arrays.picture(np.array([[-2.0, 0], [1, 0]], np.float32))
    assert signed[1:3] == (-2, 2)


def test_a_shrunk_picture_keeps_the_largest_of_each_block():
    x = np.zeros((500, 40), np.float32)
    x[371, 21] = -7
    values, blocks = arrays.shrunk(x)
    assert blocks and values.shape == (84, 40) and values[371 // 6, 21] == -7 and np.count_nonzero(values) == 1


def test_the_picture_has_pillows_reading():
    image = pytest.importorskip("PIL.Image", reason="a second reader of PNG needs Pillow (extra 'vision')")
    import io

    x = np.random.default_rng(1).random((30, 50)).astype(np.float32)
    data = b64decode(arrays.picture(x)[0].split(",")[1])
    indices, colours = decoded(data)
    assert (np.asarray(image.open(io.BytesIO(data)).convert("RGB")) == colours[indices]).all()


# ---- captures -----------------------------------------------------------------------------------------------------


def test_a_capture_shows_steps_and_patterns(tiny):
    with qwenref.capture(tiny, "layers.*.self_attn.attn_weights", "layers.*.linear_attn.beta") as c:
        assert repr(c).startswith("Capture · 0 calls · 0 names")
        cache = qwenref.Cache(tiny)
        tiny(IDS, cache=cache)
        tiny([5], cache=cache)
    lines = repr(c).splitlines()
    assert (
        lines[:4]
        == [
            "Capture · 2 calls (7 + 1 tokens) · 8 names · 2.906 KiB of 1 GiB budget",
            "  step  tokens  names       bytes",
            "     0       7      8   2.516 KiB   prefill",
            "     1       1      8       400 B   decode",
        ]
        or c.nbytes != 2816
    )
    assert re.fullmatch(
        r"  layers\.\*\.linear_attn\.beta +x 6  float32 \[B 1, T 7, V-head 6\] +0\.\d+ … 0\.\d+", lines[4]
    )
    assert re.fullmatch(
        r"  layers\.\*\.self_attn\.attn_weights +x 2  float32 \[B 1, Q-head 4, T 7, S 7\] +0 … 1", lines[5]
    )
    assert len(lines) == 6
    everything = np.concatenate(
        [c[f"layers.{i}.linear_attn.beta", s].ravel() for i in (0, 1, 2, 4, 5, 6) for s in (0, 1)]
    )
    assert lines[4].endswith(f"{everything.min():.4g} … {everything.max():.4g}")


def test_a_large_capture_stays_on_a_page_and_says_what_is_left(captured):
    lines = repr(captured).splitlines()
    assert 38 <= len(lines) <= 40 and re.search(r"… \d+ more patterns: c\.names\(\), c\.tree\(\)$", lines[-1])
    left = int(re.search(r"… (\d+) more", lines[-1])[1])
    whole = str(captured.tree()).splitlines()
    assert len(whole) == len(lines) - 1 + left
    assert sum(int(re.search(r" x (\d+) ", line)[1]) for line in whole[4:]) == len(captured.names())


def test_the_html_of_a_capture_says_what_the_text_says(captured):
    page = checked_page(captured.tree(), 100_000)
    figures = "".join(re.findall(r"<figcaption>.*?</figcaption>", captured.tree()._repr_html_()))
    more = re.findall(r"more pictures: [\d,]+", page.text)
    expected = numbers(str(captured.tree())) + numbers(re.sub("<[^>]*>", " ", figures)) + numbers(" ".join(more))
    assert numbers(page.text) == sorted(expected)
    assert page.tags.count("svg") > 10 and page.tags.count("img") == 6
    assert all(value for name, value in page.attributes if name in ("alt", "aria-label"))
    assert checked_page(captured, 100_000).tags.count("img") == 6


def test_sparklines_are_small(captured):
    pictures = re.findall(r"<svg.*?</svg>", captured.tree()._repr_html_())
    assert pictures and max(map(len, pictures)) <= 2048


def test_a_capture_saved_as_a_page_stands_alone(captured, tmp_path):
    captured.save_html(tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<title>Capture · 2 calls" in text
    assert len(text.encode()) <= 2e6 and not re.search(r"<script|https?:|@import", text)


@pytest.mark.measured
def test_looking_at_a_capture_is_quick(tiny):
    with qwenref.capture(tiny, "**") as c:
        tiny(list(range(512)))
    size = len(c._repr_html_())
    for show in (c.__repr__, c._repr_html_):
        best = min(seconds_of(show) for _ in range(3))
        print(f"{c.nbytes / 2**20:.0f} MiB: {best * 1e3:.1f} ms, HTML {size:,} bytes")
        assert best < 0.05 and size < 100_000
    assert "~ of a sample" in repr(c)  # and so it says that not all was looked at


def test_values_that_are_bad_show(tiny):
    with qwenref.edit(tiny, {"layers.2": lambda x: x * np.float32("nan")}), qwenref.capture(tiny, "layers.2") as c:
        tiny(IDS)
    assert repr(c).splitlines()[-1].endswith(" 896 NaN")


# ---- caches -------------------------------------------------------------------------------------------------------


def test_a_cache_says_what_it_holds_and_for_what(tiny):
    cache = qwenref.Cache(tiny)
    tiny(IDS, cache=cache)
    assert repr(cache).splitlines() == [
        "Cache · 1 row, 7 tokens · 180.5 KiB = 2 x keys/values 14.0 KiB + 6 x state 144.0 KiB + 6 x conv 22.5 KiB",
        "  attention  layers 3, 7  keys, values float32 [B 1, K-head 2, S 7, D 64]",
        "  DeltaNet   layers 0-2, 4-6  state float32 [B 1, V-head 6, K 32, D 32] · conv float32 [B 1, C 320, W-1 3]",
    ]
    page = checked_page(cache, 16_000)
    assert numbers(page.text) == numbers(repr(cache))


def test_the_headline_of_a_27b_cache():
    """With the dtypes a serving engine keeps: keys, values and window in two bytes, the state in four."""
    model = qwenref.from_config(ROOT_27B, device="meta")

    class Held:
        def __init__(self, **parts):
            self.parts = parts

        def arrays(self):
            zero = np.zeros(1, np.uint8)
            return {name: np.lib.stride_tricks.as_strided(zero, (n,), (0,)) for name, n in self.parts.items()}

    size = qwenref.cache_size(model, 4096)
    layers = [
        Held(keys=layer.kv // 2, values=layer.kv // 2)
        if layer.kind == "full_attention"
        else Held(recurrent_state=layer.recurrent, conv_state=layer.conv)
        for layer in size.per_layer
    ]
    cache = type(
        "Held", (), {"length": np.array([4096]), "batch": 1, "layers": layers, "nbytes": size.total, "waiting": ()}
    )
    assert headline(cache) == (
        "Cache · 1 row, 4,096 tokens · 402.8 MiB = "
        "16 x keys/values 256.0 MiB + 48 x state 144.0 MiB + 48 x conv 2.8 MiB"
    )


def test_rows_of_different_length_are_listed(tiny):
    cache = qwenref.Cache(tiny, batch=2)
    tiny([[1, 2, 3], [1, 2, 3]], attention_mask=[[1, 1, 1], [0, 1, 1]], cache=cache)
    assert repr(cache).startswith("Cache · 2 rows, 3, 2 tokens · ")


# ---- hooks --------------------------------------------------------------------------------------------------------


def test_hooks_are_listed_with_place_and_age_and_can_be_cleared():
    model = qwenref.from_pretrained("tiny")
    layers = model.model.language_model.layers

    def seen(module, args, output):
        calls.append(module)

    calls = []
    layers[3].register_forward_hook(seen)
    layers[0].mlp.register_forward_pre_hook(lambda module, args: None, with_kwargs=False)
    handle = qwenref.Module.register_forward_hook(layers[1], seen, always_call=True)
    found = qwenref.hooks(model)
    assert [(h.place, h.kind) for h in found] == [
        ("model.language_model.layers.0.mlp", "pre-hook"),
        ("model.language_model.layers.1", "hook"),
        ("model.language_model.layers.3", "hook"),
    ]
    assert all(0 <= h.age < 60 for h in found) and found[2].hook is seen
    lines = repr(found).splitlines()
    assert lines[0] == "3 hooks" and re.search(r"layers\.3 +hook +.*seen \(.*, line \d+\) +\d+ s old$", lines[3])
    assert numbers(checked_page(found, 16_000).text) == numbers(repr(found))
    assert len(qwenref.clear_hooks(model)) == 3 and len(qwenref.hooks(model)) == 0
    handle.remove()
    model(IDS)
    assert not calls


def test_the_times_of_hooks_leave_with_them():
    model = qwenref.from_pretrained("tiny")
    for _ in range(50):
        model.lm_head.register_forward_hook(print)
        model.lm_head._forward_hooks.clear()
        model.lm_head.register_forward_hook(print).remove()
    assert len(model.lm_head._forward_hooks.since) < 4
