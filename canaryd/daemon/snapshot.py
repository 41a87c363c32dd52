"""The evidence at one moment, in the form for the metrics page, /healthz and the status page."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from canaryd.engine.engine import Engine
from canaryd.facts import FINGERPRINT, Reading, printable, stack_id
from canaryd.judge import case, clock
from canaryd.judge.phrases import count
from canaryd.judge.verdict import fault_rate_bound
from canaryd.judge.watch import has_looked
from canaryd.metrics import families
from canaryd.model import Ack, Cause, Device, Outcome, Run, State, Verdict
from canaryd.report.status import DeviceStatus
from canaryd.store.store import Store

STEADY = 5
"""Number of newest runs whose recorded results must agree before their fingerprint is shown. As many runs are kept in
memory with their recordings."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The data for the answers of /healthz and /readyz."""

    healthy: bool = False
    waits: str = "waiting for a first run on every device"
    """The reason why the daemon is not ready, or "" if it is ready."""
    reasons: tuple[str, ...] = ("no evidence yet",)
    """The reasons why the daemon is not healthy, one sentence each."""


def device_view(engine: Engine, device: Device, shown: DeviceStatus | None, now: float) -> families.DeviceView:
    """Return the metrics page's data about a device; `shown` is what status says about it."""
    uuid, verdict = device.uuid, shown.verdict if shown and shown.judged else None
    runs = engine.evidence(uuid)
    newest = {(r.probe, r.instruction_set): r for r in runs}.values()
    ack = shown.acknowledgement if shown else None
    spent, skipped = engine.account.totals(uuid) if device.computes_here else ({}, {})
    held = engine.account.withheld(uuid)
    return families.DeviceView(
        device=device,
        present=uuid in engine.in_place and not engine.watch.lost(uuid),
        verdict=verdict,
        last_runs={r.probe: r for r in runs},
        last_success=last_success(runs),
        fault_rate=fault_rate_bound(runs),
        fingerprints=fingerprints(runs),
        periods=engine.periods(device),
        stacks={r.stack_id: r.stack for r in newest if r.stack},
        acknowledged=is_acknowledged(ack, verdict, engine.store),
        acknowledged_at=ack.at if ack else None,
        polls=engine.watch.polls(uuid),
        readings=(*engine.watch.readings(uuid, now), *newest_readings(device, runs)),
        drifts=engine.decisions.drifts(uuid),
        spent=spent,
        skipped=skipped,
        withheld=held.wait.reason if held else "",
    )


def last_success(runs: Iterable[Run]) -> dict[str, float]:
    """Return probe → start (epoch s) of its newest run that examined something and found nothing wrong.

    `runs` are sorted, oldest first. A run that gave only readings counts too.
    """
    clean = (r for r in runs if r.outcome is Outcome.COMPLETED and not (r.wrong or r.unknown))
    return {r.probe: r.started for r in clean if has_looked(r)}


def health(engine: Engine, now: float) -> Health:
    """Return a `Health`: healthy if all devices have fresh evidence, ready if this process has tested all devices.

    A device counts as tested while the budget postpones its tests. For a device that an earlier process tested, a run
    that skips everything does not count, and the daemon is not ready while torch no longer shows the device: a release
    that cannot test must not replace one that could.
    """
    reasons = [
        reason
        for uuid, device in sorted(engine.devices.items())
        if uuid in engine.present
        for reason in stale(engine, device, engine.evidence(uuid), now)
    ]
    known = {u for u, d in engine.devices.items() if d.computes_here and any(r.trials for r in engine.evidence(u))}
    waiting = {uuid for uuid in engine.devices if engine.account.withheld(uuid)}
    done = engine.tried | (engine.ran - known) | waiting
    wanted = {uuid for uuid, device in engine.devices.items() if uuid in engine.present and device.is_reached}
    wanted |= engine.unreached() & known
    ready = bool(engine.present and done) and wanted <= done
    unstored = f"cannot store: {printable(engine.store.problem)}" if engine.store.problem else ""
    return Health(
        healthy=bool(engine.present) and not reasons,
        waits=unstored or ("" if ready else Health.waits),
        reasons=tuple(reasons) or (*engine.problems, "no device was found yet"),
    )


def stale(engine: Engine, device: Device, runs: Iterable[Run], now: float) -> list[str]:
    """Return one sentence for each probe without fresh evidence on a device; the judge's age limits apply."""
    runs = [r for r in runs if r.outcome is Outcome.COMPLETED and r.whole and has_looked(r)]
    periods = engine.periods(device)
    if not periods and not engine.is_divided(device):
        return [f"{device.name}: none of the chosen probes tests it"]
    reasons = []
    for probe, period in periods.items():
        ages = [clock.age(r, now) for r in runs if r.probe == probe]
        limit = case.freshness(engine.config.judge, period)
        if not ages:
            reasons.append(f"{device.name} {probe}: no evidence yet")
        elif (age := min(ages)) == math.inf:
            reasons.append(f"{device.name} {probe}: all evidence is dated in the future")
        elif age > limit:
            reasons.append(f"{device.name} {probe}: newest evidence is {age:.0f} s old (limit {limit:.0f} s)")
    return reasons


def summary(engine: Engine, verdicts: Mapping[str, Verdict]) -> str:
    """Return the number of devices in each state as one line, e.g. "8 devices: 7 healthy, 1 suspect"."""
    found = [verdicts[u].state if u in verdicts else State.UNKNOWN for u in sorted(engine.in_place)]
    counts = ", ".join(f"{found.count(state)} {state.value}" for state in State if state in found)
    return f"{count(len(found), 'device')}: {counts}" if found else "no device was found yet"


def newest_evidence(engine: Engine, uuid: str) -> dict[str, float | None]:
    """Return probe → time (epoch s) of its newest evidence on a device, or None for a probe that gave none."""
    found: dict[str, float | None] = dict.fromkeys(engine.periods(engine.devices[uuid]))
    for run in engine.evidence(uuid):
        if run.outcome is Outcome.COMPLETED and run.whole:
            found[run.probe] = max(found.get(run.probe) or 0.0, run.started)
    polls = engine.watch.polls(uuid)
    return found | {name: poll.completed.started if poll.completed else None for name, poll in polls.items()}


def sum_counts(*counts: families.Counters) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return one mapping of (name, labels) → sum of the counters with this name and these labels."""
    total: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def newest_readings(device: Device, runs: Iterable[Run]) -> Iterator[Reading]:
    """Yield the readings of each probe's newest complete run; for a CPU, only with its default instruction set.

    Readings of another instruction set, such as a slower kernel's time, would need their own label.
    """
    own = ("", *device.instruction_sets[:1])
    newest = {r.probe: r for r in runs if r.whole and r.outcome is Outcome.COMPLETED and r.instruction_set in own}
    for run in newest.values():
        yield from run.readings


def is_acknowledged(ack: Ack | None, verdict: Verdict | None, store: Store) -> bool:
    """Return whether an acknowledgement covers the device's present state. It does not cover a later fault.

    If the cause of a fault becomes known later, it is still the same fault.
    """
    if ack is None:
        return False
    if verdict is None or verdict.state is not State.FAULTY or verdict.since <= ack.at:
        return True
    known = (Cause.UNDETERMINED, verdict.cause)
    newest_first = reversed(store.verdict_history(verdict.device))
    same = itertools.takewhile(lambda v: v.state is State.FAULTY and v.cause in known, newest_first)
    return any(v.since <= ack.at for v in same)


def fingerprints(runs: Iterable[Run]) -> dict[tuple[str, str], int]:
    """Return (probe, label) → newest fingerprint, for the software of the newest run of each instruction set.

    Healthy devices of one model have equal fingerprints under equal labels. The label is the id of the software stack
    with the probe's version, since another version may have other cases. If recordings made the fingerprint, the label
    also stands for the kernel behind each recording, since another kernel may round differently. Recorded results can
    vary on a healthy device, so a fingerprint is left out if the newest `STEADY` runs with its label disagree, or if
    one of these runs gave two results for a case.
    """
    stacks: dict[tuple[str, str], str] = {}
    newest: dict[tuple[str, str], tuple[str, str]] = {}
    given: dict[tuple[str, str], list[int | None]] = {}
    for run in runs:
        if not run.whole or run.outcome is not Outcome.COMPLETED:
            continue
        lane, value, chains = (run.probe, run.instruction_set), _fingerprint(run), {}
        stacks[lane] = stack = label = f"{run.stack_id}-v{run.probe_version}"
        if run.recordings:
            chains = {r.case: r.chain_id for r in run.recordings}
            label = f"{stack_id({'stack': run.stack_id} | chains)}-v{run.probe_version}"
        varied = len({(r.case, r.digest) for r in run.recordings}) > len(chains)
        if value is not None or varied:
            newest[lane] = stack, label
            before = given.get((run.probe, label), []) if chains else []
            given[run.probe, label] = [*before, None if varied else value][-STEADY:]
    found = {}
    for lane, (stack, label) in newest.items():
        value, *others = {*given[lane[0], label]}
        if value is not None and not others and stack == stacks[lane]:
            found[lane[0], label] = value
    return found


def _fingerprint(run: Run) -> int | None:
    """Return a run's fingerprint, or None if it is missing or is no integer that a float holds exactly."""
    value = next((r.value for r in run.readings if r.name == FINGERPRINT), None)
    return value if type(value) is int and 0 <= value < 2**53 else None
