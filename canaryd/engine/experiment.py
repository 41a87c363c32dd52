"""What follows a wrong result: the same data again here and on siblings, later retests, a look at the software's files.

Each experiment is a plan, which the engine carries out like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from canaryd.engine import schedule
from canaryd.engine.evidence import Evidence
from canaryd.engine.host import Host
from canaryd.engine.schedule import Plan
from canaryd.formatting import DAY
from canaryd.judge.findings import RENEWED, UNCHARACTERISED
from canaryd.judge.phrases import count
from canaryd.model import INTENSITIES, Device, Event, EventKind, Files, Outcome, Run, State, Verdict

TRIES = 3
"""Maximum number of attempts to confirm a mismatch, as a multiple of the required number: some do not complete."""
DISTRIBUTIONS = {"torch": "torch", "onnx": "onnxruntime", "mlx": "mlx", "jax": "jaxlib"}
"""Runtime → the distribution that has its kernels, with those that it needs."""
LONGEST = 300.0
"""Maximum seconds of the comparison: a torch with CUDA has 5 GB of libraries, which a disk may read at 20 MB/s."""
NAMED = 3
"""Altered files that an event names."""


class Experiments:
    """Plans the runs that follow a mismatch."""

    def __init__(self, host: Host, evidence: Evidence) -> None:
        """Keep the host and the evidence in memory, from which the plans are made."""
        self._host = host
        self._evidence = evidence

    def confirmations(self, run: Run) -> list[Plan]:
        """Return plans for the confirmations that a run requires, on its own device and on the siblings."""
        host = self._host
        if run.probe not in host.entries or run.device not in host.devices:
            return []
        device, entry = host.devices[run.device], host.entries[run.probe]
        siblings = [sibling for sibling in host.siblings(device) if schedule.applies(entry, sibling)]
        plans = schedule.confirmations(run, entry, device, siblings, host.config.judge.confirm_runs)
        if not entry.spec.group or device.unit == "cpu":
            return plans
        peers = tuple(host.devices[uuid] for uuid in sorted(host.together - {run.device}) if uuid in host.devices)
        same = tuple(p for p in peers if p.backend == device.backend and schedule.applies(entry, p))
        return [replace(plan, peers=same) for plan in plans if same]

    def owed(self, uuid: str) -> list[Plan]:
        """Return plans for missing confirmations of recent mismatches, e.g. after a stop, a crash or a busy device."""
        host, policy = self._host, self._host.config.judge
        runs, now = self._evidence.of(uuid), host.clock()
        plans: list[Plan] = []
        for run in runs:
            recent = now - run.started < policy.repeat_window
            wanted = (run.wrong or run.unknown) and not run.confirms and (run.whole or run.intensity)
            here = run.probe in host.entries and not host.entries[run.probe].spec.group
            if wanted and recent and here:
                # Memory forgets a confirmation before the mismatch that it confirms; a record that was lost has none.
                in_memory = [other.outcome.value for other in runs if other.confirms == run.id]
                again = max(host.store.confirmations(run), in_memory, key=len)
                done = again.count(Outcome.COMPLETED.value)
                given_up = len(again) >= TRIES * policy.confirm_runs
                missing = 0 if given_up else policy.confirm_runs - done
                plans += schedule.confirmations(run, host.entries[run.probe], host.devices[uuid], [], missing)
        return plans

    def retests(self, uuid: str) -> list[Plan]:
        """Return plans for the next retest of a suspect, at a higher intensity (docs/judgement.md); [] if none is due.

        Recorded results have no known right answer, so a sibling gets the same retest for comparison.
        """
        host = self._host
        device, verdict = host.devices[uuid], host.store.verdict(uuid)
        if plans := self._behind_a_departed_endpoint(device):
            return plans
        if verdict is None or verdict.state is State.FAULTY or not verdict.doubted:
            return []
        mine = [
            r
            for r in self._evidence.of(uuid)
            if r.probe in host.entries and schedule.can_be_retested(host.entries[r.probe], device)
        ]
        for run, how in schedule.retests_due(mine, host.config.judge, host.clock())[:1]:
            turn = sum(r.intensity == how and not r.confirms and r.instruction_set == run.instruction_set for r in mine)
            tested = [device, *([] if run.wrong else self._next_sibling(device, turn + INTENSITIES.index(how)))]
            seed = schedule.new_seed()
            return [p for d in tested for p in schedule.retests(run, how, host.entries, d, seed=seed, turn=turn)]
        return []

    def _behind_a_departed_endpoint(self, device: Device) -> list[Plan]:
        """Return plans for a deep test of a device behind an endpoint in doubt; [] if it is not needed or was done."""
        host = self._host
        mine = self._evidence.of(device.uuid)
        for endpoint in (d for d in host.devices.values() if device in host.devices_behind(d)):
            verdict = host.store.verdict(endpoint.uuid)
            if verdict is None or not _in_doubt(verdict):
                continue
            if any(r.intensity == "content" and r.started >= verdict.since for r in mine):
                continue
            if schedule.may_be_retested(mine, host.clock()):
                return schedule.deep_test(host.entries, device, trigger=f"{endpoint.name} departed")
        return []

    def _next_sibling(self, device: Device, turn: int) -> list[Device]:
        """Return [the sibling that gets the same retest as a device], or [] if none can be retested today.

        `turn` counts the retests: each one takes the next sibling. The list of siblings begins after the device itself,
        so that several suspects do not all load the same sibling.
        """
        siblings, now = self._host.siblings(device), self._host.clock()
        after = [*(s for s in siblings if s.uuid > device.uuid), *(s for s in siblings if s.uuid < device.uuid)]
        free = [s for s in after if schedule.may_be_retested(self._evidence.of(s.uuid), now)]
        return [free[turn % len(free)]] if free else []


def _in_doubt(verdict: Verdict) -> bool:
    """Return whether an endpoint is suspect or worse, or whether nothing proves that it can give correct answers."""
    unproven = any(f.rule in (UNCHARACTERISED, RENEWED) for f in verdict.findings)
    return verdict.state.severity >= State.SUSPECT.severity or unproven


def to_compare(device: Device, runs: Iterable[Run]) -> Run | None:
    """Return the newest wrong run of software that can be compared, or None."""
    wrong = [run for run in runs if run.wrong and run.stack and not run.drill]
    return wrong[-1] if wrong and device.runtime in DISTRIBUTIONS else None


def was_compared(run: Run, known: Iterable[Event], now: float) -> bool:
    """Return whether the software of a run was compared within a day, by its device's events."""
    return any(e.kind == EventKind.FILES and e.name == run.stack_id and now - e.last < DAY for e in known)


def compare(device: Device, run: Run, now: float, ask: Callable[[str, dict[str, Any]], tuple[Any, ...]]) -> Event:
    """Return what a worker finds of the software of a run, as an event of its device. `ask` puts the question."""
    distribution = DISTRIBUTIONS[device.runtime]
    outcome, found, why = ask("installed", {"distribution": distribution})
    other = [*found.get("altered", ()), *found.get("misread", ())]
    paths = ", ".join(sorted(map(os.path.basename, other))[:NAMED])
    if outcome is not Outcome.COMPLETED:
        state, text = Files.NOT_COMPARED, f"the files of {distribution} could not be compared: {why}"
    elif found["altered"]:
        state, text = Files.ALTERED, f"not as pip installed it: {paths}"
    elif found["misread"]:
        state, text = Files.MISREAD, f"read once with other bytes and then as installed: {paths}"
    elif found["without"]:
        state, text = Files.NOT_COMPARED, f"pip's record lacks files of {', '.join(found['without'])}"
    else:
        state, text = Files.AS_INSTALLED, f"{count(found['compared'], 'compiled file')} are as pip installed them"
    return Event(
        device=device.uuid,
        kind=EventKind.FILES,
        name=run.stack_id,
        first=now,
        last=now,
        after=state.value,
        detail=text,
        fields={"files": paths, "compared": str(found.get("compared", 0))},
    )
