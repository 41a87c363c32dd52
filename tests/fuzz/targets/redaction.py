"""What is told to strangers: `clean` and the redaction of a dossier.

A planted secret, a user's directory or a process's name never stays, whatever surrounds it; the result is lines without
control characters. A redacted text holds no serial number, no uuid, no host and no address that it was told of, the
same thing has the same pseudonym.
"""

from __future__ import annotations

import json
from pathlib import Path

from canaryd.dossier.redact import Redactor, clean, cleaned, without_processes
from canaryd.model import Device
from canaryd.store.store import Store
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import in_time, lines

SECRET = "Zq9secret7X"
NAMES = ("token", "API_KEY", "api-key", "secret", "password", "passwd", "hf_token", "x-credential-id", "Authorization",
         "--token", "HF_TOKEN", "client_secret")  # fmt: skip
JOINS = ("=", ": ", ":", " = ", '": "', "'='", '="', ": Bearer ", "=Bearer ", ": Basic ")


def _planted(data: bytes) -> None:
    choices = Choices(data)
    name = choices.of(NAMES)
    join = " " if name.startswith("--") else choices.of(JOINS)
    said = (
        _around(choices) + name + join + SECRET + choices.of(("", " ", "\n", '"', "'", ",", ";", "\t")) + choices.text()
    )
    shown = clean(said)
    lines(shown)
    assert SECRET not in shown, (said, shown)
    assert SECRET not in clean(shown)


def _around(choices: Choices) -> str:
    """Text before it that does not end in a letter, a digit or a line that hides it from the eye as well."""
    return choices.text() + choices.of((" ", "\n", "{", "(", '"', ", ", "\t", ""))[:1].replace("", " ", 1)


def _person(data: bytes) -> None:
    choices = Choices(data)
    before = choices.text().rstrip("/") + " "
    said = before + choices.of(("/home/", "/Users/")) + SECRET + choices.of(("/", "", " ", ":", "/x/y", "\n")) + " "
    said += choices.of(("process=", "comm=", "name=", "Process Name=")) + SECRET + choices.of((",", " ", "\n", ""))
    shown = clean(said + choices.text())
    lines(shown)
    assert SECRET not in shown, (said, shown)


def _any(data: bytes) -> None:
    data = stretched(data)
    text = data.decode("utf-8", "surrogateescape")
    with in_time(len(data) * 4):
        shown = clean(text)
        kept = without_processes(text)
        redacted = _redactor().text(shown)
    lines(shown)
    lines(redacted)
    assert kept.count("\n") <= text.count("\n")
    json.dumps(cleaned({text[:200]: [text[:200], 1, None]})).encode()


SERIAL, UUID, HOST = "1653923001234", "GPU-5f1c0d6e-aaaa-bbbb-cccc-0123456789ab", "node17.dc4.example"
BUS, URL = "0000:65:00.0", "http://10.1.2.3:8000/v1"
_made: list[Redactor] = []


def _redactor() -> Redactor:
    if not _made:
        store = Store.open(Path("/proc/nonexistent"))  # no such place: it works from memory
        store.see_device(
            Device(uuid=UUID, backend="cuda", index=0, model="H200", detail={"serial": SERIAL, "bus_id": BUS}), 1.79e9
        )
        _made.append(Redactor(store, HOST, salt=b"0" * 16))
    return _made[0]


def _redacted(data: bytes) -> None:
    choices = Choices(data)
    name = choices.of((SERIAL, UUID, HOST, BUS, URL, "10.1.2.3", "fe80::1:2:3", "node17"))
    ends = (" ", "\n", ",", ";", '"', "'", "(", ")", "=", "|")
    before, after = choices.text() + choices.of(ends), choices.of(ends) + choices.text()
    said = clean(f"{before}{name}{after}")
    shown = _redactor().text(said)
    assert name not in shown, (said, shown)
    assert name.upper() not in shown
    assert _redactor().text(said) == shown
    assert "\0" not in shown
    value = _redactor().value({"message": said, "list": [said], "count": 1, "state": "faulty"})
    assert name not in json.dumps(value, ensure_ascii=False)
    assert value["count"] == 1
    assert value["state"] == "faulty"


SMI = """    GPU 00000000:65:00.0
        Product Name                          : NVIDIA H200
        Processes
            GPU instance ID                   : N/A
            Process ID                        : 4242
                Name                          : {}
        Accounting Mode                       : Disabled
"""


def _tool(data: bytes) -> None:
    """nvidia-smi -q without its processes, by indent, however it is cut."""
    choices = Choices(data)
    text = SMI.format(SECRET)
    at = choices.below(text.index("Processes"))
    text = text[:at] + choices.text().replace("\r", "") + text[at:] if choices.flag() else text
    if any(line.strip() == "Processes" for line in text.split("\n")):
        assert SECRET not in without_processes(text), text
    without_processes(choices.rest().decode("utf-8", "replace"))


target = modes(_planted, _person, _any, _redacted, _tool)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes((n + i * 7) % 256 for i in range(60))) for mode in (0, 1, 3, 4) for n in range(0, 250, 12)),
        seed(2, "token=abcdef /home/me/x Bearer a1b2c3d4 10.1.2.3 fe80::1"),
        seed(2, SMI),
    ]
