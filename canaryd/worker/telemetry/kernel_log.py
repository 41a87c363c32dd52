"""The kernel's log: follow it, and take apart the lines that touch the health of an accelerator or of its host.

Facts only: what a code means and what follows from it, the daemon decides. docs/readings.md lists what is recognised.
Formats are those of the Linux kernel (Documentation/ABI/testing/dev-kmsg) and of the drivers' own messages.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from canaryd.model import LogPosition, LogRecord

BOOT_ID = "/proc/sys/kernel/random/boot_id"
LONGEST_LINE = 16_384
"""Bytes; longer lines are no records (the kernel's own are at most 8 KiB with everything escaped)."""
LONGEST_TEXT = 2_048
"""Characters of a record's text that are looked at and kept."""
TICK = 0.5
"""Seconds between two looks at a regular file, and at whether to stop."""
_CHUNK = 65_536
_BATCH = 256
"""Records that are read from the device before the position is told."""
_HEAD = 64
"""Bytes at a file's start that show whether it is still the same contents."""


# --- One record ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of /dev/kmsg."""

    priority: int
    """0 (emergency) to 7 (debug)."""
    facility: int
    """0 for the kernel; what a process writes to /dev/kmsg has another one, which the kernel enforces."""
    sequence: int
    usec: int
    """Microseconds of the kernel's clock since boot."""
    text: str
    """One line of printable characters, at most `LONGEST_TEXT` of them."""


_RECORD = re.compile(r"([0-9]{1,9}),([0-9]{1,18}),([0-9]{1,18}),[^;\n]{0,200};([^\n]*)")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


def parse(record: str) -> Record | None:
    r"""Return a record "prio,seq,usec,flags;text" taken apart, or None if it is none.

    Lines after the first (" KEY=value") are left out. Escaped bytes (\x0a) are decoded; what cannot be printed becomes
    a space, so that a line break inside a message never looks like another message.
    """
    found = _RECORD.match(record)
    if not found:
        return None
    raw = found[4][: 4 * LONGEST_TEXT].encode("utf-8", "replace")
    text = _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), raw).decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text[:LONGEST_TEXT])
    prefix = int(found[1])
    return Record(
        priority=prefix & 7, facility=prefix >> 3, sequence=int(found[2]), usec=int(found[3]), text=text.strip()
    )


# --- One message -----------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A kernel message that touches the health of a device; kinds and names are in docs/readings.md."""

    kind: str
    name: str
    bus_id: str
    text: str
    """The message without names and numbers of processes."""
    fields: dict[str, str]


_PCI = r"(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"

_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?{_PCI}(?: GPU-I:(?P<instance>[0-9]+))?(?: GPU-CI:(?P<compute_instance>[0-9]+))?\): "
    r"(?P<code>[0-9]{1,5})(?:,(?P<rest>.*))?$"
)
_PID = re.compile(r",? ?\bpid=(?:'[^']*'|\"[^\"]*\"|[^,\s]*)")
# The driver seldom quotes a process's name, and a name may hold a comma. Where a channel follows, it ends the name.
_NAME = re.compile(r",? ?\bname=(?:'[^']*'|\"[^\"]*\"|.{0,64}?(?=, (?:Ch|[Cc]hannel) (?:ID )?[0-9a-fx]+)|[^,]*)(?=,|$)")
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Za-z0-9_/]*(?: Degraded)?)\s+(?P<severity>Fatal|Non-?fatal)\s+XC(?P<cross_contained>[0-9]+)\s+"
    r"i(?P<injected>[0-9]+)\s+Link\s+(?P<link>-?[0-9]+)\s*\((?P<words>[^)]*)"
)
_WORD = re.compile(r"0x[0-9a-fA-F]{1,8}\b")
_DETAIL: dict[int, re.Pattern[str]] = {
    13: re.compile(r"\(GPC (?P<gpc>[0-9]+), TPC (?P<tpc>[0-9]+)(?:, SM (?P<sm>[0-9]+))?\)"),
    31: re.compile(
        r"MMU Fault: ENGINE (?P<engine>\S+)(?:.*?\b(?P<fault>FAULT_\w+))?(?:.*?\bACCESS_TYPE_(?P<access>\w+))?"
    ),
}
_NVLINK = re.compile(r"\blink (?P<link>[0-9]+) ?\((?P<words>[^)]*)", re.IGNORECASE)
_RECOVERY = re.compile(r"changed from 0x(?P<before>[0-9a-fA-F]+) \([^)]*\) to 0x(?P<action>[0-9a-fA-F]+) \([^)]*\)")
_ACTIONS = ("none", "reset", "reboot", "drain-p2p", "drain-and-reset")
"""By number, as `nvmlDeviceGpuRecoveryAction_t` has them: the words of Xid 154 differ between drivers."""


def _xid(text: str) -> Message | None:
    found = _XID.match(text)
    if not found:
        return None
    code = int(found["code"])
    rest = _NAME.sub("", _PID.sub("", found["rest"] or "", count=1), count=1).strip(" ,")
    fields = {k: str(int(found[k])) for k in ("instance", "compute_instance") if found[k]}
    if 144 <= code <= 150 and (told := _NVLINK5.search(rest)):
        intr_info, error_status, *debug = [*_WORD.findall(told["words"]), "", ""]
        fields |= {k: told[k] for k in ("unit", "cross_contained", "injected")}
        fields["severity"] = "fatal" if told["severity"] == "Fatal" else "non-fatal"
        fields["link"] = str(int(told["link"]))
        fields |= {"intr_info": intr_info, "error_status": error_status, "debug": " ".join(filter(None, debug))}
    elif code in _DETAIL and (told := _DETAIL[code].search(rest)):
        fields |= told.groupdict("")
    elif code == 74 and (told := _NVLINK.search(rest)):
        fields |= {"link": str(int(told["link"])), "registers": " ".join(_WORD.findall(told["words"]))}
    elif code == 154 and (told := _RECOVERY.search(rest)):
        fields |= {"before": _action(told["before"]), "action": _action(told["action"])}
    head = text[: found.start("rest")] if found["rest"] is not None else text
    return Message(
        "xid", str(code), _bus(found["bus"]), f"{head} {rest}".strip(" ,"), {k: v for k, v in fields.items() if v}
    )


def _action(number: str) -> str:
    value = int(number, 16)
    return _ACTIONS[value] if value < len(_ACTIONS) else f"0x{value:x}"


_SXID = re.compile(rf"nvidia-nvswitch(?P<switch>[0-9]+): SXid \(PCI:{_PCI}\): (?P<code>[0-9]{{1,6}}),? ?(?P<rest>.*)$")
_SXID_MORE = ("Data {", "Severity ")
"""How further lines about an SXid begin that has been told already."""


def _sxid(text: str) -> Message | None:
    found = _SXID.match(text)
    if not found or found["rest"].startswith(_SXID_MORE):
        return None
    severity = re.match(r"(?:Non-?)?fatal\b", found["rest"], re.IGNORECASE)
    link = re.search(r"\bLink ([0-9]+)", found["rest"])
    fields = {"switch": found["switch"], "severity": "unknown"}
    if severity:
        fields["severity"] = "fatal" if severity[0].lower() == "fatal" else "non-fatal"
    if link:
        fields["link"] = str(int(link[1]))
    return Message("sxid", str(int(found["code"])), _bus(found["bus"]), text, fields)


_MCE_LOGGED = re.compile(r"mce: \[Hardware Error\]: Machine check events logged")
_MCE = re.compile(
    r"(?:mce: )?\[Hardware Error\]: (?:CPU (?P<cpu>[0-9]+): Machine Check(?: Exception)?: [0-9a-f]{1,16} "
    r"Bank (?P<bank>[0-9]+): |CPU:(?P<amd_cpu>[0-9]+) \([0-9a-f:]+\) MC(?P<amd_bank>[0-9]+)_STATUS\[[^\]]*\]: 0x)"
    r"(?P<status>[0-9a-f]{1,16})\b"
)
_APEI = re.compile(r"\{[0-9]+\}\[Hardware Error\]: event severity: (?P<severity>corrected|recoverable|fatal)")


def _mce(text: str) -> Message | None:
    if "[Hardware Error]" not in text:
        return None
    if found := _MCE.match(text):
        # MCi_STATUS: bit 61 UC (Intel SDM 3B, 17.3.2.2; AMD APM 2, 9.3.2.1), AMD's bit 44 Deferred.
        status, amd = int(found["status"], 16), found["amd_cpu"] is not None
        name = "uncorrected" if status >> 61 & 1 else "deferred" if amd and status >> 44 & 1 else "corrected"
        cpu, bank = (found["amd_cpu"], found["amd_bank"]) if amd else (found["cpu"], found["bank"])
        return Message("mce", name, "", text, {"cpu": cpu, "bank": bank, "status": f"0x{status:016x}"})
    if found := _APEI.match(text):
        return Message(
            "mce", "corrected" if found["severity"] == "corrected" else "uncorrected", "", text, found.groupdict()
        )
    return Message("mce", "logged", "", text, {}) if _MCE_LOGGED.match(text) else None


_EDAC = re.compile(
    r"EDAC (?:\w+ )?MC(?P<controller>[0-9]+): (?P<count>[0-9]+) (?P<type>[CU])E "
    r"(?:.{0,200}? on (?P<dimm>[^()]{1,80}?) \()?"
)
_EDAC_OLD = re.compile(
    r"EDAC (?:\w+ )?MC(?P<controller>[0-9]+): (?P<type>[CU])E (?:page|row)\b(?:.*? labels? \"(?P<dimm>[^\"]{1,80})\")?"
)


def _edac(text: str) -> Message | None:
    found = _EDAC.match(text) or _EDAC_OLD.match(text)
    if not found:
        return None
    fields = {"count": "1"} | {k: v for k, v in found.groupdict().items() if v and k != "type"}
    return Message("edac", "corrected" if found["type"] == "C" else "uncorrected", "", text, fields)


_SEVERITY = r"(?P<severity>Correct(?:ed|able)|Uncorrect(?:ed|able)(?: \((?:Non-Fatal|Fatal)\))?)"
_AER = re.compile(
    rf"\S+ {_PCI}: (?:AER: )?(?:PCIe|CXL) Bus Error: severity={_SEVERITY}"
    r"(?:, type=(?P<layer>[^,]{1,40}))?(?:, \((?P<agent>[^)]{1,40})\))?"
)
_AER_BARE = re.compile(
    rf"\S+ \S+: AER: (?:Multiple )?{_SEVERITY} error message received from {_PCI} \(no details found"
)


def _aer(text: str) -> Message | None:
    found = _AER.match(text) or _AER_BARE.match(text)
    if not found:
        return None
    name = "correctable" if found["severity"].startswith("C") else "fatal" if "(Fatal)" in text else "nonfatal"
    fields = {k: v for k, v in found.groupdict().items() if v and k in ("layer", "agent")}
    return Message("aer", name, _bus(found["bus"]), text, fields)


_AMD = (
    rf"(?:amdgpu {_PCI}: (?:amdgpu: )?(?:\[drm(?::\w+ \[amdgpu\])?\] )?|\[drm:\w+ \[amdgpu\]\] |amdgpu: )"
    r"(?:\*ERROR\* )?(?:\{[0-9]+\})?"
)
_RAS = rf"{_AMD}(?:socket: (?P<socket>[0-9]+), die: (?P<die>[0-9]+),? )?(?P<count>[0-9]+) (?:new )?"
_NVIDIA_TASK = r"(?:nvidia|nv[-_]|nvswitch|UVM |irq/[0-9]+-nvidia)"
_AMD_TASK = r"(?:amdgpu|kfd|amd-smi|rocm-smi|irq/[0-9]+-amdgpu|kworker/\S{0,20}amdgpu)"
_FUNCTION = rf"\S+ {_PCI}: "
_CPU = r"(?:mce: )?CPU(?P<cpu>[0-9]+): "
_TOTAL = r"temperature (?:is )?above threshold(?:.*total events = (?P<total>[0-9]+))?"
_NVME = r"nvme (?P<controller>nvme[0-9]+)(?:n[0-9]+)?: "
_BLOCK = r"hardware errors detected in (?P<block>\w+) block"
_BLOCKED = r".{0,40}?:[0-9]+ )blocked for more than (?P<seconds>[0-9]+) seconds"
_LINES: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (kind, name, re.compile(pattern))
    for kind, name, pattern in (
        # Group "bus" becomes the bus id, group "cut" is cut out of the text, all others become fields.
        ("off-bus", "", rf"NVRM: GPU (?:at )?(?:PCI:)?{_PCI}:? (?:GPU )?has fallen off the bus"),
        ("off-bus", "", rf"NVRM: The NVIDIA GPU {_PCI}\b.{{0,200}}?fallen off the bus"),
        (
            "off-bus",
            "",
            r"NVRM: (?:\(PCI ID: \S+\) )?(?:installed in this )?(?:system )?(?:has )?fallen off the bus and",
        ),
        (
            "driver",
            "mismatch",
            r"NVRM: API mismatch: the (?:client(?P<cut>.{0,80}?) has the version|NVIDIA kernel module)",
        ),
        ("driver", "init-failed", rf"NVRM: (?:GPU {_PCI}: )?RmInitAdapter failed"),
        ("driver", "probe-failed", rf"nvidia: probe of {_PCI} failed with error (?P<error>-[0-9]+)"),
        ("driver", "probe-failed", rf"nvidia {_PCI}: probe with driver nvidia failed with error (?P<error>-[0-9]+)"),
        ("driver", "bar-invalid", r"NVRM: This PCI I/O region assigned to your NVIDIA device is invalid"),
        ("pcie", "link-down", _FUNCTION + r"(?:pciehp: )?Slot\([^)]{1,20}\): Link Down"),
        ("pcie", "link-down", _FUNCTION + r"(?:pciehp: )?Data Link Layer Link Active not set"),
        (
            "pcie",
            "bandwidth",
            _FUNCTION + r"(?P<available>[0-9.]+) Gb/s available PCIe bandwidth, limited by (?P<speed>[0-9.]+) GT/s "
            r"PCIe x(?P<width>[0-9]+) link at (?P<at>[0-9a-f:.]+)(?: \(capable of (?P<capable>[0-9.]+) Gb/s)?",
        ),
        ("pcie", "not-ready", _FUNCTION + r"not ready [0-9]+ms after .{1,40}; giving up"),
        ("pcie", "inaccessible", _FUNCTION + r"(?:Unable to|can't) change power state from .{1,60}device inaccessible"),
        ("oom", "system", r"Out of memory(?: \([a-z_]+\))?: Kill(?:ed)? process(?P<cut> [0-9]+ \(.*\)|.*)"),
        ("oom", "cgroup", r"Memory cgroup out of memory: Kill(?:ed)? process(?P<cut> [0-9]+ \(.*\)|.*)"),
        ("nvme", "timeout", _NVME + r"I/O .{1,120}\btimeout\b"),
        ("nvme", "down", _NVME + r"controller is down; will reset"),
        ("nvme", "reset", _NVME + r"resetting controller"),
        ("nvme", "failed", _NVME + r"(?:Removing after probe failure|Disabling device after reset failure)"),
        ("nvme", "failed", _NVME + r"Device not ready; aborting"),
        ("nvme", "medium", r"(?:blk_update_request: )?critical medium error, dev (?P<controller>nvme[0-9]+)"),
        ("thermal", "core", rf"{_CPU}Core {_TOTAL}"),
        ("thermal", "package", rf"{_CPU}Package {_TOTAL}"),
        ("thermal", "critical", r"thermal (?P<zone>thermal_zone[0-9]+): .{0,40}critical temperature reached"),
        ("amdgpu", "ring-timeout", rf"{_AMD}ring (?P<ring>\S{{1,40}}) timeout"),
        ("amdgpu", "reset-failed", rf"{_AMD}GPU reset(?:(?:\([0-9]+\))? failed| end with ret = -[0-9]+)"),
        ("amdgpu", "reset", rf"{_AMD}GPU reset begin"),
        ("amdgpu", "fault", rf"{_AMD}\[(?P<hub>\w+)\] (?:[\w-]+ )?page fault (?:\(.*?(?P<cut>,? for process .*)|\()"),
        ("amdgpu", "ras-uncorrected", rf"{_RAS}uncorrectable {_BLOCK}"),
        ("amdgpu", "ras-deferred", rf"{_RAS}deferred {_BLOCK}"),
        ("amdgpu", "ras-corrected", rf"{_RAS}correctable {_BLOCK}"),
        ("amdgpu", "ras-uncorrected", rf"{_AMD}(?:RAS: )?uncorrectable hardware event\b"),
        ("amdgpu", "bad-pages", rf"{_AMD}Saved bad pages.{{0,40}}reaches threshold"),
        ("amdgpu", "bad-pages", rf"{_AMD}RAS records.{{0,40}}exceed threshold"),
        ("amdgpu", "init-failed", rf"{_AMD}Fatal error during GPU init"),
        ("amdgpu", "lost", rf"{_AMD}device lost from bus"),
        ("hang", "nvidia", rf"INFO: task (?P<cut>{_NVIDIA_TASK}{_BLOCKED}"),
        ("hang", "amdgpu", rf"INFO: task (?P<cut>{_AMD_TASK}{_BLOCKED}"),
        (
            "clock",
            "unstable",
            r"clocksource: timekeeping watchdog.{0,120}?Marking clocksource '(?P<source>[^']{1,20})'",
        ),
        ("clock", "unstable", r"clocksource: timekeeping watchdog.{0,120}?marking unstable"),
        (
            "lockup",
            "soft",
            (
                r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<cpu>[0-9]+) stuck for (?P<seconds>[0-9]+)s!"
                r"(?P<cut>.*)"
            ),
        ),
        ("lockup", "hard", r"(?:NMI )?watchdog: (?:CPU[0-9]+: )?Watchdog detected hard LOCKUP on cpu (?P<cpu>[0-9]+)"),
        ("lockup", "rcu", r"(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU"),
    )
)


def classify(text: str) -> Message | None:
    """Return what a kernel message says about the health of a device, or None.

    Of several lines about one incident one is returned, and the others are None. The caller vouches that the text
    comes from the kernel itself: facility 0.
    """
    text = text[:LONGEST_TEXT]
    for special in (_xid, _sxid, _mce, _edac, _aer):
        if message := special(text):
            return message
    for kind, name, pattern in _LINES:
        if found := pattern.match(text):
            fields = {k: v for k, v in found.groupdict().items() if v and k not in {"bus", "cut"}}
            bus = found["bus"] if "bus" in pattern.groupindex else None
            start, end = found.span("cut") if "cut" in pattern.groupindex else (-1, -1)
            kept = text if start < 0 else f"{text[:start].rstrip()} {text[end:].lstrip(' ,')}".rstrip()
            return Message(kind, name, _bus(bus) if bus else "", kept, fields)
    return None


def _bus(text: str) -> str:
    """Return a PCI address as "0000:65:00.0": four digits of domain or as many as it needs, and the function."""
    domain, bus, device = text.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}" + ("" if "." in device else ".0")


# --- The log as a stream ---------------------------------------------------------------------------------------------


class _Source(Protocol):
    def read(self) -> tuple[bytes, bool]:
        """Return what is there now (b"" for nothing), and whether it begins anew."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when there may be more, at the latest after so many seconds."""
        ...

    def close(self) -> None: ...


class _Device:
    """The character device: each read gives one record."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def read(self) -> tuple[bytes, bool]:
        records: list[bytes] = []
        while len(records) < _BATCH:
            try:
                record = os.read(self._descriptor, LONGEST_LINE)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overrun: the next read gives the oldest record left, and the gap tells how many are lost
            if not record:
                raise ValueError(f"{self._path}: a device that is at its end; the kernel log is /dev/kmsg")
            records.append(record)
        return b"".join(records), False

    def wait(self, seconds: float) -> None:
        self._poll.poll(seconds * 1000)

    def close(self) -> None:
        os.close(self._descriptor)


class _File:
    """A regular file that somebody appends to, truncates, or replaces."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._offset = 0
        self._head = b""
        self.missing = False
        """Whether nothing was at the path when the newest read looked."""

    def read(self) -> tuple[bytes, bool]:
        anew = False
        if os.fstat(self._descriptor).st_size < self._offset or self._at(0, len(self._head)) != self._head:
            self._offset, self._head, anew = 0, b"", True
        data = self._at(self._offset, _CHUNK)
        if not data and self._replaced():
            anew = True
            data = self._at(0, _CHUNK)
        self._offset += len(data)
        if len(self._head) < _HEAD:
            self._head = self._at(0, min(_HEAD, self._offset))
        return data, anew

    def _at(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def _replaced(self) -> bool:
        """Whether the path leads to another file now, which then is open."""
        self.missing = False
        try:
            new = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self.missing = True
            return False
        if os.path.sameopenfile(new, self._descriptor) or self._at(self._offset, 1):
            os.close(new)
            return False
        os.close(self._descriptor)
        self._descriptor, self._offset, self._head = new, 0, b""
        return True

    def holds(self, sequence: int) -> bool:
        """Whether any record in it is as new as that."""
        with Path(self._path).open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                found = re.match(rb"[0-9]{1,9},([0-9]{1,18}),", line)
                if found and int(found[1]) >= sequence:
                    return True
        return False

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        os.close(self._descriptor)


def _open(path: str) -> _Source:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except PermissionError:
        wanted = "run as root or with the capability CAP_SYSLOG, or make the file readable"
        raise PermissionError(f"{path}: the kernel log may not be read; {wanted}") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode):
        return _Device(path, descriptor)
    if stat.S_ISREG(mode):
        return _File(path, descriptor)
    os.close(descriptor)
    raise ValueError(f"{path}: neither a character device nor a regular file; the kernel log is /dev/kmsg")


class _Lines:
    """Cuts a stream of bytes into lines; an unfinished one waits for its end."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        """Whether an over-long line is being passed over, which was given out once, cut short."""

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
        """Begin anew; return what never got its end."""
        rest, self._rest, self._skipping = self._rest, b"", False
        return [rest] if rest else []


_IDENTITY = re.compile(rf"NVRM: GPU at PCI:{_PCI}: (?P<uuid>GPU-[0-9a-fA-F-]{{8,40}})")


class _Reader:
    """Turns lines into records of the model; knows which ones have been counted before."""

    def __init__(self, boot: str, after: int) -> None:
        self.boot = boot
        self.floor = after
        """Records up to this one have been counted."""
        self._newest = after
        self._lost = 0
        self._garbled = 0
        self._held: LogRecord | None = None
        """A machine check that was announced without its severity: the next lines may tell it."""
        self._uuids: dict[str, str] = {}

    @property
    def position(self) -> LogPosition:
        newest = self._newest if self._held is None else self._held.sequence - 1
        return LogPosition(boot=self.boot, sequence=newest, lost=self._lost, garbled=self._garbled)

    def take(self, lines: list[bytes], since: float = 0.0) -> Iterator[LogRecord]:
        """Yield what the lines tell that were written at `since` (seconds since the epoch) or later."""
        now, since_boot = time.time(), time.monotonic()
        for line in lines:
            if not line.strip() or line.startswith(b" "):
                continue
            record = parse(line.decode("utf-8", "replace")) if len(line) <= LONGEST_LINE else None
            if record is None:
                self._garbled += 1
                continue
            message = None
            if record.facility == 0:
                message = classify(record.text)
                if told := _IDENTITY.match(record.text):
                    self._uuids[_bus(told["bus"])] = told["uuid"]
            if record.sequence <= self.floor:
                continue
            if self._newest >= 0:
                self._lost += max(0, record.sequence - self._newest - 1)
            self.floor = self._newest = record.sequence
            if self._held and record.facility == 0:
                if message and message.kind == "mce" and message.name != "logged":
                    self._held = None
                elif message or "[Hardware Error]" not in record.text:  # what comes after it must not overtake it
                    yield from self.release()
            if message is None:
                continue
            if uuid := self._uuids.get(message.bus_id, ""):
                message.fields["uuid"] = uuid
            # The kernel's clock stands still while the machine sleeps, and no time server keeps it from drifting.
            at = min(now, max(since, now - since_boot + record.usec / 1e6))
            found = LogRecord(boot=self.boot, sequence=record.sequence, at=at, **message._asdict())
            if message.kind == "mce" and message.name == "logged":
                self._held = found
            else:
                yield found

    def release(self) -> Iterator[LogRecord]:
        """Give out the announced machine check about which no more came."""
        if self._held:
            held, self._held = self._held, None
            yield held


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
) -> Iterator[LogRecord | LogPosition]:
    """Yield what the kernel's log says about the health of devices, and how far it has been read.

    `path` is /dev/kmsg, or a regular file that is fed with lines of its format. Records up to number `after` are passed
    over if `boot` is the present boot. A position follows every batch, and comes every `beat` seconds (at most) when
    nothing does; a position that was stored is where to go on, and no record is given out twice or left out.
    `until_end` ends at the log's present end. `stop` is asked every `TICK` seconds. `boot_id` names the file that
    holds the boot id. Raises `PermissionError`, `FileNotFoundError` (at once with `until_end`, otherwise when nothing
    was there for a whole beat), other `OSError`, and `ValueError` for a path that is neither a device nor a file.
    """
    present = _boot(boot_id)
    reader, lines = _Reader(present, after if boot == present else -1), _Lines()
    source: _Source | None = None
    told = there = time.monotonic()
    since = 0.0
    try:
        while not stop():
            if source is None:
                with contextlib.suppress(FileNotFoundError):
                    source = _open(path)
                    if isinstance(source, _File) and not source.holds(reader.floor):
                        reader.floor = -1  # another file than the one that was read: it starts again
            looked = time.time()
            data, anew = source.read() if source else (b"", False)
            if source is not None and not (isinstance(source, _File) and source.missing):
                there = time.monotonic()
            elif (until_end and source is None) or time.monotonic() - there >= beat:
                wanted = "name /dev/kmsg, or a file that is fed in its format"
                raise FileNotFoundError(f"{path}: no kernel log there; {wanted}")
            if anew:
                since = 0.0
                yield from reader.take(lines.reset())
                reader.floor = -1
            if data:
                yield from reader.take(lines.feed(data), since)
            elif until_end:
                break
            else:
                # All that was there has been read: what comes next is news. The second is for a clock being slewed.
                since = looked - 1.0
                yield from reader.release()
            if data or (source and time.monotonic() - told >= beat):
                told = time.monotonic()
                yield reader.position
            if not data:
                pause = min(TICK, beat)
                source.wait(pause) if source else time.sleep(pause)
        yield from reader.release()
        yield reader.position
    finally:
        if source:
            source.close()
