"""What a Prometheus answers to `canaryd fleet`: bytes over HTTP, and vectors that are nearly right.

Only `FleetError`, one printable line. The text steers no terminal, the JSON is strict; a fleet of which anything could
not be learnt is never healthy, and no name out of an answer becomes a state.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from canaryd.fleet import prometheus, vote, vote_text
from canaryd.model import State
from tests.fuzz.material import Choices, dumps, modes, seed, stretched, warped
from tests.fuzz.properties import in_time, lines, one_line
from tests.fuzz.targets.http import Sayer

LABELS = {"job": "canaryd", "instance": "n1:19469", "device": "GPU-1", "index": "0", "model": "H200", "probe": "exact",
          "stack": "s", "fingerprint": "7", "state": "healthy", "rule": "r", "cause": "hardware", "version": "0.1",
          "why": "known", "job2": ""}  # fmt: skip


def vector(*values: str, **labels: str) -> dict[str, Any]:
    found = [{"metric": {**LABELS, **labels}, "value": [1.79e9, value]} for value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": found}}


class Asked(prometheus.Prometheus):
    """A Prometheus whose answers come out of a table instead of a socket; `_bytes` has a socket."""

    def __init__(self, choices: Choices) -> None:
        super().__init__("http://127.0.0.1:9090", patience=60.0)
        self._choices = choices
        self.spoilt = 0

    def _fetch(self, url: str) -> tuple[int, bytes]:
        query = parse_qs(urlsplit(url).query)["query"][0]
        labels = {"state": "suspect"} if "suspect" in query else {}
        said: Any = vector("1", **labels) if self._choices.below(3) else vector()
        if "silent" in query or "up" in query or "offset" in query:
            said = vector()
        code = 200
        if not self._choices.below(4):
            self.spoilt += 1
            said = warped(said, self._choices, most=2)
            code = self._choices.of((200, 200, 200, 400, 401, 404, 500, 503))
        return code, dumps(said).encode()

    def _get(self, url: str) -> tuple[int, bytes]:
        return self._fetch(url)


def _vectors(data: bytes) -> None:
    asked = Asked(Choices(data))
    with in_time(300_000):
        try:
            found = vote.gather(asked)
        except prometheus.FleetError as error:
            one_line(str(error))
            return
        told(found)


def told(found: vote.Fleet) -> None:
    lines(vote_text.as_text(found, 100))
    one_line(vote_text.answer(found))
    json.dumps(vote_text.as_json(found), allow_nan=False).encode()
    assert isinstance(found.state, State)
    assert not found.problems or found.state is not State.HEALTHY
    assert found.nodes > 0 or found.state is not State.HEALTHY
    assert set(found.states) <= {state.value for state in State}
    assert not any(count and name in ("suspect", "faulty") for name, count in found.states.items()) or (
        found.state is not State.HEALTHY
    )


_sayers: list[Sayer] = []


def _bytes(data: bytes) -> None:
    """Any bytes as the answer to every question."""
    if not _sayers:
        _sayers.append(Sayer())
    server = _sayers[0]
    server.said = stretched(data)
    with in_time(len(server.said) * 20):
        try:
            found = vote.gather(prometheus.Prometheus(f"http://127.0.0.1:{server.port}", patience=60.0))
        except prometheus.FleetError as error:
            one_line(str(error))
            return
        told(found)


def _address(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        prometheus.Prometheus(text)
    except ValueError as error:
        one_line(str(error))


target = modes(_vectors, _bytes, _address)


def seeds() -> list[bytes]:
    body = json.dumps(vector("1")).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return [
        *(seed(0, bytes(range(n, n + 60))) for n in range(0, 190, 10)),
        seed(1, head + body),
        seed(1, b"HTTP/1.1 302 x\r\nLocation: http://a\r\n\r\n"),
        *(seed(2, text) for text in ("http://a:9090", "https://[::1]:9/x", "http://u:p@a", "http://[")),
    ]
