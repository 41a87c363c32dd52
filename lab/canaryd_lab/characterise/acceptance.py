"""Turn a characterisation into records for the store that say which classes of exact cases are exact on a device."""

from __future__ import annotations

from collections.abc import Sequence

from canaryd.formatting import format_time
from canaryd.judge.characterised import Met, class_of
from canaryd.model import Device
from canaryd_lab.characterise.results import Result, Status
from canaryd_lab.observation import Claim, Seen

CASES = "cases/"
"""Beginning of the names of parts (tests) that run cases of the probes. Only results of these parts are accepted."""


def records(device: Device, results: Sequence[Result]) -> list[Met]:
    """Return a record for each right part with a known stack: the classes of cases that were right in every case."""
    found = []
    for result in results:
        stack = result.facts.get("stack", {})
        if not result.name.startswith(CASES) or result.status is not Status.RIGHT or not stack:
            continue
        strict = [o for o in result.observations if o.claim is Claim.STRICT]
        wrong = {class_of(o.name) for o in strict if o.seen in (Seen.WRONG, Seen.RAISED)}
        met = {class_of(o.name) for o in strict if o.seen is Seen.RIGHT} - wrong
        why = f"canaryd characterise, {format_time(result.started, seconds=False)}"
        found.append(
            Met(
                device=device.uuid,
                kind=device.kind,
                probe=result.name.removeprefix(CASES),
                probe_version=int(result.facts["probe_version"]),
                stack={str(k): str(v) for k, v in stack.items()},
                accepted=dict.fromkeys(sorted(met), why),
                used=result.started,
            )
        )
    return found
