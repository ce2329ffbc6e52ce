"""The command line as a user meets it: output, exit codes, streams and messages, each in a process of its own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

import qwenref
from qwenref import cli, cli_base
from qwenref.loading import LoadReport
from qwenref.overview import overview, overview_text, tensors
from qwenref.tree import index_ranges, tree

RUNS = Path(__file__).parent / "data" / "tiny_examples.jsonl"
EXAMPLES = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
SUM, STORY = EXAMPLES[1], next(line for line in EXAMPLES if line["messages"] is None)
QUESTION, ANSWER = SUM["messages"][0]["content"], "1+3=4, 3+2=5\n</think>\n\n54\n"

# The package under test must be found from any folder, also when it was built in place.
BASE = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(qwenref.__file__).parent.parent)]))}
BASE = {name: value for name, value in BASE.items() if name not in ("NO_COLOR", "TERM", "PYTHONIOENCODING")}
COMMAND = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "qwenref"]


def run(*words, stdin=None, **variables):
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env=BASE | {"PYTHONUTF8": "1"} | variables,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model, to be damaged."""
    shutil.copytree(Path(qwenref.__file__).parent / "tiny", tmp_path / "model")
    return tmp_path / "model"


# The tour


def test_alone_it_shows_six_lines_with_three_commands_that_work():
    tour = run()
    assert (tour.returncode, tour.stderr) == (0, "") and len(tour.stdout.splitlines()) == 6
    assert max(map(len, tour.stdout.splitlines())) <= 100
    commands = [re.split(" {3,}", line.strip())[0] for line in tour.stdout.splitlines() if line.startswith("  ")]
    assert len(commands) == 3
    for command in commands:
        done = run(*shlex.split(command)[1:])
        assert done.returncode == 0 and len(done.stdout) > 20, command


def test_help_of_each_verb_begins_with_an_example_that_works():
    for verb in ("inspect", "generate", "tokenize"):
        help = run(verb, "--help")
        assert help.returncode == 0
        example = help.stdout.splitlines()[0]
        assert example.startswith(f"qwenref {verb} tiny") and run(*shlex.split(example)[1:]).returncode == 0
    assert run("--version").stdout == f"qwenref {qwenref.__version__}\n"


# inspect


def test_inspect_shows_the_answer_first_and_how_to_go_on_last():
    shown = run("inspect", "tiny")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        "Qwen3.5 · ForConditionalGeneration · tiny                          ok: every tensor assigned once",
        "parameters  2,626,760 + 312,064 MTP         on disk 5.878 MB bf16 + 12 fp32      tied embeddings: no",
        "  text 2,329,736 · vision 297,024 · embedding and lm_head 163,840 each",
        "mixers      6 Gated DeltaNet + 2 attention        full attention: 3 7",
        "cache       155.2 KiB fixed + 1 KiB per token     4,096 tokens 4.152 MiB",
        "vision      2 blocks, width 64, patch 16, merge 2          MTP: 1 block (not part of the forward)",
        "  images 4,096 to 16,384 pixels                            videos 4,096 to 131,072 in 4 to 16 frames",
        "tokenizer   present, chat template present                 stop: <|im_end|> 1256 <|endoftext|> 1254",
        "  stop ids differ by file: generation_config 1256, 1254 · config 1254 · tokenizer_config 1256",
        "next        inspect … --tree · --tensors 'layers.0.*' · --cache 4096 32768 · qwenref generate …",
    ]


def test_inspect_tells_how_pictures_are_prepared_or_that_nothing_says_so(tmp_path):
    model = qwenref.from_pretrained("tiny")
    facts = overview(model)
    assert (facts["vision"]["num_heads"], facts["vision"]["out_hidden_size"]) == (4, 128)
    image, video = facts["processor"]["image"], facts["processor"]["video"]
    assert (image["least"], image["most"], image["mean"]) == (4096, 16_384, (0.5, 0.5, 0.5))
    assert (video["fps"], video["min_frames"], video["where"]) == (2, 4, "video_preprocessor_config.json")
    model.save_pretrained(tmp_path)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 7}')
    facts = overview(qwenref.from_pretrained(tmp_path))
    assert facts["processor"]["video"] == {"error": "no video_preprocessor_config.json"}
    line = overview_text(facts, 200).splitlines()[6]
    assert line.startswith("  images <preprocessor_config.json: size>   ")
    assert line.endswith("videos <no video_preprocessor_config.json>")
    assert json.loads(json.dumps(facts)) and overview(published_27b())["processor"]["image"]["error"]


def published_27b():
    """Shapes of the published 27B without data, and a report as opening its files would leave it."""
    tiny = json.loads((Path(qwenref.__file__).parent / "tiny" / "config.json").read_text(encoding="utf-8"))
    text = tiny["text_config"] | {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    }
    text["rope_parameters"] = text["rope_parameters"] | {"rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    vision = tiny["vision_config"] | {"depth": 27, "hidden_size": 1152, "out_hidden_size": 5120}
    vision |= {"intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304}
    model = qwenref.from_config(tiny | {"text_config": text, "vision_config": vision}, device="meta")
    model.report = LoadReport(
        path="",
        files=(),
        nbytes=2 * (27_356_728_560 + 424_699_392),
        tensors=0,
        dtypes={"bfloat16": 851},
        tied=False,
        leftovers={"mtp": {"all": (424_699_392,)}},
        unknown=(),
    )
    model.path = "nowhere"
    return model


def test_the_27b_is_shown_with_its_exact_figures():
    text = overview_text(overview(published_27b(), "./Qwen3.5-27B")).splitlines()
    assert text[0].startswith("Qwen3.5 · ForConditionalGeneration · ./Qwen3.5-27B    ")
    assert text[1:6] == [
        "parameters  27,356,728,560 + 424,699,392 MTP      on disk 55.56 GB bf16      tied embeddings: no",
        "  text 26,895,998,464 · vision 460,730,096 · embedding and lm_head 1,271,398,400 each",
        "mixers      48 Gated DeltaNet + 16 attention      full attention: 3 7 11 15 … 63",
        "cache       146.8 MiB fixed + 64 KiB per token    4,096 tokens 402.8 MiB · 32,768 tokens 2.143 GiB",
        "vision      27 blocks, width 1,152, patch 16, merge 2      MTP: 1 block (not part of the forward)",
    ]
    assert max(map(len, text)) <= 100


def test_a_narrow_terminal_loses_columns_from_the_right_and_wraps_nothing():
    facts = overview(published_27b(), "./Qwen3.5-27B")
    wide, narrow = overview_text(facts, 200).splitlines(), overview_text(facts, 60).splitlines()
    assert len(wide) == len(narrow)
    for full, cut in zip(wide, narrow, strict=True):
        assert full.startswith(cut.split("    ")[0]) and (len(cut) <= 60 or "    " not in cut.strip()[12:])


def test_the_tree_of_the_27b_fits_a_page_and_counts_each_weight_once():
    lines = tree(published_27b()).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    for line in (
        "ForConditionalGeneration · Qwen3.5                       27,356,728,560 parameters · 54.71 GB bf16",
        "ForConditionalGeneration                                                  27.36 B   54.71 GB",
        "├ model: Model                                                            26.09 B   52.17 GB",
        "│ ├ visual: VisionModel                  27 blocks, width 1,152          460.73 M  921.46 MB",
        "│ └ language_model: TextModel            64 layers, width 5,120           25.62 B   51.25 GB",
        "│   ├ embed_tokens: Embedding            248,320 x 5,120                   1.27 B    2.54 GB",
        "│   ├ layers: ModuleList                 48 DeltaNet + 16 attention       24.35 B   48.71 GB",
        "│   │ ├ 0-2, 4-6, … 60-62: DecoderLayer  x 48 · Gated DeltaNet            18.40 B   36.79 GB",
        "│   │ │ ├ linear_attn: GatedDeltaNet     16 key / 48 value heads x 128   115.88 M  231.75 MB each",
        "│   │ │ ├ mlp: MLP                       5,120 -> 17,408 -> 5,120        267.39 M  534.77 MB each",
        "│   │ └ 3, 7, … 63: DecoderLayer         x 16 · attention                  5.96 B   11.91 GB",
        "│   │   ├ self_attn: Attention           24 query / 4 kv heads x 256     104.86 M  209.72 MB each",
        "│   ├ norm: RMSNorm                      5,120, 1 + w                      5.12 k   10.24 kB",
        "│   └ rotary_emb: RotaryEmbedding        theta 1e7, sections 11/11/10           –          –",
        "└ lm_head: Linear                        5,120 -> 248,320                  1.27 B    2.54 GB",
    ):
        assert line in lines


def test_a_tied_head_counts_once_in_the_tree():
    config = json.loads((Path(qwenref.__file__).parent / "tiny" / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    model = qwenref.from_config(config, device="meta")
    lines = tree(model, depth=1).splitlines()
    assert lines[-1].endswith(" = embed_tokens.weight")
    assert lines[5].split()[1:3] == lines[6].split()[3:5] == ["2.46", "M"]


def test_index_ranges_join_runs_and_leave_out_the_middle():
    assert index_ranges([0, 1, 2, 4, 5, 6]) == "0-2, 4-6"
    assert index_ranges([3]) == "3"
    assert index_ranges(range(3, 64, 4)) == "3, 7, … 63"


def test_depth_cuts_the_tree_and_implies_it():
    assert len(run("inspect", "tiny", "--depth", "0").stdout.splitlines()) == 6  # four lines on the model, one node
    shown = run("inspect", "tiny", "--depth", "2").stdout.splitlines()
    expected = tree(qwenref.from_pretrained("tiny"), 2).splitlines()
    assert shown[:3] + shown[4:] == expected[:3] + expected[4:]  # line 3 tells what is in memory now
    assert len(run("inspect", "tiny", "--tree").stdout.splitlines()) == len(
        tree(qwenref.from_pretrained("tiny")).splitlines()
    )


def test_cache_lengths_are_sized_as_the_function_sizes_them():
    shown = run("inspect", "tiny", "--cache", "0", "1,000").stdout
    assert shown == "\n".join(repr(qwenref.cache_size("tiny", n)) for n in (0, 1000)) + "\n"


def test_tensors_are_listed_with_their_place_in_the_file():
    shown = run("inspect", "tiny", "--tensors", "layers.10*").returncode, run("inspect", "tiny", "--tensors", "*.A_log")
    assert shown[0] == 3 and shown[1].stdout.startswith("6 tensors · 144 B\n")
    assert "F32  [6]" in shown[1].stdout
    path = Path(qwenref.__file__).parent / "tiny"
    rows = tensors(path, "layers.*")
    assert [row["name"].split(".")[3] for row in rows] == sorted((row["name"].split(".")[3] for row in rows), key=int)
    row = next(row for row in rows if row["name"].endswith("layers.3.self_attn.q_norm.weight"))
    raw = (path / row["file"]).read_bytes()[row["offset"] :][: row["nbytes"]]
    weight = qwenref.from_pretrained("tiny").model.language_model.layers[3].self_attn.q_norm.weight
    assert raw == weight.tobytes()


def test_inspect_json_is_one_document_with_the_same_figures():
    done = run("inspect", "tiny", "--json", "--cache", "100")
    facts = json.loads(done.stdout)
    assert facts["schema"] == "qwenref.inspect/1" and done.stdout.count("\n") == 1 and done.stderr == ""
    assert facts["parameters"]["total"] == 2_626_760 and facts["mixers"] == {"linear_attention": 6, "full_attention": 2}
    assert facts["cache"]["contexts"] == [{"tokens": 100, "kv": 102_400, "total": 261_376}]
    assert [entry["id"] for entry in facts["tokenizer"]["stop"]] == [1256, 1254]
    listed = json.loads(run("inspect", "tiny", "--json", "--tensors", "lm_head.*").stdout)["tensors"]
    assert [row["shape"] for row in listed] == [[1280, 128]]


def test_a_broken_tokenizer_is_a_finding_and_an_absent_one_is_not(folder):
    (folder / "tokenizer.json").write_text("{")
    broken = run("inspect", str(folder))
    assert broken.returncode == 1 and "<error: " in broken.stdout
    (folder / "tokenizer.json").unlink()
    absent = run("inspect", str(folder))
    assert absent.returncode == 0 and "tokenizer   absent" in absent.stdout
    assert run("generate", str(folder), "Hello").returncode == 3


# generate


def test_generate_chats_when_there_is_a_template():
    done = run("generate", "tiny", QUESTION)
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER, "")
    assert run("generate", "tiny", QUESTION, "--chat").stdout == ANSWER
    off = run("generate", "tiny", EXAMPLES[0]["messages"][0]["content"], "--no-thinking")
    assert off.stdout == EXAMPLES[0]["output_text"].removesuffix("<|im_end|>") + "\n"


def test_generate_raw_continues_the_text_itself(folder):
    expected = STORY["output_text"].removesuffix("<|endoftext|>") + "\n"
    assert run("generate", "tiny", STORY["prompt"], "--raw").stdout == expected
    assert run("generate", "tiny", "-", "--raw", stdin=STORY["prompt"] + "\n").stdout == expected
    (folder / "chat_template.jinja").unlink()
    assert run("generate", str(folder), STORY["prompt"]).stdout == expected
    forced = run("generate", str(folder), STORY["prompt"], "--chat")
    assert forced.returncode == 3 and "no chat template" in forced.stderr and "--raw" in forced.stderr


def test_generate_json_is_one_document():
    done = run("generate", "tiny", QUESTION, "--json")
    facts = json.loads(done.stdout)
    assert facts["schema"] == "qwenref.generate/1" and done.stdout.count("\n") == 1 and done.stderr == ""
    assert facts["prompt"] == SUM["prompt"] and facts["prompt_ids"] == SUM["prompt_ids"]
    assert facts["new_ids"] == SUM["output_ids"] and facts["text"] + "\n" == ANSWER
    assert facts["finish"] == "stop token <|im_end|> 1256"


def test_statistics_go_to_standard_error_when_asked_for():
    done = run("generate", "tiny", QUESTION, "--stats", "--max-new-tokens", "4", "--numerics", "fp64")
    assert done.stdout == "1+3=\n"
    assert done.stderr.startswith("21 prompt + 4 new tokens in ")
    assert done.stderr.endswith("numerics fp64 · ended by max_new_tokens\n")
    assert run("generate", "tiny", QUESTION, "--max-new-tokens", "0").stdout == "\n"


def test_text_is_written_as_it_comes():
    with subprocess.Popen(
        [*COMMAND, "generate", "tiny", STORY["prompt"], "--raw"], stdout=subprocess.PIPE, env=BASE
    ) as p:
        first = os.read(p.stdout.fileno(), 4096)
        rest = p.stdout.read()
    whole = (first + rest).decode()
    assert whole == STORY["output_text"].removesuffix("<|endoftext|>") + "\n"
    assert 0 < len(first) < len(whole) // 2


# Streams and terminals


def test_a_reader_that_leaves_is_no_error():
    for words in (["generate", "tiny", STORY["prompt"], "--raw"], ["inspect", "tiny", "--tensors", "*"]):
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BASE) as p:
            p.stdout.close()
            assert p.stderr.read() == b""
        assert p.returncode == cli_base.BROKEN_PIPE


# The command line, with Ctrl-C pressed at the n-th call of the model, in the middle of an answer; 0 for never.
PRESSED = """
import os, signal, sys
from qwenref import cli, text
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
calls, forward = [], text.TextModel.forward
def pressed(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGINT)
    return forward(self, *args, **kwargs)
text.TextModel.forward = pressed
sys.exit(cli.main(sys.argv[2:]))
"""


def test_ctrl_c_ends_without_a_traceback():
    done = fresh.python(PRESSED, 3, "generate", "tiny", STORY["prompt"], "--raw", check=False)
    assert done.returncode == cli_base.INTERRUPTED and done.stderr == "\n"
    assert done.stdout and STORY["output_text"].startswith(done.stdout)


def test_a_pipe_gets_no_escape_codes_and_a_poor_terminal_no_frames():
    for words in (["inspect", "tiny", "--tree"], ["generate", "tiny", QUESTION, "--stats"]):
        assert "\x1b" not in run(*words).stdout + run(*words, NO_COLOR="1").stderr
    for variables in ({"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, {"TERM": "dumb"}):
        plain = run("inspect", "tiny", "--tree", **variables)
        assert plain.returncode == 0 and plain.stdout.isascii() and "`-lm_head: Linear" in plain.stdout
        assert len(plain.stdout.splitlines()) == len(tree(qwenref.from_pretrained("tiny")).splitlines())


# Errors

TABLE = [
    (["generate"], "qwenref generate: the following arguments are required: MODEL, PROMPT"),
    (["inspect"], "qwenref inspect: the following arguments are required: MODEL"),
    (["explode"], "qwenref: argument VERB: invalid choice: 'explode'"),
    (["inspect", "tiny", "--dept", "2"], "qwenref: unrecognized arguments: --dept 2"),
    (["inspect", "tiny", "--depth", "-1"], "qwenref inspect: argument --depth: '-1' is not a number of at least 0"),
    (["generate", "tiny", "x", "--max-new-tokens", "many"], "qwenref generate: argument --max-new-tokens: 'many'"),
    (["generate", "tiny", "x", "--raw", "--chat"], "qwenref generate: argument --chat: not allowed with argument"),
    (["generate", "tiny", ""], "InputError: generate: the prompt is empty"),
    (["generate", "tiny", "x", "--raw", "--no-thinking"], "InputError: generate: --no-thinking is for a chat"),
    (["generate", "tiny", "x", "--numerics", "fp7"], "InputError: numerics: no profile 'fp7'"),
    (["generate", "tiny", "x " * 5000], "InputError: generate: the prompt is "),
    (["inspect", "no-such-model"], "ModelNotFound: 'no-such-model': no such model"),
    (["inspect", "tiny", "--tensors", "zz*"], "InputError: 'zz*' matches no tensor"),
]


@pytest.mark.parametrize(
    ("words", "first"), TABLE, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_bad_input_is_one_message_and_code_3(words, first):
    done = run(*words)
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and done.stdout == ""
    assert lines[0].startswith(first) and len(lines) <= 12
    assert all(line.startswith("    ") for line in lines[1:]) and "Traceback" not in done.stderr


def test_text_that_is_no_text_is_refused_with_its_place():
    done = subprocess.run(
        [*COMMAND, "generate", "tiny", "-"], input=b"a\xffb", capture_output=True, env=BASE | {"PYTHONUTF8": "1"}
    )
    assert done.returncode == 3 and b"lone surrogate" in done.stderr


def test_a_broken_checkpoint_is_bad_input_that_names_the_file(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    for verb in (["inspect", str(folder)], ["generate", str(folder), "x"]):
        done = run(*verb)
        assert done.returncode == 3 and done.stderr.startswith("CheckpointError: ") and shard.name in done.stderr


def test_a_hub_name_that_cannot_be_fetched_is_code_4(tmp_path):
    variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run("inspect", "acme/none", **variables)
    assert done.returncode == 4 and done.stdout == ""
    at = [done.stderr.index(place) for place in ("1. embedded models", "2. folder", "3. cache", "4. download")]
    assert at == sorted(at)


def test_the_network_is_tried_last_and_its_failure_is_code_4(tmp_path):
    variables = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = run("inspect", "acme/none", **variables)
    assert done.returncode == 4 and "4. download: " in done.stderr and "Traceback" not in done.stderr


def test_a_traceback_comes_only_when_asked_for():
    assert "Traceback" not in run("inspect", "no-such-model").stderr
    asked = run("inspect", "no-such-model", QWENREF_TRACEBACK="1")
    assert "Traceback" in asked.stderr and asked.returncode == 3


def test_a_finding_in_the_numbers_is_code_1_and_a_fault_of_ours_is_called_one(monkeypatch, capsys):
    def fail(error):
        def run(*args, **options):
            raise error

        return run

    for error, code, words in (
        (qwenref.errors.NonFiniteError("step 3"), 1, "NonFiniteError: step 3"),
        (ZeroDivisionError("oops"), cli_base.INTERNAL, "internal error: ZeroDivisionError: oops"),
        (MemoryError("too much"), 3, "MemoryError: too much"),
    ):
        monkeypatch.setattr(qwenref, "from_pretrained", fail(error))
        assert cli.main(["inspect", "tiny"]) == code
        assert capsys.readouterr().err.startswith(words)
