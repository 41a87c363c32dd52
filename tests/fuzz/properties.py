"""What must hold of whatever a parser makes of garbage."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json

LONGEST_MESSAGE = 20_000
"""Characters: a message that repeats its whole input would fill a log."""
SECONDS_PER_MEGABYTE = 20.0
"""Of processor time, and as much as a second for the smallest input: what takes longer grows faster than its input."""


def one_line(text: str) -> None:
    """A message goes to a terminal and into a log: one line, nothing that steers either, and something in it."""
    assert text.strip(), "an empty message"
    assert text.isprintable(), f"not printable: {text[:300]!r}"
    assert len(text) <= LONGEST_MESSAGE, f"{len(text)} characters: {text[:300]!r}"


def lines(text: str) -> None:
    """As `one_line`, for a text of several."""
    for line in text.split("\n"):
        assert line.isprintable(), f"not printable: {line[:300]!r}"


def plain(value: Any) -> None:
    """It can be written as strict JSON in UTF-8, and what is read back is the same: no NaN, no half of a character."""
    data = to_json(value)
    text = json.dumps(data, allow_nan=False, ensure_ascii=False)
    text.encode()
    if type(value).__module__.startswith("canaryd."):
        assert from_json(type(value), json.loads(text)) == value


def finite(number: object, low: float = -math.inf, high: float = math.inf) -> None:
    assert isinstance(number, (int, float)), number
    assert not isinstance(number, bool), number
    assert math.isfinite(number), number
    assert low <= number <= high, number


@contextmanager
def in_time(size: int) -> Iterator[None]:
    """Processor time, not the clock: other processes may be busy."""
    begun = time.thread_time()
    yield
    spent = time.thread_time() - begun
    allowed = 2.0 + SECONDS_PER_MEGABYTE * size / 2**20
    assert spent <= allowed, f"{spent:.1f} s of processor time for {size} bytes"


class Scratch:
    """A directory of its own for each input, in memory where there is such a place; gone afterwards."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._base = memory if memory.is_dir() else None

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(prefix="canaryd-fuzz-", dir=self._base))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


scratch = Scratch()
