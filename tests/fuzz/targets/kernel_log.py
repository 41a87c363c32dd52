"""The kernel's log: records of /dev/kmsg, messages, the file as a stream, and what the daemon makes of a record.

A record's text is one printable line; a PCI address has its form; a name or number of a process never stays. Chunks may
be cut anywhere: the same records come out. Numbers rise, times lie neither before the epoch nor in the future, what is
lost is never negative. The daemon turns every record into one event of a device, whose grading never raises.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import re
import time
from pathlib import Path

from canaryd.config.settings import TelemetryConfig
from canaryd.config.values import GRADES
from canaryd.facts import LogPosition, LogRecord
from canaryd.judge.telemetry import events, xids
from canaryd.judge.telemetry.signals import _grade, decode_xid
from canaryd.model import Device
from canaryd.worker.telemetry import kernel_log
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import in_time, one_line, plain, scratch

DATA = Path(__file__).resolve().parents[2] / "data/kernel-log"
BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
DEVICE = Device(uuid="GPU-0", backend="cuda", index=0, model="H200", detail={"driver": "575.57.08"})
BOOT = "3f2a7c9e-0000-4000-8000-000000000001"
SECRET = "Zq9secretprocess"


def _stream(data: bytes) -> None:
    choices = Choices(data[:3])
    data = stretched(data[3:])
    with scratch.fresh() as place, in_time(len(data)):
        log, boot = place / "kmsg", place / "boot"
        log.write_bytes(data)
        boot.write_text(BOOT + "\n")
        after = choices.below(4) * 500 - 1
        found: list[LogPosition | LogRecord] = []
        try:
            found += kernel_log.follow(str(log), boot=BOOT, after=after, until_end=True, boot_id=str(boot))
            assert isinstance(found[-1], LogPosition)
        except ValueError as error:
            assert "its lines are no records of the kernel" in str(error)
        records = [one for one in found if isinstance(one, LogRecord)]
        for position in (one for one in found if isinstance(one, LogPosition)):
            assert position.lost >= 0 <= position.garbled
        for record in records:
            _checked(record)
        numbers = [record.sequence for record in records]
        assert numbers == sorted(set(numbers)), "a record twice, or out of order"
    size = choices.below(200) + 1
    if len(data) <= 100_000:
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        whole, cut = kernel_log._Lines(), kernel_log._Lines()
        assert _short(whole.feed(data)) == _short([line for piece in pieces for line in cut.feed(piece)])


def _short(lines: list[bytes]) -> list[bytes]:
    """An over-long line is given out once, and how much of it is nobody's business: it is no record."""
    return [line if len(line) <= kernel_log.LONGEST_LINE else b"too long" for line in lines]


def _checked(record: LogRecord) -> None:
    plain(record)
    one_line(record.text)
    assert len(record.text) <= kernel_log.LONGEST_TEXT + 8
    assert record.boot == BOOT
    assert 0 <= record.at <= time.time() + 1
    assert not record.bus_id or BUS.fullmatch(record.bus_id), record.bus_id
    for text in (record.kind, record.name, *record.fields, *record.fields.values()):
        assert text.isprintable()
        assert len(text) <= kernel_log.LONGEST_TEXT
    happened = events.log_event(record, DEVICE.uuid)
    plain(happened)
    assert happened.device == DEVICE.uuid
    assert happened.kind == record.kind
    assert happened.count > 0
    assert happened.first <= happened.last
    if record.kind == "xid":
        grade = _grade(happened, DEVICE, TelemetryConfig())
        assert grade in (*GRADES, xids.UNKNOWN), grade
        decode_xid(happened, DEVICE)
        one_line(xids.explain(int(record.name)).title)
    if record.kind == "sxid":
        one_line(xids.explain_sxid(int(record.name)))


def _message(data: bytes) -> None:
    data = stretched(data)
    with in_time(len(data)):
        record = kernel_log.parse("4,1,1,-;" + data.decode("utf-8", "replace"))
        text = record.text if record else data.decode("utf-8", "replace")
        message = kernel_log.classify(text)
    if record:
        assert record.text.isprintable()
        assert len(record.text) <= kernel_log.LONGEST_TEXT
        assert record.facility == 0
    if message and record:
        _checked(LogRecord(boot=BOOT, sequence=1, at=1.0, **message._asdict()))


ENDS = ("", ", Ch 00000008", ", channel 0x00000010", ", Channel ID 00000008, intr 10000000", ", MMU Fault: ENGINE X")


def _process(data: bytes) -> None:
    """Names as NVIDIA's driver writes them: bare or quoted, with anything in them but what ends them."""
    choices = Choices(data)
    quote = choices.of(("", "'", '"'))
    name = SECRET + "".join(c for c in choices.text(15) if c.isprintable() and c not in "'\",;= ")
    number, code = choices.below(1 << 22), choices.below(200)
    process = f"pid={quote}{number}{quote}, name={quote}{name}{quote}"
    said = f"NVRM: Xid (PCI:0000:{choices.below(256):02x}:00): {code}, {process}"
    message = kernel_log.classify(said + choices.of(ENDS))
    assert message is not None, said
    assert SECRET not in message.text, message.text
    assert not any(SECRET in value for value in message.fields.values()), message.fields
    assert "pid=" not in message.text
    assert message.name == str(code)


def _words(data: bytes) -> None:
    """The words of an NVLink 5 message, and codes that no catalogue has."""
    choices = Choices(data)
    found = xids.decode(
        choices.below(200), choices.text(), choices.text(), f"0x{choices.below(1 << 32):x}", choices.text()
    )
    assert isinstance(found.rows, tuple)
    code = int(choices.number()) if choices.flag() else choices.below(300)
    one_line(xids.explain(code).title)
    one_line(xids.explain_sxid(code))


def _number_free(data: bytes) -> None:
    """As `_words`, where a number may be none."""
    try:
        _words(data)
    except (ValueError, OverflowError) as error:  # int() of a float that is not finite: ours, not the catalogue's
        assert "cannot convert float" in str(error)


target = modes(_stream, _message, _process, _number_free)


def seeds() -> list[bytes]:
    found = []
    for file in sorted(DATA.rglob("*")):
        if file.is_file():
            text = file.read_bytes()
            found.append(seed(0, b"\0\0\x40" + text[:4000]))
            found += [seed(1, line.rpartition(b";")[2][:500]) for line in text.split(b"\n")[:200]]
    return [*found, seed(2, b"\0abcdefghij"), seed(2, b"\x01\x02" * 9), seed(3, bytes(range(24)))]
