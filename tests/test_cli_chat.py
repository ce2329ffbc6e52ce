"""Text on the command line: conversations, prompts and tokens, through pipes and at a terminal."""

import json
import os
import subprocess
import time

import fresh
import pytest
from test_cli import ANSWER, BASE, COMMAND, EXAMPLES, PRESSED, QUESTION, STORY, SUM, run

import qwenref
from qwenref.terminal_chat import Conversation, _answer, _Shown

pty = pytest.importorskip("pty")  # not on Windows, where the package is not built either
OTHER = EXAMPLES[0]["messages"][0]["content"]


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


def chat(*lines, words=(), **variables):
    return run("chat", "tiny", *words, stdin="".join(f"{line}\n" for line in lines), **variables)


# chat


def test_a_conversation_through_pipes_shows_answers_and_nothing_else():
    done = chat(QUESTION)
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER, "")
    assert chat().stdout == ""
    assert chat("", "/quit", QUESTION).stdout == ""


@pytest.mark.parametrize("thinking", [None, False])
def test_each_answer_is_the_one_to_the_rendered_history(model, thinking):
    conversation, messages = Conversation(model, "Be brief.", thinking, max_new_tokens=40), []
    messages.append({"role": "system", "content": "Be brief."})
    for turn, question in enumerate((QUESTION, OTHER, "And 2 plus 2?")):
        messages.append({"role": "user", "content": question})
        prompt = qwenref.render(model, messages, enable_thinking=thinking)
        cold = model.generate(prompt.ids, max_new_tokens=40)
        out = conversation.ask(question)
        assert out.new_ids == cold.new_ids and conversation.prompt == prompt.text
        assert (conversation.reused > 0) == (turn > 0)
        messages.append(conversation.messages[-1])


def test_a_failed_answer_leaves_conversation_and_next_answer_as_they_were(model):
    def stop(piece):
        raise KeyboardInterrupt

    touched, untouched = (Conversation(model, max_new_tokens=30) for _ in range(2))
    for conversation in (touched, untouched):
        conversation.ask(QUESTION)
    before = list(touched.messages)
    with pytest.raises(KeyboardInterrupt):
        touched.ask("Tell me a story", streamer=stop)
    assert touched.messages == before
    assert touched.ask(OTHER).new_ids == untouched.ask(OTHER).new_ids
    assert touched.messages == untouched.messages and touched.reused > 0


def test_a_conversation_keeps_the_states_after_its_newest_question_and_no_copy_of_keys_and_values(model):
    conversation = Conversation(model, max_new_tokens=30)
    fixed = qwenref.cache_size(model, tokens=0, kv_dtype="float32").total
    for turn, question in enumerate((QUESTION, OTHER, QUESTION)):
        conversation.ask(question)
        (kept,) = conversation._cache.snapshots[0]
        assert kept == len(conversation._asked) < conversation._cache.length[0]
        assert conversation._cache.snapshot_nbytes == fixed and (conversation.reused > 0) == (turn > 0)


def test_the_json_of_a_chat_is_a_line_for_each_answer(model):
    messages, words = [{"role": "user", "content": QUESTION}], ("--json", "--max-new-tokens", "60")
    done = chat(QUESTION, "/show prompt", "/help", OTHER, "/reset", QUESTION, words=words)
    assert done.returncode == 0 and SUM["prompt"] in done.stderr and "/reset" in done.stderr
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert (first["schema"], first["sampler"], first["reused"]) == ("qwenref.chat/1", None, 0)
    assert (first["prompt"], first["prompt_ids"]) == (SUM["prompt"], SUM["prompt_ids"])
    assert (first["new_ids"], first["text"]) == (SUM["output_ids"], ANSWER.removesuffix("\n"))
    assert (first["thinking"], first["content"], first["tool_calls"]) == ("1+3=4, 3+2=5", "54", [])
    assert first["finish"].startswith("stop token <|im_end|>") and first["round_trip"] == {"same": True, "at": None}
    again = [*model.chat(messages).messages, {"role": "user", "content": OTHER}]
    out = model.chat(again, max_new_tokens=60)
    assert {name: second[name] for name in out.to_dict()} == out.to_dict() and second["reused"] > 0
    assert third == first


def test_an_answer_that_changes_as_history_is_told_of(model, capsys):
    class Letters:
        """Writes y, e, s, where the tokenizer has one token."""

        def __init__(self):
            self.ids = iter([model.tokenizer.token_id(letter) for letter in "yes"] + [model.tokenizer.stop.ids[0]])

        def sample(self, logits, context_ids, rng):
            return next(self.ids)

    conversation = Conversation(model, None, False, sampler=Letters())
    _answer(conversation, QUESTION)
    out, err = capsys.readouterr()
    assert out == "yes\n" and "in the next prompt this answer has other ids, from id " in err


def test_show_prompt_is_the_prompt_of_the_newest_answer():
    done = chat(QUESTION, "/show prompt")
    assert done.stdout == ANSWER + SUM["prompt"] + "\n"
    early = chat("/show prompt")
    assert early.returncode == 3 and early.stderr.startswith("InputError: /show prompt: there is no answer yet")


def test_reset_forgets_and_system_begins_anew():
    assert chat(QUESTION, "/reset", QUESTION, "/show prompt").stdout == ANSWER * 2 + SUM["prompt"] + "\n"
    cut = ("--max-new-tokens", "1")
    told = chat("/system Be brief.", QUESTION, "/reset", QUESTION, "/show prompt", words=cut)
    assert told.stdout.count("Be brief.") == 1 and told.stdout.count(QUESTION) == 1
    assert told.stderr.count("cut off: max_new_tokens") == 2
    assert chat(QUESTION, "/show prompt", words=(*cut, "--system", "Be brief.")).stdout.count("Be brief.") == 1
    assert "Be brief." not in chat("/system Be brief.", "/system", QUESTION, "/show prompt", words=cut).stdout


def test_what_is_saved_renders_and_nothing_is_overwritten(tmp_path):
    file, mine = tmp_path / "talk.json", tmp_path / "mine.json"
    mine.write_text("mine")
    assert chat(QUESTION, f"/save {file}", OTHER, f"/save {file}").returncode == 0
    messages = json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1] == {"role": "assistant", "content": "54", "reasoning_content": "1+3=4, 3+2=5"}
    assert run("render", "tiny", str(file)).stdout == qwenref.render(qwenref.from_pretrained("tiny"), messages).text
    refused = chat(QUESTION, f"/save {mine}")
    assert refused.returncode == 3 and "is there already" in refused.stderr and mine.read_text() == "mine"


def test_an_unknown_command_is_bad_input_and_two_slashes_are_a_message():
    unknown = chat("/rest")
    assert unknown.returncode == 3 and unknown.stderr.startswith("InputError: chat: /rest\n") and not unknown.stdout
    assert "/reset" in chat("/help").stdout
    message = chat("//help", "/show prompt", words=("--max-new-tokens", "1"))
    assert "<|im_start|>user\n/help<|im_end|>" in message.stdout


def test_bad_input_to_a_chat_is_one_message_and_code_3(tmp_path):
    for words in (("chat", "nowhere-at-all"), ("chat", "tiny", "--top-p", "2"), ("chat", "tiny", "--ids")):
        done = run(*words, stdin=QUESTION, HF_HUB_OFFLINE="1")
        assert done.returncode == 3 and done.stdout == "" and "Traceback" not in done.stderr, words


def at_terminal(typed, pressed=0, **variables):
    """(all that the terminal shows, exit code); each line is typed when a prompt is there, Ctrl-C as in PRESSED."""
    mine, theirs = pty.openpty()
    env = BASE | {"TERM": "xterm", "PYTHONUTF8": "1"} | variables
    words = [*COMMAND[:2], "-c", PRESSED, str(pressed), "chat", "tiny"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=fresh.TESTS) as process:
        os.close(theirs)
        shown, deadline, typed = b"", time.monotonic() + 60, list(typed)
        answered = 0
        while time.monotonic() < deadline:
            try:
                shown += os.read(mine, 4096)
            except OSError:  # Linux's word for the end
                break
            if shown.count(b"> ") > answered and shown.endswith(b"> ") and typed:
                answered = shown.count(b"> ")
                os.write(mine, typed.pop(0))
    os.close(mine)
    return shown.decode().replace("\r\n", "\n"), process.returncode


def test_a_terminal_dims_the_thinking_and_ends_with_the_input():
    shown, code = at_terminal([QUESTION.encode() + b"\n", b"/rest\n", b"\x04"])
    assert code == 0 and "\x1b[2m1+3=4, 3+2=5\n</think>\x1b[22m\n\n54\n" in shown
    assert "InputError: chat: /rest" in shown  # and goes on
    plain, code = at_terminal([QUESTION.encode() + b"\n", b"/quit\n"], NO_COLOR="1")
    assert code == 0 and "\x1b[2m" not in plain and ANSWER in plain


def test_ctrl_c_stops_an_answer_and_not_the_conversation():
    story = b"Tell me a story about a fox.\n"
    shown, code = at_terminal([story, b"/show prompt\n", b"/quit\n"], pressed=5)
    assert code == 0 and "stopped; question and answer are not kept" in shown
    assert "there is no answer yet" in shown and "Traceback" not in shown


def test_thinking_ends_where_its_tag_ends_however_the_pieces_fall():
    class Terminal:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return True

    text = "a </thin b</think>\n\nc"
    for size in range(1, len(text) + 1):
        terminal = Terminal()
        shown = _Shown(terminal, colour=True)
        shown.begin(thinking=True)
        for at in range(0, len(text), size):
            shown.put(text[at : at + size])
        shown.end()
        assert terminal.text == "\x1b[2ma </thin b</think>\x1b[22m\n\nc\n"


# Sampling


def test_flags_draw_as_the_sampler_does_and_nothing_is_drawn_unasked(model):
    ids = model.tokenizer.encode(STORY["prompt"])
    sampler = qwenref.Sampler(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, order="vllm")
    words = ["--temperature=1.5", "--top-k=20", "--top-p=0.9", "--min-p=0.01", "--order=vllm", "--seed=7"]
    done = run("generate", "tiny", STORY["prompt"], "--raw", "--json", "--max-new-tokens", "20", *words)
    facts = json.loads(done.stdout)
    assert facts["new_ids"] == model.generate(ids, max_new_tokens=20, sampler=sampler, seed=7).new_ids
    assert facts["new_ids"] != STORY["output_ids"][:20] and facts["sampler"] == repr(sampler) and facts["seed"] == 7
    greedy = json.loads(run("generate", "tiny", STORY["prompt"], "--raw", "--json", "--max-new-tokens", "20").stdout)
    assert greedy["new_ids"] == STORY["output_ids"][:20] and greedy["sampler"] is greedy["seed"] is None


def test_a_seed_or_an_order_without_sampling_and_wrong_values_are_refused():
    for words, told in (
        (["--seed", "1"], "--seed without sampling"),
        (["--order", "hf"], "--order without sampling"),
        (["--temperature", "-1"], "temperature -1.0"),
        (["--temperature", "1", "--order", "ours"], "order 'ours'"),
    ):
        done = run("generate", "tiny", "Hello", *words)
        assert done.returncode == 3 and told in done.stderr and done.stdout == "", words


# render


def test_render_writes_the_prompt_and_not_a_byte_more(tmp_path):
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(SUM["messages"]), encoding="utf-8")
    done = subprocess.run([*COMMAND, "render", "tiny", str(file)], capture_output=True, env=BASE | {"LC_ALL": "C"})
    assert (done.returncode, done.stdout, done.stderr) == (0, SUM["prompt"].encode(), b"")
    assert run("render", "tiny", "-", stdin=json.dumps(SUM["messages"])).stdout == SUM["prompt"]
    assert run("render", "tiny", str(file), "--ids").stdout.split() == list(map(str, SUM["prompt_ids"]))
    facts = json.loads(run("render", "tiny", str(file), "--json").stdout)
    assert facts["schema"] == "qwenref.render/1"
    assert (facts["text"], facts["ids"]) == (SUM["prompt"], SUM["prompt_ids"])


def test_the_json_of_render_says_which_characters_and_ids_came_from_which_message(model):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 plus 1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
        {"role": "user", "content": "And 3 plus 4?"},
    ]
    facts = json.loads(run("render", "tiny", "-", "--json", "--no-thinking", stdin=json.dumps(messages)).stdout)
    spans = facts["spans"]
    assert "".join(facts["text"][span["start"] : span["stop"]] for span in spans) == facts["text"]
    assert [id for span in spans for id in facts["ids"][span["first"] : span["last"]]] == facts["ids"]
    contents = [span for span in spans if span["part"] == "content"]
    assert [(span["message"], span["role"]) for span in contents] == list(enumerate(m["role"] for m in messages))
    for span, message in zip(contents, messages, strict=True):
        assert facts["text"][span["start"] : span["stop"]] == message["content"]
        assert model.tokenizer.decode(facts["ids"][span["first"] : span["last"]]) == message["content"]
    assert (spans[-1]["part"], spans[-1]["role"], spans[-1]["message"]) == ("tail", None, None)
    assert facts["text"].endswith(facts["tail"]) and facts["tail"].endswith("<think>\n\n</think>\n\n")
    assert facts["enable_thinking"] is False
    asked = json.loads(run("render", "tiny", "-", "--json", stdin=json.dumps(messages)).stdout)
    assert asked["enable_thinking"] is True and asked["tail"].endswith("<think>\n")


def test_render_takes_tools_thinking_and_the_end(tmp_path, model):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    messages, tools = [{"role": "user", "content": "é 😀"}], tmp_path / "tools.json"
    tools.write_text(json.dumps([tool]))
    for words, options in (
        (["--thinking"], {"enable_thinking": True}),
        (["--no-thinking"], {"enable_thinking": False}),
        (["--tools", str(tools)], {"tools": [tool]}),
        (["--no-generation-prompt"], {"add_generation_prompt": False}),
    ):
        done = run("render", "tiny", "-", *words, stdin=json.dumps(messages))
        assert done.stdout == qwenref.render(model, messages, **options).text
    both = run("render", "tiny", "-", stdin=json.dumps({"messages": messages, "tools": [tool]}))
    assert both.stdout == qwenref.render(model, messages, tools=[tool]).text


def test_render_says_what_is_wrong_with_its_input(tmp_path):
    for stdin, told in (
        ("[{", "InputError: standard input: no JSON"),
        ("[]", "InputError: messages is empty"),
        ('[{"role": 3}]', "InputError: messages[0] is not a message"),
        ('[{"role": "nobody", "content": "x"}]', "TemplateError: chat template, messages[0]"),
    ):
        done = run("render", "tiny", "-", stdin=stdin)
        assert done.returncode == 3 and done.stderr.startswith(told) and done.stdout == "", stdin
    (tmp_path / "latin").write_bytes(b'["\xe9"]')
    for name, told in (("absent", "cannot be read"), ("latin", "no JSON")):
        done = run("render", "tiny", str(tmp_path / name))
        assert done.returncode == 3 and told in done.stderr and "Traceback" not in done.stderr


# tokenize


def test_tokenize_shows_each_token_with_its_place(model):
    text = "Hello, 😀\n<|im_end|>"
    ids, offsets = model.tokenizer.encode_offsets(text)
    lines = run("tokenize", "tiny", text).stdout.splitlines()
    assert lines[0] == f"{len(ids)} tokens · 19 characters · 22 bytes" and len(lines) == len(ids) + 1
    assert lines[1].split() == [str(ids[0]), "0-5", "Hello"] and lines[-1].split()[-1] == "<|im_end|>"
    assert run("tokenize", "tiny", "-", "--ids", stdin=text).stdout.split() == list(map(str, ids))
    facts = json.loads(run("tokenize", "tiny", text, "--json").stdout)
    assert facts["schema"] == "qwenref.tokenize/1" and facts["ids"] == ids
    assert [[row["start"], row["stop"]] for row in facts["rows"]] == offsets.tolist()
    assert [row["piece"] for row in facts["rows"]] == [text[start:stop] for start, stop in offsets.tolist()]
    assert [row["token"] for row in facts["rows"]] == [model.tokenizer.token_text(id) for id in ids]


def test_tokenize_takes_special_tokens_as_text_when_asked_and_refuses_what_is_no_text(model):
    as_text = run("tokenize", "tiny", "<|im_end|>", "--ids", "--special-as-text").stdout.split()
    assert as_text == list(map(str, model.tokenizer.encode("<|im_end|>", special_tokens="text"))) and len(as_text) > 1
    assert run("tokenize", "tiny", "", "--ids").stdout == "\n"
    done = subprocess.run(
        [*COMMAND, "tokenize", "tiny", "-"], input=b"a\xff", capture_output=True, env=BASE | {"PYTHONUTF8": "1"}
    )
    assert done.returncode == 3 and b"lone surrogate" in done.stderr and b"Traceback" not in done.stderr
