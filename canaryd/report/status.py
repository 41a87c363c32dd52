"""The status of a machine from its store, without access to a device: verdicts, events, acknowledgements."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.config.settings import Config
from canaryd.engine.check import NO_ENDPOINT, Gap, all_gaps, lacking
from canaryd.engine.inventory import remembered
from canaryd.formatting import DAY, format_duration, format_time
from canaryd.judge import acks as judge_acks
from canaryd.judge import verdict as judge_verdict
from canaryd.judge.clock import AHEAD
from canaryd.judge.findings import ACKNOWLEDGED, CAUSES, NO_EVIDENCE, conclusion
from canaryd.model import Ack, AckKind, Cause, Device, Event, Finding, Outcome, Run, State, Verdict
from canaryd.report.terminal import verdict_note
from canaryd.store.locks import Flag, may_make
from canaryd.store.notes import BUDGET_NOTE, LOG_PROBLEM_NOTE, daemon_runs, released_until
from canaryd.store.rows import parse_time
from canaryd.store.store import DRILL_EXPIRY, Store

UNTENDED = 1800.0
"""Age in seconds above which a stored verdict no longer counts: a daemon stores it again every ten minutes."""
UNTENDED_RULE = "untended"
"""Rule of the finding that the verdict is too old. This module makes it, not the judge."""
WITHHELD_RULE = "budget-withheld"
"""Rule of the note about tests that wait because canaryd's share of the device is used up. This module makes it."""
UNJUDGED_RULE = "unjudged"
"""Rule of the finding that newer runs or repairs are stored, but not judged yet. This module makes it."""
UNSTORED_RULE = "unstored"
"""Rule of the finding that the daemon cannot store newer verdicts. This module makes it."""
RECENT = DAY
"""Seconds for which an event is shown after it happened."""
LEVELLED = "exact_matmul"
"""The probe whose newest run shows the level (quick, standard, deep) at which this machine is tested."""
LOOKED = 20
"""Number of a probe's newest runs that are searched for a completed one, or for a wrong one."""
Newest = Mapping[str, float | None]
"""Probe → start of its newest completed whole run or poll, in seconds since the epoch; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Drill:
    """The newest drill (a test with an injected fault) of a device. It never counts against the device."""

    fault: str
    at: float
    """Time of the drill, in seconds since the epoch."""
    caught: bool
    until: float
    """Time until which the drill is shown, and its metric served (s since the epoch)."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """The status of one device."""

    device: Device
    present: bool
    verdict: Verdict
    events: tuple[Event, ...]
    """Events of the last day, newest last."""
    judged: bool = True
    """Whether a verdict is on record; if not, `verdict` says so."""
    acks: tuple[Ack, ...] = ()
    """Operators' statements about the device, without acknowledgements that have ended; newest last."""
    evidence: Newest = field(default_factory=dict)
    drill: Drill | None = None

    @property
    def awaits_first_tests(self) -> bool:
        """Whether the device's numbers are in doubt only because its first tests have not ended."""
        doubts = self._doubts
        # Without a probe and not of this module: no probe is enabled for it, and none will run.
        return bool(doubts) and all(f.rule == NO_EVIDENCE and (f.probe or f.cause is Cause.HARNESS) for f in doubts)

    @property
    def acknowledged(self) -> bool:
        """Whether an operator has acknowledged everything that makes the device's numbers doubtful."""
        doubts = self._doubts
        return bool(doubts) and all(f.acknowledged for f in doubts) and self.acknowledgement is not None

    @property
    def _doubts(self) -> list[Finding]:
        return [f for f in self.verdict.findings if f.state.severity >= State.UNKNOWN.severity]

    @property
    def acknowledgement(self) -> Ack | None:
        """The acknowledgement in force, or None."""
        return next((a for a in self.acks if a.kind == AckKind.ACKNOWLEDGED), None)

    @property
    def acks_to_show(self) -> tuple[Ack, ...]:
        """The operators' statements to print: an acknowledgement is left out if a finding already mentions it."""
        mentioned = any(f.rule == ACKNOWLEDGED for f in self.verdict.findings)
        return tuple(a for a in self.acks if not (mentioned and a.kind == AckKind.ACKNOWLEDGED))

    @property
    def stalest(self) -> tuple[str, float | None] | None:
        """The probe that ran least recently and the start of its newest run (None: no run), or None without probes."""
        return min(self.evidence.items(), key=lambda item: (item[1] or 0.0, item[0]), default=None)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything that `canaryd status` shows."""

    now: float
    daemon: bool
    """Whether a daemon runs on this state directory."""
    released_until: float
    """Time at which a `canaryd release` ends, in seconds since the epoch; 0.0 if there is none."""
    devices: tuple[DeviceStatus, ...]
    problems: tuple[str, ...]
    unreadable: str = ""
    """A sentence with the reason why the stored results could not be read; "" if they could."""
    absent: str = ""
    """The state directory if it does not exist; else ""."""
    closed: bool = False
    """Whether the state directory is absent and this user cannot create it. A daemon can still run, without storing."""
    not_tested: tuple[Gap, ...] = ()
    """Parts that the recorded tests did not examine."""

    @property
    def first_tests(self) -> tuple[DeviceStatus, ...]:
        """The devices whose first tests a daemon runs now; empty if any device is suspect or faulty."""
        waiting = tuple(d for d in self.devices if d.awaits_first_tests)
        return waiting if self.daemon and self.state is State.UNKNOWN and not self.released_until else ()

    @property
    def state(self) -> State:
        """The worst state of the devices, unknown without devices; at least unknown if the store cannot be read."""
        state = judge_verdict.worst([d.verdict for d in self.devices])
        return max(state, State.UNKNOWN, key=lambda s: s.severity) if self.unreadable else state


def gather(
    store: Store,
    config: Config,
    now: float | None = None,
    *,
    daemon: bool | None = None,
    evidence: Mapping[str, Newest] | None = None,
    itself: bool = False,
) -> Status:
    """Return the status of this machine from the store, as of `now` (default: the present).

    A verdict becomes unknown, with a note on its former state, if it was not renewed in time, or if a daemon cannot
    store newer verdicts. A daemon that asks about itself passes `itself`: it has the newer verdicts, so the second rule
    does not apply. `daemon`: whether one runs (default: find out). `evidence`: device → probe → time (default: stored).
    """
    now = time.time() if now is None else now
    verdicts = store.verdicts()
    records = store.devices()
    here = {r.device.uuid for r in records if r.present}
    acks = judge_acks.heeded(store.acks(), now)
    shown = [
        r
        for r in records
        if (r.present or r.device.uuid in verdicts)
        and remembered(r, store, here, config, now, verdict=verdicts.get(r.device.uuid))
        and (r.present or not judge_acks.retired(r.device, acks, r.last_seen))
    ]
    events_of, acks_of = _by_device(store.events(since=now - RECENT)), _by_device(acks)
    drilled = store.drilled(now)
    if daemon is None:
        daemon = not store.unreadable and daemon_runs(store)
    postponed = _postponed(store) if daemon else {}
    if evidence is None:
        evidence = _stored_evidence(store, config, {r.device.uuid for r in shown})
    unstored = not itself and Flag.flies(store.state_dir)
    found = []
    for record in shown:
        device, own = record.device, acks_of[record.device.uuid]
        verdict = _up_to_date(store, verdicts.get(device.uuid), device, own, now, daemon=daemon)
        if unstored:
            was = f"It was {verdict_note(verdict)}."
            verdict = _unless_alarm(verdict, _note(UNSTORED_RULE, UNSTORED, READ_LOG, was))
        if note := postponed.get(device.uuid):
            verdict = replace(verdict, findings=(*verdict.findings, note))
        found.append(
            DeviceStatus(
                device=device,
                present=record.present,
                verdict=verdict,
                judged=device.uuid in verdicts,
                events=tuple(events_of[device.uuid]),
                acks=_in_force(device, own, now),
                evidence=_since_repair(evidence.get(device.uuid, {}), judge_acks.cut(device, own)),
                drill=newest_drill(drilled.get(device.uuid, ())),
            )
        )
    absent = "" if os.path.exists(store.state_dir) else str(store.state_dir)  # noqa: PTH110  never raises
    return Status(
        now=now,
        daemon=daemon,
        released_until=released_until(store, now),
        devices=_worst_first(found),
        problems=tuple(_problems(store, config, acks, now, daemon=daemon)),
        unreadable=store.unreadable,
        absent=absent,
        closed=bool(absent) and not may_make(store.state_dir),
        not_tested=_not_tested(store, config, found),
    )


def _by_device(items: Iterable[Any]) -> Mapping[str, list[Any]]:
    """Return device → its items, in their original order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        found[item.device].append(item)
    return found


def _not_tested(store: Store, config: Config, devices: Sequence[DeviceStatus]) -> tuple[Gap, ...]:
    """Return the parts that the stored tests did not examine, with the words of a check; () if no device was tested."""
    tested = [d for d in devices if d.present and d.device.computes_here and any(d.evidence.values())]
    if not tested:
        return ()
    gaps = [NO_ENDPOINT] if all(d.device.computes_here for d in devices) else []
    gaps += lacking({d.device.name: {probe for probe, at in d.evidence.items() if at} for d in tested})
    # A run of chosen cases tests neither what its level does, nor is it followed by the other probes of that level.
    some = (store.runs(tested[0].device.uuid, LEVELLED, limit=limit) for limit in (1, LOOKED))
    whole = next((run for runs in some for run in reversed(runs) if run.whole), None)
    return all_gaps(whole.level if whole else config.schedule.level, gaps, [d.device for d in tested])


def _problems(store: Store, config: Config, acks: Iterable[Ack], now: float, *, daemon: bool) -> Iterator[str]:
    yield from store.problems
    if store.problem:
        yield store.problem
    if lost := store.lost:
        at, aside = lost
        ended = now - at >= config.judge.watch or any(a.at >= at for a in acks)
        if not ended and not any(aside in text for text in store.problems):
            yield (
                f"the stored records were damaged or removed on {format_time(at, seconds=False)}, so earlier results"
                f" are lost; what is left: {aside}. Shown until canaryd ack, or for"
                f" {format_duration(config.judge.watch)}"
            )
    unread = store.note(LOG_PROBLEM_NOTE)
    if daemon and unread:
        yield f"the kernel log is not read: {unread}"


def newest_drill(runs: Sequence[Run]) -> Drill | None:
    """Return the newest drill of these runs, or None if there are none."""
    if not runs:
        return None
    same = [r for r in runs if r.drill == runs[-1].drill]
    missed = [r for r in same if r.wrong or r.unknown]
    newest = (missed or same)[-1].started
    return Drill(fault=runs[-1].drill, at=newest, caught=bool(missed), until=newest + DRILL_EXPIRY)


def _postponed(store: Store) -> Mapping[str, Finding]:
    """Return device → note about its tests that wait because canaryd's share of the device is used up."""
    return {
        uuid: Finding(
            rule=WITHHELD_RULE,
            state=State.HEALTHY,
            cause=Cause.NONE,
            message=f"A test has been waiting since {format_time(since)}: {text}",
        )
        for uuid, (since, text) in store.parsed_note(BUDGET_NOTE, _parse_waiting, _parse_waiting("{}")).items()
    }


def _parse_waiting(text: str) -> dict[str, tuple[float, str]]:
    return {uuid: (parse_time(held["since"]), str(held["text"])) for uuid, held in dict(json.loads(text)).items()}


def _since_repair(evidence: Newest, repaired: float) -> Newest:
    """Return the evidence with None in place of each time before the device's repair."""
    return {probe: at if at is None or at > repaired else None for probe, at in evidence.items()}


def _worst_first(devices: Iterable[DeviceStatus]) -> tuple[DeviceStatus, ...]:
    def key(d: DeviceStatus) -> tuple[int, int, str, int, str]:
        costs = CAUSES.index(d.verdict.cause)
        return -d.verdict.state.severity, costs, d.device.backend, d.device.index, d.device.name

    return tuple(sorted(devices, key=key))


def _stored_evidence(store: Store, config: Config, devices: set[str]) -> dict[str, Newest]:
    """Return device → start of the newest run of each of its probes, without probes that are switched off."""
    found: dict[str, Newest] = {}
    probes = {
        (of.get("device", ""), of.get("probe", ""))  # labels may have rotted
        for name, items in store.counters()
        if name == "probe_runs" and (of := dict(items))
    }
    off = {name for name, settings in config.probes.each.items() if settings.enabled is False}
    for device, probe in sorted(probes):
        if device in devices and probe not in off:
            # One run is enough nearly always, and reading a run takes time.
            for limit in (1, LOOKED):
                runs = store.runs(device, probe, outcome=Outcome.COMPLETED, limit=limit)
                runs += store.polls(device, probe, completed=True, limit=1)
                started = [r.started for r in runs if r.whole]
                if started:
                    break
            found[device] = {**found.get(device, {}), probe: max(started, default=None)}
    return found


def _in_force(device: Device, acks: Iterable[Ack], now: float) -> tuple[Ack, ...]:
    """Return the statements about the device, except acknowledgements that have ended."""
    heeded = judge_acks.heeded(acks, now)
    standing = judge_acks.standing(device, heeded, now)
    return tuple(a for a in heeded if a.kind != AckKind.ACKNOWLEDGED or a is standing)


def newest_of(devices: Sequence[DeviceStatus]) -> Newest:
    """Return probe → start of its newest result; None if a device has no result. The oldest entry is first.

    The start is that of the device whose newest result is oldest.
    """
    probes = {probe for d in devices for probe in d.evidence}
    found: dict[str, float | None] = {}
    for probe in probes:
        times = [d.evidence[probe] for d in devices if probe in d.evidence]
        found[probe] = None if None in times else min(at for at in times if at is not None)
    return dict(sorted(found.items(), key=lambda item: (item[1] or 0.0, item[0])))


def ago(at: float | None, now: float) -> str:
    """Return the time since `at` as part of a sentence: "3 minutes ago"; "none yet" for None."""
    return "none yet" if at is None else f"{format_duration(now - at)} ago"


JUDGE_NOW, TEST_NOW = "Wait some minutes for the daemon to judge it", "Test it: canaryd check"
"""What to do about records that are not judged yet: with a daemon, and without one."""
UNSTORED = "The daemon cannot store its results, so this verdict may be old."
READ_LOG = "Free disk space, or give the files to the daemon's user; its log says which"


def _up_to_date(
    store: Store, verdict: Verdict | None, device: Device, acks: Sequence[Ack], now: float, *, daemon: bool
) -> Verdict:
    """Return the stored verdict, or what is known after a repair or a wrong run that has not been judged yet."""
    shown, action = _unless_old(verdict, device, now, daemon=daemon), JUDGE_NOW if daemon else TEST_NOW
    if verdict is None:
        return shown
    cut = judge_acks.cut(device, acks)
    if cut > verdict.decided:
        note = _note(
            UNJUDGED_RULE,
            f"It was repaired or replaced on {format_time(cut, seconds=False)} and has no new verdict yet.",
            action,
            f"Before, it was {verdict_note(verdict)}. Earlier failures no longer count."
            " Wait until every probe has run.",
        )
        return replace(_unknown(device.uuid, cut, note), decided=verdict.decided)
    if shown.state.severity > State.UNKNOWN.severity:
        return shown
    judged = {run for f in verdict.findings for run in f.runs}
    later = store.runs(device.uuid, since=verdict.decided, failed=True, limit=LOOKED)
    wrong = [r for r in later if (r.wrong or r.unknown) and r.id not in judged and r.started > cut]
    if not wrong:
        return shown
    newest = wrong[-1]
    what = (
        f"computed wrong results (case {newest.wrong[-1].case})"
        if newest.wrong
        else f"differed from its baseline (case {newest.unknown[-1]})"
    )
    note = _note(
        UNJUDGED_RULE,
        f"A newer {newest.probe} run {what}; not judged yet.",
        action,
        f"The run started on {format_time(newest.started)}. Before it, the device was {verdict_note(verdict)}.",
    )
    note = replace(
        note, cause=Cause.UNDETERMINED, probe=newest.probe, repro=newest.repro, runs=tuple(r.id for r in wrong)
    )
    return _with(shown, note, newest.started)


def _with(verdict: Verdict, finding: Finding, at: float) -> Verdict:
    """Return a verdict with `finding` added, and with the state and cause that follow. A new state begins at `at`."""
    findings = tuple(sorted((finding, *verdict.findings), key=lambda f: -f.state.severity))
    state, cause = conclusion(findings)
    since = verdict.since if (state, cause) == (verdict.state, verdict.cause) else at
    return replace(verdict, state=state, cause=cause, findings=findings, since=since)


def _unless_old(verdict: Verdict | None, device: Device, now: float, *, daemon: bool) -> Verdict:
    """Return the verdict if it was renewed in time. If not, it becomes unknown, unless it is suspect or faulty.

    None becomes an unknown verdict.
    """
    if verdict is None:
        return _unknown(device.uuid, now, _note(NO_EVIDENCE, "It has no verdict yet.", JUDGE_NOW if daemon else ""))
    age = now - verdict.decided
    if _is_renewed(verdict, now):
        return verdict
    old = f"{format_duration(age)} old" if age > 0 else "dated ahead of the clock"
    said = f"The last verdict is {old}; it was {verdict_note(verdict)}."
    if verdict.state.severity > State.UNKNOWN.severity:
        said = f"This verdict is {old}; no newer one was stored."
    return _unless_alarm(verdict, _note(UNTENDED_RULE, said, JUDGE_NOW if daemon else TEST_NOW))


def _is_renewed(verdict: Verdict, now: float) -> bool:
    return -AHEAD <= now - verdict.decided <= UNTENDED


def _unless_alarm(verdict: Verdict, note: Finding) -> Verdict:
    """Return the verdict with the note added. Its state becomes unknown, unless it is suspect or faulty."""
    if verdict.state.severity > State.UNKNOWN.severity:
        return replace(verdict, findings=(*verdict.findings, note))
    return _unknown(verdict.device, verdict.decided, note, *verdict.findings)


def _note(rule: str, message: str, action: str, *evidence: str) -> Finding:
    """Return a finding with state unknown whose cause is canaryd itself."""
    return Finding(
        rule=rule, state=State.UNKNOWN, cause=Cause.HARNESS, message=message, action=action, evidence=evidence
    )


def _unknown(uuid: str, since: float, note: Finding, *findings: Finding) -> Verdict:
    return Verdict(
        device=uuid, state=State.UNKNOWN, cause=Cause.HARNESS, findings=(note, *findings), decided=since, since=since
    )
