"""What the codes in NVIDIA's kernel messages mean: Xids, NVLink 5 errors (Xid 144 to 150) and SXids of NVSwitches.

Codes, mnemonics, action buckets and bit patterns come from NVIDIA's Xid catalogue ("Analyzing Xid Errors with the Xid
Catalog", codes 1 to 172), SXids from NVIDIA's Fabric Manager User Guide, appendix D. Titles and sentences are our
words. `nature` is our reading, not NVIDIA's. The data is in `xid_catalogue.json` and is loaded on first use:
a new code is a row there. What follows from a code is in `xid_rules.py`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from canaryd.config.values import GRADES

UNKNOWN = "unknown"
"""Stands for a grade where no source gives one."""

BUCKETS: Mapping[str, str] = {
    "IGNORE": "nothing to do",
    "IGNORE_SYMPATHETIC": "another error causes this one: fix that one; report this one only if it occurs alone",
    "SYMPATHETIC_REPORT_SOLO": "another error causes this one: fix that one; report this one if it occurs alone",
    "INFORMATIONAL": "it only accompanies another Xid; follow the action of that Xid",
    "RESTART_APP": "restart the application; no reset or reboot needed",
    "CHECK_APP/CUDA": "look for the fault in the application; the message names its process",
    "RESET_GPU": "reset the GPU; no reboot needed",
    "RESTART_BM": "restart the machine",
    "RESTART_VM": "restart the virtual machine that owns the GPU",
    "CONTACT_SUPPORT": "contact the vendor's support",
    "REPORT_ISSUE": "report it to NVIDIA if it occurs more than once a day",
    "CHECK_MECHANICALS": "check that the board is well seated and every cable is plugged in",
    "CHECK_UVM": "reset the GPU if unified memory or virtual GPUs are in use; otherwise nothing to do",
    "UPDATE_SWFW": "update driver, guest driver and firmware to matching, current versions",
    "INVESTIGATE_SW": "look for the fault in software: the user's or NVIDIA's",
    "INVESTIGATE_SW_USER": "find out which software or person caused it, unless it was intended",
    "INVESTIGATE_SW_USER_LINK_SI": "find out which software or person caused it; if none, check the link's signal",
    "INVESTIGATE_LINK_SI": "check the link's signal and telemetry",
    "INVESTIGATE_LINK_SI_AND_CABLES": "check the link: cable, transceiver, temperature, seating",
    "INVESTIGATE_PEER_DEVICE": "check the device at the other end of the link",
    "INVESTIGATE_HOST": "check the host's other logs: another fault probably caused this one",
    "CHECK_NVLINK_FAILURE_FLOW": "ignore it if a link went down in the 30 seconds before; otherwise report it",
    "WORKFLOW_XID_13": "if it repeats on one GPC and TPC, run the end-user diagnostic, then the field diagnostic; "
    "otherwise look for the fault in the application",
    "WORKFLOW_XID_31": "if it repeats on one GPU, run the end-user diagnostic, then the field diagnostic; "
    "otherwise look for the fault in the application",
    "WORKFLOW_XID_45": "follow the other Xid reported with it; if there is none, restart the fabric manager",
    "WORKFLOW_XID_48": "reset the GPU (drain it first if Xid 63 or 64 came too); run the field diagnostic if the "
    "error occurred alone or the SRAM threshold is exceeded",
    "WORKFLOW_XID_137": "look for an illegal access to a peer GPU in the application; if there is none, report it",
    "WORKFLOW_NVLINK_ERR": "reset the GPU and read the registers in the message: report repeated parity or ECC bits; "
    "for signal bits reseat the link and run diagnostics",
    "WORKFLOW_NVLINK5_ERR": "decode the two words of the message: they say what to do",
    "XID_154": "follow the action that the message names",
    "XID_154_EVAL": "follow the Xid 154 reported with it; if there is none, restart the application",
}
"""NVIDIA's action buckets in one clause each. A few labels are shortened: "IGNORE (sympathetic)" is
IGNORE_SYMPATHETIC, "REPORT_ISSUE (if seen >1 per day)" REPORT_ISSUE, "Solo: RESTART_FM …" WORKFLOW_XID_45."""

_GRADE_OF: Mapping[str, str] = {
    "IGNORE": "none",
    "XID_154": "none",  # the line itself names the action: `Event.fields["action"]`
    "RESTART_APP": "application",
    "WORKFLOW_XID_45": "application",  # channels were torn down; the Xid that caused it decides
    "XID_154_EVAL": "application",  # what is left to do where no Xid 154 follows
    "UPDATE_SWFW": "application",  # versions do not match: the part is not at fault
    "RESET_GPU": "reset",
    "WORKFLOW_XID_48": "reset",
    "WORKFLOW_NVLINK_ERR": "reset",
    "WORKFLOW_NVLINK5_ERR": "reset",  # the worst in its table; `decode` grades one line
    "CHECK_UVM": "reset",  # the stricter branch: lines do not show if UVM is used
    "RESTART_BM": "reboot",
    "RESTART_VM": "reboot",
    "CHECK_MECHANICALS": "inspect",
    "CONTACT_SUPPORT": "inspect",
}
"""Bucket of the immediate action → grade. No bucket is "rma": by NVIDIA's RMA policy the field diagnostic decides."""
_OURS: Mapping[int, str] = {
    162: "none",  # the circuit works again
    163: "none",  # "No GPU reset required"
    164: "inspect",  # replacing is advised only "if power smoothing is desired"
    165: "inspect",  # likewise
    167: "inspect",  # a fatal timeout on PCIe: like a lost device, but it answers again
    168: "reboot",  # "boot re-attempted", or ECC switched on, which takes effect at boot
    169: "reset",  # a controller's firmware halted, like Xid 62
    171: "reset",  # comes with Xid 48
    172: "reset",
}
"""Codes without a bucket in the catalogue: our grade, after its note where it has one. All others are unknown."""

_V2_FROM = 575
"""First driver branch with the new encoding of IntrInfo (header of NVIDIA's table)."""
_COMBINED = (144, 145, 146, 147, 148)
"""Xids whose error status is a set of bits. In 149 and 150 it is one value."""


class Xid(NamedTuple):
    """One code of the catalogue."""

    code: int
    title: str
    """What happened, in our words."""
    immediate: str
    """NVIDIA's bucket for what to do at once, a key of `BUCKETS`; "" where it gives none."""
    investigatory: str
    """NVIDIA's bucket for finding the cause; "" where it gives none."""
    nature: str
    """What it points to, in our reading: "application", "hardware", "either" (exact tests can tell these two apart),
    "link", "thermal-power", "informational", "driver" (NVIDIA's software or firmware), or "unused" by the catalogue."""
    grade: str
    """One of `GRADES`, or "unknown"; derived from `immediate` by `_grade`."""

    @property
    def advice(self) -> str:
        """NVIDIA's two buckets in one clause, to follow "NVIDIA's catalogue: "; without a full stop."""
        if self.code not in catalogue():
            return f"this code is not in canaryd's copy, which ends at {len(catalogue())}"
        if self.nature == "unused":
            return "not used on Ampere and newer GPUs; an older GPU may use it"
        if not self.immediate:
            return "no action given for this code"
        if self.investigatory in ("", "INFORMATIONAL", self.immediate):
            return BUCKETS[self.immediate]
        return f"{BUCKETS[self.immediate]}; to find the cause: {BUCKETS[self.investigatory]}"


class NvlinkRow(NamedTuple):
    """One row of NVIDIA's table for Xid 144 to 150."""

    unit: str
    """The unit's names, separated by "/" where old and new drivers use different ones."""
    encoding: str
    """"V1" (drivers before R575) or "V2": how IntrInfo was read."""
    bucket: str
    severity: str
    """"Non-fatal", "Fatal" or "Link Fatal"."""
    origin: str
    """"HW", "SW", "HW/SW" or "FW"; "NA" where NVIDIA marks it as not applicable."""

    @property
    def grade(self) -> str:
        """What has to be done by this row, one of `GRADES`."""
        return _GRADE_OF[self.bucket]


class Decoded(NamedTuple):
    """The rows of NVIDIA's table that match one message of Xid 144 to 150."""

    rows: tuple[NvlinkRow, ...]
    """One for each bit of the error status that the table knows; empty where it knows none."""
    assumed: bool
    """True where the driver's version was unknown and V2, then V1, was tried."""

    @property
    def grade(self) -> str:
        """The worst of the rows; "unknown" without one."""
        return max((row.grade for row in self.rows), key=GRADES.index, default=UNKNOWN)

    def __str__(self) -> str:
        if not self.rows:
            return "not in NVIDIA's table for Xid 144 to 150"
        rows = dict.fromkeys(f"{r.unit}, {r.severity.lower()}, {r.origin}: {BUCKETS[r.bucket]}" for r in self.rows)
        assumed = f" (read as {self.rows[0].encoding}, driver unknown)" if self.assumed else ""
        return "; ".join(rows) + assumed


def _grade(code: int, immediate: str, nature: str) -> str:
    """Return the grade of an Xid: its bucket's, ours where it has no bucket, unknown for unused codes."""
    if nature == "unused":
        return UNKNOWN
    return _GRADE_OF[immediate] if immediate else _OURS.get(code, UNKNOWN)


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("xid_catalogue.json").read_text(encoding="utf-8"))
    return data


@functools.cache
def catalogue() -> Mapping[int, Xid]:
    """Return code → what the catalogue says, for 1 to 172; the file is read on first use."""
    return {
        code: Xid(code, title, immediate, investigatory, nature, _grade(code, immediate, nature))
        for code, _, title, immediate, investigatory, nature in _data()["xids"]
    }


def explain(code: int | None) -> Xid:
    """Return the entry of an Xid; of a code that is not in the catalogue (None: no number) one of grade "unknown"."""
    number = -1 if code is None else code
    newer = number > len(catalogue())
    title = "newer than canaryd's copy of NVIDIA's catalogue" if newer else "not a code of NVIDIA's"
    return catalogue().get(number) or Xid(number, title, "", "", "informational", UNKNOWN)


@functools.cache
def _sxids() -> dict[int, str]:
    return {code: title for code, _, title in _data()["sxids"]}


def explain_sxid(code: int | None) -> str:
    """Return the title of an SXid (None: no number). The message, not the code, shows whether it was fatal."""
    return _sxids().get(-1 if code is None else code, "not in NVIDIA's public lists")


def decode(code: int, unit: str, intr_info: str, error_status: str, driver: str = "") -> Decoded:
    """Return the rows of NVIDIA's table that an NVLink 5 message (Xid 144 to 150) matches.

    `intr_info` and `error_status` are words of the message ("0x004505c6"); `unit` is the unit in it ("" for any);
    `driver` is the driver's version ("575.57.08"), which decides how IntrInfo is encoded. Without it V2 is tried first,
    then V1. Words that are not numbers, as in a message that was cut, match nothing; never raises.
    """
    info, status = _word(intr_info), _word(error_status)
    if info is None or status is None:
        return Decoded((), assumed=False)
    branch = re.match(r"[0-9]{2,5}(?=\.|$)", driver)
    encodings = ("V2", "V1") if branch is None else ("V2",) if int(branch[0]) >= _V2_FROM else ("V1",)
    for encoding in encodings:
        rows = tuple(_rows(code, unit, info, status, encoding))
        if rows:
            return Decoded(rows, assumed=branch is None)
    return Decoded((), assumed=False)


def _rows(code: int, unit: str, info: int, status: int, encoding: str) -> Iterator[NvlinkRow]:
    for row_code, names, v1, v2, statuses, bucket, _, severity, origin in _data()["nvlink5"]:
        if (
            row_code == code
            and (not unit or unit == names or unit in names.split("/"))
            and _fits(v2 if encoding == "V2" else v1, info)
            and (not statuses or any(_holds(code, status, int(wanted, 16)) for wanted in statuses))
        ):
            yield NvlinkRow(names, encoding, bucket, severity, origin)


def _fits(pattern: str, word: int) -> bool:
    """Whether the 32 bits of a word agree with a pattern of 0, 1 and "-" for any, highest bit first."""
    return all(wanted in ("-", bit) for wanted, bit in zip(pattern, f"{word:032b}", strict=True))


def _holds(code: int, status: int, wanted: int) -> bool:
    return status & wanted != 0 if code in _COMBINED else status == wanted


def _word(text: str) -> int | None:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None
