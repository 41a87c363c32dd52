"""What hostile input is made of: choices out of a fuzzer's bytes, and documents that are nearly right.

A target is a function of bytes. Bytes that are a document are given to a parser as they are; bytes that are choices
(`Choices`) spoil a good document at a few places (`warped`), which leads deeper than any flipped bit of its text.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = (
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        16,
        64,
        100,
        255,
        1000,
        65_536,
        2**31,
        2**32 - 1,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
    ),
    *(10**400, -(10**400), 0.0, -0.0, 0.5, -0.5, 1e-320, 1.5, 99.99, 1e9, 1.7e9, 4e9, 1e18, 1e300, -1e300),
    *(float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", "0", "1", "-1", "x", "a b", "é", "\0", "\n", "\r\n", "\t", "\x1b[31mred\x1b[0m", "\x7f", "\x85", "\u2028"),
    *("\u202e", "\ud800", "\udfff\ud800", "\U0001f600", "\ufeff", "/", "..", "../../etc/passwd", "/dev/null", "%s%n"),
    *(
        "{}",
        "[",
        '"',
        "\\",
        "'",
        "<script>",
        "&amp;",
        "</td>",
        "null",
        "true",
        "NaN",
        "Infinity",
        "1e999",
        "0x10",
        "1_0",
    ),
    *(
        "²",
        "١٢",
        "-0",
        "+5",
        "1e5",
        "9" * 30,
        "a" * 300,
        "a/b",
        "a{b=c}",
        "a=b,c=d",
        "2024-01-01",
        "12:30:45",
        "#",
        "*",
    ),
    *(
        "-",
        "--help",
        "http://[",
        "http://user:pass@host/",
        "$(id)",
        "`id`",
        ";",
        "|",
        "GPU-0",
        "cuda:0",
        "cpu",
        "endpoint",
    ),
)
LONG, DEEP, DIGITS = "\0long", "\0deep", "\0digits"
"""Texts that `dumps` writes as a long text, as lists inside of lists, and as a number of 5,000 digits."""
LETTERS = "abcxyzABCXYZ0189 _-.,:;/\\|(){}[]<>='\"#%&@!?*+~^$\t\n\r\0\x1b\x7fäß€\u200b\u2028\ud800"


class Choices:
    """Draws from bytes; when they are used up, everything is the first choice, so that every input ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit` - 1."""
        value, width = 0, (max(limit - 1, 1).bit_length() + 7) // 8
        for byte in self.take(width):
            value = value << 8 | byte
        return value % limit

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def rest(self) -> bytes:
        return self.take(max(0, self.left))

    def flag(self) -> bool:
        return bool(self.below(2))

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def number(self) -> int | float:
        kind = self.below(4)
        if kind < 2:
            return self.of(NUMBERS)
        return self.below(1 << 16) if kind == 2 else (self.below(1 << 32) - (1 << 31)) / (1 << self.below(32))

    def text(self, longest: int = 40) -> str:
        kind = self.below(4)
        if kind < 2:
            return self.of(TEXTS)
        size = self.below(longest) + 1
        if kind == 2:
            return "".join(LETTERS[b % len(LETTERS)] for b in self.take(size))
        return self.take(size).decode("utf-8", "replace")

    def value(self) -> Any:
        """A value of JSON that nobody expects where it stands."""
        kind = self.below(8)
        if kind == 0:
            return self.of((None, True, False, [], {}, [[]], {"": ""}, [None], DEEP, DIGITS, LONG))
        if kind < 4:
            return self.number()
        if kind < 7:
            return self.text()
        return [self.value() for _ in range(self.below(4))] if self.flag() else {self.text(): self.value()}


def warped(document: Any, choices: Choices, most: int = 5) -> Any:
    """Return a copy of a document of JSON that is spoilt at a few places."""
    root = [copy.deepcopy(document)]
    for _ in range(choices.below(most) + 1):
        holder: Any = root
        key: Any = 0
        while isinstance(holder[key], (dict, list)) and holder[key] and choices.below(8):
            holder = holder[key]
            key = choices.of(list(holder)) if isinstance(holder, dict) else choices.below(len(holder))
        action = choices.below(8)
        if action == 0 and holder is not root:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[choices.text()] = holder.pop(key)
        elif action == 2 and isinstance(holder, list) and holder is not root:
            holder.insert(key, copy.deepcopy(holder[choices.below(len(holder))]))
        elif action == 3 and isinstance(holder, dict):
            holder[key] = copy.deepcopy(holder[choices.of(list(holder))])
        elif action == 4 and isinstance(holder[key], str) and len(holder[key]) < 100_000:
            at, text = choices.below(len(holder[key]) + 1), holder[key]
            holder[key] = text[:at] + choices.text() + text[at + choices.below(3) :]
        else:
            holder[key] = choices.value()
    return root[0]


def dumps(document: Any) -> str:
    """Return a document as the text of JSON, with what no Python object can hold spelt out."""
    text = json.dumps(document)
    for mark, said in ((LONG, '"' + "a" * 70_000 + '"'), (DEEP, "[" * 700 + "]" * 700), (DIGITS, "9" * 5000)):
        text = text.replace(json.dumps(mark), said)
    return text


def loaded(document: Any) -> Any:
    """Return a document as JSON gives it; None where it gives nothing."""
    try:
        return json.loads(dumps(document))
    except (ValueError, RecursionError):
        return None


def stretched(data: bytes) -> bytes:
    """Return bytes, one part of them repeated up to a megabyte where they ask for it: time must grow with length."""
    if data[:1] != b"\xff" or len(data) < 8:
        return data
    start, size = data[1] % len(data), data[2] % 64 + 1
    times = (1 << (data[3] % 21)) // size
    return data[4 : 4 + start] + data[4 + start : 4 + start + size] * times + data[4 + start + size :]


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return bytes changed at a few places, as a fuzzer does it without looking at coverage."""
    out = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 2:
            del out[at : at + rng.randrange(1, 17)]
        elif kind == 3:
            size = rng.randrange(1, 33)
            out[at:at] = out[at : at + size] * rng.randrange(1, 4)
        elif kind == 4:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            out[at:] = other[start:]
        elif kind == 5:
            out[at:at] = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
        elif kind == 6:
            out[at:at] = str(rng.choice(NUMBERS[:19])).encode()
        else:
            out[at : at + 4] = rng.randbytes(4)
    return bytes(out[:65_536])


Target = Callable[[bytes], None]


def modes(*targets: Target) -> Target:
    """Return a target that chooses among several by its first byte: a for the first, b for the second."""

    def chosen(data: bytes) -> None:
        if data:
            targets[(data[0] - ord("a")) % len(targets)](data[1:])

    return chosen


def seed(mode: int, data: bytes | str) -> bytes:
    """Return an input for one of `modes`."""
    return bytes([ord("a") + mode]) + (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
