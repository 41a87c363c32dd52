"""The proof of `canaryd prove`: whether a node held under load, device by device, as one line and one JSON file."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.facts import printable
from canaryd.files import write_whole
from canaryd.formatting import format_duration
from canaryd.judge.phrases import count
from canaryd.model import Ack, AckKind, Cause, State
from canaryd.report.terminal import state_note

SCHEMA = "canaryd.proof/1"
FILE = "proof.json"
"""Name of the newest proof in the state directory."""


class Decision(str, enum.Enum):
    """What was decided, the worst last."""

    PROVEN, NOT_PROVEN, REFUSED = "proven", "not proven", "refused"

    @property
    def exit_code(self) -> int:
        """0, 2 if a fault was found, 3 if something that was asked for could not be tested."""
        return {Decision.PROVEN: 0, Decision.REFUSED: 2, Decision.NOT_PROVEN: 3}[self]


@dataclass(frozen=True, kw_only=True)
class Proved:
    """The decision about one device."""

    device: str
    """`Device.uuid`."""
    name: str
    decision: Decision
    why: str = ""
    """The reason, in a clause; for a proven device a note, or ""."""
    state: State
    cause: Cause
    results: int
    wrong: int
    under_load: Mapping[str, int] = field(default_factory=dict)
    """Kind of load → number of results that were compared under it."""

    def __str__(self) -> str:
        text = f"{self.name} {state_note(self.state.value, self.cause)}"
        return f"{text}: {self.why}" if self.why else text


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The decision about a node."""

    schema: str = SCHEMA
    canaryd: str
    """The version that decided."""
    started: float
    """Seconds since the epoch."""
    seconds: float
    loaded: float
    """Seconds in which everything was loaded at once."""
    decision: Decision
    devices: tuple[Proved, ...]
    """The worst first."""
    not_tested: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        bad = [d for d in self.devices if d.decision is self.decision and d.decision is not Decision.PROVEN]
        if bad or self.decision is not Decision.PROVEN:
            text = "; ".join(map(str, bad)) or "no device could be tested"
            return printable(f"{self.decision.value}: {text}")
        notes = "; ".join(str(d) for d in self.devices if d.why)
        of = f"{count(len(self.devices), 'device')}, {sum(d.results for d in self.devices):,} results, none wrong"
        times = f"{format_duration(self.seconds)}, {format_duration(self.loaded)} of them under full load"
        return printable(f"proven: {of}; {times}{f'; {notes}' if notes else ''}")


def as_json(proof: Proof) -> dict[str, Any]:
    """Return the object that `canaryd prove --json` prints, and that is kept as `FILE`."""
    return dict(to_json(proof))


def keep(proof: Proof, state_dir: Path) -> None:
    """Write the proof into the state directory. Raises `OSError`."""
    write_whole(state_dir / FILE, json.dumps(as_json(proof), indent=2).encode() + b"\n")


def forget(state_dir: Path) -> None:
    """Remove the last proof: while another is made, or where it was cut short, nothing is proven. Raises `OSError`."""
    (state_dir / FILE).unlink(missing_ok=True)


def missing(state_dir: Path, device: str, acks: tuple[Ack, ...]) -> str:
    """Return why a device is not proven by the newest proof, or "". A repair after the proof makes it void."""
    try:
        proof: Proof = from_json(Proof, json.loads((state_dir / FILE).read_bytes()))
    except FileNotFoundError:
        return "nothing was proven here; type canaryd prove"
    except (OSError, ValueError) as error:
        return f"{state_dir / FILE} cannot be read: {error}; type canaryd prove"
    found = next((d for d in proof.devices if d.device == device), None)
    if found is None:
        return "it was not part of the newest proof; type canaryd prove"
    if found.decision is not Decision.PROVEN:
        return f"{found.decision.value} in the newest proof: {found.why}"
    if any(a.kind in (AckKind.REPAIRED, AckKind.REPLACED) and a.at > proof.started for a in acks):
        return "it was repaired after the newest proof; type canaryd prove"
    return ""
