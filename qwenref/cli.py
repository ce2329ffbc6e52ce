"""The command line: reads words, prints results.  Every fact it prints comes from a function one can call."""

import json
import os
import sys
import time

from qwenref import cli_compare
from qwenref._version import __version__
from qwenref.cli_base import (
    BROKEN_PIPE,
    FINDING,
    FINE,
    INTERRUPTED,
    Parser,
    add_verb,
    explain,
    prepare_streams,
    show,
    show_json,
    stream,
    tell,
    whole_number,
    width,
    write_exactly,
)

TOUR = f"""\
qwenref {__version__}: reference runtime for the Qwen3.5 family.  MODEL is tiny, a folder or a hub name.
  qwenref inspect tiny                                 its parameters, mixers, cache, stop ids
  qwenref generate tiny "How much is 31 plus 23?"      an answer with its chain of thought
  qwenref compare tiny --engine reference:tiny         whether an engine is wrong, and where
The same in Python: import qwenref; model = qwenref.from_pretrained("tiny"); print(model)
qwenref VERB --help: inspect, generate, chat, render, tokenize, compare, record, doctor, bench."""


def main(argv=None):
    """Run one command; the exit code: 0 fine, 1 a finding, 2 undecided, 3 bad input, 4 unreachable, 130 interrupted."""
    prepare_streams()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        if not words:
            show(TOUR)
            return FINE
        options = _parser().parse_args(words)
        options.words = words
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left.  The interpreter flushes stdout once more at its end; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except SystemExit as leaving:  # argparse: help, version, wrong words
        return leaving.code
    except Exception as error:
        return explain(error)


# Verbs


def inspect(options):
    import qwenref
    from qwenref import overview
    from qwenref.tree import tree

    model = qwenref.from_pretrained(options.model)
    facts = overview.overview(model, options.model, options.cache)
    rows = overview.tensors(model.path, options.tensors) if options.tensors is not None else None
    if options.json:
        show_json("inspect", facts if rows is None else {**facts, "tensors": rows})
    elif rows is not None:
        show(overview.tensors_text(rows))
    elif options.cache is not None:
        show(overview.cache_text(model, options.cache))
    elif options.tree or options.depth is not None:
        show(tree(model, options.depth).text())
    else:
        show(overview.overview_text(facts, width()))
    return FINDING if facts["tokenizer"]["error"] else FINE


def generate(options):
    import qwenref
    from qwenref.errors import InputError, compose

    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    if not prompt:
        raise InputError(compose("generate: the prompt is empty", expected="text, or - with text on standard input"))
    sampling = _sampling(options)
    model = qwenref.from_pretrained(options.model, numerics=options.numerics)
    tokenizer = model.tokenizer
    if options.chat if options.chat is not None else tokenizer.has_chat_template:
        thinking = False if options.no_thinking else None
        messages = [{"role": "user", "content": prompt}]
        seen = qwenref.render(model, messages, enable_thinking=thinking, images=options.image, videos=options.video)
        prompt, ids, pictures = seen.text, seen.ids, getattr(seen, "prepared", None)
    elif options.no_thinking:
        raise InputError(compose("generate: --no-thinking is for a chat", found="a raw prompt", do="leave one out"))
    elif options.image or options.video:
        pictures = model.processor(prompt, options.image, options.video)
        prompt, ids = pictures.text, pictures.ids
    else:
        ids, pictures = tokenizer.encode(prompt), None
    began = time.perf_counter()
    streamer = None if options.json else stream
    inputs = {} if pictures is None else pictures.inputs
    out = model.generate(ids, max_new_tokens=options.max_new_tokens, streamer=streamer, **inputs, **sampling)
    seconds = time.perf_counter() - began
    facts = {
        "model": options.model,
        "numerics": model.numerics,
        **_drawn_by(sampling),
        "prompt": prompt,
        "prompt_ids": ids,
        **({} if pictures is None else pictures.to_dict()),
        "text": out.text,
        "new_ids": out.new_ids,
        "finish": out.finish,
        "steps": out.steps,
        "seconds": round(seconds, 6),
    }
    if options.json:
        show_json("generate", facts)
    elif not out.text.endswith("\n"):
        show("")
    if options.stats or (sys.stderr.isatty() and not options.json):
        if pictures is not None:
            tell(pictures.describe())
        tell(_statistics(facts))
    return FINE


def _statistics(facts):
    new, seconds = len(facts["new_ids"]), facts["seconds"]
    rate = f" · {new / seconds:.4g} tokens/s" if new and seconds else ""
    return (
        f"{len(facts['prompt_ids']):,} prompt + {new:,} new tokens in {seconds:.3g} s{rate} · "
        f"numerics {facts['numerics']} · ended by {facts['finish']}"
    )


def chat(options):
    import qwenref
    from qwenref.terminal_chat import Conversation, converse

    sampling = _sampling(options)
    model = qwenref.from_pretrained(options.model, numerics=options.numerics)
    model.tokenizer.chat_template()  # a checkpoint without one is told before the first question
    thinking = False if options.no_thinking else None
    conversation = Conversation(model, options.system, thinking, max_new_tokens=options.max_new_tokens, **sampling)
    facts = {"model": options.model, "numerics": model.numerics, **_drawn_by(sampling)}
    converse(conversation, (lambda answer: show_json("chat", {**facts, **answer})) if options.json else None)
    return FINE


def render(options):
    import qwenref

    messages, tools = _read_json(options.messages, "messages"), None
    if isinstance(messages, dict):  # as a request to a server has them
        messages, tools = messages.get("messages"), messages.get("tools")
    if options.tools is not None:
        tools = _read_json(options.tools, "tools")
    model = qwenref.from_pretrained(options.model)
    rendered = qwenref.render(
        model,
        messages,
        tools=tools,
        add_generation_prompt=not options.no_generation_prompt,
        enable_thinking=options.thinking,
    )
    if options.json:
        show_json("render", {"model": options.model, **rendered.to_dict()})
    elif options.ids:
        show(" ".join(map(str, rendered.ids)))
    else:
        write_exactly(rendered.text)
    return FINE


def tokenize(options):
    import qwenref

    text = _standard_input() if options.text == "-" else options.text
    tokenizer = qwenref.from_pretrained(options.model).tokenizer
    ids, offsets = tokenizer.encode_offsets(text, special_tokens="text" if options.special_as_text else "ids")
    rows = [
        {"id": id, "token": tokenizer.token_text(id), "start": start, "stop": stop, "piece": text[start:stop]}
        for id, (start, stop) in zip(ids, offsets.tolist(), strict=True)
    ]
    if options.json:
        show_json("tokenize", {"model": options.model, "text": text, "ids": [row["id"] for row in rows], "rows": rows})
    elif options.ids:
        show(" ".join(str(row["id"]) for row in rows))
    else:
        show(f"{len(rows):,} tokens · {len(text):,} characters · {len(text.encode()):,} bytes")
        for row in rows:
            show(f"{row['id']:>8}  {row['start']:>6}-{row['stop']:<6}  {row['token']}")
    return FINE


def bench(options):
    from qwenref.bench import bench

    report = bench(
        options.model,
        shape=options.shape,
        against=[name for name in (options.against or "").split(",") if name],
        folder=options.folder,
        only=options.only,
        rounds=options.rounds,
        tokens=options.tokens,
        prefill=options.prefill,
        threads=options.threads,
    )
    for warning in report.facts["warnings"]:
        tell(f"bench: {warning}")
    if options.svg:
        with open(options.svg, "w", encoding="utf-8") as file:
            file.write(report.svg())
    if options.json:
        show_json("bench", report.to_dict())
    else:
        show(report.text())
    return FINE


def _sampling(options):
    """Arguments of `generate` for the sampling that was asked for: none, where none was."""
    from qwenref.errors import InputError, compose

    asked = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    asked = {name: value for name, value in asked.items() if value is not None}
    lonely = [f"--{name}" for name in ("seed", "order") if getattr(options, name) is not None]
    if not asked:
        if lonely:
            raise InputError(
                compose(
                    f"{options.verb}: {' and '.join(lonely)} without sampling",
                    expected="with it, one of --temperature, --top-k, --top-p, --min-p",
                    do="--temperature 1 draws from the model's own probabilities",
                )
            )
        return {}
    from qwenref.sampling import Sampler

    return {"sampler": Sampler(order=options.order or "hf", **asked), "seed": options.seed or 0}


def _drawn_by(sampling):
    return {"sampler": repr(sampling["sampler"]) if sampling else None, "seed": sampling.get("seed")}


def _read_json(name, what):
    """What a file, or standard input for -, holds as JSON."""
    from qwenref.errors import InputError, compose

    place = "standard input" if name == "-" else name
    try:
        if name == "-":
            raw = _standard_input()
        else:
            with open(name, encoding="utf-8-sig") as file:
                raw = file.read()
        return json.loads(raw)
    except OSError as error:
        raise InputError(
            compose(f"{place}: cannot be read", found=error.strerror, expected=f"{what} as JSON")
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise InputError(compose(f"{place}: no JSON", found=error, expected=f"a list of {what}")) from error


def _standard_input():
    return sys.stdin.read()


# Words


def _parser():
    parser = Parser(prog="qwenref", description=TOUR)
    parser.add_argument("--version", action="version", version=f"qwenref {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_inspect(verbs)
    _add_generate(verbs)
    _add_chat(verbs)
    _add_render(verbs)
    _add_tokenize(verbs)
    _add_bench(verbs)
    cli_compare.add(verbs)
    return parser


def _add_inspect(verbs):
    verb = add_verb(
        verbs, "inspect", inspect, "qwenref inspect tiny --tree", "What a checkpoint holds; no weight is read."
    )
    verb.add_argument("--tree", action="store_true", help="the module tree, layers grouped by kind")
    verb.add_argument("--depth", type=whole_number("--depth", 0), metavar="N", help="the tree to N levels")
    tokens = whole_number("--cache", 0)
    verb.add_argument("--cache", type=tokens, nargs="+", metavar="N", help="cache size after N tokens, by part")
    verb.add_argument("--tensors", metavar="GLOB", help="tensors on disk: name, dtype, shape, file @ offset")


_NUMERICS = "fp32 (default), fp64, hf, hf-5.12, fla, state-bf16, kv-bf16 or chunk64; choices follow: fp32+kv=bf16"


_GENERATE = "Continue a prompt, greedily unless sampling is asked for; text streams to standard output."


def _add_generate(verbs):
    example = 'qwenref generate tiny "How much is 31 plus 23?"'
    verb = add_verb(verbs, "generate", generate, example, _GENERATE)
    verb.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="a user's message (default with a template)")
    form.add_argument("--raw", action="store_false", dest="chat", help="the text as it is")
    for kind in ("image", "video"):
        words = f"a{'n' * (kind == 'image')} {kind} before the text, again for more; with --raw, for its placeholders"
        verb.add_argument(f"--{kind}", action="append", metavar="FILE", help=words)
    _add_answering(verb, 256)
    verb.add_argument("--stats", action="store_true", help="tokens, time and why it ended, on standard error")


def _add_answering(verb, most):
    verb.add_argument("--no-thinking", action="store_true", help="ask the chat template for an answer without thinking")
    number = whole_number("--max-new-tokens", 0)
    verb.add_argument("--max-new-tokens", type=number, default=most, metavar="N", help=f"default {most}")
    verb.add_argument("--numerics", default="fp32", metavar="P", help=_NUMERICS)
    group = verb.add_argument_group(
        "sampling", "Nothing is drawn, and no default of the checkpoint read, unless one of the first four is given."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="1 where another is given; 0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="the K likeliest")
    group.add_argument("--top-p", type=float, metavar="P", help="the likeliest that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="those with P of the likeliest one's probability")
    group.add_argument(
        "--seed", type=whole_number("--seed", 0), metavar="N", help="default 0: the same draws every time"
    )
    group.add_argument("--order", metavar="ENGINE", help="cuts as hf (default), vllm, llama.cpp or sglang makes them")


def _add_chat(verbs):
    summary = "A conversation: type messages, /help lists commands; through a pipe each line is a message."
    verb = add_verb(verbs, "chat", chat, "qwenref chat tiny", summary, json="one JSON document a line for each answer")
    verb.add_argument("--system", metavar="TEXT", help="begin with this system message")
    _add_answering(verb, 1024)


def _add_render(verbs):
    summary = "The exact prompt of a conversation, by the checkpoint's chat template, with no newline added."
    example = """echo '[{"role": "user", "content": "Hello"}]' | qwenref render tiny -"""
    verb = add_verb(verbs, "render", render, example, summary)
    verb.add_argument(
        "messages",
        metavar="FILE",
        help='JSON: [{"role": ..., "content": ...}, ...], or {"messages": ..., "tools": ...}; - standard input',
    )
    verb.add_argument("--ids", action="store_true", help="token ids instead of text")
    verb.add_argument("--tools", metavar="FILE", help="JSON: a list of the tools' schemas")
    choice = verb.add_mutually_exclusive_group()
    choice.add_argument("--thinking", action="store_true", default=None, help="on (default: as the template has it)")
    choice.add_argument("--no-thinking", action="store_false", dest="thinking", help="off")
    verb.add_argument("--no-generation-prompt", action="store_true", help="end with the last message")


def _add_tokenize(verbs):
    summary = "The tokens of a text: id, first and last character, the token made visible."
    verb = add_verb(verbs, "tokenize", tokenize, 'qwenref tokenize tiny "Hello, world"', summary)
    verb.add_argument("text", metavar="TEXT", help="- reads standard input, to the last newline")
    verb.add_argument("--ids", action="store_true", help="ids only, on one line")
    verb.add_argument("--special-as-text", action="store_true", help="<|im_end|> and its like are mere characters")


def _add_bench(verbs):
    summary = "Speed against the machine's limits, the goals and other engines; takes minutes."
    example = "qwenref bench --shape 0.8b --folder DIR --against torch"
    verb = add_verb(verbs, "bench", bench, example, summary, model="?")
    from qwenref.bench import SHAPES

    verb.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead (default 0.8b)")
    verb.add_argument("--folder", metavar="DIR", help="where they are kept, and made once; else a temporary one")
    verb.add_argument("--against", metavar="LIST", help="torch, llama.cpp or both, comma-separated")
    verb.add_argument("--only", nargs="+", metavar="GOAL", help="goals by name, such as 'decode.*' or op.smallest")
    for name, default, what in (
        ("rounds", 5, "turns of the contenders"),
        ("tokens", 16, "tokens decoded in a turn"),
        ("prefill", 512, "tokens of the prompt"),
        ("threads", None, "threads of every contender; default: as set"),
    ):
        shown = f"{what} (default {default})" if default else what
        verb.add_argument(f"--{name}", type=whole_number(f"--{name}", 1), default=default, metavar="N", help=shown)
    verb.add_argument("--svg", metavar="FILE", help="write a picture of the roofline")
