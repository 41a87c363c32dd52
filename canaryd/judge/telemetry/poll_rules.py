"""Rules for polls that give nothing any more, and for links that are not what they were."""

from __future__ import annotations

import math
from collections.abc import Iterator

from canaryd.formatting import format_duration
from canaryd.judge.clock import POLL_AHEAD
from canaryd.judge.coverage import OUTCOMES
from canaryd.judge.findings import finding
from canaryd.judge.phrases import count, first_of, reason_of
from canaryd.judge.telemetry.events import is_number, unread
from canaryd.judge.telemetry.readings import READINGS, in_words
from canaryd.judge.telemetry.signals import HELD, TRAINING, Signs, lost_because, stale_after
from canaryd.model import Cause, EventKind, Finding, Outcome, Remedy, State

COUNTED = frozenset(name for name, kind in READINGS.items() if kind.event)
"""Counters each rise of which is judged."""
MOST_NAMED = 4
"""Kinds of readings, and counts, that one finding names (ours)."""
NO_POLL = ("canaryd did not read it", "Check whether the daemon is overloaded or stopped")
MUTE = (
    Cause.ENVIRONMENT,
    "its polls give no reading any more",
    "Check driver, library and permissions (see the reason)",
)


def telemetry_stale(signs: Signs) -> Iterator[Finding]:
    """No poll has given readings for too long; one failed poll alone shows nothing, nor polls that never gave any.

    The finding hides nothing beside it, because only numbers are `unknown`. A device that is gone may be silent.
    """
    for probe, poll in sorted(signs.polls.items()) if not signs.gone else ():
        mute = poll.completed is not None and not poll.completed.readings and bool(poll.known)
        read = [at for _, at in poll.known.values()] if mute else [poll.completed.started] if poll.completed else []
        times = (poll.since, *read)
        seen = max((t for t in times if t <= signs.now + POLL_AHEAD), default=None)
        limit = stale_after(poll.period)
        if lost_because(poll.newest) or (seen is not None and signs.now - seen <= limit):
            continue
        newest, why, action, reason = poll.newest, *NO_POLL, ""
        if newest is not None and (newest.outcome in OUTCOMES or mute):
            _, why, action = OUTCOMES.get(newest.outcome, MUTE)
            why = why if newest.outcome is Outcome.COMPLETED else f"the newest poll {why}"
            reason = reason_of(newest) or next(iter(newest.absent.values()), "")
        since = "since the clock was set back" if seen is None else f"for {format_duration(signs.now - seen)}"
        yield finding(
            *("telemetry-stale", State.DEGRADED, Cause.ENVIRONMENT),
            f"No readings from {probe} {since} (limit {format_duration(limit)}): {why}.",
            f"{action.format(probe)}{'' if ': ' in action else '.'}",
            f"Reason: {reason.rstrip('.')}." if reason else "",
            f"{count(poll.failures, 'attempt')} in a row failed." if poll.failures else "",
            "Clears with the next complete reading.",
            probe=probe,
        )


def readings_lost(signs: Signs) -> Iterator[Finding]:
    """The driver fails to read, twice in a row, what it read before. What was counted until then stands."""
    for probe, poll in sorted(signs.polls.items()):
        run = poll.completed
        lost = [u for u in unread(run, poll.known) if u.at < poll.before] if run and not signs.gone else []
        if run is None or not lost:
            continue
        codes = {run.codes.get(u.reading.key, run.codes.get(u.reading.name, 0)) for u in lost}
        reasons = {run.absent.get(u.reading.key, run.absent.get(u.reading.name, "")) for u in lost}
        counters = [u for u in lost if is_number(u.reading) and u.reading.name in COUNTED]
        names = list(dict.fromkeys(in_words(u.reading.name) for u in (*counters, *lost)))
        counts = [f"{in_words(u.reading.key)} {u.reading.value:g}" for u in counters if u.reading.value]
        yield finding(
            *("readings-lost", State.DEGRADED, Cause.ENVIRONMENT),
            f"{count(len(lost), 'reading')} can no longer be read (driver code {', '.join(map(str, sorted(codes)))}):"
            f" {first_of(names, MOST_NAMED)}.",
            "Look for the reason in the kernel log; drain the device and reset it.",
            *(f"Reason: {reason}." for reason in sorted(filter(None, reasons))),
            f"Last read at {signs.moment(max(u.at for u in lost))}.",
            f"Counted by then, and it stands: {', '.join(counts[:MOST_NAMED])}." if counts else "",
            "Rules and alerts on them see nothing new until they can be read again.",
            "Clears with the next poll that reads them.",
            probe=probe,
            remedy=Remedy.RESET,
        )


def lanes_lost(signs: Signs) -> Iterator[Finding]:
    """A link came back from a reset with fewer lanes, and has had no more since, loaded or not.

    A device that was moved to a narrow slot has all the lanes that both can do. A link that narrows by itself when it
    is idle is known by having done so: `rates` judges it under load.
    """
    changes = [e for e in signs.seen(EventKind.FLAG, HELD, "pcie_width") if e.before and e.after]
    falls = [e for e in changes if float(e.after) < float(e.before)]
    now = signs.value("pcie_width", signs.policy.settle)
    if len(falls) != 1 or not now:
        return
    (fall,) = falls
    most = min(float(fall.before), signs.value("pcie_width_max", signs.policy.settle) or math.inf)
    if 0 < now < most and any(fall.first <= reset <= fall.last for reset in signs.resets):
        yield finding(
            *("pcie-slow", State.DEGRADED, Cause.ENVIRONMENT),
            f"PCIe link uses {now:g} of {most:g} lanes since the last reset or reboot.",
            "Reseat the device; if it stays, check riser, slot and board.",
            f"Found at {signs.moment(fall.last)}.",
            "The link lost lanes (canaryd's own rule).",
            f"Clears when the lanes are back, or after {format_duration(HELD)}.",
        )


def nvlink_down(signs: Signs) -> Iterator[Finding]:
    """A link that was up is down, or the device left its fabric; also for a while after it came back.

    A device divided by MIG has its links off, and one that was reset waits for them.
    """
    settle = signs.policy.settle
    waits = any(signs.now - t <= TRAINING for t in signs.trainings)
    if waits or signs.device.parent or signs.value("mig_enabled", settle):
        return
    newest = {e.name: e for reading in ("nvlink_up", "fabric_ready") for e in signs.seen(EventKind.FLAG, HELD, reading)}
    for _, event in sorted(newest.items()):
        down = event.after == "0" and not signs.value(event.reading, **event.labels)
        fell = (event.after == "0" or event.before == "1") and signs.trained(event, -math.inf, signs.now) > 0
        if down or (fell and signs.now - event.last <= settle):
            what = "The device left its NVLink fabric"
            if event.reading == "nvlink_up":
                what = f"NVLink link {event.labels.get('link', 'unknown')} went down"
            yield finding(
                *("nvlink-down", State.DEGRADED, Cause.UNDETERMINED),
                f"{what} and {'is not back' if down else 'came back'}.",
                "Check Fabric Manager and the other end of the link.",
                f"Last change at {signs.moment(event.last)}.",
                "Rule: canaryd's own.",
                f"Clears {format_duration(settle)} after it is back.",
            )
