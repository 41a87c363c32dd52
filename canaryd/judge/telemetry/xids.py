"""What the codes in NVIDIA's kernel messages mean: Xids, NVLink 5 errors (Xid 144 to 150) and SXids of NVSwitches.

Codes, mnemonics, action buckets and bit patterns are those of NVIDIA's Xid catalogue ("Analyzing Xid Errors with the
Xid Catalog", codes 1 to 172), SXids those of NVIDIA's Fabric Manager User Guide, appendix D. Titles and sentences are
our words. `nature` is our reading, not NVIDIA's. The data lies in `xids.json` and is loaded when it is first asked for.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATURES = ("application", "either", "hardware", "driver", "link", "thermal-power", "informational", "unused")
"""Whose fault an Xid speaks of, in our reading. "either": an application or the hardware, which exact goldens can
settle; "driver": software or firmware of NVIDIA's; "unused": the catalogue does not use the code."""
GRADES = ("none", "application", "reset", "reboot", "inspect", "rma")
"""What has to be done, from least to most. Beside them stands "unknown", which is no grade: nobody has told us."""
UNKNOWN = "unknown"

BUCKETS: Mapping[str, str] = {
    "IGNORE": "nothing has to be done",
    "IGNORE_SYMPATHETIC": "it comes with another error: resolve that one, and report this one only if it comes alone",
    "SYMPATHETIC_REPORT_SOLO": "it comes with another error: resolve that one, and report this one if it comes alone",
    "INFORMATIONAL": "it only goes with another Xid, whose action counts",
    "RESTART_APP": "restart the application; neither a reset nor a reboot is needed",
    "CHECK_APP/CUDA": "look for the fault in the application, by the process that the message names",
    "RESET_GPU": "reset the GPU; a reboot is not needed",
    "RESTART_BM": "restart the machine",
    "RESTART_VM": "restart the virtual machine that owns the GPU",
    "CONTACT_SUPPORT": "ask the vendor's support",
    "REPORT_ISSUE": "report it to NVIDIA when it comes more than once a day",
    "CHECK_MECHANICALS": "check that the board is seated well and every cable is plugged in",
    "CHECK_UVM": "reset the GPU where unified memory or virtual GPUs are in use, else do nothing",
    "UPDATE_SWFW": "bring driver, guest driver and firmware to matching, current versions",
    "INVESTIGATE_SW": "look for the fault in software, the user's or NVIDIA's",
    "INVESTIGATE_SW_USER": "find out which software or person did it, if nobody meant to",
    "INVESTIGATE_SW_USER_LINK_SI": "find out which software or person did it; if nobody, examine the link's signal",
    "INVESTIGATE_LINK_SI": "examine the link's signal and telemetry",
    "INVESTIGATE_LINK_SI_AND_CABLES": "examine the link: cable, transceiver, temperature, seating",
    "INVESTIGATE_PEER_DEVICE": "look at the device at the other end of the link",
    "INVESTIGATE_HOST": "look through the host's other logs: this is likely the consequence of something else",
    "CHECK_NVLINK_FAILURE_FLOW": "ignore it if a link went down in the 30 seconds before, else report it",
    "WORKFLOW_XID_13": "run the end-user diagnostic, then the field diagnostic, when it repeats on one GPC and TPC; "
    "otherwise look for the fault in the application",
    "WORKFLOW_XID_31": "run the end-user diagnostic, then the field diagnostic, when it repeats on one GPU; "
    "otherwise look for the fault in the application",
    "WORKFLOW_XID_45": "follow the other Xid beside it; if there is none, restart the fabric manager",
    "WORKFLOW_XID_48": "reset the GPU, drained first if Xid 63 or 64 is beside it, and run the field diagnostic if the "
    "error came alone or the SRAM threshold is exceeded",
    "WORKFLOW_XID_137": "look for an illegal access to a peer GPU in the application, and report it if there is none",
    "WORKFLOW_NVLINK_ERR": "reset the GPU, and read the registers in the message: repeated parity or ECC bits call for "
    "a report, signal bits for reseating the link and for diagnostics",
    "WORKFLOW_NVLINK5_ERR": "decode the two words of the message, which decide",
    "XID_154": "follow the action that the message itself names",
    "XID_154_EVAL": "follow the Xid 154 beside it; if there is none, restart the application",
}
"""NVIDIA's action buckets in one clause each. A few labels are shortened: "IGNORE (sympathetic)" is
IGNORE_SYMPATHETIC, "REPORT_ISSUE (if seen >1 per day)" REPORT_ISSUE, "Solo: RESTART_FM …" WORKFLOW_XID_45."""

_GRADE_OF: Mapping[str, str] = {
    "IGNORE": "none",
    "XID_154": "none",  # the line names the action: `LogRecord.fields["action"]` has it
    "RESTART_APP": "application",
    "WORKFLOW_XID_45": "application",  # channels were torn down; the other Xid beside it carries the weight
    "XID_154_EVAL": "application",  # what is left to do where no Xid 154 follows
    "UPDATE_SWFW": "application",  # versions do not match: nothing is wrong with the part
    "RESET_GPU": "reset",
    "WORKFLOW_XID_48": "reset",
    "WORKFLOW_NVLINK_ERR": "reset",
    "WORKFLOW_NVLINK5_ERR": "reset",  # the worst that its table can say; `decode` says what this line asks for
    "CHECK_UVM": "reset",  # the stricter of its two branches: a log line does not tell whether UVM is in use
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
    167: "inspect",  # a fatal timeout on PCI Express: as a lost device, but it answers again
    168: "reboot",  # "boot re-attempted", or ECC switched on, which takes effect at boot
    169: "reset",  # a controller's firmware halted, as with Xid 62
    171: "reset",  # goes with Xid 48
    172: "reset",
}
"""Codes to which the catalogue gives no bucket: our grade, after its note where it has one. Missing: unknown."""

_V2_FROM = 575
"""Driver branch from which on IntrInfo is encoded anew (header of NVIDIA's table)."""
_COMBINED = (144, 145, 146, 147, 148)
"""Xids whose error status is a set of bits. In 149 and 150 it is one value."""


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One code of the catalogue."""

    code: int
    mnemonic: str
    """NVIDIA's name of it; "" for a code that is not in the catalogue."""
    title: str
    """What happened, in our words."""
    immediate: str
    """NVIDIA's bucket for what to do at once, a key of `BUCKETS`; "" where it gives none."""
    investigatory: str
    """NVIDIA's bucket for finding the cause; "" where it gives none."""
    nature: str
    """One of `NATURES`; our reading."""
    grade: str
    """One of `GRADES`, or "unknown"; derived from `immediate` by `_grade`."""

    @property
    def advice(self) -> str:
        """NVIDIA's two buckets in one sentence of ours, to stand after "NVIDIA's catalogue: "; no full stop."""
        if self.code not in XIDS:
            return f"has no such code; the copy that canaryd has ends at {len(XIDS)}"
        if self.nature == "unused":
            return "unused on Ampere and later; an older GPU may mean something by it"
        if not self.immediate:
            return "names no action for this code"
        if self.investigatory in ("", "INFORMATIONAL", self.immediate):
            return BUCKETS[self.immediate]
        return f"{BUCKETS[self.immediate]}; to find the cause: {BUCKETS[self.investigatory]}"


@dataclass(frozen=True, kw_only=True)
class NvlinkRow:
    """One row of NVIDIA's table for Xid 144 to 150."""

    code: int
    unit: str
    """The unit's names, divided by "/" where old and new drivers call it differently."""
    encoding: str
    """"V1" (drivers before R575) or "V2": how IntrInfo was read."""
    bucket: str
    investigatory: str
    severity: str
    """"Non-fatal", "Fatal" or "Link Fatal"."""
    origin: str
    """"HW", "SW", "HW/SW" or "FW"; "NA" where NVIDIA says that it does not apply."""

    @property
    def grade(self) -> str:
        """What has to be done by this row, one of `GRADES`."""
        return _GRADE_OF[self.bucket]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What NVIDIA's table says about one message of Xid 144 to 150."""

    rows: tuple[NvlinkRow, ...]
    """One for each bit of the error status that the table knows; empty where it knows none."""
    assumed: bool
    """True where the driver's version was unknown, so that the encoding was found by trying V2 and then V1."""

    @property
    def grade(self) -> str:
        """The worst of the rows; "unknown" without one."""
        return max((row.grade for row in self.rows), key=GRADES.index, default=UNKNOWN)

    def __str__(self) -> str:
        if not self.rows:
            return "not in NVIDIA's table for Xid 144 to 150"
        told = dict.fromkeys(f"{r.unit}, {r.severity.lower()}, {r.origin}: {BUCKETS[r.bucket]}" for r in self.rows)
        assumed = f" (read as {self.rows[0].encoding}, driver unknown)" if self.assumed else ""
        return "; ".join(told) + assumed


@dataclass(frozen=True, kw_only=True)
class SXid:
    """One code of an NVSwitch. Whether it was fatal the message itself tells."""

    code: int
    listed: str
    """The guide's list: "non-fatal", "fatal", "always-fatal" or "notable"; "unknown" for a code that is in none."""
    title: str


def _grade(code: int, immediate: str, nature: str) -> str:
    """Return what an Xid asks for by itself: its bucket's grade, ours where it has none; unused codes are unknown."""
    if nature == "unused":
        return UNKNOWN
    return _GRADE_OF[immediate] if immediate else _OURS.get(code, UNKNOWN)


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("xids.json").read_text(encoding="utf-8"))
    return data


@functools.cache
def _xids() -> dict[int, Xid]:
    return {
        code: Xid(
            code=code,
            mnemonic=mnemonic,
            title=title,
            immediate=immediate,
            investigatory=investigatory,
            nature=nature,
            grade=_grade(code, immediate, nature),
        )
        for code, mnemonic, title, immediate, investigatory, nature in _data()["xids"]
    }


class _Catalogue(Mapping[int, Xid]):
    """The codes; the file is read when the first one is asked for."""

    def __getitem__(self, code: int) -> Xid:
        return _xids()[code]

    def __iter__(self) -> Iterator[int]:
        return iter(_xids())

    def __len__(self) -> int:
        return len(_xids())


XIDS: Mapping[int, Xid] = _Catalogue()
"""Code → what the catalogue says, for 1 to 172."""


def explain(code: int) -> Xid:
    """Return what is known of an Xid. A code that is not in the catalogue has the grade "unknown"; never raises."""
    known = XIDS.get(code)
    if known is not None:
        return known
    title = "newer than the catalogue that canaryd has" if code > len(XIDS) else "no code of NVIDIA's"
    return Xid(
        code=code, mnemonic="", title=title, immediate="", investigatory="", nature="informational", grade=UNKNOWN
    )


@functools.cache
def _sxids() -> dict[int, SXid]:
    return {code: SXid(code=code, listed=listed, title=title) for code, listed, title in _data()["sxids"]}


def explain_sxid(code: int) -> SXid:
    """Return what is known of an SXid; never raises."""
    return _sxids().get(code) or SXid(code=code, listed=UNKNOWN, title="not in NVIDIA's public lists")


def decode(code: int, unit: str, intr_info: str, error_status: str, driver: str = "") -> Decoded:
    """Return the rows of NVIDIA's table that an NVLink 5 message (Xid 144 to 150) matches.

    `intr_info` and `error_status` are the words as the message has them ("0x004505c6"); `unit` is the unit that it
    names ("" for any); `driver` is the driver's version ("575.57.08"), which decides how IntrInfo is encoded. Without
    it V2 is tried first, then V1. Words that are no numbers, as of a message cut short, match nothing; never raises.
    """
    info, status = _word(intr_info), _word(error_status)
    if info is None or status is None:
        return Decoded(rows=(), assumed=False)
    branch = re.match(r"[0-9]{2,5}(?=\.|$)", driver)
    encodings = ("V2", "V1") if branch is None else ("V2",) if int(branch[0]) >= _V2_FROM else ("V1",)
    for encoding in encodings:
        rows = tuple(_rows(code, unit, info, status, encoding))
        if rows:
            return Decoded(rows=rows, assumed=branch is None)
    return Decoded(rows=(), assumed=False)


def _rows(code: int, unit: str, info: int, status: int, encoding: str) -> Iterator[NvlinkRow]:
    for row_code, names, v1, v2, statuses, bucket, investigatory, severity, origin in _data()["nvlink5"]:
        if (
            row_code == code
            and (not unit or unit == names or unit in names.split("/"))
            and _fits(v2 if encoding == "V2" else v1, info)
            and (not statuses or any(_holds(code, status, int(wanted, 16)) for wanted in statuses))
        ):
            yield NvlinkRow(
                code=code,
                unit=names,
                encoding=encoding,
                bucket=bucket,
                investigatory=investigatory,
                severity=severity,
                origin=origin,
            )


def _fits(pattern: str, word: int) -> bool:
    """Whether the 32 bits of a word agree with a pattern of 0, 1 and "-" for any, highest bit first."""
    return all(wanted in ("-", bit) for wanted, bit in zip(pattern, f"{word:032b}", strict=True))


def _holds(code: int, status: int, wanted: int) -> bool:
    return status & wanted != 0 if code in _COMBINED else status == wanted


def _word(text: str) -> int | None:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None
