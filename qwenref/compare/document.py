"""The document of a comparison, schema qwenref.compare/1: its fields, plain values for JSON, and no secrets in it."""

import copy
import functools
import json
import math
import re
from importlib import resources

import numpy as np

from qwenref._version import __version__
from qwenref.compare.errors import ReportError
from qwenref.errors import a_kind, compose

SCHEMA = "qwenref.compare/1"

# What a document says where nothing was found; the fields of `schema.json`, in its order.
_BLANK = {
    "schema": SCHEMA, "created": None, "tool_version": __version__, "status": "INCONCLUSIVE", "cause": "none",
    "confidence": None, "summary": "", "exit_code": 2, "tier": None, "mode": "greedy", "reference": {"model": ""},
    "engine": {"name": ""}, "suite": {"name": "", "sha256": None, "prompts": 0, "positions": 0}, "envelope": {"J": 0},
    "decision_path": [], "stages": [], "stats": {}, "flips": [], "first_divergence": None, "strips": [],
    "hypotheses": [], "runner_up": None, "detection_limit": None, "localisation": None, "per_position_file": None,
    "findings": [], "blind_spots": [], "config_diff": [], "text_diffs": [], "arbiter": None,
    "repro": {"argv": [], "env": {}},
}  # fmt: skip
FIELDS = tuple(_BLANK)


@functools.cache
def schema():
    """The JSON Schema that every document keeps to."""
    return json.loads(resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))


def filled(fields):
    """A document with all fields: those that are given, in plain values, the others blank."""
    unknown = [name for name in fields if name not in _BLANK]
    if unknown:
        raise ReportError(compose(f"report: no field {unknown[0]!r}", expected=", ".join(FIELDS)))
    document = without_secrets({**copy.deepcopy(_BLANK), **plain_values(fields)})
    check(document)
    if document["arbiter"] is not None:
        document["arbiter"]["reports"] = [filled(report) for report in document["arbiter"]["reports"]]
    return document


def check(document):
    """Refuse a document that displays cannot rely on.  `schema.json` says more, and is for other programs."""
    if not isinstance(document, dict):
        raise ReportError(compose(f"report: {a_kind(document)}", expected=f"an object, schema {SCHEMA}"))
    if document.get("schema") != SCHEMA:
        raise _wrong("schema", document.get("schema"), SCHEMA)
    rules = schema()
    for name in rules["required"]:
        if name not in document:
            raise _wrong(name, "nothing", "the field")
    for name, rule in rules["properties"].items():
        if name in document:
            _check_value(name, document[name], rule)


def _check_value(path, value, rule):
    """Choices, kinds, and fields that must be there, as deep as the schema spells them out."""
    choices = rule.get("anyOf")
    if choices:
        if value is None:
            return
        rule = choices[0]
    if "$ref" in rule:
        return check(value)
    if "enum" in rule and value not in rule["enum"]:
        raise _wrong(path, value, ", ".join(map(str, rule["enum"])))
    if rule.get("type") == "object":
        if not isinstance(value, dict):
            raise _wrong(path, a_kind(value), "an object")
        for name in rule.get("required", ()):
            if name not in value:
                raise _wrong(f"{path}.{name}", "nothing", "the field")
        for name, inner in rule.get("properties", {}).items():
            if name in value:
                _check_value(f"{path}.{name}", value[name], inner)
    if rule.get("type") == "array":
        if not isinstance(value, list):
            raise _wrong(path, a_kind(value), "a list")
        for i, item in enumerate(value):
            _check_value(f"{path}[{i}]", item, rule["items"])


def _wrong(path, found, expected):
    error = ReportError(compose(f"report: {path}", found=found, expected=expected))
    error.path = path
    return error


def plain_values(value):
    """A value as JSON has it: NumPy's numbers and arrays as Python's, tuples as lists, what is not finite as None."""
    if isinstance(value, dict):
        return {str(key): plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return str(value)


# ---- secrets -----------------------------------------------------------------------------------------------------

HIDDEN = "***"
_KEY = "(?:api[-_]?key|(?:access|hf|api)[-_]?token|auth(?:orization)?|bearer|pass(?:word|wd)?|secret|credentials?)"
_NAMED = re.compile(rf"^-*(?:[\w-]*[-_])?{_KEY}$|^token$|^--?(?:key|token)$", re.I)  # fields and options
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.I)
_IN_TEXT = re.compile(rf"\b((?:[\w-]*[-_])?{_KEY}|key|token)(=|: ?)(?:(Bearer|Basic) )?[^\s&,;'\"]+", re.I)
_BEARER = re.compile(r"\b(Bearer|Basic) [A-Za-z0-9+/=._~-]{6,}")
# Kept to the letter: texts of models and tokenizers; and whole reports, which were hidden on their own.
_KEPT = ("strips", "flips", "first_divergence", "text_diffs", "arbiter")


def without_secrets(document):
    """The document without keys, tokens and passwords: those of addresses, of options and of fields so named."""
    return {name: value if name in _KEPT else _hidden(value) for name, value in document.items()}


def _hidden(value):
    if isinstance(value, dict):
        return {key: HIDDEN if _NAMED.match(key) and isinstance(inner, str) else _hidden(inner)
                for key, inner in value.items()}  # fmt: skip
    if isinstance(value, list):
        pairs = zip([None, *value], value, strict=False)  # a word, and the option it may be the value of
        return [
            HIDDEN if isinstance(word, str) and _names_a_secret(option) else _hidden(word) for option, word in pairs
        ]
    return _hidden_text(value) if isinstance(value, str) else value


def _names_a_secret(option):
    return isinstance(option, str) and option.startswith("-") and _NAMED.match(option) is not None


def _hidden_text(text):
    text = _ADDRESS.sub(r"\1", text)
    text = _IN_TEXT.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}", text)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)
