"""Hide configured secrets in all output, because a server can echo the key that canaryd sent.

`keep` registers a secret before it is first sent. `hide` replaces it in texts, lists and mappings: in plain form, with
any of its characters percent-encoded, and in base64 (both alphabets), also as a part of a longer encoded text.

A secret that is a plain word ("EMPTY", "ollama") or shorter than `SHORTEST` also occurs in harmless texts. It is
replaced only after "Bearer" and other words that mean a key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "…"
SHORTEST = 6
"""Smallest length of a secret that is replaced everywhere (ours: 6 random characters are 35 bits)."""
LONGEST_WORD = 16
"""Smallest length of a secret that is never taken for a plain word (ours: 16 random letters are 75 bits)."""
_WORD = re.compile(r"(?:[A-Z]?[a-z]*|[A-Z]*)(?:[-_.](?:[A-Z]?[a-z]*|[A-Z]*))*")
_CALLED = r"(?<![A-Za-z])(?i:bearer|key|token|authorization|secret|password)\b\W{1,8}(?:\w+\W{1,8}){0,2}?"
_patterns: dict[str, re.Pattern[str]] = {}
"""Secret → pattern that finds it in a text. The match of the group "before" is kept; the rest is replaced."""


def keep(secret: str) -> None:
    """Register a secret of printable ASCII, so that `hide` replaces it until the process ends."""
    if not secret or secret in _patterns:
        return
    if len(secret) < SHORTEST or (len(secret) < LONGEST_WORD and _WORD.fullmatch(secret)):
        _patterns[secret] = re.compile(rf"(?P<before>{_CALLED}){re.escape(secret)}(?!\w)")
    else:
        _patterns[secret] = re.compile("|".join([_percent(secret), *_base64(secret)]))


def hide(value: Any) -> Any:
    """Return JSON data, or a text, with all registered secrets replaced. Without secrets, return `value` itself."""
    return _hidden(value) if _patterns else value


def bare(address: str) -> str:
    """Return an address in which "…" replaces all text before the last "@", because it can contain a password.

    In a malformed address nothing shows where a password begins and ends.
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
    """Return a pattern that matches a secret whose characters are each plain or percent-encoded (%73)."""
    return "".join(f"(?:{re.escape(c)}|%(?i:{ord(c):02x}))" for c in secret)


def _base64(secret: str) -> Iterator[str]:
    """Yield three patterns for a secret in base64, one for each of its possible offsets (0, 1 or 2 bytes) in a group.

    The patterns omit digits that also encode neighbouring bytes.
    """
    for before in range(3):
        encoded = base64.b64encode(b" " * before + secret.encode()).decode().rstrip("=")
        digits = encoded[(0, 2, 3)[before] : len(encoded) - ((before + len(secret)) % 3 > 0)]
        yield "".join({"+": "[+-]", "/": "[/_]"}.get(digit, digit) for digit in digits)
