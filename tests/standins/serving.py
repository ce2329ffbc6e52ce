"""A server on loopback in a thread; what it answers is a function of the request."""

import contextlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request:
    """What was asked: `method`, `path`, `headers`, the body in bytes, and as JSON where it is some."""

    def __init__(self, handler):
        self.method, self.path, self.headers = handler.command, handler.path, handler.headers
        self.raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.body = json.loads(self.raw) if self.raw else None


class Refused(Exception):
    """Answers with this status and body."""

    def __init__(self, status, body):
        super().__init__(status)
        self.status, self.body = status, body


@contextlib.contextmanager
def serving(answer, certificate=None):
    """(address, requests so far) of a server; answer(request, handler) returns what is sent as JSON, or None.

    None: it has written to `handler.wfile` itself.  `Refused` is an answer with another status.  With a certificate,
    a PEM file that has its key too, over TLS.
    """
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            request = Request(self)
            seen.append(request)
            try:
                status, body = 200, answer(request, self)
            except Refused as refused:
                status, body = refused.status, refused.body
            if body is not None:
                send(self, body, status)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def send(handler, body, status=200, **headers):
    """An answer: bytes as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"Content_Type": "application/json", "Content_Length": len(raw), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(raw)
