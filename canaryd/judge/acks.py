"""An operator's word about a device, and what follows from it (docs/status.md).

Nothing that was recorded is deleted by it. What a device did before it was repaired is history, and no longer evidence;
what was acknowledged is said to be known, and is not healthy for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from canaryd.formatting import moment
from canaryd.model import Ack, Cause, Device, Finding, State

AHEAD = 3600.0
"""Seconds by which a word may lie in the future: the clock has been set back since, and by it nothing after the word
could be told from what came before, so it does not count (ours). False alarms: none, it only disregards a word."""


def heeded(acks: Iterable[Ack], now: float) -> tuple[Ack, ...]:
    """Return the words that count at `now`, oldest first."""
    return tuple(sorted((a for a in acks if a.at <= now + AHEAD), key=lambda a: a.at))


def cut(device: Device, acks: Sequence[Ack]) -> float:
    """Return since when what a device does is evidence, in seconds since the epoch: its newest repair.

    A part that was replaced has another uuid; only where a uuid names no part does a replacement begin anew under it.
    """
    kinds = {"repaired", "replaced"} if device.weak_identity else {"repaired"}
    return max((a.at for a in acks if a.kind in kinds), default=0.0)


def retired(device: Device, acks: Iterable[Ack], last_seen: float) -> bool:
    """Whether a part that names itself was said to be replaced and has not been found since."""
    of = (a for a in acks if a.device == device.uuid)
    return not device.weak_identity and any(a.kind == "replaced" and a.at >= last_seen for a in of)


def standing(acks: Sequence[Ack], now: float) -> Ack | None:
    """Return the acknowledgement that has not run out; a newer one takes the place of an older one."""
    newest = next((a for a in reversed(acks) if a.kind == "acknowledged"), None)
    return newest if newest is not None and newest.until > now else None


def covers(ack: Ack | None, finding: Finding) -> bool:
    """Whether an acknowledgement speaks of a finding: a suspicion by a rule that spoke when it was said."""
    return ack is not None and finding.state is State.SUSPECT and finding.rule in ack.rules


def covered(ack: Ack, finding: Finding) -> Finding:
    """Return a finding as it stands while it is acknowledged: a suspicion that is known is no news, and no health."""
    until = moment(ack.until, seconds=False)
    message = f"known to the operator until {until}, so unknown and not healthy: {finding.message}"
    return replace(finding, state=State.UNKNOWN, message=message, acknowledged=True)


def note(ack: Ack) -> Finding:
    """Return what is said of an acknowledgement that stands; it makes nothing healthy."""
    by = f" by {ack.by}" if ack.by else ""
    text = f"acknowledged{by} until {moment(ack.until, seconds=False)}: {ack.reason}"
    return Finding(rule="acknowledged", state=State.HEALTHY, cause=Cause.NONE, message=text)
