"""The client of engines over HTTP against servers that are broken or mean harm: none hangs, crashes or fools it."""

import gzip
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from standins.serving import Refused, send, serving

from qwenref.compare.errors import (
    CompareError,
    EngineContractViolation,
    EngineRejected,
    EngineUnreachable,
)
from qwenref.engines.http import Client
from qwenref.errors import CapabilityMissing, InputError

QUICK = (0.01, 0.01, 0.01)


def asked(answer, *, deadline=20.0, limit=1000, body=None, optional=(), **options):
    """What the client makes of one POST to a server that answers so."""
    with serving(answer) as (url, seen):
        client = Client(url, deadline=deadline, pauses=QUICK, **options)
        try:
            return client.post("/x", body or {"prompt": [1, 2]}, limit=limit, optional=optional), seen
        finally:
            client.close()


def says(**headers):
    """A server that sends these bytes."""
    body = headers.pop("body")
    return lambda request, handler: send(handler, body, **headers)


def drip(piece, every, head=b""):
    """A server that never ends its answer."""

    def answer(request, handler):
        handler.wfile.write(head)
        while True:
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(every)

    return answer


LOOPBACK = Path(__file__).parent / "data" / "http" / "loopback.pem"
OK = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"


def test_what_is_asked_and_what_is_answered():
    found, [request] = asked(lambda request, handler: {"tokens": [1, 2, 3], "text": "ü"}, key="secret")
    assert found["tokens"].ids() == [1, 2, 3] and found["text"].text() == "ü" and "nothing" not in found
    assert request.body == {"prompt": [1, 2]} and request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "head, piece, every",
    [(OK, b" ", 0.02), (b"HTTP/1.0 200 OK\r\n", b"X: y\r\n", 0.02), (b"HTTP/1.0 20", b"0", 0.02), (OK, b"", 5)],
    ids=["body", "headers", "status line", "silence"],
)
def test_a_slow_drip_ends_at_the_deadline(head, piece, every):
    with pytest.raises(EngineUnreachable, match="no whole answer in 0.3 s"):
        asked(drip(piece, every, head), deadline=0.3, limit=10**9)


def test_a_server_that_accepts_and_says_nothing_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", deadline=0.3)
        with pytest.raises(EngineUnreachable, match="no whole answer in 0.3 s"):
            client.get("/")


def test_a_slow_drip_under_tls_ends_at_the_deadline():
    with serving(drip(b" ", 0.02, OK), LOOPBACK) as (url, _):
        client = Client(url, deadline=0.4, certificates=LOOPBACK)
        with pytest.raises(EngineUnreachable, match="no whole answer in 0.4 s"):
            client.get("/x", limit=10**9)


def test_a_certificate_has_to_be_one_that_is_trusted():
    with serving(lambda request, handler: {"a": 1}, LOOPBACK) as (url, _):
        assert Client(url, certificates=LOOPBACK).get("/x")["a"].whole() == 1
        with pytest.raises(EngineUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            Client(url).get("/x")
    for wrong in (Path(__file__), "not/there.pem", 3):
        with pytest.raises(InputError, match="a PEM file of authorities"):
            Client("https://localhost:1", certificates=wrong)


def test_an_endless_body_ends_at_what_was_asked_for():
    with pytest.raises(EngineRejected, match="longer than what was asked for"):
        asked(drip(b"1" * 65536, 0, OK), limit=10**6)


@pytest.mark.parametrize("length", [10**12, 10**30, -1, "x"])
def test_a_wrong_content_length_is_no_harm(length):
    with pytest.raises((EngineRejected, EngineUnreachable)):
        asked(says(body=b'{"a": 1}', Content_Length=length), deadline=2)


def test_a_body_that_breaks_off_is_an_error():
    with pytest.raises(EngineUnreachable, match="breaks off is the engine's fault"):
        asked(says(body=b'{"a": 1}', Content_Length=20))


def test_a_body_longer_than_its_length_is_read_to_its_length():
    found, _ = asked(says(body=b'{"a": 1}{"a": 2}', Content_Length=8))
    assert found["a"].whole() == 1


def test_a_compressed_answer_is_refused_unread():
    bomb = gzip.compress(b"0" * 10**7)
    with pytest.raises(EngineRejected, match="encoding that was not asked for"):
        asked(says(body=bomb, Content_Encoding="gzip"), limit=10**6)


@pytest.mark.parametrize(
    "body, words",
    [
        (b"\xff{}", "byte 0 is no UTF-8"),
        (b'{"a": "\xc3', "byte 7 is no UTF-8"),
        (b"<html><body>Please log in</body></html>", "Please log in"),
        (b"", "Expecting value"),
        (b'{"a": 1', "no JSON"),
        (b"[" * 900, "nested too deep|no JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "no JSON"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
    ],
    ids=["bytes", "cut", "page", "empty", "broken off", "deep", "digits", "two"],
)
def test_an_answer_that_is_no_json_is_refused_and_says_why(body, words):
    with pytest.raises(EngineRejected, match=words):
        asked(says(body=body), limit=10**5)


def test_brackets_nested_deeper_than_any_stack_are_refused():
    with pytest.raises(EngineRejected, match="nested too deep"):
        asked(says(body=b"[" * 200_000 + b"]" * 200_000), limit=10**6)


def test_a_name_twice_in_an_object_is_a_breach_of_contract():
    with pytest.raises(EngineContractViolation, match="same name twice.*\n.*'token_id:5'"):
        asked(says(body=b'{"token_id:5": -1.0, "token_id:5": -2.0}'))


@pytest.mark.parametrize(
    "value, read, words",
    [
        ('"x"', lambda f: f.whole(), "'x'"),
        ("true", lambda f: f.whole(), "True"),
        ("1e999", lambda f: f.whole(), "inf"),
        ("1" * 400, lambda f: f.whole(), "many digits"),
        ("-1", lambda f: f.whole(), "-1"),
        ("3", lambda f: f.text(), "an int"),
        ('"\\ud800"', lambda f: f.text(), "surrogate"),
        ("null", lambda f: f.text(), "an object with b"),
        ("[1]", lambda f: f[3], "a list of 1"),
        ("[1]", lambda f: f["x"], "a list"),
        ("1", lambda f: f.flag(), "an int"),
    ],
)
def test_a_value_of_another_kind_is_a_breach_of_contract_that_says_where(value, read, words):
    found, _ = asked(says(body=b'{"b": 1, "a": %s}' % value.encode()))
    with pytest.raises(EngineContractViolation, match=words) as caught:
        read(found["a"])
    assert "/x {prompt: [1, 2]}: " in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("bad", ["-1", "2048", "1.0", "true", '"2"', "9" * 300, "[2]", "null"])
def test_an_id_outside_of_the_vocabulary_is_a_breach_of_contract_that_says_which(bad):
    found, _ = asked(says(body=b'{"ids": [1, %s]}' % bad.encode()))
    with pytest.raises(EngineContractViolation, match=r"ids\[1\]\n.*\n.*0 to 2,047"):
        found["ids"].ids(2048)


def test_three_retries_and_only_where_the_server_asks_to_come_again():
    for status, count in ((429, 4), (502, 4), (503, 4), (500, 1), (504, 1), (404, 1)):
        tries = []

        def answer(request, handler, status=status, tries=tries):
            tries.append(1)
            raise Refused(status, {"error": "no"})

        with pytest.raises(EngineRejected, match=f"HTTP {status}: no") as caught:
            asked(answer)
        assert len(tries) == count and caught.value.status == status


def test_a_server_that_becomes_ready_is_asked_again():
    answers = iter([Refused(503, {}), Refused(429, {}), None])

    def answer(request, handler):
        refused = next(answers)
        if refused:
            raise refused
        return {"a": 1}

    assert asked(answer)[0]["a"].whole() == 1


def test_a_pause_that_the_deadline_does_not_leave_ends_at_once():
    begun = time.monotonic()
    with pytest.raises(EngineUnreachable, match="no whole answer in 5 s"):
        asked(says(body=b"{}", status=503, Retry_After=9), deadline=5.0)
    assert time.monotonic() - begun < 4  # it did not sleep


def test_a_redirect_to_another_host_is_not_followed_and_gets_no_key():
    with serving(lambda request, handler: {}) as (other, seen):
        for status in (301, 302, 303, 307, 308):
            with pytest.raises(EngineRejected, match=f"HTTP {status} to {other}/x"):
                asked(says(body=b"", status=status, Location=f"{other}/x?token=1"), key="secret")
    assert seen == []


def test_a_redirect_on_the_same_host_is_followed_a_few_times():
    def answer(request, handler):
        if request.path == "/x":
            return send(handler, b"", 308, Location="/x/")
        return {"method": request.method, "body": request.body}

    found, _ = asked(answer)
    assert found["method"].text() == "POST" and found["body"].object() == {"prompt": [1, 2]}
    with pytest.raises(EngineRejected, match="redirected, and not followed"):
        asked(says(body=b"", status=308, Location="/x"))
    with pytest.raises(EngineRejected, match="keep the method"):
        asked(says(body=b"", status=302, Location="/y"))
    with pytest.raises(EngineRejected, match="redirected, and not followed"):
        asked(says(body=b"", status=308))


@pytest.mark.parametrize(
    "said, field",
    [
        ({"detail": [{"loc": ["body", "top_k"], "msg": "Extra inputs are not permitted"}]}, "top_k"),
        ({"error": {"message": "bad", "param": "top_k", "code": 400}}, "top_k"),
        ({"error": {"message": "Field 'top_k': type must be number", "code": 400}}, "top_k"),
        ({"error": "unknown option top_k"}, "top_k"),
        ({"error": "no"}, None),
        (["no"], None),
        ({"detail": {"a": 1}}, None),
    ],
)
def test_the_field_a_server_names_is_the_field_of_the_error(said, field):
    def answer(request, handler):
        raise Refused(400, said)

    with pytest.raises(EngineRejected) as caught:
        asked(answer, body={"prompt": "x", "top_k": 0})
    assert caught.value.field == field and caught.value.status == 400
    assert ("because of top_k" in str(caught.value)) == (field is not None)


def test_a_request_goes_once_more_without_the_optional_field_that_was_named():
    def answer(request, handler):
        if "min_p" in request.body:
            raise Refused(400, {"error": "unknown field `min_p`"})
        return {"left": sorted(request.body)}

    body = {"prompt": "x", "min_p": 0, "top_k": 0}
    found, seen = asked(answer, body=body, optional=("min_p", "top_k"))
    assert found["left"].value == ["prompt", "top_k"] and len(seen) == 2
    with pytest.raises(EngineRejected, match="because of min_p"):
        asked(answer, body=body, optional=("top_k",))


def test_optional_fields_refused_one_after_the_other_are_all_left_out():
    def answer(request, handler):
        for name in ("top_k", "min_p"):
            if name in request.body:
                raise Refused(400, {"error": {"message": "unknown", "param": name}})
        return {"left": sorted(request.body)}

    body = {"prompt": "x", "min_p": 0, "top_k": 0, "seed": 0}
    found, seen = asked(answer, body=body, optional=("seed", "min_p", "top_k"))
    assert found["left"].value == ["prompt", "seed"] and len(seen) == 3


def test_where_no_field_is_named_every_optional_one_is_left_out_and_stays_so():
    def answer(request, handler):
        if len(request.body) > 1:
            raise Refused(422, {"error": "no"})
        return {}

    with serving(answer) as (url, seen):
        client = Client(url)
        for _ in range(2):
            client.post("/x", {"prompt": "x", "min_p": 0, "top_k": 0}, optional=("min_p", "top_k"))
        assert client.dropped == {"min_p", "top_k"} and len(seen) == 3


def test_no_message_shows_the_key_or_a_password():
    def answer(request, handler):
        raise Refused(401, {"error": {"message": f"{request.headers['Authorization']} is not known"}})

    with serving(answer) as (url, _):
        for address, key in ((url, "sk-topsecret"), (url.replace("//", "//me:topsecret@"), None)):
            client = Client(address, key=key)
            with pytest.raises(EngineRejected, match="is not known") as caught:
                client.post("/x", {})
            assert "secret" not in str(caught.value) + client.url and "***" in str(caught.value)
            assert "bWU6" not in str(caught.value) and "give the key" in str(caught.value)


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown():
    for key in ("secret\nb", "secretä", 3):
        with pytest.raises(InputError, match="a key that no header can carry") as caught:
            Client("http://localhost:1", key=key)
        assert "secret" not in str(caught.value)


def test_a_key_comes_from_the_environment_by_its_name(monkeypatch):
    monkeypatch.setenv("QWENREF_API_KEY", "usual")
    monkeypatch.setenv("ANOTHER", "named")
    for options, expected in (({}, "usual"), ({"key_env": "ANOTHER"}, "named"), ({"key": "given"}, "given")):
        _, [request] = asked(lambda request, handler: {}, **options)
        assert request.headers["Authorization"] == f"Bearer {expected}"
    with pytest.raises(InputError, match="NOT_THERE, which is not set"):
        Client("http://localhost:1", key_env="NOT_THERE")


def test_neither_proxies_nor_passwords_of_the_environment_are_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    os.chmod(tmp_path / "netrc", 0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("QWENREF_API_KEY", raising=False)
    _, [request] = asked(lambda request, handler: {})
    assert request.headers["Authorization"] is None


def test_nothing_listens_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineUnreachable, match="Connection refused") as caught:
        Client(f"http://127.0.0.1:{port}").get("/v1/models")
    assert caught.value.exit_code == 4 and f"GET http://127.0.0.1:{port}/v1/models" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://x", "http://", "http://x/?q=1", 3, "http://[::1", "http://x:y"]
)
def test_an_address_that_is_none(url):
    with pytest.raises(InputError, match="an address that is none"):
        Client(url)


@pytest.mark.parametrize("deadline", [0, -1, "x", None, True, float("nan"), float("inf")])
def test_a_deadline_that_is_none(deadline):
    with pytest.raises(InputError, match="deadline"):
        Client("http://localhost:1", deadline=deadline)


def test_one_request_at_a_time_unless_more_are_asked_for():
    under_way, most, lock = 0, [], threading.Lock()

    def answer(request, handler):
        nonlocal under_way
        with lock:
            under_way += 1
            most.append(under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1
        return {}

    def four(client):
        most.clear()
        threads = [threading.Thread(target=client.get, args=("/x",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(most)

    with serving(answer) as (url, _):
        client = Client(url)
        assert four(client) == 1
        with client.together(4):
            assert four(client) > 1
        assert four(client) == 1


def test_random_bytes_and_cut_answers_give_nothing_but_the_errors_of_a_comparison():
    import random

    draw = random.Random(5)
    whole = json.dumps({"tokens": [1, 2], "completion_probabilities": [{"id": 1, "logprob": -0.5}] * 3}).encode()
    bodies = [draw.randbytes(draw.randrange(60)) for _ in range(60)]
    for _ in range(60):
        at = draw.randrange(len(whole))
        bodies.append(whole[:at] + bytes([draw.randrange(256)]) + whole[at + draw.randrange(3) :])
    answers = iter(bodies)
    with serving(lambda request, handler: send(handler, next(answers))) as (url, _):
        client = Client(url)
        for _ in bodies:
            try:
                found = client.get("/x")
                found["completion_probabilities"].items()[0]["logprob"].logprob()
                found["tokens"].ids(10)
            except CompareError:
                pass


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(CapabilityMissing, match=r"qwenref\[compare\]"):
        Client("http://localhost:1")
