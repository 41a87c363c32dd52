"""The types of values in the configuration: durations, sizes, addresses, choices."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from canaryd.config.schema import SPELLED, Notes, Scalar, quoted, read_filled, read_integer, read_number
from canaryd.probe import LEVELS

MAX_SECONDS = 36500 * 86400.0  # a century: longer ones overflow the standard library's timers and timestamps
MAX_BYTES = 1 << 50
MAX_REQUEST = 86400.0
"""Longest time limit of one request to an endpoint, in seconds (ours)."""
GRADES = ("none", "application", "reset", "reboot", "inspect", "rma")
"""Actions that an Xid (an NVIDIA error) can require, from none to a return of the part; see docs/readings.md."""
DIALECTS = (
    *("vllm", "sglang", "trtllm", "mindie", "llama-server", "llama-cpp-python", "mlx-lm", "ollama", "tgi"),
    *("transformers", "generic"),
)
"""Server software that the endpoint canary supports; see docs/canaries.md."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_duration(text: str) -> float:
    """Return the seconds of "90s", "15m", "2h" or "30d". Raises `ValueError` that says what to write."""
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not match:
        raise ValueError(f'{quoted(text)} is not a duration; write e.g. "15m"')
    if float(match[1]) <= 0:
        raise ValueError(f'{quoted(text)} is not a positive duration; write e.g. "15m"')
    if not match[2]:
        raise ValueError(f"{quoted(text)} of what? write {text}d for days, {text}h for hours, {text}m or {text}s")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f'{quoted(text)} is longer than a century; write at most "36500d"')
    return seconds


def _request_timeout(text: str) -> float:
    if (seconds := parse_duration(text)) > MAX_REQUEST:
        raise ValueError(f'{quoted(text)} is too long for one request; write at most "1d"')
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes of e.g. "256MiB" (KiB, MiB, GiB or TiB). Raises `ValueError` that says what to write."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(KiB|MiB|GiB|TiB)", text)
    if not match:
        raise ValueError(f'{quoted(text)} is not a size; write e.g. "256MiB"')
    size = float(match[1]) * _SIZES[match[2]]
    if not 1024 <= size <= MAX_BYTES:
        raise ValueError(f'{quoted(text)} is out of range; write at least "1KiB" and at most "1024TiB"')
    return int(size)


def parse_listen(text: str) -> tuple[str, int]:
    """Return (host, port) of "127.0.0.1:19469", "[::1]:19469", "name:19469" or ":19469". Raises `ValueError`.

    The host is "" for ":19469", which means all interfaces. Port 0 means any free port.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f'{quoted(text)} is not HOST:PORT; write e.g. "127.0.0.1:19469"')
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{quoted(text)}: {quoted(port)} is not a port; write a number from 0 (any free) to 65535")
    if re.fullmatch(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*", host):
        raise ValueError(f'{quoted(text)}: write an IPv6 address in brackets, e.g. "[::1]:{port}"')
    if not _is_host(host):
        raise ValueError(f"{quoted(text)}: {quoted(host)} is not a host name or address; write e.g. 127.0.0.1")
    return host.strip("[]"), int(port)


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            ipaddress.IPv6Address(host[1:-1])
            return True
        if re.fullmatch(r"[0-9.]+", host):
            ipaddress.IPv4Address(host)
            return True
        host.encode("idna")  # as `socket` does, which refuses empty labels and those above 63 letters
    except ValueError:
        return False
    return bool(re.fullmatch(r"[A-Za-z0-9._-]*", host))


def _store_size(text: str) -> int:
    if (size := parse_size(text)) < 1 << 20:
        raise ValueError(f'{quoted(text)} is too small for the database; write at least "1MiB"')
    return size


def _absolute(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(f'{quoted(text)} is not an absolute path; write e.g. "/var/lib/canaryd"')
    return Path(text)


def _program(text: str) -> str:
    if not text or ("/" in text and not text.startswith("/")):
        raise ValueError(
            f'{quoted(text)} is neither an absolute path nor a command name; write e.g. "/opt/bin/python3"'
        )
    return text


def choice(what: str, known: Sequence[str], types: tuple[str, ...]) -> Scalar:
    """Return the type of a setting that accepts only the words `known`; `what` describes such a word in messages."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{quoted(text)} is not {what}; write one of {', '.join(known)}")
        return text

    return Scalar(f"one of {', '.join(known)}", parse, {"enum": list(known)}, types)


def _url(text: str) -> str:
    if "@" in text:  # a user name, and perhaps a password: it must not be repeated
        raise ValueError('the address contains "@", as one with a password; put the key into a file and set key_file')
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket or a port that cannot be
        good = False
    if not good or parts.query or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError(f'{quoted(text)} is not the address of an API; write e.g. "http://127.0.0.1:8000/v1"')
    return text.rstrip("/")


def parse_hours(text: str) -> tuple[int, int]:
    """Return begin and end of a range such as "22:00-06:00", in minutes after midnight. Raises `ValueError`.

    An end before the beginning is on the next day; "00:00-24:00" is the whole day.
    """
    match = re.fullmatch(r"([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", text)
    begin, end = (60 * int(match[i]) + int(match[i + 1]) for i in (1, 3)) if match else (0, 0)
    if not match or max(int(match[2]), int(match[4])) > 59 or begin >= 1440 or end > 1440 or begin == end:
        raise ValueError(f'{quoted(text)} is not a time of day; write e.g. "08:00-20:00" or "22:00-06:00"')
    return begin, end


def _between(low: float, high: float, name: str, read: Callable[[str], float], *types: str) -> Scalar:
    """Return the type of a setting with a number from `low` to `high`.

    `name`: what messages call the value, such as "a number". `read` converts a text; `types`: the allowed YAML types.
    """

    def parse(text: str) -> float:
        if not low <= (number := read(text)) <= high:
            raise ValueError(f"{text} is out of range; write {name} from {low} to {high}")
        return number

    kind = "integer" if types == ("int",) else "number"
    return Scalar(name, parse, {"type": kind, "minimum": low, "maximum": high}, types)


def whole(low: int, high: int) -> Scalar:
    """Return a setting type for whole numbers from `low` to `high`."""
    return _between(low, high, "a whole number", read_integer, "int")


DURATION = Scalar(
    'a duration, e.g. "15m"',
    parse_duration,
    {"type": "string", "pattern": r"^(?=.*[1-9])[0-9]+(\.[0-9]+)?[smhd]$"},
    SPELLED,
)
REQUEST_TIMEOUT = Scalar(DURATION.wanted, _request_timeout, DURATION.json, DURATION.types)
_BYTES = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]iB)$"}
SIZE = Scalar('a size, e.g. "256MiB"', _store_size, _BYTES, SPELLED)
MEMORY = Scalar('a size, e.g. "1GiB"', parse_size, _BYTES, SPELLED)
LISTEN = Scalar(
    'HOST:PORT in quotes, e.g. "127.0.0.1:19469"',
    parse_listen,
    {"type": "string", "pattern": r"^(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]*):[0-9]{1,5}$"},
    SPELLED,
)
LEVEL = choice("a level", LEVELS, SPELLED)
GRADE = choice("a grade", GRADES, SPELLED)
SHARE = _between(0.0001, 1, "a number", read_number, "int", "float")
HOURS = Scalar(
    'hours of the day, e.g. "08:00-20:00"',
    parse_hours,
    {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]-[0-2][0-9]:[0-5][0-9]$"},
    ("str",),
)
PATH = Scalar("an absolute path", _absolute, {"type": "string", "pattern": "^/"})
PROGRAM = Scalar("an absolute path or a command's name", _program, {"type": "string", "pattern": "^(/.*|[^/]+)$"})


class _Secret(Scalar):
    """A setting with a text that may be secret, so that messages do not repeat it."""

    def read(self, node: Any, where: str, notes: Notes) -> Any:
        noted = len(notes.problems)
        value = super().read(node, where, notes)
        if notes.problems[noted:]:
            del notes.problems[noted:]
            notes.add(node, where, f"wanted {self.wanted}; what is there is not shown, as it may be secret")
        return value


KEY_FILE = _Secret("the absolute path of a file with the key", _absolute, {"type": "string", "pattern": "^/"})
VARIABLE = _Secret("text (in quotes)", str, {"type": "string"})
URL = Scalar("an address (in quotes)", _url, {"type": "string", "pattern": "^https?://[^/]+"})
_APIS = ("completions", "chat")
ENFORCEMENT = choice("a way to enforce", ("log", "act"), ("str",))
API = choice("an API", _APIS, ("str",))
DIALECT = choice("a dialect", DIALECTS, ("str",))
REPEATS = choice("a promise", ("always", "restarts"), ("str",))
FILLED = Scalar("text (in quotes)", read_filled, {"type": "string", "minLength": 1})
