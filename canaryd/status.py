"""`canaryd status`: what the store knows, without touching a device: verdicts, what happened, who is watching."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from canaryd import judge
from canaryd.config import Config
from canaryd.inventory import remembered
from canaryd.model import Cause, Device, Event, Finding, State, Verdict
from canaryd.store import Busy, Store
from canaryd.watch import DAEMON_LOCK, LOG_PROBLEM_NOTE, released_until

UNTENDED = 1800.0
"""Seconds after which a verdict that nobody has renewed is no verdict: a running daemon renews it every ten minutes."""
RECENT = 86_400.0
"""Seconds for which an event is told."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """One device."""

    device: Device
    present: bool
    verdict: Verdict
    events: tuple[Event, ...]
    """What happened to it in the last day, newest last."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """All that `canaryd status` tells."""

    now: float
    daemon: bool
    """Whether a daemon runs on this state directory."""
    released_until: float
    """Until when `canaryd release` keeps canaryd away from devices, in seconds since the epoch; 0.0 for not."""
    devices: tuple[DeviceStatus, ...]
    problems: tuple[str, ...]

    @property
    def state(self) -> State:
        """The worst device's state; unknown without devices."""
        return judge.worst([d.verdict for d in self.devices])


def gather(store: Store, config: Config, now: float | None = None) -> Status:
    """Read the status from the store; a verdict that nobody maintains is shown as unknown, with what it was."""
    now = time.time() if now is None else now
    verdicts: Mapping[str, Verdict] = store.verdicts()
    found = []
    records = store.devices()
    here = {r.device.uuid for r in records if r.present}
    for record in records:
        verdict = verdicts.get(record.device.uuid)
        if (record.present or verdict is not None) and remembered(record, here, config, now):
            events = tuple(store.events(since=now - RECENT, device=record.device.uuid))
            found.append(
                DeviceStatus(
                    device=record.device,
                    present=record.present,
                    verdict=_tended(verdict, record.device, now),
                    events=events,
                )
            )
    return Status(
        now=now,
        daemon=daemon_runs(store),
        released_until=released_until(store, now),
        devices=tuple(sorted(found, key=lambda d: (-d.verdict.state.severity, d.device.backend, d.device.name))),
        problems=(
            *store.problems,
            *([store.problem] if store.problem else []),
            *([f"the kernel log is not read: {unread}"] if (unread := store.note(LOG_PROBLEM_NOTE)) else []),
        ),
    )


def daemon_runs(store: Store) -> bool:
    """Return whether a daemon holds this state directory."""
    try:
        with store.lock(DAEMON_LOCK):
            return False
    except Busy:
        return True


def _tended(verdict: Verdict | None, device: Device, now: float) -> Verdict:
    if verdict is None:
        text = "it has not been judged yet: start the daemon, or run canaryd check"
        return _unknown(device.uuid, now, text, ())
    age = now - verdict.decided
    if age <= UNTENDED:
        return verdict
    what = f"{verdict.state.value}/{verdict.cause.value}"
    text = f"nobody has judged it for {age / 3600:.1f} h (it was {what}): start the daemon, or run canaryd check"
    if verdict.state.severity > State.UNKNOWN.severity:
        note = Finding(rule="untended", state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
        return replace(verdict, findings=(*verdict.findings, note))
    return _unknown(device.uuid, verdict.decided, text, verdict.findings)


def _unknown(uuid: str, since: float, text: str, findings: tuple[Finding, ...]) -> Verdict:
    note = Finding(rule="untended", state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
    return Verdict(
        device=uuid,
        state=State.UNKNOWN,
        cause=Cause.HARNESS,
        findings=(note, *findings),
        decided=since,
        since=since,
    )
