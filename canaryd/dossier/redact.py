"""Remove private data from a dossier: secrets, users and processes always, names of machines and parts on request."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import platform
import re
import secrets
from collections.abc import Mapping
from typing import Any

from canaryd.facts import printable
from canaryd.store.store import Store

NAMED = 500
"""Number of newest runs and polls of each device that are searched for host names."""
_HEX = "[0-9a-f]"
PATTERNS = (
    ("url", re.compile(r"[a-zA-Z0-9+.-]{1,32}://[^\s'\"<>]+")),
    (
        "uuid",
        re.compile(
            rf"(?i)(?:\b(?:GPU|MIG|CPU|MPS|XPU|NPU)-(?:GPU-)?)?\b{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\b"
        ),
    ),
    (
        "bus",
        re.compile(
            rf"(?i)\b(?:{_HEX}{{4,8}}:)?{_HEX}{{2}}:{_HEX}{{2}}\.[0-7]\b|\b{_HEX}{{4}}(?:{_HEX}{{4}})?:{_HEX}{{2}}:{_HEX}{{2}}\b"
        ),
    ),
    (  # no torch@2.13.0, and no systemd-coredump@3-1234-0.service
        "mail",
        re.compile(r"[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}(?!(?:service|socket|timer|mount|slice)\b)[A-Za-z]{2,24}\b"),
    ),
    ("ip", re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])")),
    ("ip", re.compile(rf"(?i)(?<![\w:])(?:{_HEX}{{1,4}}:){{3,7}}{_HEX}{{1,4}}(?![\w:])")),
    (
        "ip",
        re.compile(rf"(?i)(?<![\w:])(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}})*)?::{_HEX}{{1,4}}(?::{_HEX}{{1,4}})*(?![\w:])"),
    ),
    ("path", re.compile(r"(?<![\w/.\]])/(?:[\w.+@~-]+/)+[\w.+@~-]*")),
)
"""Patterns that recognise names. URLs come first, because they contain hosts and paths."""
LONG = 10
"""Smallest length of a part's number that is replaced inside words too (ours): "65:00.0" has seven characters."""
SERVER_NUMBERS = ("product_serial", "board_serial", "chassis_serial", "chassis_asset_tag")
"""Numbers of a machine, as files below /sys/class/dmi/id are called."""
ALWAYS = {"host": "host", "hostname": "host"} | dict.fromkeys(SERVER_NUMBERS, "serial")
"""Field that contains only a name → kind of the name. They are always replaced, however short they are."""
OWN_WORDS = frozenset({"schema", "kind", "state", "cause", "subject", "exactness", "backend", "format"}) | {
    "by",
    "characterised_by",
}
"""Fields whose values are words of canaryd. They are never replaced, even if a host is called "device" or "healthy"."""
NAMING = ("serial", "bus_id", "board_id", "module_id", "hostname", *SERVER_NUMBERS)
"""Keys in `Device.detail` whose values name a part or a host and match none of the `PATTERNS`."""


def clean(text: str) -> str:
    """Return a text without control characters, secrets, and names of users and processes."""
    lines = (printable(line.replace("\t", "    ")) for line in text.split("\n"))
    plain = _LOGIN.sub(r"\1[left out]@", _PEM.sub("[left out]", "\n".join(lines)))
    plain = _HOME.sub(r"\1[user]", _PROCESS.sub(r"\1[left out]", plain))
    return _SECRET.sub(r"\1[left out]", _HEADER.sub(r"\1[left out]", plain))


# Repeats are bounded, and nothing is matched before a key: a line of 16,000 dashes took seconds.
_KEYS = r"(?:token|secret|passw(?:or)?d|passphrase|\bpwd|api[_-]?key|credential)[\w-]{0,64}"
_GIVEN = r"['\"]?\s*[=:]\s*(?:bearer\s+|basic\s+)?"
_QUOTED = r"\"[^\"\n]+\"|'[^'\n]+'"
_SECRET = re.compile(
    rf"(?i)((?:{_KEYS}{_GIVEN}|--[\w-]{{0,32}}{_KEYS}\s+|\bbearer\s+(?=\S*\d)))"
    rf"(?:{_QUOTED}|['\"]?[^\s'\",;]{{4,}})"
)
_HEADER = re.compile(rf"(?i)(\b(?:authorization|cookie){_GIVEN})(?:{_QUOTED}|['\"]?[^'\"\n]+)")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL)
_LOGIN = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,30}://)[^/\s]{1,200}@")
_HOME = re.compile(r"(/(?:home|Users)/)[^/\s:'\"]+")
_PROCESS = re.compile(r"(?i)(\b(?:process name|process|comm|name)=|\bcomm: )(?!\s)[^,\s]+")


def without_processes(text: str) -> str:
    """Return the output of `nvidia-smi -q` without its process sections."""
    kept, depth = [], -1
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if depth >= 0 and line.strip() and indent <= depth:
            depth = -1
        if depth < 0 and re.match(r"\s*(?:Accounting Mode Buffer|Processes|Accounted Processes)\b", line):
            depth = indent if re.match(r"\s*(?:Accounted )?Processes", line) else -1
            kept.append(f"{line.rstrip().partition(':')[0].rstrip()}: left out by canaryd" if depth >= 0 else line)
            continue
        if depth < 0:
            kept.append(line)
    return "\n".join(kept)


class Redactor:
    """Replaces names of machines and parts by pseudonyms. Within one dossier a name always gets the same pseudonym."""

    def __init__(
        self, store: Store, host: str, server: Mapping[str, str] | None = None, salt: bytes | None = None
    ) -> None:
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self.known: dict[str, str] = {}
        """Name to replace → its kind."""
        for record in store.devices():
            device = record.device
            self._know(device.uuid, "uuid")
            self._know(device.parent, "uuid")
            self._know(device.card, "uuid")
            for module in device.detail.get("memory_serials", "").split(", "):
                self._know(module.rpartition(": ")[2], "serial")
        for detail in (*(record.device.detail for record in store.devices()), server or {}):
            for name in NAMING:
                self._know(detail.get(name, ""), "bus" if name == "bus_id" else "serial")
        self._know(host, "host")
        self._know(platform.node(), "host")
        uuids = [record.device.uuid for record in store.devices()]
        for uuid, kept in itertools.product(uuids, (store, store.drills)):
            for run in (*kept.runs(uuid, limit=NAMED), *kept.polls(uuid, limit=NAMED)):
                self._know(run.environment.get("hostname", ""), "host")
        # A part's long number is replaced anywhere, a host's name only as a whole word.
        whole: list[str] = []
        words: list[str] = []
        for name in sorted(self.known, key=len, reverse=True):
            long = len(name) >= LONG and self.known[name] != "host"
            (whole if long else words).append(re.escape(name))
        either = [rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])"] if words else []
        self._names = re.compile(rf"(?i){'|'.join([*whole, *either])}") if self.known else None

    def _know(self, value: str, kind: str) -> None:
        # A short number ("0", "1") as module or board id would make every such number a pseudonym, and a host called
        # "vm" every such word. In the fields that hold a host, `value` replaces it anyway.
        if len(value) >= 3 and not (value.isdigit() and len(value) < 6):
            self.known.setdefault(value, kind)
            if kind == "host" and "." in value:
                self.known.setdefault(value.partition(".")[0], kind)

    def _alias(self, kind: str, value: str) -> str:
        plain = value.lower()
        if kind == "uuid":
            plain = re.sub(r"^(?:[a-z]{3}-)+", "", plain)
        if kind == "bus":
            plain = re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", plain)
            plain = plain if re.match(r"[0-9a-f]{4}:", plain) else f"0000:{plain}"
            plain = plain if "." in plain else f"{plain}.0"
        digest = hmac.new(self._salt, f"{kind} {plain}".encode(), hashlib.sha256).hexdigest()
        return f"[{kind} {digest[:8]}]"

    def text(self, text: str) -> str:
        """Return a text with every name replaced."""
        aliases: list[str] = []

        def put(alias: str) -> str:
            # Pseudonyms are inserted at the end, so that no later pattern matches inside one.
            aliases.append(alias)
            return f"\0{len(aliases) - 1}\0"

        kinds = {n.lower(): k for n, k in self.known.items()}
        url, *others = PATTERNS
        text = url[1].sub(lambda m: put(self._alias("url", m[0])), text)
        if self._names is not None:
            text = self._names.sub(lambda m: put(self._alias(kinds[m[0].lower()], m[0])), text)
        for kind, pattern in others:
            text = pattern.sub(lambda m: put(self._alias(kind, m[0])), text)  # noqa: B023  used at once
        return re.sub(r"\0(\d+)\0", lambda m: aliases[int(m[1])], text)

    def value(self, value: Any) -> Any:
        """Return JSON data with every text redacted, and also every key that is not a field name."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {k if k.isidentifier() else self.text(k): self._field(k, v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(v) for v in value]
        return value

    def _field(self, name: str, value: Any) -> Any:
        if name in OWN_WORDS and isinstance(value, str):
            return value
        return self._alias(ALWAYS[name], value) if name in ALWAYS and value else self.value(value)


def cleaned(value: Any) -> Any:
    """Return JSON data with every text cleaned by `clean`."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(k): cleaned(v) for k, v in value.items()}
    return [cleaned(v) for v in value] if isinstance(value, (list, tuple)) else value
