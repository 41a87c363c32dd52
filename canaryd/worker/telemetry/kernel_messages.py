"""Recognise kernel messages that concern the health of an accelerator or of its host.

This module gives facts only: the daemon decides the meaning and the consequence of a code. docs/readings.md lists the
recognised messages. Formats are those of the Linux kernel and of the drivers' own messages.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from canaryd.model import EventKind

LONGEST_TEXT = 2_048
"""Largest number of characters of a record's text that are examined and kept."""


class Message(NamedTuple):
    """A kernel message that concerns the health of a device; docs/readings.md lists kinds and names."""

    kind: str
    name: str
    bus_id: str
    text: str
    """The message without the names and numbers of processes."""
    fields: dict[str, str]


PCI = r"(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"

_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?{PCI}(?: GPU-I:(?P<instance>[0-9]+))?(?: GPU-CI:(?P<compute_instance>[0-9]+))?\): "
    r"(?P<code>[0-9]{1,5})(?:,(?P<rest>.*))?$"
)
_PID = re.compile(r",? ?\bpid=(?:'[^']*'|\"[^\"]*\"|[^,\s]*)")
# The driver seldom quotes a process's name, and a name may contain a comma. A channel that follows ends the name.
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
_RECOVERY = re.compile(
    r"changed from 0x(?P<before>[0-9a-fA-F]+) \([^)]*\) to 0x(?P<action>[0-9a-fA-F]+) \((?P<words>[^)]*)\)"
)
_ACTIONS = (
    *("none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex-domain", "bus-reset", "system-reboot"),
)
"""Names of recovery actions, by their number in `nvmlDeviceGpuRecoveryAction_t`. The number in Xid 154 is used, because
its words differ between drivers."""


def _xid(text: str) -> Message | None:
    found = _XID.match(text)
    if not found:
        return None
    code = int(found["code"])
    rest = _NAME.sub("", _PID.sub("", found["rest"] or "", count=1), count=1).strip(" ,")
    fields = {k: str(int(found[k])) for k in ("instance", "compute_instance") if found[k]}
    if 144 <= code <= 150 and (detail := _NVLINK5.search(rest)):
        intr_info, error_status, *debug = [*_WORD.findall(detail["words"]), "", ""]
        fields |= {k: detail[k] for k in ("unit", "cross_contained", "injected")}
        fields["severity"] = "fatal" if detail["severity"] == "Fatal" else "non-fatal"
        fields["link"] = str(int(detail["link"]))
        fields |= {"intr_info": intr_info, "error_status": error_status, "debug": " ".join(filter(None, debug))}
    elif code in _DETAIL and (detail := _DETAIL[code].search(rest)):
        fields |= detail.groupdict("")
    elif code == 74 and (detail := _NVLINK.search(rest)):
        fields |= {"link": str(int(detail["link"])), "registers": " ".join(_WORD.findall(detail["words"]))}
    elif code == 154 and (detail := _RECOVERY.search(rest)):
        fields |= {"before": _action(detail["before"]), "action": _action(detail["action"])}
        if fields["action"] == "recover-imex-domain" and "imex" not in detail["words"].lower():
            fields["action"] = "bus-reset"  # so drivers 580 and 590 had it (nvidia-ml-py 13.580)
    head = text[: found.start("rest")] if found["rest"] is not None else text
    return Message(
        "xid", str(code), bus_id(found["bus"]), f"{head} {rest}".strip(" ,"), {k: v for k, v in fields.items() if v}
    )


def process_of(text: str) -> str:
    """Return the number of the process in an Xid message, or "" if there is none."""
    found = _XID.match(text)
    named = re.search(r"\bpid='?(\d{1,10})\b", found["rest"] or "") if found else None
    return named[1] if named else ""


def _action(number: str) -> str:
    value = int(number, 16)
    return _ACTIONS[value] if value < len(_ACTIONS) else f"0x{value:x}"


_SXID = re.compile(rf"nvidia-nvswitch(?P<switch>[0-9]+): SXid \(PCI:{PCI}\): (?P<code>[0-9]{{1,6}}),? ?(?P<rest>.*)$")
_SXID_MORE = ("Data {", "Severity ")
"""Beginnings of lines that add details to an SXid message (an error of an NVSwitch) in an earlier line."""


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
    return Message("sxid", str(int(found["code"])), bus_id(found["bus"]), text, fields)


_MCE_LOGGED = re.compile(r"mce: \[Hardware Error\]: Machine check events logged")
_MCE = re.compile(
    r"(?:mce: )?\[Hardware Error\]: (?:CPU (?P<cpu>[0-9]+): Machine Check(?: Exception)?: [0-9a-f]{1,16} "
    r"Bank (?P<bank>[0-9]+): |CPU:(?P<amd_cpu>[0-9]+) \([0-9a-f:]+\) MC(?P<amd_bank>[0-9]+)_STATUS\[[^\]]*\]: 0x)"
    r"(?P<status>[0-9a-f]{1,16})\b"
)
_BY_INTEL = re.compile(r"mce: \[Hardware Error\]: PROCESSOR 0:")
"""The line that follows a machine check with its processor, of vendor 0 (Linux, arch/x86/include/asm/processor.h)."""
_BY_CONTROLLER = re.compile(
    r"(?:mce: )?\[Hardware Error\]: (?:Unified Memory Controller\b|.{0,80}\bDRAM ECC error\b"
    r"|.{0,200}?\bIPID:? (?:0x)?(?P<ipid>[0-9a-f]{1,16})\b)"
)
_MEMORY_CONTROLLER = 0x96
"""Hardware id of a unified memory controller in AMD's MCA_IPID (Linux, arch/x86/kernel/cpu/mce/amd.c)."""
_APEI = re.compile(r"\{[0-9]+\}\[Hardware Error\]: event severity: (?P<severity>corrected|recoverable|fatal)")
_APEI_PART = re.compile(
    r"\{[0-9]+\}\[Hardware Error\]:\s+(?:(?P<next>Error [0-9]+, type: )|section_type: (?P<section>\w[\w ,/-]{0,60})"
    r"|fru_text: (?P<fru>.{1,60})|DIMM location: (?!not present)(?P<slot>.{1,60})"
    r"|(?P<place>node: ?[0-9]+ (?:card: ?[0-9]+ )?(?:module: ?[0-9]+)?)"
    rf"|device_id: {PCI}\s*$)"
)
_AER_OF = {"corrected": "correctable", "recoverable": "nonfatal", "fatal": "fatal"}
BLOCKED = "blocked"
"""Name of a task that hangs, until a line of its trace shows that it hangs in a driver."""
RELAYED = "relayed"
"""Name for a machine check message that only repeats a memory error which the firmware has reported."""
UNTOLD = frozenset({BLOCKED, RELAYED})
"""Names of messages that are no event by themselves."""
_BANK_OF_FIRMWARE = "255"
"""Bank number of errors that the kernel forwards from the firmware (-1). No processor has this bank (Linux,
arch/x86/kernel/cpu/mce/apei.c)."""
PCI_EXPRESS, MEMORY = "PCIe error", "memory error"
"""Names of the sections in a firmware report that concern a device on PCI Express, and the host's memory."""


def _mce(text: str) -> Message | None:
    if "[Hardware Error]" not in text:
        return None
    if found := _MCE.match(text):
        # MCi_STATUS: bit 61 UC (Intel SDM 3B, 17.3.2.2; AMD APM 2, 9.3.2.1), AMD's bit 44 Deferred.
        status, amd = int(found["status"], 16), found["amd_cpu"] is not None
        name = "uncorrected" if status >> 61 & 1 else "deferred" if amd and status >> 44 & 1 else "corrected"
        cpu, bank = (found["amd_cpu"], found["amd_bank"]) if amd else (found["cpu"], found["bank"])
        if bank == _BANK_OF_FIRMWARE:  # the kernel may leave out the firmware's own report of an uncorrected error
            name = "memory" if name == "uncorrected" else RELAYED
        message = Message("mce", name, "", text, {"cpu": cpu, "bank": bank, "status": f"0x{status:016x}"})
        # Intel's codes of memory controllers (SDM 3B, 17.9.2; bit 12 tells of filtering), which AMD does not use.
        return _of_memory(message, status & 0xEF80 == 0x80)
    if found := _APEI.match(text):
        return Message(
            "mce", "corrected" if found["severity"] == "corrected" else "uncorrected", "", text, found.groupdict()
        )
    return Message("mce", "logged", "", text, {}) if _MCE_LOGGED.match(text) else None


def _of_memory(message: Message, is_memory: bool) -> Message:
    """Return a machine check, as an error of the memory if its bank is that of a memory controller."""
    if not is_memory:
        return message
    name = "memory" if message.name == "uncorrected" else message.name
    return message._replace(name=name, fields={**message.fields, "section": MEMORY})


def is_open(message: Message) -> bool:
    """Return whether the next lines may say more of the same error."""
    return message.kind == "mce" or message.name == BLOCKED or "section" in message.fields


def continued(report: Message, text: str) -> Message | None:
    """Return a report, completed by the next line `text`, or None if that line adds nothing to it."""
    if report.name == BLOCKED and (found := _FRAME.match(text)):
        return report._replace(name=found["module"])
    if report.name == "corrected" and "status" in report.fields and _BY_INTEL.match(text):
        # MCi_STATUS: bits 52 to 38 count; bits 54 and 53 are 2 past the processor's own limit (SDM 3B, 17.3.2.2).
        status = int(report.fields["status"], 16)
        yellow = {"threshold": "yellow"} if status >> 53 & 3 == 2 else {}
        return report._replace(fields={**report.fields, "count": str(max(1, status >> 38 & 0x7FFF)), **yellow})
    if "status" in report.fields and (found := _BY_CONTROLLER.match(text)):
        return _of_memory(report, not found["ipid"] or int(found["ipid"], 16) >> 32 & 0xFFF == _MEMORY_CONTROLLER)
    return _apei_part(report, text) if "severity" in report.fields else None


def begins_another(report: Message, text: str) -> bool:
    """Return whether the line `text` begins a further error in a report of which one error is complete."""
    found = _APEI_PART.match(text) if "section" in report.fields else None
    return bool(found and (found["next"] or found["section"]))


def _apei_part(report: Message, text: str) -> Message | None:
    """Return the error that the firmware (APEI) reports, with what the line says of its part.

    The severity comes first, then the place in words, the section, and the place in numbers or the device: an error on
    PCI Express belongs to that device, not to the processor.
    """
    found = _APEI_PART.match(text)
    if not found or text.partition("[")[0] != report.text.partition("[")[0]:
        return None
    severity = report.fields["severity"]
    fields = {"severity": severity} if begins_another(report, text) else dict(report.fields)
    fields |= {k: v.strip() for k, v in found.groupdict().items() if v and k in ("section", "fru", "slot", "place")}
    section, place = fields.get("section", ""), re.sub(": ?", " ", fields.get("place", "")).strip()
    part = fields.get("slot", fields.get("fru", ""))
    where = ", ".join(filter(None, (part, place)))
    words = f"{report.text.partition(':')[0]}: event severity: {severity}, {section}".rstrip(", ")
    words += f" at {where}" if where else ""
    if found["bus"] and section == PCI_EXPRESS:
        bus = bus_id(found["bus"])
        return Message("aer", _AER_OF[severity], bus, f"{words}, device {bus}", fields)
    if where and section == MEMORY:
        fields |= {"dimm": part or "unknown", "controller": place or "unknown"}
    uncorrected = "memory" if section == MEMORY else "uncorrected"
    return Message("mce", "corrected" if severity == "corrected" else uncorrected, "", words, fields)


_EDAC = re.compile(  # the page too: a process that is named "EDAC MC0: 1 UE" begins lines of the kernel with that
    r"EDAC (?:\w+ )?MC(?P<controller>[0-9]+): (?P<count>[0-9]+) (?P<type>[CU])E "
    r"(?:(?:.{0,200}? )?on (?P<dimm>[^()]{1,80}?) \()?.{0,200}?\bpage:0x"
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
    rf"\S+ {PCI}: (?:AER: )?(?:PCIe|CXL) Bus Error: severity={_SEVERITY}"
    r"(?:, type=(?P<layer>[^,]{1,40}))?(?:, \((?P<agent>[^)]{1,40})\))?"
)
_AER_BARE = re.compile(rf"\S+ \S+: AER: (?:Multiple )?{_SEVERITY} error message received from {PCI} \(no details found")


def _aer(text: str) -> Message | None:
    found = _AER.match(text) or _AER_BARE.match(text)
    if not found:
        return None
    name = "correctable" if found["severity"].startswith("C") else "fatal" if "(Fatal)" in text else "nonfatal"
    fields = {k: v for k, v in found.groupdict().items() if v and k in ("layer", "agent")}
    return Message("aer", name, bus_id(found["bus"]), text, fields)


_AMD = (
    rf"(?:amdgpu {PCI}: (?:amdgpu: )?(?:\[drm(?::\w+ \[amdgpu\])?\] )?|\[drm:\w+ \[amdgpu\]\] |amdgpu: )"
    r"(?:\*ERROR\* )?(?:\{[0-9]+\} ?)?"
)
_RAS = rf"{_AMD}(?:socket: (?P<socket>[0-9]+), die: (?P<die>[0-9]+),? )?(?P<count>[1-9][0-9]*) (?:new )?"
_INTEL = rf"(?:xe|i915) {PCI}: (?:\[drm\] )?(?:\*ERROR\* )?(?:Tile[0-9]+: )?(?:GT[0-9]+: )?(?:GUC: )?"
# One line for a tile and a component; lines that name the unit follow it.
_INTEL_RAS = rf"{_INTEL}\[Hardware Error\]: TILE(?P<tile>[0-9]+) reported (?P<block>[\w-]{{1,40}}) "
_RESTART = r"x86/amd: Previous system reset reason \[0x(?!ffffffff)[0-9a-f]+\]: "  # all ones: it could not be read
_NVIDIA_TASK = r"(?:nvidia|nv[-_]|nvc:|nvswitch|UVM |irq/[0-9]+-nvidia)"
_AMD_TASK = r"(?:amdgpu|kfd|amd-smi|rocm-smi|irq/[0-9]+-amdgpu|kworker/\S{0,20}amdgpu)"
_FUNCTION = rf"\S+ {PCI}: "
_CPU = r"(?:mce: )?CPU(?P<cpu>[0-9]+): "
_TOTAL = r"temperature (?:is )?above threshold(?:.*total events = (?P<total>[0-9]+))?"
_NVME = r"nvme (?P<controller>nvme[0-9]+)(?:n[0-9]+)?: "
_BLOCK = r"hardware errors (?:and [0-9]+ deferred hardware errors )?detected in (?P<block>\w+) block"
_SOFT = r"(?:NMI )?(?:watchdog: )?BUG: soft lockup"
_BLOCKED = r".{0,60}?:[0-9]+ )blocked (?:in I/O wait )?for more than (?P<seconds>[0-9]+) seconds"
_FRAME = re.compile(r"[\w.]+\+0x[0-9a-f]+/0x[0-9a-f]+ \[(?P<module>nvidia|amdgpu|xe|i915)(?:_\w+)?(?: [0-9a-f]+)?\]")
"""A call in the trace of a task; after "? " comes what is only left over on its stack."""
_PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    # Group "bus" becomes the bus id, group "cut" is removed from the text, all others become fields.
    EventKind.OFF_BUS: (
        ("", rf"NVRM: GPU (?:at )?(?:PCI:)?{PCI}:? (?:GPU )?has fallen off the bus"),
        ("", rf"NVRM: The NVIDIA GPU {PCI}\b.{{0,200}}?fallen off the bus"),
        ("", r"NVRM: (?:\(PCI ID: \S+\) )?(?:installed in this )?(?:system )?(?:has )?fallen off the bus and"),
    ),
    "driver": (
        ("mismatch", r"NVRM: API mismatch: the (?:client(?P<cut>.{0,80}?) has the version|NVIDIA kernel module)"),
        # The second number is NVIDIA's status; 0x1c is NV_ERR_INSUFFICIENT_POWER (nvstatuscodes.h).
        ("no-power", rf"NVRM: (?:GPU {PCI}: )?RmInitAdapter failed! \(0x[0-9a-f]+:0x1c:"),
        ("init-failed", rf"NVRM: (?:GPU {PCI}: )?RmInitAdapter failed"),
        ("probe-failed", rf"nvidia: probe of {PCI} failed with error (?P<error>-[0-9]+)"),
        ("probe-failed", rf"nvidia {PCI}: probe with driver nvidia failed with error (?P<error>-[0-9]+)"),
        ("bar-invalid", r"NVRM: This PCI I/O region assigned to your NVIDIA device is invalid"),
    ),
    "pcie": (
        ("link-down", _FUNCTION + r"(?:pciehp: )?Slot\([^)]{1,20}\): Link Down(?!/)"),
        ("link-down", _FUNCTION + r"(?:pciehp: )?Data Link Layer Link Active not set"),
        ("contained", _FUNCTION + r"DPC: containment event, status:0x[0-9a-f]+"),
        (
            "bandwidth",
            _FUNCTION + r"(?P<available>[0-9.]+) Gb/s available PCIe bandwidth, limited by (?P<speed>[0-9.]+) GT/s "
            r"PCIe x(?P<width>[0-9]+) link at (?P<at>[0-9a-f:.]+)(?: \(capable of (?P<capable>[0-9.]+) Gb/s)?",
        ),
        ("not-ready", _FUNCTION + r"not ready [0-9]+ms after .{1,40}; giving up"),
        ("inaccessible", _FUNCTION + r"(?:Unable to|can't) change power state from .{1,60}device inaccessible"),
    ),
    "mce": (("memory", r"mce: Uncorrected hardware memory error in (?:user|kernel)-access"),),
    "oom": (
        ("system", r"Out of memory(?: \([a-z_]+\))?: Kill(?:ed)? process(?P<cut> [0-9]+ \(.*\)|.*)"),
        ("cgroup", r"Memory cgroup out of memory: Kill(?:ed)? process(?P<cut> [0-9]+ \(.*\)|.*)"),
    ),
    "nvme": (
        ("timeout", _NVME + r"I/O .{1,120}\btimeout\b"),
        ("down", _NVME + r"controller is down; will reset"),
        ("reset", _NVME + r"resetting controller"),
        ("failed", _NVME + r"(?:Removing after probe failure|Disabling device after reset failure)"),
        ("failed", _NVME + r"Device not ready; aborting"),
        ("medium", r"(?:blk_update_request: )?critical medium error, dev (?P<controller>nvme[0-9]+)"),
    ),
    "thermal": (
        ("core", rf"{_CPU}Core {_TOTAL}"),
        ("package", rf"{_CPU}Package {_TOTAL}"),
        ("critical", r"thermal (?P<zone>thermal_zone[0-9]+): .{0,40}critical temperature reached"),
    ),
    "amdgpu": (
        ("soft-recovered", rf"{_AMD}ring (?P<ring>\S{{1,40}}) timeout, but soft recovered"),
        ("ring-timeout", rf"{_AMD}ring (?P<ring>\S{{1,40}}) timeout"),
        ("queue-hung", rf"{_AMD}(?:MES|The cp) might be in (?:an )?unrecoverable state"),
        ("reset-failed", rf"{_AMD}GPU reset(?:(?:\([0-9]+\))? failed| end with ret = -[0-9]+)"),
        ("reset", rf"{_AMD}GPU reset begin"),
        ("fault", rf"{_AMD}\[(?P<hub>\w+)\] (?:[\w-]+ )?page fault (?:\(.*?(?P<cut>,? for process .*)|\()"),
        ("ras-uncorrected", rf"{_RAS}uncorrectable {_BLOCK}"),
        ("ras-deferred", rf"{_RAS}deferred {_BLOCK}"),
        ("ras-corrected", rf"{_RAS}correctable {_BLOCK}"),
        ("ras-uncorrected", rf"{_AMD}[Uu]ncorrectable hardware error\b"),
        ("ras-uncorrected", rf"{_AMD}(?:GPU reset for \w+ )?RAS poison consumption\b"),
        ("bad-pages", rf"{_AMD}Saved bad pages.{{0,40}}reaches threshold"),
        ("bad-pages", rf"{_AMD}RAS records.{{0,40}}exceed threshold"),
        (
            "overheated",
            rf"{_AMD}ERROR: GPU (?:over temperature range\(SW CTF\)|HW Critical Temperature Fault\(aka CTF\)) detected",
        ),
        ("init-failed", rf"{_AMD}Fatal error during GPU init"),
        ("lost", rf"{_AMD}device lost from bus"),
    ),
    "intel": (
        ("hang", rf"{_INTEL}Engine reset: engine_class=(?P<engine>\w{{1,20}})"),
        ("hang", rf"{_INTEL}Timedout job: .{{1,200}}? flags=0x[0-9a-f]+(?P<cut>,? in .*)?"),
        ("hang", rf"{_INTEL}GPU HANG: ecode [0-9a-fx:]+(?P<cut>, in .*)?"),
        ("reset-failed", rf"{_INTEL}(?:Engine reset (?:request )?failed|Failed to reset chip)"),
        ("reset-failed", rf"{_INTEL}CRITICAL: Xe has declared device \S{{1,40}} as wedged"),
        ("fault", rf"{_INTEL}Engine memory (?:CAT|cat) error\b"),
        ("ras-corrected", rf"{_INTEL_RAS}(?:correctable-errors|CORRECTABLE error), bit"),
        ("ras-uncorrected", rf"{_INTEL_RAS}(?:uncorrectable-errors|(?:NON)?FATAL error), bit"),
        ("firmware", rf"{_INTEL}\[Hardware Error\]: (?:\w+: )?HEC (?:Uncorrected )?FW .{{1,60}} reported"),
    ),
    "last-boot": (
        ("error", rf"{_RESTART}(?:an uncorrected error caused|a parity error occurred)"),
        ("heat", rf"{_RESTART}(?:thermal pin|internal CPU thermal limit)"),
        ("record", r"BERT: Error records from previous boot"),
    ),
    "hang": (
        ("nvidia", rf"INFO: task (?P<cut>{_NVIDIA_TASK}{_BLOCKED}"),
        ("amdgpu", rf"INFO: task (?P<cut>{_AMD_TASK}{_BLOCKED}"),
        (BLOCKED, rf"INFO: task (?P<cut>{_BLOCKED}"),
    ),
    "clock": (
        ("unstable", r"clocksource: timekeeping watchdog.{0,120}?Marking clocksource '(?P<source>[^']{1,20})'"),
        ("unstable", r"clocksource: timekeeping watchdog.{0,120}?marking unstable"),
    ),
    "lockup": (
        ("soft", rf"{_SOFT} - CPU#(?P<cpu>[0-9]+) stuck for (?P<seconds>[0-9]+)s!(?P<cut>.*)"),
        ("hard", r"(?:NMI )?watchdog: (?:CPU[0-9]+: )?Watchdog detected hard LOCKUP on cpu (?P<cpu>[0-9]+)"),
        ("rcu", r"(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU"),
    ),
}
_LINES = tuple((kind, name, re.compile(p)) for kind, patterns in _PATTERNS.items() for name, p in patterns)


def classify(text: str) -> Message | None:
    """Return what a message says about the health of a device, or None if it says nothing about it.

    If several lines belong to one incident, only one of them gives a message. The caller makes sure that the text comes
    from the kernel itself (facility 0).
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
            return Message(kind, name, bus_id(bus) if bus else "", kept, fields)
    return None


def bus_id(text: str) -> str:
    """Return a PCI address in the form "0000:65:00.0", with at least four digits of domain, and the function."""
    domain, bus, device = text.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}" + ("" if "." in device else ".0")
