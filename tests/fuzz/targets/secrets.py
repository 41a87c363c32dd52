"""What a server may echo of a configured key, and what of it leaves a worker: its protocol and its standard error.

Wherever the key stands, as it is, percent-encoded or in base64 after anything, neither the messages of `Runner` nor its
lines hold it. A message stays JSON of the same shape, and a text without the key stays as it is.
"""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.parse
from typing import Any

from canaryd.hidden import hide, keep
from canaryd.worker.runner import Lines, Runner
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import in_time

KEYS = ("sk-Zq9secretkey7-0123456789", "hf_AbCdEf", "a/b+c=d&e~7", "Zq9" * 40, "hunter2")
WORD = "EMPTY"
AROUND = ("", " ", "Bearer ", "user:", "x", '"', "{'k': '", "…", "QmVhcmVy")


def _keep() -> None:
    for key in (*KEYS, WORD):
        keep(key)


def _spelled(key: str, choices: Choices) -> tuple[str, str]:
    """Return a form of a key that a server could echo, and what of it must be gone."""
    before = choices.of(("", "a", "ab"))
    encoded = base64.b64encode((before + key).encode()).decode().rstrip("=")
    sure = encoded[4 if before else 0 : -1]  # at the edges a digit depends on what stands beside the key
    web = str.maketrans("+/", "-_")
    ways = (
        lambda: (key, key),
        lambda: (encoded, sure),
        lambda: (encoded.translate(web), sure.translate(web)),
        lambda: (whole := urllib.parse.quote(key, safe=""), whole),
        lambda: (whole := urllib.parse.quote(key), whole),
        lambda: (whole := "".join(f"%{ord(c):02x}" for c in key), whole),
        lambda: (whole := "".join(choices.of((c, f"%{ord(c):02X}", f"%{ord(c):02x}")) for c in key), whole),
    )
    return choices.of(ways)()


def _sent(message: dict[str, Any]) -> Any:
    """Return what leaves a worker when a probe says something."""
    reading, writing = os.pipe()
    try:
        Runner(writing, "nonce")._send(kind="fact", id="1", **message)
        os.close(writing)
        with os.fdopen(reading, "rb", closefd=False) as pipe:
            line = pipe.read()
    finally:
        os.close(reading)
    return json.loads(line.partition(b" ")[2])


def _placed(data: bytes) -> None:
    """In a message of any shape: a text, a name or an item."""
    _keep()
    choices = Choices(data)
    spelled, secret = _spelled(choices.of(KEYS), choices)
    text = choices.of(AROUND) + spelled + choices.of(AROUND)
    value: Any = {"a": 1, "case": "completions/reef/fresh", "values": [1.5, None, True]}
    where = choices.below(4)
    value["text" if where != 1 else text] = text if where != 2 else [choices.of(("a", "b")), text, {"x": [text]}]
    said = _sent({"value": value, "detail": text})
    assert said["value"]["case"] == "completions/reef/fresh"
    assert said["value"]["values"] == [1.5, None, True]
    assert len(said["value"]) == len(value)
    assert secret not in json.dumps(said, ensure_ascii=False)


def _in_parts(data: bytes) -> None:
    """On standard error, in several writes of one line."""
    _keep()
    choices = Choices(data)
    key = rest = choices.of(KEYS)
    written = io.BytesIO()
    stream = Lines(io.TextIOWrapper(written, "utf-8"))
    while rest:
        size = choices.below(min(len(rest), 6)) + 1
        stream.write(rest[:size])
        rest = rest[size:]
    stream.write("\n")
    stream.flush()
    assert key not in written.getvalue().decode()


def _any(data: bytes) -> None:
    """Anything, in bounded time; a word that is a key stays wherever nothing calls it one."""
    _keep()
    data = stretched(data)
    text = data.decode("utf-8", "replace")
    with in_time(len(data)):
        hide({"text": text, "tokens": [text[:50], text[50:100]]})
    assert hide(f"the basket is {WORD}") == f"the basket is {WORD}"
    assert WORD not in hide(f"Invalid API key provided: {WORD}, Authorization: Bearer {WORD}")


target = modes(_placed, _in_parts, _any)


def seeds() -> list[bytes]:
    return [
        *(seed(0, bytes([key, way, *range(n, n + 12)])) for key in range(5) for way in range(7) for n in (0, 7)),
        *(seed(1, bytes([key, *range(n, n + 40)])) for key in range(5) for n in (0, 9)),
        *(seed(2, key.encode() * 3) for key in KEYS),
        seed(2, "c2stWnE5" * 20),
        seed(2, "Z" * 100),
    ]
