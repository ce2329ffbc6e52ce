"""Verbs that look at engines and at the machine: compare, record, doctor."""

import contextlib
import os

from qwenref.cli_base import FINDING, FINE, INTERRUPTED, add_verb, show, show_document, show_json, whole_number, width

# What a comparison is asked for: of engines and texts alike, and of engines alone.
_OF_BOTH = ("jitter", "precision")
_OF_ENGINES = ("mode", "draws", "engine_weights", "explain", "until_decided", "truth", "workers", "dask")
_STOPPED = "interrupted"  # the finding of a comparison that was
_ENGINE = "KIND:REST, KIND+http://HOST:PORT or a recorded run PATH.jsonl; see the examples in qwenref/engines/README.md"


def add(verbs):
    """Their words."""
    _add_compare(verbs)
    _add_record(verbs)
    _add_doctor(verbs)


# Verbs


def compare(options):
    from qwenref.compare.options import refuse

    _refuse_contradictions(options)
    refuse(**_given(options, *_OF_BOTH, "mode", "explain", "draws", "until_decided"))
    _free_outputs(options)
    report = _pasted(options) if options.text else _compared(options)
    return _told(report, options)


def _compared(options):
    """The Report of one engine, or of two with the reference between them."""
    from qwenref.compare import compare
    from qwenref.compare.opening import reference

    for spec in options.engine:
        _known_engine(spec)
    activations = _activations(options)
    model = reference(options.model)
    if activations is not None:
        _fits(model, *activations)
    asked = _suite(options.suite or "quick", model)
    report = compare(model, options.engine, asked, **_given(options, *_OF_BOTH, *_OF_ENGINES))
    return report if activations is None or _interrupted(report) else _localised(report, model, *activations)


def _pasted(options):
    """The Report of two answers that were pasted into files."""
    from qwenref.compare import pasted
    from qwenref.compare.opening import ids_of, reference

    ids_of(options.prompt_ids)  # what is no list of ids is said before the model is opened
    texts = [_text(path) for path in options.text]
    model = reference(options.model)
    return pasted(model, ids_of(options.prompt_ids, model), *texts, **_given(options, *_OF_BOTH))


def _given(options, *names):
    """{name: value} of what was said on the command line."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _refuse_contradictions(options):
    from qwenref.errors import InputError, compose

    wrong = None
    lost = [
        f"--{name.replace('_', '-')}"
        for name in _given(options, "suite", "activations", "activations_order", *_OF_ENGINES)
    ]
    if options.text and options.engine:
        wrong = "--text is about two texts, --engine about an engine"
    elif options.text and not options.prompt_ids:
        wrong = "--text needs the ids both texts answer: --prompt-ids FILE"
    elif options.text and lost:
        wrong = f"--text takes no {', '.join(lost)}, only --jitter and --precision"
    elif not options.text and not options.engine:
        wrong = "nothing to compare with: --engine SPEC, or --text A B"
    elif len(options.engine) > 2:
        wrong = f"{len(options.engine)} engines: at most two"
    elif len(options.engine) > 1 and options.activations:
        wrong = "--activations are those of one engine: name it alone"
    elif options.prompt_ids and not options.text and not options.activations:
        wrong = "--prompt-ids goes with --text or --activations"
    elif options.activations_order and not options.activations:
        wrong = "--activations-order goes with --activations"
    elif options.workers and options.dask:
        wrong = "--workers or --dask"
    if wrong:
        raise InputError(compose(f"compare: {wrong}", do="qwenref compare --help"))


def _free_outputs(options):
    """Every file that will be written is free, and no two are one."""
    from qwenref.compare.report import free, positions_file
    from qwenref.errors import InputError, compose

    outputs = [path for path in (options.html, options.junit, _json_file(options)) if path]
    if _json_file(options):
        outputs.append(positions_file(options.json))
    if len({os.path.abspath(path) for path in outputs}) < len(outputs):
        raise InputError(compose("compare: two results in one file", found=", ".join(outputs)))
    for path in outputs:
        free(path, options.force)


def _json_file(options):
    return options.json if options.json != "-" else None


def _activations(options):
    """(values, ids) of the file of activations, or None."""
    if not options.activations:
        return None
    from qwenref.compare.layouts import read
    from qwenref.compare.opening import ids_of
    from qwenref.errors import InputError, compose

    found = read(options.activations)
    ids = ids_of(options.prompt_ids) if options.prompt_ids else found.ids
    if ids is None:
        do = "--prompt-ids FILE, or an array input_ids in the file"
        raise InputError(compose(f"{options.activations}: of which token ids?", do=do))
    return found.values, ids, options.activations_order or "hf"


def _fits(model, values, ids, order):
    from qwenref.compare.layouts import aligned
    from qwenref.compare.opening import checked_ids

    aligned(model, values, len(checked_ids(ids, "activations", model)), order)


def _localised(report, model, values, ids, order):
    from qwenref.compare.localise import localise, localised

    try:
        return localised(report, localise(model, ids, values, order=order))
    except KeyboardInterrupt:
        return report.noted(_STOPPED, "warning", "interrupted: activations were not looked at")


def _interrupted(report):
    """Whether a Report, or one of those within it, is of work that was interrupted."""
    reports = [report.to_dict(), *(report.arbiter or {}).get("reports", ())]
    return any(found["code"] == _STOPPED for each in reports for found in each["findings"])


def _text(path):
    from qwenref.errors import InputError, compose

    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except ValueError as error:
        raise InputError(compose(f"{path}: no text", found=error, expected="UTF-8")) from error


def _told(report, options):
    """Print and write the forms that were asked for; the exit code."""
    from qwenref.compare.report import Report

    repro = {"argv": ["qwenref", *options.words], "env": _settings()}
    report = Report({**report.to_dict(), "repro": repro}, report.arrays)
    made = [("html", options.html), ("junit", options.junit), ("json", _json_file(options))]
    for form, path in made:
        if path:
            getattr(report, f"to_{form}")(path, force=options.force)
    if options.json == "-":
        show_document(report.to_dict())
    else:
        show(report.text(width()))
        written = ", ".join(path for _, path in made if path)
        if written:
            show(f"written: {written}")
    return INTERRUPTED if _interrupted(report) else report.exit_code


def _settings():
    return {name: value for name, value in sorted(os.environ.items()) if name in ("QWENREF_NUM_THREADS", "QWENREF_CPU")}


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
        show(f"next: qwenref compare {options.model or 'MODEL'} --engine {options.output} --suite {options.suite}")
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


def _add_compare(verbs):
    summary = "Whether an engine is inside what rounding explains of the reference; if not, since where and of what."
    example = "qwenref compare tiny --engine reference:tiny?numerics=hf"
    verb = add_verb(verbs, "compare", compare, example, summary, json=False)
    _add_engine(verb, None, action="append", default=[])
    verb.add_argument("--text", nargs=2, metavar=("A", "B"), help="two answers pasted into files, in place of engines")
    verb.add_argument("--prompt-ids", metavar="FILE", help="token ids that both answer, or that activations belong to")
    group = verb.add_argument_group("how")
    group.add_argument("--jitter", type=whole_number("--jitter", 1), metavar="J", help="rounding variants; 8 or 16")
    group.add_argument("--mode", choices=("greedy", "sample", "rl"), help="default greedy")
    draws = "tokens that modes sample and rl draw; default 4,096"
    group.add_argument("--draws", type=whole_number("--draws", 1), metavar="N", help=draws)
    group.add_argument(
        "--precision", metavar="P", help="what the engine claims: bf16, fp16, fp32, fp8, int8, int4, a GGUF type"
    )
    group.add_argument("--engine-weights", metavar="DIR", help="the engine's own weights, dequantised, as a checkpoint")
    group.add_argument("--explain", choices=("auto", "always", "never"), help="hold known faults against the error")
    group.add_argument("--activations", metavar="FILE", help="the engine's, npz or safetensors, by our site names")
    orders = "order of value heads in it; default hf"
    group.add_argument("--activations-order", choices=("hf", "gguf"), help=orders)
    until = "stop asking as soon as the odds decide; mode greedy"
    group.add_argument("--until-decided", action="store_true", default=None, help=until)
    group.add_argument("--truth", choices=("fp64", "fp32"), help="what errors are counted from; fp32 needs less memory")
    group.add_argument("--workers", type=whole_number("--workers", 1), metavar="N", help="processes that score")
    group.add_argument("--dask", metavar="URL", help="a Dask cluster that scores, tcp://HOST:PORT")
    group = verb.add_argument_group("results")
    group.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the document; without FILE alone on stdout"
    )
    group.add_argument("--html", metavar="FILE", help="one page that needs no other file and no network")
    group.add_argument("--junit", metavar="FILE", help="test cases for continuous integration")
    group.add_argument("--force", action="store_true", help="write over files")


def _add_engine(verb, asked, **options):
    verb.add_argument("--engine", metavar="SPEC", help=_ENGINE, **options)
    suites = "quick (4 prompts), standard (16), deep (66), or a file"
    verb.add_argument("--suite", default=asked, metavar="S", help=f"{suites}; default quick")


def _add_record(verbs):
    summary = "What an engine answers to a suite, written down for a comparison elsewhere."
    example = "qwenref record tiny --engine reference:tiny?numerics=hf -o run.jsonl"
    verb = add_verb(verbs, "record", record, example, summary, model="?")
    _add_engine(verb, "quick", required=True)
    verb.add_argument("-o", "--output", required=True, metavar="FILE", help="JSON lines of qwenref.run/1")
    most = whole_number("--k", 1)
    verb.add_argument("--k", type=most, default=20, metavar="K", help="log-probabilities a position; default 20")
    way = verb.add_mutually_exclusive_group()
    way.add_argument("--force", action="store_true", help="write over a file")
    way.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")


def _add_doctor(verbs):
    summary = "What is installed, what the machine has, and whether a checkpoint runs: ok, warning or fault."
    add_verb(verbs, "doctor", doctor, "qwenref doctor", summary, model="?")
