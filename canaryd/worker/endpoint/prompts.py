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
    if not isinstance(entry, dict):
        return [f": got {type(entry).__name__}, wanted an object with name, text and tokens"]
    unknown = [printable(key[:40]) for key in entry if key not in ("name", "text", "tokens")]
    found = [f".{key}: unknown, wanted name, text and tokens only" for key in unknown]
    name, text, tokens = entry.get("name"), entry.get("text"), entry.get("tokens", DEFAULT)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        found.append(f".name: got {_shown(name)}, wanted 1 to 32 of a-z, 0-9, _ and -, a letter first")
    if not isinstance(text, str):
        found.append(f".text: got {_shown(text)}, wanted a text")
    elif not SHORTEST <= len(text) <= LONGEST:
        found.append(f".text: {len(text)} characters, wanted {SHORTEST} to {LONGEST:,}")
    elif not re.fullmatch(r"[^\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]*", text):
        found.append(".text: holds a control character or half a surrogate pair, wanted plain text")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not FEWEST <= tokens <= MOST:
        found.append(f".tokens: got {_shown(tokens)}, wanted a whole number from {FEWEST} to {MOST}")
    return found


def _shown(value: Any) -> str:
    """Return a value as text for a message; only the beginning of a long text is kept."""
    if value is None:
        return "nothing"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= 40 else text[:39] + "…"
