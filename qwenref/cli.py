"""The command line: reads words, prints results.  Every fact it prints comes from a function one can call."""

import argparse
import json
import os
import shutil
import sys
import time
import traceback

from qwenref._version import __version__
from qwenref.plain import plain

FINE, FINDING, UNDECIDED, BAD_INPUT, UNREACHABLE = range(5)
INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141

TOUR = f"""\
qwenref {__version__}: reference runtime for the Qwen3.5 family.  MODEL is tiny, a folder or a hub name.
  qwenref inspect tiny                                 its parameters, mixers, cache, stop ids
  qwenref generate tiny "How much is 31 plus 23?"      an answer with its chain of thought
  qwenref generate tiny "Once upon a time," --raw      a text continued, without the chat template
The same in Python: import qwenref; model = qwenref.from_pretrained("tiny"); print(model)
Each verb explains itself: qwenref inspect --help, qwenref generate --help."""


def main(argv=None):
    """Run one command; the exit code: 0 fine, 1 a finding, 2 undecided, 3 bad input, 4 unreachable."""
    _prepare_streams()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        if not words:
            _show(TOUR)
            return FINE
        options = _parser().parse_args(words)
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
        return _explain(error)


# Verbs


def inspect(options):
    import qwenref
    from qwenref import overview
    from qwenref.tree import tree

    model = qwenref.from_pretrained(options.model)
    facts = overview.overview(model, options.model, options.cache)
    rows = overview.tensors(model.path, options.tensors) if options.tensors is not None else None
    if options.json:
        _show_json("inspect", facts if rows is None else {**facts, "tensors": rows})
    elif rows is not None:
        _show(overview.tensors_text(rows))
    elif options.cache is not None:
        _show(overview.cache_text(model, options.cache))
    elif options.tree or options.depth is not None:
        _show(tree(model, options.depth).text())
    else:
        _show(overview.overview_text(facts, _width()))
    return FINDING if facts["tokenizer"]["error"] else FINE


def generate(options):
    import qwenref
    from qwenref.errors import InputError, compose

    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    if not prompt:
        raise InputError(compose("generate: the prompt is empty", expected="text, or - with text on standard input"))
    model = qwenref.from_pretrained(options.model, numerics=options.numerics)
    tokenizer = model.tokenizer
    if options.chat if options.chat is not None else tokenizer.has_chat_template:
        thinking = False if options.no_thinking else None
        prompt, ids = qwenref.render(model, [{"role": "user", "content": prompt}], enable_thinking=thinking)
    elif options.no_thinking:
        raise InputError(compose("generate: --no-thinking is for a chat", found="a raw prompt", do="leave one out"))
    else:
        ids = tokenizer.encode(prompt)
    began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=options.max_new_tokens, streamer=None if options.json else _stream)
    seconds = time.perf_counter() - began
    facts = {
        "model": options.model,
        "numerics": model.numerics,
        "prompt": prompt,
        "prompt_ids": ids,
        "text": out.text,
        "new_ids": out.new_ids,
        "finish": out.finish,
        "steps": out.steps,
        "seconds": round(seconds, 6),
    }
    if options.json:
        _show_json("generate", facts)
    elif not out.text.endswith("\n"):
        _show("")
    if options.stats or (sys.stderr.isatty() and not options.json):
        _tell(_statistics(facts))
    return FINE


def _statistics(facts):
    new, seconds = len(facts["new_ids"]), facts["seconds"]
    rate = f" · {new / seconds:.4g} tokens/s" if new and seconds else ""
    return (
        f"{len(facts['prompt_ids']):,} prompt + {new:,} new tokens in {seconds:.3g} s{rate} · "
        f"numerics {facts['numerics']} · ended by {facts['finish']}"
    )


# Words


class _Parser(argparse.ArgumentParser):
    """argparse whose help begins with an example and whose complaints have the form and code of all others."""

    example = None

    def __init__(self, *args, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def format_help(self):
        return (f"{self.example}\n\n" if self.example else "") + super().format_help()

    def error(self, message):
        _tell(f"{self.prog}: {message}\n    do       {self.prog} --help")
        raise SystemExit(BAD_INPUT)


def _parser():
    parser = _Parser(prog="qwenref", description=TOUR)
    parser.add_argument("--version", action="version", version=f"qwenref {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_inspect(verbs)
    _add_generate(verbs)
    return parser


def _verb(verbs, name, run, example, summary):
    verb = verbs.add_parser(name, help=summary, description=summary)
    verb.example = example
    verb.set_defaults(run=run)
    verb.add_argument("model", metavar="MODEL", help='"tiny", a folder, or a hub name such as Qwen/Qwen3.5-0.8B')
    verb.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    return verb


def _add_inspect(verbs):
    verb = _verb(
        verbs, "inspect", inspect, "qwenref inspect tiny --tree", "What a checkpoint holds; no weight is read."
    )
    verb.add_argument("--tree", action="store_true", help="the module tree, layers grouped by kind")
    verb.add_argument("--depth", type=_number("--depth", 0), metavar="N", help="the tree to N levels")
    tokens = _number("--cache", 0)
    verb.add_argument("--cache", type=tokens, nargs="+", metavar="N", help="cache size after N tokens, by part")
    verb.add_argument("--tensors", metavar="GLOB", help="tensors on disk: name, dtype, shape, file @ offset")


_NUMERICS = "fp32 (default), fp64, hf, hf-5.12, fla, state-bf16, kv-bf16 or chunk64; choices follow: fp32+kv=bf16"


def _add_generate(verbs):
    example = 'qwenref generate tiny "How much is 31 plus 23?"'
    verb = _verb(verbs, "generate", generate, example, "Continue a prompt greedily; text streams to standard output.")
    verb.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="a user's message (default with a template)")
    form.add_argument("--raw", action="store_false", dest="chat", help="the text as it is")
    verb.add_argument("--no-thinking", action="store_true", help="ask the chat template for an answer without thinking")
    verb.add_argument(
        "--max-new-tokens", type=_number("--max-new-tokens", 0), default=256, metavar="N", help="default 256"
    )
    verb.add_argument("--numerics", default="fp32", metavar="P", help=_NUMERICS)
    verb.add_argument("--stats", action="store_true", help="tokens, time and why it ended, on standard error")


def _number(name, least):
    def number(word):
        try:
            value = int(word.replace(",", "").replace("_", ""))
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{word!r} is not a number of at least {least}")
        return value

    return number


# Printing


def _prepare_streams():
    """A terminal that cannot show a character gets a substitute instead of an error in mid-sentence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses what is no text, and says where


def _width():
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def _show(text):
    print(plain(text, sys.stdout))


def _stream(piece):
    sys.stdout.write(piece)
    sys.stdout.flush()


def _show_json(kind, facts):
    print(json.dumps({"schema": f"qwenref.{kind}/1", "version": __version__, **facts}, ensure_ascii=True))


def _tell(text):
    sys.stdout.flush()
    print(plain(text, sys.stderr), file=sys.stderr)


def _explain(error):
    """One message on standard error, and the code for it.  A fault of ours is called one."""
    from qwenref import errors

    if os.environ.get("QWENREF_TRACEBACK") == "1":
        traceback.print_exception(error)
    expected = isinstance(error, (errors.QwenrefError, OSError, MemoryError))
    what = f"{type(error).__name__}: {error}"
    notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", ()))
    if expected:
        _tell(what + notes)
    else:
        _tell(f"internal error: {what}{notes}\n    do       QWENREF_TRACEBACK=1 shows where; please report it")
        return INTERNAL
    if isinstance(error, errors.Unreachable):
        return UNREACHABLE
    return FINDING if isinstance(error, errors.NonFiniteError) else BAD_INPUT
