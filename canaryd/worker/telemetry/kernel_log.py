"""Follow the kernel's log, and parse its records.

`kernel_messages` classifies the messages; the daemon decides what they mean. The format is that of the Linux kernel
(Documentation/ABI/testing/dev-kmsg).
"""

from __future__ import annotations

import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from canaryd.facts import LogPosition, LogRecord
from canaryd.worker.telemetry import pci
from canaryd.worker.telemetry.kernel_messages import (
    LONGEST_TEXT,
    PCI,
    UNTOLD,
    Message,
    begins_another,
    bus_id,
    classify,
    continued,
    is_open,
    process_of,
)

BOOT_ID = "/proc/sys/kernel/random/boot_id"
SYSFS = "/sys"
VENDORS = {"amdgpu": pci.AMD, "driver": pci.NVIDIA, "off-bus": pci.NVIDIA}
"""Kind of a message that does not always contain its device → PCI vendor of that device."""
LONGEST_LINE = 16_384
"""Bytes of the longest record (the kernel's own have at most 8 KiB with everything escaped)."""
TICK = 0.5
"""Seconds between two checks of a regular file, and between two calls of the function `stop`."""
_CHUNK = 65_536
_BATCH = 256
"""Largest number of records that are read before a position is yielded."""
STORM = 10.0
"""Seconds after which all old records count as read, even if the device always has further records: those are newer."""
REPORT = 2_000_000
"""Microseconds of the kernel's clock after which a report has no further line (ours): they are printed in one go."""
STRANGE = 20
"""Lines in a row that may be no records; after more of them the log has another format (ours)."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_HEAD = 64
"""Number of bytes at the start of a file that are compared to see whether its contents were replaced."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of /dev/kmsg."""

    facility: int
    """0 for the kernel; the kernel gives another number to text that a process writes to /dev/kmsg."""
    sequence: int
    usec: int
    """Microseconds since boot, by the kernel's clock."""
    text: str
    """One line of printable characters, at most `LONGEST_TEXT` of them."""


_RECORD = re.compile(r"([0-9]{1,9}),([0-9]{1,18}),([0-9]{1,18}),[^;\n]{0,200};([^\n]*)")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


def parse(record: str) -> Record | None:
    r"""Return the record in a line "prio,seq,usec,flags;text", or None if the line has another form.

    Lines after the first (" KEY=value") are ignored. Escaped bytes (\x0a) are decoded. Unprintable characters become
    spaces, so that a line break inside a message never looks like another message.
    """
    found = _RECORD.match(record)
    if not found:
        return None
    raw = found[4][: 4 * LONGEST_TEXT].encode("utf-8", "replace")
    text = _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), raw).decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text[:LONGEST_TEXT])
    return Record(facility=int(found[1]) >> 3, sequence=int(found[2]), usec=int(found[3]), text=text.strip())


class _Log:
    """The log at a path: a device, of which each read gives one record, or a regular file that others write.

    A file can appear late, be truncated, be replaced, or be missing for a while.
    """

    def __init__(self, path: str, *, patience: float, at_once: bool) -> None:
        """Set how long to wait for a file at the path: `patience` seconds, but not for the first if `at_once`."""
        self._path, self._patience, self._at_once = path, patience, at_once
        self._descriptor = -1
        self._is_file = False
        self._offset = self._present = 0
        self._head = b""
        self._opened = self._seen_at = time.monotonic()

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def open(self, sequence: int) -> bool:
        """Open the log if it exists; return whether it is a file whose records all have numbers below `sequence`."""
        if self.is_open:
            return False
        try:
            self._descriptor = os.open(self._path, _FLAGS)
        except FileNotFoundError:
            return False
        except PermissionError:
            wanted = "run as root or with the capability CAP_SYSLOG, or make the file readable"
            raise PermissionError(f"{self._path}: no permission to read the kernel log; {wanted}") from None
        status = os.fstat(self._descriptor)
        self._opened, self._present, self._is_file = time.monotonic(), status.st_size, stat.S_ISREG(status.st_mode)
        if not (self._is_file or stat.S_ISCHR(status.st_mode)):
            kinds = "neither a character device nor a regular file"
            raise ValueError(f"{self._path}: {kinds}; the kernel log is /dev/kmsg")
        return self._is_file and not self._holds(sequence)

    def read(self) -> tuple[bytes, bool]:
        """Return (new bytes or b"", restarted); restarted is True if a file is read from its beginning again.

        Raises `FileNotFoundError` if nothing has been at the path for too long.
        """
        data, restarted, is_there = b"", False, self.is_open
        if self._is_file:
            if os.fstat(self._descriptor).st_size < self._offset or self._at(0, len(self._head)) != self._head:
                self._offset, self._head, restarted = 0, b"", True
            data = self._at(self._offset, _CHUNK)
            if not data:
                is_there, replaced = self._look()
                restarted |= replaced
                data = self._at(0, _CHUNK) if replaced else b""
            self._offset += len(data)
            if len(self._head) < _HEAD:
                self._head = self._at(0, min(_HEAD, self._offset))
        elif is_there:
            data = self._records()
        if is_there:
            self._seen_at = time.monotonic()
        elif (self._at_once and not self.is_open) or time.monotonic() - self._seen_at >= self._patience:
            usual = "" if str(self._path) == "/dev/kmsg" else "/dev/kmsg, or to "
            wanted = f"set telemetry.kernel_log to {usual}a file with records in its format"
            raise FileNotFoundError(f"{self._path}: no kernel log there; {wanted}")
        return data, restarted

    def _records(self) -> bytes:
        records: list[bytes] = []
        while len(records) < _BATCH:
            try:
                record = os.read(self._descriptor, LONGEST_LINE)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overrun: the next read gives the oldest record left; the gap in numbers counts the lost
            if not record:
                raise ValueError(f"{self._path}: this device has ended; the kernel log is /dev/kmsg")
            records.append(record)
        return b"".join(records)

    def _at(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def _look(self) -> tuple[bool, bool]:
        """Return (whether a file is at the path, whether it is a new file); a new file is opened."""
        try:
            new = os.open(self._path, _FLAGS)
        except FileNotFoundError:
            return False, False
        if os.path.sameopenfile(new, self._descriptor) or self._at(self._offset, 1):
            os.close(new)
            return True, False
        os.close(self._descriptor)
        self._descriptor, self._offset, self._head = new, 0, b""
        return True, True

    def _holds(self, sequence: int) -> bool:
        """Return whether the file has a record numbered `sequence` or higher."""
        with Path(self._path).open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                found = re.match(rb"[0-9]{1,9},([0-9]{1,18}),", line)
                if found and int(found[1]) >= sequence:
                    return True
        return False

    def caught_up(self) -> bool:
        """Return whether all records that existed when the log was opened have been read."""
        if self._is_file:
            return self._offset >= self._present
        return self.is_open and time.monotonic() - self._opened >= STORM

    def wait(self, seconds: float) -> None:
        """Wait until new records may have arrived, for at most `seconds`."""
        if self.is_open and not self._is_file:
            select.select([self._descriptor], (), (), seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)


class _Lines:
    """Splits a stream of bytes into lines; keeps an unfinished line until its end arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        """Whether the rest of an over-long line is being skipped; its beginning was returned."""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if self._skipping:
            self._rest = b""
        elif len(self._rest) > LONGEST_LINE:
            lines.append(self._rest[: LONGEST_LINE + 1])
            self._rest, self._skipping = b"", True
        return lines

    def reset(self) -> list[bytes]:
        """Start again with an empty buffer; return a list with the unfinished line, or [] if there is none."""
        rest, self._rest, self._skipping = self._rest, b"", False
        return [rest] if rest else []


_IDENTITY = re.compile(rf"NVRM: GPU at PCI:{PCI}: (?P<uuid>GPU-[0-9a-fA-F-]{{8,40}})")


class _Report(NamedTuple):
    """A report of which the next lines may say more."""

    first: Record
    message: Message
    found: LogRecord


class _Reader:
    """Converts lines of the log into `LogRecord` objects; skips records that an earlier run has counted."""

    def __init__(self, boot: str, after: int, sysfs: str = SYSFS) -> None:
        self.boot = boot
        self._sysfs = Path(sysfs)
        self.floor = after
        """Records up to this number have been counted."""
        self._newest = after
        self._lost = 0
        self._garbled = 0
        self._strange = STRANGE
        """Lines that are no records since the newest record, so that the first line of a log may not be strange."""
        self.foreign = ""
        """The newest line, if so many in a row are no records that the log has another format."""
        self._held: _Report | None = None
        self._uuids: dict[str, str] = {}

    @property
    def position(self) -> LogPosition:
        newest = self._newest if self._held is None else self._held.first.sequence - 1
        return LogPosition(boot=self.boot, sequence=newest, lost=self._lost, garbled=self._garbled)

    def start_again(self) -> None:
        """Forget the log read so far, because another one took its place; what it told stands."""
        self.floor, self._strange, self.foreign = -1, STRANGE, ""

    def take(self, lines: list[bytes], since: float = 0.0) -> Iterator[LogRecord]:
        """Yield a `LogRecord` for each line about health; `since` is the earliest possible time of lines (epoch s)."""
        now, since_boot = time.time(), time.monotonic()
        for line in lines:
            if not line.strip() or line.startswith(b" "):
                continue
            text = line.decode("utf-8", "replace")
            record = parse(text) if len(line) <= LONGEST_LINE else None
            self._strange = 0 if record else self._strange + 1
            self.foreign = text[:60] if self._strange > STRANGE else ""
            if record is None:
                self._garbled += 1
                continue
            message = None
            if record.facility == 0:
                message = classify(record.text)
                if identity := _IDENTITY.match(record.text):
                    self._uuids[bus_id(identity["bus"])] = identity["uuid"]
            if record.sequence <= self.floor:
                continue
            if self._newest >= 0:
                self._lost += max(0, record.sequence - self._newest - 1)
            self.floor = self._newest = record.sequence
            if record.facility == 0:
                # The kernel's clock stops while the machine sleeps, and no time server corrects its drift.
                at = min(now, max(since, now - since_boot + record.usec / 1e6))
                yield from self._heard(record, message, at)

    def _heard(self, record: Record, message: Message | None, at: float) -> Iterator[LogRecord]:
        """Yield what a line completes; `message` is its own meaning, `at` its time (epoch s).

        A report of several lines is held until another message, `REPORT`, or silence ends it.
        """
        held, first = self._held, record
        if held and not message and record.usec - held.first.usec <= REPORT:
            message = continued(held.message, record.text)
            if message in (None, held.message):
                return
            if not begins_another(held.message, record.text):
                first, self._held = held.first, None
        elif held and message and held.message.name == "logged" != message.name and message.kind == "mce":
            self._held = None  # the line explains what was announced
        yield from self.release()
        if message:
            found = self._found(message, record, at)
            if is_open(message):
                self._held = _Report(first, message, found)
            else:
                yield found

    def _found(self, message: Message, record: Record, at: float) -> LogRecord:
        """Return the record of a message, with its device and, for the daemon alone, its process."""
        message = self._placed(message)
        if process := process_of(record.text):
            message.fields["process"] = process  # the daemon keeps no numbers of processes
        if uuid := self._uuids.get(message.bus_id, ""):
            message.fields["uuid"] = uuid
        return LogRecord(boot=self.boot, sequence=record.sequence, at=at, **message._asdict())

    def _placed(self, message: Message) -> Message:
        """Return a message, completed by its device if only one is possible, or by the devices below its PCI port."""
        if not message.bus_id and message.kind in VENDORS:
            place = pci.only_one(self._sysfs, VENDORS[message.kind])
            return message._replace(bus_id=place, fields={**message.fields, "only": place} if place else message.fields)
        if message.kind in ("aer", "pcie") and (parts := pci.below(self._sysfs, message.bus_id)):
            message.fields["below"] = " ".join(parts)
        return message

    def release(self) -> Iterator[LogRecord]:
        """Yield what is known of the held report, if there is one: no further line completes it."""
        if self._held:
            held, self._held = self._held, None
            if held.message.name not in UNTOLD:
                yield held.found


def _boot(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise OSError(
            f"{path}: cannot tell which boot this is, so lines might count twice ({error.strerror})"
        ) from None


def follow(
    path: str,
    *,
    boot: str = "",
    after: int = -1,
    until_end: bool = False,
    beat: float = 10.0,
    stop: Callable[[], bool] = lambda: False,
    boot_id: str = BOOT_ID,
    sysfs: str = SYSFS,
) -> Iterator[LogRecord | LogPosition]:
    """Yield the log's records about the health of devices, and the positions that reading has reached.

    `path` is /dev/kmsg, or a regular file to which lines of its format are appended. Records up to number `after` are
    skipped if `boot` is the present boot. A position follows every batch of records, and comes at least every `beat`
    seconds when nothing else comes. A start from a stored position repeats no record and leaves none out. With
    `until_end`, reading ends where the log ends now. `stop` is called every `TICK` seconds. `boot_id` is the path of
    the file with the boot id; `sysfs` is the directory with the devices on the bus.

    Raises `PermissionError`; `FileNotFoundError` if there is no log (at once with `until_end`, otherwise after `beat`
    seconds); other `OSError`; and `ValueError` for a path that is neither a device nor a file, and for lines of another
    format.
    """
    present = _boot(boot_id)
    start = after if boot == present else -1
    reader, lines = _Reader(present, start, sysfs), _Lines()
    log = _Log(path, patience=beat, at_once=until_end)
    reported = time.monotonic()
    since, was_idle = 0.0, False
    try:
        while not stop():
            if log.open(reader.floor):
                reader.start_again()  # not the file that was read before
            looked = time.time()
            data, restarted = log.read()
            if restarted:
                since = 0.0
                yield from reader.take(lines.reset())
                reader.start_again()
            if data:
                yield from reader.take(lines.feed(data), since)
            elif until_end or reader.foreign:
                break
            else:
                # Everything there has been read, so what comes next is new. The second allows for a clock being slewed.
                since = looked - 1.0
                if was_idle:  # lines of one report arrive one by one
                    yield from reader.release()
            was_idle = not data
            if until_end and log.caught_up():  # what comes after it would never end in a storm of lines
                break
            if (data and not reader.foreign) or (log.is_open and time.monotonic() - reported >= beat):
                reported = time.monotonic()
                yield reader.position
            if not data:
                log.wait(min(TICK, beat))
        yield from reader.release()
        if not reader.foreign or reader.position.sequence != start:
            yield reader.position
        if reader.foreign:
            shape = "prio,number,microseconds,flags;text"
            raise ValueError(f"{path}: its lines are no records of the kernel; wanted {shape}, got {reader.foreign!r}")
    finally:
        log.close()
