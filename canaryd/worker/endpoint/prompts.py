"""The prompts of an endpoint canary: they are read from a small JSON file, which is validated completely.

The file is JSON and not YAML because workers have the standard library alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd.facts import printable
from canaryd.probe import Skip
from canaryd.worker.telemetry.sysfs import Unreadable, read_bytes

MAX_FILE_BYTES = 1 << 20
MAX_PROMPTS = 32
SHORTEST, LONGEST = 64, 20_000
"""Minimum and maximum characters of a prompt. Some kernels were wrong only above 8 rows, so prompts exceed 8 tokens."""
FEWEST, DEFAULT, MOST = 32, 64, 1024
"""Minimum, default and maximum tokens to generate: faults that only decoding has need some tens of tokens to show."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
PLAIN = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]*")
FIELDS = {
    "name": "1 to 32 of a-z, 0-9, _ and -, a letter first",
    "text": f"{SHORTEST} to {LONGEST:,} characters of plain text",
    "tokens": f"a whole number from {FEWEST} to {MOST}",
}
"""Field of a prompt → what it must be."""
WANTED = '{"prompts": [{"name": "reef", "text": "…", "tokens": 64}]}'


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to be continued, or the user's message in a chat."""

    name: str
    text: str
    tokens: int = DEFAULT
    """Number of tokens to generate."""


def load(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a file; raise `Skip` with one line for each mistake."""
    if not path.exists():
        raise Skip(f"{path}: no such file")
    try:
        data = read_bytes(path)
    except Unreadable as error:
        raise Skip(f"{path}: cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise Skip(f"{path}: {len(data)} bytes, wanted at most 1 MiB")
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # JSONDecodeError: its text names line and column
        raise Skip(f"{path}: not JSON: {error}; wanted {WANTED}") from None
    entries = document.get("prompts") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(document) != 1:
        raise Skip(f'{path}: wanted an object with one list "prompts", such as {WANTED}')
    if not 1 <= len(entries) <= MAX_PROMPTS:
        raise Skip(f"{path}: {len(entries)} prompts, wanted 1 to {MAX_PROMPTS}")
    problems = [f"{path}: prompts[{i}]{text}" for i, entry in enumerate(entries) for text in _mistakes(entry)]
    given = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    names = [name for name in given if isinstance(name, str) and NAME.fullmatch(name)]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"{path}: the name {name!r} is given {names.count(name)} times, wanted once" for name in twice]
    if problems:
        raise Skip("\n".join(problems))
    return tuple(Prompt(**entry) for entry in entries)


def _mistakes(entry: Any) -> list[str]:
    """Return a clause for each wrong or unknown field of an entry, such as ".tokens: wanted a whole number …"."""
    if not isinstance(entry, dict):
        return [f": got {type(entry).__name__}, wanted an object with name, text and tokens"]
    name, text = (given if isinstance(given := entry.get(field), str) else "" for field in ("name", "text"))
    tokens = entry.get("tokens", DEFAULT)
    right = {
        "name": NAME.fullmatch(name),
        "text": SHORTEST <= len(text) <= LONGEST and PLAIN.fullmatch(text),
        "tokens": type(tokens) is int and FEWEST <= tokens <= MOST,
    }
    unknown = [printable(key[:40]) for key in entry if key not in right]
    found = [f".{key}: unknown, wanted name, text and tokens only" for key in unknown]
    return found + [f".{field}: wanted {FIELDS[field]}" for field, is_right in right.items() if not is_right]
