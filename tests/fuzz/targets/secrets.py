"""What a server may echo of a configured key, and what of it leaves a worker: its protocol and its standard error.

However the key is spelled (any case, escapes, base64 after anything, look-alikes, apart, token by token) and wherever
it stands or is cut off, neither the messages of `Runner` nor its lines hold half of it. A message stays JSON of the
same shape, and a text without the key stays as it is.
"""

from __future__ import annotations

import base64
import html
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


def _base64(key: str, choices: Choices) -> str:
    return base64.b64encode((choices.of(("", "a", "ab")) + key).encode()).decode()


def _spelled(key: str, choices: Choices) -> str:
    """Return a spelling of a key that a server could echo."""
    ways = (
        lambda: key,
        lambda: choices.of((key.upper(), key.lower(), key.title(), key.swapcase())),
        lambda: _base64(key, choices),
        lambda: _base64(key, choices).translate(str.maketrans("+/", "-_")),
        lambda: urllib.parse.quote(_base64(key, choices), safe=""),
        lambda: key.encode().hex(choices.of(" :-,")),
        lambda: key.encode().hex(),
        lambda: urllib.parse.quote(key, safe=""),
        lambda: "".join(f"%{ord(c):02X}" for c in key),
        lambda: "".join(choices.of((c, f"\\u{ord(c):04x}", f"\\x{ord(c):02x}", f"&#{ord(c)};")) for c in key),
        lambda: html.escape(key),
        lambda: json.dumps(key)[1:-1].replace("/", "\\/"),
        lambda: " ".join(key),
        lambda: choices.of(("\u200b", "\0", "\x1b[1m", ".", "][", "\u0301")).join(key),
        lambda: "".join(chr(ord(c) + 0xFEE0) for c in key),
        lambda: "".join(f"\\{ord(c):03o}" for c in key),
        lambda: "".join(f"={ord(c):02X}" for c in key),
        lambda: str(list(key.encode())),
        lambda: base64.b64encode(key.encode("utf-16-le")).decode(),
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


def _without(text: str, spelled: str) -> None:
    half = (len(spelled) + 1) // 2 + 3  # of base64 the edges that depend on what stands beside it may stay
    for at in range(len(spelled) - half + 1):
        assert spelled[at : at + half].lower() not in text.lower(), (spelled, text)


def _placed(data: bytes) -> None:
    """In a message of any shape: a text, a name, an item, or cut off at its end."""
    _keep()
    choices = Choices(data)
    key = choices.of(KEYS)
    spelled = _spelled(key, choices)
    before, after = choices.of(AROUND), choices.of(AROUND)
    text = before + spelled + after
    if choices.flag():
        text = before + spelled[: choices.below(len(spelled)) + 1]
    value: Any = {"a": 1, "case": "completions/reef/fresh", "values": [1.5, None, True]}
    where = choices.below(4)
    value["text" if where != 1 else text] = text if where != 2 else [choices.of(("a", "b")), text, {"x": [text]}]
    said = _sent({"value": value, "detail": text})
    assert said["value"]["case"] == "completions/reef/fresh"
    assert said["value"]["values"] == [1.5, None, True]
    assert len(said["value"]) == len(value)
    _without(json.dumps(said, ensure_ascii=False), spelled)


def _apart(data: bytes) -> None:
    """In tokens that spell it together, and in writes to standard error."""
    _keep()
    choices = Choices(data)
    key = choices.of(KEYS)
    tokens, rest = [choices.of(("The", " key", ""))], key
    while rest:
        size = choices.below(min(len(rest), 6)) + 1
        tokens.append(rest[:size])
        rest = rest[size:]
    tokens.append(choices.of(("", " is", "!")))
    said = _sent({"value": {"tokens": tokens}})["value"]["tokens"]
    assert len(said) == len(tokens)
    _without("".join(said), key)
    written = io.BytesIO()
    stream = Lines(io.TextIOWrapper(written, "utf-8"))
    for token in tokens:
        stream.write(token)
    stream.write("\n")
    stream.flush()
    _without(written.getvalue().decode(), key)


def _any(data: bytes) -> None:
    """Anything, in bounded time; a word that is a key stays wherever nothing calls it one."""
    _keep()
    data = stretched(data)
    text = data.decode("utf-8", "replace")
    with in_time(len(data)):
        hide({"text": text, "tokens": [text[:50], text[50:100]]})
    assert hide(f"the basket is {WORD}") == f"the basket is {WORD}"
    assert WORD not in hide(f"Invalid API key provided: {WORD}, Authorization: Bearer {WORD}")


target = modes(_placed, _apart, _any)


def seeds() -> list[bytes]:
    return [
        *(seed(0, bytes([key, way, *range(n, n + 12)])) for key in range(5) for way in range(19) for n in (0, 7)),
        *(seed(1, bytes([key, *range(n, n + 40)])) for key in range(5) for n in (0, 9)),
        *(seed(2, key.encode() * 3) for key in KEYS),
        seed(2, "c2stWnE5" * 20),
        seed(2, "Z" * 100),
    ]
