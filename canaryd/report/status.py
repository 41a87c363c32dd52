"""`canaryd status`: what the store knows, without touching a device: verdicts, what happened, who is watching.

Also its two opening sentences, which the terminal, the page and JSON share: may this machine's numbers be trusted, and
what to do now.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from canaryd.config.settings import Config
from canaryd.engine.inventory import remembered
from canaryd.formatting import moment, spoken
from canaryd.judge import acks as judge_acks
from canaryd.judge import verdict as judge_verdict
from canaryd.judge.clock import AHEAD
from canaryd.judge.findings import CAUSES
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, State, Verdict
from canaryd.store.notes import BUDGET_NOTE, LOG_PROBLEM_NOTE, daemon_runs, released_until
from canaryd.store.store import Store

UNTENDED = 1800.0
"""Seconds after which a verdict that nobody has renewed is no verdict: a running daemon renews it every ten minutes."""
UNTENDED_RULE = "untended"
"""Name of the finding that says so; it is this module's, not the judge's."""
WITHHELD_RULE = "budget-withheld"
"""Name of the note that says what waits for the budget; this module's too."""
UNJUDGED_RULE = "unjudged"
"""Name of the finding that says what came after the verdict; this module's too."""
SUMMED = frozenset({"counter", "flag", "condition", "reset", "boot", "change"})
"""Kinds of events of which each one is told: values before and after, or moments. Lines of a log repeat themselves."""
RECENT = 86_400.0
"""Seconds for which an event is told."""
STALLED = 300.0
"""Age in seconds from which a cached status is said to be old: a daemon gathers it anew every 15 s (ours)."""
LOOKED = 20
"""Newest runs of a probe among which one that completed, or that was wrong, is looked for."""
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
    def known(self) -> bool:
        """Whether an operator knows of all that makes its numbers doubtful, and has said so."""
        speaking = [f for f in self.verdict.findings if f.state.severity >= State.UNKNOWN.severity]
        return bool(speaking) and all(f.acknowledged for f in speaking) and bool(self._standing)

    @property
    def known_until(self) -> float:
        """When the acknowledgement ends, in seconds since the epoch; 0.0 where there is none."""
        return max((a.until for a in self._standing), default=0.0)

    @property
    def _standing(self) -> tuple[Ack, ...]:
        return tuple(a for a in self.acks if a.kind == "acknowledged")

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
        return judge_verdict.worst([d.verdict for d in self.devices])


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
    said = judge_acks.heeded(store.acks(), now)
    shown = [
        r
        for r in records
        if (r.present or r.device.uuid in verdicts)
        and remembered(r, here, config, now, verdict=verdicts.get(r.device.uuid))
        and (r.present or not judge_acks.retired(r.device, said, r.last_seen))
    ]
    events, words = defaultdict(list), defaultdict(list)
    for event in store.events(since=now - RECENT):
        events[event.device].append(event)
    for ack in said:
        words[ack.device].append(ack)
    daemon = daemon_runs(store) if daemon is None else daemon
    waiting = _waiting(store) if daemon else {}
    if evidence is None:
        evidence = _stored_evidence(store, config, {r.device.uuid for r in shown})
    found = [
        DeviceStatus(
            device=record.device,
            present=record.present,
            verdict=_beside(
                _since_then(store, verdicts.get(record.device.uuid), record.device, words[record.device.uuid], now),
                waiting.get(record.device.uuid),
            ),
            events=tuple(events[record.device.uuid]),
            acks=_in_force(words[record.device.uuid], now),
            evidence=_of_now(
                evidence.get(record.device.uuid, {}), judge_acks.cut(record.device, words[record.device.uuid])
            ),
        )
        for record in shown
    ]
    return Status(
        now=now,
        daemon=daemon,
        released_until=released_until(store, now),
        devices=_worst_first(found),
        problems=tuple(_problems(store, config, said, now, daemon=daemon)),
    )


def _problems(store: Store, config: Config, said: Iterable[Ack], now: float, *, daemon: bool) -> Iterator[str]:
    yield from store.problems
    if store.problem:
        yield store.problem
    if lost := store.lost:
        at, aside = lost
        ended = now - at >= config.judge.watch or any(a.at >= at for a in said)
        if not ended and not any(aside in text for text in store.problems):
            yield (
                f"the records of this machine were damaged or removed, and begun anew on {moment(at, seconds=False)}, "
                f"so what was found before is not known; what is left of them is {aside}. Told until canaryd ack, and "
                f"for {spoken(config.judge.watch)} at most"
            )
    unread = store.note(LOG_PROBLEM_NOTE)
    if daemon and unread:
        yield f"the kernel log is not read: {unread}"


def _waiting(store: Store) -> Mapping[str, Finding]:
    """Return device → a note of what waits on it, as the daemon left word."""
    return {
        uuid: Finding(
            rule=WITHHELD_RULE,
            state=State.HEALTHY,
            cause=Cause.NONE,
            message=f"the budget puts a test off since {moment(float(held['since']))}: {held['text']}",
        )
        for uuid, held in json.loads(store.note(BUDGET_NOTE) or "{}").items()
    }


def _beside(verdict: Verdict, note: Finding | None) -> Verdict:
    return verdict if note is None else replace(verdict, findings=(*verdict.findings, note))


def _of_now(evidence: Newest, cut: float) -> Newest:
    """Return the evidence without what is from before the device was repaired: that is history."""
    return {probe: at if at is None or at > cut else None for probe, at in evidence.items()}


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
        costs = CAUSES.index(d.verdict.cause)
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
    heeded = judge_acks.heeded(said, now)
    standing = judge_acks.standing(heeded, now)
    return tuple(a for a in heeded if a.kind != "acknowledged" or a is standing)


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
    yield from _advice_on_devices(status) if status.devices else [f"{START}."]
    if status.problems:
        yield f"canaryd itself has {'a problem' if len(status.problems) == 1 else 'problems'}, told below."


START = "start the daemon (canaryd run), or run canaryd check"


def _advice_on_devices(status: Status) -> Iterator[str]:
    state = status.state
    worst = [d for d in status.devices if d.verdict.state is state]
    if state is State.FAULTY:  # what is to be done depends on the cause, and the first costs most
        worst = [d for d in worst if d.verdict.cause is worst[0].verdict.cause]
    names = _names(worst)
    they, them, are = ("it", "it", "is") if len(worst) == 1 else ("they", "them", "are")
    known = all(d.known for d in worst)
    if known:
        until = moment(min(d.known_until for d in worst), seconds=False)
        yield f"{names} {are} acknowledged until {until}, so this is no news. Still:"
        yield f"send {names} no new work, and hold back what {they} computed."
    elif state is State.FAULTY:
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
            yield f"{START}."
        else:
            yield f"see below why nothing is known of {names}; canaryd check asks {them} now."
    elif state is State.DEGRADED:
        yield f"nothing tonight: the numbers are right so far. Plan a look at {names}; the findings say at what."
    elif status.daemon:
        yield "nothing."
    else:
        yield "nothing tonight, but no daemon watches: start canaryd run."


def told_of_events(d: DeviceStatus) -> list[str]:
    """Return what happened to a device in words, newest last; what would be said twice is said once.

    Of equal lines of a log the newest is told with how often there were such; one that a finding quotes, without its
    text.
    """
    alike: dict[object, Event] = {}
    for number, event in enumerate(d.events):
        key = number if event.kind in SUMMED else (event.kind, event.name)
        before = alike.pop(key, None)
        count = event.count + (before.count if before else 0.0)
        alike[key] = replace(event, first=min(event.first, before.first if before else event.first), count=count)
    return [told_of_event(e, quoted=_quoted(e, d.verdict.findings)) for e in alike.values()]


def _quoted(event: Event, findings: Iterable[Finding]) -> bool:
    text = event.detail.rstrip(".")
    return bool(text) and any(text in f.message for f in findings)


def told_of_event(event: Event, *, quoted: bool = False) -> str:
    """Return an event in words, its time first; of one that is `quoted` nearby, what it was and not its text."""
    if quoted:
        times = f", {event.count:g} times" if event.count > 1 and event.kind not in ("counter", "condition") else ""
        return f"{moment(event.last)}  {f'{event.kind} {event.name}'.strip()}{times}: told above"
    times = f" ({event.count:g} times)" if event.count > 1 and event.kind not in ("counter", "condition") else ""
    what = event.detail or f"{event.name}: {event.before} → {event.after}"
    name = f" {event.name}" if event.name not in what else ""
    return f"{moment(event.last)}  {event.kind}{name}{times}: {what}"


def told_of_ack(ack: Ack) -> str:
    """Return what an operator said of a device as a sentence."""
    if ack.kind == "acknowledged" and ack.until <= ack.at:
        return f"{ack.by or 'an operator'} ended the acknowledgement on {moment(ack.at)}: {ack.reason}"
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


def _since_then(store: Store, verdict: Verdict | None, device: Device, words: Sequence[Ack], now: float) -> Verdict:
    """Return the verdict as it reads beside what came after it and was not judged: words, and runs that were wrong."""
    shown = _tended(verdict, device, now)
    if verdict is None:
        return shown
    cut = judge_acks.cut(device, words)
    if cut > verdict.decided:
        text = (
            f"it was said to be repaired or replaced on {moment(cut, seconds=False)}, after it was judged last (it was "
            f"{_was(verdict)}): what it did before is history, and nothing is known until every probe has run on it "
            f"again. {JUDGES}"
        )
        return replace(_unknown(device.uuid, cut, text, (), rule=UNJUDGED_RULE), decided=verdict.decided)
    shown = _heeding(shown, judge_acks.standing(words, now), now)
    if shown.state.severity > State.UNKNOWN.severity:
        return shown
    judged = {run for f in verdict.findings for run in f.runs}
    later = store.runs(device.uuid, since=verdict.decided, failed=True, limit=LOOKED)
    wrong = [r for r in later if (r.wrong or r.unknown) and r.id not in judged and r.started > cut]
    if not wrong:
        return shown
    newest = wrong[-1]
    what = f"wrong in {newest.wrong[-1].case}" if newest.wrong else f"beyond what is known in {newest.unknown[-1]}"
    text = (
        f"a run after this verdict was wrong and has not been judged: {newest.probe} on "
        f"{moment(newest.started)} was {what} (before it was {_was(verdict)}). {JUDGES}"
    )
    note = Finding(
        rule=UNJUDGED_RULE,
        state=State.UNKNOWN,
        cause=Cause.UNDETERMINED,
        message=text,
        probe=newest.probe,
        repro=newest.repro,
        runs=tuple(r.id for r in wrong),
    )
    return _with(shown, note, newest.started)


JUDGES = "A running daemon judges it within minutes; without one, start it (canaryd run) or run canaryd check"


def _heeding(verdict: Verdict, ack: Ack | None, now: float) -> Verdict:
    """Return a verdict beside the acknowledgement that stands now, as the judge would make it of the same findings.

    What was suspect when it was said is known, and unknown; what was known by one that stands no more is suspect again.
    """
    if ack is None:
        known = [f for f in verdict.findings if f.acknowledged]
        if not known:
            return verdict
        text = "the acknowledgement has ended, and it has not been judged since: it is suspect again by what is below"
        cause = min((f.cause for f in known), key=CAUSES.index)
        note = Finding(rule=UNJUDGED_RULE, state=State.SUSPECT, cause=cause, message=text)
        return _with(replace(verdict, findings=_without_words(verdict)), note, now)
    if ack.at <= verdict.decided:
        return verdict
    findings = [judge_acks.covered(ack, f) if judge_acks.covers(ack, f) else f for f in _without_words(verdict)]
    return _with(replace(verdict, findings=tuple(findings)), judge_acks.note(ack), ack.at)


def _without_words(verdict: Verdict) -> tuple[Finding, ...]:
    return tuple(f for f in verdict.findings if f.rule != "acknowledged")


def _with(verdict: Verdict, finding: Finding, at: float) -> Verdict:
    """Return a verdict with another finding, and the state and cause that follow; `at` is when it entered that."""
    findings = tuple(sorted((finding, *verdict.findings), key=lambda f: -f.state.severity))
    state = findings[0].state
    blamed = (f.cause for f in findings if f.state is state is not State.HEALTHY)
    cause = min(blamed, key=CAUSES.index, default=Cause.NONE)
    since = verdict.since if (state, cause) == (verdict.state, verdict.cause) else at
    return replace(verdict, state=state, cause=cause, findings=findings, since=since)


def _was(verdict: Verdict) -> str:
    return f"{verdict.state.value}/{verdict.cause.value}"


def _tended(verdict: Verdict | None, device: Device, now: float) -> Verdict:
    if verdict is None:
        text = "it has not been judged yet: start the daemon, or run canaryd check"
        return _unknown(device.uuid, now, text, ())
    age = now - verdict.decided
    if -AHEAD <= age <= UNTENDED or any(f.rule in (UNTENDED_RULE, UNJUDGED_RULE) for f in verdict.findings):
        return verdict
    text = (
        f"nobody has judged it for {age / 3600:.1f} h (it was {_was(verdict)}): start the daemon, or run canaryd check"
    )
    if verdict.state.severity > State.UNKNOWN.severity:
        note = Finding(rule=UNTENDED_RULE, state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
        return replace(verdict, findings=(*verdict.findings, note))
    return _unknown(device.uuid, verdict.decided, text, verdict.findings)


def _unknown(uuid: str, since: float, text: str, findings: tuple[Finding, ...], rule: str = UNTENDED_RULE) -> Verdict:
    note = Finding(rule=rule, state=State.UNKNOWN, cause=Cause.HARNESS, message=text)
    return Verdict(
        device=uuid,
        state=State.UNKNOWN,
        cause=Cause.HARNESS,
        findings=(note, *findings),
        decided=since,
        since=since,
    )
