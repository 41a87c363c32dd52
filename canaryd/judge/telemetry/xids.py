"""What the codes in NVIDIA's kernel messages mean: Xids, NVLink 5 errors (Xid 144 to 150) and SXids of NVSwitches.

Codes, mnemonics, action buckets and bit patterns come from NVIDIA's Xid catalogue ("Analyzing Xid Errors with the Xid
Catalog", codes 1 to 172), SXids from NVIDIA's Fabric Manager User Guide, appendix D. Titles and sentences are our
words; `nature` and the grades of buckets, and `ours` of codes without a bucket, are our reading, not NVIDIA's, each
with its reason where it needs one. The data is in `xid_catalogue.json` and is loaded on first use: a new code is a row
there. A few labels of buckets are shortened: "IGNORE (sympathetic)" is IGNORE_SYMPATHETIC, "REPORT_ISSUE (if seen >1
per day)" REPORT_ISSUE, "Solo: RESTART_FM …" WORKFLOW_XID_45. No bucket is "rma": by NVIDIA's RMA policy the field
diagnostic decides. What follows from a code is in `xid_rules.py`.
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
    """NVIDIA's bucket for what to do at once, a key of `buckets`; "" where it gives none."""
    investigatory: str
    """NVIDIA's bucket for finding the cause; "" where it gives none."""
    nature: str
    """What it points to, in our reading: "application", "hardware", "either" (exact tests can tell these two apart),
    "link", "thermal-power", "informational", "driver" (NVIDIA's software or firmware), or "unused" by the catalogue."""
    grade: str
    """One of `GRADES`, or "unknown": the bucket's, ours where there is no bucket, unknown for unused codes."""

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
            return advice_of(self.immediate)
        return f"{advice_of(self.immediate)}; to find the cause: {advice_of(self.investigatory)}"


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
        return _buckets()[self.bucket][1]


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
        rows = dict.fromkeys(f"{r.unit}, {r.severity.lower()}, {r.origin}: {advice_of(r.bucket)}" for r in self.rows)
        assumed = f" (read as {self.rows[0].encoding}, driver unknown)" if self.assumed else ""
        return "; ".join(rows) + assumed


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("xid_catalogue.json").read_text(encoding="utf-8"))
    return data


@functools.cache
def _buckets() -> Mapping[str, tuple[str, str]]:
    return {name: (advice, grade) for name, advice, grade, _ in _data()["buckets"]}


def advice_of(bucket: str) -> str:
    """Return one of NVIDIA's action buckets in one clause; "" for none."""
    return _buckets()[bucket][0] if bucket else ""


@functools.cache
def catalogue() -> Mapping[int, Xid]:
    """Return code → what the catalogue says, for 1 to 172; the file is read on first use."""
    ours, found = {code: grade for code, grade, _ in _data()["ours"]}, {}
    for code, _, title, immediate, investigatory, nature in _data()["xids"]:
        grade = _buckets()[immediate][1] if immediate else ours.get(code, UNKNOWN)
        grade = UNKNOWN if nature == "unused" else grade
        found[code] = Xid(code, title, immediate, investigatory, nature, grade)
    return found


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
