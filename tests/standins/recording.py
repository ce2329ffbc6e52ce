"""Exchanges with real servers: taken down once, answered from ever after.

To take one down again, from the top folder, with a server running:

    PYTHONPATH=.:tests python -m standins.recording llama+http http://127.0.0.1:8080 tests/data/http/llama_server.json
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from qwenref.engines import adapter
from standins.serving import Refused, serving

TEXT = "How much is 31 plus 23?"
MESSAGES = [{"role": "user", "content": TEXT}]
NEW, K = 6, 4
RENDERED = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n<think>\n"  # of the embedded model's template


def talk(engine):
    """What is asked of every engine that can; {name: what came}."""
    able = engine.capabilities()
    found = {"capabilities": able, "config": engine.config()}
    if able.tier == "A":
        found["tokens"] = engine.tokenize(TEXT)
        found["prompt"] = engine.render(MESSAGES, enable_thinking=False)
        found["scores"] = engine.score(found["tokens"][:6], K)
        found["greedy"] = engine.generate(found["prompt"].ids, NEW, K)
        found["drawn"] = engine.generate(found["tokens"][:6], 2, 2, {"temperature": 1.0, "top_k": 5, "seed": 1})
    else:
        found["greedy"] = engine.generate(MESSAGES if engine.messages else RENDERED, 60, K)
    return found


def replaying(path):
    """A server (`serving`) that answers as the real one did; a request it was not sent fails the test."""
    exchanges = json.loads(Path(path).read_text(encoding="utf-8"))
    known = {_key(e["method"], e["path"], e["request"]): (e.get("status"), e["response"]) for e in exchanges}

    def answer(request, handler):
        key = _key(request.method, request.path, request.body)
        if key not in known:
            raise Refused(500, {"error": f"not in {path}: {key}"})
        status, response = known[key]
        if status:
            raise Refused(status, response)
        return response

    return serving(answer)


def _key(method, path, body):
    return method, path, json.dumps(body, sort_keys=True)


def record(kind, address, path, *options):
    """Writes down what a server answers to `talk`; options as name=value."""
    exchanges = []

    def answer(request, handler):
        ask = urllib.request.Request(address + request.path, request.raw or None, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(ask, timeout=120) as came:
                status, raw = came.status, came.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        response = json.loads(raw)
        exchange = {"method": request.method, "path": request.path, "request": request.body, "response": response}
        if status != 200:
            exchange["status"] = status
        exchanges.append(exchange)
        if status != 200:
            raise Refused(status, response)
        return response

    with serving(answer) as (url, _):
        talk(adapter(kind).open(url, **dict(option.split("=", 1) for option in options)))
    Path(path).write_text("[\n" + ",\n".join(json.dumps(e) for e in exchanges) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    record(*sys.argv[1:])
