"""Servers that turn hostile in the middle of a comparison: it ends in time, with a report that says what happened."""

import json
import time

import pytest
from standins.engine import Probabilities
from standins.opening import STANDIN, answering, behind
from standins.serving import send, serving

from qwenref.compare import FaultyReference, Suite, compare, suite
from qwenref.compare.errors import EngineRejected, EngineUnreachable
from qwenref.engines import adapter

FAST = {"explain": "never", "jitter": 4}
HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"
DEADLINE = 4.0  # seconds of a request


@pytest.fixture(scope="module")
def two(tiny):
    kept = [item._replace(new=16) for item in suite("quick", tiny).prompts if item.kind in ("cjk", "recall")]
    return Suite("quick", tuple(kept))


# ---- what is sent in place of an answer: hostile(right answer, handler) --------------------------------------------


def endless(answer, handler):
    handler.wfile.write(HEAD + b'{"choices": [')
    while True:
        handler.wfile.write(b"1," * 32768)


def drip(answer, handler):
    handler.wfile.write(HEAD)
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def elsewhere(answer, handler):
    handler.send_response(307)
    handler.send_header("Location", "http://192.0.2.1/v1/completions")
    handler.end_headers()


def round_and_round(answer, handler):
    handler.send_response(307)
    handler.send_header("Location", handler.path)
    handler.end_headers()


def no_utf8(answer, handler):
    send(handler, json.dumps(answer).encode().replace(b'"choices"', b'"\xff\xc3"'))


def nothing(answer, handler):
    handler.wfile.write(b"")


def written(**new):
    """The right answer with numbers in place of the log-probabilities, or of the ids, of what was written."""

    def changed(answer, handler):
        choice = answer["choices"][0]
        if "value" in new:
            choice["logprobs"]["token_logprobs"][0] = "VALUE"
        else:
            choice["token_ids"][0] = "VALUE"
        raw = json.dumps(answer).encode().replace(b'"VALUE"', str(new.get("value", new.get("id"))).encode())
        send(handler, raw)

    return changed


HUGE = "9" * 400
GONE = [drip, nothing]
REFUSED = [endless, elsewhere, round_and_round, no_utf8]
WRONG = {
    "NaN": written(value="NaN"), "infinity": written(value="Infinity"), "huge number": written(value=HUGE),
    "1e999": written(value="1e999"), "above 0": written(value="3.5"), "text": written(value='"x"'),
    "id of many digits": written(id=HUGE), "id outside": written(id=1280), "id below 0": written(id=-1),
    "id in parts": written(id=1.5), "id of true": written(id="true"),
}  # fmt: skip


def against(tiny, asked, hostile, always=False):
    """The report of a server that is hostile at the second prompt, or always; it takes no longer than it may."""
    answer = answering("vllm+http", FaultyReference(tiny, jitter=1), tiny.tokenizer)
    bad = list(asked.prompts[1].ids)

    def turning(request, handler):
        right = answer(request, handler)
        prompt = (request.body or {}).get("prompt", [])
        if not request.path.endswith("/completions") or not (always or prompt[: len(bad)] == bad):
            return right
        hostile(right, handler)
        return None

    began = time.monotonic()
    with serving(turning) as (url, _), adapter("vllm+http").open(url, deadline=DEADLINE) as engine:
        engine.together = None  # the engine behind the server has one cache
        try:
            return compare(tiny, engine, asked, **FAST)
        finally:
            assert time.monotonic() - began < 60


def codes(report):
    return {found["code"] for found in report.findings}


@pytest.mark.parametrize("hostile", [*GONE, *REFUSED], ids=lambda each: each.__name__)
def test_a_server_that_turns_hostile_leaves_what_it_said_before(tiny, two, hostile):
    report = against(tiny, two, hostile)
    assert (report.status, report.exit_code) == ("INCONCLUSIVE", 4) and "failed" in report.summary
    assert codes(report) & {"engine-unreachable", "engine-rejected"} and len(report.strips) == 1
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("hostile", [drip, endless], ids=lambda each: each.__name__)
def test_a_server_that_is_hostile_from_the_first_request_is_an_error(tiny, two, hostile):
    with pytest.raises((EngineUnreachable, EngineRejected)) as caught:
        against(tiny, two, hostile, always=True)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_are_none_are_never_taken_for_some(tiny, two, what):
    report = against(tiny, two, WRONG[what])
    found = codes(report) & {"bad-logprobs", "bad-token-ids", "engine-contract"}
    assert found and (report.exit_code == 3 or len(report.strips) == 1)  # what was said so is not in it
    json.dumps(report.to_dict(), allow_nan=False)


def test_other_ids_than_were_chosen_are_outside(tiny, two):
    def other(answer, handler):
        choice = answer["choices"][0]
        if len(choice["token_ids"]) > 1:
            for at, id in enumerate(choice["token_ids"]):
                choice["token_ids"][at] = (id + 7) % 1200
                choice["logprobs"]["tokens"][at] = f"token_id:{choice['token_ids'][at]}"
        send(handler, answer)

    report = against(tiny, two, other)
    assert "engine-contract" in codes(report) or report.exit_code in (1, 3), (report.status, codes(report))


@pytest.mark.parametrize("kind", STANDIN)
def test_probabilities_in_place_of_their_logarithms_are_an_invalid_answer_of_every_server(tiny, two, kind):
    one = Suite("quick", two.prompts[:1])
    with behind(kind, Probabilities(FaultyReference(tiny)), tiny.tokenizer) as engine:
        engine.together = None
        report = compare(tiny, engine, one, **FAST)
    assert (report.status, report.exit_code) == ("INVALID", 3) and "bad-logprobs" in codes(report)
    assert "probabilities in place of log-probabilities" in report.summary
