"""The consequences of an operator's acknowledgement, repair or replacement (docs/status.md).

No stored run is deleted. After a repair, older runs are history and no longer evidence. An acknowledged fault is
known, which does not make the device healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from canaryd.formatting import format_utc
from canaryd.judge.clock import AHEAD, EPOCH
from canaryd.judge.findings import ACKNOWLEDGED
from canaryd.model import Ack, AckKind, Cause, Device, Finding, State


def heeded(acks: Iterable[Ack], now: float) -> tuple[Ack, ...]:
    """Return the acknowledgements that count at `now`, oldest first.

    One that is dated in the future is ignored, and stays ignored once canaryd has noticed it: the clock was wrong when
    it was made, so it is not known which runs came before it.
    """
    return tuple(sorted((a for a in acks if a.at <= now + AHEAD and not a.void), key=lambda a: a.at))


def ahead(acks: Iterable[Ack], now: float, passed: float) -> tuple[Ack, ...]:
    """Return the acknowledgements that a fast clock dated in the future; `passed` is a time known to be past.

    They must never take effect. If the present clock was never set, the result is empty.
    """
    limit = max(now, passed) + AHEAD
    return tuple(a for a in acks if now >= EPOCH and a.at > limit and not a.void)


def cut(device: Device, acks: Sequence[Ack]) -> float:
    """Return the time (epoch s) of the device's newest repair: only newer runs are evidence. 0.0 without a repair.

    A replacement part has another uuid. If the uuid does not name the part (`weak_identity`), a replacement counts as a
    repair.
    """
    kinds = {AckKind.REPAIRED, AckKind.REPLACED} if device.weak_identity else {AckKind.REPAIRED}
    return max((a.at for a in acks if a.kind in kinds), default=0.0)


def retired(device: Device, acks: Iterable[Ack], last_seen: float) -> bool:
    """Return whether this part was replaced and has not been found since; False if its uuid does not name the part."""
    of = (a for a in acks if a.device == device.uuid)
    return not device.weak_identity and any(a.kind == AckKind.REPLACED and a.at >= last_seen for a in of)


def standing(device: Device, acks: Sequence[Ack], now: float) -> Ack | None:
    """Return this part's newest acknowledgement, or None if it has ended or there is none.

    An acknowledgement from before a repair does not count: it is about the fault that was repaired.
    """
    begun = cut(device, acks)
    newest = next((a for a in reversed(acks) if a.kind == AckKind.ACKNOWLEDGED and a.at >= begun), None)
    return newest if newest is not None and newest.until > now else None


def covers(ack: Ack | None, finding: Finding) -> bool:
    """Return whether the finding makes the device suspect by a rule that the acknowledgement lists."""
    return ack is not None and finding.state is State.SUSPECT and finding.rule in ack.rules


def covered(ack: Ack, finding: Finding) -> Finding:
    """Return the finding as an acknowledged one, with state unknown: the device is neither suspect nor healthy."""
    until = format_utc(ack.until, seconds=False)
    message = f"Acknowledged until {until}: {finding.message}"
    return replace(finding, state=State.UNKNOWN, message=message, acknowledged=True)


def note(ack: Ack) -> Finding:
    """Return a note that says who acknowledged the fault, until when and why. The note changes no state."""
    by = f" by {ack.by}" if ack.by else ""
    text = f"Acknowledged{by} until {format_utc(ack.until, seconds=False)}: {ack.reason}"
    return Finding(rule=ACKNOWLEDGED, state=State.HEALTHY, cause=Cause.NONE, message=text)
