"""`canaryd status`: what the store knows, without touching a device: verdicts, what happened, who is watching.

Also its two opening sentences, which the terminal, the page and JSON share: may this machine's numbers be trusted, and
what to do now.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from canaryd import acks, judge
from canaryd.config import Config
from canaryd.inventory import remembered
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, State, Verdict
from canaryd.store import Busy, Store
from canaryd.watch import DAEMON_LOCK, LOG_PROBLEM_NOTE, released_until
from canaryd.wording import moment, spoken

UNTENDED = 1800.0
"""Seconds after which a verdict that nobody has renewed is no verdict: a running daemon renews it every ten minutes."""
UNTENDED_RULE = "untended"
"""Name of the finding that says so; it is this module's, not the judge's."""
RECENT = 86_400.0
"""Seconds for which an event is told."""
STALLED = 300.0
"""Age in seconds from which a cached status is said to be old: a daemon gathers it anew every 15 s (ours)."""
LOOKED = 20
"""Newest runs of a probe among which one that completed is looked for."""
NAMED = 4
"""Devices that are named one by one in a sentence."""

Newest = Mapping[str, float | None]
"""Probe → when its newest whole run or poll that completed began, in seconds since the epoch; None for none so far."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """One device."""

    device: Device
    present: bool
    verdict: Verdict
    events: tuple[Event, ...]
    """What happened to it in the last day, newest last."""
    acks: tuple[Ack, ...] = ()
    """What operators said of it that still holds, newest last."""
    evidence: Newest = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Whether nothing needs to be said of it but that it is healthy."""
        return self.verdict.state is State.HEALTHY and not (self.verdict.findings or self.events or self.acks)

    @property
    def untold(self) -> tuple[Ack, ...]:
        """Those of `acks` of which no finding speaks."""
        told = any(f.rule == "acknowledged" for f in self.verdict.findings)
        return tuple(a for a in self.acks if not (told and a.kind == "acknowledged"))

    @property
    def stalest(self) -> tuple[str, float | None] | None:
        """The probe whose newest evidence is the oldest, and when that began; None where no probe is known."""
        return min(self.evidence.items(), key=lambda item: (item[1] or 0.0, item[0]), default=None)


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


def gather(
    store: Store,
    config: Config,
    now: float | None = None,
    *,
    daemon: bool | None = None,
    evidence: Mapping[str, Newest] | None = None,
) -> Status:
    """Read the status from the store; a verdict that nobody maintains is shown as unknown, with what it was.

    The daemon itself says that it runs, and what its newest evidence is (device → probe → when): it need not ask.
    """
    now = time.time() if now is None else now
    verdicts = store.verdicts()
    records = store.devices()
    here = {r.device.uuid for r in records if r.present}
    said = acks.heeded(store.acks(), now)
    shown = [
        r
        for r in records
        if (r.present or r.device.uuid in verdicts)
        and remembered(r, here, config, now)
        and (r.present or not acks.retired(r.device, said, r.last_seen))
    ]
    events, words = defaultdict(list), defaultdict(list)
    for event in store.events(since=now - RECENT):
        events[event.device].append(event)
    for ack in said:
        words[ack.device].append(ack)
    if evidence is None:
        evidence = _stored_evidence(store, config, {r.device.uuid for r in shown})
    found = [
        DeviceStatus(
            device=record.device,
            present=record.present,
            verdict=_tended(verdicts.get(record.device.uuid), record.device, now),
            events=tuple(events[record.device.uuid]),
            acks=_in_force(words[record.device.uuid], now),
            evidence=evidence.get(record.device.uuid, {}),
        )
        for record in shown
    ]
    return Status(
        now=now,
        daemon=daemon_runs(store) if daemon is None else daemon,
        released_until=released_until(store, now),
        devices=_worst_first(found),
        problems=(
            *store.problems,
            *([store.problem] if store.problem else []),
            *([f"the kernel log is not read: {unread}"] if (unread := store.note(LOG_PROBLEM_NOTE)) else []),
        ),
    )


def as_of(status: Status, now: float) -> Status:
    """Return a status that was gathered earlier as it reads now: what has aged meanwhile has lost its say."""
    old = now - status.now
    stalled = f"nothing has been looked at for {spoken(old)}: look at the log of canaryd"
    return Status(
        now=now,
        daemon=status.daemon,
        released_until=status.released_until if status.released_until > now else 0.0,
        devices=_worst_first(
            replace(
                d,
                verdict=_tended(d.verdict, d.device, now),
                events=tuple(e for e in d.events if e.last >= now - RECENT),
                acks=_in_force(d.acks, now),
            )
            for d in status.devices
        ),
        problems=(*([stalled] if old > STALLED else []), *status.problems),
    )


def _worst_first(devices: Iterable[DeviceStatus]) -> tuple[DeviceStatus, ...]:
    def key(d: DeviceStatus) -> tuple[int, int, str, int, str]:
        costs = judge.CAUSES.index(d.verdict.cause)
        return -d.verdict.state.severity, costs, d.device.backend, d.device.index, d.device.name

    return tuple(sorted(devices, key=key))


def _stored_evidence(store: Store, config: Config, devices: set[str]) -> dict[str, Newest]:
    """Return the newest evidence of each probe that ever ran on one of `devices` and is not switched off."""
    found: dict[str, Newest] = {}
    probes = {
        (of["device"], of["probe"]) for name, items in store.counters() if name == "probe_runs" and (of := dict(items))
    }
    off = {name for name, settings in config.probes.each.items() if settings.enabled is False}
    for device, probe in sorted(probes):
        if device in devices and probe not in off:
            # One run is enough nearly always, and reading a run takes time.
            for limit in (1, LOOKED):
                runs = [*store.runs(device, probe, limit=limit), *store.polls(device, probe, completed=True, limit=1)]
                started = [r.started for r in runs if r.outcome is Outcome.COMPLETED and r.whole]
                if started:
                    break
            found[device] = {**found.get(device, {}), probe: max(started, default=None)}
    return found


def _in_force(said: Iterable[Ack], now: float) -> tuple[Ack, ...]:
    """Return every repair and replacement, and the acknowledgement that has not run out."""
    heeded = acks.heeded(said, now)
    standing = acks.standing(heeded, now)
    return tuple(a for a in heeded if a.kind != "acknowledged" or a is standing)


# -- the two sentences ------------------------------------------------------------------------------------------------

ANSWERS = {
    State.HEALTHY: "YES, trust this node's numbers",
    State.DEGRADED: "YES, trust this node's numbers so far, but look",
    State.UNKNOWN: "NOT KNOWN whether this node's numbers are right",
    State.SUSPECT: "NO, do not trust this node's numbers",
    State.FAULTY: "NO, do not trust this node's numbers",
}
"""What the worst state of a machine says of its numbers: those of a degraded device are right so far (design §4)."""


def answer(status: Status) -> str:
    """Return whether this machine's numbers can be trusted, and because of which devices: one line."""
    if not status.devices:
        return f"{ANSWERS[State.UNKNOWN]}: no device has been seen yet"
    alike = groupby(status.devices, key=lambda d: (d.verdict.state, d.verdict.cause))
    return f"{ANSWERS[status.state]}: " + "; ".join(
        _counted(state, cause, list(same)) for (state, cause), same in alike
    )


def _counted(state: State, cause: Cause, same: Sequence[DeviceStatus]) -> str:
    blamed = "" if cause is Cause.NONE else f" ({cause.value})"
    are = "is" if len(same) == 1 else "are"
    if state is State.HEALTHY and len(same) > 1:
        return f"{len(same)} devices are healthy"
    return f"{_names(same)} {are} {state.value}{blamed}"


def _names(devices: Sequence[DeviceStatus]) -> str:
    names = [d.device.name for d in devices]
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


BLAMED = {
    Cause.HARDWARE: "distrust what {names} computed, and take {them} out of service: the part is broken;"
    " the dossier for the vendor: canaryd report {first} -o DIR",
    Cause.SOFTWARE: "distrust what {names} computed, and put back or mend the software that the findings name;"
    " the part is not accused",
    Cause.ENVIRONMENT: "distrust what {names} computed, and put right what the findings name: heat, power, cables",
    Cause.UNDETERMINED: "distrust what {names} computed, and take {them} out of service; the findings say what would"
    " settle whose fault it is",
    Cause.HARNESS: "distrust what {names} computed, and read the findings: the test itself may be wrong",
}
"""What to do about a faulty device, by cause."""


def advice(status: Status) -> str:
    """Return what to do now about the worst devices: one sentence or two."""
    return " ".join(_advice(status))


def _advice(status: Status) -> Iterator[str]:
    if not status.devices:
        yield "start the daemon (canaryd run), or run canaryd check."
        return
    state = status.state
    worst = [d for d in status.devices if d.verdict.state is state]
    if state is State.FAULTY:  # what is to be done depends on the cause, and the first costs most
        worst = [d for d in worst if d.verdict.cause is worst[0].verdict.cause]
    names = _names(worst)
    they, them, are = ("it", "it", "is") if len(worst) == 1 else ("they", "them", "are")
    known = [a.until for d in worst for a in d.acks if a.kind == "acknowledged"]
    if len(known) == len(worst):
        yield f"{names} {are} acknowledged until {moment(min(known), seconds=False)}, so this is no news. Still:"
    if state is State.FAULTY:
        blamed = BLAMED.get(worst[0].verdict.cause, BLAMED[Cause.UNDETERMINED])
        yield f"{blamed.format(names=names, them=them, first=worst[0].device.name)}."
    elif state is State.SUSPECT:
        yield f"send {names} no new work, and hold back what {they} computed."
        if status.daemon:
            yield f"canaryd tests {them} again by itself."
        else:
            yield f"No daemon tests {them} again: canaryd check --device {worst[0].device.name}."
    elif state is State.UNKNOWN:
        if status.released_until:
            yield "canaryd release keeps canaryd away; canaryd release --end ends that."
        elif not any(d.present for d in worst):
            yield f"find out why {names} {are} gone: kernel log, power, slot."
            yield f"If {they} {are} to stay away, list {them} under devices.absent in the configuration."
        elif not status.daemon:
            yield "start the daemon (canaryd run), or run canaryd check."
        else:
            yield f"see below why nothing is known of {names}; canaryd check asks {them} now."
    elif state is State.DEGRADED:
        yield f"nothing tonight: the numbers are right so far. Plan a look at {names}; the findings say at what."
    elif status.daemon:
        yield "nothing."
    else:
        yield "nothing tonight, but no daemon watches: start canaryd run."
    if status.problems:
        yield f"canaryd itself has {'a problem' if len(status.problems) == 1 else 'problems'}, told below."


def told_of_event(event: Event) -> str:
    """Return an event in words, its time first."""
    times = f" ({event.count:g} times)" if event.count > 1 and event.kind not in ("counter", "condition") else ""
    what = event.detail or f"{event.name}: {event.before} → {event.after}"
    name = f" {event.name}" if event.name not in what else ""
    return f"{moment(event.last)}  {event.kind}{name}{times}: {what}"


def told_of_ack(ack: Ack) -> str:
    """Return what an operator said of a device as a sentence."""
    until = f" until {moment(ack.until)}" if ack.until else ""
    by = f" by {ack.by}" if ack.by else ""
    return f"{ack.kind}{until}{by} on {moment(ack.at)}: {ack.reason}"


def newest_of(devices: Sequence[DeviceStatus]) -> Newest:
    """Return the newest evidence that all of the devices have, the oldest first."""
    probes = {probe for d in devices for probe in d.evidence}
    found: dict[str, float | None] = {}
    for probe in probes:
        times = [d.evidence.get(probe) for d in devices]
        found[probe] = None if None in times else min(at for at in times if at is not None)
    return dict(sorted(found.items(), key=lambda item: (item[1] or 0.0, item[0])))


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
    if -acks.AHEAD <= age <= UNTENDED or any(f.rule == UNTENDED_RULE for f in verdict.findings):
        return verdict
    what = f"{verdict.state.value}/{verdict.cause.value}"
    text = f"nobody has judged it for {age / 3600:.1f} h (it was {what}): start the daemon, or run canaryd check"
    if verdict.state.severity > State.UNKNOWN.severity:
        note = Finding(rule=UNTENDED_RULE, state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
        return replace(verdict, findings=(*verdict.findings, note))
    return _unknown(device.uuid, verdict.decided, text, verdict.findings)


def _unknown(uuid: str, since: float, text: str, findings: tuple[Finding, ...]) -> Verdict:
    note = Finding(rule=UNTENDED_RULE, state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
    return Verdict(
        device=uuid,
        state=State.UNKNOWN,
        cause=Cause.HARNESS,
        findings=(note, *findings),
        decided=since,
        since=since,
    )
