"""Requests to the server of an engine: one at a time, each bounded in time and size, every failure an error of ours.

A server may be wrong, broken or hostile.  Nothing it sends can make a request last longer than its deadline, take more
memory than the answer asked for could need, or send the key to another host.
"""

import base64
import contextlib
import os
import socket
import ssl
import threading
import time

from qwenref.compare.errors import EngineRejected, EngineUnreachable
from qwenref.engines import fields, refusals
from qwenref.errors import CapabilityMissing, InputError, compose

DEADLINE = 120.0  # seconds for a request: connecting, sending, reading, retries and the pauses between them
RETRIED = {429: "too many requests", 502: "bad gateway", 503: "not ready"}
PAUSES = (0.5, 1.0, 2.0)  # seconds before each retry, unless the server asks for another pause of at most LONGEST
LONGEST = 10.0
HOPS = 3  # redirects followed, on the same host alone
SMALL = 1 << 20  # bytes of an answer that lists nothing per token
KEY_VARIABLE = "QWENREF_API_KEY"
REDIRECTS, SAME_METHOD = {301, 302, 303, 307, 308}, {307, 308}


class Client:
    """A server by its address.

    `key` is sent as a bearer token, by default that of the environment variable QWENREF_API_KEY or the one `key_env`
    names; no message shows it.  `deadline` is in seconds, for a request with all its retries; `at_once` is how many
    requests may be under way together; `certificates` is a PEM file of authorities in place of the system's.
    """

    def __init__(self, url, *, key=None, key_env=None, deadline=DEADLINE, at_once=1, certificates=None, pauses=PAUSES):
        self._httpx = _httpx()
        address = _address(url, self._httpx)
        self._url, key = address.copy_with(username="", password=""), _key(key, key_env)
        self._secrets = [secret for secret in (key, address.password) if secret]
        self.deadline, self._pauses = _seconds(deadline), tuple(pauses)
        self._gate = threading.BoundedSemaphore(at_once)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "qwenref"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        elif address.password:
            basic = base64.b64encode(f"{address.username}:{address.password}".encode()).decode()
            headers["Authorization"] = f"Basic {basic}"
            self._secrets.append(basic)
        # A connection for each request: what is left over of one answer cannot be taken for the next. Proxies and
        # passwords of the environment are not for a server that was named by its address.
        limits = self._httpx.Limits(max_keepalive_connections=0)
        self._client = self._httpx.Client(
            headers=headers,
            limits=limits,
            trust_env=False,
            follow_redirects=False,
            verify=_trust(self._url, certificates),
        )
        self.dropped = set()  # optional fields this server refused

    @property
    def url(self):
        """The address, without a user name or password."""
        return str(self._url).rstrip("/")

    def close(self):
        self._client.close()

    @contextlib.contextmanager
    def together(self, count):
        """A span in which `count` requests may be under way at once."""
        before, self._gate = self._gate, threading.BoundedSemaphore(count)
        try:
            yield
        finally:
            self._gate = before

    def get(self, path, *, limit=SMALL):
        """What GET answers, as an `fields.Field`."""
        return self._ask("GET", path, None, limit)

    def post(self, path, body, *, limit=SMALL, optional=()):
        """What POST of a JSON body answers, as an `fields.Field`; `limit` is the most bytes it may have.

        A server that refuses a field of `optional` by its name gets the request once more without it, and so on; one
        that names none gets it once more without all of them.  What was refused is left out from then on, and is in
        `dropped`.  Fields may also stand in an object of the body.
        """
        body, left_out = _without(body, self.dropped), set()
        while True:
            try:
                answer = self._ask("POST", path, _without(body, left_out), limit)
                break
            except EngineRejected as error:
                further = {error.field} if error.field else set(optional)
                further = further & set(optional) & refusals.names(body) - left_out
                if error.status not in (400, 422) or not further:
                    raise
                left_out |= further
        self.dropped |= left_out
        return answer

    def _ask(self, method, path, body, limit):
        asked = f"{method} {self.url}{path}" + (f" {refusals.shown(body)}" if body is not None else "")
        with self._gate, _Deadline(self.deadline) as deadline:
            try:
                status, headers, raw = self._answered(method, path, body, limit, deadline, asked)
                deadline.left()  # a body without a length may end by being cut off
            except self._httpx.InvalidURL as error:
                raise EngineRejected(compose(f"{asked}: sent to an address that is none", found=error)) from None
            except (self._httpx.HTTPError, OSError) as error:
                raise self._unreachable(asked, error, deadline) from None
        if status // 100 != 2:
            raise refusals.rejected(asked, status, raw, body, self._hide)
        return fields.read(raw, asked, headers.get("content-type", ""), self._hide)

    def _answered(self, method, path, body, limit, deadline, asked):
        """(status, headers, body) of the first answer that is no redirect and no request to come again."""
        url, tries, hops = self._url.copy_with(path=self._url.path.rstrip("/") + path), 0, 0
        while True:
            status, headers, raw = self._once(method, url, body, limit, deadline, asked)
            if status in REDIRECTS:
                hops += 1
                url = self._next(url, method, status, headers, hops, asked)
            elif status in RETRIED and tries < len(self._pauses):
                deadline.pause(_pause(headers, self._pauses[tries]))
                tries += 1
            else:
                return status, headers, raw

    def _once(self, method, url, body, limit, deadline, asked):
        request = self._client.build_request(
            method,
            url,
            json=body,
            timeout=self._httpx.Timeout(deadline.left()),
            extensions={"trace": deadline.watch},
        )
        response = self._client.send(request, stream=True)
        try:
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                found = f"Content-Encoding: {refusals.line(response.headers['content-encoding'])}"
                raise EngineRejected(compose(f"{asked}: an answer in an encoding that was not asked for", found=found))
            room = limit if response.status_code // 100 == 2 else min(limit, SMALL)
            return response.status_code, response.headers, _bounded(response, room, asked)
        finally:
            response.close()

    def _next(self, url, method, status, headers, hops, asked):
        """Where a redirect leads, if it stays on this host and keeps the method."""
        where = headers.get("location", "")
        target = url.join(where)
        same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
        if where and same and hops <= HOPS and (method == "GET" or status in SAME_METHOD):
            return target
        target = target.copy_with(username="", password="", query=None, fragment=None)
        error = EngineRejected(
            compose(
                f"{asked}: redirected, and not followed",
                found=f"HTTP {status} to {self._hide(refusals.line(str(target)))}",
                expected=f"an answer, or at most {HOPS} redirects on the same host that keep the method",
                do="give the address that answers",
            )
        )
        error.status = status
        raise error

    def _unreachable(self, asked, error, deadline):
        if deadline.over or isinstance(error, (self._httpx.TimeoutException, TimeoutError)):
            return EngineUnreachable(
                compose(
                    f"{asked}: no whole answer in {self.deadline:g} s",
                    do="look whether the engine works on something else, or give it longer: deadline=600",
                )
            )
        return EngineUnreachable(
            compose(
                f"{asked}: no answer",
                found=self._hide(refusals.line(f"{type(error).__name__}: {error}")),
                do="start the engine, or correct host and port; an answer that breaks off is the engine's fault",
            )
        )

    def _hide(self, text):
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class _Deadline:
    """Ends what is under way when its time is over, also where every single read makes some progress."""

    def __init__(self, seconds):
        self._end, self._sockets = time.monotonic() + seconds, []
        self.over = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._lock = threading.Lock()

    def __enter__(self):
        self._timer.start()
        return self

    def __exit__(self, *_):
        self._timer.cancel()
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()

    def left(self):
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def pause(self, seconds):
        if seconds >= self.left():
            self.over = True
            raise TimeoutError
        time.sleep(seconds)

    def watch(self, event, info):
        """httpx tells of every step; the connections it opens are those to shut.

        By a socket of our own: TLS takes the first one's descriptor away, and its handshake may drip as well.
        """
        if event.endswith("connect_tcp.complete"):
            with self._lock:
                self._sockets.append(info["return_value"].get_extra_info("socket").dup())
                if self.over:
                    self._shut()

    def _cut(self):
        with self._lock:
            self.over = True
            self._shut()

    def _shut(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _bounded(response, limit, asked):
    """The body as it comes, or an error as soon as it is longer than `limit` bytes."""

    def too_long(found):
        return EngineRejected(
            compose(f"{asked}: an answer longer than what was asked for", found=found, expected=f"{limit:,} at most")
        )

    stated = response.headers.get("content-length", "")
    if stated.isdecimal() and len(stated) < 20 and int(stated) > limit:
        raise too_long(f"{int(stated):,} bytes, by its header")
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > limit:
            raise too_long(f"{len(body):,} bytes and more")
    return bytes(body)


def _without(body, names):
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in body.items()
        if name not in names
    }


def _pause(headers, usual):
    asked = headers.get("retry-after", "")
    return min(float(asked), LONGEST) if asked.isdecimal() and len(asked) < 6 else usual


def _trust(url, certificates):
    """What httpx is to verify by: reading certificates takes 20 ms, and plain HTTP has none."""
    if url.scheme != "https":
        return False
    if certificates is None:
        return True
    try:
        return ssl.create_default_context(cafile=os.fspath(certificates))
    except (OSError, TypeError) as error:  # of a file that has none, ssl.SSLError, which is an OSError
        raise InputError(compose("engine: certificates", found=error, expected="a PEM file of authorities")) from None


def _httpx():
    try:
        import httpx
    except ImportError as error:
        raise CapabilityMissing(
            compose("engines over HTTP need the package httpx", do="pip install 'qwenref[compare]'")
        ) from error
    return httpx


def _address(url, httpx):
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InputError(compose("engine: an address that is none", found=error)) from None
    if found.scheme not in ("http", "https") or not found.host or found.query or found.fragment:
        shown = found.copy_with(username="", password="", query=None)
        raise InputError(
            compose("engine: an address that is none", found=str(shown), expected="http://host:port, or https")
        )
    return found


def _seconds(deadline):
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < 1e6:
        raise InputError(compose("engine: deadline", found=repr(deadline), expected="seconds above 0"))
    return float(deadline)


def _key(key, variable):
    """The key, or None; never shown."""
    found = key if key is not None else os.environ.get(variable or KEY_VARIABLE)
    if variable and found is None:
        raise InputError(compose(f"engine: key_env names the variable {variable}, which is not set"))
    if found is not None and (not isinstance(found, str) or not found.isascii() or not found.isprintable()):
        raise InputError(compose("engine: a key that no header can carry", expected="printable ASCII characters"))
    return found or None
