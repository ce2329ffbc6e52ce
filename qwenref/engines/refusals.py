"""What a server said when it refused, and what it was asked, in the few words a message has room for."""

import json
import re

from qwenref.compare.errors import EngineRejected
from qwenref.errors import compose

LONGEST = 300  # characters of what a server said
FIELDS = 4  # of a request that a message shows
ADVICE = {
    401: "give the key: key=..., or the environment variable QWENREF_API_KEY",
    403: "give a key that may do this, or start the engine with this route enabled",
    404: "look whether this address is that of the engine named, and the model's name: model=...",
    413: "ask for less at once",
    429: "wait, or ask less often",
    502: "look whether the engine behind the gateway runs",
    503: "wait until the engine has loaded its model",
}


def rejected(asked, status, raw, body, hide):
    """EngineRejected of an answer that is no success, with `status` and the `field` of the request that it names."""
    said, field = _said(raw, names(body or {}))
    error = EngineRejected(
        compose(
            f"{asked}: refused" + (f", because of {field}" if field else ""),
            found=f"HTTP {status}" + (f": {hide(said)}" if said else ", and no reason"),
            do=ADVICE.get(status),
        )
    )
    error.status, error.field = status, field
    return error


def shown(value, depth=0):
    """A request in short: its first fields, long lists by their length, long texts by their beginning."""
    if isinstance(value, dict):
        inside = [f"{name}: {shown(v, depth + 1)}" for name, v in list(value.items())[: FIELDS if depth < 2 else 0]]
        more = len(value) - len(inside)
        return "{" + ", ".join(inside + [f"and {more} more"] * (more > 0)) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(v, 2) for v in value)}]" if len(value) <= 4 else f"[{len(value):,} items]"
    if isinstance(value, str):
        return repr(value if len(value) <= 24 else value[:24] + "...")
    return json.dumps(value, default=repr)


def names(body):
    """The fields of a request, and of the objects in it."""
    return set(body).union(*(value for value in body.values() if isinstance(value, dict)))


def line(text, longest=LONGEST):
    """Foreign text on one line of printable characters, cut where it is long."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * longest]).split())
    return text if len(text) <= longest else text[:longest] + "..."


def _said(raw, fields):
    """(what the server said, the field of the request it named or None)."""
    text = raw[:65536].decode("utf-8", "replace")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return line(re.sub(r"<[^>]*>", " ", text)), None
    for detail in _list(_in(told, "detail")) + _list(_in(told, "details")):
        where = [part for part in _list(_in(detail, "loc")) if part in fields]
        if where:
            return line(f"{'.'.join(map(str, detail['loc']))}: {_in(detail, 'msg')}"), where[-1]
    error = _in(told, "error")
    said = next((v for v in (_in(error, "message"), error, _in(told, "message"), _in(told, "detail")) if _is(v)), text)
    named = _in(error, "param") or _in(told, "param")
    field = named.rpartition(".")[2] if isinstance(named, str) else None
    return line(said), field if field in fields else _named(said, fields)


def _named(said, fields):
    """The field of the request that stands in what was said: in quotes, or else as a word with an underscore."""
    for pattern in (r"[\"'`]([A-Za-z_][\w.]*)[\"'`]", r"\b([A-Za-z]+_\w+)\b"):
        for name in re.findall(pattern, said):
            if name in fields:
                return name
    return None


def _in(value, name):
    return value.get(name) if isinstance(value, dict) else None


def _list(value):
    return value if isinstance(value, list) else []


def _is(value):
    return isinstance(value, str) and value.strip()
