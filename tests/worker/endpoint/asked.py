"""Servers that answer, and the facts that a probe makes of them."""

from __future__ import annotations

import pytest

from canaryd.probe import Skip
from canaryd.worker.endpoint.canary import Endpoint
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import Settings
from probes import endpoint_canary
from tests.worker.endpoint.served import context, recorded

PROMPT = Prompt(name="reef", text="A diver sank slowly towards the reef, and saw what nobody had seen. " * 3)
KEY = "sk-canary-0123456789abcdef"


def routes_of(name: str) -> dict:
    """Return a server's routes; those of its answers are functions."""
    routes = recorded(name)
    for path in ("POST /v1/completions", "POST /v1/chat/completions"):
        answer = routes[path]
        routes[path] = answer if callable(answer) else lambda _, answer=answer: answer
    return routes


def run(url: str, **fields) -> list:
    return list(endpoint_canary.run(context(url, **fields)))


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
