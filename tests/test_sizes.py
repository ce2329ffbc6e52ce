"""Facts of a model counted from its shapes: exact at the published 27B geometry, and equal to what arrays take."""

import json
import re
import textwrap
from collections import Counter
from math import prod

import fresh
import ml_dtypes
import numpy as np
import pytest
from checkpoints import sparse, sparse_sharded, text_27b
from folders import MARKS, TEXT, composite, folder, named, weights
from text_configs import CONFIGS, text_config

import qwenref
from qwenref import ConfigError, InputError
from qwenref.loading import split_name
from qwenref.sizes import memory

TEXT_27B = text_config(
    "lllf" * 16,
    heads=(24, 4),
    delta=(16, 48),
    head_dim=256,
    section=[11, 11, 10],
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
)
ROOT_27B = composite(TEXT_27B, vision_config={"model_type": "qwen3_5_vision", "out_hidden_size": 5120})
ROOT_27B = {key: value for key, value in ROOT_27B.items() if key not in MARKS}  # the published ids are the defaults


@pytest.fixture(scope="module")
def large():
    return qwenref.from_config(ROOT_27B, device="meta")


def numbers(text):
    """Every number of a text, as the set of its digits and separators."""
    return Counter(re.findall(r"\d[\d,.]*", re.sub(r"<[^>]*>", " ", text)))


# ---- the published geometry -------------------------------------------------------------------------------------


def test_parameters_of_27b(large):
    count = qwenref.parameters(large)
    assert count.embed == count.lm_head == 1_271_398_400
    assert (count.text, count.visual, count.total) == (26_895_998_464, 460_730_096, 27_356_728_560)
    assert count.nbytes == 2 * count.total
    stored = text_27b()
    text = {n: p.shape for n, p in large.named_parameters() if ".visual." not in n}
    assert len(stored) == 851 == len(text) and len(large.model.visual.blocks) == 27
    assert {name: shape for name, (_, shape) in stored.items()} == text
    assert count.text == sum(prod(shape) for _, shape in stored.values())


def test_parts_of_27b(large):
    """Worked out by hand from the widths, layer by layer."""
    H, inner, K, V = 5120, 17408, 16 * 128, 48 * 128
    delta = H * (2 * K + V) + H * V + 2 * H * 48 + (2 * K + V) * 4 + V * H + 48 + 48 + 128
    attention = H * 24 * 256 * 2 + 2 * H * 4 * 256 + 24 * 256 * H + 2 * 256
    count = qwenref.parameters(large)
    assert count.mixers == {"linear_attention": 48 * delta, "full_attention": 16 * attention}
    assert (delta, attention) == (115_876_064, 104_858_112)
    assert count.mlp == 64 * 3 * H * inner
    assert count.norms == (2 * 64 + 1) * H


def test_shapes_of_27b(large):
    layers = large.model.language_model.layers
    attention = layers[3].self_attn
    assert attention.q_proj.weight.shape == (12288, 5120) and attention.o_proj.weight.shape == (5120, 6144)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, 5120)
    assert layers[0].linear_attn.conv1d.weight.shape == (10240, 1, 4)
    assert large.model.language_model.embed_tokens.weight.shape == large.lm_head.weight.shape == (248320, 5120)


def test_mixers_of_27b(large):
    assert qwenref.mixers(large) == {"linear_attention": 48, "full_attention": 16}
    kinds = [layer.block_type for layer in large.model.language_model.layers]
    assert kinds == [layer.layer_type for layer in large.model.language_model.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == list(range(3, 64, 4))


def test_cache_of_27b(large):
    size = qwenref.cache_size(large, tokens=32768)
    assert size.kv_per_token == 65_536 and size.kv == 65_536 * 32768
    assert size.recurrent == 150_994_944 and size.conv == 2_949_120
    assert size.fixed == 153_944_064 and size.total == 2_301_427_712
    assert [layer.total for layer in size.per_layer[:4]] == [3_207_168] * 3 + [4096 * 32768]
    assert [layer.index for layer in size.per_layer] == list(range(64))
    assert repr(size).splitlines()[0] == "CacheSize · 1 row of 32,768 tokens · 2.143 GiB"
    assert qwenref.cache_size(large, tokens=4096).headline.endswith("402.8 MiB")
    assert repr(size.per_layer[3]) == "layer 3 · attention · 128 MiB"


def facts_of(script, *args):
    """What a script in a process of its own prints as JSON; its memory is nobody else's."""
    head = """
        import json, resource, sys, time
        import qwenref
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        start = resident()
    """
    return json.loads(fresh.python(textwrap.dedent(head) + textwrap.dedent(script), *args).stdout)


@pytest.mark.measured
def test_a_27b_without_data_takes_no_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ROOT_27B))
    facts = facts_of(
        """
        began = time.perf_counter()
        model = qwenref.from_config(sys.argv[1], device="meta")
        seconds = time.perf_counter() - began
        total = qwenref.parameters(model).total
        text = repr(qwenref.cache_size(model)) + repr(model)
        print(json.dumps([total, seconds, resident() - start]))
        """,
        tmp_path,
    )
    assert facts[0] == 27_356_728_560
    print(f"from_config(27B, meta): {facts[1]:.3f} s, {facts[2] / 1e6:.1f} MB")
    assert facts[1] < 1 and facts[2] < 60e6


@pytest.mark.measured
@pytest.mark.parametrize("shards", [12, 1])
def test_a_27b_folder_opens_and_prints_in_a_second(tmp_path, shards):
    """The file is a hole of 54 GB: whoever read the weights would need the time and the memory."""
    (tmp_path / "config.json").write_text(json.dumps(ROOT_27B))
    if shards == 1:
        sparse(tmp_path / "model.safetensors", text_27b())
    else:
        sparse_sharded(tmp_path, text_27b(), shards)
    facts = facts_of(
        """
        began = time.perf_counter()
        model = qwenref.from_pretrained(sys.argv[1])
        text = str(model)
        seconds = time.perf_counter() - began
        total = qwenref.parameters(model).total
        print(json.dumps([total, len(model.report.files), text.count("\\n"), seconds, resident()]))
        """,
        tmp_path,
    )
    total, files, lines, seconds, nbytes = facts
    assert total == 26_895_998_464 and files == shards and lines > 100
    print(f"open and print 27B in {shards} files: {seconds:.3f} s, {nbytes / 1e6:.1f} MB resident")
    assert seconds < 1 and nbytes < 200e6


# ---- every source says the same ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_mixers_are_the_same_from_every_source(tmp_path, name):
    model = qwenref.from_config(CONFIGS[name], device="meta")
    counted = Counter()
    for module in model.modules():
        counted["linear_attention"] += isinstance(module, qwenref.GatedDeltaNet)
        counted["full_attention"] += isinstance(module, qwenref.Attention)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    sources = (model, model.model, model.config, model.config.text_config, CONFIGS[name])
    for source in (*sources, tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert qwenref.mixers(source) == counted
        assert qwenref.cache_size(source, 100).total == qwenref.cache_size(model, 100).total
    for source in (model.config, CONFIGS[name], tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert qwenref.parameters(source).rows() == qwenref.parameters(model).rows()


def test_mixers_walk_the_layers_there_are():
    """Of an edited model the layers count, not the config."""
    model = qwenref.from_config(text_config("lllf"), device="meta")
    del model.model.layers[0]
    assert qwenref.mixers(model) == {"linear_attention": 2, "full_attention": 1}


@pytest.mark.parametrize("count", [qwenref.mixers, qwenref.cache_size, qwenref.parameters])
@pytest.mark.parametrize("source", [None, 5, []])
def test_what_is_no_model_is_refused(count, source):
    with pytest.raises(ConfigError, match="config: "):
        count(source)


# ---- the size of a cache is that of the arrays --------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("profile", ["fp32", "fp64"])
@pytest.mark.parametrize("batch, tokens", [(1, 0), (1, 1), (2, 2), (3, 7)])
def test_cache_size_is_what_a_cache_holds(name, profile, batch, tokens):
    model = qwenref.from_config(CONFIGS[name], seed=0)
    with qwenref.numerics(profile):
        cache = qwenref.Cache(model, batch=batch)
        if tokens:
            model(np.ones((batch, tokens), int), cache=cache)
        dtype = cache.dtype.name
    size = qwenref.cache_size(model, tokens, batch, kv_dtype=dtype, state_dtype=dtype)
    assert size.total == cache.nbytes
    assert [layer.total for layer in size.per_layer] == [layer.nbytes for layer in cache.layers]
    assert size.kv == sum(layer.nbytes for layer in cache.layers if hasattr(layer, "keys"))
    assert size.conv == sum(layer.conv_state.nbytes for layer in cache.layers if hasattr(layer, "conv_state"))
    assert size.kv_per_token * batch * tokens == size.kv


def test_cache_size_of_a_long_prompt_in_pieces():
    """The arrays grow by more than a token at a time; only what is in use counts."""
    model = qwenref.from_config(text_config("lf"), seed=0)
    cache, fed = qwenref.Cache(model, batch=2), 0
    for n in (64, 1, 66, 130):
        model(np.ones((2, n), int), cache=cache)
        fed += n
        assert qwenref.cache_size(model, fed, 2, "float32").total == cache.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtypes_by_any_name(dtype):
    size = qwenref.cache_size(TEXT, 10, kv_dtype=dtype, state_dtype=dtype)
    assert (size.kv_dtype, size.state_dtype) == ("bfloat16", "bfloat16")
    assert repr(size) == repr(qwenref.cache_size(TEXT, 10, state_dtype="bfloat16"))
    assert 2 * size.total == qwenref.cache_size(TEXT, 10, kv_dtype=np.float32, state_dtype=np.float32).total


@pytest.mark.parametrize(
    "options",
    [{"tokens": -1}, {"tokens": 1.5}, {"tokens": True}, {"batch": 0}, {"kv_dtype": "int8"}, {"state_dtype": None}],
)
def test_sizes_of_nothing_are_refused(options):
    with pytest.raises(InputError, match=f"cache_size: {next(iter(options))} "):
        qwenref.cache_size(TEXT, **options)


# ---- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_add_up(name):
    model = qwenref.from_config(CONFIGS[name], device="meta")
    count = qwenref.parameters(model)
    assert count.total == sum(p.size for p in model.parameters())
    assert count.nbytes == sum(p.nbytes for p in model.parameters())
    assert count.total == sum(n for _, n, _ in count.rows())
    tied = CONFIGS[name]["tie_word_embeddings"]
    assert count.lm_head == (0 if tied else count.embed)
    assert ("tied to the embedding" in repr(count)) is tied
    backbone = qwenref.parameters(model.model)
    assert backbone.total == count.total - count.lm_head and "tied" not in repr(backbone)
    for kind, cls in (("linear_attention", qwenref.GatedDeltaNet), ("full_attention", qwenref.Attention)):
        parts = [module for module in model.modules() if isinstance(module, cls)]
        assert count.mixers.get(kind, 0) == sum(p.size for module in parts for p in module.parameters())


def test_bytes_are_those_of_the_file(tmp_path):
    arrays = weights()
    model = qwenref.from_pretrained(folder(tmp_path, TEXT, named(arrays, "model.")))
    assert qwenref.parameters(model).nbytes == sum(a.nbytes for a in arrays.values()) == model.report.nbytes


def test_parts_on_disk_are_counted_apart():
    model = qwenref.from_pretrained("tiny")
    count = qwenref.parameters(model)
    stored = qwenref._C.Checkpoint(model.path)
    sizes = Counter()
    for name in stored:
        sizes[split_name(name)[1].split(".")[0]] += prod(stored.info(name).shape)
    assert (count.visual, count.mtp) == (sizes["visual"], sizes["mtp"])
    assert count.total == count.text + count.visual == sum(sizes.values()) - count.mtp
    assert repr(count).splitlines()[0] == f"CountReport · {count.total:,} parameters · {count.nbytes:,} B"
    assert sum("on disk, not part of this tree" in line for line in repr(count).splitlines()) == 1


# ---- displays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["tiny", TEXT_27B, CONFIGS["tied embedding"]], ids=["tiny", "27B", "tied"])
@pytest.mark.parametrize("report", ["cache", "parameters"])
def test_html_says_what_the_text_says(source, report):
    model = qwenref.from_pretrained(source) if source == "tiny" else qwenref.from_config(source, device="meta")
    shown = qwenref.parameters(model) if report == "parameters" else qwenref.cache_size(model, 4000, batch=3)
    text, html = repr(shown), shown._repr_html_()
    assert numbers(text) == numbers(html) and numbers(text)
    words = re.sub(r"[\s·]+", " ", re.sub(r"<[^>]*>", " ", html)).strip()
    assert words == re.sub(r"[\s·]+", " ", text)
    assert not re.search(r"<script|http|@import|\bon\w+=", html)
    assert max(map(len, text.splitlines())) <= 100
    for tag in ("table", "tr", "th", "td", "div", "b"):
        assert len(re.findall(rf"<{tag}[ >]", html)) == html.count(f"</{tag}>")
    assert html.count('<th scope="row">') == len(shown.rows())


@pytest.mark.parametrize(
    "nbytes, text",
    [(0, "0 B"), (1023, "1023 B"), (65536, "64 KiB"), (402.8 * 2**20, "402.8 MiB"), (2_301_427_712, "2.143 GiB")],
)
def test_memory_is_told_in_binary_units(nbytes, text):
    assert memory(nbytes) == text


# ---- print(model) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["tiny", *CONFIGS], ids=str)
def test_print_is_transformers_print(tmp_path, config):
    """Byte for byte, once the family's prefix is off the class names; a sampled table is no mere embedding."""
    transformers = pytest.importorskip("transformers", reason="the witness needs transformers (extra 'test')")
    torch = pytest.importorskip("torch", reason="the witness needs PyTorch (extra 'test')")
    ours = qwenref.from_config(CONFIGS.get(config, config), device="meta")
    (tmp_path / "config.json").write_text(ours.config.to_json())
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        whole = getattr(transformers, ours.config["architectures"][0])(theirs)
    text = re.sub(r"Qwen3_5(?:Text(?=RotaryEmbedding)|Vision(?=Patch))?", "", str(whole))
    text = text.replace("(pos_embed): Embedding", "(pos_embed): PositionTable")
    assert str(ours) == repr(ours) == text
