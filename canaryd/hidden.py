"""Configured secrets, hidden in everything that repeats them: a server may echo a key in any spelling.

`keep` names a secret where it is sent for the first time. `hide` replaces it in texts, in mappings, and in lists whose
texts spell it only together, as tokens do: in any case, in look-alike letters (NFKD), with anything but letters and
digits in between (invisible characters too), with the escapes of JSON, URLs, HTML, C and mail, as lists of bytes, and
in base64 at each of its three alignments.

A secret that is a plain word ("EMPTY", "ollama") or shorter than `SHORTEST` would stand in innocent texts too: it is
replaced only after "Bearer", and after a word that calls it a key.
"""

from __future__ import annotations

import base64
import re
import unicodedata
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
_ESCAPE = r"""(?:&[a-z]{0,5}|[\s,:;'"|%=\\&#xu{0-9a-f-]{0,8})"""
"""What may be left of a character where a text is cut off."""
_CALLED = r"(?<![A-Za-z])(?:key|token|authorization|secret|password)\b\W{1,8}(?:\w+\W{1,8}){0,2}?"
_ENTITIES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_CONTROL = re.compile(r"[\x1b?]\[[0-9;]*[A-Za-z]")
"""A terminal's control sequence, also as `facts.printable` leaves it."""
_NO_LETTER = re.compile(rf"{_CONTROL.pattern}|[\W_]+?")
"""What may stand between the letters and digits of a secret."""
_patterns: dict[str, re.Pattern[str]] = {}
"""Secret → what finds it; in a group named "before" stands what is kept."""
_letters: dict[str, None] = {}
"""The letters and digits of each secret that is no plain word."""


def keep(secret: str) -> None:
    """Hide a secret of printable ASCII from now on, until the process ends."""
    if not secret or secret in _patterns:
        return
    if len(secret) < SHORTEST or (len(secret) < LONGEST_WORD and _WORD.fullmatch(secret)):
        called = rf"(?P<before>{_CALLED}){re.escape(secret)}(?!\w)"
        _patterns[secret] = re.compile("|".join([called, *_spellings(f"Bearer {secret}")]), re.IGNORECASE)
        return
    _patterns[secret] = re.compile("|".join(_spellings(secret)), re.IGNORECASE)
    letters = _NO_LETTER.sub("", secret)
    if len(letters) >= SHORTEST and (len(letters) >= LONGEST_WORD or not _WORD.fullmatch(letters)):
        _letters[letters.casefold()] = None


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
        for first, last in reversed(_lettered(text)):
            text = text[:first] + HIDDEN + text[last:]
    return text


def _kept(match: re.Match[str]) -> str:
    return (match.groupdict().get("before") or "") + HIDDEN


def _apart(items: list[str]) -> list[str]:
    """Return texts without those that spell a secret together."""
    joined = "".join(items)
    spans = [match.span() for pattern in _patterns.values() for match in pattern.finditer(joined)] + _lettered(joined)
    if not spans:
        return items
    kept, begin = [], 0
    for item in items:
        end = begin + len(item)
        kept.append(HIDDEN if any(first < end and begin < last for first, last in spans) else item)
        begin = end
    return kept


def _letters_of(text: str) -> str:
    """Return the letters and digits of a text, look-alikes as the plain ones, in one case."""
    plain = text if text.isascii() else unicodedata.normalize("NFKD", text)
    return _NO_LETTER.sub("", plain).casefold()


def _lettered(text: str) -> list[tuple[int, int]]:
    """Return where letters and digits spell a secret, or its beginning at the text's end, whatever stands between."""
    flat = _letters_of(text)
    found: list[tuple[int, int]] = []
    for letters in _letters:
        begin = min(CUT, (len(letters) + 1) // 2)
        at = flat.find(letters[:begin])
        while at >= 0:
            # Of a long secret its first part is enough, as everywhere.
            same = next((n for n, c in enumerate(letters) if flat[at + n : at + n + 1] != c), len(letters))
            if same >= min(SPELLED, len(letters)) or at + same == len(flat):
                found.append((at, at + same))
            at = flat.find(letters[:begin], at + 1)
    return _places(text, found) if found else []


def _places(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans of a text's letters and digits as spans of the text, in order and without overlaps."""
    dropped = {n for match in _CONTROL.finditer(text) for n in range(*match.span())}
    where = [n for n, c in enumerate(text) if n not in dropped for _ in _letters_of(c)]
    found: list[tuple[int, int]] = []
    for first, last in sorted((where[first], where[last - 1] + 1) for first, last in spans):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _spellings(secret: str) -> Iterator[str]:
    """Yield patterns for a secret as text and in base64, for matching without regard to case."""
    secret, more = secret[:SPELLED], secret[SPELLED:]
    rest = f"(?:{_BETWEEN}(?:{'|'.join(map(_character, sorted(set(more))))})){{0,{len(more)}}}" if more else ""
    yield _pattern([*map(_character, secret)], _BETWEEN, rest)
    cases = [given.encode() for given in (secret, secret.lower(), secret.upper())]
    for given in dict.fromkeys([*cases, secret.encode("utf-16-le")]):
        for before in range(3):
            # Of the first and the last group only the characters that depend on the secret alone.
            encoded = base64.b64encode(b" " * before + given).decode().rstrip("=")
            last = len(encoded) - ((before + len(given)) % 3 > 0)
            digits = [_digit(c) for c in encoded[(0, 2, 3)[before] : last]]
            yield _pattern(digits, r"\s{0,2}", rf"(?:\s{{0,2}}[0-9a-z+/_=%-]){{0,{4 + 2 * len(more)}}}")
    yield _pattern([rf"\b0*{ord(c)}\b" for c in secret], r"[\s,;]{1,4}", r"(?:[\s,;]{1,4}\d{1,3}\b)*")


def _pattern(characters: list[str], between: str, rest: str) -> str:
    """Return a pattern for characters in a row and their `rest`, or for at least `CUT` of them at a text's end."""
    begin = min(CUT, (len(characters) + 1) // 2)
    cut = ""
    for character in reversed(characters[begin:]):
        cut = f"(?:{between}{character}{cut})?"
    tail = between.join(["", *characters[begin:]])
    return f"{between.join(characters[:begin])}(?:{tail}{rest}|{cut}{_ESCAPE}\\Z)"


def _character(character: str) -> str:
    r"""Return a pattern for a character as it is, as %73, \x73, \u0073, =73, 0x73, 73 or \163, as &#115; or &amp;."""
    codes = {f"{ord(c):02x}" for c in (character.lower(), character.upper())}
    numbers = {str(ord(c)) for c in (character.lower(), character.upper())}
    octal = {f"{ord(c):o}" for c in (character.lower(), character.upper())}
    ways = [rf"\\*{re.escape(character)}"]
    # In UTF-16 a zero byte follows.
    ways.append(rf"(?:%(?:25)*|\\+x|\\+u\{{?0*|&\#x0*|0x|=)?(?:{'|'.join(sorted(codes))})[;}}]?(?:00)?")
    ways.append(rf"\\+0?(?:{'|'.join(sorted(octal))})")
    ways.append(rf"&\#0*(?:{'|'.join(sorted(numbers))});?")
    if character in _ENTITIES:
        ways.append(f"&{_ENTITIES[character]};")
    return f"(?:{'|'.join(ways)})"


def _digit(character: str) -> str:
    """Return a pattern for a digit of base64, in both alphabets and escaped in a URL."""
    return {"+": "(?:[+-]|%2B)", "/": r"(?:\\?/|_|%2F)"}.get(character, character)
