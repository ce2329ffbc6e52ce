"""Answers with one value changed: an adapter refuses them, or what it makes of them is ids and log-probabilities."""

import copy
import json
from types import SimpleNamespace

import pytest
from standins.opening import IDS_IN, STANDIN, answering
from standins.serving import Refused

from qwenref.compare.errors import CompareError
from qwenref.engines import adapter, fields, reference, refusals

NO_LOGPROBS = [float("nan"), float("inf"), 10**400, 1.5, True, "x", {}, [[]]]
OTHERS = [None, -1, 10**400, 10**9, float("nan"), 1.5, True, "x", "\ud800", [], {}, [[]]]


@pytest.fixture(scope="module")
def tiny():
    return reference.open("tiny")


class Told:
    """In place of an engine's client: a stand-in without a server, one of whose answers can be changed."""

    def __init__(self, answer, optional):
        self._answer, self._optional = answer, optional
        self.answers, self.change = {}, None

    def ask(self, path, body=None, **_):
        body = {name: value for name, value in (body or {}).items() if name not in self._optional}
        key = path, json.dumps(body, sort_keys=True)
        if key not in self.answers:
            try:
                self.answers[key] = self._answer(SimpleNamespace(method="POST", path=path, body=body), None)
            except Refused as refused:
                said = json.dumps(refused.body).encode()
                raise refusals.rejected("POST " + path, refused.status, said, body, str) from None
        value = self.answers[key]
        if self.change is not None and self.change[0] == key:
            value = changed(value, *self.change[1:])
        return fields.read(json.dumps(value).encode(), "POST " + path, "")


@pytest.fixture
def engine(request, tiny):
    kind = request.param
    how = {} if kind in IDS_IN else {"tokenizer": tiny.model.tokenizer}
    engine = adapter(kind).open("http://127.0.0.1:9", model="tiny", vocab=1280, **how)
    engine.client.close()
    engine.client = Told(answering(kind, tiny, tiny.model.tokenizer), engine.OPTIONAL)
    engine.client.get = engine.client.post = engine.client.ask
    engine.capabilities()  # with the right answers: only those to `ask` are changed
    engine.client.answers.clear()
    return engine


def ask(engine):
    """Rows of a score, where there is one, and of a short answer."""
    able = engine.capabilities()
    rows = engine.score([5, 6, 7], 3).rows if able.prompt_logprobs else []
    return rows + list(engine.generate([5, 6, 7] if able.ids_in else "abc", 2, 3).rows)


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(value, path, new):
    if not path:
        return new
    found = copy.deepcopy(value)
    at(found, path[:-1])[path[-1]] = new
    return found


def is_logprob(path, value):
    return isinstance(value, float) and any("logprob" in key for key in path if isinstance(key, str))


@pytest.mark.parametrize("engine", STANDIN, indirect=True)
def test_any_value_changed_is_refused_or_does_no_harm(engine):
    right = ask(engine)
    tried = 0
    for key, value in list(engine.client.answers.items()):
        for path in places(value):
            known = is_logprob(path, at(value, path))
            for new in NO_LOGPROBS if known else OTHERS:
                engine.client.change = (key, path, new)
                tried += 1
                try:
                    rows = ask(engine)
                except CompareError:
                    continue
                assert not known, (key, path, new)
                for row in rows:
                    assert row is None or all(0 <= id < 1280 for id in row.ids) and (row.logprobs <= 1e-6).all()
    engine.client.change = None
    assert len(ask(engine)) == len(right) and tried > 500
