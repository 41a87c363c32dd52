"""`canaryd check --boundary`: in which job, or other tenancy, a device went wrong.

The begin of a job is kept in one small file; the check at its end is compared with it, device by device. A device that
either check did not show as sound or wrong is unknown, and no job is named for it.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from canaryd import files
from canaryd.codec import from_json, to_json
from canaryd.engine.check import Result
from canaryd.facts import Subject, printable
from canaryd.formatting import format_utc
from canaryd.judge.incidents import incidents
from canaryd.model import Cause, State, Tally, Verdict, added
from canaryd.report.incidents import brief
from canaryd.report.terminal import state_note
from canaryd.store.notes import BOOT_NOTE
from canaryd.store.store import Store

BEGIN, END = "begin", "end"
DIRECTORY = "boundaries"
"""Directory of the begins and dossiers in the state directory."""
KEPT = {".json": 1000, ".tar.gz": 50}
"""Ending → number of files in `DIRECTORY`, the newest, that are kept: of begins and of dossiers."""
NOTE = (
    "That the first wrong result falls into the time of job {0} does not make job {0} the cause: the fault may be rare,"
    " or in what was not tested at the begin."
)


class DeviceChange(str, enum.Enum):
    """What became of a device between begin and end."""

    SOUND, WENT_WRONG, ALREADY_WRONG, UNKNOWN = "sound", "went wrong", "already wrong", "unknown"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One device after a check."""

    name: str
    state: State
    cause: Cause
    tested: Mapping[str, int]
    """Probe → number of exact results of this check."""
    record: Mapping[str, Tally]
    """Probe → all exact results on record."""

    def __str__(self) -> str:
        return state_note(self.state.value, self.cause)

    @property
    def is_wrong(self) -> bool:
        """Whether the device is suspect or faulty."""
        return self.state.severity >= State.SUSPECT.severity

    @property
    def doubt(self) -> str:
        """Why a device that is not wrong cannot be called sound, or ""."""
        return "unknown" if self.state is State.UNKNOWN else "" if any(self.tested.values()) else "without a result"


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What a check at the begin or at the end of a job found."""

    label: str
    at: float
    """Epoch s."""
    boot: str
    """The kernel's boot id, or "" where there is none."""
    tests: str
    """The command that was typed, without its devices: what another one did not test proves nothing about this one."""
    devices: Mapping[str, Mark]
    """By `Device.uuid`."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What became of one device."""

    device: str
    """`Device.uuid`."""
    name: str
    change: DeviceChange
    why: str
    """Counts, or the reason, as clauses; "" for a sound device."""
    before: Tally | None = None
    """Results on record at the begin, of the probes that were wrong since, else of all; None if nobody can tell."""
    since: Tally | None = None
    """Results of the same probes between the two checks, those of the second included."""
    dossier: str = ""
    """Path of the dossier of a device that went wrong, or ""."""
    sha256: str = ""
    """SHA-256 of that file in hexadecimal, or ""."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What `--json` prints under "boundary"."""

    moment: str
    """`BEGIN` or `END`."""
    label: str
    begun: float | None
    """Time of the begin (epoch s), or None if it is not on record or could not be stored."""
    ended: float | None
    """Time of the end (epoch s), or None at the begin."""
    devices: tuple[Compared, ...] = ()
    """Empty at the begin."""
    note: str = ""
    """What the statement about devices that went wrong does not say; "" if there are none."""

    def lines(self) -> list[str]:
        """Return one line for each change and reason, and the note."""
        if self.moment == BEGIN:
            kept = f"on record; after the job, type the same with --boundary {END}"
            return [f"job {self.label}: its begin is {'not on record' if self.begun is None else kept}"]
        alike: dict[tuple[DeviceChange, str], list[str]] = {}
        for each in self.devices:
            alike.setdefault((each.change, each.why), []).append(each.name)
        told = [self._line(change, why, ", ".join(names)) for (change, why), names in alike.items()]
        return [printable(line) for line in (*told, self.note) if line]

    def _line(self, change: DeviceChange, why: str, names: str) -> str:
        job = f"job {self.label}"
        if change is DeviceChange.WENT_WRONG:
            return f"{names} went wrong during {job} ({_span(self.begun or 0.0, self.ended or 0.0)}): {why}"
        if change is DeviceChange.UNKNOWN:
            return f"cannot tell whether {names} went wrong during {job}: {why}"
        when = "already wrong before" if change is DeviceChange.ALREADY_WRONG else "sound before and after"
        return f"{names}: {when} {job}" + (f" ({why})" if why else "")


def _span(begun: float, ended: float) -> str:
    first, last = format_utc(begun, seconds=False), format_utc(ended, seconds=False)
    date = len("2026-11-29 ")
    return f"{first.removesuffix(' UTC')} to {last[date:] if first[:date] == last[:date] else last}"


def take(result: Result, store: Store, label: str, tests: str, now: float) -> Marks:
    """Return what a check found, and what is on record of its devices at `now` (epoch s). Drills are not on record."""
    devices = {}
    for device in result.devices:
        tested, verdict = Counter[str](), result.verdicts[device.uuid]
        for run in result.runs.get(device.uuid, ()):
            tested[run.probe] += run.trials
        record: dict[str, Tally] = {}
        for each in store.tallies(device.uuid):
            count = each.of(Subject.DEVICE)
            found = record.get(each.lane.probe, Tally())
            record[each.lane.probe] = added((found, Tally(wrong=count.wrong, of=count.results)))
        devices[device.uuid] = Mark(
            name=device.name, state=verdict.state, cause=verdict.cause, tested=tested, record=record
        )
    return Marks(label=label, at=now, boot=store.note(BOOT_NOTE), tests=tests, devices=devices)


def compare(begin: Marks | None, end: Marks, verdicts: Mapping[str, Verdict]) -> Boundary:
    """Return what became of each device; `verdicts`: device → verdict at the end. A dossier is added by the caller."""
    started = begin.devices if begin else {}
    devices = []
    for uuid, mark in {**end.devices, **started}.items():
        if begin and uuid in started and uuid in end.devices:
            devices.append(_compared(uuid, begin, end, verdicts[uuid]))
        else:
            why = "not tested at its end" if uuid in started else "no begin of it is on record"
            devices.append(Compared(device=uuid, name=mark.name, change=DeviceChange.UNKNOWN, why=why))
    order = (DeviceChange.WENT_WRONG, DeviceChange.ALREADY_WRONG, DeviceChange.UNKNOWN, DeviceChange.SOUND)
    devices.sort(key=lambda d: order.index(d.change))
    note = NOTE.format(end.label) if any(d.change is DeviceChange.WENT_WRONG for d in devices) else ""
    begun = begin.at if begin else None
    return Boundary(moment=END, label=end.label, begun=begun, ended=end.at, devices=tuple(devices), note=note)


def _compared(uuid: str, begin: Marks, end: Marks, verdict: Verdict) -> Compared:
    before, after = begin.devices[uuid], end.devices[uuid]
    since = _since(before, after)
    wrong = {probe for probe, tally in since.items() if tally.wrong}
    told = {probe for probe in wrong if before.tested.get(probe)}
    probes = told or wrong or since.keys()
    earlier, later = added(before.record.get(p, Tally()) for p in probes), added(since[p] for p in probes)
    change, why = _doubt(begin, end, before, after) or _change(begin, after, verdict, wrong, told)
    if change is DeviceChange.UNKNOWN:
        return Compared(device=uuid, name=after.name, change=change, why=why)
    if change is DeviceChange.WENT_WRONG:
        counts = f"{earlier.wrong:,} of {earlier.of:,} results wrong before, {later.wrong:,} of {later.of:,} since"
        why = f"{counts}; now {after}: {why}"
    return Compared(device=uuid, name=after.name, change=change, why=why, before=earlier, since=later)


def _since(before: Mark, after: Mark) -> dict[str, Tally]:
    """Return what each probe added to the record. What was pruned meanwhile (after 400 days) makes nothing negative."""
    old = {probe: before.record.get(probe, Tally()) for probe in after.record}
    return {
        probe: Tally(wrong=max(0, new.wrong - old[probe].wrong), of=max(0, new.of - old[probe].of))
        for probe, new in after.record.items()
    }


def _doubt(begin: Marks, end: Marks, before: Mark, after: Mark) -> tuple[DeviceChange, str] | None:
    """Return what two checks decide without their counts, with the reason, or None if the counts decide."""
    if before.is_wrong:
        return DeviceChange.ALREADY_WRONG, f"{before} at its begin"
    if before.doubt:
        return DeviceChange.UNKNOWN, f"{before.doubt} at its begin"
    if begin.boot != end.boot:
        return DeviceChange.UNKNOWN, "the host was restarted since its begin"
    if begin.tests != end.tests:
        return DeviceChange.UNKNOWN, f"at its begin another check was made: {begin.tests}"
    if after.doubt and not after.is_wrong:
        return DeviceChange.UNKNOWN, f"{after.doubt} at its end"
    return None


def _change(
    begin: Marks, after: Mark, verdict: Verdict, wrong: Collection[str], told: Collection[str]
) -> tuple[DeviceChange, str]:
    """Return what the counts say of a device that was sound at the begin, with the reason.

    `wrong`: probes with wrong results since. `told`: those of them that were tested, and right, at the begin.
    """
    if not (wrong or after.is_wrong):
        return DeviceChange.SOUND, "" if after.state is State.HEALTHY else f"now {after}"
    if not after.is_wrong:
        return DeviceChange.UNKNOWN, f"{after} now, though results since were wrong"
    worst = incidents(verdict)[0]
    if told or (not wrong and worst.since >= begin.at):
        return DeviceChange.WENT_WRONG, brief(worst).rstrip(".")
    return DeviceChange.UNKNOWN, f"{after} now; what shows it is older than its begin, or was not tested then"


def keep(begin: Marks, state_dir: Path) -> bool:
    """Store the begin of a job for its end, in place of an older one with its label. Return whether it is stored."""
    directory, wanted = str(state_dir / DIRECTORY), to_json(begin)
    with contextlib.suppress(OSError):
        _prune(state_dir, ".json")
    files.keep(directory, begin.label, wanted)
    return bool(files.recall(directory, begin.label) == wanted)


def recall(label: str, state_dir: Path) -> Marks | None:
    """Return the begin that `keep` stored under a label, or None if there is none or it cannot be read."""
    with contextlib.suppress(ValueError):
        return from_json(Marks, files.recall(str(state_dir / DIRECTORY), label))
    return None


def keep_dossier(archive: Path, label: str, state_dir: Path) -> tuple[str, str]:
    """Copy the archive of a dossier into the state directory; return (path, SHA-256). Raises `OSError`."""
    data, path = archive.read_bytes(), state_dir / DIRECTORY / f"{label}-{archive.name}"
    _prune(state_dir, ".tar.gz")
    with files.owners_rights(state_dir):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        files.write_whole(path, data)
    return str(path), hashlib.sha256(data).hexdigest()


def _prune(state_dir: Path, ending: str) -> None:
    """Remove the oldest files with this ending, so that there is room for one more. Raises `OSError`."""
    with files.owners_rights(state_dir):
        newest = sorted((state_dir / DIRECTORY).glob(f"*{ending}"), key=lambda path: -path.lstat().st_mtime)
        for path in newest[KEPT[ending] - 1 :]:
            path.unlink(missing_ok=True)
