"""Rules for PCIe and NVLink."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from canaryd.judge.telemetry.events import taken_apart
from canaryd.judge.telemetry.signals import DAY, MINUTE, TRAINING, WATCH, Signs, clears_after, finding, until
from canaryd.model import Cause, Event, Finding, State

BIT_ERROR_RATE = 1e-12
"""Errors per bit that PCI Express allows; from it DCGM derives its limit of replays."""
TRANSFERS = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9, 7: 128e9}
"""PCI Express generation → transfers per second and lane (PCI Express Base Specifications 1.0 to 7.0)."""
CRC_PER_SECOND = 100
"""NVLink CRC errors: DCGM's limit (DcgmGPUHardwareLimits.h)."""


def replay_limit(generation: float, lanes: float) -> float:
    """Return the replays per minute that a bit error rate of 1e-12 explains; 31 for generation 5 with 16 lanes."""
    return math.ceil(BIT_ERROR_RATE * TRANSFERS.get(int(generation), TRANSFERS[5]) * lanes * MINUTE)


def pcie_errors(signs: Signs) -> Iterator[Finding]:
    """The link to the host repairs more errors than it may, or reports some that it cannot repair."""
    lanes, generation = (signs.value(f"pcie_{k}_max", WATCH) or d for k, d in (("width", 16), ("generation", 5)))
    limit = replay_limit(generation, lanes)
    # Over ten minutes, where DCGM takes one: a single burst is no rate (ours).
    span = 10 * MINUTE
    repaired = {
        "packets sent again": signs.rises("pcie_replays_total", signs.policy.settle + span),
        "correctable errors": signs.rises("pcie_aer_errors_total", signs.policy.settle + span, severity="correctable"),
    }
    for what, events in repaired.items():
        if (rate := signs.most(events, span, signs.trained) * MINUTE / span) > limit:
            text = f"{rate:.3g} {what} a minute on PCI Express; DCGM's limit for this link is {limit:g} "
            text += f"(bit error rate 1e-12). Look at seating, riser and slot. {clears_after(signs)}"
            yield finding("pcie-replays", State.DEGRADED, Cause.HARDWARE, text)
    for severity, state in (("fatal", State.SUSPECT), ("nonfatal", State.DEGRADED)):
        events = [
            *signs.rises("pcie_aer_errors_total", severity=severity),
            *(e for e in signs.seen("aer") if e.name == severity),
        ]
        events = [e for e in events if not signs.cleared(e.last, signs.resets)]
        newest = max(events, key=lambda e: e.last, default=None)
        if newest and (severity == "fatal" or signs.now - newest.last <= DAY):
            over = "Over after a day" if severity == "nonfatal" else until(signs, newest.last, signs.resets)
            text = f"{severity} PCI Express error {signs.moment(newest.last)}: {newest.detail.rstrip('.')}. "
            text += f"Reset-class (ours): look at seating and slot, then reset. {over}"
            yield finding("pcie-aer", state, Cause.HARDWARE, text)


def nvlink_errors(signs: Signs) -> Iterator[Finding]:
    """A link between devices had to recover or could not, or repairs more errors than DCGM allows."""
    settle, bad = signs.policy.settle, []
    links: dict[str, list[Event]] = defaultdict(list)
    for event in signs.rises("nvlink_errors_total", 2 * settle):
        links[event.name].append(event)
    for key, events in sorted(links.items(), key=lambda link: ("kind=recovery_failed" not in link[0], link[0])):
        labels = taken_apart(key)[1]
        kind, where = labels.get("kind", ""), f"link {labels.get('link', '?')}"
        times = signs.most(events, settle, signs.trained)
        rate = signs.most(events, MINUTE, signs.trained) / MINUTE
        if kind == "recovery_failed" and signs.now - events[-1].last <= settle and times:
            bad.append(f"{where} could not recover (ours)")
        elif kind in ("replay", "recovery"):
            if times >= 1:
                bad.append(f"{where} had {times:.3g} of kind {kind} (DCGM allows none)")
        elif rate >= CRC_PER_SECOND:
            bad.append(f"{where} had {rate:.3g} of kind {kind} a second (DCGM's limit is {CRC_PER_SECOND})")
    if bad:
        more = f", and {len(bad) - 3} more" if len(bad) > 3 else ""
        text = f"NVLink: {'; '.join(bad[:3])}{more}. Look at both ends of the link. {clears_after(signs)}"
        yield finding("nvlink-errors", State.DEGRADED, Cause.HARDWARE, text)


def nvlink_down(signs: Signs) -> Iterator[Finding]:
    """A link that was up is down, or the device left its fabric; also for a while after it came back."""
    # A divided device has its links off, and one that was reset waits for them.
    if signs.value("mig_enabled", signs.policy.settle) or any(signs.now - t <= TRAINING for t in signs.trainings):
        return
    newest = {e.name: e for name in ("nvlink_up", "fabric_ready") for e in signs.seen("flag", start=name)}
    for key, event in sorted(newest.items()):
        name, labels = taken_apart(key)
        down = event.after == "0" and not signs.value(name, **labels)
        fell = (event.after == "0" or event.before == "1") and signs.trained(event, -math.inf, signs.now) > 0
        if down or (fell and signs.now - event.last <= signs.policy.settle):
            what = f"NVLink {labels.get('link', '?')} went down" if labels else "the device left its NVLink fabric"
            text = f"{what} {signs.moment(event.last)} and is {'down still' if down else 'back'}. Ours: look at Fabric "
            text += f"Manager and at the other end. {'Over when it is up again' if down else clears_after(signs)}"
            yield finding("nvlink-down", State.DEGRADED, Cause.UNDETERMINED, text)
