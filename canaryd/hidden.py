"""Configured secrets, hidden in everything that repeats them: a server may echo a key in any spelling.

`keep` names a secret where it is sent for the first time. `hide` replaces it in texts, in mappings, and in lists whose
texts spell it only together, as tokens do: in any case, with JSON, URL, HTML or hexadecimal escapes, with white space
or punctuation in between, and in base64 at each of its three alignments.

A secret that is a plain word ("EMPTY", "ollama") or shorter than `SHORTEST` would stand in innocent texts too: it is
replaced only after "Bearer", and after a word that calls it a key.
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
SPELLED = 48
"""Characters of a long secret that are looked for; as many more that may be its own are replaced with them (ours)."""
CUT = 8
"""Characters of a secret that are replaced where a text ends within it; of a shorter one its first half (ours)."""
_WORD = re.compile(r"(?:[A-Z]?[a-z]*|[A-Z]*)(?:[-_.](?:[A-Z]?[a-z]*|[A-Z]*))*")
_BETWEEN = r"""[\s,:;'"|-]{0,4}"""
_ESCAPE = r"""(?:&[a-z]{0,5}|[\s,:;'"|%\\&#xu0-9a-f-]{0,8})"""
"""What may be left of a character where a text is cut off."""
_CALLED = r"(?<![A-Za-z])(?:key|token|authorization|secret|password)\b\W{1,8}(?:\w+\W{1,8}){0,2}?"
_ENTITIES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_patterns: dict[str, re.Pattern[str]] = {}
"""Secret → what finds it; in a group named "before" stands what is kept."""


def keep(secret: str) -> None:
    """Hide a secret of printable ASCII from now on, until the process ends."""
    if not secret or secret in _patterns:
        return
    if len(secret) < SHORTEST or (len(secret) < LONGEST_WORD and _WORD.fullmatch(secret)):
        called = rf"(?P<before>{_CALLED}){re.escape(secret)}(?!\w)"
        _patterns[secret] = re.compile("|".join([called, *_spellings(f"Bearer {secret}")]), re.IGNORECASE)
    else:
        _patterns[secret] = re.compile("|".join(_spellings(secret)), re.IGNORECASE)


def hide(value: Any) -> Any:
    """Return JSON data, or a text, without the secrets; itself where none is kept."""
    return _hidden(value) if _patterns else value


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_hidden(name): _hidden(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_hidden(item) for item in value]
        return _apart(items) if len(items) > 1 and all(isinstance(item, str) for item in items) else items
    return value


def _text(text: str) -> str:
    if len(text) >= SHORTEST:
        for pattern in _patterns.values():
            text = pattern.sub(_kept, text)
    return text


def _kept(match: re.Match[str]) -> str:
    return (match.groupdict().get("before") or "") + HIDDEN


def _apart(items: list[str]) -> list[str]:
    """Return texts without those that spell a secret together."""
    joined = "".join(items)
    spans = [match.span() for pattern in _patterns.values() for match in pattern.finditer(joined)]
    if not spans:
        return items
    kept, begin = [], 0
    for item in items:
        end = begin + len(item)
        kept.append(HIDDEN if any(first < end and begin < last for first, last in spans) else item)
        begin = end
    return kept


def _spellings(secret: str) -> Iterator[str]:
    """Yield patterns for a secret as text and in base64, for matching without regard to case."""
    secret, more = secret[:SPELLED], secret[SPELLED:]
    rest = f"(?:{_BETWEEN}(?:{'|'.join(map(_character, sorted(set(more))))})){{0,{len(more)}}}" if more else ""
    yield _pattern([*map(_character, secret)], _BETWEEN, rest)
    for given in dict.fromkeys((secret, secret.lower(), secret.upper())):
        for before in range(3):
            # Of the first and the last group only the characters that depend on the secret alone.
            encoded = base64.b64encode(b" " * before + given.encode()).decode().rstrip("=")
            last = len(encoded) - ((before + len(given)) % 3 > 0)
            digits = [_digit(c) for c in encoded[(0, 2, 3)[before] : last]]
            yield _pattern(digits, r"\s{0,2}", rf"(?:\s{{0,2}}[0-9a-z+/_=%-]){{0,{4 + 2 * len(more)}}}")


def _pattern(characters: list[str], between: str, rest: str) -> str:
    """Return a pattern for characters in a row and their `rest`, or for at least `CUT` of them at a text's end."""
    begin = min(CUT, (len(characters) + 1) // 2)
    cut = ""
    for character in reversed(characters[begin:]):
        cut = f"(?:{between}{character}{cut})?"
    tail = between.join(["", *characters[begin:]])
    return f"{between.join(characters[:begin])}(?:{tail}{rest}|{cut}{_ESCAPE}\\Z)"


def _character(character: str) -> str:
    r"""Return a pattern for a character as it is, as %73, \x73, \u0073, 0x73 or 73, and as &#115; or &amp;."""
    codes = {f"{ord(c):02x}" for c in (character.lower(), character.upper())}
    numbers = {str(ord(c)) for c in (character.lower(), character.upper())}
    ways = [rf"\\*{re.escape(character)}", rf"(?:%(?:25)*|\\+x|\\+u00|&\#x0*|0x)?(?:{'|'.join(sorted(codes))});?"]
    ways.append(rf"&\#0*(?:{'|'.join(sorted(numbers))});?")
    if character in _ENTITIES:
        ways.append(f"&{_ENTITIES[character]};")
    return f"(?:{'|'.join(ways)})"


def _digit(character: str) -> str:
    """Return a pattern for a digit of base64, in both alphabets and escaped in a URL."""
    return {"+": "(?:[+-]|%2B)", "/": r"(?:\\?/|_|%2F)"}.get(character, character)
