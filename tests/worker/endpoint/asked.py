"""Servers that answer, and the facts that a probe makes of them."""

from __future__ import annotations

import json

import pytest

from canaryd.probe import Skip
from canaryd.worker.endpoint.canary import Endpoint
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import Settings
from tests.worker.endpoint.served import context, probe, recorded

PROMPT = Prompt(name="reef", text="A diver sank slowly towards the reef, and saw what nobody had seen. " * 3)
KEY = "sk-canary-0123456789abcdef"
CHUNKS = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("one", " two", " three")]
END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
PROBED = probe()


def sse(*events, done: bool = True) -> tuple:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines).encode()


def streaming(answer):
    """Return a route that streams where a stream is wanted, and answers as recorded otherwise."""
    return lambda body: sse(*CHUNKS, END) if body["stream"] else answer(body) if callable(answer) else answer


def routes_of(name: str) -> dict:
    routes = recorded(name)
    for path in ("POST /v1/completions", "POST /v1/chat/completions"):
        routes[path] = streaming(routes[path])
    return routes


def run(url: str, **fields) -> list:
    return list(PROBED.run(context(url, **fields)))


def reason(action, *arguments, **fields) -> str:
    """Return the one line that an action is skipped with; never with the key or the prompt."""
    with pytest.raises(Skip) as caught:
        action(*arguments, **fields)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    assert KEY not in text
    assert PROMPT.text[:40] not in text
    return text


def reach(server, **settings) -> Endpoint:
    return Endpoint(Settings.read({"url": server.url, **settings}))
