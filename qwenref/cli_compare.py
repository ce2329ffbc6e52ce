"""Verbs that look at engines and at the machine: record, doctor."""

import contextlib

from qwenref.cli_base import FINDING, FINE, add_verb, show, show_json, whole_number, width

_ENGINE = "KIND:REST, KIND+http://HOST:PORT or a recorded run PATH.jsonl; see the examples in qwenref/engines/README.md"


def add(verbs):
    """Their words."""
    _add_record(verbs)
    _add_doctor(verbs)


# Verbs


def record(options):
    import qwenref
    from qwenref.compare.report import free
    from qwenref.compare.scoring import continued
    from qwenref.engines.record import record as write
    from qwenref.errors import InputError, compose

    if not options.resume:
        free(options.output, options.force)
    _known_engine(options.engine)
    if options.model is None and not options.suite.endswith(".jsonl"):
        do = "name the MODEL whose tokenizer makes its ids, or a file of ids: --suite FILE.jsonl"
        raise InputError(compose(f"record: suite {options.suite!r} without a model", do=do))
    model = None if options.model is None else qwenref.from_pretrained(options.model)
    asked = _suite(options.suite, model)
    own = None if model is None else lambda ids, new: continued(model, ids, new)
    with _engine(options.engine) as engine:
        written = write(
            engine,
            asked,
            options.output,
            k=options.k,
            continuations=own,
            force=options.force,
            resume=options.resume,
        )
    facts = {"engine": engine.name, "suite": asked.name, "prompts": len(asked.prompts), "records": written}
    if options.json:
        show_json("record", {"output": options.output, **facts})
    else:
        show(f"{options.output}: {written:,} records of {engine.name}, suite {asked.name}")
        show(f"next        qwenref compare {options.model or 'MODEL'} --engine {options.output}")
    return FINE


def doctor(options):
    from qwenref.doctor import FAULT, doctor, text

    checks = doctor(options.model)
    if options.json:
        show_json("doctor", {"checks": [check._asdict() for check in checks]})
    else:
        show(text(checks, width()))
    return FINDING if any(check.status == FAULT for check in checks) else FINE


def _suite(name, model):
    """A suite by its name, or of a file that `Suite.save` wrote."""
    from qwenref.compare.suites import Suite, suite

    return Suite.load(name) if name.endswith(".jsonl") else suite(name, model)


def _known_engine(spec):
    """Refuse a spec that is none before anything is opened."""
    from qwenref.engines import ADAPTERS, specs

    specs.parse(spec, ADAPTERS)


@contextlib.contextmanager
def _engine(spec):
    from qwenref import engines

    engine = engines.open(spec)
    try:
        yield engine
    finally:
        engine.close()


# Words


def _add_engine(verb, **options):
    verb.add_argument("--engine", metavar="SPEC", help=_ENGINE, **options)
    suites = "quick (4 prompts), standard (16), deep (66), or a file"
    verb.add_argument("--suite", default="quick", metavar="S", help=f"{suites}; default quick")


def _add_record(verbs):
    summary = "What an engine answers to a suite, written down for a comparison elsewhere."
    example = "qwenref record tiny --engine reference:tiny?numerics=hf -o run.jsonl"
    verb = add_verb(verbs, "record", record, example, summary, model="?")
    _add_engine(verb, required=True)
    verb.add_argument("-o", "--output", required=True, metavar="FILE", help="JSON lines of qwenref.run/1")
    most = whole_number("--k", 1)
    verb.add_argument("--k", type=most, default=20, metavar="K", help="log-probabilities a position; default 20")
    way = verb.add_mutually_exclusive_group()
    way.add_argument("--force", action="store_true", help="write over a file")
    way.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")


def _add_doctor(verbs):
    summary = "What is installed, what the machine has, and whether a checkpoint runs: ok, warning or fault."
    add_verb(verbs, "doctor", doctor, "qwenref doctor", summary, model="?")
