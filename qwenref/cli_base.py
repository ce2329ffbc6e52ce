"""What all verbs of the command line share: words and their errors, and how results are printed."""

import argparse
import json
import os
import shutil
import sys
import traceback

from qwenref._version import __version__
from qwenref.plain import plain

FINE, FINDING, UNDECIDED, BAD_INPUT, UNREACHABLE = range(5)
INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141

# Words


class Parser(argparse.ArgumentParser):
    """argparse whose help begins with an example and whose complaints have the form and code of all others."""

    example = None

    def __init__(self, *args, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def format_help(self):
        return (f"{self.example}\n\n" if self.example else "") + super().format_help()

    def error(self, message):
        tell(f"{self.prog}: {message}\n    do       {self.prog} --help")
        raise SystemExit(BAD_INPUT)


def add_verb(verbs, name, run, example, summary, json=None, model=None):
    """A verb with MODEL and --json; `json` is what that is for, False leaves it to the verb."""
    verb = verbs.add_parser(name, help=summary, description=summary)
    verb.example = example
    verb.set_defaults(run=run)
    verb.add_argument(
        "model", metavar="MODEL", nargs=model, help='"tiny", a folder, or a hub name such as Qwen/Qwen3.5-0.8B'
    )
    if json is not False:
        said = json or "one JSON document on standard output, nothing else"
        verb.add_argument("--json", action="store_true", help=said)
    return verb


def whole_number(name, least):
    """The `type` of an option that takes a whole number, separators allowed."""

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


def prepare_streams():
    """A terminal that cannot show a character gets a substitute instead of an error in mid-sentence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses what is no text, and says where


def width():
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def show(text):
    print(plain(text, sys.stdout))


def write_exactly(text):
    """The text as UTF-8 and nothing else; a terminal, where a line has to end, gets a newline."""
    sys.stdout.flush()
    if sys.stdout.isatty() or not hasattr(sys.stdout, "buffer"):
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    else:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
        sys.stdout.buffer.flush()


def stream(piece):
    sys.stdout.write(piece)
    sys.stdout.flush()


def show_json(kind, facts):
    show_document({"schema": f"qwenref.{kind}/1", "version": __version__, **facts})


def show_document(document):
    print(json.dumps(document, ensure_ascii=True), flush=True)


def tell(text):
    sys.stdout.flush()
    print(plain(text, sys.stderr), file=sys.stderr)


def explain(error):
    """One message on standard error, and the code for it.  A fault of ours is called one."""
    from qwenref import errors

    if os.environ.get("QWENREF_TRACEBACK") == "1":
        traceback.print_exception(error)
    expected = isinstance(error, (errors.QwenrefError, OSError, MemoryError))
    what = f"{type(error).__name__}: {error}"
    notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", ()))
    if expected:
        tell(what + notes)
    else:
        tell(f"internal error: {what}{notes}\n    do       QWENREF_TRACEBACK=1 shows where; please report it")
        return INTERNAL
    if hasattr(error, "exit_code"):  # of a comparison
        return error.exit_code
    if isinstance(error, errors.Unreachable):
        return UNREACHABLE
    return FINDING if isinstance(error, errors.NonFiniteError) else BAD_INPUT
