"""Huawei Ascend NPUs: the output of `npu-smi info`, in the forms of its versions 21 to 25.

One table lists all devices; three more commands per card give memory errors, memory temperature and clocks. A fourth
command asks for fault codes if the table says that a device is unhealthy. All devices of one poll share the answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.facts import Reading, printable
from canaryd.model import Device
from canaryd.probe import Absent
from canaryd.worker.telemetry.command import NotInstalled, command_setting, output
from canaryd.worker.telemetry.interface import NotHere, Unavailable
from canaryd.worker.telemetry.sysfs import Fact, Unreadable, aer, attempt, only, path_setting, pcie

PATIENCE = 4.0
"""Seconds after which a command of npu-smi is abandoned; it is slow on a busy machine."""
FRESH = 5.0
"""Seconds during which an answer of npu-smi, or its failure, is used again for all devices in it."""
STATES = ("ok", "warning", "alarm", "critical", "unknown")
CODES = 16
"""Largest number of fault codes that are reported for one device."""
MEBIBYTE = 1 << 20
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")

_answers: dict[tuple[str, ...], tuple[float, str | Unreadable]] = {}


@dataclass(frozen=True, kw_only=True)
class _Chip:
    """One chip, from two rows of the table."""

    npu: str
    chip: str
    name: str
    health: str
    bus_id: str
    """PCI address, or "" if the table has none, as in some virtual machines."""
    values: Mapping[str, str]
    """Heading of a column → text in this column."""


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the NPUs that npu-smi lists; raise `Unavailable` if npu-smi gives no answer."""
    smi, _ = _settings(settings)
    chips = _listed(smi)
    found = []
    for index, chip in enumerate(chips):
        card = _pairs(_board(smi, chip.npu))
        known = {
            "serial": card.get("serialnumber"),
            "driver": card.get("softwareversion"),
            "firmware": card.get("firmwareversion"),
            "product": card.get("productname"),
            "board_id": card.get("boardid"),
            "die_id": _pairs(_board(smi, chip.npu, chip.chip)).get("vdieid"),
        }
        detail = {"npu": chip.npu, "chip": chip.chip}
        given = {key: printable(text)[:200] for key, text in known.items() if text}
        detail |= {key: text for key, text in given.items() if text.upper() not in ("NA", "N/A", "-")}
        if chip.bus_id:
            detail["bus_id"] = chip.bus_id
        several = sum(other.npu == chip.npu for other in chips) > 1
        place = chip.bus_id or f"{chip.npu}-{chip.chip}"
        serial = detail.get("serial", "") + (f"-{chip.chip}" if several else "")
        found.append(
            Device(
                uuid=f"NPU-{serial if 'serial' in detail else place}",
                backend="npu",
                index=index,
                model=printable(f"Ascend {chip.name.removeprefix('Ascend')}")[:200],
                weak_identity="serial" not in detail,
                detail=detail,
            )
        )
    return found


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the present readings of the NPU; raise `Unavailable` if npu-smi fails or does not list the NPU."""
    smi, root = _settings(settings)
    place = (device.detail.get("npu"), device.detail.get("chip"))
    if device.backend != "npu":
        raise Unavailable(f"{device.name} is not an Ascend NPU")
    chips = _listed(smi)
    chip = next((chip for chip in chips if (chip.npu, chip.chip) == place), None)
    if chip is None:
        raise Unavailable(f"{device.name}: npu-smi lists no chip {place[1]} of NPU {place[0]}")
    alone = sum(other.npu == chip.npu for other in chips) == 1
    yield from _health(smi, chip, alone=alone)
    yield from _table(chip)
    yield from _asked(smi, chip, alone=alone)
    if chip.bus_id:
        yield from pcie(root, chip.bus_id)
        yield from aer(root, chip.bus_id)


def close() -> None:
    """Delete the answers of npu-smi that are stored for all devices."""
    _answers.clear()


def _settings(settings: Mapping[str, Any]) -> tuple[str, Path]:
    only(settings, "ascend_telemetry", "npu_smi", "sysfs")
    return command_setting(settings, "npu_smi", "npu-smi"), path_setting(settings, "sysfs", "/sys")


def _health(smi: str, chip: _Chip, *, alone: bool) -> Iterator[Fact]:
    status = chip.health.lower()
    if status not in STATES:
        yield Absent(name="device_health", reason=f"npu-smi gives {chip.health[:40]!r}, not a state of health")
        return
    yield Reading(name="device_health", value=1, labels={"status": status})
    if status == "ok":
        return
    try:
        text = _section(_ask(smi, "health", chip.npu), chip.chip, alone=alone).get("errorcode", "")
    except Unreadable as error:
        yield Absent(name="device_fault", reason=str(error))
        return
    codes = re.findall(r"\b(?:0x)?([0-9A-Fa-f]{8})\b", text)
    for code in list(dict.fromkeys(code.upper() for code in codes))[:CODES]:
        yield Reading(name="device_fault", value=1, labels={"code": code})
    if not codes:
        yield Absent(name="device_fault", reason="npu-smi names no fault code")


def _table(chip: _Chip) -> Iterator[Fact]:
    def column(name: str, least: float, most: float) -> float:
        return _number(chip.values.get(name), f"column {name}", least, most)

    def memory(part: int) -> float:
        for name in ("HBM-Usage(MB)", "Memory-Usage(MB)"):  # a device has one of the two; the other is 0 / 0
            used, _, total = chip.values.get(name, "").partition("/")
            both = [_number(text, f"column {name}", 0, 1 << 24) for text in (used, total)] if total else [0, 0]
            if both[1] > 0:
                return both[part] * MEBIBYTE
        raise Unreadable("npu-smi's table gives no memory")

    yield attempt("power_watts", lambda: column("Power(W)", 0.1, 10_000), "watts")
    yield attempt("temperature_celsius", lambda: column("Temp(C)", -40, 200), "celsius", sensor="core")
    yield attempt("utilization_ratio", lambda: column("AICore(%)", 0, 100) / 100, engine="aicore")
    yield attempt("memory_used_bytes", lambda: memory(0), "bytes")
    yield attempt("memory_total_bytes", lambda: memory(1), "bytes")


def _asked(smi: str, chip: _Chip, *, alone: bool) -> Iterator[Fact]:
    """Yield the readings of one chip that need further commands of npu-smi.

    Only errors of the stacked memory are read, because devices without DDR memory print counts of DDR errors too.
    `alone`: the card has only this chip.
    """
    field = partial(_field, smi, chip, alone=alone)
    heat = partial(field, "memory", "HBM Temperature(C)", -40, 200)
    yield attempt("temperature_celsius", heat, "celsius", sensor="memory")
    errors = partial(field, "ecc", least=0, most=1 << 32)
    for kind, bits in (("corrected", "Single"), ("uncorrected", "Double")):
        labels = {"kind": kind, "location": "hbm"}
        yield attempt("ecc_errors_total", partial(errors, f"HBM {bits} Bit Error Count"), **labels)
        life = partial(errors, f"HBM {bits} Bit Aggregate Total Err Cnt")
        yield attempt("ecc_aggregate_errors_total", life, **labels)
    # Not reported: the counts for single bits, which are reserved and always 0 (npu-smi reference, 25.5).
    yield attempt("retired_pages", partial(errors, "HBM Double Bit Isolated Pages Count"), cause="double_bit")
    waiting = partial(errors, "HBM Double Bit Next-Isolated Pages Count")
    yield attempt("retired_pages_pending", lambda: int(waiting() > 0))
    now, most = (partial(field, "common", f"Aicore {which}(MHZ)", 1, 10_000) for which in ("curFreq", "Freq"))
    yield attempt("clock_hertz", lambda: now() * 10**6, "hertz", domain="aicore")
    yield attempt("clock_max_hertz", lambda: most() * 10**6, "hertz", domain="aicore")


def _listed(smi: str) -> list[_Chip]:
    """Return the chips of the table; raise `Unavailable` if there is no table."""
    try:
        text = _answer(smi, "info")
    except NotInstalled as error:
        raise NotHere(str(error)) from error
    except Unreadable as error:
        raise Unavailable(str(error)) from error
    if "Health" not in text:
        raise Unavailable(f"{smi} info prints no table of devices")
    return _chips(text)


def _chips(text: str) -> list[_Chip]:
    """Return the chips in the table: each has a row for its card and then its own row, with different headings."""
    found: list[_Chip] = []
    headings: dict[str, list[str]] = {"Health": [], "Bus-Id": []}
    card: tuple[str, str, str, dict[str, str]] | None = None
    for line in text.splitlines():
        if "Process id" in line:
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.lstrip().startswith("|") else []
        if len(cells) != 3 or not cells[0]:
            continue
        first, second, third = cells[0].split(), cells[1], cells[2]
        if second in headings:
            headings[second] = third.split()
        elif first[0].isdigit() and len(first) == 2 and not first[1].isdigit():
            card = (first[0], first[1], second, _columns(headings["Health"], third))
        elif all(word.isdigit() for word in first) and card is not None:
            bus_id = second.lower() if _BUS_ID.fullmatch(second) else ""
            values = card[3] | _columns(headings["Bus-Id"], third)
            npu, name, health, _ = card
            found.append(_Chip(npu=npu, chip=first[0], name=name, health=health, bus_id=bus_id, values=values))
            card = None
    return found


def _columns(headings: list[str], cell: str) -> dict[str, str]:
    """Return heading → value for a cell such as "97.6" or "0 / 0"; {} if it has more or fewer values than headings."""
    values = re.findall(r"\S+\s*/\s*\S+|\S+", cell)
    return dict(zip(headings, values, strict=True)) if len(values) == len(headings) else {}


def _field(smi: str, chip: _Chip, question: str, name: str, least: float, most: float, *, alone: bool) -> float:
    """Return one number of the answer to `npu-smi info -t <question>`; raise `Unreadable` if it is missing or wrong."""
    fields = _section(_ask(smi, question, chip.npu), chip.chip, alone=alone)
    return _number(fields.get(_key(name)), f"npu-smi info -t {question}: {name}", least, most)


def _section(text: str, chip: str, *, alone: bool) -> dict[str, str]:
    """Return the fields of one chip: those of the blocks of text that contain the chip's number.

    If the card has only this chip (`alone`), blocks without a number are included.
    """
    found: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", text):
        pairs = [(_key(key), value) for key, value in _lines(block)]
        fields = dict(pairs)
        if len(fields) != len(pairs) or "chipname" in fields:
            continue  # chips without a line between them, or the board's controller
        if fields.get("chipid") == chip or (alone and "chipid" not in fields):
            found |= fields
    return found


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in _lines(text):
        found.setdefault(_key(key), value)
    return found


def _lines(text: str) -> list[tuple[str, str]]:
    return [(key, value.strip()) for key, value in re.findall(r"^\s*([^:\n]+?)\s*:[ \t]*(.*)$", text, re.MULTILINE)]


def _key(name: str) -> str:
    """Return a field's name in lower case without blanks, because versions differ in both ("Temperature (C)")."""
    return re.sub(r"\s+", "", name).lower()


def _number(text: str | None, where: str, least: float, most: float) -> float:
    if text is None:
        raise Unreadable(f"{where}: not printed by this version or for this device")
    if not re.fullmatch(r"-?\d{1,12}(\.\d{1,6})?", text.strip()):
        raise Unreadable(f"{where}: {text.strip()[:40]!r} is not a number")
    number = float(text) if "." in text else int(text)
    if not least <= number <= most:
        raise Unreadable(f"{where}: {text.strip()} is out of range ({least:g} to {most:g})")
    return number


def _ask(smi: str, question: str, npu: str, chip: str = "") -> str:
    return _answer(smi, "info", "-t", question, "-i", npu, *(("-c", chip) if chip else ()))


def _board(smi: str, npu: str, chip: str = "") -> str:
    """Return npu-smi's description of a board, or "" if there is no answer, so that a device is still listed."""
    try:
        return _ask(smi, "board", npu, chip)
    except Unreadable:
        return ""


def _answer(*argv: str) -> str:
    """Return a command's output; raise `Unreadable` if it failed. The output is used again for `FRESH` seconds."""
    now = time.monotonic()
    asked, answer = _answers.get(argv, (float("-inf"), ""))
    if now - asked > FRESH:
        try:
            answer = output(argv, PATIENCE)
        except Unreadable as error:
            answer = error
        _answers[argv] = (time.monotonic(), answer)
    if isinstance(answer, Unreadable):
        raise answer
    return answer
