"""Configured secrets, hidden in everything that repeats them: a server may echo the key that it was sent.

`keep` names a secret where it is sent for the first time. `hide` replaces it in texts, lists and mappings: as it is,
with any of its characters percent-encoded, and in base64 (both alphabets), whatever stands before it there.

A secret that is a plain word ("EMPTY", "ollama") or shorter than `SHORTEST` would stand in innocent texts too: it is
replaced only after "Bearer" and other words that call it a key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "…"
SHORTEST = 6
"""Characters of the shortest secret that is replaced wherever it stands (ours: 6 random characters are 35 bits)."""
LONGEST_WORD = 16
"""Characters from which a secret of letters alone is no plain word (ours: 16 random letters are 75 bits)."""
_WORD = re.compile(r"(?:[A-Z]?[a-z]*|[A-Z]*)(?:[-_.](?:[A-Z]?[a-z]*|[A-Z]*))*")
_CALLED = r"(?<![A-Za-z])(?i:bearer|key|token|authorization|secret|password)\b\W{1,8}(?:\w+\W{1,8}){0,2}?"
_patterns: dict[str, re.Pattern[str]] = {}
"""Secret → what finds it; in a group named "before" stands what is kept."""


def keep(secret: str) -> None:
    """Hide a secret of printable ASCII from now on, until the process ends."""
    if not secret or secret in _patterns:
        return
    if len(secret) < SHORTEST or (len(secret) < LONGEST_WORD and _WORD.fullmatch(secret)):
        _patterns[secret] = re.compile(rf"(?P<before>{_CALLED}){re.escape(secret)}(?!\w)")
    else:
        _patterns[secret] = re.compile("|".join([_percent(secret), *_base64(secret)]))


def hide(value: Any) -> Any:
    """Return JSON data, or a text, without the secrets; itself where none is kept."""
    return _hidden(value) if _patterns else value


def bare(address: str) -> str:
    """Return an address without what stands before its last "@": a user name or password, also where it is malformed.

    Only one that is well-formed says where a password begins and ends.
    """
    _, at, rest = address.rpartition("@")
    return f"{HIDDEN}{at}{rest}" if at else address


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        for pattern in _patterns.values():
            value = pattern.sub(_kept, value)
        return value
    if isinstance(value, dict):
        return {_hidden(name): _hidden(item) for name, item in value.items()}
    return [_hidden(item) for item in value] if isinstance(value, (list, tuple)) else value


def _kept(match: re.Match[str]) -> str:
    return (match.groupdict().get("before") or "") + HIDDEN


def _percent(secret: str) -> str:
    """Return a pattern for a secret, each character as it is or as %73."""
    return "".join(f"(?:{re.escape(c)}|%(?i:{ord(c):02x}))" for c in secret)


def _base64(secret: str) -> Iterator[str]:
    """Yield a pattern for a secret in base64, for each alignment: the digits that depend on the secret alone."""
    for before in range(3):
        encoded = base64.b64encode(b" " * before + secret.encode()).decode().rstrip("=")
        digits = encoded[(0, 2, 3)[before] : len(encoded) - ((before + len(secret)) % 3 > 0)]
        yield "".join({"+": "[+-]", "/": "[/_]"}.get(digit, digit) for digit in digits)
